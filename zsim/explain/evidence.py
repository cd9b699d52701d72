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
    range of its measurements is "assumed".
    """
    cluster, gpus = job.cluster, [job.cluster.gpus[kind] for kind in job.types]
    grades_of_part: Mapping[str, list[Evidence]] = {
        "compute": [
            table.evidence
            for gpu in gpus
            for table in (
                gpu.peak, gpu.memory, gpu.gemm, gpu.attention, gpu.memory_bound, gpu.launch, gpu.interference,
            )
        ],
        "network": [
            cluster.node_link.evidence, cluster.nic.evidence, cluster.collectives.evidence,
            *(table.evidence for node in cluster.nodes for table in (node.node_link, node.nic)),
        ],
        "memory": [*(gpu.memory.evidence for gpu in gpus), cluster.framework_memory.evidence],
        "host": [host.evidence for host in cluster.hosts],
    }  # fmt: skip
    if is_offloaded(job):
        nvme = [cluster.nvme.evidence] if cluster.nvme else []
        grades_of_part = {
            **grades_of_part,
            "offload": [cluster.pcie.evidence, cluster.offload.evidence, *nvme],
        }
    if job.model.captured is not None and job.model.captured.is_assumed:
        grades_of_part = {**grades_of_part, "compute": [*grades_of_part["compute"], "assumed"]}
    for part in extrapolations(plan, cluster):
        grades_of_part = {**grades_of_part, part: [*grades_of_part[part], "assumed"]}
    return {part: max(grades, key=EVIDENCE_ORDER.index) for part, grades in grades_of_part.items()}
