"""Machines as their own tools print them: bridged pairs, meshes, clouds, AMD's, hwloc's, and Slurm's many."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.expect import about
from zsim.errors import InputError
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.files import load_cluster
from zsim.specs.formats.topology.read import import_topology

ROCM = """\
============================ ROCm System Management Interface ============================
================================ Weight between two GPUs =================================
       GPU0         GPU1         GPU2
GPU0   0            15           15
GPU1   15           0            15
GPU2   15           15           0
=============================== Link Type between two GPUs ===============================
       GPU0         GPU1         GPU2
GPU0   0            XGMI         XGMI
GPU1   XGMI         0            XGMI
GPU2   XGMI         XGMI         0
================================== End of ROCm SMI Log ===================================
"""
HWLOC = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0"><object type="Machine"><object type="Package">
  <object type="Bridge" bridge_type="0-1">
    <object type="PCIDev" pci_type="0302 [10de:2330] a1" pci_link_speed="63.0">
      <object type="OSDev"><info name="GPUModel" value="NVIDIA H100 80GB HBM3"/></object></object>
    <object type="PCIDev" pci_type="0302 [10de:2330] a1" pci_link_speed="31.5">
      <object type="OSDev"><info name="GPUModel" value="NVIDIA H100 80GB HBM3"/></object></object>
    <object type="PCIDev" pci_type="0207 [15b3:1021] 00" pci_link_speed="63.0"/>
  </object>
  <object type="Bridge" bridge_type="0-1">
    <object type="PCIDev" pci_type="0300 [1a03:2000] 52" pci_link_speed="0.0"/>
  </object>
</object></object></topology>
"""
CLOUD = """<system version="1"><cpu numaid="0">
  <pci busid="0000:10:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
    <gpu dev="0" sm="90" rank="0"/></pci>
  <pci busid="0000:11:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
    <gpu dev="1" sm="90" rank="1"/></pci>
</cpu></system>
"""


def matrix(rows: list[str]) -> str:
    """What `nvidia-smi topo -m` prints for rows of cells, with its underlined first line."""
    names = [f"GPU{number}" for number in range(len(rows))]
    lines = ["\x1b[4m\t" + "\t".join(names) + "\tCPU Affinity\x1b[0m"]
    lines += ["\t".join([name, *row.split(), "0-31"]) for name, row in zip(names, rows, strict=True)]
    return "\n".join(lines) + "\n\nLegend:\n"


def imported(folder: Path, text: str, name: str = "a.txt", **options: str) -> tuple[Cluster, tuple[str, ...]]:
    (folder / name).write_text(text, encoding="utf-8")
    found = import_topology(folder / name, **options)  # type: ignore[arg-type]
    (folder / "mine.toml").write_text(found.toml, encoding="utf-8")
    return load_cluster(folder / "mine.toml"), found.notes


def test_bridges_that_join_pairs_are_no_way_between_all(tmp_path: Path) -> None:
    rows = ["X NV12 NODE SYS", "NV12 X NODE SYS", "NODE NODE X NV12", "SYS SYS NV12 X"]
    cluster, notes = imported(tmp_path, matrix(rows))
    assert cluster.node_link.kind == "none"
    assert cluster.gpus_per_node == 4
    assert any("joins some GPUs alone (GPU0, GPU1 ...)" in note for note in notes)


def test_four_gpus_with_direct_links_are_of_the_generation_with_so_many_in_all(tmp_path: Path) -> None:
    """6 links to each of 3 others are an H100's 18: 450 GB/s. A V100's 6 go to a switch or to 3 others."""
    rows = ["X NV6 NV6 NV6", "NV6 X NV6 NV6", "NV6 NV6 X NV6", "NV6 NV6 NV6 X"]
    cluster, _ = imported(tmp_path, matrix(rows))
    assert (cluster.node_link.kind, cluster.gpu.name) == ("mesh", load_cluster("dgx-h100").gpu.name)
    assert cluster.node_link.bandwidth == about(450e9)
    of_a100, _ = imported(tmp_path, matrix([row.replace("NV6", "NV4") for row in rows]))
    assert (of_a100.node_link.kind, of_a100.node_link.bandwidth) == ("mesh", about(300e9))


def test_all_links_to_a_switch_are_not_multiplied(tmp_path: Path) -> None:
    """Cells of 12 between 4 GPUs are 12 links to a switch, since no GPU has 36."""
    rows = ["X NV12 NV12 NV12", "NV12 X NV12 NV12", "NV12 NV12 X NV12", "NV12 NV12 NV12 X"]
    cluster, _ = imported(tmp_path, matrix(rows))
    assert (cluster.node_link.kind, cluster.gpus_per_node) == ("switch", 4)


def test_the_cube_of_a_dgx_1_is_a_mesh_of_v100s(tmp_path: Path) -> None:
    """Every GPU has 6 links: to 4 others, two of them twice; the rest is reached over the sockets."""
    rows = [
        "X NV1 NV1 NV2 NV2 SYS SYS SYS", "NV1 X NV2 NV1 SYS NV2 SYS SYS", "NV1 NV2 X NV2 SYS SYS NV1 SYS",
        "NV2 NV1 NV2 X SYS SYS SYS NV1", "NV2 SYS SYS SYS X NV1 NV1 NV2", "SYS NV2 SYS SYS NV1 X NV2 NV1",
        "SYS SYS NV1 SYS NV1 NV2 X NV2", "SYS SYS SYS NV1 NV2 NV1 NV2 X",
    ]  # fmt: skip
    cluster, _ = imported(tmp_path, matrix(rows))
    assert (cluster.node_link.kind, cluster.gpus_per_node) == ("mesh", 8)
    assert cluster.gpu.name == load_cluster("dgx-1").gpu.name
    assert cluster.node_link.bandwidth == about(150e9)


