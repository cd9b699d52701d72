"""What a plan holds, without a clock: an op's memory is taken before it, and given back before or after."""

from zsim.plan.held import held_before_update, plan_peaks
from zsim.plan.ops import Memory, MemoryChange, Op, Plan, Program


def plan() -> Plan:
    """40 B of parameters always; 8 B of gradients from op 0, a 16 B buffer freed before the update is issued,
    and 4 B that the update itself takes."""
    program = Program(
        "",
        ops=(Op("backward", "host", phase="backward"), Op("update", "host", phase="optimizer")),
        resident=(Memory("parameters", 40), Memory("optimizer_states", 80, device="cpu")),
        memory=(
            MemoryChange(0, "gradients", 8),
            MemoryChange(0, "buffers", 16),
            MemoryChange(1, "buffers", -16),
            MemoryChange(1, "buffers", 4),
        ),
    )
    return Plan.uniform("test", 1, program, {})


def test_before_the_update_it_holds_what_backward_left() -> None:
    held = held_before_update(plan())
    assert (held["parameters"], held["gradients"], held["buffers"], held["optimizer_states"]) == (40, 8, 0, 0)


def test_peaks_are_each_category_s_own_and_the_sum_s() -> None:
    """40 + 8 + 16."""
    peaks = plan_peaks(plan())
    assert (peaks["parameters"], peaks["buffers"], peaks["optimizer_states"], peaks["total"]) == (
        40,
        16,
        0,
        64,
    )
