"""Which products of a step lose their alignment: a model's odd sizes count, a batch's never."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.rates.efficiency import contiguous
from zsim.cost.rates.gpu import kernel_seconds
from zsim.operations import BACKWARD, FORWARD
from zsim.operations.fused_head import fused_head
from zsim.specs.cluster.files import load_gpu
from zsim.specs.model.huggingface import load_model
from zsim.specs.model.spec import Linear, ModelSpec, Module, Parameter
from zsim.specs.strategy.training import losses

LLAMA = load_model("llama-3.2-1b")
OPTIONS = [
    WorkOptions(),
    WorkOptions("fp16", compile=True, loss=losses()["fused"]),
    WorkOptions(autocast=True),
    WorkOptions("fp32", liger=True),
]


def modules_of(model: ModelSpec) -> Iterator[Module]:
    yield from (*model.before, *model.blocks[0].modules, *model.after)


def products(modules: Iterator[Module], shape: BatchShape, options: WorkOptions) -> Iterator[Kernel]:
    for module in modules:
        both = module.kernels(FORWARD, shape, options) + module.kernels(BACKWARD, shape, options)
        yield from (kernel for kernel in both if kernel.kind == "gemm")


def rows(kernel: Kernel) -> tuple[int, int, int]:
    m, n, k = kernel.shape
    return contiguous(m, n, k, kernel.layout)


def is_aligned(kernel: Kernel) -> bool:
    return all(length % (4 if kernel.dtype == "fp32" else 8) == 0 for length in rows(kernel))


@settings(max_examples=60)
@given(sequences=st.integers(1, 5), length=st.integers(1, 9000), options=st.sampled_from(OPTIONS))
def test_no_number_of_tokens_misaligns_a_product_of_an_even_model(
    sequences: int, length: int, options: WorkOptions
) -> None:
    """Of fused attention's blocks and of the head; 64 divides all widths and the vocabulary of 128,256."""
    shape = BatchShape(sequences, length)
    assert all(is_aligned(kernel) for kernel in products(modules_of(LLAMA), shape, options))
    head = LLAMA.after[-2]
    fused = fused_head(head, shape, replace(options, loss=losses()["fused_linear"]))
    assert all(is_aligned(kernel) for kernel in fused.forward if kernel.kind == "gemm")


@settings(max_examples=40)
@given(length=st.integers(1, 3000))
def test_written_out_scores_are_rows_of_keys_so_the_sequence_counts(length: int) -> None:
    """Two products forward, four backward: every one reads or writes scores."""
    attention = next(module for module in LLAMA.blocks[0].modules if module.name.endswith("core"))
    found = list(products(iter([attention]), BatchShape(2, length), WorkOptions(attention="math")))
    assert len(found) == 6
    assert all(is_aligned(kernel) == (length % 8 == 0) for kernel in found)


@pytest.mark.parametrize(("vocab", "expected"), [(50257, False), (50304, True)])
def test_an_odd_vocabulary_misaligns_all_three_products_of_the_head(vocab: int, expected: bool) -> None:
    """Logits and their gradient have rows of it, whichever way they are multiplied."""
    head = Module("lm_head", Linear(768, vocab), (Parameter("weight", (vocab, 768)),))
    found = list(products(iter([head]), BatchShape(8, 1024), WorkOptions()))
    assert [is_aligned(kernel) for kernel in found] == 3 * [expected]


def test_fp8_products_sum_along_rows_so_the_weights_gradient_counts_tokens() -> None:
    """8 x 4096 by 4096 x 4096 over 100 tokens: rows of 4096 forward and for the input, of 100 for the
    weight."""
    module = Module("m", Linear(4096, 4096), (Parameter("weight", (4096, 4096)),))
    found = list(products(iter([module]), BatchShape(1, 100), WorkOptions("fp8")))
    assert [rows(kernel)[0] for kernel in found] == [4096, 4096, 100]


def test_8191_tokens_take_as_long_as_8192_on_an_h100() -> None:
    gpu = load_gpu("h100-sxm-80gb")
    seconds = [
        sum(kernel_seconds(kernel, gpu) for kernel in products(modules_of(LLAMA), shape, WorkOptions()))
        for shape in (BatchShape(1, 8191), BatchShape(1, 8192))
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.001)
