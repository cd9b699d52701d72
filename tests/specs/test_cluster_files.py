"""Loading clusters: the shipped ones, one's own, and one clear sentence for what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.expect import about
from zsim.errors import InputError
from zsim.specs.cluster import files
from zsim.specs.cluster.files import load_cluster, load_gpu
from zsim.specs.library import Library
from zsim.specs.presets import topology_preset_names, topology_preset_path

_CHANGED = 'source = "what if it were other"\nevidence = "assumed"\n'


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def message_of(path: Path | str) -> str:
    with pytest.raises(InputError) as caught:
        load_cluster(path)
    return str(caught.value)


def test_the_promised_presets_are_there() -> None:
    """The names of the main job's contract."""
    promised = {"dgx-2", "dgx-a100-40gb", "dgx-a100-80gb", "dgx-h100", "hgx-h200", "rtx-4090-x8", "cpu-gloo"}
    assert promised <= set(topology_preset_names())


@pytest.mark.parametrize("name", topology_preset_names())
def test_every_preset_loads_under_its_own_name_and_every_number_has_a_source(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.description
    for table in (cluster.node_link, cluster.pcie, cluster.nic, cluster.collectives, cluster.gpu.gemm):
        assert len(table.source) > 20


def test_a_preset_says_what_the_data_sheet_says() -> None:
    """DGX H100: 8 GPUs, 450 GB/s NVLink per direction, 8 cards of 400 Gb/s = 50 GB/s, H100 of 989.4 TFLOP/s
    with 3.35 TB/s."""
    cluster = load_cluster("dgx-h100")
    assert cluster.gpus_per_node == 8
    assert cluster.node_link.bandwidth == 450e9
    assert (cluster.nic.per_node, cluster.nic.bandwidth) == (8, 50e9)
    assert cluster.gpu.peak.bf16 == pytest.approx(989.4e12)
    assert cluster.gpu.memory.bandwidth == pytest.approx(3.35e12)


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("dgx-2", 122e9),  # mb-00332
        ("dgx-a100-80gb", 235e9),  # mb-00225, 16 GiB
        ("dgx-h100", 370e9),  # mb-00334
        ("hgx-h200", 362e9),  # mb-00324 and mb-00325
    ],
)
def test_a_large_ring_in_a_node_gets_the_measured_bus_bandwidth(name: str, measured: float) -> None:
    """A large ring on NVSwitch runs at bandwidth x efficiency; within 3 % of nccl-tests' large messages."""
    link = load_cluster(name).node_link
    assert link.bandwidth * link.efficiency == pytest.approx(measured, rel=0.03)


def test_a_changed_cluster_does_not_keep_a_description_that_is_no_longer_true(tmp_path: Path) -> None:
    """The preset's says "8 x 400 Gb/s InfiniBand NDR"."""
    nic = f'[nic]\nbandwidth = "100 Gb/s"\n{_CHANGED}'
    assert load_cluster(write(tmp_path, f'schema = 1\nextends = "dgx-h100"\n{nic}')).description == (
        "dgx-h100, with changes to nic"
    )
    below = write(tmp_path, f'extends = "mine.toml"\n[gpu]\nsm_count = 144\n[pcie]\n{_CHANGED}', "below.toml")
    assert load_cluster(below).description == "mine, with changes to gpu, pcie"
    own = write(tmp_path, f'extends = "dgx-h100"\ndescription = "slow cards"\n{nic}', "own.toml")
    assert load_cluster(own).description == "slow cards"
    renamed = write(tmp_path, 'schema = 1\nextends = "dgx-h100"\nname = "ours"\n', "renamed.toml")
    assert load_cluster(renamed).description == load_cluster("dgx-h100").description


def test_a_file_extends_a_preset_and_changes_one_number(tmp_path: Path) -> None:
    path = write(tmp_path, f'schema = 1\nextends = "dgx-h100"\n[nic]\nbandwidth = "800 Gb/s"\n{_CHANGED}')
    cluster, base = load_cluster(path), load_cluster("dgx-h100")
    assert cluster.nic.bandwidth == 100e9
    assert cluster.nic.per_node == base.nic.per_node
    assert cluster.node_link == base.node_link
    assert cluster.name == "mine"


