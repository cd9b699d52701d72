"""From an experiment to runs of days: each phase's step is simulated once, for every scenario.

Replicas that train separately (local SGD, DiLoCo) synchronize in an outer step. Every rank averages its shard
with the ranks of the other replicas that hold the same one. That is an all-reduce over R ranks, of which a
ring sends 2 (R - 1) / R times the shard from each (torchft 73dafea local_sgd.py, and Patarasuk and Yuan
2009). DiLoCo sends fp32 changes, a fragment of the model at a time, and keeps the last common parameters in
host memory, from where they come and to where they go at each outer step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from pydantic import BaseModel, ConfigDict

from zsim.api import Result, simulate
from zsim.engine.simulator import Simulator
from zsim.errors import InputError, NotSimulatedError, ZsimError
from zsim.fabric.fabric import idle_seconds
from zsim.files import PRESETS
from zsim.goodput.checkpoints.cost import save_cost, startup_cost
from zsim.goodput.checkpoints.machine import SavingMachine, saving_rates
from zsim.goodput.checkpoints.saved import SavedFiles, collect_model_states, framework_checkpoint, saved_files
from zsim.goodput.scenario import (
    DAY,
    Checkpoint,
    Failures,
    Phase,
    Recovery,
    Saves,
    Scenario,
    Startup,
    failures_of,
)
from zsim.goodput.search import starting_interval
from zsim.plan.ops import Collective, Group
from zsim.specs.cluster.files import read_toml
from zsim.specs.experiment.job import Job, job_topology
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.run.checkpoint import TWO_TIERS, CheckpointMode
from zsim.specs.experiment.run.run import LocalTrainingTable, PhaseTable, TrainingRunTable
from zsim.specs.experiment.tables import CostTable, Experiment
from zsim.specs.lazy_model import Table, resolve_table
from zsim.specs.messages import validate_table
from zsim.specs.strategy.registry import kinds
from zsim.units import Duration
from zsim.validated.verdict import Verdict

_FP32 = 4


@dataclass(frozen=True, slots=True)
class OuterStep:
    """A synchronization of `replicas`."""

    replicas: int
    bytes_per_gpu: float
    """Bytes that the fullest rank sends for all fragments."""
    averaging_seconds: float
    """All-reduce of one fragment, on idle links."""
    copying_seconds: float
    """Copies of one fragment, on idle links."""
    added_seconds: float
    """The mean addition to an inner step."""


def replica_experiment(experiment: Experiment, table: LocalTrainingTable) -> Experiment:
    """The experiment of a replica: its part of the nodes. Raises InputError where they do not divide."""
    job = resolve(experiment)
    if job.num_nodes % table.replicas:
        raise InputError(
            f"run.local.replicas: found {table.replicas}, which does not divide the {job.num_nodes} nodes; "
            f"expected {_divisor_words(job.num_nodes)}, as a replica has whole nodes"
        )
    if not framework_checkpoint(job.kind).has_local_replicas:
        raise NotSimulatedError(
            f"run.local: replicas of strategy '{job.kind}' are not simulated; expected strategy.kind "
            f"{' or '.join(repr(kind) for kind in _local_kinds())}, or no [run.local]"
        )
    return change_experiment(experiment, {"nodes": job.num_nodes // table.replicas, "gpus": None})


def _local_kinds() -> list[str]:
    """The strategies whose replicas may train separately."""
    return [kind for kind in reversed(kinds()) if framework_checkpoint(kind).has_local_replicas]


def _divisor_words(nodes: int) -> str:
    """The possible numbers of replicas of so many nodes, in words."""
    divisors = [str(count) for count in range(2, nodes + 1) if nodes % count == 0]
    return " or ".join(divisors) if divisors else "more nodes"


def outer_step(experiment: Experiment, table: LocalTrainingTable, inner: Result) -> OuterStep:
    """The outer step that follows inner steps as `inner` of one replica."""
    full_job, shard = resolve(experiment), _shard_bytes(inner.job)
    world, replicas = full_job.world_size, table.replicas
    groups = {"replicas": Group.regular("replicas", world, replicas, world // replicas)}
    fragment_bytes = -(-shard // table.fragments)
    averaging = idle_seconds(
        job_topology(full_job), groups, [Collective("all_reduce", fragment_bytes, "fp32", "replicas")]
    )
    copying = 0.0
    if table.method == "diloco":
        machine = SavingMachine(inner.job, saving_rates())
        amounts = np.full(inner.job.world_size, 2 * fragment_bytes, dtype=np.int64)  # there and back
        copying = machine.copy_seconds(amounts, is_pinned=True)
    waiting_seconds = max(0.0, averaging - table.delay * inner.report.step_seconds) + copying
    return OuterStep(
        replicas,
        2 * (replicas - 1) / replicas * fragment_bytes * table.fragments,
        averaging,
        copying,
        waiting_seconds * table.fragments / table.every,
    )


def _shard_bytes(job: Job) -> int:
    """fp32 bytes of the parameters of the fullest rank."""
    model_states = collect_model_states(job)
    num_shards = framework_checkpoint(job.kind).num_shards(job, job.strategy, model_states)
    largest = max(model_states.numels)
    return -(-largest // num_shards) * _FP32


_RECOVERY_FILE = PRESETS / "recovery.toml"  # default times of recovery of the frameworks
_MAX_SIZES = 12  # numbers of nodes that are simulated for shrink


@dataclass(frozen=True)
class WholeStep:
    """A step of which the trainer's update is a part, as in reinforcement learning. Saves are its."""

    seconds: float
    seconds_range: tuple[float, float]
    """The interval of 80 %."""
    nodes: int
    gpus: int
    tokens: float
    """Tokens that are trained on."""
    verdict: Verdict
    """On the phase that is least likely to fit."""
    headline: str
    """Model, loop and GPUs."""


