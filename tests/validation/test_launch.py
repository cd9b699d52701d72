"""Ranks always end, and say why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")

from validation import ends  # noqa: E402
from validation.launch import ROOT, RankError, run, run_outcomes  # noqa: E402

pytestmark = pytest.mark.torch


def is_alive(pid: int) -> bool:
    """Running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "ranks are still alive"
        time.sleep(0.05)


def pids_in(folder: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 60
    while True:
        files = sorted(folder.glob("pid-*"))
        if len(files) == count and all(file.read_text() for file in files):
            return [int(file.read_text()) for file in files]
        assert time.monotonic() < deadline, "ranks did not start"
        time.sleep(0.05)


def test_fifty_runs_end_without_abort() -> None:
    """A process that ends with its group alive aborts one time in three; here all 100 ranks end with 0."""
    assert run("tests.validation.ranks:add_up", 2, rounds=50, timeout=180) == [1.0, 1.0]


def test_what_a_rank_touched_before_it_began_is_not_new_to_it() -> None:
    """32 MiB are 8,192 pages."""
    (new,) = run("tests.validation.ranks:pages_found_new", 1)
    (known,) = run("tests.validation.ranks:pages_found_new", 1, touched_bytes=2**26)
    assert new > 7_000
    assert known < 1_000


def test_trainings_end_with_0_and_leave_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m validation.ends --runs 50` in small; its figures are in validation/README.md."""
    assert ends.main(["--runs", "1"]) == 0
    said = capsys.readouterr().out
    assert said.count("1 runs of 2 ranks") == 2
    assert said.count("2 with 0; 0 processes left") == 2


def test_what_is_still_running_is_counted() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert child.pid in ends.descendants()
        child.kill()
    assert child.pid not in ends.descendants()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_killed_rank_is_an_error_on_the_others_and_no_hang(stage: int) -> None:
    outcomes = run_outcomes(
        "tests.validation.ranks:die_in_backward", 3, (1, "is killed", stage), collective_timeout=8.0
    )
    assert outcomes[1].exit_code == -signal.SIGKILL
    for survivor in (outcomes[0], outcomes[2]):
        assert survivor.exit_code == 1
        assert "RuntimeError" in (survivor.error or "")


def test_a_rank_that_raises_is_reported_with_its_own_error() -> None:
    with pytest.raises(RankError) as caught:
        run("tests.validation.ranks:die_in_backward", 2, (1, "raises", 3), collective_timeout=30.0)
    assert "FloatingPointError: the victim's own error" in (caught.value.outcomes[1].error or "")
    assert caught.value.outcomes[0].error is not None


def test_time_up_leaves_no_process(tmp_path: Path) -> None:
    """The launcher and a child of it sleep for ever; both are gone when `run_outcomes` returns."""
    (outcome,) = run_outcomes(
        "tests.validation.sleeper:none", 1, timeout=3, environment={"ZSIM_TEST_FOLDER": str(tmp_path)}
    )
    assert "did not end" in (outcome.error or "")
    wait_until_gone(pids_in(tmp_path, 2))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_a_caller_that_is_killed_or_interrupted(tmp_path: Path, how: signal.Signals) -> None:
    program = (
        "from pathlib import Path; from validation.launch import run;"
        f"run('tests.validation.ranks:note_pid_and_sleep', 2, (Path({str(tmp_path)!r}),))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    caller = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL
    )
    pids = pids_in(tmp_path, 2)
    caller.send_signal(how)
    caller.wait()
    wait_until_gone(pids)
