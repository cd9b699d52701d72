"""Lower bounds on time and memory that need no simulation.

`Bounds` come from the batch and the checkpointing alone, so that one bound serves many candidates. The bound
on time: the kernels of a step run in order on one stream, however states are sharded. A step is never shorter
than their sum on the job's slowest GPU without interference, since communication only slows them. An update
on the CPU follows when all gradients are there. The bound on memory is the activations that forward saves for
backward, plus the CUDA context.

`plan_seconds` is, from the plan, the least time for which each resource is busy. No step is shorter than the
maximum of these times. `path_seconds` is, from the plan, the longest chain of ops that wait for each other,
which is longer where the host waits for the GPU and then works itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from zsim.cost.kernels.update import OPTIMIZER_STATES, update_bytes
from zsim.cost.rates.gpu import KernelPricer
from zsim.cost.rates.host_calls import host_seconds, shipped_host_costs
from zsim.engine.micro_batches import extrapolate_seconds
from zsim.plan.builder import COMPUTE
from zsim.plan.node_types import gpu_of, host_of
from zsim.plan.ops import Collective, Copy, DriveIo, HostWork, Kernels, Op, Plan, Work
from zsim.plan.parallel.experts import expand_experts
from zsim.plan.workload.issued_work import kernels_of
from zsim.plan.workload.workload import Workload, make_workload
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.faults import FaultsTable
from zsim.specs.experiment.job import Job, slowest_gpu_slowdown
from zsim.specs.strategy.training import TrainingConfig
from zsim.study.tune.framework import bounds_of
from zsim.study.tune.stage_bounds import StageBounds


@dataclass(frozen=True, slots=True)
class Bound:
    """A step takes at least `seconds` and needs at least `gpu_bytes` per GPU."""

    seconds: float
    gpu_bytes: int


class Bounds:
    """Bounds of jobs of one model on one kind of GPU. Each training setting is evaluated once.

    With `has_degrees`, jobs without model parallelism are bounded like those with it: exposed collectives,
    the host and the states count too.
    """

    def __init__(self, *, has_degrees: bool = False) -> None:
        self.has_degrees = has_degrees
        self._micro_batch_bounds: dict[tuple[str, str, TrainingConfig], Bound] = {}
        self._pricers: dict[str, KernelPricer] = {}
        self._staged = StageBounds()

    def bound(self, job: Job) -> Bound:
        """The bound on the job's step."""
        framework = bounds_of(job.kind)
        is_staged = self.has_degrees and framework.counts_stages
        if is_staged or not job.parallelism.is_trivial:
            context = job.cluster.framework_memory.context
            return Bound(self._staged.seconds(job), self._staged.gpu_bytes(job) + context)
        single_training = replace(job.training, gradient_accumulation_steps=1)
        key = (job.model.name + job.model.source, job.cluster.gpu.name, single_training)
        if key not in self._micro_batch_bounds:
            self._micro_batch_bounds[key] = self._micro_batch(job, single_training)
        bound = self._micro_batch_bounds[key]
        activation_bytes = int(framework.checkpoint_share(job, job.strategy) * bound.gpu_bytes)
        seconds = bound.seconds * job.training.gradient_accumulation_steps * slowest_gpu_slowdown(job)
        return Bound(
            seconds + _host_update_seconds(job), activation_bytes + job.cluster.framework_memory.context
        )

    def _micro_batch(self, job: Job, training: TrainingConfig) -> Bound:
        pricer = self._pricers.setdefault(job.cluster.gpu.name, KernelPricer(job.cluster.gpu))
        workload = make_workload(expand_experts(job.model, job.parallelism.experts), training)
        seconds = sum(
            pricer.seconds(kernel) for op_kernels in _kernels(workload) for kernel in op_kernels.kernels
        )
        return Bound(seconds, _kept_bytes(workload))


def _kernels(workload: Workload) -> Iterable[Kernels]:
    """Kernels of forward, backward and recomputation of one micro-batch, the ones that `Walk` issues."""
    for segment in workload.segments:
        for call in segment.calls:
            yield kernels_of(call.work.forward)
            yield kernels_of(call.work.backward)
            if call.work.recompute is not None:
                yield kernels_of(call.work.recompute)
        for call in segment.recomputed:
            yield kernels_of(call.work.forward)


