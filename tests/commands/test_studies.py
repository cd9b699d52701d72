"""The commands of studies: what they print and write, and how they end."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.browser import browse, in_browser
from zsim.cli import app
from zsim.errors import InputError

SMALL = ["--model", "gpt2", "--set", "training.sequence_length=128", "--set", "strategy.kind=fsdp2"]


def ran(*arguments: str) -> str:
    """Standard output of a command that ends well."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "study.toml"
    path.write_text(
        '[base]\nmodel = "gpt2"\ncluster = "dgx-h100"\n[axes]\ngpus = [8, 12]\n'
        '[[zip]]\nlabel = ["sharded", "whole"]\nstrategy = [{kind = "fsdp2"}, {kind = "ddp"}]\n'
    )
    return path


def test_a_sweep_says_what_became_of_its_points(study: Path) -> None:
    output = ran("sweep", str(study), "--jobs", "1", "--set", "training.sequence_length=128")
    assert "4 of 4 points: 4 simulated, 0 known, 2 failed" in output
    assert "fastest that fit, of 2" in output
    assert "whole, gpus 8\n" in output
    assert "2 failed: gpus: found 12, expected a multiple of the 8 GPUs" in output
    assert (study.parent / "study-results" / "results.csv").exists()
    again = ran("sweep", str(study), "--jobs", "1", "--set", "training.sequence_length=128")
    assert "4 of 4 points: 0 simulated, 4 known, 2 failed" in again


def test_a_sweep_of_whole_runs_prints_their_days_and_cost(study: Path) -> None:
    """Two intervals between saves that block 60 s: one of 10 min loses about a tenth, one of 100 min about a
    hundredth. Points with the same step are ordered by days; one that can never finish says why."""
    study.write_text(
        '[base]\nmodel = "gpt2"\ncluster = "dgx-h100"\ngpus = 8\n[base.cost]\ngpu_hour_price = 2.0\n'
        '[base.run]\ntokens = "1T"\nseeds = 4\n[base.run.failures]\nper_1000_node_days = 4.0\n'
        '[base.run.checkpoint]\nblocking = "60 s"\ndurable = "60 s"\nload = "60 s"\n'
        '[base.run.recovery]\nrestart = "4 min"\n[axes]\n'
        'run.checkpoint.every = ["10 min", "100 min"]\nrun.failures.per_1000_node_days = [4.0, 1e7]\n'
    )
    output = ran("sweep", str(study), "--jobs", "1")
    heading, first, second = [line for line in output.splitlines() if "GB" in line or "GPU memory" in line][
        :3
    ]
    assert heading.split()[:7] == ["tokens/s/GPU", "GPU", "memory", "days", "goodput", "cost", "fastest"]
    assert first.endswith("every 100 min, per_1000_node_days 4")
    assert second.endswith("every 10 min, per_1000_node_days 4")
    goodput = [float(line.split()[4].rstrip("%")) for line in (first, second)]
    assert goodput[0] == pytest.approx(99.0, abs=0.5)
    assert goodput[1] == pytest.approx(90.9, abs=0.5)
    assert output.count("1 without a whole run: run: can never finish") == 2


def test_a_study_of_which_nothing_works_ends_with_1(study: Path) -> None:
    study.write_text('[base]\nmodel = "gpt2"\ncluster = "dgx-h100"\n[axes]\ngpus = [12, 20]\n')
    done = CliRunner().invoke(app, ["sweep", str(study), "--jobs", "1"])
    assert done.exit_code == 1
    assert "1 failed: gpus: found 12, expected a multiple of the 8 GPUs" in done.stdout


@pytest.mark.parametrize(
    ("axis", "nearest"),
    [
        ("noodes", "; did you mean 'nodes'?"),
        ("foo", ""),
        ("training.micro_batchsize", "; did you mean 'training.micro_batch_size'?"),
        ("strategy.stag", "; did you mean 'strategy.stage'?"),
        ("nodes.many", "; did you mean 'nodes'?"),
    ],
)
def test_an_axis_that_no_experiment_has_is_refused(study: Path, axis: str, nearest: str) -> None:
    study.write_text(f'[base]\nmodel = "gpt2"\ncluster = "dgx-h100"\n[axes]\n"{axis}" = [1, 2]\n')
    done = CliRunner().invoke(app, ["sweep", str(study), "--jobs", "1"])
    assert isinstance(done.exception, InputError)
    assert str(done.exception) == f"study: unknown key '{axis}'{nearest}"
    assert not (study.parent / "study-results").exists()


