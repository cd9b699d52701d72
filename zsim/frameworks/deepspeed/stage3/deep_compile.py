"""DeepSpeed ZeRO stage 3 under DeepCompile: gathers, releases and reductions that the compiled graph issues.

Transcribed from DeepSpeed 0.19.6 `compile/init_z3.py`, `csrc/compile/z3.cpp` and
`csrc/includes/deepcompile.h` (arXiv 2504.09983). The passes are in compiled_graph.py. The plan is of a step
after the fifth, from which on all passes are in force (after the first where optimizer states are moved).

# [Note: a compiled gather]
Python's hooks are gone, and with them their host time, the queue of fetches and the limits on it. A gather is
an operator of the graph: one NCCL call for a group of parameters, each into its own buffer, on a stream that
first waits for all kernels that were issued before. Its reader waits for it alone. The buffers of a gather
that is issued ahead are memory of the compute stream (`prefetchParamsFused` allocates them without a guard),
so that `record_stream` of their readers' stream defers nothing, and the next gather may have them at once.

# [Note: a compiled reduction]
Gradients are copied into a bucket on a stream of their own. A bucket that would overflow is reduced in one
group of NCCL calls, from the bucket into the rank's gradients, or where they hold a sum or are of another
type into a temporary tensor that is added. The next gradients go to a second bucket. The host waits for the
last reduction of every backward. A gradient larger than the bucket makes it as large.

# [Note: optimizer states in host memory]
Each state that leaves the GPU is copied into page-locked memory on a stream that first waits for all kernels
issued before, and its block is free once the copy ends. It comes back on the same stream, into a block of the
compute stream. The host waits for the stream at the end of every backward, so that accumulation repeats the
copies for every micro-batch (`offload_opt_launch`, `reload_opt`, `reload_copy_stream_sync`).

# [Note: shards in host memory]
Shards that `offload_param` keeps on the host come to the GPU at the head of a graph, all that it reads, on
streams that wait for the kernels issued before (`offload_parameters.py`, `DSParam::reload`). Its kernels wait
for a shard with the gather. Behind the last use of the gathered parameter the shard, unchanged, is copied
back to the host, and its block is free at once (`DSParam::offload`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from zsim.cost.kernels.update import accumulate_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.errors import NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage3.bucket import GradientBucket
from zsim.frameworks.deepspeed.stage3.compiled_activations import (
    ActivationMoves,
    HostActivations,
    moved_activations,
    trim_moves,
)
from zsim.frameworks.deepspeed.stage3.compiled_graph import (
    Groups,
    compiled_graphs,
    gathers_ahead,
    kept_gathered,
    returns_of_states,
    states_that_leave,
)
from zsim.frameworks.deepspeed.stage3.fetch_trace import parameters_of_calls
from zsim.frameworks.deepspeed.stage3.schedule import Zero3Schedule
from zsim.operations.operation import Role
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import Memory
from zsim.plan.shared.host_side import HostSide
from zsim.plan.stage import Stage
from zsim.plan.walk import Walk
from zsim.plan.workload.workload import ModuleCall, Segment, make_workload
from zsim.specs.strategy.optimizers import optimizer_of

GATHER, REDUCE, COPY, STATES = "all_gather", "reduce_scatter", "gradient_copy", "state_copy"
_GRADIENTS = "gradients"  # the buffers that wait for their reduction, apart from gathered parameters
SHARDS_IN, SHARDS_OUT = "shards in", "shards out"
_WITHOUT_ACTIVATIONS = (Role.EMBEDDING, Role.RESIDUAL)  # which save token ids and masks, no floats


@dataclass(frozen=True, slots=True)
class PassDecisions:
    """The decisions of the passes."""

    launches: dict[int, Groups] = field(default_factory=dict)
    """The gathers that are issued before a node, by its number."""
    persistent: frozenset[int] = frozenset()
    """The parameters that stay gathered to the end of a step."""
    leaving: tuple[int, ...] = ()
    """Bytes of each optimizer state that leaves the GPU."""
    returns: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The states that come back behind a node, by the node's number."""
    activations: ActivationMoves = field(default_factory=ActivationMoves)
    """The activations that leave the GPU, and when they come back."""


