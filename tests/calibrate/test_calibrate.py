"""Numbers that made the measurements come back out of them; the file loads; what is out of range is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zsim
from tests.expect import about
from zsim.calibrate.hardware_file import calibrate
from zsim.calibrate.kernel_fits import ADAMW_IMPLEMENTATIONS, FitParameter, replace_values, robust_fit
from zsim.calibrate.measurements import Measurement, Measurements
from zsim.calibrate.readers import read_measurements
from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.update import optimizer_kernels
from zsim.cost.rates.gpu import kernel_seconds
from zsim.errors import InputError
from zsim.specs.cluster.files import load_cluster

ROOT = Path(__file__).resolve().parents[2]
MICROBENCH = ROOT / "traces" / "cpu-2core-epyc" / "microbench.json"
TRUTH = {
    "memory_bound.copy_fraction": 0.7,
    "memory_bound.elementwise_fraction": 0.6,
    "memory_bound.optimizer_fraction": 0.65,
    "memory_bound.bytes_half": 3e6,
    "gemm.max_fraction": 0.71,
    "gemm.k_half": 300.0,
    "attention.forward_fraction": 0.6,
    "attention.backward_fraction": 0.5,
    "attention.sequence_half": 400.0,
}


def synthetic() -> Measurements:
    """What an H100 with TRUTH's numbers would measure, every eleventh point disturbed by half."""
    gpu = replace_values(load_cluster("dgx-h100").gpu, TRUTH)
    rows: list[Measurement] = []

    def add(
        family: str, parameters: dict[str, Any], kernels: list[Kernel], flops: float, num_bytes: float
    ) -> None:
        seconds = sum(kernel_seconds(kernel, gpu) for kernel in kernels)
        seconds *= 1.5 if len(rows) % 11 == 5 else 1.0
        rows.append(Measurement(family, parameters, seconds, "synthetic.json", flops, num_bytes))

    for size in 2.0 ** np.arange(16, 31):
        add("copy", {"bytes": size}, [Kernel("copy", 0.0, 2 * size)], 0.0, 2 * size)
        add("residual", {"direction": "forward"}, [Kernel("elementwise", 0.0, 3 * size)], 0.0, 3 * size)
        for kind, implementation in ADAMW_IMPLEMENTATIONS.items():
            adam = {"kind": kind, "place": "cuda", "threads": 1, "numel": size}
            add("adamw", adam, [*optimizer_kernels(int(size), "adamw", implementation)], 0.0, 28 * size)
    for m in (1024, 4096, 16384):
        for n, k in (
            (4096, 4096), (14336, 4096), (4096, 14336), (4096, 512), (128256, 4096),
            (4096, 2048), (14336, 2048), (4096, 3072), (4096, 8192),
        ):  # fmt: skip
            flops, moved = 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n)
            shape = {"m": m, "n": n, "k": k, "dtype": "bf16"}
            add("gemm", shape, [Kernel("gemm", flops, moved, "bf16", (m, n, k))], flops, moved)
    for length in (512, 1024, 2048, 4096, 8192):
        forward = 2.0 * 32 * length * length * 128
        kernels = [
            Kernel("attention_forward", forward, 0.0, "bf16", (32, length, length, 128)),
            Kernel("attention_backward", 2.5 * forward, 0.0, "bf16", (32, length, length, 128), 3),
        ]
        common = {"batch": 1, "heads": 32, "length": length, "head_dim": 128, "dtype": "bf16"}
        add("attention", common | {"direction": "forward"}, kernels[:1], forward, 0.0)
        add("attention", common | {"direction": "both"}, kernels, 3.5 * forward, 0.0)
    return Measurements(tuple(rows), ("a machine",), (), ("synthetic.json",))


