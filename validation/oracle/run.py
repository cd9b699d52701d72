"""Run one step of the real FSDP2 on fake tensors and record what it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from validation.collective_log import CollectiveLog
from validation.llama import Llama, find_shape
from validation.oracle.answer import Answer
from validation.oracle.case import Case
from validation.oracle.memory import CategoryTracker, by_name
from validation.oracle.sharding import make_mesh, shard_case
from validation.oracle.shortcuts import fsdp_shortcuts


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a process group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ask(case: Case) -> Answer:
    """The oracle's answer to a case. One process can ask any number of questions, one after the other."""
    with fake_world(case.world_size):
        mesh = make_mesh(case.world_size, case.replicate)
        with FakeTensorMode():
            model = Llama(
                find_shape(case.model),
                checkpointing=case.activation_checkpointing == "full",
                code=case.code,
            )
            count = sum(parameter.numel() for parameter in model.parameters())
            with fsdp_shortcuts():
                shard_case(model, mesh, case)
            optimizer = ShardOptimizer(model, case.optimizer)
            tracker = CategoryTracker(model, optimizer.adamw)
            with tracker, CollectiveLog() as log:
                run_step(case, model, optimizer, tracker)
            return Answer(
                case=case,
                parameters=count,
                calls=tuple(log.calls),
                peak_bytes=tracker.own_peaks,
                at_peak=by_name(tracker.get_tracker_snapshot("peak")),
                tracker_peaks={name: size for name, size in tracker.tracker_peaks.items() if size},
                between_steps=by_name(tracker.get_tracker_snapshot("current")),
            )


def run_step(case: Case, model: Llama, optimizer: ShardOptimizer, tracker: CategoryTracker) -> None:
    """One optimizer step; gradients are reduced in each micro-batch, as FSDP2 does unless told otherwise."""
    for _ in range(case.gradient_accumulation_steps):
        tokens = torch.zeros(case.micro_batch_size, case.sequence_length, dtype=torch.int64)
        labels = torch.zeros_like(tokens)
        tracker.track_inputs((tokens, labels))
        model(tokens, labels).loss.backward()  # the logits are dropped, as in transformers' Trainer
    if case.gradient_clipping:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.gradient_clipping)
        if isinstance(norm, DTensor):
            norm.full_tensor()
    optimizer.step()
    optimizer.zero_grad()


class ShardOptimizer:
    """AdamW on this rank's shards, with states allocated in advance, as in any step but the first.

    # [Note: AdamW without DTensor]
    Given FSDP2's DTensors, AdamW under FakeTensorMode makes fake *full* tensors to work out layouts, and the
    tracker counts tens of gigabytes that no run ever holds. AdamW is elementwise, so it runs here on the
    local shards themselves: the same kernels on the same bytes.
    """

    def __init__(self, model: torch.nn.Module, kind: str) -> None:
        self.pairs = [(p, torch.nn.Parameter(local_of(p))) for p in model.parameters()]
        self.adamw = torch.optim.AdamW(
            [local for _, local in self.pairs], lr=1e-4, fused=kind == "fused", foreach=kind == "foreach"
        )
        for _, local in self.pairs:
            local.grad = torch.zeros_like(local)
        self.adamw.step()
        self.zero_grad()

    def step(self) -> None:
        for parameter, local in self.pairs:
            local.grad = local_of(parameter.grad) if parameter.grad is not None else None
        self.adamw.step()

    def zero_grad(self) -> None:
        for parameter, local in self.pairs:
            parameter.grad = local.grad = None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
