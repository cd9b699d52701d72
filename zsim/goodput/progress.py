"""How far a run is: steps done, steps saved, and the books on both: every second is in one bin.

Training between two events: steps and saves in a fixed order, so that any moment is known at once.

# [Note: the cycle of saves]
Let k steps of s seconds lie between two saves. A local save blocks for c, and is durable P after it began. A
remote one takes the place of every m-th (`checkpoint_and_decide_exit` of Megatron-LM d98e8a64
training/training.py), blocks for C and is durable after Q. What runs in the background makes the steps after
a save longer by o and O. The next save waits for the last one, so the overhead of an interval and of a cycle
of m intervals are

    o' = max(o, P - c - k s)            B = o' + k s + c
    O' = max(O, Q - C - (m B - c))      T = O' + m B - c + C

The overhead is counted at the beginning of its interval, which leaves every save where it is. At time x the
number of finished cycles is x // T, and the other numbers follow by division. So a training interval of
months costs what one of minutes does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from zsim.goodput.scenario import Checkpoint, Phase, Saves, Scenario

BINS = (
    "checkpoints", "evaluation", "detection", "restart", "recomputation", "waiting", "planned", "degraded",
)  # fmt: skip


@dataclass(slots=True)
class Span:
    """A part of a run's clock, for its timeline."""

    start_seconds: float
    end_seconds: float
    bin: str
    cause: str
    steps: float
    """Steps that are done at its end."""


@dataclass(slots=True)
class PhaseTime:
    """Seconds of a phase on the clock."""

    elapsed: float
    worked: float
    """Ideal seconds of its steps, also of those that were run again."""


@dataclass(slots=True)
class RunLedger:
    """Seconds of one run by bin, and lost seconds by cause of failure, on as many nodes as the first phase
    has.
    """

    useful: float = 0.0
    """Ideal seconds of the steps that were kept."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BINS, 0.0))
    by_cause: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    num_saves: int = 0
    num_restarts: int = 0
    num_scratch: int = 0
    steps: float = 0.0
    elapsed: float = 0.0
    is_finished: bool = False
    phases: list[PhaseTime] = field(default_factory=list)
    """The phases that have ended."""
    node_share: float = 1.0
    """Nodes of the phase under way, over the first one's."""
    spans: list[Span] | None = None
    """The timeline, if it is kept."""

    def add(self, bin: str, seconds: float, cause: str = "") -> None:
        """Book lost seconds. Negative ones take back what turns out to be of another bin."""
        self.seconds[bin] += seconds
        if cause:
            self.by_cause[cause] = self.by_cause.get(cause, 0.0) + seconds * self.node_share

    def count(self, cause: str) -> None:
        """Book a failure."""
        self.failures[cause] = self.failures.get(cause, 0) + 1

    def end_phase(self, now: float) -> None:
        """Book the time of the phase that ends now."""
        worked = self.useful + self.seconds["recomputation"]
        earlier_phases = self.phases
        elapsed = now - sum(phase.elapsed for phase in earlier_phases)
        self.phases.append(PhaseTime(elapsed, worked - sum(phase.worked for phase in earlier_phases)))

    def mark(self, start: float, end: float, bin: str, cause: str, steps: float) -> None:
        """Add to the timeline."""
        if self.spans is not None and end > start:
            self.spans.append(Span(start, end, bin, cause, steps))

    @property
    def num_failures(self) -> int:
        return sum(self.failures.values())


_NEVER_INTERVALS = 10**12  # intervals between remote saves where there are none
_TIME_ROUNDING = 1e-9
_FREE_CHECKPOINT = Checkpoint(0, 0.0, 0.0, 0.0, 0.0, 0)


class TrainingMoment(NamedTuple):
    """A time in a training interval."""

    steps: float
    """Steps done since its start, with the part of the step under way."""
    local: int | None
    """Steps, counted likewise, in the last local save that is durable. None if none of this interval is."""
    remote: int | None
    """The same of the last remote save."""
    intervals: int
    """Save intervals since the last remote save."""
    since: float
    """Steps since the last save."""


