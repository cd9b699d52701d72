"""A job's failures from the rates of its fleet: by its nodes, their GPUs, and the causes."""

from __future__ import annotations

from zsim.goodput.scenario import Cause, Failures
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.run.failures import (
    NODE_GPUS,
    CauseTable,
    FailuresTable,
    resolve_failures,
)

DAY = 86_400.0
_SECONDS_PER_1000_NODE_DAYS = 1000 * DAY  # seconds of a rate per 1,000 node-days


def failures_of(table: FailuresTable | None, job: Job, nodes: int) -> Failures:
    """The failures of a job on so many nodes.

    The rate is r n (G / G0)^(e - 1) above G0 GPUs and r n below, with n nodes of 8 GPUs, r per node, and G
    GPUs.
    """
    resolved = resolve_failures(table)
    gpus = nodes * job.cluster.gpus_per_node
    standard_nodes = gpus / NODE_GPUS
    rate = resolved.total_per_1000_node_days() / _SECONDS_PER_1000_NODE_DAYS * standard_nodes
    if gpus > resolved.exponent_above_gpus:
        rate *= (gpus / resolved.exponent_above_gpus) ** (resolved.exponent - 1)
    planned = resolved.planned_per_day
    return Failures(
        per_second=rate,
        causes=tuple(_causes(resolved)),
        law=resolved.law,
        shape=resolved.shape or 1.0,
        ageing=tuple((day * DAY, factor) for day, factor in resolved.ageing),
        rack_fraction=resolved.rack_fraction,
        rack_nodes=resolved.rack_nodes,
        leaf_fraction=resolved.leaf_fraction,
        leaf_nodes=resolved.leaf_nodes,
        planned_every=DAY / planned if planned else None,
        planned_takes=resolved.planned_takes,
        preemptions_per_second=resolved.preemptions_per_day / DAY,
        preemption_takes=resolved.preemption_takes,
        preemption_notice=resolved.preemption_notice,
        stragglers_per_second=resolved.stragglers_per_1000_node_days
        / _SECONDS_PER_1000_NODE_DAYS
        * standard_nodes,
        straggler_slowdown=resolved.straggler_slowdown,
        straggler_takes=resolved.straggler_takes,
    )


def _causes(table: FailuresTable) -> list[Cause]:
    if not table.causes:
        hardware = 1 - table.transient_fraction
        node_loss = Cause(
            "node lost", hardware, repair_seconds=table.repair, repair_median=table.repair_median
        )
        return [node_loss, Cause("transient", table.transient_fraction, keeps_node=True)]
    return [_cause(name, cause, table) for name, cause in table.causes.items()]


def _cause(name: str, cause: CauseTable, table: FailuresTable) -> Cause:
    repair, median = cause.repair, cause.repair_median
    if repair is None:
        repair, median = table.repair, table.repair_median
    weight = cause.per_1000_node_days if cause.share is None else cause.share
    return Cause(
        name.replace("-", " "), weight or 0.0, cause.keeps_node, cause.nodes, repair, median,
        cause.detect, cause.found_later,
    )  # fmt: skip
