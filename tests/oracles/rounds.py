"""Collectives played round by round, message by message: the slow proof of the one-activity model.

Every message is an activity of its own on the same fluid pool: it starts when its sender has what it needs
and the edge is free, is delivered a round's latency after its last byte, and lets the next one start. The
channels of a collective (one per local rank) do the same at places of the same kind, so a message stands
for the same message of all channels. Links have no other load.

# [Note: a channel's share]
A channel is one thread block, and its rate does not grow when other channels pause (NCCL's perChMax...Bws),
so an edge gets at most the share that makes all edges end together on the busiest link. Without that,
channels fill each other's gaps, the rounds' latency hides behind bytes, and medium messages on several nodes
come out up to a fifth faster than NCCL's own plan, latency plus bytes over bandwidth, has them. On a ring
every rank waits for the slowest edge; on a tree only those above and below it do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import simpy

from zsim.arrays import Floats, Ints
from zsim.cost.collectives.rounds import CONCURRENT_ROUNDS, bus_bytes
from zsim.errors import InputError
from zsim.fabric.algorithms.link_usage import tree_parents
from zsim.fabric.algorithms.rings import bytes_by_link, crossings, extra_round_seconds, local_ranks
from zsim.fabric.communicators import round_seconds
from zsim.fluid.pool import FluidPool, Profile
from zsim.plan.ops import SplitSizes
from zsim.specs.cluster.collectives import ProtocolCosts
from zsim.specs.topology.topology import Topology


@dataclass
class _Edge:
    """One edge of the schedule; messages go one at a time, `latency` after the last byte they arrive."""

    usage: Floats
    crosses: bool
    latency: float
    profile: Profile
    queue: deque[tuple[float, Callable[[], None]]] = field(default_factory=deque)
    is_busy: bool = False


class Rounds:
    """Plays a collective of one group, at `slots`, on an idle topology."""

    def __init__(self, topology: Topology, slots: Ints, costs: ProtocolCosts) -> None:
        self.topology = topology
        self.costs = costs
        self.env = simpy.Environment()
        self.pool = FluidPool(self.env, topology.capacities().tolist())
        self.members = slots[None, :]
        self.size = self.members.shape[1]
        self.local = local_ranks(topology, self.members)
        self.spans = self.local < self.size
        self.longer = extra_round_seconds(topology, slots)
        self.last = 0.0
        self.num_messages = 0

    # -- collectives --------------------------------------------------------------------------------

    def ring(self, kind: str, full_bytes: float) -> float:
        """Seconds of a ring all-gather, reduce-scatter or all-reduce: in every round a rank passes on what
        it got in the round before."""
        laps = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}.get(kind)
        if laps is None:
            raise InputError(f"{kind} is not played round by round on a ring")
        edges = [self._ring_edge(position) for position in range(self.size)]
        steps = laps * (self.size - 1)
        carried = bus_bytes(kind, full_bytes, self.size)
        self._share(edges, carried)

        def send(position: int, step: int) -> None:
            def delivered() -> None:
                if step + 1 < steps:
                    send((position + 1) % self.size, step + 1)

            self._send(edges[position], carried / steps, delivered)

        def start() -> None:
            for position in range(self.size):
                send(position, 0)

        return self._run(start)

    def tree(self, full_bytes: float, pieces: int) -> float:
        """Seconds of an all-reduce on the double binary tree, in `pieces` per channel (a channel is on one of
        the two trees: `zsim.cost.collectives.rounds.tree_pieces` says how many NCCL has)."""
        domains = self.size // self.local
        trees = [self._tree(parents, full_bytes / 2, pieces) for parents in tree_parents(domains)]
        self._share([edge for _, edges in trees for edge in edges], full_bytes / 2, by_kind=True)

        def begin() -> None:
            for start, _edges in trees:
                start()

        return self._run(begin)

    def all_to_all(self, full_bytes: float, in_flight: int = CONCURRENT_ROUNDS) -> float:
        """Seconds of a direct all-to-all: node after node, to all GPUs of it at once, `in_flight` nodes at a
        time; the GPUs of one's own node meanwhile (one after the other where there is no other node)."""
        pair = full_bytes / self.size
        domains = self.size // self.local
        inside = [self._offsets([o]) for o in range(1, self.local)]
        across = [self._domain_offset(offset) for offset in range(1, domains)]

        left = deque(across or inside)

        def play() -> None:
            if left:
                self._send(left.popleft(), pair, play)

        def start() -> None:
            for edge in inside if across else ():
                edge.latency = 0.0
                self._send(edge, pair, lambda: None)
            for _ in range(in_flight):
                play()

        return self._run(start)

    def unequal_all_to_all(self, parts: SplitSizes, in_flight: int = CONCURRENT_ROUNDS) -> float:
        """Seconds of a direct all-to-all of `parts[i][j]` bytes from member i to member j. Every rank goes
        through its rounds by itself: node after node, `in_flight` at a time, the next once the bytes of one
        are all sent; its own node's GPUs meanwhile."""
        domains = self.size // self.local

        def begin(rank: int) -> None:
            first = rank // self.local * self.local
            inside = [[first + (rank + o) % self.local] for o in range(1, self.local)]
            across = [
                [(first + o * self.local + place) % self.size for place in range(self.local)]
                for o in range(1, domains)
            ]
            left = deque(across or inside)

            def play() -> None:
                if left:
                    targets, missing = left.popleft(), [self.local if across else 1]

                    def delivered() -> None:
                        missing[0] -= 1
                        if not missing[0]:
                            play()

                    for target in targets:
                        self._send(self._pair(rank, target), parts[rank][target], delivered)

            for target in (target for targets in inside for target in targets) if across else ():
                edge = self._pair(rank, target)
                edge.latency = 0.0
                self._send(edge, parts[rank][target], lambda: None)
            for _ in range(in_flight):
                play()

        def start() -> None:
            for rank in range(self.size):
                begin(rank)

        return self._run(start)

    # -- schedules ----------------------------------------------------------------------------------

    def _tree(self, parents: Ints, tree_bytes: float, pieces: int) -> tuple[Callable[[], None], list[_Edge]]:
        """One tree of chains: a node sends a piece up when it has it from all below, down when from above."""
        local, piece = self.local, tree_bytes / pieces
        nodes = [(domain, place) for domain in range(len(parents)) for place in range(local)]
        above: dict[tuple[int, int], tuple[int, int] | None] = {}
        for domain, place in nodes:
            up = int(parents[domain])
            above[domain, place] = (domain, place - 1) if place else (up, 0) if up >= 0 else None
        below = {node: [other for other in nodes if above[other] == node] for node in nodes}
        edges = {node: self._tree_edges(node, above[node]) for node in nodes if above[node] is not None}
        missing = {(node, number): len(below[node]) for node in nodes for number in range(pieces)}

        def send_up(node: tuple[int, int], number: int) -> None:
            parent = above[node]
            if parent is None:
                send_down(node, number)
                return

            def delivered() -> None:
                missing[parent, number] -= 1
                if missing[parent, number] == 0:
                    send_up(parent, number)

            self._send(edges[node][0], piece, delivered)

        def send_down(node: tuple[int, int], number: int) -> None:
            for child in below[node]:
                self._send(edges[child][1], piece, lambda child=child: send_down(child, number))  # type: ignore[misc]

        def start() -> None:
            for node in nodes:
                if not below[node]:
                    for number in range(pieces):
                        send_up(node, number)

        return start, [edge for pair in edges.values() for edge in pair]

    def _ring_edge(self, position: int) -> _Edge:
        """From a place of the ring to the next, in all rotations."""
        crosses = self.spans and position % self.local == self.local - 1
        usage = np.zeros(self.topology.num_links)
        rotations = self.local if self.spans else 1
        for rotation in range(rotations):
            order = _rotate(self.members, self.local, rotation)[0]
            source, target = order[[position]], order[[(position + 1) % self.size]]
            if crosses:
                head = order[[position // self.local * self.local]]
                edge = crossings(self.topology, source, head, target, 1 / rotations)
                usage += bytes_by_link(self.topology, edge)
            else:
                self.topology.add_routes(usage, source, target, 1 / rotations)
        return self._edge(usage, crosses)

    def _tree_edges(self, child: tuple[int, int], parent: tuple[int, int] | None) -> tuple[_Edge, _Edge]:
        """Up and down between two places of a tree, in all rotations."""
        assert parent is not None
        crosses = child[0] != parent[0]
        up, down = np.zeros(self.topology.num_links), np.zeros(self.topology.num_links)
        for rotation in range(self.local):
            order = _rotate(self.members, self.local, rotation).reshape(-1, self.local)
            one, other = order[child][None], order[parent][None]
            up += bytes_by_link(self.topology, crossings(self.topology, one, one, other, 1 / self.local))
            down += bytes_by_link(self.topology, crossings(self.topology, other, other, one, 1 / self.local))
        return self._edge(up, crosses), self._edge(down, crosses)

    def _offsets(self, offsets: list[int]) -> _Edge:
        """Every rank to the peers of its own domain so many places on, at once."""
        usage = np.zeros(self.topology.num_links)
        rows = self.members.reshape(-1, self.local)
        for offset in offsets:
            self.topology.add_routes(usage, rows.ravel(), np.roll(rows, -offset, axis=1).ravel(), 1.0)
        return self._edge(usage, crosses=False)

    def _pair(self, source: int, target: int) -> _Edge:
        """From one rank to another."""
        usage = np.zeros(self.topology.num_links)
        slots = self.members[0]
        self.topology.add_routes(usage, slots[[source]], slots[[target]], 1.0)
        return self._edge(usage, crosses=source // self.local != target // self.local)

    def _domain_offset(self, offset: int) -> _Edge:
        """Every rank to all ranks of the domain so many domains on, at once."""
        usage = np.zeros(self.topology.num_links)
        rows = self.members.reshape(-1, self.local)
        for shift in range(self.local):
            targets = np.roll(np.roll(rows, -offset, axis=0), -shift, axis=1)
            self.topology.add_routes(usage, rows.ravel(), targets.ravel(), 1.0)
        return self._edge(usage, crosses=True)

    def _edge(self, usage: Floats, crosses: bool) -> _Edge:
        costs = self.costs
        leaves = self.topology.leaves_node()
        weights = usage / np.where(leaves, costs.inter_fraction, costs.intra_fraction)
        inside, across = round_seconds(costs, self.longer, spans=self.spans)
        return _Edge(weights, crosses, across if crosses else inside, self._profile(weights))

    def _profile(self, weights: Floats) -> Profile:
        used = np.nonzero(weights)[0]
        return self.pool.profile(list(zip(used.tolist(), weights[used].tolist(), strict=True)))

    def _share(self, edges: list[_Edge], carried: float, *, by_kind: bool = False) -> None:
        """Hold edges that carry the same bytes to their share of the busiest link, or (`by_kind`) those
        inside domains and those across each to the busiest of their kind; see [Note: a channel's share]."""
        if carried <= 0:
            return
        load = np.sum([edge.usage for edge in edges], axis=0) / self.topology.capacities()
        leaves = self.topology.leaves_node()
        for edge in edges:
            own = load
            if by_kind:
                own = load[leaves if edge.crosses else ~leaves]
            self.pool.capacity.append(1 / float(own.max()))
            share = (len(self.pool.capacity) - 1, 1.0)
            edge.profile = self.pool.profile([*edge.profile.usage, share])

    # -- the clock ----------------------------------------------------------------------------------

    def _send(self, edge: _Edge, size: float, delivered: Callable[[], None]) -> None:
        self.num_messages += 1
        edge.queue.append((size, delivered))
        self._next(edge)

    def _next(self, edge: _Edge) -> None:
        if edge.is_busy or not edge.queue:
            return
        edge.is_busy = True
        size, delivered = edge.queue.popleft()

        def sent() -> None:
            edge.is_busy = False
            self._after(edge.latency, delivered)
            self._next(edge)

        self.pool.start(edge.profile, size, sent)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        def act(_event: simpy.Event) -> None:
            self.last = self.env.now
            action()

        event = simpy.Timeout(self.env, seconds)
        event.callbacks = [act]

    def _run(self, start: Callable[[], None]) -> float:
        """Seconds until the last message is delivered, the protocol's start included."""
        self._after(self.costs.base, start)
        self.env.run()
        return self.last


def _rotate(members: Ints, local: int, rotation: int) -> Ints:
    """Every node's ranks shifted by `rotation`: channel c enters each node at its c-th rank."""
    count, size = members.shape
    return np.roll(members.reshape(count, size // local, local), -rotation, axis=2).reshape(count, size)
