"""A page of documentation, followed by the letter: its files written, its commands run, its Python executed.

What a page may hold, in the order in which a reader meets it:

- a block of any language with `title="NAME"`: a file of that name in the reader's folder;
- a `console` block: lines that begin with `$ zsim` are run there, and what stands under one is what it prints
  (nothing under it: anything); `| head -N` and `| tail -N` cut it, `# exit 1` is another exit code than 0;
- a `python` block: executed, all of a page in one namespace; a `text` block right after it is what it prints;
- `<!-- with PATH -->`: that file of the repository lies in the reader's folder from the beginning;
- `sh` blocks are for the reader alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from zsim.cli import app

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 80
_WITH = re.compile(r"(?m)^<!-- with (\S+) -->$")
_FENCE = re.compile(
    r'(?ms)^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
)
_COMMAND = re.compile(r"(?m)^\$ (?P<line>.*)\n(?P<output>(?:(?!\$ ).*\n)*)")
_EXIT = re.compile(r"\s+# exit (\d)$")
_TERMINAL = {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    title: str | None
    text: str
    start: int
    end: int


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a page that are followed, in order."""
    for match in _FENCE.finditer(text):
        yield Block(match["language"], match["title"], match["text"], match.start("text"), match.end("text"))


def followed(text: str, folder: Path) -> str:
    """The page as it would be if it showed what its blocks print; `folder` is the current one.

    Raises AssertionError where a command ends with another exit code than the page says, or prints lines that
    80 columns do not hold."""
    for path in _WITH.findall(text):
        shutil.copy(ROOT / path, folder)
    names: dict[str, Any] = {"__name__": "page"}
    anew, last, printed = [], 0, ""
    for block in blocks(text):
        shown = block.text
        if block.title is not None:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "console":
            shown = _COMMAND.sub(_with_output, block.text)
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as stream:
                exec(compile(block.text, "page", "exec"), names)
            printed = stream.getvalue()
        elif block.language == "text" and printed:
            shown, printed = printed, ""
        anew += [text[last : block.start], shown]
        last = block.end
    return "".join([*anew, text[last:]])


def _with_output(match: re.Match[str]) -> str:
    line = match["line"]
    if not line.startswith("zsim "):
        raise AssertionError(f"only `zsim` is run in a console block; put `{line}` into one of sh")
    printed = output_of(line)
    return f"$ {line}\n" + (printed if match["output"].strip() else match["output"])


def output_of(line: str) -> str:
    """What a command prints at 80 columns; seconds that it took itself are left out."""
    command, *cuts = line.split("  #")[0].rstrip().split(" | ")
    code = _EXIT.search(line)
    output = _refused(command, int(code[1])) if code else _printed(command)
    lines = [re.sub(r" events in .*", " events", text.rstrip()) for text in output.splitlines()]
    wide = [text for text in lines if len(text) > WIDTH and not text.startswith("note: ")]
    assert code or not wide, wide  # refusals and notes are paragraphs
    for cut in cuts:
        end, count = cut.split(" -")
        lines = lines[: int(count)] if end == "head" else lines[-int(count) :]
    return "\n".join([*lines, ""]).strip("\n") + "\n"


def _printed(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command)[1:], env=_TERMINAL)
    assert result.exit_code == 0, f"{command}: {result.output} {result.exception}"
    return result.stdout


def _refused(command: str, code: int) -> str:
    """What a command prints that ends with `code`, errors included."""
    program = [sys.executable, "-c", "from zsim.cli import main; main()"]
    done = subprocess.run(
        [*program, *shlex.split(command)[1:]], capture_output=True, text=True, check=False,
        env={**os.environ, **_TERMINAL},
    )  # fmt: skip
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr
