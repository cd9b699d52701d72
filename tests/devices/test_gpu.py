"""Kernels that share a GPU, on a clock of their own."""

from __future__ import annotations

import heapq
from itertools import count

import pytest

from zsim.devices.gpu import GpuKernels
from zsim.specs.cluster.collectives import exchange_slowdown
from zsim.specs.cluster.files import load_gpu


class Clock:
    """Runs a GPU: `starts` are (time, seconds) of kernels, which are numbered in this order; `collective`,
    the time at which one begins and the time at which it ends. `ended`: (time, kernel) in order."""

    def __init__(
        self,
        starts: list[tuple[float, float]],
        slowdown: float = 1.0,
        collective: tuple[float, float] | None = None,
    ) -> None:
        self.ended: list[tuple[float, int]] = []
        self.turns: list[bool] = []
        self._agenda: list[tuple[float, int, str, int]] = []
        self._order = count()
        self._now = 0.0
        gpu = GpuKernels(slowdown, self, self._call_after, Clock._end, self.turns.append)
        for number, (at, _) in enumerate(starts):
            self._put(at, "start", number)
        for at, what in zip(collective or (), ("began", "over"), strict=False):
            self._put(at, what, 0)
        while self._agenda:
            now, _, what, number = heapq.heappop(self._agenda)
            self._now = now
            if what == "start":
                gpu.start(now, number, starts[number][1])
            elif what == "began":
                gpu.begin_collective(now)
            elif what == "over":
                gpu.end_collective(now)
            elif number == gpu.ticket:
                gpu.wake(now)
        assert not gpu.is_busy

    def _put(self, at: float, what: str, number: int) -> None:
        heapq.heappush(self._agenda, (at, next(self._order), what, number))

    def _call_after(self, delay: float, wake: tuple[GpuKernels[Clock], int]) -> None:
        self._put(self._now + delay, "wake", wake[1])

    def _end(self, op: int, now: float) -> None:
        self.ended.append((now, op))


def test_two_kernels_share_the_gpu_until_the_shorter_one_ends() -> None:
    """1 s and 3 s of work: at half speed until 2 s, then the longer one alone for its other 2 s."""
    assert Clock([(0.0, 3.0), (0.0, 1.0)]).ended == [(2.0, 1), (4.0, 0)]
    assert Clock([(0.0, 1.0), (0.0, 3.0)]).ended == [(2.0, 0), (4.0, 1)]


def test_equal_kernels_end_together_in_the_order_of_their_start() -> None:
    clock = Clock([(0.0, 2.0), (0.0, 2.0)])
    assert clock.ended == [(4.0, 0), (4.0, 1)]
    assert clock.turns == [True, False]


def test_three_kernels_and_then_two_and_then_one() -> None:
    """1, 2 and 3 s of work: a third of the speed until 3 s, half until 5 s (1 s more each), and 1 s alone."""
    assert Clock([(0.0, 2.0), (0.0, 3.0), (0.0, 1.0)]).ended == [(3.0, 2), (5.0, 0), (6.0, 1)]


def test_a_third_kernel_joins_two() -> None:
    """4 and 2 s of work side by side have 3 and 1 left after 2 s, when 1 s joins: both have 0 left 3 s later,
    and the first its 2 s alone."""
    assert Clock([(0.0, 4.0), (0.0, 2.0), (2.0, 1.0)]).ended == [(5.0, 1), (5.0, 2), (7.0, 0)]


@pytest.mark.parametrize("first", [0, 1])
def test_a_collective_slows_two_kernels_alike(first: int) -> None:
    """1 s and 2 s of work twice as slow until 2 s, while half a second of each is done: the shorter one has
    half a second left, at half speed, and the longer one then 1 s."""
    seconds = [1.0, 2.0] if first == 0 else [2.0, 1.0]
    clock = Clock([(0.0, seconds[0]), (0.0, seconds[1])], slowdown=2.0, collective=(0.0, 2.0))
    assert clock.ended == [(3.0, first), (4.0, 1 - first)]


def test_a_librarys_exchange_slows_kernels_by_the_multiprocessors_that_it_holds() -> None:
    """7 s of work, alone at 1, beside a narrow exchange at 1.25 and beside any collective at 2: 1 s alone
    until 1 s, 2 s of work until 3.5 s, 1 s of work until 5.5 s while both run, 2 s of work until 8 s beside
    the narrow one again, and the last second alone."""
    agenda: list[tuple[float, int, int]] = []
    order, ended, clock = count(), list[float](), [0.0]

    def call_after(delay: float, wake: tuple[GpuKernels[None], int]) -> None:
        heapq.heappush(agenda, (clock[0] + delay, next(order), wake[1]))

    gpu = GpuKernels(2.0, None, call_after, lambda _, __, now: ended.append(now), narrow_slowdown=1.25)
    gpu.start(0.0, 0, 7.0)
    changes = iter([(1.0, True, True), (3.5, True, False), (5.5, False, False), (8.0, False, True)])
    change = next(changes, None)
    while agenda or change:
        if change is not None and (not agenda or change[0] <= agenda[0][0]):
            clock[0], begins, is_narrow = change
            call = gpu.begin_collective if begins else gpu.end_collective
            call(clock[0], is_narrow=is_narrow)
            change = next(changes, None)
            continue
        clock[0], _, ticket = heapq.heappop(agenda)
        if ticket == gpu.ticket:
            gpu.wake(clock[0])
    assert ended == pytest.approx([9.0])


@pytest.mark.parametrize(
    ("gpu", "dispatcher", "slowdown"),
    [
        ("gb300-288gb", "hybridep", 152 / 136),
        ("b200-sxm-180gb", "deepep", 148 / 128),
        ("h100-sxm-80gb", "deepep", 132 / 112),
        ("h100-sxm-80gb", "all-to-all", 1.2),
    ],
)
def test_what_libraries_hold_follows_from_their_multiprocessors(
    gpu: str, dispatcher: str, slowdown: float
) -> None:
    """20 for DeepEP and 16 for HybridEP, as Megatron asks them; NCCL's are H100's 1.2."""
    assert exchange_slowdown(load_gpu(gpu), dispatcher) == pytest.approx(slowdown)
