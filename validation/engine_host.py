"""Host time of Transformer Engine's norms and products, on CPU tensors and without its kernels.

    python -m validation.engine_host FOLDER [--experts 1 4 16]

FOLDER holds Transformer Engine's Python as pip installs it (`pip install --target FOLDER --no-deps
transformer_engine==2.8.0`); its compiled parts, CUDA and Triton are stand-ins that do nothing, so that the
time is that of Python, torch's autograd, and a hook behind every weight like Megatron-Core's
(core/distributed/distributed_data_parallel.py). Run with `python -O`, without assertions that want a GPU.
Prints processor time in microseconds forward and backward: the quickest of 40 times ten.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import time
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from validation.megatron_host import quickest_seconds

_ROWS, _WIDTH, _TIMES = 16, 64, 40


class _Names(type):
    """Any attribute of a stand-in is a stand-in."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


class Nothing(metaclass=_Names):
    """A stand-in that can be called, decorated with and asked for anything."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __int__(self) -> int:
        return 0

    __index__ = __int__


def _class(module: Any, name: str) -> type:
    """A stand-in for a name of a module, the same each time."""
    if name.startswith("__"):
        raise AttributeError(name)
    made = _Names(name, (Nothing,), {})
    setattr(module, name, made)
    return made


def stand_in(name: str, folder: Path | None = None, **has: Any) -> None:
    """Put a module in place of one that needs a GPU; with a folder its own modules come from there."""
    module: Any = types.ModuleType(name)
    if folder is None:
        module.__getattr__ = partial(_class, module)
    else:
        module.__path__ = [str(folder)]
    for key, value in has.items():
        setattr(module, key, value)
    sys.modules[name] = module


def load_from(folder: Path) -> None:
    """Let Transformer Engine's modules be imported from a folder."""
    root, none = folder / "transformer_engine", torch.Tensor()
    stand_in("transformer_engine", root, __version__="2.8.0")
    stand_in("transformer_engine.common", root / "common", load_framework_extension=lambda name: None)
    stand_in("transformer_engine.pytorch", root / "pytorch", torch_version=lambda: (2, 13, 0))
    stand_in("transformer_engine.pytorch.module", root / "pytorch" / "module")
    importlib.import_module("torch._inductor.runtime.hints")  # looks for Triton itself
    for name in ("onnxscript", "triton", "triton.language", "transformer_engine.pytorch.onnx_extensions"):
        stand_in(name)
    stand_in(
        "transformer_engine_torch",
        generic_gemm=_product,
        te_general_grouped_gemm=lambda a, *rest: [None] * len(a),
        rmsnorm_fwd=lambda x, *rest: (torch.empty_like(x), None, torch.empty(x.shape[0])),
        rmsnorm_bwd=lambda dy, x, scale, weight, *rest: (torch.empty_like(x), torch.empty_like(weight)),
        get_num_cublas_streams=lambda: 4,
    )
    cuda: Any = torch.cuda
    cuda.is_available, cuda.is_current_stream_capturing = (lambda: True), (lambda: False)
    cuda.get_device_capability = lambda *args: (9, 0)
    cuda.get_device_properties = lambda *args: types.SimpleNamespace(
        major=9, minor=0, multi_processor_count=132
    )
    cuda.current_device = lambda: torch.device("cpu")
    cuda.device = cuda.nvtx.range = lambda *args: contextlib.nullcontext()
    cuda.Stream = cuda.current_stream = cuda.Event = lambda *args, **kwargs: Nothing()
    importlib.import_module("transformer_engine.pytorch.module.base")  # first: the others import in circles
    for name in ("utils", "cpp_extensions.gemm"):
        loaded: Any = importlib.import_module(f"transformer_engine.pytorch.{name}")
        loaded._empty_tensor, loaded.get_sm_count = (lambda: none), (lambda: 132)
    empty: Any = torch.empty
    library: Any = torch
    library.empty = lambda *size, device=None, **kwargs: empty(*size, **kwargs)


