"""Published rows as experiment files: the same question, and the same answer to the digit."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from validation.published.__main__ import main
from validation.published.experiment_files import write_experiments
from validation.published.experiments import difference
from validation.published.job import row_experiment
from validation.published.predict import shipped_tables
from validation.published.sources import complete_run, source_rules
from validation.published.table import PublishedRun, read_runs
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.load import load_experiment

# Rows of these take seconds each; validation/published/experiments.py has them all.
MAX_WORK = 4e3  # micro-batches times blocks times GPUs


@cache
def runs() -> tuple[PublishedRun, ...]:
    return tuple(read_runs(shipped_tables()).runs)


def work(run: PublishedRun) -> float:
    """How long a row takes, roughly."""
    steps = min(run.count("grad_accum") or 1, 3)
    return steps * (run.count("n_layers") or 1) * (run.count("n_gpus") or 1)


def smallest_of_each() -> list[PublishedRun]:
    """Of every source, and of every kind of strategy, the row that takes least."""
    chosen: dict[str, PublishedRun] = {}
    for run in sorted(runs(), key=work, reverse=True):
        chosen |= {run.source: run, run.text("strategy")[:6]: run}
    return list({run.row_id: run for run in chosen.values() if work(run) < MAX_WORK}.values())


def test_a_row_of_each_source_is_what_its_experiment_file_says(tmp_path: Path) -> None:
    """Seconds and bytes of `zsim run row.toml` are those of `zsim check`, bit by bit."""
    chosen = smallest_of_each()
    assert len({run.source for run in chosen}) >= 27
    assert [text for run in chosen if (text := difference(run, tmp_path))] == []


def test_a_row_is_written_and_read_again_as_the_same_question(tmp_path: Path) -> None:
    chosen = {run.source: run for run in runs()} | {run.row_id: run for run in runs()[::25]}
    written = write_experiments(list({run.row_id: run for run in chosen.values()}.values()), tmp_path)
    assert not written.refused
    for run in chosen.values():
        assert load_experiment(written.files[run.row_id]) == row_experiment(run).experiment


def test_the_file_says_what_the_row_measured(tmp_path: Path) -> None:
    run = next(run for run in runs() if run.text("mem_reserved_gb") and run.text("step_time_s"))
    text = write_experiments([run], tmp_path).files[run.row_id].read_text()
    assert text.startswith(f"# {run.row_id}, of {run.source}\n")
    assert f"step {float(run.text('step_time_s')):g} s" in text
    assert f"memory reserved {run.text('mem_reserved_gb')} GB" in text


def test_the_command_writes_files_and_says_which_rows_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expert = {**runs()[0].cells, "ep": "2", "row_id": "r-2"}
    whole = {**runs()[0].cells, "row_id": "r-1"}
    table = tmp_path / "runs.csv"
    lines = [",".join(whole), *(",".join(f'"{cell}"' for cell in row.values()) for row in (whole, expert))]
    table.write_text("\n".join(lines))
    out = tmp_path / "rows"
    assert main([str(table), "--write-experiments", str(out), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "written": {"r-1": str(out / "r-1.toml")},
        "refused": {"r-2": "expert parallelism (ep = 2) without routed experts"},
    }


@pytest.mark.parametrize("row_id", ["../r", "a/b", ".r"])
def test_a_row_whose_name_no_file_can_have_is_refused(tmp_path: Path, row_id: str) -> None:
    run = runs()[0]
    bad = PublishedRun(row_id, run.source, run.role, run.cells, run.where)
    with pytest.raises(InputError, match="is no file's name"):
        write_experiments([bad], tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot be made: .*file is a file, expected a folder"):
        write_experiments([runs()[0]], tmp_path / "file" / "folder")


def test_two_rows_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="stands there twice"):
        write_experiments([runs()[0], runs()[0]], tmp_path)


def test_every_rule_of_the_sources_is_of_some_row() -> None:
    """A rule that applies to nothing is a mistake in it. (Pinned memory of runs that also offload parameters
    goes with that of their optimizer; rows with model parallelism and mixtures of experts are kept
    elsewhere, and so are most of Megatron's tests that a rule knows by name.)"""
    known = [complete_run(run).run for run in runs()]
    unused = []
    for rule in source_rules():
        of_columns = rule.model_copy(update={"when": {**rule.when, "kind": ""}})
        if rule.changes and not any(of_columns.applies(run, "") for run in known):
            unused.append(dict(rule.when))
    # No row of theirs is here, or only old ones.
    elsewhere = (
        "bigscience-a100",
        "megatron-bridge",
        "megatron-moe",
        "moe modelzoo",
        "dgxc-megatron",
        "kempnerforge",
        "mlperf-",
        "halo-b300",  # experiments
        "titan-deepep-b200",
        "lumen-mi300x",
    )

    def names(when: dict[str, str]) -> str:
        """The source of a rule, or the software where that is what it knows, as sources are spelt."""
        return f"{when.get('source', '')} {when.get('software', '').lower()}"

    assert [
        when
        for when in unused
        if when.get("offload") != "params"
        and not {"tp", "pp", "vp", "dp"} & set(when)
        and not any(source in names(when) for source in elsewhere)
        and not ("megatron-ci" in when.get("source", "") and "source_ref" in when)
        and not ("megatron-ci" in when.get("source", "") and "moe" in when.get("notes", ""))
    ] == []


@pytest.mark.parametrize("is_strangers", [False, True])
def test_a_mean_with_the_first_step_in_it_is_compared_with_nothing(is_strangers: bool) -> None:
    """Ten steps of ten (Gemma 4's card), and steps 91 to 100 (Nemotron 3 Super's pretraining)."""
    folder = "Megatron-Bridge examples/model_verification_cards"
    cells = {"source_ref": f"{folder}/gemma-4-26b-a4b-it/card.yaml@cc59a637a items/sft/H100"}
    run = PublishedRun("r", "megatron-bridge-cards-3", "report", cells, "x", is_strangers)
    with pytest.raises(NotSimulatedError, match="first step"):
        complete_run(run)
    cells = {"source_ref": f"{folder}/nemotron-3-super-120b-a12b/card.yaml@cc59a637a items/pretrain/H100"}
    assert complete_run(PublishedRun("r", "s", "report", cells, "x", is_strangers)).run.cells == cells
