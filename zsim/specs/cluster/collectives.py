"""`[collectives]` of a cluster file: costs of collectives besides the bytes on links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from zsim.errors import did_you_mean
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.lazy_model import FiniteTable, Fraction, Table
from zsim.units import Seconds


class ProtocolCosts(FiniteTable):
    """The costs of one NCCL protocol: seconds to start, seconds per round, and the fraction of a link's
    bandwidth.

    Once a group spans nodes, its rounds inside a node take at least `network_overhead`, since the proxy
    thread posts for every round.

    `ramp` is the cost of sending a tensor of S bytes in pieces, times sqrt(S / 1 MiB). Fewer pieces leave
    links idle while the first piece travels, and more pieces cost more handling. The sum of a/p and b p has
    its minimum, 2 sqrt(a b), at the best piece, and a grows with S (Sanders, Speck, Traff, Two-tree
    algorithms, 2009). `network_ramp` is the same for pieces that wait for a network card.
    """

    base: Seconds = Field(description="time to start a collective")
    intra_round: Seconds = Field(description="time of a round inside a node, besides its bytes")
    inter_round: Seconds = Field(description="time of a round between nodes, besides its bytes")
    intra_fraction: Fraction = Field(
        description="what the protocol reaches of a link's bandwidth inside a node"
    )
    inter_fraction: Fraction = Field(description="what the protocol reaches of a card's bandwidth")
    network_overhead: Seconds = Field(
        default=0.0, description="the least time of a round inside a node, once the group spans nodes"
    )
    ramp: Seconds = Field(
        default=0.0, description="cost of cutting a tensor of S bytes into pieces, times sqrt(S / 1 MiB)"
    )
    network_ramp: Seconds = Field(default=0.0, description="the same, once the group spans nodes")


class LinkLatencies(FiniteTable):
    """Latencies of the links that rounds were measured on: NVLink, and card and network between nodes."""

    node_link: Seconds = Field(default=0.0, description="latency of a link between GPUs")
    nic: Seconds = Field(default=0.0, description="latency of a card")
    network: Seconds = Field(default=0.0, description="latency of the network between cards")


AlgorithmName = Literal[
    "ring", "tree", "nvls", "nvls_tree", "pat", "all_to_all", "all_to_all_inside", "deepep_inside",
    "deepep_pair", "deepep_across", "hybridep_inside", "hybridep_pair", "hybridep_across",
]  # fmt: skip
LIBRARIES: Mapping[str, tuple[AlgorithmName, AlgorithmName, AlgorithmName]] = {
    "deepep": ("deepep_inside", "deepep_pair", "deepep_across"),
    "hybridep": ("hybridep_inside", "hybridep_pair", "hybridep_across"),
}

# The multiprocessors of their kernels: what DeepEP's buffers take (`Buffer.num_sms`) and Megatron gives it
# (`moe_deepep_num_sms`), and what Megatron gives HybridEP (`moe_hybridep_num_sms`; Megatron-Core 0.16.1
# core/transformer/transformer_config.py), whose copies are the TMA's.
LIBRARY_MULTIPROCESSORS: Mapping[str, int] = {"deepep": 20, "hybridep": 16}

_COMMON: frozenset[AlgorithmName] = frozenset({"ring", "tree", "all_to_all", "all_to_all_inside"})


class CollectiveCosts(Table):
    """Latency and bandwidth of collectives on this machine, by protocol. The fastest is taken.

    The names of algorithms:

    - "ring": an all-reduce's ring, if it differs from `protocols`.
    - "tree", "pat".
    - "nvls": reduction in the switches of one NVLink domain.
    - "nvls_tree": the same joined by trees across domains.
    - "all_to_all", and "all_to_all_inside" of a group in one NVLink domain, if it differs.
    - "deepep_inside", "hybridep_inside": these libraries' kernels in one domain, by default the backend's.
    - "deepep_pair", "hybridep_pair": theirs between two domains.
    - "deepep_across", "hybridep_across": theirs between more domains.

    NVLS and PAT exist only where their costs are given. `backend` "other" is a vendor's own library, with
    rounds of its own. `measured_on` belongs to the file that states the rounds. A file that extends it and
    changes only links need not state it. With `choice` "tuning-model" the algorithm is what NCCL's model for
    `generation` would choose.
    """

    backend: Literal["nccl", "rccl", "gloo", "other"] = Field(description="the library of collectives")
    algorithm: Literal["ring", "hierarchical"] = Field(
        default="ring", description="rings through all ranks, or inside nodes first and between them after"
    )
    reduce_scatter: Literal["native", "all_reduce"] = Field(
        default="native", description="as such, or sent as a whole all-reduce (gloo)"
    )
    protocols: dict[str, ProtocolCosts] = Field(
        description='costs by protocol ("simple", "ll", "ll128"), of all algorithms that have none '
        "of their own"
    )
    algorithms: dict[AlgorithmName, dict[str, ProtocolCosts]] = Field(
        default_factory=dict,
        description="costs by protocol, of single algorithms; left out: those of `protocols`",
    )
    force_algorithm: AlgorithmName | None = Field(
        default=None,
        description="the algorithm that is used wherever a collective has it (NCCL_ALGO); left out: by "
        "`choice`",
    )
    force_protocol: str | None = Field(
        default=None,
        description="the protocol that is used wherever it exists (NCCL_PROTO); left out: by `choice`",
    )
    choice: Literal["fastest", "tuning-model"] = Field(
        default="fastest", description="the fastest on idle links, or NCCL's own choice by its tuning model"
    )
    generation: Literal["volta", "ampere", "hopper", "blackwell"] | None = Field(
        default=None,
        description='the GPUs that the tuning model is of; left out: for `choice` "fastest", which needs '
        "none",
    )
    message_delay: Seconds = Field(default=0.0, description="added to every message between nodes")
    channels: int = Field(default=16, gt=0, description="NCCL's channels, for its tuning model")
    measured_on: LinkLatencies | None = Field(
        default=None, description="link latencies that the rounds contain; longer links lengthen them"
    )

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = {*self.protocols, *(name for costs in self.algorithms.values() for name in costs)}
        if self.force_protocol is not None and self.force_protocol not in names:
            hint = did_you_mean(self.force_protocol, names)
            raise ValueError(
                f"force_protocol: found '{self.force_protocol}', expected one of "
                f"{', '.join(sorted(names))}{hint}"
            )
        if self.backend == "other" and (self.choice == "tuning-model" or set(self.algorithms) - _COMMON):
            raise ValueError(
                "backend 'other' chooses by none of NCCL's models and has no NVLS or PAT; expected choice "
                f"'fastest', and of [collectives.algorithms] only {', '.join(sorted(_COMMON))}"
            )
        if self.choice == "tuning-model" and self.generation is None:
            raise ValueError("choice 'tuning-model' needs 'generation'")
        return self


def exchange_slowdown(gpu: Gpu, dispatcher: str) -> float:
    """The factor on kernels while only exchanges of a dispatcher run on the GPU.

        s = min(c, S / (S - n))

    c: `compute_slowdown`. S: multiprocessors. n: those that the library's kernels hold
    (`LIBRARY_MULTIPROCESSORS`). Other dispatchers' are the backend's, c.
    """
    slowdown = gpu.interference.compute_slowdown
    count = LIBRARY_MULTIPROCESSORS.get(dispatcher, 0)
    return min(slowdown, gpu.sm_count / (gpu.sm_count - count)) if 0 < count < gpu.sm_count else slowdown
