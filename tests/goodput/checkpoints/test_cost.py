"""Seconds and memory of saves, against closed forms."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

import zsim
from zsim.engine.micro_batches import simulate_step
from zsim.errors import InputError, NotSimulatedError
from zsim.goodput.checkpoints.cost import checkpoint_of, communicator_seconds, cost_of, startup_cost
from zsim.goodput.checkpoints.machine import (
    OverlappedStep,
    PlanningRates,
    SavingMachine,
    SavingRates,
    StoreLimits,
    file_seconds,
    overlapped_step,
    read_limits,
    saving_rates,
    starting_rates,
    transfer_seconds,
    write_limits,
)
from zsim.goodput.checkpoints.saved import saved_files
from zsim.goodput.scenario import Checkpoint
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.run.checkpoint import CheckpointMode, CheckpointTable
from zsim.specs.experiment.run.run import StorageTable

REPOSITORY = Path(__file__).parents[3]
INFINITE = float("inf")
QUIET = OverlappedStep(seconds=1.0, copying_seconds=0.9, host_fraction=0.2, host_bytes=0)
# Nothing but what a test names takes time.
INSTANT = PlanningRates(
    read_item="0 s", plan_item="0 s", answer_item="0 s", commit_item="0 s", load_item="0 s",
    metadata_item="0 s",
)  # fmt: skip
FREE = SavingRates(
    archive_bandwidth="1000000 GB/s", unarchive_bandwidth="1000000 GB/s", archive_seconds="0 s",
    unarchive_seconds="0 s", state_dict_seconds="0 s", staging_seconds="0 s",
    own_load_plan_seconds_per_item="0 s",
    file_bandwidth="1000000 GB/s", planning=INSTANT, planning_uncollected=INSTANT,
    planning_wait="0 s", archiving_wait="0 s", copy_bandwidth="1000000 GB/s", source="a test",
)  # fmt: skip
FAST = StorageTable(write_bandwidth="1000000 GB/s")


@cache
def job_of(kind: str = "fsdp2", nodes: int = 8, **keys: Any) -> Job:
    strategy = {"kind": kind, **keys}
    return resolve(zsim.Experiment(model="llama-3-8b", cluster="dgx-h100", nodes=nodes, strategy=strategy))


def cost(
    table: dict[str, Any],
    storage: StorageTable = FAST,
    *,
    job: Job | None = None,
    step: OverlappedStep = QUIET,
    rates: SavingRates = FREE,
) -> Checkpoint:
    job = job or job_of()
    checked = CheckpointTable(**table)
    saved = saved_files(job, checked)
    return cost_of(job, saved, checked, storage, step, rates)


# -- the store -------------------------------------------------------------------------------------------


def test_a_lone_large_writer_has_the_store_to_itself_at_the_end() -> None:
    """Ten ranks of 1 GB and one of 11 GB share 10 GB/s, each at most 2: all get 10/11 until 1.1 s, when ten
    have ended; the last has 10 GB left and writes 2 GB/s: 6.1 s."""
    amounts = np.array([1_000_000_000] * 10 + [11_000_000_000])
    limits = StoreLimits(2e9, INFINITE, 10e9)
    assert transfer_seconds(amounts, np.zeros(11, dtype=np.int64), limits) == pytest.approx(6.1)


def test_many_amounts_are_rounded_up_within_classes() -> None:
    """1 to 199 GB and 1,000 GB at 10 GB/s in all are 2,090 s. Of 64 classes each is 15.6 GB wide: none of the
    199 is rounded up by more, and by half as much on average; the large one stands alone.
    """
    amounts = np.array([*range(1, 200), 1000]) * 10**9
    seconds = transfer_seconds(amounts, np.zeros(200, dtype=np.int64), StoreLimits(INFINITE, INFINITE, 10e9))
    assert 2090.0 <= seconds <= 2090.0 + 199 * 15.6 / 2 / 10 * 1.05


def test_a_full_node_is_slower_than_one_with_few_writers() -> None:
    """Two nodes of 4 GB/s; one has four ranks of 1 GB: 1 s; the other one rank of 2 GB: half a second."""
    amounts, nodes = np.array([10**9] * 4 + [2 * 10**9]), np.array([0, 0, 0, 0, 1])
    assert transfer_seconds(amounts, nodes, StoreLimits(INFINITE, 4e9, INFINITE)) == pytest.approx(1.0)
    assert transfer_seconds(amounts, nodes, StoreLimits(1e9, 4e9, INFINITE)) == pytest.approx(2.0)


def test_nothing_to_write_takes_no_time() -> None:
    assert (
        transfer_seconds(np.zeros(3, dtype=np.int64), np.zeros(3, dtype=np.int64), StoreLimits(1, 1, 1)) == 0
    )


def test_a_synchronous_save_takes_as_long_as_its_store() -> None:
    """96.4 GB from 8 nodes of 2 GB/s: 6.02 s; the step waits for all of it."""
    found = cost({"mode": "sync"}, StorageTable(write_bandwidth_per_node="2 GB/s"))
    assert found.bytes == pytest.approx(12 * 8_030_261_248, rel=2e-3)
    assert found.blocking_seconds == pytest.approx(found.bytes / 16e9, rel=0.01)
    assert found.durable_seconds == found.blocking_seconds
    assert (found.slowdown_seconds, found.host_bytes_per_node) == (0.0, 0)


def test_efficiency_is_of_what_all_nodes_reach_together() -> None:
    store = StorageTable(write_bandwidth="10 GB/s", efficiency=0.2)
    assert cost({}, store).durable_seconds == pytest.approx(96.46e9 / 2e9, rel=0.01)


def test_without_a_stated_rate_the_cards_limit_a_node() -> None:
    """8 cards of 400 Gb/s a node."""
    job = job_of()
    cards = SavingMachine(job, FREE).nic_bytes_per_second
    assert cards == pytest.approx(8 * 50e9 * job.cluster.nic.efficiency)
    assert cost({}).durable_seconds == pytest.approx(96.46e9 / 8 / cards, rel=0.02)


def test_a_rate_per_writer_is_of_the_whole_path() -> None:
    """1.507 GB per rank at 0.5 GB/s, archives included."""
    store = StorageTable(write_bandwidth_per_writer="0.5 GB/s")
    slow = FREE.model_copy(update={"archive_bandwidth": 1e9})
    assert cost({}, store, rates=slow).durable_seconds == pytest.approx(1.507e9 / 0.5e9, rel=0.01)
    assert cost({"threads": 2}, store, rates=slow).durable_seconds == pytest.approx(
        1.507 + 1.507 / 6, rel=0.02
    )


def test_archives_come_before_the_store() -> None:
    slow = FREE.model_copy(update={"archive_bandwidth": 1e9})
    store = StorageTable(write_bandwidth_per_node="2 GB/s")
    assert cost({}, store, rates=slow).durable_seconds == pytest.approx(6.03 + 1.507, rel=0.01)


def test_files_cost_the_store_their_making() -> None:
    """64 ranks' files and .metadata, 10 a second: 6.5 s; two a rank: 12.9 s, and
    copies that are not ahead of two threads."""
    store = StorageTable(write_bandwidth="1000000 GB/s", metadata_per_second=10)
    assert cost({}, store).durable_seconds == pytest.approx(6.5, abs=0.05)
    assert cost({"threads": 2}, store).durable_seconds == pytest.approx(12.9 + 1.507 / 6, abs=0.06)


# -- planning, staging ---------------------------------------------------------------------------------


def planning(**seconds: float) -> SavingRates:
    """Where only parts of planning take time, in torchtitan's training process."""
    return FREE.model_copy(update={"planning_uncollected": INSTANT.model_copy(update=seconds)})


