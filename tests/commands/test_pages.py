"""Every page that a command writes, as the command writes it, alive in headless Chromium: it draws all its
figures, says nothing to the console and asks nobody for anything. The page of `zsim ui` is in tests/ui."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from typer.testing import CliRunner

from tests.browser import check_file, chromium, in_browser
from zsim.cli import app

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[2]
SMALL = ["--model", "gpt2", "--set", "model.n_layer=2", "--set", "training.sequence_length=128"]
FSDP2 = ["--set", "strategy.kind=fsdp2"]


class Written(NamedTuple):
    """How a command writes its page: its arguments, the page's file and the figures on it."""

    arguments: list[str]
    file: str
    plots: list[str]


# By the function that writes the page, as `pages_of` finds it: `module:function`.
PAGES = {
    "commands.run:_write_all": Written(
        ["run", *SMALL, *FSDP2, "--nodes", "2", "--out", "."], "report.html",
        ["step", "timeline", "waterfall-gpu", "memory-gpu", "collectives", "links", "errors"],
    ),
    "commands.run:_write_rl": Written(
        ["run", "rl.toml", "--out", "."], "report.html", ["phases", "timeline", "running", "cache"],
    ),
    "commands.recorded:calibrate": Written(
        ["calibrate", str(ROOT / "traces" / "cpu-2core-epyc" / "microbench.json"), "--base", "cpu-gloo",
         "--page", "page.html"], "page.html", [f"fit{number}" for number in (2, 3, 4, 5, 10, 11, 12)],
    ),
    "commands.recorded:compare": Written(
        ["compare", "one.toml", "other.toml", "--out", "page.html"], "page.html",
        ["timeline", "ops", "memory"],
    ),
    "commands.run:goodput": Written(
        ["goodput", "run.toml", "--seeds", "5", "-j", "1", "--out", "."], "goodput.html",
        ["waterfall", "progress", "timeline", "interval", "spares", "causes", "days"],
    ),
    "commands.studies:scaling": Written(
        ["scaling", *SMALL, *FSDP2, "--gpus", "8,16", "-j", "1", "--out", "."], "scaling.html",
        ["efficiency", "throughput", "causes", "memory"],
    ),
    "commands.studies:sensitivity": Written(
        ["sensitivity", *SMALL, *FSDP2, "--gpus", "1", "-j", "1", "--out", ".", "--target",
         "step_seconds=1e-6", "--resource", "HBM bandwidth"], "sensitivity.html", ["tornado"],
    ),
    "commands.topology:bench": Written(
        ["topology", "bench", "--curves", "curves.csv", "--out", "page.html"], "page.html", ["c0"],
    ),
    "commands.topology:compare": Written(
        ["topology", "compare", "dgx-h100", "dgx-a100-80gb", "-e", "one.toml", "--gpus", "16", "--out", "."],
        "compare.html", ["steps", "heat", "traffic", "scaling", "price", "d0", "d1"],
    ),
    "commands.topology:show": Written(
        ["topology", "show", "dgx-superpod-h100", "--nodes", "32", "--out", "page.html"], "page.html", ["d0"],
    ),
    "commands.studies:tune": Written(
        ["tune", "ds.json", *SMALL, "--cluster", "dgx-h100", "--gpus", "8", "-j", "1", "--top", "2",
         "--out", ".", "--keep", "offload", "--keep", "checkpointing", "--keep", "micro-batch",
         "--keep", "bucket", "--keep", "stage"],
        "tune.html", ["pareto", "steps"],
    ),
}  # fmt: skip


def pages_of(path: Path) -> Iterator[str]:
    """The functions of a module that call something whose name is of a page: `..._page`, `...html...`, or
    `save`, by which results write theirs."""
    module = ".".join(path.relative_to(ROOT / "zsim").with_suffix("").parts)
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name.endswith("_page") or "html" in name or name == "save":
                    yield f"{module}:{function.name}"


def test_every_command_that_writes_a_page_is_in_the_list() -> None:
    commands = [ROOT / "zsim" / "cli.py", *sorted((ROOT / "zsim" / "commands").glob("*.py"))]
    assert {name for path in commands for name in pages_of(path)} == set(PAGES)


# A failure every 2.5 days on one node; what a save costs is stated.
_RUN = """[run]
days = 20
[run.checkpoint]
every = "20 min"
blocking = "5 s"
durable = "60 s"
load = "1 min"
bytes = "1 GB"
[run.failures]
per_1000_node_days = 400
[run.recovery]
restart = "4 min"
spares = 1
"""

_RL = """
[strategy]
kind = "fsdp2"
[rl]
framework = "verl"
prompts_per_step = 16
samples_per_prompt = 4
[rl.lengths]
prompt = { mean = 20 }
response = { mean = 40, high = 100 }
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the commands read, and where they write."""
    monkeypatch.chdir(tmp_path)
    model = json.loads((ROOT / "zsim" / "presets" / "models" / "gpt2.json").read_text())
    (tmp_path / "gpt2.json").write_text(json.dumps(model | {"n_layer": 2}))
    for name, micro_batch in (("one", 1), ("other", 2)):
        table = f"nodes = 1\n[training]\nsequence_length = 128\nmicro_batch_size = {micro_batch}\n"
        (tmp_path / f"{name}.toml").write_text(f'model = "gpt2.json"\ncluster = "dgx-h100"\n{table}')
    (tmp_path / "run.toml").write_text((tmp_path / "one.toml").read_text() + _RUN)
    (tmp_path / "rl.toml").write_text((tmp_path / "one.toml").read_text() + _RL)
    config = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    rows = (ROOT / "validation" / "curves" / "all_reduce.csv").read_text().splitlines()
    (tmp_path / "curves.csv").write_text("\n".join(row for row in rows if "cluster" in row or "A100" in row))
    return tmp_path


@in_browser
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_alive(name: str, inputs: Path, browser: Browser) -> None:
    arguments, file, plots = PAGES[name]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code in (0, 1), (done.output, done.exception)
    check_file(browser, inputs / file, plots)


@in_browser
def test_the_report_of_a_pipeline_is_alive(inputs: Path, browser: Browser) -> None:
    """Two stages of one layer each: the schedule as it ran, and the stages on the node."""
    split = ["--set", "strategy.kind=megatron", "--set", "parallelism.pipeline=2"]
    batch = ["--set", "training.gradient_accumulation_steps=4"]
    done = CliRunner().invoke(app, ["run", *SMALL, *split, *batch, "--gpus", "8", "--out", "."])
    assert done.exit_code == 0, (done.output, done.exception)
    plots = [
        "step",
        "schedule",
        "mesh",
        "timeline",
        "waterfall-gpu",
        "memory-gpu",
        "collectives",
        "links",
        "errors",
    ]
    check_file(browser, inputs / "report.html", plots)


@in_browser
def test_the_best_interval_is_marked_among_the_intervals(inputs: Path, browser: Browser) -> None:
    """On a logarithmic axis: three decades at most, with the note inside."""
    arguments, file, _ = PAGES["commands.run:goodput"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    page = browser.new_page()
    page.goto((inputs / file).as_uri())
    page.wait_for_selector('html[data-drawn="7"]', state="attached")
    low, high = page.evaluate("() => document.getElementById('plot-interval').layout.xaxis.range")
    note = page.evaluate("() => document.getElementById('plot-interval').layout.annotations[0].x")
    page.close()
    assert low < note < high < low + 3