def test_a_sweep_lists_its_points_without_running_them(study: Path) -> None:
    lines = ran("sweep", str(study), "--list").splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("     0  gpus = 8, label = sharded")
    assert not (study.parent / "study-results").exists()


def test_a_setting_that_no_experiment_has_is_refused(study: Path) -> None:
    done = CliRunner().invoke(app, ["sweep", str(study), "--jobs", "1", "--set", "trainin=1"])
    assert isinstance(done.exception, InputError)
    assert str(done.exception) == "study: unknown key 'trainin'; did you mean 'training'?"


def test_scaling_writes_a_page_and_its_numbers(tmp_path: Path) -> None:
    output = ran("scaling", *SMALL, "--gpus", "8,16", "--jobs", "1", "--out", str(tmp_path / "out"))
    assert "weak scaling: the same batch on every GPU" in output
    assert "100.0%" in output
    content = json.loads((tmp_path / "out" / "scaling.json").read_text())
    assert [scale["gpus"] for scale in content["scales"]] == [8, 16]
    assert "plot-efficiency" in (tmp_path / "out" / "scaling.html").read_text()


def test_filling_and_keeping_the_batch_contradict(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["scaling", *SMALL, "--strong", "--fill", "--out", str(tmp_path)])
    assert isinstance(done.exception, InputError)
    assert "give one" in str(done.exception)


