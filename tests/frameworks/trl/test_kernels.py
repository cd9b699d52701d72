"""TRL's losses: what they move beside transformers', and the head in checkpoints of 256 tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from zsim.cost.kernels.losses import EAGER
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.frameworks.trl.kernels import CHUNKED, NLL
from zsim.operations.fused_head import FusedHead, fused_head
from zsim.operations.linear import Linear
from zsim.operations.operation import Module
from zsim.specs.model.spec import Parameter

HIDDEN, VOCAB, TOKENS = 64, 32768, 1000
WEIGHT = HIDDEN * VOCAB


def head(options: WorkOptions, *, trainable: bool = True) -> FusedHead:
    weight = Parameter("weight", (VOCAB, HIDDEN), trainable=trainable)
    module = Module("lm_head", Linear(HIDDEN, VOCAB), (weight,))
    return fused_head(module, BatchShape(1, TOKENS), replace(options, loss=CHUNKED))


def test_nll_adds_a_cast_entropy_and_the_largest_logit() -> None:
    """Of 16-bit logits over a long row, bytes a logit: a cast 6, log-softmax of fp32 four tensors of 4, exp,
    product and sum six, argmax one: 6 + 44. Backward is transformers'."""
    sizes = [loss.kernels(1, VOCAB, 2, "bf16", is_backward=False)[0].hbm_bytes for loss in (NLL, EAGER)]
    assert sizes[0] - sizes[1] == 50 * VOCAB
    assert NLL.backward == EAGER.backward


@pytest.mark.parametrize(
    ("options", "trainable", "casts", "products"),
    [
        (WorkOptions(), True, (8, 16), (4, 12)),
        (WorkOptions(autocast=True), True, (4, 8), (4, 12)),
        (WorkOptions(), False, (8, 8), (4, 8)),
        (WorkOptions(dtype="fp32"), True, (0, 0), (4, 12)),
    ],
)
def test_every_chunk_casts_the_weight_and_runs_again(
    options: WorkOptions, trainable: bool, casts: tuple[int, int], products: tuple[int, int]
) -> None:
    """1,000 tokens are four chunks. As torch 2.13 dispatches `_chunk` under autocast: a weight in 16 bits is
    cast twice a chunk, again before backward, and its gradient twice; one in fp32 once each."""
    fused = head(options, trainable=trainable)
    counts = [Counter(kernel.kind for kernel in side) for side in (fused.forward, fused.backward)]
    assert tuple(count["copy"] for count in counts) == casts
    assert tuple(count["gemm"] for count in counts) == products
    if casts[0]:
        copy = next(kernel for kernel in fused.forward if kernel.kind == "copy")
        assert copy.hbm_bytes == 6 * WEIGHT


def test_no_more_logits_exist_than_those_of_a_chunk() -> None:
    """Kept are hidden states alone; beside 256 x 32,768 logits in 16 bits backward has twice two in fp32."""
    fused = head(WorkOptions(autocast=True))
    assert fused.tensors.saved == (TOKENS * HIDDEN * 2,)
    assert max(fused.tensors.backward) == max(256 * VOCAB * 4, WEIGHT * 2)
    assert sum(fused.tensors.backward) == 256 * VOCAB * (2 + 8 + 8) + 2 * WEIGHT * 2
