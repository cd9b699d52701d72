"""Megatron's fused kernels, by hand: 200 tokens of 10 features in fp16."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations import BACKWARD, FORWARD
from zsim.specs.model.spec import Attention, Module, Norm, Residual
from zsim.specs.strategy.training import layer_kernel_sets

SHAPE = BatchShape(sequences=2, sequence_length=100)
TORCH, CORE, OLD = (
    WorkOptions("fp16", "math", compile=True, layers=layer_kernel_sets()[name])
    for name in ("torch", "megatron", "megatron-2")
)


def costs(module: Module, options: WorkOptions, shape: BatchShape = SHAPE) -> tuple[Any, Any]:
    """(bytes, launches) without products, forward and backward."""
    found = []
    for kernels in (module.kernels(FORWARD, shape, options), module.kernels(BACKWARD, shape, options)):
        plain = [kernel for kernel in kernels if kernel.kind != "gemm"]
        found.append((sum(one.hbm_bytes for one in plain), sum(one.launches for one in plain)))
    return found[0], found[1]


@pytest.mark.parametrize("options", [CORE, OLD])
def test_bias_dropout_and_the_residual_add_are_a_kernel_of_their_own(options: WorkOptions) -> None:
    """2,000 elements: forward reads the branch and the stream and writes their sum, 6 bytes, and a mask of
    one; backward reads the gradient and the mask and writes, 5, and adds the stream's gradient, 6."""
    assert costs(Module("add", Residual(10, 0.1)), options) == ((7 * 2_000, 1), (11 * 2_000, 2))
    assert costs(Module("add", Residual(10)), options) == ((6 * 2_000, 1), (6 * 2_000, 1))


def test_the_norm_leaves_the_add_out_and_apexs_goes_over_its_rows_twice() -> None:
    """Bytes per element: persistent 2 x 2 forward and 3 x 2 backward, Apex's 3 x 2 and 7 x 2; with the add
    torch.compile's 4 x 2 and 6 x 2."""
    norm = Module("norm", Norm(10, "layer"))
    moved = [[part[0] / 2_000 for part in costs(norm, options)] for options in (CORE, OLD, TORCH)]
    assert moved == [[4, 6], [6, 14], [8, 12]]


def test_scores_are_dropped_behind_the_fused_softmax() -> None:
    """2 sequences of 2 heads, 40,000 scores: softmax reads half, up to the diagonal, and writes all, 3 bytes,
    dropout 5; backward 5, and half of two tensors read and one written, 4. The output of 4 features a head is
    copied each way, 2 x 200 x 8 x 2 bytes."""
    module = Module("core", Attention(2, 2, 4, 4, rotary=False, dropout=0.1))
    assert costs(module, CORE) == ((8 * 40_000 + 6_400, 3), (9 * 40_000 + 6_400, 3))


def test_a_softmax_without_a_causal_mask_reads_all_scores() -> None:
    """4 bytes forward and 6 backward, beside those of dropout."""
    module = Module("core", Attention(2, 2, 4, 4, rotary=False, dropout=0.1, is_causal=False))
    assert costs(module, CORE) == ((9 * 40_000 + 6_400, 3), (11 * 40_000 + 6_400, 3))


def test_heads_that_are_no_multiple_of_four_have_softmax_kernel_by_kernel() -> None:
    """One sequence of 2 heads, 20,000 scores: cast 6, scale 8, mask 9, softmax 8, cast 6; backward 6, 12, 9,
    8 and 6."""
    module = Module("core", Attention(2, 2, 4, 4, rotary=False))
    one = BatchShape(sequences=1, sequence_length=100)
    assert costs(module, CORE, one) == ((37 * 20_000 + 3_200, 6), (41 * 20_000 + 3_200, 6))
