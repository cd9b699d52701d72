"""What makes a job fit that does not: the cheapest switch that its program has, simulated.

Looked at are checkpointing, the loss, offloading and smaller micro-batches: one of them alone, and where none
is enough, two together, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, product
from typing import Any

from zsim.errors import ZsimError
from zsim.report.memory import Remedy
from zsim.specs.experiment import DeepSpeedTable, Experiment
from zsim.study.tune.axes import ACCUMULATION, MICRO_BATCH, STRUCTURE, Axis
from zsim.study.tune.base import base_of, value_of
from zsim.study.tune.candidates import Candidate
from zsim.study.tune.evaluate import Evaluator, Measured
from zsim.study.tune.search import search
from zsim.study.tune.tellings import script_changes

AXES = ("checkpointing", "cross-entropy", "offload", "micro-batch")
_IN_JSON = {
    MICRO_BATCH: "strategy.config.train_micro_batch_size_per_gpu",
    ACCUMULATION: "strategy.config.gradient_accumulation_steps",
}


def remedy_of(experiment: Experiment) -> Remedy | None:
    """The switch, or the fewest, with which the job fits and its step is shortest; None where none does."""
    try:
        given = Candidate(base_of(experiment), {}, -1)
        measured = cheapest_switch(Evaluator(), given)
    except ZsimError:
        return None
    return None if measured is None else remedy_from(experiment, given, measured)


def remedy_from(experiment: Experiment, given: Candidate, measured: Measured) -> Remedy:
    """What is changed from `given`, under the keys of `experiment`."""
    table, training = experiment.strategy, experiment.training
    is_in_json = isinstance(table, DeepSpeedTable) and table.config is not None
    changes: dict[str, Any] = {}
    said: list[str] = []
    for key, value in measured.candidate.overrides.items():
        if value == value_of(given.base, {}, key):
            continue
        shown = _IN_JSON.get(key, key) if is_in_json else key
        changes[shown] = value
        if shown != key and getattr(training, key.rpartition(".")[2]) is not None:
            changes[key] = value  # said in both
        said.append(f"{_short(shown)} = {_word(value)}")
    words = " and ".join(said)
    return Remedy(
        changes, words, measured.gpu_bytes, measured.seconds, tuple(script_changes(measured.candidate))
    )


def cheapest_switch(evaluator: Evaluator, given: Candidate) -> Measured | None:
    """Of the least that makes it fit, what takes the shortest step."""
    axes = [axis for axis in STRUCTURE if axis.name in AXES]
    single = list(_singles(given, axes))
    for candidates in chain([single], _together(evaluator, given, single)):
        found = search(evaluator, _numbered(candidates), count=1, at_once=1).best
        if found and not found[0].may_run_out:
            return found[0]
    return None


def _singles(given: Candidate, axes: Sequence[Axis]) -> Iterator[Candidate]:
    """The given job with one axis changed; micro-batches only smaller."""
    for axis in axes:
        for choice in axis.of(given.base, {}):
            changes = {
                key: value
                for key, value in choice.overrides.items()
                if value != value_of(given.base, {}, key)
            }
            size = changes.get(MICRO_BATCH)
            if changes and not (size is not None and size > given.base.job.training.micro_batch_size):
                yield given.with_choice(axis.name, replace(choice, overrides=changes), -1)


def _together(
    evaluator: Evaluator, given: Candidate, single: Sequence[Candidate]
) -> Iterator[list[Candidate]]:
    """Every combination of two axes, of three, and so on; of those axes whose lightest choices fit."""
    lightest: dict[str, tuple[int, Candidate]] = {}
    for candidate, memory in zip(single, evaluator.memory(single), strict=True):
        (name,) = candidate.choices
        if memory is not None and (name not in lightest or memory.peaks["gpu"] < lightest[name][0]):
            lightest[name] = memory.peaks["gpu"], candidate
    choices = {name: [one.choices[name] for one in single if name in one.choices] for name in lightest}
    for count in range(2, len(lightest) + 1):
        least = [
            Candidate(given.base, {name: lightest[name][1].choices[name] for name in names}, -1)
            for names in combinations(lightest, count)
        ]
        memories = evaluator.memory(least)
        yield [
            Candidate(given.base, dict(zip(one.choices, chosen, strict=True)), -1)
            for one, memory in zip(least, memories, strict=True)
            if evaluator.fits(memory)
            for chosen in product(*(choices[name] for name in one.choices))
        ]


def _numbered(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [Candidate(one.base, one.choices, number) for number, one in enumerate(candidates)]


def _short(key: str) -> str:
    return key.removeprefix("strategy.config.")


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get("device", value))
    return str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)
