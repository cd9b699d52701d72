"""Whether two simulated configurations differ by more than zsim's error on their ratio."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zsim.validated.ratios import ALLOCATOR_SHORT, NO_DIFFERENCE, is_ratio_significant
from zsim.validated.validation import format_range
from zsim.validated.verdict import Verdict

# Setting (`zsim.validated.ratios.SETTINGS`) -> the columns of a sweep's row that hold it.
_COLUMNS = {
    "batch": ("training.micro_batch_size", "training.gradient_accumulation_steps"),
    "sequence length": ("training.sequence_length",),
    "GPUs": ("nodes", "gpus"),
    "strategy": ("strategy",),
    "parallelism": (),
    "network": ("cluster",),
    "training": (
        "training.precision", "training.activation_checkpointing", "training.checkpoint_every",
        "training.block_checkpointing", "training.cross_entropy", "training.compile",
    ),
    "another model or GPU": ("model", "gpu"),
}  # fmt: skip


def range_of_row(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """(low, high) of the row's step interval in seconds, or None where the row has no interval."""
    low, high = row.get("step_seconds_low"), row.get("step_seconds_high")
    return None if low is None or high is None else (low, high)


def verdict_of_row(row: Mapping[str, Any]) -> Verdict | None:
    """The row's verdict, or None for a row without one, such as a row saved by an earlier release."""
    word, probability = row.get("verdict"), row.get("fits_probability")
    return None if word is None or probability is None else Verdict(word, probability)


# Keys of DeepSpeed's file that are settings of their own: the batch, which follows from the number of GPUs
# too, and the precision.
_NOT_STRATEGY = frozenset(
    {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "precision"}
)


def _strategy_settings(row: Mapping[str, Any]) -> Any:
    """The framework's settings of a row, without those that are columns of their own."""
    text = row.get("strategy.settings")
    settings = json.loads(text) if isinstance(text, str) and text.startswith("{") else text
    if not isinstance(settings, Mapping):
        return settings
    return {key: value for key, value in settings.items() if key not in _NOT_STRATEGY}


# What follows from a row's other columns: the GPUs, the length, the batch and the strategy.
_FOLLOWING = frozenset(
    {"data", "style", "context_inner", "context_masks", "tensor_grain", "buffered_micro_batches"}
)
_DEGREES = frozenset({"tensor", "pipeline", "virtual_stages", "context", "expert", "expert_tensor"})


def _have_different_degrees(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two rows divide a replica of the model among ranks by different degrees, or under one framework
    in different ways. Rows of an older zsim do not say how they do.
    """
    differ = {
        key.removeprefix("parallelism.")
        for key, value in first.items()
        if key.startswith("parallelism.") and value != second.get(key, value)
    } - _FOLLOWING
    if first.get("parallelism.style") != second.get("parallelism.style"):
        differ &= _DEGREES
    if all((row.get("parallelism.context") or 1) == 1 for row in (first, second)):
        differ.discard("context_method")
    return bool(differ)


def differing_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The settings in which two rows of a sweep differ, as `zsim.validated.ratios` names them."""
    names = [
        name
        for name, columns in _COLUMNS.items()
        if any(first.get(column) != second.get(column) for column in columns)
        or (name == "strategy" and _strategy_settings(first) != _strategy_settings(second))
        or (name == "parallelism" and _have_different_degrees(first, second))
    ]
    is_short = bool(first.get("allocator_retries") or second.get("allocator_retries"))
    return [*names, ALLOCATOR_SHORT] if is_short and names else names


def is_shared(row: Mapping[str, Any]) -> bool:
    """Whether several ranks share a replica of the model in a row of a sweep."""
    return any((row.get(f"parallelism.{axis}") or 1) > 1 for axis in ("tensor", "pipeline", "context"))


def is_distinguishable(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether zsim can tell which of two rows is faster per token."""
    tokens = (first["step_tokens"], second["step_tokens"])
    costs = [row["step_seconds"] / count for row, count in zip((first, second), tokens, strict=True)]
    shared = is_shared(first) or is_shared(second)
    return is_ratio_significant(costs[0], costs[1], differing_settings(first, second), is_shared=shared)


def format_step_range(row: Mapping[str, Any], best: Mapping[str, Any] | None = None) -> str:
    """The row's step interval, e.g. "3.90 to 5.10 s (80 %)", with a note if zsim cannot tell the row from
    `best`. Empty without an interval.
    """
    interval = range_of_row(row)
    if interval is None:
        return ""
    text = f"{format_range(interval)} (80 %)"
    if best is not None and best is not row and not is_distinguishable(row, best):
        text += f"; {NO_DIFFERENCE} from 1"
    return text
