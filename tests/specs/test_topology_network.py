"""`[network]` of a cluster file: what is wrong with it, in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.errors import InputError
from zsim.specs.cluster.files import load_cluster
from zsim.specs.topology.topology import Topology

_ORIGIN = 'source = "made up for a test"\nevidence = "assumed"\n'


def message_of(folder: Path, network: str, nodes: int = 4) -> str:
    path = folder / "mine.toml"
    path.write_text(f'schema = 1\nextends = "dgx-h100"\n[network]\n{_ORIGIN}{network}\n')
    with pytest.raises(InputError) as caught:
        Topology(load_cluster(path), nodes, 8)
    return str(caught.value)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ('kind = "fat-tre"', "did you mean 'fat-tree'?"),
        (
            'kind = "fat-tree"\nshape = [2, 2]',
            "'shape' does not belong to kind 'fat-tree'; it is a key of torus",
        ),
        (
            'kind = "fat-tree"\nnode_per_leaf = 2',
            "unknown key 'node_per_leaf'; did you mean 'nodes_per_leaf'?",
        ),
        ('kind = "fat-tree"\noversubscription = 0.5', "greater than or equal to 1"),
        ('kind = "fat-tree"\nleaves_per_pod = 4', "need levels = 3"),
        ('kind = "fat-tree"\nflows_per_pair = 4', "flows_per_pair needs routing = 'hash'"),
        ('kind = "fat-tree"\nhash_seed = 4', "hash_seed needs routing = 'hash'"),
        ('kind = "fat-tree"\nrouting = "hash"\nhash_seed = -1', "greater than or equal to 0"),
        ('kind = "torus"\nshape = [4]', "found 1 dimensions, expected 2 or 3"),
        ('kind = "links"', "needs at least one [[network.links]] table"),
        ('kind = "fat-tree"\nlink_bandwidth = 400', "has no unit"),
    ],
)
def test_a_wrong_table_is_one_sentence(tmp_path: Path, network: str, message: str) -> None:
    text = message_of(tmp_path, network)
    assert text.startswith("mine.toml: network")
    assert message in text


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (
            'kind = "fat-tree"\nnodes_per_leaf = 3\noversubscription = 5.0',
            "mine: network: oversubscription leaves 4.8 uplinks for a switch; expected a whole number",
        ),
        ('kind = "fat-tree"\nswitch_ports = 64', "a leaf needs 256 ports, but switch_ports is 64"),
        ('kind = "torus"\nshape = [1, 2]', "4 nodes do not fit on a torus of 1 x 2"),
        (
            'kind = "dragonfly"\nnodes_per_router = 1\nrouters_per_group = 1\nglobal_links_per_router = 2',
            "4 groups of 1 routers with 2 global links each cannot all be joined; expected at most 3 groups",
        ),
        (
            'kind = "links"\n[[network.links]]\nfrom = "node0"\nto = "s0"\nbandwidth = "1 GB/s"',
            "no link for card 0 of node1",
        ),
    ],
)
def test_numbers_that_do_not_fit_together_are_one_sentence(
    tmp_path: Path, network: str, message: str
) -> None:
    assert message in message_of(tmp_path, network)


def test_switches_that_are_not_joined_are_named(tmp_path: Path) -> None:
    cables = "".join(
        f'[[network.links]]\nfrom = "node{n}"\nto = "s{n % 2}"\nbandwidth = "1 GB/s"\n' for n in range(4)
    )
    assert "no way from 's0' to 's1'" in message_of(tmp_path, f'kind = "links"\n{cables}')
