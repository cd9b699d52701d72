"""The answer of an RL step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from zsim.engine.simulator import Simulator
from zsim.plan.memory.capacity import usable_bytes
from zsim.plan.ops import state_bytes
from zsim.report.energy import bill
from zsim.report.views.displayable import Displayable
from zsim.report.views.text.plain import named_columns, paragraph, table
from zsim.report.views.text.sentences import missing_memory
from zsim.specs.experiment.job import gpus_label, strategy_label
from zsim.specs.experiment.load import ExperimentSource, experiment_of
from zsim.units import format_bytes, format_gpus, format_seconds
from zsim.validated.memory import MemoryErrors
from zsim.validated.validation import format_range
from zsim.validated.verdict import Verdict, verdict_content, verdict_of
from zsim.version import __version__
from zsim.workflows.rl.job import RlJob, resolve_rl
from zsim.workflows.rl.loop import RlStepTimes, run_loop
from zsim.workflows.rl.memory import (
    PhaseMemory,
    engine_bytes,
    host_memory_by_phase,
    memory_by_phase,
    remedies,
)
from zsim.workflows.rl.phases import PhaseTimes, phase_times
from zsim.workflows.rollout.limits import BLOCK_TOKENS


class PhaseSpread(NamedTuple):
    """Factors from what is simulated to the ends of its interval of 80 %, by errors of published steps.

    Each end is one of split conformal prediction: of n factors in order, that of place 0.9 (n + 1), or the
    last where there are too few. Only rows to which constants may be fitted are counted, so that rows that
    are there to report errors tell whether the intervals hold (validation/rl/README.md). Constants of steps,
    trainers and rollouts were fitted to the same rows, which then lie about as often on either side: the
    larger factor is for both ends. `python -m validation.rl.calibration` prints the factors.
    """

    below: float
    """What is simulated, over the least that is to be expected."""
    above: float
    """The most that is to be expected, over what is simulated."""

    def range_of(self, seconds: float) -> tuple[float, float]:
        """The interval about `seconds`."""
        return seconds / self.below, seconds * self.above


STEP = PhaseSpread(1.33, 1.33)
"""13 steps, of NeMo-RL and of verl."""
PASSES = STEP
"""21 phases of verl's trainer are within a factor of 1.18, all of one source, so that a step's is taken."""
ROLLOUT = PhaseSpread(1.26, 1.26)
"""Seven rollouts of verl."""
_COPIED = PhaseSpread(1.57, 4.4)
SYNCS: Mapping[str, PhaseSpread] = {
    "ipc": _COPIED,
    "broadcast": _COPIED,
    "filesystem": _COPIED,
    "reshard": PhaseSpread(1.51, 1.34),
    "host": PhaseSpread(1.14, 1.13),
}
"""By transport: 22 syncs by handles or broadcasts of several releases of verl, 13 of NeMo-RL from shard to
shard, 6 of checkpoint-engine from host memory. A file system, of which there are none, is as the first."""


def phase_spread(phase: str, transport: str) -> PhaseSpread:
    """The spread of a phase. Those without published times have the step's."""
    if phase == "weight_sync":
        return SYNCS[transport]
    if phase in ("training", "old_logprobs", "reference", "values"):
        return PASSES
    return ROLLOUT if phase == "rollout" else STEP


PHASES = (
    "rollout", "old_logprobs", "reference", "values", "training", "weight_sync", "offload", "reward", "other",
)  # fmt: skip

_THOUSAND = 1000  # steps of a bill
_LONG_TAIL = 0.3  # of a rollout, and of a step
_BUSY = 0.9  # of the time, from which a side counts as never resting

_CERTAIN = MemoryErrors(np.empty(0), np.empty(0), 0, 0, 0.0, 0)
"""No errors: an engine fills what `gpu_memory_utilization` gives it."""


