"""RMSNorm as one operator, forward and backward, as it is one kernel on a GPU.

# [Note: one kernel where the GPU has one kernel]
On a GPU `torch.nn.RMSNorm` is one fused kernel that keeps its input and one number per row for the
backward pass. On a CPU torch takes it apart into fp32 pieces which are all kept, and memory counted there
would be wrong by gigabytes. The operator below computes the same anywhere, keeps what the fused kernel
keeps, and needs no kernel at all with fake tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("zsim_validation::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) * weight, and 1 / rms(x) of each row in fp32."""
    wide = x.float()
    reciprocal = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * reciprocal * weight.float()).to(x.dtype), reciprocal


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("zsim_validation::rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, reciprocal: Tensor) -> tuple[Tensor, Tensor]:
    """With n = x / rms(x) and h = grad * weight: dx = (h - n * mean(h * n)) / rms(x), dw = sum(grad * n)."""
    normed = x.float() * reciprocal
    scaled = grad.float() * weight.float()
    grad_x = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * reciprocal
    grad_weight = (grad.float() * normed).flatten(0, -2).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


@rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, reciprocal: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor, None]:
    grad_x, grad_weight = rms_norm_backward(grad, *ctx.saved_tensors)
    return grad_x, grad_weight, None


rms_norm.register_autograd(_backward, setup_context=_save)
