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
            self._allocate(segment.input_bytes, segment.name + CHECKPOINT)
            for call in segment.calls:
                if self.logs is not None and isinstance(call.module.work, Loss):
                    self.logs.replace_outputs(builder)
                self._forward_module(call, keeps=not segment.is_checkpointed)
            hooks.after_forward(segment)
        hooks.end_forward()

    def _forward_module(self, call: ModuleCall, *, keeps: bool) -> None:
        """Issue one module's forward; `keeps`: its saved activations stay allocated for backward."""
        builder, work = self.builder, call.work
        self.hooks.before_module(call)
        tensors, outputs = work.tensors, work.kept_outputs
        self._allocate(work.saved_bytes, call.name, tensors.saved)
        self._allocate(work.forward_extra_bytes, call.name, tensors.forward)
        self._allocate(sum(outputs), call.segment + CHECKPOINT, outputs)
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
        self._free(work.forward_extra_bytes, call.name)
        if not keeps:
            self._free(work.saved_bytes, call.name)
        self.hooks.after_module(call)

    def backward(self, *, is_last: bool, is_told: bool) -> None:
        """Issue the backward of the micro-batch; `is_last` and `is_told` as in `Hooks.begin_backward`."""
        hooks, builder, workload = self.hooks, self.builder, self.workload
        builder.phase, builder.micro_batch = "backward", self.micro_batch
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
                    saved = last.work.tensors.saved
                    self._allocate(sum(saved), last.name, saved)
                self._allocate(segment.output_bytes, segment.name + OUTPUT)
                builder.phase = "backward"
            for call in reversed(segment.calls):
                self._backward_module(call)
                if call is head:
                    self._allocate(workload.residual_bytes, RESIDUAL)
            self._free(segment.output_bytes, segment.name + OUTPUT)
            self._free(segment.checkpoint_bytes, segment.name + CHECKPOINT)
            hooks.after_backward(segment)
        self._free(workload.residual_bytes, RESIDUAL)
        hooks.end_backward()
        if self.logs is not None:
            self.logs.end_micro_batch(builder)

    def _backward_module(self, call: ModuleCall) -> None:
        builder, work = self.builder, call.work
        self.hooks.before_module(call)
        if work.recompute is not None:  # selective checkpointing
            builder.phase = "recompute"
            self._allocate(work.recomputed_bytes, call.name)
            builder.add(
                f"{call.name} recompute",
                "compute",
                work.recompute,
                launches=work.recompute_launches,
                module=call.name,
            )
            builder.phase = "backward"
        self._allocate(work.backward_extra_bytes, call.name, work.tensors.backward)
        builder.add(
            f"{call.name} backward",
            "compute",
            work.backward,
            launches=work.backward_launches,
            overhead="autograd_node",
            module=call.name,
        )
        self.hooks.gradient_ready(call)
        self._free(work.backward_extra_bytes + work.saved_bytes + work.recomputed_bytes, call.name)
        self.hooks.after_module(call)

    def _allocate(self, size: int, owner: str, tensors: tuple[int, ...] = ()) -> None:
        if size:
            self.builder.allocate(
                "activations", size, owner=owner, tensors=tensors, micro_batch=self.micro_batch
            )

    def _free(self, size: int, owner: str) -> None:
        if size:
            self.builder.free("activations", size, owner=owner, micro_batch=self.micro_batch)


def _head(workload: Workload) -> ModuleCall:
    """The LM head: the last product before the loss, or the last module. From its backward on, the gradient
    of the residual stream is allocated."""
    calls = workload.segments[-1].calls or workload.segments[-2].calls
    place = head_place(tuple(call.module for call in calls))
    return calls[-1 if place is None else place]
