"""ZeRO++ with parameters in host memory: hpZ's secondary shards are there too.

Llama-3.2-1B as in test_zeropp: 33 norms persist; a pass in which nothing is kept gathers all other weights,
the embedding twice. DeepSpeed 0.19.8 partition_parameters.py: `_partition_param_sec` makes secondary shards
on `self.remote_device`, and gathers take them `.to(get_accelerator().current_device_name())`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.frameworks.deepspeed.zeropp_jobs import HPZ, NOTHING_KEPT, QWZ, calls, plan_of
from zsim.plan.ops import Copy, HostWork, Plan

TOTAL = 1_235_814_400
NORMS = 33 * 2_048
WEIGHTS = TOTAL - NORMS
EMBEDDING = 128_256 * 2_048
PASS = WEIGHTS + EMBEDDING
PINNED, PAGEABLE = ({"device": "cpu", "pin_memory": is_pinned} for is_pinned in (True, False))


def with_host(offload: dict[str, Any] = PINNED, **options: Any) -> Plan:
    return plan_of({**NOTHING_KEPT, **HPZ, "offload_param": offload}, **options)


def copied(plan: Plan, direction: str, beginning: str) -> int:
    works = [op.work for op in plan.ops if op.name.startswith(beginning)]
    return sum(work.bytes for work in works if isinstance(work, Copy) and work.direction == direction)


def test_the_calls_are_those_without_offloading() -> None:
    assert calls(with_host()) == calls(plan_of({**NOTHING_KEPT, **HPZ}))
    assert calls(with_host(steps=3)) == calls(plan_of({**NOTHING_KEPT, **HPZ}, steps=3))


def test_what_is_gathered_comes_over_pcie_from_the_shards_that_it_is_gathered_from() -> None:
    """Forward: a 16th of every weight. Its head and backward: an eighth, from the secondary shards."""
    plan = with_host()
    assert copied(plan, "h2d", "shard of") == 2 * WEIGHTS // 16
    assert copied(plan, "h2d", "secondary shard of") == 2 * (EMBEDDING + PASS) // 8
    assert copied(plan, "h2d", "shards of persistent") == 2 * NORMS // 16


@pytest.mark.parametrize(
    ("offload", "version", "passes"),
    [(PINNED, "0.19.8", 3), (PAGEABLE, "0.19.8", 1), (PINNED, "0.19.4", 2), (PAGEABLE, "0.19.4", 0)],
)
def test_a_secondary_shard_is_made_in_host_memory(offload: dict[str, Any], version: str, passes: int) -> None:
    """`pin_memory` copies what is not written yet (2 bytes moved for 1), `zero_` since 0.19.5 writes it once
    more; then an eighth of everything comes from the GPU, and the host waits for each."""
    plan = with_host(offload, version=version)
    made = [op.work for op in plan.ops if op.name.startswith("make secondary shard")]
    assert sum(work.bytes for work in made if isinstance(work, HostWork)) == passes * 2 * TOTAL // 8
    assert copied(plan, "d2h", "secondary shard of") == 2 * TOTAL // 8
    awaited = {number for op in plan.ops for number in op.host_waits}
    copies = [
        number
        for number, op in enumerate(plan.ops)
        if op.name.startswith("secondary shard of") and isinstance(op.work, Copy)
    ]
    assert awaited.issuperset(copies)


def test_secondary_shards_fill_the_nodes_memory_and_leave_the_gpus() -> None:
    """The 8 GPUs of a node keep a whole model between them, 2 bytes of every element."""
    plan = with_host()
    held: Counter[tuple[str, str]] = Counter()
    most: Counter[tuple[str, str]] = Counter()
    for change in plan.memory:
        key = change.category, change.device
        held[key] += change.bytes
        most[key] = max(most[key], held[key])
    assert most["parameters", "host"] == 2 * TOTAL // 8
    assert most["parameters", "gpu"] == 0
    assert not any(held.values())


def test_before_0_13_2_they_are_there_from_the_beginning() -> None:
    plan = with_host(version="0.13.1")
    parameters = [memory for memory in plan.resident if memory.category == "parameters" and memory.bytes]
    assert [(memory.device, memory.bytes) for memory in parameters] == [
        ("host", 2 * TOTAL // 16),
        ("host", 2 * TOTAL // 8),
    ]
    assert copied(plan, "h2d", "secondary shard of") == 2 * PASS // 8
    assert not copied(plan, "d2h", "secondary shard of")


def test_quantised_gathers_take_them_too() -> None:
    plan = plan_of({**NOTHING_KEPT, **HPZ, **QWZ, "offload_param": PINNED})
    assert calls(plan) == calls(plan_of({**NOTHING_KEPT, **HPZ, **QWZ}))
    assert copied(plan, "h2d", "secondary shard of") == 2 * (EMBEDDING + PASS) // 8
