"""Seconds, bytes and memory of a job's saves and loads.

A save has these phases. Ranks gather where the format wants one file. The planner on rank 0 goes through all
items. States are staged in host memory where writing goes on beside the steps. A thread of each rank makes
archives and writes them, and a commit makes them a checkpoint. A synchronous save blocks the step until its
commit.

# [Note: archive, then store]
DCP's torch.save fills the page cache of the node, and fsync waits for the store, so the two follow each other
(torch 2.13 distributed/checkpoint/filesystem.py `_write_files_from_queue`, which one thread runs). DeepSpeed
and one file of all give torch.save a name. Its C++ writes the file and nobody calls fsync, but a store over a
network gets the bytes before the file is closed. A rate stated per writer is of the whole path, and then
there is no other.

# [Note: two threads, one interpreter]
torch lets go of CPython's interpreter in every operator. A thread that computes in Python, as the planner
does on rank 0, takes it then and keeps it for a turn (`sys.getswitchinterval()`, 5 ms), and the thread that
launches kernels waits after each few of them. With L launches and waits of w each (`planning_wait`,
`archiving_wait`) a step takes its host L w longer. Until the planner is done a GPU that has nothing queued,
as after staging, does T / (H + L w) steps where it would do one, T being the step's time and H its host's.
Archives and the commit come while the GPU has what was queued before. A commit of c seconds at any time of a
step outlasts that by c^2 / 2T, or c - T/2 if it takes more than a step. A separate process has a separate
interpreter.

# [Note: DeepSpeed's decoupled writer]
Its process writes what the engine hands it, and the engine waits for the commit before the next update
(0.19.8 runtime/engine.py `_commit_decoupled_checkpoint`). So a save hides behind one forward and backward.

# [Note: cards]
While steps run, states go to the store or to a peer through the node's cards, and collectives between nodes
get what is left. The step is simulated with so much less, and the difference is added to every step while
bytes are under way.

# [Note: planning]
One process goes through the items of all ranks. Read in torch 2.13 distributed/checkpoint: `utils.py`
`reduce_scatter` (plans to rank 0, and back), `default_planner.py` (`create_global_plan` removes copies,
builds `.metadata` and checks it, and `create_default_global_load_plan` leaves a load's plans as they are),
`filesystem.py` `finish`, `planner_helpers.py` `create_read_items_for_chunk_list` (each rank goes through all
parts of its tensors).

# [Note: cycles]
Python looks for cycles among all objects again and again while plans come in, which takes most of the time.
torchtitan turns that off in the training process (0.2.2 tools/utils.py `GarbageCollection`), which plans
unless another process writes.

Seconds of a save and of a start of a job: simulated, or as the experiment states them.

A start is that of processes and communicators, compilation and the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from zsim.api import Result
from zsim.engine.simulator import Simulator
from zsim.errors import InputError, NotSimulatedError
from zsim.goodput.checkpoints.machine import (
    OverlappedStep,
    PlanningRates,
    SavingMachine,
    SavingRates,
    StartingRates,
    StoreLimits,
    file_seconds,
    overlapped_step,
    read_limits,
    saving_rates,
    starting_rates,
    transfer_seconds,
    write_limits,
)
from zsim.goodput.checkpoints.saved import SavedFiles, framework_checkpoint, saved_files
from zsim.goodput.scenario import Checkpoint, Startup
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.run.checkpoint import TWO_TIERS, CheckpointMode, CheckpointTable
from zsim.specs.experiment.run.run import StorageTable, resolve_storage
from zsim.specs.strategy.registry import framework_of

_STAGED: tuple[CheckpointMode, ...] = ("async", "in-memory", "local-then-remote")


@dataclass(frozen=True, slots=True)
class SavePhases:
    """Seconds of the phases of one save, from its start to its commit, and of a load."""

    gather: float
    """Finding the states, and gathering them where one file is wanted."""
    plan: float
    stage: float
    archive: float
    store: float
    commit: float
    load: float
    copy: float = 0.0
    """Copying files on the nodes' drives to the store, for which training waits."""

    @property
    def writing(self) -> float:
        return self.archive + self.store + self.commit


