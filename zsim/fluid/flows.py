"""`simulate_flows`: flows over links that share bandwidth, in the fluid pool that the engine uses too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import simpy

from zsim.errors import InputError, StuckError, did_you_mean
from zsim.fluid.pool import FluidPool

_KEYS = ("route", "size_bytes", "start_seconds", "latency_seconds")


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
        if key not in _KEYS:
            raise InputError(f"flow {number}: unknown key '{key}'{did_you_mean(key, _KEYS)}")
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
