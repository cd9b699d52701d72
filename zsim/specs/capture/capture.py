"""`zsim.capture`: a torch module and an example of its inputs -> a model to simulate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zsim.errors import InputError
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
