"""The recipes about irregular clusters run as they stand; what they claim, they assert."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "recipes"


@pytest.mark.parametrize("recipe", ["irregular-slow.md"])
def test_the_recipe_runs(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", (FOLDER / recipe).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, recipe, "exec"), names)
    assert capsys.readouterr().out
