"""Draws the pictures of the README and of the pages: `python docs/pictures.py`, or `make pictures`.

Each is a page in headless Chromium, which has to be installed. pictures.json beside this file says what each
shows in words. tests/test_pictures.py holds it against what the pages would show today, so that none is older
than the text.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zsim
from zsim.api import Result
from zsim.report.fit import fit_of
from zsim.report.views.html.report import tiles, write_html_report
from zsim.report.views.text.sentences import headline
from zsim.specs.experiment.tables import Experiment
from zsim.ui.app import address, make_app, make_server, open_socket
from zsim.ui.form import make_form

DOCS = Path(__file__).resolve().parent
MADE = DOCS / "pictures.json"
DRAWN_BY_HAND = frozenset({"how-it-works.svg"})
EXAMPLE = DOCS.parent / "zsim" / "presets" / "experiments" / "llama-3-70b-zero3.toml"
WIDTH, REPORT_HEIGHT, PAGE_HEIGHT = 1280, 1620, 1500  # pixels

Words = dict[str, list[str]]


def words() -> dict[str, Words]:
    """What each picture would show today."""
    experiment = zsim.load_experiment(EXAMPLE)
    return {
        "report.png": _step_words(zsim.simulate(experiment)),
        "ui.png": {
            "fields": [f"{field.label}, {field.unit}" for field in make_form(experiment).fields.values()]
        },
    }


def _step_words(result: Result) -> Words:
    report = result.report
    return {
        "title": [headline(report)],
        "verdict": [fit_of(report).words],
        "tiles": [f"{label}: {number}" for label, number, _ in tiles(report)],
    }


def digest(picture: str) -> str:
    """The picture's bytes in short."""
    return hashlib.sha256((DOCS / picture).read_bytes()).hexdigest()


def draw() -> None:
    """Draw all pictures, and write down what they show. Raises RuntimeError where there is no Chromium."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    browser_path = next(filter(None, map(shutil.which, names)), None)
    if browser_path is None:
        raise RuntimeError("no Chromium here, which draws the pictures; install chromium")
    experiment = zsim.load_experiment(EXAMPLE)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])

        def shoot(picture: str, address: str, height: int, is_ready: Callable[[Any], object]) -> None:
            page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme="light")
            page.set_default_timeout(180_000)
            page.goto(address)
            is_ready(page)
            page.screenshot(path=DOCS / picture)
            page.close()

        result = zsim.simulate(experiment)
        report = write_html_report(result.report, result.trace, Path(folder) / "report.html")
        shoot("report.png", report.as_uri(), REPORT_HEIGHT, _wait_for_report)
        with _served(experiment, Path(folder)) as address:
            shoot("ui.png", address, PAGE_HEIGHT, _wait_for_page)
        browser.close()
    made = {name: {"sha256": digest(name), **shown} for name, shown in words().items()}
    MADE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def _wait_for_report(page: Any) -> None:
    page.wait_for_selector("html[data-drawn]", state="attached")


def _wait_for_page(page: Any) -> None:
    page.wait_for_selector("#plot-memory-gpu .scatterlayer path", state="attached")
    page.wait_for_selector("#shell:not(.busy)", state="attached")
    page.wait_for_timeout(1000)  # its last figures fade in


@contextmanager
def _served(experiment: Experiment, folder: Path) -> Iterator[str]:
    """The address of the page of `zsim ui`."""
    with open_socket("127.0.0.1", 0) as place:
        server = make_server(make_app(experiment, folder), place, "127.0.0.1")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield address("127.0.0.1", place.getsockname()[1])
        server.shutdown()
        thread.join()


if __name__ == "__main__":
    draw()
