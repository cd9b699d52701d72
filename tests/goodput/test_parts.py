"""Runs of very many failures: a part of each stands for all of it."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zsim
from tests.goodput.scenarios import SOFTWARE, save, scenario
from zsim.errors import ZsimError
from zsim.goodput.goodput import SimulatedRun
from zsim.goodput.progress import RunLedger, SaveCycle, TrainingInterval
from zsim.goodput.runs import Runs, num_parts, num_seeds, pilot_of, run_seeds, shorten_scenario
from zsim.goodput.scenario import Cause, Failures, Recovery, Saves, Scenario
from zsim.study.whole_runs import simulate_run


def often_failing(steps: int, mean: float = 1_000.0, **more: Any) -> Scenario:
    """A failure every 1,000 s of a job that starts in 200 and saves every 50."""
    return scenario(
        steps, 50, save(2.0), startup=200.0, failures=Failures(1 / mean, SOFTWARE),
        recovery=Recovery(detect_seconds=20.0), **more,
    )  # fmt: skip


def test_four_parts_have_the_mean_and_the_spread_of_the_whole() -> None:
    """100,000 steps, some 150 failures, and four times 25,000: means within their errors, spreads (which a
    sum of four independent parts has twice that of one) within three tenths of each other."""
    whole = often_failing(100_000)
    runs = run_seeds(whole, 100)
    parts = run_seeds(shorten_scenario(whole, 4), 100, 1_000).combine(whole, 4)
    assert parts.mean_days == pytest.approx(runs.mean_days, abs=3 * (runs.days_error + parts.days_error))
    assert stdev(parts.days) == pytest.approx(stdev(runs.days), rel=0.3)
    assert parts.goodput_fraction == pytest.approx(runs.goodput_fraction, rel=0.02)
    for ledger in parts.ledgers:
        assert ledger.useful + sum(ledger.seconds.values()) == pytest.approx(ledger.elapsed)
        assert ledger.useful == pytest.approx(100_000.0)


def test_a_part_of_a_run_is_grown_by_hand() -> None:
    """Parts of 10 and 14 s: of four, a mean of 48 and twice the deviation of 2."""
    ledgers = tuple(
        RunLedger(useful=8.0, elapsed=seconds, failures={"gpu": count}, is_finished=True)
        for seconds, count in ((10.0, 3), (14.0, 5))
    )
    found = Runs(scenario(8, 1), 1, ledgers).combine(scenario(32, 1), 4).ledgers
    assert [one.elapsed for one in found] == pytest.approx([44.0, 52.0])
    assert [one.useful for one in found] == pytest.approx([32.0, 32.0])
    assert [one.failures["gpu"] for one in found] == [14, 18]
    assert all(one.is_finished for one in found)


def test_a_part_has_its_share_of_steps_days_and_years_of_age() -> None:
    one = often_failing(1_000, horizon_seconds=800.0, limit_seconds=4_000.0)
    one = replace(one, failures=replace(one.failures, ageing=((100.0, 2.0),)))
    part = shorten_scenario(one, 4)
    assert part.phases[0].steps == 250
    assert (part.horizon_seconds, part.limit_seconds) == (200.0, 1_000.0)
    assert part.failures.ageing == ((25.0, 2.0),)
    assert part.failures.per_second == one.failures.per_second


def test_an_ordinary_run_is_simulated_whole() -> None:
    one = often_failing(400_000)
    pilot = pilot_of(one, 1)
    assert pilot.is_complete
    assert num_parts(one, 100, pilot) == 1
    assert num_seeds(100, 1, pilot) == 100


def test_a_run_of_a_hundred_thousand_failures_is_simulated_in_part() -> None:
    """Of 100 seeds each has 4,000 of them, so that all have 400,000."""
    one = often_failing(70_000_000)
    pilot = pilot_of(one, 1)
    assert not pilot.is_complete
    expected = (
        fmean(ledger.num_failures for ledger in run_seeds(shorten_scenario(one, 100), 20).ledgers) * 100
    )
    assert pilot.all_failures == pytest.approx(expected, rel=0.1)
    assert num_parts(one, 100, pilot) == pytest.approx(expected / 4_000, rel=0.1)


def test_parts_are_long_against_repairs_else_fewer_seeds_are_drawn() -> None:
    """Repairs of a year: no part of this run is long against them, and 2 million failures are enough."""
    one = often_failing(70_000_000)
    lost = (Cause("node", 1e-9, repair_seconds=3e7), *SOFTWARE)
    one = replace(one, failures=replace(one.failures, causes=lost))
    pilot = pilot_of(one, 1)
    assert num_parts(one, 100, pilot) == 1
    assert num_seeds(100, 1, pilot) == max(20, int(2_000_000 / pilot.all_failures))


def test_without_a_save_in_a_part_the_run_is_whole() -> None:
    """Saved ten times in all: no part of it has ten."""
    one = often_failing(10_000_000, mean=100_000.0)
    one = replace(one, phases=(replace(one.phases[0], saves=replace(one.phases[0].saves, every=10**6)),))
    pilot = pilot_of(one, 1, 5)
    assert not pilot.is_complete
    assert num_parts(one, 1_000_000, pilot) == 1


# -- A stretch: every moment by division is the one that a step-by-step walk comes to ----------------------


def stretch_of(
    saves: Saves, seconds: float, goal: float, intervals: int = 0, since: float = 0.0
) -> TrainingInterval:
    return TrainingInterval(SaveCycle(saves, seconds), goal, intervals, since)


def test_sync_saves_add_their_seconds() -> None:
    """100 steps of 2 s, a save of 7 s after each 10, the last one too: 200 + 10 * 7."""
    assert stretch_of(Saves(10, save(7.0)), 2.0, 100).total_seconds == pytest.approx(270.0)


def test_nothing_saved_is_steps_alone() -> None:
    assert stretch_of(Saves(100), 2.0, 100).total_seconds == pytest.approx(200.0)


def test_a_save_waits_for_the_last_one() -> None:
    """Saves hold training for 1 s and are durable after 31; ten steps take 20 s, so each save but the first
    begins 31 s after the last one: 20 + 9 * 31, and the last one's 31 s."""
    assert stretch_of(Saves(10, save(1.0, persist=30.0)), 2.0, 100).total_seconds == pytest.approx(330.0)


