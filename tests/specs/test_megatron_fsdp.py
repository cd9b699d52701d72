"""Megatron-FSDP and the precision-aware optimizer in an experiment: resolved, refused, read from flags."""

from __future__ import annotations

from typing import Any

import pytest

from tests.expect import of_kind
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.frameworks.megatron.settings.fsdp import MegatronFsdp
from zsim.frameworks.megatron.settings.precision_aware import PrecisionAware
from zsim.programs.megatron_lm.read import read_megatron
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve

SHARDED = {"fsdp_sharding": "optim_grads_params"}


def job(strategy: dict[str, Any], **tables: Any) -> Job:
    data: dict[str, Any] = {"model": "llama-3-8b", "cluster": "dgx-h100", "nodes": 2, **tables}
    data["strategy"] = {"kind": "megatron", "distributed_optimizer": True, **strategy}
    return resolve(build_experiment(data, {}, origin="test"))


def fsdp(strategy: dict[str, Any], **tables: Any) -> MegatronFsdp:
    found = of_kind(job(strategy, **tables).strategy, MegatronConfig).fsdp
    assert found is not None
    return found


def states(strategy: dict[str, Any], **tables: Any) -> PrecisionAware:
    found = of_kind(
        job({"precision_aware_optimizer": True, **strategy}, **tables).strategy, MegatronConfig
    ).precision_aware
    assert found is not None
    return found


def test_sharded_parameters_overlap_in_any_case() -> None:
    """But embedding, last norm and head are buckets only where --overlap-grad-reduce is given."""
    found = fsdp(SHARDED)
    assert (found.overlaps_gradients, found.overlaps_parameters, found.bucket_size) == (True, True, None)
    assert fsdp({**SHARDED, "overlap_grad_reduce": True}).bucket_size == 40_000_000


def test_its_streams_keep_their_queues_beside_tensor_parallelism() -> None:
    """Megatron asserts one connection beside tensor parallelism, and that there are more with its FSDP."""
    split = {"tensor": 2, "sequence_parallel": True}
    assert job({}, parallelism=split).training.device_max_connections == 1
    assert job(SHARDED, parallelism=split).training.device_max_connections == 8


@pytest.mark.parametrize(
    ("strategy", "tables", "message"),
    [
        ({**SHARDED, "version": "0.12.0"}, {}, "a strategy.version from '0.13.0' on"),
        ({**SHARDED, "distributed_optimizer": False}, {}, "expected distributed_optimizer = true"),
        ({**SHARDED, "precision_aware_optimizer": True}, {}, "no gradient reaches it"),
        ({"fsdp_sharding": "no_shard"}, {}, "expected overlap_grad_reduce = true"),
        ({**SHARDED, "optimizer_instances": 2}, {}, "never sums over the instances"),
        ({**SHARDED, "fsdp_outer_sharding": "optim"}, {}, "optimizer_instances above 1"),
        ({"fsdp_unit_size": 1000}, {}, "expected fsdp_sharding as well"),
        ({"gradient_reduce_div_fusion": False}, {}, "belongs to Megatron-FSDP"),
        (SHARDED, {"training": {"device_max_connections": 1}}, "expected 8, the default"),
        (
            {"fsdp_sharding": "optim", "overlap_grad_reduce": True},
            {"parallelism": {"pipeline": 2}, "training": {"gradient_accumulation_steps": 4}},
            "never see a last micro-batch",
        ),
        (
            {**SHARDED, "optimizer_instances": 2, "overlap_grad_reduce": True},
            {"model": "mixtral-8x7b", "parallelism": {"expert": 4}},
            "has no group; expected 1, or version '0.17.0'",
        ),
    ],
)
def test_what_cannot_be_is_refused(strategy: dict[str, Any], tables: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job(strategy, **tables)


def test_a_graph_of_the_step_is_not_simulated() -> None:
    with pytest.raises(
        NotSimulatedError, match=r"cuda_graph: found true with fsdp_sharding = .*, beside which zsim does not"
    ):
        job({**SHARDED, "cuda_graph": True})


def test_fp32_masters_of_bf16_weights_are_their_remainders() -> None:
    """From core 0.13 on; fp8 weights have none, and with other scales than delayed the masters are
    Megatron's."""
    assert states({}).keeps_remainders
    assert not states({"version": "0.12.0"}).keeps_remainders
    assert not states({"main_params_dtype": "fp16"}).keeps_remainders
    fp8 = {"precision": "fp8", "fp8_recipe": "current"}
    assert not states({}, training=fp8).has_masters
    assert states({}, training={**fp8, "fp8_recipe": "delayed"}).keeps_remainders


@pytest.mark.parametrize(
    ("strategy", "tables", "message"),
    [
        ({"version": "0.10.0"}, {}, "a strategy.version from '0.11.0' on"),
        (
            {"distributed_optimizer": False},
            {},
            "beside which alone Megatron has it; expected distributed_optimizer = true",
        ),
        ({"main_grads_dtype": "bf16"}, {}, "expected grad_reduce_dtype = 'bf16'"),
        ({}, {"training": {"optimizer": "sgd"}}, "expected 'adamw'"),
        (
            {"precision_aware_optimizer": False, "exp_avg_dtype": "fp8"},
            {},
            "without precision_aware_optimizer, which Megatron refuses",
        ),
    ],
)
def test_what_its_optimizer_cannot_be_is_refused(
    strategy: dict[str, Any], tables: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        job({"precision_aware_optimizer": True, **strategy}, **tables)


def test_flags_are_its_settings() -> None:
    """User buffers come with a double buffer; the later releases' types of gradients are the reduction's."""
    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
        "--max-position-embeddings 64 --micro-batch-size 1 --vocab-size 128 --bf16 "
        "--use-distributed-optimizer --use-megatron-fsdp "
        "--data-parallel-sharding-strategy optim_grads_params --use-nccl-ub --create-all-gather-group "
        "--suggested-communication-unit-size 800000000 --megatron-fsdp-main-grads-dtype bf16"
    )
    says = read_megatron(flags.split()).settings
    assert {key.removeprefix("strategy."): value for key, value in says.items() if "fsdp" in key} == {
        "fsdp_sharding": "optim_grads_params",
        "fsdp_double_buffer": True,
        "fsdp_gather_group": True,
        "fsdp_unit_size": 800_000_000,
    }
    assert says["strategy.grad_reduce_dtype"] == "bf16"
