"""In which respects two jobs are alike, as far as zsim's errors depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

ALLOCATOR, OFFLOADING, NETWORK, HOST, KERNELS = (
    "the allocator",
    "offloading",
    "the network",
    "the host",
    "kernels",
)

# From which part of the step on something else than the kernels binds it. With 2 to 10 % for the host and 10
# or 20 % for the network as many rows lie within their intervals, to 1 %.
_SHARES = (
    (OFFLOADING, "offload_stall", 0.05),
    (NETWORK, "exposed_communication", 0.1),
    (HOST, "host_bound", 0.1),
)


@dataclass(frozen=True)
class Features:
    """`framework`: FSDP, DeepSpeed, DDP ..., `strategy` one of its ways ("ZeRO-3"), `fabric` what joins the
    GPUs: on one node its links, on several the network ("" where neither is known or needed); `binding` what
    binds the step."""

    framework: str
    strategy: str
    gpu: str
    nodes: int
    gpus: int
    fabric: str
    binding: str
    parameters: int

    @property
    def chip(self) -> str:
        """The GPU without its form and memory: "h100" for "h100-sxm-80gb"."""
        return chip_of(self.gpu)

    @property
    def is_several(self) -> bool:
        """Whether the job runs on several nodes."""
        return self.nodes > 1

    @cached_property
    def cells(self) -> tuple[tuple[str | bool, ...], ...]:
        """What it has in common with runs that are like it, from all that matters to any run at all."""
        return (
            (self.framework, self.is_several, self.binding, self.chip),
            (self.framework, self.is_several, self.binding),
            (self.framework, self.is_several),
            (self.is_several,),
            (),
        )


def chip_of(gpu: str) -> str:
    return gpu.partition("-")[0]


def binding_of(shares: Mapping[str, float], retries: float) -> str:
    """What binds a step: torch's allocator where it runs short, else what takes enough of the step (parts of
    1, by the breakdown's names), else the kernels."""
    if retries > 0:
        return ALLOCATOR
    return next((name for name, part, least in _SHARES if shares.get(part, 0.0) > least), KERNELS)
