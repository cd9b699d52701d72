"""Other people's descriptions of machines and fabrics, the hostile ones too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.expect import about
from zsim.errors import InputError
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.files import load_cluster
from zsim.specs.formats.topology.astra_sim import astra_sim_yaml
from zsim.specs.formats.topology.read import import_topology
from zsim.specs.formats.topology.slurm import expand_hostlist
from zsim.specs.topology.graph import is_connected
from zsim.specs.topology.topology import Topology

NCCL = """<system version="1">
  <cpu numaid="0" arch="x86_64" vendor="GenuineIntel">
    <pci busid="0000:01:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:02:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="90" rank="0"><nvlink target="0000:ff:00.0" count="18" tclass="0x068000"/></gpu>
      </pci>
      <pci busid="0000:03:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="1" sm="90" rank="1"><nvlink target="0000:ff:00.0" count="18" tclass="0x068000"/></gpu>
      </pci>
      <pci busid="0000:04:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="400000" port="1" gdr="1"/></nic>
      </pci>
    </pci>
  </cpu>
</system>
"""
SMI = """\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\tNV12\tNV12\tPXB\tSYS\t0-31\t0
GPU1\tNV12\t X \tNV12\tNV12\tPXB\tSYS\t0-31\t0
GPU2\tNV12\tNV12\t X \tNV12\tSYS\tPXB\t32-63\t1
GPU3\tNV12\tNV12\tNV12\t X \tSYS\tPXB\t32-63\t1
NIC0\tPXB\tPXB\tSYS\tSYS\t X \tSYS
NIC1\tSYS\tSYS\tPXB\tPXB\tSYS\t X

Legend:
"""
SLURM = """# two leaves
SwitchName=s0 Nodes=tux[0-2]
SwitchName=s1 Nodes=tux[3-4],gpu07
SwitchName=top Switches=s[0-1] LinkSpeed=100
"""
SLURM_YAML = """- topology: default
  tree:
    switches:
      - switch: top
        children: s[0-1]
      - switch: s0
        nodes: tux[0-2]
      - switch: s1
        nodes: tux[3-5]
