"""The loss of a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zsim.cost.kernels.losses import AUTOCAST, LossKernelSet
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import Kernels, Module, Operation, Role
from zsim.operations.tensors import ModuleTensors, Sizes


@dataclass(frozen=True, slots=True)
class Loss(Operation):
    """Cross-entropy over the vocabulary."""

    vocab_size: int
    num_metrics: int = 0
    """Times that torch's cross-entropy of the held logits is computed again after each backward, for
    logging.
    """
    holds_logits: Literal["no", "as they are", "in fp32"] = "no"
    """The trainer keeps a reference to the logits, as they are or cast to fp32, until those of the next
    micro-batch replace them. With "no" it releases them before backward.
    """

    @property
    def is_function(self) -> bool:
        return True

    @property
    def role(self) -> Role:
        return Role.LOSS

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        return self._kernels(options.loss, shape, options, is_backward=False)

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        return self._kernels(options.loss, shape, options, is_backward=True)

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """The tensors that the kernels keep. Logits that the trainer holds anyway are not counted."""
        return sum(self._kept(shape, options))

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return sum(self._temporaries(shape, options, is_backward=False))

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return sum(self._temporaries(shape, options, is_backward=True))

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        return ModuleTensors(
            self._kept(shape, options),
            self._temporaries(shape, options, is_backward=False),
            self._temporaries(shape, options, is_backward=True),
        )

    def metric_kernels(self, shape: BatchShape, options: WorkOptions) -> Kernels:
        """composer's LanguageCrossEntropy or Perplexity: torch's loss under autocast, forward only."""
        return self._kernels(AUTOCAST, shape, options, is_backward=False)

    def metric_sizes(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        """Bytes of each tensor of log-probabilities that a metric makes."""
        return AUTOCAST.kept_sizes(self._logits(shape), options.activation_bytes)

    def _kernels(
        self, loss: LossKernelSet, shape: BatchShape, options: WorkOptions, *, is_backward: bool
    ) -> Kernels:
        e, dtype = options.activation_bytes, options.kernel_dtype
        return loss.kernels(shape.tokens, self.vocab_size, e, dtype, is_backward=is_backward)

    def _kept(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        holds_logits = self.holds_logits == "as they are"
        return options.loss.kept_sizes(
            self._logits(shape), options.activation_bytes, holds_logits=holds_logits
        )

    def _temporaries(self, shape: BatchShape, options: WorkOptions, *, is_backward: bool) -> Sizes:
        return options.loss.temporary_sizes(
            self._logits(shape), options.activation_bytes, is_backward=is_backward
        )

    def _logits(self, shape: BatchShape) -> int:
        return shape.tokens * self.vocab_size
