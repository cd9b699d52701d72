"""From an experiment and a goal to the best few configurations that fit."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError, check_choice
from zsim.files import check_folder
from zsim.report.views.text.sentences import format_remedy
from zsim.specs.experiment.load import ExperimentSource, experiment_of
from zsim.specs.experiment.run.run import TrainingRunTable
from zsim.specs.experiment.tables import Experiment
from zsim.specs.strategy.registry import STRATEGIES
from zsim.study.progress import Counts
from zsim.study.search import least_gpus
from zsim.study.tune.axes import LOSSES, PARALLELISM, Candidate, axis_names, base_of
from zsim.study.tune.evaluate import CandidateResult, Evaluator
from zsim.study.tune.explain import TuningStep, differing_axes, explain, needed_steps
from zsim.study.tune.framework import Base, degree_kinds, tuning_of
from zsim.study.tune.goals import GOALS, LONGEST, Question, Verifier, simulate_start, start_verdict
from zsim.study.tune.remedy import cheapest_switch, remedy_from
from zsim.study.tune.result import TuneResult
from zsim.study.tune.search import SearchResult, other_numerics

ALL_AXES = "all"  # as an axis to keep: every axis
BUDGET = 24  # configurations to simulate where degrees are searched: thousands of them differ by little
DAYS = "fewest-days"
_COMPARED = ("fastest", "cheapest")  # goals whose configurations are compared by their steps
_STEPS = 6  # configurations to simulate for the steps from the given one to the best of those

_PARALLELISMS = ("tp", "tensor", "pp", "pipeline", "3d", "cp", "context")


def tune(
    experiment: ExperimentSource = None,
    goal: str = "fastest",
    *,
    overrides: Mapping[str, Any] | None = None,
    kinds: Sequence[str] | None = None,
    keep: Sequence[str] = (),
    quantised: bool = False,
    parallelism: bool = False,
    simulations: int | None = None,
    headroom: float = 0.0,
    top: int = 5,
    jobs: int | None = None,
    cache: str | Path | None = None,
) -> TuneResult:
    """Find the best configuration that fits, as `zsim tune` does. The global batch stays.

    `experiment` is a file, a `zsim.Experiment`, a dict, or None for the README's example. `goal` is fastest,
    cheapest, fewest-days (of `[run]`), smallest-cluster, largest-model, largest-batch or longest-sequence.
    `kinds` are the strategies to look at, e.g. ["deepspeed", "fsdp2"], by default the experiment's. `keep` is
    what stays as it is, e.g. ["micro-batch"], or ["all"]. With `quantised` ZeRO++'s int8 gathers and int4
    reductions are tried too. With `parallelism` tensor, pipeline and context degrees are tried too, with at
    most `simulations` simulated. `headroom` is the fraction of GPU memory to leave free. `top` is how many
    are kept in `best`. `cache` is a folder of simulated points.

        found = zsim.tune("experiment.toml", kinds=["deepspeed", "fsdp2"], top=3)
        found.best[0].seconds, found.to_frame(), found.figure("pareto")
        found.save("tuned")                      # tuned/best/... for DeepSpeed or torchtitan

    Sharding, offloading and the cutting of the batch come first, then sizes and switches. Recipes of fp8 are
    tried on the best, and are never in it, and so are quantised collectives.
    `TuneResult.largest_possible_gain` says what could still be better where degrees are searched.
    Deterministic: `jobs` only changes the run time. Raises InputError where nothing fits, or where `cache`
    cannot be made.
    """
    resolved_experiment, folder = experiment_of(experiment, overrides), None if cache is None else Path(cache)
    _check_options(goal, kinds or (), keep, headroom)
    if folder is not None:
        check_folder(folder)
    keep = _expand_keep(goal, keep)
    base = base_of(resolved_experiment)
    if parallelism:
        base = replace(base, data={"parallelism": {}, **base.data})
    kinds = tuple(kinds or ()) or (base.kind,)
    has_degrees = "parallelism" in base.data and PARALLELISM.name not in keep
    if has_degrees and not set(kinds) & set(degree_kinds()):
        if parallelism:
            raise InputError(
                f"--parallelism: found {' and '.join(kinds)}, whose degrees are not searched; expected "
                f"--kind {' or '.join(degree_kinds())}"
            )
        has_degrees = False
    run = (resolved_experiment.run or TrainingRunTable()) if goal == DAYS else None
    budget = (BUDGET if simulations is None else simulations) if has_degrees else None
    with Counts("checked", "simulated") as progress:
        workers = jobs or os.cpu_count() or 1
        evaluator = Evaluator(workers, folder, progress.update, headroom, has_degrees, run)
        question = Question(base, kinds, keep, evaluator)
        return _search(resolved_experiment, goal, question, budget, top, allows_quantised=quantised)


def _search(
    experiment: Experiment,
    goal: str,
    question: Question,
    budget: int | None,
    count: int,
    *,
    allows_quantised: bool,
) -> TuneResult:
    """The best `count` configurations for the goal, and the steps to them from the experiment's own."""
    base, keep, evaluator = question.base, question.keep, question.evaluator
    try:
        space = GOALS[goal](question)
    except InputError as error:
        raise InputError(f"{error}{_remedy(experiment, question)}") from None
    given_candidate = Candidate(base, {}, -1)
    is_compared = goal in (*_COMPARED, DAYS)
    verifier = Verifier(evaluator, keep, count, given_candidate, is_compared, budget)
    verification = verifier.verify_best(space)
    start_result, start_memory = simulate_start(evaluator, given_candidate)
    search, best = verification.search, verification.best[:count]
    if not best:
        message = _nothing_fits(base, search, evaluator, may_grow=least_gpus(experiment) is not None)
        raise InputError(message + _remedy(experiment, question))
    given_verdict = None if start_memory is None else start_verdict(evaluator, given_candidate)
    steps: list[TuningStep] = []
    if best[0].candidate.base is base and best[0].candidate is not given_candidate:
        steps = explain(
            evaluator,
            given_candidate,
            start_result,
            best[0].candidate,
            budget=None if budget is None else _STEPS,
        )
    refused, measured = dict(evaluator.refused), list(verification.measured)
    doubtful: Sequence[TuningStep] = ()
    if goal in _COMPARED and best[0].candidate.base is base:
        needed = needed_steps(start_result, steps, best[0])
        simpler = evaluator.verify(steps[needed - 1].after, LONGEST) if needed else start_result
        is_safe = simpler is not None and simpler.relative_odds >= best[0].relative_odds
        if simpler is not None and is_safe and not simpler.may_run_out:
            steps, doubtful = steps[:needed], steps[needed:]
            measured += [simpler] if needed else []
            best = [simpler, *(result for result in best if _differ(simpler, result))][:count]
    changed_numerics = None
    if goal in _COMPARED:
        tuning = tuning_of(best[0].candidate.base.kind)
        axes = [*tuning.numerics, *(tuning.quantised if allows_quantised else ())]
        axes = [axis for axis in axes if axis.name not in keep]
        changed_numerics = other_numerics(evaluator, best[0], axes, verification.space.objective)
        measured += [] if changed_numerics is None else [changed_numerics]
    return TuneResult(
        goal, verification.space.remark, base, start_result, start_memory, best, steps, doubtful,
        changed_numerics, search, measured, refused, evaluator.num_simulated, evaluator.num_checked,
        given_verdict, budget,
    )  # fmt: skip


