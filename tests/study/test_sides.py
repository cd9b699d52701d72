"""`zsim compare` on files: traces, experiments, exit codes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from zsim.cli import app
from zsim.comparison import planted
from zsim.comparison.compare import compare
from zsim.comparison.plan_check import Call, fold, unfold
from zsim.errors import InputError
from zsim.study.check.targets import load_trace
from zsim.trace.chrome import write_chrome_trace

ROOT = Path(__file__).resolve().parents[2]
JOB = """
model = "gpt2"
cluster = "dgx-a100-80gb"
gpus = 8
training.sequence_length = 512
strategy = {kind = "fsdp2"}
"""


def invoke(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


@pytest.fixture
def recorded(job: Path) -> Path:
    return write_chrome_trace(load_trace(job), job.parent / "run.json.gz")


def test_an_experiment_is_simulated_and_compared_with_a_trace_of_it(job: Path, recorded: Path) -> None:
    """13 units gathered in forward, 12 again in backward (the root stays), 13 reduced."""
    code, text = invoke(job, recorded)
    assert code == 0, text
    assert text.startswith("SAME  ")
    assert "calls  the same 38 per rank, in the same order, on 1 rank" in text


def test_a_difference_is_exit_code_1_and_everything_is_written(job: Path, recorded: Path) -> None:
    write_chrome_trace(planted.swap_calls(load_trace(job), 3), recorded)
    page, data = job.parent / "page.html", job.parent / "data.json"
    code, text = invoke(job, recorded, "--out", page, "--json", data)
    assert code == 1
    assert "order: " in text
    assert "<title>" in page.read_text()
    assert json.loads(data.read_text())["verdict"] == "fail"


def test_a_setting_changes_the_simulated_side_alone(job: Path, recorded: Path) -> None:
    code, text = invoke(job, recorded, "--set", "strategy.reshard_after_forward=false", "--json", "-")
    assert code == 1
    content: dict[str, Any] = json.loads(text)
    kinds = {row["kind"] for row in content["plan"]["0"]["differences"]}
    assert kinds == {"only recorded"}


def test_a_tolerance_decides(job: Path, recorded: Path) -> None:
    """The last kernel ends late, the step is 3 % longer: past 2 %, within 5 %."""
    trace = load_trace(job)
    ends = trace.end_seconds.copy()
    ends[ends.argmax()] += 0.03 * trace.step_seconds
    write_chrome_trace(replace(trace, step_seconds=1.03 * trace.step_seconds, end_seconds=ends), recorded)
    wide = ["--tolerance", "time=9"]
    assert invoke(job, recorded, *wide, "--tolerance", "step=0.05")[0] == 0
    assert invoke(job, recorded, *wide, "--tolerance", "step=0.02")[0] == 1


def test_what_is_inconclusive_is_said_and_is_no_miss(job: Path) -> None:
    traces = job.parent / "recorded beside others"
    shutil.copytree(ROOT / "traces" / "gloo" / "fsdp2-reshard-even-2ranks", traces)
    summary = json.loads((traces / "summary.json").read_text())
    summary["step_seconds"]["foreign_cpu_fraction"] = 0.3
    (traces / "summary.json").write_text(json.dumps(summary))
    experiment = summary["experiment"]
    model = job.parent / "config.json"
    model.write_text(json.dumps(experiment["model"]))
    lines = [f'model = "{model}"', 'cluster = "cpu-gloo"', "gpus = 2", "[training]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in experiment["training"].items()]
    lines += [
        "[strategy]",
        *(f"{key} = {json.dumps(value)}" for key, value in experiment["strategy"].items()),
    ]
    job.write_text("\n".join(lines))
    code, text = invoke(job, traces)
    assert code == 0, text
    assert text.startswith("INCONCLUSIVE  ")
    assert "times  inconclusive: others used" in text


def test_what_cannot_be_is_refused(job: Path, recorded: Path) -> None:
    with pytest.raises(InputError, match="is a trace; only an experiment can be changed"):
        invoke(recorded, recorded, "--set", "gpus=4")
    with pytest.raises(InputError, match="no such file"):
        invoke(job, job.parent / "none.json")
    with pytest.raises(InputError, match="cannot be written"):
        invoke(job, recorded, "--out", job.parent / "no" / "page.html")


def test_whether_the_recorded_step_lies_inside_the_interval_is_said(job: Path) -> None:
    """A recording of the same step, and of one that took three times as long."""
    simulated = load_trace(job)
    low, high = simulated.metadata["step_seconds_range"]
    assert low < simulated.step_seconds < high
    same = compare(simulated, replace(simulated, source="recorded"))
    assert same.is_within_range
    assert same.to_dict()["step_seconds_range"] == [low, high]
    assert same.range_sentence.startswith("the recorded step, ")
    assert "lies inside of" not in same.range_sentence
    assert " lies inside " in same.range_sentence
    slow = replace(simulated, source="recorded", step_seconds=3 * simulated.step_seconds)
    assert compare(simulated, slow).is_within_range is False
    assert "lies outside " in compare(simulated, slow).range_sentence


def test_a_step_that_zsim_wrote_is_not_called_recorded(job: Path, tmp_path: Path) -> None:
    simulated = load_trace(job)
    own = load_trace(write_chrome_trace(simulated, tmp_path / "own.json"))
    assert compare(simulated, own).range_sentence.startswith("the other trace's step, ")
    copy = load_trace(write_chrome_trace(replace(simulated, source="recorded"), tmp_path / "recorded.json"))
    assert compare(simulated, copy).range_sentence.startswith("the recorded step, ")


def test_two_simulations_are_not_judged_by_an_interval(job: Path) -> None:
    simulated = load_trace(job)
    assert compare(simulated, simulated).range_sentence == ""


# -- Lists of calls as short JSON --------------------------------------------------------------------------


calls = st.builds(
    Call,
    st.sampled_from(["all_gather", "reduce_scatter"]),
    st.integers(1, 3),
    st.sampled_from(["bf16", "fp32"]),
    st.sampled_from([8, 64]),
    st.sampled_from([None, 1]),
    st.sampled_from(["", "comm"]),
    st.sampled_from(["", "root", "blocks.*.mlp"]),
)


@given(st.lists(calls, max_size=30))
def test_unfolding_gives_back_what_was_folded(given_calls: list[Call]) -> None:
    assert unfold(fold(given_calls), "here") == given_calls


def test_a_step_of_many_blocks_is_a_few_rows() -> None:
    """80 blocks, each gathered and then reduced: one repeat, and the numbers of blocks are gone."""
    step = [
        Call(kind, 10, "bf16", 8, 1, "", f"blocks.{block}")
        for block in range(80)
        for kind in ("all_gather", "reduce_scatter")
    ]
    assert fold(step) == [
        {
            "times": 80,
            "calls": [
                ["all_gather", 10, "bf16", 8, 1, "blocks.*"],
                ["reduce_scatter", 10, "bf16", 8, 1, "blocks.*"],
            ],
        }
    ]


@pytest.mark.parametrize("wrong", [3, [3], [["all_gather"]], [{"times": 2}], [["a", "x", "y", 1, 1, ""]]])
def test_anything_else_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(InputError, match=r"run\.json: calls: found something else than calls"):
        unfold(wrong, "run.json: calls")