def test_the_planner_goes_through_every_item_of_every_rank() -> None:
    """291 parameters, each with two moments and a counter, and 12 values of the group, on 64 ranks: 1 us for
    each of 75,264; kept plans cost nothing."""
    rates = planning(read_item=3e-7, plan_item=5e-7, answer_item=2e-7)
    free = cost({}).durable_seconds
    assert cost({}, rates=rates).durable_seconds - free == pytest.approx(64 * (4 * 291 + 12) * 1e-6, rel=1e-6)
    assert cost({"plan_caching": True}, rates=rates).durable_seconds == free


def test_a_load_is_not_planned_but_sent_around_and_every_rank_reads_all_metadata() -> None:
    """75,264 items of 64 ranks, none of which is planned: 1 us each to come in and go out; 2 us for each of
    the parts that 1,176 names of a rank's plan have without copies: of 64 ranks where rows suffice."""
    free = cost({}).load_seconds
    assert cost({}, rates=planning(plan_item=1.0, read_item=1.0)).load_seconds == free
    sent = cost({}, rates=planning(load_item=1e-6)).load_seconds - free
    assert sent == pytest.approx(64 * (4 * 291 + 12) * 1e-6, rel=1e-6)
    read = cost({}, rates=planning(metadata_item=2e-6)).load_seconds - free
    assert read == pytest.approx((64 * 3 * 291 + 291 + 12) * 2e-6, rel=1e-6)


