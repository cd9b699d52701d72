"""The mutual slowdown of concurrent kernels and collectives, from recordings.

    python -m validation.interference TRACE.json[.gz] ... [--rows 10]

The files are the ranks of one run, or a folder of them.

A kernel that was launched with one and the same grid does the same work every time. Its duration while
collectives were under way on its GPU over its duration while none was is `compute_slowdown`. A collective of
one kind and size does the same work too. Its transfer while kernels ran over its transfer while none did is
`communication_slowdown`.

# [Note: what a recording can tell]
Only work that was done both ways tells anything, and work that overlapped in part is left out. So are kernels
that shared their GPU with other kernels, and those of less than 10 us, which a clock of 1 us (torch before
2.1) does not resolve. A collective's kernel runs from the moment its rank has arrived, so its duration is
mostly waiting. With all ranks recorded the transfer is what follows the last arrival
(zsim.trace.readers.join_ranks). With one rank the shortest call each way is taken, which still may have
waited. Overlapping and other calls are not a random sample either: a kernel that finds its input in a cache
is faster in either case, and one grid may hide two shapes.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from zsim.errors import InputError
from zsim.trace.collective_names import is_collective_kernel
from zsim.trace.readers.content import JsonStream
from zsim.trace.readers.kineto.file import DeviceEvent, load
from zsim.trace.readers.read import read_trace
from zsim.trace.trace import COLLECTIVES, Trace

MIN_SECONDS = 10e-6
MIN_OVERLAPPED, MAX_ISOLATED = 0.95, 0.01  # fractions of a duration that count as all of it and as none
_GPU_KINDS = frozenset({"compute", "optimizer", "copy"})


class OverlapPair(NamedTuple):
    """One piece of work that was done both isolated and overlapping: its name, its seconds each way and how
    often it was done.
    """

    name: str
    shape: str
    isolated_seconds: float
    overlapped_seconds: float
    num_isolated: int
    num_overlapped: int

    @property
    def ratio(self) -> float:
        return self.overlapped_seconds / self.isolated_seconds


class IntervalUnion:
    """A union of intervals, which gives the fraction of a time that it covers."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._cumulative_seconds: list[float] = []  # length of all intervals before each
        total = 0.0
        for start, end in sorted(intervals):
            if self._ends and start <= self._ends[-1]:
                total += max(0.0, end - self._ends[-1])
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._cumulative_seconds.append(total)
                self._starts.append(start)
                self._ends.append(end)
                total += end - start

    def share(self, start: float, end: float) -> float:
        """Fraction of the time from `start` to `end` that the intervals cover: 0 to 1."""
        return (
            (self._covered_seconds(end) - self._covered_seconds(start)) / (end - start)
            if end > start
            else 0.0
        )

    def _covered_seconds(self, time: float) -> float:
        index = bisect_right(self._starts, time) - 1
        if index < 0:
            return 0.0
        return self._cumulative_seconds[index] + min(time, self._ends[index]) - self._starts[index]


def slowdown(pairs: Sequence[OverlapPair]) -> float:
    """Total duration of the overlapping calls over the duration of as many isolated calls, or NaN without
    pairs.
    """
    isolated_seconds = sum(pair.isolated_seconds * pair.num_overlapped for pair in pairs)
    overlapped = sum(pair.overlapped_seconds * pair.num_overlapped for pair in pairs)
    return overlapped / isolated_seconds if isolated_seconds else float("nan")


def kernel_pairs(events: Sequence[DeviceEvent]) -> list[OverlapPair]:
    """Kernels of one rank's file, by name and launch: isolated, and overlapping the rank's collectives."""
    kernels = [event for event in events if event.kind == "kernel" and event.end > event.start]
    collectives = _collectives_per_device(event for event in kernels if is_collective_kernel(event.name))
    compute_kernels = [event for event in kernels if not is_collective_kernel(event.name)]
    busy: dict[Hashable, list[DeviceEvent]] = {}
    for event in sorted(compute_kernels, key=lambda event: (event.start, event.end)):
        busy.setdefault(event.device, []).append(event)
    durations: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    for device, device_kernels in busy.items():
        device_collectives = collectives.get(device)
        for event in _exclusive_kernels(device_kernels):
            share = device_collectives.share(event.start, event.end) if device_collectives else 0.0
            key = event.name, str(event.args.get("launch", ""))
            _add_duration(durations, key, (event.end - event.start) * 1e-9, share)
    return [pair for pair in _pairs(durations, median) if pair.isolated_seconds >= MIN_SECONDS]