@dataclass(frozen=True, eq=False)
class RlResult(Displayable):
    """One simulated step of reinforcement learning."""

    job: RlJob
    times: PhaseTimes
    step: RlStepTimes

    @cached_property
    def phases_seconds(self) -> dict[str, float]:
        """Seconds of each phase by itself."""
        times = self.times
        return {
            "rollout": self.step.rollout,
            "old_logprobs": times.old_logprobs,
            "reference": times.reference,
            "values": times.values,
            "training": times.training,
            "weight_sync": times.weight_sync,
            "offload": times.offload,
            "reward": times.reward,
            "other": times.controller,
        }

    @cached_property
    def exposed_seconds(self) -> dict[str, float]:
        """Seconds of each phase that the step waits for."""
        step = self.step
        return {**self.phases_seconds, "rollout": step.exposed_rollout, "weight_sync": step.exposed_sync}

    @cached_property
    def memory(self) -> Mapping[str, PhaseMemory]:
        """The fullest GPU of each phase."""
        return memory_by_phase(self.job, self.times)

    @cached_property
    def host_memory(self) -> Mapping[str, PhaseMemory]:
        """A node's host in each phase."""
        return host_memory_by_phase(self.job, self.times)

    @property
    def capacity_bytes(self) -> int:
        """Usable bytes of a GPU."""
        return usable_bytes(self.job.cluster)

    def phase_capacity_bytes(self, name: str) -> int:
        """The same in a phase. In the rollout torch's allocator has its margin beside the engine alone, which
        takes what it was told and no more."""
        if name != "rollout":
            return self.capacity_bytes
        engine, capacity = engine_bytes(self.memory["rollout"]), self.job.cluster.gpu.memory.capacity
        room = max(0, capacity - engine) * self.capacity_bytes / capacity
        return min(capacity, round(engine + room))

    @property
    def host_capacity_bytes(self) -> int:
        """Bytes of a node's host."""
        return min(host.memory for host in self.job.cluster.hosts)

    @cached_property
    def verdicts(self) -> Mapping[str, Verdict]:
        """The verdict on each phase. That on training counts torch's allocator too."""
        report = self.times.update.report
        features = None if report.validation is None else report.validation.features
        framework, is_mixture = ("", False) if features is None else (features.framework, features.is_mixture)
        verdicts = {
            name: verdict_of(
                phase.total / self.capacity_bytes,
                framework,
                exact=state_bytes(phase.by_category) / self.capacity_bytes,
                is_mixture=is_mixture,
            )
            for name, phase in self.memory.items()
        }
        verdicts["rollout"] = self._rollout_verdict(framework, is_mixture)
        verdicts["training"] = min(
            verdicts["training"], report.verdict, key=lambda verdict: verdict.probability
        )
        for name, phase in self.host_memory.items():
            if phase.total > self.host_capacity_bytes:
                load = phase.total / self.host_capacity_bytes
                verdicts[name] = verdict_of(load, framework, errors=_CERTAIN)
        return verdicts

    def _rollout_verdict(self, framework: str, is_mixture: bool) -> Verdict:
        """An engine takes the part of the memory that it was told. What the trainer left beside it has the
        trainer's errors, and the room that the engine leaves.
        """
        phase = self.memory["rollout"]
        engine, capacity = engine_bytes(phase), self.phase_capacity_bytes("rollout")
        room, remnant = capacity - engine, phase.total - engine
        if room <= 0 or not remnant:
            return verdict_of(phase.total / capacity, "", errors=_CERTAIN)
        exact = state_bytes(phase.by_category) / room
        return verdict_of(remnant / room, framework, exact=exact, is_mixture=is_mixture)

    @property
    def _fullest_phase(self) -> str:
        """The phase that is least likely to fit."""
        return min(self.verdicts, key=lambda name: self.verdicts[name].probability)

    @property
    def verdict(self) -> Verdict:
        """The verdict on the phase that is least likely to fit."""
        return self.verdicts[self._fullest_phase]

    @property
    def fits(self) -> bool:
        """Whether every phase is likelier to fit the usable bytes of the GPUs than not."""
        return self.verdict.is_likely

    @property
    def remedies(self) -> list[str]:
        """Sentences that name the keys with which the phases fit that do not, or likely do not."""
        on_host = [name for name, phase in self.host_memory.items() if phase.total > self.host_capacity_bytes]
        unlikely = {name for name, verdict in self.verdicts.items() if not verdict.is_likely} - {*on_host}
        return [
            *(
                sentence
                for name, phase in self.memory.items()
                for sentence in remedies(
                    self.job, {name: phase}, self.phase_capacity_bytes(name), unlikely=unlikely
                )
            ),
            *remedies(self.job, self.host_memory, self.host_capacity_bytes, is_host=True),
        ]

    @property
    def step_seconds_range(self) -> tuple[float, float]:
        """The interval about the step by the errors of published ones."""
        return STEP.range_of(self.step.seconds)

    @cached_property
    def phases_seconds_range(self) -> dict[str, tuple[float, float]]:
        """The intervals about the phases by the errors of published ones."""
        return {
            name: phase_spread(name, self.job.transport).range_of(seconds)
            for name, seconds in self.phases_seconds.items()
        }

    @property
    def _cache_bytes(self) -> int:
        """Bytes of the cache that the fullest replica used on a GPU."""
        model = self.job.model
        blocks = max(log.peak_blocks for log in self.step.logs) // model.layout.data
        return blocks * BLOCK_TOKENS * model.cache_bytes_per_token

    @property
    def tokens(self) -> float:
        """Tokens of prompts and responses of a step."""
        requests = self.step.requests
        total = sum(request.prompt_tokens + request.response_tokens for request in requests)
        return total / self.step.steps / self.step.part

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens of prompts and responses, over all GPUs."""
        return self.tokens / self.step.seconds / self.job.total_gpus

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `zsim run` with `[rl]`."""
        step, logs, trained = self.step, self.step.logs, self._trained_tokens
        return {
            "zsim_version": __version__,
            "step_seconds": step.seconds,
            "step_seconds_range": self.step_seconds_range,
            "phases_seconds": self.phases_seconds,
            "phases_seconds_range": self.phases_seconds_range,
            "exposed_seconds": self.exposed_seconds,
            "rollout": {
                "tail_seconds": step.tail,
                "tokens": trained,
                "tokens_per_second_per_gpu": trained / step.rollout / self.job.rollout_gpus,
                "running_sequences_mean": _mean_running(self),
                "preemptions": round(self.per_step(sum(log.preemptions for log in logs))),
                "kv_bytes": self._cache_bytes,
                "prefill_tokens": round(self.per_step(sum(log.prefill_tokens for log in logs))),
            },
            "busy_fraction": {"trainer": step.busy_training, "rollout": step.busy_rollout},
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "staleness": {"mean": step.mean_staleness, "max": step.max_staleness},
            "dropped_tokens_fraction": step.dropped_tokens / (step.dropped_tokens + trained),
            "fits": self.fits,
            **verdict_content(self.verdict),
            "capacity_bytes": self.capacity_bytes,
            "capacity_bytes_by_phase": {name: self.phase_capacity_bytes(name) for name in self.memory},
            "verdicts_by_phase": {
                name: verdict_content(phase_verdict) for name, phase_verdict in self.verdicts.items()
            },
            "gpus": {"all": self.job.total_gpus, "trainer": self.job.training_gpus}
            | {"rollout": self.job.rollout_gpus},
            "notes": list(self.job.notes),
            "remedies": self.remedies,
            "peak_bytes_by_phase": {name: phase.to_dict() for name, phase in self.memory.items()},
            "host_bytes_by_phase": {name: phase.to_dict() for name, phase in self.host_memory.items()},
            "training": self.times.update.report.to_dict(),
        }

    def records(self) -> Sequence[Mapping[str, Any]]:
        """One row a phase."""
        return [
            {"phase": name, "seconds": seconds, "exposed_seconds": self.exposed_seconds[name]}
            for name, seconds in self.phases_seconds.items()
        ]

    def headline(self) -> str:
        job = self.job
        return (
            f"{job.table.algorithm.upper()} of {job.update_job.model.name} by {job.framework.name} on "
            f"{self._gpus_label}, {strategy_label(job.update_job)}"
        )

    @property
    def _gpus_label(self) -> str:
        job = self.job
        if job.is_colocated:
            return gpus_label(job.update_job)
        sides = f"{job.training_gpus:,} of the trainer, {job.rollout_gpus:,} of the rollout"
        return f"{format_gpus(job.total_gpus)} ({sides})"

    @property
    def _step_label(self) -> str:
        """E.g. "95.930 s (70.022 s to 131.424 s)"."""
        low, high = map(format_seconds, self.step_seconds_range)
        return f"{format_seconds(self.step.seconds)} ({low} to {high})"

    def brief_lines(self) -> Iterator[str]:
        """Whether it fits, its step with the range of 80 %, and what 1,000 steps take."""
        job, verdict = self.job, self.verdict
        name = self._fullest_phase
        used = f"{format_bytes(self.memory[name].total)} of {format_bytes(self.phase_capacity_bytes(name))}"
        gpu_hours = _THOUSAND * self.step.seconds * job.total_gpus / 3600
        for text in (
            f"{verdict.word.upper()}  {used} in {name.replace('_', ' ')}, {verdict.odds}: {self.headline()}",
            f"step {self._step_label}, {self.tokens_per_second_per_gpu:,.0f} tokens/s/GPU",
            f"1,000 steps: {bill(gpu_hours, job.experiment.cost)}",
        ):
            yield from paragraph(text, indent=2)

    def loop_sentences(self) -> Iterator[str]:
        """The tail of the rollout, how busy both sides are, and how old and how many samples are trained
        on."""
        step = self.step
        yield (
            f"The last tenth of the samples takes {format_seconds(step.tail)} of the rollout's "
            f"{format_seconds(step.rollout)}{_tail_advice(self)}."
        )
        yield (
            f"The rollout's GPUs run iterations in {100 * step.busy_rollout:.0f} % of the time, the "
            f"trainer's train in {100 * step.busy_training:.0f} %{_balance_advice(self)}."
        )
        yield _engine_sentence(self)
        if step.max_staleness:
            yield (
                f"Samples are {step.mean_staleness:.1f} versions older than the policy in the mean, at most "
                f"{step.max_staleness}."
            )
        if step.dropped_tokens:
            share = 100 * step.dropped_tokens / (step.dropped_tokens + self._trained_tokens)
            percent = "Less than 1" if share < 1 else f"{share:.0f}"
            yield f"{percent} % of the generated tokens are dropped."

    @property
    def _trained_tokens(self) -> float:
        """Tokens of responses that a step trains on."""
        return (
            sum(request.response_tokens for request in self.step.requests) / self.step.steps / self.step.part
        )

    def per_step(self, counted: float) -> float:
        """A step's part of what the logs of the simulated replicas count over all steps."""
        generated = sum(log.generated_tokens for log in self.step.logs)
        return counted * (self._trained_tokens + self.step.dropped_tokens) / generated

    def lines(self) -> Iterator[str]:
        """The text that `zsim run` prints."""
        job, step = self.job, self.step
        low, high = map(format_seconds, self.step_seconds_range)
        yield from paragraph(f"{self.headline()}.")
        yield from paragraph(
            f"A step takes {format_seconds(step.seconds)}, {low} to {high} in 80 %: {job.num_samples:,} "
            f"samples of {self.tokens / job.num_samples:,.0f} tokens, {job.updates} "
            f"update{'' if job.updates == 1 else 's'}, "
            f"{self.tokens_per_second_per_gpu:,.0f} tokens/s/GPU."
        )
        yield ""
        shares = [
            [
                name.replace("_", " "),
                format_seconds(seconds),
                format_range(self.phases_seconds_range[name]),
                format_seconds(exposed),
                f"{100 * exposed / step.seconds:.0f} %",
            ]
            for name, seconds in self.phases_seconds.items()
            for exposed in [self.exposed_seconds[name]]
            if seconds
        ]
        yield from table(named_columns("Phase", "time", "in 80 %", "exposed", "exposed of step"), shares)
        yield ""
        yield from paragraph(" ".join(self.loop_sentences()))
        yield ""
        rows = [
            [
                name.replace("_", " "),
                format_bytes(phase.total),
                format_bytes(self.host_memory[name].total),
                phase_verdict.word,
                f"{100 * phase_verdict.probability:.0f} %",
            ]
            for name, phase in self.memory.items()
            for phase_verdict in [self.verdicts[name]]
        ]
        yield from table(named_columns("Memory", "a GPU", "a node's host", "verdict", "it fits"), rows)
        verdict, name = self.verdict, self._fullest_phase
        sizes = sorted(self.memory[name].by_category.items(), key=lambda entry: -entry[1])
        contents = ", ".join(f"{what.replace('_', ' ')} {format_bytes(size)}" for what, size in sizes if size)
        room = f"{format_bytes(self.phase_capacity_bytes(name))} that can be used in {name.replace('_', ' ')}"
        yield from paragraph(
            f"{verdict.word.upper()}: a GPU has {room}, {verdict.chance}. It holds {contents}."
        )
        report = self.times.update.report
        if report.out_of_memory is not None and self.memory["training"].total <= self.capacity_bytes:
            yield from paragraph(f"{missing_memory(report.out_of_memory, job.experiment.strategy.kind)}.")
        for sentence in self.remedies:
            yield from paragraph(f"{sentence[0].upper()}{sentence[1:]}.")
        if job.notes:
            yield ""
        for note in job.notes:
            yield from paragraph(note, first="note: ", indent=2)


