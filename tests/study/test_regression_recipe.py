"""The recipe about regressions runs as it stands, and prints what it shows."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "docs" / "recipes" / "regression-check.md"
BLOCKS = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```)?", re.DOTALL)


def printed(code: str, names: dict[str, Any]) -> str:
    """What a block prints, at the width of the page."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        exec(compile(code, RECIPE.name, "exec"), names)
    lines = [
        "\n".join(textwrap.wrap(line, 110, subsequent_indent="    ", break_on_hyphens=False))
        for line in text.getvalue().splitlines()
    ]
    return "".join(f"{line}\n" for line in lines)


def test_the_recipe_prints_what_it_shows(request: pytest.FixtureRequest) -> None:
    """`--update` writes today's output into the page."""
    names: dict[str, Any] = {}
    page = RECIPE.read_text(encoding="utf-8")
    blocks = list(BLOCKS.finditer(page))
    assert len(blocks) == 6
    for block in reversed([(block, printed(block["code"], names)) for block in blocks]):
        match, output = block
        if match["output"] is None:
            assert output == ""
        elif request.config.getoption("--update"):
            start, end = match.span("output")
            page = page[:start] + output + page[end:]
        else:
            assert match["output"] == output
    if request.config.getoption("--update"):
        RECIPE.write_text(page, encoding="utf-8")


def test_every_planted_fault_is_named_on_the_page() -> None:
    page = RECIPE.read_text(encoding="utf-8")
    for words in (
        "\ndropped: all-gather",
        "\nchanged: call 21",
        "\norder: all-gather",
        "every call 1.10 times",
    ):
        assert words in page
    assert "holds back" in page
    assert "\ninconclusive\n" in page
