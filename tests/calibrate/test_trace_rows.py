"""What a recorded trace says of the machine it ran on."""

from __future__ import annotations

from pathlib import Path

import pytest

import zsim
from zsim.calibrate.hardware_file import calibrate
from zsim.calibrate.measurements import Measurement, Measurements, merge_measurements
from zsim.calibrate.readers import read_measurements
from zsim.errors import InputError
from zsim.specs.cluster.files import load_cluster
from zsim.trace.chrome.write import write_chrome_traces

GLOO = Path(__file__).resolve().parents[2] / "traces" / "gloo"


def recorded(folder: Path, model: str) -> Path:
    """All ranks of a node whose NVLinks reach half of their rate, also beside kernels."""
    origin = {"source": "a test", "evidence": "assumed"}
    cluster = {
        "extends": "dgx-h100",
        "node_link": {"efficiency": 0.5, **origin},
        "gpu": {"interference": {"compute_slowdown": 1.2, "communication_slowdown": 1.0, **origin}},
    }
    result = zsim.simulate(
        zsim.Experiment(model=model, cluster=cluster, nodes=1, training={"sequence_length": 512}), unfold=True
    )
    folder.mkdir()
    write_chrome_traces(result.trace, folder)
    return folder


def test_links_are_found_again_from_the_transfers_of_recorded_steps(tmp_path: Path) -> None:
    """Kineto files of 8 ranks, two models; the waits of collectives for the last rank do not count."""
    folders = [recorded(tmp_path / model, model) for model in ("gpt2", "llama-3.2-1b")]
    measured = merge_measurements([read_measurements(folder) for folder in folders])
    assert {row["kind"] for row in measured.rows} == {"all_gather", "reduce_scatter"}
    assert measured.machines == ("8 ranks",)
    found = calibrate(load_cluster("dgx-h100"), "dgx-h100", "half", measured)
    (tmp_path / "half.toml").write_text(found.toml())
    assert load_cluster(str(tmp_path / "half.toml")).node_link.efficiency == pytest.approx(0.5, rel=0.01)


def test_a_recording_of_gloo_gives_a_row_for_every_kind_and_size() -> None:
    """Two ranks of the reference engine's stage 3: gathers and reductions of the root and of a block."""
    measured = read_measurements(GLOO / "zero3-even-2ranks")
    rows = [(row["kind"], row["bytes"], row["ranks"], row["nodes"]) for row in measured.rows]
    assert rows == [
        ("all_gather", 524_800, 2, 1),
        ("all_gather", 738_304, 2, 1),
        ("reduce_scatter", 524_800, 2, 1),
        ("reduce_scatter", 738_304, 2, 1),
    ]
    assert "kernels are left out, their shapes are not in the trace" in measured.notes[0]


def test_points_that_no_link_explains_are_refused() -> None:
    """Twice the bytes in a hundredth of the time: beside other work, or stamped when calls had returned."""
    rows = tuple(
        Measurement("collective", {"kind": "all_gather", "ranks": 2, "nodes": 1}, seconds, "x", bytes=size)
        for size, seconds in ((1e6, 4e-2), (2e6, 4e-4), (4e6, 8e-2), (8e6, 1e-4), (16e6, 1e-1), (32e6, 2e-4))
    )
    with pytest.raises(InputError, match="no start, round and rate fit these 6 points"):
        calibrate(load_cluster("cpu-gloo"), "cpu-gloo", "x", Measurements(rows, ("2 x EPYC",), (), ("x",)))


def test_one_rank_of_many_does_not_tell_transfer_from_waiting(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "all", "gpt2")
    one = tmp_path / "one"
    one.mkdir()
    first = sorted(folder.iterdir())[0]
    (one / first.name).write_bytes(first.read_bytes())
    with pytest.raises(InputError, match="too few ranks to tell transfer from waiting"):
        read_measurements(one)


def test_a_truncated_trace_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "cut.json.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(InputError, match=r"cut\.json\.gz"):
        read_measurements(path)
