"""Lower bounds on time and memory that need no simulation.

# [Note: a pipeline is never faster]
A pipeline rank can begin only after the stages before it have had one forward, must run forward and backward
of all micro-batches of its own stages, and after its last backward the stages before it still have theirs. So
a step takes at least lead-in + own work + drain of every rank (Narayanan et al. 2021, arXiv 2104.04473,
section 2.2, for unequal stages). Where backward is split (zero bubble) the drain is left out. Collectives
between a layer's products that nothing overlaps take as long as on idle links. Nor is a step shorter than the
host needs to issue the modules of a rank: with Megatron's 1F1B, whose host waits for the device at every
message, this holds for each micro-batch.

Memory: parameters, gradients and optimizer states of the rank's stages, and the activations of the
micro-batches that its schedule has in flight.

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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from zsim.cost.kernels.update import OPTIMIZER_STATES, update_bytes
from zsim.cost.rates.gpu import KernelPricer
from zsim.cost.rates.host_calls import host_seconds, shipped_host_costs
from zsim.dtypes import DTYPE_BYTES
from zsim.engine.micro_batches import extrapolate_seconds
from zsim.fabric.algorithms.methods import CallKind, call_kind
from zsim.fabric.fabric import Fabric, idle_fabric
from zsim.plan.builder import COMPUTE
from zsim.plan.make import stages_of
from zsim.plan.node_types import gpu_of, host_of
from zsim.plan.ops import Collective, Copy, DriveIo, Group, HostWork, Kernels, Op, Plan, Work
from zsim.plan.pipeline.orders import ranks_of_stages
from zsim.plan.workload.issued_work import IssuedWork, kernels_of
from zsim.plan.workload.workload import ModuleCall, Segment, make_workload
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.faults import FaultsTable
from zsim.specs.experiment.job import Job, job_topology, slowest_gpu_slowdown
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.optimizers import optimizer_of
from zsim.specs.strategy.parallelism import CONTEXT, DATA, TENSOR, ParallelismConfig
from zsim.specs.strategy.training import TrainingConfig
from zsim.specs.topology.topology import Topology
from zsim.study.tune.framework import bounds_of

_SPLIT_BACKWARD = ("interleaved-zero-bubble", "zbv-zero-bubble", "dualpipe-v")


@dataclass(frozen=True, slots=True)
class _SegmentCost:
    """Seconds and bytes of a segment: forward, backward with recomputation, the host's time for both, kept
    activations, parameters."""

    forward: float = 0.0
    backward: float = 0.0
    host: float = 0.0
    kept_bytes: int = 0
    numel: int = 0

    def __add__(self, other: _SegmentCost) -> _SegmentCost:
        return _SegmentCost(
            self.forward + other.forward,
            self.backward + other.backward,
            self.host + other.host,
            self.kept_bytes + other.kept_bytes,
            self.numel + other.numel,
        )


@dataclass(frozen=True, slots=True)
class _ModelCosts:
    """A model's pieces: before the blocks, every block, after them."""

    before: _SegmentCost
    blocks: tuple[_SegmentCost, ...]
    after: _SegmentCost


Key = tuple[str, str, TrainingConfig, ParallelismConfig]


@dataclass(frozen=True, slots=True)
class Bound:
    """A step takes at least `seconds` and needs at least `gpu_bytes` per GPU."""

    seconds: float
    gpu_bytes: int


