"""One run of days: a SimPy process that trains, and processes that fail, repair, slow down and interrupt it.

Between two events training is one interval (`zsim.goodput.progress`), however many steps it has.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Generator, Sequence
from itertools import accumulate
from random import Random
from typing import Any, Literal, NamedTuple

import simpy

from zsim.goodput.progress import RunLedger, RunProgress
from zsim.goodput.scenario import Cause, Failures, Phase, Recovery, Scenario


class Incident(NamedTuple):
    """A failure."""

    cause: str
    nodes: int
    """Nodes that are lost with it. 0 if all go on."""
    detect_seconds: float
    repair_seconds: tuple[float, ...] = ()
    found_later: float | None = None
    corrupted_steps: float | None = None
    """The number of steps after which the state is bad, where silent corruption is detected. None for a loud
    failure.
    """


class FailureDraws:
    """Failures of one run, in order.

    Times are drawn at the rate of all nodes. `share_present` of them is accepted where fewer are there.
    """

    def __init__(self, failures: Failures, recovery: Recovery, times: Random, kinds: Random) -> None:
        self.failures, self.recovery = failures, recovery
        self.times, self.kinds = times, kinds
        self.cumulative = list(accumulate(cause.weight for cause in failures.causes))
        self.scale = 0.0
        if failures.per_second > 0:
            self.scale = 1 / failures.per_second / math.gamma(1 + 1 / failures.shape)

    def gap(self, now: float) -> float:
        """Seconds from `now` to the next failure. Infinite without failures."""
        if not self.scale:
            return math.inf
        if self.failures.law == "weibull":
            exposure = self.times.weibullvariate(self.scale, self.failures.shape)
        else:
            exposure = self.times.expovariate(1.0) * self.scale
        return apply_ageing(exposure, now, self.failures.ageing)

    def incident(self, nodes: int) -> Incident:
        """The next failure, of a job on so many nodes."""
        kinds, failures = self.kinds, self.failures
        number = bisect(self.cumulative, kinds.random() * self.cumulative[-1])
        cause = failures.causes[min(number, len(failures.causes) - 1)]
        num_lost = 0 if cause.keeps_node else min(self._scope(cause), nodes)
        repairs = tuple(repair_seconds(cause, kinds) for _ in range(num_lost))
        later = None if cause.found_later is None else kinds.expovariate(1.0) * cause.found_later
        return Incident(cause.name, num_lost, self._detection(cause), repairs, later)

    def _scope(self, cause: Cause) -> int:
        failures = self.failures
        if not failures.rack_fraction and not failures.leaf_fraction:
            return cause.nodes
        where = self.kinds.random()
        if where < failures.leaf_fraction:
            return max(cause.nodes, failures.leaf_nodes)
        if where < failures.leaf_fraction + failures.rack_fraction:
            return max(cause.nodes, failures.rack_nodes)
        return cause.nodes

    def _detection(self, cause: Cause) -> float:
        recovery = self.recovery
        if cause.detect_seconds is not None:
            return cause.detect_seconds
        if recovery.hang_fraction and self.kinds.random() < recovery.hang_fraction:
            return recovery.hang_seconds
        return recovery.detect_seconds


def repair_seconds(cause: Cause, draws: Random) -> float:
    """A node's time in repair: lognormal of the given mean and median (mean = median exp(sigma^2 / 2)), else
    exponential."""
    mean, median = cause.repair_seconds, cause.repair_median
    if median is None:
        return draws.expovariate(1.0) * mean
    if not median:
        return 0.0
    return median * math.exp(math.sqrt(2 * math.log(mean / median)) * draws.gauss(0.0, 1.0))


def apply_ageing(exposure: float, now: float, ageing: Sequence[tuple[float, float]]) -> float:
    """Seconds from `now` in which the rate's factor, integrated, is `exposure`."""
    if not ageing:
        return exposure
    time, factor = now, 1.0
    for start, following in (*ageing, (math.inf, 1.0)):
        if start > time:
            if factor > 0 and exposure <= (start - time) * factor:
                return time + exposure / factor - now
            exposure -= (start - time) * factor if factor else 0.0
            time = start
        factor = following
    return math.inf


