"""Threads and bytes of optimizers on the CPU, by the launcher and by the type of the weights."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.plan.make import make_plan
from zsim.plan.ops import HostWork
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

FSDP1 = {"kind": "fsdp1", "cpu_offload": True}


def job(
    strategy: dict[str, Any], gpus: int = 8, offload: dict[str, Any] | None = None, **training: Any
) -> Job:
    cluster = "dgx-a100-80gb" if offload is None else {"extends": "dgx-a100-80gb", "offload": offload}
    tables = {"micro_batch_size": 1, "sequence_length": 512, **training}
    return resolve(Experiment(model="gpt2", cluster=cluster, gpus=gpus, training=tables, strategy=strategy))


def update_of(found: Job) -> HostWork:
    works = make_plan(found).unique_work()
    (update,) = (work for work in works if isinstance(work, HostWork) and work.kind == "optimizer")
    return update


@pytest.mark.parametrize(("dtype", "bytes_of_element"), [("fp32", 28), ("bf16", 14)])
def test_fsdp1_updates_weights_and_states_of_the_type_that_is_stored(
    dtype: str, bytes_of_element: int
) -> None:
    """Four reads and three writes of every element."""
    update = update_of(job(FSDP1, stored_dtype=dtype))
    assert update.bytes == bytes_of_element * update.numel


def test_torchrun_gives_a_rank_one_thread_where_several_run_on_a_node() -> None:
    several, alone = job(FSDP1), job(FSDP1, gpus=1)
    assert several.cluster.offload.threads_per_rank == 1
    assert [note for note in several.notes if "OMP_NUM_THREADS" in note]
    assert alone.cluster.offload.threads_per_rank is None
    assert not [note for note in alone.notes if "OMP_NUM_THREADS" in note]


def test_threads_that_the_cluster_says_are_kept() -> None:
    found = job(FSDP1, offload={"threads_per_rank": 16})
    assert found.cluster.offload.threads_per_rank == 16
    assert not [note for note in found.notes if "OMP_NUM_THREADS" in note]


def test_deepspeeds_launcher_leaves_all_cores() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    found = job({"kind": "deepspeed", "config": {"bf16": {"enabled": True}, "zero_optimization": zero}})
    assert found.cluster.offload.threads_per_rank is None


def test_a_step_without_offloading_says_nothing_of_threads() -> None:
    found = job({"kind": "fsdp1"})
    assert found.cluster.offload.threads_per_rank is None
    assert not [note for note in found.notes if "OMP_NUM_THREADS" in note]
