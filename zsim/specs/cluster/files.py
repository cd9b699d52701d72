"""Reads cluster and GPU descriptions: presets by name, or TOML files of the user.

A file may say `extends = "dgx-h100"` (a preset, or a path relative to the file) and then needs only what
differs, key by key within a table. A table that changes numbers may state their origin in `source` and
`evidence`, else they are "assumed". The source of the kept numbers is appended, and the table's grade is the
weaker of both.

`fabric` and `oversubscription` next to `extends` stand for a `[network]` table.

[[nodes]] makes a cluster of several types of nodes, in this order. Each entry has a `count` and either a
`gpu`, which takes the place of the cluster's, or `like`, a cluster's name. With `like` GPU, links, PCIe,
cards and host are as there.

A file with changes and no `description` does not inherit the parent's, which may describe what is changed.

# [Note: a GPU at another power limit]
`power_limit` of a GPU is what `nvidia-smi -pl` or a chip's cTDP sets, in place of its file's. Matrix products
and fused attention run at the limit, so they slow down with it. Kernels bound by memory do so only where the
limit is below what they draw ("The Illusion of Power Capping in LLM Decode", arXiv 2605.11999, abstract:
decoding draws 137 to 300 of an H200's 700 W, so that no cap slows it).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from zsim.errors import InputError, expected_text
from zsim.files import PRESETS
from zsim.reading import MAX_TOML_BYTES, parse_toml, read_user_file
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.collectives import LinkLatencies
from zsim.specs.cluster.gpu import AttentionEfficiency, Gpu, Power
from zsim.specs.cluster.host_speeds import default_offload_table, scale_host_costs
from zsim.specs.cluster.network import KEYS
from zsim.specs.cluster.node_request import (
    NETWORK_ALIASES,
    NODE_KEYS,
    check_no_unused_keys,
    expand_aliases,
    read_node_entries,
    refuse_node_counts,
    shared_keys_of,
)
from zsim.specs.key_index import first_unknown_segment, keys_at, nearest_key
from zsim.specs.lazy_model import EVIDENCE_ORDER, UNSAID, Evidence, FiniteTable
from zsim.specs.messages import validate_table
from zsim.specs.presets import gpu_preset_path, topology_preset_path

_ORIGIN_KEYS = frozenset({"source", "evidence"})
_LABELS = frozenset({"schema", "extends", "name", "description"})
_MAX_DEPTH = 8


class HardwareFiles:
    """The TOML files of clusters and GPUs, each read once, and the GPUs that they describe."""

    def __init__(self) -> None:
        self._tables: dict[Path, dict[str, Any]] = {}
        self._gpus: dict[Path, Gpu] = {}

    def tables(self, path: Path) -> dict[str, Any]:
        """A file's tables, which must not be changed. Raises InputError as `read_toml`."""
        if path not in self._tables:
            self._tables[path] = read_toml(path)
        return self._tables[path]

    def gpu(self, path: Path) -> Gpu:
        """A file's GPU. Raises InputError if something in it is wrong."""
        if path not in self._gpus:
            tables = _read_and_merge_parents(path, gpu_preset_path, self)
            self._gpus[path] = apply_power_limit(validate_table(tables, path.name, Gpu))
        return self._gpus[path]


def load_cluster(source: str | Path | Mapping[str, Any], files: HardwareFiles | None = None) -> Cluster:
    """The cluster of a preset's name ("dgx-h100"), of a TOML file, or of a file's tables.

    `files` are those that have been read.

    Raises InputError if the cluster does not exist, or if something in it is wrong.
    """
    files = files or HardwareFiles()
    if isinstance(source, Mapping):
        _check_is_complete(source)
        file, data = "cluster", _merge_parents(source, "cluster", Path(), topology_preset_path, files)
    else:
        refuse_node_counts(str(source))
        path = _find(source, topology_preset_path)
        file, data = path.name, _read_and_merge_parents(path, topology_preset_path, files)
    if isinstance(data.get("gpu"), list):
        raise InputError(
            f"{file}: gpu: found a list, expected one GPU; list nodes of several kinds under [[nodes]], each "
            "with `gpu` (or `like`, a cluster) and `count`"
        )
    if "nodes" in data:
        return validate_table(_resolve_node_types(data, file, files), file, Cluster)
    return validate_table(_resolve_gpu(data, file, files), file, Cluster)


