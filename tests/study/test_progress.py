"""Progress is drawn where somebody watches, and nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import zsim
from zsim.goodput import goodput
from zsim.goodput.prepared import prepare
from zsim.study import progress
from zsim.study.check.baseline import read_baseline
from zsim.study.check.check import COUNTED, run_check

ROOT = Path(__file__).resolve().parents[2]
RUN: dict[str, Any] = {
    "model": "gpt2", "cluster": "dgx-h100", "nodes": 4, "training": {"sequence_length": 512},
    "run": {"tokens": 1e12, "seeds": 6, "checkpoint": {"every": "auto"}},
}  # fmt: skip


class ZMQInteractiveShell:
    """Named as the shell of Jupyter's kernels."""


@pytest.mark.parametrize(("widgets", "is_watched"), [(object(), True), (None, False)])
def test_a_notebook_is_watched_if_widgets_can_draw(
    monkeypatch: pytest.MonkeyPatch, widgets: object, is_watched: bool
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=ZMQInteractiveShell))
    monkeypatch.setattr(progress, "find_spec", lambda name: widgets if name == "ipywidgets" else None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert progress.is_watched() is is_watched


def test_a_terminal_is_watched_and_a_pipe_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert progress.is_watched()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert not progress.is_watched()


def test_a_whole_run_tells_how_far_it_is_and_is_silent_in_a_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[str, int]] = []
    goodput.simulate_prepared(
        prepare(zsim.Experiment(**RUN)),
        jobs=1,
        compares=False,
        on_done=lambda kind, count: told.append((kind, count)),
    )
    runs = [count for kind, count in told if kind == "runs"]
    intervals = [count for kind, count in told if kind == "intervals"]
    assert runs == [1, 2, 3, 4, 5, 6]
    assert intervals == list(range(1, len(intervals) + 1)) != []
    zsim.simulate_run(zsim.Experiment(**RUN), jobs=1, compares=False)
    assert capfd.readouterr() == ("", "")


def test_on_processes_runs_are_told_in_parts_and_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """More failures than one process is worth: 6 seeds in parts of one on 2 processes."""
    alone = goodput.simulate_prepared(prepare(zsim.Experiment(**RUN)), jobs=1, compares=False)
    monkeypatch.setattr("zsim.goodput.runs._MIN_FAILURES_PER_POOL", -1.0)
    told: list[int] = []
    both = goodput.simulate_prepared(
        prepare(zsim.Experiment(**RUN)),
        jobs=2,
        compares=False,
        on_done=lambda kind, count: told.append(count) if kind == "runs" else None,
    )
    assert told == [1, 2, 3, 4, 5, 6]
    assert both.runs.days == alone.runs.days


def test_a_check_counts_rows_of_tables_and_cases(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    curves = ROOT / "validation" / "curves"
    table = tmp_path / "runs.csv"
    table.write_text(
        "row_id,model,cluster,gpus,training.sequence_length,strategy.kind,training.micro_batch_size\n"
        "a,gpt2,dgx-h100,8,512,ddp,1\nb,gpt2,dgx-h100,8,512,ddp,2\n"
    )
    run_check([table], tmp_path, on_done=lambda kind, count: told.append((kind, count)))
    rows, cases = COUNTED
    assert told == [(rows, 1), (rows, 2)]
    told.clear()
    run_check([curves], ROOT, baseline=read_baseline(ROOT / "validation" / "baseline.json"),
              on_done=lambda kind, count: told.append((kind, count)))  # fmt: skip
    assert [kind for kind, _ in told] == [cases] * len(told) != []