def _kept_bytes(workload: Workload) -> int:
    """Bytes of activations that are alive when forward ends."""
    return sum(
        segment.checkpoint_bytes
        if segment.is_checkpointed
        else sum(call.work.saved_bytes for call in segment.calls)
        for segment in workload.segments
    )


def _host_update_seconds(job: Job) -> float:
    """Least seconds of the update on a node's CPU, if every state has one owner. 0 where GPUs update some of
    them, or where the CPU updates while they compute.
    """
    optimizer = job.training.optimizer
    if not bounds_of(job.kind).updates_on_host(job.strategy) or optimizer not in OPTIMIZER_STATES:
        return 0.0
    dtype = job.training.stored_dtype
    moved = update_bytes(job.model.trainable_numel, optimizer, "fused", dtype, dtype) / job.num_nodes
    return moved / _rates(job.cluster)["cpu"]


def least_seconds(job: Job, plan: Plan, smaller: tuple[Job, Plan] | None = None, extra: float = 0.0) -> float:
    """Lower bound on a step, from its plan.

    `smaller` is the same job with fewer micro-batches. With it the bound is that on a step which has `extra`
    times the difference more of them. Their kernels lengthen the path, as far as the last ones lengthened it:
    an update that runs beside the kernels (DeepSpeed's a step late) may hide them.
    """
    busy, path = plan_seconds(job, plan), path_seconds(job, plan)
    if smaller is None:
        return max(path, *busy.values())
    smaller_busy, path_growth = plan_seconds(*smaller), path - path_seconds(*smaller)
    extended = {
        name: extrapolate_seconds(seconds, smaller_busy[name], extra) for name, seconds in busy.items()
    }
    added = min(extended["compute"] - busy["compute"], extra * path_growth)
    return max(path + added, *extended.values())


def plan_seconds(job: Job, plan: Plan) -> dict[str, float]:
    """Lower bound on the seconds for which a step keeps each resource busy, by resource. If programs differ
    between ranks, it is the maximum over programs.

    - `compute`: kernels on the compute stream, on the slowest GPU.
    - `host`: the thread that issues.
    - `nic`: bytes that a node must receive, over all its cards at full rate ((k - 1) / k of what a group
      across k nodes gathers, reduces or exchanges).
    - `cpu`: the node's CPU work at the CPU's rate.
    - `h2d`, `d2h`: copies over one GPU's PCIe or C2C.
    - `read`, `write`: the node's drives at their data sheet's rates.
    """
    busiest: dict[str, float] = {}
    for number in range(len(plan.programs)):
        for name, seconds in _program_seconds(job, plan, number).items():
            busiest[name] = max(busiest.get(name, 0.0), seconds)
    return busiest


def _program_seconds(job: Job, plan: Plan, number: int) -> dict[str, float]:
    use = _ResourceUse(job, plan, number)
    bytes_of = dict.fromkeys(_rates(job.cluster), 0.0)
    compute = host = 0.0
    for op in plan.programs[number].ops:
        host += use.host_seconds(op)
        work = op.work
        if isinstance(work, Kernels):
            if op.stream == COMPUTE:
                compute += use.kernel_seconds(work)
        elif work is not None:
            resource, count = use.traffic(work)
            bytes_of[resource] += count
    busy = {name: bytes_of[name] / rate for name, rate in _rates(job.cluster).items() if rate > 0}
    return {"compute": compute * slowest_gpu_slowdown(job), "host": host, **busy}


def _rates(cluster: Cluster) -> dict[str, float]:
    """Bytes per second of each resource of `plan_seconds` that moves bytes, at its best."""
    nvme, nodes = cluster.nvme, cluster.nodes or (cluster,)
    copies = max(cluster.copy_bandwidth, *(node.pcie.bandwidth for node in nodes))
    fractions = (cluster.offload.optimizer_fraction, cluster.offload.copy_fraction)
    return {
        "nic": max(node.nic.per_node * node.nic.bandwidth for node in nodes),
        "cpu": max(host.memory_bandwidth for host in cluster.hosts) * max(fractions),
        "h2d": copies,
        "d2h": copies,
        "read": nvme.drives * nvme.read_bandwidth if nvme else 0.0,
        "write": nvme.drives * nvme.write_bandwidth if nvme else 0.0,
    }