def test_a_writing_process_looks_for_cycles_while_it_plans() -> None:
    """torchtitan turns that off in its own; any other trainer has it on."""
    slow = FREE.model_copy(update={"planning": INSTANT.model_copy(update={"plan_item": 1e-6})})
    assert cost({}, rates=slow).durable_seconds == cost({}).durable_seconds
    table = {"mode": "async", "writer": "process"}
    added = cost(table, rates=slow).durable_seconds - cost(table).durable_seconds
    assert added == pytest.approx(64 * (4 * 291 + 12) * 1e-6, rel=1e-6)
    plain = job_of(wrapping="transformer_blocks")
    assert cost({}, job=plain, rates=slow).durable_seconds > cost({}, job=plain).durable_seconds


def test_megatron_plans_what_has_no_copies_and_waits_for_it() -> None:
    """The plans of 64 ranks have every parameter once and each rank's pieces of the optimizer's; training
    waits for them in an asynchronous save too, unless the structure is taken as constant."""
    job = job_of("megatron", distributed_optimizer=True)
    saved = saved_files(job)
    assert 3 * 291 + 291 <= saved.items == saved.chunks < saved.read_items
    assert saved.read_items == saved.chunks + 63 * 291
    rates = FREE.model_copy(update={"planning": INSTANT.model_copy(update={"plan_item": 1e-3})})
    table = {"mode": "async"}
    waits = cost(table, job=job, rates=rates).blocking_seconds - cost(table, job=job).blocking_seconds
    assert waits == pytest.approx(saved.chunks * 1e-3, rel=1e-6)
    kept = {**table, "plan_caching": True}
    assert cost(kept, job=job, rates=rates).blocking_seconds == cost(kept, job=job).blocking_seconds


def test_pageable_staging_blocks_at_its_rate_and_needs_a_copy_in_host_memory() -> None:
    """1.507 GB per GPU through the driver's buffer; 8 of them on a node."""
    found = cost({"mode": "async", "writer": "process"})
    rate = job_of().cluster.offload.pageable_bandwidth
    assert found.blocking_seconds == pytest.approx(1.5057e9 / rate, rel=0.001)
    assert found.host_bytes_per_node == pytest.approx(12 * 8_030_261_248 / 8, rel=1e-4)


def test_pinned_staging_hides_behind_forward_and_backward() -> None:
    table = {"mode": "async", "staging": "pinned", "writer": "process"}
    assert cost(table).blocking_seconds == 0.0
    hurried = replace(QUIET, copying_seconds=0.0)
    exposed = cost(table, step=hurried).blocking_seconds
    assert 0.02 < exposed < cost({"mode": "async", "writer": "process"}).blocking_seconds


def test_replicas_stage_as_much_each() -> None:
    """HSDP with 8 replicas: every rank stages an eighth of 96.4 GB, 8 times as much as without."""
    plain = cost({"mode": "async"}).host_bytes_per_node
    assert cost({"mode": "async"}, job=job_of(replicate=8)).host_bytes_per_node == pytest.approx(8 * plain)


def test_a_thread_that_makes_archives_slows_a_busy_host_and_a_process_does_not() -> None:
    """A host that works for 0.8 of a step of 1 s and waits 0.4 ms at each of 2,000 launches takes 1.6 s for
    a step: in 1.507 s of archives 0.942 of the 1.507 steps are made. One that works for 0.2 loses none."""
    rates = FREE.model_copy(update={"archive_bandwidth": 1e9, "archiving_wait": 0.4e-3})
    busy = replace(QUIET, host_fraction=0.8, launches=2000)
    lost = cost({"mode": "async"}, step=busy, rates=rates).slowdown_seconds
    cards = cost({"mode": "async"}, step=replace(busy, host_fraction=0.2), rates=rates).slowdown_seconds
    assert cards < 0.05
    assert lost - cards == pytest.approx(1.507 * (1 - 1 / 1.6), rel=0.01)
    process = {"mode": "async", "writer": "process"}
    assert cost(process, step=busy, rates=rates).slowdown_seconds == cards


