"""Studies from the file to the tables: resumed, stopped, with failing points and dying workers."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

import zsim
from zsim import Experiment
from zsim.cli import app
from zsim.engine.simulator import Simulator
from zsim.errors import InputError
from zsim.specs.experiment.job import Job
from zsim.study.progress import Counts, Progress, format_duration
from zsim.study.sweep.pool import Task, run_tasks
from zsim.study.sweep.records import Record, Store, report_row
from zsim.study.sweep.study_file import load_study
from zsim.study.sweep.sweep import SweepResult, csv_text, run_sweep

SMALL = """
[base]
model = "gpt2"
cluster = "dgx-h100"
[base.training]
sequence_length = 256
[axes]
strategy.stage = [1, 3]
gpus = [8, 16]
"""


def study_file(folder: Path, text: str = SMALL) -> Path:
    path = folder / "study.toml"
    path.write_text(text)
    return path


def swept(folder: Path, text: str = SMALL, **options: Any) -> SweepResult:
    arguments = {"jobs": 1, "is_quiet": True, **options}
    return run_sweep(load_study(study_file(folder, text)), folder / "out", **arguments)


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


# -- results ---------------------------------------------------------------------------------------------


def test_a_row_has_the_axes_the_resolved_settings_and_the_results(tmp_path: Path) -> None:
    done = swept(tmp_path)
    rows = table(tmp_path / "out")
    assert [(row["strategy.stage"], row["gpus"]) for row in rows] == [
        ("1", "8"), ("1", "16"), ("3", "8"), ("3", "16"),
    ]  # fmt: skip
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["training.precision"] for row in rows} == {"bf16"}
    assert {row["nodes"] for row in rows} == {"1", "2"}
    settings = json.loads(rows[0]["strategy.settings"])
    assert settings["zero_optimization.reduce_bucket_size"] == "500,000,000"
    assert all(float(row["step_seconds"]) > 0 and row["fits"] == "true" for row in rows)
    assert (done.done, done.cached, done.failed) == (4, 0, 0)
    summary = json.loads((tmp_path / "out" / "study.json").read_text())
    assert summary["points"] == {"ok": 4, "error": 0, "not run": 0}


def test_the_parquet_holds_what_the_csv_holds(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    text = SMALL.replace("[1, 3]", "[1, 3, 7]").replace("[8, 16]", "[8]")
    swept(tmp_path, text + 'training.gradient_clipping = [1.0]\n"label" = [true]\n')
    found = parquet.read_table(tmp_path / "out" / "results.parquet").to_pylist()
    rows = table(tmp_path / "out")
    assert [row["step_seconds"] for row in found[:2]] == [float(row["step_seconds"]) for row in rows[:2]]
    assert found[2]["step_seconds"] is None
    assert found[2]["status"] == "error"
    assert list(found[0]) == list(rows[0])


def test_what_makes_the_parquet_is_said_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = study_file(tmp_path, SMALL.replace("[1, 3]", "[1]").replace("[8, 16]", "[8]"))
    done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(tmp_path / "out"), "-j", "1"])
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "out" / "results.parquet").exists()
    assert "no results.parquet: it needs pyarrow (pip install zsim[parquet])" in done.output


def test_a_column_of_mixed_kinds_is_text_in_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    text = SMALL.replace("strategy.stage = [1, 3]", "strategy.reshard_after_forward = [true, 4]")
    swept(tmp_path, text.replace("[8, 16]", "[8]"))
    found = parquet.read_table(tmp_path / "out" / "results.parquet").to_pylist()
    assert [row["strategy.reshard_after_forward"] for row in found] == ["true", "4"]


def test_a_failing_point_is_a_row_with_its_error(tmp_path: Path) -> None:
    """GPT-2 has 1,024 learned positions; 12 GPUs are no whole number of nodes."""
    text = SMALL.replace("sequence_length = 256", "").replace("[8, 16]", "[8, 12]")
    done = swept(tmp_path, text + "training.sequence_length = [1024, 2032]\n")
    rows = table(tmp_path / "out")
    assert [row["status"] for row in rows] == ["ok", "error", "error", "error"] * 2
    assert "found 2032, but 'gpt2' has 1024 learned positions" in rows[1]["error"]
    assert "expected a multiple of the 8 GPUs" in rows[2]["error"]
    assert rows[1]["step_seconds"] == ""
    assert done.failed == 6


def test_a_bug_of_ours_costs_one_row_and_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_simulator: Simulator, *_arguments: Any, **_options: Any) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(Simulator, "outcome", broken)
    done = swept(tmp_path)
    assert done.failed == 4
    assert {row["error"] for row in done.rows} == {"internal error: ZeroDivisionError: oh"}
    monkeypatch.undo()
    assert swept(tmp_path).failed == 0


def test_a_job_that_does_not_fit_is_a_result(tmp_path: Path) -> None:
    text = SMALL.replace('"gpt2"', '"llama-3-8b"').replace("[8, 16]", "[1]").replace("[1, 3]", "[1]")
    (row,) = swept(tmp_path, text).rows
    assert (row["status"], row["fits"]) == ("ok", False)
    assert row["missing_bytes"] > 0


# -- what is known ---------------------------------------------------------------------------------------


def test_only_new_points_are_simulated(tmp_path: Path) -> None:
    assert swept(tmp_path).cached == 0
    again = swept(tmp_path)
    assert (again.cached, again.done) == (4, 4)
    more = swept(tmp_path, SMALL.replace("[8, 16]", "[4, 8, 16]"))
    assert (more.cached, more.done) == (4, 6)


def test_a_cache_serves_other_studies(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    swept(first, cache=tmp_path / "cache")
    assert swept(second, cache=tmp_path / "cache").cached == 4


def test_equal_points_are_simulated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A label is no key of the experiment: three labels of one point are one simulation, three rows."""
    calls: list[str] = []
    real = Simulator.job

    def counted(simulator: Simulator, experiment: Experiment) -> Job:
        calls.append("")
        return real(simulator, experiment)

    monkeypatch.setattr(Simulator, "job", counted)
    text = SMALL.replace("[1, 3]", "[1]").replace("[8, 16]", "[8]") + '"label" = ["a", "b", "c"]\n'
    assert swept(tmp_path, text).done == 3
    assert len(calls) == 1
    assert len({row["step_seconds"] for row in table(tmp_path / "out")}) == 1


