"""A job and its step as the features that validated runs are compared by."""

from __future__ import annotations

import re
from collections.abc import Mapping

from zsim.plan.make import is_offloaded
from zsim.report.report import TracedStep
from zsim.report.views.text.allocator import AllocatorRow
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.labels import strategy_label
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig
from zsim.specs.strategy.frameworks import Fsdp1, Fsdp2
from zsim.validated.features import Features, binding_of
from zsim.validated.validation import Validation, validation_of

_FRAMEWORKS = {
    "fsdp1": "FSDP",
    "fsdp2": "FSDP",
    "deepspeed": "DeepSpeed",
    "ddp": "DDP",
    "megatron": "Megatron",
    "reference": "the reference engine",
}
_LINKS = {"switch": "NVSwitch", "mesh": "a mesh of links between GPUs", "none": "PCIe between GPUs"}
_DOMAIN = "an NVLink domain of several nodes"
_NETWORKS = (("EFA", r"\bEFA\b"), ("RoCE", r"RoCE"), ("InfiniBand", r"InfiniBand|\b[EHN]DR\b|\bIB\b"),
             ("Ethernet", r"Ethernet"))  # fmt: skip


def job_features(
    job: Job, seconds: Mapping[str, float], step_seconds: float, retries: float, network: str | None = None
) -> Features:
    """`seconds` of the step by the breakdown's names; `retries` of torch's allocator in it. `network` between
    the nodes, where the cluster's file does not say."""
    shares = {name: part / step_seconds for name, part in seconds.items()}
    return Features(
        framework=_framework(job),
        strategy=strategy_name(job),
        gpu=job.cluster.gpu.name,
        nodes=job.num_nodes,
        gpus=job.world_size,
        fabric=_fabric(job, network),
        binding=binding_of(shares, retries),
        parameters=job.model.numel,
    )


def step_validation(job: Job, step: TracedStep, allocator: AllocatorRow | None) -> Validation:
    """How far to trust a step's time, by all validated runs."""
    retries = 0 if allocator is None else allocator.retries
    return validation_of(job_features(job, step.breakdown.seconds, step.seconds, retries))


def _framework(job: Job) -> str:
    """One GPU shards nothing, whatever the framework; without offloading it is as under DDP."""
    if job.world_size == 1 and not is_offloaded(job):
        return _FRAMEWORKS["ddp"]
    return _FRAMEWORKS.get(job.kind, job.kind)


def strategy_name(job: Job) -> str:
    """What is sharded, and where it is kept: "ZeRO-3 + qwZ", "HSDP", "FSDP2 offloaded"."""
    strategy, offloaded = job.strategy, " offloaded" if is_offloaded(job) else ""
    if job.world_size == 1:
        return f"one GPU{offloaded}"
    if isinstance(strategy, Fsdp1 | Fsdp2) and strategy.replicate > 1:
        return f"HSDP{offloaded}"
    if isinstance(strategy, DeepSpeedConfig):
        zero = strategy.zero
        label = "MiCS" if zero.is_mics else re.sub(r" \+ hpZ \d+", " + hpZ", strategy_label(job))
        return label + offloaded
    return strategy_label(job).removesuffix(" FULL_SHARD") + offloaded


def _fabric(job: Job, network: str | None) -> str:
    if job.world_size == 1:
        return ""
    cluster = job.cluster
    if job.num_nodes == 1:
        return node_fabric(cluster)
    is_known = network is not None and cluster.node_link.nodes_per_domain == 1
    return network or "" if is_known else network_fabric(cluster)


def node_fabric(cluster: Cluster) -> str:
    """What joins the GPUs of a node."""
    backend = cluster.collectives.backend
    if backend == "gloo":
        return "the host's loopback under gloo"
    of = "" if backend == "nccl" else f" under {backend}"
    return _LINKS[cluster.node_link.kind] + of


def network_fabric(cluster: Cluster) -> str:
    """What joins the nodes, as the cluster's file words it; "" where it does not."""
    if cluster.node_link.nodes_per_domain > 1:
        return _DOMAIN
    return network_word(cluster.description) or network_word(cluster.nic.source)


def network_word(text: str) -> str:
    """EFA, RoCE, InfiniBand or Ethernet, the first that a text names."""
    return next((name for name, pattern in _NETWORKS if re.search(pattern, text)), "")
