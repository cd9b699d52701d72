"""Every collective that a piece of torch code issues, in order, with its full size.

`CollectiveLog` is a dispatch mode, so it sees calls by any framework and on any backend, the fake one
included. Sizes are zsim's: an all-gather's output, a reduce-scatter's or all-to-all's input, an
all-reduce's or broadcast's buffer. FSDP2 announces what it does in profiler ranges ("FSDP::all_gather
(layers.3)"); the log takes the unit's name from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work, _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from validation.tracing import SILENT, Tracer, now
from zsim.comparison.plan_check import Call

DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.uint8: "uint8",
    torch.bool: "bool",
}


# Operator -> (kind, index of the argument that holds the full tensor, index of the group)
_C10D = {
    "_allgather_base_": ("all_gather", 0, 2),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "allreduce_": ("all_reduce", 0, 1),
    "broadcast_": ("broadcast", 0, 1),
    "reduce_": ("reduce", 0, 1),
    "alltoall_base_": ("all_to_all", 1, 2),
    "allgather_": ("all_gather", 0, 2),
    "reduce_scatter_": ("reduce_scatter", 1, 2),
    "alltoall_": ("all_to_all", 1, 2),
    "send": ("send", 0, 1),
    "recv_": ("recv", 0, 1),
}
# Functional collectives (used by DTensor) name their group by a string; the full tensor is input or result.
_FUNCTIONAL = {
    "all_reduce": ("all_reduce", "input", 2),
    "all_reduce_": ("all_reduce", "input", 2),
    "all_gather_into_tensor": ("all_gather", "result", 2),
    "reduce_scatter_tensor": ("reduce_scatter", "input", 3),
    "broadcast": ("broadcast", "input", 2),
    "all_to_all_single": ("all_to_all", "input", 3),
}
_IGNORED = {"barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"}
_UNIT = re.compile(r"^FSDP::\w+ \((.*?)\)")


class CollectiveLog(TorchDispatchMode):
    """`with CollectiveLog() as log: step()`; then `log.calls`. Each call and its end also go to `tracer`."""

    def __init__(self, tracer: Tracer = SILENT) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.tracer = tracer
        self._unit = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor turn into local tensors and collectives first
        issued = now()  # gloo's calls block until they have ended
        result = func(*args, **(kwargs or {}))
        namespace, name = func.namespace, func._opname
        if namespace == "profiler" and name == "_record_function_enter_new":
            if args[0].startswith("FSDP::"):
                match = _UNIT.match(args[0])
                self._unit = match[1] if match else "root"
        elif namespace == "c10d" and name not in _IGNORED:
            if name not in _C10D:
                raise NotImplementedError(f"collective {func} is not in the log's table")
            kind, tensor_index, group_index = _C10D[name]
            work = result[-1] if isinstance(result, tuple | list) else result
            self._add(
                kind,
                args[tensor_index],
                dist.ProcessGroup.unbox(args[group_index]),
                issued,
                work,
                blocks(func, args),
            )
        elif namespace == "_c10d_functional" and name not in _IGNORED:
            if name not in _FUNCTIONAL:
                raise NotImplementedError(f"collective {func} is not in the log's table")
            kind, where, group_index = _FUNCTIONAL[name]
            group = _resolve_process_group(args[group_index])
            self._add(kind, args[0] if where == "input" else result, group, issued)
        return result

    def _add(
        self,
        kind: str,
        tensors: Any,
        group: dist.ProcessGroup,
        issued: int,
        work: Any = None,
        is_blocking: bool = False,
    ) -> None:
        flat = list(_tensors(tensors))
        ranks = dist.get_process_group_ranks(group)
        call = Call(
            kind=kind,
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in flat),
            dtype=DTYPE_NAMES[flat[0].dtype],
            group_size=len(ranks),
            group_stride=ranks[1] - ranks[0] if len(ranks) > 1 else 1,
            module=self._unit,
        )
        self.calls.append(call)
        if self.tracer.is_on:
            done = Work.unbox(work) if work is not None else None
            self.tracer.collective(call, issued).track(done, is_blocking=is_blocking)


def blocks(func: Any, args: Sequence[Any]) -> bool:
    """Whether the caller of a c10d operator waits for its end at once."""
    names = [argument.name for argument in func._schema.arguments]
    return "async_op" in names[: len(args)] and not args[names.index("async_op")]


def _tensors(tree: Any) -> Iterable[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)