def _differ(first: CandidateResult, second: CandidateResult) -> bool:
    """Whether two results are of configurations that differ in more than the loss."""
    before, after = first.candidate, second.candidate
    if before.base is not after.base:
        return True
    return bool({*differing_axes(before, after), *differing_axes(after, before)} - {LOSSES.name})


def _check_options(goal: str, kinds: Sequence[str], keep: Sequence[str], headroom: float) -> None:
    for kind in kinds:
        if kind.lower() in _PARALLELISMS:
            raise InputError(
                f"--kind {kind}: is no strategy; --parallelism searches the degrees of --kind "
                f"{' or '.join(degree_kinds())}"
            )
        if kind.lower() == "ep":
            raise NotSimulatedError("--kind ep: zsim does not simulate expert parallelism yet")
    kept = [axis for axis in keep if axis != ALL_AXES]
    for option, names, options in (
        ("goal", [goal], GOALS), ("kind", kinds, STRATEGIES), ("keep", kept, axis_names())
    ):  # fmt: skip
        for name in names:
            check_choice(f"--{option} {name}: ", name, sorted(options))
    if goal == "largest-batch" and "micro-batch" in keep:
        raise InputError("--keep micro-batch: the goal largest-batch sets it")
    if not 0 <= headroom < 1:
        raise InputError(f"--headroom {headroom:g}: expected a fraction from 0 to below 1")


def _expand_keep(goal: str, keep: Sequence[str]) -> Sequence[str]:
    """The axes to leave unchanged. `all` expands to every axis that the goal does not set."""
    if ALL_AXES not in keep:
        return keep
    return [axis for axis in sorted(axis_names()) if goal != "largest-batch" or axis != "micro-batch"]


def _remedy(experiment: Experiment, question: Question) -> str:
    """A sentence on the switches with which the experiment's job would fit, as `zsim run` names them: axes of
    --keep, larger degrees and LoRA included. It is "" if there are none.
    """
    start, keep = Candidate(question.base, {}, -1), question.keep
    switch_result = cheapest_switch(question.evaluator, start)
    if switch_result is None:
        return ""
    kept_axes = [name for name in switch_result.candidate.choices if name in keep]
    keep_note = f" --keep leaves {' and '.join(kept_axes)} as given." if kept_axes else ""
    return f". {format_remedy(remedy_from(experiment, start, switch_result))}{keep_note}"


def _nothing_fits(base: Base, search: SearchResult, evaluator: Evaluator, *, may_grow: bool) -> str:
    growth = "more GPUs (--goal smallest-cluster finds how many), " if may_grow else ""
    reasons = sorted(evaluator.refused, key=lambda reason: -evaluator.refused[reason])
    example = f"; {len(reasons)} were refused, e.g. {reasons[0]}" if reasons else ""
    return (
        f"nothing fits on {base.world_size} GPUs of '{base.job.cluster.name}': {search.num_too_large} of "
        f"{search.num_candidates} configurations need more memory{example}; expected {growth}"
        "a shorter sequence or a smaller batch"
    )
