"""Mixture-of-experts layers as a rank runs them without expert parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zsim.cost.kernels.kernel import total_flops
from zsim.cost.kernels.moved_rows import TRANSFORMERS_KERNELS, MoveCost, MoveKind
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.rates.gpu import kernel_seconds
from zsim.engine.simulate import simulate_job
from zsim.explain.report_of import report_of
from zsim.frameworks.megatron.kernels import MEGATRON as UNFUSED
from zsim.frameworks.megatron.kernels import MEGATRON_FUSED as FUSED
from zsim.frameworks.torch.parallelism import KEMPNERFORGE, TORCHTITAN
from zsim.operations import BACKWARD, FORWARD
from zsim.operations.activation import Activation
from zsim.operations.experts import Experts
from zsim.operations.grouped_linear import GroupedLinear
from zsim.operations.rearrange import Rearrange
from zsim.plan.make import make_plan, stages_of
from zsim.plan.ops import Plan
from zsim.plan.parallel.experts import expand_experts
from zsim.specs.cluster.files import load_gpu
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.huggingface import load_model, model_from_config
from zsim.specs.model.spec import Attention, ModelSpec, Module
from zsim.specs.strategy.expert_library import TRANSFORMERS, ExpertLibrary
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.fp8 import Fp8, Fp8Recipe

TINY: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 1024, "num_experts": 16, "num_experts_per_tok": 4, "tie_word_embeddings": False,
}  # fmt: skip
PRESETS = ("mixtral-8x7b", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b", "deepseek-v3")
LIBRARIES: tuple[ExpertLibrary, ...] = (
    TRANSFORMERS,
    TORCHTITAN,
    KEMPNERFORGE,
    UNFUSED,
    FUSED,
)
SHAPE = BatchShape(2, 512)
MEGATRON = {"kind": "megatron", "moe_grouped_gemm": True, "moe_permute_fusion": True}


def job_of(strategy: dict[str, Any], gpus: int = 8, **more: Any) -> Job:
    training = {"sequence_length": 512, **more.pop("training", {})}
    data = {"model": TINY, "cluster": "dgx-h100", "gpus": gpus, "training": training, **more}
    return resolve(Experiment(**data, strategy=strategy))


def layer_of(model: ModelSpec, library: ExpertLibrary, **split: Any) -> tuple[Module, ...]:
    """The modules of the last block from the second norm on."""
    modules = expand_experts(model, ExpertSplit(library=library, **split)).blocks[-1].modules
    first = next(n for n, module in enumerate(modules) if module.name == "post_attention_layernorm")
    return modules[first + 1 :]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", PRESETS)
def test_what_stands_for_the_experts_has_their_parameters(name: str, library: ExpertLibrary) -> None:
    model = load_model(name)
    made = expand_experts(model, ExpertSplit(library=library))
    assert made.numel == model.numel
    assert sum(parameter.numel for _, parameter in made.named_parameters()) == model.numel


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", PRESETS)
def test_products_have_the_flops_of_the_active_parameters(name: str, library: ExpertLibrary) -> None:
    """2 per parameter and token forward, twice that backward; attention's products are not counted."""
    model, options = load_model(name), WorkOptions()
    counted = [m for m in model.blocks[-1].modules if not isinstance(m.op_spec, Attention)]
    flops = SHAPE.tokens * sum(module.forward_flops(512) for module in counted)
    block = expand_experts(model, ExpertSplit(library=library)).blocks[-1].modules
    made = [m for m in block if not isinstance(m.op_spec, Attention)]
    forward = sum(total_flops(m.kernels(FORWARD, SHAPE.seen_by(m), options)) for m in made)
    backward = sum(total_flops(m.kernels(BACKWARD, SHAPE.seen_by(m), options)) for m in made)
    assert forward == pytest.approx(flops, rel=1e-3)
    assert backward == pytest.approx(2 * forward)


def test_an_expert_has_its_part_of_the_rows() -> None:
    """2 of 8 experts per token, 1,024 tokens: 256 rows each, of 4,096 wide to twice 14,336."""
    layer = layer_of(load_model("mixtral-8x7b"), TRANSFORMERS)
    product = next(module for module in layer if isinstance(module.op_spec, GroupedLinear))
    (kernel,) = product.kernels(FORWARD, SHAPE.seen_by(product), WorkOptions())
    assert kernel.shape == (256, 28672, 4096)
    assert kernel.flops == 2.0 * 2048 * 28672 * 4096
    assert kernel.hbm_bytes == 2 * (2048 * 4096 + 8 * 28672 * 4096 + 2048 * 28672)
    assert kernel.launches == 1


