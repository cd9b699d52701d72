"""Parallelisms: other programs' names are answered with zsim's own; `[parallelism]` is resolved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zsim
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.strategy.parallelism import Mesh

DATA = {"model": "llama-3-8b", "cluster": "dgx-h100"}


@pytest.mark.parametrize(
    ("key", "own"),
    [
        ("strategy.tensor_parallel", "tensor"),
        ("strategy.pipeline_parallel", "pipeline"),
        ("strategy.context_parallel", "context"),
        ("strategy.tp", "tensor"),
        ("strategy.pp_size", "pipeline"),
        ("strategy.tensor_model_parallel_size", "tensor"),
        ("training.cp", "context"),
        ("parallelism.tensor_parallel_degree", "tensor"),
        ("strategy.expert_parallel", "expert"),
        ("strategy.expert_tensor_parallel_degree", "expert_tensor"),
    ],
)
def test_another_programs_name_is_answered_with_the_key(key: str, own: str) -> None:
    with pytest.raises(InputError, match=f"test: {key}: unknown key; it is parallelism.{own} here"):
        build_experiment(dict(DATA), {key: 8}, origin="test")


@pytest.mark.parametrize("strategy", [{"kind": "ddp", "tp": 2}, {"stage": 3, "tp": 2}, {"tp": 2}])
def test_whatever_the_strategy_is(strategy: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"strategy\.tp: unknown key; it is parallelism\.tensor here"):
        zsim.Experiment(**DATA, strategy=strategy)


@pytest.mark.parametrize("key", ["tensor", "parallel", "sequence", "data_parallel"])
def test_other_unknown_keys_are_unknown(key: str) -> None:
    with pytest.raises(InputError, match=f"unknown key '{key}'"):
        zsim.Experiment(**DATA, strategy={"kind": "fsdp2", key: 2})


def resolved(
    parallelism: dict[str, Any], kind: str = "megatron", nodes: int = 4, steps: int = 8, **more: Any
) -> Job:
    strategy = {"kind": kind, **({"stage": 1} if kind == "deepspeed" else {})}
    training = {"sequence_length": 4096, "gradient_accumulation_steps": steps}
    data: dict[str, Any] = {
        **DATA,
        "nodes": nodes,
        "strategy": strategy,
        "parallelism": parallelism,
        "training": training,
    }
    return resolve(zsim.Experiment(**{**data, **more}))


def test_data_parallelism_is_what_remains() -> None:
    job = resolved({"tensor": 4, "pipeline": 2, "context": 2})
    assert (job.world_size, job.data_parallel_size) == (32, 2)
    assert job.mesh.axes == (("pipeline", 2), ("data", 2), ("context", 2), ("tensor", 4))


@pytest.mark.parametrize(
    ("parallelism", "kind", "message"),
    [
        ({"tensor": 3}, "megatron", "3 does not divide 32 GPUs; tensor 4 would"),
        ({"tensor": 16}, "fsdp2", "does not divide the 8 key/value heads of 'llama-3-8b'; the nearest"),
        ({"pipeline": 16, "tensor": 2, "virtual_stages": 4}, "megatron", "32 layers do not divide by 64 st"),
        ({"pipeline": 2, "schedule": "gpipe"}, "megatron", "Megatron has no 'gpipe'; expected '1f1b' or"),
        ({"pipeline": 2, "schedule": "gpipe"}, "deepspeed", "DeepSpeed has no 'gpipe'; expected '1f1b'"),
        ({"pipeline": 2, "virtual_stages": 2, "schedule": "1f1b"}, "fsdp2", "one stage per rank"),
        ({"pipeline": 2, "virtual_stages": 3, "schedule": "dualpipe-v"}, "fsdp2", "found 3 with schedule"),
        ({"pipeline": 2, "layers_per_stage": [16, 15]}, "fsdp2", "add up to the model's 32 layers"),
        ({"schedule": "1f1b"}, "fsdp2", "has no effect with pipeline = 1"),
        ({"order": "tp-pp"}, "megatron", "expected tp, cp, dp and pp in some order"),
        ({"context": 2, "context_method": "a2a+p2p"}, "fsdp2", "torchtitan has no 'a2a"),
        ({"pipeline": 2, "passes": 3}, "fsdp2", "parallelism.passes: found 3, which does not divide 8"),
        ({"tensor": 2}, "ddp", "for data parallelism alone; expected strategy 'fsdp2'"),
        ({"async_tensor": True}, "fsdp2", "async_tensor: has no effect with tensor = 1"),
        ({"tensor": 2, "async_tensor": True}, "fsdp2", "expected training.compile = true"),
        ({"tensor": 2, "async_tensor": True}, "megatron", "--tp-comm-overlap asserts; expected sequence_"),
    ],
)
def test_what_does_not_go_is_refused(parallelism: dict[str, Any], kind: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolved(parallelism, kind)


def test_a_suggested_pipeline_divides_the_layers() -> None:
    """3 ranks would divide 3 GPUs, but not 32 layers."""
    odd = zsim.Experiment(
        model="llama-3-8b",
        cluster="dgx-h100",
        gpus=3,
        strategy={"kind": "megatron"},
        parallelism={"pipeline": 2},
    )
    with pytest.raises(InputError, match="2 does not divide 3 GPUs; pipeline 1 would"):
        resolve(odd)


def test_a_tied_head_is_not_cut_off_its_embedding() -> None:
    with pytest.raises(InputError, match="torchtitan's pipelines share no weight"):
        resolved({"pipeline": 2}, "fsdp2", model="llama-3.2-1b")


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        ("full", NotSimulatedError, "torch recomputes a block for each of its parameters"),
        ("selective-op", InputError, "torch takes selective checkpoints through one backward"),
    ],
)
def test_split_backwards_recompute_nothing(policy: str, error: type[Exception], message: str) -> None:
    """Seen with torch 2.13 on fake ranks: under interleaved zero bubbles a block of nine parameters ran ten
    times more per micro-batch with full checkpoints; selective ones end in "Trying to backward an extra
    time"."""
    data: dict[str, Any] = {
        **DATA,
        "training": {"gradient_accumulation_steps": 8, "activation_checkpointing": policy},
        "parallelism": {"pipeline": 2, "schedule": "zbv-zero-bubble"},
    }
    experiment = zsim.Experiment(**data, strategy={"kind": "fsdp2"})
    with pytest.raises(error, match=message):
        resolve(experiment)