class DeepCompileSchedule(Zero3Schedule):
    """Stage 3 whose gathers and reductions are operators of graphs. See the module's notes."""

    def __init__(self, stage: Stage, config: DeepSpeedConfig, passes: PassDecisions) -> None:
        super().__init__(stage, config)
        assert config.deep_compile is not None
        self.passes, self.compiled = passes, config.deep_compile
        self.gather_stream, self.reduce_stream = GATHER, REDUCE
        self.reduce_bytes = self.param_bytes  # the gradients' own type, whatever the file says
        self.graphs = compiled_graphs(
            stage.workload, parameters_of_calls(stage.workload, dict(self._number_of))
        )
        self.node_changes: list[int] = []  # of the builder's memory, those before each node
        self._node = 0
        self._events: dict[int, int] = {}  # by gathered parameter, the event of its gather
        self._bucket_events: list[int | None] = [None] * self.compiled.num_buckets
        self.host = HostSide(self.builder)
        offload = config.zero.offload_param
        self._pins_shards = offload is not None and offload.pin_memory
        self._shard_events: dict[int, int] = {}  # by parameter, the event of the copy of its shard
        self.activations: HostActivations | None = None
        if self.compiled.moves == "activations":
            is_pinned = self.compiled.pins_activations
            self.activations = HostActivations(self.host, passes.activations, is_pinned=is_pinned)
            self.checkpoints = self.activations
        self._keeping_calls = {
            call.name
            for segment in stage.workload.segments
            if not segment.is_checkpointed
            for call in segment.calls
            if call.name not in segment.unsaved_calls and call.module.role not in _WITHOUT_ACTIVATIONS
        }

    # -- sizes ------------------------------------------------------------------------------------------

    @property
    def bucket_bytes(self) -> int:
        largest = max(parameter.numel for parameter in self.trace.parameters)
        return self.compiled.num_buckets * max(self.zero.reduce_bucket_size, largest) * self.param_bytes

    @property
    def gathered_sizes(self) -> list[int]:
        """Bytes of each gathered parameter."""
        return [parameter.padded_numel * self.param_bytes for parameter in self.trace.parameters]

    @property
    def state_sizes(self) -> list[int]:
        """Bytes of the optimizer states that the pass may move, in its order."""
        master = DTYPE_BYTES[self.config.master_weights_dtype]
        moment = DTYPE_BYTES[self.config.optimizer_states_dtype]
        widths = [*[moment] * (optimizer_of(self.training.optimizer).moments or 0), master]
        return [width * self._group_numel(group) for group in self.sub_groups for width in widths]

    def resident(self) -> list[Memory]:
        """Also parameters that stay gathered. States that leave the GPU are allocated by the step."""
        kept = sum(self.gathered_sizes[number] for number in self.passes.persistent)
        memories = [*super().resident(), *([Memory("buffers", kept)] if kept else [])]
        if self.activations is not None:
            return [*memories, *self.activations.resident()]
        if self.compiled.moves != "states":
            return memories
        leaving, copies = sum(self.passes.leaving), sum(self.state_sizes)
        memories = [
            replace(memory, bytes=memory.bytes - leaving) if memory.category == "optimizer_states" else memory
            for memory in memories
        ]
        return [*memories, Memory("optimizer_states", copies, "host", is_pinned=True)]

    # -- gathers ----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._events = {}
        for size in self.passes.leaving:
            self.builder.allocate("optimizer_states", size)

    def begin_forward(self, micro_batch: int) -> None:
        """Send states to host memory. See [Note: optimizer states in host memory]."""
        self._node = 0
        self._bring_shards()
        if not self.passes.leaving:
            return
        self.builder.wait_stream(STATES, COMPUTE)
        for number, size in enumerate(self.passes.leaving):
            event = self.host.copy(f"state {number} to host", "d2h", size, STATES)
            assert event is not None
            self.builder.free_when_done("optimizer_states", size, event)

    def begin_backward(self, micro_batch: int, *, is_last: bool, schedule_manages_sharding: bool) -> None:
        self._node = self.graphs.num_forward
        self._micro_batch, self._is_boundary = micro_batch, is_last
        self._bring_shards()

    def _bring_shards(self) -> None:
        """`reload_parameter`: bring what the next graph reads. See [Note: shards in host memory]."""
        if self.store.is_on_gpu:
            return
        self.builder.wait_stream(SHARDS_IN, COMPUTE)
        first = self._node
        graph = next(graph for graph in self.graphs.graphs if first in graph)
        for number in (number for node in graph for number in self.graphs.gathers[node]):
            if not self.store.placement.comes_over_pcie(number):
                continue
            size, name = self._shard_bytes(number), self.trace.parameters[number].name
            self.builder.allocate("buffers", size, stream=SHARDS_IN)
            event = self.host.copy(
                f"shard of {name}", "h2d", size, SHARDS_IN, is_pinned=self._pins_shards, module=name
            )
            assert event is not None
            self._shard_events[number] = event

    def _send_shard(self, number: int) -> None:
        """`offload_parameter`."""
        if not self.store.placement.comes_over_pcie(number):
            return
        size, name = self._shard_bytes(number), self.trace.parameters[number].name
        self.builder.wait_stream(SHARDS_OUT, COMPUTE)
        self.host.copy(
            f"shard of {name} back", "d2h", size, SHARDS_OUT, is_pinned=self._pins_shards, module=name
        )
        self.builder.free("buffers", size)

    def _shard_bytes(self, number: int) -> int:
        return self.trace.parameters[number].shard_numel * self.param_bytes

    def pre_backward(self, segment: Segment) -> None: ...

    def pre_module(self, call: ModuleCall) -> None:
        """Issue the gathers that stand before the node, and wait for those of its own parameters."""
        node = self._node
        assert self.graphs.nodes[node] == (self.builder.phase, call.name)
        self._node += 1
        self.node_changes.append(len(self.builder.memory))
        if self.activations is not None:
            self.activations.before_node(node, call)
        for group in self.passes.launches.get(node, ()):
            self._launch(group, COMPUTE)
        for number in self.graphs.gathers[node]:
            self._launch((number,), GATHER)
            self.builder.stream_wait(COMPUTE, self._events[number])

    def _launch(self, numbers: Sequence[int], allocation_stream: str) -> None:
        """`prefetch_params_fused` or `allgather_param`: gather those that are not gathered."""
        builder, sizes = self.builder, self.gathered_sizes
        missing = [number for number in numbers if number not in self._events]
        if not missing:
            return
        size = sum(sizes[number] for number in missing)
        builder.wait_stream(GATHER, COMPUTE)
        for number in missing:
            for stream in (COMPUTE, GATHER):
                builder.stream_wait(stream, self._shard_events.get(number))
        allocated = tuple(sizes[number] for number in missing if number not in self.passes.persistent)
        builder.allocate("buffers", sum(allocated), tensors=allocated, stream=allocation_stream)
        name = self.trace.parameters[missing[0]].name
        suffix = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        if self.world_size > 1:
            event = builder.collective(
                "all_gather", size, self.config.param_dtype, self.group.name, stream=GATHER,
                name=f"all_gather {name}{suffix}", module=name,
            )  # fmt: skip
        else:
            event = builder.move(f"copy {name}{suffix}", size, size, stream=GATHER, module=name)
        self._events |= dict.fromkeys(missing, event)

    def post_module(self, call: ModuleCall) -> None:
        """`release_param` of the parameters that no later node of the graph reads."""
        released = [
            number for number in self.graphs.releases[self._node - 1] if number not in self.passes.persistent
        ]
        for number in released:
            del self._events[number]
        size, last = sum(self.gathered_sizes[number] for number in released), self.builder.record(COMPUTE)
        if self.passes.launches or last is None:
            self.builder.free("buffers", size)
        else:
            self.builder.free_when_done("buffers", size, last)
        for number in self.passes.returns.get(self._node - 1, ()):
            self._bring_back(number)
        if not self.store.is_on_gpu:
            for number in self.graphs.releases[self._node - 1]:
                self._send_shard(number)
        if self.activations is not None and call.name in self._keeping_calls:
            if self.builder.phase == "forward":
                self.activations.send(call.name, call.work.tensors.saved)
            elif self.builder.phase == "backward":
                self.activations.hold(call.name)

    def _bring_back(self, number: int) -> None:
        """`move_back_key`: a state returns to the GPU."""
        size = self.passes.leaving[number]
        self.builder.allocate("optimizer_states", size, stream=COMPUTE)
        self.builder.wait_stream(STATES, COMPUTE)
        self.host.copy(f"state {number} to the GPU", "h2d", size, STATES)

    # -- gradients --------------------------------------------------------------------------------------

    def _add_gradient(self, number: int, name: str) -> None:
        """`reduceGrad`."""
        builder, bucket = self.builder, self._bucket
        numel = self.trace.parameters[number].numel
        size = numel * self.param_bytes
        builder.allocate("buffers", size, stream=COMPUTE, part=_GRADIENTS)
        if bucket.elements and bucket.elements + numel > self.zero.reduce_bucket_size:
            self._reduce()
            bucket = self._bucket
        builder.stream_wait(COMPUTE, self._bucket_events[0])
        builder.wait_stream(COPY, COMPUTE)
        builder.move(f"bucket {name}", size, size, stream=COPY, module=name)
        bucket.loose_bytes += size  # kept until the bucket is reduced
        bucket.elements += numel
        bucket.shard_elements += self.trace.parameters[number].shard_numel
        bucket.parameters.append(number)

    def _reduce(self) -> None:
        """`flushReduceBucket`."""
        builder, bucket, config = self.builder, self._bucket, self.config
        if not bucket.elements:
            return
        builder.wait_stream(REDUCE, COPY)
        is_added = self._micro_batch > 0
        is_temporary = is_added or config.grad_accum_dtype != config.param_dtype
        shard = bucket.shard_elements * self.param_bytes
        temporary_bytes = shard if is_temporary else 0
        builder.allocate("buffers", temporary_bytes)
        if self.world_size > 1:
            size, dtype = shard * self.world_size, config.param_dtype
            builder.collective("reduce_scatter", size, dtype, self.group.name, stream=REDUCE)
        if is_added:
            kernels = accumulate_kernels(bucket.shard_elements, config.grad_accum_dtype, config.param_dtype)
            builder.kernels("add gradients", kernels, stream=REDUCE)
        elif is_temporary or self.world_size == 1:
            sums = bucket.shard_elements * DTYPE_BYTES[config.grad_accum_dtype]
            builder.move("copy gradients", shard, sums, bucket.num_tensors, stream=REDUCE)
        builder.free("buffers", temporary_bytes)
        self._bucket_events = [*self._bucket_events[1:], builder.record(REDUCE)]
        builder.wait_stream(COMPUTE, COPY)
        builder.free("buffers", bucket.loose_bytes, part=_GRADIENTS)
        self._bucket = GradientBucket()

    def end_backward(self) -> None:
        """`endBackward`: the host waits for the last reduction."""
        if self.passes.leaving:
            self.builder.host_wait(self.builder.record(STATES))
            self.builder.host("optimizer states are back")
        if self.activations is not None:
            self.activations.end_backward()
        self._reduce()
        self.builder.host_wait(self.builder.record(REDUCE))
        self.builder.host("end of backward")

    def optimizer_step(self) -> None:
        super().optimizer_step()
        for size in self.passes.leaving:
            self.builder.free("optimizer_states", size)


