"""The resolved experiment as readable sections: values with their units, sources and evidence grades."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zsim.report.traffic import CollectiveRow
from zsim.units import format_bytes, format_flops, format_rate, format_seconds

_PLAIN = (str, int, bool)  # a tuple: a union would be made anew for each value


def plain(value: Any) -> Any:
    """`value` as JSON data: mappings, lists, text and finite numbers. Numbers that are not finite become
    None.
    """
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(entry) for entry in (sorted(value) if isinstance(value, set | frozenset) else value)]
    to_scalar = getattr(value, "item", None)  # a numpy scalar
    return plain(to_scalar()) if callable(to_scalar) else str(value)


def collective_content(row: CollectiveRow) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "group": row.group,
        "count": row.count,
        "bytes": row.bytes,
        "dtype": row.dtype,
        "busy_seconds": row.busy_seconds,
        "group_size": row.group_size,
        "algorithm_bytes_per_second": row.algorithm_bytes_per_second,
        "bus_bytes_per_second": row.bus_bytes_per_second,
        "exposed_seconds": row.exposed_seconds,
    }


_LONG = 40  # letters; tables with longer values get a line for each


@dataclass
class SettingsTable:
    """A table of the experiment: `rows` are (label, value), without the file's `source` and `evidence`."""

    title: str
    rows: list[tuple[str, str]] = field(default_factory=list)
    source: str = ""
    evidence: str = ""
    children: list[SettingsTable] = field(default_factory=list)

    @property
    def has_long_values(self) -> bool:
        return any(len(value) > _LONG for _, value in self.rows)


# The unit of a number by the end of its key, the longest first; hardware files have the unit in the value.
_BY_KEY_END: dict[str, Callable[[float], str]] = {
    "bytes_per_second": format_rate,
    "flops_per_second": format_flops,
    "_bytes": format_bytes,
    "bytes_half": format_bytes,
    "bandwidth": format_rate,
    "capacity": format_bytes,
    "memory": format_bytes,
    "context": format_bytes,
    "communicator": format_bytes,
    "exchange_peer": format_bytes,
    "latency": format_seconds,
    "_round": format_seconds,
    "overhead": format_seconds,
    "base": format_seconds,
}
_BY_TABLE: dict[str, Callable[[float], str]] = {"peak": format_flops, "power": lambda watts: f"{watts:g} W"}


def sections(experiment: Mapping[str, Any], title: str = "experiment") -> SettingsTable:
    """`experiment` as nested sections. Unset values are left out."""
    section = SettingsTable(title.replace("_", " "))
    for key, value in plain(experiment).items():
        if value is None or value == {} or value == []:
            continue
        if key in ("source", "evidence") and isinstance(value, str):
            setattr(section, key, value)
        elif isinstance(value, Mapping):
            section.children.append(sections(value, key))
        elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
            tables = (entry if isinstance(entry, Mapping) else {"value": entry} for entry in value)
            section.children += [sections(entry, f"{key} {number}") for number, entry in enumerate(tables, 1)]
        else:
            label = key if "." in key else key.replace("_", " ")  # a dotted key was written by the user
            section.rows.append((label, _value(title, key, value)))
    return section


def _value(table: str, key: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_value(table, key, entry) for entry in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if table in _BY_TABLE:
        return _BY_TABLE[table](value)
    if key.endswith("_fraction") or key == "efficiency":
        return f"{value * 100:.3g} %"
    if "seconds" in key:
        return format_seconds(value)
    for end, format_value in _BY_KEY_END.items():
        if key.endswith(end):
            return format_value(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
