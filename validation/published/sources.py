"""Knowledge about the sources of published runs beyond their columns: the rules of
`published_sources.toml`, whose header defines how rules are read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from validation.published.parallelism import stated_degrees
from validation.published.table import PublishedRun
from validation.published.vocabulary import canonical_text
from zsim.errors import NotSimulatedError
from zsim.reading import parse_toml
from zsim.specs.experiment.overrides import set_dotted_key
from zsim.specs.messages import validate_table

_FILE = "published_sources.toml"


_Value = bool | int | float | str | tuple[int, ...] | tuple[str, ...]


class SourceRule(BaseModel):
    """One rule of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    why: str
    when: dict[str, str]
    unless: dict[str, str] = {}
    cells: dict[str, str] = {}
    changes: dict[str, bool | int | float | str | tuple[int, ...] | tuple[str, ...]] = Field(
        default={}, alias="set"
    )
    assume: str | None = None
    leaves_out: bool = False
    """The row's time is not that of a step in the middle of a run: it is compared with nothing."""

    @property
    def is_of_one_source(self) -> bool:
        """Whether the rule tells what was found out of single sources, and not what a software of its date
        does, which everybody can know."""
        return not {"source", "source_ref"}.isdisjoint(self.when)

    def applies(self, run: PublishedRun, kind: str) -> bool:
        """Whether the rule is about the row. `kind` is the kind of its strategy, or "" before it is known.
        Rules on single sources are about no row that is read as a stranger would."""
        if run.is_strangers and self.is_of_one_source and not self.leaves_out:
            return False
        return all(_matches(run, kind, *condition) for condition in self.when.items()) and not any(
            _matches(run, kind, *condition) for condition in self.unless.items()
        )


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    rule: tuple[SourceRule, ...]


def _matches(run: PublishedRun, kind: str, column: str, pattern: str) -> bool:
    if column == "since":
        return run.text("date") >= pattern
    if column == "before":
        return run.text("date") < pattern
    source = "" if run.is_strangers else run.source
    text = {"source": source, "kind": kind}.get(column, run.text(column))
    texts = [text, canonical_text(column, text)]
    return any(re.search(pattern, found, re.IGNORECASE) for found in texts[: 1 + bool(texts[1])])


@cache
def source_rules() -> tuple[SourceRule, ...]:
    """The shipped rules, in order."""
    text = (Path(__file__).parent / _FILE).read_text(encoding="utf-8")
    return validate_table(parse_toml(text, _FILE), _FILE, _File).rule


@dataclass(frozen=True)
class CompletedRun:
    """A row with the cells that the rules fill in."""

    run: PublishedRun
    assumptions: tuple[str, ...]
    """The assumptions that these rules make."""


def complete_run(run: PublishedRun) -> CompletedRun:
    """The row with the torch release of `software` in the cell `torch`, and with the cells that the rules
    fill in. Raises NotSimulatedError for one that a rule leaves out."""
    release = re.search(r"torch (1\.\d+)", run.text("software"), re.IGNORECASE)
    if release and not run.text("torch"):
        run = _fill_cells(run, {"torch": release[1]})
    run = _fill_cells(run, stated_degrees(run))
    assumptions: list[str] = []
    for rule in source_rules():
        if rule.leaves_out and rule.applies(run, ""):
            raise NotSimulatedError(f"the published time is of no single step: {' '.join(rule.why.split())}")
        if rule.cells and rule.applies(run, ""):
            run = _fill_cells(run, rule.cells)
            assumptions += [rule.assume] if rule.assume else []
    return CompletedRun(run, tuple(assumptions))


def _fill_cells(run: PublishedRun, cells: Mapping[str, str]) -> PublishedRun:
    return replace(run, cells={**run.cells, **cells})


def changes_of_source(source: str, experiment: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of an experiment by dotted name that were found out of `source`.

    They are of rules that name it, and beside it at most the kind of strategy and dotted keys of the
    experiment, whose values they know as Python writes them.
    """
    changes: dict[str, Any] = {}
    for rule in source_rules():
        names = {column: _key_of(column) for column in rule.when if column != "source"}
        if not re.search(rule.when.get("source", "^$"), source) or rule.unless or not all(names.values()):
            continue
        if all(re.search(rule.when[name], _text_of(experiment, key)) for name, key in names.items()):
            changes |= rule.changes
    return changes


def _key_of(column: str) -> str:
    """The dotted key that a condition is about. Empty for a column of tables."""
    return "strategy.kind" if column == "kind" else column if "." in column else ""


def _text_of(experiment: Mapping[str, Any], key: str) -> str:
    """The value of a dotted key. Empty without one."""
    value: Any = experiment
    for part in key.split("."):
        value = value.get(part, "") if isinstance(value, Mapping) else ""
    return str(value)


def apply_rules(run: PublishedRun, data: dict[str, Any]) -> Iterable[str]:
    """Set the rules' changes in the experiment's `data`. Returns the rules' assumptions."""
    kind = str(data["strategy"]["kind"])
    assumptions = []
    for rule in source_rules():
        if rule.changes and rule.applies(run, kind):
            for key, value in rule.changes.items():
                set_dotted_key(data, key, value)
                if key.startswith("cluster."):
                    set_dotted_key(data, f"{key.rpartition('.')[0]}.source", " ".join(rule.why.split()))
            assumptions += [rule.assume] if rule.assume else []
    return assumptions
