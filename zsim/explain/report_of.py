"""An outcome of the engine as a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from zsim.cost.rates.power import GpuActivity
from zsim.engine.micro_batches import SimulatedStep
from zsim.engine.simulate import Outcome
from zsim.explain.job import (
    attention_note,
    kernel_activity_of,
    model_size,
    resolved_experiment,
    resolved_parallelism,
    step_work,
)
from zsim.explain.notes import extrapolations, notes_of
from zsim.explain.pipeline import (
    Terms,
    bubbles_of,
    gpu_type_rows,
    mean_energy,
    pipeline_of,
    rank_capacities,
    slowest_step,
    traced_step_of,
)
from zsim.explain.variants import (
    Variants,
    add_memory_peak,
    full_allocation,
    full_collectives,
    full_pipeline,
    full_step,
    micro_batches_note,
    sum_rows,
)
from zsim.plan.make import is_offloaded, moments_of
from zsim.plan.memory.capacity import (
    excess_bytes,
    node_capacity_bytes,
    pinned_bytes,
    pinned_limit_violation,
    program_peak_bytes,
    program_startup_bytes,
    startup_bytes,
    usable_bytes,
)
from zsim.plan.node_types import gpu_of
from zsim.plan.ops import Plan
from zsim.report.breakdown import weighted_sums
from zsim.report.critical.causes import CriticalSeconds, OpCauses, critical_seconds
from zsim.report.critical.path import critical_path
from zsim.report.energy import Energy, RunCost, run_cost, step_energy
from zsim.report.irregular import GpuTypeRow, JobRow, RankRow, loss_note, rank_rows, step_spread
from zsim.report.job_features import step_validation
from zsim.report.limiting_sentence import shared_queues_notes
from zsim.report.memory import PINNED, START_UP, AllocatorRow, OutOfMemory, over_limit
from zsim.report.offload import TierRow, moved_bytes_of
from zsim.report.pipeline import PipelineSection
from zsim.report.rank_map import RankMap, rank_map
from zsim.report.report import JobFacts, MachineUse, Report, TracedStep, make_report
from zsim.report.traffic import SentRow, TrafficRow, reported_group
from zsim.report.views.meanings import DATA_LOADING
from zsim.specs.experiment.data.loading import waiting_seconds
from zsim.specs.experiment.job import (
    Job,
    batch_label,
    gpus_label,
    parallelism_label,
    strategy_label,
    training_label,
)
from zsim.specs.lazy_model import EVIDENCE_ORDER, Evidence
from zsim.specs.strategy.registry import framework_of
from zsim.validated.validation import OFFLOADING, Validation, input_spread, widen_for_input
from zsim.version import __version__

Used = TypeVar("Used", TrafficRow, TierRow)


def report_of_step(step: SimulatedStep, wall_seconds: float, variants: Variants | None = None) -> Report:
    """The report of a simulated step with its `variants`, see `full_variants`."""
    if step.is_complete:
        return report_of(step.outcome, wall_seconds, variants)
    if step.is_loop:
        outcome = replace(step.outcome, job=step.job)
        report = report_of(outcome, wall_seconds, variants, full_step(step), terms=step.terms)
        return _add_repeats(report, step)
    notes = (*step.outcome.notes, micro_batches_note(step))
    outcome = replace(step.outcome, job=step.job, notes=notes, allocation=full_allocation(step))
    pipeline = full_pipeline(step)
    traced = full_step(step)
    if pipeline is not None:
        traced = replace(slowest_step(outcome, pipeline), full_seconds=step.seconds)
    report = report_of(outcome, wall_seconds, variants, traced, pipeline, step.terms)
    simulated_seconds = report.critical_path_seconds or {}
    chain = CriticalSeconds(
        lambda: {name: seconds * step.length_ratio for name, seconds in simulated_seconds.items()}
    )
    return replace(add_memory_peak(report, step), critical_path_seconds=chain)


def _add_repeats(report: Report, step: SimulatedStep) -> Report:
    """The report of a loop, given that of its simulated micro-batches with the seconds of all."""
    terms = step.terms

    def used(rows_of: Callable[[Outcome], Sequence[Used]], key: str) -> tuple[Used, ...]:
        """Rows whose bytes are those of the terms, and whose use of the step is the mean of theirs."""
        shares = [
            (factor * outcome.trace.step_seconds / step.seconds, rows_of(outcome))
            for factor, outcome in terms
        ]
        return tuple(
            replace(row, utilisation_fraction=share.utilisation_fraction)
            for row, share in zip(
                sum_rows([(factor, rows_of(outcome)) for factor, outcome in terms], key),
                sum_rows(shares, key),
                strict=True,
            )
        )

    offload = report.offload
    if offload is not None:
        moved = [(factor, moved_bytes_of(outcome.trace, report.rank)) for factor, outcome in terms]
        offload = replace(
            offload,
            moved_bytes={
                kind: round(sum(f * sizes[kind] for f, sizes in moved)) for kind in offload.moved_bytes
            },
            tiers=used(_tiers, "tier"),
        )
    rank_terms = [(factor, _ranks(outcome, has_bubbles=False)) for factor, outcome in terms]
    return replace(
        report,
        collectives=full_collectives(step),
        traffic=used(_traffic, "link_class"),
        sent=sum_rows(
            [(factor, _sent(outcome)) for factor, outcome in terms], "phase", "kind", "group", "group_size"
        ),
        offload=offload,
        ranks=sum_rows(rank_terms, "rank", "ranks", "kernel_slowdown"),
        critical_path_seconds=CriticalSeconds(
            lambda: weighted_sums([(factor, _critical_seconds(outcome)) for factor, outcome in terms])
        ),
    )


def report_of(
    outcome: Outcome,
    wall_seconds: float,
    variants: Variants | None = None,
    step: TracedStep | None = None,
    pipeline: PipelineSection | None = None,
    terms: Terms | None = None,
) -> Report:
    """The report of one simulated step, with its `variants` under other assumptions.

    `step` and `pipeline` are the traced step and its pipeline, where their breakdowns are not those of the
    outcome's trace. Then the step is the sum of `terms`.
    """
    job, plan, jitter_run = outcome.job, outcome.plan, outcome.jitter_run
    variants = variants or Variants()
    if step is None:
        pipeline = pipeline_of(outcome)
        step = traced_step_of(outcome) if pipeline is None else slowest_step(outcome, pipeline)
    step = _add_data_loading(job, step)
    types = gpu_type_rows(outcome, step.seconds, terms)
    allocator = _allocator(outcome, step.seconds)
    mean_breakdown = (
        step.breakdown if pipeline is None else replace(step.breakdown, seconds=pipeline.mean_seconds())
    )
    energy = (
        mean_energy(outcome, step.seconds, terms)
        if types
        else step_energy(
            mean_breakdown, _kernel_activity(outcome, terms), job.cluster.gpus[job.types[0]].power
        )
    )
    jitter = None
    if jitter_run is not None:
        jitter = step_spread(jitter_run.jitter, jitter_run.steps, jitter_run.plain_seconds)
    report = make_report(
        step,
        _facts(outcome),
        replace(outcome.stats, wall_seconds=wall_seconds),
        _machine_use(outcome),
        step_seconds_without_overlap=variants.without_overlap,
        offload_seconds_range=variants.offload_range,
        pipeline=pipeline,
    )
    notes = (*_notes(outcome, allocator, energy, variants, step, terms), *_notes_on_types(job, types))
    return replace(
        report,
        notes=variants.replace_note(notes),
        input_notes=variants.replace_note(report.input_notes),
        allocator=allocator,
        energy=energy,
        cost=_cost(job, energy, step.seconds),
        critical_path_seconds=CriticalSeconds(lambda: _critical_seconds(outcome)),
        validation=_add_input_spreads(step_validation(job, plan, step, allocator), variants, step.seconds),
        ranks=_ranks(outcome, has_bubbles=pipeline is not None),
        jitter=jitter,
        jobs=tuple(_jobs(outcome)),
        gpu_types=types,
    )


def _kernel_activity(outcome: Outcome, terms: Terms | None) -> GpuActivity:
    """The activity of the step's kernels."""
    activities = [
        kernel_activity_of(term.job, term.plan).scaled(factor) for factor, term in terms or [(1.0, outcome)]
    ]
    return GpuActivity(*map(sum, zip(*activities, strict=True)))


