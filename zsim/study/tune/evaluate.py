"""Evaluate candidates: bounds at once, exact memory from the plan, time by simulation, on many processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from zsim.engine.micro_batches import extrapolate_seconds, limit_micro_batches, sample_counts
from zsim.engine.simulator import Simulator
from zsim.errors import InputError, ZsimError
from zsim.goodput.goodput import mode_choices, simulate_prepared
from zsim.goodput.prepared import prepare
from zsim.plan.memory.capacity import (
    ResidentMemory,
    node_peak_bytes,
    peak_bytes,
    pinned_limit_violation,
    resident_memory,
    usable_bytes,
)
from zsim.plan.ops import Device
from zsim.report.views.meanings import BREAKDOWN
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.run.checkpoint import TWO_TIERS
from zsim.specs.experiment.run.run import TrainingRunTable
from zsim.specs.experiment.tables import CostTable, Experiment
from zsim.study.differences import verdict_of_row
from zsim.study.sweep.pool import Task, run_tasks
from zsim.study.sweep.records import Identities, Record, points_folder
from zsim.study.tune.axes import Candidate
from zsim.study.tune.bounds import Bound, Bounds, least_seconds
from zsim.study.tune.framework import (
    ACCUMULATION,
    BLOCKS,
    CHECKPOINTING,
    EVERY,
    LOSS,
    MICRO_BATCH,
    RECOMPUTED,
)
from zsim.validated.verdict import LEVEL


@dataclass(frozen=True, slots=True)
class RunDays:
    """The expected days of a run."""

    days: float
    """Infinite for a run that cannot be."""
    goodput_fraction: float = 0.0
    mode: str = ""
    """The mode of its saves."""
    interval_seconds: float = 0.0
    """The interval between its saves."""
    ideal_days: float = 0.0
    error: str | None = None
    """The reason why there is no run."""

    def settings(self) -> dict[str, Any]:
        """The keys of `[run.checkpoint]` that it has."""
        if self.error is not None:
            return {}
        return {"run.checkpoint.mode": self.mode, "run.checkpoint.every": f"{self.interval_seconds:.6g} s"}


def best_run(experiment: Experiment, run: TrainingRunTable, *, jobs: int = 1) -> RunDays:
    """The fewest expected days over the modes of saving, each about at its best interval, then at the best
    interval of the best mode. The experiment's mode is kept where it states the cost of its saves, or that
    there are none.
    """
    try:
        prepared = prepare(experiment.model_copy(update={"run": run}))
        mode = prepared.table.checkpoint.mode
        ranked = [
            mode_choice
            for mode_choice in mode_choices(prepared, jobs=jobs)
            if mode_choice.goodput_fraction is not None
        ]
        if ranked:
            mode = max(ranked, key=lambda mode_choice: mode_choice.goodput_fraction or 0.0).mode
        saves = prepared.table.checkpoint
        remote = saves.remote_every if mode in TWO_TIERS else None
        saves = saves.model_copy(update={"mode": mode, "every": "auto", "remote_every": remote})
        table = prepared.table.model_copy(update={"checkpoint": saves})
        simulated = simulate_prepared(prepared.replace_table(table), jobs=jobs, compares=False)
    except ZsimError as error:
        return RunDays(inf, error=str(error))
    days = inf if simulated.expected_days is None else simulated.expected_days
    return RunDays(days, simulated.goodput_fraction, mode, simulated.work_seconds, simulated.ideal_days)


def least_days(run: TrainingRunTable | None, cost: CostTable | None, step_tokens: int) -> float:
    """Days per second of the step, without stops: a lower limit of every run with that step. Raises
    InputError where the experiment does not say how many steps it takes.
    """
    return _steps(run, cost, step_tokens) / 86_400.0


def _steps(table: TrainingRunTable | None, cost: CostTable | None, step_tokens: int) -> int:
    if table is None or table.days is not None or table.phases:
        raise InputError(
            "--goal fewest-days: needs the length of the run: expected run.tokens or run.steps, without "
            "run.days and run.phases"
        )
    if table.steps is not None:
        return table.steps
    tokens = table.tokens if table.tokens is not None else None if cost is None else cost.given_tokens
    if tokens is None:
        raise InputError('--goal fewest-days: how far does the run go? expected run.tokens (as in "15T")')
    return max(round(tokens / step_tokens), 1)


# Processes take seconds to start and share no work with this one, so short searches finish sooner
# without them: they are started only after this much processor time.
_SERIAL_SECONDS = 10.0
_BATCH_KEYS = (MICRO_BATCH, ACCUMULATION, CHECKPOINTING, EVERY, BLOCKS, *RECOMPUTED, LOSS)
_SECONDS = ("step_seconds", *(f"{name}_seconds" for name in BREAKDOWN))


@dataclass(frozen=True, slots=True)
class MemoryBounds:
    """Exact peaks of the fullest GPU and of a node's host and drives, and their limits."""

    peaks: Mapping[Device, int]
    resident: ResidentMemory
    least_seconds: float
    """The plan's lower bound on the step."""

    @property
    def limits(self) -> Mapping[Device, int]:
        return self.resident.limits

    @property
    def fits(self) -> bool:
        return all(self.peaks[device] <= self.limits[device] for device in self.peaks)

    @property
    def missing(self) -> tuple[Device, int] | None:
        """The tier that exceeds its limit by the largest ratio, and by how many bytes. None if all fit."""
        over = [device for device in self.peaks if self.peaks[device] > self.limits[device]]
        if not over:
            return None
        worst = max(over, key=lambda device: self.peaks[device] / max(1, self.limits[device]))
        return worst, self.peaks[worst] - self.limits[worst]


