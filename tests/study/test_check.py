"""The regression check: recorded cases, traces beside their experiments, baselines; what moved is named."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

import zsim
from tests.expect import there
from zsim.cli import app
from zsim.comparison import planted
from zsim.comparison.verdict import Tolerances
from zsim.errors import InputError
from zsim.study.check.baseline import CheckRow, pinned_content, pinned_rows, step_times
from zsim.study.check.check import CheckReport, report_lines, run_check, sample
from zsim.study.check.targets import find_targets
from zsim.study.measured.prediction import CheckResult, RowResult
from zsim.trace.chrome import write_chrome_trace

TRACES = Path(__file__).resolve().parents[2] / "traces"
JOB = """
model = "gpt2"
cluster = "dgx-a100-80gb"
gpus = 8
training.sequence_length = 512
strategy = {kind = "fsdp2"}
"""
HEADER = (
    "row_id,source,model,cluster,gpus,training.sequence_length,strategy.kind,training.micro_batch_size,"
    "step_seconds"
)
RUN = "a-1,mine,gpt2,dgx-a100-80gb,8,512,ddp,2,0.02"


def invoke(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "gpt2.toml").write_text(JOB)
    return folder


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """A recorded run of traces/gloo to damage."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(TRACES / "gloo" / name, tmp_path / name))

    return copy


def change_summary(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / "summary.json").read_text())
    change(content)
    (folder / "summary.json").write_text(json.dumps(content))


# -- recorded cases ---------------------------------------------------------------------------------------


def test_a_recorded_run_passes_where_it_is_judged_and_its_times_decide_nothing() -> None:
    report = run_check([TRACES / "gloo" / "fsdp2-reshard-even-2ranks"], TRACES)
    outcomes = {row.name: row.outcome for row in report.rows}
    assert outcomes == {
        "ranks": "pass",
        "calls": "pass",
        "gpu parameters": "pass",
        "gpu gradients": "pass",
        "gpu optimizer states": "pass",
        "calls, span logs": "pass",
        "calls, profile": "pass",
        "step": "inconclusive",
        "processor time of the main thread": "inconclusive",
    }
    assert {row.case for row in report.rows} == {"gloo/fsdp2-reshard-even-2ranks"}
    assert report.verdict == "pass"


def test_an_oracles_answer_passes() -> None:
    report = run_check([TRACES / "oracle" / "llama-3-8b_w64_reshard-true.json"], TRACES)
    assert {row.outcome for row in report.rows} == {"pass"}
    assert [row.name for row in report.rows][:2] == ["calls", "gpu parameters"]


