"""The points of a study: every combination that its conditions keep, as an experiment."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel

from zsim.errors import InputError, ZsimError, did_you_mean
from zsim.specs.cluster.files import check_hardware_key, load_cluster
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.tables import (
    CostTable,
    Experiment,
    SimulationTable,
    TrainerTable,
    refuse_parallelisms,
)
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.strategy.registry import STRATEGIES
from zsim.study.sweep.study_file import LABEL, Expression, Rule, Study, flatten, nested_value

# Tables with free keys: those of other programs' files, and names of nodes and links.
_CLOSED_TABLES: dict[str, type[BaseModel]] = {
    "training": TrainingTable, "trainer": TrainerTable, "simulation": SimulationTable, "cost": CostTable,
}  # fmt: skip
_OPEN_TABLES = frozenset(Experiment.model_fields) - {*_CLOSED_TABLES, "strategy", "nodes", "gpus"}


@dataclass(frozen=True)
class Point:
    """One point: its number in the study, the values of the axes, and its experiment or the error that
    prevents it."""

    number: int
    values: Mapping[str, Any]
    experiment: Experiment | None
    error: str | None = None

    @classmethod
    def of(cls, number: int, values: Mapping[str, Any], build: Callable[[], Experiment]) -> Point:
        """The point whose experiment `build` makes, or the error that it raises."""
        try:
            return cls(number, values, build())
        except ZsimError as error:
            return cls(number, values, None, str(error))


def study_points(study: Study) -> list[Point]:
    """The points in the grid's order, with the last axis varying fastest. An invalid combination is a point
    with an error. A combination that `where` excludes is no point.

    Raises InputError where a varied key is not a key of experiments, or where a condition reads an unknown
    key or keeps no point.
    """
    _check_names(study)
    points: list[Point] = []
    for values in _combinations(study):
        overrides = {**study.overrides, **{key: value for key, value in values.items() if key != LABEL}}
        for rule in study.rules:
            _apply(rule, overrides, _Lookup(study, overrides, values))
        lookup = _Lookup(study, overrides, values)
        if not all(condition.value(lookup) for condition in study.where):
            continue
        points.append(Point.of(len(points), values, partial(_experiment, study, overrides)))
    if not points:
        raise InputError(f"{study.name}: 'where' keeps none of {study.num_combinations:,} combinations")
    if len(points) > 1 and points[0].error is not None and len({point.error for point in points}) == 1:
        # not about the values of an axis: what all points have in common
        message = points[0].error.removeprefix("--set ").removeprefix(f"{study.name}: ")
        raise InputError(f"{study.name}: {message}")
    return points


def _experiment(study: Study, overrides: Mapping[str, Any]) -> Experiment:
    return build_experiment(dict(study.base), overrides, origin=study.name, code=study.code)


def _combinations(study: Study) -> Iterator[dict[str, Any]]:
    for rows in itertools.product(*(axis.rows for axis in study.axes)):
        yield {
            key: value
            for axis, row in zip(study.axes, rows, strict=True)
            for key, value in zip(axis.keys, row, strict=True)
        }


class _Lookup:
    """The value of a key at one point: the point's setting, else the base's, else the experiment's default.
    `nodes` and `gpus` are both available, whichever of the two the study sets.
    """

    def __init__(self, study: Study, overrides: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self.study, self.overrides, self.values = study, overrides, values
        self._data: Mapping[str, Any] | None = None

    def __call__(self, name: str) -> Any:
        for mapping in (self.overrides, self.values):
            if name in mapping:
                return mapping[name]
        if name in ("nodes", "gpus"):
            return self._count_of(name)
        if self._data is None:
            self._data = self._resolve_data()
        return nested_value(self._data, name)

    def _resolve_data(self) -> Mapping[str, Any]:
        try:
            return _experiment(self.study, self.overrides).model_dump()
        except ZsimError:
            return self.study.base  # the point reports the error

    def _count_of(self, name: str) -> int | None:
        chosen = self.overrides if {"nodes", "gpus"} & set(self.overrides) else self.study.base
        if isinstance(chosen.get(name), int):
            return int(chosen[name])
        try:
            per_node = load_cluster(self("cluster")).gpus_per_node
        except ZsimError:
            return None
        given_count = chosen.get("nodes" if name == "gpus" else "gpus") or 1
        if not isinstance(given_count, int):
            return None  # the point reports the error
        return given_count * per_node if name == "gpus" else max(1, -(-given_count // per_node))


def _apply(rule: Rule, overrides: dict[str, Any], lookup: _Lookup) -> None:
    if rule.when is not None and not rule.when.value(lookup):
        return
    for key, value in rule.values:
        overrides[key] = value.value(lookup) if isinstance(value, Expression) else value


def _check_names(study: Study) -> None:
    """Raise InputError unless every key that is set or varied is a key of experiments, and every key that a
    condition reads could be set."""
    tables = {name: {name} for name in Experiment.model_fields}
    for table, model in _CLOSED_TABLES.items():
        tables[table] |= {f"{table}.{name}" for name in model.model_fields}
    tables["strategy"] |= {f"strategy.{name}" for kind in STRATEGIES.values() for name in kind.model_fields}
    settable = sorted(set().union(*tables.values()) | {LABEL})
    rule_keys = [key for rule in study.rules for key, _ in rule.values]
    cluster_tables = {key: value for key, value in study.base.items() if key == "cluster"}
    cluster_keys = [key for key, _ in flatten(cluster_tables)]
    for key in (*study.base, *cluster_keys, *study.overrides, *study.keys, *rule_keys):
        first, _, subkey = key.partition(".")
        if first in ("cluster", "gpu") and subkey:
            check_hardware_key(key, f"{study.name}: ")
            continue
        short = f"{first}.{subkey.partition('.')[0]}" if subkey and first not in _OPEN_TABLES else first
        if short not in settable:
            table, dot, last = key.rpartition(".")
            refuse_parallelisms(f"{study.name}: {table}{dot}", [last])
            raise InputError(f"{study.name}: unknown key '{key}'{did_you_mean(short, settable)}")
    expressions = [*study.where]
    for rule in study.rules:
        expressions += [rule.when] if rule.when is not None else []
        expressions += [value for _, value in rule.values if isinstance(value, Expression)]
    readable = {"model", "cluster", "nodes", "gpus", LABEL, *study.keys, *study.overrides}
    readable |= {key for rule in study.rules for key, _ in rule.values}
    readable |= tables["strategy"].union(*(tables[table] for table in _CLOSED_TABLES))
    for expression in expressions:
        for name in expression.names:
            is_table = name.partition(".")[0] in _OPEN_TABLES
            if name not in readable and not is_table and nested_value(study.base, name) is None:
                raise InputError(
                    f"{expression.where}: {expression.text!r}: unknown key '{name}'"
                    f"{did_you_mean(name, sorted(readable))}"
                )
