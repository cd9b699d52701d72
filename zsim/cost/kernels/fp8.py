"""The kernels around fp8 and fp4 products that quantise their operands, and what is kept and sent quantised.

A cast is bound by HBM: it reads 2 bytes per element, and writes each direction that is requested. Read in
Transformer Engine 2.17 and torchao 0.15:

- delayed: one kernel, whose scale is known before (`nvte_quantize_v2`). It computes the new maximum on the
  way.
- current: a kernel for the maximum, one for the scale, then the cast (csrc/quantizer.cpp
  Float8CurrentScalingQuantizer::quantize_impl).
- block, mxfp8: one kernel, scales included.
- nvfp4: the maximum first. Inputs and gradients are rotated (16 x 16 Hadamard) along tokens inside both
  kernels (NVFP4Quantizer::quantize_impl, `nvte_hadamard_transform_amax`,
  `nvte_quantize_with_hadamard_transform`).
- a fused norm writes what the product reads (csrc/extensions/normalization.cpp). With delayed scales it does
  so at once, transposed by a second kernel. With current scales it computes the maximum. Before other casts
  it writes 16 bits.
- torchao-tensorwise: maximum and cast are two kernels. Operands are kept in 16 bits and cast again in
  backward, the output's gradient in two layouts (torchao/float8/float8_linear.py, float8_ops.py
  `preprocess_addmm`).
- torchao-rowwise: a row's maximum and its cast are one kernel, a column's two.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.shapes import WorkOptions
from zsim.specs.strategy.fp8 import Fp8

MarkedKernels = list[tuple[Kernel, bool]]


def product(m: int, n: int, k: int, output_bytes: float, fp8: Fp8) -> Kernel:
    """One product of quantised operands, m x k by k x n. Every 8-bit product is "nt": see [Note: two
    directions]."""
    read_bytes = fp8.operand_bytes(m * k) + fp8.operand_bytes(k * n)
    flops, moved_bytes = 2.0 * m * n * k, float(read_bytes + output_bytes)
    return Kernel(
        "gemm", flops, moved_bytes, fp8.dtype, (m, n, k), is_transformer_engine=fp8.is_transformer_engine
    )


def cast(numel: int, options: WorkOptions) -> list[Kernel]:
    """Transformer Engine's kernels that quantise `numel` elements for both directions."""
    return _engine_casts(numel, _directions(options.fp8), options)


def weight_casts(
    numel: int, options: WorkOptions, *, is_backward: bool, is_trained: bool = True
) -> list[Kernel]:
    """Kernels that make a weight's quantised copies. Kept ones are made once a step, of which a micro-batch
    has its part. A weight that arrives quantised and is never updated needs none. Quantised weights of one
    scale, or in squares, are transposed. mxfp8's are gathered in 16 bits and cast
    (`post_all_gather_processing`; `_copy_main_params_to_param_buffer` of Megatron-Core 0.16.1
    core/optimizer/distrib_optimizer.py).
    """
    fp8 = options.fp8
    if fp8.keeps_weights or fp8.has_quantized_weights:
        if is_backward or (fp8.has_quantized_weights and not is_trained):
            return []
        part = numel // options.micro_batches
        if not fp8.has_quantized_weights or fp8.recipe in ("mxfp8", "nvfp4"):
            return _engine_casts(part, _directions(fp8), options)
        return [_elementwise(2 * part, options)] if _directions(fp8) == 2 else []
    if not fp8.recasts_weights:
        return [] if is_backward else _engine_casts(numel, _directions(fp8), options)
    return _engine_casts(numel, _directions(fp8) if is_backward else 1, options)


def norm_saving(numel: int, options: WorkOptions) -> int:
    """Bytes less that a fused norm writes, which quantises its output of `numel` elements itself."""
    return numel if options.dtype == "fp8" and options.fp8.recipe == "delayed" else 0


