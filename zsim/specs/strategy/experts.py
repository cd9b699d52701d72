"""How a job's routed experts run: among how many ranks, by whose code, with which loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zsim.specs.model.experts import ExpertsLibrary, GroupedKernel

Dispatcher = Literal["all-gather", "all-to-all", "deepep", "hybridep"]
EXPERT, EXPERT_TENSOR, EXPERT_MODEL, EXPERT_DATA = "expert", "expert_tensor", "expert_model", "expert_data"


@dataclass(frozen=True, slots=True)
class ExpertSplit:
    """The routed experts of every layer on `ranks` ranks, each expert's products on `tensor` of them.

    `dispatcher`: what brings rows to the experts' ranks. `capacity_factor`: rows that an expert takes, over
    the mean; None: all that are routed to it. `pads_to_capacity`: every expert has as many, so that the host
    reads no counts. `loads`: rows of each rank of a group over the mean, the fullest first; (1.0,) if all
    have as many. `library`: whose code rearranges rows. `kernel`: how grouped products run. `gate_in_fp32`:
    None for the model's own.
    """

    ranks: int = 1
    tensor: int = 1
    dispatcher: Dispatcher = "all-to-all"
    capacity_factor: float | None = None
    pads_to_capacity: bool = False
    loads: tuple[float, ...] = (1.0,)
    library: ExpertsLibrary = "transformers"
    kernel: GroupedKernel = "grouped"
    gate_in_fp32: bool | None = None
    has_auxiliary_loss: bool = False
    overlaps_shared: bool = False

    @property
    def members(self) -> int:
        """Ranks that share the experts of a layer."""
        return self.ranks * self.tensor

    @property
    def imbalance(self) -> float:
        """Rows of the fullest rank over the mean, as far as the capacity takes them."""
        if self.capacity_factor is None:
            return max(self.loads)
        return self.capacity_factor if self.pads_to_capacity else min(max(self.loads), self.capacity_factor)

    @property
    def host_waits(self) -> bool:
        """Whether the host reads the rows of each expert before it goes on."""
        return not self.pads_to_capacity and (self.library.startswith("megatron") or self.members > 1)
