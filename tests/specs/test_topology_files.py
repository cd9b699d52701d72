"""Topology files in few words, new ones, and what `ibnetdiscover` and `lldpctl` print."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from zsim.errors import InputError
from zsim.specs.cluster.files import load_cluster
from zsim.specs.formats.topology.new_file import NewTopology
from zsim.specs.formats.topology.read import TopologyToml, import_topology
from zsim.specs.topology.topology import make_wiring

SWITCHES = """#
# Topology file: generated on Mon Nov 23 10:00:00 2026
#
switchguid=0xa1(a1)
Switch\t65 "S-00000000000000a1"\t\t# "leaf1" enhanced port 0 lid 1 lmc 0
[1]\t"H-0000000000001000"[1](1001) \t\t# "gpu9 mlx5_0" lid 11 4xNDR
[2]\t"H-0000000000001010"[1](1011) \t\t# "gpu9 mlx5_10" lid 12 4xNDR
[5]\t"H-0000000000009000"[1](9001) \t\t# "login1 mlx5_0" lid 19 4xHDR
[6]\t"H-0000000000009100"[1](9101) \t\t# "login2 mlx5_0" lid 20 4xHDR
[7]\t"H-0000000000009200"[1](9201) \t\t# "login3 mlx5_0" lid 21 4xHDR
[33]\t"S-00000000000000b1"[1]\t\t# "spine" lid 3 2xNDR
[34]\t"S-00000000000000b1"[2]\t\t# "spine" lid 3 2xNDR

switchguid=0xa2(a2)
Switch\t65 "S-00000000000000a2"\t\t# "leaf2" enhanced port 0 lid 2 lmc 0
[1]\t"H-000000000000a010"[1](a011) \t\t# "gpu10 mlx5_2" lid 22 4xNDR
[2]\t"H-000000000000a000"[1](a001) \t\t# "gpu10 mlx5_1" lid 21 4xNDR
[33]\t"S-00000000000000b1"[3]\t\t# "spine" lid 3 4xNDR

switchguid=0xb1(b1)
Switch\t65 "S-00000000000000b1"\t\t# "spine" enhanced port 0 lid 3 lmc 0
[1]\t"S-00000000000000a1"[33]\t\t# "leaf1" lid 1 2xNDR
[2]\t"S-00000000000000a1"[34]\t\t# "leaf1" lid 1 2xNDR
[3]\t"S-00000000000000a2"[33]\t\t# "leaf2" lid 2 4xNDR
[41]\t"H-00000000000000c1"[1](c1) \t\t# "Mellanox Technologies Aggregation Node" lid 4 4xNDR

