"""The one command for a GPU, tried where there is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")

from validation import gpu  # noqa: E402
from validation.provenance import machine_folder  # noqa: E402

pytestmark = pytest.mark.torch
TINY = gpu.Run("llama-tiny", length=64, steps=1, more={"world-size": 256})


def test_every_run_has_a_name_of_its_own() -> None:
    names = [run.name for run in gpu.runs()]
    assert len(set(names)) == len(names)
    assert "llama_llama-3-70b_world-size-256_t4096_b1_ac-full" in names
    assert "hf_llama-3-8b@8_trainer-deepspeed_stage-2_t4096_b2" in names


def test_a_finished_run_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = gpu.library("gpt2@2", 64)
    (tmp_path / f"{TINY.name}.json").write_text("{}")
    monkeypatch.setattr(gpu, "measure", lambda run, *_: f"FAILED: {run.name}")
    assert not gpu.measure_all([TINY, other], tmp_path, "cpu")
    assert capsys.readouterr().out == f"   1/1 {other.name}: FAILED: {other.name}\n"


def test_machines_are_called_by_their_class() -> None:
    assert machine_folder("NVIDIA H200") == "h200"
    assert machine_folder("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb"
    assert machine_folder().startswith("cpu-")


def test_a_run_leaves_numbers_a_trimmed_trace_and_the_experiment(tmp_path: Path) -> None:
    assert gpu.measure(TINY, tmp_path, "cpu", tmp_path / "turn").endswith(" s")
    found = json.loads((tmp_path / f"{TINY.name}.json").read_text())
    assert found["experiment"]["gpus"] == 256
    assert len(found["step_seconds"]["all"]) == 1
    assert 0 < (tmp_path / f"{TINY.name}.kineto.json.gz").stat().st_size < 500_000


def fail_with(monkeypatch: pytest.MonkeyPatch, folder: Path, message: str, end: str = "exit 1") -> None:
    """Let the step's process be one that says `message` and ends."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\necho "{message}" >&2\n{end}\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.parametrize(
    ("message", "end"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory.", "exit 1"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "exit 1"),
        ("OSError: [Errno 28] No space left on device", "exit 1"),
        ("", "kill -9 $$"),  # as Linux does when memory is out
    ],
)
def test_what_does_not_fit_is_written_down(
    message: str, end: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fail_with(monkeypatch, tmp_path, message, end)
    assert gpu.measure(TINY, tmp_path, "cuda", tmp_path / "turn").startswith("does not fit")
    found = json.loads((tmp_path / f"{TINY.name}.json").read_text())
    assert message in found["does_not_fit"] or "ended with -9" in found["does_not_fit"]


def test_any_other_failure_is_said_and_leaves_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fail_with(monkeypatch, tmp_path, "RuntimeError: of another kind")
    assert "of another kind" in gpu.measure(TINY, tmp_path, "cuda", tmp_path / "turn")
    assert not (tmp_path / f"{TINY.name}.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_skipped_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == 3
    assert "SKIPPED: there is no GPU here" in capsys.readouterr().err
