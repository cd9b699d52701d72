"""Full state dicts of torch's sharded frameworks, and of models that every rank holds completely."""

from __future__ import annotations

from collections.abc import Iterator

from zsim.plan.moments import (
    EVERY_RANK,
    GATHERED_SAVE,
    PRETRAINED,
    RESUMING,
    UNOFFLOADED_SAVE,
    BetweenSteps,
    JobMoment,
    evaluation,
    loading,
)


def sharded_moments(held: BetweenSteps, gathered: int, how: str, source: str) -> Iterator[JobMoment]:
    """Moments of FSDP, which gathers `gathered` parameters at a time for a full state dict. `option` is the
    option that asks for one.
    """
    numel, each = held.job.model.numel, held.stored_bytes
    yield from evaluation(held)
    yield loading(
        held, f"{EVERY_RANK}; with fsdp_cpu_ram_efficient_loading one rank of a node does", PRETRAINED,
        held.local_ranks,
    )  # fmt: skip
    yield JobMoment(
        GATHERED_SAVE, held.gpu_bytes + each * gathered, held.host_bytes + each * numel,
        f"{how}, offloaded to the host of rank 0: all weights there, besides them the optimizer's states "
        "where they are asked for",
        source, False,
    )  # fmt: skip
    yield JobMoment(
        UNOFFLOADED_SAVE, held.gpu_bytes + each * numel, None,
        f"{how} without offloading it to the host: every GPU holds all weights", source, False,
    )  # fmt: skip
    if held.num_states is None:
        return
    yield JobMoment(
        RESUMING, None, held.host_bytes + (1 + held.num_states) * each * numel,
        "from a whole state dict: rank 0 reads all weights and states into host memory; sharded ones are "
        "read in place",
        source, False,
    )  # fmt: skip


def replicated_moments(held: BetweenSteps) -> Iterator[JobMoment]:
    """Moments of DDP: every rank reads everything."""
    numel, each = held.job.model.numel, held.stored_bytes
    yield from evaluation(held)
    yield loading(held, EVERY_RANK, PRETRAINED, held.local_ranks)
    if held.num_states is None:
        return
    yield JobMoment(
        RESUMING, None, held.host_bytes + held.local_ranks * (1 + held.num_states) * each * numel,
        "every rank reads all weights and states into host memory (torch.load to the CPU)",
        "torch 2.13 serialization.py `load`", False,
    )  # fmt: skip
