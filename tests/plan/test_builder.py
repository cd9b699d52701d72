"""The plan's host program: CUDA's stream and event semantics, and memory in host order."""

from __future__ import annotations

from zsim.cost.kernels.kernel import Kernel
from zsim.plan.builder import COMPUTE, PlanBuilder, move_kernels
from zsim.plan.ops import Copy, Group, Memory, MemoryChange

KERNEL = Kernel("gemm", 1.0, 1.0)


def builder() -> PlanBuilder:
    return PlanBuilder([Group.regular("world", 4)])


def test_an_event_of_an_empty_stream_is_none_and_waiting_for_it_is_nothing() -> None:
    b = builder()
    assert b.record("side") is None
    b.stream_wait(COMPUTE, None)
    b.wait_stream(COMPUTE, "side")
    b.host_wait(None)
    op = b.kernels("k", [KERNEL])
    assert b.ops[op].after == ()
    assert b.ops[op].host_waits == ()


def test_a_stream_wait_holds_the_next_op_of_that_stream_only() -> None:
    """Later ops follow in stream order, so they need not name the event again."""
    b = builder()
    first = b.kernels("first", [KERNEL])
    b.stream_wait("side", first)
    other = b.kernels("other", [KERNEL])
    waiting = b.kernels("waiting", [KERNEL], stream="side")
    later = b.kernels("later", [KERNEL], stream="side")
    assert b.ops[other].after == ()
    assert b.ops[waiting].after == (first,)
    assert b.ops[later].after == ()


def test_wait_stream_waits_for_what_was_issued_so_far() -> None:
    b = builder()
    b.kernels("early", [KERNEL])
    last = b.kernels("last", [KERNEL])
    b.wait_stream("side", COMPUTE)
    b.kernels("too late", [KERNEL])
    assert b.ops[b.kernels("waiting", [KERNEL], stream="side")].after == (last,)


def test_a_stream_does_not_wait_for_itself() -> None:
    b = builder()
    b.kernels("k", [KERNEL])
    b.wait_stream(COMPUTE, COMPUTE)
    assert b.ops[b.kernels("next", [KERNEL])].after == ()


def test_the_same_event_is_waited_for_once() -> None:
    b = builder()
    event = b.kernels("k", [KERNEL])
    for _ in range(3):
        b.stream_wait("side", event)
        b.host_wait(event)
    op = b.ops[b.kernels("waiting", [KERNEL], stream="side")]
    assert (op.after, op.host_waits) == ((event,), (event,))


def test_the_host_blocks_before_its_next_op_whatever_the_stream() -> None:
    b = builder()
    event = b.kernels("k", [KERNEL])
    b.host_wait(event)
    blocked = b.host("hook")
    free = b.kernels("free", [KERNEL])
    assert b.ops[blocked].host_waits == (event,)
    assert b.ops[free].host_waits == ()


def test_a_host_op_is_no_event_of_its_stream_and_takes_no_stream_waits() -> None:
    b = builder()
    event = b.kernels("k", [KERNEL])
    b.stream_wait("host", event)
    op = b.host("hook", overhead="step")
    assert b.record("host") is None
    assert (b.ops[op].work, b.ops[op].launches, b.ops[op].after) == (None, 0, ())


def test_kernels_count_their_launches() -> None:
    """Three copies priced together and one product."""
    b = builder()
    op = b.kernels("k", [*move_kernels(10, 10, launches=3), KERNEL])
    assert b.ops[op].launches == 4


def test_moves_is_what_is_read_plus_what_is_written() -> None:
    (kernel,) = move_kernels(10, 20, launches=2)
    assert (kernel.kind, kernel.hbm_bytes, kernel.launches, kernel.flops) == ("copy", 30.0, 2, 0.0)


def test_collectives_and_copies_carry_their_work() -> None:
    b = builder()
    gathered = b.ops[b.collective("all_gather", 64, "bf16", "world", stream="comm")]
    assert (gathered.name, gathered.stream, gathered.overhead) == ("all_gather", "comm", "collective_call")
    copied = b.ops[b.copy("offload", Copy("d2h", 64), stream="d2h")]
    assert copied.work == Copy("d2h", 64, is_pinned=True)


def test_memory_changes_stand_before_the_op_that_is_issued_next() -> None:
    """Freed by the host after the first op; what `record_stream` protects says until which op."""
    b = builder()
    b.allocate("buffers", 10)
    op = b.kernels("k", [KERNEL])
    b.free("buffers", 10)
    b.free_when_done("activations", 5, op)
    assert b.memory == [
        MemoryChange(0, "buffers", 10),
        MemoryChange(1, "buffers", -10),
        MemoryChange(1, "activations", -5, "gpu", op),
    ]


def test_nothing_is_booked_for_no_bytes() -> None:
    b = builder()
    op = b.kernels("k", [KERNEL])
    b.allocate("buffers", 0)
    b.free("buffers", 0)
    b.free_when_done("buffers", 0, op)
    assert b.memory == []


def test_a_wait_at_the_very_end_gets_an_op_of_its_own() -> None:
    b = builder()
    event = b.kernels("k", [KERNEL])
    b.host_wait(event)
    plan = b.finish("test", 4, [Memory("parameters", 1)])
    assert (plan.ops[-1].name, plan.ops[-1].host_waits) == ("end of step", (event,))
    assert plan.resident == (Memory("parameters", 1),)


def test_groups_split_the_world_by_size_and_stride() -> None:
    """World 16 in fours: neighbours, or every fourth."""
    near, far = Group.regular("near", 16, 4), Group.regular("far", 16, 4, 4)
    assert [near.ranks_of(rank) for rank in (0, 5)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [far.ranks_of(rank) for rank in (0, 5)] == [[0, 4, 8, 12], [1, 5, 9, 13]]
    assert Group.regular("pairs", 8, 2, 2).ranks_of(7) == [5, 7]
