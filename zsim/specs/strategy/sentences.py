"""Phrases of error messages and of the pages of settings that name frameworks (`presets/sentences.toml`)."""

from __future__ import annotations

from collections.abc import Mapping

from zsim.resources import preset_table


def alternatives(setting: str) -> str:
    """The strategies to choose for a setting that a framework lacks, as error messages expect them."""
    return _phrases("alternatives")[setting]


def left_out(key: str) -> str:
    """The values that frameworks take where `key` is left out, as its description has them."""
    return _phrases("left out")[key]


def phrase(subject: str) -> str:
    """The part of a sentence about `subject` that names frameworks."""
    return _phrases("phrases")[subject]


def _phrases(table: str) -> Mapping[str, str]:
    phrases: Mapping[str, str] = preset_table("sentences")[table]
    return phrases
