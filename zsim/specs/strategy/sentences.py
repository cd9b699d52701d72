"""Phrases of error messages and of the pages of settings that name frameworks."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache

from zsim.resources import PRESETS


@cache
def _sentences() -> Mapping[str, Mapping[str, str]]:
    return tomllib.loads((PRESETS / "sentences.toml").read_text())


def alternatives(setting: str) -> str:
    """The strategies to choose for a setting that a framework lacks, as error messages expect them."""
    return _sentences()["alternatives"][setting]


def left_out(key: str) -> str:
    """The values that frameworks take where `key` is left out, as its description has them."""
    return _sentences()["left out"][key]


def phrase(subject: str) -> str:
    """The part of a sentence about `subject` that names frameworks."""
    return _sentences()["phrases"][subject]
