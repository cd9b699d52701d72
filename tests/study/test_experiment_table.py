"""Tables of one's own runs, whose columns are keys of the experiment file."""

from __future__ import annotations

from pathlib import Path

import pytest

import zsim
from zsim.errors import InputError
from zsim.study.check.check import run_check
from zsim.study.check.targets import find_targets
from zsim.study.measured.experiment_table import predict_run, read_experiment_runs, write_run_experiments
from zsim.study.measured.prediction import RowResult

KEYS = "row_id,model,cluster,gpus,training.sequence_length,training.compile,strategy.kind"
ROW = "a,gpt2,dgx-h100,8,512,true,ddp"


def predicted(folder: Path, columns: str, *cells: str) -> list[RowResult]:
    path = folder / "runs.csv"
    path.write_text("\n".join([f"{KEYS}{columns}", *(f"{ROW}{text}" for text in cells)]) + "\n")
    return [predict_run(run) for run in read_experiment_runs(path)]


def test_a_row_is_predicted_as_its_experiment_is(tmp_path: Path) -> None:
    """Half of the step is measured, so that the error is 100 %; the bytes are the report's own."""
    report = zsim.simulate(
        zsim.Experiment(
            model="gpt2",
            cluster="dgx-h100",
            gpus=8,
            training={"sequence_length": 512, "compile": True},
            strategy={"kind": "ddp"},
        )
    ).report
    (row,) = predicted(
        tmp_path,
        ",step_seconds,gpu_bytes,fits",
        f",{report.step_seconds / 2!r},{report.peaks['gpu'].total},true",
    )
    assert row.predicted_seconds == report.step_seconds
    assert row.relative_error == pytest.approx(1.0)
    assert (row.memory_relative_error, row.measured_fits, row.predicted_fits) == (0.0, True, True)
    assert row.source == "runs"


def test_a_run_that_does_not_fit_is_predicted_all_the_same(tmp_path: Path) -> None:
    (row,) = predicted(tmp_path, ",training.micro_batch_size,fits", ",4096,false")
    assert (row.status, row.measured_fits, row.predicted_fits) == ("ok", False, False)
    assert row.predicted_retries is None


def test_throughput_is_read_as_a_step(tmp_path: Path) -> None:
    """512 tokens per GPU at 1,024 tokens/s are half a second; a step that is stated goes first."""
    columns = ",tokens_per_second_per_gpu,step_seconds"
    assert predicted(tmp_path, columns, ",1024,")[0].measured_seconds == 0.5
    assert predicted(tmp_path, columns, ",1024,0.25")[0].measured_seconds == 0.25


def test_keys_inside_other_files_are_columns_too(tmp_path: Path) -> None:
    (small,) = predicted(tmp_path, ",model.n_layer,cluster.gpu.memory.capacity", ",2,")
    (whole,) = predicted(tmp_path, ",model.n_layer", ",")
    assert small.predicted_seconds is not None
    assert whole.predicted_seconds is not None
    assert small.predicted_seconds < 0.7 * whole.predicted_seconds


def test_a_row_that_cannot_be_simulated_is_skipped_with_its_reason(tmp_path: Path) -> None:
    (row,) = predicted(tmp_path, ",parallelism.tensor,step_seconds", ",3,0.5")
    assert (row.status, row.predicted_seconds, row.measured_seconds) == ("skipped", None, 0.5)
    assert row.reason


@pytest.mark.parametrize(
    ("columns", "cells", "message"),
    [
        (",training.micro_batch", ",1", "column 'training.micro_batch'; did you mean 'training.micro_batch"),
        (",micro_batch_size", ",1", "unknown column 'micro_batch_size'; did you mean 'training.micro_batch"),
        (",step_second", ",1", "unknown column 'step_second'; did you mean 'step_seconds'"),
        (",cluster.gpu.memory.capacty", ",1", "runs.csv: cluster.gpu.memory.capacty: .*'capacity'"),
        (",training.micro_batch_size", ",two", r"line 2: training.micro_batch_size: .*'two'"),
        (",step_seconds", ",fast", "line 2: column 'step_seconds': found 'fast', expected a number above 0"),
        (",gpu_bytes", ",1.5", "line 2: column 'gpu_bytes': found '1.5', expected a whole number"),
        (",fits", ",yes", "line 2: column 'fits': found 'yes', expected true, false or nothing"),
        (",gpus", ",8", "the column 'gpus' stands there twice"),
        (",n_layers,n_gpus", ",1,8", r"has the columns .* `python -m validation.published .*runs.csv`"),
    ],
)  # fmt: skip
def test_a_wrong_table_is_refused(tmp_path: Path, columns: str, cells: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        predicted(tmp_path, columns, cells)


def test_two_rows_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 3: row_id 'a' stands there twice"):
        predicted(tmp_path, "", "", "")


def test_tables_in_folders_are_found_and_published_ones_named(tmp_path: Path) -> None:
    """A file of other columns is no case."""
    (tmp_path / "mine.csv").write_text(f"{KEYS}\n{ROW}\n")
    (tmp_path / "theirs.csv").write_text("row_id,n_layers,n_gpus\na,1,8\n")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    search = find_targets([tmp_path], tmp_path)
    assert [target.name for target in search.targets] == ["mine.csv"]
    assert (search.published, search.ignored) == (["theirs.csv"], ["other.csv"])
    report = run_check([tmp_path], tmp_path)
    assert "theirs.csv: python -m validation.published checks published runs" in report.notes


def test_rows_are_written_as_experiments_that_predict_the_same(tmp_path: Path) -> None:
    """Keys inside the files that an experiment names, and lists, included; what was measured is a comment."""
    columns = ",model.n_layer,cluster.gpu.memory.capacity,training.lora.targets,step_seconds,fits"
    path = tmp_path / "runs.csv"
    path.write_text(f'{KEYS}{columns}\n{ROW},2,40 GB,"[""c_attn""]",0.5,true\n')
    (run,) = read_experiment_runs(path)
    written = write_run_experiments([path], tmp_path / "files")
    assert written == {"a": tmp_path / "files" / "a.toml"}
    text = written["a"].read_text()
    assert text.startswith("# a, of runs\n# measured: step_seconds = 0.5, fits = true\n")
    again = zsim.load_experiment(written["a"])
    assert again == run.experiment
    assert zsim.simulate(again).report.step_seconds == predict_run(run).predicted_seconds


def test_a_row_whose_name_is_no_files_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{KEYS}\n{ROW}\n{ROW.replace('a,', '../b,', 1)}\n")
    with pytest.raises(InputError, match=r"row_id '\.\./b' is no file's name"):
        write_run_experiments([path], tmp_path / "files")
    assert not (tmp_path / "files").exists()
    other = tmp_path / "other.csv"
    path.write_text(f"{KEYS}\n{ROW}\n")
    other.write_text(path.read_text())
    with pytest.raises(InputError, match="row_id 'a' is in another table too"):
        write_run_experiments([path, other], tmp_path / "files")


def test_an_error_of_zsim_on_one_row_is_that_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyError("shape")

    monkeypatch.setattr("zsim.study.measured.experiment_table.predict_job", fails)
    (row,) = predicted(tmp_path, "", "")
    assert (row.status, row.reason) == ("skipped", "an error of zsim: KeyError: 'shape'")
