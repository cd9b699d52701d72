"""Another model in an experiment: which of its training settings are kept.

One rule, wherever the model is changed (`--model`, `--set model=`, the page, a sweep's axis): every setting
of [training] is kept, except a sequence that is longer than the new model's learned positions: unless the
same overrides set it, it is shortened to them. The report's notes say both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.specs.model.huggingface import load_model, model_from_config

_LENGTH = "sequence_length"


def with_model(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """File-shaped `data` for the new model of the dotted `overrides`: a [training] that the new model can
    run, and notes of what is kept; unchanged if no model is changed.

    Raises InputError for a model that cannot be read.
    """
    before, after = data.get("model"), overrides.get("model")
    training = data.get("training")
    if before is None or after is None or before == after or not isinstance(training, Mapping):
        return dict(data)
    kept = {key: value for key, value in training.items() if f"training.{key}" not in overrides}
    if not kept:
        return dict(data)
    notes = []
    length = kept.get(_LENGTH)
    if isinstance(length, int):
        model = (
            model_from_config(after, "model", "experiment") if isinstance(after, dict) else load_model(after)
        )
        longest = model.learned_positions
        if longest is not None and length > longest:
            training = {**training, _LENGTH: longest}
            kept.pop(_LENGTH)
            notes.append(
                f"sequence_length {length} becomes {longest}: '{model.name}' has no more learned positions"
            )
    if kept:
        said = ", ".join(f"{key} {_word(value)}" for key, value in kept.items())
        notes.insert(
            0,
            f"the model is changed from {_name(before)} to {_name(after)}; what training says stays: {said}",
        )
    return {**data, "training": training, "notes": [*data.get("notes", ()), *notes]}


def _name(model: Any) -> str:
    return f"'{model}'" if isinstance(model, str) else "the experiment's own"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
