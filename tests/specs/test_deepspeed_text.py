"""A DeepSpeed JSON as a file: damaged, missing, with comments."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.errors import InputError
from zsim.frameworks.deepspeed.settings.load import load_deepspeed_config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is not valid JSON at line 1, column 1"),
        ('{"zero_optimization": {"stage": 3', "is not valid JSON at line 1"),
        ("[1, 2]", "expected a JSON object at the top, found a list"),
        ("null", "expected a JSON object at the top, found null"),
        ('{"bf16": {"enabled": true}, "bf16": {}}', "key 'bf16' is there twice; expected it once"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_deepspeed_config(path, world_size=1, hidden_size=1)
    assert str(caught.value).startswith(f"{path}: {expected}")


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file; expected a DeepSpeed JSON"):
        load_deepspeed_config(tmp_path / "none.json", world_size=1, hidden_size=1)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read as text"):
        load_deepspeed_config(tmp_path / "binary.json", world_size=1, hidden_size=1)


def test_comment_lines_and_trailing_commas_are_forgiven(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n  // ours\n  "train_batch_size": 8,\n  # and\n  "bf16": {"enabled": true,},\n}\n')
    config = load_deepspeed_config(path, world_size=8, hidden_size=64)
    assert (config.name, config.batch.micro_batch_size, config.precision) == (str(path), 1, "bf16")


def test_a_file_can_be_called_something_else(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    with pytest.raises(InputError, match=r"^my file: train_micro_batch_size_per_gpu: missing"):
        load_deepspeed_config(tmp_path / "ds.json", world_size=1, hidden_size=1, name="my file")
