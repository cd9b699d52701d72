"""AutoTP with heads and features that do not divide among its ranks: the parts of the first rank."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.frameworks.deepspeed.test_deepspeed_parallel import calls, job_of
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.autotp import first_rank_features
from zsim.plan.make import make_plan, stages_of
from zsim.specs.experiment.job import Job
from zsim.specs.model.spec import Activation, Attention

HEAD = 32
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 12 * HEAD, "intermediate_size": 1001, "num_hidden_layers": 2,
    "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": HEAD, "vocab_size": 4099,
    "tie_word_embeddings": False,
}  # fmt: skip

# `get_shard_size_list(total, ranks, meta, name)` of DeepSpeed 0.19.8, with key/value heads in front.
SHARDS: list[tuple[int, int, int, str, list[int]]] = [
    (6, 384, 4, "layers.0.self_attn.q_proj", [128, 128, 64, 64]),
    (6, 192, 4, "layers.0.self_attn.k_proj", [64, 64, 32, 32]),
    (6, 384, 4, "layers.0.mlp.gate_proj", [96, 96, 96, 96]),
    (6, 1001, 4, "layers.0.mlp.down_proj", [251, 250, 250, 250]),
    (6, 4098, 4, "lm_head", [1025, 1025, 1024, 1024]),
    (6, 4098, 4, "fc1", [1366, 1366, 683, 683]),
    (6, 4099, 4, "fc1", [1025, 1025, 1025, 1024]),
    (2, 256, 4, "layers.0.self_attn.v_proj", [128, 128, 0, 0]),
]


@pytest.mark.parametrize(("groups", "total", "ranks", "name", "shards"), SHARDS)
def test_the_first_rank_has_deepspeed_s_largest_shard(
    groups: int, total: int, ranks: int, name: str, shards: list[int]
) -> None:
    assert sum(shards) == total
    assert first_rank_features(total, ranks, name, groups) == shards[0] == max(shards)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_the_shards_are_what_deepspeed_answers() -> None:
    program = (
        "import json, sys\n"
        "from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list\n"
        "print(json.dumps([get_shard_size_list(total, ranks, AutoTPMeta(num_kv_heads=groups), name)"
        " for groups, total, ranks, name in json.loads(sys.argv[1])]))"
    )
    asked = json.dumps([row[:4] for row in SHARDS])
    done = subprocess.run(
        [sys.executable, "-c", program, asked], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [row[4] for row in SHARDS]


def autotp(ranks: int, *, version: str = "0.19.8", model: dict[str, Any] = LLAMA, grain: int = 1) -> Job:
    return job_of(
        1, {}, model=model, gpus=2 * ranks, micro_batches=1, version=version,
        tensor_parallel={"autotp_size": ranks, "tp": {"tp_grain_size": grain}},
    )  # fmt: skip


# `get_shard_size_list(total, ranks, AutoTPMeta(num_kv_heads=6, tp_grain_size=grain), "mlp")` of 0.19.8.
GRAINS: list[tuple[int, int, int, list[int]]] = [
    (1001, 4, 64, [256, 256, 256, 233]),
    (1001, 4, 1, [251, 250, 250, 250]),
    (96, 4, 128, [24, 24, 24, 24]),
    (640, 4, 64, [192, 192, 128, 128]),
    (640, 4, 320, [320, 320, 0, 0]),
]


@pytest.mark.parametrize(("total", "ranks", "grain", "shards"), GRAINS)
def test_a_grain_deals_out_so_many_features_at_a_time(
    total: int, ranks: int, grain: int, shards: list[int]
) -> None:
    assert sum(shards) == total
    assert first_rank_features(total, ranks, "mlp.gate_proj", 6, grain) == shards[0] == max(shards)


def test_a_plan_with_a_grain_is_that_of_the_first_rank() -> None:
    """4,099 logits are 64 grains of 64, 16 a rank, and 3 more, which the last has: zsim stops. Of 1,001
    features 31 grains of 32 are 8 on the first of 4 ranks, of 4,128 logits 33."""
    with pytest.raises(
        NotSimulatedError, match=r"found 64, which leaves 3 of the 4,099 features of 'lm_head'"
    ):
        make_plan(autotp(4, grain=64))
    model = {**LLAMA, "vocab_size": 4128}
    job = autotp(4, grain=32, model=model)
    modules = stages_of(job.model, job.parallelism)[0].blocks[0].modules
    assert [one.op_spec.width for one in modules if isinstance(one.op_spec, Activation)] == [256]
    assert ("all_gather", "tensor", 128 * 4 * 33 * 32 * 2) in calls(make_plan(job).program, "tensor")
    (told,) = [note for note in job.notes if note.startswith("AutoTP")]
    assert "256 of 1,001 features of the MLP" in told


def test_releases_without_a_grain_and_those_that_lose_features() -> None:
    """0.18.9 to 0.19.5 follow transformers' plan and leave the grain at 1; older ones drop the 41 features of
    1,001 that 64 leaves over."""
    assert autotp(3, grain=64, version="0.19.5").parallelism.tensor_grain == 1
    for version in ("0.16.4", "0.18.8"):
        with pytest.raises(
            InputError, match=f"does not divide the 1,001 features .*{version} loses the rest"
        ):
            autotp(4, grain=64, version=version)
    assert autotp(4, grain=64, version="0.19.6").parallelism.tensor_grain == 64


def test_the_plan_is_that_of_the_first_rank() -> None:
    """4 ranks: 2 of 6 key/value heads and 4 of 12, 251 of 1,001 features, 1,025 of 4,099 logits, gathered
    padded to 4 x 1,025; embedding and norms whole."""
    job = autotp(4)
    (model,) = stages_of(job.model, job.parallelism)
    works = [module.op_spec for module in model.blocks[0].modules]
    (core,) = (work for work in works if isinstance(work, Attention))
    assert (core.num_heads, core.num_kv_heads) == (4, 2)
    (activation,) = (work for work in works if isinstance(work, Activation))
    assert activation.width == 251
    hidden = LLAMA["hidden_size"]
    layer = hidden * HEAD * (4 + 2 * 2 + 4) + 3 * hidden * 251 + 2 * hidden
    assert model.numel == 2 * layer + hidden + hidden * (4099 + 1025)
    assert ("all_gather", "tensor", 128 * 4 * 1025 * 2) in calls(make_plan(job).program, "tensor")


def test_the_report_says_which_rank_counts() -> None:
    (told,) = [note for note in autotp(4).notes if note.startswith("AutoTP")]
    assert "4 of 12 heads (2 of 6 of keys and values) and 251 of 1,001 features of the MLP" in told
    (few,) = [note for note in autotp(8).notes if note.startswith("AutoTP")]
    assert "2 of 12 heads (1 of 6 of keys and values), as have the 5 behind it, the others none" in few
    even = {**LLAMA, "intermediate_size": 1024}
    assert not [note for note in autotp(2, model=even).notes if note.startswith("AutoTP")]


def test_features_of_an_mlp_that_goes_by_heads_are_told_as_simulated() -> None:
    """OPT's fc1 is no "mlp": 2 of 6 heads' 1,536 features are 512, though 4 ranks divide them evenly."""
    opt = {
        "model_type": "opt", "hidden_size": 384, "ffn_dim": 1536, "num_attention_heads": 6,
        "num_hidden_layers": 2, "vocab_size": 4096, "max_position_embeddings": 128,
        "word_embed_proj_dim": 384,
    }  # fmt: skip
    job = autotp(4, model=opt)
    (told,) = [note for note in job.notes if note.startswith("AutoTP")]
    assert "2 of 6 heads (2 of 6 of keys and values) and 512 of 1,536 features of the MLP" in told
    modules = stages_of(job.model, job.parallelism)[0].blocks[0].modules
    assert [one.op_spec.width for one in modules if isinstance(one.op_spec, Activation)] == [512]


def test_releases_that_do_not_know_of_heads_are_refused() -> None:
    """transformers' plan since 0.18.9, without `set_num_kv_heads` before 0.19.6."""
    for version in ("0.16.4", "0.18.8", "0.19.6"):
        assert autotp(4, version=version).parallelism.tensor == 4
    for version in ("0.18.9", "0.19.5"):
        with pytest.raises(InputError, match=f"6 key/value heads .*DeepSpeed {version} cuts one in two"):
            autotp(4, version=version)
        assert autotp(3, version=version).parallelism.tensor == 3


def test_products_of_several_parts_are_refused() -> None:
    fused = {
        "model_type": "gpt2", "n_embd": 96, "n_head": 6, "n_layer": 2, "vocab_size": 4096, "n_positions": 128,
    }  # fmt: skip
    with pytest.raises(NotSimulatedError, match="queries, keys and values in one product"):
        autotp(4, model=fused)
