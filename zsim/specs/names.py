"""Checks which names of an experiment cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError, ZsimError
from zsim.specs.cluster.files import load_cluster
from zsim.specs.messages import format_problems
from zsim.specs.user_code import load_named_model


def unreadable_names(data: Mapping[str, Any]) -> list[str]:
    """One sentence for each of the model and the cluster named in file-shaped `data` that cannot be read."""
    problems = []
    for key, load in (("model", load_named_model), ("cluster", load_cluster)):
        if isinstance(data.get(key), str):
            try:
                load(data[key])
            except ZsimError as error:
                problems.append(str(error))
    return problems


def check_names(model: object, cluster: object) -> None:
    """Raises InputError about model and cluster if neither can be read."""
    problems = unreadable_names({"model": model, "cluster": cluster})
    if len(problems) > 1:
        raise InputError(format_problems("experiment", problems))