def test_background_writing_slows_the_steps_after_a_save() -> None:
    """20 + 9 * (20 + 1 + 3) until the last steps are done, and the last save's 11 s."""
    stretch = stretch_of(Saves(10, save(1.0, persist=10.0, slowdown=3.0)), 2.0, 100)
    assert stretch.total_seconds == pytest.approx(20 + 9 * 24 + 11)


def test_a_save_is_worth_nothing_before_its_commit() -> None:
    """The first save begins at 20 s and is durable at 31; the second begins at 41 and is durable at 52."""
    stretch = stretch_of(Saves(10, save(1.0, persist=10.0)), 2.0, 100)
    found = [stretch.moment_at(time).remote for time in (19.0, 30.9, 31.1, 51.9, 52.1)]
    assert found == [None, None, 10, 10, 20]


def test_steps_stand_still_while_a_save_holds_training() -> None:
    stretch = stretch_of(Saves(10, save(5.0)), 2.0, 100)
    assert [stretch.moment_at(time).steps for time in (19.0, 20.0, 24.0, 27.0)] == pytest.approx(
        [9.5, 10, 10, 11]
    )


def test_two_tiers_save_locally_often_and_in_the_store_rarely() -> None:
    """Steps of 1 s, a local save of 1 s every 10, in place of every third one a remote one of 4 s. The first
    cycle: twice 10 + 1, 10 and then 4: the remote save begins at 32 and holds until 36. The next local copy
    begins after 10 more and is durable at 47."""
    saves = Saves(10, save(4.0, persist=6.0), save(1.0), remote_every=3)
    stretch = stretch_of(saves, 1.0, 100)
    times = (10.5, 11.0, 22.0, 33.0, 40.0, 46.9, 47.1)
    assert [stretch.moment_at(time).local for time in times] == [None, 10, 20, 20, 20, 20, 40]
    assert [stretch.moment_at(time).remote for time in (41.9, 42.1)] == [None, 30]
    assert stretch.moment_at(35.0).steps == pytest.approx(30.0)
    assert stretch.moment_at(38.0).steps == pytest.approx(32.0)


def test_every_save_is_remote_where_each_first_one_is() -> None:
    """A local tier of which no save is left costs nothing: the cycle of one interval is that of one tier."""
    both, one = (Saves(10, save(4.0), local, remote_every=1) for local in (save(1.0), None))
    stretches = [stretch_of(saves, 1.0, 100) for saves in (both, one)]
    assert [stretch.total_seconds for stretch in stretches] == [100 + 10 * 4.0] * 2
    assert [stretch.moment_at(60.0).local for stretch in stretches] == [None, None]


def test_a_stretch_goes_on_where_the_last_one_was_cut() -> None:
    """Cut after 25 s: 14 steps of 2 s are not done, since the first save took 5; the next save comes after
    10 steps since the last one, so after 7.5 more at 4 s each."""
    first = stretch_of(Saves(10, save(5.0)), 2.0, 100)
    moment = first.moment_at(30.0)
    assert [moment.steps, moment.since] == pytest.approx([12.5, 2.5])
    second = stretch_of(Saves(10, save(5.0)), 4.0, 100 - moment.steps, moment.intervals, moment.since)
    assert second.moment_at(29.9).remote is None
    assert second.moment_at(35.1).remote == 7  # whole steps since the cut, of 12.5 before it


def walk(saves: Saves, step: float, goal: int, until: float) -> tuple[float, int | None]:
    """Steps done and steps durable at `until`, one step at a time, for saves of one tier."""
    assert saves.remote is not None
    place, now, done, free_at = saves.remote, 0.0, 0, 0.0
    commits: list[tuple[float, int]] = []
    while done < goal:
        if now + step > until:
            break
        now, done = now + step, done + 1
        if done % saves.every == 0 and done < goal:
            begin = max(now, free_at)
            if begin > until:
                break
            commits.append((begin + place.durable_seconds, done))
            free_at = begin + place.durable_seconds
            now = begin + place.blocking_seconds
    durable = [steps for time, steps in commits if time <= until]
    return done, durable[-1] if durable else None