def test_a_thread_that_plans_holds_up_every_launch() -> None:
    """75,264 items at 20 us are 1.505 s, in which a step of 1 s takes 0.2 + 2,000 x 1.4 ms = 3 s: two thirds
    are lost. The commit of 56,175 tensors at 10 us, 0.562 s anywhere in a step, outlasts what is queued by
    0.562^2 / 2; at 50 us, 2.81 s, by 2.31 s."""
    planning = INSTANT.model_copy(update={"plan_item": 20e-6, "commit_item": 10e-6})
    rates = FREE.model_copy(update={"planning": planning, "planning_uncollected": planning})
    rates = rates.model_copy(update={"planning_wait": 1.4e-3})
    step = replace(QUIET, launches=2000)
    cards = cost({"mode": "async", "writer": "process"}, step=step, rates=rates).slowdown_seconds
    lost = cost({"mode": "async"}, step=step, rates=rates).slowdown_seconds - cards
    assert lost == pytest.approx((1.505 + 0.5 * 0.562**2) * 2 / 3, rel=0.01)
    planning = planning.model_copy(update={"plan_item": 0.0, "commit_item": 50e-6})
    rates = rates.model_copy(update={"planning": planning, "planning_uncollected": planning})
    lost = cost({"mode": "async"}, step=step, rates=rates).slowdown_seconds - cards
    assert lost == pytest.approx((2.81 - 0.5) * 2 / 3, rel=0.01)


def test_a_slower_core_archives_and_plans_slower_and_waits_as_long() -> None:
    rates, slow = saving_rates(), saving_rates().scale_to_core(1.5)
    assert slow.archive_bandwidth == pytest.approx(rates.archive_bandwidth / 1.5)
    assert slow.staging_seconds == pytest.approx(rates.staging_seconds * 1.5)
    assert slow.planning.read_item == pytest.approx(rates.planning.read_item * 1.5)
    assert slow.planning_wait == rates.planning_wait


def test_cards_that_carry_states_slow_the_collectives_beside_them() -> None:
    """A peer's copies fill the cards while they last, so steps beside them are longer."""
    machine = SavingMachine(job_of(), FREE)
    alone = replace(QUIET, seconds=simulate_step(machine.job).seconds)
    assert machine.step_delay_seconds(0.0, alone) == 0.0
    little, much = (machine.step_delay_seconds(fraction, alone) for fraction in (0.2, 0.8))
    assert 0.0 < little < much
    assert SavingMachine(job_of(nodes=1), FREE).step_delay_seconds(0.8, alone) == 0.0


def test_cards_slow_as_many_steps_as_there_are_while_states_are_stored() -> None:
    """Its ranks' 12.06 GB leave a node at half of its cards' rate. Each of the steps made meanwhile is
    longer by what cards in use to a half take of it.
    """
    job, table = job_of(), {"mode": "async", "writer": "process"}
    machine, node = SavingMachine(job, FREE), 96.46e9 / 8
    step = replace(QUIET, seconds=simulate_step(job).seconds)
    rate = machine.nic_bytes_per_second / 2
    found = cost(table, StorageTable(write_bandwidth=f"{8 * rate} B/s"), step=step).slowdown_seconds
    steps = node / rate / step.seconds
    assert found == pytest.approx(steps * machine.step_delay_seconds(0.5, step), rel=0.02)
    assert found > 0.0
    assert abs(step.seconds - 1) > 0.1  # a step of 1 s would not tell a quotient from a product


def test_a_decoupled_writer_hides_copies_behind_one_forward_and_backward() -> None:
    """ZeRO-1's rank 0 copies 16.06 GB of parameters and its partition, 12 bytes of each of 8.03e9 / 64, as
    pageable memory takes it, and commits in less than 0.1 s. What the next forward and backward do not cover
    waits.
    """
    job = job_of("deepspeed", stage=1)
    copied = (16.06e9 + 12 * 8.03e9 / 64) / job.cluster.offload.pageable_bandwidth
    for hidden in (0.0, 1.0):
        step = replace(QUIET, seconds=2.0, copying_seconds=hidden)
        found = cost({"mode": "async", "format": "deepspeed"}, job=job, step=step)
        assert found.blocking_seconds == pytest.approx(copied - hidden, abs=0.1)


