"""What the page shows of offloading."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zsim
from tests.browser import as_plotly
from zsim.report.offload import CAUSES
from zsim.report.views.html.figures import drive_timeline
from zsim.report.views.html.report import html_report
from zsim.report.views.tables import moved_table, offload_table
from zsim.trace.drives import drive_rates

NVME = {"device": "nvme", "nvme_path": "/nvme"}


@pytest.fixture(scope="module")
def result() -> Any:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "offload_optimizer": NVME}}
    return zsim.simulate(
        zsim.Experiment(
            model="gpt2", cluster="dgx-h100", gpus=4,
            training={"sequence_length": 256, "micro_batch_size": 1}, strategy={"config": config},
        )
    )  # fmt: skip


def test_every_cause_of_a_stall_has_a_row_and_they_add_up(result: Any) -> None:
    section = result.report.offload
    waited = [f"stall: {cause}" for cause in CAUSES if section.stall_seconds.get(cause)]
    tiers = [tier.tier for tier in section.tiers]
    assert [row[0] for row in offload_table(result.report, section).rows] == [*waited, *tiers]
    stall = result.report.breakdown.seconds["offload_stall"]
    assert sum(section.stall_seconds.values()) == pytest.approx(stall)
    assert section.stall_seconds["drive read"] > 0
    assert section.stall_seconds["drive write"] > 0


def test_bytes_are_those_of_the_report(result: Any) -> None:
    work = {row[0] for row in moved_table(result.report.offload).rows}
    assert {"GPU to host", "CPU work on memory", "read from NVMe", "written to NVMe"} <= work
    assert "page-locked on each node" in work


def test_what_the_drives_did_adds_up_to_what_was_moved(result: Any) -> None:
    """The area under the node's rates is four ranks' bytes."""
    rates = drive_rates(result.trace, 0)
    assert rates is not None
    lasting = np.diff(rates.seconds)
    for direction in ("read", "write"):
        area = float((getattr(rates, direction)[:-1] * lasting).sum())
        assert area == pytest.approx(4 * result.report.offload.moved_bytes[f"nvme_{direction}"], rel=1e-6)
    figure = as_plotly(drive_timeline(rates, result.report))
    assert [line.name for line in figure.data] == ["NVMe read", "NVMe write"]


def test_the_page_has_a_section_only_where_something_is_offloaded(result: Any) -> None:
    page = html_report(result.report, result.trace)
    assert '<section class="card" id="offload">' in page
    assert 'data-plot="plot-drives"' in page
    plain = zsim.simulate(zsim.Experiment(model="gpt2", cluster="dgx-h100", gpus=4))
    assert 'id="offload"' not in html_report(plain.report, plain.trace)