"""
ASTRA = """topology: [ Switch, Switch ]
npus_count: [ 8, 4 ]
bandwidth: [ 400.0, 50.0 ]
latency: [ 500, 2000.0 ]
"""


def imported(folder: Path, text: str, name: str, **options: str) -> tuple[Cluster, tuple[str, ...]]:
    (folder / name).write_text(text, encoding="utf-8")
    found = import_topology(folder / name, **options)  # type: ignore[arg-type]
    (folder / "mine.toml").write_text(found.toml, encoding="utf-8")
    return load_cluster(folder / "mine.toml"), found.notes


def refused(folder: Path, text: str, name: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        import_topology(folder / name)
    return str(caught.value)


def test_an_nccl_file_gives_the_node_with_nccls_planning_numbers(tmp_path: Path) -> None:
    """PCIe 5.0 x16: 16 x 240 / 80 = 48 GB/s; 18 NVLinks of SM90: 18 x 20.6 = 370.8 GB/s to a switch; one
    card of 400,000 Mb/s; two GPUs under one switch."""
    cluster, notes = imported(tmp_path, NCCL, "topo.xml")
    assert cluster.gpus_per_node == 2
    assert (cluster.pcie.bandwidth, cluster.pcie.gpus_per_switch) == (48e9, 2)
    assert (cluster.node_link.kind, cluster.node_link.bandwidth) == ("switch", about(370.8e9))
    assert (cluster.nic.per_node, cluster.nic.bandwidth) == (1, 50e9)
    assert cluster.gpu.name == "h100-sxm-80gb"
    assert any("what joins the nodes" in note for note in notes)


def test_nvlinks_to_oneself_join_nobody(tmp_path: Path) -> None:
    text = NCCL.replace('target="0000:ff:00.0"', 'target="0000:02:00.0"', 1).replace(
        'target="0000:ff:00.0"', 'target="0000:03:00.0"'
    )
    cluster, notes = imported(tmp_path, text, "topo.xml")
    assert cluster.node_link.kind == "none"
    assert any("target is the GPU itself" in note for note in notes)


def test_a_skeleton_takes_gpus_and_cards_from_the_preset_and_says_so(tmp_path: Path) -> None:
    device = '<pci class="0x030200" link_speed="16 GT/s" link_width="16"/>'
    text = f'<system version="1"><cpu numaid="0">{device}</cpu></system>'
    cluster, notes = imported(tmp_path, text, "topo.xml")
    assert cluster.gpu.name == "a100-sxm-80gb"
    assert any("guess" in note for note in notes)


@pytest.mark.parametrize(
    ("speed", "width", "gpus", "pcie"),
    [("8 GT/s", 16, 8, 12e9), ("16 GT/s", 16, 8, 24e9), ("32.0 GT/s PCIe", 16, 8, 48e9), ("", 0, 4, 12e9)],
    ids=["p4d", "NDv4", "NDv5", "NCv4"],
)
def test_speeds_as_clouds_write_them_are_read(
    tmp_path: Path, speed: str, width: int, gpus: int, pcie: float
) -> None:
    """16 x generation / 80: AWS's p4d says 8 GT/s for its PCIe 4.0 (12 GB/s), Azure's NDv4 16 GT/s (24 GB/s),
    NDv5 32 GT/s (48 GB/s); NCv4 leaves speed and width empty, which count as 8 GT/s and 16 lanes."""
    device = f'<pci class="0x030200" link_speed="{speed}" link_width="{width}"><gpu dev="0" sm="80"/></pci>'
    nodes = [f'<cpu numaid="{number}">{device * (gpus // 2)}</cpu>' for number in (0, 1)]
    text = f'<system version="1">{"".join(nodes)}</system>'
    cluster, notes = imported(tmp_path, text, "topo.xml")
    assert (cluster.gpus_per_node, cluster.pcie.bandwidth) == (gpus, pcie)
    assert any("empty PCIe speeds" in note for note in notes) is (speed == "")


def test_hostile_xml_neither_expands_nor_hangs(tmp_path: Path) -> None:
    """A billion laughs, an external entity, 20,000 levels: one sentence each, before anything expands: the
    laughs would be 10 GB."""
    levels = [f'<!ENTITY l{level} "{f"&l{level - 1};" * 10}">' for level in range(1, 10)]
    laughs = f'<!DOCTYPE s [<!ENTITY l0 "{"ha" * 5}">{"".join(levels)}]><system>&l9;</system>'
    reach_out = '<!DOCTYPE s [<!ENTITY a SYSTEM "file:///etc/passwd">]><system>&a;</system>'
    for text in (laughs, reach_out):
        assert "has a DTD or entities" in refused(tmp_path, text, "topo.xml")
    deep = "<system>" + "<pci>" * 20_000 + "</pci>" * 20_000 + "</system>"
    assert "nested or repeated beyond" in refused(tmp_path, deep, "topo.xml")
    wide = "<system>" + "<pci/>" * 50_000 + "</system>"
    assert "nested or repeated beyond" in refused(tmp_path, wide, "topo.xml")


@pytest.mark.parametrize("cut", range(1, len(NCCL) - 12, 97))
def test_a_truncated_nccl_file_is_one_sentence(tmp_path: Path, cut: int) -> None:
    assert refused(tmp_path, NCCL[:cut], "topo.xml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('speed="400000"', 'speed="fast"', "found 'fast', expected a number"),
        ('speed="400000"', 'speed="1e300"', "expected a number that hardware can have"),
        ("<system", "<graphs", "not XML"),
    ],
)
def test_wrong_values_in_xml_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert message in refused(tmp_path, NCCL.replace(old, new), "topo.xml")


def test_an_nvidia_smi_matrix_gives_shape_and_leaves_rates_to_the_preset(tmp_path: Path) -> None:
    """12 NVLinks to each of the others are a switch: an A100 node, here of 4 GPUs with 2 cards."""
    cluster, notes = imported(tmp_path, SMI, "topo.txt")
    assert (cluster.gpus_per_node, cluster.nic.per_node) == (4, 2)
    assert (cluster.node_link.kind, cluster.gpu.name) == ("switch", "a100-sxm-80gb")
    assert any("no rates" in note for note in notes)


def test_a_matrix_cut_short_is_refused(tmp_path: Path) -> None:
    assert "cut short" in refused(tmp_path, "\n".join(SMI.splitlines()[:4]), "topo.txt")


@pytest.mark.parametrize(("text", "name"), [(SLURM, "topology.conf"), (SLURM_YAML, "topology.yaml")])
def test_a_slurm_tree_becomes_links(tmp_path: Path, text: str, name: str) -> None:
    """Six nodes under two leaves under one switch: from the first node to the second one link class of cards,
    to the fourth two links between switches."""
    cluster, _ = imported(tmp_path, text, name)
    topology = Topology(cluster, 6, 8)
    assert is_connected(topology)
    near, far = ([topology.class_of(link).tier for link in topology.route(0, rank)] for rank in (8, 24))
    assert near.count("switch-switch") == 0
    assert far.count("switch-switch") == 2


def test_host_lists() -> None:
    assert expand_hostlist("tux[0-2,07],login", "x") == ["tux0", "tux1", "tux2", "tux07", "login"]
    assert expand_hostlist("a[1-2]b[3-4]", "x") == ["a1b3", "a1b4", "a2b3", "a2b4"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a Nodes=n[0-1]", "above itself"),
        ("SwitchName=a Nodes=n[0-99999999]", "more than 20,000 nodes"),
        ("SwitchName=a Nodes=n0\nSwitchName=b Nodes=n0", "under two switches"),
        ("SwitchName=a", "no switch has nodes"),
    ],
)
def test_impossible_slurm_trees_are_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text, "topology.conf")


def test_an_astra_sim_network_comes_in_and_goes_out_again(tmp_path: Path) -> None:
    """8 GPUs at 400 GB/s in the node, 50 GB/s each between 4 nodes; exported, the same numbers."""
    cluster, notes = imported(tmp_path, ASTRA, "network.yml")
    assert (cluster.gpus_per_node, cluster.node_link.bandwidth, cluster.nic.bandwidth) == (8, 400e9, 50e9)
    assert "use it with --nodes 4" in notes
    lines = astra_sim_yaml(cluster, 4).splitlines()[1:]
    assert lines[:3] == [
        "topology: [ Switch, Switch ]",
        "npus_count: [ 8, 4 ]",
        "bandwidth: [ 400, 50 ]",
    ]


def test_yaml_without_end_or_with_wrong_keys_is_refused(tmp_path: Path) -> None:
    deep = "npus_count: " + "[" * 200_000 + "]" * 200_000
    assert "nested or repeated beyond" in refused(tmp_path, deep, "network.yml")
    assert "expected one of Ring" in refused(tmp_path, ASTRA.replace("Switch,", "Star,"), "network.yml")
    assert "positive number" in refused(tmp_path, ASTRA.replace("50.0", "-50.0"), "network.yml")


def test_a_network_of_ones_own_joins_the_nodes(tmp_path: Path) -> None:
    own = tmp_path / "fabric.toml"
    own.write_text('[network]\nsource = "made up for a test"\nevidence = "assumed"\nkind = "fat-tree"\n')
    (tmp_path / "topo.xml").write_text(NCCL)
    found = import_topology(tmp_path / "topo.xml", network=own)
    (tmp_path / "mine.toml").write_text(found.toml)
    assert load_cluster(tmp_path / "mine.toml").network.kind == "fat-tree"


def test_what_is_none_of_these_is_said_to_be_none(tmp_path: Path) -> None:
    assert "not recognised" in refused(tmp_path, "hello", "topo.txt")
    assert "the file is empty" in refused(tmp_path, " ", "topo.txt")


def test_nodes_of_several_types_have_no_one_bandwidth_for_astra_sim() -> None:
    """The first type's rates stood for all."""
    with pytest.raises(InputError, match=r"nodes of several types \(dgx-h100, dgx-a100-80gb\)"):
        astra_sim_yaml(load_cluster({"nodes": "1 dgx-h100, 1 dgx-a100-80gb"}), 2)