def test_a_save_that_is_not_staged_copies_no_item() -> None:
    """torch stages states item by item, a second each here, before it writes behind the step."""
    rates = FREE.model_copy(update={"staging_seconds": 1.0})
    assert cost({"mode": "sync"}, rates=rates) == cost({"mode": "sync"})
    assert cost({"mode": "async"}, rates=rates).blocking_seconds > 100.0


# -- states in host memory -----------------------------------------------------------------------------------


def test_states_that_are_offloaded_are_staged_in_host_memory() -> None:
    """96.4 GB on 64 ranks: 1.507 GB a rank at the driver's 6 GB/s from GPUs, at 10 GB/s of a host's thread
    where FSDP2's states live there already; synchronous saves copy nothing then."""
    rates = FREE.model_copy(update={"copy_bandwidth": 10e9})
    each = 96.46e9 / 64
    on_gpu, on_host = job_of(), job_of(cpu_offload=True)
    pageable = on_gpu.cluster.offload.pageable_bandwidth
    table = {"mode": "async"}
    from_gpu, found = cost(table, rates=rates), cost(table, job=on_host, rates=rates)
    assert from_gpu.blocking_seconds == pytest.approx(each / pageable, rel=0.01)
    assert found.blocking_seconds == pytest.approx(each / 10e9, rel=0.01)
    saved = from_gpu.load_seconds - found.load_seconds
    assert saved == pytest.approx(each / pageable - each / 10e9, rel=0.01)
    assert found.host_bytes_per_node == from_gpu.host_bytes_per_node


def test_zero_offload_leaves_parameters_on_the_gpu() -> None:
    """ZeRO-2: a partition of masters and moments, 12 bytes of 8e9 / 64, is in host memory; rank 0's 16 GB of
    parameters come over PCIe. In stage 3 `ratio` of the sub-groups are there."""

    def offloaded(stage: int, **more: Any) -> Job:
        zero = {"stage": stage, "offload_optimizer": {"device": "cpu", **more}}
        strategy = {"kind": "deepspeed", "config": {"zero_optimization": zero, "bf16": {"enabled": True},
                    "train_micro_batch_size_per_gpu": 1}}  # fmt: skip
        return resolve(zsim.Experiment(model="llama-3-8b", cluster="dgx-h100", nodes=8, strategy=strategy))

    saved = saved_files(offloaded(2))
    assert saved.on_host is not None
    assert saved.on_host == pytest.approx(np.full(64, 12 * 8_030_261_248 / 64), rel=1e-3)
    assert saved.host_fractions[1] == pytest.approx(1.0)
    assert saved.host_fractions[0] == pytest.approx(12 / 64 / (12 / 64 + 2), rel=1e-3)
    rates = FREE.model_copy(update={"copy_bandwidth": 10e9})
    pcie = offloaded(2).cluster.offload.pageable_bandwidth
    assert cost({}, job=offloaded(2), rates=rates).blocking_seconds == pytest.approx(
        2 * 8_030_261_248 / pcie, rel=0.04
    )
    third = saved_files(offloaded(3, ratio=0.25))
    assert third.on_host is not None
    assert third.on_host.sum() == pytest.approx(0.25 * 12 * 8_030_261_248, rel=1e-2)


# -- tiers -----------------------------------------------------------------------------------------------


def test_a_peers_memory_needs_no_store_and_four_copies() -> None:
    """Own and the peer's, the new ones and the last complete ones."""
    slow = StorageTable(write_bandwidth="1 MB/s")
    found = cost({"mode": "in-memory", "staging": "pinned"}, slow)
    assert found.durable_seconds < 1.0
    assert found.load_seconds < 1.0
    assert found.host_bytes_per_node == pytest.approx(4 * 12 * 8_030_261_248 / 8, rel=1e-3)


def test_a_nodes_drives_take_its_own_states() -> None:
    """Eight drives: 12.06 GB a node at their rate together."""
    drives = SavingMachine(job_of(), FREE).drive_bytes_per_second()
    assert drives is not None
    found = cost({"mode": "local-then-remote", "staging": "pinned"}, StorageTable(write_bandwidth="1 MB/s"))
    staged = found.durable_seconds - 12.06e9 / drives[0]
    assert 0.0 < staged < 0.1
    assert found.load_seconds == pytest.approx(12.05e9 / drives[1] + 1.506e9 / 6e9, rel=0.05)


def test_no_saves_cost_nothing() -> None:
    assert cost({"mode": "none"}) == Checkpoint(0, 0.0, 0.0, 0.0, 0.0, 0)