def checkpoint_of(
    job: Job,
    result: Result,
    *,
    mode: CheckpointMode | None = None,
    saved: SavedFiles | None = None,
    simulator: Simulator | None = None,
) -> Checkpoint:
    """The cost of a save of the job while the step of `result` goes on.

    `mode` replaces the table's. `saved` holds the save's files, where they are known. `simulator` is the one
    that simulated the step.

    Raises InputError for a format that the framework lacks, staging that host memory has no room for, and a
    tier that the cluster lacks.
    """
    run = job.experiment.run
    table = CheckpointTable() if run is None else run.checkpoint
    table = table if mode is None else table.model_copy(update={"mode": mode})
    storage = resolve_storage(None if run is None else run.storage)
    saved = saved or saved_files(job, table)
    _check_mode(job, table, saved)
    return cost_of(job, saved, table, storage, overlapped_step(result, simulator))


def cost_of(
    job: Job,
    saved: SavedFiles,
    table: CheckpointTable,
    storage: StorageTable,
    step: OverlappedStep,
    rates: SavingRates | None = None,
) -> Checkpoint:
    """The cost of `saved`. Raises InputError as `checkpoint_of`."""
    if table.mode == "none":
        return Checkpoint(0, 0.0, 0.0, 0.0, 0.0, 0)
    machine = SavingMachine(job, rates or saving_rates().scale_to_core(job.cluster.host.overhead_factor))
    phases = phases_of(machine, saved, table, storage)
    staging_bytes = _staging_bytes(machine, saved, table)
    if staging_bytes:
        _check_host_memory(job, table, staging_bytes, step)
    durable = phases.gather + phases.plan + phases.stage + phases.writing + phases.copy
    blocking, slowdown = durable, 0.0
    if table.mode in _STAGED:
        blocking, slowdown = _overlapped_save(machine, saved, table, phases, step)
        durable = max(durable + slowdown, blocking)
    return Checkpoint(saved.bytes, blocking, durable, slowdown, phases.load, staging_bytes)


def phases_of(
    machine: SavingMachine, saved: SavedFiles, table: CheckpointTable, storage: StorageTable
) -> SavePhases:
    """The phases, each as long as it takes while no step runs."""
    threads = table.threads
    rates, node_of = machine.rates, machine.node_of
    written = (
        saved.archived_bytes()
        if _is_planned(saved, table)
        else saved.archived_bytes() - saved.metadata_bytes()
    )
    is_staged = table.mode in _STAGED
    copies = saved.staged if is_staged else written
    hidden = saved.is_copied_ahead and threads == 1 and not is_staged
    pinned = is_staged and table.staging == "pinned"
    in_host = 1.0 if machine.is_cpu else saved.host_fractions
    if is_staged:
        stage = machine.copy_seconds(copies, is_pinned=pinned, on_host=in_host)
    elif hidden:
        stage = 0.0
    else:  # torch.save writes what is in host memory from where it is
        stage = machine.copy_seconds(np.rint(copies * (1 - in_host)).astype(np.int64), is_pinned=False)
    if is_staged and saved.is_staged_by_item:
        stage += saved.items / len(saved.staged) * rates.staging_seconds
    limits = _write_limits(machine, table, storage)
    per_writer = np.isfinite(limits.rank)
    archive = 0.0 if per_writer else _archive_seconds(saved, rates, threads)
    commit = file_seconds(saved.num_files(), limits) + _round_seconds(machine)
    commit += _commit_seconds(saved, machine, table)
    if table.mode == "in-memory":
        archive = commit = 0.0
        limits = StoreLimits(np.inf, machine.nic_bytes_per_second, np.inf)
        written = saved.staged
    return SavePhases(
        gather=saved.states * rates.state_dict_seconds + machine.gather_seconds(saved),
        plan=_plan_seconds(saved, machine, table),
        stage=stage,
        archive=archive,
        store=transfer_seconds(written, node_of, limits),
        commit=commit,
        load=load_seconds(machine, saved, table, storage),
        copy=_drive_copy_seconds(machine, saved, limits),
    )


def _drive_copy_seconds(
    machine: SavingMachine, saved: SavedFiles, limits: StoreLimits, *, back: bool = False
) -> float:
    """Seconds of copying what is on drives to the store, or `back`: the slower of the two."""
    if saved.copied is None:
        return 0.0
    drives = machine.drive_bytes_per_second()
    assert drives is not None  # states are on them
    node = float(np.bincount(machine.node_of, weights=saved.copied).max())
    return max(node / drives[0 if back else 1], transfer_seconds(saved.copied, machine.node_of, limits))


def _archive_seconds(saved: SavedFiles, rates: SavingRates, threads: int) -> float:
    """Seconds of the fullest rank's archives. The number of tensors is estimated from their overhead."""
    written, overhead = saved.archived_bytes() - saved.metadata_bytes(), np.zeros(len(saved.staged))
    archives = [file for file in saved.files if not file.is_metadata]
    np.add.at(overhead, [file.rank for file in archives], [file.overhead for file in archives])
    if not saved.is_synced:  # [Note: archive, then store]
        return float(written.max()) / rates.file_bandwidth
    tensors = overhead / _OVERHEAD_PER_TENSOR
    return float((written / rates.archive_bandwidth + tensors * rates.archive_seconds).max()) / threads