@pytest.mark.parametrize(("padding", "is_uneven"), [(1.0, True), (2.5, False)])
def test_rows_that_are_padded_are_even_and_drawn_ones_are_not(padding: float, is_uneven: bool) -> None:
    """The gradient of weights sums over an expert's rows, which are no tiles of it."""
    layer = layer_of(load_model("mixtral-8x7b"), KEMPNERFORGE, padding=padding)
    product = next(module for module in layer if isinstance(module.op_spec, GroupedLinear))
    kernels = product.kernels(BACKWARD, SHAPE.seen_by(product), WorkOptions())
    found = {kernel.layout: kernel.has_uneven_rows for kernel in kernels if kernel.kind == "gemm"}
    assert found == {"nn": is_uneven, "tn": False}


def test_experts_one_after_the_other_are_a_launch_each() -> None:
    layer = layer_of(load_model("mixtral-8x7b"), UNFUSED, kernel="loop")
    product = next(module for module in layer if isinstance(module.op_spec, GroupedLinear))
    assert product.kernels(FORWARD, SHAPE.seen_by(product), WorkOptions())[0].launches == 8


def test_experts_on_streams_are_a_launch_each_and_four_at_a_time() -> None:
    """Transformer Engine's: the GPU has two turns of four of the 8 products, the host launches all 8."""
    layer = layer_of(load_model("mixtral-8x7b"), UNFUSED, kernel="streams")
    product = next(module for module in layer if isinstance(module.op_spec, GroupedLinear))
    kernel = product.kernels(FORWARD, SHAPE.seen_by(product), WorkOptions())[0]
    assert (kernel.launches, kernel.sequential_launches) == (8, 2)
    gpu = load_gpu("h100-sxm-80gb")
    in_line = replace(kernel, launches=2, concurrent_launches=1)
    assert kernel_seconds(kernel, gpu) == kernel_seconds(in_line, gpu)


def test_experts_padded_to_the_fullest_compute_all_of_its_rows() -> None:
    """Of 8 experts, two per token, the fullest with 2.5 times the mean: 5 rows per token in every product.
    A layer's rows are of 1,024 tokens x 2 x 4,096 x 2 bytes; back to tokens they pass 15 + 2 x 8 +
    4 x 8 x 2.5 times in backward, and out to experts 6 + 4 x 8 + 2 x 8 x 2.5 times with a pass of the
    tokens, the rows' sum by tokens apart, and the host waiting for the counts."""
    layer = layer_of(load_model("mixtral-8x7b"), KEMPNERFORGE, padding=2.5)
    products = [one for one in layer if isinstance(one.op_spec, GroupedLinear)]
    assert [one.rows_per_token for one in products] == [5.0, 5.0]
    first, last = (one for one in layer if isinstance(one.op_spec, Rearrange))
    assert (first.host_waits, last.host_waits) == (True, False)
    token = 1024 * 4096 * 2
    by_token = first.kernels(BACKWARD, SHAPE.seen_by(first), WorkOptions())[1]
    assert by_token.added_elements == round(0.65 * 2 * 1024 * 4096)
    moved = [one.kernels(BACKWARD, SHAPE.seen_by(one), WorkOptions())[0].hbm_bytes for one in (first, last)]
    assert moved == [token * (1 + 2 * (6 + 32 + 40)), token * 2 * (15 + 16 + 80)]


def test_megatron_keeps_routed_rows_and_the_layers_input_once() -> None:
    """Korthikanti's count with rows in place of tokens (R = 2 N): the router's input 2 N h and two tensors of
    fp32 scores 8 N E; rows 2 R h, gate and up 4 R f, their product 2 R f; an index of 8 bytes per row."""
    layer = layer_of(load_model("mixtral-8x7b"), FUSED)
    options = WorkOptions(compile=True)
    kept = sum(module.saved_bytes(SHAPE.seen_by(module), options) for module in layer)
    tokens, rows, hidden, features = 1024, 2048, 4096, 14336
    assert kept == 2 * tokens * hidden + 8 * tokens * 8 + rows * (2 * hidden + 6 * features) + 8 * rows


