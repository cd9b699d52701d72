"""The rows of experts' products in fp8, which come up to a multiple for every expert."""

from __future__ import annotations

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.kernels.update import cat_launches
from zsim.specs.model.experts import GroupedLinear

Kernels = tuple[Kernel, ...]
_MULTIPLES = {"mxfp8": 32, "nvfp4": 128}  # of rows; 16 of other recipes (`get_align_size_for_quantization`)


def is_grouped_fp8(spec: GroupedLinear, options: WorkOptions) -> bool:
    """Whether the experts' products run in fp8, as Transformer Engine's do."""
    is_engine = options.dtype == "fp8" and options.fp8.is_transformer_engine
    return is_engine and spec.in_features % 16 == 0 and spec.out_features % 16 == 0


def computed_rows(spec: GroupedLinear, shape: BatchShape, options: WorkOptions) -> int:
    """Rows of a product with those that quantised ones pad: each expert's up to a multiple, of which half are
    missing in the mean (Transformer Engine d0067d0d pytorch/module/fp8_padding.py)."""
    if not (spec.pads and is_grouped_fp8(spec, options)):
        return shape.tokens
    multiple = _MULTIPLES.get(options.fp8.recipe, 16)
    return shape.tokens + spec.num_experts * (multiple - 1) // 2


def padding_copies(
    spec: GroupedLinear, shape: BatchShape, options: WorkOptions, *, is_backward: bool
) -> tuple[Kernels, Kernels]:
    """The copies of rows before and after an expert's products in one direction: of a first product those on
    its input's side, of a last one on its output's.

    For grouped products a kernel reads the rows and writes them with their padding, or the other way round
    (`fused_multi_row_padding`), the same in either direction. Before, another does so with their scores. For
    products that run one by one see `_sequential_copies`.
    """
    if spec.kernel == "loop":
        return _sequential_copies(spec, shape, options, is_backward=is_backward)
    padded = computed_rows(spec, shape, options)
    if padded == shape.tokens or spec.pads == "map":
        return (), ()
    is_first = spec.position == "first"
    width = spec.in_features if is_first else spec.out_features
    copies = (_copies((shape.tokens + padded) * width, 2 if is_first else 1, options),)
    return (copies, ()) if is_first else ((), copies)


def _sequential_copies(
    spec: GroupedLinear, shape: BatchShape, options: WorkOptions, *, is_backward: bool
) -> tuple[Kernels, Kernels]:
    """`SequentialMLP` (Megatron-Core 0.16.1 core/transformer/moe/experts.py), in passes over R rows.

    The outputs of several experts are joined (reads R, writes R), as are the gradients of their inputs. In
    fp8 an expert whose rows are no multiple (all but one in m, where the multiple is m) has, before the first
    product, zeros for the missing rows, both joined, and the scores likewise. After the last product the rows
    without them are a view, whose gradient is zeros for all rows and a copy into them (every expert's).
    """
    rows, count, is_first = shape.tokens, spec.num_experts, spec.position == "first"
    width = spec.in_features if is_first else spec.out_features
    copies: Kernels = ()
    padded = computed_rows(spec, shape, options)
    if spec.pads == "copies" and padded > rows:
        multiple = _MULTIPLES.get(options.fp8.recipe, 16)
        share, missing = (multiple - 1) / multiple, padded - rows
        if is_first and not is_backward:
            copies = (_copies((2 * share * rows + 3 * missing) * width, 4 * count, options),)
        elif not is_first and is_backward:
            copies = (_copies((padded + 2 * rows) * width, 2 * count, options),)
    if count > 1 and spec.position and is_first == is_backward:
        concatenation = _copies(2 * rows * width, cat_launches(count), options)
        copies = (*copies, concatenation) if is_first else (concatenation, *copies)
    return (copies, ()) if is_first else ((), copies)


def _copies(elements: float, launches: int, options: WorkOptions) -> Kernel:
    moved_bytes = float(elements * options.activation_bytes)
    return Kernel("elementwise", 0.0, moved_bytes, options.kernel_dtype, (), launches)