class Bounds:
    """Bounds of jobs. Each way of cutting a layer is evaluated once.

    With `has_degrees`, jobs without model parallelism are bounded like those with it: exposed collectives,
    the host and the states count too.
    """

    def __init__(self, *, has_degrees: bool = False) -> None:
        self.has_degrees = has_degrees
        self._costs: dict[Key, _ModelCosts] = {}
        self._pricers: dict[str, KernelPricer] = {}
        self._collectives = IdleCollectives()

    def bound(self, job: Job) -> Bound:
        """The bound on the job's step."""
        framework, context = bounds_of(job.kind), job.cluster.framework_memory.context
        is_staged = self.has_degrees and framework.counts_stages
        if is_staged or not job.parallelism.is_trivial:
            return Bound(self._seconds_of_stages(job), self._bytes_of_stages(job) + context)
        (model,) = self._stages(job)
        steps = job.training.gradient_accumulation_steps
        seconds = (model.forward + model.backward) * steps * slowest_gpu_slowdown(job)
        kept_bytes = int(framework.checkpoint_share(job, job.strategy) * model.kept_bytes)
        return Bound(seconds + _host_update_seconds(job), kept_bytes + context)

    def _seconds_of_stages(self, job: Job) -> float:
        """Seconds that the step takes at least: see [Note: a pipeline is never faster]."""
        stages, split, framework = self._stages(job), job.parallelism, bounds_of(job.kind)
        ranks = ranks_of_stages(split.schedule, split.pipeline, split.virtual_stages)
        steps = job.training.gradient_accumulation_steps
        drains = split.schedule not in _SPLIT_BACKWARD
        lower_bound, slowdown = 0.0, slowest_gpu_slowdown(job)
        waits = framework.waits_for_messages and split.schedule == "1f1b" and split.pipeline > 1
        syncs = job.training.gradient_clipping > 0 and drains
        first_rank_numel = sum(
            stage.numel for stage, stage_rank in zip(stages, ranks, strict=True) if stage_rank == ranks[0]
        )
        drain_tail = self._tail(job, first_rank_numel, 0)  # behind the drain
        for rank in range(split.pipeline):
            held_stages = [number for number, stage_rank in enumerate(ranks) if stage_rank == rank]
            preceding = stages[: held_stages[0]]
            busy = slowdown * sum(stages[number].forward + stages[number].backward for number in held_stages)
            host = sum(stages[number].host for number in held_stages)
            lead_in = slowdown * sum(stage.forward for stage in preceding)
            drain = slowdown * sum(stage.backward for stage in preceding) if drains else 0.0
            numel = sum(stages[number].numel for number in held_stages)
            tail = (
                self._tail(job, numel, 0 if held_stages[0] == 0 else stages[held_stages[0]].numel)
                if syncs
                else 0.0
            )
            issued = steps * (max(busy, host) if waits else busy)
            lower_bound = max(lower_bound, lead_in + issued + max(drain + drain_tail, tail), steps * host)
        return lower_bound

    def _tail(self, job: Job, numel: int, numel_of_last: int) -> float:
        """Seconds of the reduction and of the gathering of a rank with `numel` parameters that nothing
        overlaps. `numel_of_last` is the number of parameters of the stage whose backward is the last.
        """
        if job.data_parallel_size * job.parallelism.context == 1:
            return 0.0
        framework = bounds_of(job.kind)
        calls = framework.exposed_collectives(job, job.strategy, numel, numel_of_last)
        return sum(
            self._collectives.seconds(job, Collective(kind, count * DTYPE_BYTES[dtype], dtype, DATA))
            for kind, count, dtype in calls
            if count
        )

    def _bytes_of_stages(self, job: Job) -> int:
        """Bytes that the fullest rank needs at least."""
        stages, split = self._stages(job), job.parallelism
        ranks = ranks_of_stages(split.schedule, split.pipeline, split.virtual_stages)
        moments = optimizer_of(job.training.optimizer).moments or 0
        framework = bounds_of(job.kind)
        bytes_per_parameter = framework.bytes_per_parameter(job, job.strategy, moments)
        share = framework.checkpoint_share(job, job.strategy)
        peak_bytes = 0
        for rank in range(split.pipeline):
            held_stages = [stages[number] for number, stage_rank in enumerate(ranks) if stage_rank == rank]
            resident = sum(stage.numel for stage in held_stages) * bytes_per_parameter
            activation_bytes = min(stage.kept_bytes for stage in held_stages) * _num_in_flight(job, rank)
            peak_bytes = max(peak_bytes, int(resident) + int(share * activation_bytes))
        return peak_bytes

    def _stages(self, job: Job) -> list[_SegmentCost]:
        """The virtual stages in model order."""
        costs, layers = self._model_costs(job), job.parallelism.layers_per_stage
        if not layers:
            return [sum(costs.blocks, costs.before) + costs.after]
        stages, first = [], 0
        for number, count in enumerate(layers):
            stage = sum(costs.blocks[first : first + count], _SegmentCost())
            stage = stage + costs.before if number == 0 else stage
            stages.append(stage + costs.after if number == len(layers) - 1 else stage)
            first += count
        return stages

    def _model_costs(self, job: Job) -> _ModelCosts:
        unpipelined = replace(
            job.parallelism, pipeline=1, virtual_stages=1, layers_per_stage=(), schedule="1f1b", passes=1
        )
        training = replace(job.training, gradient_accumulation_steps=1)
        key = (job.model.name + job.model.source, job.cluster.gpu.name, training, unpipelined)
        if key not in self._costs:
            self._costs[key] = self._derive_costs(job, unpipelined, training)
        return self._costs[key]

    def _derive_costs(
        self, job: Job, unpipelined: ParallelismConfig, training: TrainingConfig
    ) -> _ModelCosts:
        (model,) = stages_of(job.model, unpipelined)
        unique_model_and_training = _unique_blocks(model, training)
        before, *blocks, after = make_workload(*unique_model_and_training).segments
        num_in_tower = sum(len(tower.blocks) + 1 for tower in model.towers)
        in_tower, blocks = blocks[:num_in_tower], blocks[num_in_tower:]
        costs = {
            name: self._segment_cost(job, segment)
            for name, segment in zip(_unique_kinds(model, training), blocks, strict=True)
        }
        order = [costs[kind] for kind in block_kinds(model, training)]
        first = sum(
            (self._segment_cost(job, segment) for segment in in_tower), self._segment_cost(job, before)
        )
        return _ModelCosts(first, tuple(order), self._segment_cost(job, after))

    def _segment_cost(self, job: Job, segment: Segment) -> _SegmentCost:
        forward = sum(self._seconds(job, call.work.forward) for call in segment.calls)
        backward = sum(self._seconds(job, call.work.backward) for call in segment.calls)
        backward += sum(self._seconds(job, call.work.forward) for call in segment.recomputed)
        backward += sum(self._recompute_seconds(job, call) for call in segment.calls)
        host = self._host_seconds(job, segment)
        saved = sum(call.work.saved_bytes for call in segment.calls)
        activation_bytes = segment.checkpoint_bytes if segment.is_checkpointed else saved
        return _SegmentCost(forward, backward, host, activation_bytes, segment.numel)

    def _host_seconds(self, job: Job, segment: Segment) -> float:
        """Seconds of the host thread for forward and backward of a segment, without the framework's hooks
        but for those around a block."""
        framework, costs = bounds_of(job.kind), shipped_host_costs()

        def seconds(overhead: str, events: int, launches: int) -> float:
            return host_seconds(overhead, events, launches, job.cluster.host, costs)

        is_compiled = job.training.compile and segment.kind not in ("before", "after")
        is_eager = framework.calls_modules_eagerly and not is_compiled
        module, node = ("eager_call", "eager_node") if is_eager else ("module_call", "autograd_node")
        forwards = (*segment.calls, *segment.recomputed)
        total = sum(seconds(module, 1, call.work.forward_launches) for call in forwards)
        for call in segment.calls:
            total += seconds(node, 1, call.work.backward_launches)
            total += seconds(module, 0, call.work.recompute_launches)
        block_overhead = framework.block_overhead(job.strategy)
        if block_overhead is not None and segment.kind == "block":
            total += seconds(block_overhead, 3 if segment.is_checkpointed else 2, 0)
        return total

    def _recompute_seconds(self, job: Job, call: ModuleCall) -> float:
        return self._seconds(job, call.work.recompute) if call.work.recompute is not None else 0.0

    def _seconds(self, job: Job, issued: IssuedWork) -> float:
        """Kernels, and the collectives that run in line with them."""
        pricer = self._pricers.setdefault(job.cluster.gpu.name, KernelPricer(job.cluster.gpu))
        total: float = sum(pricer.seconds(kernel) for kernel in kernels_of(issued).kernels)
        if not isinstance(issued, tuple):
            return total
        for part in issued:
            if isinstance(part.work, Collective) and part.stream == COMPUTE:
                total += self._collectives.seconds(job, part.work)
        return total


