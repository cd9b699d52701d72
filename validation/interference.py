"""The mutual slowdown of concurrent kernels and collectives, from recordings.

    python -m validation.interference TRACE.json[.gz] ... [--rows 10]

The files are the ranks of one run, or a folder of them. zsim.calibrate.interference defines what counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from zsim.calibrate.interference import OverlapPair, collective_pairs, kernel_pairs, slowdown
from zsim.errors import InputError
from zsim.trace.readers.content import JsonStream
from zsim.trace.readers.kineto.file import load
from zsim.trace.readers.read import read_trace


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
