"""Reads cluster and GPU descriptions: presets by name, or TOML files of the user.

A file may say `extends = "dgx-h100"` (a preset, or a path relative to the file) and then needs only what
differs, key by key within a table. A table that changes numbers may state their origin in `source` and
`evidence`, else they are "assumed"; the source of the kept numbers is appended, and the table's grade is the
weaker of both.
A file with changes and no `description` does not inherit the parent's, which may describe what is changed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.reading import MAX_TOML_BYTES, parse_toml, read_given
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.collectives import LinkLatencies
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.cluster.offload_rates import default_offload_table
from zsim.specs.cluster.table import EVIDENCE_ORDER, UNSAID
from zsim.specs.messages import validated
from zsim.specs.presets import gpu_preset_path, topology_preset_path

_ORIGIN_KEYS = frozenset({"source", "evidence"})
_LABELS = frozenset({"schema", "extends", "name", "description"})
_MAX_DEPTH = 8
Read = Callable[[Path], Mapping[str, Any]]  # the tables of a TOML file


def load_cluster(source: str | Path | Mapping[str, Any], read: Read | None = None) -> Cluster:
    """The cluster of a preset's name ("dgx-h100"), of a TOML file, or of a file's tables; `read` (default
    `read_toml`) reads files.

    Raises InputError if the cluster does not exist, or if something in it is wrong.
    """
    read = read or read_toml
    if isinstance(source, Mapping):
        file, data = "cluster", _with_parents(source, "cluster", Path(), topology_preset_path, read)
    else:
        path = _find(source, topology_preset_path)
        file, data = path.name, _read_with_parents(path, topology_preset_path, read)
    for key in ("gpu", "nodes"):
        if isinstance(data.get(key), list):
            raise NotSimulatedError(
                f"{file}: {key}: several kinds of nodes or GPUs in one cluster are not simulated; "
                "give one, and slower GPUs of it as [faults.slow_gpus] of the experiment"
            )
    if isinstance(data.get("gpu"), str | Mapping):
        # The path of `gpu` is relative to the file that says it, which may be a parent.
        data["gpu"] = load_gpu(data["gpu"], read)
    elif "gpu" in data and not isinstance(data["gpu"], Gpu):
        raise InputError(
            f"{file}: gpu: expected the name of a GPU ('h100-sxm-80gb') or the path of a GPU file"
        )
    return validated(data, file, Cluster)


def load_gpu(source: str | Path | Mapping[str, Any], read: Read | None = None) -> Gpu:
    """The GPU of a preset's name ("h100-sxm-80gb"), of a TOML file, or of a file's tables."""
    read = read or read_toml
    if isinstance(source, Mapping):
        return validated(_with_parents(source, "gpu", Path(), gpu_preset_path, read), "gpu", Gpu)
    path = _find(source, gpu_preset_path)
    return validated(_read_with_parents(path, gpu_preset_path, read), path.name, Gpu)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; raises InputError when it cannot be read or is not TOML."""
    content = read_given(path, MAX_TOML_BYTES)
    try:
        return parse_toml(content.decode("utf-8"), path.name)
    except UnicodeDecodeError:
        raise InputError(f"{path.name}: not a TOML file: not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path.name}: not a TOML file, or cut short: {error}") from None


def _find(name_or_path: str | Path, preset: Callable[[str], Path]) -> Path:
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(".toml") or "/" in text or "\\" in text:
        return Path(name_or_path)
    return preset(text)


def _read_with_parents(
    path: Path, preset: Callable[[str], Path], read: Read, depth: int = 0
) -> dict[str, Any]:
    data = dict(read(path))
    if isinstance(data.get("gpu"), str) and data["gpu"].endswith(".toml"):
        data["gpu"] = str(path.parent / data["gpu"])
    return _with_parents(data, path.name, path.parent, preset, read, depth)


