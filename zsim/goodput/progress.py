"""How far a run is: steps done, steps saved, and the books on both."""

from __future__ import annotations

import math

from zsim.goodput.ledger import RunLedger
from zsim.goodput.scenario import Phase, Scenario
from zsim.goodput.training_interval import SaveCycle, TrainingInterval

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
        ledger.add("checkpoints", elapsed - steps * (self.pace + self.evaluation))
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
        has_local = saves.local is not None and (nodes == 0 or (saves.survives_node and nodes == 1))
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