_OVERHEAD_PER_TENSOR = 1577  # bytes of an archive of one tensor beside it


def _write_limits(machine: SavingMachine, table: CheckpointTable, storage: StorageTable) -> StoreLimits:
    if table.mode == "local-then-remote":
        drives = machine.drive_bytes_per_second()
        if drives is None:
            raise InputError(
                "run.checkpoint.mode: found 'local-then-remote', but the nodes of cluster "
                f"'{machine.job.cluster.name}' have no drives ([nvme]); expected 'in-memory', 'async' or "
                "'sync'"
            )
        return StoreLimits(np.inf, drives[0], np.inf)
    return write_limits(storage, table.threads, machine.nic_bytes_per_second)


def load_seconds(
    machine: SavingMachine, saved: SavedFiles, table: CheckpointTable, storage: StorageTable
) -> float:
    """Seconds of reading the most frequent kind of save back.

    Ranks read `.metadata` and plan, every rank reads its states out of the archives (or rank 0 reads all and
    broadcasts them), and they are copied to the devices. From a copy on the node that was not planned, a rank
    reads what it wrote and gets the remaining states from its peers.
    """
    rates, planning = machine.rates, _load_plan_seconds(saved, machine, table)
    archives, read, metadata = 0.0, saved.unarchived_bytes(), _metadata_bytes(machine, saved)
    exchange, is_checked_only = 0.0, not _is_planned(saved, table)
    if is_checked_only:
        cards = StoreLimits(np.inf, machine.nic_bytes_per_second, np.inf)
        exchange = transfer_seconds(read - saved.staged, machine.node_of, cards)
        read, metadata = saved.staged, 0
    if table.mode == "in-memory":
        copied = machine.copy_seconds(saved.staged, is_pinned=True, on_host=saved.host_fractions)
        return copied + exchange + planning * is_checked_only
    limits = read_limits(storage, table.threads, machine.nic_bytes_per_second)
    if table.mode == "local-then-remote":
        drives = machine.drive_bytes_per_second()
        limits = limits if drives is None else StoreLimits(np.inf, drives[1], np.inf)
    if not np.isfinite(limits.rank):
        archives = float(read.max()) / rates.unarchive_bandwidth / table.threads
        archives += saved.read_items / len(saved.read) * rates.unarchive_seconds
    seconds = transfer_seconds(read + metadata, machine.node_of, limits) + archives + exchange + planning
    seconds += _drive_copy_seconds(machine, saved, limits, back=True)
    seconds += machine.copy_seconds(read, is_pinned=False, on_host=saved.host_fractions)
    seconds += saved.states * rates.state_dict_seconds
    seconds += file_seconds(np.minimum(saved.num_files(), 1), limits)
    if saved.converted:
        seconds += _conversion_seconds(machine, saved, limits, _write_limits(machine, table, storage))
    if saved.read_once:
        seconds += machine.broadcast_seconds(int(saved.read.max()))
    return seconds


def _conversion_seconds(
    machine: SavingMachine, saved: SavedFiles, reading: StoreLimits, writing: StoreLimits
) -> float:
    """Seconds in which one machine makes the files of a universal checkpoint.

    States are read and written twice, by a number of processes. It takes as long as these do, or as the store
    does.
    """
    size = float(sum(file.bytes for file in saved.converted))
    rates, store = machine.rates, size / min(reading.node, reading.total)
    store += size / min(writing.node, writing.total)
    seconds_per_file = size / rates.unarchive_bandwidth + size / rates.file_bandwidth
    return sum(max(seconds_per_file / workers, store) for workers in saved.conversion_workers)