def test_a_disturbed_point_does_not_pull_a_fit() -> None:
    """y = 3 x at nine points and 30 x at one: least squares of the logarithms would say 3.8."""
    xs = np.arange(1.0, 11.0)
    ys = 3 * xs
    ys[4] *= 10
    values, stuck = robust_fit(
        [FitParameter("a", 1.0, 0.1, 100.0)], lambda v: (v["a"] * xs).tolist(), ys.tolist()
    )
    assert values["a"] == pytest.approx(3.0, rel=0.02)
    assert stuck == ()


def test_a_number_that_stops_at_its_limit_is_named() -> None:
    values, stuck = robust_fit([FitParameter("a", 1.0, 0.5, 2.0)], lambda v: [v["a"]] * 3, [5.0, 5.0, 5.0])
    assert (values["a"], stuck) == (about(2.0, rel=1e-2), ("a",))


def test_a_gpus_numbers_come_back_from_what_they_made() -> None:
    found = calibrate(load_cluster("dgx-h100"), "dgx-h100", "mine", synthetic())
    values = {name: value for fit in found.fits for name, value in fit.values.items()}
    for name, truth in TRUTH.items():
        assert values[name] == pytest.approx(truth, rel=0.15 if "half" in name else 0.04), name
    assert all(fit.median_error < 0.02 for fit in found.fits if fit.points)


@pytest.mark.parametrize("start", [16.0, 128.0, 642.0, 1500.0])
def test_k_half_is_that_of_long_products_wherever_its_search_begins(start: float) -> None:
    """Short ones take the time of writing their result from 349 on. Alone they do not tell it."""
    base = load_cluster("dgx-h100")
    base = base.model_copy(update={"gpu": replace_values(base.gpu, {"gemm.k_half": start})})
    rows = tuple(row for row in synthetic().rows if row.family == "gemm")
    (fit,) = calibrate(base, "dgx-h100", "mine", Measurements(rows)).fits
    assert fit.values["gemm.k_half"] == pytest.approx(300, rel=0.05)
    short = tuple(row for row in rows if row["k"] == 512)
    (fit,) = calibrate(base, "dgx-h100", "mine", Measurements(short)).fits
    assert list(fit.values) == ["gemm.max_fraction"]


def test_the_file_loads_over_its_base_and_says_where_each_number_is_from(tmp_path: Path) -> None:
    found = calibrate(load_cluster("dgx-h100"), "dgx-h100", "mine", synthetic())
    path = tmp_path / "mine.toml"
    path.write_text(found.toml())
    cluster = load_cluster(path)
    assert cluster.gpu.gemm.max_fraction == pytest.approx(0.71, rel=0.03)
    assert cluster.gpu.gemm.transformer_engine_ratio == 1.0  # H100's is to what torch's sustain in steps
    assert cluster.gpu.gemm.source.startswith(
        "zsim calibrate, matrix products: synthetic.json on a machine: 27 points"
    )
    assert cluster.gpu.gemm.measured_range["flops"] == (2.0 * 1024 * 4096 * 512, 2.0 * 16384 * 128256 * 4096)
    assert cluster.nic == load_cluster("dgx-h100").nic


def test_work_beyond_the_measured_range_lowers_the_grade_and_is_said(tmp_path: Path) -> None:
    found = calibrate(load_cluster("dgx-h100"), "dgx-h100", "mine", synthetic())
    path = tmp_path / "mine.toml"
    path.write_text(found.toml())
    job = {
        "model": "llama-3-8b",
        "nodes": 1,
        "training": {"sequence_length": 4096},
        "strategy": {"kind": "fsdp2"},
    }
    inside = zsim.simulate(zsim.Experiment(origin="test", cluster=str(path), **job))
    assert not [
        note for note in inside.report.notes if note.startswith("extrapolated: ") and "matrix" in note
    ]
    lines = [
        "flops = [1.0, 1000.0]" if line.startswith("flops") else line
        for line in path.read_text().splitlines()
    ]
    path.write_text("\n".join(lines))
    beyond = zsim.simulate(zsim.Experiment(origin="test", cluster=str(path), **job)).report
    notes = [note for note in beyond.notes if "matrix products" in note]
    assert len(notes) == 1
    assert "100% of the work in matrix products is in pieces beyond the 1 to 1e+03 FLOP" in notes[0]
    assert beyond.evidence["compute"] == "assumed"