def collective_pairs(trace: Trace) -> list[OverlapPair]:
    """Collectives of a recording, by kind, size and group: isolated, and overlapping kernels on any of its
    ranks.
    """
    kernels = kernel_intervals(trace)
    is_bounded = bool(trace.metadata.get("transfers_bounded")) or trace.transfer_seconds is None
    durations: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    for span, (_, info, start, end) in enumerate(trace.rows()):
        if info.kind not in COLLECTIVES or not info.bytes:
            continue
        if not is_bounded and trace.transfer_seconds is not None:
            start = max(start, end - float(trace.transfer_seconds[span]))
        if end > start:
            key = info.kind, f"{info.bytes:,} B, {info.group_size} ranks"
            _add_duration(durations, key, end - start, kernels.share(start, end))
    return _pairs(durations, min if is_bounded else median)


def kernel_intervals(trace: Trace) -> IntervalUnion:
    """The intervals in which kernels ran on any of the recorded ranks."""
    return IntervalUnion(
        (start, end) for _, info, start, end in trace.rows() if info.kind in _GPU_KINDS and end > start
    )


def _collectives_per_device(events: Iterable[DeviceEvent]) -> Mapping[Hashable, IntervalUnion]:
    intervals: dict[Hashable, list[tuple[float, float]]] = {}
    for event in events:
        intervals.setdefault(event.device, []).append((event.start, event.end))
    return {device: IntervalUnion(device_intervals) for device, device_intervals in intervals.items()}


def _exclusive_kernels(kernels: Sequence[DeviceEvent]) -> list[DeviceEvent]:
    """The kernels, in order of their starts, that overlapped no other kernel."""
    exclusive = []
    last_end = 0
    for index, kernel in enumerate(kernels):
        is_before_next = index + 1 == len(kernels) or kernels[index + 1].start >= kernel.end
        if kernel.start >= last_end and is_before_next:
            exclusive.append(kernel)
        last_end = max(last_end, kernel.end)
    return exclusive


def _add_duration(
    durations: dict[tuple[str, str], tuple[list[float], list[float]]],
    key: tuple[str, str],
    seconds: float,
    share: float,
) -> None:
    isolated_seconds, overlapped = durations.setdefault(key, ([], []))
    if share <= MAX_ISOLATED:
        isolated_seconds.append(seconds)
    elif share >= MIN_OVERLAPPED:
        overlapped.append(seconds)


def _pairs(
    durations: Mapping[tuple[str, str], tuple[list[float], list[float]]],
    average: Callable[[list[float]], float],
) -> list[OverlapPair]:
    """Work that was done both ways, with the longest total of overlapping calls first."""
    pairs = [
        OverlapPair(
            *key, average(isolated_seconds), average(overlapped), len(isolated_seconds), len(overlapped)
        )
        for key, (isolated_seconds, overlapped) in durations.items()
        if isolated_seconds and overlapped
    ]
    return sorted(pairs, key=lambda pair: -pair.overlapped_seconds * pair.num_overlapped)


def lines(paths: Sequence[Path], rows: int) -> Iterable[str]:
    """The report, line by line."""
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    kernels: list[OverlapPair] = []
    for file in files:
        kernels += kernel_pairs(load(file, JsonStream(file)).device_events)
    yield from _block("kernels, beside collectives over alone", kernels, rows)
    trace = read_trace(files, whole=True)
    if trace.metadata.get("transfers_bounded"):
        yield "not every rank of a group is recorded: the shortest call each way, which may have waited"
    yield from _block("collectives, beside kernels over alone", collective_pairs(trace), rows)


def _block(title: str, pairs: Sequence[OverlapPair], rows: int) -> Iterable[str]:
    if not pairs:
        yield f"{title}: nothing was done both ways"
        return
    seconds = sum(pair.isolated_seconds * pair.num_overlapped for pair in pairs)
    yield f"{title}: {slowdown(pairs):.3f} ({len(pairs)} kinds, {seconds * 1e3:.2f} ms alone)"
    for pair in sorted(pairs, key=lambda pair: -pair.overlapped_seconds * pair.num_overlapped)[:rows]:
        yield (
            f"  {pair.ratio:6.3f}  {pair.isolated_seconds * 1e6:10.1f} us alone ({pair.num_isolated}), "
            f"{pair.overlapped_seconds * 1e6:10.1f} us beside ({pair.num_overlapped})  {pair.name[:60]} "
            f"{pair.shape}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--rows", type=int, default=10)
    given = parser.parse_args()
    try:
        print("\n".join(lines(given.traces, given.rows)))
    except InputError as error:
        sys.exit(f"validation.interference: {error}")


if __name__ == "__main__":
    main()