@settings(max_examples=200, deadline=None)
@given(
    every=st.integers(1, 9),
    goal=st.integers(1, 60),
    step=st.sampled_from([0.5, 1.0, 3.0]),
    blocking=st.sampled_from([0.0, 0.25, 4.0]),
    persist=st.sampled_from([0.0, 1.25, 40.0]),
    part=st.floats(0.01, 0.99),
)
def test_any_moment_is_the_walks(
    every: int, goal: int, step: float, blocking: float, persist: float, part: float
) -> None:
    saves = Saves(every, save(blocking, persist=persist))
    stretch = stretch_of(saves, step, goal)
    until = stretch.work_seconds * part
    moment = stretch.moment_at(until)
    done, durable = walk(saves, step, goal, until + 1e-9)
    assert moment.remote == durable
    # The wait for the store comes before the steps here and after them there: [Note: the cycle of saves].
    assert moment.steps <= done + 1 + 1e-6
    if persist <= every * step:
        assert moment.steps >= done - 1e-6


# -- Local SGD and DiLoCo: bytes and seconds of the outer step, and runs of replicas that train apart ------


STATED = {"every": "20 min", "blocking": "5 s", "load": "1 min", "bytes": "96 GB"}


def ran(
    *, strategy: dict[str, Any] | None = None, run: dict[str, Any] | None = None, **local: Any
) -> SimulatedRun:
    tables = {"tokens": "10B", "seeds": 2, "checkpoint": STATED, "recovery": {"restart": "2 min"},
              "local": {"replicas": 4, **local}, **(run or {})}  # fmt: skip
    experiment = zsim.Experiment(
        model="llama-3.2-1b", cluster="dgx-h100", nodes=4, run=tables, strategy=strategy or {"kind": "fsdp2"},
        training={"sequence_length": 2048},
    )  # fmt: skip
    return simulate_run(experiment, compares=False)


def outer(found: SimulatedRun) -> Any:
    step = found.prepared.first.outer
    assert step is not None
    return step


@pytest.fixture(scope="module")
def diloco() -> SimulatedRun:
    return ran()


def test_a_gpu_sends_its_shard_around_a_ring_of_replicas(diloco: SimulatedRun) -> None:
    """1,235,814,400 parameters in fp32 over 8 GPUs of a replica, 2 * 3 / 4 of that each; with its card's 50
    GB/s it takes no less than that."""
    shard = 4 * 1_235_814_400 / 8
    assert outer(diloco).bytes_per_gpu == pytest.approx(1.5 * shard)
    assert outer(diloco).averaging_seconds > 1.5 * shard / 50e9
    assert outer(diloco).averaging_seconds < 2 * 1.5 * shard / 50e9


def test_the_step_is_a_replicas_and_its_part_of_the_outer_one(diloco: SimulatedRun) -> None:
    """One node's step, without a message between nodes; all replicas' tokens count."""
    first, step = diloco.prepared.first, outer(diloco)
    assert first.result.job.world_size == 8
    assert [first.nodes, diloco.gpus] == [4, 32]
    waited = (step.averaging_seconds + step.copying_seconds) / 40
    assert step.added_seconds == pytest.approx(waited)
    assert first.step_seconds == pytest.approx(first.result.report.step_seconds + waited)
    assert first.steps == -(-(10**10) // (4 * first.result.report.step_tokens))
    assert diloco.to_dict()["step_seconds"] == pytest.approx(first.step_seconds)


def test_meeting_half_as_often_costs_half(diloco: SimulatedRun) -> None:
    assert outer(ran(every=80)).added_seconds == pytest.approx(outer(diloco).added_seconds / 2)


def test_averaging_beside_inner_steps_is_not_waited_for(diloco: SimulatedRun) -> None:
    """Four fragments of a quarter each, averaged beside two steps: copies alone are left."""
    step = outer(ran(fragments=4, delay=2))
    assert step.averaging_seconds < 0.3 * outer(diloco).averaging_seconds
    assert step.added_seconds == pytest.approx(step.copying_seconds * 4 / 40)
    assert step.bytes_per_gpu == pytest.approx(outer(diloco).bytes_per_gpu, rel=1e-6)


def test_local_sgd_keeps_nothing_in_host_memory(diloco: SimulatedRun) -> None:
    step = outer(ran(method="local-sgd"))
    assert step.copying_seconds == 0.0
    assert step.averaging_seconds == outer(diloco).averaging_seconds


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"replicas": 3}, "does not divide the 4 nodes"),
        ({"strategy": {"kind": "deepspeed", "stage": 3}}, "replicas of strategy 'deepspeed'"),
        ({"every": 41, "fragments": 2}, "multiple of fragments"),
        ({"delay": 40}, "fewer steps than from one fragment"),
        ({"method": "local-sgd", "fragments": 2}, "averages all at once"),
        ({"run": {"recovery": {"policy": "per-step"}}}, "is not simulated"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises((ZsimError, ValueError), match=said):
        ran(**changes)
