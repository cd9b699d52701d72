"""The caching allocator: what waits, for what, and how often."""

from __future__ import annotations

from math import nan
from typing import Any

import zsim
from zsim.devices.allocator import Allocator as RealAllocator
from zsim.devices.allocator import ChangesOfOp


def Allocator(free_bytes: int, changes: dict[int, list[tuple[int, int]]]) -> RealAllocator:
    """An allocator from plain changes: op -> [(bytes, protecting op or -1), ...]."""
    return RealAllocator(free_bytes, {op: ChangesOfOp(of_op) for op, of_op in changes.items()})


def test_room_is_taken_without_waiting() -> None:
    allocator = Allocator(10, {0: [(6, -1), (-6, -1)], 1: [(10, -1)]})
    assert allocator.advance(0, 0.0, [nan]) == -1
    assert allocator.advance(1, 0.0, [nan]) == -1
    assert allocator.num_retries == 0


def test_a_protected_block_is_collected_once_its_use_has_ended() -> None:
    """Op 0 protects 6 of 10 bytes; it ended at 1, the host asks for 8 at 2."""
    allocator = Allocator(10, {1: [(6, -1), (-6, 0)], 2: [(8, -1)]})
    assert allocator.advance(1, 0.0, [nan]) == -1
    assert allocator.advance(2, 2.0, [1.0]) == -1
    assert allocator.num_retries == 0


def test_a_short_allocator_waits_for_all_outstanding_uses() -> None:
    """Ops 0 and 1 protect 3 bytes each of 10. Asking for 6 finds 4, and waits until both have ended, though
    one would do: synchronize_and_free_events. That is one retry."""
    allocator = Allocator(10, {2: [(3, -1), (-3, 0), (3, -1), (-3, 1)], 3: [(6, -1)]})
    ended = [nan, nan]
    assert allocator.advance(2, 0.0, ended) == -1
    assert allocator.advance(3, 0.0, ended) == 1
    ended[1] = 5.0
    assert allocator.advance(3, 5.0, ended) == 0
    ended[0] = 6.0
    assert allocator.advance(3, 6.0, ended) == -1
    assert allocator.num_retries == 1


def test_what_never_fits_does_not_wait_for_ever() -> None:
    allocator = Allocator(10, {0: [(20, -1)], 1: [(5, -1)]})
    assert allocator.advance(0, 0.0, [nan]) == -1
    assert allocator.advance(1, 0.0, [nan]) == -1


def step(memory: str, tmp_path: Any) -> zsim.Result:
    """ZeRO-3 of a 7B model on 8 GPUs with `memory` bytes each."""
    folder = tmp_path / memory.replace(" ", "")
    folder.mkdir()
    source = 'source = "made up for this test"\nevidence = "assumed"\n'
    (folder / "gpu.toml").write_text(
        f'extends = "h100-sxm-80gb"\nname = "small"\n[memory]\n{source}capacity = "{memory}"\n'
    )
    (folder / "cluster.toml").write_text('extends = "dgx-h100"\nname = "small"\ngpu = "gpu.toml"\n')
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
    assert not any("ran short" in note for note in roomy.report.notes)
    assert any("ran short" in note for note in tight.report.notes)
    assert tight.report.peaks["gpu"].total == roomy.report.peaks["gpu"].total
    assert tight.trace.step_seconds >= roomy.trace.step_seconds


def test_a_host_that_comes_by_twice_makes_the_changes_once() -> None:
    """The host allocates 6 of 10 bytes for op 0, then blocks on an event before it issues it, and comes back.
    Twice 6 would not leave the 4 of op 1."""
    allocator = Allocator(10, {0: [(6, -1)], 1: [(4, -1), (-4, 0)], 2: [(4, -1)]})
    for op in (0, 0, 1, 2):
        waits_for = allocator.advance(op, 0.0, [nan])
    assert waits_for == 0
    assert allocator.advance(2, 1.0, [1.0]) == -1
    assert allocator.num_retries == 1
