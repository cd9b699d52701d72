"""Do ranks always end? `python -m validation.ends --runs 50`.

Starts, trains and ends ranks again and again: this repository's stage 3 and torch's FSDP2. Counts exit codes
other than 0 (an abort at exit is -6) and processes that are still there afterwards."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

from validation.backends import Strategy
from validation.launch import run_outcomes
from validation.training import TrainCase

STRATEGIES = {"stage 3 of the engine": Strategy("engine", {"stage": 3}), "FSDP2": Strategy("fsdp2")}


def descendants() -> set[int]:
    """Process ids of the descendants of this process that still exist."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(path.parent.name)] = int(fields[1])
    found, before = {os.getpid()}, 0
    while len(found) > before:
        before = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {os.getpid()}


def main(words: list[str]) -> int:
    arguments = argparse.ArgumentParser(prog="python -m validation.ends", description=__doc__)
    arguments.add_argument("--runs", type=int, default=50)
    arguments.add_argument("--ranks", type=int, default=2)
    options = arguments.parse_args(words)
    has_failed = False
    for name, strategy in STRATEGIES.items():
        case = TrainCase(strategy=strategy, steps=2, sequences=2 * options.ranks)
        before, begun, codes = descendants(), time.monotonic(), Counter[object]()
        for number in range(options.runs):
            outcomes = run_outcomes("validation.training:train", options.ranks, (case,), timeout=120)
            codes.update(outcome.exit_code for outcome in outcomes)
            print(f"\r{name}: {number + 1} of {options.runs}", end="", flush=True)
        left = descendants() - before
        ended = ", ".join(f"{count} with {code}" for code, count in sorted(codes.items(), key=str))
        print(
            f"\r{name}: {options.runs} runs of {options.ranks} ranks in {time.monotonic() - begun:.0f} s: "
            f"{ended}; {len(left)} processes left"
        )
        has_failed |= set(codes) != {0} or bool(left)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