def test_a_changed_table_names_both_sources_and_has_the_weaker_grade(tmp_path: Path) -> None:
    """The DGX H100's nic table is 'measured'; an assumed number in it makes the table 'assumed'."""
    path = write(tmp_path, f'schema = 1\nextends = "dgx-h100"\n[nic]\nbandwidth = "800 Gb/s"\n{_CHANGED}')
    nic, base = load_cluster(path).nic, load_cluster("dgx-h100").nic
    assert base.evidence == "measured"
    assert nic.evidence == "assumed"
    assert nic.source == f"what if it were other; the rest as in dgx-h100: {base.source}"


@pytest.mark.parametrize(
    ("said", "source", "evidence"),
    [
        ("", "the file does not say", "assumed"),
        ('evidence = "measured"\n', "the file does not say", "measured"),
        ('source = "me"\n', "me", "assumed"),
    ],
)
def test_a_changed_number_is_assumed_where_the_file_does_not_say(
    tmp_path: Path, said: str, source: str, evidence: str
) -> None:
    path = write(tmp_path, f'schema = 1\nextends = "dgx-h100"\n[nic]\nbandwidth = "800 Gb/s"\n{said}')
    nic = load_cluster(path).nic
    assert nic.bandwidth == 100e9
    assert nic.evidence == evidence
    assert nic.source.startswith(f"{source}; the rest as in dgx-h100: ")


def test_every_problem_of_a_file_is_said_at_once(tmp_path: Path) -> None:
    """'bandwith' is what 'bandwidth' is missing for: one problem."""
    tables = '[nic]\nbandwith = "1 GB/s"\nlatency = "x"\n'
    path = write(tmp_path, f'schema = 1\nextends = "dgx-h100"\ngpus_per_nod = 8\n{tables}')
    assert message_of(path) == (
        "mine.toml: 3 problems: (1) nic: unknown key 'bandwith'; did you mean 'bandwidth'?; "
        "(2) unknown key 'gpus_per_nod'; did you mean 'gpus_per_node'?; "
        "(3) nic.latency: 'x' is not a quantity; expected a number and a unit (s, ms, us, µs, ns)"
    )


def test_tables_within_tables_are_merged_key_by_key(tmp_path: Path) -> None:
    table = f'[collectives]\n{_CHANGED}[collectives.protocols.simple]\nbase = "1 ms"\n'
    path = write(tmp_path, f'schema = 1\nextends = "dgx-h100"\n{table}')
    protocols = load_cluster(path).collectives.protocols
    assert protocols["simple"].base == 1e-3
    assert protocols["simple"].inter_round == pytest.approx(16.8e-6)
    assert protocols["ll"] == load_cluster("dgx-h100").collectives.protocols["ll"]


def test_own_gpu_file_is_found_beside_the_cluster_file_that_names_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        f'schema = 1\nextends = "h100-sxm-80gb"\n[memory]\ncapacity = "96 GiB"\n{_CHANGED}',
        "big.toml",
    )
    write(tmp_path, 'schema = 1\nextends = "dgx-h100"\ngpu = "big.toml"\n', "base.toml")
    (tmp_path / "below").mkdir()
    child = write(tmp_path / "below", 'schema = 1\nextends = "../base.toml"\n')
    gpu = load_cluster(child).gpu
    assert gpu.memory.capacity == 96 * 2**30
    assert gpu.name == "big"


