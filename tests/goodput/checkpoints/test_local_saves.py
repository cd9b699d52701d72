"""Copies in a peer's memory and on the node's drives, with a plan and without."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.goodput.checkpoints.test_cost import FAST, FREE, INSTANT, QUIET, cost, job_of
from zsim.goodput.checkpoints.cost import cost_of
from zsim.goodput.checkpoints.machine import SavingMachine
from zsim.goodput.checkpoints.saved import SavedFiles, saved_files
from zsim.goodput.scenario import Checkpoint
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import load_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.run.checkpoint import TWO_TIERS, CheckpointMode, CheckpointTable

LLAMA = Path(__file__).parents[3] / "validation" / "published" / "runs" / "llama-3-405b.toml"
PLANS = INSTANT.model_copy(update={"read_item": 1e-6, "plan_item": 1e-3, "commit_item": 1e-3})
SLOW = FREE.model_copy(update={"planning": PLANS})


@cache
def megatron() -> Job:
    return job_of("megatron", distributed_optimizer=True)


@cache
def llama() -> Job:
    return resolve(load_experiment(LLAMA))


@cache
def llama_files() -> SavedFiles:
    return saved_files(llama())


def llama_save(mode: CheckpointMode, *, is_constant: bool = False) -> Checkpoint:
    table = CheckpointTable(mode=mode, plan_caching=is_constant)
    return cost_of(llama(), llama_files(), table, FAST, QUIET)


@pytest.mark.parametrize("mode", TWO_TIERS)
def test_a_local_save_of_llama_3_405b_waits_for_the_shapes_of_all_ranks_and_for_no_plan(
    mode: CheckpointMode,
) -> None:
    """1,468,912 shapes of 16,384 ranks that every rank gets, at 23 us on a core 1.25 times as slow: 42.2 s;
    0.81 GB at 6 GB/s and the states of 48 parameters: 0.14 s, which is all where the structure is constant.
    """
    assert llama_save(mode).blocking_seconds == pytest.approx(42.4, abs=0.3)
    assert llama_save(mode, is_constant=True).blocking_seconds == pytest.approx(0.144, abs=0.005)
    assert llama_save("async").blocking_seconds == pytest.approx(98.0, abs=0.5)


@pytest.mark.parametrize("mode", TWO_TIERS)
def test_megatron_neither_plans_nor_commits_a_local_save(mode: CheckpointMode) -> None:
    """1 us for each shape of 64 ranks, and nothing of a plan or `.metadata` at 1 ms an item."""
    saved = saved_files(megatron())
    waits = cost({"mode": mode}, job=megatron(), rates=SLOW).blocking_seconds
    free = cost({"mode": mode}, job=megatron()).blocking_seconds
    assert waits - free == pytest.approx(saved.checked_items * 1e-6, rel=1e-6)
    kept = {"mode": mode, "plan_caching": True}
    assert cost(kept, job=megatron(), rates=SLOW).blocking_seconds == pytest.approx(free)
    apart = cost({"mode": mode}, job=megatron(), rates=SLOW).durable_seconds
    assert apart < cost({"mode": mode}, job=megatron()).durable_seconds + 2 * saved.checked_items * 1e-6


def test_a_save_to_the_store_is_planned_and_committed_while_training_waits() -> None:
    saved = saved_files(megatron())
    found = cost({"mode": "async"}, job=megatron(), rates=SLOW).blocking_seconds
    free = cost({"mode": "async"}, job=megatron()).blocking_seconds
    shapes = (saved.checked_items + saved.items) * 1e-6
    assert found - free == pytest.approx(shapes + 2e-3 * saved.chunks, rel=1e-6)


def test_dcp_plans_a_local_save_as_any_other() -> None:
    """torch's planner runs in every save."""
    plain, table = job_of(wrapping="transformer_blocks"), {"mode": "local-then-remote"}
    saved = saved_files(plain)
    late = cost(table, job=plain, rates=SLOW).durable_seconds - cost(table, job=plain).durable_seconds
    assert late == pytest.approx(saved.items * (1e-3 + 1e-6) + saved.chunks * 1e-3, rel=1e-6)


@pytest.mark.parametrize("mode", TWO_TIERS)
def test_a_local_copy_is_read_in_parts_that_ranks_give_to_each_other(mode: CheckpointMode) -> None:
    """8.03 billion parameters of 2 bytes on each of 8 ranks of a node, of which a rank has 1/64: 63/64 of
    128.5 GB come over the cards. All shapes are checked, at 1 us; nothing is planned, no `.metadata` read."""
    saved, job = saved_files(megatron()), megatron()
    plans = INSTANT.model_copy(update={"read_item": 1e-6, "load_item": 1.0, "metadata_item": 1.0})
    rates = FREE.model_copy(update={"planning": plans})
    machine = SavingMachine(job, rates)
    found = cost({"mode": mode}, job=job, rates=rates).load_seconds
    peers = 8 * 2 * 8_030_261_248 * 63 / 64 / machine.nic_bytes_per_second
    copied = machine.copy_seconds(saved.staged, is_pinned=mode == "in-memory")
    drives = machine.drive_bytes_per_second()
    assert drives is not None
    node = float(np.bincount(machine.node_of, weights=saved.staged).max())
    read = 0.0 if mode == "in-memory" else node / drives[1]
    assert found == pytest.approx(peers + copied + read + saved.checked_items * 1e-6, rel=0.01)


def test_metadata_is_no_archive() -> None:
    """Rank 0 of Megatron writes 280 bytes of `.metadata` for each shard, which no torch.save packs: its
    archives take as long as those of the rank beside it."""
    saved = saved_files(megatron())
    rates = FREE.model_copy(update={"archive_seconds": 1.0})
    free = cost({}, job=megatron()).durable_seconds
    archives = cost({}, job=megatron(), rates=rates).durable_seconds - free
    most = max(file.overhead for file in saved.files if file.name.startswith("__")) * 2 / 1577
    assert archives == pytest.approx(most, rel=0.2)
    assert saved.metadata_bytes()[0] == 280 * saved.chunks
    assert not saved.metadata_bytes()[1:].any()
    lengthened = replace(saved, files=(*saved.files, saved.files[1]._replace(overhead=10**9)))
    table = CheckpointTable(mode="in-memory")
    same = cost_of(megatron(), lengthened, table, FAST, QUIET, FREE)
    assert same.durable_seconds == cost_of(megatron(), saved, table, FAST, QUIET, FREE).durable_seconds
    assert np.array_equal(
        lengthened.archived_bytes() - lengthened.metadata_bytes(),
        saved.archived_bytes() - saved.metadata_bytes(),
    )
