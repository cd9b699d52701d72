"""The loop of rollouts and updates on the clock.

[Note: capacity] Samples are started as long as they can still be trained on: with staleness n, version v and
a batch of b samples at most (n + v + 1) b have been started in all (AReaL 4aef98d8
areal/infra/staleness_manager.py `get_capacity`). So n = 0 starts a batch when the version before it has been
trained, and is the synchronous loop. Samples that were started under version v - n or before are at most one
batch then, so that none gets older than n only if batches are trained on in the order in which they were
started. That is how trajectories have the step they are for (NeMo-RL 7ea279ab algorithms/grpo.py). A fraction
n starts that part of the next batch's prompts, and the others with the next version (verl 1dda039b
docs/advance/fully_async.md, `staleness_threshold`).

[Note: prompts in flight] NeMo-RL starts a prompt only when fewer than a step's, times the staleness, are
under way (0a27b1f4 nemo_rl/algorithms/async_utils.py), prime-rl a sample when fewer than a number of them
are, and at most one batch has ended that the engines' weights are not from. Those of the next batch take the
places of those that have ended.

[Note: replicas alike] Replicas do not see one another, and get requests of the same laws. Of a step with more
samples than `MAX_SIMULATED_SAMPLES` as many replicas are simulated as have that many, with their part of
the prompts.

[Note: stream] verl's fully asynchronous loop queues prompts as they end. Its trainer takes the first
`stream_prompts` of the queue, whenever they were started, and engines get new weights when a step's prompts
have been taken, with or without waiting for what runs. Of a replica 16 prompts are under way at once
(b178a3cd verl/experimental/fully_async_policy/, fully_async_trainer.py `_get_samples_from_queue`,
fully_async_rollouter.py `_processor_worker`, `pause` and `max_concurrent_samples`). So even without staleness
it trains while the step's other prompts are generated, and long responses may be older than the staleness
says.

[Note: finished first] prime-rl fills a batch with the prompts that end first. Before it loads new weights it
cancels what runs of prompts that these make older than the staleness, and trains on their samples that have
ended (004274ec src/prime_rl/orchestrator/dispatcher.py `on_version_pending`, train_sink.py `process_group`).
From 2441fd51 on it drops those too, and prompts that get too old as they wait (`_drop_stale`): not simulated.

[Note: enough prompts] With over-sampling a batch has more prompts than a step trains on, and is complete when
enough of them have all their responses. The others are aborted: their tokens are lost, or with partial
rollouts kept until the next batch, whose first prompts they are (verl docs/advance/fully_async.md, slime
`--over-sampling-batch-size` and `--partial-rollout`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, log
from statistics import fmean
from typing import Any

import numpy as np
import simpy

from zsim.workflows.rl.job import RlJob
from zsim.workflows.rl.phases import PhaseTimes
from zsim.workflows.rl.samples import MAX_SIMULATED_SAMPLES, draw_samples
from zsim.workflows.rollout.replica import Replica
from zsim.workflows.rollout.requests import EngineLog, SampleRequest

_MIN_REPLICAS = 4
_WARM_UP, _MEASURED = 3, 4  # steps of a loop whose steps overlap, until it is steady, and those averaged


@dataclass(frozen=True, eq=False)
class RlStepTimes:
    """A steady step on the clock."""

    seconds: float
    rollout: float
    """Seconds from the first request of a step's samples to the end of its last."""
    exposed_rollout: float
    """Seconds for which the trainer waits for samples."""
    exposed_sync: float
    """Seconds for which the trainer waits for engines to get new weights."""
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
    dropped_tokens: float
    """Generated tokens of a step that are not trained on."""
    steps: int
    """Steps that are averaged."""
    part: float
    """Simulated replicas over all of them. Requests and logs are theirs."""
    marks: tuple[tuple[str, float, float], ...] = field(default=())
    """Phases of the last steps: name, start and end."""


@dataclass(eq=False)
class PromptGroup:
    """A prompt and its responses."""

    number: int
    requests: list[SampleRequest]
    version: int
    """Of the weights when it was first started."""
    unfinished: int


