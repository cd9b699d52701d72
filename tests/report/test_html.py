"""The HTML page: complete, self-contained, deterministic; and alive in a browser where there is one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.browser import Page, browse, in_browser, text_of
from tests.expect import there
from zsim.report.report import Report
from zsim.report.views.html.report import html_report, write_html_report
from zsim.trace.trace import Trace
from zsim.validated.features import Features
from zsim.validated.validation import Validation

PLOTS = ["step", "timeline", "waterfall-gpu", "memory-gpu", "collectives", "links"]


@pytest.fixture
def page(make_step_report: Callable[..., Report], make_sharded_step: Callable[..., Trace]) -> Page:
    report = make_step_report(notes=["a note with <b>markup</b> & more"])
    return Page(html_report(report, make_sharded_step()))


def test_the_page_fetches_nothing(page: Page) -> None:
    assert page.fetched == []


def test_every_figure_is_on_the_page_as_json(page: Page) -> None:
    assert list(page.figures) == [f"plot-{name}" for name in PLOTS]
    for figure in page.figures.values():
        assert set(json.loads(figure)) >= {"data", "layout"}


def test_the_headline_the_verdict_and_the_limit_come_first(page: Page) -> None:
    text = text_of(page)
    verdict = "Fits 17.75 GB of 80.00 GB (22.2 %) in use on the fullest GPU. Probability that it fits 99 %."
    assert f"llama-3-70b | FSDP2 | 2 x dgx-h100 | 16 GPUs {verdict} Compute-bound: 80 % compute;" in text


def test_how_far_to_trust_the_step_stands_below_the_limit(
    make_step_report: Callable[..., Report], make_sharded_step: Callable[..., Trace]
) -> None:
    features = Features("DDP", "DDP", "x", 1, 8, "", "kernels", 10**9)
    judged = Validation(0.9, 1.3, "no similar validated run", 0, 0, None, None, ("GPU x",), features)
    report = replace(make_step_report(), step_seconds=10.0, validation=judged)
    text = text_of(Page(html_report(report, make_sharded_step())))
    assert "Step 9.00 to 13.0 s (80 %), from dissimilar runs. Extrapolates: GPU x." in text


def test_the_experiment_is_shown_with_sources_links_and_grades(page: Page) -> None:
    text = text_of(page)
    assert "sequence length 8,192" in text
    assert "node link data sheet bandwidth 450.00 GB/s" in text
    assert "https://example.org/sheet.pdf" in page.links


def test_what_users_wrote_is_escaped(
    page: Page, make_step_report: Callable[..., Report], make_sharded_step: Callable[..., Trace]
) -> None:
    assert "a note with <b>markup</b> & more" in text_of(page)
    report = make_step_report(labels={"model": "<i>mine</i>"})
    assert "<i>mine</i> | fsdp2 | 16 GPUs" in text_of(Page(html_report(report, make_sharded_step())))


def test_a_name_cannot_end_the_script_that_holds_a_figure(
    make_step_report: Callable[..., Report], make_trace: Callable[..., Trace]
) -> None:
    trace = make_trace([{"start": 0, "end": 1, "name": "</script><script>alert(1)</script>"}])
    page = Page(html_report(make_step_report(trace), trace))
    (bar,) = json.loads(page.figures["plot-timeline"])["data"]
    assert "</script><script>alert(1)" in bar["hovertext"][0]


def test_a_job_that_does_not_fit_says_so_on_top(
    make_step_report: Callable[..., Report], make_sharded_step: Callable[..., Trace]
) -> None:
    report = make_step_report(capacity_bytes={"gpu": 12 * 10**9})
    report = replace(report, out_of_memory=replace(there(report.out_of_memory), least_gpus=64))
    text = text_of(Page(html_report(report, make_sharded_step())))
    assert "the first op without room is 'blocks.2 forward', issued at 7.10 ms, which lacks" in text
    assert "64 GPUs would hold all tensors. The times below assume that it fits." in text


def test_a_single_gpu_without_memory_events_has_a_page_too(
    make_step_report: Callable[..., Report], make_trace: Callable[..., Trace]
) -> None:
    trace = make_trace([{"start": 0, "end": 1}], world_size=1)
    text = text_of(Page(html_report(make_step_report(trace, traffic=[]), trace)))
    assert "Nothing is sent: one GPU." in text
    assert "The trace holds no memory events." in text


def test_the_same_report_gives_the_same_bytes(
    make_step_report: Callable[..., Report], make_sharded_step: Callable[..., Trace], tmp_path: Path
) -> None:
    first, second = (
        write_html_report(make_step_report(), make_sharded_step(), tmp_path / name)
        for name in ("a.html", "b.html")
    )
    assert first.read_bytes() == second.read_bytes()


@in_browser
@pytest.mark.parametrize(
    ("flags", "ink"),
    [
        ([], "rgb(28, 36, 48)"),
        (["--force-dark-mode", "--enable-features=WebUIDarkMode"], "rgb(231, 235, 240)"),
    ],
)
def test_a_browser_draws_every_figure_without_a_word_or_a_request(
    make_step_report: Callable[..., Report],
    make_sharded_step: Callable[..., Trace],
    tmp_path: Path,
    flags: list[str],
    ink: str,
) -> None:
    """The page's content policy reports every request it stops to the console, which stays empty. The
    timeline of 4 blocks has 8 kernels, 8 gathers, 4 reduce-scatters, the optimizer and 3 waits: the first
    gather after the host, and the last reduce-scatter. plotly.js's own upload button is out."""
    path = write_html_report(make_step_report(), make_sharded_step(), tmp_path / "report.html")
    dom, console = browse(path, tmp_path / "profile", *flags)
    assert console == []
    assert f'data-drawn="{len(PLOTS)}"' in dom
    start = dom.index('id="plot-timeline"')
    timeline = dom[start : dom.index("<figcaption", start)]
    assert timeline.count('<g class="point">') == 24
    assert f"fill: {ink}" in timeline
    assert ">reduce_scatter</text>" in timeline
    buttons = set(re.findall(r'data-title="([^"]+)"', dom))
    assert buttons == {"Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"}
