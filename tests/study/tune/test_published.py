"""Published settings: what `zsim tune` found fits, is at least as fast, and is what the recipe shows."""

from __future__ import annotations

import contextlib
import io
import json
import re

import pytest

from validation.published.tune import DOCUMENT, RESULTS, SETTINGS, TABLE, Setting, table_lines
from zsim.api import simulate
from zsim.study.tune.settings import base_of
from zsim.study.tune.tune import tune

RECORDED = json.loads(RESULTS.read_text())
# What stays, so that a handful of configurations is left: those of one plan are many more.
KEEP = (
    "checkpointing", "cross-entropy", "micro-batch", "offload", "no_sync", "hpZ", "wrapping",
    "backward prefetch", "forward prefetch", "limit_all_gathers", "overlap_comm", "bucket", "prefetch",
    "persistence", "reuse", "compile", "precision",
)  # fmt: skip
CHEAP = ("Llama-3.1-8B", "Llama-2-70B", "MPT-7B")


def test_all_six_settings_are_recorded() -> None:
    assert list(RECORDED) == [setting.name for setting in SETTINGS]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_what_was_found_in_the_whole_space_fits_and_is_at_least_as_fast(setting: Setting) -> None:
    """The recorded search, simulated anew: `python -m validation.published.tune` makes it again."""
    recorded = RECORDED[setting.name]
    given = simulate(setting.load()).report
    found = simulate(base_of(setting.load()).experiment(recorded["overrides"])).report
    assert given.fits
    assert found.fits
    assert found.step_seconds <= given.step_seconds
    assert given.step_seconds == pytest.approx(recorded["given"]["seconds"], rel=0.01)
    assert found.step_seconds == pytest.approx(recorded["found"]["seconds"], rel=0.01)


@pytest.mark.parametrize(
    "setting", [s for s in SETTINGS if any(n in s.name for n in CHEAP)], ids=lambda s: s.name
)
def test_a_small_search_is_never_slower_and_always_fits(setting: Setting) -> None:
    tuned = tune(setting.load(), keep=KEEP, count=2)
    assert tuned.given is not None
    assert tuned.best[0].seconds <= tuned.given.seconds
    assert all(measured.row["fits"] for measured in tuned.measured)


def test_the_recipe_shows_what_is_recorded() -> None:
    shown = TABLE.search(DOCUMENT.read_text(encoding="utf-8"))
    assert shown is not None
    assert shown[0] == shown[1] + "\n".join(table_lines(RECORDED))


def test_the_recipe_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block, DOCUMENT.name, "exec"), {"__name__": "recipe"})
    assert "What to change, in order of gain" in printed.getvalue()
