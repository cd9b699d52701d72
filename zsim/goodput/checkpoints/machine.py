"""The machine and the step as a save meets them: copies to the host, cards, drives, collectives.

Rates of the processor's part of saving and loading, and of starting, with their sources
(`zsim/presets/checkpoints.toml`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from pydantic import BaseModel, ConfigDict

from zsim.api import Result
from zsim.arrays import Floats, Ints
from zsim.engine.simulator import Simulator
from zsim.fabric.fabric import idle_seconds
from zsim.files import PRESETS
from zsim.goodput.checkpoints.saved import SavedFiles
from zsim.plan.ops import Collective, CollectiveKind, Group
from zsim.specs.cluster.files import read_toml
from zsim.specs.experiment.faults import LinkFault
from zsim.specs.experiment.job import Job, job_topology
from zsim.specs.experiment.run.run import StorageTable
from zsim.specs.lazy_model import Table
from zsim.units import BytesPerSecond, Duration

_FILE = "checkpoints.toml"


class PlanningRates(BaseModel):
    """Seconds of one process for an item of a plan or of `.metadata`."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    read_item: Duration
    """Rank 0 reads an item of any rank's plan of a save."""
    plan_item: Duration
    """Rank 0 makes the items one plan."""
    answer_item: Duration
    """Rank 0 sends an item back."""
    commit_item: Duration
    """Rank 0 handles where an item was written, and its line in `.metadata`."""
    load_item: Duration
    """Rank 0 reads an item of a load's plan and sends it back as it is."""
    metadata_item: Duration
    """Every rank that loads reads all of `.metadata` and looks for its parts."""

    def scale_to_core(self, factor: float) -> PlanningRates:
        """The rates of a core that is `factor` times as slow."""
        return self.model_copy(update={name: factor * seconds for name, seconds in self})


class SavingRates(Table):
    """Rates of one thread that saves or loads."""

    archive_bandwidth: BytesPerSecond
    """torch.save between tensors and memory."""
    unarchive_bandwidth: BytesPerSecond
    """torch.load between tensors and memory."""
    archive_seconds: Duration
    """On top of the bytes, for each tensor that torch.save archives."""
    unarchive_seconds: Duration
    """On top of the bytes, for each tensor that torch.load reads."""
    file_bandwidth: BytesPerSecond
    """torch.save into a file by name, which its C++ writes, to the page cache."""
    state_dict_seconds: Duration
    """The search for a parameter and its states."""
    staging_seconds: Duration
    """For each tensor that is staged, on top of its bytes."""
    own_load_plan_seconds_per_item: Duration
    """Planning the load of an item of a rank and looking it up."""
    planning_wait: Duration
    """The wait of a thread that launches kernels, per launch, for the interpreter while another thread of the
    process plans.
    """
    archiving_wait: Duration
    """The same, while another thread makes archives."""
    copy_bandwidth: BytesPerSecond
    """Host memory into new pages, on ranks that are processors."""
    planning: PlanningRates
    planning_uncollected: PlanningRates
    """The planner's rates where Python does not look for cycles of objects."""

    def scale_to_core(self, factor: float) -> SavingRates:
        """The rates of a core that is `factor` times as slow. Waits for turns are no work and stay."""
        slower = {name: getattr(self, name) / factor for name in _CORE_BANDWIDTHS}
        slower |= {name: getattr(self, name) * factor for name in _CORE_SECONDS}
        plans = {
            name: getattr(self, name).scale_to_core(factor) for name in ("planning", "planning_uncollected")
        }
        return self.model_copy(update=slower | plans)


_CORE_BANDWIDTHS = ("archive_bandwidth", "unarchive_bandwidth", "file_bandwidth", "copy_bandwidth")
_CORE_SECONDS = (
    "archive_seconds", "unarchive_seconds", "state_dict_seconds", "staging_seconds",
    "own_load_plan_seconds_per_item",
)  # fmt: skip


class StartingRates(Table):
    """Times of a start. `communicator_seconds` at `communicator_ranks` grows with ranks to the power
    `communicator_exponent`, and is at least `communicator_least`.
    """

    process: Duration
    """Launch to model, without the image."""
    communicator_seconds: Duration
    communicator_ranks: int
    communicator_exponent: float
    communicator_least: Duration
    compile: Duration
    """torch.compile without a cache."""
    first_steps: float
    """The number of steps' times that the first one takes."""


def saving_rates() -> SavingRates:
    """The rates on the reference core, that of `frameworks.toml`."""
    return SavingRates.model_validate(read_toml(PRESETS / _FILE)["saving"])


def starting_rates() -> StartingRates:
    return StartingRates.model_validate(read_toml(PRESETS / _FILE)["starting"])


_SENDING_LINKS = "nic_out"  # all links from cards to the fabric
_NEGLIGIBLE_FRACTION, _MIN_LEFT_FRACTION = 0.01, 0.1  # fractions of a card's rate


