"""Real runs on this machine and zsim's prediction: `python -m validation.predict --out traces/MACHINE/runs`.

The prediction knows the machine from microbenchmarks alone (`validation.microbench`, fitted as
`zsim calibrate` does), none of which trains anything, and how fast its cores were during the run from two of
them timed between steps (`validation.probe`). Models are larger than those of `validation.record`, so that
operators take the time, not Python. Each run gets a folder as `validation.record` writes it, with its
`cluster.toml`; `zsim check` judges them from then on: processor time of the main thread within 10 %, time on
the clock within 20 % where nobody else was busy."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from validation.cases.cases import CPU_CLUSTER, case_rows
from validation.probe import ELEMENTS, WIDTH
from validation.provenance import machine_folder, write_checksums
from validation.record.__main__ import record_case
from validation.record.cases import LARGER_MODELS, Recording, find
from zsim.calibrate.hardware_file import calibrate
from zsim.calibrate.readers import read_measurements
from zsim.cost.kernels.kernel import Kernel
from zsim.cost.rates.gpu import kernel_seconds
from zsim.specs.cluster.files import load_cluster
from zsim.study.check.baseline import CheckRow

RUNS = ("ddp", "fsdp2-reshard", "fsdp2-keep", "zero1", "zero2", "zero3")
SEQUENCES, LENGTH = {"medium": 8, "large": 4}, 128


def runs() -> list[tuple[Recording, str]]:
    """(strategy, model) of all runs: every strategy with both models."""
    return [
        (replace(find(f"{name}-even")[0], micro_batch_size=SEQUENCES[model], sequence_length=LENGTH), model)
        for model in LARGER_MODELS
        for name in RUNS
    ]


def machine_text(microbench: Path, ranks: int) -> str:
    """The CPU cluster file with this machine's numbers."""
    base = load_cluster(CPU_CLUSTER)
    measured = read_measurements(microbench, ranks=ranks, nodes=1)
    return calibrate(base, CPU_CLUSTER, machine_folder(), measured).toml()


def run_text(machine: Path, probed: Mapping[str, float]) -> str:
    """The machine's cluster with the core speed that the probe measured during a run's steps."""
    gpu = load_cluster(str(machine)).gpu
    product = Kernel("gemm", 2.0 * WIDTH**3, 12.0 * WIDTH**2, "fp32", (WIDTH, WIDTH, WIDTH))
    addition = Kernel("elementwise", 0.0, 12.0 * ELEMENTS, "fp32")
    speed = kernel_seconds(product, gpu) / probed["product"]
    rate = kernel_seconds(addition, gpu) / probed["addition"]
    source = f"{machine.name}, times what validation.probe took beside the steps of this run"
    return "\n".join(
        [
            "schema = 1",
            f'extends = "../{machine.name}"',
            f'name = "{machine.stem}"',
            "",
            "[gpu.peak]",
            f'source = "{source}"',
            'evidence = "calibrated"',
            f'fp32 = "{(gpu.peak.fp32 or 0.0) * speed / 1e9:.4g} GFLOP/s"',
            "",
            "[gpu.memory]",
            f'source = "{source}"',
            'evidence = "calibrated"',
            f'bandwidth = "{gpu.memory.bandwidth * rate / 1e9:.4g} GB/s"',
            "",
        ]
    )


def main(words: list[str]) -> int:
    arguments = argparse.ArgumentParser(prog="python -m validation.predict", description=__doc__)
    arguments.add_argument("--out", type=Path, default=Path("recordings"))
    arguments.add_argument("--microbench", type=Path, help="default: traces/MACHINE/microbench.json")
    arguments.add_argument("--only", action="append", metavar="STRATEGY")
    arguments.add_argument("--attempts", type=int, default=2, help="again while others are busy")
    options = arguments.parse_args(words)
    microbench = options.microbench or Path("traces") / machine_folder() / "microbench.json"
    options.out.mkdir(parents=True, exist_ok=True)
    machine = options.out / f"{machine_folder()}.toml"
    machine.write_text(machine_text(microbench, ranks=2))
    recording = argparse.Namespace(out=options.out, kineto=False, timed_steps=12, attempts=options.attempts)
    for strategy, model in runs():
        if options.only and strategy.name not in options.only:
            continue
        folder = record_case(strategy, model, 2, recording)
        probed = json.loads((folder / "summary.json").read_text())["probe_seconds"]
        (folder / "cluster.toml").write_text(run_text(machine, probed))
        print_rows(folder)
    if options.out.parent.parent.name == "traces":
        write_checksums(options.out.parent.parent)
    return 0


def print_rows(folder: Path) -> None:
    """Print the run's predicted and measured times."""
    path = folder / "summary.json"
    for row in case_rows(folder.name, path, json.loads(path.read_text())):
        if row.predicted is not None and row.name in ("step", "processor time of the main thread"):
            print(line(row), flush=True)


def line(row: CheckRow) -> str:
    assert row.error is not None
    return f"{row.case:24} {row.name:34} {row.error:+7.1%}  {row.outcome:12} {row.sentence}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
