"""One setting as people write it: `KEY=VALUE` behind `--set`, and in a field of the page."""

from __future__ import annotations

import tomllib
from typing import Any

from zsim.errors import InputError
from zsim.reading import NULL, parse_toml
from zsim.specs.experiment.tables import Experiment
from zsim.specs.key_places import takes_text

_MAX_PARTS = 32


def setting(text: str) -> tuple[str, Any]:
    """`training.precision=bf16` -> a dotted key and a value: TOML if it parses as TOML, else a string.

    Where only text may stand, a number is the text as written (`strategy.version=0.10`). `null` is None: it
    unsets the key. Raises InputError for text of another shape.
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InputError(f"--set {text}: expected KEY=VALUE, e.g. --set training.micro_batch_size=2")
    if key.count(".") > _MAX_PARTS:
        raise InputError(f"--set {key[:60]}...: found {key.count('.') + 1:,} parts, expected a few")
    written = value.strip()
    if written == NULL:
        return key, None
    try:
        parsed = parse_toml(f"value = {value}", f"--set {key[:60]}")["value"]
    except tomllib.TOMLDecodeError:
        return key, written
    is_number = isinstance(parsed, int | float) and not isinstance(parsed, bool)
    return key, written if is_number and takes_text(key, Experiment) else parsed
