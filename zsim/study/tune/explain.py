"""From the configuration of the experiment to the best one: the changes to make, in order of gain.

Forward selection over the axes in which the two differ. At each step the change with the largest gain is
made, and every combination on the way is checked for memory and simulated. Changes without a gain are left
out. Every combination has the same global batch: with other degrees, or another micro-batch, the number of
micro-batches changes too. A budget ends the selection: all remaining changes are then one step.

The choices that the program's configuration file can express, and those that need a change of the training
script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from typing import Any

from zsim.specs.experiment.programs import find_config_mapping, program_of, readable_programs
from zsim.study.differences import is_distinguishable
from zsim.study.tune.axes import PARALLELISM, Candidate, base_of, micro_batch_choice, replicas_of, value_of
from zsim.study.tune.evaluate import CandidateResult, Evaluator
from zsim.study.tune.framework import ACCUMULATION, MICRO_BATCH, Base
from zsim.study.tune.search import WORTH
from zsim.units import format_setting


def script_changes(candidate: Candidate) -> Iterator[str]:
    """The candidate's changes that no file can express, e.g. "training.cross_entropy = fused: ..."."""
    base = candidate.base
    program = base.program
    if program is not None and program_of(program, base.kind) is None:
        title = readable_programs()[program].title
        yield f"strategy.kind = {base.kind}: another strategy than {title}'s file has"
    for key, value in candidate.overrides.items():
        instruction = script_change(base, key, value)
        if instruction:
            yield f"{key} = {format_setting(value)}: {instruction}"


def file_settings(candidate: Candidate) -> Iterator[str]:
    """Sentences on where the program's files express the candidate's changes of [training]."""
    base = candidate.base
    program = program_of(base.program, base.kind)
    for key, value in candidate.overrides.items():
        mapping = find_config_mapping(program, base.kind, key, value)
        is_changed = key.startswith("training.") and value != value_of(base, {}, key)
        if program is not None and is_changed and mapping is not None and mapping.location == "file":
            yield f"{readable_programs()[program].title} is told {key} = {value} by {mapping.instruction}"


def script_change(base: Base, key: str, value: Any) -> str:
    """How the script must change for the key to have this value, or "" if no change is needed."""
    if value == value_of(base, {}, key):
        return ""
    mapping = find_config_mapping(base.program, base.kind, key, value)
    return mapping.instruction if mapping is not None and mapping.location == "script" else ""


_MAX_JOINT_AXES = 3  # largest number of axes tried as one change, before all that are left at once
_BATCH = "micro-batch"  # the axis
_JOINT_AXES = ("checkpointing", _BATCH)  # one frees memory that the other uses: also tried as one change


@dataclass(frozen=True)
class Change:
    """One changed key."""

    key: str
    before: Any
    """The value before (None: absent, or off)."""
    after: Any
    script: str = ""
    """How the training script must change for it, if no file can express it."""


@dataclass(frozen=True)
class TuningStep:
    """Changes that are made in one step, with the measured training steps before and after them."""

    changes: tuple[Change, ...]
    before: CandidateResult | None
    """None if the configuration before did not fit."""
    after: CandidateResult

    @property
    def seconds_before(self) -> float | None:
        return None if self.before is None else self.before.seconds

    @property
    def is_distinguishable(self) -> bool:
        """Whether the gain exceeds zsim's error on the ratio of the two steps."""
        return self.before is None or is_distinguishable(self.after.row, self.before.row)

    @property
    def gain_fraction(self) -> float | None:
        """The gain as a fraction of the step before, or None if the configuration before did not fit."""
        return None if self.before is None else 1 - self.after.seconds / self.before.seconds


def explain(
    evaluator: Evaluator,
    start: Candidate,
    measured: CandidateResult | None,
    best: Candidate,
    budget: int | None = None,
) -> list[TuningStep]:
    """The steps from `start` to the gains of `best`.

    `measured` is the result of `start`, or None if it does not fit. After `budget` simulated configurations
    all remaining changes are one step.
    """
    remaining = differing_axes(start, best)
    current, before = start, measured
    explicit = start  # without the values that hold by default
    for name, choice in best.choices.items():
        if name not in remaining:  # set explicitly, because the default may depend on what changes
            current = current.replace_choice(name, choice, start.number)
    steps: list[TuningStep] = []
    initial_simulations = evaluator.num_simulated
    while remaining:
        is_over = budget is not None and evaluator.num_simulated - initial_simulations >= budget
        max_axes = 0 if is_over else _MAX_JOINT_AXES if budget is None else 1
        chosen = _best_change(evaluator, current, before, best, remaining, max_axes)
        if chosen is None:
            break
        names, after = chosen
        changed = [
            name for name in best.choices if name in names or _has_moved(name, current, after.candidate)
        ]
        changes = [
            change
            for name in changed
            for change in changes_of(current, after.candidate, best.choices[name].overrides)
        ]
        for name in changed:
            explicit = explicit.replace_choice(name, after.candidate.choices[name], start.number)
        explicit, moved_defaults = _set_moved_defaults(explicit, after.candidate)
        steps.append(TuningStep((*changes, *moved_defaults), before, after))
        current, before = after.candidate, after
        remaining = [name for name in remaining if current.choices.get(name) != best.choices[name]]
    return steps