def _with_parents(
    data: Mapping[str, Any],
    file: str,
    folder: Path,
    preset: Callable[[str], Path],
    read: Read,
    depth: int = 0,
) -> dict[str, Any]:
    """The file's tables merged over those of all files that it extends, recursively."""
    if "extends" not in data:
        return dict(data)
    parent_name = data["extends"]
    if not isinstance(parent_name, str):
        raise InputError(f"{file}: extends: expected a preset's name or a path, found {parent_name!r}")
    if depth == _MAX_DEPTH:
        raise InputError(f"{file}: extends: more than {_MAX_DEPTH} files deep; does one extend itself?")
    parent_path = folder / parent_name if parent_name.endswith(".toml") else preset(parent_name)
    parent = _read_with_parents(parent_path, preset, read, depth + 1)
    merged = dict(parent)
    merged["name"] = Path(file).stem
    changed = [key for key in data if key not in _LABELS]
    if changed and "description" in parent:  # the parent's may describe what is changed
        merged["description"] = f"{parent_path.stem}, with changes to {', '.join(changed)}"
    for key, value in data.items():
        if key == "gpu" and isinstance(value, Mapping):
            value = _changed_gpu(value, parent.get("gpu"))
        elif isinstance(value, dict):
            before = parent.get(key, default_offload_table() if key == "offload" else None)
            if isinstance(before, dict):
                value = _merged_table(file, key, value, before, parent_path.stem)
        if key != "extends":
            merged[key] = value
    if isinstance(merged.get("collectives"), Mapping):
        merged["collectives"] = _with_links(merged["collectives"], data, parent)
    return merged


def _with_links(
    collectives: Mapping[str, Any], child: Mapping[str, Any], parent: Mapping[str, Any]
) -> Mapping[str, Any]:
    """`collectives` with the parent's latencies as `measured_on`, if the child keeps the parent's rounds and
    changes latencies of links."""
    stated = child.get("collectives", {})
    if isinstance(stated, Mapping) and {"protocols", "algorithms", "measured_on"} & set(stated):
        return {key: value for key, value in collectives.items() if key != "measured_on" or key in stated}
    if "measured_on" in collectives or not _latencies(child):
        return collectives
    return {**collectives, "measured_on": _latencies(parent)}


def _latencies(data: Mapping[str, Any]) -> dict[str, Any]:
    """The link latencies that a file states."""
    tables = {name: data.get(name) for name in LinkLatencies.model_fields}
    return {
        name: table["latency"]
        for name, table in tables.items()
        if isinstance(table, Mapping) and "latency" in table
    }


def _changed_gpu(change: Mapping[str, Any], parent: Any) -> dict[str, Any]:
    """The parent's GPU changed by the child's `[gpu]` table."""
    if "extends" in change or not isinstance(parent, str | Mapping):
        return dict(change)
    if isinstance(parent, str):
        return {"extends": parent, **change}
    return {**parent, **change}


def _merged_table(
    file: str, table: str, child: Mapping[str, Any], parent: Mapping[str, Any], parent_name: str
) -> dict[str, Any]:
    """`child` merged over `parent`, nested tables too; with the sources of both if both have numbers."""
    changed = set(child) - _ORIGIN_KEYS
    if "source" in parent and changed:
        child = {"source": UNSAID, "evidence": "assumed", **child}
    kept = {name: span for name, span in parent.get("spread", {}).items() if name not in child}
    merged = _merged_keys(child, {**parent, "spread": kept} if "spread" in parent else parent)
    if "source" in parent and changed and set(parent) - set(child):
        merged["source"] = f"{child['source']}; the rest as in {parent_name}: {parent['source']}"
        grades = [grade for grade in (child["evidence"], parent["evidence"]) if grade in EVIDENCE_ORDER]
        merged["evidence"] = max(grades, key=EVIDENCE_ORDER.index) if len(grades) == 2 else child["evidence"]
    return merged


def _merged_keys(child: Mapping[str, Any], parent: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(parent)
    for key, value in child.items():
        if isinstance(value, dict) and isinstance(parent.get(key), dict):
            value = _merged_keys(value, parent[key])
        merged[key] = value
    return merged
