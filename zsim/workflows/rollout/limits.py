"""The bounds of an engine's batches, of which the cache is what a GPU's memory leaves."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from zsim.cost.inference.layers import ServedModel
from zsim.errors import InputError
from zsim.specs.cluster.gpu import Gpu
from zsim.units import format_bytes

BLOCK_TOKENS = 16  # of a page of the cache, vLLM's default on GPUs
ENGINE_OVERHEAD = 3 * 2**30
"""Bytes of an engine besides weights, caches and activations: CUDA's context, NCCL and captured graphs."""
BUDGET_OVERHEAD = 150_000_000
"""Bytes of an engine's part of the memory that neither weights, activations nor the cache have: NCCL's, as
vLLM finds them when it profiles itself, 0.14 GiB of an engine on 8 GPUs (verl-recipe 48ea0a79, the recipe of
quantized training). Graphs are captured afterwards, beyond that part."""
_MOST_UTILIZATION = 0.95  # of a GPU's memory: CUDA's contexts of other processes need the rest


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The bounds of a replica's batches."""

    max_num_seqs: int
    """Sequences that run at once."""
    max_num_batched_tokens: int
    """Tokens of an iteration."""
    cache_blocks: int
    """Blocks of `BLOCK_TOKENS` tokens."""
    prefix_caching: bool = True
    reserves_responses: bool = False
    """A request starts only when all blocks of its answer are free, so that none is ever preempted."""
    shares_at_once: bool = True
    """Requests of one iteration share a prompt, see [Note: shared prompts] of `replica`."""
    has_static_batches: bool = False
    """Requests start only when all that ran before have ended."""


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


def static_limits(sequences: int, sequence_length: int) -> EngineLimits:
    """The bounds of batches of `sequences` that start together, with room for the longest of each in the
    cache (DeepSpeed edaa7221 csrc/transformer/inference/includes/inference_context.h `GenWorkSpace`)."""
    blocks = sequences * blocks_for(sequence_length)
    return EngineLimits(sequences, sequences * sequence_length, blocks, False, has_static_batches=True)


def engine_limits(
    model: ServedModel,
    gpu: Gpu,
    utilization: float,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    prefix_caching: bool = True,
    reserves_responses: bool = False,
    shares_at_once: bool = True,
    overhead_bytes: int = BUDGET_OVERHEAD,
) -> EngineLimits:
    """The bounds of a replica, whose cache has what weights and activations leave of `utilization` of each
    GPU's memory. Groups of ranks with sequences of their own each have a cache, and the bounds, for them.

    Raises InputError where nothing is left.
    """
    activation_bytes = (
        4 * max_num_batched_tokens * model.hidden_size * 2
        + max_num_batched_tokens * max(product.out_features for product in model.products) * 2
    )
    room = utilization * gpu.memory.capacity - model.weight_bytes - activation_bytes - overhead_bytes
    block_bytes = model.cache_bytes_per_token * BLOCK_TOKENS
    blocks = int(room // block_bytes)
    if blocks < 1:
        needed = utilization * gpu.memory.capacity - room + block_bytes
        raise InputError(
            f"rl.rollout: the weights of a replica take {format_bytes(model.weight_bytes)} of each GPU, and "
            f"gpu_memory_utilization {utilization:g} leaves no room for a cache; expected "
            f"{_remedies(needed / gpu.memory.capacity)}"
        )
    groups = model.layout.data
    return EngineLimits(
        groups * max_num_seqs,
        groups * max_num_batched_tokens,
        groups * blocks,
        prefix_caching,
        reserves_responses,
        shares_at_once,
    )


def _remedies(share: float) -> str:
    """The changes that can help where an engine needs `share` of its GPU's memory."""
    words = "more GPUs to a replica (rl.rollout.tensor)"
    least = ceil(100 * share) / 100
    if least > _MOST_UTILIZATION:
        return words
    return f"{words} or a gpu_memory_utilization of at least {least:g}"
