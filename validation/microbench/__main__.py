"""`python -m validation.microbench`; see the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from validation.launch import run
from validation.microbench import kernels, movement
from validation.microbench.bench import Benchmark, ResultFile, rates, spread, time_repeats

FAMILIES = ("gemm", "attention", "memory_bound", "optimizers", "host", "host_copies", "files", "collectives")


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m validation.microbench", description=__doc__)
    add = arguments.add_argument
    add("--out", type=Path, default=Path("microbench.json"))
    add("--only", choices=FAMILIES, action="append", help="a family; may be given again")
    add("--quick", action="store_true", help="few sizes")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--ranks", type=int, action="append", help="group sizes of collectives (2 and 4)")
    return arguments


def local_benchmarks(families: list[str], device: str, quick: bool, folder: Path) -> Iterator[Benchmark]:
    """What one process measures, family by family."""
    for name in families:
        if name == "files":
            yield from movement.files(folder, quick)
        elif name == "host_copies":
            if device == "cpu":
                print("host_copies: SKIPPED, there is no GPU to copy to")
            yield from movement.host_copies(device, quick)
        elif name != "collectives":
            yield from getattr(kernels, name)(device, quick)


def measure_collectives(results: ResultFile, ranks: int, quick: bool) -> None:
    """All of one group size in one start of its ranks."""
    missing = [b for b in movement.collective_benchmarks(ranks, quick) if not results.has(b)]
    if not missing:
        return
    wanted = [benchmark.parameters for benchmark in missing]
    found = run("validation.microbench.movement:on_ranks", ranks, (wanted, "cpu"), timeout=600)[0]
    for benchmark, seconds in zip(missing, found, strict=True):
        report(results, benchmark, seconds)


def report(results: ResultFile, benchmark: Benchmark, seconds: dict[str, float]) -> None:
    results.add(benchmark, seconds)
    count = len(results.data["measurements"])
    print(
        f"{count:4}  {seconds['median'] * 1e3:10.4f} ms  {rates(benchmark.work, seconds['median']):40}",
        end="",
    )
    print(benchmark.key, flush=True)


def main(words: list[str]) -> int:
    options = parser().parse_args(words)
    families = list(options.only or FAMILIES)
    torch.manual_seed(0)
    results = ResultFile(options.out, "python -m validation.microbench " + " ".join(words), options.device)
    with movement.file_folder() as folder:
        for benchmark in local_benchmarks(families, options.device, options.quick, Path(folder)):
            if results.has(benchmark):
                continue
            place = str(benchmark.parameters.get("place", options.device))
            device = "cpu" if benchmark.family in ("host", "file") else place
            report(results, benchmark, spread(time_repeats(benchmark.prepare(), device)))
    if "collectives" in families:
        for ranks in options.ranks or (2, 4):
            measure_collectives(results, ranks, options.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
