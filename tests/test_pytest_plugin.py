"""The pytest plugin, run by pytest inside of pytest."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[1]
JOB = """
model = "gpt2"
cluster = "dgx-a100-80gb"
gpus = 8
training.sequence_length = 512
strategy = {kind = "fsdp2"}
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A team's repository with one job; only zsim's plugin is loaded, as installing zsim would."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\naddopts = -p zsim.pytest_plugin --strict-markers")
    (pytester.path / "jobs").mkdir()
    (pytester.path / "jobs" / "gpt2.toml").write_text(JOB)
    return pytester


def write_test(project: pytest.Pytester, body: str) -> None:
    (project.path / "test_jobs.py").write_text("import pytest\nfrom dataclasses import replace\n" + body)


def test_installing_zsim_brings_the_plugin() -> None:
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert entry_points["pytest11"] == {"zsim": "zsim.pytest_plugin"}


def test_loading_it_costs_nothing() -> None:
    code = (
        "import sys, zsim.pytest_plugin\n"
        "heavy = ('numpy', 'pandas', 'plotly', 'torch', 'pydantic', 'simpy', 'networkx', 'typer')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tests_that_do_not_ask_for_it_run_as_before(project: pytest.Pytester) -> None:
    write_test(project, "def test_one(): pass\n")
    result = project.runpytest_inprocess()
    result.assert_outcomes(passed=1)
    assert "zsim" not in result.stdout.str().replace(str(project.path), "")


def test_a_job_is_held_to_the_baseline_that_it_wrote(project: pytest.Pytester) -> None:
    write_test(project, "def test_job(zsim_check): zsim_check('jobs/gpt2.toml')\n")
    first = project.runpytest_inprocess()
    first.assert_outcomes(failed=1)
    first.stdout.fnmatch_lines(
        ["*zsim-baseline.json: no baseline yet; pytest --zsim-update-baseline writes it*"]
    )
    project.runpytest_inprocess("--zsim-update-baseline").assert_outcomes(passed=1)
    assert list(json.loads((project.path / "zsim-baseline.json").read_text())["cases"]) == ["jobs/gpt2.toml"]
    project.runpytest_inprocess().assert_outcomes(passed=1)


def test_a_job_that_changed_fails_and_names_what_moved(project: pytest.Pytester) -> None:
    write_test(project, "def test_job(zsim_check): zsim_check('jobs/gpt2.toml')\n")
    project.runpytest_inprocess("--zsim-update-baseline").assert_outcomes(passed=1)
    job = project.path / "jobs" / "gpt2.toml"
    job.write_text(JOB.replace('"fsdp2"', '"fsdp2", reshard_after_forward = false'))
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "jobs/gpt2.toml is not what zsim-baseline.json pins:" in text
    assert "jobs/gpt2.toml: calls: dropped: all-gather of" in text
    assert "gpu_buffers_bytes" in text
    assert "pytest_plugin.py" not in text  # what differs, not where zsim noticed


def test_two_traces_are_compared_and_the_worst_difference_comes_first(project: pytest.Pytester) -> None:
    write_test(
        project,
        "from zsim.comparison.planted import drop_call\n"
        "def test_same(zsim_check, zsim_trace):\n"
        "    trace = zsim_trace('jobs/gpt2.toml')\n"
        "    assert zsim_check(trace, trace).verdict == 'pass'\n"
        "def test_dropped(zsim_check, zsim_trace):\n"
        "    trace = zsim_trace('jobs/gpt2.toml')\n"
        "    zsim_check(trace, drop_call(trace, 3))\n",
    )
    result = project.runpytest_inprocess()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*1  dropped: all-gather of*"])


HEADER = (
    "row_id,source,model,cluster,gpus,training.sequence_length,strategy.kind,training.micro_batch_size,"
    "step_seconds"
)
RUN = "a-1,mine,gpt2,dgx-a100-80gb,8,512,ddp,2,0.02"


def test_a_table_of_runs_is_held_to_the_baseline_and_a_typo_in_it_named(project: pytest.Pytester) -> None:
    table = project.path / "runs.csv"
    write_test(project, "def test_runs(zsim_check): zsim_check('runs.csv')\n")
    table.write_text(HEADER.replace("gpus", "gpu_s") + f"\n{RUN}\n")
    typo = project.runpytest_inprocess()
    typo.assert_outcomes(failed=1)
    typo.stdout.fnmatch_lines(["*runs.csv: unknown column 'gpu_s'; did you mean 'gpus'?*"])
    table.write_text(f"{HEADER}\n{RUN}\n")
    project.runpytest_inprocess("--zsim-update-baseline").assert_outcomes(passed=1)
    project.runpytest_inprocess().assert_outcomes(passed=1)
    table.write_text(f"{HEADER}\n{RUN.replace('ddp,2', 'ddp,32')}\n")
    moved = project.runpytest_inprocess()
    moved.assert_outcomes(failed=1)
    moved.stdout.fnmatch_lines(["*runs.csv is not what zsim-baseline.json pins:*"])


def test_an_inconclusive_comparison_is_skipped_neither_failed_nor_passed(project: pytest.Pytester) -> None:
    write_test(
        project,
        "def test_busy(zsim_check, zsim_trace):\n"
        "    trace = zsim_trace('jobs/gpt2.toml')\n"
        "    busy = replace(trace, source='recorded', step_seconds=9 * trace.step_seconds,\n"
        "                   metadata={**trace.metadata, 'foreign_cpu_fraction': 0.5})\n"
        "    zsim_check(trace, busy)\n",
    )
    result = project.runpytest_inprocess("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*inconclusive: others used 50% of the machine*"])


