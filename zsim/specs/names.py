"""The names in an experiment, looked up only to say which of them lead nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError, ZsimError
from zsim.specs.cluster.files import load_cluster
from zsim.specs.messages import listed
from zsim.specs.model.huggingface import load_model


def unreadable(data: Mapping[str, Any]) -> list[str]:
    """A sentence for each of model and cluster that file-shaped `data` names and that cannot be read."""
    found = []
    for key, load in (("model", load_model), ("cluster", load_cluster)):
        if isinstance(data.get(key), str):
            try:
                load(data[key])
            except ZsimError as error:
                found.append(str(error))
    return found


def check_names(model: object, cluster: object) -> None:
    """Raises InputError, about both, where neither can be read."""
    found = unreadable({"model": model, "cluster": cluster})
    if len(found) > 1:
        raise InputError(listed("experiment", found))
