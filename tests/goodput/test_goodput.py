"""`zsim goodput` and `zsim.simulate_run`: the contract, what is refused, and the page."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import zsim
from tests.goodput.scenarios import SOFTWARE, save, scenario
from zsim.cli import app
from zsim.errors import InputError
from zsim.goodput.prepared import prepare
from zsim.goodput.runs import Draw, run_draws, wake_processes
from zsim.goodput.scenario import Failures
from zsim.goodput.search import best_interval, starting_interval
from zsim.goodput.views import goodput_lines, trust_rows
from zsim.plan import plans
from zsim.plan.make import PlanBasis, plan_of
from zsim.plan.ops import Plan
from zsim.plan.workload.workload import Workloads
from zsim.report.views.text.sentences import format_trust
from zsim.study.whole_runs import simulate_run
from zsim.units import format_amount, format_seconds, format_tokens

STATED = {"every": "20 min", "blocking": "5 s", "durable": "60 s", "load": "1 min", "bytes": "96 GB"}
CONTRACT = {
    "step_seconds", "steps", "ideal_days", "expected_days", "days_range", "goodput_fraction", "failures",
    "lost_seconds", "lost_gpu_hours", "startup_seconds", "interval_seconds", "best_interval_seconds",
    "checkpoint", "seeds",
}  # fmt: skip


def experiment(**run: Any) -> zsim.Experiment:
    tables = {"checkpoint": STATED, "recovery": {"restart": "4 min", "spares": 2}, "seeds": 20, **run}
    return zsim.Experiment(
        model="llama-3-8b", cluster="dgx-h100", nodes=8, run=tables,
        training={"sequence_length": 8192, "activation_checkpointing": "full"},
        cost={"gpu_hour_price": 2.0},
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole() -> Any:
    return zsim.simulate_run(experiment(tokens="100B", failures={"preset": "opt-175b"}))


def test_the_answer_has_the_contracts_fields(whole: Any) -> None:
    found = whole.to_dict()
    assert set(found) >= CONTRACT
    assert set(found["checkpoint"]) >= {"bytes", "blocking_seconds", "durable_seconds", "load_seconds"}
    assert set(found["lost_seconds"]) >= {
        "checkpoints", "detection", "restart", "recomputation", "waiting", "degraded"
    }  # fmt: skip
    json.dumps(found)


def test_lost_seconds_are_what_is_between_ideal_and_expected(whole: Any) -> None:
    found = whole.to_dict()
    lost = sum(found["lost_seconds"].values()) / 86_400
    assert found["ideal_days"] + lost == pytest.approx(found["expected_days"], rel=1e-9)
    assert found["ideal_days"] == pytest.approx(found["steps"] * found["step_seconds"] / 86_400)
    assert found["goodput_fraction"] == pytest.approx(found["ideal_days"] / found["expected_days"])
    assert found["days_range"][0] <= found["expected_days"] <= found["days_range"][1]


def test_money_counts_spares_and_the_first_start(whole: Any) -> None:
    """10 nodes of 8 GPUs at 2 an hour, for the expected days and 240 s."""
    found = whole.to_dict()
    hours = 80 * (found["expected_days"] * 24 + 240 / 3600)
    assert found["cost"]["gpu_hours"] == pytest.approx(hours)
    assert found["cost"]["money"] == pytest.approx(2 * hours)


def test_a_phase_on_fewer_nodes_costs_less() -> None:
    """Half of the tokens on 8 nodes, half on 4, with 2 spares: hours of 80 and of 48 GPUs. A step's failures
    are those of its nodes."""
    phases = [{"tokens": "50B"}, {"tokens": "50B", "nodes": 4}]
    run = simulate_run(experiment(phases=phases, failures={"preset": "opt-175b"}), compares=False)
    times = [[ledger.phases[number].elapsed for ledger in run.runs.ledgers] for number in (0, 1)]
    first, second = (sum(seconds) / len(seconds) / 3600 for seconds in times)
    hours = 80 * (first + 240 / 3600) + 48 * second
    assert run.bill.gpu_hours == pytest.approx(hours)
    assert run.bill.money == pytest.approx(2 * hours)
    joules = 0.0
    for phase in run.prepared.phases:
        energy = phase.result.report.energy
        assert energy is not None
        joules += energy.joules * phase.gpus * phase.steps
    assert run.bill.megawatt_hours is not None
    assert run.bill.megawatt_hours * 3.6e9 > joules
    assert [phase.failure_share for phase in run.runs.scenario.phases] == [1.0, 0.5]


def test_no_failures_and_free_saves_take_the_steps_time() -> None:
    free = {**STATED, "blocking": "0 s", "durable": "0 s"}
    run = simulate_run(
        experiment(tokens="10B", checkpoint=free, failures={"per_1000_node_days": 0}), compares=False
    )
    assert run.goodput_fraction == pytest.approx(1.0, rel=1e-12)
    assert run.expected_days == pytest.approx(
        run.runs.scenario.steps * run.prepared.first.step_seconds / 86_400
    )


def test_a_run_of_years_is_written_without_exponents() -> None:
    """Above 1,000 days, whose interval was "1.73e+03 to 2.18e+03"."""
    free = {**STATED, "blocking": "0 s", "durable": "0 s"}
    run = simulate_run(
        experiment(tokens="50T", checkpoint=free, failures={"per_1000_node_days": 0}), compares=False
    )
    days = run.expected_days
    assert days is not None
    assert days > 1000
    said = " ".join(" ".join(goodput_lines(run)).split())
    assert f"steps take {days:,.2f} days" in said
    assert re.search(r"Days in proportion: \d+,\d{3} to \d+,\d{3}\.", said)


def test_spares_are_named_where_there_are_some() -> None:
    run = simulate_run(experiment(tokens="1B", recovery={"restart": "4 min"}), compares=False)
    (hours,) = (line for line in goodput_lines(run) if "GPU-hours" in line)
    assert "with spares" not in hours


def test_the_text_fits_a_terminal(whole: Any) -> None:
    lines = list(goodput_lines(whole))
    assert max(map(len, lines)) <= 80
    assert any("GPU-hours with spares" in line for line in lines)


def test_the_text_says_how_far_to_trust_the_step(whole: Any) -> None:
    """Its interval, what the validated runs behind it have in common, the days in proportion, and the grades
    of evidence, as `zsim run` says them."""
    said = " ".join(" ".join(goodput_lines(whole)).split())
    report = whole.prepared.first.result.report
    assert format_trust(report) in said
    assert report.validation.regime in format_trust(report)
    assert "Days in proportion: " in said
    for part, grade in report.evidence.items():
        assert f"{part} {grade}" in said


def test_a_run_and_its_saves_beside_the_step_make_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans made, not seconds: asynchronous saves over the cards slow the step, which is simulated again."""
    made: list[PlanBasis] = []

    def counted(basis: PlanBasis, workloads: Workloads) -> Plan:
        made.append(basis)
        return plan_of(basis, workloads)

    monkeypatch.setattr(plans, "plan_of", counted)
    prepared = prepare(
        experiment(tokens="10B", checkpoint={"mode": "async"}, storage={"write_bandwidth": "240 GB/s"})
    )
    assert prepared.cost("in-memory").slowdown_seconds > 0
    assert len(made) == 1