@dataclass(frozen=True)
class CandidateResult:
    """A simulated candidate."""

    candidate: Candidate
    row: Mapping[str, Any]
    """The sweep's row, for the whole step with all its micro-batches."""
    least_seconds: float
    """The lower bound on its step."""
    days: RunDays | None = None
    """Its run of days, if that is the goal."""

    @property
    def seconds(self) -> float:
        value: float = self.row["step_seconds"]
        return value

    @property
    def may_run_out(self) -> bool:
        """Whether torch's allocator may fail to find room for it, although all tensors fit."""
        return bool(self.row["allocator_failures"])

    def objective_value(self, objective: Callable[[float, int], float]) -> float:
        """The objective's value, to be minimised, at its risk. Infinite if torch may run out of memory."""
        if self.may_run_out:
            return inf
        return self.risked(objective(self.seconds, self.gpus) if self.days is None else self.days.days)

    def risked(self, value: float) -> float:
        """A value to be minimised, larger by how much less likely it fits than what is told to fit."""
        return value / self.relative_odds

    @property
    def relative_odds(self) -> float:
        """The probability that it fits over that of a configuration that is told to fit, at most 1."""
        verdict = verdict_of_row(self.row)
        return 1.0 if verdict is None else min(1.0, verdict.probability / LEVEL)

    @property
    def gpus(self) -> int:
        value: int = self.row["gpus"]
        return value

    @property
    def gpu_bytes(self) -> int:
        value: int = self.row["gpu_peak_bytes"]
        return value


def memory_of(experiment: Experiment, simulator: Simulator | None = None) -> MemoryBounds | str:
    """Exact peaks from the plan (of the study's `simulator`), or the reason why there is no plan."""
    simulator = simulator or Simulator()
    steps = experiment.training.gradient_accumulation_steps or 1
    try:
        most, fewer = sample_counts(simulator.job(experiment))
        job = simulator.job(limit_micro_batches(experiment, most))
        plan = simulator.plan(job)
        seconds = least_seconds(job, plan)
        if steps > most:
            smaller = simulator.job(limit_micro_batches(experiment, fewer))
            extra = (steps - most) / (most - fewer)
            seconds = least_seconds(job, plan, (smaller, simulator.plan(smaller)), extra)
        if pinned_limit_violation(job, plan) is not None:
            return "more host memory would be page-locked than the host allows"
        resident = resident_memory(job, plan)
        peaks: dict[Device, int] = {"gpu": peak_bytes(job, plan)}
        peaks |= {name: node_peak_bytes(job, plan, name) for name in resident.limits if name != "gpu"}
    except ZsimError as error:
        return str(error)
    return MemoryBounds(peaks, resident, seconds)


