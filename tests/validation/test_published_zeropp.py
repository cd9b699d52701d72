"""ZeRO++'s published runs: which shapes stand in for assumed ones, and whether ZeRO++ helps as measured.

GPT-18B, 49B and 138B on 24 DGX-2 with 100 to 800 Gb/s each, with ZeRO-3 and with all of ZeRO++.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from validation.published.job import RowJob, row_job
from validation.published.predict import measured_seconds, shipped_tables
from validation.published.table import PublishedRun, read_runs
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.plan.make import make_plan
from zsim.study.measured.prediction import predict_step


@cache
def runs() -> dict[str, PublishedRun]:
    table = next(path for path in shipped_tables() if path.name == "training_runs.csv")
    return {run.row_id[-4:]: run for run in read_runs([table]).runs if run.source == "zeropp-blog"}


@cache
def seconds(number: str) -> tuple[float, float]:
    """(measured, predicted)."""
    measured = measured_seconds(runs()[number])
    assert measured is not None
    return measured, with_room(row_job(runs()[number]))


def with_room(row: RowJob) -> float:
    """Seconds without what torch's allocator takes where it runs short, which hangs on a hundredth of the
    memory: of two shapes alike it does in one."""
    step = predict_step(row.job)
    assert step.allocation is not None
    return step.seconds - step.allocation.extra_seconds


def config(row: RowJob) -> DeepSpeedConfig:
    assert isinstance(row.job.strategy, DeepSpeedConfig)
    return row.job.strategy


def test_all_rows_are_predicted() -> None:
    assert len(runs()) == 13
    for number in runs():
        make_plan(row_job(runs()[number]).job)


def test_the_text_says_what_is_on() -> None:
    on, off = (config(row_job(runs()[number])).zero for number in ("0008", "0007"))
    assert (on.zero_hpz_partition_size, on.zero_quantized_weights, on.zero_quantized_gradients) == (
        16,
        True,
        True,
    )
    assert (off.zero_hpz_partition_size, off.zero_quantized_weights, off.zero_quantized_gradients) == (
        1, False, False,
    )  # fmt: skip
    assert config(row_job(runs()["0008"])).gpus_per_node == 16


def test_an_assumed_shape_that_qgz_cannot_divide_is_replaced_by_the_nearest() -> None:
    """8,192 is 21.3 x 384 GPUs and 11,264 is 29.3 x: 62 layers of 8,064 and 92 of 11,136 have as many
    parameters to 1 %. The tutorial's 6,144 is 16 x 384 and stays."""
    for number, layers, width in (("0008", 62, 8064), ("0032", 92, 11136), ("0034", 40, 6144)):
        row = row_job(runs()[number])
        assert (len(row.job.model.blocks), row.job.model.hidden_size) == (layers, width)
        assert any("qgZ cannot divide" in text for text in row.assumptions) is (number != "0034")
    plain, quantised = (row_job(runs()[number]).job.model.numel for number in ("0007", "0008"))
    assert quantised == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize(("plain", "quantised"), [("0023", "0024"), ("0033", "0034"), ("0039", "0040")])
def test_zeropp_is_faster_where_it_was_measured_to_be(plain: str, quantised: str) -> None:
    measured = seconds(plain)[0] / seconds(quantised)[0]
    predicted = seconds(plain)[1] / seconds(quantised)[1]
    assert predicted > 1
    assert predicted == pytest.approx(measured, rel=0.35)


def test_it_helps_most_where_the_network_is_slowest() -> None:
    """Measured: 1.9 at 100 Gb/s per node (49B), 1.35 at 200 (18B), 1.15 at 800 (138B)."""
    for index in (0, 1):
        gains = [seconds(plain)[index] / seconds(quantised)[index] for plain, quantised in (
            ("0023", "0024"), ("0033", "0034"), ("0039", "0040"),
        )]  # fmt: skip
        assert gains == sorted(gains, reverse=True)


def test_the_network_is_not_what_is_missing() -> None:
    """What 100 Gb/s per node take longer than 400, for the same 49B: measured 18.1 s; what one more sequence
    takes at 400 with ZeRO++: 4.9 s. Predicted 18.8 and 4.6; the miss of 7 s at 400 is in neither."""
    slower = [seconds("0023")[index] - seconds("0007")[index] for index in (0, 1)]
    longer = [seconds("0008")[index] - seconds("0006")[index] for index in (0, 1)]
    assert slower[1] == pytest.approx(slower[0], rel=0.15)
    assert longer[1] == pytest.approx(longer[0], rel=0.2)


@pytest.mark.parametrize("number", ["0007", "0023", "0024", "0039"])
def test_the_runs_hid_less_than_deepspeeds_code_would(number: str) -> None:
    """With `overlap_comm` off, which leaves gathers ahead of their modules, a tenth of the miss or more is
    gone. Predictions keep DeepSpeed's default, because no source says that it was off."""
    row = row_job(runs()[number])
    strategy = config(row)
    serial = replace(strategy, zero=strategy.zero.model_copy(update={"overlap_comm": False}))
    measured, predicted = seconds(number)
    alone = with_room(replace(row, job=replace(row.job, strategy=serial)))
    assert predicted < alone < measured
    assert (measured - alone) < 0.9 * (measured - predicted)