def test_a_save_of_two_tiers_reaches_the_store_about_as_often_as_pays() -> None:
    """Left out, it is as often as without the first tier, to the nearest number of its saves, where the store
    would take a save every minute. Copies on drives, which the loss of a node takes away, are no rarer."""
    prepared = prepare(
        experiment(tokens="10B", checkpoint={"mode": "async"}, storage={"write_bandwidth": "240 GB/s"})
    )
    remote = prepared.cost("async")
    best = starting_interval(prepared.scenario(math.inf), remote)
    step = prepared.first.step_seconds
    saves = prepared.scenario(100 * step, mode="in-memory").phases[0].saves
    apart = saves.remote_every * (100 * step + prepared.cost("in-memory").blocking_seconds)
    assert best > 3 * remote.durable_seconds
    assert abs(apart - best) <= 51 * step
    on_drives = prepared.scenario(math.inf, mode="local-then-remote")
    assert starting_interval(on_drives, prepared.cost("local-then-remote")) <= best
    assert prepared.scenario(best, mode="local-then-remote").phases[0].saves.remote_every == 1


def test_processes_that_were_woken_give_what_one_gives() -> None:
    """A failure every minute or so pays for processes: the same ledgers from one and from two."""
    draw = Draw(scenario(100_000, 10, save(1.0), failures=Failures(0.01, SOFTWARE)), 30)
    awake = wake_processes(draw, 2)
    awake()
    alone, both = (run_draws([draw], jobs=jobs)[0].days for jobs in (1, 2))
    assert draw.failures > 20_000
    assert alone == both


