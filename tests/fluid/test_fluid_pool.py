"""The pool on the clock: rates change when activities start and end, and at no other time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.fluid.pool import FluidPool


class Clock:
    """A pool of the given capacities, and a note of when each activity ended."""

    def __init__(self, *capacity: float) -> None:
        self.env = simpy.Environment()
        self.pool = FluidPool(self.env, list(capacity))
        self.ended: dict[str, float] = {}

    def start(self, name: str, size: float, *usage: tuple[int, float], at: float = 0.0) -> None:
        """Start an activity at a time; usage defaults to resource 0 once."""
        profile = self.pool.profile(list(usage) or [(0, 1.0)])

        def end() -> None:
            assert name not in self.ended
            self.ended[name] = self.env.now

        def begin(_event: simpy.Event) -> None:
            self.pool.start(profile, size, end)

        event = simpy.Timeout(self.env, at)
        event.callbacks = [begin]

    def run(self) -> dict[str, float]:
        self.env.run()
        return self.ended


def test_one_activity_takes_its_size_over_the_capacity() -> None:
    clock = Clock(10.0)
    clock.start("a", 50.0)
    assert clock.run() == {"a": 5.0}


def test_an_activity_goes_on_under_another_profile() -> None:
    """20 of 50 are done at 2; a unit then takes twice as much, so 30 are left at 5 a second: 8."""
    clock = Clock(10.0)
    once, twice = clock.pool.profile([(0, 1.0)]), clock.pool.profile([(0, 2.0)])
    activity = clock.pool.start(once, 50.0, lambda: clock.ended.update(a=clock.env.now))
    later = simpy.Timeout(clock.env, 2.0)
    later.callbacks = [lambda _event: clock.pool.change(activity, twice)]
    assert clock.run() == {"a": 8.0}


def test_two_share_until_one_ends_and_the_other_speeds_up() -> None:
    """At 5 each, 20 are done at 4; of b's 50, 30 are left at 10: 7."""
    clock = Clock(10.0)
    clock.start("a", 20.0)
    clock.start("b", 50.0)
    assert clock.run() == {"a": 4.0, "b": 7.0}


def test_a_late_arrival_slows_the_one_under_way() -> None:
    """a has 30 of 50 left at 2; at 5 each a ends at 8, having left b 20 of its 50: 10."""
    clock = Clock(10.0)
    clock.start("a", 50.0)
    clock.start("b", 50.0, at=2.0)
    assert clock.run() == {"a": 8.0, "b": 10.0}


def test_what_shares_nothing_is_not_solved_again_when_others_start_and_end() -> None:
    """Ten on resource 0, one after the other beside a long one on resource 1: one solution of each profile,
    and two events of SimPy for each activity (its start and its end) beside a first solution of each."""
    clock = Clock(1.0, 1.0)
    short, long = clock.pool.profile([(0, 1.0)]), clock.pool.profile([(1, 1.0)])
    ends: list[float] = []

    def begin(_event: object = None) -> None:
        clock.pool.start(short, 1.0, end)

    def end() -> None:
        ends.append(clock.env.now)
        if len(ends) < 10:
            simpy.Timeout(clock.env, 0.5).callbacks = [begin]

    clock.pool.start(long, 100.0, lambda: ends.append(clock.env.now))
    begin()
    events = 0
    while clock.env.peek() < float("inf"):
        clock.env.step()
        events += 1
    assert ends == [1.0 + 1.5 * number for number in range(10)] + [100.0]
    assert clock.pool.num_solutions == 2
    assert events == 9 + 10 + 1 + 1  # starts, ends, the end of the long one, the solver once


def test_one_that_shares_with_two_slows_both_until_it_ends() -> None:
    """a and b have 50 of 100 left at 5; c, on both resources, has its 10 done at 7 at half of each; the 40
    that are left take 4 more."""
    clock = Clock(10.0, 10.0)
    clock.start("a", 100.0, (0, 1.0))
    clock.start("b", 100.0, (1, 1.0))
    clock.start("c", 10.0, (0, 1.0), (1, 1.0), at=5.0)
    assert clock.run() == {"c": 7.0, "a": 11.0, "b": 11.0}


def test_an_activity_that_moves_to_a_resource_in_use_shares_it() -> None:
    """Both have 80 of 100 left at 2, and then 5 a second: 18."""
    clock = Clock(10.0, 10.0)
    first, second = clock.pool.profile([(0, 1.0)]), clock.pool.profile([(1, 1.0)])
    moving = clock.pool.start(first, 100.0, lambda: clock.ended.update(a=clock.env.now))
    clock.pool.start(second, 100.0, lambda: clock.ended.update(b=clock.env.now))
    later = simpy.Timeout(clock.env, 2.0)
    later.callbacks = [lambda _event: clock.pool.change(moving, second)]
    assert clock.run() == {"a": 18.0, "b": 18.0}


