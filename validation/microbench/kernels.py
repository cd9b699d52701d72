"""Kernels of a transformer's step: matrix products, attention, and memory-bound kernels."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from validation.llama import RMSNorm, rotate
from validation.microbench.bench import Benchmark, sizes

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Prepared = Callable[[], Any]
_BEYOND_CACHES, _MAX_COPIES = 2**28, 256


def clock(device: str) -> str:
    return "host" if device == "cpu" else "device"


# -- products ---------------------------------------------------------------------------------------------


def gemm(device: str, quick: bool) -> Iterator[Benchmark]:
    """tokens x k times k x n: a linear layer's forward (nt), and the two products of its backward (nn, tn).

    Widths are those of the recorded small models on a CPU, of Llama-3 on a GPU.
    """
    if device == "cpu":
        widths = [(128, 128), (128, 352), (128, 512), (512, 512), (512, 1408), (1024, 4096)]
        tokens, dtypes = [128, 512, 2048], ["fp32", "bf16"]
    else:
        widths = [(4096, 4096), (4096, 14336), (4096, 128_256), (8192, 8192), (8192, 28_672)]
        tokens, dtypes = [2048, 8192], ["bf16", "tf32", "fp32"]
        if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
            dtypes.append("fp8")
    if quick:
        widths, tokens = widths[:1], tokens[:1]
    for dtype in dtypes:
        layouts = ("nt",) if quick or dtype == "fp8" else ("nt", "nn", "tn")
        asked = widths[:2] if dtype in ("tf32", "fp32") and device != "cpu" else widths
        for m, (k, n) in ((m, width) for width in asked for m in tokens):
            for layout in layouts:
                yield product(device, dtype, m, n, k, layout)


def product(device: str, dtype: str, m: int, n: int, k: int, layout: str) -> Benchmark:
    """One product; random data, because a GPU multiplies zeros faster."""
    item = 1 if dtype == "fp8" else DTYPES[dtype].itemsize
    out_item = 2 if dtype == "fp8" else item

    def operands(of: torch.dtype) -> tuple[Tensor, Tensor]:
        left = torch.randn((k, m) if layout[0] == "t" else (m, k), device=device).to(of)
        right = torch.randn((n, k) if layout[1] == "t" else (k, n), device=device).to(of)
        return left.t() if layout[0] == "t" else left, right.t() if layout[1] == "t" else right

    def prepare() -> Prepared:
        if dtype == "fp8":
            a, b = operands(torch.float8_e4m3fn)
            one = torch.ones((), device=device)
            return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        left, right = operands(DTYPES[dtype])
        return lambda: left @ right

    parameters = {"m": m, "n": n, "k": k, "layout": layout, "dtype": dtype}
    work = {"flops": 2.0 * m * n * k, "bytes": float(item * (m * k + k * n) + out_item * m * n)}
    return Benchmark("gemm", parameters, prepare, work, clock(device))


# -- attention --------------------------------------------------------------------------------------------


def attention(device: str, quick: bool) -> Iterator[Benchmark]:
    """Causal attention: forward, and forward with backward; FLOPs count the causal half only."""
    if device == "cpu":
        dtype, shapes = "fp32", [(2, 4, 64, 32), (1, 4, 128, 64), (1, 4, 512, 64), (1, 8, 1024, 64)]
    else:
        dtype, shapes = "bf16", [(1, 32, length, 128) for length in (1024, 2048, 4096, 8192, 16_384)]
    for batch, heads, length, head_dim in shapes[:1] if quick else shapes:
        for direction in ("forward", "both"):

            def prepare(
                shape: tuple[int, ...] = (batch, heads, length, head_dim), direction: str = direction
            ) -> Prepared:
                def random(grad: bool) -> Tensor:
                    return torch.randn(shape, device=device, dtype=DTYPES[dtype], requires_grad=grad)

                q, k, v = (random(direction == "both") for _ in range(3))
                upstream = random(False)
                if direction == "forward":
                    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
                return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(upstream)

            forward = 2.0 * batch * heads * length * length * head_dim  # two products, half of each masked
            flops = forward * (1 if direction == "forward" else 3.5)
            parameters: dict[str, Any] = {
                "batch": batch,
                "heads": heads,
                "length": length,
                "head_dim": head_dim,
            }
            parameters |= {"direction": direction, "dtype": dtype}
            yield Benchmark("attention", parameters, prepare, {"flops": flops}, clock(device))


# -- bound by memory --------------------------------------------------------------------------------------


def memory_bound(device: str, quick: bool) -> Iterator[Benchmark]:
    """Norms, activation, residual, rotary embedding, embedding, cross-entropy; copies and fills by size.

    `bytes` assumes that each kernel reads and writes its tensors once; pieces that run as many small kernels
    have `elements` only."""
    if device == "cpu":
        dtype, shapes = "fp32", [(128, 128, 512), (512, 512, 2048), (2048, 512, 8192)]
    else:
        dtype, shapes = "bf16", [(2048, 4096, 32_000), (8192, 4096, 128_256), (8192, 8192, 128_256)]
    for tokens, width, vocab in shapes[:1] if quick else shapes:
        yield from pieces(device, dtype, tokens, width, vocab)
    for size in list(sizes(2**14, 2**28 if device == "cpu" else 2**30))[: 2 if quick else None]:

        def copy(size: int = size) -> Prepared:
            source = torch.ones(size, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
            return lambda: target.copy_(source)

        def fill(size: int = size) -> Prepared:
            target = torch.empty(size, dtype=torch.uint8, device=device)
            return lambda: target.fill_(1)

        yield Benchmark("copy", {"bytes": size}, copy, {"bytes": 2.0 * size}, clock(device))
        yield Benchmark("fill", {"bytes": size}, fill, {"bytes": 1.0 * size}, clock(device))


def pieces(device: str, dtype: str, tokens: int, width: int, vocab: int) -> Iterator[Benchmark]:
    """Each piece forward, and with its backward."""
    item = DTYPES[dtype].itemsize
    full, logits = float(tokens * width * item), float(tokens * vocab)
    # Cross-entropy in fp32: log-softmax reads and writes, its backward reads two and writes one, the loss's
    # writes one; logits of another dtype are cast before and after.
    loss_bytes = logits * (24 + (0 if item == 4 else 8 + 2 * item))
    table = float(vocab * width * item)
    work: dict[str, tuple[dict[str, float], dict[str, float]]] = {
        "rms_norm": ({"bytes": 2 * full}, {"bytes": 5 * full}),
        "rms_norm_eager": ({}, {}),
        "silu_times": ({"bytes": 5 * full}, {"bytes": 14 * full}),
        "residual": ({"bytes": 3 * full}, {}),
        "rotary": ({}, {}),
        "embedding": ({"bytes": 2 * full}, {"bytes": 5 * full + table}),
        "cross_entropy": ({}, {"bytes": loss_bytes}),
    }
    for name, amounts in work.items():
        for direction, amount in zip(("forward", "both"), amounts, strict=True):
            if (name, direction) == ("residual", "both"):
                continue  # its backward only passes the gradient on

            def prepare(name: str = name, direction: str = direction) -> Prepared:
                both = direction == "both"
                count = most_copies(3 * full if name != "cross_entropy" else 4 * logits)
                made = [
                    make_piece(name, device, DTYPES[dtype], tokens, width, vocab, both) for _ in range(count)
                ]
                forwards, kept = itertools.cycle(made), deque[Tensor](maxlen=count)
                upstream = torch.ones_like(made[0]())

                def run() -> None:
                    output = next(forwards)()
                    if both:
                        output.backward(upstream)
                    kept.append(output.detach())

                return run

            parameters = {"tokens": tokens, "width": width, "dtype": dtype, "direction": direction}
            if name in ("embedding", "cross_entropy"):
                parameters["vocab"] = vocab
            elements = {"elements": logits if name == "cross_entropy" else float(tokens * width)}
            yield Benchmark(name, parameters, prepare, {**amount, **elements}, clock(device))


def most_copies(num_bytes: float) -> int:
    """How many copies of a piece of `num_bytes` are used in turn, so that it is not in caches when its turn
    comes again, as in a step."""
    return max(1, min(_MAX_COPIES, round(_BEYOND_CACHES / num_bytes)))


def make_piece(
    name: str, device: str, dtype: torch.dtype, tokens: int, width: int, vocab: int, grad: bool
) -> Prepared:
    """A forward function of the named piece on random data."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=grad)

    x, y = random(tokens, width), random(tokens, width)
    if name == "rms_norm":
        weight = random(width)
        return lambda: F.rms_norm(x, (width,), weight)
    if name == "rms_norm_eager":
        norm = RMSNorm(width).to(device, dtype)
        return lambda: norm(x)
    if name == "silu_times":
        return lambda: F.silu(x) * y
    if name == "residual":
        return lambda: x + y
    if name == "rotary":
        cos, sin = (torch.randn(tokens, width, device=device, dtype=dtype) for _ in range(2))
        return lambda: rotate(x, cos, sin)
    rows = torch.randint(0, vocab, (tokens,), device=device)
    if name == "embedding":
        table = random(vocab, width)
        return lambda: F.embedding(rows, table)
    assert name == "cross_entropy"
    logits = random(tokens, vocab)
    return lambda: F.cross_entropy(logits.float(), rows)