def _add_input_spreads(validation: Validation, variants: Variants, step_seconds: float) -> Validation:
    """The validation with the spreads of the job's inputs that the step was simulated with."""
    ends = {
        "the host": variants.host_seconds,
        OFFLOADING: variants.offload_range,
        "how even the router is": variants.routing,
    }
    for input_name, seconds in ends.items():
        if (variation := input_spread(input_name, seconds, step_seconds)) is not None:
            validation = widen_for_input(validation, variation)
    return validation


def _notes_on_types(job: Job, types: Sequence[GpuTypeRow]) -> list[str]:
    """The losses of GPUs of several types to the slowest, and how their gradients count."""
    notes = [loss_note(types)] if types else []
    if job.micro_batch_sizes:
        notes.append(
            "ranks have micro-batches of several sizes, and the framework averages gradients over ranks: "
            "sequences in smaller micro-batches count for more, unless the script scales each rank's loss"
        )
    return [note for note in notes if note]


def _facts(outcome: Outcome) -> JobFacts:
    job, plan, cluster = outcome.job, outcome.plan, outcome.job.cluster
    grades = dict[str, str](_evidence(job, plan))
    node = node_capacity_bytes(job, plan)
    if outcome.jitter_run is not None:
        grades["jitter"] = outcome.jitter_run.jitter.evidence
    return JobFacts(
        zsim_version=__version__,
        experiment=resolved_experiment(job),
        work=step_work(job),
        capacity_bytes={"gpu": _fullest_usable(outcome), "host": node["host"], "nvme": node["nvme"]},
        evidence=grades,
        labels={
            "model": job.model.name,
            "cluster": cluster.name,
            "strategy": strategy_label(job),
            **_parallelism(job),
            "gpus": gpus_label(job),
            "batch": batch_label(job.training, job.micro_batch_sizes),
            "training": training_label(job),
        },
        gpus_per_node=job.gpus_per_node,
        rank_capacities=rank_capacities(outcome),
        framework=framework_of(job.kind).title,
        startup_bytes=startup_bytes(job, plan),
        over_limits=_over_limits(job, plan),
        parallelism=resolved_parallelism(job),
        model=model_size(job),
        moments=moments_of(job, plan),
        input_notes=job.notes,
        rank_map=None if job.parallelism.is_trivial else _rank_map(job),
    )