def make_deep_compile(stage: Stage, config: DeepSpeedConfig) -> DeepCompileSchedule:
    """The hooks with what the passes decide, each by a profile of one micro-batch with the passes before it.

    The profile before `selective_gather` has the gathers that `schedule_prefetch` has moved.
    """
    assert config.deep_compile is not None
    limit = config.deep_compile.tensor_bytes
    if config.deep_compile.moves == "parameters":
        return DeepCompileSchedule(stage, config, PassDecisions())
    plain = _profile(stage, config, PassDecisions())
    if config.deep_compile.moves == "states":
        if stage.training.optimizer not in ("adam", "adamw"):
            raise NotSimulatedError(
                f"{config.name}: compile.offload_opt_states: found with {stage.training.optimizer}, of whose "
                "states DeepSpeed moves only what Adam names so; expected adamw"
            )
        return DeepCompileSchedule(stage, config, _place_states(plain, limit))
    if config.deep_compile.moves == "activations":
        return DeepCompileSchedule(stage, config, _place_activations(stage, config, plain, limit))
    launches = gathers_ahead(plain.graphs, _node_peaks(plain), plain.gathered_sizes, limit)
    moved = _profile(stage, config, PassDecisions(launches))
    persistent = kept_gathered(moved.graphs, moved.gathered_sizes, limit - max(_node_peaks(moved)))
    return DeepCompileSchedule(stage, config, PassDecisions(launches, persistent))