def _num_in_flight(job: Job, rank: int) -> int:
    """Forwards of a stage whose backward has not begun, at most at a time, on a pipeline rank."""
    split, steps = job.parallelism, job.training.gradient_accumulation_steps // job.parallelism.passes
    ranks, virtual = split.pipeline, split.virtual_stages
    if ranks == 1:
        return 1
    if split.schedule in ("gpipe", "looped-bfs"):
        return steps * virtual
    if split.schedule == "1f1b":
        return min(steps, ranks - rank)
    if split.schedule == "interleaved-1f1b":
        return min(steps * virtual, 2 * (ranks - 1 - rank) + (virtual - 1) * ranks + 1)
    return min(steps * virtual, virtual)


def block_kinds(model: ModelSpec, training: TrainingConfig) -> list[tuple[int, str]]:
    """The shape and the checkpointing of each block, which its work depends on."""
    indexed_blocks = enumerate(model.blocks, model.first_block)
    return [(id(block), training.block_policy(number)) for number, block in indexed_blocks]


def _unique_kinds(model: ModelSpec, training: TrainingConfig) -> list[tuple[int, str]]:
    return list(dict.fromkeys(block_kinds(model, training)))


def _unique_blocks(model: ModelSpec, training: TrainingConfig) -> tuple[ModelSpec, TrainingConfig]:
    """The model with one block of each kind, and the training with their policies."""
    kinds = block_kinds(model, training)
    indices = [kinds.index(kind) for kind in _unique_kinds(model, training)]
    blocks = tuple(model.blocks[index] for index in indices)
    policies: Sequence[str] = [kinds[index][1] for index in indices]
    return replace(model, blocks=blocks), replace(training, block_checkpointing=tuple(policies))  # type: ignore[arg-type]