class Evaluator:
    """Evaluates candidates and caches the results.

    `jobs` is the number of processes, on which results do not depend. `on_done` is called after each piece of
    work with its kind (checked, simulated) and the count so far. `headroom` is the fraction of GPU memory
    that a candidate must leave free. `has_degrees` is as in `Bounds`. With `run`, the days of that run are
    found for every simulated candidate. `simulator` is one that has made some plans already.
    """

    def __init__(
        self,
        jobs: int = 1,
        cache: Path | None = None,
        on_done: Callable[[str, int], None] | None = None,
        headroom: float = 0.0,
        has_degrees: bool = False,
        run: TrainingRunTable | None = None,
        simulator: Simulator | None = None,
    ) -> None:
        self.jobs = jobs
        self.run = run
        self._days: dict[str, RunDays] = {}
        self.headroom = headroom
        self.on_done = on_done or (lambda label, count: None)
        self.num_simulated = self.num_checked = 0
        self.refused: dict[str, int] = {}
        self.simulator = simulator or Simulator()
        self._seconds = 0.0  # of work in this process
        self._cache = cache
        self._bounds = Bounds(has_degrees=has_degrees)
        self._identities = Identities()
        self._resolved: dict[str, Job | str] = {}
        self._memory: dict[str, MemoryBounds | str] = {}
        self._residents: dict[str, ResidentMemory] = {}
        self._records: dict[str, Record] = {}
        self._run_out: dict[str, Mapping[str, Any]] = {}  # whole steps that torch may have no room for

    # -- bounds -----------------------------------------------------------------------------------------

    def bound(self, candidate: Candidate) -> Bound | None:
        """The bound on the candidate's step. None where it contradicts itself, for a reason in `refused`."""
        job = self._job(candidate)
        return None if isinstance(job, str) else self._bounds.bound(job)

    def usable_bytes(self, candidate: Candidate) -> int:
        """Bytes of one GPU that tensors and the framework may use."""
        return int(usable_bytes(candidate.base.job.cluster) * (1 - self.headroom))

    def is_too_large(self, candidate: Candidate, bound: Bound) -> bool:
        """Whether its activations, with the resident bytes known of its structure, exceed the memory."""
        if bound.gpu_bytes > self.usable_bytes(candidate):
            return True
        resident = self._residents.get(_structure(candidate))
        if resident is None:
            return False
        activation_bytes = bound.gpu_bytes - candidate.base.job.cluster.framework_memory.context
        return resident.is_too_much or resident.bytes["gpu"] + activation_bytes > self.usable_bytes(candidate)

    def holds_too_much(self, candidate: Candidate) -> bool:
        """Whether the resident bytes known of its structure exceed the memory."""
        resident = self._residents.get(_structure(candidate))
        return resident is not None and resident.is_too_much

    def keep_resident(self, candidate: Candidate, resident: ResidentMemory) -> None:
        """Keep the resident bytes of a candidate's plan for those of the same structure."""
        self._residents.setdefault(_structure(candidate), resident)

    def fits(self, memory: MemoryBounds | None) -> bool:
        """Whether a candidate with this memory may be proposed: it fits and leaves the headroom free."""
        if memory is None or not memory.fits:
            return False
        return memory.peaks["gpu"] <= memory.limits["gpu"] * (1 - self.headroom)

    def _job(self, candidate: Candidate) -> Job | str:
        key = candidate.key()
        if key not in self._resolved:
            try:
                self._resolved[key] = self.simulator.job(candidate.experiment())
            except ZsimError as error:
                self._refuse(key, str(error))
        return self._resolved[key]

    def _refuse(self, key: str, reason: str) -> None:
        self._resolved[key] = reason
        self.refused[reason] = self.refused.get(reason, 0) + 1

    # -- memory -----------------------------------------------------------------------------------------

    def memory(self, candidates: Sequence[Candidate]) -> list[MemoryBounds | None]:
        """Exact memory of each candidate. None where there is no plan."""
        missing: dict[str, Experiment] = {}
        for candidate in candidates:
            key, job = candidate.key(), self._job(candidate)
            if key not in self._memory and key not in missing and not isinstance(job, str):
                missing[key] = job.experiment
        for key, bounds in zip(missing, self._map(list(missing.values())), strict=True):
            self._memory[key] = bounds
            self.num_checked += 1
            if isinstance(bounds, str):
                self._refuse(key, bounds)
        for candidate in candidates:
            cached = self._memory.get(candidate.key())
            if isinstance(cached, MemoryBounds):
                self._residents.setdefault(_structure(candidate), cached.resident)
        self.on_done("checked", self.num_checked)
        results = (self._memory.get(candidate.key()) for candidate in candidates)
        return [bounds if isinstance(bounds, MemoryBounds) else None for bounds in results]

    def _map(self, experiments: list[Experiment]) -> list[MemoryBounds | str]:
        if self._processes() == 1 or len(experiments) < 2 * self.jobs:
            with self._timed():
                return [memory_of(experiment, self.simulator) for experiment in experiments]
        import joblib

        run: Any = joblib.Parallel(n_jobs=self.jobs)
        results: list[MemoryBounds | str] = run(
            joblib.delayed(memory_of)(experiment) for experiment in experiments
        )
        return results

    # -- time -------------------------------------------------------------------------------------------

    def simulate(self, candidates: Sequence[Candidate]) -> list[CandidateResult | None]:
        """The simulated step of each candidate. None where it cannot be simulated (`refused` says why)."""
        task_lists = {candidate.key(): self._tasks(candidate) for candidate in candidates}
        tasks = {
            task.identity: task
            for candidate_tasks in task_lists.values()
            for task in candidate_tasks
            if task.identity not in self._records
        }
        self._run(list(tasks.values()))
        return [self._candidate_result(candidate, task_lists[candidate.key()]) for candidate in candidates]

    def verify(self, measured: CandidateResult, limit: int) -> CandidateResult:
        """The candidate with every micro-batch simulated, if it has no more than `limit`. If this shows that
        it may run out of memory, the result is kept: `simulate` returns it from then on.
        """
        job = self._job(measured.candidate)
        if isinstance(job, str) or not _full_limit(job) < job.training.gradient_accumulation_steps <= limit:
            return measured
        task = Task(self._identities.identify(job.experiment), job.experiment)
        self._run([task] if task.identity not in self._records else [])
        record = self._records[task.identity]
        if record["status"] != "ok":
            return measured
        full_step = replace(measured, row=record["row"])
        if full_step.may_run_out:
            self._run_out[measured.candidate.key()] = full_step.row
        return full_step

    def _tasks(self, candidate: Candidate) -> list[Task]:
        job = self._job(candidate)
        if isinstance(job, str):
            return []
        experiment = job.experiment
        enough, fewer = sample_counts(job)
        num_full = _full_limit(job)
        sizes = [fewer, enough] if job.training.gradient_accumulation_steps > num_full else [num_full]
        experiments = (limit_micro_batches(experiment, size) for size in sizes)
        return [Task(self._identities.identify(reduced), reduced) for reduced in experiments]

    def _run(self, tasks: list[Task]) -> None:
        def accept(record: Record) -> None:
            self._records[record["identity"]] = record
            self.num_simulated += 1
            self.on_done("simulated", self.num_simulated)

        if not tasks:
            return
        with points_folder(self._cache) as folder:
            jobs = self._processes() if len(tasks) > 1 else 1
            with self._timed() if jobs == 1 else nullcontext():
                run_tasks(tasks, folder, accept, jobs=jobs, simulator=self.simulator)

    def _processes(self) -> int:
        """The number of processes that pays off by now. See `_SERIAL_SECONDS`."""
        return self.jobs if self._seconds >= _SERIAL_SECONDS else 1

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start_seconds = time.process_time()
        yield
        self._seconds += time.process_time() - start_seconds

    def _candidate_result(self, candidate: Candidate, tasks: list[Task]) -> CandidateResult | None:
        job = self._job(candidate)
        records = [self._records[task.identity] for task in tasks]
        if isinstance(job, str):
            return None
        for record in records:
            if record["status"] != "ok":
                self._refuse(candidate.key(), record["error"])
                return None
        row = dict(records[-1]["row"])
        steps = job.training.gradient_accumulation_steps
        if len(records) == 2:
            most, fewer = sample_counts(job)
            row |= _extrapolate_row(records[0]["row"], row, (steps - most) / (most - fewer))
            row[ACCUMULATION] = steps
        row = dict(self._run_out.get(candidate.key(), row))
        memory = self._memory.get(candidate.key())
        lower_bound = (
            memory.least_seconds if isinstance(memory, MemoryBounds) else self._bounds.bound(job).seconds
        )
        return CandidateResult(candidate, row, lower_bound, self._days_of(candidate, job))

    def _days_of(self, candidate: Candidate, job: Job) -> RunDays | None:
        key = candidate.key()
        if self.run is not None and key not in self._days:
            self._days[key] = best_run(job.experiment, self.run, jobs=self.jobs)
        return self._days.get(key)