def _tail_advice(result: RlResult) -> str:
    """The keys that shorten a rollout that is mostly tail, and that the step waits for."""
    step, table = result.step, result.job.table
    waits = step.exposed_rollout >= _LONG_TAIL * step.seconds and not _balance_advice(result)
    if step.tail < _LONG_TAIL * step.rollout or not waits:
        return ""
    keys = ["a lower rl.lengths.max_response"]
    if not result.job.is_synchronous:
        keys.insert(0, "a higher rl.max_staleness")
    elif table.environment.turns == 1 and table.over_sampling == 1:
        keys.insert(0, "rl.over_sampling = 1.3")
        if "async" in result.job.framework.placements:
            keys.insert(1, 'rl.placement = "async"')
    return f", which {' or '.join(keys)} would shorten, and more GPUs do not"


def _balance_advice(result: RlResult) -> str:
    """The side of an asynchronous loop that more GPUs help: the one that never rests while the other does."""
    step = result.step
    busy = {"rollout": step.busy_rollout, "trainer": step.busy_training}
    for side, other in (("rollout", "trainer"), ("trainer", "rollout")):
        if not result.job.is_synchronous and busy[side] > _BUSY > busy[other]:
            return f", so that a step is as long as the {side} takes, and more GPUs for it shorten the step"
    return ""