def test_an_unknown_preset_names_the_nearest_one() -> None:
    assert "did you mean 'dgx-h100'?" in message_of("dgx-h10")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert message_of(tmp_path / "none.toml") == f"{tmp_path / 'none.toml'}: no such file"


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    assert message_of(tmp_path) == f"{tmp_path}: is a folder, expected a file"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "mine.toml: the file is empty"),
        (b"\n  \n", "mine.toml: the file is empty"),
        (b"\xff\xfe\x00", "mine.toml: not a TOML file: not UTF-8 text"),
        (b'{"gpu": 1}', "mine.toml: not a TOML file, or cut short"),
    ],
)
def test_what_is_not_toml_is_said_to_be_none(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    assert message_of(path).startswith(message)


def test_a_truncated_preset_is_an_error_wherever_it_ends(tmp_path: Path) -> None:
    """Cut after every 97th byte, a cluster file never loads and only ever raises InputError."""
    text = topology_preset_path("dgx-h100").read_text(encoding="utf-8")
    for length in range(0, len(text) - 30, 97):
        message_of(write(tmp_path, text[:length]))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'bandwidth = "450 GB/s"',
            'bandwith = "450 GB/s"',
            "mine.toml: node_link: unknown key 'bandwith'; did you mean 'bandwidth'?",
        ),
        (
            "[node_link]",
            "[node_lnk]",
            "mine.toml: unknown key 'node_lnk'; did you mean 'node_link'?",
        ),
        ('kind = "switch"\n', "", "mine.toml: node_link: missing key 'kind'"),
        (
            'bandwidth = "450 GB/s"',
            "bandwidth = 450",
            "mine.toml: node_link.bandwidth: '450' has no unit; expected one of B/s, kB/s",
        ),
        (
            'bandwidth = "450 GB/s"',
            'bandwidth = "450 Gbps"',
            "mine.toml: node_link.bandwidth: unknown unit 'Gbps' in '450 Gbps'; expected one of B/s",
        ),
        (
            'bandwidth = "450 GB/s"',
            'bandwidth = "450 GiB"',
            "mine.toml: node_link.bandwidth: unknown unit 'GiB' in '450 GiB'",
        ),
        (
            'bandwidth = "450 GB/s"',
            "bandwidth = nan",
            "mine.toml: node_link.bandwidth: 'nan' is not a quantity",
        ),
        (
            "gpus_per_node = 8",
            "gpus_per_node = 0",
            "mine.toml: gpus_per_node: found 0, expected greater than 0",
        ),
        (
            "gpus_per_node = 8",
            "gpus_per_node = 2.5",
            "mine.toml: gpus_per_node: found 2.5, expected a valid integer",
        ),
        (
            "gpus_per_node = 8",
            "gpus_per_node = nan",
            "mine.toml: gpus_per_node: found nan, expected a finite number",
        ),
        ("efficiency = 0.81", "efficiency = nan", "mine.toml: node_link.efficiency: found nan, expected"),
        (
            "efficiency = 0.81",
            "efficiency = 81",
            "mine.toml: node_link.efficiency: found 81, expected less than",
        ),
        (
            'kind = "switch"',
            'kind = "swich"',
            "mine.toml: node_link.kind: found 'swich', expected 'switch', 'mesh' or 'none'; "
            "did you mean 'switch'?",
        ),
        (
            'evidence = "measured"',
            'evidence = "sure"',
            "mine.toml: node_link.evidence: found 'sure', expected",
        ),
        (
            "[node_link]",
            "node_link = 3\n[other]",
            "mine.toml: 2 problems: (1) unknown key 'other'; expected one of schema, name, ",
        ),
        ('gpu = "h100-sxm-80gb"', 'gpu = "h100"', "unknown GPU 'h100'"),
        ('gpu = "h100-sxm-80gb"', "gpu = 100", "mine.toml: gpu: expected the name of a GPU"),
        ('gpu = "h100-sxm-80gb"\n', "", "mine.toml: missing key 'gpu'"),
        ("schema = 1", "schema = 2", "mine.toml: schema: found 2, expected 1"),
        (
            "inter_fraction = 1.0",
            "inter_frac = 1.0",
            "mine.toml: collectives.protocols.simple: unknown key 'inter_frac'; "
            "did you mean 'inter_fraction'?",
        ),
    ],
)
def test_one_wrong_thing_is_one_clear_sentence(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = topology_preset_path("dgx-h100").read_text(encoding="utf-8")
    assert old in text
    error = message_of(write(tmp_path, text.replace(old, new, 1)))
    assert error.startswith(message)
    assert "\n" not in error


def test_a_wrong_gpu_file_is_named_and_not_the_cluster(tmp_path: Path) -> None:
    write(tmp_path, 'schema = 1\nextends = "h100-sxm-80gb"\nsm_cuont = 1\n', "wrong.toml")
    path = write(tmp_path, 'schema = 1\nextends = "dgx-h100"\ngpu = "wrong.toml"\n')
    assert message_of(path) == "wrong.toml: unknown key 'sm_cuont'; did you mean 'sm_count'?"


def test_a_file_that_extends_itself_is_told_so(tmp_path: Path) -> None:
    path = write(tmp_path, 'schema = 1\nextends = "mine.toml"\n')
    assert message_of(path) == "mine.toml: extends: more than 8 files deep; does one extend itself?"


def test_extends_takes_a_name(tmp_path: Path) -> None:
    path = write(tmp_path, "schema = 1\nextends = 3\n")
    assert message_of(path) == "mine.toml: extends: expected a preset's name or a path, found 3"


def test_only_ampere_and_later_have_flash_attention_and_bf16() -> None:
    assert not load_gpu("v100-sxm3-32gb").supports_flash_attention
    assert load_gpu("v100-sxm3-32gb").peak.bf16 is None
    assert load_gpu("a100-sxm-40gb").supports_flash_attention


def test_a_list_of_gpus_is_told_how_to_write_nodes_of_several_types(tmp_path: Path) -> None:
    text = 'schema = 1\nextends = "dgx-h100"\ngpu = ["h100-sxm-80gb", "a100-sxm-80gb"]'
    with pytest.raises(
        InputError, match=r"gpu: found a list, .*list nodes of several kinds under \[\[nodes\]\]"
    ):
        load_cluster(write(tmp_path, text))


def test_rounds_are_longer_where_links_are_longer_than_those_they_were_measured_on(tmp_path: Path) -> None:
    """InfiniBand's 0.6 + 0.4 us are in NCCL's rounds; a card of 100 us adds 99.4, a faster one takes nothing
    off, and who states rounds states them for the links of the same file."""
    mine = f'schema = 1\nextends = "dgx-h100"\n[nic]\n{_CHANGED}latency = "100 us"\n'
    assert load_cluster(write(tmp_path, mine)).extra_link_seconds == (0.0, about(99.4e-6))
    theirs = f'schema = 1\nextends = "mine.toml"\n[network]\n{_CHANGED}latency = "2.4 us"\n'
    assert load_cluster(write(tmp_path, theirs, "a.toml")).extra_link_seconds[1] == pytest.approx(101.4e-6)
    inside = f'schema = 1\nextends = "dgx-h100"\n[node_link]\n{_CHANGED}latency = "1.5 us"\n'
    assert load_cluster(write(tmp_path, inside)).extra_link_seconds == (about(1e-6), 0.0)
    faster = f'schema = 1\nextends = "dgx-h100"\n[nic]\n{_CHANGED}latency = "0.1 us"\n'
    assert load_cluster(write(tmp_path, faster)).extra_link_seconds == (0.0, 0.0)
    own = mine + f'[collectives.protocols.simple]\ninter_round = "120 us"\n[collectives]\n{_CHANGED}'
    assert load_cluster(write(tmp_path, own)).extra_link_seconds == (0.0, 0.0)
    assert (
        load_cluster("dgx-superpod-h100").extra_link_seconds
        == load_cluster("aws-p5").extra_link_seconds
        == (0.0, 0.0)
    )
    assert load_cluster("roce-h100").extra_link_seconds == (0.0, about(4e-6))


@pytest.mark.parametrize("link", ["nic = 5", "network = true", "node_link = 2.5"])
def test_a_link_that_is_no_table_is_refused_by_its_name(link: str, tmp_path: Path) -> None:
    said = message_of(write(tmp_path, f'schema = 1\nextends = "dgx-h100"\n{link}\n'))
    assert said.startswith(f"mine.toml: {link.partition(' ')[0]}: found ")
    assert "expected a table of source, evidence, " in said


def test_a_librarys_clusters_share_the_files_and_the_gpu_that_they_extend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sweep over cards: the cluster's file and its GPU's are read once, and the GPU is the same object."""
    read: list[str] = []

    def counted(path: Path) -> dict[str, Any]:
        read.append(path.name)
        return files_read(path)

    files_read = files.read_toml
    monkeypatch.setattr(files, "read_toml", counted)
    library = Library()
    cards = ({"extends": "dgx-h100", "nic": {"bandwidth": f"{rate} GB/s"}} for rate in (20, 30))
    slow, fast = (library.cluster(table) for table in cards)
    assert (slow.nic.bandwidth, fast.nic.bandwidth) == (20e9, 30e9)
    assert slow.gpu is fast.gpu
    assert read == ["dgx-h100.toml", "h100-sxm-80gb.toml"]