def test_a_clouds_file_without_nvlinks_keeps_the_machines(tmp_path: Path) -> None:
    """Clouds give NCCL what it cannot see in a virtual machine; NVLinks it asks the driver for."""
    cluster, notes = imported(tmp_path, CLOUD, "p5-topo.xml")
    assert (cluster.node_link.kind, cluster.gpus_per_node) == ("switch", 2)
    assert any("the preset's are kept" in note for note in notes)
    own, _ = imported(tmp_path, CLOUD, "dump.xml")
    assert own.node_link.kind == "none"


def test_rocm_smi_gives_the_links_and_a_preset_the_rates(tmp_path: Path) -> None:
    cluster, _ = imported(tmp_path, ROCM, base="mi300x-x8")
    assert (cluster.node_link.kind, cluster.gpus_per_node) == ("mesh", 3)
    alone, _ = imported(tmp_path, ROCM.replace("XGMI", "PCIE"), base="mi300x-x8")
    assert alone.node_link.kind == "none"
    with pytest.raises(InputError, match=r"does not say which GPUs these 3 are.*--base"):
        imported(tmp_path, ROCM)
    with pytest.raises(InputError, match="found 2 rows for 3 columns"):
        imported(tmp_path, ROCM.replace("GPU2   XGMI         XGMI         0\n", ""), base="mi300x-x8")
    with pytest.raises(InputError, match="found XXXX among the link types"):
        imported(tmp_path, ROCM.replace("GPU1   XGMI", "GPU1   XXXX"), base="mi300x-x8")


def test_hwlocs_xml_gives_pcie_and_the_gpus_model(tmp_path: Path) -> None:
    """Two H100 under one bridge, the slower at 31.5 GB/s. The graphics of the board is no GPU with a "
    "model."""
    cluster, _ = imported(tmp_path, HWLOC, "machine.xml")
    assert (cluster.gpus_per_node, cluster.pcie.gpus_per_switch) == (2, 2)
    assert cluster.pcie.bandwidth == about(31.5e9)
    assert cluster.gpu.name == load_cluster("dgx-h100").gpu.name
    accelerators = HWLOC.replace("0302 [10de:2330]", "1200 [1002:74a1]")
    accelerators = accelerators.replace("NVIDIA H100 80GB HBM3", "AMD Instinct MI300X OAM")
    cluster, _ = imported(tmp_path, accelerators, "machine.xml")
    assert (cluster.gpus_per_node, cluster.gpu.name) == (2, load_cluster("mi300x-x8").gpu.name)
    with pytest.raises(InputError, match="of which zsim has no machine"):
        imported(tmp_path, HWLOC.replace("H100", "K80"), "machine.xml")
    with pytest.raises(InputError, match="no GPU in it"):
        imported(tmp_path, HWLOC.replace("0302", "0106").replace("0300", "0106"), "machine.xml")


def test_entities_of_an_hwloc_file_are_refused(tmp_path: Path) -> None:
    text = HWLOC.replace('SYSTEM "hwloc2.dtd"', '[<!ENTITY a "b">]')
    with pytest.raises(InputError, match="a DTD or entities"):
        imported(tmp_path, text, "machine.xml")


def test_hosts_called_gpu01_are_a_fabrics(tmp_path: Path) -> None:
    text = (
        "# Topology file: generated on Mon Jan  1 00:00:00 2024\nswitchguid=0x10(10)\n"
        'Switch\t65 "S-0000000000000010"\t\t# "leaf1" enhanced port 0 lid 1 lmc 0\n'
        '[1]\t"H-0000000000000101"[1](101) \t\t# "gpu01 mlx5_0" lid 11 4xNDR\n'
        '[2]\t"H-0000000000000201"[1](201) \t\t# "gpu02 mlx5_0" lid 13 4xNDR\n'
    )
    _, notes = imported(tmp_path, text)
    assert any(note.startswith("2 nodes of 1 cards under 1 switches") for note in notes)


def test_of_several_topologies_of_slurm_the_default_is_taken(tmp_path: Path) -> None:
    tree = "  tree:\n    switches:\n      - switch: s1\n        nodes: n[1-4]\n"
    block = "  block:\n    blocks:\n      - block: b1\n        nodes: n[1-2]\n"
    block += "      - block: b2\n        nodes: n[3-4]\n"
    head = (
        "- topology: tree\n{}" + tree + "- topology: racks\n{}" + block + "- topology: plain\n  flat: true\n"
    )
    default = "  cluster_default: true\n"
    _, notes = imported(tmp_path, head.format("", default), "topology.yaml")
    assert any("2 topologies of the same nodes: 'racks' is taken, not 'tree'" in note for note in notes)
    assert any(note.startswith("4 nodes under 2 leaf switches") for note in notes)
    _, notes = imported(tmp_path, head.format("", ""), "topology.yaml")
    assert any("'tree' is taken, not 'racks'" in note for note in notes)


def test_lines_of_slurm_may_go_on(tmp_path: Path) -> None:
    text = (
        "SwitchName=s0 \\\n   Nodes=n[0-1]\nSwitchName=s1 Nodes=n[2-3]\nSwitchName=top \\\nSwitches=s[0-1]\n"
    )
    _, notes = imported(tmp_path, text, "topology.conf")
    assert any(note.startswith("4 nodes under 2 leaf switches") for note in notes)
