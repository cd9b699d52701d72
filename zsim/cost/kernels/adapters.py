"""The kernels of adapters around their two products, merged into experts, and of 4-bit weights.

# [Note: what an adapter casts]
PEFT 0.21.2 casts the adapter's input to the adapter's type (`_cast_input_dtype`), which is fp32 by default
(`autocast_adapter_dtype`). Where autocast is on, the product casts it back to 16 bits. Where it is not, the
adapter's products are fp32, and so is the sum, which is cast back.

# [Note: 4-bit products]
bitsandbytes 0.50.2 dequantises the weight before the product in forward (backends/cuda/ops.py `gemm_4bit`: in
one kernel with it only below 1,536 tokens) and again before the product of the input's gradient
(autograd/_functions.py `MatMul4Bit.backward`). Quantised scales are dequantised first, and their mean added.
What it reads is cast to 16 bits, what it makes to the type of that (nn/modules.py `Linear4bit.forward`), and
PEFT copies it (0.21.2 tuners/lora/bnb.py `Linear4bit.forward`).
"""

from __future__ import annotations

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.specs.model.experts import MergedWeights
from zsim.specs.model.spec import AdapterInput, AdapterSum, Linear, Module

Kernels = tuple[Kernel, ...]
_BLOCK, _SCALE_BLOCK = 64, 256  # elements of a block with a scale, scales of a block with a scale of its own
_FP32, _LOW = 4, 2  # bytes of an element


def product_type(spec: Linear, options: WorkOptions) -> tuple[int, str]:
    """Bytes of an element, and the type, in which a product is computed."""
    return (_FP32, "fp32") if spec.dtype == "fp32" else (options.activation_bytes, options.kernel_dtype)


def input_forward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """Cast, dropout, cast back. See [Note: what an adapter casts]."""
    spec = module.op_spec
    assert isinstance(spec, AdapterInput)
    elements, e = shape.tokens * spec.width, options.activation_bytes
    adapter_element = adapter_bytes(spec, options)
    kernels = [_elementwise(elements * (e + adapter_element))] if adapter_element != e else []
    if spec.dropout:
        kernels.append(_elementwise(elements * (2 * adapter_element + 1)))
    if spec.recasts:
        kernels.append(_elementwise(elements * (_LOW + adapter_element)))
    return tuple(kernels)


def adapter_bytes(spec: AdapterInput, options: WorkOptions) -> int:
    """Bytes of an element of an adapter's input as dropout sees it."""
    return _FP32 if spec.dtype == "fp32" or spec.recasts else options.activation_bytes


def sum_forward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """`result + lora_B(...) * scaling`: a product with a number, a sum, and a cast where types differ."""
    spec = module.op_spec
    assert isinstance(spec, AdapterSum)
    elements, e = shape.tokens * spec.width, options.activation_bytes
    adapter_element = _FP32 if spec.dtype == "fp32" else e
    kernels = [
        _elementwise(elements * 2 * adapter_element),
        _elementwise(elements * (e + 2 * adapter_element)),
    ]
    return (
        (*kernels, _elementwise(elements * (e + adapter_element))) if adapter_element != e else tuple(kernels)
    )


def sum_backward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """The gradient goes to the frozen product as it is, and scaled to the adapter."""
    spec = module.op_spec
    assert isinstance(spec, AdapterSum)
    elements, e = shape.tokens * spec.width, options.activation_bytes
    adapter_element = _FP32 if spec.dtype == "fp32" else e
    scale = _elementwise(elements * 2 * adapter_element)
    return (_elementwise(elements * (e + adapter_element)), scale) if adapter_element != e else (scale,)


def casts_around(module: Module, shape: BatchShape, *, is_backward: bool) -> tuple[Kernels, Kernels]:
    """The casts before and after a 16-bit product of which input and output are fp32. See [Note: 4-bit
    products].
    """
    spec = module.op_spec
    if not module.in_fp32 or not isinstance(spec, Linear):
        return (), ()
    input_elements, output_elements = shape.tokens * spec.in_features, shape.tokens * spec.out_features
    if is_backward:
        input_elements, output_elements = output_elements, input_elements
    copy = 0 if is_backward else 2 * _FP32
    return (_elementwise(input_elements * (_FP32 + _LOW)),), (
        _elementwise(output_elements * (_FP32 + _LOW + copy)),
    )


def dequantise_kernels(module: Module, options: WorkOptions) -> Kernels:
    """The kernels that make 16-bit weights of 4-bit ones. () for other weights. See [Note: 4-bit
    products].
    """
    weight = next(
        (parameter for parameter in module.parameters if parameter.stored_dtype.startswith("nf4")), None
    )
    if weight is None:
        return ()
    numel, scales = weight.numel, -(-weight.numel // _BLOCK)
    product = _elementwise(numel / 2 + _FP32 * scales + numel * options.activation_bytes)
    if weight.stored_dtype != "nf4":
        return (product,)
    scale_bytes = scales + _FP32 * -(-scales // _SCALE_BLOCK) + _FP32 * scales
    return (_elementwise(scale_bytes), _elementwise(2 * _FP32 * scales), product)


def _elementwise(count: float) -> Kernel:
    return Kernel("elementwise", 0.0, float(count), "fp32")


def merged_forward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """Adapters' weights cast, and added to the experts', twice: torch's `register_parametrization` makes the
    sum once to compare shapes (2.13 nn/utils/parametrize.py). PEFT 0.21.2 `_LoraFactorsProxy`: one `baddbmm`
    of E products, out x rank by rank x in, 2 E out in r FLOPs. See [Note: adapters on experts] of
    `zsim.specs.model.expert_adapters`.
    """
    work, casts = _merged_weights(module), _factor_casts(module, options)
    return (*casts, *(_low_rank(work, options, (work.out_features, work.in_features, work.rank)),) * 2)


def merged_backward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """The gradients of both factors, each a product with the gradient of the sum. B's is brought into the
    order of its parameter, in fp32.
    """
    work, e = _merged_weights(module), 4 if _merged_weights(module).casts else options.activation_bytes
    n, k, r = work.out_features, work.in_features, work.rank
    products = _low_rank(work, options, (n, r, k)), _low_rank(work, options, (r, k, n))
    return (
        *products,
        *_factor_casts(module, options),
        _elementwise_launches(2 * work.num_experts * n * r * e, options),
    )


def _low_rank(work: MergedWeights, options: WorkOptions, shape: tuple[int, int, int]) -> Kernel:
    """E products among the weights' size and the two factors'."""
    n, k, r = work.out_features, work.in_features, work.rank
    reads = 2 if shape[2] == r else 1  # the weights and their sum, or the gradient of the sum
    moved_bytes = work.num_experts * (reads * n * k + n * r + k * r) * options.activation_bytes
    flops = 2.0 * work.num_experts * n * k * r
    return Kernel("gemm", flops, float(moved_bytes), options.kernel_dtype, shape, layout="nn")


def _factor_casts(module: Module, options: WorkOptions) -> Kernels:
    work = _merged_weights(module)
    if not work.casts or options.activation_bytes == 4:
        return ()
    numel = work.num_experts * work.rank * (work.in_features + work.out_features)
    return (_elementwise_launches(numel * (4 + options.activation_bytes), options, 2),)


def _merged_weights(module: Module) -> MergedWeights:
    assert isinstance(module.op_spec, MergedWeights)
    return module.op_spec


def _elementwise_launches(num_bytes: float, options: WorkOptions, launches: int = 1) -> Kernel:
    return Kernel("elementwise", 0.0, float(num_bytes), options.kernel_dtype, (), launches)
