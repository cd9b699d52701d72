"""Collectives between modules of a rank, in line with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.dtypes import DTYPE_BYTES
from zsim.operations.operation import Module, Operation, Role
from zsim.operations.tensors import Sizes

ExchangeKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


class ExchangeLibrary(NamedTuple):
    """The library whose kernels an all-to-all is, "deepep" or "hybridep"."""

    name: str
    forwarded_bytes_fraction: float = 0.0
    """For an all-to-all between nodes, bytes that a GPU passes on inside its node, meanwhile, for each that
    it gets from another node.
    """


@dataclass(frozen=True, slots=True)
class Exchange(Operation):
    """A collective among ranks that share a layer: one in forward, and another in backward (None: none
    there). It has no kernels here: NCCL's are the collective's.
    """

    forward: ExchangeKind | None
    backward: ExchangeKind | None
    width: int
    """Elements per token of the full tensor, of which each of `ranks` holds a part before a gather and after
    a scatter.
    """
    ranks: int
    group: str = "tensor"
    in_fp32: bool = False
    """The elements are statistics of the loss."""
    follows_precision: bool = False
    """A product after it reads fp8 in fp8 training, and gets it gathered quantised where the recipe
    does so.
    """
    dtype: str = ""
    """The type of the elements. Empty for the activations' type."""
    numel: int = 0
    """Elements of the full tensor, where they are not of tokens."""
    loads: tuple[float, ...] = ()
    """For an all-to-all, what each rank receives in forward (and sends in backward, or the other way round
    where `returns`) over the mean. Empty if all receive as much.
    """
    returns: bool = False
    repeats: bool = False
    """An earlier product has gathered the same input, and compiled graphs do so once (torch's
    `fx_graph_cse`).
    """
    copies: bool = False
    """The full tensor of several sequences is copied between the order of ranks and that of sequences."""
    library: ExchangeLibrary | None = None
    """The library whose kernels an all-to-all is. None for those of the cluster's backend."""
    shares_forwarded_bytes: bool = False
    """The kernels of the exchange between nodes pass these bytes on
    (`ExchangeLibrary.forwarded_bytes_fraction`), without a call of their own.
    """
    forward_result: float = 1.0
    """Rows of the tensor that an all-to-all makes in forward, for each that it moves. A library that adds up
    a token's rows makes fewer, and none where it passes them on in its own buffers.
    """
    backward_result: float = 1.0
    """The same in backward."""

    @property
    def is_function(self) -> bool:
        return True

    @property
    def role(self) -> Role:
        return Role.EXCHANGE

    @property
    def scatters_output(self) -> bool:
        return self.forward == "reduce_scatter"

    @property
    def saves_nothing(self) -> bool:
        return True

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return self._result_bytes(self.forward, shape.tokens, options, self.forward_result)

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return self._result_bytes(self.backward, shape.tokens, options, self.backward_result)

    def kept_outputs(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        return (self._result_bytes(self.forward, shape.tokens, options, self.forward_result),)

    def _result_bytes(self, kind: ExchangeKind | None, tokens: int, options: WorkOptions, rows: float) -> int:
        """Bytes of the tensor that one of its collectives makes: all tokens', a rank's part, or `rows` for
        each that an all-to-all moves. An all-reduce works in place.
        """
        element = 4 if self.in_fp32 else options.activation_bytes
        if self.dtype:
            element = DTYPE_BYTES[self.dtype]
        full = (self.numel or tokens * self.width) * element
        return {
            "all_gather": full,
            "reduce_scatter": full // self.ranks,
            "all_to_all": round(full * rows),
        }.get(kind or "", 0)
