"""Runs against closed forms (Daly's expectation, renewal sums, a birth-death chain), and traced by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from statistics import fmean

import pytest

from tests.goodput.scenarios import SOFTWARE, save, scenario
from zsim.goodput.progress import RunLedger
from zsim.goodput.runs import run_seeds
from zsim.goodput.scenario import Cause, Failures, Phase, Recovery, Saves, Scenario
from zsim.goodput.training_run import FailureDraws, TrainingRun
from zsim.specs.experiment.run.failures import RecoveryPolicy


def check_books(ledger: RunLedger) -> None:
    """Every second is in one bin."""
    assert ledger.useful + sum(ledger.seconds.values()) == pytest.approx(ledger.elapsed, rel=1e-9)


def test_without_failures_and_with_free_saves_a_run_is_its_steps() -> None:
    ledger = TrainingRun(scenario(1_000_000, 500, save(0.0), step=1.25), 1).train()
    assert ledger.elapsed == pytest.approx(1_250_000.0, rel=1e-12)
    assert ledger.useful == ledger.elapsed


@pytest.mark.parametrize(
    ("mean", "work", "blocking", "persist", "restart", "down", "expected"),
    [
        (10_000, 1_200, 60, 0, 600, 120, 0.8316),
        (10_000, 1_200, 10, 300, 600, 120, 0.8425),
        (3_000, 600, 5, 500, 300, 60, 0.6721),
        (11_135, 465, 10, 0, 120, 0, 0.9479),
        (11_135, 465, 10, 0, 300, 0, 0.9327),
        (11_135, 797, 30, 0, 300, 0, 0.9037),
        (11_135, 1_116, 60, 0, 600, 0, 0.8526),
    ],
)
def test_goodput_is_the_exact_renewal_formula(
    mean: float, work: int, blocking: float, persist: float, restart: float, down: float, expected: float
) -> None:
    """tau exp(-(R + P) / M) / ((M + D) (exp(L / M) - 1)): Daly's law, extended to saves that are durable
    later. 60 seeds of 200 mean times have some 0.4 % of error; the last save of a run is waited for."""
    length = work + blocking
    formula = work * math.exp(-(restart + persist) / mean) / ((mean + down) * math.expm1(length / mean))
    assert formula == pytest.approx(expected, abs=5e-5)
    steps = work * round(mean * 200 / work)
    runs = run_seeds(
        scenario(
            steps, work, save(blocking, persist=persist), startup=restart,
            failures=Failures(1 / mean, SOFTWARE), recovery=Recovery(detect_seconds=down),
        ),
        60,
    )  # fmt: skip
    for ledger in runs.ledgers:
        check_books(ledger)
    assert runs.goodput_fraction == pytest.approx(formula, rel=0.01)


def test_a_finite_run_takes_dalys_expectation() -> None:
    """W = 20,000 s in intervals of 1,000, saves of 50, M 5,000, R 100, D 30: the first start is apart, so
    (W / tau) (M + D) exp(R / M) (exp(L / M) - 1) = 23,983 s; within three standard errors."""
    runs = run_seeds(
        scenario(
            20_000, 1_000, save(50.0), startup=100.0, failures=Failures(1 / 5_000, SOFTWARE),
            recovery=Recovery(detect_seconds=30.0),
        ),
        1_500,
    )  # fmt: skip
    expected = 20 * 5_030 * math.exp(100 / 5_000) * math.expm1(1_050 / 5_000)
    assert expected == pytest.approx(23_983, abs=1)
    assert runs.mean_days * 86_400 == pytest.approx(expected, abs=3 * runs.days_error * 86_400)
    assert runs.days_error * 86_400 < 0.01 * expected


def test_without_saves_the_run_explodes_as_it_should() -> None:
    """E[T] = M (exp(W / M) - 1) with W = 2 M: 6.389 M."""
    runs = run_seeds(scenario(2_000, 2_000, failures=Failures(1 / 1_000, SOFTWARE)), 3_000)
    mean = runs.mean_days * 86_400
    assert mean == pytest.approx(1_000 * math.expm1(2.0), abs=3 * runs.days_error * 86_400)


@pytest.mark.parametrize("shape", [0.6, 0.8, 1.5, 3.0])
def test_weibull_failures_are_the_renewal_sum(shape: float) -> None:
    """Per failure, tau times the expected number of durable saves before it: the sum over j of the survival
    function at R + P + j L, over M. Restart without detection, so that the clock runs as in the sum."""
    mean, work, blocking, persist, restart = 10_000.0, 1_200, 10.0, 300.0, 600.0
    scale = mean / math.gamma(1 + 1 / shape)
    ends = (restart + persist + j * (work + blocking) for j in range(1, 5_000))
    expected = work * sum(math.exp(-((end / scale) ** shape)) for end in ends) / mean
    runs = run_seeds(
        scenario(
            work * 1_600, work, save(blocking, persist=persist), startup=restart,
            failures=Failures(1 / mean, SOFTWARE, "weibull", shape),
        ),
        60,
    )  # fmt: skip
    assert runs.goodput_fraction == pytest.approx(expected, rel=0.012)


@pytest.mark.parametrize("spares", [0, 2, 5])
def test_waiting_is_the_birth_death_chain(spares: int) -> None:
    """20 nodes of mean life 50,000 s, repairs of mean 4,000 s: k nodes are away at rates (nodes there)
    lambda up and k mu down; training waits while k exceeds the spares."""
    nodes, life, repair = 20, 50_000.0, 4_000.0
    chain = [1.0]
    for away in range(nodes + spares):
        chain.append(chain[-1] * min(nodes, nodes + spares - away) * repair / (life * (away + 1)))
    expected = sum(chain[spares + 1 :]) / sum(chain)
    lost = (Cause("node", 1.0, repair_seconds=repair),)
    runs = run_seeds(
        scenario(
            1_000_000, 1, save(0.0), nodes=nodes, failures=Failures(nodes / life, lost),
            recovery=Recovery(spares=spares),
        ),
        30,
    )  # fmt: skip
    waiting = runs.mean_of(lambda ledger: ledger.seconds["waiting"])
    elapsed = runs.mean_of(lambda ledger: ledger.elapsed)
    assert waiting / elapsed == pytest.approx(expected, rel=0.05, abs=2e-3)


class _Struck(TrainingRun):
    """A run with failures at given times, and no other."""

    def __init__(self, one: Scenario, times: list[float], incident: Cause) -> None:
        self.at = times
        super().__init__(one, 1)
        self.draws.failures = Failures(1.0, (incident,))
        self.draws.cumulative = [1.0]
        self.draws.gap = self._gap  # type: ignore[method-assign]

    def _gap(self, now: float) -> float:
        return self.at.pop(0) - now if self.at else math.inf


def test_one_failure_is_traced_by_hand() -> None:
    """Steps of 1 s, a save of 5 s every 100. Struck at 250: saves at 100 and 205, so 200 steps are durable
    and 40 lost. Detection 30, start 60, load 10: training goes on at 350 from step 200. Of 300 steps in all
    100 are left, and a last save: 455."""
    one = scenario(300, 100, save(5.0, load=10.0), startup=60.0, recovery=Recovery(detect_seconds=30.0))
    ledger = _Struck(one, [250.0], SOFTWARE[0]).train()
    assert ledger.elapsed == pytest.approx(455.0)
    assert ledger.seconds == pytest.approx(
        {"checkpoints": 15.0, "evaluation": 0.0, "detection": 30.0, "restart": 70.0, "recomputation": 40.0,
         "waiting": 0.0, "planned": 0.0, "degraded": 0.0}
    )  # fmt: skip
    assert ledger.by_cause == pytest.approx({"software": 140.0})


def test_a_failure_in_a_save_loses_the_interval_before_it() -> None:
    """Struck at 103, in the first save: 100 steps are lost, and all begins anew at 103."""
    ledger = _Struck(scenario(100, 100, save(5.0)), [103.0], SOFTWARE[0]).train()
    assert ledger.elapsed == pytest.approx(103.0 + 105.0)
    assert ledger.seconds["recomputation"] == pytest.approx(100.0)


def test_a_failure_while_starting_begins_the_start_anew() -> None:
    """Struck at 50, and again at 110 in a start of 100 s that began at 60: 10 + 50 s of start and 10 of
    detection twice, then 100 of start: training goes on at 220 from nothing."""
    one = scenario(100, 100, save(0.0), startup=100.0, recovery=Recovery(detect_seconds=10.0))
    ledger = _Struck(one, [50.0, 110.0], SOFTWARE[0]).train()
    assert ledger.elapsed == pytest.approx(220.0 + 100.0)
    assert ledger.seconds["restart"] == pytest.approx(150.0)
    assert ledger.seconds["detection"] == pytest.approx(20.0)


def test_local_copies_outlive_what_keeps_the_node_alone() -> None:
    """In-memory copies every 10 steps at no cost, remote ones every 50; struck at 95: a lost rack goes back
    to 50, everything else to 90 where copies have a peer."""
    saves = {"local": save(0.0), "remote_every": 5, "survives_node": True}
    one = scenario(100, 10, save(0.0), saves=saves, recovery=Recovery(spares=4))
    lost = {
        name: _Struck(one, [95.0], cause).train().seconds["recomputation"]
        for name, cause in {
            "software": SOFTWARE[0],
            "node": Cause("node", 1.0, nodes=1),
            "rack": Cause("rack", 1.0, nodes=2),
        }.items()
    }
    assert lost == pytest.approx({"software": 5.0, "node": 5.0, "rack": 45.0})


def test_silent_corruption_goes_back_beyond_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves every 10 steps. Corrupted at 35, found at 75: with all saves kept back to 30, with two kept (60
    and 70) to nothing, with one of 20 kept for ever to 20."""

    def lost(**kept: int | None) -> float:
        one = scenario(100, 10, save(0.0), saves=kept)
        run = _Struck(one, [35.0], Cause("corruption", 1.0, keeps_node=True, found_later=1.0))
        monkeypatch.setattr(run.kind_draws, "expovariate", lambda _: 40.0)
        return run.train().seconds["recomputation"]

    assert lost(keep=None) == pytest.approx(45.0)
    assert lost(keep=2) == pytest.approx(75.0)
    assert lost(keep=2, archive_steps=20) == pytest.approx(55.0)


