"""Mixtures of experts in Megatron's flags and torchtitan's keys, read and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zsim
from zsim.errors import InputError
from zsim.frameworks.megatron.kernels import MEGATRON_FUSED
from zsim.operations.router import Router
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.formats.export import export_files
from zsim.specs.model.expert_layer import stacked_experts

NETWORK = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --swiglu "
    "--max-position-embeddings 4096 --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--vocab-size 1024 --tokenizer-type NullTokenizer --seq-length 512 --micro-batch-size 1 --bf16"
)
EXPERTS = "--num-experts 16 --moe-ffn-hidden-size 64 --moe-router-topk 4"


def read(flags: str, nodes: int = 2) -> Job:
    config = f"{NETWORK} {flags}".split()
    return resolve(
        build_experiment({"cluster": "dgx-h100", "nodes": nodes}, {"strategy.config": config}, origin="test")
    )


def test_flags_of_the_network_are_the_models() -> None:
    """A dense layer first; 16 experts of 64 with 4 of them, of 2 of 4 groups; a shared one of 128."""
    job = read(
        f"{EXPERTS} --moe-layer-freq ([0]*1+[1]*3) --moe-router-num-groups 4 --moe-router-group-topk 2 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-shared-expert-intermediate-size 128"
    )
    experts = stacked_experts(job.model)
    assert experts is not None
    assert (experts.num_experts, experts.top_k, experts.expert_features) == (16, 4, 64)
    first, second = job.model.blocks[:2]
    assert first.numel - second.numel == 3 * 256 * (512 - 128) - 16 * 3 * 256 * 64 - 16 * 256
    router = next(module.op_spec for module in second.modules if isinstance(module.op_spec, Router))
    assert (router.score, router.num_groups, router.top_groups) == ("sigmoid", 4, 2)
    assert router.has_choice_bias
    assert stacked_experts(job.model) is not None


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("2", [1, 0, 1, 0]),
        ("([0]*1+[1]*3)*1", [0, 1, 1, 1]),
        ("([0]+[1])*2", [0, 1, 0, 1]),
        ("[0,1,1,0]", [0, 1, 1, 0]),
    ],
)
def test_layers_with_experts_are_a_list_as_python_writes_it(pattern: str, expected: list[int]) -> None:
    blocks = read(f"{EXPERTS} --moe-layer-freq {pattern}").model.blocks
    has_experts = [any(isinstance(module.op_spec, Router) for module in block.modules) for block in blocks]
    assert has_experts == [bool(bit) for bit in expected]


def test_flash_attention_is_not_cudnns_where_a_script_asks_for_it() -> None:
    jobs = [
        resolve(
            build_experiment(
                {"cluster": "hgx-b200", "nodes": 1},
                {"strategy.config": f"{NETWORK} {more}".split()},
                origin="test",
            )
        )
        for more in ("--attention-backend flash", "--attention-backend fused", "")
    ]
    flash, fused, default = (job.cluster.gpu.attention.backward_fraction for job in jobs)
    assert fused == default
    assert fused != flash


def test_latent_attention_has_deepseeks_shapes() -> None:
    """4 heads of 24 + 8 and values of 16, from latent vectors of 48 and 32: the layer's products and, with
    --qk-layernorm, their norms; without --q-lora-rank queries are made directly."""
    flags = (
        f"{EXPERTS} --multi-latent-attention --kv-lora-rank 32 --qk-head-dim 24 --qk-pos-emb-head-dim 8 "
        "--v-head-dim 16"
    )
    plain = 256 * 4 * 32 + 256 * (32 + 8) + 32 * 4 * (24 + 16) + 4 * 16 * 256
    latent = 256 * 48 + 48 * 4 * 32 - 256 * 4 * 32
    counts = [
        sum(
            m.numel
            for m in read(f"{flags} {more}").model.blocks[0].modules
            if m.name.startswith("self_attn.")
        )
        for more in ("", "--q-lora-rank 48", "--q-lora-rank 48 --qk-layernorm")
    ]
    assert counts == [plain, plain + latent, plain + latent + 48 + 32]


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--expert-model-parallel-size 8", "ranks", 8),
        ("--expert-model-parallel-size 8", "dispatcher", "all-gather"),
        ("--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall", "dispatcher", "all-to-all"),
        ("--expert-model-parallel-size 8 --moe-token-dispatcher-type flex", "dispatcher", "deepep"),
        (
            "--expert-model-parallel-size 8 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend "
            "hybridep", "dispatcher", "hybridep",
        ),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "tensor", 2),
        ("--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1", "tensor", 1),
        ("--moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.5", "capacity_factor", 1.5),
        ("--moe-grouped-gemm", "kernel", "streams"),
        ("", "kernel", "loop"),
        ("--moe-permute-fusion", "library", MEGATRON_FUSED),
        ("--moe-permute-fusion", "builds_map_with_masks", True),
        ("--moe-permute-fusion --enable-experimental", "builds_map_with_masks", False),
        ("--moe-router-dtype fp32", "gate_in_fp32", True),
        ("--moe-aux-loss-coeff 1e-2", "has_auxiliary_loss", True),
        ("--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type none", "has_auxiliary_loss", False),
    ],
)  # fmt: skip
def test_flags_say_how_experts_run(flags: str, key: str, value: Any) -> None:
    assert getattr(read(f"{EXPERTS} {flags}").parallelism.experts, key) == value


def test_flags_of_experts_have_no_effect_on_a_dense_model() -> None:
    job = read("--moe-grouped-gemm --moe-router-dtype fp32")
    assert stacked_experts(job.model) is None


WRITTEN = (
    "--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall --moe-grouped-gemm",
    "--expert-model-parallel-size 4 --moe-token-dispatcher-type flex --moe-permute-fusion "
    "--moe-shared-expert-intermediate-size 128 --moe-shared-expert-gate",
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
    "--moe-router-dtype fp32",
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.5 "
    "--moe-pad-expert-input-to-capacity --moe-aux-loss-coeff 0.01",
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --expert-model-parallel-size 8",
)


@pytest.mark.parametrize("flags", WRITTEN)
def test_a_script_that_was_written_gives_the_same_plan(flags: str, tmp_path: Path) -> None:
    job = read(f"{EXPERTS} {flags}")
    text = export_files(job).files["megatron.sh"]
    path = tmp_path / "megatron.sh"
    path.write_text(text)
    again = resolve(build_experiment({"cluster": "dgx-h100"}, {"strategy.config": str(path)}, origin="test"))
    plan, made = zsim.make_plan(job.experiment), zsim.make_plan(again.experiment)
    assert made.ops == plan.ops
    assert made.groups == plan.groups


TITAN = """
[training]
local_batch_size = 1
seq_len = 4096

