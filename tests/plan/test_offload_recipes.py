"""The recipes about offloading run as they stand; what they claim, they assert."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

RECIPES = sorted((Path(__file__).resolve().parents[2] / "docs" / "recipes").glob("offload-*.md"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipe_runs(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", recipe.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, recipe.name, "exec"), names)
    assert capsys.readouterr().out


def test_there_are_the_three_recipes() -> None:
    assert [path.stem for path in RECIPES] == ["offload-drives", "offload-pipeline", "offload-slow"]
