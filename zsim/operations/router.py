"""The gate of a layer with routed experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zsim.cost.kernels.kernel import Kernel, Layout, elementwise
from zsim.cost.kernels.moved_rows import TRANSFORMERS_KERNELS, ExpertKernelSet, ScoreCost
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import Kernels, Module, Operation, Role
from zsim.operations.tensors import ModuleTensors, Sizes

ScoreFunction = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Router(Operation):
    """The gate's product, the scores, and the choice of `top_k` of `num_experts` experts for every token."""

    in_features: int
    num_experts: int
    top_k: int
    score: ScoreFunction = "softmax"
    num_groups: int = 1
    """Groups of experts. With more than 1, the best `top_groups` of them are left to choose from."""
    top_groups: int = 1
    in_fp32: bool = False
    """The product is of fp32 copies of input and weight."""
    has_fp32_output: bool = False
    """The product is of the operands as they are, summed to fp32."""
    has_choice_bias: bool = False
    """A bias without a gradient is added to the scores for the choice only."""
    normalizes: bool = True
    """The chosen scores are divided by their sum."""
    has_auxiliary_loss: bool = False
    """A loss that balances the experts is computed."""
    library: ExpertKernelSet = TRANSFORMERS_KERNELS
    """The kernels of the library whose gate it is."""
    is_merged: bool = False
    """The weight is a sum with adapters', as in `GroupedLinear`."""

    @property
    def role(self) -> Role:
        return Role.ROUTER

    @property
    def product_features(self) -> tuple[int, int]:
        return self.in_features, self.num_experts

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """Casts of a product in fp32, the gate's product, scores and choice."""
        cost, scores = self._score_cost(), shape.tokens * self.num_experts
        score_kernel = elementwise(scores * cost.forward_bytes, options.kernel_dtype, cost.forward_launches)
        return (*self._casts(shape, options), self._gate(shape, options, "nt"), score_kernel)

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """Scores, the gate's two products (one if it is frozen), casts of what was cast. The input's gradient
        is added to that of the experts.
        """
        cost, scores = self._score_cost(), shape.tokens * self.num_experts
        score_kernel = elementwise(scores * cost.backward_bytes, options.kernel_dtype, cost.backward_launches)
        weight_gradient = (self._gate(shape, options, "tn"),) if module.trains_weight else ()
        width = shape.tokens * self.in_features
        accumulation = elementwise(3 * width * options.activation_bytes, options.kernel_dtype)
        input_gradient = self._gate(shape, options, "nn")
        return (
            score_kernel,
            input_gradient,
            *weight_gradient,
            *self._casts(shape, options),
            accumulation,
        )

    def forward_flops(self, module: Module, sequence_length: int) -> float:
        return 2.0 * self.in_features * self.num_experts

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return sum(self._saved(module, shape, options))

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return self._scores(shape)

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return self._scores(shape) + shape.tokens * self.in_features * options.activation_bytes

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        saved = self._saved(module, shape, options)
        scores = self._scores(shape)
        gradients = scores, shape.tokens * self.in_features * options.activation_bytes
        return ModuleTensors(saved, (scores,), gradients)

    def _saved(self, module: Module, shape: BatchShape, options: WorkOptions) -> Sizes:
        """The input (in fp32 where the product is) for the gradient of the weight, and the scores, twice in
        fp32: the output of the function, and the map of tokens to experts with their scores.
        """
        e, scores = options.activation_bytes, self._scores(shape)
        is_copied = self.in_fp32 and e < 4 and module.trains_weight
        shares = module.shares_input or not module.trains_weight
        input_bytes = (
            0 if shares and not is_copied else shape.tokens * self.in_features * (4 if is_copied else e)
        )
        return input_bytes, scores, scores

    def _scores(self, shape: BatchShape) -> int:
        """Bytes of a score in fp32 for every token and expert."""
        return shape.tokens * self.num_experts * 4

    def _score_cost(self) -> ScoreCost:
        """Cost of the scores. A bias for the choice is a sum more than the library's. Groups take the best
        two scores of each, a mask, and a masked copy. The loss is a sum of scores and one of the map.
        """
        gates = self.library.gates
        if gates:
            return gates[min(self.top_k, len(gates)) - 1]
        cost = self.library.scores
        forward, launches = cost.forward_bytes, cost.forward_launches
        backward, back_launches = cost.backward_bytes, cost.backward_launches
        if self.has_choice_bias:
            forward, launches = forward + 8, launches + 1
        if self.num_groups > 1:
            forward, launches = forward + 12, launches + 7
        if self.has_auxiliary_loss:
            forward, launches, backward, back_launches = (
                forward + 12,
                launches + 6,
                backward + 8,
                back_launches + 4,
            )
        return ScoreCost(forward, launches, backward, back_launches)

    def _casts(self, shape: BatchShape, options: WorkOptions) -> Kernels:
        """The input cast between the activations' type and fp32, in one direction."""
        if not self.in_fp32 or options.activation_bytes == 4:
            return ()
        return (elementwise(shape.tokens * self.in_features * 6, options.kernel_dtype, 2),)

    def _gate(self, shape: BatchShape, options: WorkOptions, layout: Layout) -> Kernel:
        tokens, experts, width = shape.tokens, self.num_experts, self.in_features
        shapes = {
            "nt": (tokens, experts, width),
            "nn": (tokens, width, experts),
            "tn": (experts, width, tokens),
        }
        dtype = "fp32" if self.in_fp32 else options.kernel_dtype
        operand = 4 if self.in_fp32 else options.activation_bytes
        score = 4 if self.in_fp32 or self.has_fp32_output else options.activation_bytes
        moved_bytes = (tokens * width + width * experts) * operand + tokens * experts * score
        flops = 2.0 * tokens * experts * width
        return Kernel("gemm", flops, float(moved_bytes), dtype, shapes[layout], layout=layout)
