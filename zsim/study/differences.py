"""Whether two simulated configurations differ by more than zsim errs on their ratio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.validated.ratios import NO_DIFFERENCE, SHORT, can_tell
from zsim.validated.validation import range_words

# Columns of a sweep's row by the setting that they are (`zsim.validated.ratios.SETTINGS`).
_COLUMNS = {
    "batch": ("training.micro_batch_size", "training.gradient_accumulation_steps"),
    "sequence length": ("training.sequence_length",),
    "GPUs": ("nodes", "gpus"),
    "strategy": ("strategy", "strategy.settings"),
    "network": ("cluster",),
    "training": (
        "training.precision", "training.activation_checkpointing", "training.checkpoint_every",
        "training.block_checkpointing", "training.cross_entropy", "training.compile",
    ),
    "another model or GPU": ("model", "gpu"),
}  # fmt: skip


def range_of_row(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """The interval of a sweep's row; None where it has none."""
    low, high = row.get("step_seconds_low"), row.get("step_seconds_high")
    return None if low is None or high is None else (low, high)


def differing_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """By which settings two rows of sweeps differ."""
    found = [
        name
        for name, columns in _COLUMNS.items()
        if any(one.get(column) != other.get(column) for column in columns)
    ]
    is_short = bool(one.get("allocator_retries") or other.get("allocator_retries"))
    return [*found, SHORT] if is_short and found else found


def is_told_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether zsim can tell which of two rows is faster, for the same tokens."""
    tokens = (one["step_tokens"], other["step_tokens"])
    costs = [row["step_seconds"] / count for row, count in zip((one, other), tokens, strict=True)]
    return can_tell(costs[0], costs[1], differing_settings(one, other))


def row_words(row: Mapping[str, Any], best: Mapping[str, Any] | None = None) -> str:
    """ "3.90 to 5.10 s (80 %)"; with that it cannot be told from the best. Empty without an interval."""
    found = range_of_row(row)
    if found is None:
        return ""
    said = f"{range_words(found)} (80 %)"
    if best is not None and best is not row and not is_told_apart(row, best):
        said += f"; {NO_DIFFERENCE} from 1"
    return said