caguid=0x1000
Ca\t1 "H-0000000000001000"\t\t# "gpu9 mlx5_0"
[1](1001) \t"S-00000000000000a1"[1]\t\t# lid 11 lmc 0 "leaf1" lid 1 4xNDR
"""


def run_cli(*words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from zsim.cli import main; main()", *words]
    return subprocess.run(program, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


# -- in few words ----------------------------------------------------------------------------------------


def test_two_words_are_a_network() -> None:
    short = load_cluster({"extends": "dgx-h100", "fabric": "fat-tree", "oversubscription": 2})
    network = {"kind": "fat-tree", "oversubscription": 2.0}
    long = load_cluster({"extends": "dgx-h100", "network": network})
    assert long.network.nodes_per_leaf == 16
    assert short.network.model_dump(exclude={"source"}) == long.network.model_dump(exclude={"source"})
    assert short.network.evidence == "assumed"


def test_a_tree_keeps_its_own_kind_and_numbers() -> None:
    found = load_cluster({"extends": "dgx-superpod-h100", "oversubscription": 3}).network
    assert (found.kind, found.nodes_per_leaf, found.oversubscription) == ("rail-optimized", 30, 3.0)


@pytest.mark.parametrize(("over", "nodes"), [(2, 16), (3, 15), (7, 14), (32, 32)])
def test_a_leaf_has_as_many_nodes_as_whole_uplinks_serve(over: int, nodes: int) -> None:
    found = load_cluster({"extends": "dgx-h100", "fabric": "fat-tree", "oversubscription": over})
    assert found.network.nodes_per_leaf == nodes
    make_wiring(found, 2 * nodes)


def test_a_fabric_alone_asks_for_nodes() -> None:
    with pytest.raises(InputError, match=r'found fabric, oversubscription alone, .* extends = "dgx-h100"'):
        load_cluster({"fabric": "fat-tree", "oversubscription": 2})


def test_numbers_that_another_shape_does_not_have_are_dropped() -> None:
    found = load_cluster({"extends": "roce-h100", "fabric": "single-switch"}).network
    assert found.kind == "single-switch"
    assert found.hop_latency == 1e-6


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"fabric": "fattree"}, "did you mean 'fat-tree'"),
        ({"fabric": 3}, "fabric: found 3"),
        ({"oversubscription": 2, "network": {"kind": "fat-tree"}}, r"beside a \[network\] table"),
        ({"fabric": "torus", "oversubscription": 2}, "does not belong to kind 'torus'"),
        ({"oversubscription": 0.5}, "greater than or equal to 1"),
    ],
)
def test_wrong_words_are_refused(more: dict[str, object], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        load_cluster({"extends": "dgx-h100", **more})


def test_all_that_is_wrong_with_a_network_is_said_at_once() -> None:
    wrong = {"kind": "torus", "nodes_per_leaf": 3, "planes": 2, "bandwith": 1}
    with pytest.raises(InputError) as error:
        load_cluster({"extends": "dgx-h100", "network": wrong})
    assert all(f"'{key}'" in str(error.value) for key in ("nodes_per_leaf", "planes", "bandwith"))
    tree = {"kind": "fat-tree", "leaves_per_pod": 4, "flows_per_pair": 4}
    with pytest.raises(InputError, match=r"levels = 3; flows_per_pair needs routing"):
        load_cluster({"extends": "dgx-h100", "network": tree})


# -- a new file ------------------------------------------------------------------------------------------


def test_a_new_file_reads_back_as_what_was_said() -> None:
    asked = NewTopology("ours", "dgx-a100-80gb", "fat-tree", 4, 2.0, 4, "200 Gb/s", "our plan")
    assert "# downlinks of a leaf over its uplinks" in asked.text()
    found = asked.cluster(asked.text())
    assert (found.network.nodes_per_leaf, found.network.oversubscription) == (4, 2.0)
    assert (found.nic.per_node, found.nic.bandwidth) == (4, 25e9)
    assert found.network.source.startswith("our plan; the rest as in dgx-a100-80gb")
    assert found.network.evidence == "data sheet"


def test_the_command_writes_a_file_that_show_takes(tmp_path: Path) -> None:
    file = tmp_path / "ring.toml"
    options = ["--like", "dgx-h100", "--fabric", "torus", "--shape", "2x4"]
    assert run_cli("topology", "new", str(file), *options).returncode == 0
    assert "torus" in run_cli("topology", "show", str(file), "--nodes", "8").stdout
    again = run_cli("topology", "new", str(file), *options)
    assert (again.returncode, "exists" in again.stderr) == (2, True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "expected --like"),
        (["--like", "dgx-h100", "--fabric", "fat-trees"], "did you mean 'fat-tree'"),
        (["--like", "dgx-h100", "--fabric", "torus", "--shape", "4by4"], "as 4x4"),
        (["--like", "dgx-h100", "--fabric", "single-switch", "--oversubscription", "2"], "does not belong"),
    ],
)
def test_what_cannot_be_written_leaves_no_file(tmp_path: Path, options: list[str], expected: str) -> None:
    file = tmp_path / "new.toml"
    found = run_cli("topology", "new", str(file), *options)
    assert found.returncode == 2
    assert expected in found.stderr
    assert not file.exists()


# -- ibnetdiscover -----------------------------------------------------------------------------------------


def imported(tmp_path: Path, text: str) -> str:
    file = tmp_path / "ib.txt"
    file.write_text(text)
    return import_topology(file).toml


def test_cables_cards_and_rates_are_those_of_the_fabric(tmp_path: Path) -> None:
    """gpu9 before gpu10, mlx5_1 before mlx5_2; logins with one card each and SHARP's own nodes are no nodes;
    two switches list the same cables."""
    file = tmp_path / "ours.toml"
    file.write_text(imported(tmp_path, SWITCHES))
    found = load_cluster(file)
    cables = {(one.source_end, one.target_end): (one.bandwidth, one.count) for one in found.network.links}
    assert cables == {
        ("node0.nic0", "leaf1"): (50e9, 1),
        ("node0.nic1", "leaf1"): (50e9, 1),
        ("node1.nic0", "leaf2"): (50e9, 1),
        ("node1.nic1", "leaf2"): (50e9, 1),
        ("leaf1", "spine"): (25e9, 2),
        ("leaf2", "spine"): (50e9, 1),
    }
    assert (found.nic.per_node, found.nic.bandwidth) == (2, 50e9)
    assert run_cli("topology", "show", str(file), "--nodes", "2").returncode == 0


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("4xNDR", "4xZDR", "line 6: found no width and speed"),
        ("gpu9 mlx5_0", "MT4129 ConnectX7 Mellanox Technologies", "names no host"),
        ('Switch\t65 "S-00000000000000a1"', "", "line 6: a port before any Switch"),
    ],
)
def test_a_fabric_that_cannot_be_read_is_refused(tmp_path: Path, old: str, new: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        imported(tmp_path, SWITCHES.replace(old, new))


def test_a_cut_file_has_no_cables(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no switch has a cable"):
        imported(tmp_path, SWITCHES[: SWITCHES.index("[1]")])


# -- lldpctl ---------------------------------------------------------------------------------------------

ONE_MACHINE = """-------------------------------------------------------------------------------
LLDP neighbors:
-------------------------------------------------------------------------------
Interface:    eth0, via: LLDP, RID: 1, Time: 10 days, 03:04:05
  Chassis:
    SysName:      oob.dc1.example.com
    Capability:   Bridge, on
  Port:
    PortID:       ifname swp9
      MAU oper type: 1000BaseTFD - Four-pair Category 5 UTP, full duplex mode