def _check_is_complete(source: Mapping[str, Any]) -> None:
    """Raises InputError for a table of changes that does not say which cluster it changes."""
    if {"extends", "network", "fabric"} & set(source) or isinstance(source.get("nodes"), str | list):
        return
    first = next((key for key in source if key in Cluster.model_fields), None)
    change = 'power_limit = "500 W"' if first is None or first == "gpu" else "..."
    example = f'cluster = {{ extends = "dgx-h100", {first or "gpu"} = {{ {change} }} }}'
    counts = "; how many `nodes` there are stands beside `cluster`" if "nodes" in source else ""
    raise InputError(
        f"cluster: found a table of {', '.join(map(str, source)) or 'nothing'}, which is no whole cluster; "
        f"what it changes is said by `extends`, as in {example}{counts}"
    )


def cluster_tables(source: str) -> dict[str, Any]:
    """The tables of a preset's or a file's cluster, with those of the files that it extends."""
    return _read_and_merge_parents(_find(source, topology_preset_path), topology_preset_path, HardwareFiles())


def _resolve_gpu(data: dict[str, Any], file: str, files: HardwareFiles) -> dict[str, Any]:
    """The tables of a cluster with its GPU read.

    The path of `gpu` is relative to the file that says it, which may be a parent.
    """
    gpu = data.get("gpu")
    if isinstance(gpu, str) and gpu.endswith(".toml") and not Path(gpu).exists():
        raise InputError(
            f"{file}: gpu: no file '{gpu}'; expected the path of a GPU file, relative to the file that names "
            "it, or a GPU's name ('h100-sxm-80gb')"
        )
    if isinstance(gpu, str | Mapping):
        return {**data, "gpu": load_gpu(gpu, files)}
    if "gpu" in data and not isinstance(gpu, Gpu):
        raise InputError(
            f"{file}: gpu: expected the name of a GPU ('h100-sxm-80gb') or the path of a GPU file"
        )
    return data


def _resolve_node_types(data: dict[str, Any], file: str, files: HardwareFiles) -> dict[str, Any]:
    """The tables of a cluster whose `nodes` are of several types, with these types read.

    Anything that the file does not say of the cluster is as in the first file that its nodes are `like`.
    """
    entries = read_node_entries(data["nodes"], file)
    base = {key: value for key, value in data.items() if key != "nodes"}
    first = next((entry["like"] for entry in entries if "like" in entry), None)
    if "network" not in base and first is not None:
        base_cluster = _read_and_merge_parents(
            _find(first, topology_preset_path), topology_preset_path, files
        )
        name = " + ".join(f"{entry['count']} x {entry.get('like') or entry['gpu']}" for entry in entries)
        labels = {"name": name.replace(".toml", ""), "description": f"nodes of several types: {name}"}
        base = {**base_cluster, **labels, **base}
    nodes = [_resolve_node_type(entry, number, base, file, files) for number, entry in enumerate(entries)]
    return {**base, **{key: nodes[0][key] for key in NODE_KEYS}, "nodes": nodes}


def _resolve_node_type(
    entry: Mapping[str, Any], number: int, cluster: Mapping[str, Any], file: str, files: HardwareFiles
) -> dict[str, Any]:
    """One entry of `nodes` in the shape of a NodeType. `cluster` has the tables that the file states
    for all.
    """
    where = f"{file}: nodes[{number}]"
    if "like" in entry:
        like = entry["like"]
        if not isinstance(like, str):
            raise InputError(f"{where}.like: found {like!r}, expected a cluster's name or a path")
        like_cluster = load_cluster(like, files)
        if like_cluster.nodes:
            raise InputError(f"{where}.like: '{like}' has nodes of several types itself; name one of these")
        cluster = {key: getattr(like_cluster, key) for key in NODE_KEYS}
        gpu, name = like_cluster.gpu, Path(like).stem
    else:
        gpu = _resolve_gpu({"gpu": entry["gpu"]}, where, files)["gpu"]
        name = gpu.name
    missing = [key for key in NODE_KEYS if key != "gpu" and key not in cluster]
    if missing:
        raise InputError(
            f"{file}: missing {', '.join(missing)}: nodes that name a GPU alone need a cluster around it; "
            'expected `extends = "dgx-h100"` or another cluster, or `like` in place of `gpu`'
        )
    node_tables = {key: cluster[key] for key in NODE_KEYS}
    return {**node_tables, "gpu": gpu, "name": name, "count": entry["count"]}


