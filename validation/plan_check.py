"""zsim's plans against the calls that PyTorch made: `python -m validation.plan_check`.

The plan check has no clock and no tolerance: a plan must have the same collectives, of the same kinds,
sizes, types and groups, in the same order, as the oracle's answers and the recorded runs. Memory is compared
by category, as a relative error: zsim computes activations by formulas, PyTorch's follow the allocator's
order."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import zsim
from validation.cases.cases import ANY_CLUSTER, oracle_experiment
from validation.oracle.answer import Answer
from zsim.comparison.plan_check import Call, calls_of_plan, unfold
from zsim.plan.memory.tensors import plan_peaks
from zsim.plan.ops import Plan

TRACES = Path(__file__).parents[1] / "traces"


def first_difference(mine: Sequence[Call], theirs: Sequence[Call]) -> str | None:
    """None if two lists of calls agree on the wire; else the first place where they differ."""
    for index, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one.wire != other.wire:
            return f"call {index}: zsim {one.wire} ({one.module}), torch {other.wire} ({other.module})"
    if len(mine) != len(theirs):
        return f"zsim has {len(mine)} calls, torch {len(theirs)}"
    return None


def oracle_answers() -> list[Path]:
    return sorted((TRACES / "oracle").glob("*.json"))


def recordings() -> list[Path]:
    """Summaries of the recorded runs for which zsim has a plan."""
    paths = sorted((TRACES / "gloo").glob("*/summary.json"))
    return [path for path in paths if json.loads(path.read_text())["experiment"] is not None]


def recorded_plan(summary: dict[str, Any]) -> Plan:
    return zsim.make_plan(zsim.Experiment(cluster=ANY_CLUSTER, **summary["experiment"]))


def memory_errors(plan: Plan, answer: Answer) -> dict[str, float]:
    """(zsim - torch) / torch of each category's peak."""
    peaks = plan_peaks(plan)
    return {name: peaks[name] / measured - 1 for name, measured in answer.peak_bytes.items() if measured}


def show(name: str, difference: str | None, errors: dict[str, float]) -> str:
    memory = "  ".join(f"{category} {error:+.2%}" for category, error in errors.items())
    return f"{'same calls' if difference is None else 'DIFFERENT'}  {name}  {memory}" + (
        f"\n    {difference}" if difference else ""
    )


def main() -> int:
    has_missed = False
    for path in oracle_answers():
        answer = Answer.read(path)
        plan = zsim.make_plan(oracle_experiment(asdict(answer.case)))
        difference = first_difference(calls_of_plan(plan), answer.calls)
        print(show(path.stem, difference, memory_errors(plan, answer)))
        has_missed |= difference is not None
    for path in recordings():
        summary = json.loads(path.read_text())
        calls = unfold(summary["calls"])
        difference = first_difference(calls_of_plan(recorded_plan(summary)), calls)
        print(show(path.parent.name, difference, {}))
        has_missed |= difference is not None
    return int(has_missed)


if __name__ == "__main__":
    sys.exit(main())
