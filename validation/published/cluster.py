"""The cluster for the hardware columns of a published run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from validation.published.sources import complete_run
from validation.published.table import PublishedRun
from validation.published.vocabulary import (
    best_word,
    join_numbers,
    read_words,
    spellings,
    split_words,
    vocabulary,
)
from zsim.errors import NotSimulatedError
from zsim.report.job_features import find_network
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.files import load_cluster
from zsim.specs.presets import topology_preset_names
from zsim.units import BYTES_PER_SECOND, parse_quantity

_BUSY = r"degrades? strongly"  # Hugging Face's cluster, whose collectives were measured among other jobs
_SLOWEST_RDMA = 5.0  # Gb/s per GPU: below, TCP
_FORMS = ("pcie", "nvl", "max")  # of a chip, that a file must name
_LABELS = frozenset(("extends", "name", "description", "gpus_per_node"))


def cluster_preset(run: PublishedRun) -> str:
    """The name of the preset whose GPU the row names, however it is spelled. Raises NotSimulatedError if
    there is none."""
    gpu, network = run.text("gpu"), run.text("inter_desc")
    present = _gpu_words(gpu, run.number("gpu_mem_gb"))
    best = best_word("gpu", present)
    if best is None:
        best = _cluster_by_file(present)
    if best is None or "labelled" in gpu or any(form in present - best[1] for form in _FORMS):
        raise NotSimulatedError(f"GPU '{gpu}' has no hardware file")
    if best[0] == "dgx-h100" and re.search(r"(?i)\bp5\b|p5\.48xlarge", network):
        return "aws-p5-busy" if re.search(_BUSY, network) else "aws-p5"
    if best[0] == "dgx-a100-80gb" and re.search(r"(?i)jean zay", network):
        return "jean-zay-a100"
    return best[0]


def _gpu_words(text: str, memory_gb: float | None) -> frozenset[str]:
    """The words of a GPU's name, with and without joined numbers, and its memory: "40 GB", "40G" and "40" of
    the memory's column are 40gb."""
    plain = re.sub(r"(?i)(\d+) ?gi?b?\b", r"\1gb", text)
    words = set(spellings(plain))
    words |= {match[1] for word in words if (match := re.fullmatch(r"(sxm)\d", word))}
    words |= {match[1] for word in words if (match := re.fullmatch(r"(?:rtx|geforce)(\d+)", word))}
    if memory_gb and not any(re.fullmatch(r"\d+gb", word) for word in words):
        words.add(f"{memory_gb:.0f}gb")
    return frozenset(words)


def _cluster_by_file(present: frozenset[str]) -> tuple[str, frozenset[str]] | None:
    """The preset that the vocabulary does not list, by the name of its GPU's file: gh200 for
    "gh200-96gb"."""
    listed = vocabulary()["gpu"]
    for name in topology_preset_names():
        if name not in listed:
            chip = _chip(name)
            if chip in present and chip not in _listed_chips():
                return name, frozenset((chip,))
    return None


@cache
def _listed_chips() -> frozenset[str]:
    """The chips whose variants the vocabulary chooses among."""
    return frozenset(map(_chip, vocabulary()["gpu"]))


def _chip(cluster: str) -> str:
    """The first word of the name of a preset's GPU, with its number: "rtx4090" of rtx-4090."""
    return join_numbers(split_words(load_cluster(cluster).gpu.name))[0][0]


def cluster_table(run: PublishedRun, name: str, preset: Cluster, assumptions: list[str]) -> dict[str, Any]:
    """The preset and the tables in which the row differs from it: GPUs per node, bandwidth of the NVLinks,
    network bandwidth per GPU. A network between nodes that is not published is the preset's, by name."""
    table: dict[str, Any] = {"extends": name}
    gpus = run.count("n_gpus") or 1
    per_node = run.count("gpus_per_node") or preset.gpus_per_node
    if per_node != preset.gpus_per_node:
        table["gpus_per_node"] = per_node
    network = run.number("inter_gbps_per_gpu")
    if not network and gpus > per_node:
        network = described_gbps(run.text("inter_desc"), per_node)
        taken = f"the {preset.name} preset's" if network is None else f"{network:g} Gb/s for each GPU"
        assumptions.append(f"network: not published, taken as {taken}")
        if network is None and per_node != preset.gpus_per_node:
            network = preset.nic.bandwidth * preset.nic.per_node / preset.gpus_per_node * 8 / 1e9
    if network:
        table["nic"] = {"per_node": per_node, "bandwidth": _rate(network * 1e9 / 8)}
    link = _link_bytes_per_second(run.text("intra_link"))
    if link is not None and abs(link / preset.node_link.bandwidth - 1) > 0.01:
        table["node_link"] = {"bandwidth": _rate(link)}
    return table


