"""The products of routed experts.

In fp8 the rows of every expert come up to a multiple.

# [Note: experts in 4 bits]
bitsandbytes' `replace_parameter_4bit` (0.50.2 nn/parametrize.py) makes a stacked weight one that torch's
parametrization dequantises when a forward reads it, once, since its hooks keep the result until the module's
forward ends. The product keeps the 16-bit weight for the gradient of its input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from zsim.cost.kernels import fp8
from zsim.cost.kernels.kernel import Kernel, Layout, elementwise
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.kernels.update import cat_launches
from zsim.operations.linear import dequantise_kernels, is_dequantised
from zsim.operations.operation import Kernels, Module, Operation, Role
from zsim.operations.tensors import ModuleTensors

GroupedKernel = Literal["grouped", "streams", "loop"]
"""One kernel for all experts; a product per expert on four streams (Transformer Engine); one after the
other."""
# The streams of a grouped product in Transformer Engine 2.17 (common/gemm/cublaslt_gemm.cu,
# `multi_stream_cublas_gemm`, `nvte_get_num_compute_streams`); the host launches a product per expert.
STREAMS = 4
_MULTIPLES = {"mxfp8": 32, "nvfp4": 128}  # of rows; 16 of other recipes (`get_align_size_for_quantization`)


@dataclass(frozen=True, slots=True)
class GroupedLinear(Operation):
    """The products of `num_experts` experts, each of its own rows with its own `in_features x out_features`
    weight.
    """

    num_experts: int
    in_features: int
    out_features: int
    kernel: GroupedKernel = "grouped"
    has_even_rows: bool = False
    """Every expert has exactly as many rows, as where they are padded. Otherwise a router draws them."""
    scored_bias_bytes: int = 0
    """Bytes of one score, where an expert's bias is multiplied by the row's score and added after the
    product, expert by expert. 0 if the bias is added as it is.
    """
    is_merged: bool = False
    """The weight is a sum with adapters', so that it gets a gradient though it is frozen itself."""
    is_adapter: bool = False
    """The product reads the rows that the adapted product reads."""
    pads: Literal["", "map", "copies"] = ""
    """In fp8 every expert has rows up to a multiple: in the routing map, or by copies."""
    position: Literal["", "first", "last"] = ""
    """Under Megatron, whether it is the first of an expert's products, which reads the layer's rows, or the
    last, which makes them.
    """

    @property
    def role(self) -> Role:
        return Role.EXPERT_PRODUCT

    @property
    def num_weights(self) -> int:
        return self.num_experts

    def is_fp8(self, options: WorkOptions) -> bool:
        """Whether the experts' products run in fp8, as Transformer Engine's do."""
        is_engine = options.dtype == "fp8" and options.fp8.is_transformer_engine
        return is_engine and self.in_features % 16 == 0 and self.out_features % 16 == 0

    def computed_rows(self, shape: BatchShape, options: WorkOptions) -> int:
        """Rows of a product with those that quantised ones pad: each expert's up to a multiple, of which half
        are missing in the mean (Transformer Engine d0067d0d pytorch/module/fp8_padding.py).
        """
        if not (self.pads and self.is_fp8(options)):
            return shape.tokens
        multiple = _MULTIPLES.get(options.fp8.recipe, 16)
        return shape.tokens + self.num_experts * (multiple - 1) // 2

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """The product of every expert. Its bias, one row per expert, is added to its rows."""
        rows = self.computed_rows(shape, options)
        n, k = self.out_features, self.in_features
        casts: Kernels = ()
        if self.is_fp8(options):
            input_casts = () if module.shares_input else self._casts(rows * k, options)
            numel, is_trained = self.num_experts * k * n, module.trains_weight
            weight_casts = fp8.weight_casts(numel, options, is_backward=False, is_trained=is_trained)
            casts = (*input_casts, *weight_casts)
        copies_before, copies_after = self._padding_copies(shape, options, is_backward=False)
        if self._concatenates_rows:
            casts = (*casts, elementwise(2 * rows * k * options.activation_bytes, options.kernel_dtype))
        products = (*dequantise_kernels(module, options), self._product(module, rows, (n, k), options, "nt"))
        has_bias = module.has_bias
        bias: Kernels = ()
        if self.scored_bias_bytes:
            bias = self._scored_bias(rows, options).forward
        elif has_bias:
            bias = (elementwise(3 * rows * n * options.activation_bytes, options.kernel_dtype, 2),)
        return (*copies_before, *casts, *products, *bias, *copies_after)

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """Gradients of the rows, then of the weights."""
        input_gradient = self.input_gradient_kernels(module, shape, options)
        return (*input_gradient, *self.weight_gradient_kernels(module, shape, options))

    def input_gradient_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        rows, element = self.computed_rows(shape, options), options.activation_bytes
        n, k = self.out_features, self.in_features
        kernels: Kernels = (self._product(module, rows, (k, n), options, "nn"),)
        if self.is_fp8(options):
            weights = fp8.weight_casts(self.num_experts * k * n, options, is_backward=True)
            kernels = (*self._casts(rows * n, options), *weights, *kernels)
        if (module.shares_input or self.is_adapter) and not options.compile:
            kernels = (*kernels, elementwise(3 * rows * k * element, options.kernel_dtype))
        if self._concatenates_rows:
            passes = self.num_experts + 2 + 3 * (self.num_experts - 1)
            launches = 3 * self.num_experts - 1
            kernels = (*kernels, elementwise(passes * rows * k * element, options.kernel_dtype, launches))
        if self.scored_bias_bytes:
            kernels = (*self._scored_bias(rows, options).backward, *kernels)
        copies_before, copies_after = self._padding_copies(shape, options, is_backward=True)
        return (*copies_after, *kernels, *copies_before)

    def weight_gradient_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """() for frozen weights."""
        if not module.trains_weight:
            return ()
        rows, n, k = self.computed_rows(shape, options), self.out_features, self.in_features
        product = self._product(module, rows, (n, k), options, "tn")
        if self.scored_bias_bytes or not module.has_bias:
            return (product,)
        return product, elementwise(2 * rows * n * options.activation_bytes, options.kernel_dtype, 2)

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """The rows, unless the weight is frozen, and the whole weight where forward made it of 4 bits."""
        if is_dequantised(module):  # adapters' sums are kept by what makes them
            numel = 0 if self.is_merged else self.num_experts * self.in_features * self.out_features
            return numel * options.activation_bytes
        if module.shares_input or not module.trains_weight:
            return 0
        numel = self.computed_rows(shape, options) * self.in_features
        return options.fp8.operand_bytes(numel) if self.is_fp8(options) else numel * options.activation_bytes

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        is_passed_on = is_dequantised(module) and self.is_merged
        weights = self.num_experts * self.in_features * self.out_features if is_passed_on else 0
        return (shape.tokens * self.out_features + weights) * options.activation_bytes

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return shape.tokens * (self.out_features + self.in_features) * options.activation_bytes

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        element = shape.tokens * options.activation_bytes
        outputs, inputs = element * self.out_features, element * self.in_features
        return ModuleTensors((module.saved_bytes(shape, options),), (outputs,), (outputs, inputs))

    @property
    def _concatenates_rows(self) -> bool:
        """Whether an adapter copies the rows of every expert into one tensor before its products:
        Megatron-Bridge's (0.6.0 peft/utils.py `GroupedExpertLinearAdapter.forward`). Backward of each slice
        writes zeros for all rows and the slice into them. The slices' gradients are added up.
        """
        return self.is_adapter and self.kernel == "grouped" and self.num_experts > 1

    def _scored_bias(self, rows: int, options: WorkOptions) -> _ForwardAndBackward:
        """The bias of the second product, which Megatron (core 0.16.1 core/transformer/moe/experts.py
        `TEGroupedMLP._apply_bias`) and NeMo AutoModel add themselves, eager.

        With e bytes per element of the output, p per score and w = max(e, p): for each expert the bias times
        the scores (writes p) and its sum with the rows (reads e and p, writes w). The experts' rows are
        concatenated (reads and writes w) and cast back where w > e (reads w, writes e). Backward: the cast.
        The sum passes w on, in e to the rows (a cast where w > e), whose parts are concatenated (2 e). The
        product's two gradients are each a product (reads w, writes p) summed up (reads p). Every product has
        a broadcast factor.
        """
        e, p = options.activation_bytes, self.scored_bias_bytes
        w, count = max(e, p), self.num_experts
        cast, casts = (w + e, 1) if w > e else (0, 0)
        numel = rows * self.out_features
        forward = (e + p + w) + 2 * w + cast
        backward = 2 * cast + 2 * e + 2 * p
        return _ForwardAndBackward(
            (
                _broadcast_products(numel, p, count, options),
                elementwise(numel * forward, options.kernel_dtype, count + 1 + casts),
            ),
            (
                _broadcast_products(2 * numel, w + p, 2 * count, options),
                elementwise(numel * backward, options.kernel_dtype, (2 + casts) * count + 1 + casts),
            ),
        )

    def _casts(self, numel: int, options: WorkOptions) -> Kernels:
        """Casts of the experts' rows. With delayed scales in both directions, and in nvfp4, they are one
        kernel for all. Otherwise they are those of each expert (Transformer Engine d0067d0d
        pytorch/csrc/extensions/cast.cpp `split_quantize`, `multi_tensor_quantize_impl`).
        """
        casts, recipe = fp8.cast(numel, options), options.fp8
        if recipe.recipe == "nvfp4" or (recipe.recipe == "delayed" and recipe.transposes):
            return tuple(casts)
        return tuple(replace(kernel, launches=kernel.launches * self.num_experts) for kernel in casts)

    def _product(
        self, module: Module, rows: int, features: tuple[int, int], options: WorkOptions, layout: Layout
    ) -> Kernel:
        """The experts' products: 2 R n k FLOPs, with R rows of all experts. They are priced at the rows of
        one expert in the mean, in fp8 at a multiple of 16, as every expert's are padded. Transformer Engine's
        GroupedLinear calls its own product for each expert (`multi_stream_cublas_gemm`).
        """
        n, k = features
        rows_per_expert = max(1, round(rows / self.num_experts))
        is_fp8 = self.is_fp8(options)
        is_transformer_engine = is_fp8 or module.runs_in_transformer_engine(options)
        rows_per_expert = -(-rows_per_expert // 16) * 16 if is_fp8 else rows_per_expert
        shape = (n, k, rows_per_expert) if layout == "tn" else (rows_per_expert, n, k)
        e, operand = options.activation_bytes, 1 if is_fp8 else options.activation_bytes
        weights, outputs = self.num_experts * n * k, rows * n
        if layout == "tn":
            moved_bytes = (rows * n + rows * k) * operand + weights * e
        else:
            moved_bytes = (rows * k + weights) * operand + outputs * e
        launches = 1 if self.kernel == "grouped" else self.num_experts
        streams = STREAMS if self.kernel == "streams" else 1
        dtype = options.fp8.dtype if is_fp8 else options.kernel_dtype
        flops = 2.0 * rows * n * k
        return Kernel(
            "gemm",
            flops,
            float(moved_bytes),
            dtype,
            shape,
            launches,
            layout="nt" if is_fp8 else layout,
            is_grouped=self.kernel == "grouped",
            has_uneven_rows=layout != "tn" and not self.has_even_rows,
            is_transformer_engine=is_transformer_engine and self.kernel != "grouped",
            concurrent_launches=streams,
        )

    def _padding_copies(
        self, shape: BatchShape, options: WorkOptions, *, is_backward: bool
    ) -> tuple[Kernels, Kernels]:
        """The copies of rows before and after an expert's products in one direction: of a first product those
        on its input's side, of a last one on its output's.

        For grouped products a kernel reads the rows and writes them with their padding, or the other way
        round (`fused_multi_row_padding`), the same in either direction. Before, another does so with their
        scores. For products that run one by one see `_sequential_copies`.
        """
        if self.kernel == "loop":
            return self._sequential_copies(shape, options, is_backward=is_backward)
        padded = self.computed_rows(shape, options)
        if padded == shape.tokens or self.pads == "map":
            return (), ()
        is_first = self.position == "first"
        width = self.in_features if is_first else self.out_features
        copies = (_copies((shape.tokens + padded) * width, 2 if is_first else 1, options),)
        return (copies, ()) if is_first else ((), copies)

    def _sequential_copies(
        self, shape: BatchShape, options: WorkOptions, *, is_backward: bool
    ) -> tuple[Kernels, Kernels]:
        """`SequentialMLP` (Megatron-Core 0.16.1 core/transformer/moe/experts.py), in passes over R rows.

        The outputs of several experts are joined (reads R, writes R), as are the gradients of their inputs.
        In fp8 an expert whose rows are no multiple (all but one in m, where the multiple is m) has, before
        the first product, zeros for the missing rows, both joined, and the scores likewise. After the last
        product the rows without them are a view, whose gradient is zeros for all rows and a copy into them
        (every expert's).
        """
        rows, count, is_first = shape.tokens, self.num_experts, self.position == "first"
        width = self.in_features if is_first else self.out_features
        copies: Kernels = ()
        padded = self.computed_rows(shape, options)
        if self.pads == "copies" and padded > rows:
            multiple = _MULTIPLES.get(options.fp8.recipe, 16)
            share, missing = (multiple - 1) / multiple, padded - rows
            if is_first and not is_backward:
                copies = (_copies((2 * share * rows + 3 * missing) * width, 4 * count, options),)
            elif not is_first and is_backward:
                copies = (_copies((padded + 2 * rows) * width, 2 * count, options),)
        if count > 1 and self.position and is_first == is_backward:
            concatenation = _copies(2 * rows * width, cat_launches(count), options)
            copies = (*copies, concatenation) if is_first else (concatenation, *copies)
        return (copies, ()) if is_first else ((), copies)


@dataclass(frozen=True, slots=True)
class _ForwardAndBackward:
    """Kernels of forward and of backward."""

    forward: Kernels
    backward: Kernels


def _broadcast_products(elements: int, each_bytes: int, launches: int, options: WorkOptions) -> Kernel:
    """Products with a broadcast factor, see [Note: kernels that walk strides] of `layer_kernels`."""
    moved_bytes = float(elements * each_bytes)
    return Kernel(
        "elementwise", 0.0, moved_bytes, options.kernel_dtype, (), launches, strided_elements=elements
    )


def _copies(elements: float, launches: int, options: WorkOptions) -> Kernel:
    moved_bytes = float(elements * options.activation_bytes)
    return Kernel("elementwise", 0.0, moved_bytes, options.kernel_dtype, (), launches)
