"""No picture of the README or a page is older than the text: `make pictures` draws them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from docs import pictures

ROOT = Path(__file__).resolve().parents[1]
MADE = json.loads(pictures.MADE.read_text(encoding="utf-8"))
_IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")


def test_the_pictures_show_what_pages_show_today() -> None:
    """Their words were written down when they were drawn: title, verdict, numbers; fields."""
    made = {name: {key: said for key, said in row.items() if key != "sha256"} for name, row in MADE.items()}
    assert made == pictures.words()


def test_the_pictures_are_those_that_were_drawn_then() -> None:
    assert {name: row["sha256"] for name, row in MADE.items()} == {
        name: pictures.digest(name) for name in MADE
    }


def test_the_readmes_numbers_are_the_pictures() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    numbers = dict(tile.split(": ") for tile in MADE["report.png"]["tiles"])
    assert re.search(rf"(?m)^step +{re.escape(numbers['Step time'])} ", readme)
    for label in ("MFU", "HFU"):
        assert re.search(rf"{label} +{re.escape(numbers[label])}$", readme, re.MULTILINE)


def test_every_picture_of_a_page_is_drawn_by_the_command() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {Path(image).name for page in pages for image in _IMAGE.findall(page.read_text(encoding="utf-8"))}
    assert shown - pictures.DRAWN_BY_HAND == set(MADE)
