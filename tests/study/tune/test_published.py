"""Published settings: what `zsim tune` finds fits, and is at least as fast by its odds."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from validation.published.tune import SETTINGS, Setting
from zsim.study.tune.search import fastest
from zsim.study.tune.tune import tune

DOCUMENT = Path(__file__).parents[3] / "docs" / "recipes" / "tune.md"
# What stays, so that a handful of configurations is left: those of one plan are many more.
KEEP = (
    "checkpointing", "cross-entropy", "micro-batch", "offload", "no_sync", "hpZ", "wrapping",
    "backward prefetch", "forward prefetch", "limit_all_gathers", "overlap_comm", "bucket", "prefetch",
    "persistence", "reuse", "compile", "precision",
)  # fmt: skip
CHEAP = ("Llama-3.1-8B", "Llama-2-70B", "MPT-7B")


@pytest.mark.parametrize(
    "setting", [s for s in SETTINGS if any(n in s.name for n in CHEAP)], ids=lambda s: s.name
)
def test_a_small_search_is_never_slower_and_always_fits(setting: Setting) -> None:
    tuned = tune(setting.load(), keep=KEEP, count=2)
    assert tuned.given is not None
    assert tuned.best[0].objective_value(fastest) <= tuned.given.objective_value(fastest)
    assert all(measured.row["fits"] for measured in tuned.measured)


def test_the_recipe_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block, DOCUMENT.name, "exec"), {"__name__": "recipe"})
    assert "What to change, in order of gain" in printed.getvalue()
