"""Pages as a reader meets them: their text and what they would fetch, and alive in headless Chromium."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--window-size=1280,2000",
    "--virtual-time-budget=30000",
]  # fmt: skip


def in_browser(test):
    """Marks a test that opens a page; it is skipped where there is no Chromium."""
    return pytest.mark.browser(pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")(test))


class Page(HTMLParser):
    """Collects what the page would fetch, its text and its figures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.figures: dict[str, str] = {}
        self._element: tuple[str, dict[str, str | None]] = ("", {})
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self._element = (tag, dict(attributes))
        values = dict(attributes)
        self.fetched += [str(values[key]) for key in ("src", "data", "poster", "srcset") if key in values]
        if "href" in values:
            (self.links if tag == "a" else self.fetched).append(str(values["href"]))

    def handle_endtag(self, tag):
        self._element = ("", {})

    def handle_data(self, data):
        tag, attributes = self._element
        if tag == "script" and "data-plot" in attributes:
            self.figures[str(attributes["data-plot"])] = data
        elif tag not in ("script", "style"):
            self.words.append(data)


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
    page = Page(text)
    assert page.fetched == []
    assert list(page.figures) == [f"plot-{name}" for name in plots]
    for name, figure in page.figures.items():
        traces = json.loads(figure)["data"]
        assert any(_has_values(trace) for trace in traces), f"{name} has no data"
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    dom, console = browse(path, folder / "profile")
    assert console == []
    assert f'data-drawn="{len(plots)}"' in dom
    assert dom.count('class="plot js-plotly-plot"') == len(plots)
    return dom


def _has_values(trace) -> bool:
    return any(trace.get(axis) for axis in ("x", "y", "z", "base"))
