"""Models that are functions of the user's own, `package.module:function`, and the permission to run them.

# [Note: who may run code] Experiments, studies, other programs' files, tables of runs and the page's address
are data: no text in them imports or calls anything. A function runs only where its user names it: in
`--model` on the command line, in `zsim.Experiment(model=...)` in Python, or in a file of a command that has
`--allow-code`. It then becomes a `ModelSpec` at once, which has numbers and no code, so that workers and
later steps run none. The permission is an object, a `UserCode`, that only commands and `Experiment` make:
data cannot hold it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError, ZsimError
from zsim.specs.capture.capture import capture_function, names_function
from zsim.specs.cluster.files import load_cluster
from zsim.specs.messages import format_problems
from zsim.specs.model.huggingface import load_model
from zsim.specs.model.spec import ModelSpec

_JOBS = "jobs"


class UserCode:
    """The permission to import and call functions of the user's own. Each function is called once."""

    def __init__(self) -> None:
        self._models: dict[str, ModelSpec] = {}

    def model(self, text: str) -> ModelSpec:
        """The model of a function. Raises InputError as `capture_function` does."""
        if text not in self._models:
            self._models[text] = capture_function(text)
        return self._models[text]

    def resolve(self, text: str) -> str | ModelSpec:
        """The model of a function. Any other name is returned as it is."""
        return self.model(text) if names_function(text) else text


def load_named_model(text: str | Path) -> ModelSpec:
    """The model of a preset's name, or of a file or folder. Raises InputError, for a function too."""
    refuse_function(text, "")
    return load_model(text)


def refuse_function(model: object, where: str) -> None:
    """Raises InputError where data names a function as its model. `where` begins the message."""
    if isinstance(model, str) and names_function(model):
        prefix = f"{where}: " if where else ""
        raise InputError(
            f"{prefix}model '{model}': is a function, which would be imported and called, and no file, "
            "setting or address runs code; expected a preset or the path of a config.json. If the function "
            f"is yours: --model {model} on the command line, --allow-code beside a file that you trust (not "
            f"with zsim ui), or zsim.Experiment(model='{model}') in Python"
        )


def load_user_models(data: Mapping[str, Any], where: str, code: UserCode | None) -> dict[str, Any]:
    """File-shaped data, or dotted overrides, in which every function named as a model is replaced by its
    model.

    Models of co-located jobs are included. The functions are run with `code`. Without it, InputError is
    raised about them.
    """
    new_data = dict(data)
    for key, value in data.items():
        segments = key.split(".")
        if key == "model" or (segments[0] == _JOBS and segments[2:] == ["model"]):
            new_data[key] = _load_user_model(value, where, code)
        elif segments[0] == _JOBS and len(segments) == 2 and isinstance(value, Mapping):
            new_data[key] = load_user_models(value, f"{where}: {key}", code)
        elif key == _JOBS and isinstance(value, Mapping):
            new_data[key] = {
                name: load_user_models(table, f"{where}: {key}.{name}", code)
                if isinstance(table, Mapping)
                else table
                for name, table in value.items()
            }
    return new_data


def _load_user_model(value: Any, where: str, code: UserCode | None) -> Any:
    if code is None:
        refuse_function(value, where)
        return value
    return code.resolve(value) if isinstance(value, str) else value


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
