"""Evidence grades of a result: the weakest grade among the numbers behind each part of it."""

from __future__ import annotations

from collections.abc import Mapping

from zsim.plan.make import is_offloaded
from zsim.plan.ops import Plan
from zsim.report.extrapolation import extrapolations
from zsim.specs.cluster.table import EVIDENCE_ORDER, Evidence
from zsim.specs.experiment.job import Job


def evidence(job: Job, plan: Plan) -> dict[str, Evidence]:
    """The weakest grade among the numbers behind each part of the result. A part that is used outside of the
    range of its measurements is "assumed"."""
    cluster, gpu = job.cluster, job.cluster.gpu
    parts: Mapping[str, list[Evidence]] = {
        "compute": [
            gpu.peak.evidence, gpu.memory.evidence, gpu.gemm.evidence, gpu.attention.evidence,
            gpu.memory_bound.evidence, gpu.launch.evidence, gpu.interference.evidence,
        ],
        "network": [cluster.node_link.evidence, cluster.nic.evidence, cluster.collectives.evidence],
        "memory": [gpu.memory.evidence, cluster.framework_memory.evidence],
        "host": [cluster.host.evidence],
    }  # fmt: skip
    if is_offloaded(job):
        nvme = [cluster.nvme.evidence] if cluster.nvme else []
        parts = {**parts, "offload": [cluster.pcie.evidence, cluster.offload.evidence, *nvme]}
    if job.model.captured is not None and job.model.captured.is_assumed:
        parts = {**parts, "compute": [*parts["compute"], "assumed"]}
    for part in extrapolations(plan, cluster):
        parts = {**parts, part: [*parts[part], "assumed"]}
    return {part: max(grades, key=EVIDENCE_ORDER.index) for part, grades in parts.items()}
