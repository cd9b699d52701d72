"""Who holds the memory: a hand-made plan whose levels can be added up by eye, and its text."""

from __future__ import annotations

import re

from zsim.plan.builder import PlanBuilder
from zsim.plan.ops import Memory, Plan
from zsim.report.memory import Holder, holders, memory_profile
from zsim.report.views.text.memory import profile_lines
from zsim.validated.verdict import Verdict

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