class SaveCycle:
    """Seconds of the cycle of saves with steps of `seconds` each."""

    def __init__(self, saves: Saves, seconds: float) -> None:
        self.saves, self.seconds, self.every = saves, seconds, saves.every
        every = saves.every
        local, remote = saves.local or _FREE_CHECKPOINT, saves.remote or _FREE_CHECKPOINT
        self.local, self.remote = local, remote
        self.per_cycle = saves.remote_every if saves.remote is not None else _NEVER_INTERVALS
        work = every * seconds
        self.overhead = max(
            local.slowdown_seconds, local.durable_seconds - local.blocking_seconds - work, 0.0
        )
        self.interval = self.overhead + work + local.blocking_seconds
        self.remote_start = self.per_cycle * self.interval - local.blocking_seconds
        self.cycle_overhead = max(
            remote.slowdown_seconds, remote.durable_seconds - remote.blocking_seconds - self.remote_start, 0.0
        )
        self.cycle_seconds = self.cycle_overhead + self.remote_start + remote.blocking_seconds
        self.last_save = remote if saves.remote is not None else local

    def interval_start(self, cycles: int, intervals: int) -> float:
        """The time at which an interval's steps begin."""
        cycle_start = cycles * self.cycle_seconds + self.cycle_overhead
        return cycle_start + intervals * self.interval + self.overhead

    def time_of_steps(self, steps: float) -> float:
        """The time at which so many steps are done."""
        num_intervals = max(math.ceil(steps / self.every - _TIME_ROUNDING) - 1, 0)
        cycles, interval = divmod(num_intervals, self.per_cycle)
        return self.interval_start(cycles, interval) + (steps - num_intervals * self.every) * self.seconds

    def saves_at(self, time: float) -> tuple[int, int]:
        """Intervals whose local, and whose remote save has begun by `time`."""
        cycles, cycle_time = divmod(time + _TIME_ROUNDING * max(time, 1.0), self.cycle_seconds)
        cycle_time -= self.cycle_overhead
        remote = int(cycles) * self.per_cycle
        work = self.overhead + self.every * self.seconds
        num_local = min(max(int((cycle_time - work) // self.interval) + 1, 0), self.per_cycle - 1)
        local = remote + num_local
        if not num_local:  # the last one of the cycle before, which has none where every save is remote
            local = max(remote - 1, 0) if self.per_cycle > 1 else 0
        return local, remote + (self.per_cycle if cycle_time >= self.remote_start else 0)


class TrainingInterval:
    """Steps up to `goal` steps, begun `intervals` saves after a remote one and `since` steps after a save.

    A save that training waits for ends it. Times are those of the cycle's clock.
    """

    def __init__(self, cycle: SaveCycle, goal: float, intervals: int = 0, since: float = 0.0) -> None:
        self.cycle, self.goal = cycle, goal
        self.start_time = cycle.interval_start(0, intervals) + since * cycle.seconds
        self.start_steps = intervals * cycle.every + since
        self.work_seconds = cycle.time_of_steps(self.start_steps + goal) - self.start_time

    @property
    def total_seconds(self) -> float:
        """Until the goal is reached and saved."""
        return self.work_seconds + self.cycle.last_save.durable_seconds

    def moment_at(self, elapsed: float) -> TrainingMoment:
        """The moment `elapsed` seconds after the start."""
        cycle, time = self.cycle, self.start_time + min(elapsed, self.work_seconds)
        save_interval = cycle.every
        cycles, cycle_time = divmod(time, cycle.cycle_seconds)
        cycle_time -= cycle.cycle_overhead
        interval = min(max(int(cycle_time // cycle.interval), 0), cycle.per_cycle - 1)
        interval_time = cycle_time - interval * cycle.interval - cycle.overhead
        since = min(max(interval_time / cycle.seconds, 0.0), float(save_interval))
        steps = (cycles * cycle.per_cycle + interval) * save_interval + since
        local = remote = None
        if cycle.saves.local is not None:
            local = self._saved_steps(elapsed - cycle.local.durable_seconds, is_local=True)
        if cycle.saves.remote is not None:
            remote = self._saved_steps(elapsed - cycle.remote.durable_seconds, is_local=False)
        if elapsed >= self.work_seconds:
            steps = self.start_steps + self.goal
        return TrainingMoment(steps - self.start_steps, local, remote, interval, since)

    def begun_saves(self, elapsed: float) -> tuple[int | None, int | None]:
        """Steps since the start in the last local and in the last remote save that have begun."""
        saves = self.cycle.saves
        local = None if saves.local is None else self._saved_steps(elapsed, is_local=True)
        return local, None if saves.remote is None else self._saved_steps(elapsed, is_local=False)

    def _saved_steps(self, elapsed: float, *, is_local: bool) -> int | None:
        """Steps since the start in the last save that began in this interval, until `elapsed`."""
        if elapsed < 0.0:
            return None
        cycle = self.cycle
        local, remote = cycle.saves_at(self.start_time + elapsed)
        before_goal = math.ceil((self.start_steps + self.goal) / cycle.every - _TIME_ROUNDING) - 1
        intervals = min(local if is_local else remote, before_goal)
        if not is_local:
            intervals -= intervals % cycle.per_cycle
        steps = intervals * cycle.every - self.start_steps
        return int(steps) if steps > 0 else None


_ROUNDING = 1e-6


class RunProgress:
    """Steps of the phase under way: `steps` done, `remote` and `local` the last durable saves of them.

    All three start at 0 with the phase, which begins with a save.
    """

    def __init__(self, scenario: Scenario, ledger: RunLedger) -> None:
        self.scenario, self.ledger = scenario, ledger
        self.previous_steps = 0  # steps of earlier phases
        self.phase: Phase = scenario.phases[0]
        self.steps = 0.0
        self.remote = self.local = 0
        self.num_intervals, self.steps_since_save = 0, 0.0
        self.pending: list[tuple[float, int, bool]] = []
        self.training: TrainingInterval | None = None
        self.cycle = SaveCycle(self.phase.saves, self.phase.step_seconds)
        self.start_seconds = 0.0
        self.loads_local = False
        self.corruptions: dict[int, float] = {}
        self.num_corruptions = 0

    def begin_phase(self, phase_index: int, now: float) -> None:
        """Start with the steps of a phase. Those of the phase before it are done and saved."""
        if phase_index:
            self.previous_steps += self.phase.steps
            self.ledger.end_phase(now)
        self.phase = self.scenario.phases[phase_index]
        self.ledger.node_share = self.phase.nodes / self.scenario.phases[0].nodes
        self.steps, self.remote, self.local = 0.0, 0, 0
        self.num_intervals, self.steps_since_save = 0, 0.0
        self.pending.clear()
        self.corruptions.clear()

    @property
    def is_phase_done(self) -> bool:
        return self.steps >= self.phase.steps

    @property
    def steps_left(self) -> float:
        return self.phase.steps - self.steps

    @property
    def steps_done(self) -> float:
        """Steps of the run, in all phases."""
        return self.previous_steps + self.steps

    @property
    def load_seconds(self) -> float:
        saves = self.phase.saves
        tier = saves.local if self.loads_local and saves.local is not None else saves.remote
        return 0.0 if tier is None else tier.load_seconds

    @property
    def save_seconds(self) -> float:
        """A save that training waits for until it is durable."""
        tier = self.phase.saves.remote or self.phase.saves.local
        return 0.0 if tier is None else tier.durable_seconds

    # stretches

    def begin(self, now: float, slowdown: float) -> TrainingInterval:
        """Train on, each step `slowdown` times as long as the ideal one."""
        scenario, phase = self.scenario, self.phase
        self.pace = phase.step_seconds * slowdown
        evaluation = (
            scenario.evaluation_seconds / scenario.evaluation_every if scenario.evaluation_every else 0.0
        )
        self.evaluation = evaluation
        seconds = self.pace + evaluation
        if self.cycle.seconds != seconds or self.cycle.saves is not phase.saves:
            self.cycle = SaveCycle(phase.saves, seconds)
        self.training = TrainingInterval(
            self.cycle, self.steps_left, self.num_intervals, self.steps_since_save
        )
        self.start_seconds = now
        return self.training

    def _record(self, elapsed: float, steps: float, now: float) -> None:
        ledger, ideal = self.ledger, self.phase.step_seconds
        ledger.useful += steps * ideal
        ledger.add("degraded", steps * (self.pace - ideal))
        ledger.add("evaluation", steps * self.evaluation)
        saves = elapsed - steps * (self.pace + self.evaluation)
        ledger.add("checkpoints", max(saves, 0.0))  # of no save, a rounding error
        ledger.num_saves += int((self.steps_since_save + steps) // self.phase.saves.every)
        ledger.mark(self.start_seconds, now, "steps", "", self.previous_steps + self.steps + steps)

    def finish(self, now: float) -> None:
        """The training interval reached the phase's end."""
        assert self.training is not None
        self._record(now - self.start_seconds, self.training.goal, now)
        self.training = None
        self.steps = float(self.phase.steps)
        self.ledger.steps = self.previous_steps + self.steps

    def pause(self, now: float) -> None:
        """Cut the training interval short. Nothing is lost by that alone."""
        if self.training is None:
            return
        training, elapsed = self.training, now - self.start_seconds
        moment = training.moment_at(elapsed)
        self._record(elapsed, moment.steps, now)
        start = self.steps
        self._commit_pending(now)
        if moment.local is not None:
            self._commit(round(start + moment.local), is_local=True)
        if moment.remote is not None:
            self._commit(round(start + moment.remote), is_local=False)
        local, remote = training.begun_saves(elapsed)
        if local is not None and local != moment.local:
            self.pending.append((now + self.cycle.local.durable_seconds, round(start + local), True))
        if remote is not None and remote != moment.remote:
            self.pending.append((now + self.cycle.remote.durable_seconds, round(start + remote), False))
        self.steps = start + moment.steps
        self.num_intervals, self.steps_since_save = moment.intervals, moment.since
        self.training = None

    def steps_at(self, now: float) -> float:
        """Steps of the phase done by now, also within a training interval."""
        return (
            self.steps
            if self.training is None
            else self.steps + self.training.moment_at(now - self.start_seconds).steps
        )

    def _commit(self, steps: int, *, is_local: bool) -> None:
        if is_local:
            self.local = max(self.local, steps)
        else:
            self.remote = max(self.remote, steps)

    def _commit_pending(self, now: float) -> None:
        """Commit the saves of earlier training intervals that are durable by now."""
        if not self.pending:
            return
        for time, steps, is_local in self.pending:
            if time <= now:
                self._commit(steps, is_local=is_local)
        self.pending = [entry for entry in self.pending if entry[0] > now]

    # losses

    def roll_back(self, cause: str, nodes: int, corrupted: float | None) -> None:
        """Back to the last save that survives the loss of `nodes`, and is older than `corrupted` steps."""
        saves = self.phase.saves
        has_local = saves.has_local_after(nodes)
        if saves.local is not None and not has_local:
            self.local = 0
        target = max(self.remote, self.local if has_local else 0)
        if corrupted is not None:
            target = min(target, self._newest_clean_save(corrupted))
            self.remote, self.local = min(self.remote, target), min(self.local, target)
        self.loads_local = has_local and self.local >= self.remote and self.local == target
        if target == 0 and self.steps >= 1 and corrupted is not None:
            self.ledger.num_scratch += 1
        self.lose(self.steps - target, cause)
        self.steps = float(target)
        per_remote = saves.every * saves.remote_every
        self.num_intervals = (target - self.remote) // saves.every % max(per_remote // saves.every, 1)
        self.steps_since_save = 0.0
        self.pending.clear()
        self.corruptions = {n: steps for n, steps in self.corruptions.items() if steps < target}

    def _newest_clean_save(self, corrupted: float) -> int:
        """The newest kept save of at most so many steps."""
        saves = self.phase.saves
        if saves.remote is None:
            return 0
        save_steps = saves.every * saves.remote_every
        clean_steps = math.floor(corrupted / save_steps) * save_steps
        if saves.keep is not None and clean_steps <= self.remote - saves.keep * save_steps:
            archive_steps = saves.archive_steps
            clean_steps = math.floor(corrupted / archive_steps) * archive_steps if archive_steps else 0
        return clean_steps

    def lose(self, steps: float, cause: str) -> None:
        """Steps that were done and are to be done again."""
        if steps > 0:
            seconds = steps * self.phase.step_seconds
            self.ledger.useful -= seconds
            self.ledger.add("recomputation", seconds, cause)

    def lose_step(self, cause: str) -> None:
        """The step under way is discarded."""
        discarded_steps = self.steps - math.floor(self.steps + _ROUNDING)
        if discarded_steps > 0:
            self.lose(discarded_steps, cause)
            self.steps -= discarded_steps
            self.steps_since_save = max(self.steps_since_save - discarded_steps, 0.0)

    def count_restart(self) -> None:
        """Training goes on from a save."""
        self.ledger.num_restarts += 1

    def commit_all(self) -> None:
        """All steps are durable, with the part of the one under way lost."""
        self.lose_step("planned stop")
        self.remote = round(self.steps)
        self.local = round(self.steps) if self.phase.saves.local is not None else self.local
        self.loads_local = False
        self.num_intervals, self.steps_since_save = 0, 0.0
        self.pending.clear()
        self.ledger.num_saves += 1

    # silent corruption

    def add_corruption(self, steps: float) -> int:
        """Record that the state is bad from now on. Returns the corruption's number."""
        self.num_corruptions += 1
        self.corruptions[self.num_corruptions] = steps
        return self.num_corruptions

    def take_corruption(self, number: int) -> float | None:
        """The number of steps after which the state went bad. None if a rollback has undone it since."""
        return self.corruptions.pop(number, None)

    def close(self, now: float) -> None:
        """The end of the run."""
        self.ledger.steps = self.steps_done
        self.ledger.end_phase(now)
