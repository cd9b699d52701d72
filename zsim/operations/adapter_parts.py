"""The parts of a low-rank adapter around its two products.

# [Note: what an adapter casts]
PEFT 0.21.2 casts the adapter's input to the adapter's type (`_cast_input_dtype`), which is fp32 by default
(`autocast_adapter_dtype`). Where autocast is on, the product casts it back to 16 bits. Where it is not, the
adapter's products are fp32, and so is the sum, which is cast back.

unsloth's adapters cast A and B to the type of the activations, and `addmm_` puts B's product on the frozen
one's (015bdef0 kernels/utils.py `matmul_lora`). In backward kernels/fast_lora.py makes A's product and that
of the gradient with B once more, which is not priced.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.cost.kernels.kernel import elementwise
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import Kernels, Module, Operation

_FP32, _LOW = 4, 2  # bytes of an element


@dataclass(frozen=True, slots=True)
class AdapterInput(Operation):
    """Preparation of an adapter's input: a cast to `dtype` (fp32, or empty for none), and dropout."""

    width: int
    dropout: float = 0.0
    dtype: str = ""
    recasts: bool = False
    """The input is also cast to fp32, and autocast casts it back at the product."""

    @property
    def is_adapter_part(self) -> bool:
        return True

    @property
    def reads_adapted_input(self) -> bool:
        return True

    @property
    def keeps_input_type(self) -> bool:
        return True

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """Cast, dropout, cast back. See [Note: what an adapter casts]."""
        elements, e = shape.tokens * self.width, options.activation_bytes
        adapter_element = self._element(options)
        kernels = [elementwise(elements * (e + adapter_element), "fp32")] if adapter_element != e else []
        if self.dropout:
            kernels.append(elementwise(elements * (2 * adapter_element + 1), "fp32"))
        if self.recasts:
            kernels.append(elementwise(elements * (_LOW + adapter_element), "fp32"))
        return tuple(kernels)

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        return self.forward_kernels(module, shape, options)

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """The mask of dropout, a byte an element."""
        return shape.tokens * self.width if self.dropout else 0

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """The input as it is cast, with dropout its output too."""
        adapter_element = self._element(options)
        cast = adapter_element if adapter_element != options.activation_bytes else 0
        return shape.tokens * self.width * (cast + (adapter_element if self.dropout else 0))

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return self.forward_extra_bytes(module, shape, options)

    def _element(self, options: WorkOptions) -> int:
        """Bytes of an element of the adapter's input as dropout sees it."""
        return _FP32 if self.dtype == "fp32" or self.recasts else options.activation_bytes


@dataclass(frozen=True, slots=True)
class AdapterSum(Operation):
    """The adapter's output times its scale, added to the product's output, and cast back."""

    width: int
    dtype: str = ""
    """The type of the adapter's output. Empty for the training's."""
    is_in_product: bool = False
    """The adapter's product itself adds to the frozen one's output, which it reads."""

    @property
    def is_function(self) -> bool:
        return True

    @property
    def is_adapter_part(self) -> bool:
        return True

    @property
    def keeps_input_type(self) -> bool:
        return True

    @property
    def saves_nothing(self) -> bool:
        return True

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """`result + lora_B(...) * scaling`: a product with a number, a sum, and a cast where types differ."""
        elements, e = shape.tokens * self.width, options.activation_bytes
        if self.is_in_product:
            return (elementwise(elements * e, "fp32"),)
        adapter_element = self._element(options)
        kernels = (
            elementwise(elements * 2 * adapter_element, "fp32"),
            elementwise(elements * (e + 2 * adapter_element), "fp32"),
        )
        if adapter_element == e:
            return kernels
        return (*kernels, elementwise(elements * (e + adapter_element), "fp32"))

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """The gradient goes to the frozen product as it is, and scaled to the adapter."""
        if self.is_in_product:
            return ()
        elements, e = shape.tokens * self.width, options.activation_bytes
        adapter_element = self._element(options)
        scale = elementwise(elements * 2 * adapter_element, "fp32")
        if adapter_element == e:
            return (scale,)
        return (elementwise(elements * (e + adapter_element), "fp32"), scale)

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """The scaled output and the sum, in the wider type, and one more where the sum is cast."""
        if self.is_in_product:
            return 0
        e, adapter_element = options.activation_bytes, self._element(options)
        return shape.tokens * self.width * (2 * adapter_element + (e if adapter_element != e else 0))

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return self.forward_extra_bytes(module, shape, options)

    def _element(self, options: WorkOptions) -> int:
        """Bytes of an element of the adapter's output."""
        return _FP32 if self.dtype == "fp32" else options.activation_bytes