@pytest.mark.parametrize("kind", ["fsdp1", "reference"])
def test_strategies_without_model_parallelism_say_so(kind: str) -> None:
    with pytest.raises(NotSimulatedError, match=rf"parallelism\.tensor: found 2 with strategy '{kind}'"):
        resolved({"tensor": 2}, kind)


def test_layers_are_dealt_out_as_the_framework_does() -> None:
    """torchtitan's ends count a layer more: 34 on 4 stages are 9, 9, 8, 8, less one at each end."""
    assert resolved({"pipeline": 4}, "fsdp2").parallelism.layers_per_stage == (8, 9, 8, 7)
    assert resolved({"pipeline": 4}, "megatron").parallelism.layers_per_stage == (8, 8, 8, 8)
    ends = {"pipeline": 2, "first_stage_less_layers": 1, "last_stage_less_layers": 1}
    assert resolved(ends, "megatron").parallelism.layers_per_stage == (16, 16)


@pytest.mark.parametrize("kind", ["fsdp2", "megatron"])
def test_an_end_may_hold_the_embedding_or_the_head_alone(kind: str) -> None:
    """As Llama 3 405B was trained: 126 layers and two ends on 128 stages."""
    table = {"pipeline": 2, "virtual_stages": 17, "first_stage_less_layers": 1, "last_stage_less_layers": 1}
    assert resolved(table, kind).parallelism.layers_per_stage == (0, *[1] * 32, 0)


@pytest.mark.parametrize(("less", "virtual", "most"), [(1, 18, 34), (2, 18, 18)])
def test_too_many_stages_name_how_many_there_may_be(less: int, virtual: int, most: int) -> None:
    table = {"pipeline": 2, "virtual_stages": virtual}
    ends = {"first_stage_less_layers": less, "last_stage_less_layers": less}
    with pytest.raises(InputError, match=rf"too few for 36 stages; expected at most {most} stages"):
        resolved(table | ends, "fsdp2")


def test_layers_that_do_not_divide_name_ends_with_which_they_would() -> None:
    """DeepSeek-V3's 61 layers on 4 stages are 16 each with 1 and 2 less at the ends."""
    with pytest.raises(InputError, match=r"first_stage_less_layers = 1 and last_stage_less_layers = 2$"):
        resolved({"pipeline": 4}, "megatron", model="deepseek-v3")
    ends = {"first_stage_less_layers": 1, "last_stage_less_layers": 2}
    taken = resolved({"pipeline": 4, **ends}, "megatron", model="deepseek-v3").parallelism
    assert taken.layers_per_stage == (15, 16, 16, 14)


@pytest.mark.parametrize(
    ("less", "virtual", "hint"),
    [
        # 32 layers and 10 that the ends lack are 42: on 14 stages, 3 each, an end would lack 5; on 7, 6 each
        (5, 7, "too few for 14 stages; expected at most 7 stages"),
        # 42 layers divide by 7; 8, which divides the 32, would be refused
        (5, 5, "do not divide by 10 stages, which Megatron refuses; the nearest number .* is 7"),
    ],
)
def test_a_count_that_is_named_is_one_that_megatron_takes(less: int, virtual: int, hint: str) -> None:
    ends = {"first_stage_less_layers": less, "last_stage_less_layers": less}
    with pytest.raises(InputError, match=hint):
        resolved({"pipeline": 2, "virtual_stages": virtual, **ends}, "megatron")
    taken = {"pipeline": 7, **ends}
    assert resolved(taken, "megatron", nodes=7).parallelism.layers_per_stage == (1, 6, 6, 6, 6, 6, 1)


def test_groups_of_a_mesh() -> None:
    mesh = Mesh((("pipeline", 2), ("data", 2), ("tensor", 2)))
    assert mesh.groups("tensor").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.groups("data").tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.groups("pipeline").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.groups("pipeline", "tensor").tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert mesh.coordinate("pipeline").tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert np.array_equal(mesh.groups("pipeline", "data", "tensor"), np.arange(8)[None])
    with pytest.raises(AssertionError):
        mesh.coordinate("tensr")