def test_a_marker_sets_the_tolerances_and_the_nearest_one_wins(project: pytest.Pytester) -> None:
    """4 % slower: inside 10 %, outside 2 %."""
    write_test(
        project,
        "def slower(trace): return replace(trace, step_seconds=1.04 * trace.step_seconds)\n"
        "@pytest.mark.zsim(rel=0.10)\n"
        "class TestJob:\n"
        "    def test_loose(self, zsim_check, zsim_trace):\n"
        "        trace = zsim_trace({'model': 'gpt2', 'cluster': 'dgx-a100-80gb', 'gpus': 8})\n"
        "        zsim_check(trace, slower(trace))\n"
        "    @pytest.mark.zsim(step=0.02)\n"
        "    def test_tight(self, zsim_check, zsim_trace):\n"
        "        trace = zsim_trace('jobs/gpt2.toml')\n"
        "        zsim_check(trace, slower(trace))\n",
    )
    result = project.runpytest_inprocess()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*step:*(-3.8 %)*"])


def test_a_misspelt_marker_is_refused(project: pytest.Pytester) -> None:
    write_test(
        project,
        "@pytest.mark.zsim(tolerance=0.1)\ndef test_job(zsim_check): zsim_check('jobs/gpt2.toml')\n",
    )
    result = project.runpytest_inprocess()
    assert "marker zsim: found tolerance, expected rel, step, time, memory, overlap" in result.stdout.str()
    result.assert_outcomes(failed=1)


def test_what_is_no_trace_is_refused(project: pytest.Pytester) -> None:
    write_test(project, "def test_job(zsim_check): zsim_check(3)\n")
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*found int, expected a path, an experiment, a result or a trace*"])


@pytest.mark.parametrize(
    "call", ["zsim_check('jobs/gone.toml')", "zsim_check('jobs/gpt2.toml', 'gone.json')"]
)
def test_a_missing_file_is_one_paragraph_and_no_traceback(project: pytest.Pytester, call: str) -> None:
    write_test(project, f"def test_one(zsim_check): {call}\n")
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    shown = result.stdout.str()
    [first, *_] = [line for line in shown.splitlines() if "gone." in line and "no such file" in line]
    assert str(project.path) in first
    assert "Traceback" not in shown
    assert "another exception" not in shown
    assert "targets.py" not in shown
    assert "raise InputError" not in shown