@dataclass(frozen=True, slots=True)
class OverlappedStep:
    """The training step that runs while a save is written."""

    seconds: float
    copying_seconds: float
    """The part of it in which staged states do not change: forward and backward."""
    host_fraction: float
    """The fraction of it in which its host works."""
    host_bytes: int
    """Bytes of a node's memory that are in use."""
    launches: int = 0
    """Kernel launches by the host."""
    simulator: Simulator | None = None
    """The simulator that knows the step's plan, if any does."""


def overlapped_step(result: Result, simulator: Simulator | None = None) -> OverlappedStep:
    """The facts of a step, simulated by `simulator`."""
    report = result.report
    seconds = report.step_seconds
    trace = result.trace.select_rank(report.rank)
    issued = trace.issue_seconds[~np.isnan(trace.issue_seconds)]
    blocked = sum(end - start for _, start, end, _ in trace.host_blocks)
    busy = (float(np.ptp(issued)) - blocked) / trace.step_seconds if len(issued) else 1.0
    host = report.peaks["host"].total if "host" in report.peaks else 0
    update = report.breakdown.seconds.get("optimizer", 0.0)
    launches = sum(op.launches for op in result.plan.program_on(report.rank).ops)
    return OverlappedStep(
        seconds, max(0.0, seconds - update), min(1.0, max(0.0, busy)), host, launches, simulator
    )


@dataclass(frozen=True)
class SavingMachine:
    """A job's hardware in the units of saving. Copies are those of all ranks of a node at once."""

    job: Job
    rates: SavingRates

    @property
    def node_of(self) -> Ints:
        """The node of every rank."""
        job = self.job
        topology = job_topology(job)
        nodes = topology.node_of(topology.slots)
        _, numbers = np.unique(nodes, return_inverse=True)
        node_of_rank: Ints = numbers.reshape(-1).astype(np.int64)
        return node_of_rank

    @property
    def is_cpu(self) -> bool:
        return self.job.cluster.gpu.vendor == "cpu"

    @property
    def nic_bytes_per_second(self) -> float:
        """Rate of all of a node's cards."""
        nic = self.job.cluster.nic
        return nic.per_node * nic.bandwidth * nic.efficiency

    def copy_seconds(self, amounts: Ints, *, is_pinned: bool, on_host: Floats | float = 0.0) -> float:
        """Seconds until all ranks have copied `amounts` bytes to or from their hosts.

        They go over a GPU's PCIe or C2C link or, pageable, the driver's buffer, under the uplink that GPUs
        share and what host memory takes. The fractions `on_host` of them are states in host memory, which the
        rank's thread copies there.
        """
        host_fraction = 1.0 if self.is_cpu else on_host
        host_seconds = float((amounts * host_fraction).max(initial=0.0)) / self.rates.copy_bandwidth
        device_bytes: Floats = amounts.astype(np.float64) * (1 - host_fraction)
        return host_seconds + self._device_copy_seconds(device_bytes, is_pinned=is_pinned)

    def _device_copy_seconds(self, amounts: Floats, *, is_pinned: bool) -> float:
        if not amounts.any():
            return 0.0
        cluster = self.job.cluster
        fullest = float(amounts.max())
        pcie, host, offload = cluster.pcie, cluster.host, cluster.offload
        if (c2c := cluster.c2c) is not None:
            copy_bandwidth = c2c.bandwidth * min(c2c.to_gpu_efficiency, c2c.from_gpu_efficiency)
        else:
            link = pcie.bandwidth * pcie.efficiency
            copy_bandwidth = min(link, link / min(pcie.gpus_per_switch, self.job.gpus_per_node))
        if not is_pinned and cluster.c2c is None:
            copy_bandwidth = min(copy_bandwidth, offload.pageable_bandwidth)
        per_node = float(np.bincount(self.node_of, weights=amounts).max())
        return max(fullest / copy_bandwidth, per_node / (host.memory_bandwidth * offload.dma_fraction))

    def drive_bytes_per_second(self) -> tuple[float, float] | None:
        """(written, read) rates of all drives of a node. None without drives."""
        nvme = self.job.cluster.nvme
        if nvme is None or nvme.drives == 0:
            return None
        striped = nvme.drives * nvme.efficiency
        return nvme.write_bandwidth * striped, nvme.read_bandwidth * striped

    def gather_seconds(self, saved: SavedFiles) -> float:
        """Seconds of gathering tensors, one all-gather each, over all ranks."""
        return self._collective_seconds("all_gather", saved.gathered)

    def broadcast_seconds(self, amount: int) -> float:
        return self._collective_seconds("broadcast", (amount,))

    def step_delay_seconds(self, fraction: float, step: OverlappedStep) -> float:
        """Seconds by which the step is longer while `fraction` of what every card sends is taken.

        It is simulated with cards that are slower by as much. 0 on one node.
        """
        if self.job.num_nodes == 1 or fraction <= _NEGLIGIBLE_FRACTION:
            return 0.0
        left_fraction = max(_MIN_LEFT_FRACTION, 1.0 - fraction)
        faults = self.job.faults
        slower_links = faults.model_copy(
            update={"links": {**faults.links, _SENDING_LINKS: LinkFault(bandwidth_fraction=left_fraction)}}
        )
        slower_step = (step.simulator or Simulator()).step(replace(self.job, faults=slower_links))
        return max(0.0, slower_step.seconds - step.seconds)

    def _collective_seconds(self, kind: CollectiveKind, sizes: tuple[int, ...]) -> float:
        world = self.job.world_size
        if world == 1 or not sizes:
            return 0.0
        group = Group.regular("world", world)
        collectives = [Collective(kind, size, "fp32", "world") for size in sizes]
        return idle_seconds(job_topology(self.job), {"world": group}, collectives)


