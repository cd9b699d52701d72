"""Recurrences: their kernels, and how ranks share them.

A recurrence carries a state from token to token. Its kernels work through chunks of the sequence, of which
only the states are computed one after the other. They keep what they read, and backward makes the states
again. Gates, repeated heads and norms around them are elementwise kernels.

Each mixer says what its kernels do per token (`Scan`), in one direction. Backward moves and computes what is
derived from the kernels' code, at the rates of forward, since nobody publishes its times.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar, NamedTuple

from zsim.cost.kernels.kernel import Kernel, ScanKind, elementwise
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import Kernels, Module, Operation, Role
from zsim.operations.tensors import ModuleTensors, Sizes


class Scan(NamedTuple):
    """The kernels of a recurrence in one direction, per token of a rank."""

    flops: float
    hbm_bytes: float
    launches: int
    walks: int = 1
    """Kernels that go through a sequence's chunks one after the other."""


class ElementwiseWork(NamedTuple):
    """Elementwise kernels beside them: bytes per token, and launches."""

    hbm_bytes: float = 0.0
    launches: int = 0


@dataclass(frozen=True, slots=True)
class LinearMixer(Operation):
    """A recurrence over the tokens of a sequence."""

    title: ClassVar[str] = ""
    """Its name in sentences."""
    scan_kind: ClassVar[ScanKind] = "delta_scan"
    """The kind of its kernels."""

    @property
    def role(self) -> Role:
        return Role.MIXER

    @property
    def mixer_title(self) -> str:
        return self.title

    @property
    def is_run_again(self) -> bool:
        """Selective recomputation is of attention alone. These kernels make the states again by themselves
        (Megatron-LM d98e8a64 core/transformer/transformer_config.py lists no module of theirs).
        """
        return False

    @property
    def is_inner(self) -> bool:
        return True

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        raise NotImplementedError

    def forward_scan(self, element: int) -> Scan:
        """The kernels of forward, with activations of `element` bytes."""
        raise NotImplementedError

    def backward_scan(self, element: int) -> Scan:
        """The kernels of backward."""
        raise NotImplementedError

    def forward_passes(self, options: WorkOptions) -> ElementwiseWork:
        """The elementwise kernels before and after them in forward."""
        return ElementwiseWork()

    def backward_passes(self, options: WorkOptions) -> ElementwiseWork:
        """The elementwise kernels of backward."""
        return ElementwiseWork()

    def kept_sizes(self, options: WorkOptions) -> tuple[float, ...]:
        """Bytes per token of each tensor that autograd keeps."""
        raise NotImplementedError

    @property
    def output_elements(self) -> int:
        """Elements of its output per token."""
        raise NotImplementedError

    @property
    def input_elements(self) -> int:
        """Elements that it reads per token."""
        raise NotImplementedError

    # -- work ----------------------------------------------------------------------------------------------

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """The elementwise kernels, then those of the recurrence."""
        scan = self.forward_scan(options.activation_bytes)
        return (*_passes(self.forward_passes(options), shape, options), self._scan(scan, shape, options))

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """The kernels of the recurrence, then the elementwise ones."""
        scan = self.backward_scan(options.activation_bytes)
        return (self._scan(scan, shape, options), *_passes(self.backward_passes(options), shape, options))

    def forward_flops(self, module: Module, sequence_length: int) -> float:
        return self.forward_scan(2).flops

    def training_flops(self, module: Module, sequence_length: int) -> float:
        return self.forward_scan(2).flops + self.backward_scan(2).flops

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return sum(self._saved(shape, options))

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return sum(self._made(shape, options))

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """The gradients of output and inputs, and the states with their gradients."""
        states = self._made(shape, options)[1]
        return self._activation_bytes(shape, options, self.output_elements + self.input_elements) + 2 * states

    def kept_outputs(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        return (self._activation_bytes(shape, options, self.output_elements),)

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        output, states = self._made(shape, options)
        inputs = self._activation_bytes(shape, options, self.input_elements)
        return ModuleTensors(self._saved(shape, options), (output, states), (output, inputs, states, states))

    def state_bytes(self) -> float:
        """Bytes of the states of all heads at the end of a chunk, per token."""
        return 0.0

    def _made(self, shape: BatchShape, options: WorkOptions) -> tuple[int, int]:
        """Bytes of the output, and of the states of all chunks."""
        output = self._activation_bytes(shape, options, self.output_elements)
        return output, round(shape.tokens * self.state_bytes())

    def _saved(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        return tuple(round(shape.tokens * size) for size in self.kept_sizes(options))

    def _activation_bytes(self, shape: BatchShape, options: WorkOptions, elements: int) -> int:
        return shape.tokens * elements * options.activation_bytes

    def _scan(self, scan: Scan, shape: BatchShape, options: WorkOptions) -> Kernel:
        chunks = ceil((shape.span or shape.sequence_length) / self.chunk_tokens)
        return Kernel(
            self.scan_kind,
            shape.tokens * scan.flops,
            shape.tokens * scan.hbm_bytes,
            options.kernel_dtype,
            (shape.sequences, chunks * scan.walks),
            scan.launches,
        )


def _passes(passes: ElementwiseWork, shape: BatchShape, options: WorkOptions) -> Kernels:
    if not passes.launches:
        return ()
    return (elementwise(shape.tokens * passes.hbm_bytes, options.kernel_dtype, passes.launches),)
