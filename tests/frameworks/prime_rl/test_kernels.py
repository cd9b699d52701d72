"""prime-rl's losses: a head in chunks of tokens and words, and one over all logits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from zsim.cost.kernels.kernel import total_flops
from zsim.cost.kernels.losses import LossKernelSet
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.frameworks.prime_rl.kernels import CHUNK, CHUNKED, WHOLE, WORDS
from zsim.operations.fused_head import FusedHead, fused_head
from zsim.operations.linear import Linear
from zsim.operations.operation import Module
from zsim.specs.model.spec import Parameter

HIDDEN, VOCAB, TOKENS = 64, 3 * CHUNK, CHUNK + 1000
WEIGHT = HIDDEN * VOCAB


def head(*, trainable: bool = True, loss: LossKernelSet = CHUNKED) -> FusedHead:
    weight = Parameter("weight", (VOCAB, HIDDEN), trainable=trainable)
    module = Module("lm_head", Linear(HIDDEN, VOCAB), (weight,))
    return fused_head(module, BatchShape(1, TOKENS), replace(WorkOptions(), loss=loss))


@pytest.mark.parametrize(("trainable", "products"), [(True, 3), (False, 2)])
def test_backward_makes_the_logits_of_every_chunk_again(trainable: bool, products: int) -> None:
    """Two chunks of tokens by three of words: six products forward; backward the same, and the gradients of
    hidden states and of a weight that is trained. Their FLOPs are those of the whole product each."""
    fused = head(trainable=trainable)
    counts = [Counter(kernel.kind for kernel in side) for side in (fused.forward, fused.backward)]
    assert [count["gemm"] for count in counts] == [6, 6 * products]
    assert total_flops(fused.forward) == 2 * TOKENS * WEIGHT
    assert total_flops(fused.backward) == products * 2 * TOKENS * WEIGHT


def test_every_logit_is_moved_in_eager_kernels() -> None:
    """Bytes a logit of bf16: forward a cast of 6 and 12 tensors of 4, backward three casts and 10 tensors."""
    sides = [head().forward, head().backward]
    moved = [sum(kernel.hbm_bytes for kernel in side if kernel.kind == "loss") for side in sides]
    assert moved == [TOKENS * VOCAB * (6 + 48), TOKENS * VOCAB * (18 + 40)]


def test_no_more_logits_exist_than_those_of_a_chunk() -> None:
    """Kept are hidden states alone. Beside logits in 16 bits and five tensors in fp32, of which two are of
    the chunk before, backward has both gradients."""
    tensors, logits = head().tensors, CHUNK * CHUNK
    assert tensors.saved == (TOKENS * HIDDEN * 2,)
    assert sum(tensors.forward) == logits * (2 + 12)
    assert sum(tensors.backward) == logits * (2 + 20) + TOKENS * HIDDEN * 2 + WEIGHT * 2


def test_the_first_releases_cut_words_alone_and_train_a_frozen_head() -> None:
    """Twelve chunks of 2,048 words over all tokens, and three products backward whatever is trained."""
    fused = head(trainable=False, loss=WORDS)
    counts = [Counter(kernel.kind for kernel in side) for side in (fused.forward, fused.backward)]
    assert [count["gemm"] for count in counts] == [12, 36]
    assert sum(fused.tensors.forward) == TOKENS * 2048 * (2 + 12)


def test_the_other_head_holds_all_logits_in_fp32() -> None:
    """Bytes a logit: the cast's 6, the temperature's two tensors, and five that two compiled functions read;
    backward its gradient twice, one division, and the cast back. Kept are logits before and after that."""
    forward, backward = (WHOLE.kernels(10, 1000, 2, "bf16", is_backward=side)[0] for side in (False, True))
    assert (forward.hbm_bytes, backward.hbm_bytes) == (34e4, 22e4)
    assert sum(WHOLE.kept_sizes(10000, 2)) == 8e4
