"""The kernels of adapters that are merged into experts' weights: see [Note: adapters on experts] of
`zsim.specs.model.expert_adapters`."""

from __future__ import annotations

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.specs.model.experts import MergedWeights
from zsim.specs.model.spec import Module

Kernels = tuple[Kernel, ...]


def merged_forward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """Adapters' weights cast, and added to the experts', twice: torch's `register_parametrization` makes the
    sum once to compare shapes (2.13 nn/utils/parametrize.py). PEFT 0.21.2 `_LoraFactorsProxy`: one `baddbmm`
    of E products, out x rank by rank x in, 2 E out in r FLOPs."""
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
        _elementwise(2 * work.num_experts * n * r * e, options),
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
    return (_elementwise(numel * (4 + options.activation_bytes), options, 2),)


def _merged_weights(module: Module) -> MergedWeights:
    assert isinstance(module.op_spec, MergedWeights)
    return module.op_spec


def _elementwise(num_bytes: float, options: WorkOptions, launches: int = 1) -> Kernel:
    return Kernel("elementwise", 0.0, float(num_bytes), options.kernel_dtype, (), launches)
