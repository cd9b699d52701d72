"""The Python face: experiments in, plans, traces and reports out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from zsim.cost.flops import hardware_flops_per_token, model_flops_per_token
from zsim.cost.rates.power import GpuActivity, kernel_activity
from zsim.engine.capacity import (
    exceeds_pinned_limit,
    node_capacity_bytes,
    pinned_bytes,
    startup_bytes,
    step_peak_bytes,
    usable_bytes,
)
from zsim.engine.simulate import Outcome, simulate_job
from zsim.engine.variants import step_seconds_with_own_queues, step_seconds_without_overlap
from zsim.explain.offload_range import no_range_note, offload_range
from zsim.plan import make
from zsim.plan.builder import COMPUTE
from zsim.plan.make import is_offloaded
from zsim.plan.ops import Kernels, Plan
from zsim.report.critical_causes import OpCauses, critical_seconds
from zsim.report.critical_path import critical_path
from zsim.report.energy import run_cost, step_energy
from zsim.report.extrapolation import extrapolation_sentence, extrapolations
from zsim.report.irregular import JobRow, rank_rows, spread_of
from zsim.report.job_features import report_validation
from zsim.report.lost_overlap import told_of_doubts
from zsim.report.memory import PINNED, START_UP, OutOfMemory, over_limit
from zsim.report.offload import OffloadSection, TierRow
from zsim.report.report import Report, SimulationStats, StepWork, make_report
from zsim.report.traffic import SentRow, TrafficRow
from zsim.report.views.text.allocator import AllocatorRow, allocator_notes
from zsim.specs.cluster.table import EVIDENCE_ORDER, Evidence
from zsim.specs.experiment.faults import FaultsTable
from zsim.specs.experiment.job import Job, slowest_of
from zsim.specs.experiment.labels import batch_label, strategy_label, training_label
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig
from zsim.specs.strategy.deepspeed.effects import describe
from zsim.trace.trace import Trace
from zsim.units import format_bytes
from zsim.version import __version__

FLOPS_CONVENTION = "6N + 12LdS per token, N with embeddings"


@dataclass(frozen=True)
class Result:
    """One simulated step: what was asked, what the ranks did, what happened, what it means."""

    job: Job
    plan: Plan
    trace: Trace
    report: Report


def make_plan(experiment: Experiment) -> Plan:
    """What every rank will do in one steady step: ops, bytes, streams; no simulation."""
    return make.make_plan(resolve(experiment))


def simulate(experiment: Experiment, *, unfold: bool = False) -> Result:
    """Simulate one steady step; `unfold` simulates every rank instead of one per class.

    Raises InputError for an experiment that contradicts itself, NotSimulatedError for one that zsim cannot
    simulate yet. A job that does not fit is simulated all the same: `report.fits` is False; what would do
    is zsim.study.advice's to say.
    """
    began = time.perf_counter()
    job = resolve(experiment)
    outcome = simulate_job(job, unfold=unfold)
    wall_seconds = time.perf_counter() - began
    report = with_doubts(report_of(outcome, wall_seconds), outcome)
    if report.offload is not None:
        report = _with_range(report, report.offload, outcome)
    return Result(job, outcome.plan, outcome.trace, report)


def _with_range(report: Report, section: OffloadSection, outcome: Outcome) -> Report:
    """The report with the error bar of its offloaded step, or with a note why it has none."""
    note = no_range_note(outcome)
    if note is not None:
        return replace(report, notes=(*report.notes, note))
    return replace(report, offload=replace(section, range_seconds=offload_range(outcome)))


def with_doubts(report: Report, outcome: Outcome) -> Report:
    """The report with what takes another simulation: see `told_of_doubts`."""
    without, apart = step_seconds_without_overlap(outcome), step_seconds_with_own_queues(outcome)
    connections = outcome.job.training.device_max_connections
    return told_of_doubts(report, outcome.plan, outcome.trace, connections, without, apart)


def report_of(outcome: Outcome, wall_seconds: float) -> Report:
    """What one simulated step means."""
    job, jittered = outcome.job, outcome.jittered
    cluster, allocator = job.cluster, _allocator(outcome)
    arguments: dict[str, Any] = {
        "zsim_version": __version__,
        "experiment": resolved_experiment(job),
        "work": step_work(job),
        "capacity_bytes": {"gpu": usable_bytes(cluster), **node_capacity_bytes(cluster)},
        "evidence": evidence(job, outcome.plan),
        "simulation": SimulationStats(
            wall_seconds,
            outcome.stats.events,
            outcome.stats.rank_classes,
            job.world_size,
            1 if jittered is None else len(jittered.steps),
        ),
        "labels": {
            "model": job.model.name,
            "cluster": cluster.name,
            "strategy": strategy_label(job),
            "batch": batch_label(job.training),
            "training": training_label(job),
        },
        "gpus_per_node": job.gpus_per_node,
        "traffic": _traffic(outcome),
        "sent": _sent(outcome),
        "notes": _notes(outcome, allocator),
        "limits": outcome.limits,
        "tiers": _tiers(outcome),
        "startup_bytes": startup_bytes(job, outcome.plan),
        "pinned_bytes": pinned_bytes(job, outcome.plan),
        "beyond": _beyond(job, outcome.plan),
    }
    report = make_report(outcome.trace, **arguments)
    causes = OpCauses(outcome.plan, cluster.gpu, outcome.calls, outcome.limits)
    queues = job.training.device_max_connections
    chain = critical_seconds(critical_path(outcome.plan, outcome.trace, outcome.meetings, queues), causes)
    report = replace(report, critical_path_seconds=chain, allocator=allocator)
    report = replace(report, validation=report_validation(job, report))
    report = _with_irregularities(report, outcome)
    return _with_cost(report, job, outcome.plan)


def _allocator(outcome: Outcome) -> AllocatorRow | None:
    """None on a CPU, beside other jobs, and where the tensors alone are too large."""
    found, job = outcome.allocation, outcome.job
    if found is None or step_peak_bytes(job, outcome.plan) > usable_bytes(job.cluster):
        return None
    counts = found.counts
    return AllocatorRow(
        found.reserved_bytes, found.limit_bytes, counts.retries, found.extra_seconds, counts.released,
        counts.failures,
    )  # fmt: skip


def _with_irregularities(report: Report, outcome: Outcome) -> Report:
    """The report with the jobs beside it, and the ranks or the drawn steps that differ."""
    jobs = [
        JobRow(
            name=times.name,
            model=times.job.model.name,
            strategy=strategy_label(times.job),
            nodes=times.job.num_nodes,
            gpus=times.job.world_size,
            steps=times.steps,
            step_seconds_alone=times.alone_seconds,
            step_seconds_together=times.together_seconds,
        )
        for times in outcome.together
    ]
    report = replace(report, jobs=tuple(jobs))
    jittered = outcome.jittered
    if jittered is None:
        slowdowns = [float(outcome.slowdowns[rank]) for rank in outcome.classes.representatives]
        return replace(report, ranks=rank_rows(outcome.trace, outcome.classes.sizes.tolist(), slowdowns))
    spread = spread_of(jittered.jitter, jittered.steps, jittered.plain_seconds)
    return replace(report, jitter=spread, evidence={**report.evidence, "jitter": jittered.jitter.evidence})


def _with_cost(report: Report, job: Job, plan: Plan) -> Report:
    """The report with the step's energy, and with what a run costs where the experiment has `[cost]`."""
    energy = step_energy(report.breakdown, _activity(job, plan), job.cluster.gpu.power)
    table = job.experiment.cost
    if table is None:
        return replace(report, energy=energy)
    cost = run_cost(
        table,
        energy,
        step_seconds=report.step_seconds,
        step_tokens=report.work.tokens * job.world_size,
        gpus=job.world_size,
        nodes=job.num_nodes,
        parameters=job.model.numel,
    )
    notes = report.notes
    if energy is None:
        notes = (*notes, f"no energy: how much power GPU '{job.cluster.gpu.name}' draws is not known")
    return replace(report, energy=energy, cost=cost, notes=notes)