def _product(
    a: Tensor, is_a: bool, b: Tensor, is_b: bool, out: Tensor | None, *rest: Any, **more: Any
) -> Any:
    if out is None:
        columns = a.shape[0] if is_a else a.shape[-1]
        out = torch.empty(*((b.shape[-1],) if is_b else b.shape[:-1]), columns, dtype=torch.bfloat16)
    return out, None, None, None


def norm() -> Callable[[], Tensor]:
    module: Any = importlib.import_module("transformer_engine.pytorch.module.rmsnorm")
    layer = module.RMSNorm(_WIDTH, device="cpu", dtype=torch.bfloat16)
    rows = torch.randn(_ROWS, _WIDTH).bfloat16().requires_grad_()
    return lambda: layer(rows)


def hook(weight: Any) -> Callable[..., None]:
    """What Megatron-Core does behind a weight whose gradient its product has added up."""

    def added(*unused: Any) -> None:
        if weight.requires_grad:
            if weight.grad is not None and not weight.grad_added_to_main_grad:
                weight.main_grad.add_(weight.grad)
            weight.grad = None

    return added


def with_hooks(layers: Sequence[Any]) -> list[Any]:
    """The nodes behind the layers' weights, which live as long as the list does, with a hook each."""
    kept = []
    for layer in layers:
        for weight in layer.parameters():
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
            node = weight.expand_as(weight).grad_fn.next_functions[0][0]
            node.register_hook(hook(weight))
            kept.append(node)
    return kept


def dense(count: int) -> Callable[[], Tensor]:
    """So many dense products, one after the other."""
    module: Any = importlib.import_module("transformer_engine.pytorch.module.linear")
    layers = [
        module.Linear(
            _WIDTH, _WIDTH, bias=False, device="cpu", params_dtype=torch.bfloat16,
            fuse_wgrad_accumulation=True, init_method=lambda weight: None,
        )
        for _ in range(count)
    ]  # fmt: skip
    kept, rows = with_hooks(layers), torch.randn(_ROWS, _WIDTH).bfloat16().requires_grad_()

    def forward(kept: list[Any] = kept) -> Tensor:
        made = rows
        for layer in layers:
            made = layer(made)
        return made

    return forward


def products(num_experts: int) -> Callable[[], Tensor]:
    """The two products of so many experts."""
    module: Any = importlib.import_module("transformer_engine.pytorch.module.grouped_linear")
    layers = [
        module.GroupedLinear(
            num_experts, _WIDTH, _WIDTH, bias=False, device="cpu", params_dtype=torch.bfloat16,
            fuse_wgrad_accumulation=True, init_method=lambda weight: None,
        )
        for _ in range(2)
    ]  # fmt: skip
    kept, rows = with_hooks(layers), torch.randn(num_experts, _WIDTH).bfloat16().requires_grad_()

    def forward(kept: list[Any] = kept) -> Tensor:
        made: Tensor = layers[1](layers[0](rows, [1] * num_experts), [1] * num_experts)
        return made

    return forward


def call_after_call() -> float:
    """Microseconds of a call of torch's own linear layer, which say how fast the core is: 6.0 on the
    reference core (`module_call`)."""
    linear, row, found = torch.nn.Linear(8, 8), torch.randn(8, 8), []
    for _ in range(_TIMES):
        first = time.process_time()
        for _ in range(100):
            linear(row)
        found.append((time.process_time() - first) * 1e4)
    return min(found)


def main() -> None:
    """Time them, and print."""
    arguments = argparse.ArgumentParser(prog="python -O -m validation.engine_host")
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--experts", type=int, nargs="+", default=[1, 4, 16])
    given = arguments.parse_args()
    torch.set_num_threads(1)
    print(f"nn.Linear, call after call: {call_after_call():.1f} us")
    load_from(given.folder)
    timed = {"RMSNorm": quickest_seconds(norm())}
    for count in (2, 6):
        timed[f"{count} dense products"] = quickest_seconds(dense(count))
    for count in given.experts:
        timed[f"two products of {count} experts"] = quickest_seconds(products(count))
    for name, (forward, backward) in timed.items():
        print(f"{name}: forward {forward * 1e6:.1f} us, backward {backward * 1e6:.1f} us")


if __name__ == "__main__":
    main()
