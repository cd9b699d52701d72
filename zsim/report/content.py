"""Values of a report as JSON data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zsim.report.traffic import CollectiveRow

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
