"""`--model package.module:function`: the user's own function makes the module and an example of its inputs.

The module is imported and the function is called, which runs their code: see [Note: who may run code].
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zsim.errors import InputError, did_you_mean
from zsim.specs.capture.capture import captured, require_torch
from zsim.specs.model.spec import ModelSpec

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def names_function(text: str) -> bool:
    """Whether `text` has the form package.module:function."""
    return _NAME.fullmatch(text) is not None


def captured_from(text: str) -> ModelSpec:
    """The model of the module that the function `package.module:function` makes.

    The function returns (module, inputs). `inputs` is a tensor, a sequence of forward's arguments, or a
    mapping of its keywords. The function is called without arguments, with the meta device as torch's
    default. Raises InputError for a function that cannot be found, fails, or returns something else.
    """
    torch = require_torch(f"model '{text}'")
    function = _function(text)
    where = f"model '{text}'"
    try:
        with torch.device("meta"):
            made = function()
    except InputError:
        raise
    except (Exception, SystemExit) as problem:  # whatever the user's code raises
        said = " ".join(str(problem).split())[:300]
        raise InputError(
            f"{where}: the function raised {type(problem).__name__}: {said}; it is called without arguments, "
            "with the meta device as torch's default, on which tensors have no values"
        ) from problem
    if not isinstance(made, tuple | list) or len(made) != 2 or not isinstance(made[0], torch.nn.Module):
        raise InputError(
            f"{where}: the function returned {_described(made)}; expected (module, inputs): a "
            "torch.nn.Module, and "
            "a tensor, a sequence of its forward's arguments, or a mapping of its keywords"
        )
    module, inputs = made
    args, kwargs = _arguments(inputs, torch)
    model = captured(module, args, kwargs, where, text.rpartition(":")[2])
    assert model.captured is not None
    return replace(model, captured=replace(model.captured, function=text))


def _arguments(inputs: Any, torch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), {str(name): value for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


def _described(made: Any) -> str:
    if isinstance(made, tuple | list):
        return f"a {type(made).__name__} of " + (", ".join(type(one).__name__ for one in made) or "nothing")
    return f"a {type(made).__name__}"


def _function(text: str) -> Callable[[], Any]:
    name, _, attribute = text.partition(":")
    module = _module(name, text)
    function = getattr(module, attribute, None)
    if function is None:
        names = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
        raise InputError(
            f"model '{text}': '{name}' has no '{attribute}'{did_you_mean(attribute, names)}; expected "
            "a function "
            "that returns (module, inputs)"
        )
    if not callable(function):
        raise InputError(
            f"model '{text}': '{attribute}' is a {type(function).__name__}; expected a function that returns "
            "(module, inputs)"
        )
    found: Callable[[], Any] = function
    return found


def _module(name: str, text: str) -> Any:
    """The module, looked for in the working directory too, as `python -m` does."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as problem:  # whatever the user's code raises when it is imported
        said = " ".join(str(problem).split())[:300]
        missing = isinstance(problem, ModuleNotFoundError) and problem.name in (name, name.partition(".")[0])
        expected = (
            f"a module that Python finds from {here} or in its environment" if missing
            else "a module that can be imported"
        )  # fmt: skip
        raise InputError(
            f"model '{text}': cannot import '{name}': {type(problem).__name__}: {said}; expected {expected}"
        ) from problem
    finally:
        sys.path.remove(here)
