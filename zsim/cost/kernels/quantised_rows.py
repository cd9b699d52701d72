"""The rows of experts' products in fp8, which come up to a multiple for every expert."""

from __future__ import annotations

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.specs.model.experts import GroupedLinear

Kernels = tuple[Kernel, ...]
_MULTIPLES = {"mxfp8": 32, "nvfp4": 128}  # of rows; 16 of other recipes (`get_align_size_for_quantization`)


def grouped_in_fp8(work: GroupedLinear, options: WorkOptions) -> bool:
    """Whether the experts' products run in fp8, as Transformer Engine's do."""
    is_engine = options.dtype == "fp8" and options.fp8.is_engine
    return is_engine and work.in_features % 16 == 0 and work.out_features % 16 == 0


def computed_rows(work: GroupedLinear, shape: BatchShape, options: WorkOptions) -> int:
    """Rows of a product with those that quantised ones pad: each expert's up to a multiple, of which half are
    missing in the mean (Transformer Engine d0067d0d pytorch/module/fp8_padding.py)."""
    if not (work.pads and grouped_in_fp8(work, options)):
        return shape.tokens
    multiple = _MULTIPLES.get(options.fp8.recipe, 16)
    return shape.tokens + work.num_experts * (multiple - 1) // 2


def padding_copies(work: GroupedLinear, shape: BatchShape, options: WorkOptions) -> tuple[Kernels, Kernels]:
    """The copies of rows before and behind a quantised product, the same in either direction: a kernel reads
    the rows and writes them with their padding, or the other way round (`fused_multi_row_padding`); before,
    another does so with their scores."""
    padded = computed_rows(work, shape, options)
    if padded == shape.tokens or work.pads == "map":
        return (), ()
    is_before = work.pads == "before"
    width = work.in_features if is_before else work.out_features
    moved = (shape.tokens + padded) * width * options.activation_bytes
    launches = 2 if is_before else 1
    copies = (Kernel("elementwise", 0.0, float(moved), options.kernel_dtype, (), launches),)
    return (copies, ()) if is_before else ((), copies)