def test_shrinking_goes_on_with_fewer_nodes_and_grows_again() -> None:
    """8 nodes, one lost at 50 for 200 s: from 50 on steps take 8/7, until the node is back at 250; then all
    start again. 100 steps by then? 50 + 50 * 8/7 = 107 s: the run is over before."""
    recovery = Recovery("shrink", least_nodes=7)
    one = scenario(100, 10, save(0.0), recovery=recovery, phase={"slowdown_by_nodes": {8: 1.0, 7: 8 / 7}})
    ledger = _Struck(one, [50.0], Cause("node", 1.0, repair_seconds=200.0, repair_median=200.0)).train()
    assert ledger.elapsed == pytest.approx(50 + 50 * 8 / 7)
    assert ledger.seconds["waiting"] == 0.0
    longer = scenario(400, 10, save(0.0), recovery=recovery, phase={"slowdown_by_nodes": {8: 1.0, 7: 8 / 7}})
    ledger = _Struck(longer, [50.0], Cause("node", 1.0, repair_seconds=200.0, repair_median=200.0)).train()
    assert ledger.seconds["degraded"] == pytest.approx(200 - 200 * 7 / 8, abs=1.5)
    assert ledger.elapsed == pytest.approx(50 + 200 + (400 - 50 - 200 * 7 / 8), abs=1.5)


