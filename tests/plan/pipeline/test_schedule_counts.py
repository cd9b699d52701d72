"""Counts that a schedule refuses: one sentence with the key and the nearest count that it takes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.plan.pipeline.runtimes import megatron_settings, steps_of
from zsim.errors import InputError
from zsim.frameworks.megatron.settings.config import MegatronConfig

STEPS = "training.gradient_accumulation_steps: found"
STAGES = "parallelism.virtual_stages: found"


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (("torch", "1f1b", 4, 1, 3), f"{STEPS} 3, .* at least one per pipeline rank, 4; the nearest is 4"),
        (("torch", "interleaved-1f1b", 4, 2, 9), f"{STEPS} 9, .* multiple of its rounds, .* nearest is 8"),
        (("torch", "interleaved-zero-bubble", 2, 2, 7), f"{STEPS} 7, .*; the nearest is 6"),
        (("torch", "dualpipe-v", 4, 2, 7), f"{STEPS} 7, .* at least one per stage, 8; the nearest is 8"),
        (("torch", "zbv-zero-bubble", 4, 3, 8), f"{STAGES} 3 .*, expected 2"),
        (("torch", "1f1b", 4, 2, 8), f"{STAGES} 2 .* one stage per rank; expected 1"),
        (("nanotron", "1f1b", 4, 1, 2), f"{STEPS} 2, .* at least pipeline ranks - 1, 3; the nearest is 3"),
        (("megatron", "gpipe", 4, 1, 8), ".*schedule: Megatron has no 'gpipe'; expected '1f1b' or '.*'"),
        (("deepspeed", "interleaved-1f1b", 4, 2, 8), ".*schedule: DeepSpeed has no .*; expected '1f1b'.*"),
        (("megatron", "interleaved-1f1b", 4, 1, 8), f"{STAGES} 1 .*, expected 2 or more"),
        (("megatron", "interleaved-1f1b", 4, 2, 3), f"{STEPS} 3, .* least a group of 4, .* nearest is 4"),
        (("megatron", "interleaved-1f1b", 4, 2, 9), f"{STEPS} 9, .* none or at least 4, .* nearest is 8"),
    ],
)
def test_counts_are_refused(counts: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError) as caught:
        steps_of(*counts)
    assert re.fullmatch(message, str(caught.value))


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "settings", "message"),
    [
        (
            2,
            4,
            megatron_settings(overlap_p2p=False),
            r"parallelism\.pipeline: found 2, .* expected 3 or",
        ),
        (4, 8, megatron_settings(micro_batch_group=3), r"parallelism\.pipeline: found 4 .* = 3; .* ranks: 4"),
        (
            4,
            8,
            megatron_settings(overlap_p2p_warmup_flush=True, overlap_p2p=False),
            "warmup_flush: found true without",
        ),
        (4, 7, megatron_settings(micro_batch_group=6), f"{STEPS} 7, .* a group of 6, .*; the nearest is 6"),
    ],
)
def test_megatron_s_settings_are_refused(
    ranks: int, micro_batches: int, settings: MegatronConfig, message: str
) -> None:
    """Its own checks: p > 2 without overlap, n in [p, m], and m mod n 0 or at least p."""
    with pytest.raises(InputError, match=message):
        steps_of("megatron", "interleaved-1f1b", ranks, 2, micro_batches, settings=settings)


def test_a_pass_s_count_is_named_for_all_passes() -> None:
    """Three passes of 3 micro-batches on 4 ranks; 4 each would do, 12 in all."""
    with pytest.raises(InputError, match=r"found 9 in 3 passes of 3 micro-batches, .*; the nearest is 12$"):
        steps_of("torch", "1f1b", 4, 1, 3, passes=3)
    with pytest.raises(InputError, match=r"parallelism\.passes: found 2, but Megatron runs one pipeline"):
        steps_of("megatron", "1f1b", 4, 1, 3, passes=2)
