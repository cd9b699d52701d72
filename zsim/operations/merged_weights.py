"""Adapters that are merged into the weights of routed experts."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.cost.kernels.kernel import Kernel, elementwise
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import Kernels, Module, Operation
from zsim.operations.tensors import ModuleTensors, Sizes


@dataclass(frozen=True, slots=True)
class MergedWeights(Operation):
    """The weights of `num_experts` experts, to which adapters are added before a product reads the sum.

    The weights are `in_features x out_features` and the adapters of rank `rank`.
    """

    num_experts: int
    in_features: int
    out_features: int
    rank: int
    casts: bool = False
    """Both of the adapters' weights are cast from fp32."""

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """Adapters' weights cast, and added to the experts', twice: torch's `register_parametrization` makes
        the sum once to compare shapes (2.13 nn/utils/parametrize.py). PEFT 0.21.2 `_LoraFactorsProxy`: one
        `baddbmm` of E products, out x rank by rank x in, 2 E out in r FLOPs. See [Note: adapters on experts]
        of `zsim.specs.model.expert_adapters`.
        """
        casts = self._factor_casts(options)
        return (*casts, *(self._low_rank(options, (self.out_features, self.in_features, self.rank)),) * 2)

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """The gradients of both factors, each a product with the gradient of the sum. B's is brought into the
        order of its parameter, in fp32.
        """
        e = 4 if self.casts else options.activation_bytes
        n, k, r = self.out_features, self.in_features, self.rank
        products = self._low_rank(options, (n, r, k)), self._low_rank(options, (r, k, n))
        return (
            *products,
            *self._factor_casts(options),
            elementwise(2 * self.num_experts * n * r * e, options.kernel_dtype),
        )

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return sum(self._saved(options))

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """Weights that are merged are made once before, to look at their shape (torch 2.13
        nn/utils/parametrize.py).
        """
        return self._numel * options.activation_bytes

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return (self._numel + self._factors) * options.activation_bytes

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        weights = self._numel * options.activation_bytes
        saved = self._saved(options)
        return ModuleTensors(saved, (weights,), (weights, self._factors * options.activation_bytes))

    def _saved(self, options: WorkOptions) -> Sizes:
        """The sums in full, and the adapters' weights that were cast."""
        e = options.activation_bytes
        return (self._numel * e, *((self._factors * e,) if self.casts else ()))

    @property
    def _numel(self) -> int:
        """Elements of all experts' weights."""
        return self.num_experts * self.in_features * self.out_features

    @property
    def _factors(self) -> int:
        """Elements of both of the adapters' weights."""
        return self.num_experts * self.rank * (self.in_features + self.out_features)

    def _low_rank(self, options: WorkOptions, shape: tuple[int, int, int]) -> Kernel:
        """E products among the weights' size and the two factors'."""
        n, k, r = self.out_features, self.in_features, self.rank
        reads = 2 if shape[2] == r else 1  # the weights and their sum, or the gradient of the sum
        moved_bytes = self.num_experts * (reads * n * k + n * r + k * r) * options.activation_bytes
        flops = 2.0 * self.num_experts * n * k * r
        return Kernel("gemm", flops, float(moved_bytes), options.kernel_dtype, shape, layout="nn")

    def _factor_casts(self, options: WorkOptions) -> Kernels:
        if not self.casts or options.activation_bytes == 4:
            return ()
        numel = self.num_experts * self.rank * (self.in_features + self.out_features)
        return (elementwise(numel * (4 + options.activation_bytes), options.kernel_dtype, 2),)
