"""Eager kernels between Megatron's fused ones, held against what torch dispatches for the same operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zsim.cost.kernels.elementwise import activation_cost
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations import FORWARD
from zsim.operations.attention.rotary import rotary_backward, rotary_forward
from zsim.specs.model.huggingface import model_from_config
from zsim.specs.model.spec import Attention
from zsim.specs.strategy.training import layer_kernel_sets

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402


class _Seen(TorchDispatchMode):
    """Bytes of what each operator reads and writes, and elements of those that read a slice or broadcast."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes, self.walked, self.launches = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        given = given[1:] if "copy_" in str(func) else given  # the first is only written
        made = func(*args, **(kwargs or {}))
        is_made = isinstance(made, torch.Tensor) and made.dim() and not func.is_view
        is_made = is_made and "empty" not in str(func)
        if is_made and "ones_like" not in str(func) and "detach" not in str(func):
            full = [one for one in given if one.dim() and one.numel() * 8 > made.numel()]
            self.num_bytes += sum(one.numel() * one.element_size() for one in (*full, made))
            is_copy = any(word in str(func) for word in ("cat", "slice_backward"))
            walks = len(full) < sum(one.dim() > 0 for one in given) or any(
                not one.is_contiguous() for one in full
            )
            self.walked += made.numel() if walks and not is_copy else 0
            self.launches += 1
        return made


def seen(function: Callable[[Any], Any], given: Any) -> tuple[_Seen, _Seen]:
    with _Seen() as forward:
        made = function(given)
    with _Seen() as backward:
        made.backward(torch.ones_like(made))
    return forward, backward


def clamped(rows: Any) -> Any:
    """What `weighted_bias_quick_geglu_impl` does before its fused kernel."""
    gate, up = rows.chunk(2, -1)
    return torch.cat((gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)), -1)


def test_megatron_clamps_before_its_fused_activation() -> None:
    """As torch dispatches it, and the fused kernel's 3 and 5 tensors of one half."""
    cost = activation_cost("clamped_quick_gelu", is_gated=True, is_fused=True)
    half = 64 * 128
    forward, backward = seen(clamped, torch.ones(64, 256, dtype=torch.bfloat16, requires_grad=True))
    for passes, count, fused in ((cost.forward, forward, 3), (cost.backward, backward, 5)):
        assert passes.strided is not None
        assert (passes.tensors - fused) * half * 2 == count.num_bytes
        assert passes.strided.elements * half == count.walked
    assert cost.forward.launches == forward.launches + 1
    assert cost.saved == 4


def rotated(heads: Any, angles: Any) -> Any:
    """Rotary positions with a factor, in the operators of Megatron's own path."""
    cosines, sines = ((one(angles) * 1.3).to(heads.dtype) for one in (torch.cos, torch.sin))
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    nothing = heads[..., angles.shape[-1] :]
    return torch.cat((heads[..., : angles.shape[-1]] * cosines + turned * sines, nothing), dim=-1)


def test_megatron_scales_rotary_positions_in_eager_kernels() -> None:
    """As torch dispatches it; cosines and sines of one sequence are small beside 64 heads of 8 batches."""
    angles = torch.ones(16, 1, 1, 32)
    heads = torch.ones(16, 8, 64, 32, dtype=torch.bfloat16, requires_grad=True)
    passes_of = layer_kernel_sets()["megatron"].scaled_rotary
    assert passes_of is not None
    for passes, count in zip(passes_of, seen(lambda one: rotated(one, angles), heads), strict=True):
        assert passes.strided is not None
        assert passes.tensors * heads.numel() * 2 == pytest.approx(count.num_bytes, rel=0.01)
        assert passes.strided.elements * heads.numel() == pytest.approx(count.walked, rel=0.01)


def rotated_by_document(heads: Any, angles: Any) -> Any:
    """Documents of as many tokens as there are angles, one after the other, as Megatron-Core 0.19 does."""
    output, length = torch.empty_like(heads), angles.shape[0]
    for index, document in enumerate(heads.split(length)):
        output.narrow(0, index * length, length).copy_(rotated(document, angles))
    return output


def test_megatron_rotates_packed_documents_one_after_the_other() -> None:
    """Eight documents as torch dispatches them, of queries and of as many keys."""
    angles = torch.ones(64, 1, 1, 32)
    heads = torch.ones(512, 1, 64, 32, dtype=torch.bfloat16, requires_grad=True)
    counts = seen(lambda one: rotated_by_document(one * 1, angles), heads)
    spec = Attention(num_heads=64, num_kv_heads=64, qk_head_dim=32, v_head_dim=32)
    shape = BatchShape(1, 512, span=64.0, documents=8.0)
    for direction, count in zip((rotary_forward, rotary_backward), counts, strict=True):
        launches, num_bytes = {}, {}
        for name in ("megatron", "megatron-eager-rope", "megatron-0.19-eager-rope"):
            kernels = direction(spec, shape, WorkOptions(compile=True, layers=layer_kernel_sets()[name]))
            launches[name] = sum(kernel.launches for kernel in kernels)
            num_bytes[name] = sum(kernel.hbm_bytes for kernel in kernels) / 2
        assert launches["megatron"] == 1
        assert launches["megatron-0.19-eager-rope"] / 2 == pytest.approx(count.launches - 1, abs=1)
        moved = count.num_bytes - 2 * heads.numel() * 2  # the product with one in front
        assert num_bytes["megatron-0.19-eager-rope"] == pytest.approx(moved, rel=0.03)
        assert launches["megatron-eager-rope"] < launches["megatron-0.19-eager-rope"] / 8


@pytest.mark.parametrize("layers", ["megatron", "megatron-eager-rope"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_keys_of_an_earlier_layer_are_not_rotated_again(layers: str, is_compiled: bool) -> None:
    """As many heads of keys as of queries: a layer that reads keys has half of the work."""
    options = WorkOptions(compile=is_compiled, layers=layer_kernel_sets()[layers])
    spec = Attention(num_heads=64, num_kv_heads=64, qk_head_dim=32, v_head_dim=32)
    for direction in (rotary_forward, rotary_backward):
        num_bytes, read_bytes = (
            sum(kernel.hbm_bytes for kernel in direction(each, BatchShape(1, 512), options))
            for each in (spec, replace(spec, reads_keys=True))
        )
        assert read_bytes == num_bytes / 2


@pytest.mark.parametrize(("rope", "is_eager"), [({}, True), ({"rope_type": "default"}, False)])
def test_megatron_rotates_in_one_kernel_without_a_factor(rope: dict[str, str], is_eager: bool) -> None:
    """gpt-oss has YaRN's unless its file says otherwise; torch.compile fuses the factor."""
    model = {
        "model_type": "gpt_oss", "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "num_local_experts": 16,
        "rope_parameters": rope,
    }  # fmt: skip
    made = model_from_config(model, "gpt-oss", "a test")
    core = next(one for one in made.blocks[-1].modules if isinstance(one.op_spec, Attention))
    shape = BatchShape(2, 512)
    for name, is_slow in (("megatron", is_eager), ("torch", False)):
        options = WorkOptions(compile=True, layers=layer_kernel_sets()[name])
        kernels = core.kernels(FORWARD, shape, options)
        assert any(one.indexed_elements for one in kernels) == is_slow