def _fullest_usable(outcome: Outcome) -> int:
    """Usable bytes of the GPU whose rank has the least room left."""
    job, plan = outcome.job, outcome.plan
    numbers = range(len(plan.programs)) if len(job.types) > 1 else [0]
    limits = [usable_bytes(job.cluster, gpu_of(job, plan, number)) for number in numbers]
    room = [limit - program_peak_bytes(job, plan, number) for number, limit in enumerate(limits)]
    return limits[room.index(min(room))]


def _rank_map(job: Job) -> RankMap:
    split = job.parallelism.experts
    experts = job.parallelism.expert_mesh(job.world_size) if split.members > 1 else None
    return rank_map(job.mesh, job.placement.gpus, job.placement.nodes, experts)


def _parallelism(job: Job) -> dict[str, str]:
    label = parallelism_label(job)
    return {"parallelism": label} if label else {}


def _over_limits(job: Job, plan: Plan) -> list[OutOfMemory]:
    """Exceeded limits that memory over time does not show: of the start-up, and of page-locked memory."""
    exceeded: list[OutOfMemory] = []
    for number in range(len(plan.programs)):
        usable = usable_bytes(job.cluster, gpu_of(job, plan, number))
        startup = program_startup_bytes(job, plan, number)
        if startup > usable and not exceeded:
            exceeded.append(over_limit(START_UP, "gpu", startup, usable))
    pinned = pinned_limit_violation(job, plan)
    if pinned is not None:
        exceeded.append(over_limit("start", PINNED, *pinned))
    return exceeded