def _activity(job: Job, plan: Plan) -> GpuActivity:
    """What the kernels of a step's compute stream are bound by, each distinct work looked at once."""
    known: dict[int, GpuActivity] = {}
    totals = [0.0] * len(GpuActivity._fields)
    for op in plan.ops:
        if op.stream == COMPUTE and isinstance(op.work, Kernels):
            activity = known.get(id(op.work))
            if activity is None:
                activity = known[id(op.work)] = kernel_activity(op.work.kernels, job.cluster.gpu)
            for index, part in enumerate(activity):
                totals[index] += part
    return GpuActivity(*totals)


def step_work(job: Job) -> StepWork:
    """Tokens and FLOPs of one GPU's step."""
    training = job.training
    tokens = training.micro_batch_tokens * training.gradient_accumulation_steps
    length = training.sequence_length
    policies = [training.checkpointing_of(number) for number in range(len(job.model.blocks))]
    hardware = hardware_flops_per_token(job.model, length, policies)
    peak: float | None = getattr(job.cluster.gpu.peak, training.precision)
    model = model_flops_per_token(job.model, length)
    return StepWork(
        tokens, tokens * model, tokens * hardware, peak, FLOPS_CONVENTION, peak_dtype=training.precision
    )


def resolved_experiment(job: Job) -> dict[str, Any]:
    """Every value that the simulation used, as plain data with sources."""
    training = job.training
    model = job.model
    strategy: dict[str, Any] = {"kind": job.kind}
    if isinstance(job.strategy, DeepSpeedConfig):
        strategy |= {"stage": job.strategy.stage, "version": job.strategy.version, "file": job.strategy.name}
        strategy["settings"] = {
            row.key: f"{row.value} ({row.origin})" + (f": {row.effect}" if row.effect else "")
            for row in describe(job.strategy)
        }
    else:
        strategy |= {name: getattr(job.strategy, name) for name in job.strategy.__slots__}
    return {
        "model": {
            "name": model.name,
            "family": model.family,
            "parameters": model.numel,
            "layers": len(model.blocks),
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "source": _model_source(job),
        },
        "nodes": job.num_nodes,
        "gpus": job.world_size,
        "training": {name: getattr(training, name) for name in training.__slots__},
        "strategy": strategy,
        **_irregularities(job),
        "cluster": job.cluster.model_dump(by_alias=True),
    }


