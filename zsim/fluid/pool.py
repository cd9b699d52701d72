"""Activities that share resources on the simulated clock, and flows over links as such activities.

An `Activity` has a size and a profile: the units of each resource that one unit of size takes. All running
activities progress at weighted max-min fair rates (`max_min_fair_rates`), which change only when an activity
starts, ends or changes its profile. The solver runs once per instant, after the instant's other events. Its
answer depends only on which profiles are running, so it is cached.

# [Note: connected activities]
Activities that share a resource, and those that share one with these, are a component. Rates in one component
do not depend on the other components, so that it is solved, and its next end planned, by itself. Components
merge where an activity starts that shares resources with several. They are not split: one whose activities
no longer share anything has the same rates as its parts.

# [Note: max-min fairness]
An activity a runs at rate x_a and puts w_ar * x_a on resource r. The allocation is max-min fair: no rate can
grow without shrinking one that is not larger. Progressive filling computes it (Bertsekas & Gallager, Data
Networks, 2nd ed., section 6.5.2): raise all rates at once, freeze the activities of each resource that is
full, and go on with the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, TypeVar
from weakref import ref

import simpy
from simpy.events import NORMAL, EventPriority

from zsim.errors import InputError, StuckError, did_you_mean

_TIE = 1e-12  # relative: resources that fill at the same level up to rounding fill together


def max_min_fair_rates(
    usage: Mapping[str, Mapping[str, float]], capacity: Mapping[str, float]
) -> dict[str, float]:
    """Rates of activities that share resources.

    `usage` is {activity: {resource: weight}}, `capacity` {resource: units per second}. The rate of an
    activity that uses no resource is infinite. Raises InputError for an unknown resource, a negative or not
    finite weight, and a negative or not-a-number capacity.
    """
    names = list(capacity)
    index = {name: position for position, name in enumerate(names)}
    for name in names:
        if not capacity[name] >= 0:
            raise InputError(f"capacity of '{name}' must be 0 or more, found {capacity[name]}")
    rows: list[list[tuple[int, float]]] = []
    for activity, weights in usage.items():
        row = []
        for resource, weight in weights.items():
            if resource not in index:
                raise InputError(f"activity '{activity}' uses unknown resource '{resource}'")
            if not (weight >= 0 and math.isfinite(weight)):
                raise InputError(
                    f"weight of '{activity}' on '{resource}' must be finite and 0 or more, found {weight}"
                )
            if weight > 0:
                row.append((index[resource], float(weight)))
        rows.append(row)
    rates = progressive_filling(rows, [float(capacity[name]) for name in names])
    return dict(zip(usage, rates, strict=True))


def progressive_filling(
    rows: Sequence[Sequence[tuple[int, float]]], capacity: Sequence[float]
) -> list[float]:
    """Max-min rates of `rows` (per activity: (resource, weight > 0) pairs) under `capacity`.

    O(levels x touched resources + sum of weights), because every level freezes at least one activity.
    """
    rates = [math.inf] * len(rows)
    users: dict[int, list[int]] = {}
    weight_left: dict[int, float] = {}
    for activity, row in enumerate(rows):
        for resource, weight in row:
            users.setdefault(resource, []).append(activity)
            weight_left[resource] = weight_left.get(resource, 0.0) + weight
    capacity_left = {resource: capacity[resource] for resource in users}
    active_users = {resource: len(activities) for resource, activities in users.items()}
    is_active = [bool(row) for row in rows]
    num_active = sum(is_active)
    while num_active:
        level = math.inf
        levels: dict[int, float] = {}
        for resource, weight in weight_left.items():
            resource_level = max(capacity_left[resource], 0.0) / weight
            levels[resource] = resource_level
            level = min(level, resource_level)
        limit = level * (1 + _TIE)
        full = [resource for resource, resource_level in levels.items() if resource_level <= limit]
        if math.isinf(level):
            break
        for resource in full:
            for activity in users[resource]:
                if not is_active[activity]:
                    continue
                is_active[activity] = False
                num_active -= 1
                rates[activity] = level
                for touched, weight in rows[activity]:
                    active_users[touched] -= 1
                    if active_users[touched] == 0:
                        weight_left.pop(touched, None)
                    else:
                        weight_left[touched] -= weight
                        capacity_left[touched] -= weight * level
    return rates


Owner = TypeVar("Owner")
Entry = TypeVar("Entry")
_MAX_TRIES = 4


def exact_delay(now: float, time: float) -> float | None:
    """The delay that added to `now` is `time` without a rounding. None where there is none. See [Note:
    delays, not times].
    """
    delay = time - now
    for _ in range(_MAX_TRIES):
        if now + delay == time:
            return delay
        delay = math.nextafter(delay, math.inf if now + delay < time else 0.0)
    return None


class EventQueue(simpy.Event, Generic[Owner, Entry]):
    """Entries by the time for which they are scheduled, as one event of SimPy that happens at each of them.

    `dispatch(owner, entries, now)` is called with the entries of one instant, in the order in which they were
    scheduled. It happens in the place that the first of them has among SimPy's events of that instant. Like a
    `Timer`, the queue does not keep its owner alive.

    # [Note: delays, not times]
    Entries are scheduled by the delay from now, as SimPy does it, and both add the delay to the same present
    time. A time minus the present would be rounded, and the sum of both would then miss the time.
    """

    def __init__(
        self, env: simpy.Environment, owner: Owner, dispatch: Callable[[Owner, list[Entry], float], None]
    ) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        self._owner, self._dispatch = ref(owner), dispatch
        self._due: dict[float, list[Entry]] = {}
        self.callbacks = _DISPATCH_DUE

    def schedule(self, delay: float, entry: Entry) -> None:
        """Schedule `entry` for `delay` seconds from now."""
        env = self.env
        time = env.now + delay
        entries = self._due.get(time)
        if entries is not None:
            entries.append(entry)
            return
        assert delay >= 0, f"an entry is scheduled {-delay} s ago"
        self._due[time] = [entry]
        env.schedule(self, NORMAL, delay)

    def dispatch_due(self) -> None:
        """Dispatch the entries of this instant."""
        self.callbacks = _DISPATCH_DUE  # simpy takes those of an event that it processes
        owner, now = self._owner(), self.env.now
        assert owner is not None
        self._dispatch(owner, self._due.pop(now), now)


_DISPATCH_DUE: list[Callable[[EventQueue[Any, Any]], None]] = [EventQueue.dispatch_due]


_FLOW_KEYS = ("route", "size_bytes", "start_seconds", "latency_seconds")

# simpy runs priorities 0 (urgent) and 1 (normal) first
_END_OF_INSTANT = EventPriority(2)
_NEVER = -1.0


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """The resources that an activity uses."""

    number: int
    usage: tuple[tuple[int, float], ...]
    """The number of each resource, with its units per unit of size."""
    resources: tuple[int, ...] = ()


class Activity:
    """A running activity of a component. At the last change of this `remaining` units of size were left, and
    since then it runs at `rate` units per second.
    """

    __slots__ = ("component", "on_end", "profile", "rate", "remaining", "size", "started")

    def __init__(self, profile: Profile, size: float, started: float, on_end: Callable[[], None]) -> None:
        self.component = _Component(self, started)
        self.profile = profile
        self.size = size
        self.remaining = size
        self.rate = 0.0
        self.started = started
        self.on_end = on_end


class _Component:
    """Activities that share resources, directly or over others. See [Note: connected activities]."""

    __slots__ = ("activities", "end_time", "ending", "is_dirty", "last_change", "touched")

    def __init__(self, activity: Activity, now: float) -> None:
        self.activities = [activity]
        self.last_change = now
        self.ending: list[Activity] = []
        self.end_time = _NEVER  # of `ending`
        self.is_dirty = False
        self.touched: list[_Component] = []  # those that it shares a resource with, until it is solved

    def update_remaining(self, now: float) -> None:
        """Bring `remaining` of every activity up to date."""
        elapsed = now - self.last_change
        if elapsed > 0:
            for activity in self.activities:
                activity.remaining -= activity.rate * elapsed
        self.last_change = now

    def absorb(self, component: _Component) -> None:
        """Take over the activities of a component, which are all up to date."""
        for activity in component.activities:
            activity.component = self
        self.activities += component.activities
        component.activities, component.end_time = [], _NEVER


class FluidPool:
    """All resources that are shared by rate, and the activities that use them now.

    A stalled component (work left, all rates zero) never ends its activities. The executor reports the ranks
    that wait for them.
    """

    def __init__(self, env: simpy.Environment, capacity: Sequence[float]) -> None:
        self.env = env
        self.capacity = list(capacity)
        self.num_solutions = 0
        self._profiles: list[Profile] = []
        # by resource, the activities that use it, in the order in which they started
        self._users: defaultdict[int, dict[Activity, None]] = defaultdict(dict)
        self._rates: dict[tuple[int, ...], dict[int, float]] = {}
        self._isolated_rates: dict[int, float] = {}
        self._dirty: list[_Component] = []
        self._ends: EventQueue[FluidPool, _Component] = EventQueue(env, self, FluidPool._end_due)
        self._end_of_instant = Timer(env, self, FluidPool._solve_dirty)

    def profile(self, usage: Sequence[tuple[int, float]]) -> Profile:
        """Register a usage vector (resource index, weight). Zero weights are dropped."""
        positive_usage = tuple((r, w) for r, w in usage if w > 0)
        profile = Profile(
            len(self._profiles), positive_usage, tuple(dict.fromkeys(r for r, _ in positive_usage))
        )
        self._profiles.append(profile)
        return profile

    def start(self, profile: Profile, size: float, on_end: Callable[[], None]) -> Activity:
        """Start an activity. `on_end` is called when its `size` units are done.

        An activity of size 0, or one that uses no resource, ends at this instant.
        """
        activity = Activity(profile, size, self.env.now, on_end)
        if size <= 0 or not profile.usage:
            activity.remaining = 0.0
        component = activity.component
        self._use(activity)
        rate = self._isolated_rates.get(profile.number)
        if rate is None or component.touched or activity.remaining <= 0:
            self._mark_dirty(component)
        else:
            self._run_isolated(component, rate)
        return activity

    def change(self, activity: Activity, profile: Profile) -> None:
        """Continue an activity under another profile from now on."""
        component = activity.component
        component.update_remaining(self.env.now)
        self._release(activity)
        activity.profile = profile
        self._use(activity)
        self._mark_dirty(component)

    def isolated_rate(self, profile: Profile) -> float:
        """The rate of an activity while no other is running."""
        rate = self._isolated_rates.get(profile.number)
        if rate is None:
            number = profile.number
            rate = self._isolated_rates[number] = self._rates_of_profiles((number,))[number]
        return rate

    @property
    def active(self) -> Sequence[Activity]:
        """The running activities that use resources."""
        return list(dict.fromkeys(activity for users in self._users.values() for activity in users))

    def _use(self, activity: Activity) -> None:
        """Note the resources that an activity uses, and the components that it shares them with."""
        users, component = self._users, activity.component
        for resource in activity.profile.resources:
            users_of_resource = users[resource]
            if users_of_resource:
                neighbor = next(reversed(users_of_resource)).component  # and with it those before
                if neighbor is not component and neighbor not in component.touched:
                    component.touched.append(neighbor)
            users_of_resource[activity] = None

    def _release(self, activity: Activity) -> None:
        users = self._users
        for resource in activity.profile.resources:
            del users[resource][activity]

    def _mark_dirty(self, component: _Component) -> None:
        if component.is_dirty:
            return
        component.is_dirty = True
        if not self._dirty:
            self.env.schedule(self._end_of_instant, priority=_END_OF_INSTANT)
        self._dirty.append(component)

    def _run_isolated(self, component: _Component, rate: float) -> None:
        """Set the rate of the only activity, and plan its end. The rates are solved again at the end of the
        instant if another one starts until then.
        """
        component.end_time = _NEVER
        (activity,) = component.activities
        activity.rate = rate
        if activity.remaining <= 0:
            self._schedule_end(component, 0.0, [activity])
        elif rate > 0:
            self._schedule_end(component, activity.remaining / rate, [activity])

    def _solve_dirty(self) -> None:
        """Merge the components that share resources since this instant, and solve those that changed."""
        now, dirty, self._dirty = self.env.now, self._dirty, []
        merged_into: dict[_Component, _Component] = {}
        for component in dirty:
            while component in merged_into:
                component = merged_into[component]
            touched, component.touched = component.touched, []
            for neighbor in touched:
                while neighbor in merged_into:
                    neighbor = merged_into[neighbor]
                if neighbor is component or not neighbor.activities:
                    continue
                component.update_remaining(now)
                neighbor.update_remaining(now)
                larger, smaller = component, neighbor
                if len(component.activities) < len(neighbor.activities):
                    larger, smaller = neighbor, component
                larger.absorb(smaller)
                merged_into[smaller] = component = larger
        for component in dict.fromkeys([*dirty, *merged_into.values()]):
            component.is_dirty = False
            if component.activities:
                component.update_remaining(now)
                self._solve(component)

    def _solve(self, component: _Component) -> None:
        """Set the rates of the running activities of a component, and plan the end of those that end next."""
        component.end_time = _NEVER
        activities = component.activities
        if len(activities) == 1:
            self._run_isolated(component, self.isolated_rate(activities[0].profile))
            return
        numbers = [activity.profile.number for activity in activities]
        rates = self._rates_of_profiles(tuple(sorted(numbers)))
        delays: list[float] = []  # until each ends at these rates
        for activity, number in zip(activities, numbers, strict=True):
            activity.rate = rate = rates[number]
            remaining = activity.remaining
            delays.append(0.0 if remaining <= 0 else remaining / rate if rate > 0 else inf)
        soonest = min(delays)
        if soonest == inf:
            return
        # [Note: progress by construction] the activities that end next by this solution are ended at the
        # planned time, whatever rounding left of them; comparing clocks with a tolerance can stall or skip.
        limit = soonest * (1 + 1e-12)
        ending = [activity for activity, delay in zip(activities, delays, strict=True) if delay <= limit]
        self._schedule_end(component, soonest, ending)

    def _schedule_end(self, component: _Component, delay: float, ending: list[Activity]) -> None:
        """End the activities `ending` in `delay` seconds, unless the rates are solved again before."""
        component.ending = ending
        component.end_time = self.env.now + delay
        self._ends.schedule(delay, component)

    def _rates_of_profiles(self, numbers: tuple[int, ...]) -> dict[int, float]:
        """The rates of concurrent activities of these profiles, by profile."""
        rates = self._rates.get(numbers)
        if rates is None:
            self.num_solutions += 1
            usages = [self._profiles[number].usage for number in numbers]
            rates = dict(zip(numbers, progressive_filling(usages, self.capacity), strict=True))
            self._rates[numbers] = rates
        return rates

    def _end_due(self, components: list[_Component], now: float) -> None:
        """End the activities of components whose end was planned for now. If one of a component started,
        ended or changed meanwhile, the later solution has planned another.
        """
        for component in components:
            if component.end_time != now:
                continue
            ending, component.ending, component.end_time = component.ending, [], _NEVER
            if len(ending) == len(component.activities):
                component.activities = []
            else:
                component.update_remaining(now)
                ended = set(map(id, ending))
                component.activities = [
                    activity for activity in component.activities if id(activity) not in ended
                ]
                self._mark_dirty(component)
            for activity in ending:
                activity.remaining = 0.0
                self._release(activity)
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