def _allocator(outcome: Outcome, step_seconds: float) -> AllocatorRow | None:
    """The row of torch's allocator in a step of `step_seconds`.

    None where the allocator was not simulated (on a CPU, with co-located jobs), and where the tensors alone
    do not fit.
    """
    allocation, job = outcome.allocation, outcome.job
    if allocation is None or excess_bytes(job, outcome.plan) > 0:
        return None
    counts = allocation.counts
    return AllocatorRow(
        allocation.reserved_bytes, allocation.limit_bytes, counts.retries, allocation.extra_seconds,
        counts.released, counts.failures, step_seconds - allocation.extra_seconds,
    )  # fmt: skip


def _notes(
    outcome: Outcome,
    allocator: AllocatorRow | None,
    energy: Energy | None,
    variants: Variants,
    step: TracedStep,
    terms: Terms | None,
) -> list[str]:
    job = outcome.job
    notes = [*notes_of(outcome, allocator), *_lengths_note(job), *attention_note(step_work(job))]
    if energy is None and job.cost is not None:
        unknown = next((gpu for gpu in job.cluster.gpus if gpu.power is None), job.cluster.gpu)
        notes.append(f"no energy: how much power GPU '{unknown.name}' draws is not known")
    connections = job.training.device_max_connections
    traces = [(factor, term.plan, term.trace) for factor, term in terms or [(1.0, outcome)]]
    notes += shared_queues_notes(traces, connections, variants.unshared_queues)
    if variants.hosts is not None:
        notes.append(variants.hosts.note(step.breakdown.seconds["host_bound"] / step.seconds))
    return [*notes, *variants.notes]


def _cost(job: Job, energy: Energy | None, step_seconds: float) -> RunCost | None:
    """The costs of a run. None without `[cost]` in the experiment."""
    table = job.cost
    if table is None:
        return None
    return run_cost(
        table,
        energy,
        step_seconds=step_seconds,
        step_tokens=step_work(job).step_tokens(job.world_size),
        step_samples=job.sequences_per_step,
        gpus=job.world_size,
        nodes=job.num_nodes,
        parameters=job.model.numel,
    )


def _critical_seconds(outcome: Outcome) -> dict[str, float]:
    """Seconds of the critical path by cause."""
    plan, job = outcome.plan, outcome.job
    gpus = [gpu_of(job, plan, number) for number in range(len(plan.programs))]
    causes = OpCauses(plan, gpus, outcome.call_limits, outcome.limits)
    queues = job.training.device_max_connections
    path = critical_path(plan, outcome.trace, outcome.communicators, queues, outcome.peers)
    return critical_seconds(path, causes)


def _ranks(outcome: Outcome, *, has_bubbles: bool) -> tuple[RankRow, ...]:
    """The classes of ranks that differ.

    There are none where steps are drawn with jitter, and where ranks differ only by pipeline rank
    (`has_bubbles`: there are several), which has a separate table.
    """
    classes = outcome.classes
    if outcome.jitter_run is not None or (has_bubbles and len(classes.sizes) == len(outcome.plan.programs)):
        return ()
    slowdowns = [float(outcome.slowdowns[rank]) for rank in classes.representatives]
    bubbles = bubbles_of(outcome) if has_bubbles else None
    return rank_rows(outcome.trace, classes.sizes.tolist(), slowdowns, bubbles)


def _jobs(outcome: Outcome) -> list[JobRow]:
    """The jobs that share the fabric, this job first."""
    return [
        JobRow(
            name=times.name,
            model=times.job.model.name,
            strategy=strategy_label(times.job),
            nodes=times.job.num_nodes,
            gpus=times.job.world_size,
            steps=times.steps,
            step_seconds_alone=times.isolated_seconds,
            step_seconds_together=times.concurrent_seconds,
        )
        for times in outcome.concurrent_jobs
    ]


def _machine_use(outcome: Outcome) -> MachineUse:
    """Bytes by class of links, by phase and collective, and by tier of memory."""
    return MachineUse(
        traffic=_traffic(outcome),
        sent=_sent(outcome),
        tiers=_tiers(outcome),
        limits=outcome.limits,
        pinned_bytes=pinned_bytes(outcome.job, outcome.plan),
    )


