"""The page of other programs' files is the one that their declarations make."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.reference.pages import program_files_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "files.md"


def test_the_page_in_docs_is_the_code_s(request: pytest.FixtureRequest) -> None:
    text = program_files_page()
    if request.config.getoption("--update"):
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text


def test_a_program_says_what_is_read_refused_and_left_out() -> None:
    sections = {part.split("\n", 1)[0]: part for part in program_files_page().split("\n## ")}
    axolotl = sections["axolotl"]
    assert "| `micro_batch_size` | sequences of a micro-batch | `training.micro_batch_size` |" in axolotl
    assert "`relora`" in axolotl.split("Refused by name:")[1].split("Left out, and said:")[0]
    assert "`tiled_mlp`" in axolotl.split("Left out, and said:")[1]
    assert "It has the keys of the Trainer as well." in sections["TRL"]
    assert "| `per_device_train_batch_size` |" in sections["Trainer"]
