"""Checks which names of an experiment cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError, ZsimError
from zsim.specs.cluster.files import load_cluster
from zsim.specs.messages import listed
from zsim.specs.own_code import load_named_model


def unreadable(data: Mapping[str, Any]) -> list[str]:
    """One sentence for each of the model and the cluster named in file-shaped `data` that cannot be read."""
    found = []
    for key, load in (("model", load_named_model), ("cluster", load_cluster)):
        if isinstance(data.get(key), str):
            try:
                load(data[key])
            except ZsimError as error:
                found.append(str(error))
    return found


def check_names(model: object, cluster: object) -> None:
    """Raises InputError about model and cluster if neither can be read."""
    found = unreadable({"model": model, "cluster": cluster})
    if len(found) > 1:
        raise InputError(listed("experiment", found))