def _traffic(outcome: Outcome) -> list[TrafficRow]:
    """One GPU's share of the bytes on each class of links, and the maximum utilisation of a link."""
    seconds = outcome.trace.step_seconds
    rows = []
    offload_traffic = {row.name: row for row in outcome.devices}
    for name, load in outcome.traffic.items():
        link_class = outcome.topology.classes[name]
        per_gpu = load.total_bytes / outcome.job.world_size
        busy = load.fullest_bytes / (link_class.capacity * seconds)
        if name in offload_traffic:  # offloading uses these links too
            per_gpu += offload_traffic[name].per_rank
            busy += offload_traffic[name].utilisation_fraction
        if per_gpu > 0:
            rows.append(TrafficRow(name, per_gpu, busy))
    return rows


def _sent(outcome: Outcome) -> list[SentRow]:
    groups = outcome.plan.groups
    bytes_of_key: dict[tuple[str, str, str, int], tuple[float, float]] = {}
    for (phase, kind, group), (within, between) in outcome.sent_bytes.items():
        key = phase, kind, reported_group(group), groups[group].size
        totals_before = bytes_of_key.get(key, (0.0, 0.0))
        bytes_of_key[key] = totals_before[0] + within, totals_before[1] + between
    return [SentRow(*key, *sent) for key, sent in bytes_of_key.items()]


_TIERS = {
    "pcie_down": "PCIe to the GPU", "pcie_up": "PCIe from the GPU", "uplink_down": "PCIe uplink, down",
    "uplink_up": "PCIe uplink, up", "c2c_down": "C2C to the GPU",
    "c2c_up": "C2C from the GPU", "dram": "host memory", "socket_out": "between sockets",
    "cpu": "CPU cores", "drive_read": "NVMe read", "drive_write": "NVMe write",
    "drive_time": "NVMe, read and write",
}  # fmt: skip


def _tiers(outcome: Outcome) -> list[TierRow]:
    """Load of offloading on each kind of resource. Resources of a single rank (queues) are left out."""
    return [
        TierRow(_TIERS[row.name], None if row.is_time else row.per_rank, row.utilisation_fraction)
        for row in outcome.devices
        if row.name in _TIERS
    ]


def _evidence(job: Job, plan: Plan) -> dict[str, Evidence]:
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
            "offload": [(cluster.c2c or cluster.pcie).evidence, cluster.offload.evidence, *nvme],
        }
    if job.model.captured is not None and job.model.captured.is_assumed:
        grades_of_part = {**grades_of_part, "compute": [*grades_of_part["compute"], "assumed"]}
    for part in extrapolations(plan, cluster):
        grades_of_part = {**grades_of_part, part: [*grades_of_part[part], "assumed"]}
    return {part: max(grades, key=EVIDENCE_ORDER.index) for part, grades in grades_of_part.items()}


def _add_data_loading(job: Job, step: TracedStep) -> TracedStep:
    """The step with the seconds that it waits for its samples, as a part of its breakdown. It is unchanged
    without `[data]`.
    """
    table = job.experiment.data
    if table.samples_per_second_per_host is None:
        return step
    waits = waiting_seconds(table, job.training, job.gpus_per_node, job.parallelism.model_ranks, step.seconds)
    seconds = {**step.breakdown.seconds, DATA_LOADING: waits}
    return replace(
        step, full_seconds=step.seconds + waits, breakdown=replace(step.breakdown, seconds=seconds)
    )


def _lengths_note(job: Job) -> list[str]:
    """A sentence on documents of different lengths. There is none without them."""
    lengths = job.training.lengths
    if lengths is None:
        return []
    padded = (
        f"{lengths.padding_fraction:.1%} of the tokens are padding"
        if lengths.padding_fraction
        else "no padding"
    )
    return [
        f"documents of different lengths: {padded}; a token's document has {lengths.span:,.0f} tokens in "
        f"the mean "
        f"of the slowest rank, which computes {lengths.slowest_over_mean:.3f} times what the mean one does"
    ]
