"""From the configuration of the experiment to the best one: the changes to make, in order of gain.

Forward selection over the axes in which the two differ. At each step the change with the largest gain is
made, and every combination on the way is checked for memory and simulated. Changes without a gain are left
out. Every combination has the same global batch: with other degrees, or another micro-batch, the number of
micro-batches changes too. A budget ends the selection: all remaining changes are then one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from zsim.dataclass import dataclass
from zsim.study.differences import is_told_apart
from zsim.study.tune.axes import ACCUMULATION, MICRO_BATCH, PARALLELISM, in_micro_batches
from zsim.study.tune.base import base_of, value_of
from zsim.study.tune.candidates import Candidate
from zsim.study.tune.degrees import replicas_of
from zsim.study.tune.evaluate import Evaluator, Measured
from zsim.study.tune.refine import WORTH
from zsim.study.tune.tellings import script_change

_AT_ONCE = 3  # largest number of axes tried as one change, before all that are left at once
_BATCH = "micro-batch"  # the axis
_TOGETHER = ("checkpointing", _BATCH)  # one frees memory that the other uses: also tried as one change


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
    before: Measured | None
    """None if the configuration before did not fit."""
    after: Measured

    @property
    def before_seconds(self) -> float | None:
        return None if self.before is None else self.before.seconds

    @property
    def is_told_apart(self) -> bool:
        """Whether the gain exceeds zsim's error on the ratio of the two steps."""
        return self.before is None or is_told_apart(self.after.row, self.before.row)

    @property
    def gain_fraction(self) -> float | None:
        """The gain as a fraction of the step before, or None if the configuration before did not fit."""
        return None if self.before is None else 1 - self.after.seconds / self.before.seconds


def explain(
    evaluator: Evaluator,
    given: Candidate,
    measured: Measured | None,
    best: Candidate,
    budget: int | None = None,
) -> list[TuningStep]:
    """The steps from `start` to the gains of `best`.

    `measured` is the result of `start`, or None if it does not fit. After `budget` simulated configurations
    all remaining changes are one step.
    """
    left = differing_axes(given, best)
    current, before = given, measured
    asked = given  # without the values that hold by default
    for name, choice in best.choices.items():
        if name not in left:  # set explicitly, because the default may depend on what changes
            current = current.with_choice(name, choice, given.number)
    steps: list[TuningStep] = []
    spent = evaluator.num_simulated
    while left:
        seconds = None if before is None else before.seconds
        is_over = budget is not None and evaluator.num_simulated - spent >= budget
        most = 0 if is_over else _AT_ONCE if budget is None else 1
        chosen = _best_change(evaluator, current, seconds, best, left, most)
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
            asked = asked.with_choice(name, after.candidate.choices[name], given.number)
        asked, more = _with_what_followed(asked, after.candidate)
        steps.append(TuningStep((*changes, *more), before, after))
        current, before = after.candidate, after
        left = [name for name in left if current.choices.get(name) != best.choices[name]]
    return steps


def _has_moved(name: str, before: Candidate, after: Candidate) -> bool:
    """Whether the choice on an axis that a step did not name has changed with it."""
    return name in after.choices and after.choices[name] != before.choices.get(name)


def _with_choices(current: Candidate, best: Candidate, names: Sequence[str]) -> Candidate:
    """`current` with the choices of `best` on these axes. The number of micro-batches keeps its global batch,
    where a whole number does.
    """
    found = current
    for name in names:
        found = found.with_choice(name, best.choices[name], current.number)
    if PARALLELISM.name not in best.choices or not {PARALLELISM.name, _BATCH} & set(names):
        return found
    if _BATCH not in best.choices:
        return found
    size = value_of(found.base, found.overrides, MICRO_BATCH)
    steps, rest = divmod(found.base.batch_sequences, size * replicas_of(found.base, found.overrides))
    if rest or not steps or found.overrides.get(ACCUMULATION, 0) == steps:
        return found
    return found.with_choice(_BATCH, in_micro_batches(size, steps), current.number)


def _keeps_batch(candidate: Candidate) -> bool:
    """Whether a candidate has its base's global batch."""
    base, overrides = candidate.base, candidate.overrides
    size, steps = (value_of(base, overrides, key) for key in (MICRO_BATCH, ACCUMULATION))
    return bool(size * steps * replicas_of(base, overrides) == base.batch_sequences)


def _with_what_followed(asked: Candidate, wanted: Candidate) -> tuple[Candidate, list[Change]]:
    """(`explicit` with the values that must now be set because a changed key moved their default, these
    changes).
    """
    fresh = Candidate(base_of(asked.experiment()), {}, asked.number)
    more = []
    for name, choice in wanted.choices.items():
        if name in asked.choices:
            continue
        changes = changes_of(fresh, wanted, choice.overrides)
        if changes:
            asked = asked.with_choice(name, choice, asked.number)
            more += changes
    return asked, more


def differing_axes(given: Candidate, best: Candidate) -> list[str]:
    """The axes of `best` whose keys have other values in `start`."""
    return [
        name
        for name, choice in best.choices.items()
        if any(value_of(given.base, given.overrides, key) != value for key, value in choice.overrides.items())
    ]


def _best_change(
    evaluator: Evaluator,
    current: Candidate,
    seconds: float | None,
    best: Candidate,
    left: Sequence[str],
    most: int,
) -> tuple[tuple[str, ...], Measured] | None:
    """The change with the largest gain: of one axis, or of the smallest group of up to `max_axes` axes that
    gains, or of all axes at once. None if nothing gains.
    """
    together = tuple(name for name in _TOGETHER if name in left)
    for count in (*range(1, min(most, len(left)) + 1), len(left)):
        groups = list(combinations(left, count))
        if count == 1 and len(together) > 1:
            groups.append(together)
        tried = [(names, _with_choices(current, best, names)) for names in groups]
        if PARALLELISM.name in best.choices:
            tried = [(names, candidate) for names, candidate in tried if _keeps_batch(candidate)]
        found = _measured(evaluator, tried)
        if found and (seconds is None or found[1].seconds < seconds * (1 - WORTH)):
            return found
    return None


def _measured(
    evaluator: Evaluator, tried: Sequence[tuple[tuple[str, ...], Candidate]]
) -> tuple[tuple[str, ...], Measured] | None:
    possible = [(names, candidate) for names, candidate in tried if evaluator.bound(candidate) is not None]
    memories = evaluator.memory([candidate for _, candidate in possible])
    fitting = [entry for entry, memory in zip(possible, memories, strict=True) if evaluator.fits(memory)]
    results = evaluator.simulate([candidate for _, candidate in fitting])
    good = [(names, m) for (names, _), m in zip(fitting, results, strict=True) if m is not None]
    return min(good, key=lambda entry: entry[1].seconds, default=None)


def changes_of(before: Candidate, after: Candidate, keys: Mapping[str, Any]) -> list[Change]:
    """The changes from `before` to `after` among `keys`."""
    found = []
    for key in keys:
        old, new = (value_of(one.base, one.overrides, key) for one in (before, after))
        if old != new:
            found.append(Change(key, old, new, script_change(after.base, key, new)))
    return found