def _irregularities(job: Job) -> dict[str, Any]:
    """Where the job sits and what is wrong there, as far as either is said."""
    found: dict[str, Any] = {}
    if not job.placement.is_plain:
        found["placement"] = asdict(job.placement)
    faults = job.experiment.faults
    if faults != FaultsTable():
        found["faults"] = faults.model_dump()
    if job.others:
        found["jobs"] = {name: resolved_experiment(other) for name, other in job.others.items()}
    return found


def _model_source(job: Job) -> str:
    """Where the architecture came from, as the user named it."""
    asked = job.experiment.model
    if not isinstance(asked, str):
        return "the experiment itself"
    return asked if asked.endswith(".json") or "/" in asked else f"preset {asked}"


def evidence(job: Job, plan: Plan) -> dict[str, Evidence]:
    """The weakest grade among the numbers behind each part of the result; a calibrated part that is used out
    of the range of its measurements is assumed."""
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
    for part in extrapolations(plan, cluster):
        parts = {**parts, part: [*parts[part], "assumed"]}
    return {part: max(grades, key=EVIDENCE_ORDER.index) for part, grades in parts.items()}


def _traffic(outcome: Outcome) -> list[TrafficRow]:
    """Per class of links: one GPU's share of the bytes, and how busy the fullest link is."""
    seconds = outcome.trace.step_seconds
    rows = []
    copied = {row.name: row for row in outcome.devices}
    for name, load in outcome.traffic.items():
        link_class = outcome.topology.classes[name]
        per_gpu = load.total_bytes / outcome.job.world_size
        busy = load.fullest_bytes / (link_class.capacity * seconds)
        if name in copied:  # by offloading too
            per_gpu += copied[name].per_rank
            busy += copied[name].utilisation_fraction
        if per_gpu > 0:
            rows.append(TrafficRow(name, per_gpu, busy))
    return rows


