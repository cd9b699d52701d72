"""The questions whose answers are recorded in `traces/oracle`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from validation.oracle.case import Case, Checkpointing

MODELS = ("llama-3-8b", "llama-3-70b")
WORLD_SIZES = (8, 64, 1024)
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "full")


def recorded_cases() -> Iterator[Case]:
    """Both models at 8, 64 and 1,024 ranks, with and without checkpointing; then other implementations and
    other wrappings.

    On 8 ranks, resharding to 8 is resharding to all, so 8 ranks reshard to 4, and HSDP has 2 groups of 4;
    elsewhere HSDP shards over the 8 GPUs of a node.
    """
    for model, world, checkpointing in product(MODELS, WORLD_SIZES, CHECKPOINTING):
        for reshard in (True, False, 8 if world > 8 else 4):
            yield Case(model, world, reshard, activation_checkpointing=checkpointing)
        replicate = world // 8 if world > 8 else 2
        yield Case(model, world, replicate=replicate, activation_checkpointing=checkpointing)
    for checkpointing in CHECKPOINTING:
        yield Case("llama-3-8b", 64, code="torchtitan", activation_checkpointing=checkpointing)
    yield Case("llama-3-8b", 64, wrapping="torchtitan")
    yield Case("llama-3-8b", 64, wrapping="huggingface")
    yield Case("llama-3-8b", 64, wrapping="none")
    for checkpointing in CHECKPOINTING:
        yield Case("llama-3-8b", 64, wrapping="blocks:4", activation_checkpointing=checkpointing)
    yield Case("llama-3.2-1b", 64, wrapping="torchtitan")
    yield Case("llama-2-7b", 64, sequence_length=2048)
    yield Case("llama-3-8b", 64, gradient_accumulation_steps=2)
    yield Case("llama-3-8b", 64, gradient_clipping=1.0)