def _engine_sentence(result: RlResult) -> str:
    """How many sequences an engine runs, how much of its cache they take, and whether it was too small."""
    logs, job = result.step.logs, result.job
    used = max(log.peak_blocks for log in logs) / job.limits.cache_blocks
    text = (
        f"A replica of {format_gpus(job.model.layout.gpus)} runs {_mean_running(result):,.0f} sequences in "
        f"the mean, which take up to {100 * used:.0f} % of its cache"
    )
    if preemptions := round(result.per_step(sum(log.preemptions for log in logs))):
        text += f" and are preempted {preemptions:,} times a step, as it is too small for more"
    return f"{text}."


def _mean_running(result: RlResult) -> float:
    """Mean number of sequences that a replica runs, over the time in which it runs any."""
    area = span = 0.0
    for log in result.step.logs:
        for start, end, running in zip(log.times, log.times[1:], log.running, strict=False):
            if running:
                area += running * (end - start)
                span += end - start
    return area / span if span else 0.0


def simulate_rl(experiment: ExperimentSource, simulator: Simulator | None = None) -> RlResult:
    """One step of the reinforcement learning that `[rl]` of the experiment describes.

    Raises InputError for contradictions, NotSimulatedError for what zsim cannot simulate yet.
    """
    simulator = simulator or Simulator()
    job = resolve_rl(experiment_of(experiment), simulator)
    times = phase_times(job, simulator)
    return RlResult(job, times, run_loop(job, times))
