"""Peaks and the first op that does not fit, on a handful of events."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tests.expect import there
from zsim.plan.builder import PlanBuilder
from zsim.plan.ops import CATEGORIES, Memory, Plan
from zsim.report.memory import Holder, Ledger, holders, memory_peaks, memory_profile
from zsim.report.views.text.sentences import missing_memory
from zsim.study.memory import profile_lines
from zsim.trace.trace import MemoryEvents
from zsim.validated.verdict import Verdict

STEP = [
    (0, 0.0, "gpu", "parameters", 40, "start"),
    (0, 1.0, "gpu", "activations", 30, "forward"),
    (0, 2.0, "gpu", "activations", -30, "backward"),
    (0, 2.0, "gpu", "gradients", 20, "backward"),
    (0, 3.0, "gpu", "buffers", 25, "bucket"),
    (0, 4.0, "gpu", "buffers", -25, "reduce"),
]


def test_each_category_has_its_own_peak_and_the_total_is_the_peak_of_the_sum(
    make_memory: Callable[..., MemoryEvents],
) -> None:
    """Sums after the events: 40, 70, 40, 60, 85, 60. Categories peak at 40, 30, 20, 25: 115 in all."""
    peak = memory_peaks(make_memory(STEP))["gpu"]
    assert peak.total == 85
    assert {name: value for name, value in peak.by_category.items() if value} == {
        "parameters": 40, "activations": 30, "gradients": 20, "buffers": 25,
    }  # fmt: skip
    assert peak.at_total["activations"] == 0
    assert sum(peak.at_total.values()) == 85
    assert peak.seconds == 3.0


def test_events_of_one_instant_count_in_their_order(make_memory: Callable[..., MemoryEvents]) -> None:
    """Freed before allocated, the peak is 30; the other way round it would be 50."""
    events = [(0, 0.0, "gpu", "buffers", 30, "a"), (0, 1.0, "gpu", "buffers", -30, "b")]
    events += [(0, 1.0, "gpu", "gradients", 20, "b")]
    assert memory_peaks(make_memory(events))["gpu"].total == 30


def test_every_category_of_every_device_is_there_and_zero_when_unused(
    make_memory: Callable[..., MemoryEvents],
) -> None:
    peaks = memory_peaks(make_memory(STEP))
    assert set(peaks) == {"gpu", "host", "nvme"}
    assert peaks["nvme"].total == 0
    assert peaks["host"].by_category == dict.fromkeys(CATEGORIES, 0)
    assert memory_peaks(None)["gpu"].total == 0


def test_the_gpu_is_the_fullest_rank(make_memory: Callable[..., MemoryEvents]) -> None:
    events = [(0, 0.0, "gpu", "parameters", 5, "a"), (3, 0.0, "gpu", "parameters", 9, "a")]
    assert memory_peaks(make_memory(events))["gpu"].total == 9


def test_the_host_is_the_node_with_all_its_ranks(make_memory: Callable[..., MemoryEvents]) -> None:
    """Eight ranks like the traced one pin 10 bytes each: 80."""
    events = [(0, 0.0, "host", "optimizer_states", 10, "a")]
    assert memory_peaks(make_memory(events), gpus_per_node=8)["host"].total == 80


def test_ranks_of_different_kinds_share_a_node_as_told(make_memory: Callable[..., MemoryEvents]) -> None:
    """Node one: 2 ranks like rank 0 (10 bytes from 0 to 2); node two: one like rank 0, one like rank 1
    (7 bytes from 1): 20 and 17."""
    events = [
        (0, 0.0, "host", "optimizer_states", 10, "a"),
        (0, 2.0, "host", "optimizer_states", -10, "b"),
        (1, 1.0, "host", "activations", 7, "a"),
    ]
    peaks = memory_peaks(make_memory(events), nodes=[{0: 2}, {0: 1, 1: 1}])
    assert peaks["host"].total == 20
    peaks = memory_peaks(make_memory(events), nodes=[{0: 1, 1: 1}])
    assert peaks["host"].total == 17


def test_a_timeline_never_runs_backwards_and_keeps_the_peak(make_memory: Callable[..., MemoryEvents]) -> None:
    """A free that the stream reaches early is drawn where the order of events puts it."""
    events = make_memory(STEP)
    events.stream_seconds[4] = 0.5
    held = Ledger.of(events).fullest("gpu")
    assert held.stream_seconds.tolist() == [0.0, 1.0, 2.0, 2.0, 2.0, 4.0]
    assert held.totals.tolist() == [40, 70, 40, 60, 85, 60]
    assert np.array_equal(held.levels[-1], [40, 20, 0, 0, 0, 0])


def test_a_job_that_fits_has_no_finding(make_memory: Callable[..., MemoryEvents]) -> None:
    """85 bytes fit into exactly 85; what has no capacity given is unlimited."""
    assert Ledger.of(make_memory(STEP)).first_over_capacity({"gpu": 85, "host": None}) is None


def test_the_first_op_over_capacity_is_named_with_what_is_missing(
    make_memory: Callable[..., MemoryEvents],
) -> None:
    """Capacity 65: at `forward` 70 are held, 5 too many; at the peak of 85 it is 20."""
    finding = there(Ledger.of(make_memory(STEP)).first_over_capacity({"gpu": 65}))
    assert (finding.op, finding.pool, finding.seconds) == ("forward", "gpu", 1.0)
    assert (finding.missing_bytes, finding.peak_missing_bytes) == (5, 20)
    assert (finding.capacity_bytes, finding.least_gpus) == (65, None)


def test_what_lacks_at_the_peak_is_that_of_the_fullest_rank(make_memory: Callable[..., MemoryEvents]) -> None:
    """Rank 3 is the first over 65, by 1 and by 5 at its peak of 70; rank 0 lacks 20 at its peak of 85."""
    events = [*STEP, (3, 0.5, "gpu", "activations", 66, "early"), (3, 3.5, "gpu", "activations", 4, "late")]
    finding = there(Ledger.of(make_memory(events)).first_over_capacity({"gpu": 65}))
    assert (finding.op, finding.rank, finding.missing_bytes) == ("early", 3, 1)
    assert finding.peak_missing_bytes == memory_peaks(make_memory(events))["gpu"].total - 65 == 20


def test_an_op_issued_ahead_of_the_step_is_at_its_start(make_memory: Callable[..., MemoryEvents]) -> None:
    """A host that is 2.3 s ahead issues the first ops of a step while the one before still runs. The GPU is
    over by then already, the host only later in the step."""
    events = [
        (0, -2.3, "gpu", "buffers", 90, "gather"),
        (0, 0.5, "host", "buffers", 90, "swap"),
        (0, 1.0, "gpu", "buffers", -90, "gather"),
    ]
    finding = there(Ledger.of(make_memory(events)).first_over_capacity({"gpu": 80, "host": 80}))
    assert (finding.op, finding.pool, finding.seconds) == ("gather", "gpu", 0.0)
    assert "the first op without room is 'gather', which lacks" in missing_memory(finding)


def test_the_earliest_pool_to_overflow_is_the_finding(make_memory: Callable[..., MemoryEvents]) -> None:
    """The host is over at 0.5, before the GPU at 1."""
    events = [*STEP, (0, 0.5, "host", "optimizer_states", 10, "pin")]
    finding = there(Ledger.of(make_memory(events)).first_over_capacity({"gpu": 65, "host": 9}))
    assert (finding.pool, finding.op, finding.missing_bytes) == ("host", "pin", 1)


# -- Who holds the memory: a hand-made plan whose levels can be added up by eye, and its text --------------


TOO_LARGE, BARELY = Verdict("does not fit", 0.05), Verdict("likely does not fit", 0.45)


def made() -> Plan:
    """Forward keeps 10 and 30 bytes of two blocks, with 5 more for one op; backward gathers 50 for a unit
    while it gives back the blocks; the optimizer takes 8 that belong to nobody. Below lie 100 of parameters.

        forward   100 + 10 + 30 (+ 5)                 = 145, just before 'one'
        backward  100 + 40 + 50                       = 190, just before 'one backward'
        optimizer 100 + 8                             = 108
    """
    builder = PlanBuilder([])
    builder.allocate("activations", 10, owner="layers.0.mlp")
    builder.kernels("zero", ())
    builder.allocate("activations", 30, owner="layers.1.mlp")
    builder.allocate("activations", 5, owner="layers.1.mlp")
    builder.kernels("one", ())
    builder.free("activations", 5, owner="layers.1.mlp")
    builder.phase = "backward"
    builder.allocate("buffers", 50, owner="layers.1")
    builder.kernels("one backward", ())
    builder.free("activations", 30, owner="layers.1.mlp")
    builder.free("buffers", 50, owner="layers.1")
    builder.free("activations", 10, owner="layers.0.mlp")
    builder.kernels("zero backward", ())
    builder.phase = "optimizer"
    builder.allocate("buffers", 8)
    builder.kernels("update", ())
    builder.free("buffers", 8)
    return builder.finish("by hand", 1, [Memory("parameters", 100), Memory("parameters", 7, "host")])


def test_a_phase_that_only_frees_was_highest_when_it_began() -> None:
    """Gradients that the optimizer drops are there while it updates."""
    builder = PlanBuilder([])
    builder.phase = "backward"
    builder.allocate("gradients", 60)
    builder.kernels("backward", ())
    builder.phase = "optimizer"
    builder.kernels("update", ())
    builder.free("gradients", 60)
    builder.kernels("end", ())
    profile = memory_profile(builder.finish("by hand", 1, [Memory("parameters", 100)]))
    assert [(moment.phase, moment.total) for moment in profile.phases] == [
        ("backward", 160),
        ("optimizer", 160),
    ]


def test_every_phase_has_its_highest_and_the_step_the_highest_of_them() -> None:
    profile = memory_profile(made())
    found = [(moment.phase, moment.name, moment.total) for moment in profile.phases]
    assert found == [("forward", "one", 145), ("backward", "one backward", 190), ("optimizer", "update", 108)]
    assert profile.peak.total == 190
    assert profile.peak.by_category["buffers"] == 50


def test_what_is_held_at_the_peak_is_by_owner_and_adds_up_to_it() -> None:
    profile = memory_profile(made())
    assert profile.at_peak == {
        ("parameters", ""): 100,
        ("activations", "layers.0.mlp"): 10,
        ("activations", "layers.1.mlp"): 30,
        ("buffers", "layers.1"): 50,
    }


def test_what_forward_leaves_for_backward_is_without_what_one_op_took() -> None:
    profile = memory_profile(made())
    assert {key: size for key, size in profile.kept_for_backward.items() if key[0] == "activations"} == {
        ("activations", "layers.0.mlp"): 10,
        ("activations", "layers.1.mlp"): 30,
    }
    assert profile.highest["activations", "layers.1.mlp"] == 35


def test_what_is_beside_the_plan_is_held_all_along() -> None:
    assert memory_profile(made(), [Memory("framework", 3)]).peak.total == 193


def test_equal_blocks_are_one_row_with_the_most_of_any() -> None:
    profile = memory_profile(made())
    assert holders(profile.at_peak, "activations") == [Holder("layers.*.mlp", "activations", 2, 30, 40)]
    checkpoints = {("activations", "h.0 checkpoint"): 4, ("activations", "h.11 checkpoint"): 4}
    assert holders(checkpoints) == [Holder("h.* checkpoint", "activations", 2, 4, 8)]  # type: ignore[arg-type]


def test_a_plan_that_changes_nothing_has_its_residents_as_peak() -> None:
    plan = PlanBuilder([])
    plan.kernels("alone", ())
    assert memory_profile(plan.finish("by hand", 1, [Memory("parameters", 4)])).peak.total == 4


def test_the_text_fits_80_columns_and_counts_what_it_leaves_out() -> None:
    lines = list(profile_lines(memory_profile(made()), TOO_LARGE, capacity_bytes=150, limit=1))
    assert max(map(len, lines)) <= 80
    assert lines[0] == "DOES NOT FIT  probability that it fits 5 %"
    assert lines[1] == "peak  190 B of 150 B, backward"
    assert lines[2] == "      at 'one backward', op 3 of 5"
    assert any(re.fullmatch(r"2 more +90 B +47\.4%", line) for line in lines)


def test_the_text_judges_tensors_and_leaves_the_allocator_to_a_run() -> None:
    """On a CPU there is no allocator that could run short."""
    profile = memory_profile(made())
    lines = list(profile_lines(profile, BARELY, capacity_bytes=190))
    assert lines[0] == "LIKELY DOES NOT FIT  probability that it fits 45 %"
    assert lines[3] == "      Whether torch's allocator runs short, `zsim run` says."
    on_cpu = list(profile_lines(profile, BARELY, capacity_bytes=190, has_allocator=False))
    assert not any("allocator" in line for line in on_cpu)


def test_the_json_names_every_owner() -> None:
    content = memory_profile(made()).to_dict()
    assert content["peak"]["op_name"] == "one backward"
    assert content["held_at_peak"][0] == {"owner": "", "category": "parameters", "bytes": 100}
    assert {"owner": "layers.0.mlp", "category": "activations", "bytes": 10} in content["kept_for_backward"]