def _metadata_bytes(machine: SavingMachine, saved: SavedFiles) -> int:
    """Bytes of `.metadata` per rank. Every rank reads all of it, and the ranks of a node read it out of one
    cache.
    """
    return -(-int(saved.metadata_bytes().sum()) // machine.job.gpus_per_node)


def _round_seconds(machine: SavingMachine) -> float:
    """Seconds of the messages by which all ranks agree: plans in and out, results in, the commit."""
    return 0.0 if machine.job.world_size == 1 else 4 * machine.broadcast_seconds(64 * 1024)


# -- beside the step -----------------------------------------------------------------------------------


def _overlapped_save(
    machine: SavingMachine,
    saved: SavedFiles,
    table: CheckpointTable,
    phases: SavePhases,
    step: OverlappedStep,
) -> tuple[float, float]:
    """(seconds that the step waits, seconds that are added to the steps while the save is written)."""
    if saved.is_committed_before_update and table.mode == "async":  # [Note: DeepSpeed's decoupled writer]
        background_seconds = phases.plan + phases.stage + phases.writing
        return phases.gather + phases.copy + max(0.0, background_seconds - step.copying_seconds), 0.0
    if table.staging == "pinned":  # beside forward and backward, and awaited before the update
        blocking = phases.gather + max(0.0, phases.stage - step.copying_seconds)
    else:
        blocking = phases.gather + phases.stage
    plan = phases.plan
    if saved.is_planned_at_once:
        blocking, plan = blocking + phases.plan + _commit_seconds(saved, machine, table), 0.0
    slowdown = _card_slowdown(machine, saved, table, phases, step)
    if table.writer == "thread" and table.mode == "async":
        slowdown += _interpreter_slowdown(machine, saved, table, plan, step)
    return blocking, slowdown


def _interpreter_slowdown(
    machine: SavingMachine, saved: SavedFiles, table: CheckpointTable, plan: float, step: OverlappedStep
) -> float:
    """Seconds that Python threads of the save add, [Note: two threads, one interpreter].

    `plan` is the seconds of planning while the step runs.
    """
    rates = machine.rates
    archive = _archive_seconds(saved, rates, table.threads)
    commit = 0.0 if saved.is_planned_at_once else _commit_seconds(saved, machine, table)
    exposed = commit - step.seconds / 2 if commit > step.seconds else commit**2 / (2 * step.seconds)
    lost_seconds = (plan + exposed) * _lost_fraction(step, rates.planning_wait)
    return lost_seconds + archive * _lost_fraction(step, rates.archiving_wait)


def _lost_fraction(step: OverlappedStep, wait: float) -> float:
    """The part of the time that is lost while every launch waits so long."""
    host = step.host_fraction + step.launches * wait / step.seconds
    return max(0.0, 1 - 1 / host) if host else 0.0


def _card_slowdown(
    machine: SavingMachine,
    saved: SavedFiles,
    table: CheckpointTable,
    phases: SavePhases,
    step: OverlappedStep,
) -> float:
    """[Note: cards]"""
    if table.mode == "local-then-remote" or phases.store == 0.0:
        return 0.0
    sent = saved.staged if table.mode == "in-memory" else saved.written_bytes()
    fullest_node_bytes = float(np.bincount(machine.node_of, weights=sent).max())
    fraction = fullest_node_bytes / phases.store / machine.nic_bytes_per_second
    return phases.store / step.seconds * machine.step_delay_seconds(fraction, step)


def _check_mode(job: Job, table: CheckpointTable, saved: SavedFiles) -> None:
    if saved.copied is not None and table.mode in TWO_TIERS:
        raise NotSimulatedError(
            f"run.checkpoint.mode: found '{table.mode}' with states on NVMe, which "
            f"{framework_of(job.kind).title} copies to the store file by file; expected 'sync' or 'async'"
        )
    if table.mode == "async" and saved.format == "full":
        raise InputError(
            "run.checkpoint.mode: found 'async' with format 'full', which torch.save writes while the step "
            "waits; expected 'sync', or format 'dcp'"
        )


# -- host memory ---------------------------------------------------------------------------------------


def _staging_bytes(machine: SavingMachine, saved: SavedFiles, table: CheckpointTable) -> int:
    """Host memory that the fullest node needs for staging.

    It holds the staged states. In-memory saves also hold a peer's, and the last complete copies of both,
    which stay until the new ones are complete.
    """
    if table.mode not in _STAGED:
        return 0
    node = int(np.bincount(machine.node_of, weights=saved.staged).max())
    return 4 * node if table.mode == "in-memory" else node


def _check_host_memory(job: Job, table: CheckpointTable, staging_bytes: int, step: OverlappedStep) -> None:
    memory = min(job.cluster.hosts[kind].memory for kind in job.types)
    room = memory - step.host_bytes
    if staging_bytes > room:
        raise InputError(
            f"run.checkpoint.mode: '{table.mode}' stages {staging_bytes / 1e9:,.0f} GB in the host memory of "
            f"a node, and {max(0, room) / 1e9:,.0f} GB of {memory / 1e9:,.0f} GB are left beside the step: "
            "out of memory; expected run.checkpoint.mode 'sync', more nodes, or less offloading"
        )


def _plan_seconds(saved: SavedFiles, machine: SavingMachine, table: CheckpointTable) -> float:
    """Seconds until a save is planned.

    None for plans that are kept (`enable_plan_caching`, Megatron's `--ckpt-assume-constant-structure`), after
    the first save.
    """
    if table.plan_caching:
        return 0.0
    rates = _rates(machine, table)
    checked = saved.checked_items * rates.read_item
    if not _is_planned(saved, table):
        return checked
    item_seconds = rates.read_item + rates.plan_item + rates.answer_item * saved.is_answered
    return saved.items * item_seconds + checked


def _commit_seconds(saved: SavedFiles, machine: SavingMachine, table: CheckpointTable) -> float:
    """Seconds of rank 0 for `.metadata`, where there is one."""
    return saved.chunks * _rates(machine, table).commit_item if _is_planned(saved, table) else 0.0


def _is_planned(saved: SavedFiles, table: CheckpointTable) -> bool:
    """Whether rank 0 plans all files of the most frequent kind of save, and writes their `.metadata`."""
    return saved.has_local_plan or table.mode not in TWO_TIERS


def _load_plan_seconds(saved: SavedFiles, machine: SavingMachine, table: CheckpointTable) -> float:
    """Seconds of `.metadata` on every rank, and of the plans on rank 0, where there are any."""
    rates = _rates(machine, None)
    if not _is_planned(saved, table):
        return saved.checked_items * rates.read_item
    seconds = saved.chunks * rates.metadata_item + saved.read_items * rates.load_item
    seconds += saved.read_items / len(saved.read) * machine.rates.own_load_plan_seconds_per_item
    return seconds + saved.checked_items * rates.read_item


def _rates(machine: SavingMachine, table: CheckpointTable | None) -> PlanningRates:
    """The planner's rates, [Note: cycles]. `table` is a save's, None for a load."""
    strategy = machine.job.strategy
    is_separate_process = table is not None and table.mode == "async" and table.writer == "process"
    if is_separate_process or framework_checkpoint(strategy.kind).looks_for_cycles(strategy):
        return machine.rates.planning
    return machine.rates.planning_uncollected


STATED_KEYS = ("blocking", "durable", "slowdown", "load", "bytes")
_REQUIRED_KEYS = ("blocking", "load", "bytes")


def save_cost(
    result: Result,
    table: CheckpointTable,
    mode: CheckpointMode,
    files: Callable[[], SavedFiles] | None = None,
    simulator: Simulator | None = None,
) -> Checkpoint:
    """The cost of a save of this step's job in `mode`.

    What the table states is taken as it is, and a stated time that training waits is all of the save unless
    more is stated. `files` returns the files of the save. `simulator` is the one that simulated the step.
    """
    stated = {name: getattr(table, name) for name in STATED_KEYS if getattr(table, name) is not None}
    if table.blocking is not None and all(name in stated for name in _REQUIRED_KEYS):
        simulated = Checkpoint(0, 0.0, 0.0, 0.0, 0.0, 0)
    else:
        saved = None if files is None else files()
        simulated = checkpoint_of(result.job, result, mode=mode, saved=saved, simulator=simulator)
    cost = replace(
        simulated,
        bytes=stated.get("bytes", simulated.bytes),
        blocking_seconds=stated.get("blocking", simulated.blocking_seconds),
        load_seconds=stated.get("load", simulated.load_seconds),
    )
    if "blocking" in stated:
        cost = replace(cost, durable_seconds=cost.blocking_seconds, slowdown_seconds=0.0)
    durable = stated.get("durable", cost.durable_seconds)
    return replace(
        cost,
        durable_seconds=max(durable, cost.blocking_seconds),
        slowdown_seconds=stated.get("slowdown", cost.slowdown_seconds),
    )


def startup_cost(result: Result) -> Startup:
    """The start of this step's job, on machines that have its image."""
    job, rates = result.job, starting_rates()
    seconds = result.report.step_seconds
    compiled = rates.compile if job.training.compile else 0.0
    first = seconds * (rates.first_steps - 1)
    return Startup(rates.process, communicator_seconds(job.world_size, rates), compiled, first)


def communicator_seconds(ranks: int, rates: StartingRates) -> float:
    """Seconds of setting up the communicators of so many ranks: a power of their number."""
    if ranks == 1:
        return 0.0
    growth = (ranks / rates.communicator_ranks) ** rates.communicator_exponent
    return float(max(rates.communicator_least, rates.communicator_seconds * growth))
