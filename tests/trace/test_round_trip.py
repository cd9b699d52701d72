"""What zsim writes, read back."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zsim
from tests.expect import there
from zsim.report.breakdown import step_breakdown
from zsim.trace.chrome import write_chrome_trace, write_chrome_traces
from zsim.trace.trace import SpanInfo, SpanInfos, Trace, kind_mask


def deepspeed(stage: int, **zero: Any) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **zero},
    }
    return {"kind": "deepspeed", "config": config}


ON_HOST, ON_DRIVE = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/drive"}
STRATEGIES = {
    "ddp": {"kind": "ddp"},
    "megatron": {"kind": "megatron", "distributed_optimizer": True, "overlap_grad_reduce": True},
    "zero1": deepspeed(1),
    "zero2": deepspeed(2),
    "zero3": deepspeed(3),
    "zero2-host": deepspeed(2, offload_optimizer=ON_HOST),
    "zero3-host": deepspeed(3, offload_optimizer=ON_HOST, offload_param=ON_HOST),
    "zero3-drive": deepspeed(3, offload_optimizer=ON_DRIVE, offload_param=ON_DRIVE),
    "fsdp1": {"kind": "fsdp1"},
    "fsdp2": {"kind": "fsdp2"},
}


@pytest.fixture(
    scope="module",
    params=[
        {"strategy": {"kind": "fsdp2", "replicate": 2}, "nodes": 2},
        {"strategy": deepspeed(3, offload_optimizer=ON_HOST), "nodes": 1},
    ],
    ids=["hsdp", "offload"],
)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    """A simulated trace, and what its files hold."""
    training = {"sequence_length": 256}
    experiment = zsim.Experiment(model="gpt2", cluster="dgx-h100", training=training, **request.param)
    simulated = zsim.simulate(experiment).trace
    folder = tmp_path_factory.mktemp("export")
    write_chrome_traces(simulated, folder)
    return simulated, zsim.read_trace(folder)


def rows(trace: Trace) -> Counter[tuple[Any, ...]]:
    """All of a span but its dtype, which only collectives write; times in whole nanoseconds."""
    return Counter(
        (
            i.name, i.kind, i.stream, i.bytes, i.group and i.dtype, i.group, i.group_size, i.phase, i.module,
            i.flops, round(i.hbm_bytes), round(start * 1e9), round(end * 1e9),
        )
        for _, i, start, end in trace.rows()
    )  # fmt: skip


def test_every_span_comes_back(both: tuple[Trace, Trace]) -> None:
    simulated, read = both
    assert rows(read) == rows(simulated)
    assert read.step_seconds == pytest.approx(simulated.step_seconds, abs=1e-9)
    assert read.metadata["groups"] == simulated.metadata["groups"]
    assert read.world_size == simulated.world_size


def test_what_the_host_launched_and_waited_for_comes_back(both: tuple[Trace, Trace]) -> None:
    simulated, read = both
    on_gpu = np.array([info.kind not in ("cpu", "host", "nvme_read", "nvme_write") for info in read.infos])
    known = np.sort(read.issue_seconds[on_gpu[read.info_indices]])
    on_gpu = np.array(
        [info.kind not in ("cpu", "host", "nvme_read", "nvme_write") for info in simulated.infos]
    )
    issued = np.sort(simulated.issue_seconds[on_gpu[simulated.info_indices]])
    assert known == pytest.approx(issued, abs=1e-9)
    assert len(read.host_blocks) == len(simulated.host_blocks)


def peaks_and_ends(trace: Trace) -> dict[tuple[str, str], tuple[int, int]]:
    """Of each category and of the sum, per device, as allocated one after the other."""
    events = there(trace.memory)
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for device in sorted(set(events.devices)):
        own = np.array([on == device for on in events.devices])
        for category in [*sorted(set(events.categories)), "total"]:
            is_in = own & np.array([category in (name, "total") for name in events.categories])
            levels = np.cumsum(events.deltas[is_in])
            found[device, category] = int(levels.max(initial=0)), int(levels[-1:].sum())
    return {key: value for key, value in found.items() if any(value)}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_trace_of_a_run_is_the_same_as_the_run_and_has_its_peaks_to_the_byte(
    name: str, tmp_path: Path
) -> None:
    """With checkpointing: much is allocated and freed within one instant there."""
    training = {"sequence_length": 256, "activation_checkpointing": "full"}
    experiment = zsim.Experiment(
        model="gpt2", cluster="dgx-h100", nodes=2, training=training, strategy=STRATEGIES[name]
    )
    simulated = zsim.simulate(experiment).trace
    read = zsim.read_trace(write_chrome_trace(simulated, tmp_path / "trace.json.gz"))
    comparison = zsim.compare(simulated, read)
    assert (comparison.verdict, comparison.differences) == ("pass", ())
    assert peaks_and_ends(read) == peaks_and_ends(simulated)


def test_where_an_allocator_that_runs_short_held_the_host_up_comes_back_and_is_replayed(
    tmp_path: Path,
) -> None:
    """The step of ZeRO-3 of llama-3-70b on 128 GPUs, which runs short."""
    short = zsim.Experiment(
        model="llama-3-70b",
        cluster="dgx-h100",
        nodes=16,
        training={"sequence_length": 8192, "activation_checkpointing": "full"},
        strategy={"kind": "deepspeed", "stage": 3},
    )
    simulated = zsim.simulate(short).trace
    parts = step_breakdown(simulated).seconds
    assert parts["allocator"] > 0
    read = zsim.read_trace(write_chrome_trace(simulated, tmp_path / "trace.json.gz"))
    assert step_breakdown(read.typical_step()).seconds == pytest.approx(parts, abs=1e-6)
    again = zsim.replay(read)
    for side in again.breakdowns().values():
        assert side == pytest.approx(parts, abs=1e-6)
    comparison = zsim.compare(simulated, read)
    assert (comparison.verdict, comparison.differences) == ("pass", ())
    assert "torch's allocator" in [metric.name for metric in comparison.clock.step]
    (step,) = read.steps
    middle = step.seconds / 2
    late = (
        replace(read, steps=(replace(step, start_seconds=middle),)).select_step(step.number).allocator_blocks
    )
    assert min(start for _, start, _ in late) >= 0
    assert sum(end - start for _, start, end in late) == pytest.approx(
        sum(end - max(start, middle) for _, start, end in read.allocator_blocks if end > middle)
    )


# -- The distinct ops of a trace, and what is derived from them once ---------------------------------------


INFOS = SpanInfos([SpanInfo("mm", "compute", "compute"), SpanInfo("gather", "all_gather", "nccl")])


def test_what_is_derived_from_ops_is_derived_once() -> None:
    gathers = INFOS.memoize(kind_mask, frozenset({"all_gather"}))
    assert gathers.tolist() == [False, True]
    assert INFOS.memoize(kind_mask, frozenset({"all_gather"})) is gathers


def test_ops_are_sent_to_other_processes_without_what_was_derived() -> None:
    INFOS.memoize(kind_mask, frozenset({"compute"}))
    sent = pickle.loads(pickle.dumps(INFOS))
    assert sent == INFOS
    assert type(sent) is SpanInfos
    assert not sent._derived
