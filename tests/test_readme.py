"""What the README shows is what today's code does."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import zsim
from zsim.cli import app
from zsim.study.published.bars import table_lines
from zsim.trace.chrome.write import write_chrome_traces
from zsim.validated.runs import validated_runs

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
EXAMPLE = ROOT / "zsim" / "presets" / "experiments" / "llama-3-70b-zero3.toml"
BLOCK = re.compile(r"(```console\n\$ zsim run --out out\n).*?(```)", re.DOTALL)


RECIPE = re.compile(r"(<!-- recipe -->\n```console\n\$ zsim (.+)\n)((?:.*\n)*?)(```)")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def example_output(folder: Path) -> str:
    """What `zsim run --out out` prints at 80 columns, without the seconds it took."""
    done = subprocess.run(
        [sys.executable, "-c", "from zsim.cli import main; main()", "run", "--out", "out"],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"},
    )
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return re.sub(r" events in .*", " events", "\n".join(lines)).rstrip() + "\n"


def test_the_output_at_the_top_is_todays(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    output, text = example_output(tmp_path), README.read_text()
    if request.config.getoption("--update"):
        README.write_text(BLOCK.sub(lambda match: match[1] + output + match[2], text, count=1))
        return
    shown = BLOCK.search(text)
    assert shown is not None
    assert shown[0] == "```console\n$ zsim run --out out\n" + output + "```"


def test_the_three_recipes_print_what_they_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = README.read_text()
    monkeypatch.chdir(tmp_path)

    def printed(match: re.Match[str]) -> str:
        result = CliRunner().invoke(app, shlex.split(match[2]))
        assert result.exit_code == 0, result.output
        assert max(map(len, result.stdout.splitlines())) <= 80
        return match[1] + result.stdout + match[4]

    anew, count = RECIPE.subn(printed, text)
    assert count == 3
    if request.config.getoption("--update"):
        README.write_text(anew)
    else:
        assert anew == text


def test_the_accuracy_table_is_what_the_check_holds() -> None:
    """The table is drawn from the pins of the published runs, which `make check-accuracy` holds.
    After a change: python validation/published/accuracy.py."""
    content = json.loads((ROOT / "validation" / "baseline.json").read_text())
    pins = content["cases"]["validation/published/training_runs.csv"]
    shown = re.search(r"<!-- published runs.*?-->\n(.*?)<!-- end of", README.read_text(), re.DOTALL)
    assert shown is not None
    regimes, table, causes = shown[1].split("\n\n", 2)
    lines = [*regimes.splitlines(), "", *table.splitlines()]
    assert lines == table_lines(pins["sources"], pins["all"], validated_runs())
    assert re.match(r"Of \d+ rows off by more than 10%: ", causes)


def test_the_experiment_file_shown_is_the_one_that_ships() -> None:
    assert blocks("toml")[0] == EXAMPLE.read_text()


def test_the_python_example_runs() -> None:
    subprocess.run([sys.executable, "-c", blocks("python")[0]], check=True, capture_output=True)


def test_the_commands_shown_are_accepted(tmp_path: Path) -> None:
    """Every line runs as it stands (with the files that it names in place)."""
    (tmp_path / "path" / "to").mkdir(parents=True)
    model = ROOT / "zsim" / "presets" / "models" / "llama-3-8b.json"
    (tmp_path / "path" / "to" / "config.json").write_text(model.read_text())
    (tmp_path / "my.toml").write_text(EXAMPLE.read_text())
    (tmp_path / "ds_config.json").write_text(
        '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 1}'
    )
    small = zsim.Experiment(model="gpt2", cluster="dgx-h100", nodes=2, strategy={"kind": "fsdp2"})
    write_chrome_traces(zsim.simulate(small).trace, tmp_path / "my-traces")
    lines = [line for line in blocks("console")[1].splitlines() if line.startswith("$ zsim")]
    assert len(lines) == 9
    for line in lines:
        arguments = line.split("#")[0].split()[2:]
        done = subprocess.run(
            [sys.executable, "-c", "from zsim.cli import main; main()", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
        assert done.returncode == 0, line + done.stdout + done.stderr


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / document).read_text()):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
