"""Forward and backward of a micro-batch through a stage's segments, the same for every framework.

The differences between frameworks are in their `Hooks`, which are called where PyTorch calls its hooks.
Activations are held per micro-batch: several micro-batches may be between their forward and their backward.

# [Note: a block as a copy]
A model's equal blocks issue the same ops in the same order if they start from the same state. The state is
the builder's events and waits, and what a framework's hooks know (what is gathered, what is in a bucket), all
counted from the block. A block that ends in the state in which it began is walked once. The blocks after it
are copies of its ops and memory changes, with later numbers and their own names, for as many blocks as the
hooks see the same ahead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from zsim.operations.fused_head import head_index
from zsim.operations.operation import Role
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.hooks import BlockPosition, Hooks
from zsim.plan.ops import Kernels, MemoryChange, Op
from zsim.plan.shared.amaxes import reduce_amaxes
from zsim.plan.shared.checkpoints import CHECKPOINT
from zsim.plan.workload.issued_work import IssuedWork, launches_of, num_launches
from zsim.plan.workload.modules import SIDE_STREAM_MARKS
from zsim.plan.workload.workload import ModuleCall, Segment, Workload
from zsim.specs.model.spec import Exchange, Module

RESIDUAL = "gradient of the residual stream"
SHARED_EXPERTS_STREAM = "shared experts"
OUTPUT, REFERENCE = " output", " of the reference"  # suffixes of the block's name


class Walk:
    """Issues forward and backward of one micro-batch through the stage of `hooks`.

    `stream` is the stream of the modules' in-line work. `input_event` is the event on which the host waits
    for a module's input, and None stands for all of the compute stream.
    """

    def __init__(self, hooks: Hooks, micro_batch: int) -> None:
        self.hooks, self.micro_batch = hooks, micro_batch
        self.stream = COMPUTE
        self.input_event: int | None = None
        self.builder, self.workload = hooks.builder, hooks.stage.workload
        self.logs = self.workload.logs
        parallelism = hooks.stage.parallelism
        self.has_dtensors = parallelism.has_dtensors
        self.compiles = self.workload.training.compile
        self.keeps_nothing = self.workload.training.forward_only

    def _call_overhead(self, call: ModuleCall) -> str:
        return "eager_call" if self._is_eager(call) else "module_call"

    def _node_overhead(self, call: ModuleCall) -> str:
        return "eager_node" if self._is_eager(call) else "autograd_node"

    def _is_eager(self, call: ModuleCall) -> bool:
        """Whether torch's dispatcher runs a module's operators one by one, in a framework whose host time is
        not counted per block.
        """
        return self.hooks.is_eager and not (self.compiles and call.segment not in ("before", "after"))

    def _issue(
        self, name: str, work: IssuedWork, module: str, launches: int, overhead: str, events: int = 1
    ) -> None:
        """Issue a module's work in one direction: one op, or its parts. The host takes its time for the
        module (`overhead`) `events` times, and for every launch."""
        builder = self.builder
        if isinstance(work, Kernels):
            builder.add(
                name, self.stream, work, launches=launches, overhead=overhead, module=module, events=events
            )
            return
        for part in work:
            stream = self.stream if part.stream == COMPUTE else part.stream
            if part.follows:
                builder.wait_stream(stream, self.stream if part.follows == COMPUTE else part.follows)
            label = f"{name} {part.name}" if part.name else name
            if isinstance(part.work, Kernels):
                part_launches = num_launches(part.work.kernels)
                builder.add(
                    label,
                    stream,
                    part.work,
                    launches=part_launches,
                    overhead=overhead,
                    module=module,
                    events=events,
                )
                events = 0
            elif part.work is not None:
                builder.communicate(label, stream, part.work, module)

    def _switch_stream(self, module: Module, starts: str, ends: str) -> str:
        """Switch to the stream on which a module issues its work, and return the stream to come back to. A
        side stream waits for the compute stream at the module of side `starts`, and the compute stream for it
        at the module of side `ends`.
        """
        previous_stream = self.stream
        if module.side_stream == ends:
            self.builder.wait_stream(previous_stream, SHARED_EXPERTS_STREAM)
        if module.side_stream in SIDE_STREAM_MARKS:
            if module.side_stream == starts:
                self.builder.wait_stream(SHARED_EXPERTS_STREAM, previous_stream)
            self.stream = SHARED_EXPERTS_STREAM
        return previous_stream

    def _add_dtensor_overhead(self, call: ModuleCall, suffix: str = "") -> None:
        """Count what DTensor costs the host around a module that torch's tensor parallelism has cut. Blocks
        that are compiled have no DTensors left when they run.
        """
        is_compiled = self.compiles and call.segment not in ("before", "after")
        event = _dtensor_event(call.module)
        if event and not is_compiled:
            self.builder.host(f"{call.name} in DTensors", event + suffix, module=call.name)

    def forward(self) -> None:
        """Issue the forward of the micro-batch."""
        for _ in self._forward_segments(segments_to_walk(self.hooks, self.workload.segments)):
            pass

    def reference_forward(self) -> None:
        """Issue the forward of a frozen model on the micro-batch, which keeps nothing for a backward. See
        [Note: a reference's forward] of `zsim.specs.experiment.training.trained_model`.
        """
        builder, micro_batch, gathering = self.builder, self.micro_batch, self.hooks.reference
        builder.phase, builder.micro_batch = "reference", micro_batch
        hooks = gathering or self.hooks
        if gathering is not None:
            gathering.begin_forward(micro_batch)
        for segment in self.workload.segments:
            if gathering is not None:
                gathering.pre_forward(segment)
            builder.activations(segment.input_bytes, segment.name + REFERENCE, micro_batch)
            for call in segment.calls:
                size = call.work.saved_bytes + call.work.forward_extra_bytes
                hooks.pre_module(call)
                builder.activations(size, call.name + REFERENCE, micro_batch)
                work = call.work
                self._issue(
                    f"{call.name}{REFERENCE}", work.forward, call.name, work.forward_launches,
                    self._call_overhead(call),
                )  # fmt: skip
                builder.activations(-size, call.name + REFERENCE, micro_batch)
                hooks.post_module(call)
            builder.activations(-segment.input_bytes, segment.name + REFERENCE, micro_batch)
            if gathering is not None:
                gathering.post_forward(segment)
        if gathering is not None:
            gathering.end_forward()
            if gathering is not self.hooks:
                gathering.forget_forward()

    def forward_calls(self) -> Iterator[ModuleCall]:
        """Issue the forward of the micro-batch. It stops in front of each module with its call."""
        return self._forward_segments(self.workload.segments)

    def _forward_segments(self, segments: Iterable[Segment]) -> Iterator[ModuleCall]:
        hooks, builder = self.hooks, self.builder
        builder.phase, builder.micro_batch = "forward", self.micro_batch
        hooks.begin_forward(self.micro_batch)
        for segment in segments:
            hooks.pre_forward(segment)
            if not self.keeps_nothing:
                builder.activations(segment.input_bytes, segment.name + CHECKPOINT, self.micro_batch)
                hooks.checkpoints.enter(segment)
            for call in segment.calls:
                if self.logs is not None and call.module.role is Role.LOSS:
                    self.logs.replace_outputs(builder)
                keeps = not segment.is_checkpointed and call.name not in segment.unsaved_calls
                keeps = keeps and not self.keeps_nothing
                yield call
                self._forward_module(call, keeps=keeps)
            if not self.keeps_nothing:
                hooks.checkpoints.save(segment)
            hooks.post_forward(segment)
        reduce_amaxes(builder, self.workload.model, self.workload.training, is_backward=False)
        hooks.end_forward()

    def _forward_module(self, call: ModuleCall, *, keeps: bool) -> None:
        """Issue one module's forward. With `keeps` its saved activations stay allocated for backward."""
        builder, work, name, micro_batch = self.builder, call.work, call.name, self.micro_batch
        self.hooks.pre_module(call)
        tensors, outputs = work.tensors, work.kept_outputs
        saved, extra = work.saved_bytes, work.forward_extra_bytes
        if saved:
            builder.activations(saved, name, micro_batch, tensors.saved)
        if extra:
            builder.activations(extra, name, micro_batch, tensors.forward)
        if outputs and not self.keeps_nothing:
            builder.activations(sum(outputs), call.segment + CHECKPOINT, micro_batch, outputs)
        if call.module.host_waits or call.module.op_spec.host_waits:
            builder.host_wait(builder.record(COMPUTE) if self.input_event is None else self.input_event)
        if self.has_dtensors:
            self._add_dtensor_overhead(call)
        previous_stream = self._switch_stream(call.module, "begins", "joins")
        self._issue(name, work.forward, name, work.forward_launches, self._call_overhead(call))
        self.stream = previous_stream
        if extra:
            builder.activations(-extra, name, micro_batch)
        if saved and not keeps:
            builder.activations(-saved, name, micro_batch)
        self.hooks.post_module(call)

    def backward(self, *, is_last: bool, schedule_manages_sharding: bool) -> None:
        """Issue the backward of the micro-batch. `is_last` and `schedule_manages_sharding` are those of
        `Hooks.begin_backward`.
        """
        segments = segments_to_walk(self.hooks, self.workload.segments[::-1])
        for _ in self._backward_segments(
            self.backward_module,
            segments,
            is_last=is_last,
            schedule_manages_sharding=schedule_manages_sharding,
        ):
            pass
        if self.logs is not None:
            self.logs.end_micro_batch(self.builder)

    def backward_inputs(self, *, schedule_manages_sharding: bool) -> None:
        """Issue the backward as far as the stage's input needs it: a schedule's action I. The first stage has
        nothing to do (`backward_one_chunk` of torch 2.13 distributed/pipelining/stage.py)."""
        if not self.hooks.stage.is_first:
            segments = self.workload.segments[::-1]
            for _ in self._backward_segments(
                self.backward_input,
                segments,
                is_last=False,
                schedule_manages_sharding=schedule_manages_sharding,
            ):
                pass

    def backward_weights(self, *, is_last: bool, schedule_manages_sharding: bool) -> None:
        """Issue the gradients of weights that `backward_inputs` has left, which is a schedule's action W. On
        the first stage it is the whole backward.
        """
        if self.hooks.stage.is_first:
            self.backward(is_last=is_last, schedule_manages_sharding=schedule_manages_sharding)
            return
        hooks, builder = self.hooks, self.builder
        builder.phase, builder.micro_batch = "backward", self.micro_batch
        hooks.begin_backward(
            self.micro_batch, is_last=is_last, schedule_manages_sharding=schedule_manages_sharding
        )
        for segment in reversed(self.workload.segments):
            for call in segment.backward_calls:
                self.backward_weight(call)
        hooks.end_backward()
        if self.logs is not None:
            self.logs.end_micro_batch(builder)

    def backward_calls(
        self, issue_backward: Callable[[ModuleCall], None], *, is_last: bool, schedule_manages_sharding: bool
    ) -> Iterator[ModuleCall]:
        """Issue the backward of the micro-batch, each module's by `issue_backward`. It stops in front of each
        module.
        """
        segments = self.workload.segments[::-1]
        yield from self._backward_segments(
            issue_backward, segments, is_last=is_last, schedule_manages_sharding=schedule_manages_sharding
        )
        if self.logs is not None:
            self.logs.end_micro_batch(self.builder)

    def _backward_segments(
        self,
        issue_backward: Callable[[ModuleCall], None],
        segments: Iterable[Segment],
        *,
        is_last: bool,
        schedule_manages_sharding: bool,
    ) -> Iterator[ModuleCall]:
        """Recomputation and backward of `segments`, from the last to the first, module by module."""
        hooks, builder, workload, micro_batch = self.hooks, self.builder, self.workload, self.micro_batch
        builder.phase, builder.micro_batch = "backward", micro_batch
        hooks.begin_backward(
            self.micro_batch, is_last=is_last, schedule_manages_sharding=schedule_manages_sharding
        )
        head = _head(workload) if hooks.stage.is_last else None
        if hooks.stage.is_first and not hooks.stage.is_last:  # a tower's stream may be larger than a message
            extra_bytes = workload.residual_bytes - workload.message_bytes
            builder.activations(extra_bytes, RESIDUAL, micro_batch)
        for segment in segments:
            if not segment.has_backward:
                continue
            hooks.checkpoints.restore(segment)
            hooks.pre_backward(segment)
            for number, call in enumerate(segment.backward_calls):
                yield call
                if segment.is_checkpointed and number == segment.num_before_recomputation:
                    self._recompute(segment)
                self._rerun(segment.reruns_by_last_call.get(call.name, ()))
                issue_backward(call)
                if call is head:
                    builder.activations(workload.residual_bytes, RESIDUAL, micro_batch)
            builder.activations(-segment.freed_bytes, (segment.group or segment.name) + OUTPUT, micro_batch)
            builder.activations(-segment.checkpoint_bytes, segment.name + CHECKPOINT, micro_batch)
            hooks.checkpoints.drop(segment)
            hooks.post_backward(segment)
        if hooks.stage.is_first:
            builder.activations(-workload.residual_bytes, RESIDUAL, micro_batch)
        reduce_amaxes(builder, workload.model, workload.training, is_backward=True)
        hooks.end_backward()

    def _recompute(self, segment: Segment) -> None:
        """The forward of a checkpointed segment once more, as far as its backward needs it."""
        builder, micro_batch = self.builder, self.micro_batch
        builder.phase = "recompute"
        for call in segment.recomputed:
            self._forward_module(call, keeps=True)
        if segment.stops_at is not None:
            last = segment.stops_at
            self.hooks.pre_module(last)
            work = last.work
            builder.activations(work.saved_bytes, last.name, micro_batch, work.tensors.saved)
        builder.activations(segment.output_bytes, (segment.group or segment.name) + OUTPUT, micro_batch)
        builder.phase = "backward"

    def _rerun(self, calls: Sequence[ModuleCall]) -> None:
        """Run the forward of a part of a block once more, before the backward of its last module."""
        if not calls:
            return
        self.builder.phase = "recompute"
        for call in calls:
            self._forward_module(call, keeps=True)
        self.builder.phase = "backward"

    def backward_module(self, call: ModuleCall) -> None:
        """Issue a module's backward."""
        work = call.work
        if not call.module.has_backward:
            return
        self.hooks.pre_module(call)
        self._recompute_core(call)
        self.builder.activations(
            work.backward_extra_bytes, call.name, self.micro_batch, work.tensors.backward
        )
        if self.has_dtensors:
            self._add_dtensor_overhead(call, "_backward")
        previous_stream = self._switch_stream(call.module, "ends", "forks")
        launches = work.backward_launches
        self._wait_in_backward(call.module)
        self._issue(f"{call.name} backward", work.backward, call.name, launches, self._node_overhead(call))
        self.stream = previous_stream
        self.hooks.gradient_ready(call)
        self.builder.activations(
            -(work.backward_extra_bytes + work.saved_bytes + work.recomputed_bytes),
            call.name,
            self.micro_batch,
        )
        self.hooks.post_module(call)

    def _wait_in_backward(self, module: Module) -> None:
        if module.backward_waits:
            self.builder.host_wait(self.builder.record(COMPUTE))

    def _recompute_core(self, call: ModuleCall) -> None:
        """Run the core of attention again, or what makes a dropped input."""
        builder, work, name = self.builder, call.work, call.name
        if work.recompute is None:
            return
        builder.phase = "recompute"
        builder.activations(work.recomputed_bytes, name, self.micro_batch)
        launches = work.recompute_launches
        self._issue(f"{name} recompute", work.recompute, name, launches, self._call_overhead(call), events=0)
        builder.phase = "backward"

    def backward_input(self, call: ModuleCall) -> None:
        """Issue the gradient of a module's input. A product's input and its output's gradient stay for the
        weight's gradient.
        """
        builder, work, name, micro_batch = self.builder, call.work, call.name, self.micro_batch
        if not call.module.has_backward:
            return
        self.hooks.pre_module(call)
        self._recompute_core(call)
        builder.activations(work.backward_extra_bytes, name, micro_batch, work.tensors.backward)
        if self.has_dtensors:
            self._add_dtensor_overhead(call, "_backward")
        gradient_work = work.input_gradient
        self._wait_in_backward(call.module)
        self._issue(
            f"{name} backward input",
            gradient_work,
            name,
            launches_of(gradient_work),
            self._node_overhead(call),
        )
        freed_bytes = work.backward_extra_bytes + work.recomputed_bytes
        builder.activations(-(freed_bytes - _kept_for_weight(call)), name, micro_batch)
        if not work.weight_gradient:
            builder.activations(-work.saved_bytes, name, micro_batch)
        self.hooks.post_module(call)

    def backward_weight(self, call: ModuleCall) -> None:
        """Issue the gradient of a module's weight that `backward_input` has left."""
        work, name = call.work, call.name
        if work.weight_gradient:
            gradient_work = work.weight_gradient
            self._issue(
                f"{name} backward weight",
                gradient_work,
                name,
                launches_of(gradient_work),
                self._node_overhead(call),
            )
        self.hooks.gradient_ready(call)
        if work.weight_gradient:
            freed_bytes = work.saved_bytes + _kept_for_weight(call)
            self.builder.activations(-freed_bytes, name, self.micro_batch)


def _dtensor_event(module: Module) -> str:
    """The host's event of DTensor around a module. It is "" where there is none: attention and activations
    get local tensors, and a product's sum of outputs is counted with the product.
    """
    op_spec = module.op_spec
    if module.role in (Role.PRODUCT, Role.EMBEDDING):
        return "dtensor_product"
    if module.role is Role.NORM:
        return "dtensor_norm"
    is_input_exchange = (
        isinstance(op_spec, Exchange) and not op_spec.in_fp32 and op_spec.forward in ("all_gather", None)
    )
    return "dtensor_input" if is_input_exchange else ""


def _kept_for_weight(call: ModuleCall) -> int:
    """Bytes of the output's gradient of a product, which its weight's gradient needs too."""
    return call.work.tensors.backward[0] if call.work.weight_gradient else 0


def _head(workload: Workload) -> ModuleCall:
    """The LM head: the last product before the loss, or the last module. From its backward on, the gradient
    of the residual stream is allocated."""
    calls = workload.segments[-1].calls or workload.segments[-2].calls
    index = head_index(tuple(call.module for call in calls))
    return calls[-1 if index is None else index]


class _BlockStart(NamedTuple):
    """The state of the builder before a segment, with the numbers of ops and memory changes, and the position
    of the hooks.
    """

    segment: Segment
    state: tuple[object, ...]
    position: BlockPosition | None
    num_ops: int
    num_changes: int


def segments_to_walk(hooks: Hooks, segments: Sequence[Segment]) -> Iterator[Segment]:
    """The segments that must be walked, each before the next is taken from the iterator. All others are
    issued as copies, see [Note: a block as a copy].
    """
    builder, number = hooks.builder, 0
    last: _BlockStart | None = None
    while number < len(segments):
        segment, state, position = segments[number], builder.state(), None
        if last is not None and last.state == state and segment.kind == "block":
            position = hooks.block_position(segment)  # asked only where the builder's state has come back
        start = _BlockStart(segment, state, position, len(builder.ops), len(builder.memory))
        if last is not None and position is not None and last.position is not None:
            max_copies = (
                hooks.repeat_count(last.position, position) if last.position.state == position.state else 0
            )
            count = _num_repeats(last.segment, segments[number : number + max_copies])
            if count:
                _copy(builder, last, start, count)
                hooks.skip(last.position, position, count, count * (start.num_ops - last.num_ops))
                number, last = number + count, None
                continue
        last = start
        yield segment
        number += 1


def _num_repeats(segment: Segment, followers: Sequence[Segment]) -> int:
    """The number of `followers` that continue the sequence of `segment` and the first of them."""
    prefix, number = _list_and_index(segment.name)
    step = _list_and_index(followers[0].name)[1] - number if followers else 0
    for count, follower in enumerate(followers):
        if _list_and_index(follower.name) != (prefix, number + (count + 1) * step) or not _are_identical(
            segment, follower
        ):
            return count
    return len(followers)


def _list_and_index(name: str) -> tuple[str, int]:
    """The list of blocks, and the block's number in it: ("model.layers", 17)."""
    prefix, _, number = name.rpartition(".")
    return (prefix, int(number)) if number.isdigit() else (name, 0)


def _are_identical(first: Segment, second: Segment) -> bool:
    """Whether two blocks are of the same modules with the same work."""
    if first.reruns or second.reruns or first.group or second.group:
        return False
    return _outline(first) == _outline(second) and all(
        a.module is b.module and a.work is b.work
        for a, b in zip(_all_calls(first), _all_calls(second), strict=True)
    )


def _outline(segment: Segment) -> tuple[object, ...]:
    return (
        segment.kind,
        len(segment.calls),
        len(segment.recomputed),
        segment.is_checkpointed,
        segment.stops_at is None,
        segment.input_bytes,
        segment.output_bytes,
        segment.freed_bytes,
        segment.num_before_recomputation,
    )


def _all_calls(segment: Segment) -> tuple[ModuleCall, ...]:
    stop = () if segment.stops_at is None else (segment.stops_at,)
    return (*segment.calls, *segment.recomputed, *stop)


def _copy(builder: PlanBuilder, start: _BlockStart, end: _BlockStart, count: int) -> None:
    """Issue the ops and changes between `start` and `end` again, for the `count` blocks after it."""
    ops, changes = builder.ops[start.num_ops :], builder.memory[start.num_changes :]
    prefix, number = _list_and_index(start.segment.name)
    step, length, new_tuple = _list_and_index(end.segment.name)[1] - number, len(ops), tuple.__new__
    block = re.compile(rf"(?<![\w.]){re.escape(prefix)}\.(\d+)(?!\w)")
    names = {text for op in ops for text in (op.name, op.module)} | {change.owner for change in changes}
    split_names = [(name, *block.split(name, maxsplit=1)) for name in names]
    block_names = [
        (name, name_start, int(block_index), name_end)
        for name, name_start, *index_and_end in split_names
        if index_and_end
        for block_index, name_end in [index_and_end]
    ]
    new_name = {name: name for name in names}
    for repeat in range(1, count + 1):
        op_shift, index_shift = repeat * length, repeat * step
        new_name |= {
            name: f"{name_start}{prefix}.{block_index + index_shift}{name_end}"
            for name, name_start, block_index, name_end in block_names
        }
        builder.ops += [
            new_tuple(Op, (new_name[name], stream, work,
                           after and tuple([predecessor + op_shift for predecessor in after]),
                           waits and tuple([predecessor + op_shift for predecessor in waits]),
                           launches, overhead, phase,
                           new_name[module], events))
            for name, stream, work, after, waits, launches, overhead, phase, module, events in ops
        ]  # fmt: skip
        builder.memory += [
            new_tuple(MemoryChange, (op + op_shift, category, size, device,
                                     until + op_shift if until >= 0 else until, is_pinned, new_name[owner],
                                     tensors, stream, part, micro_batch))
            for op, category, size, device, until, is_pinned, owner, tensors, stream, part, micro_batch
            in changes
        ]  # fmt: skip
    builder.skip(count * length)