PLANTED: dict[str, tuple[Callable[[list[Any]], object], str]] = {
    "a dropped collective": (
        lambda calls: calls[1].update(times=calls[1]["times"] - 1),
        "dropped: all-gather of model.layers.",
    ),
    "a doubled message": (
        lambda calls: calls[0].__setitem__(1, 2 * calls[0][1]),
        "changed: call 1, all-gather of root (524.80 kB fp32, 2 ranks): bytes 524,800 planned, 1,049,600",
    ),
    "a swapped order": (lambda calls: calls.insert(0, calls.pop()), "reduce-scatter"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_in_a_recorded_run_is_caught_and_named(fault: str, copied: Callable[[str], Path]) -> None:
    plant, words = PLANTED[fault]
    folder = copied("fsdp2-reshard-even-2ranks")
    change_summary(folder, lambda content: plant(content["calls"]))
    report = run_check([folder], folder.parent)
    (row,) = report.failed_rows
    assert (row.case, row.name) == ("fsdp2-reshard-even-2ranks", "calls")
    assert words in row.sentence


def test_states_that_grew_are_caught_by_category(copied: Callable[[str], Path]) -> None:
    folder = copied("fsdp2-keep-even-2ranks")

    def leak(content: dict[str, Any]) -> None:
        content["held_bytes_before_update"][0]["device"]["gradients"] += 4

    change_summary(folder, leak)
    (row,) = run_check([folder], folder.parent).failed_rows
    assert row.name == "gpu gradients"
    assert row.sentence == "1.74 MB planned, 1.74 MB measured (-4 B)"


def test_a_peak_that_grew_is_caught_by_category(tmp_path: Path) -> None:
    """The oracle's buffers 4 % higher, as when one gathered block of 32 is not freed."""
    name = "llama-3-8b_w64_reshard-true.json"
    content = json.loads((TRACES / "oracle" / name).read_text())
    content["peak_bytes"]["buffers"] = round(1.04 * content["peak_bytes"]["buffers"])
    (tmp_path / name).write_text(json.dumps(content))
    (row,) = run_check([tmp_path / name], tmp_path).failed_rows
    assert row.name == "gpu buffers"
    assert row.error == pytest.approx(1 / 1.04 - 1, abs=0.001)


def test_a_slower_link_is_caught_in_a_recorded_trace_measured_on_a_quiet_machine() -> None:
    """The same recording with collectives 10 % longer; with its own foreign load nothing could be said."""
    trace = zsim.read_trace(TRACES / "gloo" / "deepspeed2-even-2ranks").typical_step()
    quiet = replace(trace, metadata={**trace.metadata, "foreign_cpu_fraction": 0.0})
    comparison = zsim.compare(quiet, planted.slow_link(quiet, 1.1), tolerances=0.02)
    assert (comparison.plan_verdict, comparison.verdict) == ("pass", "fail")
    reasons = {row.name: row.metric.reason for row in comparison.clock.classes if row.pairs}
    assert reasons["all-gather, 2 ranks"].startswith("every call 1.10 times as long")
    assert zsim.compare(trace, planted.slow_link(trace, 1.1)).verdict == "inconclusive"


def test_a_call_missing_on_one_rank_alone_is_caught_with_the_rank_and_the_file(
    copied: Callable[[str], Path],
) -> None:
    folder = copied("fsdp2-reshard-even-2ranks")
    log = folder / "rank1.jsonl.gz"
    lines = gzip.decompress(log.read_bytes()).decode().splitlines()
    calls = [number for number, line in enumerate(lines) if '"reduce_scatter"' in line]
    del lines[calls[1]]
    log.write_bytes(gzip.compress("\n".join(lines).encode()))
    (row,) = run_check([folder], folder.parent).failed_rows
    assert row.name == "calls, span logs"
    assert "rank1.jsonl.gz" in row.sentence


def test_a_summary_that_is_not_whole_is_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("fsdp2-keep-even-2ranks")
    change_summary(folder, lambda content: content.pop("held_bytes_before_update"))
    with pytest.raises(InputError, match=r"summary\.json: not whole: KeyError 'held_bytes_before_update'"):
        run_check([folder], folder.parent)
    change_summary(folder, lambda content: content.update(calls=[["all_gather", 1]]))
    with pytest.raises(InputError, match=r"calls: found something else than calls; expected rows \[kind"):
        run_check([folder], folder.parent)


# -- traces and experiments -------------------------------------------------------------------------------


@pytest.fixture
def trace() -> Any:
    return zsim.simulate(
        zsim.Experiment(
            model="gpt2",
            cluster="dgx-a100-80gb",
            gpus=8,
            training={"sequence_length": 512},
            strategy={"kind": "fsdp2"},
        )
    ).trace


def test_a_trace_is_checked_against_the_experiment_beside_it(jobs: Path, trace: Any) -> None:
    write_chrome_trace(trace, jobs / "gpt2.json.gz")
    code, text = invoke(jobs / "gpt2.json.gz")
    assert code == 0, text
    assert text.splitlines()[-1].startswith("PASS  ")
    write_chrome_trace(planted.drop_call(trace, 3), jobs / "gpt2.json.gz")
    code, text = invoke(jobs / "gpt2.json.gz")
    assert code == 1
    assert "calls: dropped: all-gather of" in " ".join(text.split())


def test_the_traces_of_a_folders_ranks_are_one_case(jobs: Path, trace: Any) -> None:
    run = jobs / "run"
    run.mkdir()
    (run / "experiment.toml").write_text(JOB)
    for rank in (0, 1):
        one = replace(trace, ranks=0 * trace.ranks + rank)
        write_chrome_trace(one, run / f"rank{rank}.json.gz")
    found = find_targets([run], jobs)
    assert [(target.name, target.kind) for target in found.targets] == [("run", "trace")]


def test_a_trace_without_anything_to_compare_it_with_is_refused(tmp_path: Path, trace: Any) -> None:
    write_chrome_trace(trace, tmp_path / "alone.json.gz")
    with pytest.raises(
        InputError, match="a trace has nothing to be compared with; expected --baseline FILE, or"
    ):
        invoke(tmp_path / "alone.json.gz")
    (tmp_path / "job.toml").write_text(JOB)
    with pytest.raises(InputError, match=r"job\.toml: nothing is pinned; expected --baseline FILE"):
        invoke(tmp_path / "job.toml")


# -- baselines --------------------------------------------------------------------------------------------


def test_what_a_team_pins_passes_until_it_changes(jobs: Path) -> None:
    """Not resharding drops the second gathers, and keeps the buffers."""
    baseline = jobs / "baseline.json"
    code, text = invoke(jobs / "gpt2.toml", "--baseline", baseline, "--update-baseline")
    assert (code, "1 case\n" in text) == (0, True)
    code, text = invoke("--baseline", baseline)
    assert code == 0, text
    (jobs / "gpt2.toml").write_text(JOB.replace('"fsdp2"', '"fsdp2", reshard_after_forward = false'))
    code, text = invoke("--baseline", baseline)
    words = " ".join(text.split())
    assert code == 1
    assert "gpt2.toml: calls: dropped: all-gather of" in words
    assert "gpt2.toml: gpu_buffers_bytes:" in words
    assert "pinned" in words


def test_pins_keep_their_tolerances_and_these_are_used(jobs: Path) -> None:
    """A step pinned 10 % lower: past 2 %, within the case's own 20 %."""
    baseline = jobs / "baseline.json"
    invoke(jobs / "gpt2.toml", "--baseline", baseline, "--update-baseline")
    content = json.loads(baseline.read_text())
    pins = content["cases"]["gpt2.toml"]
    pins["figures"]["step_seconds"] /= 1.1
    baseline.write_text(json.dumps(content))
    code, text = invoke("--baseline", baseline)
    assert (code, "gpt2.toml: step_seconds:" in text) == (1, True)
    pins["tolerances"] = {"step": 0.2}
    baseline.write_text(json.dumps(content))
    assert invoke("--baseline", baseline)[0] == 0
    invoke("--baseline", baseline, "--update-baseline")
    assert json.loads(baseline.read_text())["cases"]["gpt2.toml"]["tolerances"] == {"step": 0.2}


def test_a_known_difference_is_shown_with_its_reason_and_fails_nothing(jobs: Path) -> None:
    baseline = jobs / "baseline.json"
    invoke(jobs / "gpt2.toml", "--baseline", baseline, "--update-baseline")
    content = json.loads(baseline.read_text())
    content["cases"]["gpt2.toml"]["figures"]["step_seconds"] *= 2
    content["known"] = [{"case": "gpt*", "check": "step_seconds", "reason": "the old cluster"}]
    baseline.write_text(json.dumps(content))
    code, text = invoke("--baseline", baseline)
    assert code == 0
    assert "1 x step_seconds: the old cluster" in text
    assert json.loads(invoke("--baseline", baseline, "--json", "-")[1])["verdict"] == "pass"


def test_what_is_not_in_the_baseline_is_a_miss_that_says_how_to_add_it(jobs: Path) -> None:
    baseline = jobs / "baseline.json"
    invoke(jobs / "gpt2.toml", "--baseline", baseline, "--update-baseline")
    (jobs / "new.toml").write_text(JOB)
    code, text = invoke(jobs, "--baseline", baseline)
    assert (code, "new.toml: baseline: not in the baseline; --update-baseline adds it" in text) == (1, True)


def test_a_recorded_trace_can_be_pinned_too(tmp_path: Path, trace: Any) -> None:
    """Last night's run against last week's, without any experiment."""
    path, baseline = tmp_path / "run.json.gz", tmp_path / "baseline.json"
    write_chrome_trace(trace, path)
    assert invoke(path, "--baseline", baseline, "--update-baseline")[0] == 0
    assert invoke("--baseline", baseline)[0] == 0
    write_chrome_trace(planted.leak(planted.drop_call(trace, 3)), path)
    code, text = invoke("--baseline", baseline)
    assert code == 1
    assert "run.json.gz: calls: dropped: all-gather of" in " ".join(text.split())


def test_pinned_times_decide_nothing_beside_foreign_load(trace: Any) -> None:
    content = pinned_content(trace)
    busy = replace(
        trace,
        source="recorded",
        step_seconds=2 * trace.step_seconds,
        metadata={**trace.metadata, "foreign_cpu_fraction": 0.3},
    )
    rows = list(pinned_rows("run", busy, content, Tolerances(), "baseline.json"))
    outcomes = {row.name: row.outcome for row in rows}
    assert (outcomes["calls"], outcomes["step_seconds"]) == ("pass", "inconclusive")
    assert outcomes["gpu_total_bytes"] == "pass"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "found format 'list', expected a baseline of format 1"),
        ('{"format": 2}', "found format 2, expected a baseline of format 1"),
        ("{", "not a baseline"),
        ('{"format": 1, "casses": {}}', "unknown key 'casses'.*did you mean 'cases'"),
        ('{"format": 1, "cases": {"a": 1}}', "expected an object of objects"),
        ('{"format": 1, "known": [{}]}', "expected objects with case, check and reason"),
        ('{"format": 1, "tolerances": {"stepp": 1}}', "found 'stepp'.*did you mean 'step'"),
        ('{"format": 1, "cases": {"a": {"tolerances": {"step": -1}}}}', "cases: a: tolerances: .*found '-1'"),
    ],
)
def test_a_wrong_baseline_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "baseline.json").write_text(text)
    with pytest.raises(InputError, match=f"baseline.json: .*{message}"):
        invoke("--baseline", tmp_path / "baseline.json")


