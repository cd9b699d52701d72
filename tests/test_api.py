"""The Python face: what it gives, what it refuses, and that it costs nothing to import."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zsim
from tests.expect import there

SMALL: dict[str, Any] = {
    "model": "llama-3.2-1b",
    "cluster": "dgx-h100",
    "nodes": 2,
    "training": {"sequence_length": 2048},
}


@pytest.fixture(scope="module")
def result() -> zsim.Result:
    return zsim.simulate(zsim.Experiment(**SMALL, strategy={"stage": 3}))


def test_importing_zsim_imports_nothing_heavy() -> None:
    """`import zsim` must not cost what simulating needs, and never torch."""
    code = (
        "import sys, zsim;"
        "print([m for m in ('torch', 'pandas', 'plotly', 'simpy', 'numpy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_simulating_needs_neither_torch_nor_plotly() -> None:
    code = (
        "import sys, zsim;"
        "zsim.simulate(zsim.Experiment(model='gpt2', cluster='dgx-h100', gpus=2)).report.to_dict();"
        "print([m for m in ('torch', 'pandas', 'plotly', 'networkx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_report_has_every_promised_field(result: zsim.Result) -> None:
    report = result.report.to_dict()
    promised = {
        "zsim_version", "experiment", "step_seconds", "tokens_per_second_per_gpu",
        "model_flops_per_second_per_gpu", "mfu_fraction", "hfu_fraction", "flops_convention", "fits",
        "out_of_memory", "peak_bytes", "breakdown_seconds", "collectives", "evidence", "simulation",
    }  # fmt: skip
    assert promised <= set(report)
    categories = {
        "total",
        "parameters",
        "gradients",
        "optimizer_states",
        "activations",
        "buffers",
        "framework",
    }
    assert {device: set(peak) for device, peak in report["peak_bytes"].items()} == {
        "gpu": categories, "host": categories, "nvme": categories,
    }  # fmt: skip
    assert report["flops_convention"] == "6N + 12LdS per token, N with embeddings"
    assert report["simulation"]["rank_classes"] == 1
    assert report["simulation"]["world_size"] == 16
    assert json.loads(json.dumps(report)) == report


def test_an_experiment_a_dict_and_a_path_are_the_same_job(tmp_path: Path) -> None:
    """The object, its tables as tomllib reads them, and the file's path as str and as another PathLike."""
    text = 'model = "gpt2"\ncluster = "dgx-h100"\ngpus = 2\n\n[strategy]\nkind = "fsdp2"\n'
    path = tmp_path / "job.toml"
    path.write_text(text)
    sources = (zsim.Experiment(**tomllib.loads(text)), tomllib.loads(text), str(path), _Location(path))
    steps = {zsim.simulate(source).report.step_seconds for source in sources}
    assert len(steps) == 1
    plans = {zsim.make_plan(source).program.ops[-1].name for source in sources}
    assert len(plans) == 1


