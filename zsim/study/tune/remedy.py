"""The remedy for a job that does not fit: the cheapest switch that its program has, simulated.

The switches are sharding, checkpointing, the loss, offloading and smaller micro-batches. They are tried one
by one, then, if none is enough, in pairs, and so on. If all of them are not enough, other degrees of
parallelism are tried, first without and then with the lightest switches, and at last adapters on the frozen
model (`zsim.study.tune.larger_changes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from zsim.dataclass import dataclass
from zsim.engine.micro_batches import few_micro_batches, with_few
from zsim.engine.simulator import Simulator
from zsim.errors import ZsimError
from zsim.plan.memory.capacity import fits, peak_bytes
from zsim.report.memory import Remedy
from zsim.specs.experiment.tables import Experiment
from zsim.specs.strategy.tables import DeepSpeedTable
from zsim.study.tune.axes import ACCUMULATION, MICRO_BATCH, STAGE, STRUCTURE, AxisChoice, TunedAxis, stage_of
from zsim.study.tune.base import base_of, value_of
from zsim.study.tune.bounds import plan_seconds
from zsim.study.tune.candidates import Candidate
from zsim.study.tune.evaluate import Evaluator, Measured
from zsim.study.tune.larger_changes import adapter_change, degree_changes
from zsim.study.tune.tellings import script_changes

_MAX_SIMULATED = 3
_SHARDING = ("stage", "optimizer", "sharding", "reshard")
AXES = (*_SHARDING, "checkpointing", "cross-entropy", "offload", "micro-batch")
_OF_TABLE = {STAGE: "strategy.stage"}  # for a stage alone, without a JSON
_IN_JSON = {
    MICRO_BATCH: "strategy.config.train_micro_batch_size_per_gpu",
    ACCUMULATION: "strategy.config.gradient_accumulation_steps",
}


def remedy_of(experiment: Experiment, simulator: Simulator | None = None) -> Remedy | None:
    """The fewest switches with which the job fits, of these the ones with the shortest step. None if nothing
    helps. `simulator` is one that has made some plans already.
    """
    try:
        given = Candidate(base_of(experiment), {}, -1)
        measured = cheapest_switch(Evaluator(simulator=simulator), given)
    except ZsimError:
        return None
    return None if measured is None else remedy_from(experiment, given, measured)


def remedy_from(experiment: Experiment, given: Candidate, measured: Measured) -> Remedy:
    """The changes of `measured` against `start`, under the keys of `experiment`."""
    table, training = experiment.strategy, experiment.training
    is_in_json = isinstance(table, DeepSpeedTable) and table.config is not None
    changes: dict[str, Any] = {}
    said: list[str] = []
    for key, value in measured.candidate.overrides.items():
        if value == value_of(given.base, {}, key):
            continue
        shown = (_IN_JSON if is_in_json else _OF_TABLE).get(key, key)
        changes[shown] = value
        if is_in_json and shown != key and getattr(training, key.rpartition(".")[2]) is not None:
            changes[key] = value  # the experiment sets it in both places
        said.append(f"{_short(shown)} = {_word(value)}")
    words = " and ".join(said)
    return Remedy(
        changes, words, measured.gpu_bytes, measured.seconds, tuple(script_changes(measured.candidate))
    )


@dataclass(frozen=True, slots=True)
class _Look:
    """A candidate evaluated by its plan: a GPU's peak, whether it fits every tier, the lower bound on its
    step."""

    candidate: Candidate
    gpu_bytes: int
    fits: bool
    seconds: float


def cheapest_switch(evaluator: Evaluator, given: Candidate) -> Measured | None:
    """The result with the fewest switches that fits, among equals the one with the shortest step. Without
    one, the first larger change that fits.
    """
    axes = [axis for axis in STRUCTURE if axis.name in AXES]
    singles = list(_singles(given, axes))
    _look(evaluator, given)  # what it holds before a step may be too much for many switches
    some = [None if evaluator.holds_too_much(one) else _look(evaluator, one) for one in singles]
    if not any(some):  # nor does any combination of the others fit
        return _larger(evaluator, given, singles)
    best = _shortest(evaluator, _needed([look for look in some if look is not None and look.fits]))
    if best is not None:
        return best
    every = [look or _look(evaluator, one) for look, one in zip(some, singles, strict=True)]
    for looks in _together(evaluator, given, [look for look in every if look is not None]):
        best = _shortest(evaluator, _needed([look for look in looks if look.fits]))
        if best is not None:
            return best
    return _larger(evaluator, given, singles)


def _larger(evaluator: Evaluator, given: Candidate, singles: Sequence[Candidate]) -> Measured | None:
    """The first larger change that fits, with as few of the lightest switches as it needs."""
    lightest: dict[str, AxisChoice] = {}
    for single in singles:  # an axis's choices come from the least to the most
        lightest |= single.choices
    frozen = adapter_change(given)
    for changed in (*degree_changes(given), *([] if frozen is None else [frozen])):
        best = _look(evaluator, changed)
        if best is None or not best.fits:
            best = _with_lightest(evaluator, changed, lightest)
        measured = None if best is None else _shortest(evaluator, [best])
        if measured is not None:
            return measured
    return None


def _with_lightest(
    evaluator: Evaluator, changed: Candidate, lightest: Mapping[str, AxisChoice]
) -> _Look | None:
    """The changed job with the first of the lightest switches that makes it fit, or with all of them. None if
    all are not enough.
    """
    every = _look(evaluator, Candidate(changed.base, {**lightest, **changed.choices}, -1))
    if every is None or not every.fits:
        return None
    single = (_look(evaluator, changed.with_choice(name, choice, -1)) for name, choice in lightest.items())
    return next((look for look in single if look is not None and look.fits), every)


def _needed(fitting: Sequence[_Look]) -> list[_Look]:
    """The candidates without those whose changes include all changes of another one."""
    changes = [{(key, str(value)) for key, value in look.candidate.overrides.items()} for look in fitting]
    return [
        look for look, own in zip(fitting, changes, strict=True) if not any(other < own for other in changes)
    ]


def _shortest(evaluator: Evaluator, fitting: Sequence[_Look]) -> Measured | None:
    """The shortest simulated step of the few candidates with the lowest bounds. A candidate is simulated only
    if its bound is below the best so far.
    """
    best: Measured | None = None
    for look in sorted(fitting, key=lambda look: look.seconds)[:_MAX_SIMULATED]:
        if best is not None and look.seconds >= best.seconds:
            break
        (found,) = evaluator.simulate([look.candidate])
        if found is None or not found.row["fits"] or found.may_run_out:
            continue
        if best is None or found.seconds < best.seconds:
            best = found
    return best


def _look(evaluator: Evaluator, candidate: Candidate) -> _Look | None:
    """The candidate evaluated by its plan, or None if it contradicts itself or has no plan.

    Without a pipeline two micro-batches suffice, since more do not change memory. A pipeline has to be full.
    """
    simulator = evaluator.simulator
    try:
        whole = candidate.experiment()
        steps = whole.training.gradient_accumulation_steps or 1
        asked = simulator.job(whole)
        if asked.parallelism.pipeline > 1:
            job, steps = with_few(asked), asked.training.gradient_accumulation_steps
        else:
            job = simulator.job(few_micro_batches(whole, 2))
        plan = simulator.plan(job)
    except ZsimError:
        return None
    evaluator.keep_resident(candidate, job, plan)
    peak = peak_bytes(job, plan)
    return _Look(
        candidate,
        peak,
        fits(job, plan) and peak <= evaluator.usable_bytes(candidate),
        max(plan_seconds(job, plan).values()) * steps / job.training.gradient_accumulation_steps,
    )


def _singles(given: Candidate, axes: Sequence[TunedAxis]) -> Iterator[Candidate]:
    """The job with one axis changed. Micro-batches only become smaller, stages only higher, and checkpointing
    only more, for which choices come from the least to the most.
    """
    for axis in axes:
        for choice in _from_the_given(given, axis):
            changes = {
                key: value
                for key, value in choice.overrides.items()
                if value != value_of(given.base, {}, key)
            }
            is_larger = changes.get(MICRO_BATCH, 0) > given.base.job.training.micro_batch_size
            is_lower = STAGE in changes and changes[STAGE] < stage_of(given.base, {})
            if changes and not is_larger and not is_lower:
                yield given.with_choice(axis.name, replace(choice, overrides=changes), -1)


def _from_the_given(given: Candidate, axis: TunedAxis) -> list[AxisChoice]:
    """An axis's choices. For checkpointing only those behind the job's own, if it is among them."""
    choices = list(axis.of(given.base, {}))
    if axis.name != "checkpointing":
        return choices
    for number, choice in enumerate(choices):
        if all(value == value_of(given.base, {}, key) for key, value in choice.overrides.items()):
            return choices[number + 1 :]
    return choices


def _together(evaluator: Evaluator, given: Candidate, single: Sequence[_Look]) -> Iterator[list[_Look]]:
    """Every combination of two axes, then of three, and so on, of axes whose lightest choices fit in
    combination.
    """
    lightest: dict[str, _Look] = {}
    for look in sorted(single, key=lambda look: look.gpu_bytes):
        (name,) = look.candidate.choices
        lightest.setdefault(name, look)
    choices = {name: [one.candidate.choices[name] for one in single if name in one.candidate.choices]
               for name in lightest}  # fmt: skip

    def looked(choices: Mapping[str, AxisChoice]) -> _Look | None:
        candidate = Candidate(given.base, choices, -1)
        return None if evaluator.holds_too_much(candidate) else _look(evaluator, candidate)

    for count in range(2, len(lightest) + 1):
        found: list[_Look] = []
        for names in combinations(lightest, count):
            least = looked({name: lightest[name].candidate.choices[name] for name in names})
            if least is not None and least.fits:
                every = product(*(choices[name] for name in names))
                looks = (looked(dict(zip(names, chosen, strict=True))) for chosen in every)
                found += [look for look in looks if look is not None]
        yield found


def _short(key: str) -> str:
    return key.removeprefix("strategy.config.")


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get("device", value))
    return str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)
