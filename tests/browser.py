"""Pages as a reader meets them: their text and what they would fetch, and alive in headless Chromium."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import plotly.graph_objects as go
import pytest

from zsim.report.views.html.figure import Figure

if TYPE_CHECKING:
    from playwright.sync_api import Browser

P = ParamSpec("P")
PHONE_WIDTH = 390  # pixels
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--window-size=1280,2000",
    "--virtual-time-budget=30000",
]  # fmt: skip

_MARKS = """() => Object.fromEntries([...document.querySelectorAll(".js-plotly-plot")].map(
    (plot) => [plot.id, plot.querySelectorAll(".plot path, .plot image, .annotation").length]))"""
_TOO_WIDE = """() => [...document.querySelectorAll("html, .card, .table")]
    .filter((box) => box.scrollWidth > box.clientWidth).map((box) => box.className || box.tagName)"""


def in_browser(test: Callable[P, None]) -> Callable[P, None]:
    """Marks a test that opens a page; it is skipped where there is no Chromium."""
    return pytest.mark.browser(pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")(test))


class Page(HTMLParser):
    """Collects what the page would fetch, its text and its figures, each checked by plotly."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.figures: dict[str, str] = {}
        self._element: tuple[str, dict[str, str | None]] = ("", {})
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._element = (tag, dict(attributes))
        values = dict(attributes)
        self.fetched += [str(values[key]) for key in ("src", "data", "poster", "srcset") if key in values]
        if "href" in values:
            (self.links if tag == "a" else self.fetched).append(str(values["href"]))

    def handle_endtag(self, tag: str) -> None:
        self._element = ("", {})

    def handle_data(self, data: str) -> None:
        tag, attributes = self._element
        if tag == "script" and "data-plot" in attributes:
            self.figures[str(attributes["data-plot"])] = data
            go.Figure(json.loads(data))
        elif tag not in ("script", "style"):
            self.words.append(data)


def as_plotly(figure: Figure) -> go.Figure:
    """The figure as plotly's own, which refuses attributes and values that plotly.js does not know."""
    return go.Figure({"data": figure.data, "layout": figure.layout})


def text_of(page: Page) -> str:
    return " ".join(" ".join(page.words).split())


def browse(path: Path, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """The page's DOM after its scripts ran, and what it wrote to the console."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def check_page(text: str, plots: Sequence[str], folder: Path) -> str:
    """Opens a page, which must fetch nothing, say nothing to the console and draw all `plots`, each with
    data; returns its DOM. Requests that the page's content policy stops are reported to the console."""
    check_text(text, plots)
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    dom, console = browse(path, folder / "profile")
    assert console == []
    assert f'data-drawn="{len(plots)}"' in dom
    assert dom.count('class="plot js-plotly-plot"') == len(plots)
    return dom


def check_text(text: str, plots: Sequence[str]) -> None:
    """A page, read: it would fetch nothing, and has all `plots`, each with data."""
    page = Page(text)
    assert page.fetched == []
    assert list(page.figures) == [f"plot-{name}" for name in plots]
    for name, figure in page.figures.items():
        traces = json.loads(figure)["data"]
        assert any(_has_values(trace) for trace in traces), f"{name} has no data"


@contextmanager
def chromium() -> Iterator[Browser]:
    """One browser for many pages."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def check_file(browser: Browser, path: Path, plots: Sequence[str]) -> None:
    """As `check_page`, for a file in a browser that runs; every plot must have drawn marks, nothing may stick
    out of its card, and on a phone in the dark nothing may be wider than the screen."""
    check_text(path.read_text(encoding="utf-8"), plots)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    try:
        said, asked = listen(page)
        page.goto(path.as_uri())
        page.wait_for_selector(f'html[data-drawn="{len(plots)}"]', state="attached")
        marks = page.evaluate(_MARKS)
        assert list(marks) == [f"plot-{name}" for name in plots]
        assert all(marks.values()), marks
        assert page.evaluate(_TOO_WIDE) == []
        page.emulate_media(color_scheme="dark")
        page.set_viewport_size({"width": PHONE_WIDTH, "height": 844})
        assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE_WIDTH
        assert said == []
        assert [url for url in asked if url != path.as_uri() and not url.startswith(("data:", "blob:"))] == []
    finally:
        page.close()


def listen(page: Any) -> tuple[list[str], list[str]]:
    """What the page will say to the console, and the addresses that it will ask for."""
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    return said, asked


def _has_values(trace: dict[str, Any]) -> bool:
    return any(trace.get(axis) for axis in ("x", "y", "z", "base"))
