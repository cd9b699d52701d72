"""From an experiment and a goal to the best few configurations that fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zsim.errors import InputError, NotSimulatedError, did_you_mean
from zsim.specs.experiment import STRATEGIES, Experiment
from zsim.study.sweep.store import check_folder
from zsim.study.tune.axes import DETAILS, QUANTISED, STRUCTURE
from zsim.study.tune.base import Base, base_of
from zsim.study.tune.candidates import Candidate
from zsim.study.tune.evaluate import Evaluator, Measured, Memory
from zsim.study.tune.explain import Step, differing_axes, explain
from zsim.study.tune.goals import GOALS, Question, Space
from zsim.study.tune.refine import refine
from zsim.study.tune.search import Found, search

EVERYTHING = "all"  # as an axis to keep

PARALLELISMS = {
    "tp": "tensor parallelism", "tensor": "tensor parallelism", "pp": "pipeline parallelism",
    "pipeline": "pipeline parallelism", "3d": "tensor and pipeline parallelism",
    "megatron": "tensor and pipeline parallelism", "cp": "context parallelism", "ep": "expert parallelism",
}  # fmt: skip
_CLOSE = 1.03  # another structure within this of the best is refined too
_LONGEST = 64  # micro-batches of a step that is simulated whole, to verify it


@dataclass(frozen=True)
class Tuned:
    """`best` first. `given` is the experiment as it was, where it fits; `given_memory` tells when not.
    `steps` lead from it to the best. `measured` are all simulated configurations, for figures."""

    goal: str
    settled: str
    base: Base
    given: Measured | None
    given_memory: Memory | None
    best: Sequence[Measured]
    steps: Sequence[Step]
    found: Found
    measured: Sequence[Measured]
    refused: dict[str, int]
    num_simulated: int
    num_checked: int


def tune(
    experiment: Experiment,
    goal: str = "fastest",
    *,
    kinds: Sequence[str] = (),
    keep: Sequence[str] = (),
    allows_quantised: bool = False,
    headroom: float = 0.0,
    count: int = 5,
    jobs: int = 1,
    cache: Path | None = None,
    on_done: Callable[[str, int], None] | None = None,
) -> Tuned:
    """Search what is kept where, in which pieces the batch comes, then sizes and switches.

    The global batch stays, unless the goal is another one. `kinds` are the strategies to look at (the
    experiment's own without), `keep` the axes to leave alone, `headroom` the fraction of GPU memory to leave
    free. Raises InputError where nothing fits, or `cache` cannot be made. Deterministic: `jobs` changes the
    time only.
    """
    _check(goal, kinds, keep, headroom)
    if cache is not None:
        check_folder(cache)
    keep = _kept(goal, keep)
    base = base_of(experiment)
    evaluator = Evaluator(jobs, cache, on_done, headroom)
    more = [QUANTISED] if allows_quantised else []
    question = Question(base, tuple(kinds) or (base.kind,), keep, more, evaluator)
    space = GOALS[goal](question)
    found = search(evaluator, space.candidates, objective=space.objective, count=count)
    given_candidate = Candidate(base, {}, -1)
    given, memory = _given(evaluator, given_candidate)
    if not found.best and given is None:
        raise InputError(_nothing_fits(base, found, evaluator))
    measured = list(found.measured)
    best = _refined(evaluator, found, space, keep, measured)
    if given is not None and goal in ("fastest", "cheapest"):
        measured.append(given)
        best.append(given)
    best = _distinct(_ranked(best, space), given_candidate)[:count]
    best[0] = evaluator.verified(best[0], _LONGEST)
    steps: list[Step] = []
    if best[0].candidate.base is base and best[0].candidate is not given_candidate:
        steps = explain(evaluator, given_candidate, given.seconds if given else None, best[0].candidate)
    return Tuned(
        goal, space.settled, base, given, memory, best, steps, found, measured, dict(evaluator.refused),
        evaluator.num_simulated, evaluator.num_checked,
    )  # fmt: skip


def _given(evaluator: Evaluator, candidate: Candidate) -> tuple[Measured | None, Memory | None]:
    """The experiment as it is: simulated where it fits, whatever the headroom."""
    memory = evaluator.memory([candidate])[0]
    if memory is None or not memory.fits:
        return None, memory
    return evaluator.simulate([candidate])[0], memory


def _refined(
    evaluator: Evaluator, found: Found, space: Space, keep: Sequence[str], measured: list[Measured]
) -> list[Measured]:
    best = list(found.best)
    worths = [m.worth(space.objective) for m in best]
    for place, start in enumerate(found.best[:2]):
        if worths[place] > _CLOSE * worths[0]:
            continue
        better, seen = refine(evaluator, start, objective=space.objective, keep=keep)
        measured += seen[1:]
        best[place] = better
    return best


def _ranked(best: Sequence[Measured], space: Space) -> list[Measured]:
    return sorted(best, key=lambda m: (m.worth(space.objective), m.candidate.number))


def _distinct(ranked: Sequence[Measured], given: Candidate) -> list[Measured]:
    """Without those that are the given configuration over again."""
    found: list[Measured] = []
    has_given = False
    for measured in ranked:
        candidate = measured.candidate
        is_given = candidate is given or (
            candidate.base is given.base and not differing_axes(given, candidate)
        )
        if not (is_given and has_given):
            found.append(measured)
        has_given = has_given or is_given
    return found


def _check(goal: str, kinds: Sequence[str], keep: Sequence[str], headroom: float) -> None:
    for kind in kinds:
        if kind.lower() in PARALLELISMS:
            what = PARALLELISMS[kind.lower()]
            raise NotSimulatedError(
                f"--kind {kind}: zsim does not simulate {what} yet; expected {', '.join(STRATEGIES)}"
            )
    axes = {axis.name for axis in (*STRUCTURE, *DETAILS)}
    for name, options in (
        (goal, GOALS),
        *((kind, STRATEGIES) for kind in kinds),
        *((axis, axes) for axis in keep if axis != EVERYTHING),
    ):
        if name not in options:
            what = "goal" if options is GOALS else "kind" if options is STRATEGIES else "keep"
            raise InputError(
                f"--{what} {name}: expected one of {', '.join(sorted(options))}{did_you_mean(name, options)}"
            )
    if goal == "largest-batch" and "micro-batch" in keep:
        raise InputError("--keep micro-batch: the goal largest-batch sets it")
    if not 0 <= headroom < 1:
        raise InputError(f"--headroom {headroom:g}: expected a fraction from 0 to below 1")


def _kept(goal: str, keep: Sequence[str]) -> Sequence[str]:
    """The axes to leave alone; `all` are all that the goal itself does not set."""
    if EVERYTHING not in keep:
        return keep
    axes = sorted({axis.name for axis in (*STRUCTURE, *DETAILS)})
    return [axis for axis in axes if goal != "largest-batch" or axis != "micro-batch"]


def _nothing_fits(base: Base, found: Found, evaluator: Evaluator) -> str:
    reasons = sorted(evaluator.refused, key=lambda reason: -evaluator.refused[reason])
    why = f"; {len(reasons)} were refused, e.g. {reasons[0]}" if reasons else ""
    return (
        f"nothing fits on {base.world_size} GPUs of '{base.job.cluster.name}': {found.num_too_large} of "
        f"{found.num_candidates} configurations need more memory{why}; expected more GPUs "
        "(--goal smallest-cluster finds how many), a shorter sequence or a smaller batch"
    )
