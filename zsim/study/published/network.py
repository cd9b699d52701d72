"""What joined the nodes of a published run: as its table says, or as is known of its source."""

from __future__ import annotations

from zsim.report.job_features import network_word
from zsim.study.published.table import PublishedRun

# By the beginning of the source's name; tables whose rows do not say it have it in their `source_ref`.
# MosaicML states RoCE for its A100s (README of llm-foundry's benchmarks, 2023-10) and nothing for its H100s;
# azure-qwen-fsdp's two slow rows are TCP over the same machines' Ethernet.
_SOURCES = {
    "mosaic": "RoCE",
    "torchtitan": "RoCE",
    "fsdp-paper": "RoCE",
    "internevo": "RoCE",
    "azure": "InfiniBand",
    "zeropp": "InfiniBand",
    "megatron-2020": "InfiniBand",
    "megatron-sc21": "InfiniBand",
    "dlperf": "InfiniBand",
    "dgxc": "InfiniBand",
    "nanotron": "EFA",
    "pytorch-blog-2022": "EFA",
}
_SLOWEST_RDMA = 5.0  # Gb/s per GPU: below, TCP


def network_of(run: PublishedRun) -> str:
    """EFA, RoCE, InfiniBand or Ethernet; "" where it is not known."""
    said = network_word(run.text("inter_desc"))
    if said:
        return said
    rate = run.number("inter_gbps_per_gpu")
    if rate is not None and rate < _SLOWEST_RDMA:
        return "Ethernet"
    if run.source.startswith("mosaic") and "H100" in run.text("gpu"):
        return ""
    return next((name for source, name in _SOURCES.items() if run.source.startswith(source)), "")