@dataclass(eq=False)
class SampleBatch:
    """The prompts that are started together, for one step."""

    groups: list[PromptGroup]
    needed: int
    """Groups that have to be finished before the step trains."""
    kept: int
    """Groups that the step trains on."""
    finished: list[PromptGroup] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.finished) >= self.needed


@dataclass(frozen=True, eq=False)
class LoopStep:
    """A step that has ended."""

    end_seconds: float
    waited_seconds: float
    """Time that the trainer waited for samples."""
    sync_seconds: float
    """Time that it waited for engines to get new weights."""
    rollout_seconds: float
    """Time from the first response that the step needs to the end of the last."""
    requests: list[SampleRequest]
    ages: list[int]
    """Versions that each prompt of the step is older than the policy it trained."""
    dropped_tokens: int


class Loop:
    """Engines and trainer of one job."""

    def __init__(self, job: RlJob, times: PhaseTimes) -> None:
        self.job, self.times = job, times
        self.env = simpy.Environment()
        pricer = job.pricer()
        count = simulated_replicas(job)
        self.part = count / job.replicas
        self.replicas = [Replica(self.env, pricer, job.limits, self._finish) for _ in range(count)]
        for replica in self.replicas:
            replica.start()
        self.version = 0
        self.started = 0  # batches
        self.marks: list[tuple[str, float, float]] = []
        self.dropped_tokens = 0
        self._batches: list[SampleBatch] = []
        self._groups: dict[int, tuple[PromptGroup, SampleBatch]] = {}
        self._places: dict[int, Replica] = {}  # of requests with several turns
        self._unfinished: list[PromptGroup] = []  # that partial rollouts go on with
        self._held: deque[tuple[PromptGroup, list[SampleRequest]]] = deque()  # see [Note: prompts in flight]
        limit = job.max_in_flight
        self._places_left: float = inf if limit is None else max(1, round(self.part * limit))
        self._num_groups = self._num_ended = 0  # prompts drawn, and ended
        self._num_requests = self._num_started = 0  # samples
        self._awaited = 0  # the batch that the trainer waits for
        self._queue: deque[PromptGroup] = deque()  # finished and not taken, see [Note: finished first]
        self._wanted = 0  # samples of the queue that the trainer waits for
        self._given_up: set[int] = set()  # samples
        self._enough = self.env.event()
        self._drained = self.env.event()
        environment = job.table.environment
        self._turn_seconds: dict[int, Iterator[float]] = {}  # of the environment's turns of each request
        self._environments = simpy.Resource(self.env, environment.concurrency or 10**9)

    # ---- Rollout -------------------------------------------------------------------------------------------

    def _finish(self, request: SampleRequest) -> None:
        """A turn of a sample has ended."""
        if request.later_turns:
            self.env.process(self._answer(request))
        else:
            self._finish_sample(request)
        if not self._drained.triggered and not any(replica.num_running for replica in self.replicas):
            self._drained.succeed()

    def _finish_sample(self, request: SampleRequest) -> None:
        self._places.pop(request.number, None)
        group, batch = self._groups[request.group]
        group.unfinished -= 1
        self._places_left += self.job.limits_samples or not group.unfinished
        if not group.unfinished:
            batch.finished.append(group)
            self._end(group)
        self._start_held()

    def _end(self, group: PromptGroup) -> None:
        """All samples of a prompt have ended, or are given up."""
        self._num_ended += bool(group.requests)
        if self.job.trains_finished_first and group.requests:
            self._queue.append(group)
        if self._has_enough() and not self._enough.triggered:
            self._enough.succeed()

    def _give_up(self) -> None:
        """End the prompts that the next weights make too old, see [Note: finished first]."""
        for group, _ in self._groups.values():
            late = [request for request in group.requests if not request.is_finished]
            running = [request for request in late if request.start_seconds is not None]
            if not running or self.version - group.version < self.job.max_staleness:
                continue
            for replica in self.replicas:
                replica.cancel(running)
            self._places_left += len(running)
            self._held = deque(entry for entry in self._held if entry[0] is not group)
            self.dropped_tokens += sum(request.generated for request in running)
            self._given_up.update(request.number for request in late)
            group.requests = [request for request in group.requests if request.is_finished]
            self._end(group)
        self._start_held()

    def _answer(self, request: SampleRequest) -> Generator[simpy.Event, Any, None]:
        """The environment's turn, after which the model's next one begins where the last was."""
        table = self.job.table.environment
        with self._environments.request() as turn:
            yield turn
            if table.seconds:
                yield self.env.timeout(next(self._turn_seconds[request.number]))
        if request.number in self._given_up:
            return
        request.begin_turn(table.observation_tokens)
        self._places[request.number].submit(request)

    def start_samples(self) -> None:
        """Start as many samples as may still be trained on, see [Note: capacity]."""
        more = ceil(len(self._given_up) / (self.part * self.job.num_samples))
        while self.started < ceil(self.job.max_staleness) + self.version + 1 + more:
            self._start_batch()
            self.started += 1

    def _start_batch(self) -> None:
        """Draw the prompts of a batch, and start them behind those that were not finished."""
        table = self.job.table
        carried, self._unfinished = self._unfinished, []
        started, needed, kept = (
            max(1, round(self.part * prompts))
            for prompts in (self.job.started_prompts, self.job.needed_prompts, table.prompts_per_step)
        )
        groups = [*carried, *self._draw_groups(max(0, started - len(carried)))]
        batch = SampleBatch(groups, needed, kept, [group for group in carried if not group.unfinished])
        self._batches.append(batch)
        for group in groups:
            self._groups[group.number] = group, batch
            unfinished = [request for request in group.requests if not request.is_finished]
            starts = [[request] for request in unfinished] if self.job.limits_samples else [unfinished]
            self._held.extend((group, requests) for requests in starts if requests)
        self._start_held()

    def _start_held(self) -> None:
        """Start the prompts that have a place, and may still be trained on."""
        batches = inf if self.job.is_synchronous else self.job.max_staleness + self.version + 1
        samples = self.job.table.samples_per_prompt * max(1, round(self.part * self.job.started_prompts))
        allowed = batches * samples + len(self._given_up)
        if self._num_ended // self._batches[0].needed - self.version > self.job.framework.max_batches_ahead:
            return
        starting: list[SampleRequest] = []
        while self._held and self._places_left > 0 and self._num_started < allowed:
            group, requests = self._held.popleft()
            self._num_started += len(requests)
            if requests[0] is group.requests[0] and not any(request.generated for request in group.requests):
                group.version = self.version
            starting += requests
            self._places_left -= 1
        self._deal(starting)

    def _draw_groups(self, count: int) -> list[PromptGroup]:
        table = self.job.table
        if not count:
            return []
        samples = draw_samples(
            table.lengths, count, table.samples_per_prompt, self.job.sequence_length, seed=self.started
        )
        generator = np.random.default_rng([table.lengths.seed, 1, self.started])
        mean = log(table.environment.seconds or 1.0) - table.environment.sigma**2 / 2
        groups = []
        for prompt, prompt_tokens in enumerate(samples.prompts):
            requests = []
            for response in samples.responses[prompt]:
                turns = split_turns(int(response), table.environment.turns)
                request = SampleRequest(self._num_requests, self._num_groups, int(prompt_tokens), turns[0])
                request.later_turns = turns[1:]
                if table.environment.seconds and request.later_turns:
                    drawn = generator.lognormal(mean, table.environment.sigma, len(request.later_turns))
                    self._turn_seconds[request.number] = iter(drawn.tolist())
                requests.append(request)
                self._num_requests += 1
            groups.append(PromptGroup(self._num_groups, requests, self.version, len(requests)))
            self._num_groups += 1
        return groups

    def _deal(self, requests: list[SampleRequest]) -> None:
        """Requests to replicas: equal parts beforehand, or each to the one with the fewest."""
        if self.job.deals_beforehand:
            size = -(-len(requests) // len(self.replicas))
            for index, request in enumerate(requests):
                self._submit(self.replicas[index // size], request)
            return
        for request in requests:
            self._submit(min(self.replicas, key=lambda engine: engine.in_flight), request)

    def _submit(self, replica: Replica, request: SampleRequest) -> None:
        if request.later_turns:
            self._places[request.number] = replica
        replica.submit(request)

    def _stop_rest(self, batch: SampleBatch) -> Generator[simpy.Event, Any, None]:
        """End what a complete batch has beyond what is trained on, see [Note: enough prompts]."""
        if len(batch.groups) == batch.needed:
            return
        yield self.env.all_of([replica.pause() for replica in self.replicas])
        for replica in self.replicas:
            replica.abort()
            replica.resume()
        rest = [group for group in batch.groups if group not in batch.finished[: batch.needed]]
        if self.job.continues_rollouts:
            self._unfinished = rest
            return
        self.dropped_tokens += sum(request.generated for group in rest for request in group.requests)

    # ---- Steps ---------------------------------------------------------------------------------------------

    def train(self, steps: int) -> Generator[simpy.Event, Any, list[LoopStep]]:
        """Run `steps` steps, and return them."""
        env, results = self.env, []
        sync: simpy.Process | None = None
        self.start_samples()
        for number in range(steps):
            self._awaited, dropped, waited = number, self.dropped_tokens, 0.0
            groups: list[PromptGroup] = []  # whose responses the step needs
            for chunk in range(self.job.chunks):
                waiting = env.now
                groups += yield from self._take(chunk)
                waited += env.now - waiting
                self.marks.append(("rollout", waiting, env.now))
                for name, seconds in self._update_phases():
                    yield from self._phase(name, seconds / self.job.chunks)
            if not self.job.continues_rollouts:
                waited += yield from self._drain()
            syncing = env.now
            if self.job.table.sync.overlap:
                if sync is not None:
                    yield sync
                sync = env.process(self._update_weights())
            else:
                yield from self._update_weights()
            synced = env.now - syncing
            kept = groups[: len(groups) * self._batches[number].kept // self._batches[number].needed]
            ages = [self.version - group.version for group in kept]
            filtered = _requests(groups[len(kept) :])  # finished, but not trained on
            self.dropped_tokens += sum(request.generated for request in filtered)
            self.version += 1
            dropped_tokens = self.dropped_tokens - dropped
            rollout = waited if self.job.is_synchronous else _span(_requests(groups))
            results.append(LoopStep(env.now, waited, synced, rollout, _requests(kept), ages, dropped_tokens))
            self.start_samples()
        return results

    def _has_enough(self) -> bool:
        """Whether the trainer can go on."""
        if self.job.trains_finished_first:
            return sum(len(group.requests) for group in self._queue) >= self._wanted
        return self._batches[self._awaited].is_complete

    def _take(self, chunk: int) -> Generator[simpy.Event, Any, list[PromptGroup]]:
        """Wait for the prompts of a chunk of a step, of which the trainer trains on those that are kept."""
        batch = self._batches[self._awaited]
        prompts = batch.needed * (chunk + 1) // self.job.chunks - batch.needed * chunk // self.job.chunks
        self._wanted = prompts * self.job.table.samples_per_prompt
        if not self._has_enough():
            self._enough = self.env.event()
            yield self._enough
        if self.job.trains_finished_first:
            groups: list[PromptGroup] = []
            while sum(len(group.requests) for group in groups) < self._wanted:
                groups.append(self._queue.popleft())
            return groups
        if self.job.is_synchronous:
            yield from self._stop_rest(batch)
        return batch.finished[: batch.needed]

    def _phase(self, name: str, seconds: float) -> Generator[simpy.Event, Any, None]:
        if seconds:
            start = self.env.now
            yield self.env.timeout(seconds)
            self.marks.append((name, start, self.env.now))

    def _drain(self) -> Generator[simpy.Event, Any, float]:
        """Wait until the sequences that run have ended, while no others start. Returns the seconds."""
        start = self.env.now
        for replica in self.replicas:
            replica.hold()
        if any(replica.num_running for replica in self.replicas):
            self._drained = self.env.event()
            yield self._drained
        for replica in self.replicas:
            replica.admit()
        return self.env.now - start

    def _update_weights(self) -> Generator[simpy.Event, Any, None]:
        """New weights for engines that stand still. Those that compute caches again forget what they had."""
        stops = [replica.pause() for replica in self.replicas]
        if self.job.trains_finished_first and not self.job.streams:
            yield self.env.all_of(stops)
            self._give_up()
        yield from self._phase("weight_sync", self.times.weight_sync)
        yield self.env.all_of(stops)
        for replica in self.replicas:
            if self.job.framework.recomputes_caches and not self.job.is_synchronous:
                for request in replica.abort():
                    replica.submit(request)
            replica.reset_cache()
            replica.resume()

    def _update_phases(self) -> list[tuple[str, float]]:
        times = self.times
        return [
            ("reward", times.reward),
            ("old_logprobs", times.old_logprobs),
            ("reference", times.reference),
            ("values", times.values),
            ("training", times.training),
            ("offload", times.offload),
            ("other", times.controller),
        ]


def simulated_replicas(job: RlJob) -> int:
    """Replicas that are simulated, see [Note: replicas alike]."""
    samples = job.started_prompts * job.table.samples_per_prompt
    if samples <= MAX_SIMULATED_SAMPLES:
        return job.replicas
    return min(job.replicas, max(_MIN_REPLICAS, ceil(job.replicas * MAX_SIMULATED_SAMPLES / samples)))


def _requests(groups: Iterable[PromptGroup]) -> list[SampleRequest]:
    return [request for group in groups for request in group.requests]


def _span(requests: Sequence[SampleRequest]) -> float:
    """Seconds from the first start of requests to the end of the last."""
    start = min(request.start_seconds or 0.0 for request in requests)
    return max(request.end_seconds for request in requests) - start


def split_turns(tokens: int, turns: int) -> tuple[int, ...]:
    """Tokens of the turns of a response, as equal as whole tokens allow. There are at most `tokens` turns."""
    turns = min(turns, tokens)
    return tuple(tokens * (turn + 1) // turns - tokens * turn // turns for turn in range(turns))


def run_loop(job: RlJob, times: PhaseTimes) -> RlStepTimes:
    """A steady step: of a loop whose steps are alike its only one, of others the mean of several."""
    loop = Loop(job, times)
    overlaps = not job.is_synchronous or (job.continues_rollouts and job.started_prompts > job.needed_prompts)
    warm_up = _WARM_UP + ceil(job.max_staleness) if overlaps else 0
    measured = _MEASURED if overlaps else 1
    process = loop.env.process(loop.train(warm_up + measured))
    results: list[LoopStep] = loop.env.run(until=process)  # type: ignore[assignment]
    begin = results[warm_up - 1].end_seconds if warm_up else 0.0
    kept = results[warm_up:]
    rounds = ceil(job.table.sampling_rounds) if job.is_synchronous else 1
    ends = [np.sort([request.end_seconds for request in step.requests]) for step in kept]
    rollout = fmean(step.rollout_seconds for step in kept)
    again = (rounds - 1) * rollout
    seconds = (kept[-1].end_seconds - begin) / measured + again
    trained_tokens = sum(request.response_tokens for step in kept for request in step.requests) / measured
    busy = sum(replica.log.busy_seconds for replica in loop.replicas) / len(loop.replicas)
    ages = [age for step in kept for age in step.ages]
    total_seconds = loop.env.now + len(results) * again
    # Steps after the first of a sync: their responses are still of its weights, 0 to `late` versions older.
    late = job.table.sync.every - 1
    return RlStepTimes(
        seconds,
        rollout + again,
        fmean(step.waited_seconds for step in kept) + again,
        fmean(step.sync_seconds for step in kept),
        fmean(float(end[-1] - end[int(0.9 * (len(end) - 1))]) for end in ends),
        tuple(request for step in kept for request in step.requests),
        tuple(replica.log for replica in loop.replicas),
        rounds * busy / total_seconds,
        times.training_side / seconds,
        float(np.mean(ages)) + late / 2,
        max(ages) + late,
        (rounds * fmean(step.dropped_tokens for step in kept) + (rounds - 1) * trained_tokens) / loop.part,
        measured,
        loop.part,
        tuple(mark for mark in loop.marks if mark[2] > begin),
    )
