"""NCCL's estimate of a collective's time on a cluster, from the bandwidths that it assumes for the links."""

from __future__ import annotations

from zsim.cost.collectives.nccl_tuning import Machine, nccl_seconds
from zsim.specs.cluster.cluster import Cluster


def planned_seconds(
    cluster: Cluster,
    kind: str,
    algorithm: str,
    protocol: str,
    full_bytes: float,
    num_ranks: int,
    num_domains: int,
) -> float:
    """Seconds that NCCL's tuning model expects (`zsim.cost.collectives.nccl_tuning`). Infinite where NCCL
    never runs the algorithm with the protocol.
    """
    generation = cluster.collectives.generation
    assert generation is not None
    link, nic = cluster.node_link, cluster.nic
    local = max(num_ranks // num_domains, 1)
    cards = min(local * nic.per_node / cluster.gpus_per_node, nic.per_node * link.nodes_per_domain)
    machine = Machine(
        generation=generation,
        intra_bytes_per_second=(link.bandwidth or cluster.pcie.bandwidth) * link.efficiency,
        inter_bytes_per_second=max(cards, 1.0) * nic.bandwidth,
        has_nvlink=link.kind != "none",
        channels=cluster.collectives.channels,
        network_overhead=max(costs.network_overhead for costs in cluster.collectives.protocols.values()) / 3,
    )
    return nccl_seconds(machine, kind, algorithm, protocol, full_bytes, num_ranks, num_domains)
