"""From the hardware columns of a published run to a cluster."""

from __future__ import annotations

import re

import numpy as np

from zsim.errors import NotSimulatedError
from zsim.specs.cluster.cluster import Cluster, FrameworkMemory
from zsim.specs.cluster.files import load_cluster
from zsim.specs.cluster.gpu import with_attention_variant
from zsim.study.published.model import is_early_composer
from zsim.study.published.table import PublishedRun

# GPU column (longest match first) -> preset.
CLUSTERS = {
    "A100-SXM4-80GB": "dgx-a100-80gb",
    "A100-SXM4-40GB": "dgx-a100-40gb",
    "H100-SXM-96GB-HBM2e": "grand-teton-h100-500w",
    "H100-SXM5-80GB": "dgx-h100",
    "H200-SXM-141GB": "hgx-h200",
    "B200-SXM-180GB": "hgx-b200",
    "GB200-186GB": "gb200-nvl72",
    "V100-SXM3-32GB": "dgx-2",
    "V100-SXM2-16GB": "dgx-1",
    "V100-SXM2-32GB": "jean-zay-v100",
}


# Bus bandwidth in GB/s by nodes: medians of all-reduces of 256 MB on AWS p5 with EFA, while others ran
# (Ultra-Scale Playbook, pp_comm_bandwidth.html, size=256MB; its scatters and gathers are another 1.3 to 3
# times slower, for the greater part by latency).
_BUSY_P5 = {2: 361.7, 4: 160.1, 8: 99.6, 16: 84.7, 32: 64.9, 64: 32.9}


def cluster_preset(run: PublishedRun) -> str:
    """The preset whose GPU the row names; raises NotSimulatedError where there is none."""
    gpu = run.text("gpu")
    if gpu.startswith("H100-SXM5-80GB") and "AWS p5" in run.text("inter_desc"):
        return "aws-p5"
    for name, preset in CLUSTERS.items():
        if gpu.startswith(name) and "labelled" not in gpu:
            return preset
    raise NotSimulatedError(f"GPU '{gpu}' has no hardware file")


def row_cluster(run: PublishedRun) -> Cluster:
    """The preset with what the row says otherwise: GPUs per node, rate of the NVLinks, of the network per
    GPU, generation of the attention kernel."""
    cluster = load_cluster(cluster_preset(run))
    per_node = run.count("gpus_per_node") or cluster.gpus_per_node
    changes: dict[str, object] = {"gpus_per_node": per_node}
    network = run.number("inter_gbps_per_gpu")
    gpus = run.count("n_gpus") or 1
    if network:
        nic: dict[str, object] = {"per_node": per_node, "bandwidth": network * 1e9 / 8}
        if "collectives degrade strongly" in run.text("inter_desc"):
            nic["efficiency"] = busy_p5_efficiency(gpus // per_node)
        changes["nic"] = cluster.nic.model_copy(update=nic)
    elif gpus > per_node:
        raise NotSimulatedError("the network between the nodes is not published")
    link = _link_bytes_per_second(run.text("intra_link"))
    if link is not None and abs(link / cluster.node_link.bandwidth - 1) > 0.01:
        changes["node_link"] = cluster.node_link.model_copy(update={"bandwidth": link})
    variant = attention_variant(run)
    if variant in cluster.gpu.attention.variants:
        changes["gpu"] = with_attention_variant(cluster.gpu, variant)
    changes["framework_memory"] = framework_memory_of(run, cluster.framework_memory)
    return cluster.model_copy(update=changes)


def busy_p5_efficiency(nodes: int) -> float:
    """The part of a p5 node's 400 GB/s that a job of so many nodes got on the busy cluster of nanotron's
    sweep: linear in the logarithm of the nodes between the medians of its all-reduces of 256 MB."""
    known = sorted(_BUSY_P5)
    at, medians = np.log(known), [_BUSY_P5[count] for count in known]
    return float(np.interp(np.log(max(nodes, 1)), at, medians)) / 400


def framework_memory_of(run: PublishedRun, memory: FrameworkMemory) -> FrameworkMemory:
    """What the row's torch takes beside its allocator: before lazy loading the CUDA context is 1.78 GiB with
    torch 1.10 and 0.90 GiB with 1.13 (microbenchmarks mb-00687 and mb-00688, stas00/ml-engineering@744d01e1
    training/performance), in between by the release."""
    minor = torch_1_release(run)
    if minor is None:
        return memory
    context = 1.78 - (1.78 - 0.90) * (min(max(minor, 10), 13) - 10) / 3
    return memory.model_copy(update={"context": round(context * 2**30)})


def torch_1_release(run: PublishedRun) -> int | None:
    """12 for "torch 1.12 + composer" and "PyTorch 1.12.1"; None where no torch 1 ran.

    MosaicML's rows whose precision is called "bf16" ran torch 1.13 whatever torch the column names:
    composer knows that name for amp_bf16 from 0.12.0 to 0.13.5, which want torch below 1.14 and for FSDP at
    least 1.13, and no longer in 0.14.0 (composer/trainer/trainer.py, dist_strategy.py and the wheels'
    requirements). So the table of 40 GB in llm-foundry's README of January 2024 is from before May 2023; the
    others were measured again.
    """
    release = re.search(r"torch 1\.(\d+)", run.text("software"), re.IGNORECASE)
    if release:
        return int(release[1])
    return 13 if "composer" in run.text("software") and run.text("precision") == "bf16" else None


def attention_variant(run: PublishedRun) -> str:
    """Which generation of FlashAttention the row names; "" is the one of the GPU's file, the second. Of the
    first, MosaicML ran the CUDA kernel (`FlashMHA`) until February 2023, then Triton's (`composer_model`)."""
    kernel = run.text("attn_kernel").lower()
    if "v1" in kernel:
        return "flash1" if is_early_composer(run) else "flash1-triton"
    return next((f"flash{generation}" for generation in "34" if f"fa{generation}" in kernel), "")


def _link_bytes_per_second(text: str) -> float | None:
    """One direction of "NVLink4/NVSwitch 900GB/s bidir"; None where no single rate stands there."""
    rates = re.findall(r"(\d+)\s?GB/s", text)
    return float(rates[0]) / 2 * 1e9 if len(rates) == 1 else None
