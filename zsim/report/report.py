"""The report: every number of one simulated step, ready for `--json`, a table or a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from typing import Any

from zsim.plan.moments import JobMoment
from zsim.plan.ops import state_bytes
from zsim.report.breakdown import Breakdown, step_breakdown
from zsim.report.energy import Energy, RunCost
from zsim.report.irregular import GpuTypeRow, JobRow, RankRow, StepSpread
from zsim.report.limiting_sentence import limiting_sentence, overlap_doubt_sentence
from zsim.report.memory import (
    AllocatorRow,
    Ledger,
    OutOfMemory,
    Peak,
    Pool,
)
from zsim.report.offload import OffloadSection, TierRow, offload_section
from zsim.report.pipeline import PipelineSection
from zsim.report.rank_map import RankMap
from zsim.report.traffic import (
    CollectiveRow,
    SentRow,
    TrafficRow,
    collective_rows,
    group_rows,
    overlap_fraction,
)
from zsim.trace.trace import SimulationStats, Trace
from zsim.validated.memory import shipped_errors
from zsim.validated.validation import Validation
from zsim.validated.verdict import Verdict, verdict_content, verdict_of

_SHOWN = 0.1  # of the model's FLOPs


@dataclass(frozen=True, slots=True)
class Padding:
    """Tokens of a mean replica's step."""

    tokens: float
    """Tokens of documents."""
    padded_tokens: float
    """Tokens that are computed."""
    slowest_over_mean: float
    """The FLOPs of the slowest rank over those of the mean one."""

    def to_dict(self, step_seconds: float, gpus: int) -> dict[str, float]:
        """The entry `lengths` of a report. `gpus` train on a replica."""
        return {
            "tokens_per_second_per_gpu": self.tokens / gpus / step_seconds,
            "padded_tokens_per_second_per_gpu": self.padded_tokens / gpus / step_seconds,
            "padding_fraction": 1 - self.tokens / self.padded_tokens,
            "slowest_over_mean": self.slowest_over_mean,
        }


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of a step. FLOPs are means over GPUs."""

    tokens: float
    """Tokens of a replica."""
    model_flops: float
    """FLOPs of the model by `convention`."""
    hardware_flops: float
    """FLOPs of everything that ran, by `convention`."""
    peak_flops_per_second: float | None
    """The dense peak in `peak_dtype`."""
    convention: str
    peak_dtype: str = ""
    gpus_per_replica: int = 1
    padding: Padding | None = None
    masked_flops: tuple[float, float] = (0.0, 0.0)
    """What masks leave out of the FLOPs of the model, and of everything that ran."""

    @property
    def tokens_per_gpu(self) -> float:
        """One GPU's share of the step's tokens."""
        return self.tokens / self.gpus_per_replica

    @property
    def is_much_masked(self) -> bool:
        """Whether a tenth or more of the model's FLOPs by the convention are pairs that a mask leaves out."""
        return self.masked_flops[0] >= _SHOWN * self.model_flops > 0

    def step_tokens(self, gpus: int) -> int:
        """Tokens of the whole step on `gpus` GPUs, the global batch."""
        return round(self.tokens * (gpus // self.gpus_per_replica))

    def utilisation(self, flops: float, seconds: float) -> float | None:
        """The fraction `flops` of the peak's FLOPs in `seconds`. None without a peak or a time."""
        if not seconds or not self.peak_flops_per_second:
            return None
        return flops / seconds / self.peak_flops_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """The parts of a report that do not depend on the simulated step."""

    zsim_version: str
    experiment: Mapping[str, Any]
    """The resolved experiment as plain values."""
    work: StepWork
    capacity_bytes: Mapping[str, int | None]
    """Per GPU for "gpu", per node for "host" and "nvme". None is unlimited."""
    evidence: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    """May have "model", "cluster", "strategy". Missing labels are taken from the trace's metadata."""
    gpus_per_node: int = 1
    """Number of ranks that share a node's memory."""
    nodes: Sequence[Pool] | None = None
    """Which traced ranks share a node, and how many of each. Without it a node holds `gpus_per_node` ranks
    like the traced one.
    """
    framework: str = ""
    """The framework's name."""
    startup_bytes: int = 0
    """Bytes that each GPU held before the first step, where that is more than in the step."""
    rank_capacities: Mapping[str, Mapping[int, int]] | None = None
    """By device, the capacity of each traced rank's GPU and host, where they differ."""
    over_limits: Sequence[OutOfMemory] = ()
    """Exceeded limits that memory over time does not show."""
    parallelism: Mapping[str, Any] = field(default_factory=dict)
    """The degrees and how they are run."""
    rank_map: RankMap | None = None
    """None where there is only data parallelism."""
    model: Mapping[str, int] = field(default_factory=dict)
    """The numbers of the model's parameters."""
    moments: Sequence[JobMoment] = ()
    """What the job needs outside of its step."""
    input_notes: Sequence[str] = ()
    """The notes on what was asked, which the report's notes begin with."""

    def ledger(self, trace: Trace) -> Ledger:
        """The memory of the job's GPUs and nodes over time."""
        return Ledger.of(trace.memory, self.gpus_per_node, self.nodes, self.rank_capacities)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUse:
    """Load of a step on links and on the resources of offloading, which no span shows."""

    traffic: Sequence[TrafficRow] = ()
    sent: Sequence[SentRow] = ()
    tiers: Sequence[TierRow] = ()
    limits: Mapping[str, str] = field(default_factory=dict)
    """The resource that bounds offloaded work, by kind of span."""
    pinned_bytes: int = 0
    """Maximum page-locked memory of a node."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step as `rank` saw it."""

    trace: Trace
    rank: int
    breakdown: Breakdown
    overlap_fraction: float | None
    """The fraction of communication that is hidden. None without communication."""
    full_seconds: float | None = None
    """The step's time, where the trace has only some of its micro-batches."""

    @property
    def seconds(self) -> float:
        return self.trace.step_seconds if self.full_seconds is None else self.full_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(JobFacts):
    """One step of `rank`, explained. The labels are the words of the headline: model, cluster, strategy."""

    rank: int
    step_seconds: float
    out_of_memory: OutOfMemory | None
    peaks: Mapping[str, Peak]
    breakdown: Breakdown
    limit: str
    collectives: tuple[CollectiveRow, ...]
    overlap_fraction: float | None
    traffic: tuple[TrafficRow, ...]
    sent: tuple[SentRow, ...]
    simulation: SimulationStats
    notes: tuple[str, ...] = ()
    """Sentences on the job and on what is assumed of it, those on what was asked first."""
    offload: OffloadSection | None = None
    energy: Energy | None = None
    cost: RunCost | None = None
    critical_path_seconds: Mapping[str, float] | None = None
    ranks: tuple[RankRow, ...] = ()
    jitter: StepSpread | None = None
    jobs: tuple[JobRow, ...] = ()
    gpu_types: tuple[GpuTypeRow, ...] = ()
    allocator: AllocatorRow | None = None
    step_seconds_without_overlap: float | None = None
    """The step with kernels and collectives one after the other, where the overlap is in doubt."""
    validation: Validation | None = None
    pipeline: PipelineSection | None = None

    @property
    def step_seconds_range(self) -> tuple[float, float] | None:
        """The interval in which the measured step lies with a probability of 80 %, by validated runs. None
        where the step is not judged by them.
        """
        return None if self.validation is None else self.validation.range_of(self.step_seconds)

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share a replica of the model."""
        return self.validation is not None and self.validation.features.is_shared

    @property
    def fits(self) -> bool:
        """Whether all tensors have room on every tier, by zsim's best estimate. Its odds are in `verdict`."""
        return self.out_of_memory is None

    @property
    def load(self) -> float:
        """Bytes at the peak over usable bytes, of the tier and the moment where this is highest."""
        return self.load_and_exact[0]

    @property
    def load_and_exact(self) -> tuple[float, float]:
        """`load`, and the part of it that model states are: 0 where it is not that of a tier's peak."""
        limits = {name: limit for name, limit in self.capacity_bytes.items() if limit}
        loads = [
            (self.peaks[name].total / limit, state_bytes(self.peaks[name].at_total) / limit)
            for name, limit in limits.items()
            if name in self.peaks
        ]
        for moment in (moment for moment in self.moments if moment.is_certain):
            sizes = {"gpu": moment.gpu_bytes, "host": moment.host_bytes}
            loads += [(size / limits[name], 0.0) for name, size in sizes.items() if size and name in limits]
        loads += [(self.startup_bytes / limits["gpu"], 0.0)] if "gpu" in limits else []
        if (out_of_memory := self.out_of_memory) is not None:
            capacity = out_of_memory.capacity_bytes
            loads.append((1 + out_of_memory.peak_missing_bytes / capacity if capacity else inf, 0.0))
        return max(loads, default=(0.0, 0.0))

    @property
    def verdict(self) -> Verdict:
        """Whether the job fits, by its fullest tier and torch's allocator."""
        framework, is_mixture = self._kind_of_job
        row = self.allocator
        is_short = row is not None and bool(row.retries or row.failures)
        load, exact = self.load_and_exact
        return verdict_of(load, framework, exact=exact, is_mixture=is_mixture, is_short=is_short)

    @property
    def peak_bytes_range(self) -> tuple[int, int]:
        """The interval of 80 % of what the fullest GPU needs, by zsim's errors on published memory."""
        low, high = shipped_errors(*self._kind_of_job).interval()
        peak = self.peaks["gpu"].total
        return round(peak * low), round(peak * high)

    @property
    def _kind_of_job(self) -> tuple[str, bool]:
        """The framework, and whether the model is a mixture, as published runs are told apart."""
        features = None if self.validation is None else self.validation.features
        return ("", False) if features is None else (features.framework, features.is_mixture)

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        return _ratio(self.work.tokens_per_gpu, self.step_seconds)

    @property
    def step_tokens(self) -> int:
        """Tokens of the step of all GPUs, the global batch."""
        return self.work.step_tokens(self.simulation.world_size)

    @property
    def model_flops_per_second_per_gpu(self) -> float | None:
        return _ratio(self.work.model_flops, self.step_seconds)

    @property
    def mfu_fraction(self) -> float | None:
        """Model FLOPs utilisation: the model's FLOPs over the GPU's peak FLOPs in the time of the step."""
        return self.work.utilisation(self.work.model_flops, self.step_seconds)

    @property
    def hfu_fraction(self) -> float | None:
        """Hardware FLOPs utilisation: as MFU, with recomputation counted as work."""
        return self.work.utilisation(self.work.hardware_flops, self.step_seconds)

    @property
    def masked_mfu_fraction(self) -> float | None:
        """MFU with attention counted over the pairs that its mask leaves, all that fused kernels compute."""
        return self.work.utilisation(self.work.model_flops - self.work.masked_flops[0], self.step_seconds)

    @property
    def masked_hfu_fraction(self) -> float | None:
        """HFU with attention counted over the pairs that its mask leaves. It is never above 1."""
        return self.work.utilisation(self.work.hardware_flops - self.work.masked_flops[1], self.step_seconds)

    @property
    def mfu_peak(self) -> str:
        """Words that name the peak of MFU where it is not the usual one: fp8's is twice that of 16 bits."""
        return f"of {self.work.peak_dtype}'s peak" if self.work.peak_dtype in ("fp8", "fp4") else ""

    def to_dict(self) -> dict[str, Any]:
        """The object that `--json` writes: plain data, finite numbers, `None` where not applicable."""
        padding, gpus = self.work.padding, self.work.gpus_per_replica
        lengths = {} if padding is None else {"lengths": padding.to_dict(self.step_seconds, gpus)}
        return {
            "zsim_version": self.zsim_version,
            "experiment": plain(self.experiment),
            "step_seconds": self.step_seconds,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "model_flops_per_second_per_gpu": self.model_flops_per_second_per_gpu,
            "mfu_fraction": self.mfu_fraction,
            "hfu_fraction": self.hfu_fraction,
            "flops_convention": self.work.convention,
            "fits": self.fits,
            "out_of_memory": None if self.out_of_memory is None else asdict(self.out_of_memory),
            "peak_bytes": {
                device: {"total": peak.total, **peak.by_category} for device, peak in self.peaks.items()
            },
            "breakdown_seconds": dict(self.breakdown.seconds),
            "collectives": [
                {name: getattr(row, name) for name in _OF_COLLECTIVES} for row in self.collectives
            ],
            "evidence": dict(self.evidence),
            "simulation": asdict(self.simulation),
            "step_seconds_range": None if self.step_seconds_range is None else list(self.step_seconds_range),
            "validation": None if self.validation is None else self.validation.to_dict(),
            "labels": dict(self.labels),
            "limit": self.limit,
            "capacity_bytes": dict(self.capacity_bytes),
            "startup_bytes": self.startup_bytes,
            "bytes_at_peak": {device: dict(peak.at_total) for device, peak in self.peaks.items()},
            "breakdown_by_phase_seconds": {
                phase: dict(row) for phase, row in self.breakdown.by_phase.items()
            },
            "overlap_fraction": self.overlap_fraction,
            "masked_mfu_fraction": self.masked_mfu_fraction,
            "masked_hfu_fraction": self.masked_hfu_fraction,
            "mfu_peak": {"dtype": self.work.peak_dtype, "flops_per_second": self.work.peak_flops_per_second},
            "traffic": [asdict(row) for row in self.traffic],
            "traffic_by_phase": [asdict(row) for row in self.sent],
            "notes": list(self.notes),
            "offload": None if self.offload is None else asdict(self.offload),
            "energy": None if self.energy is None else asdict(self.energy),
            "cost": None if self.cost is None else asdict(self.cost),
            "critical_path_seconds": (
                None if self.critical_path_seconds is None else dict(self.critical_path_seconds)
            ),
            "ranks": [asdict(row) for row in self.ranks],
            "gpu_types": [asdict(row) | {"fits": row.fits} for row in self.gpu_types],
            "jitter": None if self.jitter is None else asdict(self.jitter),
            "jobs": [asdict(row) | {"slowdown": row.slowdown} for row in self.jobs],
            "allocator": None if self.allocator is None else asdict(self.allocator),
            "step_seconds_without_overlap": self.step_seconds_without_overlap,
            **verdict_content(self.verdict),
            "peak_bytes_range": list(self.peak_bytes_range),
            "model": dict(self.model),
            "moments": [asdict(row) for row in self.moments],
            "parallelism": plain(self.parallelism),
            "bubble_fraction": None if self.pipeline is None else self.pipeline.bubble_fraction,
            "stages": [] if self.pipeline is None else [row.to_dict() for row in self.pipeline.rows],
            **lengths,
            "collectives_by_group": [asdict(row) for row in group_rows(self.collectives)],
        }


_PLAIN = (str, int, bool)  # a tuple: a union would be made anew for each value


def plain(value: Any) -> Any:
    """`value` as JSON data: mappings, lists, text and finite numbers. Numbers that are not finite become
    None.
    """
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(entry) for entry in (sorted(value) if isinstance(value, set | frozenset) else value)]
    to_scalar = getattr(value, "item", None)  # a numpy scalar
    return plain(to_scalar()) if callable(to_scalar) else str(value)


_OF_COLLECTIVES = (
    "kind", "group", "count", "bytes", "dtype", "busy_seconds", "group_size", "algorithm_bytes_per_second",
    "bus_bytes_per_second", "exposed_seconds",
)  # fmt: skip
_NO_MACHINE_USE = MachineUse()


def traced_step(trace: Trace) -> TracedStep:
    """The step of the first traced rank."""
    if trace.step_seconds <= 0 or not math.isfinite(trace.step_seconds):
        raise ValueError(f"a step of {trace.step_seconds} seconds cannot be reported")
    rank = int(trace.ranks[0]) if len(trace) else 0
    return TracedStep(trace, rank, step_breakdown(trace, rank), overlap_fraction(trace, rank))


def make_report(
    step: TracedStep,
    job: JobFacts,
    simulation: SimulationStats,
    machine_use: MachineUse = _NO_MACHINE_USE,
    *,
    step_seconds_without_overlap: float | None = None,
    offload_seconds_range: tuple[float, float] | None = None,
    pipeline: PipelineSection | None = None,
) -> Report:
    """The report of a step. `step_seconds_without_overlap` and `offload_seconds_range` come from further
    simulations of the step, where there were any. What is not in the trace, from `notes` on, is left open."""
    trace, work, breakdown = step.trace, job.work, step.breakdown
    ledger = job.ledger(trace)
    out_of_memory = ledger.first_over_capacity(job.capacity_bytes)
    if job.over_limits:
        out_of_memory = replace(job.over_limits[0], rank=step.rank)
    compute_seconds = (breakdown.seconds if pipeline is None else pipeline.mean_seconds())["compute"]
    kernel_utilisation = work.utilisation(work.hardware_flops - work.masked_flops[1], compute_seconds)
    limit = limiting_sentence(trace, breakdown, step.overlap_fraction, kernel_utilisation, work.peak_dtype)
    metadata_labels = {
        key: str(value) for key, value in trace.metadata.items() if isinstance(value, str | int)
    }
    offload = offload_section(
        trace, breakdown, step.rank, machine_use.limits, machine_use.tiers, machine_use.pinned_bytes
    )
    if offload is not None and offload_seconds_range is not None:
        offload = replace(offload, range_seconds=offload_seconds_range)
    facts: dict[str, Any] = {fact.name: getattr(job, fact.name) for fact in fields(job)}
    return Report(
        **facts | {"labels": metadata_labels | dict(job.labels)},
        rank=step.rank,
        step_seconds=step.seconds,
        out_of_memory=out_of_memory,
        peaks=ledger.peaks(),
        breakdown=breakdown,
        limit=limit + overlap_doubt_sentence(job.framework, step.seconds, step_seconds_without_overlap),
        collectives=collective_rows(trace, step.rank, breakdown.waits),
        overlap_fraction=step.overlap_fraction,
        traffic=tuple(machine_use.traffic),
        sent=tuple(machine_use.sent),
        simulation=simulation,
        offload=offload,
        step_seconds_without_overlap=step_seconds_without_overlap,
        pipeline=pipeline,
    )


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None
