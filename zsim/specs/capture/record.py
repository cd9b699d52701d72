"""A module and its example's inputs -> a recording, or one clear error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zsim.errors import InputError
from zsim.specs.capture.meta_copy import compute_dtype, meta_copy, meta_inputs
from zsim.specs.capture.recorder import Recorder
from zsim.specs.capture.recording import ModuleRecord, ModuleRecording, ParameterRecord
from zsim.specs.capture.run import run

if TYPE_CHECKING:
    from torch import Tensor, nn

_DATA_DEPENDENT_MARKS = (
    "meta tensors",
    "_local_scalar_dense",
    "data-dependent",
    "aten::nonzero",
    "aten::item",
    "to meta",
)


def record(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> ModuleRecording:
    """Run a copy of `module` on the meta device and record it. `where` begins error messages.

    Raises InputError for a module or inputs that cannot be recorded.
    """
    low = compute_dtype(module)
    meta_module = meta_copy(module, low)
    parameters = dict(meta_module.named_parameters())
    if not parameters:
        raise InputError(f"{where}: {type(module).__name__} has no parameters; expected a module to train")
    inputs, keywords = meta_inputs(args, kwargs, low)
    example = _inputs(inputs, keywords)
    if not example:
        raise InputError(
            f"{where}: no tensor among the example's inputs; expected the inputs of "
            f"{type(module).__name__}'s "
            "forward, of which the first dimension of the first counts the samples"
        )
    samples = max(1, example[0].shape[0])
    recording = ModuleRecording(samples, _positions(example), False, _module_tree(meta_module), [])
    config = getattr(module, "config", None)
    recording.hidden_size = _positive_integer(getattr(config, "hidden_size", None))
    recording.vocab_size = _positive_integer(getattr(config, "vocab_size", None))
    recorder = Recorder(recording, low)
    for name, parameter in parameters.items():
        number = recorder.register(parameter, parameter=name)
        shape = tuple(parameter.shape)
        recording.parameters.append(ParameterRecord(name, shape, parameter.requires_grad, number))
    for buffer in meta_module.buffers():
        recorder.register(buffer, is_input=True)
    for tensor in example:
        recorder.register(tensor, grows=tensor.dim() > 0 and tensor.shape[0] == samples, is_input=True)
    try:
        run(meta_module, inputs, keywords, recorder)
    except InputError as problem:
        raise InputError(f"{where}: {problem}") from None
    except Exception as problem:  # whatever the user's code raises
        raise InputError(_explain_error(where, module, recorder, problem)) from problem
    return recording


def _explain_error(where: str, module: nn.Module, recorder: Recorder, problem: Exception) -> str:
    """One paragraph about an error of the module's code."""
    path = recorder.innermost()
    location = f"in '{path}' of " if path else "in "
    message = " ".join(str(problem).split()) or type(problem).__name__
    message = message if len(message) <= 300 else message[:300] + " ..."
    prefix = f"{where}: {location}{type(module).__name__}: {type(problem).__name__}: {message}"
    if (
        any(word in message for word in _DATA_DEPENDENT_MARKS)
        or "GuardOnDataDependent" in type(problem).__name__
    ):
        return (
            f"{prefix}: the code depends on the values of tensors, and a module without weights has none; "
            "expected control flow and shapes that depend on shapes alone (experts by a grouped "
            "product instead "
            "of a loop over those that were hit)"
        )
    if "device" in message:
        return (
            f"{prefix}: expected tensors that forward makes on the device of its inputs "
            "(device=x.device), and none kept on another one"
        )
    return f"{prefix}; expected a forward and backward that run on these inputs"


def _inputs(args: Any, kwargs: Any) -> list[Tensor]:
    import torch
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def _positions(example: list[Tensor]) -> int | None:
    """The length of a sample where the first input is token ids."""
    first = example[0]
    return int(first.shape[1]) if first.dim() == 2 and not first.is_floating_point() else None


def _positive_integer(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _module_tree(module: nn.Module) -> dict[str, ModuleRecord]:
    import torch

    records = {}
    for path, submodule in module.named_modules():
        is_list = isinstance(submodule, torch.nn.ModuleList | torch.nn.Sequential)
        children = tuple(f"{path}.{name}" if path else name for name, _ in submodule.named_children())
        no_split = getattr(submodule, "_no_split_modules", None) or ()
        names = tuple(name for name in no_split if isinstance(name, str))
        records[path] = ModuleRecord(path, type(submodule).__name__, is_list, children, names)
    return records