def _place_states(plain: DeepCompileSchedule, limit: int) -> PassDecisions:
    """The decisions of `move_opt_states` by the profile `plain`: that of forward without any state on the
    GPU, that of backward with those that forward has left there. See [Note: states that leave] of
    compiled_graph.py.
    """
    sizes, (forward, backward) = plain.state_sizes, plain.graphs.graphs
    peaks = [peak - sum(sizes) for peak in _node_peaks(plain)]
    count = states_that_leave(sizes, max(peaks[node] for node in forward), limit)
    kept = sum(sizes[count:])
    returns = returns_of_states(sizes[:count], backward, [peaks[node] + kept for node in backward], limit)
    return PassDecisions(leaving=tuple(sizes[:count]), returns=returns)


def _place_activations(
    stage: Stage, config: DeepSpeedConfig, plain: DeepCompileSchedule, limit: int
) -> PassDecisions:
    """The decisions of `offload_activation` by the profile `plain`, and by the peak of a step that sends all
    activations away. See [Note: activations that stay] of compiled_activations.py.
    """
    assert plain.activations is not None
    backward, peaks = plain.graphs.graphs[1], _node_peaks(plain)
    readers = plain.activations.readers
    moves = moved_activations(readers, backward, [peaks[node] for node in backward], limit)
    floor = _profile(stage, config, PassDecisions(activations=moves))
    floor.optimizer_step()
    changes = [change.bytes for change in floor.builder.memory if change.device == "gpu"]
    peak = _resident_bytes(floor) + max(accumulate(changes), default=0)
    return PassDecisions(activations=trim_moves(moves, limit - peak))


