"""Products with a weight.

# [Note: 4-bit products]
bitsandbytes 0.50.2 dequantises the weight before the product in forward (backends/cuda/ops.py `gemm_4bit`: in
one kernel with it only below 1,536 tokens) and again before the product of the input's gradient
(autograd/_functions.py `MatMul4Bit.backward`). Quantised scales are dequantised first, and their mean added.
What it reads is cast to 16 bits, what it makes to the type of that (nn/modules.py `Linear4bit.forward`), and
PEFT copies it (0.21.2 tuners/lora/bnb.py `Linear4bit.forward`).
Before 0.48 a tree of branches makes every element (csrc/kernels.cu `dDequantizeNF4`): 5.4 ps on A800 PCIe,
105 operations at the peak of fp32, by a profile that has 30 % and more of a product of 2,048 rows with 4,096
x 14,336 (issue 1319). The memory bounds it on A10, L4 and RTX 4090, where what came after is no faster for
large matrices (pull requests 1746 and 1747).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from zsim.cost.kernels import fp8, int8
from zsim.cost.kernels.elementwise import autocast_cast
from zsim.cost.kernels.fp8 import QuantizedProduct
from zsim.cost.kernels.kernel import Kernel, elementwise, gemm
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.exchange import ExchangeKind
from zsim.operations.operation import HEAD, Kernels, Module, Operation, Role
from zsim.operations.tensors import ModuleTensors, Sizes

FP8_ALIGNMENT = 16  # of the dimensions of a product
_BLOCK, _SCALE_BLOCK = 64, 256  # elements of a block with a scale, scales of a block with a scale of its own
_FP32, _LOW = 4, 2  # bytes of an element
_BRANCHES = 105  # operations of an element that comes of a tree of branches


@dataclass(frozen=True, slots=True)
class OverlappedCollectives:
    """Collectives of a product's backward that run during its two products, as Megatron's column-parallel
    layers launch them.
    """

    reduces: ExchangeKind
    """The collective of the input's gradient, during the product for the weight's gradient."""
    input_shards: int = 1
    """The number of parts that the input's tokens are cut into. If it is more than 1, one part is kept, and
    the input is gathered during the product for the input's gradient.
    """
    group: str = "tensor"
    is_sequential: bool = False
    """Nothing overlaps: the gather is before both products, and the reduction after them."""


@dataclass(frozen=True, slots=True)
class ChunkedOverlap:
    """A product cut into pieces of its tokens, so that its own collectives overlap it (Transformer Engine's
    userbuffers).
    """

    ranks: int
    gathers: Literal["forward", "backward"]
    """The direction in which the input ("forward"), or the output's gradient ("backward"), goes around the
    `ranks` in a ring, with a step during each of `ranks` pieces.
    """
    scatters: int = 0
    """Pieces of the output that are reduce-scattered, each during the next. 0 for none."""
    group: str = "tensor"
    starts_with_local_rows: bool = False
    """The input is gathered at once, during the product of the rank's own tokens (nanotron's)."""
    is_symmetric_memory: bool = False
    """Ranks copy the pieces out of one another's buffers (torch's). See [Note: symmetric memory]."""


@dataclass(frozen=True, slots=True)
class Linear(Operation):
    """`num_tokens x in_features` times `in_features x out_features`."""

    in_features: int
    out_features: int
    overlapped_collectives: OverlappedCollectives | None = None
    """The collectives of its backward, where they overlap its products."""
    chunked_overlap: ChunkedOverlap | None = None
    """The collectives that overlap its own pieces."""
    dtype: str = ""
    """The type it is computed in, if that is not the training's."""
    is_adapter: bool = False
    """It reads what the adapted product reads, and the gradients of that input are added."""
    input_cast_ranks: int = 1
    """In fp8 training, the ranks that each cast a part of its input before it is gathered."""
    gradient_cast_ranks: int = 1
    """In fp8 training, the ranks that each cast a part of its output's gradient before it is gathered."""
    follows_norm: bool = False
    """In fp8 training, the norm before it writes what it reads."""
    in_bf16: bool = False
    """In fp8 training, it is left out and stays in bf16."""
    is_duplicated: bool = False
    """All tensor-parallel ranks have it whole, each for its own tokens."""
    reads_all_tokens: bool = False
    """Such ranks compute it for all tokens, each the same."""
    overlap: float = 1.0
    """Of a convolution, how many times it reads each element of its input."""

    # -- roles ---------------------------------------------------------------------------------------------

    @property
    def role(self) -> Role:
        return Role.PRODUCT

    @property
    def may_borrow_weight(self) -> bool:
        return True

    @property
    def casts_at_products(self) -> bool:
        return True

    @property
    def reads_adapted_input(self) -> bool:
        return self.is_adapter

    @property
    def product_features(self) -> tuple[int, int]:
        return self.in_features, self.out_features

    @property
    def is_gate(self) -> bool:
        return self.out_features == 1

    @property
    def scatters_output(self) -> bool:
        return self.chunked_overlap is not None and self.chunked_overlap.scatters > 0

    @property
    def gathers_input(self) -> bool:
        return self.chunked_overlap is not None and self.chunked_overlap.gathers == "forward"

    @property
    def holds_gathered_input(self) -> bool:
        """Whether its forward gathers its input into a tensor of its own."""
        return (
            self.chunked_overlap is not None
            and self.chunked_overlap.starts_with_local_rows
            and self.gathers_input
        )

    @property
    def input_shards(self) -> int:
        """The number of parts of the input's tokens of which backward gathers the others again."""
        return self.overlapped_collectives.input_shards if self.overlapped_collectives else 1

    @property
    def takes_fp8(self) -> bool:
        return not (self.in_features % FP8_ALIGNMENT or self.out_features % FP8_ALIGNMENT)

    def keep_in_bf16(self) -> Linear:
        return replace(self, in_bf16=True)

    def unmark_fp8(self) -> Linear:
        return replace(self, in_bf16=False, follows_norm=False)

    def saves_only_its_input(self, options: WorkOptions) -> bool:
        return True

    def is_quantized(self, module: Module, options: WorkOptions) -> bool:
        """Recipes skip the LM head and need dimensions divisible by 16.

        Source: torchao's `convert_to_float8_training` as torchtitan uses it (its filter skips "output").
        Megatron's output layer is no layer of Transformer Engine.
        """
        if options.dtype != "fp8" or module.name == HEAD or self.in_bf16 or module.is_adapter_product:
            return False
        return self.takes_fp8

    @property
    def quantized(self) -> QuantizedProduct:
        """The product with both operands quantised."""
        return QuantizedProduct(
            self.in_features,
            self.out_features,
            self.input_cast_ranks,
            self.gradient_cast_ranks,
            self.follows_norm,
        )

    @property
    def weight_numel(self) -> int:
        return self.in_features * self.out_features

    def type_of(self, options: WorkOptions) -> tuple[int, str]:
        """Bytes of an element, and the type, in which the product is computed."""
        return (_FP32, "fp32") if self.dtype == "fp32" else (options.activation_bytes, options.kernel_dtype)

    # -- work ----------------------------------------------------------------------------------------------

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """One product, with the bias in its epilogue or, in older layers, in a kernel of its own."""
        m, n, k = shape.tokens, self.out_features, self.in_features
        e, dtype = self.type_of(options)
        bias_bytes = n * e if module.has_bias else 0
        if _is_int8(module):
            return int8.forward_kernels(m, n, k, options.kernel_dtype)
        if not self.is_quantized(module, options):
            is_engine = module.runs_in_transformer_engine(options)
            product = gemm(m, n, k, e, dtype, extra_bytes=bias_bytes, is_transformer_engine=is_engine)
            casts_before, casts_after = self._casts(module, shape, is_backward=False)
            if module.has_bias and options.layers.adds_biases:
                casts_after = (elementwise(2 * m * n * e, options.kernel_dtype), *casts_after)
            return (
                *casts_before,
                *dequantise_kernels(module, options),
                *autocast_cast(n * k, options),
                product,
                *casts_after,
            )
        casts = self.quantized.forward_casts(
            m, options, shares_input=module.shares_input, trains_weight=module.trains_weight
        )
        return (*casts, fp8.product(m, n, k, m * n * e + bias_bytes, options.fp8))

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """Gradient of the input, gradient of the weight, sum over tokens for the bias.

        The gradient of a shared input is accumulated by a separate add, and so is that of a tied weight. A
        frozen weight has no gradient, and an input before all that is trained has none.
        """
        return tuple(kernel for kernel, _ in self._gradients(module, shape, options))

    def input_gradient_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        marked = self._gradients(module, shape, options)
        return tuple(kernel for kernel, is_weight in marked if not is_weight)

    def weight_gradient_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        marked = self._gradients(module, shape, options)
        return tuple(kernel for kernel, is_weight in marked if is_weight)

    def forward_flops(self, module: Module, sequence_length: int) -> float:
        return 2.0 * self.in_features * self.out_features * min(1.0, module.rows_per_token)

    def _gradients(
        self, module: Module, shape: BatchShape, options: WorkOptions
    ) -> list[tuple[Kernel, bool]]:
        """The kernels of backward in order, each with whether it is for the weight's gradient."""
        is_needed = {True: module.trains_weight, False: module.input_gradient}
        marked = self._unfiltered_gradients(module, shape, options)
        return [(kernel, is_weight) for kernel, is_weight in marked if is_needed[is_weight]]

    def _unfiltered_gradients(
        self, module: Module, shape: BatchShape, options: WorkOptions
    ) -> list[tuple[Kernel, bool]]:
        m, n, k = shape.tokens, self.out_features, self.in_features
        e, dtype = self.type_of(options)
        casts_before, casts_after = self._casts(module, shape, is_backward=True)
        kernels: list[tuple[Kernel, bool]] = []
        kernels += [(kernel, False) for kernel in (*casts_before, *dequantise_kernels(module, options))]
        if _is_int8(module):
            kernels += [(kernel, False) for kernel in int8.weight_kernels(n, k, e)]
        if self.is_quantized(module, options):
            kernels += self.quantized.backward_casts(m, options)
            kernels.append((fp8.product(m, k, n, m * k * e, options.fp8), False))
            kernels.append((fp8.product(n, k, m, k * n * e, options.fp8), True))
        else:
            is_engine = module.runs_in_transformer_engine(options)
            kernels += [
                (gemm(m, k, n, e, dtype, "nn", is_transformer_engine=is_engine), False),
                (gemm(n, k, m, e, dtype, "tn", is_transformer_engine=is_engine), True),
                *((kernel, False) for kernel in casts_after),
            ]
            kernels += [(kernel, True) for kernel in autocast_cast(n * k, options)]
        if module.has_bias:
            kernels.append((elementwise((m * n + n) * e, options.kernel_dtype), True))
        if (module.shares_input or self.is_adapter) and not options.compile:
            kernels.append((elementwise(3 * m * k * e, options.kernel_dtype), False))
        if not module.has_weight:
            kernels.append((elementwise(3 * n * k * options.stream_bytes, options.kernel_dtype), True))
        return kernels

    def _casts(self, module: Module, shape: BatchShape, *, is_backward: bool) -> tuple[Kernels, Kernels]:
        """The casts before and after a 16-bit product of which input and output are fp32. See [Note: 4-bit
        products].
        """
        if not module.in_fp32:
            return (), ()
        inputs, outputs = shape.tokens * self.in_features, shape.tokens * self.out_features
        if is_backward:
            inputs, outputs = outputs, inputs
        copy = 0 if is_backward else 2 * _FP32
        return (elementwise(inputs * (_FP32 + _LOW), "fp32"),), (
            elementwise(outputs * (_FP32 + _LOW + copy), "fp32"),
        )

    # -- memory --------------------------------------------------------------------------------------------

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """The input, for the gradient of the weight alone, and under autocast (fp32 weights) also the cast
        copy of the weight. Of a frozen weight Transformer Engine keeps no input (2.17
        pytorch/module/linear.py `backward_needs_input`). torchao does
        (0.15 float8/float8_linear.py `matmul_with_hp_or_float8_args`).
        """
        is_quantized = self.is_quantized(module, options)
        weight_bytes = self.quantized.kept_weight_bytes(options) if is_quantized else 0
        if module.shares_input:
            return weight_bytes
        local_tokens = shape.tokens // self.input_shards
        weight = self.weight_numel if options.autocast else 0
        if is_quantized and options.fp8.is_transformer_engine and not module.trains_weight:
            return weight_bytes  # `backward_needs_input` of Transformer Engine's linear.py
        if is_quantized:
            numel = local_tokens * self.in_features
            copy = weight * (0 if options.fp8.is_transformer_engine else options.activation_bytes)
            return self.quantized.kept_input_bytes(numel, options) + weight_bytes + copy
        if not module.trains_weight:
            return local_tokens * self.in_features * self.type_of(options)[0] if _is_int8(module) else 0
        return (round(local_tokens * self.in_features / self.overlap) + weight) * self.type_of(options)[0]

    def quantized_input_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        if module.shares_input or not self.is_quantized(module, options):
            return 0
        return options.fp8.operand_bytes(shape.tokens * self.in_features // self.input_cast_ranks)

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        weight = self.weight_numel * options.activation_bytes if is_dequantised(module) else 0
        if _is_int8(module):
            weight += int8.temporary_bytes(shape.tokens, self.out_features, self.in_features)
        gathered = self.in_features if self.holds_gathered_input else 0
        output_bytes = shape.tokens * (self.out_features + gathered) * self.type_of(options)[0]
        return output_bytes + weight + self._cast_bytes(module, shape, _LOW)

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """Under autocast the weight's gradient is made in the low type, then cast."""
        makes_weight = options.autocast or is_dequantised(module) or _is_int8(module)
        weight = self.weight_numel if makes_weight else 0
        gathered = shape.tokens * self.in_features if self.input_shards > 1 else 0
        numel = shape.tokens * (self.in_features + self.out_features) + gathered + weight
        return numel * self.type_of(options)[0] + self._cast_bytes(module, shape, _FP32)

    def _cast_bytes(self, module: Module, shape: BatchShape, input_element: int) -> int:
        """Bytes of tensors that the casts around a product make, where it is `in_fp32`: its input in 16 bits
        and its output in fp32. In backward they are the gradients of both in fp32, in addition to those in 16
        bits.
        """
        if not module.in_fp32:
            return 0
        return shape.tokens * (self.in_features * input_element + self.out_features * _FP32)

    def kept_outputs(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        pieces = self.chunked_overlap
        num_parts = pieces.ranks if pieces is not None and pieces.scatters else 1
        return (shape.tokens * self.out_features * options.activation_bytes // num_parts,)

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        e = self.type_of(options)[0]
        input_bytes = round(shape.tokens * self.in_features / self.overlap) * e
        output_bytes = shape.tokens * self.out_features * e
        weight = self.weight_numel * e if options.autocast else 0
        gathered = input_bytes if self.input_shards > 1 else 0
        gathered_inputs = (input_bytes,) if self.holds_gathered_input else ()
        return ModuleTensors(
            (input_bytes // self.input_shards, weight),
            (output_bytes, *gathered_inputs),
            (output_bytes, input_bytes, gathered, weight),
        )


def is_dequantised(module: Module) -> bool:
    """Whether its product makes 16-bit weights of 4-bit ones."""
    return any(parameter.is_packed for parameter in module.parameters)


def _is_int8(module: Module) -> bool:
    """Whether its product is bitsandbytes' of 8 bits."""
    return any(parameter.stored_dtype == int8.TYPE for parameter in module.parameters)


def dequantise_kernels(module: Module, options: WorkOptions) -> Kernels:
    """The kernels that make 16-bit weights of 4-bit ones, () for others. See [Note: 4-bit products]."""
    weight = next((parameter for parameter in module.parameters if parameter.is_packed), None)
    if weight is None:
        return ()
    numel, scales = weight.numel, -(-weight.numel // _BLOCK)
    product = elementwise(numel / 2 + _FP32 * scales + numel * options.activation_bytes, "fp32")
    product = replace(product, flops=float(_BRANCHES * numel * options.branches_on_4_bits))
    if weight.stored_dtype != "nf4":
        return (product,)
    scale_bytes = scales + _FP32 * -(-scales // _SCALE_BLOCK) + _FP32 * scales
    return (elementwise(scale_bytes, "fp32"), elementwise(2 * _FP32 * scales, "fp32"), product)