def test_measurements_that_say_nothing_of_the_cluster_are_refused() -> None:
    row = Measurement("poetry", {}, 1.0, "a.json")
    with pytest.raises(InputError, match="nothing of 'dgx-h100' follows"):
        calibrate(load_cluster("dgx-h100"), "dgx-h100", "mine", Measurements((row,)))


def test_too_few_sizes_are_refused_with_how_many_a_fit_takes() -> None:
    """Three sizes of one collective for three numbers, of which a fourth shows whether they fit."""
    rows = tuple(
        Measurement("collective", {"kind": "all_reduce", "ranks": 8, "nodes": 1}, 1e-3, "a.json", bytes=size)
        for size in (1e6, 1e7, 1e8)
    )
    with pytest.raises(
        InputError, match=r"3 rows of collective \(expected at least 4 of all_gather, .* sizes\)"
    ):
        calibrate(load_cluster("dgx-h100"), "dgx-h100", "mine", Measurements(rows))
    fourth = Measurement("collective", rows[0].parameters, 1e-2, "a.json", bytes=1e9)
    assert calibrate(load_cluster("dgx-h100"), "dgx-h100", "mine", Measurements((*rows, fourth))).fits


def test_products_and_collectives_beside_each_other_give_the_slowdown_of_both() -> None:
    """Products 10 s alone and 12 beside, a collective 4 and 6; of two groups the smaller counts."""
    rows = [
        Measurement("interference", {"measured": what, "beside": beside, "ranks": ranks}, seconds, "a.json")
        for what, beside, ranks, seconds in (
            ("gemm", False, 2, 10.0), ("gemm", True, 2, 12.0),
            ("all_reduce", False, 2, 4.0), ("all_reduce", True, 2, 6.0),
            ("all_reduce", False, 4, 5.0), ("all_reduce", True, 4, 10.0),
        )
    ]  # fmt: skip
    found = calibrate(load_cluster("dgx-h100"), "dgx-h100", "mine", Measurements(tuple(rows)))
    values = {name: value for fit in found.fits for name, value in fit.values.items()}
    assert values == {
        "interference.compute_slowdown": pytest.approx(1.2),
        "interference.communication_slowdown": pytest.approx(1.5),
    }
    for title in ("products beside a collective", "a collective beside products"):
        assert title in found.tables["gpu.interference"]["source"]


def test_rows_measured_beside_others_work_are_left_out_aloud() -> None:
    rows = synthetic().rows
    noisy = Measurement("copy", {"bytes": 1}, 1.0, "a.json", bytes=2.0**30, foreign_cpu_fraction=0.5)
    found = calibrate(load_cluster("dgx-h100"), "dgx-h100", "mine", Measurements((*rows, noisy)))
    assert found.notes[0] == "1 row left out: others used more than 10% of the machine meanwhile"
    assert [note.split()[0] for note in found.notes[1:]] == ["gemm.max_fraction"]  # of products alone


