"""The evidence for each part of the step: the tables of numbers behind it, and how well they are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zsim.report.critical.causes import cause_meaning
from zsim.report.report import Report
from zsim.specs.cluster.table import EVIDENCE_ORDER, Evidence

_ORDER = tuple(reversed(EVIDENCE_ORDER))
NOTHING = "follows"  # a part without numbers of its own: what it waits for has them

# Cause of the critical path (`zsim.report.critical.causes`) -> the cluster's tables whose numbers it is
# computed from. A tier of links that is not here is one of the network's.
_TABLES: Mapping[str, tuple[str, ...]] = {
    "compute": ("gpu.peak", "gpu.gemm", "gpu.attention"),
    "hbm": ("gpu.memory", "gpu.memory_bound"),
    "launch": ("gpu.launch",),
    "interference": ("gpu.interference",),
    "latency": ("collectives",),
    "nvlink": ("node_link", "collectives"),
    "pcie": ("pcie",),
    "c2c": ("c2c",),
    "network": ("nic", "collectives"),
    "allocator": ("host",),
    "host": ("host",),
    "host memory": ("host", "offload"),
    "cpu": ("offload", "host"),
    "drives": ("nvme",),
    "others": (),
}
_OTHER_TIER = ("network", "collectives")


@dataclass(frozen=True, slots=True)
class EvidenceItem:
    """A part of the critical path, and the tables of numbers behind it."""

    cause: str
    seconds: float
    step_fraction: float
    evidence: str
    """The weakest grade of the tables."""
    tables: Mapping[str, str]
    """The grade of each table."""
    source: str
    """The source of the first table with the weakest grade."""

    @property
    def label(self) -> str:
        return cause_meaning(self.cause).label

    @property
    def weakest(self) -> tuple[str, ...]:
        """The tables with the weakest grade."""
        return tuple(name for name, grade in self.tables.items() if grade == self.evidence)

    @property
    def words(self) -> str:
        """The tables by grade, the weakest first, such as "data sheet: peak; calibrated: gemm, attention"."""
        by_grade = {
            grade: [name for name, table_grade in self.tables.items() if table_grade == grade]
            for grade in _ORDER
        }
        clauses = [
            f"{grade}: {', '.join(name.removeprefix('gpu.') for name in names)}"
            for grade, names in by_grade.items()
            if names
        ]
        return "; ".join(clauses)


def evidence_items(report: Report) -> tuple[EvidenceItem, ...]:
    """The parts of the step's critical path, longest first. None where the chain is not known (a recording's
    replay).
    """
    cluster = report.experiment.get("cluster")
    if not report.critical_path_seconds or not isinstance(cluster, Mapping):
        return ()
    items = [
        _evidence_item(cause, seconds, report.step_seconds, cluster)
        for cause, seconds in report.critical_path_seconds.items()
        if seconds > 0
    ]
    return tuple(sorted(items, key=lambda item: -item.seconds))


def _evidence_item(
    cause: str, seconds: float, step_seconds: float, cluster: Mapping[str, Any]
) -> EvidenceItem:
    tables_of_cause = [(name, _table(cluster, name)) for name in _TABLES.get(cause, _OTHER_TIER)]
    tables = {name: table for name, table in tables_of_cause if table is not None}
    grades = {name: str(table["evidence"]) for name, table in tables.items()}
    grade = weakest_grade(grades.values())
    first = next((table for name, table in tables.items() if grades[name] == grade), {})
    return EvidenceItem(cause, seconds, seconds / step_seconds, grade, grades, str(first.get("source", "")))


def _table(cluster: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    table: Any = cluster
    for part in name.split("."):
        table = table.get(part) if isinstance(table, Mapping) else None
    return table if isinstance(table, Mapping) and "evidence" in table else None


def weakest_grade(grades: Iterable[str]) -> str:
    """The weakest of the grades. `NOTHING` without any."""
    distinct_grades = set(grades)
    ordered_grades: list[Evidence] = [grade for grade in EVIDENCE_ORDER if grade in distinct_grades]
    return ordered_grades[-1] if ordered_grades else NOTHING


def fraction_by_grade(items: Iterable[EvidenceItem]) -> dict[str, float]:
    """The fraction of the step that rests on each grade, best known first. Zeros are left out."""
    totals = dict.fromkeys((*EVIDENCE_ORDER, NOTHING), 0.0)
    for item in items:
        totals[item.evidence] += item.step_fraction
    return {grade: fraction for grade, fraction in totals.items() if fraction > 0}
