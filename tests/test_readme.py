"""The README is short, and what it and the start page say is what today's code says; `test_documentation.py`
runs their commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.pages import blocks
from validation.published.coverage import leave_one_source_out
from validation.published.regimes import accuracy_lines
from zsim.study.measured.error_summary import table_lines
from zsim.validated.runs import shipped_estimates, validated_runs

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
EXAMPLE = ROOT / "zsim" / "presets" / "experiments" / "llama-3-70b-zero3.toml"


def test_it_is_short_and_says_early_how_to_install() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 120
    assert any(line.startswith("pip install") for line in lines[:40])


def test_its_accuracy_is_that_of_the_validated_runs() -> None:
    """After a change of predictions: python validation/published/accuracy.py; `--update` leaves these lines
    alone."""
    shown = re.search(
        r"<!-- published runs.*?-->\n(.*?)<!-- end of published runs -->",
        README.read_text("utf-8"),
        re.DOTALL,
    )
    assert shown is not None
    assert shown[1].splitlines() == accuracy_lines(
        leave_one_source_out(validated_runs(), shipped_estimates()["open"])
    )


def test_the_page_of_errors_has_the_sources_that_the_check_holds() -> None:
    """The table is drawn from the pins of the published runs, which `make check-accuracy` holds."""
    content = json.loads((ROOT / "validation" / "baseline.json").read_text())
    pins = content["cases"]["validation/published/training_runs.csv"]
    page = (ROOT / "validation" / "published" / "errors.md").read_text(encoding="utf-8")
    shown = re.search(r"## By source\n\n(.*?)\n\n", page, re.DOTALL)
    assert shown is not None
    assert shown[1].splitlines() == table_lines(pins["sources"], pins["all"])


def test_the_experiment_file_at_the_start_is_the_one_that_ships() -> None:
    start = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    files = {block.title: block.text for block in blocks(start) if block.title}
    directive, _, shipped = EXAMPLE.read_text().partition("\n")  # where its schema lies in this repository
    assert directive.startswith("#:schema ")
    assert files["my.toml"] == shipped
