"""A stretch: every moment by division is the one that a step-by-step walk comes to."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.goodput.scenarios import save
from zsim.goodput.progress import SaveCycle, TrainingInterval
from zsim.goodput.scenario import Saves


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
    """Steps of 1 s, a local save of 1 s every 10, at every third one a remote one of 4 s. The first cycle:
    three times 10 + 1 and then 4: the remote save begins at 33 and holds until 37."""
    saves = Saves(10, save(4.0, persist=6.0), save(1.0), remote_every=3)
    stretch = stretch_of(saves, 1.0, 100)
    assert [stretch.moment_at(time).local for time in (10.5, 11.0, 22.0, 33.0)] == [None, 10, 20, 30]
    assert [stretch.moment_at(time).remote for time in (42.9, 43.1)] == [None, 30]
    assert stretch.moment_at(36.0).steps == pytest.approx(30.0)
    assert stretch.moment_at(39.0).steps == pytest.approx(32.0)


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