# -- The time until a store has taken, or given, the bytes of all ranks ------------------------------------


_CLASSES = 64  # ranks with about as many bytes move together


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bytes per second of one rank, of one node, of all ranks. Infinite where there is no limit."""

    rank: float
    node: float
    total: float
    open_seconds: float = 0.0
    """Per file."""
    files_per_second: float = np.inf
    """The rate of all ranks."""


def write_limits(table: StorageTable, threads: int, node: float) -> StoreLimits:
    """The limits of writing with `threads` per rank through `node` bytes per second of a node's cards,
    where the table says nothing of a node."""
    return _limits(
        table, threads, node, table.write_bandwidth_per_writer, table.write_bandwidth_per_node,
        table.write_bandwidth,
    )  # fmt: skip


def read_limits(table: StorageTable, threads: int, node: float) -> StoreLimits:
    """The limits of reading, which are those of writing where the table says nothing."""
    return _limits(
        table, threads, node,
        table.read_bandwidth_per_reader or table.write_bandwidth_per_writer,
        table.read_bandwidth_per_node or table.write_bandwidth_per_node,
        table.read_bandwidth or table.write_bandwidth,
    )  # fmt: skip


def _limits(
    table: StorageTable,
    threads: int,
    node: float,
    per_thread: float | None,
    per_node: float | None,
    total: float | None,
) -> StoreLimits:
    efficiency = table.efficiency
    return StoreLimits(
        threads * per_thread if per_thread else np.inf,
        per_node or node,
        total * efficiency if total else np.inf,
        table.latency,
        table.metadata_per_second or np.inf,
    )


def transfer_seconds(amounts: Ints, node_of: Ints, limits: StoreLimits) -> float:
    """Seconds until the last rank's bytes are through, all beginning at once.

    Rates are max-min fair under the limits of ranks, nodes and the store, and rise as other ranks end.
    """
    left_bytes = _round_up_to_classes(amounts)
    nodes = int(node_of.max(initial=0)) + 1
    seconds = 0.0
    while True:
        active = left_bytes > 0
        if not active.any():
            return seconds
        active_per_node = np.bincount(node_of[active], minlength=nodes)
        caps = np.minimum(limits.rank, limits.node / active_per_node[node_of[active]])
        rates = np.minimum(caps, _fair_rate(caps, limits.total))
        if np.isinf(rates).all():
            return seconds
        step = float((left_bytes[active] / rates).min())
        left_bytes[active] = left_bytes[active] - rates * step
        left_bytes[left_bytes < 1.0] = 0.0
        seconds += step


def file_seconds(files: Ints, limits: StoreLimits) -> float:
    """Seconds of creating or opening `files` per rank."""
    return float(files.max(initial=0)) * limits.open_seconds + float(files.sum()) / limits.files_per_second


def _round_up_to_classes(amounts: Ints) -> Floats:
    """The amounts in `_CLASSES` classes at most, each as its largest member."""
    values = np.unique(amounts[amounts > 0])
    rounded = amounts.astype(np.float64)
    if len(values) > _CLASSES:
        edges = np.linspace(values[0], values[-1], _CLASSES + 1)[1:]
        positive = amounts > 0
        class_index = np.minimum(np.searchsorted(edges, rounded[positive] - 0.5), _CLASSES - 1)
        largest = np.zeros(_CLASSES)
        np.maximum.at(largest, class_index, rounded[positive])
        rounded[positive] = largest[class_index]
    return rounded


def _fair_rate(caps: Floats, total: float) -> float:
    """The rate of every rank that can reach it, so that all ranks do not exceed `total`."""
    if caps.sum() <= total:
        return float(np.inf)
    ordered = np.sort(caps)
    cumulative = np.concatenate([[0.0], np.cumsum(ordered)[:-1]])
    levels = (total - cumulative) / np.arange(len(ordered), 0, -1)
    return float(levels[np.argmax(levels <= ordered)])
