"""What a plan holds, without a clock: an op's memory is taken before it, and given back before or after."""

from zsim.plan.memory.tensors import (
    bytes_before_update,
    device_peaks,
    memory_key,
    peak_bytes_per_key,
    pinned_peak,
    plan_peaks,
    select_device,
)
from zsim.plan.ops import Memory, MemoryChange, Op, Plan, Program


def plan() -> Plan:
    """40 B of parameters always; 8 B of gradients from op 0, a 16 B buffer freed before the update is issued,
    and 4 B that the update itself takes."""
    program = Program(
        "",
        ops=(Op("backward", "host", phase="backward"), Op("update", "host", phase="optimizer")),
        resident=(Memory("parameters", 40), Memory("optimizer_states", 80, device="host")),
        memory=(
            MemoryChange(0, "gradients", 8),
            MemoryChange(0, "buffers", 16),
            MemoryChange(1, "buffers", -16),
            MemoryChange(1, "buffers", 4),
        ),
    )
    return Plan.uniform("test", 1, program, {})


def test_before_the_update_it_holds_what_backward_left() -> None:
    held = bytes_before_update(plan())
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


def test_each_device_owner_and_page_locked_memory_has_its_own_maximum() -> None:
    """On the host 10 B stay and 7 page-locked ones come and go before 5 others that are not: 17 at most, of
    them 7 page-locked. `a` holds 3 and then 4 more, `b` 6 when `a` has none: 7 and 6, and never 13."""
    program = Program(
        "",
        ops=(Op("backward", "host", phase="backward"),),
        resident=(Memory("parameters", 10, device="host"),),
        memory=(
            MemoryChange(0, "buffers", 7, device="host", is_pinned=True),
            MemoryChange(0, "buffers", -7, device="host", is_pinned=True),
            MemoryChange(0, "buffers", 5, device="host"),
            MemoryChange(0, "activations", 3, owner="a"),
            MemoryChange(0, "activations", 4, owner="a"),
            MemoryChange(0, "activations", -7, owner="a"),
            MemoryChange(0, "activations", 6, owner="b"),
        ),
    )
    assert device_peaks(program) == {"host": 17, "gpu": 7}
    assert pinned_peak(program) == 7
    owners = peak_bytes_per_key(select_device("gpu", program.resident, program.memory), memory_key)
    assert owners == {("activations", "a"): 7, ("activations", "b"): 6}
