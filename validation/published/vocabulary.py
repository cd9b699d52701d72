"""The words of published tables: the canonical words that a cell's text has, whatever way it is written."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FILE = Path(__file__).parent / "vocabulary.toml"
_DEGREES = r"(?<![a-z])(?:tp|pp|cp|ep|dp|vp|vpp|etp|edp|mp)[ =:x_-]*(?:\d+|n/?a|none)(?![a-z\d])"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a cell's text says."""

    words: frozenset[str]
    """Canonical words of the column."""
    unknown: tuple[str, ...]
    """Words of the cell that no way of the column has, in order."""

    def has(self, *words: str) -> bool:
        """Whether the cell says any of `words`."""
        return not self.words.isdisjoint(words)


@cache
def _tables() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def names_of(column: str) -> dict[str, list[str]]:
    """By canonical word of a column: the ways to write it, as the file has them."""
    return _tables()[column]


@cache
def vocabulary() -> dict[str, dict[str, tuple[frozenset[str], ...]]]:
    """By column and canonical word: the ways to write it, each the words that a cell must have."""
    return {
        column: {word: tuple(_way(text) for text in ways) for word, ways in table.items()}
        for column, table in _tables().items()
        if column != "ignored"
    }


@cache
def _ignored() -> frozenset[str]:
    return frozenset(split_words(str(_tables()["ignored"]["words"])))


def _way(text: str) -> frozenset[str]:
    joined = join_numbers(split_words(text))
    return frozenset(word for word, _ in joined)


def split_words(text: str) -> list[str]:
    """The words of a text in lower case, without what stands between them: "ZeRO-3 (TP=8)" is zero, 3, tp,
    8."""
    plain = re.sub(r"\s*\+\+", "pp ", text.lower())
    return re.findall(r"\d+(?:\.\d+)+|[a-z]+\d+[a-z\d]*|\d+[a-z]+|[a-z]+|\d+", plain)


def join_numbers(words: list[str]) -> list[tuple[str, tuple[int, ...]]]:
    """The words with every number joined to the word before it ("v2" is 2), each with the positions of the
    words that it is made of."""
    joined: list[tuple[str, tuple[int, ...]]] = []
    for index, word in enumerate(words):
        number = word[1:] if re.fullmatch(r"v\d", word) else word
        if number.isdigit() and joined and joined[-1][0].isalpha():
            before, positions = joined.pop()
            joined.append((before + number, (*positions, index)))
        else:
            joined.append((word, (index,)))
    return joined


def spellings(text: str) -> dict[str, tuple[int, ...]]:
    """The words that a text may be taken to have, with and without joined numbers, and where they stand."""
    words = split_words(text)
    places: dict[str, list[int]] = {}
    for index, word in enumerate(words):
        places.setdefault(word, []).append(index)
    for word, positions in join_numbers(words):
        places.setdefault(word, []).extend(positions)
    return {word: tuple(positions) for word, positions in places.items()}


def read_words(column: str, text: str) -> Reading:
    """What a cell's text says in the words of a column of `vocabulary.toml`.

    Degrees of parallelism ("TP8") and numbers are no words: they have columns of their own."""
    return _read_words(column, text)


@cache
def _read_words(column: str, text: str) -> Reading:
    lower = text.lower()
    plain = re.sub(_DEGREES, " ", lower) if column == "strategy" else lower
    words = split_words(plain)
    present = spellings(plain)
    found: set[str] = set()
    known: set[int] = set()
    for canonical, ways in vocabulary()[column].items():
        for way in ways:
            if way <= present.keys():
                found.add(canonical)
                known.update(position for word in way for position in present[word])
    unknown = [
        word
        for index, word in enumerate(words)
        if index not in known and len(word) > 1 and not word[0].isdigit() and word not in _ignored()
    ]
    return Reading(frozenset(found), tuple(dict.fromkeys(unknown)))


def best_word(column: str, present: frozenset[str]) -> tuple[str, frozenset[str]] | None:
    """The canonical word with the longest way that `present` has, and that way. None without any."""
    ways = [
        (len(way), canonical, way)
        for canonical, its_ways in vocabulary()[column].items()
        for way in its_ways
        if way <= present
    ]
    if not ways:
        return None
    longest = max(size for size, _, _ in ways)
    return next((canonical, way) for size, canonical, way in ways if size == longest)


_COLUMNS = {"attn_kernel": "attention", "precision": "precision", "gpu": "gpu"}


def canonical_text(column: str, text: str) -> str:
    """The canonical word for a cell of a row, that rules on sources may be about however the row has it:
    "flash-attn 2" for "FA-2", "fp16" for "half precision". "" for columns without a vocabulary, and for
    cells without such a word."""
    vocabulary_column = _COLUMNS.get(column)
    if vocabulary_column is None or not text:
        return ""
    if column == "gpu":
        best = best_word("gpu", frozenset(spellings(text)))
        chips = (
            [word for word in best[1] if re.fullmatch(r"(?!sxm|hbm)[a-z]+\d+[a-z]*", word)] if best else []
        )
        return "".join(chips[:1]).upper()
    reading = read_words(vocabulary_column, text)
    return next((word for word in names_of(vocabulary_column) if word in reading.words), "")