def test_updating_without_a_file_to_write_is_refused(jobs: Path) -> None:
    with pytest.raises(InputError, match="--update-baseline: expected --baseline FILE"):
        invoke(jobs / "gpt2.toml", "--update-baseline")
    with pytest.raises(InputError, match="no such file; --update-baseline writes one"):
        invoke(jobs / "gpt2.toml", "--baseline", jobs / "none.json")


# -- measured runs ----------------------------------------------------------------------------------------


def table(folder: Path, *rows: str) -> Path:
    path = folder / "runs.csv"
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return path


def test_a_teams_own_runs_are_held_row_by_row(tmp_path: Path) -> None:
    """With 128 sequences in place of 2 the second row takes longer, and is named."""
    path, baseline = table(tmp_path, RUN, RUN.replace("a-1", "a-2")), tmp_path / "baseline.json"
    assert invoke(path, "--baseline", baseline, "--update-baseline")[0] == 0
    assert invoke(path, "--baseline", baseline)[0] == 0
    table(tmp_path, RUN, RUN.replace("a-1", "a-2").replace("ddp,2", "ddp,128"))
    code, text = invoke(path, "--baseline", baseline)
    assert code == 1
    assert "runs.csv: a-2: step:" in text
    assert "runs.csv: a-1: step:" not in text


