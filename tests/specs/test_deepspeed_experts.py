"""Routed experts under DeepSpeed: whose layer has them, as the JSON and the experiment say, and what is
refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zsim.errors import InputError, NotSimulatedError
from zsim.programs.deepspeed.write import deepspeed_object
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.strategy.expert_library import TRANSFORMERS

AUTOEP = {"enabled": True, "autoep_size": 4}


def job_of(
    strategy: dict[str, Any] | None = None,
    parallelism: dict[str, Any] | None = None,
    /,
    *,
    zero: dict[str, Any] | None = None,
    block: dict[str, Any] | None = None,
    model: str = "mixtral-8x7b",
    **top: Any,
) -> Job:
    made: dict[str, Any] = {"kind": "deepspeed", **(strategy or {"stage": 2})}
    if zero is not None or block is not None:
        made.pop("stage", None)
        blocks = {"expert_parallel": {**AUTOEP, **block}} if block is not None else {}
        made["config"] = {"zero_optimization": zero or {"stage": 2}, **blocks, **top}
    training = {"sequence_length": 1024, "micro_batch_size": 2, "precision": "bf16"}
    return resolve(
        Experiment(
            model=model,
            cluster="hgx-h200",
            nodes=2,
            strategy=made,
            parallelism=parallelism or {},
            training=training,
        )
    )


def test_the_json_enables_autoep() -> None:
    split = job_of(block={}).parallelism.experts
    assert (split.library.name, split.ranks, split.kernel, split.dispatcher) == (
        "autoep", 4, "grouped", "all-to-all",
    )  # fmt: skip
    looped = job_of(block={"use_grouped_mm": False, "autoep_size": 1}).parallelism.experts
    assert (looped.library.name, looped.ranks, looped.kernel) == ("autoep", 1, "loop")
    deepep = job_of(block={"comm_backend": "deepep", "comm_max_tokens_per_rank": 2048}).parallelism.experts
    assert deepep.dispatcher == "deepep"


def test_without_it_spread_experts_are_in_deepspeeds_own_layer() -> None:
    """A capacity of 1.0 where none is given; 2 x 1024 tokens to 2 of 8 experts are 512 rows each."""
    split = job_of({"stage": 2}, {"expert": 4}).parallelism.experts
    assert (split.library.name, split.kernel, split.capacity_factor) == ("deepspeed-moe", "loop", 1.0)
    assert split.pads_to_capacity
    assert not split.host_waits
    assert job_of({"stage": 2}).parallelism.experts.library == TRANSFORMERS
    assert job_of({"stage": 3, "expert_layer": "autoep"}, {"expert": 8}).parallelism.experts.ranks == 8


def test_a_capacity_is_whole_rows_and_at_least_four() -> None:
    """512 rows are the mean: 1.001 times are 513 rows; 0.001 times are 4."""
    found = job_of({"stage": 2}, {"expert": 4, "capacity_factor": 1.001}).parallelism.experts
    assert found.capacity_factor == pytest.approx(513 / 512)
    small = job_of({"stage": 2}, {"expert": 4, "capacity_factor": 0.001}).parallelism.experts
    assert small.capacity_factor == pytest.approx(4 / 512)


def test_without_dropping_the_fullest_expert_is_the_capacity_and_the_host_reads_it() -> None:
    split = job_of(
        {"stage": 2, "drops_tokens": False}, {"expert": 4, "expert_imbalance": 1.5}
    ).parallelism.experts
    assert (split.capacity_factor, split.host_waits) == (1.5, True)
    listed = (2, 1, 1, 1, 1, 1, 0.5, 0.5)
    split = job_of(
        {"stage": 2, "drops_tokens": False}, {"expert": 4, "expert_imbalance": listed}
    ).parallelism.experts
    assert split.capacity_factor == 2.0


def test_the_exported_file_says_the_same() -> None:
    job = job_of(block={"use_grouped_mm": False})
    made = deepspeed_object(job)
    assert made["expert_parallel"] == {**AUTOEP, "use_grouped_mm": False}
    again = job_of({"config": json.loads(json.dumps(made))})
    assert again.parallelism.experts == job.parallelism.experts
    asked = deepspeed_object(job_of({"stage": 3, "expert_layer": "autoep"}, {"expert": 8}))
    assert asked["expert_parallel"] == {"enabled": True, "autoep_size": 8}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (({"stage": 3}, {"expert": 4}), "found 3 with experts in DeepSpeed's own MoE layer"),
        (({"stage": 2}, {"expert": 3}), "the nearest that does is 2"),
        (({"stage": 2}, {"expert": 4, "expert_tensor": 2}), "the nearest is 1"),
        (({"stage": 2}, {"expert": 8, "tensor": 4}), "do not divide the 16 GPUs"),
        (({"stage": 2}, {"expert": 4, "tensor": 2, "capacity_factor": 1.001}), "513 rows of an expert"),
        (
            ({"stage": 2, "drops_tokens": False}, {"expert": 4, "tensor": 2, "expert_tensor": 2}),
            "expected parallelism.expert_tensor 1",
        ),
        (({"stage": 2, "expert_layer": "autoep"}, {"capacity_factor": 1.5}), "AutoEP drops no tokens"),
        (
            ({"stage": 2, "drops_tokens": False}, {"expert": 4, "capacity_factor": 2}),
            "with strategy.drops_tokens false",
        ),
    ],
)
def test_what_deepspeed_refuses(given: tuple[dict[str, Any], dict[str, Any]], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        job_of(*given)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"zero": {"stage": 3, "zero_hpz_partition_size": 8}, "block": {}},
            "zero_hpz_partition_size: found 8",
        ),
        ({"zero": {"stage": 3, "zero_quantized_gradients": True}, "block": {}}, "zero_quantized_gradients"),
        ({"zero": {"stage": 2, "reduce_scatter": False}, "block": {}}, "reduce_scatter: found false"),
        ({"block": {"expert_tensor_parallel_size": 2}}, "expert_tensor_parallel_size: found 2"),
        ({"block": {"load_balance_coeff": 0.01}}, "load_balance_coeff: found 0.01"),
        ({"block": {"comm_backend": "deepep"}}, "comm_max_tokens_per_rank: found 0"),
        ({"block": {"autoep_sise": 8}}, "autoep_sise"),
        ({"zero": {"stage": 3}, "block": {}, "sequence_parallel_size": 2}, "sequence_parallel_size: found 2"),
    ],
)
def test_what_deepspeed_refuses_in_the_json(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        job_of(**keys)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"block": {"gate_up_impl": "fused"}}, "gate_up_impl: zsim does not simulate 'fused'"),
        ({"block": {"async_split_plan": True}}, "async_split_plan"),
        (
            {"block": {}, "model": "gpt-oss-20b"},
            "does not simulate DeepSpeed.s AutoEP for its family .gpt_oss",
        ),
        (
            {"zero": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "block": {}},
            "offload_optimizer: zsim does not simulate it",
        ),
        ({"block": {}, "use_data_before_expert_parallelism": True}, "use_data_before_expert_parallelism"),
    ],
)
def test_what_zsim_lacks(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NotSimulatedError, match=sentence):
        job_of(**keys)


@pytest.mark.parametrize(
    ("version", "stage", "error", "sentence"),
    [
        ("0.19.2", 2, InputError, "DeepSpeed 0.19.2 refuses AutoTP"),
        ("0.19.5", 3, InputError, "at stage 3, which DeepSpeed 0.19.5 refuses"),
        ("0.19.5", 2, NotSimulatedError, "folds experts' ranks into those of AutoTP"),
        ("0.19.8", 3, NotSimulatedError, "folds experts' ranks into those of AutoTP"),
    ],
)
def test_tensor_parallelism_around_autoep_is_refused_by_release(
    version: str, stage: int, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        job_of({"version": version}, {"tensor": 2}, zero={"stage": stage}, block={})


@pytest.mark.parametrize(
    ("changes", "keys", "sentence"),
    [
        ({"expert": 1}, {}, "and autoep_size 1, which DeepSpeed 0.19.8 refuses"),
        ({}, {"zero": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "and ZeRO's offload"),
        ({"dispatcher": "deepep"}, {}, "and DeepEP, which DeepSpeed 0.19.8 refuses"),
        ({"pipeline": 2}, {"zero": {"stage": 1}}, "and a pipeline, which DeepSpeed 0.19.8 refuses"),
        ({"context": 2}, {}, "and Ulysses, which DeepSpeed 0.19.8 refuses"),
    ],
)
def test_what_cannot_be_folded_is_refused_as_by_deepspeed(
    changes: dict[str, Any], keys: dict[str, Any], sentence: str
) -> None:
    block = {"autoep_size": changes.get("expert", 4), "comm_backend": changes.get("dispatcher", "comm")}
    block |= {"comm_max_tokens_per_rank": 4096} if "dispatcher" in changes else {}
    degrees: dict[str, Any] = {"tensor": 2}
    degrees |= {key: changes[key] for key in ("pipeline", "context") if key in changes}
    with pytest.raises(InputError, match=sentence):
        job_of({"version": "0.19.8"}, degrees, **{"zero": {"stage": 2}, **keys}, block=block)


def test_releases_with_mics_refuse_it_beside_autoep() -> None:
    """It left DeepSpeed with 0.19.7."""
    with pytest.raises(InputError, match="mics_shard_size: found 8 with AutoEP"):
        job_of({"version": "0.19.5"}, zero={"stage": 3, "mics_shard_size": 8}, block={})


def test_releases_without_it_refuse_autoep() -> None:
    """Since 0.19.2; with stage 3 since 0.19.3; DeepSpeed's own layer is simulated as of 0.19.4."""
    with pytest.raises(InputError, match="expert_parallel"):
        job_of({"version": "0.19.1", "expert_layer": "autoep", "stage": 2}, {"expert": 4})
    with pytest.raises(InputError, match="found 3 with AutoEP"):
        job_of({"version": "0.19.2", "expert_layer": "autoep", "stage": 3}, {"expert": 4})
    with pytest.raises(NotSimulatedError, match="product with a mask"):
        job_of({"version": "0.19.3", "stage": 2}, {"expert": 4})


def test_a_sequence_of_fewer_tokens_than_its_ranks_is_refused_before_experts_share_them() -> None:
    """One token on four context-parallel ranks: three would have none, and an expert's mean of rows is 0."""
    data: dict[str, Any] = {"model": "deepseek-v2-lite", "cluster": "dgx-h100", "nodes": 2}
    with pytest.raises(InputError, match=r"found 1, which is cut into 4 equal parts .* that divides is 4"):
        resolve(
            Experiment(
                **data,
                training={"sequence_length": 1, "micro_batch_size": 2},
                parallelism={"context": 4, "expert": 4},
                strategy={"kind": "deepspeed", "stage": 0},
            )
        )
