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


def sharded_moments(state: BetweenSteps, gathered: int, option: str, source: str) -> Iterator[JobMoment]:
    """Moments of FSDP, which gathers `gathered` parameters at a time for a full state dict. `option` is the
    option that asks for one.
    """
    numel, element_bytes = state.job.model.numel, state.stored_bytes
    yield from evaluation(state)
    yield loading(
        state, f"{EVERY_RANK}; with fsdp_cpu_ram_efficient_loading one rank of a node does", PRETRAINED,
        state.local_ranks,
    )  # fmt: skip
    yield JobMoment(
        GATHERED_SAVE, state.gpu_bytes + element_bytes * gathered, state.host_bytes + element_bytes * numel,
        f"{option}, offloaded to the host of rank 0: all weights there, besides them the optimizer's states "
        "where they are asked for",
        source, False,
    )  # fmt: skip
    yield JobMoment(
        UNOFFLOADED_SAVE, state.gpu_bytes + element_bytes * numel, None,
        f"{option} without offloading it to the host: every GPU holds all weights", source, False,
    )  # fmt: skip
    if state.num_states is None:
        return
    yield JobMoment(
        RESUMING, None, state.host_bytes + (1 + state.num_states) * element_bytes * numel,
        "from a whole state dict: rank 0 reads all weights and states into host memory; sharded ones are "
        "read in place",
        source, False,
    )  # fmt: skip


def replicated_moments(state: BetweenSteps) -> Iterator[JobMoment]:
    """Moments of DDP: every rank reads everything."""
    numel, element_bytes = state.job.model.numel, state.stored_bytes
    yield from evaluation(state)
    yield loading(state, EVERY_RANK, PRETRAINED, state.local_ranks)
    if state.num_states is None:
        return
    yield JobMoment(
        RESUMING, None, state.host_bytes + state.local_ranks * (1 + state.num_states) * element_bytes * numel,
        "every rank reads all weights and states into host memory (torch.load to the CPU)",
        "torch 2.13 serialization.py `load`", False,
    )  # fmt: skip