_AXES = {TENSOR: (TENSOR,), CONTEXT: (CONTEXT,), DATA: (DATA, CONTEXT)}


class IdleCollectives:
    """Lower bounds on collectives: no step runs one faster than on idle links in the first group of its kind.
    Each is evaluated once for jobs of one cluster.
    """

    def __init__(self) -> None:
        self._topologies: dict[tuple[str, int, int], Topology] = {}
        self._fabrics: dict[tuple[tuple[str, int, int], bytes, str, CallKind], Fabric] = {}

    def seconds(self, job: Job, work: Collective) -> float:
        """Seconds of the collective in the group "tensor", "context" or "data". 0 in other groups."""
        axes = _AXES.get(work.group)
        if axes is None or job.mesh.size(*axes) == 1:
            return 0.0
        return self._fabric(job, job.mesh.groups(*axes)[:1], work).transfer(work, 0).isolated_seconds

    def _fabric(self, job: Job, members: np.ndarray, work: Collective) -> Fabric:
        """The fabric for collectives like `work`."""
        topology_key = job.cluster.name, job.num_nodes, job.gpus_per_node
        key = topology_key, members.tobytes(), work.group, call_kind(work)
        if key not in self._fabrics:
            if topology_key not in self._topologies:
                self._topologies[topology_key] = job_topology(job)
            group = Group(work.group, members)
            self._fabrics[key] = idle_fabric(self._topologies[topology_key], group, [work])
        return self._fabrics[key]


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