def gathered_bytes(numel: int, ranks: int, options: WorkOptions, *, is_gradient: bool = False) -> int:
    """Bytes of a tensor of `numel` elements that `ranks` ranks gather for a product. A gradient with a scale
    per block is gathered in both directions (`gather_along_first_dim` of pytorch/distributed.py)."""
    if not is_gathered_quantized(options):
        return numel * options.activation_bytes
    directions = 2 if is_gradient and not options.fp8.has_one_scale else 1
    return directions * ranks * options.fp8.operand_bytes(numel // ranks)


def is_gathered_quantized(options: WorkOptions) -> bool:
    """Whether operands are gathered quantised."""
    return options.dtype == "fp8" and options.fp8.gathers_quantized


def sums_maxima(options: WorkOptions) -> bool:
    """Whether ranks that gather an operand quantised first agree on its scale by an all-reduce of its maximum
    (`with_amax_reduction` of Transformer Engine's current scaling; torchao's casts of a DTensor).
    """
    return is_gathered_quantized(options) and options.fp8.recipe in ("current", "torchao-tensorwise")


def _cast_parts(num_ranks: int, fp8: Fp8) -> int:
    """Ranks that each cast a part of an operand that is then gathered. 1 if it is gathered in 16 bits."""
    return num_ranks if fp8.gathers_quantized else 1


def _operand_casts(
    numel: int, num_parts: int, options: WorkOptions, *, is_gradient: bool, has_wgrad: bool = True
) -> list[Kernel]:
    """Casts of an input, or of an output's gradient, of which `num_parts` ranks each cast a part and gather
    it. An operand gathered along one direction is transposed afterwards. An input is cast for forward alone
    where its weight has no gradient.
    """
    fp8 = options.fp8
    is_single = not has_wgrad or (fp8.has_one_scale and (not fp8.transposes or num_parts > 1))
    casts = _engine_casts(numel // num_parts, 1 if is_single else 2, options)
    if is_gradient and num_parts > 1 and fp8.has_one_scale and fp8.transposes:
        casts.append(_elementwise(2 * numel, options))
    return casts


def _engine_casts(numel: int, directions: int, options: WorkOptions) -> list[Kernel]:
    """Transformer Engine's kernels that quantise `numel` elements of 16 bits."""
    fp8 = options.fp8
    cast = _elementwise(2 * numel + directions * fp8.operand_bytes(numel), options)
    if fp8.recipe == "current":
        return [_elementwise(2 * numel, options), _scale(options), cast]
    if fp8.recipe == "nvfp4":
        return [_scale(options), _elementwise(2 * numel, options), cast]
    return [cast]


def _directions(fp8: Fp8) -> int:
    return 2 if fp8.transposes or not fp8.has_one_scale else 1


def _torchao_casts(numel: int, options: WorkOptions, *, is_row: bool) -> list[Kernel]:
    """torchao's cast: 2 bytes read for the maximum, 2 read and 1 written for the cast. Along rows both are
    one kernel where scales are by row.
    """
    if is_row and not options.fp8.has_one_scale:
        return [_elementwise(3 * numel, options)]
    return [_elementwise(5 * numel, options, launches=2)]


def _scale(options: WorkOptions) -> Kernel:
    """The kernel that makes a scale of a maximum, or sets the maximum to zero."""
    return _elementwise(8, options)


def _elementwise(num_bytes: int, options: WorkOptions, launches: int = 1) -> Kernel:
    return Kernel("elementwise", 0.0, float(num_bytes), options.kernel_dtype, (), launches)


@dataclass(frozen=True, slots=True)
class QuantizedProduct:
    """A product of an input of `in_features` with a weight, both quantised."""

    in_features: int
    out_features: int
    input_ranks: int
    """The ranks that each cast a part of the input before it is gathered."""
    gradient_ranks: int
    """The ranks that each cast a part of the output's gradient before it is gathered."""
    follows_norm: bool
    """The norm before writes what the product reads."""

    def forward_casts(
        self, tokens: int, options: WorkOptions, *, shares_input: bool, trains_weight: bool
    ) -> list[Kernel]:
        """Kernels before a product: those of its input, unless an earlier product has cast it, and of its
        weight."""
        fp8 = options.fp8
        numel, weight = tokens * self.in_features, self.in_features * self.out_features
        if not fp8.is_transformer_engine:
            num_parts = _cast_parts(self.input_ranks, fp8)
            is_cast = shares_input and num_parts > 1  # before it was gathered, for an earlier product
            input_casts = [] if is_cast else _torchao_casts(numel // num_parts, options, is_row=True)
            return [
                *input_casts,
                *([] if fp8.has_quantized_weights else _torchao_casts(weight, options, is_row=True)),
            ]
        input_casts = [] if shares_input else self._engine_input_casts(numel, options, trains_weight)
        return [
            *input_casts,
            *weight_casts(weight, options, is_backward=False, is_trained=trains_weight),
        ]

    def backward_casts(self, tokens: int, options: WorkOptions) -> MarkedKernels:
        """Kernels before the two products of backward, each with whether it is for the weight's gradient."""
        fp8 = options.fp8
        outputs, inputs = tokens * self.out_features, tokens * self.in_features
        weight = self.in_features * self.out_features
        if fp8.is_transformer_engine:
            gradient_casts = _operand_casts(outputs, self.gradient_ranks, options, is_gradient=True)
            casts = [(kernel, False) for kernel in gradient_casts]
            casts += [(kernel, False) for kernel in weight_casts(weight, options, is_backward=True)]
            if self.input_ranks > 1 and fp8.has_one_scale and fp8.transposes:
                casts.append((_elementwise(2 * inputs, options), True))  # gathered again, then transposed
            return casts
        is_gathered = _cast_parts(self.input_ranks, fp8) > 1
        gradient_casts_of_rows = _torchao_casts(
            outputs // _cast_parts(self.gradient_ranks, fp8), options, is_row=True
        )
        casts = [(kernel, False) for kernel in gradient_casts_of_rows]
        if fp8.has_quantized_weights:
            casts.append((_elementwise(2 * weight, options), False))
        else:
            casts += [(kernel, False) for kernel in _torchao_casts(weight, options, is_row=False)]
        if fp8.has_one_scale:
            casts.append((_elementwise(2 * outputs, options), True))
        else:
            casts += [(kernel, True) for kernel in _torchao_casts(outputs, options, is_row=False)]
        if is_gathered:
            casts.append((_elementwise(2 * inputs, options), True))
        else:
            casts += [(kernel, True) for kernel in _torchao_casts(inputs, options, is_row=False)]
        return casts

    def kept_input_bytes(self, numel: int, options: WorkOptions) -> int:
        """Bytes of a quantised product's input of `numel` elements that backward needs. Under Transformer
        Engine, which saves what it has cast, it is one direction. Under torchao it is 16 bits, except for
        what was gathered in fp8.
        """
        fp8 = options.fp8
        if fp8.is_transformer_engine or _cast_parts(self.input_ranks, fp8) > 1:
            return fp8.operand_bytes(numel)
        return numel * options.activation_bytes

    def kept_weight_bytes(self, options: WorkOptions) -> int:
        """Bytes of a weight's quantised copies that are kept from forward to backward: Transformer Engine's,
        where they are neither kept all the time nor made again."""
        fp8 = options.fp8
        if (
            not fp8.is_transformer_engine
            or fp8.keeps_weights
            or fp8.recasts_weights
            or fp8.has_quantized_weights
        ):
            return 0
        return fp8.weight_copy_bytes(self.in_features * self.out_features)

    def _engine_input_casts(self, numel: int, options: WorkOptions, trains_weight: bool) -> list[Kernel]:
        """Casts of an input, which a fused norm has begun. Without a gradient of the weight it is cast for
        forward alone (`backward_needs_input` of pytorch/module/linear.py)."""
        fp8 = options.fp8
        if not self.follows_norm or fp8.recipe not in ("delayed", "current"):
            return _operand_casts(
                numel, self.input_ranks, options, is_gradient=False, has_wgrad=trains_weight
            )
        needs_both_directions = fp8.transposes and self.input_ranks == 1 and trains_weight
        if fp8.recipe == "delayed":
            return [_elementwise(2 * numel, options)] if needs_both_directions else []
        part = numel // self.input_ranks
        return [_scale(options), _elementwise(part * (4 if needs_both_directions else 3), options)]
