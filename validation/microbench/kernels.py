"""Kernels of a transformer's step, and what the host spends on issuing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from validation.calls import Call
from validation.microbench.bench import Benchmark, sizes
from validation.tracing import Tracer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def gemm(device: str, quick: bool) -> Iterator[Benchmark]:
    """tokens x k times k x n: a linear layer forward (nt), and its two products in backward (nn, tn).

    Random data: a GPU multiplies zeros faster.
    """
    scale = 1 if device == "cpu" else 8
    widths = [(512, 512), (512, 1408), (1024, 1024)]
    shapes = [(256 * scale, n * scale, k * scale) for k, n in (widths[:1] if quick else widths)]
    for dtype in ("fp32", "bf16"):
        for m, n, k in shapes:
            for layout in ("nt",) if quick else ("nt", "nn", "tn"):

                def prepare(
                    m: int = m, n: int = n, k: int = k, layout: str = layout, dtype: str = dtype
                ) -> Any:
                    options: Any = {"device": device, "dtype": DTYPES[dtype]}
                    left = torch.randn((k, m) if layout[0] == "t" else (m, k), **options)
                    right = torch.randn((n, k) if layout[1] == "t" else (k, n), **options)
                    left = left.t() if layout[0] == "t" else left
                    right = right.t() if layout[1] == "t" else right
                    return lambda: left @ right

                size = DTYPES[dtype].itemsize * (m * k + k * n + m * n)
                parameters = {"m": m, "n": n, "k": k, "layout": layout, "dtype": dtype}
                yield Benchmark("gemm", parameters, prepare, {"flops": 2.0 * m * n * k, "bytes": size})


def attention(device: str, quick: bool) -> Iterator[Benchmark]:
    """Causal attention, forward, and forward with backward; FLOPs are of the causal half."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    lengths = (128, 512) if device == "cpu" else (1024, 4096, 8192)
    heads, head_dim = (4, 64) if device == "cpu" else (32, 128)
    for length in lengths[:1] if quick else lengths:
        for direction in ("forward", "both"):

            def prepare(length: int = length, direction: str = direction) -> Callable[[], Any]:
                shape = (1, heads, length, head_dim)
                q, k, v = (
                    torch.randn(shape, device=device, dtype=dtype, requires_grad=direction == "both")
                    for _ in range(3)
                )
                grad = torch.randn(shape, device=device, dtype=dtype)
                if direction == "forward":
                    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
                return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)

            forward = 2.0 * heads * length * length * head_dim  # two products, half of each masked away
            parameters = {"heads": heads, "length": length, "head_dim": head_dim, "direction": direction}
            flops = forward * (1 if direction == "forward" else 3.5)
            yield Benchmark("attention", {**parameters, "dtype": str(dtype)[6:]}, prepare, {"flops": flops})


def memory_bound(device: str, quick: bool) -> Iterator[Benchmark]:
    """Norm, activation, residual, embedding, cross-entropy, and a plain copy and fill."""
    tokens, width, vocab = (256, 512, 2048) if device == "cpu" else (8192, 4096, 128_256)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    item = dtype.itemsize

    def tensor(*shape: int, grad: bool = False) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=grad)

    def norm() -> Callable[[], Any]:
        x, weight = tensor(tokens, width), tensor(width)
        return lambda: F.rms_norm(x, (width,), weight)

    def silu_times() -> Callable[[], Any]:
        gate, up = tensor(tokens, width), tensor(tokens, width)
        return lambda: F.silu(gate) * up

    def residual() -> Callable[[], Any]:
        a, b = tensor(tokens, width), tensor(tokens, width)
        return lambda: a + b

    def embedding() -> Callable[[], Any]:
        table = tensor(vocab, width)
        rows = torch.randint(0, vocab, (tokens,), device=device)
        return lambda: F.embedding(rows, table)

    def cross_entropy() -> Callable[[], Any]:
        logits = tensor(tokens, vocab, grad=True)
        labels = torch.randint(0, vocab, (tokens,), device=device)
        return lambda: F.cross_entropy(logits.float(), labels).backward()

    full = float(tokens * width * item)
    for name, prepare, count in (
        ("rms_norm", norm, 2 * full),
        ("silu_times", silu_times, 5 * full),
        ("residual", residual, 3 * full),
        ("embedding", embedding, 2 * full),
        ("cross_entropy", cross_entropy, float(tokens * vocab * (3 * item + 24))),
    ):
        yield Benchmark(name, {"tokens": tokens, "width": width}, prepare, {"bytes": count})
    for size in list(sizes(2**16, 2**26 if device == "cpu" else 2**30))[: 2 if quick else None]:

        def copy(size: int = size) -> Callable[[], Any]:
            source = torch.ones(size, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
            return lambda: target.copy_(source)

        yield Benchmark("copy", {"bytes": size}, copy, {"bytes": 2.0 * size})


def optimizers(device: str, quick: bool) -> Iterator[Benchmark]:
    """AdamW, 28 bytes per parameter (reads p, g, m, v; writes p, m, v); on a GPU also the CPU's."""
    for place in dict.fromkeys((device, "cpu")):
        for numel in (10**6,) if quick else (10**6, 10**7):
            for kind in ("fused", "foreach", "loop"):

                def prepare(place: str = place, numel: int = numel, kind: str = kind) -> Callable[[], Any]:
                    parameter = nn.Parameter(torch.randn(numel, device=place))
                    parameter.grad = torch.randn(numel, device=place)
                    return torch.optim.AdamW(
                        [parameter], fused=kind == "fused", foreach=kind == "foreach"
                    ).step

                parameters = {"kind": kind, "place": place, "numel": numel}
                yield Benchmark("adamw", parameters, prepare, {"bytes": 28.0 * numel, "elements": numel})


def host(device: str, quick: bool) -> Iterator[Benchmark]:
    """What the host spends: launching a small kernel, calling a module, four hooks more, a trace event."""
    calls = 1000

    def launch() -> Callable[[], Any]:
        x = torch.zeros(1, device=device)

        def run() -> None:
            for _ in range(calls):
                x.add_(1)

        return run

    def module(with_hooks: bool) -> Callable[[], Callable[[], Any]]:
        def prepare() -> Callable[[], Any]:
            layer, x = nn.Identity(), torch.zeros(1)
            if with_hooks:
                for _ in range(2):
                    layer.register_forward_pre_hook(lambda module, args: None)
                    layer.register_forward_hook(lambda module, args, output: None)

            def run() -> None:
                for _ in range(calls):
                    layer(x)

            return run

        return prepare

    def trace_event() -> Callable[[], Any]:
        call = Call("all_gather", 1, "fp32", 2)

        def run() -> None:
            tracer = Tracer()
            for _ in range(calls):
                tracer.collective(call).finished()

        return run

    for name, prepare in (
        ("launch", launch),
        ("module_call", module(False)),
        ("module_call_with_4_hooks", module(True)),
        ("trace_event", trace_event),
    ):
        yield Benchmark("host", {"what": name, "calls": calls}, prepare)