def test_sensitivity_says_what_matters_and_what_would_do(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--gpus", "1", "--jobs", "1", "--out", str(out), "--target", "step_seconds=1e-6"]
    output = ran("sensitivity", *SMALL, *arguments, "--resource", "HBM bandwidth")
    assert "without effect: " in output
    assert "not by themselves, however much (the step then): HBM bandwidth" in output
    content = json.loads((out / "sensitivity.json").read_text())
    assert content["target"] == "step_seconds=1e-6"
    assert {number["kind"] for number in content["numbers"]} == {"hardware"}


def test_a_resource_without_a_target_is_refused(tmp_path: Path) -> None:
    """It was accepted and changed nothing."""
    arguments = ["sensitivity", *SMALL, "--gpus", "1", "--resource", "HBM bandwidth", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, InputError)
    assert "--resource HBM bandwidth: has no effect without --target" in str(done.exception)


def test_a_sweep_varies_the_gpu_as_set_does_and_counts_no_refusal_as_known(study: Path) -> None:
    study.write_text(
        '[base]\nmodel = "gpt2"\ncluster = "dgx-h100"\n[axes]\n"gpu.power_limit" = ["500 W", "900 W"]\n'
    )
    arguments = ["--jobs", "1", "--set", "training.sequence_length=128", "--set", "strategy.kind=fsdp2"]
    output = ran("sweep", str(study), *arguments)
    assert "2 of 2 points: 2 simulated, 0 known, 1 failed" in output
    assert "power_limit: found 900 W, expected 280 to 700 W" in " ".join(output.split())


def test_the_memory_to_fit_needs_no_simulation(tmp_path: Path) -> None:
    output = ran("sensitivity", *SMALL, "--gpus", "1", "--target", "fits", "--out", str(tmp_path / "out"))
    assert output.startswith("GPU memory: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["", "below"])
@pytest.mark.parametrize(
    "command", ["scaling", "sensitivity", "tune", "sweep", "sweep --cache", "tune --cache"]
)
def test_a_folder_that_cannot_be_made_is_told_before_anything_is_simulated(
    study: Path, monkeypatch: pytest.MonkeyPatch, command: str, place: str
) -> None:
    monkeypatch.setattr("zsim.study.sweep.pool.run_batch", None)
    Path("afile").write_text("mine")
    name, _, option = command.partition(" ")
    what = [str(study)] if name == "sweep" else [*SMALL, *([] if name == "scaling" else ["--gpus", "8"])]
    where = str(Path("afile") / place)
    done = CliRunner().invoke(app, [name, *what, "--jobs", "1", option or "--out", where])
    assert isinstance(done.exception, InputError)
    assert "cannot be made: " in str(done.exception)
    assert "afile is a file, expected a folder" in str(done.exception)
    assert Path("afile").read_text() == "mine"


def test_a_folder_that_may_not_be_written_is_told(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
    done = CliRunner().invoke(app, ["sweep", str(study), "--jobs", "1", "--out", "deep/out"])
    assert isinstance(done.exception, InputError)
    assert str(done.exception).startswith("deep/out: cannot be written: ")
    assert not Path("deep").exists()


@pytest.mark.parametrize(
    ("command", "words"), [("show", "2 nodes, 16 GPUs"), ("bench", "16 GPUs, groups of 16")]
)
def test_topology_takes_the_nodes_that_a_cluster_lists(command: str, words: str, tmp_path: Path) -> None:
    """It asked for 4, or 1, without being told so, and refused the cluster."""
    path = tmp_path / "both.toml"
    path.write_text('schema = 1\n[[nodes]]\nlike = "dgx-h100"\n[[nodes]]\nlike = "dgx-a100-80gb"\n')
    assert words in ran("topology", command, str(path))


# -- `zsim needs`, in words and as JSON --------------------------------------------------------------------


ARGUMENTS = [
    "needs", "--model", "gpt2", "--cluster", "dgx-h100", "--gpus", "2",
    "--set", "training.sequence_length=1024", "--set", "strategy.kind=fsdp2",
    "--set", "strategy.cpu_offload=true", "--resource", "cpu", "--resource", "pcie",
]  # fmt: skip


def test_one_sentence_per_resource_and_the_same_as_json(tmp_path: Path) -> None:
    written = tmp_path / "needs.json"
    done = CliRunner().invoke(app, [*ARGUMENTS, "--json", str(written)])
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.replace(str(written), "").splitlines())) <= 80
    found = json.loads(written.read_text())
    assert [need["resource"] for need in found] == ["cpu", "pcie"]
    for need in found:
        assert need["sentence"] in " ".join(done.output.split())
        assert need["is_enough"] == (need["needed"] <= need["available"])
    assert json.loads(CliRunner().invoke(app, [*ARGUMENTS, "--json", "-"]).output) == found


# -- `zsim tune` from the command line ---------------------------------------------------------------------


SMALL_JOB = ("--model", "gpt2", "--cluster", "dgx-a100-40gb", "--gpus", "8", "-j", "1", "--top", "2")
KEEP = ("--keep", "offload", "--keep", "checkpointing", "--keep", "micro-batch", "--keep", "bucket")
LENGTH = ("--set", "training.sequence_length=512")


def zsim(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    if isinstance(done.exception, Exception):
        raise done.exception
    return done.output


@pytest.fixture
def ds_config(tmp_path: Path) -> str:
    path = tmp_path / "ds_config.json"
    zero = {"stage": 3, "overlap_comm": False, "stage3_param_persistence_threshold": 0}
    config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 4, "zero_optimization": zero}
    path.write_text(json.dumps(config))
    return str(path)


def test_a_users_json_is_told_what_to_change(ds_config: str, tmp_path: Path) -> None:
    """The first change is to leave stage 3: a small model gathers for nothing."""
    out = tmp_path / "out"
    text = zsim(
        "tune", ds_config, *SMALL_JOB, *LENGTH, *KEEP, "--out", str(out), "--json", str(tmp_path / "t.json")
    )
    assert "What to change, in order of gain, each simulated:" in text
    assert re.search(r"zero_optimization.stage: 3 -> [012]", text)
    content = json.loads((tmp_path / "t.json").read_text())
    gains = [step["gain_fraction"] for step in content["steps"]]
    assert gains
    assert min(gains) > 0
    written = json.loads((out / "best" / "ds_config.json").read_text())
    assert written["train_micro_batch_size_per_gpu"] == 4
    assert written["zero_optimization"]["stage"] < 3
    assert (out / "tune.html").stat().st_size > 10**6


def test_other_parallelisms_are_refused() -> None:
    with pytest.raises(InputError, match="--kind tp: is no strategy; --parallelism searches the degrees"):
        zsim("tune", *SMALL_JOB, "--kind", "deepspeed", "--kind", "tp")


def test_json_alone_is_printed_with_a_dash(ds_config: str) -> None:
    content = json.loads(
        zsim("tune", ds_config, *SMALL_JOB, *LENGTH, *KEEP, "--keep", "stage", "--json", "-")
    )
    assert content["goal"] == "fastest"
    assert content["best"][0]["fits"]


@in_browser
def test_a_browser_draws_the_page_without_a_word_or_a_request(ds_config: str, tmp_path: Path) -> None:
    zsim("tune", ds_config, *SMALL_JOB, *LENGTH, *KEEP, "--out", str(tmp_path / "out"))
    dom, console = browse(tmp_path / "out" / "tune.html", tmp_path / "profile")
    assert console == []
    assert 'data-drawn="2"' in dom
    assert "not beaten in both" in dom