def test_a_short_run_is_told_in_hours_and_energy_in_its_size() -> None:
    """20 steps of an 8B model on 64 H100 take minutes, and less than a MWh."""
    run = simulate_run(experiment(steps=20, failures={"per_1000_node_days": 0}), compares=False)
    said = " ".join(" ".join(goodput_lines(run)).split())
    assert "20 steps take" in said
    assert " minutes (5 to 95 %" in said
    assert "Where the time goes minutes share" in said
    assert re.search(r"\d k?Wh", said)
    assert " 0 " not in said.partition("GPU-hours with spares")[2].partition(".")[0]


def test_a_mean_beyond_the_interval_names_the_runs_that_make_it() -> None:
    """Fewer than one run in twenty meets a failure here, which costs more than all saves."""
    run = simulate_run(
        experiment(steps=100_000, seeds=60, failures={"per_1000_node_days": 6}), compares=False
    )
    high = run.days_range[1]
    assert high is not None
    assert run.expected_days is not None
    assert run.expected_days > high
    longer = sum(days > high for days in run.runs.days)
    assert 0 < longer <= 3
    assert f"60 seeds, of which {longer} take up to " in " ".join(" ".join(goodput_lines(run)).split())


def test_small_losses_of_a_long_run_have_units_of_their_own(whole: Any) -> None:
    """Of a run of days "0.00 days" says nothing: seconds, minutes and hours, and shares of two digits."""
    lines = list(goodput_lines(whole))
    start = next(number for number, line in enumerate(lines) if line.startswith("Where the days go"))
    rows = lines[start + 1 : lines.index("", start)]
    assert len(rows) > 3
    assert any(re.search(r"\d (min|h|s) +\d", row) for row in rows)
    for row in rows:
        assert re.search(r" (0\.[1-9]\d|[1-9]\d*\.\d\d|\d+\.\d+ (s|min|h))  +", row), row
        assert not row.endswith(" 0.00 %"), row


def test_the_page_shows_a_run_with_its_failures(whole: Any) -> None:
    text = whole.page()
    for name in ("waterfall", "progress", "timeline", "interval", "spares", "causes", "days"):
        assert f'id="plot-{name}"' in text, name
    assert "effective training time ratio" in text
    assert "Should I believe this?" in text


def test_the_page_says_what_the_days_rest_on(whole: Any) -> None:
    """The step with its validated runs, and the days in proportion to its interval; then every table that
    brought rates, with its evidence."""
    rows = {what: (evidence, whence) for what, evidence, whence, _ in trust_rows(whole)}
    report = whole.prepared.first.result.report
    low, high = report.step_seconds_range
    evidence, whence = rows[f"a step of {format_seconds(report.step_seconds)}"]
    assert "compute " in evidence
    assert format_trust(report) in whence
    days = [whole.expected_days * end / report.step_seconds for end in (low, high)]
    assert f"Days in proportion: {format_amount(days[0])} to {format_amount(days[1])}." in whence
    for name, table in whole.sources.items():
        assert rows[name] == (table.evidence, table.source)


