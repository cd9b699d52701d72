"""Activities that share resources on the simulated clock, and flows over links as such activities.

An `Activity` has a size and a profile: the units of each resource that one unit of size takes. All running
activities progress at weighted max-min fair rates (`zsim.cost.sharing`), which change only when an activity
starts, ends or changes its profile. The solver runs once per instant, after the instant's other events. Its
answer depends only on which profiles are running, so it is cached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, TypeVar
from weakref import ref

import simpy
from simpy.events import EventPriority

from zsim.cost.sharing import progressive_filling, unshared_rates
from zsim.errors import InputError, StuckError, did_you_mean

_FLOW_KEYS = ("route", "size_bytes", "start_seconds", "latency_seconds")

Owner = TypeVar("Owner")

# simpy runs priorities 0 (urgent) and 1 (normal) first
_END_OF_INSTANT = EventPriority(2)
_NEVER = -1.0


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """The resources that an activity uses."""

    number: int
    usage: tuple[tuple[int, float], ...]
    """The number of each resource, with its units per unit of size."""
    resources: frozenset[int] = frozenset()


class Activity:
    """A running activity. At the last change `remaining` units of size were left, and since then it runs at
    `rate` units per second.
    """

    __slots__ = ("on_end", "profile", "rate", "remaining", "size", "started")

    def __init__(self, profile: Profile, size: float, started: float, on_end: Callable[[], None]) -> None:
        self.profile = profile
        self.size = size
        self.remaining = size
        self.rate = 0.0
        self.started = started
        self.on_end = on_end


class FluidPool:
    """All resources that are shared by rate, and the activities that use them now.

    A stalled pool (work left, all rates zero) never ends its activities. The executor reports the ranks that
    wait for them.
    """

    def __init__(self, env: simpy.Environment, capacity: Sequence[float]) -> None:
        self.env = env
        self.capacity = list(capacity)
        self.num_solutions = 0
        self._profiles: list[Profile] = []
        self._active: list[Activity] = []
        self._rates: dict[tuple[int, ...], dict[int, float]] = {}
        self._isolated_rates: dict[int, float] = {}
        self._last_change = 0.0
        self._is_dirty = False
        self._ending: list[Activity] = []
        self._end_time = _NEVER  # of `_ending`
        self._wake_up = Timer(env, self, FluidPool._finish)
        self._end_of_instant = Timer(env, self, FluidPool._solve)

    def profile(self, usage: Sequence[tuple[int, float]]) -> Profile:
        """Register a usage vector (resource index, weight). Zero weights are dropped."""
        positive_usage = tuple((r, w) for r, w in usage if w > 0)
        profile = Profile(len(self._profiles), positive_usage, frozenset(r for r, _ in positive_usage))
        self._profiles.append(profile)
        return profile

    def start(self, profile: Profile, size: float, on_end: Callable[[], None]) -> Activity:
        """Start an activity. `on_end` is called when its `size` units are done.

        An activity of size 0, or one that uses no resource, ends at this instant.
        """
        activity = Activity(profile, size, self.env.now, on_end)
        if size <= 0 or not profile.usage:
            activity.remaining = 0.0
        self._update_remaining()
        active = self._active
        active.append(activity)
        rate = self._isolated_rates.get(profile.number)
        if rate is not None and len(active) == 1 and not self._is_dirty and activity.remaining > 0:
            self._run_isolated(activity, rate)
        else:
            self._mark_dirty()
        return activity

    def change(self, activity: Activity, profile: Profile) -> None:
        """Continue an activity under another profile from now on."""
        self._update_remaining()
        activity.profile = profile
        self._mark_dirty()

    def isolated_rate(self, profile: Profile) -> float:
        """The rate of an activity while no other is running."""
        rate = self._isolated_rates.get(profile.number)
        if rate is None:
            number = profile.number
            rate = self._isolated_rates[number] = self._rates_of_profiles((number,))[number]
        return rate

    @property
    def active(self) -> Sequence[Activity]:
        return self._active

    def _update_remaining(self) -> None:
        """Bring `remaining` of every activity up to date."""
        now = self.env.now
        elapsed = now - self._last_change
        if elapsed > 0:
            for activity in self._active:
                activity.remaining -= activity.rate * elapsed
        self._last_change = now

    def _mark_dirty(self) -> None:
        if self._is_dirty:
            return
        self._is_dirty = True
        self.env.schedule(self._end_of_instant, priority=_END_OF_INSTANT)

    def _run_isolated(self, activity: Activity, rate: float) -> None:
        """Set the rate of the only activity, and plan its end. The rates are solved again at the end of the
        instant if another one starts until then.
        """
        self._end_time = _NEVER
        activity.rate = rate
        if activity.remaining <= 0:
            self._schedule_end(0.0, [activity])
        elif rate > 0:
            self._schedule_end(activity.remaining / rate, [activity])

    def _solve(self) -> None:
        """Set the rates of the running activities, and plan one wake-up for those that end next."""
        self._is_dirty = False
        self._update_remaining()
        self._end_time = _NEVER
        if not self._active:
            return
        if len(self._active) == 1:
            self._run_isolated(self._active[0], self.isolated_rate(self._active[0].profile))
            return
        numbers = [activity.profile.number for activity in self._active]
        rates = self._rates_of_profiles(tuple(sorted(numbers)))
        delays: list[float] = []  # until each ends at these rates
        for activity, number in zip(self._active, numbers, strict=True):
            activity.rate = rate = rates[number]
            remaining = activity.remaining
            delays.append(0.0 if remaining <= 0 else remaining / rate if rate > 0 else inf)
        soonest = min(delays)
        if soonest == inf:
            return
        # [Note: progress by construction] the activities that end next by this solution are ended at the
        # wake-up, whatever rounding left of them; comparing clocks with a tolerance can stall or skip.
        limit = soonest * (1 + 1e-12)
        ending = [activity for activity, delay in zip(self._active, delays, strict=True) if delay <= limit]
        self._schedule_end(soonest, ending)

    def _schedule_end(self, delay: float, ending: list[Activity]) -> None:
        """End the activities `ending` in `delay` seconds, unless the rates are solved again before."""
        self._ending = ending
        self._end_time = self.env.now + delay
        self.env.schedule(self._wake_up, delay=delay)

    def _rates_of_profiles(self, numbers: tuple[int, ...]) -> dict[int, float]:
        """The rates of concurrent activities of these profiles, by profile."""
        rates = self._rates.get(numbers)
        if rates is None:
            self.num_solutions += 1
            rates = self._rates[numbers] = dict(zip(numbers, self._solve_rates(numbers), strict=True))
        return rates

    def _solve_rates(self, numbers: tuple[int, ...]) -> list[float]:
        """The rates of concurrent activities of these profiles."""
        profiles = [self._profiles[number] for number in numbers]
        resources = [profile.resources for profile in profiles]
        if len(resources) > 1 and len(frozenset().union(*resources)) == sum(map(len, resources)):
            return unshared_rates([self.isolated_rate(profile) for profile in profiles])
        return progressive_filling([profile.usage for profile in profiles], self.capacity)

    def _finish(self) -> None:
        if self.env.now != self._end_time:
            return  # an activity started or changed meanwhile: the later solution planned another wake-up
        ending, self._ending, self._end_time = self._ending, [], _NEVER
        self._update_remaining()
        if len(ending) == len(self._active):
            self._active = []
        else:
            ended = set(map(id, ending))
            self._active = [activity for activity in self._active if id(activity) not in ended]
            self._mark_dirty()
        for activity in ending:
            activity.remaining = 0.0
            activity.on_end()


class Timer(simpy.Event, Generic[Owner]):
    """An event that calls `call(owner)` at every time for which it is scheduled. It does not keep its owner
    alive: the owner holds the timer.
    """

    def __init__(self, env: simpy.Environment, owner: Owner, call: Callable[[Owner], None]) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        self._owner, self._call = ref(owner), call
        self.callbacks = _CALLS

    def fire(self) -> None:
        self.callbacks = _CALLS  # simpy takes those of an event that it processes
        owner = self._owner()
        if owner is not None:
            self._call(owner)


_CALLS: list[Callable[[Timer[Any]], None]] = [Timer.fire]


def simulate_flows(links: Mapping[str, float], flows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Finish time in seconds of each flow under max-min fair fluid sharing.

    `links` is {name: bytes per second}. A flow is `{"route": [link, ...], "size_bytes": n,
    "start_seconds": t, "latency_seconds": l}` (start and latency default to 0): it is issued at t, waits l
    without using bandwidth, then sends n bytes over every link of its route. A link that a route names
    twice is used twice.

    Raises InputError for unknown links or keys and for negative or not finite numbers, StuckError when a
    flow can never finish because a link of its route has no bandwidth.
    """
    env = simpy.Environment()
    index = {name: position for position, name in enumerate(links)}
    for name, bandwidth in links.items():
        if not bandwidth >= 0:
            raise InputError(
                f"link '{name}': bandwidth must be 0 or more bytes per second, found {bandwidth}"
            )
    pool = FluidPool(env, list(links.values()))
    finish = [math.nan] * len(flows)
    for number, flow in enumerate(flows):
        usage, size, issue, latency = _read_flow(number, flow, index)
        profile = pool.profile(usage)

        def begin(
            _event: simpy.Event, number: int = number, profile: Any = profile, size: float = size
        ) -> None:
            def end() -> None:
                finish[number] = env.now

            pool.start(profile, size, end)

        event = simpy.Timeout(env, issue + latency)
        event.callbacks = [begin]
    env.run()
    for number, seconds in enumerate(finish):
        if math.isnan(seconds):
            dead = [name for name in flows[number]["route"] if links[name] == 0]
            raise StuckError(f"flow {number} never finishes: link '{dead[0]}' has no bandwidth")
    return finish


def _read_flow(
    number: int, flow: Mapping[str, Any], index: Mapping[str, int]
) -> tuple[list[tuple[int, float]], float, float, float]:
    for key in flow:
        if key not in _FLOW_KEYS:
            raise InputError(f"flow {number}: unknown key '{key}'{did_you_mean(key, _FLOW_KEYS)}")
    for key in ("route", "size_bytes"):
        if key not in flow:
            raise InputError(f"flow {number}: '{key}' is missing")
    weights: dict[int, float] = {}
    for name in flow["route"]:
        if name not in index:
            raise InputError(f"flow {number}: unknown link '{name}'{did_you_mean(str(name), index)}")
        weights[index[name]] = weights.get(index[name], 0.0) + 1.0
    numbers = [float(flow.get(key, 0.0)) for key in ("size_bytes", "start_seconds", "latency_seconds")]
    for key, value in zip(("size_bytes", "start_seconds", "latency_seconds"), numbers, strict=True):
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"flow {number}: {key} must be finite and 0 or more, found {value}")
    return list(weights.items()), numbers[0], numbers[1], numbers[2]
