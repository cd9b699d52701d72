"""Transfers between host and GPU, and to and from files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from validation.microbench.bench import Benchmark, sizes
from validation.microbench.kernels import Prepared
from validation.zero.files import Buffer, DirectFile

GEMM_WIDTH = 4096


def host_copies(device: str, quick: bool) -> Iterator[Benchmark]:
    """Copies to and from the GPU, pinned and pageable, one way and both ways at once; and a product
    concurrent with a copy."""
    if device == "cpu":
        return  # no device to copy to; the command reports it
    for size in list(sizes(2**14, 2**30, 16))[: 3 if quick else None]:
        for pinned in (True, False):
            for way in ("h2d", "d2h", "both"):

                def prepare(size: int = size, pinned: bool = pinned, way: str = way) -> Prepared:
                    return copies(device, size, pinned)[way]

                parameters = {"way": way, "pinned": pinned, "bytes": size}
                work = {"bytes": float(size * (2 if way == "both" else 1))}
                yield Benchmark("host_copy", parameters, prepare, work, "device")
    for way in ("none", "h2d", "d2h", "both"):
        flops = {"flops": 2.0 * GEMM_WIDTH**3}
        yield Benchmark("gemm_beside_copy", {"way": way}, partial(beside, device, way), flops, "device")


def copies(device: str, size: int, pinned: bool) -> dict[str, Callable[[], Any]]:
    """The copies in each direction and in both, on the current stream and a second one."""
    down = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    up = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    second = torch.cuda.Stream()

    def both() -> None:
        second.wait_stream(torch.cuda.current_stream())
        up[0].copy_(down[0], non_blocking=True)
        with torch.cuda.stream(second):
            down[1].copy_(up[1], non_blocking=True)
        torch.cuda.current_stream().wait_stream(second)

    return {
        "h2d": lambda: up[0].copy_(down[0], non_blocking=True),
        "d2h": lambda: down[0].copy_(up[0], non_blocking=True),
        "both": both,
    }


def beside(device: str, way: str) -> Prepared:
    """A product on this stream, concurrent with a pinned copy of 256 MiB on another that began before it."""
    left, right = (torch.randn(GEMM_WIDTH, GEMM_WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2))
    if way == "none":
        return lambda: left @ right
    copy, stream = copies(device, 2**28, True)[way], torch.cuda.Stream()

    def run() -> None:
        with torch.cuda.stream(stream):
            copy()
        left @ right  # type: ignore[unused-ignore]

    return run


def files(folder: Path, quick: bool) -> Iterator[Benchmark]:
    """Reads and writes of 64 MiB past the page cache, by block size and number of concurrent requests."""
    total = 2**26
    probe = DirectFile(folder / "probe", 4096)
    is_direct = probe.is_direct
    probe.close()
    for block in (2**20,) if quick else (2**16, 2**20, 2**23):
        for depth in (1, 4) if quick else (1, 4, 16):
            for op in ("write", "read"):

                def prepare(block: int = block, depth: int = depth, op: str = op) -> Prepared:
                    file, buffer = DirectFile(folder / "microbench", total), Buffer(total)
                    file.write(buffer, 0, total)
                    pool = ThreadPoolExecutor(depth)
                    operate = file.write if op == "write" else file.read

                    def run() -> None:
                        starts = range(0, total, block)
                        list(pool.map(lambda start: operate(buffer, start, start + block), starts))

                    return run

                parameters = {"op": op, "block_bytes": block, "depth": depth, "direct": is_direct}
                yield Benchmark("file", parameters, prepare, {"bytes": float(total)})


def file_folder() -> tempfile.TemporaryDirectory[str]:
    """The folder where files are measured: in `ZSIM_NVME_FOLDER`, else in the temporary folder."""
    return tempfile.TemporaryDirectory(dir=os.environ.get("ZSIM_NVME_FOLDER"))
