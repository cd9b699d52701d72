"""Words for methods and for settings of other programs, with the keys of zsim that they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from zsim.resources import preset_table


@dataclass(frozen=True, slots=True)
class Concept:
    """A subject that has other names elsewhere, an entry of `presets/concepts.toml`."""

    name: str
    words: tuple[str, ...]
    """Its names elsewhere, in small letters with underscores."""
    sentence: str
    keys: tuple[str, ...] = ()
    """Keys and tables of the experiment file, the nearest first."""
    see: tuple[str, ...] = ()
    """Commands that answer questions about it."""


@cache
def concepts() -> tuple[Concept, ...]:
    """All subjects, in the order of the file."""
    return tuple(
        Concept(
            name,
            tuple(entry["words"]),
            entry["sentence"],
            tuple(entry.get("keys", ())),
            tuple(entry.get("see", ())),
        )
        for name, entry in preset_table("concepts").items()
        if isinstance(entry, Mapping)
    )


def concept_of(word: str) -> Concept | None:
    """The subject that goes by a word, or None.

    Capitals, hyphens, underscores, spaces and the dashes of a flag do not matter.
    """
    spelling = _normalise(word)
    return next(
        (
            concept
            for concept in concepts()
            if any(spelling == _normalise(name) for name in (concept.name, *concept.words))
        ),
        None,
    )


def _normalise(word: str) -> str:
    return word.strip().lstrip("-").lower().replace("-", "").replace("_", "").replace(" ", "")