def test_replicas_go_on_while_one_is_away() -> None:
    """4 replicas, steps of 2 s; struck at 5: the step under way is lost (1 s), all wait 10 s, then training
    goes on at 3/4 for 100 s until the replica has started: 75 s of steps' worth in 100."""
    one = scenario(
        200, 200, step=2.0, startup=90.0, recovery=Recovery("per-step", stall_seconds=10.0),
        phase={"replicas": 4},
    )  # fmt: skip
    ledger = _Struck(one, [5.0], SOFTWARE[0]).train()
    check_books(ledger)
    assert ledger.seconds["recomputation"] == pytest.approx(1.0)
    assert ledger.seconds["detection"] == pytest.approx(10.0)
    assert ledger.seconds["degraded"] == pytest.approx(80 / 4)  # of 90 s of start, 10 were the stall
    assert ledger.elapsed == pytest.approx(400 + 1 + 10 + 20)


def test_the_last_replica_is_a_restart() -> None:
    one = scenario(
        100, 10, save(0.0), startup=30.0, recovery=Recovery("per-step", least_replicas=2),
        phase={"replicas": 2},
    )  # fmt: skip
    ledger = _Struck(one, [55.0], SOFTWARE[0]).train()
    assert ledger.seconds["restart"] == pytest.approx(30.0)
    assert ledger.seconds["recomputation"] == pytest.approx(5.0)


