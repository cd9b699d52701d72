"""The loss of a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zsim.cost.kernels.losses import (
    log_probabilities,
    loss_kernels,
    saved_bytes_per_logit,
    temporary_bytes_per_logit,
)
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import Kernels, Module, Operation, Role
from zsim.operations.tensors import ModuleTensors


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
        return loss_kernels(shape.tokens, self.vocab_size, options, is_backward=False)

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        return loss_kernels(shape.tokens, self.vocab_size, options, is_backward=True)

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """`saved_bytes_per_logit` of every logit. Logits that the trainer holds anyway are not counted."""
        holds_logits = self.holds_logits == "as they are"
        return self._logits(shape) * saved_bytes_per_logit(options, holds_logits=holds_logits)

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return self._logits(shape) * temporary_bytes_per_logit(options, is_backward=False)

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return self._logits(shape) * temporary_bytes_per_logit(options, is_backward=True)

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        logits = self._logits(shape)
        saved = log_probabilities(logits, options) if options.cross_entropy == "autocast" else ()
        return ModuleTensors(saved, (4 * logits,), (4 * logits,))

    def _logits(self, shape: BatchShape) -> int:
        return shape.tokens * self.vocab_size
