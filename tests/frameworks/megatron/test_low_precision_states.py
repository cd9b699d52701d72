"""The precision-aware optimizer: bytes of its states, traffic of its update."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zsim.frameworks.megatron.optimizer_step import state_sizes, update_low_precision
from zsim.frameworks.megatron.settings.precision_aware import PrecisionAware
from zsim.plan.builder import PlanBuilder
from zsim.plan.ops import Kernels

REMAINDERS = PrecisionAware("fp32", "fp32", "fp32", has_masters=True, keeps_remainders=True)
WHOLE = replace(REMAINDERS, keeps_remainders=False)
BF16 = replace(REMAINDERS, exp_avg="bf16", exp_avg_sq="bf16")
SMALL = PrecisionAware("fp16", "bf16", "fp8", has_masters=True, keeps_remainders=False)
ELEMENTS = 1000


def traffic(states: PrecisionAware, gradient: str = "fp32") -> list[tuple[str, float]]:
    """Bytes per element of each op."""
    builder = PlanBuilder([])
    update_low_precision(builder, states, "bf16", gradient, [ELEMENTS])
    works = [(op.name, op.work) for op in builder.ops]
    return [
        (
            name.removeprefix("optimizer step").removeprefix(": "),
            sum(one.hbm_bytes for one in work.kernels) / ELEMENTS,
        )
        for name, work in works
        if isinstance(work, Kernels)
    ]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (REMAINDERS, (8000, 8000, 4000)),  # moments in fp32, 16 bits of the master
        (WHOLE, (8000, 8000, 8000)),
        (BF16, (4000, 4000, 4000)),
        (SMALL, (4000, 2000, 4000)),
        (replace(WHOLE, has_masters=False), (8000, 8000)),
    ],
)
def test_a_state_has_the_bytes_of_its_type(states: PrecisionAware, expected: tuple[int, ...]) -> None:
    """Of a tensor of 2000 elements; an empty one has none."""
    assert state_sizes(states, [2000, 0]) == expected


@pytest.mark.parametrize(
    ("states", "gradient", "bytes_each"),
    [
        (REMAINDERS, "fp32", 28.0),  # 4 + 2 x 8 of the moments + 2 x 2 of the remainder + 2 x 2 of the weight
        (REMAINDERS, "bf16", 26.0),
        (WHOLE, "fp32", 30.0),  # 4 + 16 + 8 of the master + 2 of the weight
        (BF16, "fp32", 20.0),  # 4 + 2 x 4 + 4 + 4: the update reads and writes bf16
        (replace(WHOLE, has_masters=False), "fp32", 28.0),  # Megatron casts the weight behind it
    ],
)
def test_one_pass_moves_what_it_reads_and_writes(
    states: PrecisionAware, gradient: str, bytes_each: float
) -> None:
    assert traffic(states, gradient) == [("", bytes_each)]


def test_other_states_are_cast_around_it() -> None:
    """bf16 with a moment in fp8 is not fused: 2 + 4 up, 4 + 2 and 2 + 2 down; fp8 1 + 4 up, 4 for the
    extremes and 4 + 1 down; an fp16 master 2 + 4 up and 8 for its scale, 4, 8 and 4 + 2 down. The update
    itself is in fp32: 2 + 16 + 8 + 2."""
    assert traffic(SMALL, "bf16") == [
        ("load bf16 states", 6.0), ("load fp8 states", 5.0), ("load fp16 states", 14.0),
        ("", 28.0),
        ("store bf16 states", 10.0), ("store fp8 states", 9.0), ("store fp16 states", 18.0),
    ]  # fmt: skip


def test_casts_live_until_the_end() -> None:
    """Three states of 1000 elements in fp32."""
    builder = PlanBuilder([])
    update_low_precision(builder, SMALL, "bf16", "bf16", [ELEMENTS])
    assert [change.bytes for change in builder.memory] == [12_000, -12_000]
    assert builder.memory[1].op == len(builder.ops)
