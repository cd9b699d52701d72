"""Liger's head and loss in one, counted by hand."""

from __future__ import annotations

import pytest

from zsim.cost.kernels.kernel import total_flops
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations import BACKWARD, FORWARD
from zsim.operations.fused_head import fused_head, head_index, piece_tokens
from zsim.specs.model.huggingface import load_model
from zsim.specs.model.spec import Linear, Loss, Module, Parameter
from zsim.specs.strategy.training import losses

HEAD = Module("lm_head", Linear(64, 1000), (Parameter("weight", (1000, 64)),))
OPTIONS = WorkOptions(loss=losses()["fused_linear"])


@pytest.mark.parametrize(
    ("tokens", "hidden", "vocab", "expected"),
    [
        (8192, 4096, 128_256, 256),  # ceil(128256 / 4096) = 32 pieces of 256
        (8000, 4096, 128_256, 256),  # 250, up to 256
        (1000, 64, 1000, 64),  # 16 pieces of 63, up to 64
        (100, 4096, 1000, 100),  # fewer words than width: all at once
        (100, 64, 65, 64),  # two pieces of 50, up to 64 and the rest
    ],
)
def test_a_piece_has_as_many_logits_as_the_hidden_states_have_elements(
    tokens: int, hidden: int, vocab: int, expected: int
) -> None:
    assert piece_tokens(tokens, hidden, vocab) == expected


def test_forward_does_all_three_products_of_head_and_gradients() -> None:
    """1000 tokens of 64 against 1000 words: 16 pieces, 15 of 64 and one of 40. The FLOPs are those of the
    head forward and backward, 3 x 2 x 1000 x 64 x 1000; backward has none."""
    fused = fused_head(HEAD, BatchShape(1, 1000), OPTIONS)
    products = [kernel for kernel in fused.forward if kernel.kind == "gemm"]
    assert len(products) == 3 * 16
    assert products[-3].shape == (40, 1000, 64)
    assert total_flops(fused.forward) == 6 * 1000 * 64 * 1000
    plain = [HEAD.kernels(in_pass, BatchShape(1, 1000), OPTIONS) for in_pass in (FORWARD, BACKWARD)]
    assert total_flops(fused.forward) == sum(map(total_flops, plain))
    assert fused.backward == ()


def test_only_gradients_are_kept_and_no_more_logits_exist_than_a_piece() -> None:
    """bf16: gradients of 1000 x 64 inputs and of 1000 x 64 weights; 64 x 1000 logits and one more gradient of
    the weight pass."""
    fused = fused_head(HEAD, BatchShape(1, 1000), OPTIONS)
    assert fused.tensors.saved == (2 * 64_000, 2 * 64_000)
    assert fused.tensors.forward == (2 * 64_000, 2 * 64_000)


def test_fp16_scales_the_gradients_in_backward() -> None:
    """By the loss scale: 128,000 elements read and written, in two kernels' worth of one pass."""
    fused = fused_head(HEAD, BatchShape(1, 1000), WorkOptions("fp16", loss=losses()["fused_linear"]))
    assert sum(kernel.hbm_bytes for kernel in fused.backward) == 2 * 2 * 128_000


def test_the_head_is_the_last_product_before_the_loss() -> None:
    after = load_model("llama-3-8b").after
    place = head_index(after)
    assert place is not None
    assert after[place].name == "lm_head"
    assert isinstance(after[place + 1].op_spec, Loss)
    assert head_index(after[: place + 1]) is None