def test_shared_experts_read_the_input_that_the_router_keeps() -> None:
    """Of the readers of a layer's input the first keeps it."""
    for library in LIBRARIES:
        layer = layer_of(load_model("deepseek-v3"), library)
        readers = [m for m in layer if m.name in ("mlp.gate", "mlp.shared_experts.gate_proj")]
        assert [module.shares_input for module in readers] == [False, True]


def waits(plan: Plan, phase: str = "forward") -> int:
    return sum(bool(op.host_waits) and op.phase == phase for op in plan.ops)


def test_megatrons_host_waits_for_the_rows_of_every_layer() -> None:
    """Two layers; a recomputed layer waits again. torch's grouped product reads counts on the GPU."""
    assert waits(make_plan(job_of(MEGATRON))) == 2
    again = make_plan(job_of(MEGATRON, training={"activation_checkpointing": "full"}))
    assert (waits(again), waits(again, "recompute")) == (2, 2)
    assert waits(make_plan(job_of({"kind": "fsdp2"}))) == 0


def fetched(plan: Plan) -> list[str]:
    return [
        op.name.removeprefix("fetch ") for op in plan.ops if op.name.startswith("fetch model.layers.1.mlp")
    ]


def test_zero_3_fetches_a_block_of_experts_whole_where_its_class_is_a_leaf() -> None:
    """By default since 0.18.0; before, the router and the module of both stacked weights."""
    new = make_plan(job_of({"kind": "deepspeed", "stage": 3}))
    assert set(fetched(new)) == {"model.layers.1.mlp"}
    release = {"transformers": "5.0"}
    old = make_plan(job_of({"kind": "deepspeed", "stage": 3, "version": "0.17.6"}, training=release))
    assert set(fetched(old)) == {"model.layers.1.mlp.gate", "model.layers.1.mlp.experts"}


STRATEGIES: tuple[dict[str, Any], ...] = (
    {"kind": "ddp"},
    {"kind": "fsdp1"},
    {"kind": "fsdp2"},
    {"kind": "fsdp2", "wrapping": "huggingface"},
    *({"kind": "deepspeed", "stage": stage} for stage in range(4)),
    {"kind": "megatron"},
    {**MEGATRON, "distributed_optimizer": True},
)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: "-".join(map(str, one.values())))
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_every_data_parallelism_trains_experts(strategy: dict[str, Any], checkpointing: str) -> None:
    """Folded and unfolded alike."""
    job = job_of(strategy, 16, training={"activation_checkpointing": checkpointing})
    folded, unfolded = (report_of(simulate_job(job, unfold=unfold), 0.0) for unfold in (False, True))
    assert folded.step_seconds == pytest.approx(unfolded.step_seconds, rel=1e-9)
    assert folded.to_dict()["peak_bytes"] == unfolded.to_dict()["peak_bytes"]


def test_gradients_and_states_count_every_expert() -> None:
    """bf16 parameters, fp32 gradients, and 12 bytes of states under Megatron without sharding."""
    job = job_of({"kind": "megatron"})
    peak = report_of(simulate_job(job), 0.0).to_dict()["peak_bytes"]["gpu"]
    numel = stages_of(job.model, job.parallelism)[0].numel
    assert numel == job.model.numel
    assert (peak["parameters"], peak["gradients"]) == (2 * numel, 4 * numel)
    assert peak["optimizer_states"] == 12 * numel