Process = Generator[simpy.Event, Any, None]
State = Literal["closed", "training", "starting"]
_PLANNED, _PREEMPTION, _SPEED = "planned stop", "preemption", "speed"
_NODES_BACK, _REPLICA_BACK = "nodes are back", "a replica is back"
_STREAMS = 4
MAX_FAILURES = 2_000_000


class TrainingRun:
    """A run of `scenario`, drawn from `seed`, and abandoned after `max_failures`. `train` returns its
    ledger.
    """

    def __init__(
        self, scenario: Scenario, seed: int, *, is_recorded: bool = False, max_failures: int = MAX_FAILURES
    ) -> None:
        self.scenario, self.max_failures = scenario, max_failures
        self.env = simpy.Environment()
        self.time_draws, self.kind_draws, self.noise_draws, self.straggler_draws = (
            Random(seed * _STREAMS + number) for number in range(_STREAMS)
        )
        self.ledger = RunLedger(spans=[] if is_recorded else None)
        self.draws = FailureDraws(scenario.failures, scenario.recovery, self.time_draws, self.kind_draws)
        self.progress = RunProgress(scenario, self.ledger)
        self.phase_index = 0
        self.spares = scenario.recovery.spares
        self.missing_nodes = 0
        self.needs_replacement = False
        self.num_stragglers = self.num_strikes = 0
        self.num_replicas_away = 0
        self.generation = 0  # of replicas: a full restart brings all of them
        self.state: State = "closed"  # to interruptions
        self.incident_queue: list[Incident] = []
        self.is_recovering = False
        self.failure_limit_event = self.env.event()
        self.node_return = self.env.event()
        self.job = self.env.process(self._job())

    @property
    def phase(self) -> Phase:
        return self.scenario.phases[self.phase_index]

    def train(self) -> RunLedger:
        """Run to the last step, the horizon or the limit."""
        scenario, env = self.scenario, self.env
        failures = scenario.failures
        self.failure_process = env.process(self._failures())
        if failures.planned_every:
            env.process(self._regular_stops(failures.planned_every))
        if failures.preemptions_per_second > 0:
            env.process(self._preemptions(failures.preemptions_per_second))
        if failures.stragglers_per_second > 0:
            env.process(self._stragglers(failures.stragglers_per_second))
        horizon = scenario.horizon_seconds
        end = scenario.limit_seconds if horizon is None else min(horizon, scenario.limit_seconds)
        end_events = [self.job, self.failure_limit_event] + ([env.timeout(end)] if math.isfinite(end) else [])
        env.run(until=env.any_of(end_events))
        ledger = self.ledger
        ledger.elapsed = env.now
        if self.job.is_alive:
            self.progress.pause(env.now)
            ledger.is_finished = horizon is not None and env.now >= horizon
            self.job_body.close()
        else:
            ledger.is_finished = True
        self.progress.close(env.now)
        return ledger

    # the job

    def _job(self) -> Process:
        self.job_body = self._train_phases()
        yield from self.job_body

    def _train_phases(self) -> Process:
        for number in range(len(self.scenario.phases)):
            self.phase_index = number
            if number:
                dropped = self.scenario.phases[number - 1].nodes - self.phase.nodes
                self.missing_nodes = max(self.missing_nodes - max(dropped, 0), 0)
            self.progress.begin_phase(number, self.env.now)
            if number and self.phase.starts_anew:
                yield from self._spend(self._restart_seconds(), "planned")
            while not self.progress.is_phase_done:
                yield from self._train_interval()

    def _train_interval(self) -> Process:
        """One training interval, to the end of the phase or to the first event."""
        if self.incident_queue:
            yield from self._react(self.incident_queue.pop())
            return
        if self.missing_nodes and self.spares and self.scenario.recovery.policy == "shrink":
            yield from self._grow()
        interval = self.progress.begin(self.env.now, self._slowdown() * self._draw_noise())
        self.state = "training"
        try:
            yield self.env.timeout(interval.total_seconds)
            self.state = "closed"
            self.progress.finish(self.env.now)
        except simpy.Interrupt as interrupt:
            self.progress.pause(self.env.now)
            yield from self._react(interrupt.cause or _SPEED)

    def _react(self, event: Incident | str) -> Process:
        if isinstance(event, Incident):
            if self.scenario.recovery.policy == "per-step" and self._has_enough_replicas(event):
                yield from self._drop_replicas(event)
            else:
                yield from self._recover(event)
        elif event == _PLANNED:
            yield from self._planned_stop()
        elif event == _PREEMPTION:
            yield from self._handle_preemption()
        elif event == _NODES_BACK:
            yield from self._grow()
        elif event == _REPLICA_BACK:
            yield from self._spend(self.scenario.recovery.rejoin_seconds, "restart", _REPLICA_BACK)

    def _slowdown(self) -> float:
        """Seconds that a full step's tokens take now, over the ideal step."""
        phase = self.phase
        factor = self.scenario.failures.straggler_slowdown if self.num_stragglers else 1.0
        if self.num_replicas_away:
            factor *= phase.replicas / (phase.replicas - self.num_replicas_away)
        elif self.missing_nodes:
            factor *= phase.slowdown_by_nodes[phase.nodes - self.missing_nodes]
        return factor

    def _draw_noise(self) -> float:
        """Mean of the steps of a training interval over the mean of all steps."""
        sigma = self.phase.step_sigma
        if not sigma:
            return 1.0
        rate = self.scenario.failures.per_second
        expected = min(
            self.progress.steps_left, 1 + (1 / rate / self.phase.step_seconds if rate else math.inf)
        )
        return max(1 + sigma / math.sqrt(max(expected, 1.0)) * self.noise_draws.gauss(0.0, 1.0), 0.1)

    def _spend(self, seconds: float, ledger_bin: str, cause: str = "") -> Process:
        """Wait, and record in the ledger how long the wait really was, since an interrupt may end it
        early.
        """
        start_seconds = self.env.now
        try:
            if seconds > 0:
                yield self.env.timeout(seconds)
        finally:
            self.ledger.add(ledger_bin, self.env.now - start_seconds, cause)
            self.ledger.mark(start_seconds, self.env.now, ledger_bin, cause, self.progress.steps_done)

    # recovery

    def _recover(self, incident: Incident) -> Process:
        """Roll back, detect, replace, start again. After a failure while starting, recovery begins anew."""
        cause = incident.cause
        self._lose_nodes(incident)
        self.generation, self.num_replicas_away = self.generation + 1, 0
        self.is_recovering = True
        while True:
            yield from self._spend(incident.detect_seconds, "detection", cause)
            yield from self._replace(cause)
            self.state = "starting"
            try:
                yield from self._spend(self._restart_seconds(), "restart", cause)
                self._finish_restart()
                return
            except simpy.Interrupt as interrupt:
                event = interrupt.cause
            if not isinstance(event, Incident):
                yield from self._handle_preemption()
                return
            incident, cause = event, event.cause
            self._lose_nodes(incident)

    def _finish_restart(self) -> None:
        self.state = "closed"
        self.is_recovering = self.needs_replacement = False
        self.progress.count_restart()

    def _restart_seconds(self) -> float:
        """Start-up, loading and, where nodes are new, their joining."""
        recovery, phase = self.scenario.recovery, self.phase
        swap = recovery.swap_seconds if self.needs_replacement else 0.0
        keeps_processes = recovery.policy == "in-process" and not self.needs_replacement
        start = phase.in_process_seconds if keeps_processes else phase.startup_seconds
        return swap + start + self.progress.load_seconds

    def _lose_nodes(self, incident: Incident) -> None:
        """A failure that stops all: progress is lost, nodes go into repair."""
        self.ledger.count(incident.cause)
        self.progress.roll_back(incident.cause, incident.nodes, incident.corrupted_steps)
        if incident.nodes:
            self.needs_replacement = True
            self.missing_nodes = min(self.missing_nodes + incident.nodes, self.phase.nodes)
            self._repair(incident)

    def _repair(self, incident: Incident) -> None:
        for seconds in incident.repair_seconds:
            repair = self.env.timeout(seconds)
            assert repair.callbacks is not None
            repair.callbacks.append(self._finish_repair)

    def _finish_repair(self, event: simpy.Event) -> None:
        self.spares += 1
        if self.node_return.callbacks:  # somebody waits
            self.node_return.succeed()
            self.node_return = self.env.event()
        if self.missing_nodes and self.scenario.recovery.policy == "shrink":
            self._interrupt(_NODES_BACK)

    def _replace(self, cause: str) -> Process:
        """Take spares. Wait for repair while nodes are missing, or go on with fewer."""
        self._take_spares()
        start_seconds = self.env.now
        try:
            while self.missing_nodes and not self._can_shrink():
                yield self.node_return
                self._take_spares()
        finally:
            self.ledger.add("waiting", self.env.now - start_seconds, cause)
            self.ledger.mark(start_seconds, self.env.now, "waiting", cause, self.progress.steps_done)

    def _take_spares(self) -> None:
        num_taken = min(self.spares, self.missing_nodes)
        self.spares -= num_taken
        self.missing_nodes -= num_taken

    def _can_shrink(self) -> bool:
        recovery, phase = self.scenario.recovery, self.phase
        nodes_left = phase.nodes - self.missing_nodes
        return (
            recovery.policy == "shrink"
            and nodes_left >= recovery.least_nodes
            and nodes_left in phase.slowdown_by_nodes
        )

    def _grow(self) -> Process:
        """Save, and start again with the nodes that are back."""
        yield from self._save_now()
        self._take_spares()
        self.needs_replacement = True
        yield from self._spend(self._restart_seconds(), "restart", _NODES_BACK)
        self._finish_restart()

    def _save_now(self) -> Process:
        seconds = self.progress.save_seconds
        yield from self._spend(seconds, "checkpoints")
        self.progress.commit_all()

    # per-step recovery

    def _has_enough_replicas(self, incident: Incident) -> bool:
        """Whether enough replicas are left after this failure."""
        replicas_left = self.phase.replicas - self.num_replicas_away - self._replicas_of(incident)
        return replicas_left >= max(self.scenario.recovery.least_replicas, 1)

    def _replicas_of(self, incident: Incident) -> int:
        per_replica = max(self.phase.nodes // self.phase.replicas, 1)
        return max(-(-incident.nodes // per_replica), 1)

    def _drop_replicas(self, incident: Incident) -> Process:
        """All wait for the time-out and lose the step in flight. Then the remaining replicas go on."""
        self.ledger.count(incident.cause)
        num_lost = self._replicas_of(incident)
        self.num_replicas_away += num_lost
        self.env.process(self._rejoin(incident, num_lost))
        self.progress.lose_step(incident.cause)
        yield from self._spend(self.scenario.recovery.stall_seconds, "detection", incident.cause)

    def _rejoin(self, incident: Incident, replicas: int) -> Process:
        """Replace nodes, start, and join, unless all have started anew meanwhile."""
        recovery, generation = self.scenario.recovery, self.generation
        self.missing_nodes += incident.nodes
        self._repair(incident)
        while self.spares < incident.nodes and generation == self.generation:
            yield self.node_return
        if generation != self.generation:
            return
        self.spares -= incident.nodes
        self.missing_nodes -= incident.nodes
        swap = recovery.swap_seconds if incident.nodes else 0.0
        yield self.env.timeout(swap + self.phase.startup_seconds)
        if generation == self.generation:
            self.num_replicas_away -= replicas
            self._interrupt(_REPLICA_BACK)

    # other processes

    def _interrupt(self, event: Incident | str) -> bool:
        """Interrupt the job if it trains or, by a failure or preemption, if it starts. Returns whether."""
        interrupts_start = isinstance(event, Incident) or event == _PREEMPTION
        if self.state == "training" or (self.state == "starting" and interrupts_start):
            self.state = "closed"
            self.job.interrupt(event)
            return True
        return False

    def _failures(self) -> Process:
        while True:
            gap = self.draws.gap(self.env.now)
            if math.isinf(gap):
                return
            yield self.env.timeout(gap)
            if self.num_strikes >= self.max_failures:
                self.failure_limit_event.succeed()
                return
            self.num_strikes += 1
            self._strike()

    def _strike(self) -> None:
        """A failure of whatever is there: nodes that are away cannot fail, nor those of larger phases."""
        phase, missing = self.phase, self.missing_nodes
        if phase.failure_share < 1 and self.kind_draws.random() >= phase.failure_share:
            return
        if missing and self.kind_draws.random() * phase.nodes < missing:
            return
        incident = self.draws.incident(phase.nodes)
        if incident.found_later is not None:
            self.env.process(self._corrupt_silently(incident, self.progress.steps_at(self.env.now)))
        elif not self._interrupt(incident):
            if self.is_recovering:
                self._lose_nodes(incident)
            else:
                self.incident_queue.append(incident)

    def _corrupt_silently(self, incident: Incident, steps: float) -> Process:
        """Corrupt the state silently. It is detected later, and then all steps since are bad."""
        number = self.progress.add_corruption(steps)
        yield self.env.timeout(incident.found_later or 0.0)
        good_steps = self.progress.take_corruption(number)
        if good_steps is None:
            return
        detected_incident = Incident(
            incident.cause, incident.nodes, 0.0, incident.repair_seconds, None, good_steps
        )
        while not self._interrupt(detected_incident):
            yield self.env.timeout(60.0)

    def _regular_stops(self, interval: float) -> Process:
        while True:
            yield self.env.timeout(interval)
            self._interrupt(_PLANNED)

    def _planned_stop(self) -> Process:
        yield from self._save_now()
        yield from self._spend(self.scenario.failures.planned_takes, "planned")
        yield from self._spend(self._restart_seconds(), "planned")
        self._finish_restart()

    def _preemptions(self, rate: float) -> Process:
        while True:
            yield self.env.timeout(self.straggler_draws.expovariate(rate))
            self._interrupt(_PREEMPTION)

    def _handle_preemption(self) -> Process:
        failures = self.scenario.failures
        self.ledger.count(_PREEMPTION)
        if failures.preemption_notice >= self.progress.save_seconds > 0:
            yield from self._save_now()
        else:
            self.progress.roll_back(_PREEMPTION, self.phase.nodes, None)
        self.needs_replacement = True
        yield from self._spend(failures.preemption_takes, "waiting", _PREEMPTION)
        yield from self._spend(self._restart_seconds(), "restart", _PREEMPTION)
        self._finish_restart()

    def _stragglers(self, rate: float) -> Process:
        max_nodes = max(phase.nodes for phase in self.scenario.phases)
        while True:
            yield self.env.timeout(self.straggler_draws.expovariate(rate))
            if self.phase.nodes == max_nodes or self.straggler_draws.random() * max_nodes < self.phase.nodes:
                self.env.process(self._slow_down())

    def _slow_down(self) -> Process:
        self.num_stragglers += 1
        if self.num_stragglers == 1:
            self._interrupt(_SPEED)
        yield self.env.timeout(self.straggler_draws.expovariate(1.0) * self.scenario.failures.straggler_takes)
        self.num_stragglers -= 1
        if not self.num_stragglers:
            self._interrupt(_SPEED)