def check_hardware_key(dotted: str, where: str) -> None:
    """Raises InputError for a key under `cluster.`, or `gpu.` (the cluster's GPU), that no cluster has.

    `where` begins the message.
    """
    components = dotted.removeprefix("cluster.").split(".")
    number = first_unknown_segment(components, Cluster)
    if number is None or (
        components[number] in ("extends", *NETWORK_ALIASES) and components[:number] in ([], ["gpu"])
    ):
        return
    key, options = components[number], keys_at(components[:number], Cluster)
    value = dict.fromkeys(components[number + 1 : number + 2])
    hint = nearest_key(key, value, options, Cluster, prefix="cluster.").replace("'cluster.gpu.", "'gpu.")
    raise InputError(f"{where}{dotted}: unknown key '{key}'{hint or expected_text(key, options)}")


def load_gpu(source: str | Path | Mapping[str, Any], files: HardwareFiles | None = None) -> Gpu:
    """The GPU of a preset's name ("h100-sxm-80gb"), of a TOML file, or of a file's tables."""
    files = files or HardwareFiles()
    if isinstance(source, Mapping):
        parent = source.get("extends")
        if isinstance(parent, str) and set(source) == {"extends", "power_limit"}:  # keeps its name
            path = _find(parent, gpu_preset_path)
            data = {
                **_read_and_merge_parents(path, gpu_preset_path, files),
                "power_limit": source["power_limit"],
            }
            return apply_power_limit(validate_table(data, "gpu", Gpu))  # the file has been read before
        return apply_power_limit(
            validate_table(_merge_parents(source, "gpu", Path(), gpu_preset_path, files), "gpu", Gpu)
        )
    return files.gpu(_find(source, gpu_preset_path))


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises InputError when it cannot be read or is not TOML."""
    content = read_user_file(path, MAX_TOML_BYTES)
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


def _read_and_merge_parents(
    path: Path, preset: Callable[[str], Path], files: HardwareFiles, depth: int = 0
) -> dict[str, Any]:
    data = dict(files.tables(path))
    if isinstance(data.get("gpu"), str) and data["gpu"].endswith(".toml"):
        data["gpu"] = str(path.parent / data["gpu"])
    if isinstance(data.get("nodes"), list):
        data["nodes"] = [_resolve_paths(entry, path.parent) for entry in data["nodes"]]
    return _merge_parents(data, path.name, path.parent, preset, files, depth)


def _resolve_paths(entry: Any, folder: Path) -> Any:
    """An entry of `nodes` with its paths, which are relative to `folder`, joined with it."""
    if not isinstance(entry, Mapping):
        return entry
    return {
        key: str(folder / value) if isinstance(value, str) and value.endswith(".toml") else value
        for key, value in entry.items()
    }


def _merge_parents(
    data: Mapping[str, Any],
    file: str,
    folder: Path,
    preset: Callable[[str], Path],
    files: HardwareFiles,
    depth: int = 0,
) -> dict[str, Any]:
    """The file's tables merged over those of all files that it extends, recursively."""
    if "extends" not in data:
        if preset is topology_preset_path and "nodes" in data and "network" not in data:
            check_no_unused_keys(data, data["nodes"], file)
        return expand_aliases(data, {}, file) if preset is topology_preset_path else dict(data)
    parent_name = data["extends"]
    if not isinstance(parent_name, str):
        raise InputError(f"{file}: extends: expected a preset's name or a path, found {parent_name!r}")
    if depth == _MAX_DEPTH:
        raise InputError(f"{file}: extends: more than {_MAX_DEPTH} files deep; does one extend itself?")
    parent_path = folder / parent_name if parent_name.endswith(".toml") else preset(parent_name)
    parent = _read_and_merge_parents(parent_path, preset, files, depth + 1)
    if preset is topology_preset_path:
        data = expand_aliases(data, parent, file)
        network, parent_table = data.get("network"), parent.get("network")
        if isinstance(network, Mapping) and isinstance(parent_table, Mapping):
            kind = network.get("kind", parent_table.get("kind"))
            if (
                isinstance(kind, str) and kind in KEYS and kind != parent_table.get("kind")
            ):  # what only the parent's shape has
                parent = {**parent, "network": shared_keys_of(parent_table, kind)}
    merged = dict(parent)
    if data.get("vendor", parent.get("vendor")) != parent.get("vendor"):  # what only the parent's vendor has
        merged.pop("compute_capability", None)
        merged.pop("caching_allocator", None)
    merged["name"] = Path(file).stem
    changed = [key for key in data if key not in _LABELS]
    if changed and "description" in parent:  # the parent's may describe what is changed
        merged["description"] = f"{parent_path.stem}, with changes to {', '.join(changed)}"
    for key, value in data.items():
        if key == "gpu" and isinstance(value, Mapping):
            value = _merge_gpu(value, parent.get("gpu"))
        elif isinstance(value, dict):
            parent_table = parent.get(key, default_offload_table() if key == "offload" else None)
            if isinstance(parent_table, dict):
                value = _merge_table(value, parent_table, parent_path.stem)
            if key == "host":
                value = scale_host_costs(value, data[key], parent_table, file)
        if key != "extends":
            merged[key] = value
    if preset is topology_preset_path and "nodes" in merged:
        check_no_unused_keys(data, merged["nodes"], file)
    if isinstance(merged.get("collectives"), Mapping):
        merged["collectives"] = _add_measured_latencies(merged["collectives"], data, parent)
    return merged


