"""The interface of every kind of fabric: how network cards are connected.

A fabric numbers its links arithmetically, class by class, so that the links that a million flows use are a
few array operations. Flows go from card to card. A *hop* of many flows is a bundle of `width` parallel links
per flow, and path number p of P takes link p * width // P of every bundle on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from zsim.arrays import Bools, Floats, Ints
from zsim.specs.cluster.network import Network

View = Callable[[str], Floats]
Path = list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Cards:
    """The network cards that a fabric connects, numbered node by node."""

    num_nodes: int
    per_node: int
    """Cards of each node."""
    bandwidth: float

    @property
    def count(self) -> int:
        return self.num_nodes * self.per_node


@dataclass(frozen=True, slots=True)
class Links:
    """One class of a fabric's directed links."""

    name: str
    tier: str
    count: int
    bandwidth: float
    """Bytes per second of each link."""
    efficiency: float


@dataclass(frozen=True, slots=True)
class Hop:
    """Bundles of `width` links of a class, one for each flow of `mask`."""

    name: str
    bundles: Ints
    """`bundles[i]` is the bundle of the i-th flow for which `mask` holds."""
    width: int
    mask: Bools | None = None


@dataclass(frozen=True, slots=True)
class Inventory:
    """Switches, ports and cables of a fabric."""

    switches: dict[str, int]
    """Number of switches by role."""
    ports: dict[str, int]
    """Ports in use per switch, by role of the switch."""
    cables: dict[str, int]
    """Number of cables by tier."""

    @property
    def num_switches(self) -> int:
        return sum(self.switches.values())

    @property
    def num_cables(self) -> int:
        return sum(self.cables.values())

    @property
    def num_ports(self) -> int:
        """Switch ports in use."""
        return sum(self.switches[role] * self.ports[role] for role in self.switches)


class Wiring(Protocol):
    """A fabric between network cards."""

    planes: int
    """Ports of every card. Each port is in a plane of its own."""

    def links(self) -> Sequence[Links]:
        """The classes of links between switches. The cards' own links belong to the topology."""
        ...

    def add_usage(self, view: View, sources: Ints, targets: Ints, amount: float | Floats) -> None:
        """Adds `amount` per flow to the links between cards. `view(name)` is the part of the usage that
        belongs to a class.
        """
        ...

    def gather(self, view: View, sources: Ints, targets: Ints, is_peak: bool) -> Floats:
        """Per flow, the sum of the links' values, each times the flow's share on it.

        `view(name)` gives the values of a class. With `is_peak`, the maximum over parallel links replaces
        their mean.
        """
        ...

    def paths(self, source: int, target: int) -> list[tuple[float, int, Path]]:
        """The paths from card to card, each with its share of the traffic, plane, and links in order."""
        ...

    def plane_shares(self, sources: Ints, targets: Ints) -> Floats | None:
        """Per flow and plane, the share of the flow's traffic. None if all planes share evenly."""
        ...

    def port(self, nic: int, plane: int) -> str:
        """The switch that a card is connected to."""
        ...

    def ends(self, name: str, position: int) -> tuple[str, str]:
        """The two switches that a link connects."""
        ...

    def inventory(self) -> Inventory: ...


