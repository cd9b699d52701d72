"""Features of a job and its step, by which it is compared with validated runs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from zsim.plan.make import is_offloaded
from zsim.plan.ops import Plan
from zsim.report.framework import report_role
from zsim.report.memory import AllocatorRow
from zsim.report.report import TracedStep
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.job import Job
from zsim.specs.model.expert_layer import has_experts
from zsim.specs.strategy.registry import framework_of
from zsim.validated.features import Features, binding_of
from zsim.validated.validation import Validation, validation_of

_LINKS = {"switch": "NVSwitch", "mesh": "a mesh of links between GPUs", "none": "PCIe between GPUs"}
_DOMAIN = "an NVLink domain of several nodes"
_NETWORKS = (("EFA", r"\bEFA\b"), ("RoCE", r"RoCE"), ("InfiniBand", r"InfiniBand|\b[EHN]DR\b|\bIB\b"),
             ("Ethernet", r"Ethernet"))  # fmt: skip


def job_features(
    job: Job, seconds: Mapping[str, float], step_seconds: float, retries: float, network: str | None = None
) -> Features:
    """Features of `job`.

    `seconds` is the step by the breakdown's names. `retries` are those of torch's allocator in the step.
    `network` is the network between nodes, where the cluster file does not name it.
    """
    shares = {name: part / step_seconds for name, part in seconds.items()}
    return Features(
        framework=framework_title(job),
        strategy=strategy_name(job),
        gpu=job.cluster.gpu_label,
        nodes=job.num_nodes,
        gpus=job.world_size,
        fabric=_fabric(job, network),
        binding=binding_of(shares, retries),
        parameters=job.model.numel,
        model_ranks=job.parallelism.model_ranks,
        is_mixture=has_experts(job.model),
        is_low_precision=job.training.precision == "fp8",
        open_settings=open_settings_of(job),
    )


def open_settings_of(job: Job) -> tuple[str, ...]:
    """The settings that matter to the job's step and that its experiment leaves out, by name
    (`zsim.validated.spread.OPEN_SENTENCES`).

    Blocks that are compiled, and Liger's, bring a loss of their own. A network is known once it is measured
    or calibrated.
    """
    training, parallelism = job.experiment.training, job.experiment.parallelism
    is_open = {
        "dispatcher": job.parallelism.experts.ranks > 1 and parallelism.dispatcher is None,
        "loss": training.cross_entropy is None and not (training.compile or training.liger),
        "compile": "compile" not in training.model_fields_set,
        "network": job.num_nodes > 1 and job.cluster.nic.evidence in ("data sheet", "assumed"),
    }
    return tuple(name for name, value in is_open.items() if value)


def step_validation(job: Job, plan: Plan, step: TracedStep, allocator: AllocatorRow | None) -> Validation:
    """The validation of a step's time by all validated runs.

    Where torch's allocator runs short, the interval spans the step with its retries and without, because
    neither their number nor the time of one is certain.
    """
    retries = 0 if allocator is None else allocator.retries
    features = job_features(job, step.breakdown.seconds, step.seconds, retries)
    judged = plan.memoize(_validation_of_plan, features)
    if allocator is None or not retries:
        return judged
    return judged.extend_to_shorter(allocator.step_seconds_without_retries / step.seconds)


def _validation_of_plan(_plan: Plan, features: Features) -> Validation:
    """Runs of one plan on other hardware that have the same features have one validation."""
    return validation_of(features)


def framework_title(job: Job) -> str:
    """The framework's name. On one GPU nothing is sharded, so without offloading several are the same."""
    if job.world_size == 1 and not is_offloaded(job):
        return report_role(job.kind).title_alone
    return framework_of(job.kind).title


def strategy_name(job: Job) -> str:
    """The sharding strategy, the other parallelisms, and whether it offloads: "ZeRO-3 + qwZ", "HSDP", "FSDP2
    + TP + PP", "FSDP2 offloaded".
    """
    parallelisms = "".join(f" + {name}" for name in degrees_of(job))
    return _data_strategy(job) + parallelisms + (" offloaded" if is_offloaded(job) else "")


def degrees_of(job: Job) -> dict[str, int]:
    """The degrees above 1 of the parallelisms other than data parallelism."""
    parallelism = job.parallelism
    degrees = {
        "TP": parallelism.tensor,
        "CP": parallelism.context,
        "PP": parallelism.pipeline,
        "EP": parallelism.experts.ranks,
    }
    return {name: degree for name, degree in degrees.items() if degree > 1}


def _data_strategy(job: Job) -> str:
    if job.world_size == 1:
        return "one GPU"
    return report_role(job.kind).strategy_name(job, job.strategy)


def _fabric(job: Job, network: str | None) -> str:
    if job.world_size == 1:
        return ""
    cluster = job.cluster
    if job.num_nodes == 1:
        return node_fabric(cluster)
    is_known = network is not None and cluster.node_link.nodes_per_domain == 1
    return network or "" if is_known else network_fabric(cluster)


def node_fabric(cluster: Cluster) -> str:
    """The links between the GPUs of a node, in words."""
    backend = cluster.collectives.backend
    if backend == "gloo":
        return "the host's loopback under gloo"
    suffix = "" if backend == "nccl" else f" under {backend}"
    return _LINKS[cluster.node_link.kind] + suffix


def network_fabric(cluster: Cluster) -> str:
    """The network between the nodes, as the cluster file names it. Empty where it does not."""
    if cluster.node_link.nodes_per_domain > 1:
        return _DOMAIN
    return find_network(cluster.description) or find_network(cluster.nic.source)


def find_network(text: str) -> str:
    """The first of EFA, RoCE, InfiniBand and Ethernet in `text`. Empty without any."""
    return next((name for name, pattern in _NETWORKS if re.search(pattern, text)), "")