def test_planned_stops_save_first() -> None:
    """Every 40 s: saved (3 s), stopped for 7, started in 5: no step is lost but the one under way."""
    one = scenario(
        100, 1_000, save(3.0), startup=5.0, failures=Failures(planned_every=40.0, planned_takes=7.0)
    )
    ledger = TrainingRun(one, 1).train()
    check_books(ledger)
    assert ledger.seconds["planned"] == pytest.approx(3 * 12.0)
    assert ledger.seconds["recomputation"] == pytest.approx(0.0, abs=1e-6)


def test_a_preemption_with_notice_loses_nothing() -> None:
    base = Failures(preemptions_per_second=1 / 100, preemption_takes=20.0)
    told = TrainingRun(
        scenario(1_000, 100, save(3.0), failures=replace(base, preemption_notice=60.0)), 3
    ).train()
    sudden = TrainingRun(scenario(1_000, 100, save(3.0), failures=base), 3).train()
    assert told.failures["preemption"] >= 1
    assert told.seconds["recomputation"] < 1.0 * told.failures["preemption"]
    assert sudden.seconds["recomputation"] > 10.0


def test_stragglers_slow_the_steps_while_they_last() -> None:
    """One every 1,000 s for a mean of 1,000 s, alone or with others: slow for 1 - exp(-1) of the time."""
    rates = Failures(stragglers_per_second=1 / 1_000, straggler_slowdown=1.5, straggler_takes=1_000.0)
    runs = run_seeds(scenario(400_000, 100, save(0.0), failures=rates), 20)
    slow = 1 - math.exp(-1)
    share = runs.mean_of(lambda one: one.seconds["degraded"]) / runs.mean_of(lambda one: one.elapsed)
    assert share == pytest.approx(slow * 0.5 / 1.5, rel=0.05)


def test_evaluation_is_booked_apart() -> None:
    one = scenario(1_000, 100, save(0.0), evaluation_every=100, evaluation_seconds=7.0)
    ledger = TrainingRun(one, 1).train()
    assert [ledger.elapsed, ledger.seconds["evaluation"]] == pytest.approx([1_070.0, 70.0])


def test_phases_follow_each_other_with_a_start_between() -> None:
    first = Phase(100, 1.0, 4, Saves(50, save(1.0)), startup_seconds=9.0)
    second = Phase(10, 3.0, 8, Saves(50, save(1.0)), startup_seconds=9.0)
    ledger = TrainingRun(Scenario((first, second)), 1).train()
    assert ledger.elapsed == pytest.approx(100 + 2 + 9 + 30 + 1)
    assert ledger.steps == 110
    assert [phase.elapsed for phase in ledger.phases] == pytest.approx([102, 40])
    assert [phase.worked for phase in ledger.phases] == pytest.approx([100, 30])


def test_a_phase_on_fewer_nodes_has_fewer_failures_and_loses_less_on_them() -> None:
    """Two phases of 100,000 steps of 1 s, one on 8 and one on 2 nodes, a failure every 1,000 s of 8 nodes:
    100 and 25 failures but for their overhead, which 40 runs know within 2. A restart of 20 s costs a fourth
    as many node-seconds on 2 nodes."""
    free = Saves(1, save(0.0))
    large = Phase(100_000, 1.0, 8, free, startup_seconds=20.0)
    small = replace(large, nodes=2, failure_share=0.25)
    failures = Failures(1 / 1_000, SOFTWARE)
    both = [TrainingRun(Scenario((large, small), failures), seed).train() for seed in range(40)]
    alone = [TrainingRun(Scenario((large,), failures), seed).train() for seed in range(40)]
    counts = [fmean(ledger.num_failures for ledger in ledgers) for ledgers in (both, alone)]
    assert counts[1] == pytest.approx(102, abs=5)
    assert counts[0] - counts[1] == pytest.approx(25.1, abs=4)
    lost = [fmean(ledger.by_cause["software"] for ledger in ledgers) for ledgers in (both, alone)]
    restart = lost[1] / counts[1]
    assert lost[0] - lost[1] == pytest.approx((counts[0] - counts[1]) * restart / 4, rel=0.2)


def test_the_horizon_ends_a_run_in_whatever_it_does() -> None:
    one = scenario(
        10**6, 100, save(1.0), startup=50.0, failures=Failures(1 / 300, SOFTWARE), horizon_seconds=5_000.0
    )
    for seed in range(20):
        ledger = TrainingRun(one, seed).train()
        assert ledger.is_finished
        assert ledger.elapsed == pytest.approx(5_000.0)
        check_books(ledger)


