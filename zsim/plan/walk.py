"""Forward and backward of a micro-batch through a stage's segments, the same for every framework.

The differences between frameworks are in their `Hooks`, which are called where PyTorch calls its hooks.
Activations are held per micro-batch: several micro-batches may be between their forward and their backward.
"""

from __future__ import annotations

from zsim.cost.kernels.fused_head import head_place
from zsim.plan.builder import COMPUTE
from zsim.plan.hooks import Hooks
from zsim.plan.workload.workload import ModuleCall, Workload
from zsim.specs.model.spec import Attention, Loss

RESIDUAL = "gradient of the residual stream"
CHECKPOINT, OUTPUT = " checkpoint", " output"  # suffixes of the block's name


class Walk:
    """Issues forward and backward of one micro-batch through the stage of `hooks`."""

    def __init__(self, hooks: Hooks, micro_batch: int) -> None:
        self.hooks, self.micro_batch = hooks, micro_batch
        self.builder, self.workload = hooks.builder, hooks.stage.workload
        self.logs = self.workload.logs

    def forward(self) -> None:
        """Issue the forward of the micro-batch."""
        hooks, builder = self.hooks, self.builder
        builder.phase, builder.micro_batch = "forward", self.micro_batch
        hooks.begin_forward(self.micro_batch)
        for segment in self.workload.segments:
            hooks.before_forward(segment)
            builder.activations(segment.input_bytes, segment.name + CHECKPOINT, self.micro_batch)
            for call in segment.calls:
                if self.logs is not None and isinstance(call.module.work, Loss):
                    self.logs.replace_outputs(builder)
                self._forward_module(call, keeps=not segment.is_checkpointed)
            hooks.after_forward(segment)
        hooks.end_forward()

    def _forward_module(self, call: ModuleCall, *, keeps: bool) -> None:
        """Issue one module's forward; `keeps`: its saved activations stay allocated for backward."""
        builder, work, name, micro_batch = self.builder, call.work, call.name, self.micro_batch
        self.hooks.before_module(call)
        tensors, outputs = work.tensors, work.kept_outputs
        saved, extra = work.saved_bytes, work.forward_extra_bytes
        if saved:
            builder.activations(saved, name, micro_batch, tensors.saved)
        if extra:
            builder.activations(extra, name, micro_batch, tensors.forward)
        if outputs:
            builder.activations(sum(outputs), call.segment + CHECKPOINT, micro_batch, outputs)
        if isinstance(call.module.work, Attention) and call.module.work.host_waits:
            builder.host_wait(builder.record(COMPUTE))
        launches = work.forward_launches
        builder.add(name, COMPUTE, work.forward, launches=launches, overhead="module_call", module=name)
        if extra:
            builder.activations(-extra, name, micro_batch)
        if saved and not keeps:
            builder.activations(-saved, name, micro_batch)
        self.hooks.after_module(call)

    def backward(self, *, is_last: bool, is_told: bool) -> None:
        """Issue the backward of the micro-batch; `is_last` and `is_told` as in `Hooks.begin_backward`."""
        hooks, builder, workload, micro_batch = self.hooks, self.builder, self.workload, self.micro_batch
        builder.phase, builder.micro_batch = "backward", micro_batch
        hooks.begin_backward(self.micro_batch, is_last=is_last, is_told=is_told)
        head = _head(workload)
        for segment in reversed(workload.segments):
            hooks.before_backward(segment)
            if segment.is_checkpointed:
                builder.phase = "recompute"
                for call in segment.recomputed:
                    self._forward_module(call, keeps=True)
                if segment.stops_at is not None:
                    last = segment.stops_at
                    hooks.before_module(last)
                    work = last.work
                    builder.activations(work.saved_bytes, last.name, micro_batch, work.tensors.saved)
                builder.activations(segment.output_bytes, segment.name + OUTPUT, micro_batch)
                builder.phase = "backward"
            for call in reversed(segment.calls):
                self._backward_module(call)
                if call is head:
                    builder.activations(workload.residual_bytes, RESIDUAL, micro_batch)
            builder.activations(-segment.output_bytes, segment.name + OUTPUT, micro_batch)
            builder.activations(-segment.checkpoint_bytes, segment.name + CHECKPOINT, micro_batch)
            hooks.after_backward(segment)
        builder.activations(-workload.residual_bytes, RESIDUAL, micro_batch)
        hooks.end_backward()
        if self.logs is not None:
            self.logs.end_micro_batch(builder)

    def _backward_module(self, call: ModuleCall) -> None:
        builder, work, name, micro_batch = self.builder, call.work, call.name, self.micro_batch
        self.hooks.before_module(call)
        if work.recompute is not None:  # selective checkpointing
            builder.phase = "recompute"
            builder.activations(work.recomputed_bytes, name, micro_batch)
            launches = work.recompute_launches
            builder.add(f"{name} recompute", COMPUTE, work.recompute, launches=launches, module=name)
            builder.phase = "backward"
        builder.activations(work.backward_extra_bytes, name, micro_batch, work.tensors.backward)
        launches, done = work.backward_launches, f"{name} backward"
        builder.add(done, COMPUTE, work.backward, launches=launches, overhead="autograd_node", module=name)
        self.hooks.gradient_ready(call)
        builder.activations(
            -(work.backward_extra_bytes + work.saved_bytes + work.recomputed_bytes), name, micro_batch
        )
        self.hooks.after_module(call)


def _head(workload: Workload) -> ModuleCall:
    """The LM head: the last product before the loss, or the last module. From its backward on, the gradient
    of the residual stream is allocated."""
    calls = workload.segments[-1].calls or workload.segments[-2].calls
    place = head_place(tuple(call.module for call in calls))
    return calls[-1 if place is None else place]