def _sent(outcome: Outcome) -> list[SentRow]:
    groups = outcome.plan.groups
    return [
        SentRow(phase, kind, group, groups[group].size, *sent)
        for (phase, kind, group), sent in outcome.sent.items()
    ]


_TIERS = {
    "pcie_down": "PCIe to the GPU", "pcie_up": "PCIe from the GPU", "uplink_down": "PCIe uplink, down",
    "uplink_up": "PCIe uplink, up", "dram": "host memory", "socket_out": "between sockets",
    "cpu": "CPU cores", "drive_read": "NVMe read", "drive_write": "NVMe write",
    "drive_time": "NVMe, read and write",
}  # fmt: skip


def _tiers(outcome: Outcome) -> list[TierRow]:
    """What offloading put on each kind of resource; pools of one rank (queues) are left out."""
    return [
        TierRow(_TIERS[row.name], None if row.is_time else row.per_rank, row.utilisation_fraction)
        for row in outcome.devices
        if row.name in _TIERS
    ]


def _beyond(job: Job, plan: Plan) -> list[OutOfMemory]:
    """What exceeds a limit that memory over time does not show: the start, page-locked memory."""
    found = []
    whole, usable = startup_bytes(job, plan), usable_bytes(job.cluster)
    if whole > usable:
        found.append(over_limit(START_UP, "gpu", whole, usable))
    limit = job.cluster.host.pinned_limit
    if limit is not None and exceeds_pinned_limit(job, plan):
        found.append(over_limit("start", PINNED, pinned_bytes(job, plan), limit))
    return found


def _notes(outcome: Outcome, allocator: AllocatorRow | None) -> list[str]:
    job = outcome.job
    notes = [*job.notes, *outcome.plan.notes, *outcome.notes]
    for rows in extrapolations(outcome.plan, job.cluster).values():
        notes += [extrapolation_sentence(row) for row in rows]
    is_expandable = job.training.expandable_segments
    notes += allocator_notes(allocator, is_expandable=is_expandable)
    if outcome.plan.program.startup_bytes:
        whole = format_bytes(startup_bytes(job, outcome.plan))
        notes.append(
            f"before the first step every GPU holds the whole model, {whole} (no deepspeed.zero.Init)"
        )
    pinned, memory = pinned_bytes(job, outcome.plan), job.cluster.host.memory
    if pinned > memory / 2:
        notes.append(
            f"{format_bytes(pinned)} of each node's host memory are page-locked, {pinned / memory:.0%} of "
            "it: the kernel cannot swap or move them"
        )
    margin = job.cluster.framework_memory.allocator_margin
    if margin > 0:
        total, usable = format_bytes(job.cluster.gpu.memory.capacity), format_bytes(usable_bytes(job.cluster))
        notes.append(
            f"capacity is {usable}, the GPU's {total} / {1 + margin:g}: the allocator is taken to reserve "
            f"{margin * 100:g}% more than tensors have"
        )
    slowest = slowest_of(job)
    if slowest > 1:
        notes.append(
            f"kernels run {slowest:.3f} times slower on the slowest of {job.world_size:,} GPUs than on that "
            "of a node (assumed)"
        )
    beside = job.cluster.gpu.interference
    if beside.compute_slowdown > 1:
        notes.append(
            f"kernels run {beside.compute_slowdown:g} times slower while a collective is under way "
            f"({beside.evidence})"
        )
    if beside.communication_slowdown > 1:
        notes.append(
            f"collectives take {beside.communication_slowdown:g} times as long inside a node while kernels "
            f"run ({beside.evidence})"
        )
    return notes
