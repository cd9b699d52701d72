"""The loop of rollouts and updates on the clock.

[Note: capacity] Samples are started as long as they can still be trained on: with staleness n, version v and
a batch of b samples at most (n + v + 1) b have been started in all (AReaL 4aef98d8
areal/infra/staleness_manager.py `get_capacity`). So n = 0 starts a batch when the version before it has been
trained, and is the synchronous loop. Samples that were started under version v - n or before are at most one
batch then, so that none gets older than n only if batches are trained on in the order in which they were
started. That is how trajectories have the step they are for (NeMo-RL 7ea279ab algorithms/grpo.py).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from zsim.workflows.rl.job import RlJob
from zsim.workflows.rl.phases import PhaseTimes
from zsim.workflows.rl.samples import draw_samples
from zsim.workflows.rollout.replica import Replica
from zsim.workflows.rollout.requests import EngineLog, SampleRequest

_SYNCHRONOUS_STEPS = 1
_WARM_UP, _MEASURED = 3, 4  # steps of an asynchronous loop, until it is steady, and those that are averaged


@dataclass(frozen=True, eq=False)
class RlStepTimes:
    """A steady step on the clock."""

    seconds: float
    rollout: float
    """Seconds from the first request of a step's samples to the end of its last."""
    exposed_rollout: float
    """Seconds for which the trainer waits for samples."""
    tail: float
    """Seconds of the last tenth of the samples to end, after all the others have."""
    requests: tuple[SampleRequest, ...]
    """All samples of the measured steps."""
    logs: tuple[EngineLog, ...]
    """Of each replica, over the whole simulation."""
    busy_rollout: float
    """Part of the time in which the rollout's GPUs run iterations."""
    busy_training: float
    """Part of the time in which the trainer's GPUs train."""
    mean_staleness: float
    """Mean number of versions that a trained sample is older than the policy it trains."""
    max_staleness: int
    dropped_tokens: int
    steps: int
    """Steps that are averaged."""
    marks: tuple[tuple[str, float, float], ...] = field(default=())
    """Phases of the last steps: name, start and end."""


class Loop:
    """Engines and trainer of one job."""

    def __init__(self, job: RlJob, times: PhaseTimes) -> None:
        self.job, self.times = job, times
        self.env = simpy.Environment()
        pricer = job.pricer()
        self.replicas = [Replica(self.env, pricer, job.limits, self._finish) for _ in range(job.replicas)]
        for replica in self.replicas:
            replica.start()
        self.version = 0
        self.started = 0
        self.marks: list[tuple[str, float, float]] = []
        self._batches: list[list[SampleRequest]] = []  # the finished requests of each batch that was started
        self._versions: list[int] = []  # under which each batch was started
        self._awaited = 0  # the batch that the trainer waits for
        self._enough = self.env.event()

    # ---- Rollout -------------------------------------------------------------------------------------------

    def _finish(self, request: SampleRequest) -> None:
        """A sample has ended."""
        number = request.number // self.job.num_samples
        self._batches[number].append(request)
        if self._is_complete(self._awaited) and not self._enough.triggered:
            self._enough.succeed()

    def _is_complete(self, number: int) -> bool:
        return len(self._batches[number]) == self.job.num_samples

    def start_samples(self) -> None:
        """Start as many samples as may still be trained on, see [Note: capacity]."""
        batch = self.job.num_samples
        while self.started + batch <= (self.job.max_staleness + self.version + 1) * batch:
            self._start_batch(self.started // batch)
            self.started += batch

    def _start_batch(self, number: int) -> None:
        table = self.job.table
        samples = draw_samples(
            table.lengths,
            table.prompts_per_step,
            table.samples_per_prompt,
            self.job.sequence_length,
            seed=number,
        )
        self._batches.append([])
        self._versions.append(self.version)
        first = number * self.job.num_samples
        requests = []
        for prompt, prompt_tokens in enumerate(samples.prompts):
            group = number * table.prompts_per_step + prompt
            for index, response in enumerate(samples.responses[prompt]):
                request_number = first + prompt * table.samples_per_prompt + index
                requests.append(SampleRequest(request_number, group, int(prompt_tokens), int(response)))
        self._deal(requests)

    def _deal(self, requests: list[SampleRequest]) -> None:
        """Requests to replicas: equal parts beforehand, or each to the one with the fewest."""
        if self.job.framework.static_balance and not self.job.max_staleness:
            size = -(-len(requests) // len(self.replicas))
            for index, request in enumerate(requests):
                self.replicas[index // size].submit(request)
            return
        for request in requests:
            min(self.replicas, key=lambda engine: engine.in_flight).submit(request)

    # ---- Steps ---------------------------------------------------------------------------------------------

    def train(
        self, steps: int
    ) -> Generator[simpy.Event, Any, list[tuple[float, float, list[SampleRequest], int]]]:
        """Run `steps` steps. Returns for each its end, its wait for samples, its samples, and their age."""
        env, times, results = self.env, self.times, []
        self.start_samples()
        for number in range(steps):
            waiting, self._awaited = env.now, number
            if not self._is_complete(number):
                self._enough = env.event()
                yield self._enough
            waited = env.now - waiting
            batch = self._batches[number]
            self.marks.append(("rollout", waiting, env.now))
            for name, seconds in self._update_phases():
                start = env.now
                if seconds:
                    yield env.timeout(seconds)
                    self.marks.append((name, start, env.now))
            for replica in self.replicas:
                replica.pause()
            start = env.now
            yield env.timeout(times.weight_sync)
            self.marks.append(("weight_sync", start, env.now))
            self.version += 1
            for replica in self.replicas:
                replica.reset_cache()
                replica.resume()
            results.append((env.now, waited, batch, self.version - 1 - self._versions[number]))
            self.start_samples()
        return results

    def _update_phases(self) -> list[tuple[str, float]]:
        times = self.times
        return [
            ("reward", times.reward),
            ("old_logprobs", times.old_logprobs),
            ("reference", times.reference),
            ("training", times.training),
            ("offload", times.offload),
            ("other", times.controller),
        ]


def run_loop(job: RlJob, times: PhaseTimes) -> RlStepTimes:
    """A steady step: of the synchronous loop its only one, of an asynchronous one the mean of several."""
    loop = Loop(job, times)
    is_async = job.max_staleness > 0
    warm_up = _WARM_UP + job.max_staleness if is_async else 0
    measured = _MEASURED if is_async else _SYNCHRONOUS_STEPS
    process = loop.env.process(loop.train(warm_up + measured))
    results: Any = loop.env.run(until=process)
    begin = results[warm_up - 1][0] if warm_up else 0.0
    kept = results[warm_up:]
    seconds = (kept[-1][0] - begin) / measured
    requests = tuple(request for _, _, batch, _ in kept for request in batch)
    ages = [age for _, _, _, age in kept]
    ends = np.sort([request.end_seconds for request in kept[-1][2]])
    starts = min(request.start_seconds for request in kept[-1][2])
    busy = sum(replica.log.busy_seconds for replica in loop.replicas) / len(loop.replicas)
    return RlStepTimes(
        seconds,
        float(ends[-1] - starts) if is_async else float(ends[-1]),
        sum(waited for _, waited, _, _ in kept) / measured,
        float(ends[-1] - ends[int(0.9 * (len(ends) - 1))]),
        requests,
        tuple(replica.log for replica in loop.replicas),
        busy / loop.env.now,
        times.training_side / seconds,
        float(np.mean(ages)),
        max(ages),
        0,
        measured,
        tuple(mark for mark in loop.marks if mark[2] > begin),
    )
