"""The user's mistakes: one tree of errors, one clear sentence each.

Everything a person can get wrong raises `ZsimError`. The command line prints it as one paragraph and exits
with 2. A mistake of zsim's is an `assert`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MIN_PREFIX = 3  # characters of a name that suffice to complete it
MAX_LIST_LETTERS = 350  # characters of names that a sentence holds
_NUM_LISTED = 6


class ZsimError(Exception):
    """A mistake in the user's input. The message says where, what was found and what was expected."""


class InputError(ZsimError):
    """A file, a key or a value that cannot be used."""


class NotSimulatedError(ZsimError):
    """A valid request that zsim does not simulate yet."""


class StuckError(ZsimError):
    """The simulated clock stopped with work left. The message names the waiters and what each waits for."""


def nearest(name: str, options: Iterable[str]) -> str | None:
    """The option closest in spelling to `name`, or None if nothing is close. An option that begins with
    `name` is closest, the shortest of several."""
    by_lower = {option.lower(): option for option in options}
    completions = [option for option in by_lower if option.startswith(name.lower())]
    if completions and len(name) >= _MIN_PREFIX:
        return by_lower[min(completions, key=len)]
    matches = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """The end of an error message: `"; did you mean 'x'?"`, or `""` when nothing is close."""
    match = nearest(name, options)
    return f"; did you mean '{match}'?" if match else ""


def shorten(text: str, width: int = 60) -> str:
    """The beginning of a text, at most `width` characters with the dots that stand for the rest."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


def check_choice(start: str, name: str, options: Iterable[str], more: str = "") -> None:
    """Raise InputError, with the nearest option, unless `name` is one of them.

    The sentence begins with `start`, and `more` stands behind the options.
    """
    choices = list(options)
    if name not in choices:
        raise InputError(f"{start}expected one of {', '.join(choices)}{more}{did_you_mean(name, choices)}")


def format_options(name: str, options: Iterable[str], listed_by: str = "") -> str:
    """`"one of "` and the options.

    For more options than fit a sentence, it is their number, those spelt most like `name`, and `listed_by`,
    the command that lists all.
    """
    all_options = list(options)
    text = ", ".join(all_options)
    if len(text) <= MAX_LIST_LETTERS:
        return f"one of {text}"

    def likeness(option: str) -> float:
        return difflib.SequenceMatcher(None, name.lower(), option.lower()).ratio()

    nearest_options = sorted(all_options, key=likeness, reverse=True)[:_NUM_LISTED]
    where = f" (`{listed_by}` lists them)" if listed_by else ""
    return f"one of {len(all_options)}, such as {', '.join(nearest_options)}{where}"


def expected_text(name: str, options: Iterable[str], listed_by: str = "") -> str:
    """The end of an error message: `"; did you mean 'x'?"`, or `"; expected one of ..."` when nothing is
    close.
    """
    all_options = list(options)
    return did_you_mean(name, all_options) or (
        f"; expected {format_options(name, all_options, listed_by)}" if all_options else ""
    )


def unreadable_reason(error: Exception) -> str:
    """Why a file cannot be read, to follow its name: `"is a folder, expected a file"`, without the operating
    system's numbers."""
    if isinstance(error, IsADirectoryError):
        return "is a folder, expected a file"
    if isinstance(error, UnicodeDecodeError):
        return "cannot be read as text: it is not UTF-8"
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    return str(error)
