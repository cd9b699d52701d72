"""The algorithms that a backend may run for a collective, with their rounds, links and costs.

NCCL's all-gathers and reduce-scatters never get the bandwidth of in-switch reduction (NVLS, SHARP): only
all-reduces halve their traffic in the switch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from zsim.cost.collectives.rounds import (
    Rounds,
    all_to_all_rounds,
    binomial_rounds,
    hierarchical_rounds,
    nvls_rounds,
    pat_rounds,
    ring_rounds,
    tree_rounds,
)
from zsim.plan.ops import Collective, SplitSizes
from zsim.specs.cluster.collectives import LIBRARIES, AlgorithmName, CollectiveCosts, ProtocolCosts
from zsim.specs.model.spec import ExchangeLibrary

_TREE_FRACTION = 0.92  # NCCL src/graph/tuning.cc: busBw * .92; for cluster files without numbers of trees


# A kind of collective, the library whose all-to-all it is, or the table of one of unequal parts: each has
# costs or link usages of its own.
CallKind = str | ExchangeLibrary | SplitSizes


def call_kind(work: Collective) -> CallKind:
    """The key of a collective's algorithms."""
    return work.split_sizes or work.library or work.kind


class UnequalShape(NamedTuple):
    """The link usage of an all-to-all of unequal parts. `name` is that of the all-to-all of equal parts."""

    name: str
    split_sizes: SplitSizes


class ForwardedShape(NamedTuple):
    """The link usage of an all-to-all between nodes, inside which `times` as many bytes are passed on."""

    times: float


Shape = str | UnequalShape | ForwardedShape


@dataclass(frozen=True, slots=True)
class Method:
    """One algorithm."""

    algorithm: str
    shape: Shape
    """Its link usage (`zsim.fabric.algorithms.link_usage.link_usage`)."""
    rounds: Rounds
    protocols: Mapping[str, ProtocolCosts]
    fraction: float = 1.0
    """The part of the links' bandwidth that it reaches."""


def methods(
    kind: CallKind,
    num_ranks: int,
    num_domains: int,
    costs: CollectiveCosts,
    *,
    has_switch: bool,
    most_local_ranks: int | None = None,
) -> list[Method]:
    """All methods that the backend may run. The first is preferred between equally fast ones.

    `num_domains` is the number of NVLink domains that the group spans. With `has_switch` the GPUs of a domain
    share a switch. `most_local_ranks` is the maximum of ranks in one domain, where domains differ (then there
    is no in-switch reduction). A forced algorithm or protocol (NCCL_ALGO, NCCL_PROTO) excludes the others
    where the collective has it.
    """
    max_local = most_local_ranks or num_ranks // num_domains
    is_even = max_local * num_domains == num_ranks
    available = _available(kind, num_ranks, num_domains, costs, has_switch and is_even, max_local)
    forced = [method for method in available if method.algorithm == costs.force_algorithm]
    protocol = costs.force_protocol
    return [
        Method(m.algorithm, m.shape, m.rounds, {protocol: m.protocols[protocol]}, m.fraction)
        if protocol is not None and protocol in m.protocols
        else m
        for m in forced or available
    ]


def _available(
    kind: CallKind,
    num_ranks: int,
    num_domains: int,
    costs: CollectiveCosts,
    has_switch: bool,
    most_local: int,
) -> list[Method]:
    algorithm_costs = costs.algorithms
    basic = costs.protocols
    if isinstance(kind, ExchangeLibrary):
        return [_library_method(kind, num_ranks, num_domains, algorithm_costs, basic)]
    if not isinstance(kind, str):
        equal = _available("all_to_all", num_ranks, num_domains, costs, has_switch, most_local)
        return [replace(method, shape=UnequalShape(str(method.shape), kind)) for method in equal]
    if kind in ("send", "recv"):
        return [Method("direct", "pair", Rounds(int(num_domains == 1), int(num_domains > 1)), basic)]
    if kind == "all_to_all":
        rounds = all_to_all_rounds(num_ranks, num_domains)
        protocols = algorithm_costs.get("all_to_all", basic)
        if num_domains == 1:
            protocols = algorithm_costs.get("all_to_all_inside", protocols)
        available = [Method("direct", "all_to_all", rounds, protocols)]
        if has_switch and 1 < num_domains < num_ranks:
            available.append(Method("by rail", "all_to_all_by_rail", rounds, protocols))
        return available
    if costs.algorithm == "hierarchical" and num_domains > 1:
        rounds = hierarchical_rounds(kind, num_ranks, num_domains)
        return [Method("hierarchical", "hierarchical", rounds, basic)]
    available = [Method("ring", "ring", ring_rounds(kind, num_ranks, num_domains), basic)]
    if costs.backend == "gloo":
        if kind == "broadcast":
            return [Method("binomial tree", "binomial", binomial_rounds(num_ranks, num_domains), basic)]
        return available
    if kind == "all_reduce":
        available = [Method("ring", "ring", available[0].rounds, algorithm_costs.get("ring", basic))]
        if num_domains > 1:
            fraction = 1.0 if "tree" in algorithm_costs else _TREE_FRACTION
            rounds = tree_rounds(most_local, num_domains)
            available.append(Method("tree", "tree", rounds, algorithm_costs.get("tree", basic), fraction))
        name = "nvls" if num_domains == 1 else "nvls_tree"
        if has_switch and name in algorithm_costs and num_ranks > num_domains:
            available.append(Method(name, "nvls", nvls_rounds(num_domains), algorithm_costs[name]))
    elif (
        kind in ("all_gather", "reduce_scatter") and "pat" in algorithm_costs and 1 < num_domains == num_ranks
    ):
        available.append(Method("pat", "pat", pat_rounds(num_ranks), algorithm_costs["pat"]))
    return available


def _library_method(
    kind: ExchangeLibrary,
    num_ranks: int,
    num_domains: int,
    algorithm_costs: Mapping[AlgorithmName, Mapping[str, ProtocolCosts]],
    basic: Mapping[str, ProtocolCosts],
) -> Method:
    """A library's exchange, at the backend's costs where the library has none."""
    inside, pair, across = LIBRARIES[kind.name]
    name = {1: inside, 2: pair}.get(num_domains, across)
    protocols = algorithm_costs.get("all_to_all", basic)
    if num_domains == 1:
        protocols = algorithm_costs.get("all_to_all_inside", protocols)
    shape = ForwardedShape(kind.forwarded_bytes_fraction) if kind.forwarded_bytes_fraction else "all_to_all"
    rounds = all_to_all_rounds(num_ranks, num_domains)
    return Method("direct", shape, rounds, algorithm_costs.get(name, protocols))
