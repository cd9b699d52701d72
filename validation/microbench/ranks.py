"""Measurements that need several ranks: collectives, and the interference of a collective and a product."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from validation.machine_load import CpuLoad, foreign_fraction
from validation.microbench.bench import Benchmark, Times, sizes
from validation.zero.collectives import Collectives

WARM_UP, REPEATS = 3, 15
KINDS = ("all_gather", "reduce_scatter", "reduce_scatter_native", "all_reduce", "all_to_all", "broadcast")
GEMMS, WIDTH, BESIDE_BYTES = 10, 512, 2**25
Pair = tuple[float, float]  # wall and thread CPU seconds


def collective_benchmarks(ranks: int, backend: str, quick: bool) -> Iterator[Benchmark]:
    """Benchmarks of collectives; `bytes` is the full tensor. `reduce_scatter` is the engine's: on gloo an
    all-to-all and a local sum."""
    for kind in KINDS:
        if (kind, backend) == ("reduce_scatter_native", "nccl"):
            continue  # the engine uses the native one there
        for size in sizes(2**12, 2**18 if quick else 2**26):
            parameters = {"kind": kind, "bytes": size, "ranks": ranks, "backend": backend}
            yield Benchmark("collective", parameters, _on_ranks, {"bytes": float(size)})
    for measured in ("gemm", "all_reduce"):
        for beside in (False, True):
            parameters = {"measured": measured, "beside": beside, "ranks": ranks, "backend": backend}
            work = {"flops": GEMMS * 2.0 * WIDTH**3} if measured == "gemm" else {"bytes": float(BESIDE_BYTES)}
            yield Benchmark("interference", parameters, _on_ranks, work)


def _on_ranks() -> Callable[[], Any]:
    raise AssertionError("collectives are timed by `measure_all`")


def measure_all(rank: int, world_size: int, wanted: list[dict[str, Any]], backend: str) -> list[Times]:
    """Times of each benchmark; a repeat takes as long as on its slowest rank, in wall and in CPU time."""
    world = dist.group.WORLD
    assert world is not None
    device = "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
        device = "cuda"
    own = Collectives(world)
    results = []
    for parameters in wanted:
        if "kind" in parameters:
            once = collective(own, parameters["kind"], parameters["bytes"], device)
        else:
            once = interference(own, parameters["measured"], parameters["beside"], device)
        results.append(repeat(once, device))
    return results


def repeat(once: Callable[[], Pair], device: str) -> Times:
    wall, cpu = [], []
    load = CpuLoad()
    for number in range(WARM_UP + REPEATS):
        dist.barrier()
        taken = torch.tensor(once(), dtype=torch.float64, device=device)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        if number >= WARM_UP:
            wall.append(float(taken[0]))
            cpu.append(float(taken[1]))
    busy, total, mine = load.since()
    ranks = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(ranks)
    return Times(wall, cpu, foreign_fraction(busy, total, float(ranks)))


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], Any], device: str) -> Pair:
    """Wall and thread CPU seconds of `run`, including the work that it leaves under way."""
    settle(device)
    start, cpu = time.perf_counter(), time.thread_time()
    run()
    settle(device)
    return time.perf_counter() - start, time.thread_time() - cpu


def collective(own: Collectives, kind: str, size: int, device: str) -> Callable[[], Pair]:
    numel = size // 4
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
    return lambda: timed(runs[kind], device)


def interference(own: Collectives, measured: str, beside: bool, device: str) -> Callable[[], Pair]:
    """Ten products, or an all-reduce of 32 MiB, alone or with the other one running the whole time."""
    left, right = (torch.randn(WIDTH, WIDTH, device=device) for _ in range(2))
    full = torch.ones(BESIDE_BYTES // 4, device=device)

    def products() -> None:
        for _ in range(GEMMS):
            left @ right  # type: ignore[unused-ignore]

    def gemm() -> Pair:
        pending = own.all_reduce(full, "") if beside else None
        seconds = timed(products, device)
        if pending is not None:
            pending.wait()
        return seconds

    def all_reduce() -> Pair:
        def run() -> None:
            pending = own.all_reduce(full, "")
            while beside and not pending.work.is_completed():
                left @ right  # type: ignore[unused-ignore]
            pending.wait()

        return timed(run, device)

    return gemm if measured == "gemm" else all_reduce
