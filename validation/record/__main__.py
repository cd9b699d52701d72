"""`python -m validation.record`; see the package."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from validation.launch import run
from validation.machine_load import foreign_fraction
from validation.provenance import machine_folder, provenance, write_checksums
from validation.record.cases import (
    LARGER_MODELS,
    MODELS,
    SHAPES,
    STRATEGIES,
    Recording,
    as_json,
    experiment,
    find,
    folder_name,
    recorded_cases,
)

FORMAT = 1
QUIET = 0.1  # fraction of the machine used by others
TOUCHED_BYTES = 2**31  # per rank of the larger models: more than any of their steps holds
WITH_KINETO = {"ddp", "fsdp2-reshard", "zero3"}


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m validation.record", description=__doc__)
    add = arguments.add_argument
    add("case", nargs="?", help="STRATEGY-MODEL, as --list shows them")
    add("--list", action="store_true")
    add("--ranks", type=int, default=2)
    add("--out", type=Path, default=Path("recordings"))
    add("--timed-steps", type=int, default=12)
    add("--attempts", type=int, default=1, help="record again while others are busy; keep the quietest")
    add("--kineto", action="store_true", help="also PyTorch's own trace of one step")
    add("--only", action="append", metavar="STRATEGY", help="with --all: those whose names begin so")
    add("--all", type=Path, metavar="DIR", help="make all recorded cases again")
    add(
        "--everything", type=Path, metavar="TRACES", help="the same, the oracle's answers and the shaped link"
    )
    return arguments


def record_case(strategy: Recording, model: str, ranks: int, options: argparse.Namespace) -> Path:
    """Start the ranks here, collect their results, write the folder."""
    from validation.record.run import Order

    header = make_header(strategy, model, ranks, options.kineto, "gloo")
    with tempfile.TemporaryDirectory() as parent:
        attempts: list[tuple[float, Path, list[Any]]] = []
        while len(attempts) < options.attempts and (not attempts or attempts[-1][0] > QUIET):
            folder = Path(parent) / str(len(attempts))
            folder.mkdir()
            order = Order(str(folder), options.timed_steps, options.kineto)
            results = run(
                "validation.record.run:record",
                ranks,
                (strategy, model, order, header),
                timeout=300,
                touched_bytes=TOUCHED_BYTES if model in LARGER_MODELS else 0,
            )
            attempts.append((foreign_cpu(results), folder, results))
        _, folder, results = min(attempts, key=lambda attempt: attempt[0])
        return write_folder(folder, options.out, header, results, strategy, model)


def record_under_torchrun(strategy: Recording, model: str, options: argparse.Namespace) -> None:
    """Record as one of torchrun's ranks; rank 0 writes the folder. All ranks share a file system."""
    import torch
    import torch.distributed as dist

    from validation.record.run import Order, record

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    header = make_header(strategy, model, ranks, options.kineto, dist.get_backend())
    folder = options.out / f".{folder_name(strategy, model, ranks)}"
    folder.mkdir(parents=True, exist_ok=True)
    order = Order(str(folder), options.timed_steps, options.kineto, "cuda" if has_gpu else "cpu")
    results: list[Any] = [None] * ranks
    dist.all_gather_object(results, record(rank, ranks, strategy, model, order, header))
    if rank == 0:
        print(write_folder(folder, options.out, header, results, strategy, model))
        shutil.rmtree(folder)
    dist.barrier()
    dist.destroy_process_group()


def make_header(
    strategy: Recording, model: str, ranks: int, with_kineto: bool, backend: str
) -> dict[str, Any]:
    """The header of every file of a recording."""
    words = ["python", "-m", "validation.record", f"{strategy.name}-{model}", "--ranks", str(ranks)]
    if model in LARGER_MODELS:
        words = ["python", "-m", "validation.predict", "--only", strategy.name]
    command = shlex.join(words + (["--kineto"] if with_kineto else []))
    origin = provenance(command, backend=backend, seed=0)
    return {"format": FORMAT, "provenance": origin, "case": as_json(strategy), "model": SHAPES[model]}


def write_folder(
    source: Path, out: Path, header: dict[str, Any], results: list[Any], strategy: Recording, model: str
) -> Path:
    """Write the ranks' logs from `source`, and the summary, into the recording's folder; returns the
    folder."""
    target = out / folder_name(strategy, model, len(results))
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in sorted(source.glob("rank*.gz")):
        shutil.copy(file, target / file.name)
    (target / "summary.json").write_text(to_text({**header, **summarize(results, strategy, model)}))
    return target


