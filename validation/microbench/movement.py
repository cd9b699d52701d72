"""Bytes between host and GPU, between ranks, and to and from files."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from validation.microbench.bench import Benchmark, sizes, spread
from validation.zero.collectives import Collectives
from validation.zero.files import Buffer, DirectFile


def host_copies(device: str, quick: bool) -> Iterator[Benchmark]:
    """To the GPU and back, pinned and pageable, one way and both ways at once; nothing without a GPU."""
    if device == "cpu":
        return
    for size in list(sizes(2**14, 2**30))[: 3 if quick else None]:
        for pinned in (True, False):
            for way in ("h2d", "d2h", "both"):

                def prepare(size: int = size, pinned: bool = pinned, way: str = way) -> Callable[[], Any]:
                    down = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
                    up = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
                    second = torch.cuda.Stream()

                    def both() -> None:
                        up[0].copy_(down[0], non_blocking=True)
                        with torch.cuda.stream(second):
                            down[1].copy_(up[1], non_blocking=True)
                        torch.cuda.current_stream().wait_stream(second)

                    ways = {
                        "h2d": lambda: up[0].copy_(down[0], non_blocking=True),
                        "d2h": lambda: down[0].copy_(up[0], non_blocking=True),
                        "both": both,
                    }
                    return ways[way]

                work = {"bytes": float(size * (2 if way == "both" else 1))}
                yield Benchmark("host_copy", {"way": way, "pinned": pinned, "bytes": size}, prepare, work)


def files(folder: Path, quick: bool) -> Iterator[Benchmark]:
    """O_DIRECT reads and writes of 64 MiB by block size and number of requests at once."""
    total = 2**26
    for block in (2**20,) if quick else (2**16, 2**20, 2**23):
        for depth in (1, 4):
            for op in ("write", "read"):

                def prepare(block: int = block, depth: int = depth, op: str = op) -> Callable[[], Any]:
                    file, buffer = DirectFile(folder / "microbench", total), Buffer(total)
                    file.write(buffer, 0, total)
                    pool = ThreadPoolExecutor(depth)
                    operate = file.write if op == "write" else file.read

                    def run() -> None:
                        starts = range(0, total, block)
                        list(pool.map(lambda start: operate(buffer, start, start + block), starts))

                    return run

                parameters = {"op": op, "block_bytes": block, "depth": depth}
                yield Benchmark("file", parameters, prepare, {"bytes": float(total)})


def file_folder() -> tempfile.TemporaryDirectory[str]:
    """Where files are measured: `ZSIM_NVME_FOLDER`, or the temporary folder's drive."""
    return tempfile.TemporaryDirectory(dir=os.environ.get("ZSIM_NVME_FOLDER"))


GEMMS = 10
COLLECTIVES = (
    "all_gather",
    "reduce_scatter",
    "reduce_scatter_native",
    "all_reduce",
    "all_to_all",
    "broadcast",
)


def _measured_on_ranks() -> Callable[[], Any]:
    raise AssertionError("collectives are timed by on_ranks")


def collective_benchmarks(ranks: int, quick: bool) -> Iterator[Benchmark]:
    """What ranks measure together (see `on_ranks`); `bytes` is the full tensor."""
    for kind in COLLECTIVES:
        for size in sizes(2**12, 2**18 if quick else 2**25, 8):
            parameters = {"kind": kind, "bytes": size, "ranks": ranks, "backend": "gloo"}
            yield Benchmark("collective", parameters, _measured_on_ranks, {"bytes": float(size)})
    for busy in (False, True):
        parameters = {"with_all_reduce": busy, "ranks": ranks, "backend": "gloo"}
        yield Benchmark(
            "gemm_beside_collective", parameters, _measured_on_ranks, {"flops": GEMMS * 2.0 * 512**3}
        )


def on_ranks(rank: int, world_size: int, wanted: list[dict[str, Any]], device: str) -> list[dict[str, float]]:
    """Time collectives, and a matrix product with and without an all-reduce under way.

    A repeat is as long as its slowest rank's.
    """
    world = dist.group.WORLD
    assert world is not None
    own = Collectives(world)
    results = []
    for parameters in wanted:
        measure = _collective(own, parameters, device) if "kind" in parameters else _gemm(own, parameters)
        seconds = []
        for repeat in range(3 + 15):
            dist.barrier()
            taken = torch.tensor(measure(), dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if repeat >= 3:
                seconds.append(float(taken))
        results.append(spread(seconds))
    return results


def _collective(own: Collectives, parameters: dict[str, Any], device: str) -> Callable[[], float]:
    numel = parameters["bytes"] // 4
    full = torch.ones(numel, device=device)
    part = torch.ones(numel // own.world_size, device=device)
    other = torch.empty_like(full)
    native = Collectives(own.group, "native")
    runs: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: own.all_gather(other, part, "").wait(),
        "reduce_scatter": lambda: own.reduce_scatter(part, full, "").wait(),
        "reduce_scatter_native": lambda: native.reduce_scatter(part, full, "").wait(),
        "all_reduce": lambda: own.all_reduce(full, "").wait(),
        "all_to_all": lambda: dist.all_to_all_single(other, full),
        "broadcast": lambda: dist.broadcast(full, 0),
    }
    run = runs[parameters["kind"]]

    def measure() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return measure


def _gemm(own: Collectives, parameters: dict[str, Any]) -> Callable[[], float]:
    """Only the products are timed; the all-reduce is begun before and waited for after."""
    left, right = torch.randn(512, 512), torch.randn(512, 512)
    full = torch.ones(2**23)

    def measure() -> float:
        pending = own.all_reduce(full, "") if parameters["with_all_reduce"] else None
        start = time.perf_counter()
        for _ in range(GEMMS):
            left @ right
        seconds = time.perf_counter() - start
        if pending is not None:
            pending.wait()
        return seconds

    return measure
