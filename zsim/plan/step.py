"""The walk through one training step that every framework shares.

Forward over the segments, backward in reverse, once per micro-batch; then the optimizer. What differs
between frameworks happens in the methods of its `Hooks`, which are called where PyTorch calls theirs.
"""

from __future__ import annotations

from zsim.cost.kernels.fused_head import head_place
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.workload.workload import ModuleCall, Segment, Workload
from zsim.specs.model.spec import Attention, Loss

RESIDUAL = "gradient of the residual stream"
CHECKPOINT, OUTPUT = " checkpoint", " output"  # after the name of their block


class Hooks:
    """What a framework does around the computation: nothing here, its own things in what overrides it.
    Every method may issue ops to `builder`; most frameworks need few of them."""

    def __init__(self, builder: PlanBuilder) -> None:
        self.builder = builder

    def begin_step(self) -> None: ...
    def begin_micro_batch(self, number: int, *, is_last: bool) -> None: ...
    def before_forward(self, segment: Segment) -> None: ...
    def after_forward(self, segment: Segment) -> None: ...
    def end_forward(self) -> None: ...
    def begin_backward(self) -> None: ...
    def before_backward(self, segment: Segment) -> None: ...
    def after_backward(self, segment: Segment) -> None: ...
    def before_module(self, call: ModuleCall) -> None: ...
    def after_module(self, call: ModuleCall) -> None: ...
    def gradient_ready(self, call: ModuleCall) -> None: ...
    def end_backward(self) -> None: ...
    def optimizer_step(self) -> None: ...


def walk_step(schedule: Hooks, workload: Workload, num_micro_batches: int) -> None:
    """Issue a whole step to `schedule.builder`."""
    builder = schedule.builder
    builder.phase = "forward"
    builder.host("begin step", overhead="step")
    schedule.begin_step()
    logs = workload.logs
    if logs is not None:
        logs.begin_step(builder)
    for number in range(num_micro_batches):
        builder.phase = "forward"
        schedule.begin_micro_batch(number, is_last=number == num_micro_batches - 1)
        _forward(schedule, workload)
        _backward(schedule, workload)
        if logs is not None:
            logs.end_micro_batch(builder)
    builder.phase = "optimizer"
    schedule.optimizer_step()
    if logs is not None:
        logs.end_step(builder)


def _forward(schedule: Hooks, workload: Workload) -> None:
    builder = schedule.builder
    for segment in workload.segments:
        schedule.before_forward(segment)
        builder.allocate("activations", segment.input_bytes, owner=segment.name + CHECKPOINT)
        for call in segment.calls:
            if workload.logs is not None and isinstance(call.module.work, Loss):
                workload.logs.replace_outputs(builder)
            _forward_module(schedule, call, keeps=not segment.is_checkpointed)
        schedule.after_forward(segment)
    schedule.end_forward()


def _forward_module(schedule: Hooks, call: ModuleCall, *, keeps: bool) -> None:
    """One module forward; what it saves for backward stays allocated when `keeps`."""
    builder, work = schedule.builder, call.work
    schedule.before_module(call)
    tensors, outputs = work.tensors, work.kept_outputs
    builder.allocate("activations", work.saved_bytes, owner=call.name, tensors=tensors.saved)
    builder.allocate("activations", work.forward_extra_bytes, owner=call.name, tensors=tensors.forward)
    builder.allocate("activations", sum(outputs), owner=call.segment + CHECKPOINT, tensors=outputs)
    if isinstance(call.module.work, Attention) and call.module.work.host_waits:
        builder.host_wait(builder.record(COMPUTE))
    builder.add(
        call.name,
        "compute",
        work.forward,
        launches=work.forward_launches,
        overhead="module_call",
        module=call.name,
    )
    builder.free("activations", work.forward_extra_bytes, owner=call.name)
    if not keeps:
        builder.free("activations", work.saved_bytes, owner=call.name)
    schedule.after_module(call)


def _backward(schedule: Hooks, workload: Workload) -> None:
    builder = schedule.builder
    builder.phase = "backward"
    schedule.begin_backward()
    head = _head(workload)
    for segment in reversed(workload.segments):
        schedule.before_backward(segment)
        if segment.is_checkpointed:
            builder.phase = "recompute"
            for call in segment.recomputed:
                _forward_module(schedule, call, keeps=True)
            if segment.stops_at is not None:
                last = segment.stops_at
                schedule.before_module(last)
                saved = last.work.tensors.saved
                builder.allocate("activations", sum(saved), owner=last.name, tensors=saved)
            builder.allocate("activations", segment.output_bytes, owner=segment.name + OUTPUT)
            builder.phase = "backward"
        for call in reversed(segment.calls):
            _backward_module(schedule, call)
            if call is head:
                builder.allocate("activations", workload.residual_bytes, owner=RESIDUAL)
        builder.free("activations", segment.output_bytes, owner=segment.name + OUTPUT)
        builder.free("activations", segment.checkpoint_bytes, owner=segment.name + CHECKPOINT)
        schedule.after_backward(segment)
    builder.free("activations", workload.residual_bytes, owner=RESIDUAL)
    schedule.end_backward()


def _head(workload: Workload) -> ModuleCall:
    """After its backward there is a gradient of the residual stream; what it and the loss need is their own.
    The product before the loss, or what comes last where there is none."""
    calls = workload.segments[-1].calls or workload.segments[-2].calls
    place = head_place(tuple(call.module for call in calls))
    return calls[-1 if place is None else place]


def _backward_module(schedule: Hooks, call: ModuleCall) -> None:
    builder, work = schedule.builder, call.work
    schedule.before_module(call)
    if work.recompute is not None:  # selective checkpointing
        builder.phase = "recompute"
        builder.allocate("activations", work.recomputed_bytes, owner=call.name)
        builder.add(
            f"{call.name} recompute",
            "compute",
            work.recompute,
            launches=work.recompute_launches,
            module=call.name,
        )
        builder.phase = "backward"
    tensors = work.tensors.backward
    builder.allocate("activations", work.backward_extra_bytes, owner=call.name, tensors=tensors)
    builder.add(
        f"{call.name} backward",
        "compute",
        work.backward,
        launches=work.backward_launches,
        overhead="autograd_node",
        module=call.name,
    )
    schedule.gradient_ready(call)
    held = work.backward_extra_bytes + work.saved_bytes + work.recomputed_bytes
    builder.free("activations", held, owner=call.name)
    schedule.after_module(call)