@pytest.mark.parametrize(("dtype", "forward", "backward"), [(None, 12, 16), ("fp32", 28, 40)])
def test_megatron_adds_the_scored_bias_of_each_expert_itself(
    dtype: str | None, forward: int, backward: int
) -> None:
    """Bytes per element of the output, operator by operator: with bf16 scores b p writes 2, t + b p reads 4
    and writes 2, cat 4; backward cat 4, grad b and grad p 2 + 2 each, their sums 2 each. With fp32 ones 4,
    6 + 4, 8 and a cast of 6; backward two casts of 6, cat 4, and 2 x (4 + 4 + 4)."""
    model = {
        "model_type": "gpt_oss", "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "num_local_experts": 16,
        "num_experts_per_tok": 4,
    }  # fmt: skip
    made = expand_experts(
        model_from_config(model, "gpt-oss", "a test"),
        ExpertSplit(library=FUSED, kernel="streams", gate_in_fp32=dtype == "fp32"),
    )
    module = next(one for one in made.blocks[-1].modules if one.name.endswith("down_proj"))
    numel = SHAPE.tokens * 4 * 256
    shape = BatchShape(2, 512, rows_per_token=4.0)
    options = WorkOptions(dtype="bf16")
    last, first = module.kernels(FORWARD, shape, options)[-2:], module.kernels(BACKWARD, shape, options)[:2]
    assert sum(one.hbm_bytes for one in last) == numel * forward
    assert sum(one.hbm_bytes for one in first) == numel * backward
    assert sum(one.launches for one in last) == 2 * 16 + 1 + (dtype == "fp32")
    assert [one.strided_elements for one in (*last, *first)] == [numel, 0, 2 * numel, 0]


@pytest.mark.parametrize(
    ("recipe", "transposes", "each"),
    [("current", True, 3 * 16), ("mxfp8", False, 16), ("delayed", True, 1), ("delayed", False, 16)],
)
def test_transformer_engine_casts_the_rows_of_each_expert_apart(
    recipe: Fp8Recipe, transposes: bool, each: int
) -> None:
    """Of 16 experts: current scaling has a maximum, a scale and a cast each; delayed scales both ways are
    one kernel for all."""
    made = expand_experts(load_model("qwen3-30b-a3b"), ExpertSplit(library=FUSED, kernel="streams"))
    module = next(one for one in made.blocks[-1].modules if one.name.endswith("down_proj"))
    assert isinstance(module.op_spec, GroupedLinear)
    module = replace(module, op_spec=replace(module.op_spec, num_experts=16))
    options = WorkOptions(dtype="fp8", fp8=Fp8(recipe, transposes=transposes, has_quantized_weights=True))
    given = module.kernels(FORWARD, SHAPE, options)
    before = [one for one in given if one.kind != "gemm"]
    assert sum(one.launches for one in before if one.hbm_bytes) >= each
    assert before[0].launches == (16 if each > 1 else 1)


def test_torchtitan_compiles_around_the_rows_that_it_moves() -> None:
    """Its `apply_compile` leaves `MoE.forward` as it is, 16 passes over all rows before the products, while
    transformers' module is compiled whole, which leaves 6."""
    titan = TORCHTITAN.kernels
    kinds: tuple[MoveKind, ...] = ("permute", "unpermute")
    for kind in kinds:
        moved: list[list[MoveCost]] = [
            [kernels.move(kind, is_compiled=compiled) for compiled in (False, True)]
            for kernels in (titan, TRANSFORMERS_KERNELS)
        ]
        assert moved[0][0] == moved[0][1]
        assert moved[1][0] != moved[1][1]
    assert titan.move("permute", is_compiled=True).forward.rows == 16
    assert TRANSFORMERS_KERNELS.move("permute", is_compiled=True).forward.rows == 6


@pytest.mark.parametrize(
    ("act", "is_gated", "kept"),
    [("gelu", False, 2), ("gelu", True, 4), ("silu", True, 2), ("relu2", False, 1)],
)
def test_scores_that_no_fused_activation_takes_keep_what_they_multiply(
    act: str, is_gated: bool, kept: int
) -> None:
    """Tensors of 14,336 a row, counted with torch's hooks of saved tensors: GELU keeps its input, and the
    product with the scores GELU's output. A gated GELU keeps gate and up, GELU's output, and the gated
    product, which the scores multiply. Fused kernels keep their input."""
    model = load_model("mixtral-8x7b").map_blocks(
        lambda block: replace(
            block,
            modules=tuple(
                replace(module, op_spec=replace(module.op_spec, act=act, is_gated=is_gated))
                if isinstance(module.op_spec, Experts)
                else module
                for module in block.modules
            ),
        )
    )
    layer = layer_of(model, UNFUSED)
    middle = next(module for module in layer if isinstance(module.op_spec, Activation))
    rows = 2 * SHAPE.tokens
    options = WorkOptions(compile=True)
    kept_bytes = middle.op_spec.kept_bytes(middle, SHAPE.seen_by(middle), options)
    assert kept_bytes == kept * rows * 14336 * 2
