"""Recurrences: what they compute, keep and move, how ranks share them, and that frameworks train them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.engine.simulate import simulate_job
from zsim.errors import InputError, NotSimulatedError
from zsim.explain.report_of import report_of
from zsim.frameworks.megatron.kernels import LAYER_KERNELS
from zsim.operations import BACKWARD, FORWARD, Exchange, Module
from zsim.operations.mixers.convolution import Convolution
from zsim.operations.mixers.gated_delta import GatedDelta
from zsim.operations.mixers.kimi_delta import KimiDelta
from zsim.operations.mixers.mamba2 import StateSpace
from zsim.operations.mixers.rwkv7 import GeneralizedDelta
from zsim.operations.operation import Role
from zsim.plan.make import plan_basis, stages_of
from zsim.plan.workload.workload import make_workload
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.huggingface import load_model
from zsim.specs.model.spec import Block

SIZES: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_hidden_layers": 4,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "head_dim": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "nemotron_h": {
        "hybrid_override_pattern": "M*-EM-ME", "head_dim": 64, "mamba_num_heads": 8, "n_groups": 4,
        "ssm_state_size": 32, "n_routed_experts": 8, "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 128, "moe_latent_size": 128, "num_hidden_layers": 8,
    },
    "jamba": {"num_experts": 4, "num_hidden_layers": 8},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 256},
    "kimi_linear": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "kv_lora_rank": 64,
        "linear_attn_config": {"num_heads": 4, "head_dim": 32, "full_attn_layers": [4]},
    },
    "minimax": {"num_local_experts": 4},
    "lfm2": {"full_attn_idxs": [1]},
}  # fmt: skip
FUSED = WorkOptions(compile=True, layers=LAYER_KERNELS["megatron"])


def job_of(
    model_type: str, strategy: dict[str, Any], parallelism: dict[str, Any] | None = None, **training: Any
) -> Job:
    experiment = {
        "model": {"model_type": model_type, **SIZES, **MODELS[model_type]},
        "cluster": "dgx-h100", "gpus": 8, "strategy": strategy,
        "training": {"sequence_length": 512, **training},
        **({"parallelism": parallelism} if parallelism else {}),
    }  # fmt: skip
    return resolve(Experiment.model_validate(experiment))


def rank_block(job: Job, number: int = 0) -> Block:
    """A block as one rank has it."""
    stage = stages_of(job.model, plan_basis(job).parallelism)[0]
    return stage.blocks[number]


def mixer_bytes(preset: str, number: int, options: WorkOptions) -> int:
    """Bytes per token that a block's mixer keeps, from the norm before it to the product behind it."""
    shape, total = BatchShape(1, 4096), 0
    for module in load_model(preset).blocks[number].modules:
        if module.role is Role.RESIDUAL:
            break
        total += module.saved_bytes(shape, options)
    return round(total / 4096)


def test_gated_deltas_flops_are_those_of_its_chunks() -> None:
    """K = W = 128, C = 64: 6CK + 4CW + 6KW + 2/3 C^2 = 182,955 forward and 507,904 backward, per head."""
    work = GatedDelta(16, 32, 128, 128)
    assert round(work.forward_scan(2).flops / 32) == 182_955
    assert work.backward_scan(2).flops / 32 == 18 * 64 * 128 + 10 * 64 * 128 + 16 * 128**2 + 4 * 64**2
    assert work.forward_scan(2).hbm_bytes / 32 == 4608 + 8


def test_mamba_2s_flops_are_those_of_its_chunks() -> None:
    """Nemotron 3 Nano, H 64, P 64, N 128, G 8, Q 128: 2GQN + H(2QP + 4NP) = 3.41 million a token."""
    work = StateSpace(64, 64, 128, 8, 128)
    assert work.forward_scan(2).flops == 2 * 8 * 128 * 128 + 64 * (2 * 128 * 64 + 4 * 128 * 64)
    assert work.forward_scan(2).flops == pytest.approx(3.41e6, rel=0.01)


