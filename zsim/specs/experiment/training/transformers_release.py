"""Which release of transformers runs a model's routed experts.

`training.transformers` names it, or other software of the job implies it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from zsim.errors import InputError
from zsim.specs.experiment.training.framework_training import training_of
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.model.expert_layer import stacked_experts
from zsim.specs.model.expert_loop import has_looped_form
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.expert_library import TRANSFORMERS
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.table import StrategyTable

_KEY = "training.transformers"
NEWEST, LAST_OF_MODULES = "5.23", "4.57"


def runs_experts_one_by_one(
    model: ModelSpec, requested: TrainingTable, strategy: StrategyTable, split: ExpertSplit
) -> tuple[bool, Sequence[str]]:
    """Whether every routed expert has modules of its own, as up to transformers 4.57, and notes on what is
    assumed of it.

    If `training.transformers` is left out, the framework's release decides, else 5 is assumed.

    Raises InputError for a release that does not exist, and together with code that is not transformers'.
    """
    release = requested.transformers
    number = None if release is None else _major_release(release)
    has_experts = stacked_experts(model) is not None
    if "transformers" not in requested.model_fields_set and not (
        has_experts and split.library == TRANSFORMERS
    ):
        release = None  # that of `training.software`, which runs other parts of the job
    if not has_experts:
        notes = [f"{_KEY} is without effect: '{model.name}' has no routed experts"] if release else []
        return False, notes
    if split.library != TRANSFORMERS:
        if release is None:
            return False, ()
        raise InputError(
            f"{_KEY}: found '{release}', but the routed experts of this job are run by the code of "
            f"'{split.library.name}'; expected it left out"
        )
    if not has_looped_form(model.family):
        return False, ()
    framework = training_of(strategy.kind)
    if number is not None:
        return number < 5, framework.single_expert_notes(strategy) if number < 5 else ()
    if reason := framework.transformers_4_reason(strategy):
        note = (
            "routed experts are assumed to run one by one, each three linear layers, as in transformers 4: "
            f'{reason}; {_KEY} = "{NEWEST}" has them stacked'
        )
        return True, (note,)
    note = (
        "routed experts are assumed to be stacked and to run together, as from transformers 5 on; up to "
        f"{LAST_OF_MODULES} each is three linear layers and they run one by one, which takes up to "
        f'several times as long: {_KEY} = "{LAST_OF_MODULES}"'
    )
    return False, (note,)


def _major_release(release: str) -> int:
    match = re.fullmatch(r"([345])(\.\d{1,3}){0,2}", release)
    if not match:
        raise InputError(
            f"{_KEY}: found '{release}', expected a release of Hugging Face's transformers, as in '{NEWEST}' "
            f"or '{LAST_OF_MODULES}'"
        )
    return int(match[1])
