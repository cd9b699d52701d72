"""The caching allocator on the host's clock: what waits, for what, how often, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any

import zsim
from zsim.devices.allocator import Allocator, AllocatorChanges
from zsim.devices.caching_allocator import CachingAllocator
from zsim.plan.memory.tensors import TensorChange

MIB = 2**20


def take(op: int, tensor: int, size: int, stream: str = "compute") -> TensorChange:
    return TensorChange(op, tensor, size * MIB, stream)


def give(op: int, tensor: int, until: int = -1) -> TensorChange:
    return TensorChange(op, tensor, 0, until=until)


def allocator(room: int, *changes: TensorChange, last: Sequence[int] = ()) -> Allocator:
    """Of a GPU with `room` MiB, where the ops `last` were issued last to their streams."""
    return Allocator(CachingAllocator(room * MIB), AllocatorChanges.of(changes), lambda op: last)


def test_room_is_taken_without_waiting() -> None:
    gpu = allocator(100, take(0, 0, 60), give(1, 0), take(1, 1, 100))
    assert gpu.advance(0, 0.0, [nan]) == -1
    assert gpu.memory.reserved_bytes == 60 * MIB


def test_a_protected_block_is_collected_once_its_use_has_ended() -> None:
    """Op 0 protects 60 of 100 MiB; it ended at 1, the host asks for 60 at 2."""
    gpu = allocator(100, take(1, 0, 60), give(1, 0, until=0), take(2, 1, 60))
    assert gpu.advance(1, 0.0, [nan]) == -1
    assert gpu.advance(2, 2.0, [1.0]) == -1
    assert gpu.counts.retries == 0
    assert gpu.memory.reserved_bytes == 60 * MIB


def test_a_protected_block_is_not_handed_out_before() -> None:
    """The same, but op 0 ends at 3: the host takes 40 of its own, and reserves all 100."""
    gpu = allocator(100, take(1, 0, 60), give(1, 0, until=0), take(2, 1, 40))
    for op in (1, 2):
        assert gpu.advance(op, 2.0, [3.0]) == -1
    assert gpu.memory.reserved_bytes == 100 * MIB


def test_a_short_allocator_waits_for_all_that_was_issued() -> None:
    """Ops 0 and 1 ran on two streams and protect 30 MiB each of 100. Asking for 60 finds 40, and waits until
    both have ended, though one would do; both segments go back to the driver, and 60 come from there."""
    changes = [
        take(2, 0, 30),
        give(2, 0, until=0),
        take(2, 1, 30),
        give(2, 1, until=1),
        take(3, 2, 60),
    ]
    gpu, ended = allocator(100, *changes, last=(1, 0)), [nan, nan]
    assert gpu.advance(2, 0.0, ended) == -1
    assert gpu.advance(3, 0.0, ended) == 1
    ended[1] = 5.0
    assert gpu.advance(3, 5.0, ended) == 0
    ended[0] = 6.0
    assert gpu.advance(3, 6.0, ended) == -1
    assert (gpu.counts.retries, gpu.counts.released, gpu.counts.failures) == (1, 2, 0)
    assert gpu.memory.reserved_bytes == 60 * MIB


def test_the_host_pays_for_segments_and_for_retries() -> None:
    """Two segments taken (2 x 1 s), both given back (2 x 10 s) in one retry (100 s), one taken again."""
    changes = [take(0, 0, 30), take(0, 1, 30), give(1, 0), give(1, 1), take(1, 2, 60)]
    gpu = allocator(100, *changes)
    gpu.malloc_seconds, gpu.free_seconds, gpu.retry_seconds = 1.0, 10.0, lambda op: 100.0
    gpu.advance(0, 0.0, [])
    assert gpu.take_seconds() == 2.0
    gpu.advance(1, 0.0, [])
    assert gpu.take_seconds() == 121.0
    assert gpu.take_seconds() == 0.0


def test_ranks_that_were_together_a_moment_ago_wait_for_each_other_no_longer_than_that() -> None:
    """Retries at 50 s and at 200 s, of 100 s each where others are behind: the first takes all of it and the
    ranks go on at 150 s, so that at 200 s nobody can be more than 50 s behind."""
    changes = [take(0, 0, 60), give(1, 0), take(1, 1, 70), give(2, 1), take(2, 2, 80)]
    gpu = allocator(100, *changes)
    gpu.retry_seconds = lambda op: 100.0
    taken = []
    for op, now in ((0, 0.0), (1, 50.0), (2, 200.0)):
        gpu.advance(op, now, [])
        taken.append(gpu.take_seconds())
    assert gpu.counts.retries == 2
    assert taken == [0.0, 100.0, 50.0]


def test_what_never_fits_is_counted_and_does_not_wait_for_ever() -> None:
    gpu = allocator(10, take(0, 0, 20), take(1, 1, 4))
    assert gpu.advance(0, 0.0, [nan]) == -1
    assert gpu.advance(1, 0.0, [nan]) == -1
    assert gpu.counts.failures == 2


def test_only_the_last_round_is_counted() -> None:
    gpu = allocator(10, take(0, 0, 20), take(1, 1, 4))
    gpu.counts_from = 1
    for op in (0, 1):
        gpu.advance(op, 0.0, [nan])
    assert gpu.counts.retries == 1
    assert gpu.counts.failures == 2  # which no later round undoes


def step(memory: str, tmp_path: Any) -> zsim.Result:
    """ZeRO-3 of a 7B model on 8 GPUs with `memory` bytes each."""
    folder = tmp_path / memory.replace(" ", "")
    folder.mkdir()
    source = 'source = "made up for this test"\nevidence = "assumed"\n'
    (folder / "gpu.toml").write_text(
        f'extends = "h100-sxm-80gb"\nname = "small"\n[memory]\n{source}capacity = "{memory}"\n'
    )
    host = f"[host]\n{source}overhead_factor = 0.1\n"  # one that no step waits for
    (folder / "cluster.toml").write_text(f'extends = "dgx-h100"\nname = "small"\ngpu = "gpu.toml"\n{host}')
    return zsim.simulate(
        zsim.Experiment(
            model="llama-2-7b",
            cluster=str(folder / "cluster.toml"),
            nodes=1,
            training={"sequence_length": 2048},
            strategy={"stage": 3},
        )
    )


def test_tight_memory_makes_zero_3_wait_and_roomy_memory_does_not(tmp_path: Any) -> None:
    """Gathers run ahead of computing until memory is full of protected blocks; the peak of what is allocated
    is the same."""
    roomy, tight = step("400 GB", tmp_path), step("34 GB", tmp_path)
    assert roomy.report.fits
    assert tight.report.fits
    assert not any("runs short" in note for note in roomy.report.notes)
    assert any("runs short" in note for note in tight.report.notes)
    assert tight.report.peaks["gpu"].total == roomy.report.peaks["gpu"].total
    assert tight.trace.step_seconds >= roomy.trace.step_seconds


def test_a_host_that_comes_by_twice_makes_the_changes_once() -> None:
    """The host allocates 60 of 100 MiB for op 0, then blocks on an event before it issues it, and comes back.
    Twice 60 would not leave the 40 of op 1."""
    gpu = allocator(100, take(0, 0, 60), take(1, 1, 40))
    for op in (0, 0, 1):
        assert gpu.advance(op, 0.0, [nan]) == -1
    assert gpu.counts.retries == 0


def test_a_restart_keeps_the_segments_and_forgets_what_was_outstanding() -> None:
    gpu = allocator(100, take(1, 0, 60), give(1, 0, until=0))
    gpu.advance(1, 0.0, [nan])
    gpu.restart()
    assert (gpu.memory.reserved_bytes, gpu.memory.active_bytes) == (60 * MIB, 0)


def test_what_the_first_run_makes_to_stay_breaks_up_what_it_freed() -> None:
    """20 MiB that stay come to stand in the 60 that the first run is done with: the next one has to ask for
    another 60."""
    program = [take(0, 0, 60), give(1, 0)]
    gpu = allocator(200, *program)
    gpu.first_changes = AllocatorChanges.of([*program, take(2, -1, 20)])
    for op in sorted(gpu.current.changes_of_op):
        gpu.advance(op, 0.0, [nan])
    gpu.restart()
    assert (gpu.memory.reserved_bytes, gpu.memory.active_bytes) == (60 * MIB, 20 * MIB)
    assert sorted(gpu.current.changes_of_op) == [0, 1]
    gpu.advance(0, 0.0, [nan])
    assert (gpu.memory.reserved_bytes, gpu.memory.active_bytes) == (120 * MIB, 80 * MIB)


def test_what_has_ended_matters_only_before_ops_that_allocate() -> None:
    """Op 1 only frees, op 2 does both."""
    changes = AllocatorChanges.of([take(0, 0, 60), give(1, 0), take(2, 1, 10), give(2, 1)])
    assert set(changes.changes_of_op) == {0, 1, 2}
    assert changes.request_ops == {0, 2}
