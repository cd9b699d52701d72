"""Features of a job by which zsim's errors on two jobs are comparable."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from zsim.specs.cluster.files import load_gpu
from zsim.specs.presets import gpu_preset_names

ALLOCATOR, OFFLOADING, NETWORK = "the allocator", "offloading", "the network"
HOST, KERNELS = "the host", "kernels"

# Fraction of the step from which on it is bound by something other than kernels. With 2 to 10 % for the host
# and 10 or 20 % for the network the same number of rows lies within their intervals, to 1 %.
_SHARES = (
    (OFFLOADING, "offload_stall", 0.05),
    (NETWORK, "exposed_communication", 0.1),
    (HOST, "host_bound", 0.1),
)

_EXTRA_PARALLELISM = re.compile(r" \+ (TP|CP|PP|EP)\b")


@dataclass(frozen=True)
class Features:
    """The features of a job that its errors depend on."""

    framework: str
    """The framework's name in reports."""
    strategy: str
    """A way of the framework ("ZeRO-3")."""
    gpu: str
    nodes: int
    gpus: int
    fabric: str
    """The connection of the GPUs: the links on one node, the network on several. Empty if not known or not
    needed.
    """
    binding: str
    """The part that bounds the step."""
    parameters: int
    model_ranks: int = 1
    """Ranks that share a replica."""
    is_mixture: bool = False
    """Whether the model is a mixture of experts."""
    is_low_precision: bool = False
    """Whether products are in 8 or 4 bits."""
    open_settings: tuple[str, ...] = ()
    """The settings that matter and are left open, by name (`zsim.validated.spread.OPEN_SENTENCES`)."""

    @property
    def chip(self) -> str:
        """The GPU without its form and memory: "h100" for "h100-sxm-80gb"."""
        return self.gpu.partition("-")[0]

    @property
    def is_several(self) -> bool:
        """Whether the job runs on several nodes."""
        return self.nodes > 1

    @property
    def lacks_bf16(self) -> bool:
        """Whether the GPU is older than bf16, and so are the kernels and the software of its runs."""
        return _lacks_bf16(self.gpu)

    @property
    def regime(self) -> str:
        """E.g. "FSDP, several nodes". Its sources err to one side for reasons of their own."""
        nodes = "several nodes" if self.is_several else "one node"
        return f"{self.framework}, {nodes}{', GPUs without bf16' if self.lacks_bf16 else ''}"

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share a replica of the model."""
        return self.model_ranks > 1

    @property
    def is_offloaded(self) -> bool:
        """Whether the strategy keeps states off the GPU."""
        return self.strategy.endswith(" offloaded")

    @cached_property
    def cells(self) -> tuple[tuple[str | bool, ...], ...]:
        """Keys of the cells of similar runs that the job belongs to, from the closest cell to that of all
        runs. In the first two are runs of the job's own strategy."""
        framework_key = self.framework, self.is_several
        return (
            (*framework_key, self.strategy, self.binding, self.chip, self.is_mixture),
            (*framework_key, self.strategy, self.is_mixture),
            framework_key,
            (self.is_several,),
            (),
        )


@cache
def _lacks_bf16(gpu: str) -> bool:
    """Whether the file of a GPU that ships with zsim has no rate of bf16. False for another GPU."""
    return gpu in gpu_preset_names() and load_gpu(gpu).peak.bf16 is None


def data_strategy(strategy: str) -> str:
    """A strategy's name without the parallelisms in addition to data parallelism: "FSDP2" for "FSDP2 + TP +
    PP".
    """
    return _EXTRA_PARALLELISM.sub("", strategy)


def binding_of(shares: Mapping[str, float], retries: float) -> str:
    """The part that bounds a step.

    It is torch's allocator if it runs short, else the first part that takes enough of the step, else the
    kernels. `shares` are fractions by the breakdown's names.
    """
    if retries > 0:
        return ALLOCATOR
    return next((name for name, part, threshold in _SHARES if shares.get(part, 0.0) > threshold), KERNELS)