def needed_steps(start: CandidateResult | None, steps: Sequence[TuningStep], best: CandidateResult) -> int:
    """How many of the first steps from `start` it takes until zsim cannot tell what they lead to from `best`.
    `start` is None where the experiment's own configuration does not fit.
    """
    results = [start, *(step.after for step in steps)]
    return next(
        (
            number
            for number, result in enumerate(results)
            if result is not None
            and not is_distinguishable(best.row, result.row)
            and result.relative_odds >= best.relative_odds
        ),
        len(steps),
    )


def _has_moved(name: str, before: Candidate, after: Candidate) -> bool:
    """Whether the choice on an axis that a step did not name has changed with it."""
    return name in after.choices and after.choices[name] != before.choices.get(name)


def _apply_choices(current: Candidate, best: Candidate, names: Sequence[str]) -> Candidate:
    """`current` with the choices of `best` on these axes. The number of micro-batches keeps its global batch,
    where a whole number does.
    """
    candidate = current
    for name in names:
        candidate = candidate.replace_choice(name, best.choices[name], current.number)
    if PARALLELISM.name not in best.choices or not {PARALLELISM.name, _BATCH} & set(names):
        return candidate
    if _BATCH not in best.choices:
        return candidate
    size = value_of(candidate.base, candidate.overrides, MICRO_BATCH)
    steps, remainder = divmod(
        candidate.base.batch_sequences, size * replicas_of(candidate.base, candidate.overrides)
    )
    if remainder or not steps or candidate.overrides.get(ACCUMULATION, 0) == steps:
        return candidate
    return candidate.replace_choice(_BATCH, micro_batch_choice(size, steps), current.number)


def _keeps_batch(candidate: Candidate) -> bool:
    """Whether a candidate has its base's global batch."""
    base, overrides = candidate.base, candidate.overrides
    size, steps = (value_of(base, overrides, key) for key in (MICRO_BATCH, ACCUMULATION))
    return bool(size * steps * replicas_of(base, overrides) == base.batch_sequences)


def _set_moved_defaults(explicit: Candidate, target: Candidate) -> tuple[Candidate, list[Change]]:
    """(`explicit` with the values that must now be set because a changed key moved their default, these
    changes).
    """
    fresh = Candidate(base_of(explicit.experiment()), {}, explicit.number)
    moved = []
    for name, choice in target.choices.items():
        if name in explicit.choices:
            continue
        changes = changes_of(fresh, target, choice.overrides)
        if changes:
            explicit = explicit.replace_choice(name, choice, explicit.number)
            moved += changes
    return explicit, moved


def differing_axes(start: Candidate, best: Candidate) -> list[str]:
    """The axes of `best` whose keys have other values in `start`."""
    return [
        name
        for name, choice in best.choices.items()
        if any(value_of(start.base, start.overrides, key) != value for key, value in choice.overrides.items())
    ]


def _best_change(
    evaluator: Evaluator,
    current: Candidate,
    before: CandidateResult | None,
    best: Candidate,
    remaining: Sequence[str],
    max_axes: int,
) -> tuple[tuple[str, ...], CandidateResult] | None:
    """The change with the largest gain: of one axis, or of the smallest group of up to `max_axes` axes that
    gains, or of all axes at once. None if nothing gains.
    """
    joint = tuple(name for name in _JOINT_AXES if name in remaining)
    for count in (*range(1, min(max_axes, len(remaining)) + 1), len(remaining)):
        groups = list(combinations(remaining, count))
        if count == 1 and len(joint) > 1:
            groups.append(joint)
        tried = [(names, _apply_choices(current, best, names)) for names in groups]
        if PARALLELISM.name in best.choices:
            tried = [(names, candidate) for names, candidate in tried if _keeps_batch(candidate)]
        best_step = _fastest_fitting(evaluator, tried)
        limit = inf if before is None else before.risked(before.seconds) * (1 - WORTH)
        if best_step and best_step[1].risked(best_step[1].seconds) < limit:
            return best_step
    return None


def _fastest_fitting(
    evaluator: Evaluator, tried: Sequence[tuple[tuple[str, ...], Candidate]]
) -> tuple[tuple[str, ...], CandidateResult] | None:
    possible = [(names, candidate) for names, candidate in tried if evaluator.bound(candidate) is not None]
    memories = evaluator.memory([candidate for _, candidate in possible])
    fitting = [entry for entry, memory in zip(possible, memories, strict=True) if evaluator.fits(memory)]
    results = evaluator.simulate([candidate for _, candidate in fitting])
    good = [(names, m) for (names, _), m in zip(fitting, results, strict=True) if m is not None]
    return min(good, key=lambda entry: entry[1].risked(entry[1].seconds), default=None)


def changes_of(before: Candidate, after: Candidate, keys: Mapping[str, Any]) -> list[Change]:
    """The changes from `before` to `after` among `keys`."""
    changes = []
    for key in keys:
        old, new = (value_of(candidate.base, candidate.overrides, key) for candidate in (before, after))
        if old != new:
            changes.append(Change(key, old, new, script_change(after.base, key, new)))
    return changes
