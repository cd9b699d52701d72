"""`[training.lengths]`: the lengths of the documents that a training reads, and how they become
micro-batches.

    [training.lengths]
    law = "lognormal"      # or documents = [512, 4096], or file = "lengths.csv" with lines `length,count`
    median = 600
    sigma = 1.1            # standard deviation of the natural logarithm
    batching = "packed"    # documents in a row, cut at sequence_length, or "padded": one a sequence
    pad_to = 64            # padded sequences are a multiple of it long. Left out: 1
    seed = 0

The laws are "constant" (`mean`), "uniform" (`low` to `high`), "exponential" (`mean`) and "lognormal"
(`median`, `sigma`). The last two take bounds, `low` and `high`. Documents beyond the bounds are left out, and
`mean` and `median` stay those of the law without bounds. A document has at least one token. Padded documents
are cut at `sequence_length`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StrictBool

from zsim.errors import InputError, did_you_mean
from zsim.reading import parse_whole_number, read_user_text
from zsim.specs.lazy_model import StrictTable
from zsim.units import Length

Positive = Annotated[float, Field(gt=0, le=2**27, allow_inf_nan=False)]
_PARAMETERS = {
    "constant": ("mean",),
    "uniform": ("low", "high"),
    "exponential": ("mean",),
    "lognormal": ("median", "sigma"),
}
_BOUNDED_LAWS = ("exponential", "lognormal")
_KEYS = ("mean", "median", "sigma", "low", "high")
_MAX_LINES = 100_000
_MAX_VALUES = 9  # of a line, for its refusal
_MAX_CHARACTERS = 100  # characters of a value


class LengthsTable(StrictTable):
    """`[training.lengths]`. In packed sequences `attention_by_document` is a mask of blocks. Without it a
    token sees all tokens before it.
    """

    documents: Annotated[tuple[Length, ...], Field(min_length=1, max_length=_MAX_LINES)] | None = Field(
        default=None,
        description="lengths of documents: a list, or a histogram of {length: count}; left out: `file` or"
        " `law`",
    )
    file: str | None = Field(
        default=None,
        description="a file with lines of a length and its number of documents; left out: `documents` or "
        "`law`",
    )
    law: Literal["constant", "uniform", "exponential", "lognormal"] | None = Field(
        default=None, description="distribution that lengths are drawn from; left out: `documents` or `file`"
    )
    mean: Positive | None = Field(default=None, description="mean length; left out: not used")
    median: Positive | None = Field(default=None, description="median length; left out: not used")
    sigma: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] | None = Field(
        default=None,
        description="standard deviation of the length's logarithm; left out: not used",
    )
    low: Length | None = Field(
        default=None,
        description="shortest document; shorter draws are dropped; left out: a token",
    )
    high: Length | None = Field(
        default=None,
        description="longest document; longer draws are dropped; left out: no bound",
    )
    batching: Literal["packed", "padded"] = Field(
        default="packed",
        description="documents are packed into sequences, or padded to the longest of a micro-batch",
    )
    pad_to: Length = Field(default=1, description="padded lengths are a multiple of this")
    attention_by_document: StrictBool = Field(
        default=True, description="tokens attend only to their own document"
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, strict=True, description="seed of the draws")


def has_padding(table: LengthsTable, sequences: int, max_length: int | None) -> bool:
    """Whether micro-batches of so many sequences have padding, as a rule."""
    if table.batching != "padded":
        return False
    if table.documents is None and not (table.law == "constant" and table.mean):
        return sequences > 1 or table.pad_to > 1
    top = inf if max_length is None else max_length
    lengths = {min(length, top) for length in table.documents or (max(1, round(table.mean or 1)),)}
    longest = min(-(-max(lengths) // table.pad_to) * table.pad_to, top)
    is_rounded_up = any(length % table.pad_to and length < top for length in lengths)
    return is_rounded_up or (sequences > 1 and min(lengths) < longest)


def check_lengths(table: LengthsTable) -> None:
    """Raises InputError unless the lengths have a single source, with the parameters of their law."""
    sources = [key for key in ("documents", "file", "law") if getattr(table, key) is not None]
    if len(sources) != 1:
        names = " and ".join(sources) or "none of them"
        raise InputError(
            f"training.lengths: found {names}; expected one of `documents` (a list of lengths), `file` (a "
            "histogram) or `law`"
        )
    required_keys = _PARAMETERS.get(table.law or "", ())
    owner = f"law '{table.law}'" if table.law else f"`{sources[0]}`"
    for key in _KEYS:
        if key in required_keys and getattr(table, key) is None:
            raise InputError(f"training.lengths.{key}: missing, which {owner} needs")
        if table.law in _BOUNDED_LAWS and key in ("low", "high"):
            continue
        if key not in required_keys and getattr(table, key) is not None:
            expected = f"expected {' and '.join(required_keys)}" if required_keys else "it belongs to a law"
            hint = did_you_mean(key, required_keys)
            raise InputError(f"training.lengths.{key}: {owner} has no such parameter{hint}; {expected}")
    if table.low is not None and table.high is not None and table.low > table.high:
        raise InputError(
            f"training.lengths.high: found {table.high:,}, expected at least the low of {table.low:,}"
        )
    if table.pad_to > 1 and table.batching == "packed":
        raise InputError(
            f"training.lengths.pad_to: found {table.pad_to} with batching 'packed', which pads nothing; "
            "expected batching 'padded', or no pad_to"
        )


def histogram_of(table: LengthsTable) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Lengths and their weights, of `documents` or `file`.

    Raises InputError for a file that cannot be read as a histogram. The message quotes nothing of the file,
    since whoever names a file need not have the right to read it.
    """
    if table.documents is not None:
        return table.documents, (1.0,) * len(table.documents)
    assert table.file is not None
    where = f"training.lengths.file: {table.file}"
    text = read_user_text(Path(table.file), "lines of a length and a count", where)
    lengths: list[int] = []
    weights: list[float] = []
    for number, line in enumerate(text.splitlines(), 1):
        row = line.split(",")[:_MAX_VALUES] if line.strip() else []
        if not row or (number == 1 and not row[0].strip().isdecimal()):
            continue  # an empty line, or the header
        length = parse_whole_number(row[0].strip())
        count = parse_whole_number(row[1].strip()) if len(row) == 2 else 1 if len(row) == 1 else None
        if not length or count is None or len(lengths) >= _MAX_LINES:
            raise InputError(
                f"{where}: line {number}: found {_shape(row)}, expected a length of at least 1 and how many "
                f"documents have it, as in '512,40', in at most {_MAX_LINES:,} lines"
            )
        lengths.append(length)
        weights.append(float(count))
    if not sum(weights):
        raise InputError(f"{where}: found no documents; expected lines of a length and a count")
    return tuple(lengths), tuple(weights)


def _shape(row: Sequence[str]) -> str:
    """Describes a line without any of its content."""
    if len(row) == 1 and len(row[0]) > _MAX_CHARACTERS:
        return "more than a line of numbers has"
    if len(row) > 2:
        return f"{len(row)} values"
    if any(parse_whole_number(value.strip()) is None for value in row):
        return "what is no whole number"
    return "a length of 0" if parse_whole_number(row[0].strip()) == 0 else "one line more"