# -- frameworks ----------------------------------------------------------------------------------------


def test_deepspeeds_first_rank_is_the_last_to_end() -> None:
    """ZeRO-1: rank 0 writes 14/... bytes per parameter alone: 17.6 GB at 1 GB/s, others 1.5 GB."""
    strategy = {"kind": "deepspeed", "stage": 1}
    training = {"precision": "bf16"}
    job = resolve(zsim.Experiment(model="llama-3-8b", cluster="dgx-h100", nodes=8, strategy=strategy,
                                  training=training))  # fmt: skip
    found = cost({}, StorageTable(write_bandwidth_per_writer="1 GB/s"), job=job)
    alone = (2 + 12 / 64) * 8.030e9 / 1e9
    assert found.durable_seconds == pytest.approx(alone, rel=0.2)
    assert found.durable_seconds > alone  # and the copies to the host


def test_one_file_waits_for_one_writer_and_the_gather() -> None:
    found = cost({"format": "full"}, StorageTable(write_bandwidth_per_writer="1 GB/s"))
    assert found.blocking_seconds > 96.4
    sharded = cost({}, StorageTable(write_bandwidth_per_writer="1 GB/s"))
    assert sharded.blocking_seconds < 2.0


def test_every_replica_reads_what_it_needs() -> None:
    """8 replicas read 8 times 96.4 GB of a store of 100 GB/s."""
    store = StorageTable(write_bandwidth="100 GB/s")
    alone, replicas = cost({}, store).load_seconds, cost({}, store, job=job_of(replicate=8)).load_seconds
    assert alone == pytest.approx(0.964 + 1.506e9 / 6e9, rel=0.05)
    assert replicas == pytest.approx(7.71 + 12.05e9 / 6e9, rel=0.05)


# -- errors ----------------------------------------------------------------------------------------------


def test_staging_without_host_memory_is_out_of_memory_by_name() -> None:
    full = replace(QUIET, host_bytes=job_of().cluster.host.memory - 10**9)
    with pytest.raises(InputError, match=r"stages 12 GB in the host memory of a node, and 1 GB of .* out of"):
        cost({"mode": "async"}, step=full)


def test_a_tier_that_nodes_lack_is_an_error() -> None:
    job = job_of()
    bare = replace(job, cluster=job.cluster.model_copy(update={"nvme": None}))
    with pytest.raises(InputError, match="found 'local-then-remote'"):
        cost({"mode": "local-then-remote"}, job=bare)


def test_torch_save_is_not_asynchronous() -> None:
    run = {"steps": 10, "checkpoint": {"mode": "async", "format": "full"}}
    experiment = zsim.Experiment(
        model="llama-3-8b", cluster="dgx-h100", nodes=1, strategy={"kind": "ddp"}, run=run
    )
    result = zsim.simulate(experiment)
    with pytest.raises(InputError, match="found 'async' with format 'full'"):
        checkpoint_of(result.job, result)


# -- the whole ---------------------------------------------------------------------------------------------


def test_a_job_has_the_cost_of_its_tables() -> None:
    """A mode that is given is in place of the table's."""
    run = {"steps": 10, "checkpoint": {"mode": "in-memory"}, "storage": {"write_bandwidth": "240 GB/s"}}
    experiment = zsim.Experiment(
        model="llama-3.2-1b", cluster="dgx-h100", nodes=2, strategy={"kind": "fsdp2"}, run=run
    )
    result = zsim.simulate(experiment)
    near, far = checkpoint_of(result.job, result), checkpoint_of(result.job, result, mode="async")
    assert near.host_bytes_per_node == pytest.approx(4 * far.host_bytes_per_node)
    assert near.durable_seconds < far.durable_seconds
    beside = overlapped_step(result)
    assert 0.0 < beside.host_fraction < 1.0
    assert 0.0 < beside.copying_seconds < beside.seconds
    start = startup_cost(result)
    assert start.process_seconds == starting_rates().process
    assert start.compile_seconds == 0.0


def test_communicators_grow_as_published() -> None:
    """17 s at 16,384 GPUs; 98,000 take 208 s by N^1.4 (about 200 published); few take the least."""
    rates = starting_rates()
    assert communicator_seconds(16_384, rates) == pytest.approx(17.0)
    assert communicator_seconds(98_000, rates) == pytest.approx(208, abs=2)
    assert communicator_seconds(8, rates) == rates.communicator_least
    assert communicator_seconds(1, rates) == 0.0


