"""One setting as people write it: `training.precision=bf16`."""

from __future__ import annotations

import tomllib
from typing import Any

from zsim.errors import InputError


def setting(text: str) -> tuple[str, Any]:
    """`training.precision=bf16` -> a dotted key and a value: TOML where it is TOML, else a string."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InputError(f"--set {text}: expected KEY=VALUE, e.g. --set training.micro_batch_size=2")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value.strip()
