"""A module and its example's inputs -> a recording, or one clear error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zsim.errors import InputError
from zsim.specs.capture.meta_copy import low_type, meta_copy, meta_inputs
from zsim.specs.capture.recorder import Recorder
from zsim.specs.capture.recording import ModuleRecord, ModuleRecording, ParameterRecord
from zsim.specs.capture.run import run

if TYPE_CHECKING:
    from torch import Tensor, nn

_DATA = ("meta tensors", "_local_scalar_dense", "data-dependent", "aten::nonzero", "aten::item", "to meta")


def record(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> ModuleRecording:
    """Run a copy of `module` on the meta device and record it. `where` begins error messages.

    Raises InputError for a module or inputs that cannot be recorded.
    """
    low = low_type(module)
    made = meta_copy(module, low)
    parameters = dict(made.named_parameters())
    if not parameters:
        raise InputError(f"{where}: {type(module).__name__} has no parameters; expected a module to train")
    inputs, named = meta_inputs(args, kwargs, low)
    example = _inputs(inputs, named)
    if not example:
        raise InputError(
            f"{where}: no tensor among the example's inputs; expected the inputs of "
            f"{type(module).__name__}'s "
            "forward, of which the first dimension of the first counts the samples"
        )
    samples = max(1, example[0].shape[0])
    recording = ModuleRecording(samples, _positions(example), False, _tree(made), [])
    config = getattr(module, "config", None)
    recording.hidden_size = _whole(getattr(config, "hidden_size", None))
    recording.vocab_size = _whole(getattr(config, "vocab_size", None))
    recorder = Recorder(recording, low)
    for name, parameter in parameters.items():
        number = recorder.know(parameter, parameter=name)
        shape = tuple(parameter.shape)
        recording.parameters.append(ParameterRecord(name, shape, parameter.requires_grad, number))
    for buffer in made.buffers():
        recorder.know(buffer, is_input=True)
    for one in example:
        recorder.know(one, grows=one.dim() > 0 and one.shape[0] == samples, is_input=True)
    try:
        run(made, inputs, named, recorder)
    except InputError as problem:
        raise InputError(f"{where}: {problem}") from None
    except Exception as problem:  # whatever the user's code raises
        raise InputError(_why(where, module, recorder, problem)) from problem
    return recording


def _why(where: str, module: nn.Module, recorder: Recorder, problem: Exception) -> str:
    """One paragraph about an error of the module's code."""
    path = recorder.innermost()
    at = f"in '{path}' of " if path else "in "
    said = " ".join(str(problem).split()) or type(problem).__name__
    said = said if len(said) <= 300 else said[:300] + " ..."
    begin = f"{where}: {at}{type(module).__name__}: {type(problem).__name__}: {said}"
    if any(word in said for word in _DATA) or "GuardOnDataDependent" in type(problem).__name__:
        return (
            f"{begin}: the code depends on the values of tensors, and a module without weights has none; "
            "expected control flow and shapes that depend on shapes alone (experts by a grouped "
            "product instead "
            "of a loop over those that were hit)"
        )
    if "device" in said:
        return (
            f"{begin}: expected tensors that forward makes on the device of its inputs "
            "(device=x.device), and none kept on another one"
        )
    return f"{begin}; expected a forward and backward that run on these inputs"


def _inputs(args: Any, kwargs: Any) -> list[Tensor]:
    import torch
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def _positions(example: list[Tensor]) -> int | None:
    """The length of a sample where the first input is token ids."""
    first = example[0]
    return int(first.shape[1]) if first.dim() == 2 and not first.is_floating_point() else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _tree(module: nn.Module) -> dict[str, ModuleRecord]:
    import torch

    found = {}
    for path, one in module.named_modules():
        is_list = isinstance(one, torch.nn.ModuleList | torch.nn.Sequential)
        children = tuple(f"{path}.{name}" if path else name for name, _ in one.named_children())
        no_split = getattr(one, "_no_split_modules", None) or ()
        names = tuple(name for name in no_split if isinstance(name, str))
        found[path] = ModuleRecord(path, type(one).__name__, is_list, children, names)
    return found
