"""The verdict on whether a job fits: one word of five, and its probability by zsim's errors on published
runs.

Every command and page takes its word, its exit code and its probability from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from zsim.validated.memory import MemoryErrors, shipped_errors

Word = Literal["fits", "fits barely", "runs short", "likely does not fit", "does not fit"]
Tone = Literal["fits", "tight", "broken"]  # how a verdict is shown

LEVEL = 0.9  # from this probability on a job fits, and below its opposite it does not
LIKELY = 0.5  # below it the exit code is that of a job that does not fit

# Of the bytes of a published run, the share that is not a model state: the mean of sources, as
# `python validation/published/memory.py --shown` prints it.
UNCERTAIN_SHARE = 0.54


@dataclass(frozen=True, slots=True)
class Verdict:
    """The word and the probability that the job fits.

    A job "fits" or "does not fit" with a probability of at least `LEVEL`. In between it "fits barely" or
    "likely does not fit", by whether it is likelier to fit than not. It "runs short" if it likely fits and
    all tensors have room, but torch's allocator must give its cache back and ask again, or finds no room even
    then.
    """

    word: Word
    probability: float
    rows_short: int = 0
    """Published jobs behind the probability of a job that runs short."""

    @property
    def is_likely(self) -> bool:
        """Whether the job is likelier to fit than not."""
        return self.probability >= LIKELY

    @property
    def is_sure(self) -> bool:
        """Whether it fits, or does not, with a probability of at least `LEVEL`."""
        return self.word in ("fits", "does not fit")

    @property
    def exit_code(self) -> int:
        """0 for a job that is likelier to fit than not, else 1."""
        return 0 if self.is_likely else 1

    @property
    def label(self) -> str:
        return self.word.capitalize()

    @property
    def tone(self) -> Tone:
        if self.word == "fits":
            return "fits"
        return "tight" if self.is_likely else "broken"

    @property
    def mark(self) -> str:
        """One or two letters for a figure in a table. Empty for a job that fits."""
        return _MARKS[self.word]

    @property
    def odds(self) -> str:
        """E.g. "99 % likely", or "40 % that it fits" where it may not."""
        return f"{100 * self.probability:.0f} % {'likely' if self.word == 'fits' else 'that it fits'}"

    @property
    def chance(self) -> str:
        """E.g. "probability that it fits 99 %"."""
        return f"probability that it fits {100 * self.probability:.0f} %"


_MARKS: dict[Word, str] = {
    "fits": "", "fits barely": "?", "runs short": "~", "likely does not fit": "!?", "does not fit": "!",
}  # fmt: skip


def mark_meanings(words: set[Word]) -> list[str]:
    """The meaning of the marks of these words, a line each."""
    return [f"{_MARKS[word]:<2} {_MEANINGS[word]}" for word in _MARKS if word in words and _MARKS[word]]


_MEANINGS: dict[Word, str] = {
    "fits": "",
    "fits barely": "fits barely: likelier to fit than not, by zsim's errors",
    "runs short": "runs short: torch's allocator must give its cache back, or finds no room",
    "likely does not fit": "likely does not fit: likelier to run out of memory, by zsim's errors",
    "does not fit": "does not fit",
}


def verdict_content(verdict: Verdict | None) -> dict[str, Any]:
    """The verdict as JSON data: `verdict`, a word, and `fits_probability`. Both are None where there
    is none.
    """
    word, probability = (None, None) if verdict is None else (verdict.word, verdict.probability)
    return {"verdict": word, "fits_probability": probability}


def verdict_suffix(verdict: Verdict | None) -> str:
    """The word after a figure in a table, as in " (does not fit)". Empty for a job that fits."""
    return "" if verdict is None or verdict.word == "fits" else f" ({verdict.word})"


def verdict_of(
    load: float,
    framework: str,
    *,
    exact: float = 0.0,
    is_mixture: bool = False,
    is_short: bool = False,
    errors: MemoryErrors | None = None,
) -> Verdict:
    """The verdict on a job of `framework`, dense or a mixture of experts, whose fullest memory has this
    `load`.

    The load is the bytes at the peak over the usable bytes, the largest of GPU, host and drives. `exact` is
    parameters, gradients and optimizer states at that peak over the same usable bytes, 0 where they are not
    known apart ([Note: what is uncertain]). With
    `is_short` torch's allocator retries or fails in the job's step. `errors` are by default those of the
    shipped table.
    """
    errors = shipped_errors(framework, is_mixture) if errors is None else errors
    probability = errors.probability(_equivalent_load(load, exact))
    if probability <= 1 - LEVEL + 1e-9:
        return Verdict("does not fit", probability)
    rows_short = errors.rows_short if is_short else 0
    if is_short:
        probability = errors.probability_short(load)
    if probability < LIKELY:
        return Verdict("likely does not fit", probability, rows_short)
    if is_short:
        return Verdict("runs short", probability, rows_short)
    return Verdict("fits" if probability >= LEVEL - 1e-9 else "fits barely", probability)


def _equivalent_load(load: float, exact: float) -> float:
    """The load whose probability is that of a job with `load`, of which `exact` are model states.

    # [Note: what is uncertain]
    The sizes of parameters, gradients and optimizer states are arithmetic, so that a published run's error is
    one of its remaining bytes, of which it has the share u (`UNCERTAIN_SHARE`): in proportion 1/u times as
    large. What exceeds the limit then fits only if the remaining bytes are fewer by the ratio of the room
    beside the states to them, and not at all without such room.

    The rule has one side: it only lowers the probability of a job that exceeds the limit. A job within the
    limit is judged by all of its load, since what zsim leaves out there (a copy of a tensor, fragments of the
    allocator) grows with the states as well, and a job that is called safe must not rest on this rule.
    """
    if load <= 1 or not exact:
        return load
    if exact >= 1:
        return inf
    ratio: float = ((load - exact) / (1 - exact)) ** UNCERTAIN_SHARE
    return max(load, ratio)