def described_gbps(text: str, gpus_per_node: int) -> float | None:
    """Gb/s for each GPU by a description: "8x400Gb/s per node", "3.2 Tb/s", "400 Gb/s per GPU", "4x HDR".
    None where it says no rate. Rates of PCIe, and in bytes, are not the network's."""
    plain = re.sub(r"\d+(\.\d+)? ?[GT]B/s", "", text.replace(",", "")).lower()
    rate = re.search(r"(?:(\d+) ?x ?)?(\d+(?:\.\d+)?) ?(t|g)(?:bit|b(?!yte))?(?:/s|ps|e)?\b", plain)
    if rate is not None:
        gbps = float(rate[2]) * (1000 if rate[3] == "t" else 1)
        ports = int(rate[1]) if rate[1] else None
        if ports is None and "per gpu" in plain:
            return gbps
        return gbps * (ports or 1) / gpus_per_node
    best = best_word("network", frozenset(spellings(plain)))
    if best is None:
        return None
    count = re.search(r"(\d+) ?x", plain)
    return float(best[0]) * (int(count[1]) / gpus_per_node if count else 1.0)


def complete_cluster(run: PublishedRun, table: Mapping[str, Any]) -> str | dict[str, Any]:
    """The cluster table with a name and the sources of its numbers, or just the preset's name if nothing
    differs.
    """
    preset = str(table["extends"])
    if set(table) == {"extends"}:
        return preset
    network = network_of(run)
    over = f", over {network}" if network else ""
    tables: dict[str, Any] = {}
    for key, value in table.items():
        if key == "gpu":  # whose tables have a source each, of the rules
            tables[key] = {name: {**subtable, "evidence": "calibrated"} for name, subtable in value.items()}
        elif key not in _LABELS:
            sources = [f"columns of published run {run.row_id}{over}", *filter(None, [value.get("source")])]
            tables[key] = {**value, "source": "; ".join(sources), "evidence": "data sheet"}
    copied = {key: table[key] for key in ("gpus_per_node",) if key in table}
    description = f"{preset} as published run {run.row_id} has it{over}"
    return {"extends": preset, "name": preset, "description": description, **copied, **tables}


def network_of(run: PublishedRun) -> str:
    """The network between nodes (EFA, RoCE, InfiniBand or Ethernet), from the row or from the rules on its
    source. It is "" if unknown.
    """
    word = find_network(run.text("inter_desc"))
    if word:
        return word
    rate = run.number("inter_gbps_per_gpu")
    if rate is not None and rate < _SLOWEST_RDMA:
        return "Ethernet"
    return complete_run(run).run.text("network")


def _rate(bytes_per_second: float) -> str:
    """The bandwidth as a file writes it: in Gb/s where that parses to the same number."""
    text = f"{bytes_per_second * 8 / 1e9:g} Gb/s"
    is_same = parse_quantity(text, BYTES_PER_SECOND) == bytes_per_second
    return text if is_same else f"{bytes_per_second!r} B/s"


def attention_variant(run: PublishedRun) -> str:
    """The attention implementation that the row names. "" stands for the GPU file's default."""
    reading = read_words("attention", run.text("attn_kernel"))
    if reading.has("unfused attention"):
        return "math"
    if reading.has("flash-attn v1"):
        return "flash1-triton"
    return next((f"flash{generation}" for generation in "34" if reading.has(f"flash-attn {generation}")), "")


def _link_bytes_per_second(text: str) -> float | None:
    """Bytes per second in one direction from "NVLink4/NVSwitch 900GB/s bidir". None unless there is exactly
    one rate.
    """
    rates = re.findall(r"(\d+)\s?GB/s", text)
    return float(rates[0]) / 2 * 1e9 if len(rates) == 1 else None
