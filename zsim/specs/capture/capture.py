"""`zsim.capture`: a torch module and an example of its inputs -> a model to simulate.

With `--model package.module:function` the user's own function makes both. The module is imported and the
function is called, which runs their code: see [Note: who may run code].
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zsim.errors import InputError, did_you_mean
from zsim.extras import require
from zsim.specs.model.spec import ModelSpec

if TYPE_CHECKING:
    from torch import nn


def capture(module: nn.Module, *example_inputs: Any, **example_kwargs: Any) -> ModelSpec:
    """The model of a torch module, seen in one forward and backward on the meta device, without weights or a
    GPU.

    A copy of the module runs as `module(*example_inputs, **example_kwargs)`. The first dimension of the first
    tensor counts the samples. A micro-batch has as many as `training.micro_batch_size` says, each as long as
    the example's. The module's own loss (a scalar that forward returns) is counted.

    Raises InputError where torch is not installed, and for modules whose code depends on the values of
    tensors, that have no parameters, or that do not run on the inputs.
    """
    return capture_module(module, example_inputs, example_kwargs, "zsim.capture", type(module).__name__)


def capture_module(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], where: str, name: str
) -> ModelSpec:
    """The model of a module under the name `name`. `where` begins error messages."""
    torch = require_torch(where)
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"{where}: found a {type(module).__name__}, expected a torch.nn.Module")
    from zsim.specs.capture.model import model_of
    from zsim.specs.capture.record import record

    return model_of(record(module, args, kwargs, where), name, where)


def require_torch(where: str) -> Any:
    """The module torch. Raises InputError where it is not installed."""
    alternative = "torch's CPU build, which is enough, or a preset or config.json as the model"
    require("torch", f"{where}: capturing a torch module", alternative)
    import torch

    return torch


_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def names_function(text: str) -> bool:
    """Whether `text` has the form package.module:function."""
    return _NAME.fullmatch(text) is not None


def capture_function(text: str) -> ModelSpec:
    """The model of the module that the function `package.module:function` makes.

    The function returns (module, inputs). `inputs` is a tensor, a sequence of forward's arguments, or a
    mapping of its keywords. The function is called without arguments, with the meta device as torch's
    default. Raises InputError for a function that cannot be found, fails, or returns something else.
    """
    torch = require_torch(f"model '{text}'")
    function = _load_function(text)
    where = f"model '{text}'"
    try:
        with torch.device("meta"):
            module_and_inputs = function()
    except InputError:
        raise
    except (Exception, SystemExit) as problem:  # whatever the user's code raises
        message = " ".join(str(problem).split())[:300]
        raise InputError(
            f"{where}: the function raised {type(problem).__name__}: {message}; it is called without "
            "arguments, with the meta device as torch's default, on which tensors have no values"
        ) from problem
    if (
        not isinstance(module_and_inputs, tuple | list)
        or len(module_and_inputs) != 2
        or not isinstance(module_and_inputs[0], torch.nn.Module)
    ):
        raise InputError(
            f"{where}: the function returned {_describe(module_and_inputs)}; expected (module, inputs): a "
            "torch.nn.Module, and "
            "a tensor, a sequence of its forward's arguments, or a mapping of its keywords"
        )
    module, inputs = module_and_inputs
    args, kwargs = _arguments(inputs)
    model = capture_module(module, args, kwargs, where, text.rpartition(":")[2])
    assert model.captured is not None
    return replace(model, captured=replace(model.captured, function=text))


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), {str(name): value for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of " + (
            ", ".join(type(element).__name__ for element in value) or "nothing"
        )
    return f"a {type(value).__name__}"


def _load_function(text: str) -> Callable[[], Any]:
    name, _, attribute = text.partition(":")
    module = _import_module(name, text)
    function = getattr(module, attribute, None)
    if function is None:
        names = [
            callable_name
            for callable_name, value in vars(module).items()
            if callable(value) and not callable_name.startswith("_")
        ]
        raise InputError(
            f"model '{text}': '{name}' has no '{attribute}'{did_you_mean(attribute, names)}; expected a "
            "function that returns (module, inputs)"
        )
    if not callable(function):
        raise InputError(
            f"model '{text}': '{attribute}' is a {type(function).__name__}; expected a function that returns "
            "(module, inputs)"
        )
    model_function: Callable[[], Any] = function
    return model_function


def _import_module(name: str, text: str) -> Any:
    """The module, looked for in the working directory too, as `python -m` does."""
    working_directory = str(Path.cwd())
    sys.path.insert(0, working_directory)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as problem:  # whatever the user's code raises when it is imported
        message = " ".join(str(problem).split())[:300]
        missing = isinstance(problem, ModuleNotFoundError) and problem.name in (name, name.partition(".")[0])
        expected = (
            f"a module that Python finds from {working_directory} or in its environment" if missing
            else "a module that can be imported"
        )  # fmt: skip
        raise InputError(
            f"model '{text}': cannot import '{name}': {type(problem).__name__}: {message}; expected "
            f"{expected}"
        ) from problem
    finally:
        sys.path.remove(working_directory)
