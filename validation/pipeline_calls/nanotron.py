"""Nanotron's pipeline engines with its own blocks, state and autograd functions, on a model of one number."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from validation.pipeline_calls.stubs import real_modules

_PACKAGE = "nanotron.parallel.pipeline_parallel"
_NAMES = ("tensor_pointer", "state", "functional", "block", "context_manager", "engine")
_CASES = ((2, 1), (2, 4), (3, 2), (4, 3), (4, 8), (5, 6))


def version(root: Path) -> str:
    """The commit of the checkout, from its folder's name, as `git archive --prefix` or a download has it."""
    return root.resolve().name.removeprefix("nanotron-")


class _Messages:
    """Nanotron's P2P of one rank: sends and receives by number."""

    def __init__(self, log: list[str], rank: int, ranks: int) -> None:
        self.log, self.rank = log, rank
        self.pg = SimpleNamespace(rank=rank, size=lambda: ranks)
        self.done: Counter[str] = Counter()

    def _write(self, verb: str, *, forward: bool) -> int:
        kind = f"{verb.upper()}_{'F' if forward else 'B'}"
        number = self.done[kind]
        self.done[kind] += 1
        self.log.append(f"{verb} {self.rank}{kind}{number}")
        return number

    def send_tensors(self, tensors: list[torch.Tensor], to_rank: int) -> None:
        number = self._write("send", forward=to_rank > self.rank)
        assert len(tensors) == 1
        assert to_rank < self.rank or tensors[0].item() == number

    def recv_tensors(self, num_tensors: int, from_rank: int) -> list[torch.Tensor]:
        assert num_tensors == 1
        number = self._write("recv", forward=from_rank < self.rank)
        return [torch.tensor([float(number)], requires_grad=True)]


class _Compute(torch.autograd.Function):
    """Writes its forward and its backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, log: list[str], rank: int) -> torch.Tensor:
        ctx.log, ctx.name = log, f"{rank}B{int(tensor.item())}"
        log.append(f"{rank}F{int(tensor.item())}")
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.log.append(ctx.name)
        return gradients[0], None, None


class _Block(torch.nn.Module):
    def __init__(self, log: list[str], rank: int) -> None:
        super().__init__()
        self.log, self.rank = log, rank

    def forward(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        compute: Any = _Compute
        return {"tensor": compute.apply(tensor, self.log, self.rank)}


class _Model(torch.nn.Module):
    def __init__(self, blocks: list[Any]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, tensor: Any) -> Any:
        for block in self.blocks:
            tensor = block(tensor=tensor)["tensor"]
        return {"loss": tensor}


def recorded(root: Path) -> dict[str, list[str]]:
    """The log of every rank, its lines joined by ", ", by the name of the configuration."""
    found = real_modules(
        root / "src",
        [f"{_PACKAGE}.{name}" for name in _NAMES],
        {
            "distributed": MagicMock(get_rank=lambda group: group.rank),
            "ContextManagers": lambda _: contextlib.nullcontext(),
            "get_logger": logging.getLogger,
        },
    )
    modules = dict(zip(_NAMES, found, strict=True))
    engines = {"afab": "AllForwardAllBackwardPipelineEngine", "1f1b": "OneForwardOneBackwardPipelineEngine"}
    return {
        f"{name} p{ranks} m{count}": [
            _log(modules, getattr(modules["engine"], engine), rank, ranks, count) for rank in range(ranks)
        ]
        for name, engine in engines.items()
        for ranks, count in _CASES
    }


def _log(modules: dict[str, Any], engine: Any, rank: int, ranks: int, micro_batches: int) -> str:
    log: list[str] = []
    messages = _Messages(log, rank, ranks)
    blocks = []
    for home in range(ranks):
        block = modules["block"].PipelineBlock(
            messages, _Block, {"log": log, "rank": home}, {"tensor"}, {"tensor"}
        )
        block.build_and_set_rank(home)
        blocks.append(block)
    pointer = modules["tensor_pointer"].TensorPointer(group_rank=0)
    batch = [
        {"tensor": torch.tensor([float(number)], requires_grad=True) if rank == 0 else pointer}
        for number in range(micro_batches)
    ]
    engine().train_batch_iter(_Model(blocks), messages.pg, batch, micro_batches, None)
    return ", ".join(log)