def _full_limit(job: Job) -> int:
    """The largest number of micro-batches for which a whole step is simulated. For a pipeline it is the
    number of `sample_counts`, else one more, which costs less than a second simulation.
    """
    return sample_counts(job)[0] + (job.parallelism.pipeline == 1)


def _extrapolate_row(smaller: Mapping[str, Any], row: Mapping[str, Any], extra: float) -> dict[str, Any]:
    """The row extrapolated by `extra` times the difference between `row` and `smaller`."""
    scaled: dict[str, Any] = {}
    for key in (*_SECONDS, "step_tokens", "gpu_joules_per_step"):
        if row.get(key) is not None and smaller.get(key) is not None:
            scaled[key] = extrapolate_seconds(row[key], smaller[key], extra)
    slowdown = scaled["step_seconds"] / row["step_seconds"]
    for key in ("step_seconds_low", "step_seconds_high"):
        if row.get(key) is not None:
            scaled[key] = row[key] * slowdown
    ratio = (scaled["step_tokens"] / row["step_tokens"]) / (scaled["step_seconds"] / row["step_seconds"])
    for key in (
        "tokens_per_second",
        "tokens_per_second_per_gpu",
        "model_flops_per_second_per_gpu",
        "mfu_fraction",
    ):
        if row.get(key) is not None:
            scaled[key] = row[key] * ratio
    return scaled


def _structure(candidate: Candidate) -> str:
    """A key of candidates that differ only in how they cut the batch, in checkpointing or in the loss."""
    steps = candidate.overrides.get(ACCUMULATION, candidate.base.job.training.gradient_accumulation_steps)
    return f"{steps > 1} {candidate.key(_BATCH_KEYS)}"