def test_weights_are_units_of_the_resource_per_unit_of_size() -> None:
    """Weight 2 on 10: 5 per second, alone."""
    clock = Clock(10.0)
    clock.start("a", 20.0, (0, 2.0))
    assert clock.run() == {"a": 4.0}


def test_nothing_to_do_and_nothing_used_end_at_once() -> None:
    clock = Clock(10.0)
    clock.start("empty", 0.0, at=1.0)
    clock.start("free", 10.0, (0, 0.0), at=2.0)
    assert clock.run() == {"empty": 1.0, "free": 2.0}


def test_a_dead_resource_never_ends_its_activity_and_stops_nobody_else() -> None:
    clock = Clock(10.0, 0.0)
    clock.start("stuck", 10.0, (1, 1.0))
    clock.start("runs", 10.0)
    assert clock.run() == {"runs": 1.0}
    assert len(clock.pool.active) == 1


def test_what_starts_at_one_instant_is_solved_once() -> None:
    """256 at once are one solution; they end together, and nothing is left to solve."""
    clock = Clock(256.0)
    for number in range(256):
        clock.start(str(number), 1.0)
    assert set(clock.run().values()) == {1.0}
    assert clock.pool.num_solutions == 1


def test_a_combination_seen_before_is_not_solved_again() -> None:
    """The same profile, alone, ten times one after the other."""
    env = simpy.Environment()
    pool = FluidPool(env, [1.0])
    profile = pool.profile([(0, 1.0)])
    ends: list[float] = []

    def again() -> None:
        ends.append(env.now)
        if len(ends) < 10:
            pool.start(profile, 1.0, again)

    pool.start(profile, 1.0, again)
    env.run()
    assert ends == [float(n) for n in range(1, 11)]
    assert pool.num_solutions == 1


def test_an_end_may_start_the_next_at_the_same_instant() -> None:
    """A chain of two beside a long one: 10 shared to 2, shared on to 4, then alone: 20 - 10 - 10 = 0."""
    env = simpy.Environment()
    pool = FluidPool(env, [10.0])
    profile = pool.profile([(0, 1.0)])
    ended: dict[str, float] = {}

    def note(name: str, then: Callable[[], object] = lambda: None) -> Callable[[], None]:
        def end() -> None:
            ended[name] = env.now
            then()

        return end

    pool.start(profile, 10.0, note("first", lambda: pool.start(profile, 10.0, note("second"))))
    pool.start(profile, 25.0, note("long"))
    env.run()
    assert ended == {"first": 2.0, "second": 4.0, "long": 4.5}


def test_late_in_a_long_run_the_clock_does_not_stall() -> None:
    """At t = 1e9 s an activity of 1 ns is below the clock's resolution; it ends all the same."""
    clock = Clock(1.0)
    clock.start("tiny", 1e-9, at=1e9)
    clock.start("small", 1e-3, at=1e9)
    ended = clock.run()
    assert ended["tiny"] == pytest.approx(1e9)
    assert ended["small"] == pytest.approx(1e9 + 1e-3)


activities = st.lists(
    st.tuples(
        st.floats(0.0, 1e6),  # size
        st.floats(0.0, 100.0),  # start
        st.dictionaries(st.integers(0, 3), st.floats(0.01, 10.0), min_size=1),
    ),
    min_size=1,
    max_size=12,
)
capacity = st.lists(st.floats(1.0, 1e6), min_size=4, max_size=4)


@settings(max_examples=60)
@given(activities, capacity)
def test_all_bytes_arrive_and_no_resource_carries_more_than_it_can(
    rows: list[tuple[float, float, dict[int, float]]], limits: list[float]
) -> None:
    """Rates are summed over every interval between two events: load below capacity, sizes conserved."""
    env = simpy.Environment()
    pool = FluidPool(env, limits)
    profiles = [pool.profile(list(usage.items())) for _size, _start, usage in rows]
    done = [0.0] * len(rows)
    ended = [False] * len(rows)
    running: dict[int, object] = {}

    def starter(number: int) -> Callable[[simpy.Event], None]:
        def start(_event: simpy.Event) -> None:
            def end() -> None:
                ended[number] = True
                running.pop(number)

            running[number] = pool.start(profiles[number], rows[number][0], end)

        return start

    for number, (_size, start, _usage) in enumerate(rows):
        event = simpy.Timeout(env, start)
        event.callbacks = [starter(number)]
    while env.peek() != float("inf"):
        before = env.now
        rates = {number: activity.rate for number, activity in running.items()}  # type: ignore[attr-defined]
        env.step()
        elapsed = env.now - before
        if elapsed > 0:
            for resource, limit in enumerate(limits):
                load = sum(rate * rows[number][2].get(resource, 0.0) for number, rate in rates.items())
                assert load <= limit * (1 + 1e-9)
            for number, rate in rates.items():
                done[number] += rate * elapsed
    assert all(ended)
    for number, (size, _start, _usage) in enumerate(rows):
        assert done[number] == pytest.approx(size, rel=1e-6, abs=1e-6)