def test_a_layer_of_gated_delta_keeps_87_kb_a_token_under_megatron() -> None:
    """Qwen3.5-35B, h 2048, 16 and 32 heads of 128: norm 4,096, its output 4,096, what is convolved 16,384,
    queries and keys normalised 8,192 and repeated 16,384, values 8,192, inverses 4,096, fp32 numbers of a
    head 1,024, the norm's input and gate 16,384, its output 8,192.
    """
    assert mixer_bytes("qwen3.5-35b-a3b", 0, FUSED) == 87_040


def test_a_layer_of_mamba_2_keeps_56_kb_a_token_under_megatron() -> None:
    """Nemotron 3 Nano, h 2688, d 4096, GN 1024: norm and its output 5,376 each, what is convolved 12,288,
    gate 8,192, time steps 128, the output before the norm 8,192, the norm's input and output 8,192 each.
    """
    assert mixer_bytes("nemotron-3-nano-30b-a3b", 0, FUSED) == 55_936


def test_mamba_ssms_function_norms_by_itself() -> None:
    """8,192 bytes less, the norm's input, where the scan's function makes it again."""
    torch_fused = replace(FUSED, layers=WorkOptions().layers)
    assert mixer_bytes("nemotron-3-nano-30b-a3b", 0, torch_fused) == 55_936 - 8_192


def test_mamba_2_keeps_what_mamba_ssms_function_saves() -> None:
    """By `save_for_backward` of mamba_ssm e9594ce1 ops/triton/ssd_combined.py, per token of Nemotron 3 Nano:
    zxbcdt of 2 x 4096 + 2 x 1024 + 64 numbers and out_x of 4096 in 16 bits,
    28,800 bytes. Its rstd, 8 numbers in fp32, is 0.1 % of that and not counted.
    """
    scan = StateSpace(64, 64, 128, 8, 128)
    conv = Module("conv", Convolution(4096 + 2 * 1024, 4))
    shape = BatchShape(1, 1024)
    kept = Module("scan", scan).saved_bytes(shape, FUSED) + conv.saved_bytes(shape, FUSED)
    assert kept == 1024 * 2 * (2 * 4096 + 2 * 1024 + 64 + 4096)


@pytest.mark.parametrize(("reads_values", "tensors"), [(False, 14), (True, 16)])
def test_rwkv_7_keeps_what_flas_functions_save(reads_values: bool, tensors: int) -> None:
    """Tensors of 2,048 features in 16 bits, by `save_for_backward` of fla bc3b101d: of the six mixes the
    tokens and their shifts (`Rwkv7FusedAddcmul`, whose outputs are the products' inputs), k and a
    (`KUpdateFunction`; a is a sigmoid's output too), the normalised keys (`L2NormFunction`), w's sigmoid,
    r, w, k, v, -kk and kk a (`ChunkDPLRDeltaRuleFunction`), the normalised output and the gate beside r, k
    and v again (`GateOutputCorrection`): 2 + 2 + 1 + 1 + 6 + 2. `lerp` adds values and their sigmoid.
    """
    work = GeneralizedDelta(32, 64, reads_values=reads_values)
    assert sum(work.kept_sizes(WorkOptions())) == tensors * 2048 * 2


@pytest.mark.parametrize(
    ("options", "gate"),
    [
        (WorkOptions(), 4 + 4 + 1 + 4 + 4 + 4),
        (WorkOptions(compile=True), 2 + 4 + 4),
        (replace(FUSED, layers=LAYER_KERNELS["megatron"]), 2),
    ],
    ids=["transformers", "compiled", "megatron"],
)
def test_kimi_delta_keeps_what_flas_function_saves(options: WorkOptions, gate: int) -> None:
    """32 heads of 128, by `save_for_backward` of fla bc3b101d ops/kda/chunk.py: q, k and v of 4,096 in 16
    bits, A_qk and A_kk of 64 a head, q_rstd and k_rstd in fp32, beta, and per channel of the gate the decays
    and their sums in fp32, or the product where the gate is in the kernel. Before it transformers' gate keeps
    exp, 1 + exp, softplus and a mask (`test_the_gate_of_kimi_delta_keeps_what_autograd_keeps`).
    """
    beta = 4 if options.layers.gates_in_kernel else 2
    assert sum(KimiDelta(32, 128).kept_sizes(options)) == (
        3 * 4096 * 2 + 2 * 32 * 64 * 2 + 32 * (8 + beta) + 4096 * gate
    )