def _add_measured_latencies(
    collectives: Mapping[str, Any], child: Mapping[str, Any], parent: Mapping[str, Any]
) -> Mapping[str, Any]:
    """`collectives` with the parent's latencies as `measured_on`.

    They are added if the child keeps the parent's rounds and changes latencies of links.
    """
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


def _merge_gpu(change: Mapping[str, Any], parent: Any) -> dict[str, Any]:
    """The parent's GPU changed by the child's `[gpu]` table."""
    if "extends" in change or not isinstance(parent, str | Mapping):
        return dict(change)
    if isinstance(parent, str):
        return {"extends": parent, **change}
    return {**parent, **change}


def _merge_table(child: Mapping[str, Any], parent: Mapping[str, Any], parent_name: str) -> dict[str, Any]:
    """`child` merged over `parent`, nested tables too, with the sources of both if both have numbers."""
    changed = set(child) - _ORIGIN_KEYS
    if "source" in parent and changed:
        child = {"source": UNSAID, "evidence": "assumed", **child}
    inherited_spread = {name: span for name, span in parent.get("spread", {}).items() if name not in child}
    parent = {key: value for key, value in parent.items() if key != "spread" or inherited_spread}
    merged = _merge_keys(child, {**parent, "spread": inherited_spread} if inherited_spread else parent)
    if "source" in parent and changed and set(parent) - set(child):
        merged["source"] = f"{child['source']}; the rest as in {parent_name}: {parent['source']}"
        grades = [grade for grade in (child["evidence"], parent["evidence"]) if grade in EVIDENCE_ORDER]
        merged["evidence"] = max(grades, key=EVIDENCE_ORDER.index) if len(grades) == 2 else child["evidence"]
    return merged


