"""Lower bounds on a step with tensor, pipeline and context parallelism, without a plan.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from zsim.cost.rates.gpu import KernelPricer
from zsim.cost.rates.host_calls import host_seconds, shipped_host_costs
from zsim.dtypes import DTYPE_BYTES
from zsim.fabric.algorithms.methods import CallKind, call_kind
from zsim.fabric.fabric import Fabric, idle_fabric
from zsim.plan.builder import COMPUTE
from zsim.plan.make import stages_of
from zsim.plan.ops import Collective, Group
from zsim.plan.pipeline.orders import ranks_of_stages
from zsim.plan.workload.issued_work import IssuedWork, kernels_of
from zsim.plan.workload.workload import ModuleCall, Segment, make_workload
from zsim.specs.experiment.job import Job, job_topology, slowest_gpu_slowdown
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.mesh import CONTEXT, DATA, TENSOR
from zsim.specs.strategy.optimizers import optimizer_of
from zsim.specs.strategy.parallelism import ParallelismConfig
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


class StageBounds:
    """Bounds of jobs with model parallelism. Each way of cutting a layer is evaluated once."""

    def __init__(self) -> None:
        self._costs: dict[Key, _ModelCosts] = {}
        self._pricers: dict[str, KernelPricer] = {}
        self._collectives = IdleCollectives()

    def seconds(self, job: Job) -> float:
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

    def gpu_bytes(self, job: Job) -> int:
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
        order = [costs[kind] for kind in _block_kinds(model, training)]
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


def _block_kinds(model: ModelSpec, training: TrainingConfig) -> list[tuple[int, str]]:
    """The shape and the checkpointing of each block, which its work depends on."""
    indexed_blocks = enumerate(model.blocks, model.first_block)
    return [(id(block), training.block_policy(number)) for number, block in indexed_blocks]


def _unique_kinds(model: ModelSpec, training: TrainingConfig) -> list[tuple[int, str]]:
    return list(dict.fromkeys(_block_kinds(model, training)))


def _unique_blocks(model: ModelSpec, training: TrainingConfig) -> tuple[ModelSpec, TrainingConfig]:
    """The model with one block of each kind, and the training with their policies."""
    kinds = _block_kinds(model, training)
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
