"""Reading tables of measured runs: what is wrong is said in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from validation.published.table import PublishedRun, read_runs
from zsim.errors import InputError

HEADER = "row_id,n_layers,hidden,n_heads,seq_len,gpu,n_gpus,strategy,micro_batch"
ROW = "a-1,12,768,12,2048,A100-SXM4-80GB,8,DDP,4"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_keep_their_order_and_their_place(tmp_path: Path) -> None:
    table = read_runs([written(tmp_path, f"{HEADER}\n{ROW}\n\n{ROW.replace('a-1', 'a-2')}\n")])
    assert [(run.row_id, run.where) for run in table.runs] == [
        ("a-1", "runs.csv: line 2"),
        ("a-2", "runs.csv: line 4"),
    ]


def test_a_file_without_role_and_source_is_named_after_itself(tmp_path: Path) -> None:
    (run,) = read_runs([written(tmp_path, f"{HEADER}\n{ROW}\n")]).runs
    assert (run.source, run.role) == ("runs", "")


def test_unknown_columns_are_ignored_with_a_note(tmp_path: Path) -> None:
    table = read_runs([written(tmp_path, f"{HEADER},colour\n{ROW},red\n")])
    assert table.notes == ["runs.csv: ignored columns: colour"]


def test_a_column_of_ones_own_does_not_pass_for_what_is_known_of_a_source(tmp_path: Path) -> None:
    """`engine` and `torch` are cells that zsim itself fills in."""
    (run,) = read_runs([written(tmp_path, f"{HEADER},engine,torch\n{ROW},nanotron,1.13\n")]).runs
    assert (run.text("engine"), run.text("torch")) == ("", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the file is empty"),
        ("row_id,gpu\na,b\n", "no column seq_len, n_gpus, strategy"),
        (f"{HEADER},gpu\n{ROW},x\n", "the column 'gpu' stands there twice"),
        (f"{HEADER}\n{ROW},x\n", "line 2: more cells than the header has columns"),
        (
            f"{HEADER}\n{ROW}\na-2,12,768\n",
            "line 3: fewer cells than the header has columns; is the file whole?",
        ),
        (f'{HEADER}\n"a-1,12\n', "not a CSV file"),
        ("\x00\x01", "line 1: found '\\x00\\x01', expected a header line that names the columns: row_id,"),
        (
            f"{ROW},,,\n{ROW},,,\n",
            "line 1: found 'a-1, 12, 768, 12, 2048, A100-SXM4-80GB, 8, DDP, 4, , , ', exp",
        ),
        (f"{HEADER},,\n{ROW},,\n", "line 1: 2 columns have no name"),
        (f"{HEADER}\n", "no row below the header line; expected one per measured run"),
        (f"{HEADER}\n,,,,,,,,\n", "no row below the header line"),
    ],
)
def test_bad_files_are_one_clear_sentence(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(InputError, match=r"runs\.csv") as caught:
        read_runs([written(tmp_path, text)])
    assert expected in str(caught.value)


def test_a_file_that_is_not_text_or_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(InputError, match="not UTF-8"):
        read_runs([path])
    with pytest.raises(InputError, match="no such file"):
        read_runs([tmp_path / "none.csv"])


@pytest.mark.parametrize("cell", ["nan", "inf", "-1", "eight", "8 GB"])
def test_a_cell_that_should_be_a_number_and_is_not_is_named(cell: str) -> None:
    run = PublishedRun("a", "s", "", {"hidden": cell}, "runs.csv: line 2")
    with pytest.raises(InputError, match=r"runs.csv: line 2: column 'hidden'"):
        run.count("hidden")


def test_counts_may_be_written_as_floats_but_must_be_whole() -> None:
    run = PublishedRun("a", "s", "", {"hidden": "768.0", "ffn": "0.5", "vocab": ""}, "x")
    assert run.count("hidden") == 768
    assert run.count("vocab") is None
    with pytest.raises(InputError, match="whole number"):
        run.count("ffn")