def _merge_keys(child: Mapping[str, Any], parent: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(parent)
    for key, value in child.items():
        if isinstance(value, dict) and isinstance(parent.get(key), dict):
            value = _merge_keys(value, parent[key])
        merged[key] = value
    return merged


_PRESET = PRESETS / "power_law.toml"


class PowerPair(FiniteTable):
    """One chip at two power limits: watts, and rates in any one unit.

    `residual` is the law's error at the second limit, predicted over measured, less 1.
    """

    chip: str
    watts: tuple[float, float]
    rates: tuple[float, float]
    residual: float
    source: str = Field(min_length=1)


class PowerLaw(FiniteTable):
    """`presets/power_law.toml`: the exponent of rate over power, and the range of limits for which it is
    offered.

    The range is in fractions of a file's limit.
    """

    schema_version: Literal[1] = Field(alias="schema")
    exponent: float = Field(gt=0)
    range: tuple[float, float]
    source: str = Field(min_length=1)
    evidence: Evidence
    pairs: tuple[PowerPair, ...]


def load_power_law() -> PowerLaw:
    """The shipped law."""
    content = read_user_file(_PRESET, MAX_TOML_BYTES).decode("utf-8")
    return validate_table(parse_toml(content, _PRESET.name), _PRESET.name, PowerLaw)


def apply_power_limit(gpu: Gpu) -> Gpu:
    """The GPU at its `power_limit`, unchanged without one.

        f' = f (P / P0) ^ a

    f is the fraction of peak that products or attention reach at the file's limit P0 (`[power] maximum`), P
    the limit, and a `[power] exponent`, or the law's of `presets/power_law.toml`.

    Raises InputError for a GPU whose file does not state its power, and for limits outside of the law's
    range.
    """
    limit = gpu.power_limit
    if limit is None:
        return gpu
    if gpu.power is None:
        raise InputError(
            f"GPU '{gpu.name}': power_limit: its file does not say what it draws; expected a [power] table "
            "with `maximum` and `idle`"
        )
    if limit == gpu.power.maximum:
        return gpu
    law = load_power_law()
    file_limit = gpu.power.maximum
    lowest, highest = (file_limit * end for end in law.range)
    if not lowest <= limit <= highest:
        raise InputError(
            f"GPU '{gpu.name}': power_limit: found {limit:g} W, expected {lowest:g} to {highest:g} W "
            f"({law.range[0]:.0%} to {law.range[1]:.0%} of the {file_limit:g} W of its file)"
        )
    exponent = law.exponent if gpu.power.exponent is None else gpu.power.exponent
    factor = (limit / file_limit) ** exponent
    remark = (
        f"; at {limit:g} of {file_limit:g} W times {factor:.3f}, exponent {exponent:g} "
        "(presets/power_law.toml)"
    )
    gemm = gpu.gemm.model_copy(
        update={
            "max_fraction": gpu.gemm.max_fraction * factor,
            "by_dtype": {dtype: value * factor for dtype, value in gpu.gemm.by_dtype.items()},
            **_origin(gpu.gemm.source + remark, gpu.gemm.evidence, law),
        }
    )
    attention = _slow_attention(gpu.attention, factor).model_copy(
        update=_origin(gpu.attention.source + remark, gpu.attention.evidence, law)
    )
    changes: dict[str, Any] = {
        "name": f"{gpu.name} at {limit:g} W",
        "description": f"{gpu.description}, limited to {limit:g} W",
        "gemm": gemm,
        "attention": attention,
        "power": _limit_power(gpu.power, limit),
    }
    memory_bound = gpu.power.memory_bound
    if memory_bound is not None and memory_bound > limit:
        slower = (limit / memory_bound) ** exponent
        table = gpu.memory_bound
        names = ("elementwise_fraction", "optimizer_fraction", "copy_fraction")
        changes["memory_bound"] = table.model_copy(
            update={
                **{name: getattr(table, name) * slower for name in names},
                **_origin(
                    f"{table.source}; the limit is below their {memory_bound:g} W", table.evidence, law
                ),
            }
        )
    return gpu.model_copy(update=changes)


def _origin(source: str, grade: Evidence, law: PowerLaw) -> dict[str, Any]:
    return {"source": source, "evidence": max(grade, law.evidence, key=EVIDENCE_ORDER.index)}


def _slow_attention(table: AttentionEfficiency, factor: float) -> AttentionEfficiency:
    """The curve and its variants at `factor` times their height."""
    variants = {
        name: curve.model_copy(
            update={
                "forward_fraction": curve.forward_fraction * factor,
                "backward_fraction": curve.backward_fraction * factor,
            }
        )
        for name, curve in table.variants.items()
    }
    return table.model_copy(
        update={
            "forward_fraction": table.forward_fraction * factor,
            "backward_fraction": table.backward_fraction * factor,
            "variants": variants,
        }
    )


def _limit_power(power: Power, limit: float) -> Power:
    """The GPU's power, nowhere above the limit."""
    changes: dict[str, Any] = {"maximum": limit, "idle": min(power.idle, limit)}
    for name in ("memory_bound", "communication"):
        watts = getattr(power, name)
        if watts is not None:
            changes[name] = min(watts, limit)
    return power.model_copy(update={**changes, "source": f"{power.source}; limited to {limit:g} W"})