def test_a_decay_for_every_channel_moves_more_than_one_for_a_head() -> None:
    """24 bytes a key's channel, and a second matrix of a chunk read and written."""
    one, many = GatedDelta(32, 32, 128, 128), KimiDelta(32, 128)
    difference = many.forward_scan(2).hbm_bytes - one.forward_scan(2).hbm_bytes
    assert difference == 32 * (24 * 128 + 2 * 2 * 64 - 8)


def test_only_the_walk_through_chunks_takes_longer_with_longer_sequences() -> None:
    """As many tokens in one sequence of 8,192 or in 8: equal bytes, 128 chunks against 16."""
    module = Module("core", GatedDelta(4, 8, 128, 128))
    long, short = (
        module.kernels(FORWARD, BatchShape(count, 8192 // count), WorkOptions())[-1] for count in (1, 8)
    )
    assert long.hbm_bytes == short.hbm_bytes
    assert (long.shape, short.shape) == ((1, 128), (8, 16))
    assert module.kernels(BACKWARD, BatchShape(1, 8192), WorkOptions())[0].shape == (1, 256)


def test_tensor_parallel_ranks_have_a_part_of_the_heads() -> None:
    """4 of 8 value heads, with the products, the convolution and the decays cut alike. The norm's weight, of
    one head, is whole, and its gradient summed up.
    """
    block = rank_block(job_of("qwen3_5_text", {"kind": "megatron"}, {"tensor": 2}))
    modules = {module.name: module for module in block.modules}
    assert modules["linear_attn"].op_spec == GatedDelta(2, 4, 32, 32)
    assert [parameter.shape for parameter in modules["linear_attn"].parameters] == [(4,), (4,)]
    assert modules["linear_attn.conv1d"].parameters[0].shape == (2 * 2 * 32 + 4 * 32, 1, 4)
    (weight,) = modules["linear_attn.norm"].parameters
    assert (weight.shape, weight.summed_over) == ((32,), "tensor")


def test_context_parallel_ranks_exchange_heads_for_tokens() -> None:
    """All that the projection makes, 2 x 128 + 2 x 256 + 2 x 8 = 784 numbers a token, in one exchange, and
    the rule's output of 256 back. Between them a rank has 4 of 8 heads and all tokens.
    """
    block = rank_block(job_of("qwen3_5_text", {"kind": "megatron"}, {"context": 2}))
    exchanges = [module.op_spec for module in block.modules if isinstance(module.op_spec, Exchange)]
    assert [(work.forward, work.width, work.group) for work in exchanges] == [
        ("all_to_all", 784, "context"),
        ("all_to_all", 256, "context"),
    ]
    core = next(module for module in block.modules if module.role is Role.MIXER)
    assert (core.op_spec, core.token_shards) == (GatedDelta(2, 4, 32, 32), 1)
    assert all(module.token_shards == 2 for module in block.modules if module.role is Role.PRODUCT)


def test_mamba_2_exchanges_each_of_its_inputs_by_itself() -> None:
    """Gate and inputs of 512, B and C of 4 x 32, 8 time steps, and one exchange back."""
    block = rank_block(job_of("nemotron_h", {"kind": "megatron"}, {"context": 2}))
    widths = [module.op_spec.width for module in block.modules if isinstance(module.op_spec, Exchange)]
    assert widths == [512, 512, 128, 128, 8, 512]


@pytest.mark.parametrize(
    ("model_type", "strategy", "parallelism", "name"),
    [
        ("jamba", {"kind": "megatron"}, None, "Mamba, of which Megatron has no layer"),
        ("kimi_linear", {"kind": "megatron"}, {"context": 2}, "Kimi delta attention"),
        ("lfm2", {"kind": "megatron"}, None, "short convolutions"),
        ("minimax", {"kind": "megatron"}, None, "lightning attention"),
        ("qwen3_5_text", {"kind": "deepspeed", "stage": 1}, {"tensor": 2}, "Gated DeltaNet"),
        (
            "qwen3_5_text",
            {"kind": "fsdp2", "wrapping": "torchtitan"},
            {"context": 2},
            "torchtitan has no context",
        ),
    ],
)
def test_what_a_framework_does_not_share_is_refused_by_name(
    model_type: str, strategy: dict[str, Any], parallelism: dict[str, Any] | None, name: str
) -> None:
    with pytest.raises(NotSimulatedError, match=name):
        job_of(model_type, strategy, parallelism)


def test_heads_that_do_not_divide_are_an_error() -> None:
    with pytest.raises(InputError, match="does not divide the 4 key heads of Gated DeltaNet"):
        job_of("qwen3_5_text", {"kind": "megatron"}, {"tensor": 4, "context": 2})


def test_selective_recomputation_leaves_recurrences_alone() -> None:
    """Only the layers of attention keep less."""
    none, selective = (
        job_of("qwen3_5_text", {"kind": "megatron"}, activation_checkpointing=policy)
        for policy in ("none", "selective")
    )
    kept = [
        [sum(call.work.saved_bytes for call in segment.calls) for segment in _workload(job).segments[1:5]]
        for job in (none, selective)
    ]
    assert kept[0][:3] == kept[1][:3]
    assert kept[0][3] > kept[1][3]


def _workload(job: Job) -> Any:
    return make_workload(stages_of(job.model, plan_basis(job).parallelism)[0], job.training)


STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp2": ({"kind": "fsdp2"}, {"activation_checkpointing": "full"}),
    "torchtitan": (
        {"kind": "fsdp2", "wrapping": "torchtitan"},
        {"activation_checkpointing": "selective-op", "compile": True},
    ),
    "zero3": ({"kind": "deepspeed", "stage": 3}, {}),
    "megatron": ({"kind": "megatron"}, {"activation_checkpointing": "selective"}),
}
WITHOUT_MEGATRON = ("jamba", "minimax", "lfm2")


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        (model_type, name)
        for model_type in MODELS
        for name in STRATEGIES
        if name != "megatron" or model_type not in WITHOUT_MEGATRON
    ],
)
def test_frameworks_train_them(model_type: str, name: str) -> None:
    strategy, training = STRATEGIES[name]
    report = report_of(simulate_job(job_of(model_type, strategy, **training)), 0.0)
    assert report.step_seconds > 0


