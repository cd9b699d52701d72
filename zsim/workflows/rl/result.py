"""The answer of an RL step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zsim.engine.simulator import Simulator
from zsim.report.views.displayable import Displayable
from zsim.report.views.text.plain import named_columns, paragraph, table
from zsim.specs.experiment.labels import gpus_label, strategy_label
from zsim.specs.experiment.tables import Experiment
from zsim.units import format_bytes, format_seconds
from zsim.version import __version__
from zsim.workflows.rl.job import RlJob, resolve_rl
from zsim.workflows.rl.loop import RlStepTimes, run_loop
from zsim.workflows.rl.memory import PhaseMemory, memory_by_phase, remedies
from zsim.workflows.rl.phases import PhaseTimes, phase_times
from zsim.workflows.rollout.limits import BLOCK_TOKENS

PHASES = (
    "rollout", "old_logprobs", "reference", "values", "training", "weight_sync", "offload", "reward", "other",
)  # fmt: skip


STEP_SPREAD = 1.41
"""Factor within which a new step lies of what is simulated in 80 %, by the errors of the 13 published steps
to which constants were fitted: the twelfth, in order (`python -m validation.rl.calibration`). Of 18 steps
that nothing was fitted to 12 lie in it (docs/rl.md)."""


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
        return {**self.phases_seconds, "rollout": self.step.exposed_rollout}

    @cached_property
    def memory(self) -> Mapping[str, PhaseMemory]:
        """The fullest GPU of each phase."""
        return memory_by_phase(self.job, self.times)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of a GPU."""
        return self.job.cluster.gpu.memory.capacity

    @property
    def fits(self) -> bool:
        """Whether every phase fits the GPUs, by allocated bytes."""
        return all(phase.total <= self.capacity_bytes for phase in self.memory.values())

    @property
    def remedies(self) -> list[str]:
        """Sentences that name the keys with which the phases fit that do not."""
        return remedies(self.job, self.memory)

    @property
    def step_seconds_range(self) -> tuple[float, float]:
        """The interval about the step by the errors of published ones, see `STEP_SPREAD`."""
        return self.step.seconds / STEP_SPREAD, self.step.seconds * STEP_SPREAD

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
        step, logs = self.step, self.step.logs
        generated = sum(request.response_tokens for request in step.requests) / step.steps / step.part
        return {
            "zsim_version": __version__,
            "step_seconds": step.seconds,
            "step_seconds_range": self.step_seconds_range,
            "phases_seconds": self.phases_seconds,
            "exposed_seconds": self.exposed_seconds,
            "rollout": {
                "tail_seconds": step.tail,
                "tokens": generated,
                "tokens_per_second_per_gpu": generated / step.rollout / self.job.rollout_gpus,
                "running_sequences_mean": _mean_running(self),
                "preemptions": round(sum(log.preemptions for log in logs) / step.part),
                "kv_bytes": self._cache_bytes,
                "prefill_tokens": round(sum(log.prefill_tokens for log in logs) / step.part),
            },
            "busy_fraction": {"trainer": step.busy_training, "rollout": step.busy_rollout},
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "staleness": {"mean": step.mean_staleness, "max": step.max_staleness},
            "dropped_tokens_fraction": step.dropped_tokens / max(1.0, generated),
            "fits": self.fits,
            "remedies": self.remedies,
            "peak_bytes_by_phase": {name: phase.to_dict() for name, phase in self.memory.items()},
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
            f"{gpus_label(job.update_job)}, {strategy_label(job.update_job)}"
        )

    def lines(self) -> Iterator[str]:
        """The text that `zsim run` prints."""
        job, step = self.job, self.step
        yield from paragraph(f"{self.headline()}.")
        yield from paragraph(
            f"A step takes {format_seconds(step.seconds)}: {job.num_samples:,} samples of "
            f"{self.tokens / job.num_samples:,.0f} tokens, {job.updates} updates, "
            f"{self.tokens_per_second_per_gpu:,.0f} tokens/s/GPU."
        )
        yield ""
        shares = [
            [name.replace("_", " "), format_seconds(seconds), f"{100 * exposed / step.seconds:.0f} %"]
            for name, seconds in self.phases_seconds.items()
            for exposed in [self.exposed_seconds[name]]
            if seconds
        ]
        yield from table(named_columns("Phase", "time", "of the step"), shares)
        yield ""
        yield from paragraph(
            f"The last tenth of the samples takes {format_seconds(step.tail)} of the rollout's "
            f"{format_seconds(step.rollout)}. The rollout's GPUs run iterations in "
            f"{100 * step.busy_rollout:.0f} % of the time, the trainer's train in "
            f"{100 * step.busy_training:.0f} %."
        )
        yield ""
        rows = [[name.replace("_", " "), format_bytes(phase.total)] for name, phase in self.memory.items()]
        yield from table(named_columns("Memory of a GPU", "bytes"), rows)
        verdict = "Fits" if self.fits else "DOES NOT FIT"
        yield from paragraph(f"{verdict}: a GPU has {format_bytes(self.capacity_bytes)}.")
        for sentence in self.remedies:
            yield from paragraph(f"{sentence[0].upper()}{sentence[1:]}.")


def _mean_running(result: RlResult) -> float:
    """Mean number of sequences that a replica runs, over the time in which it runs any."""
    area = span = 0.0
    for log in result.step.logs:
        for start, end, running in zip(log.times, log.times[1:], log.running, strict=False):
            if running:
                area += running * (end - start)
                span += end - start
    return area / span if span else 0.0


def simulate_rl(experiment: Experiment, simulator: Simulator | None = None) -> RlResult:
    """One step of the reinforcement learning that `[rl]` of the experiment describes.

    Raises InputError for contradictions, NotSimulatedError for what zsim cannot simulate yet.
    """
    simulator = simulator or Simulator()
    job = resolve_rl(experiment, simulator)
    times = phase_times(job, simulator)
    return RlResult(job, times, run_loop(job, times))