class _Location:
    """A path that is no pathlib.Path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


def test_anything_else_than_an_experiment_is_one_error() -> None:
    with pytest.raises(zsim.InputError, match="experiment: found list, expected a path"):
        zsim.simulate([])  # type: ignore[arg-type]
    with pytest.raises(zsim.InputError, match="unknown key 'modell'; did you mean 'model'"):
        zsim.simulate({"modell": "gpt2"})


def test_the_breakdown_adds_up_to_the_step(result: zsim.Result) -> None:
    report = result.report.to_dict()
    assert math.fsum(report["breakdown_seconds"].values()) == pytest.approx(report["step_seconds"], rel=1e-9)


def test_a_note_says_how_the_capacity_follows_from_the_gpus_memory() -> None:
    """H100: 85.02 GB / 1.05 = 80.97 GB; 95 % of it would be 80.77 GB."""
    report = zsim.simulate(
        zsim.Experiment(
            model="gpt2",
            cluster="dgx-h100",
            gpus=8,
            training={"sequence_length": 512},
            strategy={"kind": "fsdp2"},
        )
    ).report
    assert (
        "capacity is 80.97 GB, the GPU's 85.02 GB / 1.05: the allocator is taken to reserve 5% more than "
        "tensors have"
    ) in report.notes
    assert report.to_dict()["capacity_bytes"]["gpu"] == pytest.approx(80.97e9, abs=5e6)


def test_throughput_and_mfu_follow_from_the_step(result: zsim.Result) -> None:
    """2048 tokens per GPU; 6N + 12 L d S with N = 1,235,814,400, L = 16, d = 2048; H100: 989.4 TFLOP/s."""
    report = result.report.to_dict()
    flops = 2048 * (6 * 1_235_814_400 + 12 * 16 * 2048 * 2048)
    assert report["tokens_per_second_per_gpu"] == pytest.approx(2048 / report["step_seconds"])
    assert report["model_flops_per_second_per_gpu"] == pytest.approx(flops / report["step_seconds"])
    assert report["mfu_fraction"] == pytest.approx(flops / report["step_seconds"] / 989.4e12)


def test_a_trace_becomes_a_frame(result: zsim.Result) -> None:
    frame = result.trace.to_frame()
    assert list(frame.columns)[:7] == [
        "rank", "stream", "name", "kind", "start_seconds", "end_seconds", "bytes",
    ]  # fmt: skip
    assert frame["end_seconds"].max() == pytest.approx(result.trace.step_seconds)
    assert (frame["end_seconds"] >= frame["start_seconds"]).all()


def test_the_same_question_has_the_same_answer() -> None:
    """Two runs in one process give equal bytes, but for the time they took."""
    experiment = zsim.Experiment(**SMALL, strategy={"kind": "fsdp2"})
    first, second = (zsim.simulate(experiment).report.to_dict() for _ in range(2))
    for report in (first, second):
        report["simulation"].pop("wall_seconds")
    assert json.dumps(first) == json.dumps(second)


@pytest.mark.parametrize(
    "strategy",
    [
        {"kind": "ddp"},
        {"stage": 0},
        {"stage": 1},
        {"stage": 2},
        {"stage": 3},
        {"kind": "fsdp2"},
        {"kind": "fsdp2", "replicate": 2},
        {"kind": "fsdp2", "reshard_after_forward": 8},
        {"kind": "fsdp1"},
        {"kind": "fsdp1", "sharding_strategy": "HYBRID_SHARD"},
    ],
    ids=str,
)
def test_folded_equals_unfolded(strategy: dict[str, Any]) -> None:
    """One lane for all ranks, or a lane each: the same spans to 1e-9."""
    experiment = zsim.Experiment(**SMALL, strategy=strategy)
    folded, unfolded = zsim.simulate(experiment), zsim.simulate(experiment, unfold=True)
    assert unfolded.report.to_dict()["simulation"]["rank_classes"] == 16
    assert unfolded.trace.step_seconds == pytest.approx(folded.trace.step_seconds, rel=1e-9)
    for rank in (0, 5, 15):
        lane = unfolded.trace.select_rank(rank)
        np.testing.assert_allclose(lane.start_seconds, folded.trace.start_seconds, rtol=1e-9)
        np.testing.assert_allclose(lane.end_seconds, folded.trace.end_seconds, rtol=1e-9)


def test_a_job_that_does_not_fit_is_simulated_all_the_same() -> None:
    """Llama-3-70B with DDP needs 16 bytes for each of 70.6e9 parameters on every GPU: never on 80 GB."""
    experiment = zsim.Experiment(
        model="llama-3-70b",
        cluster="dgx-h100",
        nodes=1,
        training={"sequence_length": 512},
        strategy={"kind": "ddp"},
    )
    report = zsim.simulate(experiment).report.to_dict()
    assert report["fits"] is False
    assert report["step_seconds"] > 0
    out = report["out_of_memory"]
    assert out["pool"] == "gpu"
    assert out["op"]
    assert out["missing_bytes"] > 0
    assert out["least_gpus"] is None
    assert report["peak_bytes"]["gpu"]["total"] > 16 * 70_553_706_496


def test_the_least_gpus_that_would_do_are_named_and_do() -> None:
    """Sharding helps ZeRO-3: the named count fits, one node less does not."""
    question: dict[str, Any] = {
        "model": "llama-3-70b",
        "cluster": "dgx-h100",
        "training": {"sequence_length": 1024, "activation_checkpointing": "full"},
        "strategy": {"stage": 3},
    }
    out = zsim.simulate(zsim.Experiment(**question, nodes=1)).report.to_dict()["out_of_memory"]
    least = out["least_gpus"]
    assert least % 8 == 0
    assert zsim.simulate(zsim.Experiment(**question, gpus=least)).report.fits
    assert not zsim.simulate(zsim.Experiment(**question, gpus=least - 8)).report.fits


def test_a_slower_network_never_makes_a_step_faster(tmp_path: Path) -> None:
    cluster = Path(__file__).resolve().parents[1] / "topologies" / "dgx-h100.toml"
    slow = tmp_path / "slow.toml"
    text = cluster.read_text().replace('bandwidth = "400 Gb/s"', 'bandwidth = "100 Gb/s"')
    slow.write_text(text)
    (tmp_path / "gpus").symlink_to(cluster.parent / "gpus")
    fast = zsim.simulate(zsim.Experiment(**SMALL, strategy={"kind": "fsdp2"}))
    slower = zsim.simulate(zsim.Experiment(**{**SMALL, "cluster": str(slow)}, strategy={"kind": "fsdp2"}))
    assert slower.trace.step_seconds > fast.trace.step_seconds


def test_a_report_says_how_far_to_trust_its_step() -> None:
    """The keys of `--json` and the attributes are the same values."""
    experiment = zsim.Experiment(
        model="gpt2",
        cluster="dgx-h100",
        gpus=8,
        training={"sequence_length": 1024, "micro_batch_size": 8},
        strategy={"kind": "fsdp2"},
    )
    report = zsim.simulate(experiment).report
    content = report.to_dict()
    low, high = there(report.step_seconds_range)
    assert content["step_seconds_range"] == [low, high]
    assert 0 < low < report.step_seconds < high
    found = content["validation"]
    assert found["regime"].startswith("FSDP, one node")
    assert found["runs"] == there(report.validation).runs
    assert set(found) >= {"regime", "runs", "mean_absolute_error", "worst_absolute_error", "extrapolates"}


def test_a_gpu_that_nobody_measured_is_named_as_such() -> None:
    experiment = zsim.Experiment(model="gpt2", cluster="mi300x-x8", gpus=8, strategy={"kind": "ddp"})
    found = there(zsim.simulate(experiment).report.validation)
    assert "GPU mi300x-192gb without a validated run of DDP" in found.extrapolates


def test_a_result_shows_itself_in_a_notebook_and_draws_its_page() -> None:
    """One row with the step, its interval, memory and the limit; the figures are those of the page."""
    experiment = zsim.Experiment(
        model="gpt2", cluster="dgx-h100", gpus=8, strategy=zsim.Fsdp2(), training={"sequence_length": 512}
    )
    result = zsim.simulate(experiment)
    (row,) = result.records()
    assert row["step_seconds"] == result.report.step_seconds
    assert (row["low_seconds"], row["high_seconds"]) == result.report.step_seconds_range
    html = result._repr_html_()
    assert "gpt2 | FSDP2 | dgx-h100 | 8 GPUs" in html
    assert result.report.limit in html
    assert result.figures == ("step", "timeline", "memory", "waterfall", "collectives", "links", "errors")
    for name in result.figures:
        assert result.figure(name).data
    lines = str(result).splitlines()
    assert "Where the step goes" in lines
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in str(result)


def test_a_result_saves_the_files_of_zsim_run(tmp_path: Path) -> None:
    result = zsim.simulate(zsim.Experiment(model="gpt2", cluster="dgx-h100", gpus=1))
    page, content = result.save(tmp_path / "out")
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(content.read_text()) == json.loads(json.dumps(result.report.to_dict()))
