"""The recipe about replaying runs as it stands; what it claims, it asserts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import zsim

ROOT = Path(__file__).resolve().parents[2]


def test_the_recipe_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "recipes" / "replay.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for block in blocks:
        exec(compile(block, "replay.md", "exec"), names)
    assert len(blocks) == 3
    recorded = zsim.replay(zsim.read_trace("traces/gloo/zero3-even-2ranks")).recorded_seconds
    assert f"recorded {recorded * 1e3:.1f} ms" in capsys.readouterr().out