def test_a_changed_file_makes_a_new_point(tmp_path: Path) -> None:
    """The same path, other content: DeepSpeed's JSON, and the topology's TOML."""
    ds, cluster = tmp_path / "ds.json", tmp_path / "mine.toml"
    ds.write_text('{"zero_optimization": {"stage": 1}}')
    cluster.write_text('schema = 1\nextends = "dgx-h100"\nname = "mine"\n')
    text = '[base]\nmodel = "gpt2"\ncluster = "mine.toml"\ngpus = 8\n'
    text += '[base.strategy]\nkind = "deepspeed"\nconfig = "ds.json"\n'
    text += "[axes]\ntraining.sequence_length = [128]\n[base.training]\nmicro_batch_size = 1\n"
    assert swept(tmp_path, text).cached == 0
    assert swept(tmp_path, text).cached == 1
    ds.write_text('{"zero_optimization": {"stage": 2}}')
    assert swept(tmp_path, text).cached == 0
    cluster.write_text('schema = 1\nextends = "dgx-h100"\nname = "mine"\ngpus_per_node = 4\n')
    assert swept(tmp_path, text.replace("gpus = 8", "gpus = 4")).cached == 0


def test_changed_lengths_of_documents_make_a_new_point(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("16,3\n2048,1\n")
    text = '[base]\nmodel = "llama-3-8b"\ncluster = "dgx-h100"\ngpus = 8\n'
    text += "[base.training]\nsequence_length = 2048\n"
    text += '[base.training.lengths]\nfile = "lengths.txt"\n[axes]\n"training.micro_batch_size" = [1]\n'
    assert swept(tmp_path, text).cached == 0
    assert swept(tmp_path, text).cached == 1
    seconds = table(tmp_path / "out")[0]["step_seconds"]
    lengths.write_text("16,1\n2048,3\n")
    assert swept(tmp_path, text).cached == 0
    assert table(tmp_path / "out")[0]["step_seconds"] != seconds


def test_a_damaged_record_is_simulated_again(tmp_path: Path) -> None:
    swept(tmp_path)
    for path in list((tmp_path / "out" / "points").rglob("*.json"))[:2]:
        path.write_text("{")
    assert swept(tmp_path).cached == 2


@pytest.mark.parametrize("value", [-1.0, "x"])
def test_a_record_that_was_changed_is_simulated_again(tmp_path: Path, value: object) -> None:
    """Valid JSON of the right shape, with another result in it."""
    swept(tmp_path)
    before = (tmp_path / "out" / "results.csv").read_bytes()
    changed = next((tmp_path / "out" / "points").rglob("*.json"))
    record = json.loads(changed.read_text())
    record["row"]["step_seconds"] = value
    changed.write_text(json.dumps(record))
    assert swept(tmp_path).cached == 3
    assert (tmp_path / "out" / "results.csv").read_bytes() == before


# -- processes -------------------------------------------------------------------------------------------


def test_processes_give_the_same_tables_as_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    swept(one)
    swept(two, jobs=2)
    assert (one / "out" / "results.csv").read_bytes() == (two / "out" / "results.csv").read_bytes()


def test_processes_that_stay_work_where_the_next_study_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """joblib keeps its processes: points of a second study went into the first one's folder, and relative
    paths of models were looked for there."""
    config = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_head": 2, "n_positions": 128}
    for number, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        Path("config.json").write_text(json.dumps(config | {"n_layer": 2 + number}))
        text = SMALL.replace('"gpt2"', '"config.json"').replace("256", "128")
        done = run_sweep(load_study(study_file(Path(), text)), Path("out"), jobs=2, is_quiet=True)
        assert (done.done, done.failed) == (4, 0)
    assert len([*(tmp_path / "two" / "out" / "points").rglob("*.json")]) == 4
    tables = [table(tmp_path / name / "out") for name in ("one", "two")]
    assert tables[0][0]["step_seconds"] < tables[1][0]["step_seconds"]


def test_dask_gives_the_same_tables_as_processes_here(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    here, dask = tmp_path / "here", tmp_path / "dask"
    here.mkdir()
    dask.mkdir()
    swept(here)
    swept(dask, jobs=2, backend="dask")
    for name in ("results.csv", "results.parquet"):
        assert (here / "out" / name).read_bytes() == (dask / "out" / name).read_bytes()
    assert swept(dask, jobs=1).cached == 4  # the records came back from the workers


def test_a_dask_scheduler_that_is_there_already_is_used(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster:
        done = swept(tmp_path, jobs=2, backend="dask", scheduler=cluster.scheduler_address)
    assert (done.done, done.failed) == (4, 0)


def test_an_unknown_backend_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--backend lokki: joblib does not know it"):
        swept(tmp_path, jobs=2, backend="lokki")
    with pytest.raises(InputError, match=r"--scheduler tcp://x:1: is for --backend dask, found loky"):
        swept(tmp_path, jobs=2, scheduler="tcp://x:1")


def deadly(identity: str) -> Task:
    """A task that ends its process without a word, as the kernel does when memory runs out."""

    class Deadly:
        def __getattr__(self, name: str) -> str:
            if name.startswith("__"):
                raise AttributeError(name)  # while it is packed and unpacked
            os._exit(9)

    return Task(identity, Deadly())  # type: ignore[arg-type]


def test_a_point_that_kills_its_worker_is_a_row_and_the_others_are_done(tmp_path: Path) -> None:
    from zsim.study.sweep.points import study_points

    points = study_points(load_study(study_file(tmp_path)))
    tasks = [Task(f"{p.number:064}", p.experiment) for p in points if p.experiment is not None]
    tasks.insert(1, deadly("f" * 64))
    found: dict[str, Record] = {}
    run_tasks(tasks, tmp_path / "points", lambda r: found.update({r["identity"]: r}), jobs=2)
    assert set(found) == {task.identity for task in tasks}
    assert found["f" * 64]["error"] == "the process that ran it died 2 times (killed, or out of memory?)"
    assert all(found[task.identity]["status"] == "ok" for task in tasks if task.identity != "f" * 64)
    assert Store(tmp_path / "points").load("f" * 64) is None  # tried anew the next time


MANY = SMALL + "training.micro_batch_size = {from = 1, to = 8, step = 1}\n"


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`zsim sweep` of 32 points on 2 processes, once at least 5 points are on disk."""
    study_file(folder, MANY)
    command = [sys.executable, "-m", "zsim", "sweep", "study.toml", "--out", "out", "--jobs", "2", *arguments]
    process = subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    wait_until(lambda: process.poll() is not None or len(kept(folder)) >= 5)
    return process


def kept(folder: Path) -> list[Path]:
    return list((folder / "out" / "points").glob("??/*.json"))


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(6000):
        if is_so():
            return
        time.sleep(0.02)
    raise AssertionError("it never came")


def test_killing_a_worker_mid_study_loses_nothing(tmp_path: Path) -> None:
    process = started(tmp_path)
    workers = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "loky" in " ".join(child.cmdline()) and "resource_tracker" not in " ".join(child.cmdline())
    ]
    assert len(workers) >= 2
    workers[0].kill()
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "32 of 32 points: 32 simulated, 0 known, 0 failed" in output
    rows = table(tmp_path / "out")
    assert [row["status"] for row in rows] == ["ok"] * 32
    reference = tmp_path / "reference"
    reference.mkdir()
    swept(reference, MANY)
    assert (reference / "out" / "results.csv").read_bytes() == (tmp_path / "out" / "results.csv").read_bytes()


def test_ctrl_c_leaves_a_study_that_goes_on(tmp_path: Path) -> None:
    """The signal goes to the whole process group, as a terminal sends it."""
    process = started(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "points are left; the same command goes on with them" in output
    rows = table(tmp_path / "out")
    done = [row for row in rows if row["status"] == "ok"]
    assert 5 <= len(done) < 32
    assert {row["status"] for row in rows} == {"ok", "not run"}
    again = swept(tmp_path, MANY)
    assert again.done == 32
    assert again.cached >= len(done)


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP])
def test_other_stops_leave_a_study_that_goes_on(tmp_path: Path, stop: signal.Signals) -> None:
    """A scheduler's SIGTERM and a closed terminal's SIGHUP, sent to the study alone."""
    if signal.getsignal(stop) is signal.SIG_IGN:
        pytest.skip("the signal is ignored here, as under nohup")
    process = started(tmp_path)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(stop)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "points are left; the same command goes on with them" in output
    psutil.wait_procs(workers, timeout=60)
    assert [worker for worker in workers if worker.is_running()] == []


def test_workers_end_with_a_study_that_is_killed(tmp_path: Path) -> None:
    process = started(tmp_path)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    process.kill()
    psutil.wait_procs(workers, timeout=60)
    assert [worker for worker in workers if worker.is_running()] == []
    process.communicate(timeout=60)


def test_interrupts_stay_held_when_pythons_resource_tracker_starts() -> None:
    """A semaphore starts it, as every pool's queues do, and it unblocks Ctrl-C where it was not running."""
    code = """
import multiprocessing, signal
from zsim.study.sweep.pool import _block_interrupts
with _block_interrupts():
    multiprocessing.get_context("spawn").Semaphore()
    print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


# -- progress --------------------------------------------------------------------------------------------


def test_a_pipe_has_no_progress_and_a_notebook_without_widgets_ten_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Progress(2, 0) as piped:
        piped.advance(is_ok=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("zsim.study.progress._is_notebook", lambda: True)
    monkeypatch.setattr("zsim.study.progress.is_watched", lambda: False)
    with Progress(200, 20) as progress:
        for number in range(180):
            progress.advance(is_ok=number % 90 > 0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 9
    assert lines[0].startswith("40/200 points, ")
    assert lines[-1].startswith("200/200 points, ")
    assert lines[-1].endswith(", 2 failed")
    assert " left" in lines[0]
    assert " left" not in lines[-1]


def test_counts_of_work_are_for_terminals_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with Counts("checked", "simulated") as counts:
        counts.update("checked", 3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "words"), [(7.6, "8 s"), (100, "1 min 40 s"), (3600 * 3 + 300, "3 h 5 min")]
)
def test_time_left_is_in_words(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


DEGREES = """
[base]
cluster = "dgx-h100"
nodes = 2
[base.model]
model_type = "gpt2"
n_embd = 512
n_layer = 4
n_head = 8
n_positions = 512
vocab_size = 4096
[base.strategy]
kind = "megatron"
[base.parallelism]
tensor = 2
[base.training]
sequence_length = 512
gradient_accumulation_steps = 4
[axes]
parallelism.pipeline = [1, 2, 3]
parallelism.order = ["tp-cp-dp-pp", "tp-cp-pp-dp"]
"""


def test_degrees_and_their_order_are_axes_like_others(tmp_path: Path) -> None:
    """4 layers on 3 ranks is a row with its error; without a pipeline the order changes nothing."""
    swept(tmp_path, DEGREES)
    rows = table(tmp_path / "out")
    assert [row["parallelism.pipeline"] for row in rows] == ["1", "1", "2", "2", "3", "3"]
    assert (rows[0]["parallelism.tensor"], rows[0]["parallelism.data"]) == ("2", "8")
    assert "parallelism.schedule_text" not in rows[0]  # a whole file
    assert [row["status"] for row in rows] == ["ok"] * 4 + ["error"] * 2
    seconds = [row["step_seconds"] for row in rows[:4]]
    assert seconds[0] == seconds[1]
    assert seconds[2] != seconds[3]


def test_settings_that_are_objects_are_json_in_the_csv() -> None:
    """A recipe of fp8 is a frozen dataclass, an axis from Python may be a typed table."""
    recipe = zsim.simulate(
        zsim.Experiment(model="gpt2", cluster="dgx-h100", gpus=8, strategy={"kind": "fsdp2"},
                        training={"sequence_length": 512, "precision": "fp8"})
    )  # fmt: skip
    row = report_row(recipe.report, recipe.job)
    assert json.loads(row["training.fp8"])["recipe"] == "torchao-tensorwise"
    rows = [{"strategy": zsim.Fsdp2(replicate=2), "fp8": recipe.job.training.fp8, "pair": (1, 2)}]
    (written,) = csv.DictReader(io.StringIO(csv_text(rows)))
    assert json.loads(written["strategy"]) == {"replicate": 2, "kind": "fsdp2"}
    assert json.loads(written["fp8"])["recipe"] == "torchao-tensorwise"
    assert written["pair"] == "[1, 2]"
