"""Runs a module on the meta device under torch's modes, forward and backward.

Where torch chooses another code on the meta device than on a GPU, the GPU's is taken: fused attention (torch
2.13 `scaled_dot_product_attention`: q, k, v, output and log-sum-exp are kept), dropout with a mask of one
byte (`native_dropout`), RMSNorm as one kernel (`_fused_rms_norm`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zsim.errors import InputError
from zsim.specs.capture.recorder import Recorder
from zsim.specs.capture.recording import Product

if TYPE_CHECKING:
    from torch import Tensor, nn


def run(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], recorder: Recorder) -> Any:
    """Run forward and backward of `module`, and return the output of forward. Errors of torch pass
    through.
    """
    import torch
    from torch.autograd.graph import saved_tensors_hooks
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            answer = recorder.answer_condition(func, args)
            if answer is not None:
                return answer
            out = func(*args, **(kwargs or {}))
            recorder.record_operator(func, args, kwargs or {}, out)
            return out

    gpu_functions = _gpu_functions(recorder)

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            return gpu_functions.get(func, func)(*args, **(kwargs or {}))

    handles = _install_hooks(module, recorder)
    try:
        with torch.device("meta"), Functions(), Dispatch():  # type: ignore[no-untyped-call]
            with torch.enable_grad(), saved_tensors_hooks(recorder.record_saved, lambda kept: kept):
                out = module(*args, **kwargs)
            losses = loss_of(out)
            recorder.recording.has_loss = len(losses) == 1 and losses[0].dim() == 0
            roots = [output for output in (losses or outputs_of(out)) if output.requires_grad]
            if not roots:
                raise InputError(
                    "no output of the module depends on a trainable parameter, so there is no backward; "
                    "expected parameters with requires_grad = True, and an output that uses them"
                )
            recorder.is_paused = True
            gradients = [torch.ones_like(root, memory_format=torch.contiguous_format) for root in roots]
            for gradient in gradients:
                recorder.register(gradient, grows=True)
            recorder.is_paused = False
            recorder.begin_backward(roots)
            torch.autograd.backward(roots, gradients)
            recorder.mark_gradients(p.grad for p in module.parameters() if p.grad is not None)
    finally:
        for handle in handles:
            handle.remove()
    return out


def loss_of(out: Any) -> list[Tensor]:
    """The loss in the output of a module, or [] if there is none.

    It is a scalar output, `loss` of an object or a mapping, or the first scalar of a sequence.
    """
    import torch

    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", out)
    if isinstance(loss, tuple | list):
        loss = next(
            (element for element in loss if isinstance(element, torch.Tensor) and element.dim() == 0), None
        )
    is_scalar = isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.is_floating_point()
    return [loss] if is_scalar and isinstance(loss, torch.Tensor) else []


def outputs_of(out: Any) -> list[Tensor]:
    """All floating-point tensors that a module returned."""
    import torch
    from torch.utils import _pytree

    tree = dict(out) if isinstance(out, Mapping) else getattr(out, "__dict__", out)
    leaves = _pytree.tree_leaves(out) if not isinstance(out, Mapping) else _pytree.tree_leaves(tree)
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        leaves = _pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _install_hooks(module: nn.Module, recorder: Recorder) -> list[Any]:
    """Hooks that tell the recorder which module runs."""
    import torch
    from torch.utils import _pytree

    handles: list[Any] = []
    for path, submodule in module.named_modules():

        def enter_module(_: Any, args: Any, kwargs: Any, path: str = path) -> None:
            leaves = _pytree.tree_leaves((args, kwargs))
            recorder.enter(path, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])

        def leave_module(_: Any, args: Any, out: Any) -> None:
            recorder.leave()

        handles.append(submodule.register_forward_pre_hook(enter_module, with_kwargs=True, prepend=True))
        handles.append(submodule.register_forward_hook(leave_module))
    return handles


def _gpu_functions(recorder: Recorder) -> dict[Any, Callable[..., Any]]:
    """Functions of torch that run other code on the meta device than on a GPU -> what a GPU runs."""
    import torch
    import torch.nn.functional as F

    fused = _fused_attention(recorder)

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if query.dim() < 4:  # one head, or one sample
            missing = 4 - query.dim()
            query, key, value = (tensor[(None,) * missing] for tensor in (query, key, value))
            out = fused.apply(query, key, value, attn_mask, dropout_p, is_causal)
            return out[(0,) * missing]
        batch = query.shape[:-3]
        if query.dim() > 4:
            query, key, value = (tensor.flatten(0, -4) for tensor in (query, key, value))
        out = fused.apply(query, key, value, attn_mask, dropout_p, is_causal)
        return out.unflatten(0, batch) if len(batch) > 1 else out

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(x, p, True)[0] if training and p > 0 else x

    def functional_dropout(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        return dropout(input, p, training)

    def rms_norm(
        input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Any:
        return torch.ops.aten._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]

    def format_tensor(x: Tensor, form: str = "") -> str:
        return "(no value)" if x.is_meta else f"{x.item()}" if x.dim() == 0 else str(x)

    return {
        F.scaled_dot_product_attention: attention,
        torch.Tensor.__format__: format_tensor,  # messages of checks, made before they are needed
        F.dropout: functional_dropout,
        torch.dropout: dropout,
        F.rms_norm: rms_norm,
        torch.rms_norm: rms_norm,
    }


def _fused_attention(recorder: Recorder) -> Any:
    """Fused attention as a node of autograd, which keeps what FlashAttention keeps."""
    import torch

    def product(
        q: Tensor, k: Tensor, v: Tensor, *, is_backward: bool, is_causal: bool, mask: bool, p: float
    ) -> Product:
        batch, heads, queries, width = q.shape
        keys, v_width = k.shape[2], v.shape[3]
        pairs = queries * keys - (queries * queries / 2 if is_causal else 0.0)
        flops = 2.0 * batch * heads * pairs * (width + v_width) * (2.5 if is_backward else 1.0)
        kind = "attention_backward" if is_backward else "attention_forward"
        return Product(
            kind, flops, (batch * heads, queries, keys, width), 0, is_causal=is_causal, dropout=p,
            heads=heads, kv_heads=k.shape[1], v_head_dim=v_width, has_mask=mask,
        )  # fmt: skip

    class FusedAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, causal: bool) -> Tensor:
            recorder.start_site()
            batch, heads, queries, _ = q.shape
            out = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)
            lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
            masks = [mask] if mask is not None else []
            attention_product = product(
                q, k, v, is_backward=False, is_causal=causal, mask=mask is not None, p=p
            )
            recorder.record_attention("fused attention", [q, k, v, *masks], [out, lse], attention_product)
            ctx.save_for_backward(q, k, v, out, lse, *masks)
            ctx.is_causal, ctx.p = causal, p
            return out

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            q, k, v, out, lse, *masks = ctx.saved_tensors
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            mask_gradient = torch.empty_like(masks[0]) if masks and ctx.needs_input_grad[3] else None
            attention_product = product(
                q, k, v, is_backward=True, is_causal=ctx.is_causal, mask=bool(masks), p=ctx.p
            )
            outputs = [dq, dk, dv] + ([mask_gradient] if mask_gradient is not None else [])
            recorder.record_attention(
                "fused attention backward", [q, k, v, out, lse, grad, *masks], outputs, attention_product
            )
            return dq, dk, dv, mask_gradient, None, None

    return FusedAttention
