"""Weighted max-min fair sharing: the pure solver.

An activity a runs at rate x_a and puts w_ar * x_a on resource r. The allocation is max-min fair: no rate can
grow without shrinking one that is not larger. Progressive filling computes it (Bertsekas & Gallager, Data
Networks, 2nd ed., section 6.5.2): raise all rates at once, freeze the activities of each resource that is
full, and go on with the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from zsim.errors import InputError

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