-------------------------------------------------------------------------------
Interface:    enp12s0np0, via: LLDP, RID: 2, Time: 10 days, 03:04:05
  Chassis:
    SysName:      leaf01
    Capability:   Bridge, on
  Port:
    PortID:       ifname swp1
      MAU oper type: 100GbaseCR4 - 100GBASE-R PCS/PMA over 4 lane shielded copper
-------------------------------------------------------------------------------
Interface:    enp18s0np0, via: LLDP, RID: 3, Time: 10 days, 03:04:05
  Chassis:
    SysName:      leaf02
    Capability:   Bridge, on
  Port:
    PortID:       ifname swp1
      MAU oper type: 100GbaseCR4 - 100GBASE-R PCS/PMA over 4 lane shielded copper
"""


def keyvalue(*seen: tuple[str, str, str, str, str]) -> str:
    """Lines as `clush` prints them, of (machine, interface, peer, peer's port, peer bridges)."""
    lines = []
    for machine, interface, peer, port, bridges in seen:
        start = f"{machine}: lldp.{interface}"
        lines += [f"{start}.via=LLDP", f"{start}.chassis.name={peer}",
                  f"{start}.chassis.Bridge.enabled={bridges}", f"{start}.port.ifname={port}"]  # fmt: skip
    return "\n".join(lines)


HOSTS = [(f"gpu{n}", f"eth{c}", f"leaf{c}.dc1", f"swp{n}", "on") for n in (9, 10) for c in (0, 1)]
LEAVES = [
    *((f"leaf{c}", f"swp{n}", f"gpu{n}", f"eth{c}", "off") for n in (9, 10) for c in (0, 1)),
    *((f"leaf{c}", f"swp{30 + k}", "spine", f"swp{2 * c + k}", "on") for c in (0, 1) for k in (0, 1)),
]


def links_of(path: Path, text: str, base: str | None = None) -> tuple[list[dict[str, Any]], TopologyToml]:
    path.write_text(text)
    found = import_topology(path, base=base)
    tables = tomllib.loads(found.toml)
    return tables["network"]["links"], found


def test_one_machines_neighbours_are_its_cards_without_the_slow_one(tmp_path: Path) -> None:
    """Two cards of 100 Gb/s on two leaves; the 1 Gb/s port is for management."""
    links, found = links_of(tmp_path / "lldp.txt", ONE_MACHINE)
    assert [(link["from"], link["to"], link["bandwidth"]) for link in links] == [
        ("node0.nic0", "leaf01", "100 Gb/s"), ("node0.nic1", "leaf02", "100 Gb/s"),
    ]  # fmt: skip
    assert "left out: 1 cards that are slower than their machine's fastest" in found.notes


@pytest.mark.parametrize("seen", [[*HOSTS, *LEAVES], [*LEAVES], [*HOSTS, *LEAVES[4:]]])
def test_a_cable_that_both_ends_report_is_one(tmp_path: Path, seen: list[Any]) -> None:
    """Two machines of two cards, two leaves, two cables from each leaf to the spine: from both sides' text,
    from the switches' alone, and from the hosts' with the leaves' uplinks. gpu9 comes before gpu10."""
    links, _ = links_of(tmp_path / "lldp.txt", keyvalue(*seen))
    ends = {(link["from"], link["to"]): link.get("count", 1) for link in links}
    assert ends == {
        ("node0.nic0", "leaf0"): 1, ("node0.nic1", "leaf1"): 1, ("node1.nic0", "leaf0"): 1,
        ("node1.nic1", "leaf1"): 1, ("leaf0", "spine"): 2, ("leaf1", "spine"): 2,
    }  # fmt: skip


def test_neighbours_join_the_nodes_of_any_preset(tmp_path: Path) -> None:
    """roce-h100 has a tree with keys of its own, which a list of links has not."""
    _, found = links_of(tmp_path / "lldp.txt", keyvalue(*HOSTS, *LEAVES), base="roce-h100")
    path = tmp_path / "mine.toml"
    path.write_text(found.toml)
    cluster = load_cluster(str(path))
    assert (cluster.network.kind, cluster.nic.per_node) == ("links", 2)


def test_neighbours_without_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no neighbour has a name; expected the output of lldpctl"):
        links_of(tmp_path / "lldp.txt", "lldp.eth0.via=LLDP\nlldp.eth0.rid=1\n")


@pytest.mark.skipif(os.name != "posix", reason="needs a terminal")
def test_an_answer_that_is_refused_is_asked_for_again(tmp_path: Path) -> None:
    """All answers are typed ahead: each wrong one is followed by the one that counts."""
    import pty

    typed = ["dgx-h10", "dgx-h100", "fat-tre", "fat-tree", "0", "8", "two", "2", "a person"]
    keyboard, terminal = pty.openpty()
    os.write(keyboard, "".join(f"{answer}\n" for answer in typed).encode())
    command = [sys.executable, "-m", "zsim", "topology", "new", "mine.toml"]
    done = subprocess.run(
        command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=tmp_path, check=False
    )
    os.close(terminal)
    os.close(keyboard)
    assert done.returncode == 0
    network = tomllib.loads((tmp_path / "mine.toml").read_text())["network"]
    assert (network["kind"], network["nodes_per_leaf"], network["oversubscription"]) == ("fat-tree", 8, 2.0)
    assert network["source"] == "a person"


@pytest.mark.parametrize("beside", [{"base": "dgx-h100"}, {"preset": "dgx-h100"}, {"nodes": 2}, {}])
def test_a_table_of_changes_without_its_cluster_asks_for_extends(beside: dict[str, Any]) -> None:
    """A GPU's 13 missing keys were told, and not the one that is missing."""
    with pytest.raises(
        InputError, match=r"^cluster: found a table of .*said by `extends`, as in cluster = "
    ) as told:
        load_cluster({**beside, "gpu": {"power_limit": "500 W"}})
    assert ("stands beside `cluster`" in str(told.value)) == ("nodes" in beside)