def test_the_command_writes_a_cluster_that_runs(tmp_path: Path) -> None:
    """The recorded microbenchmarks of a small CPU machine."""
    command = [sys.executable, "-c", "from zsim.cli import main; main()", "calibrate", str(MICROBENCH)]
    command += ["--base", "cpu-gloo", "--out", "cpu.toml", "--page", "page.html", "--json", "fits.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 96
    fits = json.loads((tmp_path / "fits.json").read_text())["fits"]
    titles = {fit["title"] for fit in fits}
    assert {"matrix products", "fused attention", "collectives within a node", "drive, read"} <= titles
    gemm = next(fit for fit in fits if fit["title"] == "matrix products")
    assert gemm["median_absolute_error"] < 0.1
    host = load_cluster(tmp_path / "cpu.toml").host
    assert host.cores == 2
    assert host.overhead_factor == pytest.approx(0.8487 / 0.85, rel=1e-3)
    assert "plotly" in (tmp_path / "page.html").read_text().lower()


def test_how_fast_a_host_runs_python_is_named_with_the_file_it_comes_from() -> None:
    """1.7 us for what takes the reference 0.85."""
    rows = (
        Measurement("host", {"what": "launch"}, 5e-3, "a.json", calls=1000.0),
        Measurement("host", {"what": "module_call"}, 1.7e-3, "b.json", calls=1000.0),
    )
    base = load_cluster("dgx-h100")
    made = calibrate(base, "dgx-h100", "mine", Measurements(rows))
    assert made.tables["host"]["overhead_factor"] == pytest.approx(2.0)
    assert "a.json" in made.tables["host"]["source"]
    assert "b.json" in made.tables["host"]["source"]
    without = calibrate(base, "dgx-h100", "mine", Measurements(rows[:1]))
    assert "overhead_factor" not in without.tables["host"]


def test_a_ring_between_nodes_uses_the_cards_of_all_of_a_nodes_gpus() -> None:
    """8 GPUs with a card of 50 GB/s at 0.7 each move 280 GB/s from node to node, less than NVLink's 364; as
    one card's rate that would be more than its data sheet has."""
    rows = [
        Measurement(
            "collective", {"kind": "all_gather", "ranks": 16, "nodes": 2}, seconds, "nccl.txt", 0.0, num_bytes
        )
        for num_bytes in 2.0 ** np.arange(20, 33, 2)
        for seconds in [40e-6 + num_bytes * 15 / 16 / (8 * 35e9)]
    ]
    found = calibrate(
        load_cluster("dgx-h100"), "dgx-h100", "ours", Measurements(tuple(rows), (), (), ("nccl.txt",))
    )
    (fit,) = found.fits
    assert fit.values["edge"] == about(35e9, rel=0.01)
    assert found.tables["nic"]["efficiency"] == about(0.7, rel=0.01)


def test_the_microbenchmarks_of_a_gpu_are_read_and_what_is_not_fitted_is_said() -> None:
    """The recorded H100. Its preset has what was fitted by hand to the same rows: attention 0.427 forward and
    0.394 backward. Rows of 20 us, which the host's issue takes, would put `bytes_half` at its limit."""
    measured = read_measurements(ROOT / "traces" / "h100-80gb-hbm3" / "microbench.json")
    made = calibrate(load_cluster("dgx-h100"), "dgx-h100", "mine", measured)
    attention = made.tables["gpu.attention"]
    assert attention["forward_fraction"] == pytest.approx(0.427, rel=0.05)
    assert attention["backward_fraction"] == pytest.approx(0.394, rel=0.05)
    fits = {fit.title: fit for fit in made.fits}
    assert len(fits["fused attention"].points) == 40
    assert max(fits[title].median_error for title in ("AdamW", "kernels bound by memory")) < 0.05
    assert not any(fit.at_bound for fit in made.fits)
    (alone,) = (note for note in made.notes if note.startswith("gemm.max_fraction"))
    fraction = made.tables["gpu.gemm"]["max_fraction"]
    assert fraction == pytest.approx(0.766, rel=0.05)  # fitted by hand in h100-sxm-80gb-cuda13
    assert f"{fraction:.3g} is of products timed alone, where 'dgx-h100' has 0.69 (calibrated)" in alone
    assert made.tables["gpu.gemm"]["source"].endswith(alone)
    assert fits["AdamW on the CPU"].units == {"offload.thread_bandwidth": "B/s"}
    (unfitted,) = (note for note in made.notes if note.startswith("rows to which nothing is fitted"))
    assert "60 of grouped_gemm" in unfitted
    assert "54 of fused_attention (only causal flash" in unfitted
    assert " as short as the host takes to issue a kernel" in unfitted
