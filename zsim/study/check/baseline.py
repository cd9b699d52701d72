"""A baseline: pinned predictions (or recordings) of a team's runs, so that any change of them is noticed.

    {"format": 1, "zsim_version": "0.1.0",
     "tolerances": {"step": 0.02, "time": 0.02, "memory": 0.01, "overlap": 0.02},
     "cases": {"jobs/llama.toml": {"figures": {"step_seconds": 1.2, ...}, "ops": {...}, "calls": [...],
                                   "tolerances": {"step": 0.05}}},
     "known": [{"case": "*/deepspeed1-*", "check": "calls", "reason": "..."}]}

`tolerances` apply to all cases, and a case's own `tolerances` take precedence. Both are edited by hand, and
`--update-baseline` keeps them. `known` lists misses that are understood. They are shown with their reason and
do not fail the check. Names of cases are paths relative to the baseline's folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from zsim.comparison.verdict import PREDICTIONS, Tolerances
from zsim.errors import InputError, did_you_mean, unreadable_reason
from zsim.files import write_atomically
from zsim.reading import parse_json, read_text
from zsim.version import __version__

FORMAT = 1
_KEYS = ("format", "zsim_version", "tolerances", "cases", "known")


@dataclass(frozen=True, slots=True)
class KnownMiss:
    """A known miss with its reason. `case` and `check` are shell patterns (`*`, `?`)."""

    case: str
    check: str
    reason: str

    def matches(self, case: str, check: str) -> bool:
        return fnmatchcase(case, self.case) and fnmatchcase(check, self.check)


@dataclass
class Baseline:
    """The content of a baseline file at `path`."""

    path: Path
    tolerances: Tolerances = PREDICTIONS
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    known_misses: tuple[KnownMiss, ...] = ()

    def tolerances_of(self, case: str) -> Tolerances:
        """The case's tolerances, completed by the file's."""
        case_tolerances = self.cases.get(case, {}).get("tolerances", {})
        return _tolerances(case_tolerances, self.tolerances, f"{self.path.name}: cases: {case}: tolerances")

    def reason_of(self, case: str, check: str) -> str | None:
        """The reason if a miss of this check is known, else None."""
        return next((miss.reason for miss in self.known_misses if miss.matches(case, check)), None)

    def pin(self, case: str, content: Mapping[str, Any]) -> None:
        """Replace the pinned content of a case. Its tolerances stay."""
        tolerances = {key: value for key, value in self.cases.get(case, {}).items() if key == "tolerances"}
        self.cases[case] = {**content, **tolerances}

    def write(self) -> Path:
        """Write the file with one line per figure and cases in order, so that diffs are readable."""
        content = {
            "format": FORMAT,
            "zsim_version": __version__,
            "tolerances": _tolerance_values(self.tolerances),
            "cases": {name: self.cases[name] for name in sorted(self.cases)},
            "known": [
                {"case": miss.case, "check": miss.check, "reason": miss.reason} for miss in self.known_misses
            ],
        }
        return write_atomically(self.path, _format_json(content) + "\n")


def read_baseline(path: Path) -> Baseline:
    """Read a baseline. Raises InputError for a file that is missing, not JSON, or of another shape."""
    try:
        content = parse_json(read_text(path), path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; --update-baseline writes one") from None
    except OSError as error:
        raise InputError(f"{path}: {unreadable_reason(error)}") from None
    except ValueError as error:
        raise InputError(f"{path}: not a baseline: not JSON, or cut short: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        actual_format = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise InputError(f"{path}: found format {actual_format!r}, expected a baseline of format {FORMAT}")
    for key in content:
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS)
            raise InputError(f"{path}: unknown key '{key}', expected {', '.join(_KEYS)}{hint}")
    cases, misses = content.get("cases", {}), content.get("known", [])
    if not isinstance(cases, dict) or not all(isinstance(case, dict) for case in cases.values()):
        raise InputError(f"{path}: cases: expected an object of objects, one per case")
    try:
        known_misses = tuple(KnownMiss(row["case"], row["check"], row["reason"]) for row in misses)
    except (TypeError, KeyError):
        raise InputError(f"{path}: known: expected objects with case, check and reason") from None
    tolerances = _tolerances(content.get("tolerances", {}), PREDICTIONS, f"{path}: tolerances")
    baseline = Baseline(path, tolerances, cases, known_misses)
    for case in cases:
        baseline.tolerances_of(case)
    return baseline


def _tolerance_values(tolerances: Tolerances) -> dict[str, float]:
    return {name: getattr(tolerances, name) for name in ("step", "time", "memory", "overlap")}


def _tolerances(overrides: object, base: Tolerances, where: str) -> Tolerances:
    if not isinstance(overrides, Mapping):
        raise InputError(f'{where}: expected an object, e.g. {{"step": 0.02}}')
    try:
        return Tolerances.of({**_tolerance_values(base), **overrides})
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _format_json(content: Mapping[str, Any]) -> str:
    """JSON with one line per figure and per call."""
    return _lines(content, 0)


def _lines(value: Any, depth: int) -> str:
    indent, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict) and value and depth < 5:
        if depth >= 2 and set(value) >= {"times", "calls"}:
            return json.dumps(value)
        rows = [f"{indent}{json.dumps(key)}: {_lines(inner, depth + 1)}" for key, inner in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{outer}}}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"{indent}{json.dumps(row)}" for row in value) + f"\n{outer}]"
    return json.dumps(value)
