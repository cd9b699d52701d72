"""The choice of the loss: another loss where a candidate does not fit with the configured one, and for the
best few.

A loss adds about the same cost to every configuration, so the ranking does not depend on it. Varying it
everywhere would simulate each configuration three times.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.study.tune.axes import LOSS, LOSSES
from zsim.study.tune.candidates import Candidate
from zsim.study.tune.evaluate import CandidateResult, Evaluator
from zsim.study.tune.refine import WORTH, variations
from zsim.study.tune.search import Objective


def key_without_loss(candidate: Candidate) -> str:
    """A key shared by configurations that differ only in the loss."""
    overrides = sorted((key, str(value)) for key, value in candidate.overrides.items() if key != LOSS)
    return f"{candidate.base.key} {overrides}"


def split_losses(space: Sequence[Candidate]) -> tuple[list[Candidate], dict[int, Candidate]]:
    """(each configuration with its first loss, the configured one, replacements by candidate number). The
    replacement has the next loss, to try if the candidate does not fit.
    """
    last: dict[str, Candidate] = {}
    first: list[Candidate] = []
    replacements: dict[int, Candidate] = {}
    for candidate in space:
        key = key_without_loss(candidate)
        if key in last:
            replacements[last[key].number] = candidate
        else:
            first.append(candidate)
        last[key] = candidate
    return first, replacements


def choose_loss(
    evaluator: Evaluator, best: Sequence[CandidateResult], objective: Objective
) -> tuple[list[CandidateResult], list[CandidateResult]]:
    """(each result with the loss that is best for the first of them, if it gains by it, all results simulated
    for this).
    """
    improved: list[CandidateResult] = []
    seen: list[CandidateResult] = []
    best_loss: str | None = None
    for measured in best:
        tried: list[CandidateResult] = []
        if LOSSES.name in measured.candidate.choices:
            tried = variations(evaluator, measured, LOSSES, {} if best_loss is None else {LOSS: best_loss})
        seen += tried
        variation = min(tried, key=lambda m: m.objective_value(objective), default=measured)
        if not variation.objective_value(objective) < measured.objective_value(objective) * (1 - WORTH):
            variation = measured
        if best_loss is None:
            best_loss = variation.candidate.overrides.get(LOSS)
        improved.append(variation)
    return improved, seen
