"""Model states under ZeRO, against the paper's table and DeepSpeed's estimators."""

from __future__ import annotations

from math import floor

import pytest

from tests.oracles.model_states import (
    deepspeed_zero2_estimate,
    deepspeed_zero3_estimate,
    model_state_bytes,
)

SIZES = (1, 4, 16, 64, 256, 1024)
# Rajbhandari et al. 2020, Table 1: GB per GPU by data-parallel size; (parameters, stage): (decimals, values).
TABLE_1 = {
    (7_500_000_000, 1): (120, 52.5, 35.6, 31.4, 30.4, 30.1),
    (7_500_000_000, 2): (120, 41.3, 21.6, 16.6, 15.4, 15.1),
    (7_500_000_000, 3): (120, 30.0, 7.5, 1.88, 0.47, 0.12),
    (128_000_000_000, 1): (2048, 896, 608, 536, 518, 513),
    (128_000_000_000, 2): (2048, 704, 368, 284, 263, 257),
    (128_000_000_000, 3): (2048, 512, 128, 32, 8, 2),
    (1_000_000_000_000, 1): (16000, 7000, 4750, 4187, 4046, 4011),
    (1_000_000_000_000, 2): (16000, 5500, 2875, 2218, 2054, 2013),
    (1_000_000_000_000, 3): (16000, 4000, 1000, 250, 62.5, 15.6),
}
ROWS = [
    (numel, stage, size, value)
    for (numel, stage), values in TABLE_1.items()
    for size, value in zip(SIZES, values, strict=True)
]


def printed(value: float) -> set[str]:
    """The ways a table may shorten a number to the digits of each precision: rounded half up, or cut."""
    ways = set()
    for decimals in (0, 1, 2):
        scale = 10**decimals
        ways |= {f"{floor(value * scale + 0.5) / scale:g}", f"{floor(value * scale) / scale:g}"}
    return ways


@pytest.mark.parametrize(("numel", "stage", "size", "gigabytes"), ROWS)
def test_the_zero_papers_table_comes_out(numel: int, stage: int, size: int, gigabytes: float) -> None:
    """The paper rounds its 7.5B column and cuts the others (513.5 is printed 513)."""
    value = model_state_bytes(numel, stage, size).total / 1e9
    assert f"{gigabytes:g}" in printed(value)
    assert value == pytest.approx(gigabytes, rel=0.03)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_zero_papers_first_figure_comes_out(stage: int, gigabytes: float) -> None:
    """7.5B parameters on 64 GPUs: 120, 30 + 90/64, 15 + 105/64, 120/64 GB."""
    value = model_state_bytes(7_500_000_000, stage, 64).total / 1e9
    assert round(value, 1) == gigabytes


def test_each_stage_shards_one_state_more() -> None:
    """100 parameters on 4 ranks: (200, 200, 1200), then optimizer 300, gradients 50, parameters 50."""
    states = [model_state_bytes(100, stage, 4) for stage in range(4)]
    assert [(s.parameters, s.gradients, s.optimizer_states) for s in states] == [
        (200, 200, 1200),
        (200, 200, 300),
        (200, 50, 300),
        (50, 50, 300),
    ]


def test_padded_shards_are_whole_elements() -> None:
    """10 parameters on 4 ranks: 3 each where memory is concerned, 2.5 in the paper."""
    assert model_state_bytes(10, 3, 4).total == 16 * 2.5
    assert model_state_bytes(10, 3, 4, is_padded=True).total == 16 * 3


def test_other_types_take_other_bytes() -> None:
    """Everything in fp32 with Adam: 4 + 4 + 8."""
    states = model_state_bytes(10, 0, 1, parameter_bytes=4, gradient_bytes=4, optimizer_bytes=8)
    assert states.total == 160


def test_deepspeeds_zero2_estimates_come_out() -> None:
    """P = 1000 on 2 nodes of 4: 2P + 18P/8 = 4250 and 4P * 4 * 1.5 = 24000; offloaded 2P and
    P * max(4 * 8, 16) * 1.5 = 48000."""
    plain = deepspeed_zero2_estimate(1000, 4, 2, offloads_optimizer=False)
    offloaded = deepspeed_zero2_estimate(1000, 4, 2, offloads_optimizer=True)
    assert (plain.gpu_bytes, plain.cpu_bytes) == (4250, 24000)
    assert (offloaded.gpu_bytes, offloaded.cpu_bytes) == (2000, 48000)


@pytest.mark.parametrize(
    ("optimizer", "parameters", "zero_init", "gpu_bytes", "cpu_bytes"),
    [
        # P = 1000, L = 100, 2 nodes of 4
        (False, False, True, 400 + 2250, 2400),  # 100 * 4 * 4 * 1.5
        (False, False, False, 400 + 2250, 24000),  # 1000 * 4 * 4 * 1.5
        (True, False, True, 400 + 250, 12000),  # 1000 * 16 / 2 * 1.5
        (True, False, False, 400 + 250, 24000),  # max(16, 8) per parameter
        (True, True, True, 400, 13500),  # 1000 * 18 / 2 * 1.5
        (True, True, False, 400, 24000),
    ],
)
def test_deepspeeds_zero3_estimates_come_out(
    optimizer: bool, parameters: bool, zero_init: bool, gpu_bytes: int, cpu_bytes: int
) -> None:
    """Every branch of `estimate_zero3_model_states_mem_needs`."""
    estimate = deepspeed_zero3_estimate(
        1000,
        100,
        4,
        2,
        offloads_optimizer=optimizer,
        offloads_parameters=parameters,
        uses_zero_init=zero_init,
    )
    assert (estimate.gpu_bytes, estimate.cpu_bytes) == (gpu_bytes, cpu_bytes)