@dataclass(frozen=True)
class SimulatedPhase:
    """A phase's step, of which the phase has `steps`."""

    experiment: Experiment
    result: Result
    steps: int
    sigma: float
    """Relative standard deviation of a step."""
    outer: OuterStep | None = None
    """The outer step of replicas that train separately, of which `result` is one."""
    tokens: float | None = None
    """Tokens of the phase, where its length is set in tokens or samples."""
    full_step: WholeStep | None = None
    """The step of which `result` is the trainer's update. None where they are the same."""
    continues: bool = False
    """The phase goes on from the one before it without a start."""

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, with its part of an outer one."""
        return self.inner_seconds + (0.0 if self.outer is None else self.outer.added_seconds)

    @property
    def inner_seconds(self) -> float:
        """Seconds of a step, without its part of an outer one."""
        return self.result.report.step_seconds if self.full_step is None else self.full_step.seconds

    @property
    def num_replicas(self) -> int:
        return 1 if self.outer is None else self.outer.replicas

    @property
    def step_seconds_range(self) -> tuple[float, float] | None:
        """The interval of 80 % of `inner_seconds`. None where it is not judged."""
        return (
            self.result.report.step_seconds_range if self.full_step is None else self.full_step.seconds_range
        )

    @property
    def step_tokens(self) -> float:
        return self.result.report.step_tokens if self.full_step is None else self.full_step.tokens

    @property
    def mfu_fraction(self) -> float | None:
        """Model FLOP/s of a step over the peak. None for a whole step with a rollout, which has none."""
        return self.result.report.mfu_fraction if self.full_step is None else None

    @property
    def verdict(self) -> Verdict:
        """Whether a step fits."""
        return self.result.report.verdict if self.full_step is None else self.full_step.verdict

    @property
    def nodes(self) -> int:
        if self.full_step is not None:
            return self.full_step.nodes
        return self.result.job.num_nodes * self.num_replicas

    @property
    def gpus(self) -> int:
        if self.full_step is not None:
            return self.full_step.gpus
        return self.result.job.world_size * self.num_replicas


class PreparedRun:
    """An experiment's run, ready for any interval, mode and number of spares.

    `simulator` has the plans of its steps.
    """

    def __init__(
        self,
        experiment: Experiment,
        table: TrainingRunTable,
        phases: Sequence[SimulatedPhase],
        simulator: Simulator | None = None,
    ) -> None:
        self.experiment, self.table, self.phases = experiment, table, tuple(phases)
        self.simulator = simulator or Simulator()
        self._costs: dict[tuple[int, CheckpointMode], Checkpoint] = {}
        self._files: dict[int, SavedFiles] = {}
        self._sizes: dict[int, dict[int, float]] = {}

    @property
    def first(self) -> SimulatedPhase:
        return self.phases[0]

    @cached_property
    def failures(self) -> Failures:
        """The failures of the largest phase."""
        largest = max(self.phases, key=lambda phase: phase.nodes)
        return self._failures_of(largest)

    def _failures_of(self, phase: SimulatedPhase) -> Failures:
        return failures_of(self.table.failures, phase.result.job, phase.nodes)

    @cached_property
    def startup(self) -> Startup | None:
        """The simulated start. None where the experiment states the time of a restart."""
        return None if self.table.recovery.restart is not None else startup_cost(self.first.result)

    @property
    def startup_seconds(self) -> float:
        stated = self.table.recovery.restart
        if stated is not None:
            return stated
        assert self.startup is not None
        return self.startup.seconds

    def cost(self, mode: CheckpointMode, phase: int = 0) -> Checkpoint:
        """The cost of a save in a mode of one tier, or of the local tier of one of two."""
        key = phase, mode
        if key not in self._costs:
            result, table = self.phases[phase].result, self.table.checkpoint
            self._costs[key] = save_cost(
                result, table, mode, lambda: self._saved_files(phase), self.simulator
            )
        return self._costs[key]

    def _saved_files(self, phase: int) -> SavedFiles:
        """The files of a save, whatever its mode."""
        if phase not in self._files:
            self._files[phase] = saved_files(self.phases[phase].result.job, self.table.checkpoint)
        return self._files[phase]

    def reported_cost(self) -> Checkpoint | None:
        """The cost of the most frequent kind of save. None where nothing is saved."""
        mode = self.table.checkpoint.mode
        return None if mode == "none" else self.cost(mode)

    def replace_table(self, table: TrainingRunTable) -> PreparedRun:
        """The run with another `[run]` table, as long as this one, with the same steps."""
        phases = []
        for phase in self.phases:
            phase_experiment = phase.experiment.model_copy(update={"run": table})
            job = replace(phase.result.job, experiment=phase_experiment)
            phases.append(replace(phase, experiment=phase_experiment, result=replace(phase.result, job=job)))
        return PreparedRun(self.experiment.model_copy(update={"run": table}), table, phases, self.simulator)

    # scenarios

    def scenario(
        self, work_seconds: float, *, mode: CheckpointMode | None = None, spares: int | None = None
    ) -> Scenario:
        """The run with `work_seconds` between saves."""
        table, evaluation = self.table, self.table.evaluation
        mode = mode or table.checkpoint.mode
        recovery = self.recovery
        if spares is not None:
            recovery = replace(recovery, spares=spares)
        phases = tuple(self._phase(number, work_seconds, mode) for number in range(len(self.phases)))
        evaluation_steps = 0
        if evaluation is not None:
            seconds = table.checkpoint.seconds_of(evaluation.every, phases[0].step_seconds)
            evaluation_steps = max(round(seconds / phases[0].step_seconds), 1)
        return Scenario(
            phases,
            self.failures,
            recovery,
            evaluation_every=evaluation_steps,
            evaluation_seconds=0.0 if evaluation is None else evaluation.takes,
            horizon_seconds=None if table.days is None else table.days * DAY,
        )

    def _phase(self, number: int, work_seconds: float, mode: CheckpointMode) -> Phase:
        simulated, recovery = self.phases[number], self.table.recovery
        communicators_seconds = 0.0 if self.startup is None else self.startup.communicators_seconds
        rate, highest = self._failures_of(simulated).per_second, self.failures.per_second
        return Phase(
            simulated.steps,
            simulated.step_seconds,
            simulated.nodes,
            self._saves(number, work_seconds, mode),
            startup_seconds=self.startup_seconds,
            in_process_seconds=self.startup_seconds if self.startup is None else communicators_seconds,
            step_sigma=simulated.sigma,
            slowdown_by_nodes=self._slowdowns(number) if recovery.policy == "shrink" else {},
            replicas=self._replicas(simulated) if recovery.policy == "per-step" else 1,
            failure_share=rate / highest if highest else 1.0,
            starts_anew=not simulated.continues,
        )

    def _saves(self, number: int, work_seconds: float, mode: CheckpointMode) -> Saves:
        table, phase = self.table.checkpoint, self.phases[number]
        if mode == "none":
            return Saves(every=phase.steps)
        step = phase.step_seconds
        save_steps = max(round(min(work_seconds / step, phase.steps)), 1)
        keep = table.keep or recovery_defaults().num_kept(phase.experiment.strategy.kind)
        archive_interval = None if table.archive_every is None else max(round(table.archive_every / step), 1)
        if mode not in TWO_TIERS:
            return Saves(save_steps, self.cost(mode, number), keep=keep, archive_steps=archive_interval)
        local, remote = self.cost(mode, number), self.cost("async", number)
        if table.remote_every is None:
            worthwhile_seconds = starting_interval(self.scenario(math.inf, mode="async"), remote)
            interval = save_steps * step + local.blocking_seconds
            remote_interval = max(
                round(worthwhile_seconds / interval), math.ceil(remote.durable_seconds / interval)
            )
        else:
            remote_interval = round(table.seconds_of(table.remote_every, step) / step / save_steps)
        return Saves(
            save_steps, remote, local, max(remote_interval, 1), survives_node=mode == "in-memory", keep=keep,
            archive_steps=archive_interval,
        )  # fmt: skip

    @cached_property
    def recovery(self) -> Recovery:
        table, phase, defaults = self.table.recovery, self.first, recovery_defaults()
        nodes = phase.nodes
        if table.policy == "shrink":
            self._check_elastic_load()
        if table.spares > nodes:
            raise InputError(
                f"run.recovery.spares: found {table.spares:,}, more than the {nodes:,} nodes that train; "
                f"expected at most {nodes:,}"
            )
        hang = table.hang_timeout
        if hang is None:
            hang = defaults.hang_seconds(phase.experiment.strategy.kind)
        stated = table.detect is not None
        return resolve_table(
            Recovery,
            table,
            detect_seconds=table.crash_detect if table.detect is None else table.detect,
            hang_fraction=0.0 if stated else table.hang_fraction,
            hang_seconds=0.0 if stated else hang,
            swap_seconds=table.swap,
            least_nodes=table.least_nodes or max(nodes // 2, 1),
            stall_seconds=defaults.stall.seconds if table.stall is None else table.stall,
            rejoin_seconds=self._rejoin_seconds if table.rejoin is None else table.rejoin,
        )

    def _check_elastic_load(self) -> None:
        """Raises InputError where other ranks than those that saved cannot load."""
        strategy = self.first.result.job.strategy
        framework_checkpoint(strategy.kind).check_elastic_load(strategy, self.table.checkpoint.format)

    @property
    def _rejoin_seconds(self) -> float:
        """A newcomer's state from a replica over the network cards, all ranks at once."""
        if self.table.recovery.policy != "per-step" or self.table.checkpoint.mode == "none":
            return 0.0
        job, cost = self.first.result.job, self.cost(self.table.checkpoint.mode)
        nic = job.cluster.nic
        per_node = nic.per_node * nic.bandwidth * nic.efficiency
        nodes = max(self.first.nodes // self._replicas(self.first), 1)
        return cost.bytes / (nodes * per_node)

    def _replicas(self, phase: SimulatedPhase) -> int:
        job = phase.result.job
        num_replicas = framework_checkpoint(job.kind).num_replicas(job, job.strategy)
        if num_replicas < 2:
            raise InputError(
                "run.recovery.policy: 'per-step' lets the other replicas go on while one is away, and this "
                "job has one replica; expected strategy.replicate above 1 (HSDP), or policy 'restart'"
            )
        return num_replicas

    def _slowdowns(self, number: int) -> dict[int, float]:
        """By nodes, seconds that make up for one full step, over its seconds.

        Where a number of nodes cannot train, the nodes beyond the next smaller one that can are idle.
        """
        if number not in self._sizes:
            phase = self.phases[number]
            least_nodes = self.recovery.least_nodes
            counts = range(phase.nodes - 1, least_nodes - 1, -1)
            stride = max(-(-len(counts) // _MAX_SIZES), 1)
            node_counts = sorted({*counts[:2], *counts[::stride], *counts[-1:]}, reverse=True)
            rates = {phase.nodes: 1.0}
            for nodes in node_counts:
                pace = _relative_pace(phase, nodes, self.simulator)
                if pace is not None:
                    rates[nodes] = pace
            self._sizes[number] = {
                count: rates[max(n for n in rates if n <= count)]
                for count in range(min(rates), phase.nodes + 1)
            }
        return self._sizes[number]


def _relative_pace(phase: SimulatedPhase, nodes: int, simulator: Simulator) -> float | None:
    """Seconds per token on so many nodes, over those on all. None where the job cannot run there."""
    try:
        experiment = change_experiment(phase.experiment, {"nodes": nodes})
        report = simulate(experiment, simulator=simulator, variants=None).report
    except ZsimError:
        return None
    if not report.fits:
        return None
    full_report = phase.result.report
    return report.step_seconds / report.step_tokens / (full_report.step_seconds / full_report.step_tokens)


def prepare(experiment: Experiment, result: Result | None = None) -> PreparedRun:
    """Simulate the steps of a run.

    `result` is the experiment's step, where it is known already. Raises InputError where the experiment does
    not say how far it goes.
    """
    if experiment.rl is not None:
        raise InputError(
            "run: found [rl]; expected none here, since `zsim goodput` and `zsim.simulate_run` simulate its "
            "whole steps"
        )
    table, cost = run_length(experiment)
    simulator = Simulator()
    phases = []
    for phase in table.phases or (None,):
        phase_experiment = experiment if phase is None else change_experiment(experiment, phase.overrides())
        known_result = result if phase is None else None
        phases.append(_simulate_phase(phase_experiment, table, cost, phase, known_result, simulator))
    return PreparedRun(experiment, table, phases, simulator)


def run_length(experiment: Experiment) -> tuple[TrainingRunTable, CostTable | None]:
    """The tables that say how far a run goes. The second is None where `[run]` says it.

    Raises InputError where none does.
    """
    table = experiment.run
    if table is None:
        table = TrainingRunTable()
    is_open = table.total_tokens is None and table.steps is None and table.days is None
    cost = experiment.cost if is_open else None
    if is_open and (cost is None or (cost.tokens is None and cost.samples is None)):
        raise InputError(
            'run: how far does it go? expected run.tokens (as in tokens = "15T"), run.steps or run.days, or '
            "--tokens or --samples"
        )
    return table, cost and cost.scale_samples(experiment.training.sequences_per_sample)


def _simulate_phase(
    experiment: Experiment,
    table: TrainingRunTable,
    cost: CostTable | None,
    phase: PhaseTable | None,
    known_result: Result | None,
    simulator: Simulator,
) -> SimulatedPhase:
    outer = None
    if table.local is None:
        result = known_result or simulate(experiment, simulator=simulator, variants=None)
    else:
        replica = replica_experiment(experiment, table.local)
        result = simulate(replica, simulator=simulator, variants=None)
        outer = outer_step(experiment, table.local, result)
    report, added_seconds = result.report, 0.0 if outer is None else outer.added_seconds
    tokens_per_step = report.step_tokens * (1 if outer is None else outer.replicas)
    phase_tokens = table.tokens if phase is None else phase.tokens
    if cost is not None:
        phase_tokens = cost.run_tokens(report.step_tokens / result.job.sequences_per_step)
    if table.steps is not None:
        steps = table.steps
    elif table.days is not None:
        steps = math.ceil(table.days * DAY / (report.step_seconds + added_seconds)) + 1
    else:
        assert phase_tokens is not None
        steps = max(math.ceil(phase_tokens / tokens_per_step - 1e-9), 1)
    return SimulatedPhase(experiment, result, steps, _step_sigma(result), outer, phase_tokens)


def _step_sigma(result: Result) -> float:
    """Relative standard deviation of the steps that `[jitter]` drew: from 5 to 95 % they cover 3.29 sigma."""
    jitter = result.report.jitter
    if jitter is None:
        return 0.0
    seconds = jitter.step_seconds
    return (seconds["p95"] - seconds["p5"]) / 3.29 / seconds["p50"]


class HangTimeouts(Table):
    """Until a rank that no longer answers ends the job."""

    seconds: dict[str, Duration]
    """By the strategy's kind."""


class Stall(Table):
    """A lost replica's time-out, which the other replicas wait for."""

    seconds: Duration


class KeptSaves(Table):
    """The number of saves that are kept."""

    saves: dict[str, int]
    """By the strategy's kind. All where a kind is not named."""


class RecoveryDefaults(BaseModel):
    """The file."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    hang_timeout: HangTimeouts
    stall: Stall
    keep: KeptSaves

    def hang_seconds(self, kind: str) -> float:
        """The time-out of a strategy's kind."""
        return self.hang_timeout.seconds[kind]

    def num_kept(self, kind: str) -> int | None:
        """The number of saves that a kind keeps. None for all."""
        return self.keep.saves.get(kind)


def recovery_defaults() -> RecoveryDefaults:
    """The file's content."""
    return validate_table(read_toml(_RECOVERY_FILE), _RECOVERY_FILE.name, RecoveryDefaults)