def path_seconds(job: Job, plan: Plan) -> float:
    """Lower bound on the seconds of a step of equal ranks whose host works on offloaded states.

    It is the time of the ops in their order and with their waits, each as fast as on idle resources, which
    the ranks of a node use at the same time. It is 0 for other steps, whose queues may be full when they
    begin, and for ranks that differ.
    """
    is_uneven = (
        len(plan.programs) > 1 or not job.placement.is_plain or job.faults != FaultsTable.model_construct()
    )
    if is_uneven or not plan.has_offload or job.colocated_jobs:
        return 0.0
    use, rates, slowest = _ResourceUse(job, plan, 0), _rates(job.cluster), slowest_gpu_slowdown(job)

    def idle_seconds(work: Work) -> float:
        if isinstance(work, Kernels):
            return use.kernel_seconds(work) * slowest
        resource, count = use.traffic(work)
        return count / rates[resource] if rates[resource] > 0 else 0.0

    seconds = {key: idle_seconds(work) for key, work in plan.programs[0].unique_work.items()}
    ended: list[float] = []
    stream_ends: dict[str, float] = {}
    host = 0.0
    for op in plan.programs[0].ops:
        for dependency in op.host_waits:
            host = max(host, ended[dependency])
        host += use.host_seconds(op)
        end = host
        for dependency in op.after:
            end = max(end, ended[dependency])
        if op.work is not None:
            end = max(end, stream_ends.get(op.stream, 0.0)) + seconds[id(op.work)]
            stream_ends[op.stream] = end
        ended.append(end)
    return max(host, max(ended, default=0.0))


class _ResourceUse:
    """The use that ops of a program make of idle resources. All ranks of a node use them concurrently."""

    def __init__(self, job: Job, plan: Plan, number: int) -> None:
        self._job, self._plan = job, plan
        ranks = np.flatnonzero(plan.program_of == number)
        self._rank = int(ranks[0])
        self._per_node = int(np.bincount(ranks // job.gpus_per_node).max())
        self._pricer = KernelPricer(gpu_of(job, plan, number))
        self._costs, self._host = shipped_host_costs(), host_of(job, plan, number)
        self._issued: dict[tuple[str | None, int, int], float] = {}  # by (overhead, events, launches)
        self._computed: dict[int, float] = {}  # by identity of work
        self._shares: dict[tuple[str, str], float] = {}

    def host_seconds(self, op: Op) -> float:
        """Seconds for which the host issues an op."""
        call_key = op.overhead, op.events, op.launches
        if call_key not in self._issued:
            self._issued[call_key] = host_seconds(*call_key, self._host, self._costs)
        return self._issued[call_key]

    def kernel_seconds(self, work: Kernels) -> float:
        """Seconds of kernels on a GPU that is not slowed."""
        if id(work) not in self._computed:
            self._computed[id(work)] = sum(self._pricer.seconds(kernel) for kernel in work.kernels)
        return self._computed[id(work)]

    def traffic(self, work: Work) -> tuple[str, float]:
        """The resource of `_rates` that other work uses, and the bytes that move over it. Messages between
        two ranks count as no bytes.
        """
        if isinstance(work, Collective):
            group = work.kind, work.group
            if group not in self._shares:
                self._shares[group] = _share_from_outside(self._job, self._plan, work, self._rank)
            return "nic", work.bytes * self._shares[group]
        if isinstance(work, Copy):
            return work.direction, work.bytes
        if isinstance(work, HostWork):
            return "cpu", work.bytes * self._per_node
        if isinstance(work, DriveIo):
            return work.direction, work.bytes * self._per_node
        return "nic", 0.0


def _share_from_outside(job: Job, plan: Plan, work: Collective, rank: int) -> float:
    """The fraction of a collective's bytes that a node must receive from other nodes, summed over the node's
    concurrent groups. 0 for groups inside a node, on NVLink domains of several nodes, and for other kinds
    than all-gather, reduce-scatter and all-reduce."""
    group = plan.groups[work.group]
    per_node = job.gpus_per_node
    spans_nodes = job.cluster.node_link.nodes_per_domain > 1
    if work.kind not in ("all_gather", "reduce_scatter", "all_reduce") or spans_nodes:
        return 0.0
    rows = group.row_per_rank(plan.world_size)
    nodes = len(np.unique(group.members[rows[rank]] // per_node))
    first = rank // per_node * per_node
    on_node = rows[first : first + per_node]
    groups_on_node = len(np.unique(on_node[on_node >= 0]))
    return groups_on_node * (nodes - 1) / nodes
