"""Modules and inputs on the meta device, in the type that training computes in. The user's own are not
changed.

Weights in fp32 become bf16, as in mixed precision, and so do buffers and inputs. A module that has weights in
another type (bf16, fp16) keeps it. Tensors that the code itself casts to fp32 are fp32.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zsim.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def compute_dtype(module: nn.Module) -> torch.dtype:
    """The type that the module computes in: that of most of its weights, or bf16 where that is fp32
    or fp64.
    """
    import torch

    numel_per_dtype: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        if parameter.is_floating_point():
            numel_per_dtype[parameter.dtype] = numel_per_dtype.get(parameter.dtype, 0) + parameter.numel()
    main_dtype = max(numel_per_dtype, key=lambda dtype: numel_per_dtype[dtype], default=torch.float32)
    return torch.bfloat16 if main_dtype in (torch.float32, torch.float64) else main_dtype


def meta_copy(module: nn.Module, low: torch.dtype) -> nn.Module:
    """A copy of the module without weights, in which shared weights remain shared. Raises InputError for a
    module that cannot be copied.
    """
    import torch

    memo: dict[int, Any] = {}
    converts = all(
        weight.dtype in (torch.float32, torch.float64) for weight in _floating(module.parameters())
    )

    def meta(tensor: Tensor) -> Tensor:
        dtype = low if converts and tensor.is_floating_point() else tensor.dtype
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")

    for parameter in module.parameters():
        meta_parameter = torch.nn.Parameter(meta(parameter), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = meta_parameter
    for submodule in module.modules():
        for value in [*submodule._buffers.values(), *vars(submodule).values()]:
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = meta(value)
    try:
        copied_module = copy.deepcopy(module, memo)
    except Exception as problem:
        raise InputError(
            f"the module ({type(module).__name__}) cannot be copied: {problem}; expected one that "
            "copy.deepcopy copies, without open files, locks or tensors that are results of others"
        ) from None
    assert isinstance(copied_module, torch.nn.Module)
    return copied_module.train(module.training)


def _floating(tensors: Any) -> list[Any]:
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def meta_inputs(
    args: Sequence[Any], kwargs: Mapping[str, Any], low: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example's inputs on the meta device. Those in fp32 or fp64 become `low`."""
    import torch
    from torch.utils import _pytree

    def meta(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        is_wide = leaf.dtype in (torch.float32, torch.float64)
        return torch.empty(leaf.shape, dtype=low if is_wide else leaf.dtype, device="meta")

    return _pytree.tree_map(meta, (tuple(args), dict(kwargs)))  # type: ignore[no-any-return]
