"""torch's context parallelism on a fake group: what one rank issues for an attention, in order.

Run as a script; prints JSON: by rotate method, ranks, rank and direction a list of ["forward" or "backward",
query tokens, key tokens] for the fused kernel, [kind, bytes] for collectives, and ["wait"]. The kernels are
stand-ins that make tensors of the right shapes: torch's CPU kernels are no context-parallel operators.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention, _cp_custom_ops
from torch.distributed.tensor.experimental._context_parallel._attention import _RotateMethod
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

SEQUENCES, HEADS, TOKENS, HEAD_DIM = 2, 4, 64, 8
METHODS = {"all-gather": _RotateMethod.ALL_GATHER, "p2p": _RotateMethod.ALL_TO_ALL}
CASES = ((2, 0), (2, 1), (4, 0), (4, 2), (4, 3), (8, 4))
Event = list[str | int]


class Events(TorchDispatchMode):
    """Collectives and waits in order; an all-gather's size is its output's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Event] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "cplib":  # a custom operator, whose own calls no mode would see
            with self:
                return getattr(_cp_custom_ops, func._opname)._init_fn(*args)
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            kinds = {"all_gather_into_tensor": "all_gather", "all_to_all_single": "all_to_all"}
            if func._opname == "reduce_scatter_tensor":
                self.found.append(["reduce_scatter", args[0].numel() * args[0].element_size()])
            elif func._opname in kinds:
                self.found.append([kinds[func._opname], result.numel() * result.element_size()])
            elif func._opname == "wait_tensor":
                self.found.append(["wait"])
            elif func._opname != "_wrap_tensor_autograd":
                raise NotImplementedError(func)
        return result


def run(ranks: int, rank: int) -> dict[str, list[Event]]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    shape = (SEQUENCES, HEADS, TOKENS // ranks, HEAD_DIM)
    q, k, v, dout = (torch.ones(shape, dtype=torch.bfloat16) for _ in range(4))
    log = Events()

    def forward(query: Tensor, key: Tensor, value: Tensor, **options: object) -> tuple[Tensor, ...]:
        log.found.append(["forward", query.shape[2], key.shape[2]])
        return torch.zeros_like(query), torch.zeros(query.shape[:3])

    def backward(query: Tensor, key: Tensor, value: Tensor, **options: object) -> tuple[Tensor, ...]:
        log.found.append(["backward", query.shape[2], key.shape[2]])
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    found, group = {}, dist.group.WORLD
    assert group is not None
    with log:
        out, logsumexp = _attention._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)
        found["forward"] = log.found
        log.found = []
        _attention._templated_ring_attention_backward(
            group, 2, backward, dout, "dout", q, k, v, out, logsumexp, is_causal=True
        )
        found["backward"] = log.found
    dist.destroy_process_group()
    return found


def run_flex(ranks: int, rank: int) -> dict[str, list[Event]]:
    """`_ContextParallel` around an attention that makes tensors of the right shapes."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    shape = (SEQUENCES, HEADS, TOKENS // ranks, HEAD_DIM)
    q, k, v = (torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    plan = _attention._ContextParallel(2, _attention._ContextParallel.AttentionType.FLEX)
    log, found = Events(), {}
    with log:
        mesh = init_device_mesh("cpu", (ranks,))
        module = plan._apply(Flex(log), mesh)
        log.found.clear()
        out = module(q, k, v)
        found["forward"] = list(log.found)
        log.found.clear()
        out.sum().backward()
        found["backward"] = list(log.found)
    dist.destroy_process_group()
    return found


class _FlexCore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log: Events, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.log = log
        ctx.save_for_backward(q, k, v)
        log.found.append(["forward", q.shape[2]])
        return torch.zeros_like(q)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        ctx.log.found.append(["backward", q.shape[2]])
        return None, torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


class Flex(torch.nn.Module):
    def __init__(self, log: Events) -> None:
        super().__init__()
        self.log = log

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return _FlexCore.apply(self.log, q, k, v)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    answer: dict[str, Any] = {"flex": [[ranks, rank, run_flex(ranks, rank)] for ranks, rank in CASES]}
    for method, rotate in METHODS.items():
        _attention._cp_options.rotate_method = rotate
        answer[method] = [[ranks, rank, run(ranks, rank)] for ranks, rank in CASES]
    print(json.dumps(answer))
