"""`zsim replay` on the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import zsim
from zsim.cli import main

Run = Callable[..., tuple[str | int, str, str]]
TRACE = str(Path(__file__).resolve().parents[2] / "traces" / "gloo" / "zero3-even-2ranks")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[str | int, str, str]:
        """(exit code, stdout, stderr)"""
        monkeypatch.setattr("sys.argv", ["zsim", "replay", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code or 0, *capsys.readouterr()

    return call


def test_it_prints_both_steps_within_80_columns(run: Run) -> None:
    code, out, _ = run(TRACE)
    assert code == 0
    assert re.search(r"recorded +replayed +change$", out, re.MULTILINE)
    step = re.search(r"^step +([\d.]+) ms +([\d.]+) ms +[+-][\d.]+ %$", out, re.MULTILINE)
    assert step is not None
    assert float(step[2]) == pytest.approx(float(step[1]), rel=0.01)
    assert max(len(line) for line in out.splitlines() if TRACE not in line) <= 80


def test_a_cpus_kernels_are_not_passed_off_as_a_gpus(run: Run) -> None:
    """The ranks of the trace computed on a CPU: on H100 nothing but the collectives is H100's."""
    code, out, _ = run(TRACE, "--cluster", "dgx-h100", "--gpus", "2")
    assert code == 0
    assert "replayed: kernels as recorded, collectives on dgx-h100, 2 ranks\n" in out
    assert (
        "computed on a CPU: kernels keep their durations, which are not those of h100-sxm-80gb"
        in " ".join(out.split())
    )
    result = json.loads(run(TRACE, "--cluster", "dgx-h100", "--gpus", "2", "--json", "-")[1])
    assert result["keeps_kernels"] is True
    for part in ("compute", "optimizer"):
        seconds = result["breakdown_seconds"]
        assert seconds["replayed"][part] == pytest.approx(seconds["recorded"][part], rel=0.01)
    _, scaled, _ = run(TRACE, "--cluster", "dgx-h100", "--gpus", "2", "--recorded-on", "cpu-core-zen4")
    assert "replayed: dgx-h100, 2 ranks\n" in scaled
    assert run(TRACE)[1].splitlines()[1] == "replayed: as recorded"


def test_json_on_standard_output_is_nothing_else(run: Run) -> None:
    _, out, _ = run(TRACE, "--json", "-")
    result = json.loads(out)
    assert result["ranks_replayed"] == [0, 1]
    assert result["cluster"] is None
    assert result["step_seconds"] == pytest.approx(result["recorded_seconds"], rel=0.01)
    breakdown = result["breakdown_seconds"]["replayed"]
    assert sum(breakdown.values()) == pytest.approx(result["step_seconds"], rel=1e-6)


def test_the_replayed_ranks_are_traces_again(run: Run, tmp_path: Path) -> None:
    code, _, _ = run(TRACE, "--out", str(tmp_path / "out"))
    again = zsim.read_trace(tmp_path / "out")
    assert (code, again.metadata["ranks"]) == (0, (0, 1))


def test_one_rank_of_two_is_written_as_the_only_one(run: Run, tmp_path: Path) -> None:
    code, _, err = run(TRACE, "--cluster", "dgx-h100", "--gpus", "1", "--out", str(tmp_path / "out"))
    assert code == 0, err
    again = zsim.read_trace(tmp_path / "out")
    assert (again.metadata["ranks"], again.world_size) == ((0,), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.json",), "no such file or folder"),
        ((TRACE, "--gpus", "8"), "needs a cluster"),
        ((TRACE, "--cluster", "dgx-h1000"), "did you mean 'dgx-h100'"),
        ((TRACE, "--recorded-on", "foo"), "recorded_on foo has no effect without a cluster"),
        ((TRACE, "--step", "3"), r"recorded are \[27, 28\]"),
    ],
)
def test_mistakes_are_one_paragraph_and_exit_2(run: Run, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("zsim: ")
    assert __import__("re").search(message, err)
