"""One setting as people write it: `training.precision=bf16`."""

from __future__ import annotations

import tomllib
from typing import Any

from zsim.errors import InputError
from zsim.reading import parse_toml

_MOST_PARTS = 32


def setting(text: str) -> tuple[str, Any]:
    """`training.precision=bf16` -> a dotted key and a value: TOML where it is TOML, else a string."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InputError(f"--set {text}: expected KEY=VALUE, e.g. --set training.micro_batch_size=2")
    if key.count(".") > _MOST_PARTS:
        raise InputError(f"--set {key[:60]}...: found {key.count('.') + 1:,} parts, expected a few")
    try:
        return key, parse_toml(f"value = {value}", f"--set {key[:60]}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value.strip()
