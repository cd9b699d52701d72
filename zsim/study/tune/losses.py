"""The choice of the loss: another loss where a candidate does not fit with the configured one, and for the
best few.

A loss adds about the same cost to every configuration, so the ranking does not depend on it. Varying it
everywhere would simulate each configuration three times.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.study.tune.axes import LOSS, LOSSES
from zsim.study.tune.candidates import Candidate
from zsim.study.tune.evaluate import Evaluator, Measured
from zsim.study.tune.refine import WORTH, variations
from zsim.study.tune.search import Objective


def but_for_loss(candidate: Candidate) -> str:
    """A key shared by configurations that differ only in the loss."""
    others = sorted((key, str(value)) for key, value in candidate.overrides.items() if key != LOSS)
    return f"{candidate.base.key} {others}"


def by_loss(space: Sequence[Candidate]) -> tuple[list[Candidate], dict[int, Candidate]]:
    """(each configuration with its first loss, the configured one, replacements by candidate number). The
    replacement has the next loss, to try if the candidate does not fit.
    """
    last: dict[str, Candidate] = {}
    first: list[Candidate] = []
    instead: dict[int, Candidate] = {}
    for candidate in space:
        key = but_for_loss(candidate)
        if key in last:
            instead[last[key].number] = candidate
        else:
            first.append(candidate)
        last[key] = candidate
    return first, instead


def with_best_loss(
    evaluator: Evaluator, best: Sequence[Measured], objective: Objective
) -> tuple[list[Measured], list[Measured]]:
    """(each result with the loss that is best for the first of them, if it gains by it, all results simulated
    for this).
    """
    better: list[Measured] = []
    seen: list[Measured] = []
    wanted: str | None = None
    for measured in best:
        tried: list[Measured] = []
        if LOSSES.name in measured.candidate.choices:
            tried = variations(evaluator, measured, LOSSES, {} if wanted is None else {LOSS: wanted})
        seen += tried
        fast = min(tried, key=lambda m: m.worth(objective), default=measured)
        if not fast.worth(objective) < measured.worth(objective) * (1 - WORTH):
            fast = measured
        if wanted is None:
            wanted = fast.candidate.overrides.get(LOSS)
        better.append(fast)
    return better, seen
