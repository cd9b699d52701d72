"""The cluster for the hardware columns of a published run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from validation.published.sources import complete_run
from validation.published.table import PublishedRun
from zsim.errors import NotSimulatedError
from zsim.report.job_features import find_network
from zsim.specs.cluster.cluster import Cluster
from zsim.units import BYTES_PER_SECOND, parse_quantity

# GPU column (longest match first) -> preset.
CLUSTERS = {
    "A100-SXM4-80GB": "dgx-a100-80gb",
    "A100-SXM4-40GB": "dgx-a100-40gb",
    "H100-SXM-96GB-HBM2e": "grand-teton-h100-500w",
    "H100-SXM5-80GB": "dgx-h100",
    "H200-SXM-141GB": "hgx-h200",
    "B200-SXM-180GB": "hgx-b200",
    "GB200-186GB": "gb200-nvl72",
    "B300-SXM-270GB": "hgx-b300",
    "GB300-288GB": "gb300-nvl72",
    "V100-SXM3-32GB": "dgx-2",
    "V100-SXM2-16GB": "dgx-1",
    "V100-SXM2-32GB": "jean-zay-v100",
}
_BUSY = r"degrades? strongly"  # Hugging Face's cluster, whose collectives were measured among other jobs
_SLOWEST_RDMA = 5.0  # Gb/s per GPU: below, TCP
_LABELS = frozenset(("extends", "name", "description", "gpus_per_node"))


def cluster_preset(run: PublishedRun) -> str:
    """The name of the preset whose GPU the row names. Raises NotSimulatedError if there is none."""
    gpu = run.text("gpu")
    if gpu.startswith("H100-SXM5-80GB") and "AWS p5" in run.text("inter_desc"):
        return "aws-p5-busy" if re.search(_BUSY, run.text("inter_desc")) else "aws-p5"
    for name, preset in CLUSTERS.items():
        if gpu.startswith(name) and "labelled" not in gpu:
            return preset
    raise NotSimulatedError(f"GPU '{gpu}' has no hardware file")


def cluster_table(run: PublishedRun, name: str, preset: Cluster) -> dict[str, Any]:
    """The preset and the tables in which the row differs from it: GPUs per node, bandwidth of the NVLinks,
    network bandwidth per GPU."""
    table: dict[str, Any] = {"extends": name}
    per_node = run.count("gpus_per_node") or preset.gpus_per_node
    if per_node != preset.gpus_per_node:
        table["gpus_per_node"] = per_node
    network = run.number("inter_gbps_per_gpu")
    if network:
        table["nic"] = {"per_node": per_node, "bandwidth": _rate(network * 1e9 / 8)}
    elif (run.count("n_gpus") or 1) > per_node:
        raise NotSimulatedError("the network between the nodes is not published")
    link = _link_bytes_per_second(run.text("intra_link"))
    if link is not None and abs(link / preset.node_link.bandwidth - 1) > 0.01:
        table["node_link"] = {"bandwidth": _rate(link)}
    return table


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
    """The attention implementation that the row names. "" stands for the GPU file's default,
    FlashAttention-2.
    """
    kernel = run.text("attn_kernel").lower()
    if "v1" in kernel:
        return "flash1-triton"
    return next((f"flash{generation}" for generation in "34" if f"fa{generation}" in kernel), "")


def _link_bytes_per_second(text: str) -> float | None:
    """Bytes per second in one direction from "NVLink4/NVSwitch 900GB/s bidir". None unless there is exactly
    one rate.
    """
    rates = re.findall(r"(\d+)\s?GB/s", text)
    return float(rates[0]) / 2 * 1e9 if len(rates) == 1 else None