def summarize(results: list[Any], strategy: Recording, model: str) -> dict[str, Any]:
    """The summary of all ranks' results."""
    same = all(result.calls == results[0].calls for result in results)
    return {
        "world_size": len(results),
        "parameters": results[0].parameters,
        "experiment": experiment(strategy, model, len(results)),
        "loss": {"first": results[0].losses[0], "last": results[0].losses[-1]},
        "step_seconds": {
            **spread_of_slowest([result.step_seconds for result in results]),
            "foreign_cpu_fraction": foreign_cpu(results),
        },
        "step_cpu_seconds": {
            **spread_of_slowest([result.step_cpu_seconds for result in results]),
            "mean_by_rank": [round(statistics.fmean(r.step_cpu_seconds), 6) for r in results],
        },
        "step_minor_faults": [
            max(each) for each in zip(*(r.step_minor_faults for r in results), strict=True)
        ],
        "probe_seconds": dict(zip(("product", "addition"), probe_means(results), strict=True)),
        "phase_seconds": {
            name: statistics.median(results[0].phase_seconds[name]) for name in results[0].phase_seconds
        },
        "held_bytes_before_update": [result.held_before_update for result in results],
        "held_bytes_between_steps": [result.held_between_steps for result in results],
        "cuda_peak_bytes": [result.cuda_bytes for result in results],
        "same_calls_on_all_ranks": same,
        "calls": results[0].calls if same else [result.calls for result in results],
        "flight_recorder": results[0].flight_recorder,
    }


def probe_means(results: list[Any]) -> tuple[float, float]:
    """(product, addition) mean seconds over all ranks and steps; see `validation.probe`."""
    rows = [row for result in results for row in result.probe_seconds]
    product, addition = (statistics.fmean(column) for column in zip(*rows, strict=True))
    return round(product, 9), round(addition, 9)


def spread_of_slowest(by_rank: list[list[float]]) -> dict[str, Any]:
    """Statistics of the slowest rank's time in each step."""
    slowest = [max(times) for times in zip(*by_rank, strict=True)]
    return {
        "mean": round(statistics.fmean(slowest), 6),
        "median": round(statistics.median(slowest), 6),
        "min": round(min(slowest), 6),
        "max": round(max(slowest), 6),
        "all": [round(seconds, 6) for seconds in slowest],
    }


def foreign_cpu(results: list[Any]) -> float:
    """The fraction of the machine that others used while steps were timed."""
    busy, total, _ = results[0].cpu_ticks
    return foreign_fraction(busy, total, sum(result.cpu_ticks[2] for result in results))


def to_text(summary: dict[str, Any]) -> str:
    """The summary as JSON with one line per field, and one per call."""
    parts = []
    for key, value in summary.items():
        if key in ("calls", "flight_recorder") and value:
            rows = ",\n".join(f"    {json.dumps(row)}" for row in value)
            parts.append(f'  "{key}": [\n{rows}\n  ]')
        else:
            parts.append(f'  "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def record_everything(traces: Path) -> int:
    """Record all of `traces/` with the command of each part; a part that returns 3 was skipped."""
    costs = traces / machine_folder() / "microbench.json"
    costs.parent.mkdir(parents=True, exist_ok=True)
    commands = (
        ["validation.oracle", "--record-all", str(traces / "oracle")],
        ["validation.record", "--all", str(traces / "gloo")],
        ["validation.deepspeed_calls", "--out", str(traces / "deepspeed")],
        ["validation.deepspeed_calls.hooks", "--out", str(traces / "deepspeed")],
        ["validation.checkpoints", "--out", str(traces / "checkpoints")],
        ["validation.checkpoints.clock", "--out", str(traces / "checkpoints")],
        ["validation.overlap", "--out", str(traces / "shaped")],
        ["validation.microbench", "--device", "cpu", "--again-above", "0.1", "--out", str(costs)],
        ["validation.predict", "--microbench", str(costs), "--out", str(costs.parent / "runs")],
        ["validation.gpu", "--out", str(traces)],
    )
    codes = [subprocess.run([sys.executable, "-m", *words], check=False).returncode for words in commands]
    write_checksums(traces)
    return max(code for code in codes if code != 3) if set(codes) - {3} else 0


def main(words: list[str]) -> int:
    options = parser().parse_args(words)
    if options.list:
        for strategy in STRATEGIES:
            print(", ".join(f"{strategy.name}-{model}" for model in MODELS), f"({strategy.min_ranks}+ ranks)")
        return 0
    if options.everything:
        return record_everything(options.everything)
    if options.all:
        options.out = options.all
        for strategy, model, ranks in recorded_cases():
            if strategy.backend == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
                name = folder_name(strategy, model, ranks)
                print(f"{name}: SKIPPED, DeepSpeed is not installed (pip install deepspeed)", flush=True)
                continue
            if options.only and not strategy.name.startswith(tuple(options.only)):
                continue
            options.kineto = strategy.name in WITH_KINETO and model == "even" and ranks == 2
            print(record_case(strategy, model, ranks, options), flush=True)
        write_checksums(options.all.parent)
        return 0
    ranks = int(os.environ.get("WORLD_SIZE", options.ranks))
    try:
        strategy, model = find(options.case or "")
        if ranks < strategy.min_ranks:
            raise ValueError(f"{strategy.name} needs {strategy.min_ranks} ranks or more, found {ranks}")
    except ValueError as error:
        print(f"record: {error}", file=sys.stderr)
        return 2
    if "RANK" in os.environ:
        record_under_torchrun(strategy, model, options)
    else:
        print(record_case(strategy, model, ranks, options))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
