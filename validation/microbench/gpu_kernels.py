"""Kernels that only a GPU has: fused attention by backend, grouped products, rows moved by index, chains of
small kernels, and the power that a kind of kernel draws."""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from validation.microbench.bench import Benchmark, sizes
from validation.microbench.kernels import DTYPES, Prepared, product

TOKENS = 16_384  # of all sequences together, in attention
CHAIN = 200
POWER_SECONDS = 3.0
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


# -- attention --------------------------------------------------------------------------------------------


def attention_backends(device: str, quick: bool) -> Iterator[Benchmark]:
    """Fused attention by library: lengths, widths of heads, masks, grouped heads, few heads, and heads whose
    values are narrower than their keys. FLOPs of a causal mask are half."""
    if device == "cpu":
        return
    lengths = (1024,) if quick else (512, 1024, 2048, 4096, 8192, 16_384)
    shapes: list[dict[str, Any]] = []
    for head_dim, heads in ((128, 32), (64, 32)):
        shapes += [{"batch": TOKENS // n, "heads": heads, "length": n, "head_dim": head_dim} for n in lengths]
    if not quick:
        base = {"batch": 4, "heads": 32, "length": 4096, "head_dim": 128}
        shapes += [base | {"kv_heads": 8}, base | {"causal": False}, base | {"head_dim": 64, "causal": False}]
        shapes += [
            base | {"head_dim": 192, "value_dim": 128},
            base | {"head_dim": 96},
            base | {"head_dim": 256},
        ]
        shapes += [base | {"batch": 1, "heads": heads, "length": n}
                   for heads in (2, 4, 8) for n in (2048, 8192)]  # fmt: skip
    for backend, shape, both in itertools.product(BACKENDS, shapes, (False, True)):
        yield fused_attention(backend, shape, both)


def fused_attention(backend: str, shape: dict[str, Any], both: bool) -> Benchmark:
    """One call of torch's attention with this backend, in bf16."""
    batch, heads, length, width = (shape[name] for name in ("batch", "heads", "length", "head_dim"))
    kv_heads, value_width = shape.get("kv_heads", heads), shape.get("value_dim", width)
    causal = shape.get("causal", True)

    def prepare() -> Prepared:
        def random(count: int, wide: int) -> Tensor:
            # as a model's projections leave them: (batch, length, heads, width), the heads moved forward
            made = torch.randn(batch, length, count, wide, device="cuda", dtype=torch.bfloat16)
            return made.transpose(1, 2).requires_grad_(both)

        q, k, v = random(heads, width), random(kv_heads, width), random(kv_heads, value_width)
        upstream = torch.randn(batch, length, heads, value_width, device="cuda", dtype=torch.bfloat16)
        upstream = upstream.transpose(1, 2)

        def run() -> None:
            with sdpa_kernel(BACKENDS[backend]):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=kv_heads != heads)
                if both:
                    out.backward(upstream)

        return run

    scores = batch * heads * length * length * (0.5 if causal else 1.0)
    forward = 2.0 * scores * (width + value_width)
    flops = forward + (2.0 * scores * (3 * width + 2 * value_width) if both else 0.0)
    parameters = {"backend": backend, "direction": "both" if both else "forward", "dtype": "bf16", **shape}
    return Benchmark("fused_attention", parameters, prepare, {"flops": flops}, "device")


# -- products ---------------------------------------------------------------------------------------------


def shard_gemm(device: str, quick: bool) -> Iterator[Benchmark]:
    """Products as tensor parallelism leaves them, odd widths, and many equal ones in one call."""
    if device == "cpu":
        return
    widths = [(8192, 1024), (1024, 8192), (8192, 3584), (3584, 8192), (2048, 768), (768, 2048)]
    widths += [(512, 512), (1024, 1024), (2048, 2048), (2048, 6144), (4096, 1792)]
    tokens = (1024,) if quick else (512, 1024, 4096)
    for m, (k, n), layout in itertools.product(tokens, widths[: 2 if quick else None], ("nt", "nn", "tn")):
        yield product(device, "bf16", m, n, k, layout)
    for k, n in ((1600, 50_257), (4095, 4096), (4098, 4096), (4096, 4100)):
        yield product(device, "bf16", 4096, n, k, "nt")
    for batch, m, n, k in (
        (32, 2048, 2048, 128),
        (32, 2048, 128, 2048),
        (32, 2048, 2048, 64),
        (128, 512, 512, 64),
    ):
        yield batched_product(batch, m, n, k)


def batched_product(batch: int, m: int, n: int, k: int) -> Benchmark:
    def prepare() -> Prepared:
        left = torch.randn(batch, m, k, device="cuda", dtype=torch.bfloat16)
        right = torch.randn(batch, n, k, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        return lambda: torch.bmm(left, right)

    parameters = {"batch": batch, "m": m, "n": n, "k": k, "dtype": "bf16"}
    work = {"flops": 2.0 * batch * m * n * k, "bytes": 2.0 * batch * (m * k + k * n + m * n)}
    return Benchmark("batched_gemm", parameters, prepare, work, "device")


def grouped_gemm(device: str, quick: bool) -> Iterator[Benchmark]:
    """Products of experts in one kernel, in bf16 and in fp8 with scales by row, and one by one on streams."""
    if device == "cpu":
        return
    cases = [
        (8, 1024, 14_336, 4096),
        (8, 4096, 14_336, 4096),
        (8, 2048, 4096, 14_336),
        (8, 256, 14_336, 4096),
    ]
    cases += [(128, 64, 1536, 2048), (128, 256, 1536, 2048), (128, 512, 2048, 768), (32, 512, 1536, 2048)]
    cases += [(32, 256, 4096, 7168), (32, 1024, 4096, 7168), (32, 1024, 7168, 2048), (8, 4096, 4096, 7168)]
    cases = cases[:1] if quick else cases
    for (experts, rows, n, k), layout in itertools.product(cases, ("nt", "nn", "tn")):
        yield grouped_product("grouped", experts, rows, n, k, layout, "bf16")
    for experts, rows, n, k in cases:
        yield grouped_product("streams", experts, rows, n, k, "nt", "bf16")
        yield grouped_product("grouped", experts, rows, n, k, "nt", "fp8")


def grouped_product(
    kernel: str, experts: int, rows: int, n: int, k: int, layout: str, dtype: str
) -> Benchmark:
    """`rows` of each expert times its weight of n x k: forward nt, gradients nn and tn."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def prepare() -> Prepared:
        total = experts * rows
        ends = torch.arange(rows, total + 1, rows, device="cuda", dtype=torch.int32)
        weights = random(experts, n, k)
        if kernel == "streams":
            return on_streams(random(total, k), weights)
        if dtype == "fp8":
            left, right = random(total, k).to(torch.float8_e4m3fn), weights.to(torch.float8_e4m3fn)
            by_row, by_column = torch.ones(total, device="cuda"), torch.ones(experts, n, device="cuda")
            return lambda: torch._scaled_grouped_mm(
                left, right.transpose(1, 2), by_row, by_column, offs=ends, out_dtype=torch.bfloat16
            )
        if layout == "tn":
            gradient, given = random(total, n), random(total, k)
            return lambda: torch._grouped_mm(gradient.t(), given, offs=ends)
        left = random(total, k if layout == "nt" else n)
        right = weights.transpose(1, 2) if layout == "nt" else weights
        return lambda: torch._grouped_mm(left, right, offs=ends)

    parameters = {"kernel": kernel, "experts": experts, "rows": rows, "n": n, "k": k}
    parameters |= {"layout": layout, "dtype": dtype}
    return Benchmark("grouped_gemm", parameters, prepare, {"flops": 2.0 * experts * rows * n * k}, "device")


def on_streams(left: Tensor, weights: Tensor) -> Prepared:
    """Every expert's product by itself, on four streams in turn, as Transformer Engine's."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    parts = left.chunk(len(weights))
    out = torch.empty(len(left), weights.shape[1], device="cuda", dtype=left.dtype).chunk(len(weights))

    def run() -> None:
        here = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(here)
        for number, (part, weight, target) in enumerate(zip(parts, weights, out, strict=True)):
            with torch.cuda.stream(streams[number % 4]):
                torch.mm(part, weight.t(), out=target)
        for stream in streams:
            here.wait_stream(stream)

    return run


# -- rows of experts --------------------------------------------------------------------------------------


def rows_by_index(device: str, quick: bool) -> Iterator[Benchmark]:
    """What rearranges tokens by expert: gathers and sums of rows, scores, choices and sorts."""
    if device == "cpu":
        return
    shapes = [(8192, 2048, 128, 8), (8192, 4096, 8, 2), (8192, 7168, 256, 8)]
    for tokens, width, experts, chosen in shapes[: 1 if quick else None]:
        for name, make in moves(tokens, width, experts, chosen).items():
            parameters = {
                "what": name, "tokens": tokens, "width": width, "experts": experts, "chosen": chosen,
            }  # fmt: skip
            yield Benchmark("rows_by_index", parameters, make, {"calls": 1.0}, "device")


def moves(tokens: int, width: int, experts: int, chosen: int) -> dict[str, Callable[[], Prepared]]:
    """Each operation, prepared on random data."""

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    def indices() -> Tensor:
        return torch.randperm(tokens * chosen, device="cuda") // chosen

    def gather() -> Prepared:
        x, rows = random(tokens, width), indices()
        return lambda: x[rows]

    def index_select() -> Prepared:
        x, rows = random(tokens, width), indices()
        return lambda: x.index_select(0, rows)

    def gather_backward() -> Prepared:
        x, rows = random(tokens, width), indices()
        gradient, into = random(tokens * chosen, width), torch.zeros_like(x)
        return lambda: into.index_put_((rows,), gradient, accumulate=True)

    def index_add() -> Prepared:
        into, rows, source = random(tokens, width), indices(), random(tokens * chosen, width)
        return lambda: into.index_add_(0, rows, source)

    def scatter_add() -> Prepared:
        into, source = random(tokens, width), random(tokens * chosen, width)
        rows = indices()[:, None].expand(-1, width)
        return lambda: into.scatter_add_(0, rows, source)

    def weigh_rows() -> Prepared:
        x, scores = random(tokens * chosen, width), random(tokens * chosen, 1, dtype=torch.float32)
        return lambda: x * scores

    def sum_chosen() -> Prepared:
        x = random(tokens, chosen, width)
        return lambda: x.sum(dim=1)

    def scores_summed_by_row() -> Prepared:
        x, y = random(tokens * chosen, width), random(tokens * chosen, width)
        return lambda: (x * y).sum(dim=-1)

    def softmax() -> Prepared:
        x = random(tokens, experts, dtype=torch.float32)
        return lambda: x.softmax(-1)

    def topk() -> Prepared:
        x = random(tokens, experts, dtype=torch.float32)
        return lambda: x.topk(chosen, dim=-1)

    def argsort() -> Prepared:
        x = torch.randint(0, experts, (tokens * chosen,), device="cuda")
        return lambda: x.argsort(stable=True)

    def histogram() -> Prepared:
        x = torch.randint(0, experts, (tokens * chosen,), device="cuda").int()
        return lambda: torch.histc(x, bins=experts, min=0, max=experts - 1)

    def strided_product() -> Prepared:
        both, row = random(tokens, 2 * width), random(tokens, 1)
        return lambda: both[:, ::2] * row

    def chunked_product() -> Prepared:
        both = random(tokens, 2 * width)
        return lambda: both[:, :width] * both[:, width:]

    made = [
        gather, index_select, gather_backward, index_add, scatter_add, weigh_rows, sum_chosen,
        scores_summed_by_row, softmax, topk, argsort, histogram, strided_product, chunked_product,
    ]  # fmt: skip
    return {make.__name__: make for make in made}


# -- small kernels, and power -----------------------------------------------------------------------------


def chains(device: str, quick: bool) -> Iterator[Benchmark]:
    """Additions that depend on one another, in a graph (the device's time alone) and eager (what a stream
    can be fed): by bytes read and written."""
    if device == "cpu":
        return
    for size in itertools.chain((4,), sizes(2**14, 2**16 if quick else 2**26)):
        for how in ("graph", "eager"):

            def prepare(size: int = size, how: str = how) -> Prepared:
                x = torch.zeros(size // 4, device="cuda")
                return chain(x, captured=how == "graph")

            work = {"calls": float(CHAIN), "bytes": 2.0 * size * CHAIN}
            yield Benchmark("chain", {"how": how, "bytes": size}, prepare, work, "device")


def chain(x: Tensor, *, captured: bool) -> Prepared:
    def run() -> None:
        for _ in range(CHAIN):
            x.add_(1)

    if not captured:
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def sustained(quick: bool) -> list[dict[str, Any]]:
    """Seconds of one kind of kernel repeated for three seconds, with the power and the clock meanwhile."""
    works = power_works()
    return [watch(name, *works[name]) for name in list(works)[: 2 if quick else None]]


def power_works() -> dict[str, tuple[Callable[[], Prepared], float]]:
    """What is run, and its FLOPs or bytes."""
    width, size = 8192, 2**30

    def attend() -> Prepared:
        shape = {"batch": 4, "heads": 32, "length": 4096, "head_dim": 128}
        return fused_attention("flash", shape, True).prepare()

    def add() -> Prepared:
        x, y = (torch.randn(size // 2, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return lambda: torch.add(x, y, out=x)

    def update() -> Prepared:
        parameter = torch.nn.Parameter(torch.randn(size // 4, device="cuda"))
        parameter.grad = torch.randn_like(parameter)
        return torch.optim.AdamW([parameter], fused=True).step

    return {
        "idle": (lambda: lambda: time.sleep(0.01), 0.0),
        "gemm_bf16": (product("cuda", "bf16", width, width, width, "nt").prepare, 2.0 * width**3),
        "gemm_fp8": (product("cuda", "fp8", width, width, width, "nt").prepare, 2.0 * width**3),
        "gemm_bf16_4096x14336": (
            product("cuda", "bf16", 8192, 14_336, 4096, "nt").prepare, 2.0 * 8192 * 14_336 * 4096,
        ),
        "attention_both": (attend, 3.5 * 4.0 * 4 * 32 * 4096**2 * 128 / 2),
        "addition": (add, 3.0 * size),
        "adamw": (update, 7.0 * size),
    }  # fmt: skip


def watch(name: str, prepare: Callable[[], Prepared], amount: float) -> dict[str, Any]:
    """Run for some seconds and read power and clock every 100 ms: the first second does not count."""
    run = prepare()
    words = [
        "nvidia-smi",
        "--query-gpu=power.draw,clocks.sm,temperature.gpu",
        "--format=csv,noheader,nounits",
    ]
    reader = subprocess.Popen([*words, "--id=0", "-lms", "100"], stdout=subprocess.PIPE, text=True)
    begun, rates = time.perf_counter(), []
    while time.perf_counter() - begun < POWER_SECONDS:
        start, calls = time.perf_counter(), 20
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        rates.append((time.perf_counter() - start) / calls)
    reader.terminate()
    lines = reader.communicate()[0].splitlines()
    readings = [values for values in map(_numbers, lines) if len(values) == 3]
    late = readings[len(readings) // 3 :]
    mean = [round(sum(column) / len(column), 1) for column in zip(*late, strict=True)] if late else []
    return {
        "what": name, "amount": amount, "seconds_each_first": rates[0], "seconds_each_last": rates[-1],
        "watts_mhz_celsius": mean, "readings": len(late),
    }  # fmt: skip


def _numbers(line: str) -> Sequence[float]:
    try:
        return [float(value) for value in line.split(",")]
    except ValueError:
        return []


__all__ = [
    "DTYPES",
    "attention_backends",
    "chains",
    "grouped_gemm",
    "rows_by_index",
    "shard_gemm",
    "sustained",
]
