"""An outcome on several types of GPUs: the section of its report, and the rank that the report is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from zsim.engine.simulate import Outcome
from zsim.explain.pipeline import bubbles_of
from zsim.explain.work import program_activity
from zsim.plan.by_type import gpu_of, host_of, type_of_program
from zsim.plan.memory.capacity import usable_bytes
from zsim.report.breakdown import Breakdown
from zsim.report.energy import Energy, step_energy
from zsim.report.gpu_types import GpuTypeRow, waiting_seconds, with_losses
from zsim.report.memory import Ledger, peak
from zsim.report.pipeline.bubbles import is_pipeline
from zsim.report.pipeline.section import first_ranks, rank_breakdown
from zsim.report.report import TracedStep, traced_step
from zsim.report.traffic import overlap_fraction
from zsim.report.waits import NO_WAITS
from zsim.specs.cluster.table import EVIDENCE_ORDER

_GRADES: tuple[str, ...] = EVIDENCE_ORDER
Terms = Sequence[tuple[float, Outcome]]  # a step as a sum of simulated ones, each so many times


def traced_step_of(outcome: Outcome) -> TracedStep:
    """The step as the report shows it: as its first rank saw it, or on several types of GPUs a rank of the
    type with the most seconds of kernels."""
    if len(outcome.job.types) == 1:
        return traced_step(outcome.trace)
    busiest = max(_breakdowns(outcome).items(), key=lambda one: _busy(one[1].seconds))
    rank = first_ranks(outcome.plan, outcome.trace)[busiest[0]]
    return TracedStep(outcome.trace, rank, busiest[1], overlap_fraction(outcome.trace, rank))


def own_capacities(outcome: Outcome) -> dict[str, dict[int, int]] | None:
    """Usable bytes of each traced rank's GPU, and bytes of its node's host memory. None where all nodes are
    equal.
    """
    job, plan = outcome.job, outcome.plan
    if len(job.types) == 1:
        return None
    programs = range(len(plan.programs))
    of_program = {
        "gpu": [usable_bytes(job.cluster, gpu_of(job, plan, n)) for n in programs],
        "host": [host_of(job, plan, n).memory for n in programs],
    }
    ranks = outcome.classes.representatives
    return {
        device: {rank: each[plan.program_of[rank]] for rank in ranks} for device, each in of_program.items()
    }


def gpu_type_rows(
    outcome: Outcome, step_seconds: float, terms: Terms | None = None
) -> tuple[GpuTypeRow, ...]:
    """One row per type of GPUs. There are none where all are of one type.

    `terms` are those of the complete step, if the outcome has only some of its micro-batches.
    """
    job, plan = outcome.job, outcome.plan
    if len(job.types) == 1:
        return ()
    seconds = _seconds_of(terms or [(1.0, outcome)])
    ledger, firsts = Ledger.of(outcome.trace.memory), first_ranks(plan, outcome.trace)
    counts = np.bincount(plan.program_of, minlength=len(plan.programs))
    node_types = job.cluster.type_of_node[list(job.placement.nodes)]
    rows = []
    for kind in job.types:
        programs = [n for n in range(len(plan.programs)) if type_of_program(job, plan, n) == kind]
        weights = counts[programs] / counts[programs].sum()
        busy = [_busy(seconds[number]) for number in programs]
        waits = [waiting_seconds(seconds[number]) for number in programs]
        one, gpu = job.cluster.nodes[kind], job.cluster.gpus[kind]
        rows.append(
            GpuTypeRow(
                name=one.name,
                gpu=gpu.name,
                nodes=int((node_types == kind).sum()),
                gpus=int(counts[programs].sum()),
                micro_batch_size=job.micro_batch_size_on(kind),
                busy_seconds=float(weights @ np.array(busy)),
                waiting_seconds=float(weights @ np.array(waits)),
                peak_bytes=max(peak(ledger.usage("gpu", {firsts[n]: 1})).total for n in programs),
                capacity_bytes=usable_bytes(job.cluster, gpu),
            )
        )
    return with_losses(rows, step_seconds)


def mean_energy(outcome: Outcome, step_seconds: float, terms: Terms | None = None) -> Energy | None:
    """The energy of one GPU in a step, as mean over GPUs of several types. None where the power of one is not
    known.
    """
    job, plan = outcome.job, outcome.plan
    seconds = _seconds_of(terms or [(1.0, outcome)])
    weights = (np.bincount(plan.program_of, minlength=len(plan.programs)) / plan.world_size).tolist()
    parts: list[Energy] = []
    for number, weight in enumerate(weights):
        own, gpu = Breakdown(seconds[number], {}, NO_WAITS), gpu_of(job, plan, number)
        found = step_energy(own, program_activity(plan.programs[number], gpu), gpu.power)
        if found is None:
            return None
        activity = {name: weight * value for name, value in found.activity_seconds.items()}
        parts.append(replace(found, joules=weight * found.joules, activity_seconds=activity))
    joules = sum(part.joules for part in parts)
    names = parts[0].activity_seconds
    return Energy(
        joules,
        joules / step_seconds,
        {name: sum(part.activity_seconds[name] for part in parts) for name in names},
        max((part.evidence for part in parts), key=_GRADES.index),
        "; ".join(dict.fromkeys(part.source for part in parts)),
    )


def _seconds_of(terms: Terms) -> dict[int, dict[str, float]]:
    """Seconds of the step by cause, by program."""
    total: dict[int, dict[str, float]] = {}
    for times, outcome in terms:
        for number, breakdown in _breakdowns(outcome).items():
            own = total.setdefault(number, {})
            for name, seconds in breakdown.seconds.items():
                own[name] = own.get(name, 0.0) + times * seconds
    return {
        number: {name: max(seconds, 0.0) for name, seconds in own.items()} for number, own in total.items()
    }


def _breakdowns(outcome: Outcome) -> dict[int, Breakdown]:
    """The breakdown of each program's first simulated rank, with a pipeline's bubbles."""
    plan, trace = outcome.plan, outcome.trace
    firsts = first_ranks(plan, trace)
    found = {number: rank_breakdown(trace, rank) for number, rank in firsts.items()}
    if not is_pipeline(plan):
        return found
    bubbles = bubbles_of(outcome)
    return {number: bubbles.cut_from(one, firsts[number]) for number, one in found.items()}


def _busy(seconds: Mapping[str, float]) -> float:
    return seconds["compute"] + seconds["optimizer"]