def test_a_source_that_is_predicted_worse_is_named_with_its_worst_rows(tmp_path: Path) -> None:
    path, baseline = table(tmp_path, RUN), tmp_path / "baseline.json"
    invoke(path, "--baseline", baseline, "--update-baseline")
    table(tmp_path, RUN.replace("0.02", "2.0"))
    code, text = invoke(path, "--baseline", baseline)
    words = " ".join(text.split())
    assert code == 1
    assert "runs.csv: mine: mean error of step times:" in words
    assert "in the baseline" in words
    assert "worst a-1 -" in words


def test_without_a_baseline_a_table_is_a_report_and_misses_nothing(tmp_path: Path) -> None:
    code, text = invoke(table(tmp_path, RUN.replace("0.02", "9.0")))
    assert code == 0
    assert "a-1" in text
    assert "PASS" not in text


def test_measured_curves_are_held_curve_by_curve(tmp_path: Path) -> None:
    """A curve of 8 H100 that is measured twice as fast as before: its error is far above the pinned one."""
    curves = tmp_path / "curves.csv"
    head = "curve,cluster,nodes,gpus,collective,size_bytes,bus_gigabytes_per_second,harness_seconds,source\n"
    row = "H100,dgx-h100,1,8,all_reduce,1073741824,{},0,here\n"
    curves.write_text(head + row.format(460))
    baseline = tmp_path / "baseline.json"
    assert invoke(curves, "--baseline", baseline, "--update-baseline")[0] == 0
    assert invoke("--baseline", baseline)[0] == 0
    curves.write_text(head + row.format(920))
    code, text = invoke("--baseline", baseline)
    assert (code, "curves.csv: H100:" in text) == (1, True)


def test_a_sample_has_some_rows_of_every_source_spread_over_it() -> None:
    runs = [RowResult(f"{s}-{n}", s, "ok") for s in "ab" for n in range(13 if s == "a" else 2)]
    assert [run.row_id for run in sample(runs)] == [
        "a-0", "a-2", "a-4", "a-6", "a-8", "a-10", "b-0", "b-1"
    ]  # fmt: skip


