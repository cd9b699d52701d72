"""Another model in an experiment, and which of its training settings are kept.

One rule applies wherever the model is changed (`--model`, `--set model=`, the page, a sweep's axis). Every
setting of [training] is kept, except a sequence that is longer than the new model's learned positions. It is
shortened to them, unless the same overrides set it. The report's notes say both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.specs.model.huggingface import model_from_config
from zsim.specs.model.spec import ModelSpec
from zsim.specs.user_code import load_named_model

_LENGTH = "sequence_length"


def apply_model_change(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """File-shaped `data` for the new model of the dotted `overrides`, with a [training] that the new model
    can run.

    It also has notes of the settings that are kept. It is unchanged if no model is changed. Raises InputError
    for a model that cannot be read.
    """
    old, new = data.get("model"), overrides.get("model")
    training = data.get("training")
    if old is None or new is None or old == new or not isinstance(training, Mapping):
        return dict(data)
    kept_settings = {key: value for key, value in training.items() if f"training.{key}" not in overrides}
    if not kept_settings:
        return dict(data)
    notes = []
    length = kept_settings.get(_LENGTH)
    if isinstance(length, int):
        model = _load_model(new)
        longest = model.captured.sequence_length if model.captured else model.learned_positions
        is_wrong = longest is not None and (length > longest or (model.captured and length != longest))
        if is_wrong:
            training = {**training, _LENGTH: longest}
            kept_settings.pop(_LENGTH)
            reason = "was captured with that" if model.captured else "has no more learned positions"
            notes.append(f"sequence_length {length} becomes {longest}: '{model.name}' {reason}")
    if kept_settings:
        settings = ", ".join(f"{key} {_format_setting(value)}" for key, value in kept_settings.items())
        notes.insert(
            0,
            f"the model is changed from {_name(old)} to {_name(new)}; what training says stays: {settings}",
        )
    return {**data, "training": training, "notes": [*data.get("notes", ()), *notes]}


def _load_model(source: Any) -> ModelSpec:
    if isinstance(source, ModelSpec):
        return source
    return (
        model_from_config(source, "model", "experiment")
        if isinstance(source, dict)
        else load_named_model(source)
    )


def _name(model: Any) -> str:
    if isinstance(model, ModelSpec):
        return f"'{model.function or model.name}'"
    return f"'{model}'" if isinstance(model, str) else "the experiment's own"


def _format_setting(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
