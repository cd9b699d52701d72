"""A module and its example's inputs -> a recording, or one clear error.

Modules and inputs are copied to the meta device, in the type that training computes in. The user's own are
not changed.

Weights in fp32 become bf16, as in mixed precision, and so do buffers and inputs. A module that has weights in
another type (bf16, fp16) keeps it. Tensors that the code itself casts to fp32 are fp32.

# [Note: the GPU's code]
Where torch chooses another code on the meta device than on a GPU, the GPU's is taken: fused attention (torch
2.13 `scaled_dot_product_attention`: q, k, v, output and log-sum-exp are kept), dropout with a mask of one
byte (`native_dropout`), RMSNorm as one kernel (`_fused_rms_norm`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zsim.errors import InputError
from zsim.specs.capture.recorder import Recorder, tensors_of
from zsim.specs.capture.recording import ModuleRecord, ModuleRecording, ParameterRecord, Product

if TYPE_CHECKING:
    import torch
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
    example = tensors_of((inputs, keywords))
    if not example:
        raise InputError(
            f"{where}: no tensor among the example's inputs; expected the inputs of "
            f"{type(module).__name__}'s forward, of which the first dimension of the first counts the samples"
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
        recorder.register(buffer)
    for tensor in example:
        recorder.register(tensor, grows=tensor.dim() > 0 and tensor.shape[0] == samples)
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
            "expected control flow and shapes that depend on shapes alone (experts by a grouped product "
            "instead of a loop over those that were hit)"
        )
    if "device" in message:
        return (
            f"{prefix}: expected tensors that forward makes on the device of its inputs "
            "(device=x.device), and none kept on another one"
        )
    return f"{prefix}; expected a forward and backward that run on these inputs"


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
        weight.dtype in (torch.float32, torch.float64)
        for weight in module.parameters()
        if weight.is_floating_point()
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
    tensors = tensors_of(dict(out) if isinstance(out, Mapping) else out)
    tensors = tensors or tensors_of(getattr(out, "__dict__", ()))
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _install_hooks(module: nn.Module, recorder: Recorder) -> list[Any]:
    """Hooks that tell the recorder which module runs."""
    handles: list[Any] = []
    for path, submodule in module.named_modules():

        def enter_module(_: Any, args: Any, kwargs: Any, path: str = path) -> None:
            recorder.enter(path, tensors_of((args, kwargs)))

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