def test_the_same_seed_is_the_same_run() -> None:
    one = scenario(50_000, 100, save(1.0), startup=50.0, failures=Failures(1 / 3_000, SOFTWARE))
    assert TrainingRun(one, 7).train() == TrainingRun(one, 7).train()
    assert TrainingRun(one, 7).train() != TrainingRun(one, 8).train()


@pytest.mark.parametrize("policy", ["restart", "shrink", "in-process", "per-step"])
def test_every_second_is_in_one_bin_whatever_happens(policy: RecoveryPolicy) -> None:
    """All that can happen at once, with few spares."""
    causes = (
        Cause("node", 3.0, repair_seconds=5_000.0),
        Cause("software", 2.0, keeps_node=True, detect_seconds=100.0),
        Cause("corruption", 0.5, keeps_node=True, found_later=2_000.0),
    )
    failures = Failures(
        1 / 1_500, causes, rack_fraction=0.1, rack_nodes=3, planned_every=20_000.0, planned_takes=60.0,
        preemptions_per_second=1 / 50_000, preemption_takes=500.0, stragglers_per_second=1 / 9_000,
        straggler_slowdown=1.3, straggler_takes=700.0,
    )  # fmt: skip
    recovery = Recovery(
        policy, detect_seconds=20.0, hang_fraction=0.2, hang_seconds=600.0, swap_seconds=30.0, spares=2,
        least_nodes=5, stall_seconds=10.0, rejoin_seconds=5.0,
    )  # fmt: skip
    one = scenario(
        60_000, 20, save(2.0, persist=30.0, slowdown=1.0, load=9.0), startup=120.0, failures=failures,
        recovery=recovery, saves={"local": save(0.2), "remote_every": 10, "survives_node": True, "keep": 5},
        phase={"replicas": 4, "step_sigma": 0.02, "slowdown_by_nodes": {n: 8 / n for n in range(5, 9)}},
        limit_seconds=3e6,
    )  # fmt: skip
    for seed in range(8):
        ledger = TrainingRun(one, seed).train()
        check_books(ledger)
        assert ledger.is_finished
        assert ledger.useful == pytest.approx(60_000.0)
        assert all(seconds > -1e-6 for name, seconds in ledger.seconds.items() if name != "degraded")


def test_racks_and_leaves_go_together_as_often_as_said() -> None:
    """Of 20,000 failures of one node a tenth take a rack of 4 and a twentieth a leaf of 16: 2.05 nodes each,
    within four standard errors (0.03)."""
    failures = Failures(
        1.0, (Cause("node", 1.0),), rack_fraction=0.1, rack_nodes=4, leaf_fraction=0.05, leaf_nodes=16
    )
    draws = FailureDraws(failures, Recovery(), Random(1), Random(2))
    lost = [draws.incident(100).nodes for _ in range(20_000)]
    assert set(lost) == {1, 4, 16}
    assert fmean(lost) == pytest.approx(1 + 0.1 * 3 + 0.05 * 15, abs=0.1)
    assert max(draws.incident(8).nodes for _ in range(1_000)) == 8  # no more than there are


def test_an_ageing_fleet_fails_as_often_as_the_integral_of_its_rate() -> None:
    """1 per 1,000 s until 40,000, three times that until 70,000, none until the end at 100,000: 130
    failures, within four standard errors of 200 runs."""
    failures = Failures(1 / 1_000, SOFTWARE, ageing=((40_000.0, 3.0), (70_000.0, 0.0)))
    one = scenario(10**6, 100, save(0.0), failures=failures, horizon_seconds=100_000.0)
    counts = [ledger.num_failures for ledger in run_seeds(one, 200).ledgers]
    assert fmean(counts) == pytest.approx(130.0, abs=4 * math.sqrt(130 / 200))


def test_preemptions_without_notice_are_dalys_failures() -> None:
    """All nodes are taken every M = 10,000 s for D = 300, and restart takes none: tau / ((M + D)
    (exp(L / M) - 1)), as failures would."""
    mean, work, blocking, away = 10_000.0, 1_000, 20.0, 300.0
    failures = Failures(preemptions_per_second=1 / mean, preemption_takes=away)
    runs = run_seeds(scenario(work * 1_500, work, save(blocking), failures=failures), 60)
    kept = work / ((mean + away) * math.expm1((work + blocking) / mean))
    # a preemption while nodes are away is none, so that the clock of the next one runs on meanwhile
    assert runs.goodput_fraction == pytest.approx(kept, rel=0.01)
