"""`python -m validation.microbench`; see the package."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from validation.launch import MALLOC, run
from validation.microbench import gpu_kernels, host, kernels, movement, ranks
from validation.microbench.bench import Benchmark, ResultFile, Times, measure, rates, spread

LOCAL = {
    "gemm": kernels.gemm,
    "attention": kernels.attention,
    "memory_bound": kernels.memory_bound,
    "optimizers": host.optimizers,
    "host": host.host,
    "host_copies": movement.host_copies,
    "fused_attention": gpu_kernels.attention_backends,
    "shard_gemm": gpu_kernels.shard_gemm,
    "grouped_gemm": gpu_kernels.grouped_gemm,
    "rows_by_index": gpu_kernels.rows_by_index,
    "chains": gpu_kernels.chains,
}
FAMILIES = (*LOCAL, "files", "collectives")


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m validation.microbench", description=__doc__)
    add = arguments.add_argument
    add("--out", type=Path, default=Path("microbench.json"))
    add("--only", choices=FAMILIES, action="append", help="a family; may be given again")
    add("--quick", action="store_true", help="few sizes")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--ranks", type=int, action="append", help="group sizes of collectives (2 and 4)")
    add(
        "--again-above",
        type=float,
        default=1.0,
        metavar="FRACTION",
        help="measure again what was measured while others used more than this of the machine",
    )
    return arguments


def local_benchmarks(families: list[str], device: str, quick: bool, folder: Path) -> Iterator[Benchmark]:
    """The benchmarks of a single process, family by family."""
    for name in families:
        if name == "files":
            yield from movement.files(folder, quick)
        elif name in LOCAL:
            yield from LOCAL[name](device, quick)


class Progress:
    """Writes each result to the file, and prints a line about it."""

    def __init__(self, results: ResultFile, missing: int) -> None:
        self.results, self.missing, self.done, self.begun = results, missing, 0, time.monotonic()

    def add(self, benchmark: Benchmark, times: Times) -> None:
        self.results.add(benchmark, times)
        self.done += 1
        left = (time.monotonic() - self.begun) / self.done * (self.missing - self.done)
        summary = spread(times.wall)
        assert summary is not None
        print(
            f"{self.done:4}/{self.missing} {left:4.0f} s left {summary['median'] * 1e3:10.4f} ms "
            f"{rates(benchmark.work, summary['median']):34} {benchmark.key}",
            flush=True,
        )


def measure_collectives(progress: Progress, missing: list[Benchmark]) -> None:
    """Measure the missing collectives, starting the ranks once per group size and backend."""
    starts = dict.fromkeys((b.parameters["ranks"], b.parameters["backend"]) for b in missing)
    for size, backend in starts:
        part = [b for b in missing if (b.parameters["ranks"], b.parameters["backend"]) == (size, backend)]
        wanted = [benchmark.parameters for benchmark in part]
        arguments = (wanted, backend)
        found = run("validation.microbench.ranks:measure_all", size, arguments, timeout=600, backend=backend)
        for benchmark, times in zip(part, found[0], strict=True):
            progress.add(benchmark, times)


def backends(group_size: int) -> list[str]:
    """gloo, and NCCL if each rank can have a separate GPU."""
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= group_size
    return ["gloo", "nccl"] if has_gpus else ["gloo"]


def main(words: list[str]) -> int:
    options = parser().parse_args(words)
    families = list(options.only or FAMILIES)
    torch.manual_seed(0)
    command = "python -m validation.microbench" + (" --quick" if options.quick else "")
    results = ResultFile(options.out, command, options.device)
    if "host_copies" in families and options.device == "cpu":
        print("host_copies: SKIPPED, there is no GPU to copy to")

    def missing(benchmarks: Iterator[Benchmark]) -> list[Benchmark]:
        return [one for one in benchmarks if not results.has(one, options.again_above)]

    with movement.file_folder() as folder:
        local = missing(local_benchmarks(families, options.device, options.quick, Path(folder)))
        together = [
            benchmark
            for size in (options.ranks or (2, 4))
            for backend in backends(size)
            for benchmark in missing(ranks.collective_benchmarks(size, backend, options.quick))
            if "collectives" in families
        ]
        progress = Progress(results, len(local) + len(together))
        for benchmark in local:
            try:
                progress.add(benchmark, measure(benchmark))
            except (
                RuntimeError,
                ValueError,
                AttributeError,
            ) as error:  # a kernel that this GPU or torch lacks
                print(f"not measured: {benchmark.key}: {str(error).splitlines()[0]}", flush=True)
    measure_collectives(progress, together)
    return 0


if __name__ == "__main__":
    if not MALLOC.keys() <= os.environ.keys():  # the ranks' settings; glibc reads them when a process starts
        again = [sys.executable, "-m", "validation.microbench", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, **MALLOC})
    sys.exit(main(sys.argv[1:]))
