"""`zsim tune` from the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.browser import browse, in_browser
from zsim.cli import app
from zsim.errors import InputError

SMALL = ("--model", "gpt2", "--cluster", "dgx-a100-40gb", "--gpus", "8", "-j", "1", "--top", "2")
KEEP = ("--keep", "offload", "--keep", "checkpointing", "--keep", "micro-batch", "--keep", "bucket")
LENGTH = ("--set", "training.sequence_length=512")


def zsim(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    if isinstance(done.exception, Exception):
        raise done.exception
    return done.output


@pytest.fixture
def ds_config(tmp_path: Path) -> str:
    path = tmp_path / "ds_config.json"
    zero = {"stage": 3, "overlap_comm": False, "stage3_param_persistence_threshold": 0}
    config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 4, "zero_optimization": zero}
    path.write_text(json.dumps(config))
    return str(path)


def test_a_users_json_is_told_what_to_change(ds_config: str, tmp_path: Path) -> None:
    """The first change is to leave stage 3: a small model gathers for nothing."""
    out = tmp_path / "out"
    text = zsim(
        "tune", ds_config, *SMALL, *LENGTH, *KEEP, "--out", str(out), "--json", str(tmp_path / "t.json")
    )
    assert "What to change, in order of gain, each simulated:" in text
    assert re.search(r"zero_optimization.stage: 3 -> [012]", text)
    content = json.loads((tmp_path / "t.json").read_text())
    gains = [step["gain_fraction"] for step in content["steps"]]
    assert gains
    assert min(gains) > 0
    written = json.loads((out / "best" / "ds_config.json").read_text())
    assert written["train_micro_batch_size_per_gpu"] == 4
    assert written["zero_optimization"]["stage"] < 3
    assert (out / "tune.html").stat().st_size > 10**6


def test_other_parallelisms_are_refused() -> None:
    with pytest.raises(InputError, match="--kind tp: is no strategy; --parallelism searches the degrees"):
        zsim("tune", *SMALL, "--kind", "deepspeed", "--kind", "tp")


def test_json_alone_is_printed_with_a_dash(ds_config: str) -> None:
    content = json.loads(zsim("tune", ds_config, *SMALL, *LENGTH, *KEEP, "--keep", "stage", "--json", "-"))
    assert content["goal"] == "fastest"
    assert content["best"][0]["fits"]


@in_browser
def test_a_browser_draws_the_page_without_a_word_or_a_request(ds_config: str, tmp_path: Path) -> None:
    zsim("tune", ds_config, *SMALL, *LENGTH, *KEEP, "--out", str(tmp_path / "out"))
    dom, console = browse(tmp_path / "out" / "tune.html", tmp_path / "profile")
    assert console == []
    assert 'data-drawn="2"' in dom
    assert "not beaten in both" in dom