class HopWiring:
    """A fabric whose routes are hops. It is the base of all generated fabrics."""

    planes = 1
    num_paths = 1

    def __init__(self, network: Network) -> None:
        self.network = network
        self.is_hashed = network.routing == "hash"

    def links(self) -> Sequence[Links]:
        raise NotImplementedError

    def hops(self, sources: Ints, targets: Ints) -> list[Hop]:
        """The hops between switches of each flow, in order. Two cards on one switch have none."""
        raise NotImplementedError

    def add_usage(self, view: View, sources: Ints, targets: Ints, amount: float | Floats) -> None:
        hops = self.hops(sources, targets)
        if not self.is_hashed or self.num_paths == 1:
            for hop in hops:
                usage = view(hop.name).reshape(-1, hop.width)
                weights = _select_flows(amount, hop) / hop.width
                usage += weighted_count(hop.bundles, weights, len(usage))[:, None]
            return
        share = amount / self.network.flows_per_pair
        for flow in range(self.network.flows_per_pair):
            choice = self._hash(sources, targets, flow)
            for hop in hops:
                usage = view(hop.name)
                usage += weighted_count(
                    self._hashed_links(hop, choice), _select_flows(share, hop), len(usage)
                )

    def gather(self, view: View, sources: Ints, targets: Ints, is_peak: bool) -> Floats:
        totals = np.zeros(len(sources))
        is_even = not self.is_hashed or self.num_paths == 1
        flows = 1 if is_even else self.network.flows_per_pair
        choices = [] if is_even else [self._hash(sources, targets, flow) for flow in range(flows)]
        for hop in self.hops(sources, targets):
            values = view(hop.name)
            rows = slice(None) if hop.mask is None else hop.mask
            if is_even:
                bundles = values.reshape(-1, hop.width)
                if len(hop.bundles) < len(bundles):
                    bundles = bundles[hop.bundles]
                    totals[rows] += bundles.max(axis=1) if is_peak else bundles.mean(axis=1)
                    continue
                bundle_values = bundles.max(axis=1) if is_peak else bundles.mean(axis=1)
                totals[rows] += bundle_values[hop.bundles]
            else:
                flow_values = np.stack([values[self._hashed_links(hop, choice)] for choice in choices])
                totals[rows] += flow_values.max(axis=0) if is_peak else flow_values.mean(axis=0)
        return totals

    def _hashed_links(self, hop: Hop, choice: Ints) -> Ints:
        path_numbers = choice if hop.mask is None else choice[hop.mask]
        return hop.bundles * hop.width + path_numbers * hop.width // self.num_paths

    def paths(self, source: int, target: int) -> list[tuple[float, int, Path]]:
        pair = np.array([source]), np.array([target])
        hops = [hop for hop in self.hops(*pair) if len(hop.bundles)]
        if self.is_hashed:
            flows = self.network.flows_per_pair
            choices = [(1 / flows, int(self._hash(*pair, flow)[0])) for flow in range(flows)]
        else:
            choices = [(1 / self.num_paths, path) for path in range(self.num_paths)]
        shares: dict[tuple[int, tuple[tuple[str, int], ...]], float] = {}
        for share, path in choices:
            links = tuple(
                (hop.name, int(hop.bundles[0]) * hop.width + path * hop.width // self.num_paths)
                for hop in hops
            )
            key = (path * self.planes // self.num_paths, links)
            shares[key] = shares.get(key, 0.0) + share
        return [(share, plane, list(links)) for (plane, links), share in shares.items()]

    def plane_shares(self, sources: Ints, targets: Ints) -> Floats | None:
        if self.planes == 1 or not self.is_hashed:
            return None
        shares = np.zeros((len(sources), self.planes))
        flows = self.network.flows_per_pair
        for flow in range(flows):
            plane = self._hash(sources, targets, flow) * self.planes // self.num_paths
            shares[np.arange(len(sources)), plane] += 1 / flows
        return shares

    def _hash(self, sources: Ints, targets: Ints, flow: int) -> Ints:
        return hashed_path(self.network, sources, targets, flow, self.num_paths)


def hashed_path(network: Network, sources: Ints, targets: Ints, flow: int, num_paths: int) -> Ints:
    """The path of every flow. It is a fixed mix of source, target, flow and seed, as a switch hashes a
    header.
    """
    hashes = sources.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    hashes += targets.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F) + np.uint64(flow * 0x165667B1 + 1)
    hashes ^= np.uint64(network.hash_seed * 0xD6E8FEB86659FD93 % 2**64)
    for shift in (33, 29, 32):
        hashes ^= hashes >> np.uint64(shift)
        hashes *= np.uint64(0xFF51AFD7ED558CCD)
    return (hashes >> np.uint64(11)).astype(np.int64) % num_paths


def weighted_count(indices: Ints, amount: float | Floats, length: int) -> Floats:
    """Per index below `length`, the sum of `amount` over its occurrences in `indices`.

    `amount` is one value for all, or one per entry.
    """
    weights = amount if isinstance(amount, np.ndarray) else None
    counts = np.bincount(indices, weights, length).astype(np.float64)
    return counts if isinstance(amount, np.ndarray) else counts * amount


def _select_flows(amount: float | Floats, hop: Hop) -> float | Floats:
    return amount[hop.mask] if isinstance(amount, np.ndarray) and hop.mask is not None else amount
