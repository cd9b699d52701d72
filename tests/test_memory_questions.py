"""The questions of PyTorch's memory tracker proposal: every command of the page prints what is shown there;
`--update` rewrites that."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zsim.cli import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipes" / "memory-questions.md"
TEXT = PAGE.read_text(encoding="utf-8")
COMMAND = re.compile(r"```console\n\$ zsim (.+)\n((?:.*\n)*?)```")


@pytest.fixture
def _beside_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = re.search(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    assert toml is not None
    (tmp_path / "my.toml").write_text(toml[1], encoding="utf-8")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_beside_the_experiment")
def test_every_command_prints_what_the_page_shows(request: pytest.FixtureRequest) -> None:
    def printed(match: re.Match[str]) -> str:
        result = CliRunner().invoke(app, shlex.split(match[1]))
        assert result.exit_code == 0, f"{match[1]}: {result.output}{result.exception}"
        return f"```console\n$ zsim {match[1]}\n{result.output}```"

    anew = COMMAND.sub(printed, TEXT)
    if request.config.getoption("--update"):
        PAGE.write_text(anew, encoding="utf-8")
    else:
        assert anew == TEXT


def test_all_fourteen_questions_and_the_three_about_debugging_have_a_command() -> None:
    sections = re.split(r"^## (\d+)\. ", TEXT, flags=re.MULTILINE)[1:]
    numbers, bodies = sections[::2], sections[1::2]
    assert [int(number) for number in numbers] == list(range(1, 18))
    assert all(COMMAND.search(body) for body in bodies)


def test_what_is_shown_fits_a_terminal() -> None:
    for _, shown in COMMAND.findall(TEXT):
        assert max(map(len, shown.splitlines())) <= 80