def _profile(stage: Stage, config: DeepSpeedConfig, passes: PassDecisions) -> DeepCompileSchedule:
    """Hooks that one micro-batch has been walked with, on a builder of their own."""
    training = replace(stage.training, gradient_accumulation_steps=1)
    workload = make_workload(stage.workload.model, training)
    groups = list(stage.builder.groups.values())
    hooks = DeepCompileSchedule(
        replace(stage, builder=PlanBuilder(groups), workload=workload), config, passes
    )
    walk = Walk(hooks, 0)
    walk.forward()
    walk.backward(is_last=True, schedule_manages_sharding=False)
    return hooks


def _node_peaks(hooks: DeepCompileSchedule) -> list[int]:
    """GPU bytes that tensors have at most while each node runs."""
    level = _resident_bytes(hooks)
    changes, ends = hooks.builder.memory, [*hooks.node_changes[1:], len(hooks.builder.memory)]
    peaks = []
    for start, end in zip(hooks.node_changes, ends, strict=True):
        peak = level
        for change in changes[start:end]:
            level += change.bytes if change.device == "gpu" else 0
            peak = max(peak, level)
        peaks.append(peak)
    return peaks


def _resident_bytes(hooks: DeepCompileSchedule) -> int:
    return sum(memory.bytes for memory in hooks.resident() if memory.device == "gpu")