def test_a_pipeline_has_blocks_of_several_kinds() -> None:
    job = job_of(
        "nemotron_h", {"kind": "megatron"}, {"pipeline": 2, "expert": 2}, gradient_accumulation_steps=4
    )
    report = report_of(simulate_job(job), 0.0)
    assert report.pipeline is not None
    assert 0 < report.pipeline.bubble_fraction < 1


def test_a_prediction_layer_of_nemotron_is_attention_and_experts() -> None:
    """Two blocks behind the product that joins embedding and hidden state, as one layer."""
    job = job_of("nemotron_h", {"kind": "megatron", "mtp_layers": 1, "version": "0.16.1"})
    layer = job.model.blocks[-1]
    mixers = [module.name for module in layer.modules if module.role is Role.MIXER]
    assert mixers == ["layers.0.mixer.core"]
    assert any(module.role is Role.EXPERTS for module in layer.modules)
    assert report_of(simulate_job(job), 0.0).step_seconds > 0


def test_the_norm_behind_gated_delta_may_run_again() -> None:
    """The product keeps 256 numbers a token less, in three layers, and the norm runs before its backward."""
    policy: dict[str, Any] = {
        "activation_checkpointing": "selective",
        "recompute_modules": ["gdn_norm_out"],
    }
    none = job_of("qwen3_5_text", {"kind": "megatron"})
    again = job_of("qwen3_5_text", {"kind": "megatron"}, **policy)
    kept = [
        sum(call.work.saved_bytes for segment in _workload(job).segments for call in segment.calls)
        for job in (none, again)
    ]
    assert kept[0] - kept[1] == 3 * 512 * 256 * 2


def test_a_deterministic_loop_over_chunks_is_refused() -> None:
    with pytest.raises(NotSimulatedError, match="in a loop over chunks"):
        job_of("qwen3_5_text", {"kind": "megatron", "deterministic_mode": True})
    assert job_of("falcon_h1", {"kind": "megatron", "deterministic_mode": True}).model.numel > 0
