"""NUMA: the sockets whose memory and cores a rank uses, and the bytes that cross between sockets.

A node's memory and cores are split evenly over its sockets, and so are its GPUs, in order. A byte that goes
from one socket to another leaves the first over its outgoing links and enters the second over its incoming.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zsim.specs.cluster.cluster import Cluster

Shares = Sequence[float]  # part of something on each socket, in order


@dataclass(frozen=True, slots=True)
class Sockets:
    """The sockets of a node, as seen by the ranks of one of them (`local`)."""

    count: int
    local: int
    placement: str
    is_bound: bool

    @property
    def gpu(self) -> Shares:
        """Where the rank's GPU is attached."""
        return self._single(self.local)

    @property
    def memory(self) -> Shares:
        """Where the rank's host memory is."""
        if self.placement == "first":
            return self._single(0)
        return self.interleaved if self.placement == "interleaved" else self._single(self.local)

    @property
    def threads(self) -> Shares:
        """Where the rank's CPU threads run."""
        return self._single(self.local) if self.is_bound else self.interleaved

    @property
    def interleaved(self) -> Shares:
        """Evenly over all sockets, like a stripe over drives."""
        return [1.0 / self.count] * self.count

    def _single(self, socket: int) -> Shares:
        return [float(number == socket) for number in range(self.count)]


def sockets_of(cluster: Cluster, local: int) -> Sockets:
    """The sockets of a cluster's node for ranks on socket `local`."""
    return Sockets(cluster.host.sockets, local, cluster.offload.placement, cluster.offload.bound)


def outgoing_bytes(source: Shares, target: Shares) -> list[float]:
    """Bytes that leave each socket when one byte goes from `source` to `target`."""
    return [share * (1.0 - target[number]) for number, share in enumerate(source)]


def crossings(source: Shares, target: Shares) -> dict[str, list[float]]:
    """Weights on each socket's links, out and in, of one byte from `source` to `target`."""
    return {"socket_out": outgoing_bytes(source, target), "socket_in": outgoing_bytes(target, source)}
