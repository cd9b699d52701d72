"""What no schedule can beat: bounds that cost no simulation.

`Bounds`: from the batch and the checkpointing alone, so that one serves many candidates. Time: the kernels of
a step run on one stream, in order, whatever is sharded where; a step is never shorter than their sum on the
job's slowest GPU, idle, and communication only slows them. Memory: what forward keeps for backward, beside
the CUDA context.

`plan_seconds`: from the plan, how long each resource is busy at the least. No step is shorter than any of
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from zsim.cost.rates.gpu import KernelPricer
from zsim.cost.rates.host_calls import host_seconds, shipped_host_costs
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Collective, Copy, DriveIo, HostWork, Kernels, Plan
from zsim.plan.workload.workload import Workload, make_workload
from zsim.specs.experiment.job import Job, slowest_of
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig
from zsim.specs.strategy.training import Training


@dataclass(frozen=True, slots=True)
class Bound:
    """A step takes at least `seconds` and holds at least `gpu_bytes`."""

    seconds: float
    gpu_bytes: int


class Bounds:
    """Bounds of jobs of one model on one kind of GPU, each kind of training worked out once."""

    def __init__(self) -> None:
        self._of_one: dict[tuple[str, str, Training], Bound] = {}
        self._pricers: dict[str, KernelPricer] = {}

    def of(self, job: Job) -> Bound:
        """The step's own bound."""
        one = replace(job.training, gradient_accumulation_steps=1)
        key = (job.model.name + job.model.source, job.cluster.gpu.name, one)
        if key not in self._of_one:
            self._of_one[key] = self._micro_batch(job, one)
        bound = self._of_one[key]
        kept = 0 if _leaves_checkpoints_on_host(job) else bound.gpu_bytes
        seconds = bound.seconds * job.training.gradient_accumulation_steps * slowest_of(job)
        return Bound(seconds, kept + job.cluster.framework_memory.context)

    def _micro_batch(self, job: Job, training: Training) -> Bound:
        pricer = self._pricers.setdefault(job.cluster.gpu.name, KernelPricer(job.cluster.gpu))
        workload = make_workload(job.model, training)
        seconds = sum(pricer.seconds(kernel) for each in _kernels(workload) for kernel in each.kernels)
        return Bound(seconds, _kept_bytes(workload))


def _kernels(workload: Workload) -> Iterable[Kernels]:
    """Forward, recomputation and backward of one micro-batch, as `Walk` issues them."""
    for segment in workload.segments:
        for call in segment.calls:
            yield call.work.forward
            yield call.work.backward
            if call.work.recompute is not None:
                yield call.work.recompute
        for call in segment.recomputed:
            yield call.work.forward


def _kept_bytes(workload: Workload) -> int:
    """Activations that are alive when forward ends."""
    return sum(
        segment.checkpoint_bytes
        if segment.is_checkpointed
        else sum(call.work.saved_bytes for call in segment.calls)
        for segment in workload.segments
    )


def _leaves_checkpoints_on_host(job: Job) -> bool:
    strategy = job.strategy
    return isinstance(strategy, DeepSpeedConfig) and strategy.activation_checkpointing.cpu_checkpointing


def plan_seconds(job: Job, plan: Plan) -> dict[str, float]:
    """Seconds that a step keeps each resource busy at the least, by resource.

    `host`: the thread that issues; `nic`: bytes that a node must receive, over all its cards at full rate: of
    what a group across k nodes gathers, reduces or exchanges, (k - 1) / k; `cpu`: the node's CPU work at its
    own rate; `h2d`, `d2h`: copies over one GPU's PCIe; `read`, `write`: the node's drives at their data
    sheet's rates. Where ranks do different things, the most that those of one program keep it busy.
    """
    busiest: dict[str, float] = {}
    for number in range(len(plan.programs)):
        for name, seconds in _program_seconds(job, plan, number).items():
            busiest[name] = max(busiest.get(name, 0.0), seconds)
    return busiest


def _program_seconds(job: Job, plan: Plan, number: int) -> dict[str, float]:
    cluster, program = job.cluster, plan.programs[number]
    ranks = np.flatnonzero(plan.program_of == number)
    per_node = int(np.bincount(ranks // job.gpus_per_node).max())
    pricer, costs = KernelPricer(cluster.gpu), shipped_host_costs()
    bytes_of = dict.fromkeys(("nic", "cpu", "h2d", "d2h", "read", "write"), 0.0)
    compute = host = 0.0
    issued: dict[tuple[str | None, int, int], float] = {}  # seconds of the host, by way of issuing
    computed: dict[int, float] = {}  # by identity of work
    shares: dict[tuple[str, str], float] = {}
    for op in program.ops:
        way = op.overhead, op.events, op.launches
        if way not in issued:
            issued[way] = host_seconds(*way, cluster.host, costs)
        host += issued[way]
        work = op.work
        if isinstance(work, Kernels):
            if op.stream == COMPUTE:
                if id(work) not in computed:
                    computed[id(work)] = sum(pricer.seconds(kernel) for kernel in work.kernels)
                compute += computed[id(work)]
        elif isinstance(work, Collective):
            group = work.kind, work.group
            if group not in shares:
                shares[group] = _share_from_outside(job, plan, work, int(ranks[0]))
            bytes_of["nic"] += work.bytes * shares[group]
        elif isinstance(work, Copy):
            bytes_of[work.direction] += work.bytes
        elif isinstance(work, HostWork):
            bytes_of["cpu"] += work.bytes * per_node
        elif isinstance(work, DriveIo):
            bytes_of[work.direction] += work.bytes * per_node
    nvme = cluster.nvme
    fractions = (cluster.offload.optimizer_fraction, cluster.offload.copy_fraction)
    rates = {
        "nic": cluster.nic.per_node * cluster.nic.bandwidth,
        "cpu": cluster.host.memory_bandwidth * max(fractions),
        "h2d": cluster.pcie.bandwidth,
        "d2h": cluster.pcie.bandwidth,
        "read": nvme.drives * nvme.read_bandwidth if nvme else 0.0,
        "write": nvme.drives * nvme.write_bandwidth if nvme else 0.0,
    }
    busy = {name: bytes_of[name] / rate for name, rate in rates.items() if rate > 0}
    return {"compute": compute * slowest_of(job), "host": host, **busy}


def _share_from_outside(job: Job, plan: Plan, work: Collective, rank: int) -> float:
    """The part of a collective's bytes that a node must receive from other nodes, per node: groups that
    lie inside a domain of NVLink cost nothing here; those that run beside each other add up."""
    group = plan.groups[work.group]
    per_node = job.gpus_per_node
    spans_nodes = job.cluster.node_link.nodes_per_domain > 1
    if work.kind not in ("all_gather", "reduce_scatter", "all_reduce") or spans_nodes:
        return 0.0
    rows = group.row_of(plan.world_size)
    nodes = len(np.unique(group.members[rows[rank]] // per_node))
    first = rank // per_node * per_node
    on_node = rows[first : first + per_node]
    groups_on_node = len(np.unique(on_node[on_node >= 0]))
    return groups_on_node * (nodes - 1) / nodes
