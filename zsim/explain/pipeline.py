"""The rank that a report is of: the sections on a pipeline, and on several types of GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from zsim.engine.simulate import Outcome
from zsim.explain.job import program_activity
from zsim.plan.memory.capacity import usable_bytes
from zsim.plan.node_types import gpu_of, host_of, pipeline_rank_of, type_of_program
from zsim.plan.pipeline.orders import stage_of
from zsim.report.breakdown import NO_WAITS, Breakdown, step_breakdown, weighted_sums
from zsim.report.energy import Energy, step_energy
from zsim.report.irregular import GpuTypeRow, add_losses, waiting_seconds
from zsim.report.memory import Ledger, peak
from zsim.report.pipeline import (
    Bubbles,
    PipelineSection,
    first_ranks,
    is_pipeline,
    pipeline_section,
    rank_breakdown,
)
from zsim.report.report import TracedStep, traced_step
from zsim.report.traffic import overlap_fraction
from zsim.specs.experiment.job import Job
from zsim.specs.lazy_model import EVIDENCE_ORDER


def pipeline_of(outcome: Outcome) -> PipelineSection | None:
    """The section on the pipeline. None without a pipeline."""
    job, plan = outcome.job, outcome.plan
    layers = rank_layers(job)
    return pipeline_section(
        plan,
        outcome.trace,
        outcome.peers,
        layers=layers
        if len(layers) == 1 + max(pipeline_rank_of(plan, number) for number in range(len(plan.programs)))
        else (),
        connections=job.training.device_max_connections,
    )


def bubbles_of(outcome: Outcome) -> Bubbles:
    """The bubbles of all simulated ranks."""
    return Bubbles(outcome.plan, outcome.trace, outcome.peers, outcome.job.training.device_max_connections)


def rank_layers(job: Job) -> list[int]:
    """Number of layers on each pipeline rank. Empty without a pipeline."""
    parallelism = job.parallelism
    if not parallelism.layers_per_stage:
        return []
    ranks, chunks = range(parallelism.pipeline), range(parallelism.virtual_stages)
    return [
        sum(
            parallelism.layers_per_stage[stage_of(parallelism.schedule, parallelism.pipeline, rank, chunk)]
            for chunk in chunks
        )
        for rank in ranks
    ]


def seconds_by_cause(outcome: Outcome) -> Mapping[str, float]:
    """The breakdown of the outcome's step: of its first rank, or of a pipeline's slowest."""
    section = pipeline_of(outcome)
    breakdown = step_breakdown(outcome.trace) if section is None else section.slowest.breakdown
    return breakdown.seconds


def slowest_step(outcome: Outcome, section: PipelineSection) -> TracedStep:
    """The step as the slowest pipeline rank saw it."""
    row, trace = section.slowest, outcome.trace
    return TracedStep(trace, row.first_rank, row.breakdown, overlap_fraction(trace, row.first_rank))


_GRADES: tuple[str, ...] = EVIDENCE_ORDER
Terms = Sequence[tuple[float, Outcome]]  # a step as a sum of simulated ones, each so many times


def traced_step_of(outcome: Outcome) -> TracedStep:
    """The step as the report shows it: as its first rank saw it, or on several types of GPUs a rank of the
    type with the most seconds of kernels."""
    if len(outcome.job.types) == 1:
        return traced_step(outcome.trace)
    busiest = max(_breakdown_per_program(outcome).items(), key=lambda entry: _busy(entry[1].seconds))
    rank = first_ranks(outcome.plan, outcome.trace)[busiest[0]]
    return TracedStep(outcome.trace, rank, busiest[1], overlap_fraction(outcome.trace, rank))


def rank_capacities(outcome: Outcome) -> dict[str, dict[int, int]] | None:
    """Usable bytes of each traced rank's GPU, and bytes of its node's host memory. None where all nodes are
    equal.
    """
    job, plan = outcome.job, outcome.plan
    if len(job.types) == 1:
        return None
    programs = range(len(plan.programs))
    capacities_of_device = {
        "gpu": [usable_bytes(job.cluster, gpu_of(job, plan, n)) for n in programs],
        "host": [host_of(job, plan, n).memory for n in programs],
    }
    ranks = outcome.classes.representatives
    return {
        device: {rank: capacities[plan.program_of[rank]] for rank in ranks}
        for device, capacities in capacities_of_device.items()
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
    seconds = _seconds_per_program(terms or [(1.0, outcome)])
    ledger, firsts = Ledger.of(outcome.trace.memory), first_ranks(plan, outcome.trace)
    counts = np.bincount(plan.program_of, minlength=len(plan.programs))
    node_types = job.cluster.node_type_indices[list(job.placement.nodes)]
    rows = []
    for kind in job.types:
        programs = [n for n in range(len(plan.programs)) if type_of_program(job, plan, n) == kind]
        weights = counts[programs] / counts[programs].sum()
        busy = [_busy(seconds[number]) for number in programs]
        waits = [waiting_seconds(seconds[number]) for number in programs]
        node, gpu = job.cluster.nodes[kind], job.cluster.gpus[kind]
        rows.append(
            GpuTypeRow(
                name=node.name,
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
    return add_losses(rows, step_seconds)


def mean_energy(outcome: Outcome, step_seconds: float, terms: Terms | None = None) -> Energy | None:
    """The energy of one GPU in a step, as mean over GPUs of several types. None where the power of one is not
    known.
    """
    job, plan = outcome.job, outcome.plan
    seconds = _seconds_per_program(terms or [(1.0, outcome)])
    weights = (np.bincount(plan.program_of, minlength=len(plan.programs)) / plan.world_size).tolist()
    energies: list[Energy] = []
    for number, weight in enumerate(weights):
        breakdown, gpu = Breakdown(seconds[number], {}, NO_WAITS), gpu_of(job, plan, number)
        energy = step_energy(breakdown, program_activity(plan.programs[number], gpu), gpu.power)
        if energy is None:
            return None
        activity = {name: weight * value for name, value in energy.activity_seconds.items()}
        energies.append(replace(energy, joules=weight * energy.joules, activity_seconds=activity))
    joules = sum(program_energy.joules for program_energy in energies)
    names = energies[0].activity_seconds
    return Energy(
        joules,
        joules / step_seconds,
        {name: sum(program_energy.activity_seconds[name] for program_energy in energies) for name in names},
        max((program_energy.evidence for program_energy in energies), key=_GRADES.index),
        "; ".join(dict.fromkeys(program_energy.source for program_energy in energies)),
    )


def _seconds_per_program(terms: Terms) -> dict[int, dict[str, float]]:
    """Seconds of the step by cause, by program."""
    breakdowns = [(factor, _breakdown_per_program(outcome)) for factor, outcome in terms]
    return {
        number: weighted_sums([(factor, of_program[number].seconds) for factor, of_program in breakdowns])
        for number in breakdowns[0][1]
    }


def _breakdown_per_program(outcome: Outcome) -> dict[int, Breakdown]:
    """The breakdown of each program's first simulated rank, with a pipeline's bubbles."""
    plan, trace = outcome.plan, outcome.trace
    firsts = first_ranks(plan, trace)
    breakdowns = {number: rank_breakdown(trace, rank) for number, rank in firsts.items()}
    if not is_pipeline(plan):
        return breakdowns
    bubbles = bubbles_of(outcome)
    return {
        number: bubbles.split_breakdown(breakdown, firsts[number]) for number, breakdown in breakdowns.items()
    }


def _busy(seconds: Mapping[str, float]) -> float:
    return seconds["compute"] + seconds["optimizer"]
