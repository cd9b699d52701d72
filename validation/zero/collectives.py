"""The few collectives that ZeRO needs, each counted and each timed.

# [Note: a true reduce-scatter] gloo's reduce_scatter is an all-reduce of everything that then discards most
of it: it sends 2 (N-1)/N of the tensor where (N-1)/N would do. An all-to-all sends each rank the N-1 other
ranks' copies of its piece, and their local sum is a reduce-scatter with exactly the bytes that the paper
counts. NCCL has a real one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from validation.collective_log import DTYPE_NAMES
from validation.tracing import SILENT, CollectiveSpan, Tracer
from zsim.comparison.plan_check import Call

# torch 2.13 renamed these; older versions have only the second names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


@dataclass
class Pending:
    """A collective under way. It keeps its tensors alive until `wait` returns."""

    work: Any
    span: CollectiveSpan
    tensors: tuple[Tensor, ...] = ()
    finish: Callable[[], None] | None = None
    is_done: bool = False

    def wait(self) -> None:
        """Block until the result is there; idempotent."""
        if self.is_done:
            return
        self.is_done = True
        self.span.waiting()
        if self.work is not None:
            self.work.wait()
        self.span.waited()
        if self.finish is not None:
            self.finish()
        self.span.finished()
        self.work, self.tensors, self.finish = None, (), None


@dataclass
class Collectives:
    """Collectives of one process group, with a log of the calls."""

    group: dist.ProcessGroup
    reduce_scatter_by: str | None = None
    tracer: Tracer = SILENT
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        ranks = dist.get_process_group_ranks(self.group)
        self.stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        if self.reduce_scatter_by is None:
            self.reduce_scatter_by = "all_to_all" if dist.get_backend(self.group) == "gloo" else "native"

    def all_gather(self, output: Tensor, shard: Tensor, unit: str) -> Pending:
        """`output` becomes the concatenation of all ranks' shards."""
        span = self._log("all_gather", output, unit)
        if self.world_size == 1:
            output.copy_(shard)
            return Pending(None, span)
        work = _all_gather(output, shard, group=self.group, async_op=True)
        return Pending(span.track(work), span, (output, shard))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, unit: str) -> Pending:
        """`output` becomes the sum over ranks of this rank's piece of `tensor`."""
        span = self._log("reduce_scatter", tensor, unit)
        if self.world_size == 1:
            output.copy_(tensor)
            return Pending(None, span)
        if self.reduce_scatter_by == "native":
            work = _reduce_scatter(output, tensor, group=self.group, async_op=True)
            return Pending(span.track(work), span, (output, tensor))
        received = torch.empty_like(tensor)  # [Note: a true reduce-scatter]
        work = dist.all_to_all_single(received, tensor, group=self.group, async_op=True)

        def add_up() -> None:
            torch.sum(received.view(self.world_size, -1), dim=0, out=output)

        return Pending(span.track(work), span, (output, tensor, received), add_up)

    def all_reduce(self, tensor: Tensor, unit: str, op: Any = dist.ReduceOp.SUM) -> Pending:
        """`tensor` becomes the sum over ranks."""
        span = self._log("all_reduce", tensor, unit)
        if self.world_size == 1:
            return Pending(None, span)
        work = dist.all_reduce(tensor, op=op, group=self.group, async_op=True)
        return Pending(span.track(work), span, (tensor,))

    def broadcast(self, tensor: Tensor, unit: str) -> None:
        """`tensor` becomes the first rank's tensor."""
        span = self._log("broadcast", tensor, unit)
        if self.world_size > 1:
            dist.broadcast(tensor, group_src=0, group=self.group)
        span.finished()

    def _log(self, kind: str, full: Tensor, unit: str) -> CollectiveSpan:
        size = full.numel() * full.element_size()
        call = Call(kind, size, DTYPE_NAMES[full.dtype], self.world_size, self.stride, module=unit)
        self.calls.append(call)
        return self.tracer.collective(call)