def test_rates_say_where_they_are_from() -> None:
    assert "traces/checkpoints/clock.json" in saving_rates().source
    assert "2602.00277" in starting_rates().source


def _recorded() -> dict[str, Any]:
    """What was measured with nothing beside it."""
    found: dict[str, Any] = json.loads((REPOSITORY / "traces" / "checkpoints" / "clock.json").read_text())[
        "quiet"
    ]
    return found


def test_saving_takes_what_was_recorded() -> None:
    """The preset has the rates of clock.json to two digits."""
    recorded, rates = _recorded(), saving_rates()
    for name in ("archive", "unarchive", "file", "copy"):
        expected = recorded[f"{name}_bytes_per_second"]
        assert getattr(rates, f"{name}_bandwidth") == pytest.approx(expected, rel=0.04), name
    for name in ("archive_seconds", "unarchive_seconds", "state_dict_seconds", "staging_seconds"):
        assert getattr(rates, name) == pytest.approx(recorded[name], rel=0.04), name
    assert rates.own_load_plan_seconds_per_item == pytest.approx(recorded["own_load_plan_seconds"], rel=0.04)
    beside = recorded["interpreter"]
    for name in ("planning", "archiving"):
        wait = (beside[name] - beside["alone"]) / beside["operators"]
        assert getattr(rates, f"{name}_wait") == pytest.approx(wait, rel=0.04), name


def test_planning_takes_what_was_recorded() -> None:
    """Medians per item of the plans in clock.json, to two digits."""
    plans = _recorded()["plans"]
    parts = {"read_item": ("read",), "plan_item": ("plan",), "answer_item": ("write",),
             "commit_item": ("results_read", "metadata_write"), "load_item": ("load_read", "load_write"),
             "metadata_item": ("metadata_read", "metadata_search")}  # fmt: skip
    for collects, rates in ((True, saving_rates().planning), (False, saving_rates().planning_uncollected)):
        recorded = [plan for plan in plans if plan["collects"] is collects]
        for name, keys in parts.items():
            each = [sum(plan[key] for key in keys) / plan["ranks"] / plan["items"] for plan in recorded]
            assert getattr(rates, name) == pytest.approx(median(each), rel=0.06), name