# -- what is written --------------------------------------------------------------------------------------


def test_the_json_holds_measured_rows_and_checks_together(tmp_path: Path) -> None:
    path = table(tmp_path, RUN)
    code, text = invoke(path, TRACES / "gloo" / "ddp-even-2ranks", "--json", "-")
    content = json.loads(text)
    assert code == 0
    assert content["rows"][0]["row_id"] == "a-1"
    assert content["summary"]["by_source"]["mine"]["rows"] == 1
    assert content["verdict"] == "pass"
    row = next(row for row in content["checks"] if row["name"] == "step")
    assert row["case"].endswith("ddp-even-2ranks")
    recorded = json.loads((TRACES / "gloo" / "ddp-even-2ranks" / "summary.json").read_text())
    assert (row["outcome"], row["measured"]) == ("inconclusive", recorded["step_seconds"]["mean"])


def test_junit_has_a_test_per_check_and_skips_what_is_inconclusive(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied("fsdp2-reshard-even-2ranks")
    change_summary(folder, lambda content: PLANTED["a doubled message"][0](content["calls"]))
    code, _ = invoke(folder, "--junit", tmp_path / "check.xml")
    suite = ElementTree.parse(tmp_path / "check.xml").getroot()[0]
    assert code == 1
    assert {key: suite.get(key) for key in ("tests", "failures", "skipped")} == {
        "tests": "9", "failures": "1", "skipped": "2"
    }  # fmt: skip
    skipped = [mark.get("message", "") for mark in suite.iter("skipped")]
    assert [message.partition(": ")[0] for message in skipped] == ["inconclusive", "inconclusive"]
    (failed,) = [case for case in suite if case.find("failure") is not None]
    assert failed.get("name") == "calls"
    assert "2 x" in there(failed.find("failure")).get("message", "")


def test_the_text_fits_80_columns_and_ends_with_the_verdict(copied: Callable[[str], Path]) -> None:
    folder = copied("deepspeed3-even-2ranks")
    change_summary(folder, lambda content: content["calls"].pop(0))
    code, text = invoke(folder)
    assert code == 1
    lines = text.splitlines()
    (path,) = (line for line in lines if f"/{folder.name}:" in line)  # whole, however deep the folder lies
    assert max(len(line) for line in lines if line != path) <= 80
    assert lines[-1].startswith("FAIL  1 moved, 2 inconclusive")


def test_a_pass_says_that_no_step_time_was_judged() -> None:
    """Two recordings beside which others used the machine: 7 checks of each pass, none of them of time."""
    code, text = invoke(TRACES / "gloo" / "ddp-even-2ranks", TRACES / "gloo" / "fsdp2-reshard-even-2ranks")
    assert code == 0
    assert text.splitlines()[-1] == "PASS  4 inconclusive, 14 passed; no step time judged of 2"


def test_the_verdict_counts_the_step_times_that_were_judged() -> None:
    """Of a case with a judged and an unjudged step one is judged; a measured run's row is no recording."""
    rows = [
        CheckRow("a", "step", "inconclusive"),
        CheckRow("b", "step", "skipped"),
        CheckRow("b", "calls", "pass"),
        CheckRow("c", "ahead, step", "fail"),
        CheckRow("d", "step", "known"),
        CheckRow("e", "step", "inconclusive"),
        CheckRow("e", "step_seconds", "pass"),
        CheckRow("runs.csv: a-1", "step", "fail"),
    ]
    assert step_times(rows) == (3, 5)
    report = CheckReport(tuple(rows), CheckResult((), ()))
    assert report.to_dict()["step_times"] == {"judged": 3, "of": 5}
    assert list(report_lines(report, is_long=False))[-2:] == [
        "FAIL  2 moved, 1 known, 2 inconclusive, 1 not simulated, 2 passed; 3 of 5 step",
        "  times judged",
    ]
    calls = CheckReport((CheckRow("b", "calls", "pass"),), CheckResult((), ()))
    assert list(report_lines(calls, is_long=False))[-1] == "PASS  1 passed"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nothing.csv", None, "no such file; expected a table of measured runs"),
        ("odd.json", "{}", "nothing that can be checked"),
        ("readme.md", "hello", "nothing that can be checked"),
        ("cluster.toml", 'schema = 1\nname = "x"', "nothing that can be checked"),
        ("list.toml.bak", "", "nothing that can be checked"),
        ("empty.json", "", "empty.json: is empty; expected a trace of torch.profiler"),
        ("empty.json.gz", "", "is empty; expected a trace of torch.profiler"),
        ("open.json", "[1,2", "event 1 is 1; expected an object"),
        ("half.json", '{"case": {"na', "is cut off after .*; record or copy it again"),
        ("words.json", "no JSON", "is not JSON at character 0: 'no JSON'; expected a trace"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        invoke(tmp_path / name)


@pytest.mark.parametrize("name", ["rank0.jsonl.gz", "rank0.kineto.json.gz"])
def test_a_recording_that_is_cut_off_is_refused_in_its_readers_words(
    copied: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    whole = (copied("ddp-even-2ranks") / name).read_bytes()
    (tmp_path / name).write_bytes(whole[:700])
    with pytest.raises(InputError, match=rf"{name}: the gzip stream is cut off .*; record or copy it again"):
        invoke(tmp_path / name)


def test_a_cut_summary_of_a_recorded_run_is_refused_and_not_passed_over(
    copied: Callable[[str], Path],
) -> None:
    copied("ddp-even-2ranks")
    summary = copied("ddp-uneven-2ranks") / "summary.json"
    summary.write_text(summary.read_text()[:500])
    with pytest.raises(InputError, match=r"summary.json: is cut off after .* characters; record or copy"):
        invoke(summary.parents[1])


def test_a_folder_of_nothing_but_a_damaged_recording_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.json").write_text("")
    with pytest.raises(InputError, match=r"b.json: is empty"):
        invoke(tmp_path)


def test_a_folder_without_cases_is_refused_and_other_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text("{}")
    (tmp_path / "adam.csv").write_text("row_id,seconds\na,1\n")
    with pytest.raises(InputError, match="nothing in there can be checked"):
        invoke(tmp_path)
    table(tmp_path, RUN)
    assert run_check([tmp_path], tmp_path).notes == ("2 files no case: adam.csv, odd.json",)


def test_the_rows_of_tables_are_written_as_experiments(tmp_path: Path) -> None:
    """And nothing is checked; without a table there is nothing to write."""
    table = tmp_path / "runs.csv"
    table.write_text("row_id,model,cluster,strategy.kind,fits\nmarch-1,gpt2,dgx-h100,ddp,false\n")
    words = ["check", "--write-experiments", str(tmp_path / "files")]
    result = CliRunner().invoke(app, [*words, str(table)])
    assert (result.exit_code, result.output) == (0, f"1 experiment in {tmp_path / 'files'}\n")
    assert zsim.load_experiment(tmp_path / "files" / "march-1.toml").cluster == "dgx-h100"
    assert CliRunner().invoke(app, words).exit_code != 0


# -- The recipe about regressions runs as it stands, and prints what it shows ------------------------------


RECIPE = Path(__file__).resolve().parents[2] / "docs" / "recipes" / "regression-check.md"
BLOCKS = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```)?", re.DOTALL)


def printed(code: str, names: dict[str, Any]) -> str:
    """What a block prints, at the width of the page."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        exec(compile(code, RECIPE.name, "exec"), names)
    lines = [
        "\n".join(textwrap.wrap(line, 110, subsequent_indent="    ", break_on_hyphens=False))
        for line in text.getvalue().splitlines()
    ]
    return "".join(f"{line}\n" for line in lines)


def test_the_recipe_prints_what_it_shows(request: pytest.FixtureRequest) -> None:
    """`--update` writes today's output into the page."""
    names: dict[str, Any] = {}
    page = RECIPE.read_text(encoding="utf-8")
    blocks = list(BLOCKS.finditer(page))
    assert len(blocks) == 5
    for block in reversed([(block, printed(block["code"], names)) for block in blocks]):
        match, output = block
        if match["output"] is None:
            assert output == ""
        elif request.config.getoption("--update"):
            start, end = match.span("output")
            page = page[:start] + output + page[end:]
        else:
            assert match["output"] == output
    if request.config.getoption("--update"):
        RECIPE.write_text(page, encoding="utf-8")


def test_every_planted_fault_is_named_on_the_page() -> None:
    page = RECIPE.read_text(encoding="utf-8")
    for words in (
        "\ndropped: all-gather",
        "\nchanged: call 21",
        "\norder: all-gather",
        "every call 1.10 times",
    ):
        assert words in page
    assert "holds back" in page
    assert "\ninconclusive\n" in page