def test_the_command_writes_the_json(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'model = "llama-3-8b"\ncluster = "dgx-h100"\nnodes = 2\n'
        "[training]\nsequence_length = 8192\nactivation_checkpointing = 'full'\n[run]\nsteps = 20000\nseeds "
        "= 4\n[run.storage]\nwrite_bandwidth_per_node = '2 GB/s'\n"
    )
    result = CliRunner().invoke(app, ["goodput", str(file), "--json", "-", "--set", "run.seeds=3"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["seeds"] == 3
    assert found["checkpoint"]["bytes"] > 8e9 * 12
    assert found["startup_seconds"] > 10


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({}, "how far does it go"),
        ({"tokens": "1B", "recovery": {"spares": 9, "restart": "1 min"}}, "more than the 8 nodes that train"),
        (
            {"tokens": "1B", "recovery": {"policy": "per-step", "restart": "1 min"}},
            "this job has one replica",
        ),
        (
            {"tokens": "1B", "failures": {"planned_per_day": 500, "planned_takes": "3 min"}},
            "can never finish: a planned stop every 2.9 min",
        ),
        ({"tokens": "1B", "failures": {"per_1000_node_days": 5e6}}, "can never finish: with a failure every"),
    ],
)
def test_a_run_that_cannot_be_is_refused(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(zsim.InputError) as refused:
        simulate_run(experiment(**tables), compares=False)
    assert said in str(refused.value)


def test_the_length_of_a_data_set_is_as_good_as_tokens(tmp_path: Path) -> None:
    """Three epochs of 3,200 samples are 600 steps of 2 x 8 sequences, on a step of 2 nodes."""
    file = tmp_path / "run.toml"
    file.write_text(
        'model = "gpt2"\ncluster = "dgx-h100"\nnodes = 2\n[training]\nsequence_length = 256\n'
        '[run.checkpoint]\nevery = "1 min"\nblocking = "1 s"\ndurable = "2 s"\nload = "3 s"\nbytes = "1 GB"\n'
        '[run.recovery]\nrestart = "10 s"\n'
    )
    base = ["goodput", str(file), "--json", "-", "--seeds", "2", "--jobs", "1"]
    result = CliRunner().invoke(app, [*base, "--samples", "3200", "--epochs", "3"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == 600
    tokens = CliRunner().invoke(app, [*base, "--tokens", str(9600 * 256)])
    assert json.loads(tokens.stdout)["steps"] == 600
    both = CliRunner().invoke(app, [*base, "--tokens", "1B", "--set", "run.tokens=2B"])
    assert isinstance(both.exception, InputError)
    assert "expected one number of tokens" in str(both.exception)


def test_less_than_one_step_is_one_and_says_so() -> None:
    run = simulate_run(experiment(tokens=1000, failures={"preset": "opt-175b"}, seeds=2), compares=False)
    text = " ".join(" ".join(goodput_lines(run)).split())
    assert "1,000 tokens are less than one step of 524,288, which is simulated. 1 step takes" in text


def test_a_run_whose_expectation_diverges_says_so() -> None:
    """One of the runs was given up, so there is no mean."""
    run = simulate_run(
        experiment(tokens="1B", checkpoint={"mode": "none"}, failures={"per_1000_node_days": 0}),
        compares=False,
    )
    ledgers = run.runs.ledgers
    ledgers[0].is_finished = False
    found = run.to_dict()
    assert found["expected_days"] is None
    assert found["unfinished_seeds"] == 1
    assert any("The expectation diverges" in line for line in goodput_lines(run))


@pytest.mark.parametrize(("mean", "blocking"), [(7_519.0, 600.0), (11_135.0, 10.0), (60_150.0, 600.0)])
def test_the_best_interval_is_dalys(mean: float, blocking: float) -> None:
    """M (1 + W(-exp(-1 - c / M))): 2,617.8, 465.3 and 8,100.7 s; found on runs of 150 failures, where a
    tenth more is lost at half and at twice of it, to a fifth."""
    expected = {7_519.0: 2_617.8, 11_135.0: 465.3, 60_150.0: 8_100.7}[mean]
    place = save(blocking)
    curve = best_interval(
        lambda work: scenario(
            10**7, max(round(min(work, 1e7)), 1), place, failures=Failures(1 / mean, SOFTWARE)
        ),
        place,
        1,
    )
    assert curve.closed_form_seconds == pytest.approx(expected, rel=1e-3)
    assert curve.best_seconds == pytest.approx(expected, rel=0.2)
    assert curve.flat[0] < expected < curve.flat[1]


def test_zero_goes_on_with_other_ranks_only_after_a_conversion() -> None:
    def recovery(format: str | None) -> str:
        experiment = zsim.Experiment(
            model="llama-3-8b", cluster="dgx-h100", nodes=4, strategy={"kind": "deepspeed", "stage": 1},
            training={"precision": "bf16"},
            run={"steps": 100, "checkpoint": {"format": format}, "recovery": {"policy": "shrink"}},
        )  # fmt: skip
        return prepare(experiment).recovery.policy

    with pytest.raises(InputError, match="loads a checkpoint of ZeRO on as many ranks as saved it"):
        recovery(None)
    assert recovery("universal") == "shrink"


def test_a_stated_interval_without_hope_is_refused_before_any_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failure a minute and saves two days apart."""
    monkeypatch.setattr("zsim.goodput.goodput.best_interval", None)
    experiment = zsim.Experiment(
        model="llama-3-8b", cluster="dgx-h100", nodes=16, strategy={"kind": "fsdp2"},
        run={"steps": 1_000_000, "checkpoint": {"every": "2 d", "mode": "async"},
             "failures": {"per_1000_node_days": 90_000}},
    )  # fmt: skip
    with pytest.raises(InputError, match=r"run: can never finish: .* saves 2.0 days"):
        simulate_run(experiment, jobs=1)


def test_a_run_that_waits_for_ever_is_refused_after_a_pilot() -> None:
    """Without spares, of 16 nodes that fail every day and are repaired for weeks."""
    run = {
        "tokens": "1T", "recovery": {"restart": "1 min"},
        "failures": {"per_1000_node_days": 1_000, "repair": "60 d", "transient_fraction": 0},
    }  # fmt: skip
    with pytest.raises(InputError, match=r"run: can never finish: .*failures .* of the time was kept"):
        simulate_run(experiment(**run), jobs=1, compares=False)


def test_a_run_of_very_many_failures_says_that_it_is_made_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zsim.goodput.runs._ALL_FAILURES", 20_000)
    run = {"tokens": "2T", "failures": {"per_1000_node_days": 10_000, "transient_fraction": 1}}
    checkpoint = {**STATED, "every": "2 min", "blocking": "1 s", "durable": "1 s"}
    found = simulate_run(experiment(checkpoint=checkpoint, **run), seeds=10, jobs=1, compares=False)
    assert found.to_dict()["simulated_fraction"] < 0.5
    assert found.expected_days is not None
    assert any("like parts of it" in line for line in goodput_lines(found))
    assert sum(found.to_dict()["lost_seconds"].values()) == pytest.approx(
        (found.expected_days - found.ideal_days) * 86_400
    )


@pytest.mark.parametrize(
    ("keep", "archive", "kept"), [(3, None, 3), (None, None, 10), (3, "50 min", 4), (20, None, 10)]
)
def test_the_store_holds_the_saves_that_are_kept(keep: int | None, archive: str | None, kept: int) -> None:
    """Ten saves of 96 GB, 20 min apart: the last three, all, or one of each 50 min before them besides."""
    table = {**STATED, "keep": keep, "archive_every": archive, "every": 100}
    run = experiment(steps=1_000, checkpoint=table, failures={"per_1000_node_days": 0})
    found = simulate_run(run, compares=False)
    apart = 100 * found.prepared.first.step_seconds
    if archive is not None:
        kept = 3 + int(7 * apart / 3_000)
    assert found.to_dict()["checkpoint"]["stored_bytes"] == (kept if keep or archive else 10) * 96e9


def test_energy_is_that_of_steps_idle_gpus_and_the_rest_of_nodes() -> None:
    """Without failures: joules of the steps, idle spares (two nodes of 8) while these last, and all GPUs idle
    in the first start of 240 s; 1.2 times that for cooling, with 500 W of every node."""
    run = experiment(tokens="10B", failures={"per_1000_node_days": 0}).model_copy(
        update={"cost": zsim.Experiment(
            model="llama-3-8b", cluster="dgx-h100", cost={"pue": 1.2, "node_power": "500 W"}
        ).cost}
    )  # fmt: skip
    found = simulate_run(run, compares=False)
    first = found.prepared.first
    report, power = first.result.report, first.result.job.cluster.gpu.power
    assert report.energy is not None
    assert power is not None
    steps = found.runs.scenario.steps
    trained, whole = steps * first.step_seconds, found.expected_days * 86_400 + 240  # type: ignore[operator]
    joules = steps * report.energy.joules * 64 + power.idle * (80 * whole - 64 * trained) + 500 * 10 * whole
    assert found.bill.megawatt_hours == pytest.approx(1.2 * joules / 3.6e9, rel=1e-9)


def test_a_run_that_ends_by_the_clock_says_its_tokens() -> None:
    """A day without failures or saves: its steps of 64 sequences of 8,192 tokens, 524,288."""
    run = simulate_run(experiment(days=1, failures={"per_1000_node_days": 0}, seeds=1), compares=False)
    said = " ".join(" ".join(goodput_lines(run)).split())
    tokens = 86_400 / run.prepared.first.step_seconds * 524_288
    assert run.steps * 524_288 == pytest.approx(tokens, rel=0.01)
    assert f" of steps, {format_tokens(run.steps * 524_288)} tokens." in said