def swapped_job() -> Job:
    offload = {"device": "nvme", "nvme_path": "/nvme"}
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": offload}, "bf16": {"enabled": True}}
    return resolve(
        zsim.Experiment(
            model="llama-3-8b", cluster="dgx-h100", nodes=2, strategy={"kind": "deepspeed", "config": config},
            training={"precision": "bf16", "micro_batch_size": 1},
        )
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_files_on_drives_are_copied_while_training_waits_at_the_slower_rate(mode: str) -> None:
    """12 bytes per parameter from 2 nodes: to a store of 2 GB/s per node, or out of the drives."""
    job, node = swapped_job(), 12 * 8_030_261_248 / 2
    slow = cost({"mode": mode}, StorageTable(write_bandwidth_per_node="2 GB/s"), job=job)
    assert slow.blocking_seconds == pytest.approx(node / 2e9, rel=0.01)
    nvme = job.cluster.nvme
    assert nvme is not None
    rate = nvme.drives * nvme.efficiency
    fast = cost({"mode": mode}, FAST, job=job)
    assert fast.blocking_seconds == pytest.approx(node / (rate * nvme.read_bandwidth), rel=0.01)
    assert fast.load_seconds == pytest.approx(node / (rate * nvme.write_bandwidth), rel=0.01)
    assert fast.host_bytes_per_node == 0


@pytest.mark.parametrize("mode", ["in-memory", "local-then-remote"])
def test_states_on_drives_have_no_second_tier(mode: CheckpointMode) -> None:
    job = swapped_job()
    with pytest.raises(NotSimulatedError, match="DeepSpeed copies to the store file by file"):
        checkpoint_of(job, zsim.simulate(job.experiment), mode=mode)


def test_a_universal_checkpoint_is_converted_by_one_machine_before_it_is_loaded() -> None:
    """96.4 GB and as much again out of rank 0's states: at 1 GB/s in and out of archives, by 4 and then by 2
    processes; a store that is slower bounds both."""
    job = job_of("deepspeed", stage=1)
    saved = saved_files(job, CheckpointTable(format="universal"))
    size = sum(file.bytes for file in saved.converted)
    assert size == pytest.approx(14 * 8_030_261_248, rel=0.001)
    rates = FREE.model_copy(update={"unarchive_bandwidth": 1e9, "file_bandwidth": 1e9})
    own = cost({"format": "deepspeed"}, job=job, rates=rates)
    found = cost({"format": "universal"}, job=job, rates=rates)
    read = (saved.read.max() - saved_files(job).read.max()) / 1e9
    extra = found.load_seconds - own.load_seconds
    pageable = read * 1e9 / job.cluster.offload.pageable_bandwidth
    assert extra == pytest.approx(2 * size / 1e9 * (1 / 4 + 1 / 2) + read + pageable, rel=0.01)
    slow = cost({"format": "universal"}, StorageTable(write_bandwidth="0.1 GB/s"), job=job)
    assert slow.load_seconds > 4 * size / 0.1e9
    assert found.blocking_seconds == own.blocking_seconds


def test_files_of_an_optimizer_that_was_not_read_are_not_guessed() -> None:
    job = resolve(
        zsim.Experiment(
            model="llama-3-8b",
            cluster="dgx-h100",
            gpus=8,
            strategy={"kind": "megatron"},
            training={"optimizer": "muon"},
        )
    )
    with pytest.raises(NotSimulatedError, match="what is saved of 'muon' is not known, only of adamw"):
        saved_files(job)


# -- What a store gives and takes: limits of writing and of reading, apart from each other -----------------


NODE = 7e9  # bytes per second of a node's cards


def test_reading_is_as_writing_where_nothing_is_said_of_it() -> None:
    """Two threads of 0.5 GB/s each, 3 GB/s a node, a fifth of 40 GB/s in all."""
    table = StorageTable(
        write_bandwidth_per_writer="0.5 GB/s", write_bandwidth_per_node="3 GB/s", write_bandwidth="40 GB/s",
        efficiency=0.2, latency="3 ms", metadata_per_second=100.0,
    )  # fmt: skip
    expected = StoreLimits(1e9, 3e9, 8e9, 0.003, 100.0)
    assert write_limits(table, 2, NODE) == expected
    assert read_limits(table, 2, NODE) == expected


def test_rates_of_reading_are_its_own() -> None:
    table = StorageTable(
        write_bandwidth_per_writer="0.5 GB/s", write_bandwidth_per_node="3 GB/s", write_bandwidth="40 GB/s",
        read_bandwidth_per_reader="0.75 GB/s", read_bandwidth_per_node="5 GB/s", read_bandwidth="60 GB/s",
        efficiency=0.5,
    )  # fmt: skip
    assert write_limits(table, 2, NODE) == StoreLimits(1e9, 3e9, 20e9)
    assert read_limits(table, 2, NODE) == StoreLimits(1.5e9, 5e9, 30e9)


def test_a_rate_of_reading_alone_bounds_reading_alone() -> None:
    table = StorageTable(
        write_bandwidth="10 GB/s", read_bandwidth_per_reader="0.75 GB/s", read_bandwidth_per_node="5 GB/s"
    )
    assert write_limits(table, 1, NODE) == StoreLimits(np.inf, NODE, 10e9)
    assert read_limits(table, 1, NODE) == StoreLimits(0.75e9, 5e9, 10e9)


def test_without_rates_a_nodes_cards_are_the_limit() -> None:
    table = StorageTable(write_bandwidth_per_writer="1 GB/s")
    assert write_limits(table, 4, NODE) == StoreLimits(4e9, NODE, np.inf)
    none = StorageTable(write_bandwidth="1 GB/s")
    assert read_limits(none, 4, NODE) == StoreLimits(np.inf, NODE, 1e9)


def test_files_cost_their_making_by_rank_and_by_all() -> None:
    """3 files of the fullest rank at 10 ms, and 4 in all at 100 a second."""
    limits = StoreLimits(1e9, 1e9, 1e9, 0.01, 100.0)
    assert file_seconds(np.array([3, 1]), limits) == pytest.approx(0.03 + 0.04)
    assert file_seconds(np.array([], dtype=np.int64), limits) == 0.0
    assert file_seconds(np.array([3, 1]), StoreLimits(1e9, 1e9, 1e9)) == 0.0


def test_without_any_limit_bytes_take_no_time() -> None:
    free = StoreLimits(np.inf, np.inf, np.inf)
    assert transfer_seconds(np.array([10**9, 0]), np.array([0, 1]), free) == 0.0
