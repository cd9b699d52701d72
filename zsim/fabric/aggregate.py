"""All links of a topology, and other shared resources, as the resources of one fluid pool.

# [Note: lumped links]
Links with the same capacity and the same weight in every profile constrain the rates in the same way, so
one representative replaces all of them. This is exact on every topology, and 100,000 links become a handful.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import simpy

from zsim.arrays import Floats, Ints, SplitMix64
from zsim.fluid.pool import FluidPool, Profile
from zsim.specs.topology.topology import Topology

Usage = tuple[Ints, Floats]  # the links that are used, ascending, and the bytes on each per bus byte

NO_USAGE: Usage = np.zeros(0, dtype=np.int64), np.zeros(0)


class Extra(NamedTuple):
    """Resources other than links, numbered after the links, and the usages of kinds of work that are not
    collectives.
    """

    capacities: Floats
    usages: Sequence[tuple[Hashable, Ints, Floats]]
    """(key, numbers of links or resources, units per unit of work) of each kind of work."""


NO_EXTRA = Extra(np.zeros(0), [])


class AggregatedLinks(NamedTuple):
    """The pool, the representative links in it, and the profiles of the extras' usages by key, one dictionary
    per extra."""

    pool: FluidPool
    links: Ints
    extra_profiles: list[dict[Hashable, Profile]]


def aggregate_links(
    env: simpy.Environment, topology: Topology, usages: Sequence[Usage], extras: Sequence[Extra]
) -> AggregatedLinks:
    """A pool for activities that put `usages` on links, and for the activities of `extras`. See [Note: lumped
    links]. Extras do not share resources other than links.
    """
    capacities = np.concatenate([topology.capacities(), *(extra.capacities for extra in extras)])
    num_links = topology.num_links
    signature = np.stack([capacities, capacities])
    # Two independent weighted sums distinguish links. Equal rows give equal sums, bit for bit.
    coefficients = SplitMix64(20010).fractions(2 * (len(usages) + 1)).reshape(2, -1)
    signature[:, :num_links] += coefficients[:, :1] * topology.leaves_node()
    for column, (links, weights) in enumerate(usages, 1):
        for row, coefficient in zip(signature, coefficients[:, column].tolist(), strict=True):
            row[_link_index(links)] += coefficient * weights
    numbered_usages = _number_resources(extras, num_links)
    coefficients = SplitMix64(20011).fractions(2 * len(numbered_usages)).reshape(2, len(numbered_usages))
    for column, (_extra, _key, indices, weights) in enumerate(numbered_usages):
        signature[:, indices] += coefficients[:, column : column + 1] * weights
    keys = signature.view(np.int64)
    row_hashes = keys[0] * np.int64(0x1003F) ^ keys[1]
    # adjacent links are mostly equal: one of each such row is enough to compare
    first_links = np.flatnonzero(np.concatenate([[True], row_hashes[1:] != row_hashes[:-1]]))
    _unique, first_rows = np.unique(row_hashes[first_links], return_index=True)
    representatives = np.sort(first_links[first_rows])
    pool = FluidPool(env, capacities[representatives].tolist())
    position = {
        resource: representative_index
        for representative_index, resource in enumerate(representatives.tolist())
    }
    profiles: list[dict[Hashable, Profile]] = [{} for _ in extras]
    for extra, key, indices, weights in numbered_usages:
        pairs = zip(indices.tolist(), weights.tolist(), strict=True)
        profiles[extra][key] = pool.profile(
            [(position[index], weight) for index, weight in pairs if index in position]
        )
    return AggregatedLinks(pool, representatives[representatives < num_links], profiles)


def restrict_usage(representatives: Ints, usage: Usage) -> Usage:
    """A usage of the links that represent all others, by their positions among these."""
    links, weights = usage
    positions = np.minimum(np.searchsorted(links, representatives), max(len(links) - 1, 0))
    used_representatives = (
        np.flatnonzero(links[positions] == representatives) if len(links) else positions[:0]
    )
    return used_representatives, weights[positions[used_representatives]]


def sum_usages(representatives: Ints, usages: Sequence[Usage]) -> Floats:
    """Bytes of all usages on each of the links that represent all others."""
    total = np.zeros(len(representatives))
    for usage in usages:
        used_links, weights = restrict_usage(representatives, usage)
        total[used_links] += weights
    return total


def _link_index(links: Ints) -> Ints | slice:
    """Links as an index, ascending ones without a gap as a slice, which numpy takes several times as fast."""
    if len(links) and int(links[-1] - links[0]) + 1 == len(links):
        return slice(int(links[0]), int(links[-1]) + 1)
    return links


def _number_resources(extras: Sequence[Extra], num_links: int) -> list[tuple[int, Hashable, Ints, Floats]]:
    """(extra, key, resource numbers, weights) of all usages. Resources are numbered extra by extra."""
    usages, first = [], 0
    for number, extra in enumerate(extras):
        for key, indices, weights in extra.usages:
            usages.append((number, key, np.where(indices < num_links, indices, indices + first), weights))
        first += len(extra.capacities)
    return usages