[activation_checkpoint]
mode = "none"

[parallelism]
tensor_parallel_degree = 2
expert_parallel_degree = 8
"""


def titan(folder: Path, more: str = "") -> Job:
    path = folder / "train.toml"
    path.write_text(TITAN + more)
    data = {"model": "qwen3-30b-a3b", "cluster": "dgx-h100", "nodes": 4}
    return resolve(build_experiment(data, {"strategy.config": str(path)}, origin="test"))


def test_torchtitans_degrees_are_read_and_written(tmp_path: Path) -> None:
    experts = titan(tmp_path).parallelism.experts
    assert (experts.ranks, experts.tensor, experts.dispatcher) == (8, 1, "all-to-all")
    both = titan(tmp_path, "expert_tensor_parallel_degree = 2\n").parallelism.experts
    assert (both.ranks, both.tensor) == (8, 2)
    job = titan(tmp_path, 'expert_parallel_comm_backend = "deepep"\n')
    assert job.parallelism.experts.dispatcher == "deepep"
    forced = titan(tmp_path, "[debug]\nmoe_force_load_balance = true\n")
    assert forced.parallelism.experts.imbalance == 1 < experts.imbalance
    assert "moe_force_load_balance = true" in export_files(forced).files["torchtitan.toml"]
    text = export_files(job).files["torchtitan.toml"]
    assert "moe_force_load_balance" not in text
    for line in ("expert_parallel_degree = 8", "expert_tensor_parallel_degree = 1", '"deepep"'):
        assert line in text


def test_torchtitan_refuses_what_its_parallel_dims_refuse(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"found 4; torchtitan 0\.2 takes 1 or the degree of tensor"):
        titan(tmp_path, "expert_tensor_parallel_degree = 4\n")
