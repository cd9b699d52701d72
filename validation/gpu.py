"""All measurements on one GPU: `python -m validation.gpu --out traces`, into `traces/h200` on an H200.

Steps of Llama under FSDP2 on a single rank, and as rank 0 of fake worlds (`validation.fake_rank`); steps of
Hugging Face's models under FSDP2, DeepSpeed and PEFT (`validation.library_step`); kernels, launches and
copies (`validation.microbench`); the power of each kind of kernel. Each step has a file of numbers, most a
trimmed profiler trace. A step that does not fit is a result too.

Results that are in the folder already are not measured again, so an interrupted run continues where it
stopped. Programs take turns at the GPU; the next one starts while one runs."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from validation.microbench import gpu_kernels
from validation.provenance import machine_folder, provenance, write_checksums

# Errors of a step that does not fit: out of GPU memory, host memory, disk.
DOES_NOT_FIT = ("OutOfMemoryError", "can't allocate memory", "No space left on device")
# Families of the microbenchmarks; a machine's own disk and gloo say nothing about its GPU.
FAMILIES = (
    "fused_attention", "gemm", "shard_gemm", "grouped_gemm", "rows_by_index", "chains", "memory_bound",
    "optimizers", "host", "host_copies",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One step to measure, as arguments of `validation.fake_rank` or `validation.library_step`."""

    model: str
    program: str = "fake_rank"
    length: int = 2048
    batch: int = 1
    checkpointing: str = "none"
    steps: int = 6
    has_trace: bool = True
    more: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A file name that describes the measurement."""
        program = "llama" if self.program == "fake_rank" else "hf"
        parts = [program, self.model, *(f"{key}-{value}" for key, value in self.more.items())]
        parts += [f"t{self.length}", f"b{self.batch}"]
        parts += [f"ac-{self.checkpointing}"] * (self.checkpointing != "none")
        return "_".join(parts)

    def words(self, device: str) -> list[str]:
        options = {
            "model": self.model, "device": device, "activation-checkpointing": self.checkpointing,
            "sequence-length": self.length, "micro-batch-size": self.batch, "steps": self.steps,
        }  # fmt: skip
        asked = [f"--{name}={value}" for name, value in options.items()]
        return asked + [
            f"--{name}={value}" if value != "" else f"--{name}" for name, value in self.more.items()
        ]


def library(model: str, length: int, batch: int = 1, checkpointing: str = "none", **more: str | int) -> Run:
    """A step of Hugging Face's model."""
    return Run(model, "library_step", length, batch, checkpointing, more=more)


def runs() -> Iterator[Run]:
    """The runs for a GPU of 80 GB or more; on a smaller one, some report that they do not fit."""
    yield Run("llama-3-8b@8", length=8192, more={"world-size": 1})
    yield Run("llama-3-8b@8", length=8192, checkpointing="full", more={"world-size": 1})
    yield Run("llama-3-8b@8", length=2048, batch=4, more={"world-size": 1})
    yield Run("llama-3.2-1b", length=2048, more={"world-size": 1})
    yield Run("llama-3.2-1b", length=64, more={"world-size": 1}, has_trace=False)
    yield Run("llama-3-8b", length=8192, checkpointing="full", more={"world-size": 64})
    yield Run("llama-3-8b", length=8192, checkpointing="full", more={"world-size": 256}, has_trace=False)
    yield Run("llama-3-70b", length=4096, checkpointing="full", steps=2, more={"world-size": 256})
    yield library("llama-3-8b@8", 4096, 2)
    yield library("llama-3-8b@8", 4096, 2, compile="")
    yield library("llama-3-8b", 2048, 2, "full", lora=16)
    yield library("llama-3.2-1b", 64)
    yield library("qwen2-7b@12", 4096, 2, "full")
    yield library("gemma2-9b@8", 4096, 1, attention="eager")
    yield library("qwen3-30b-a3b@4", 4096, 2)
    yield library("mixtral-8x7b@2", 4096, 2)
    yield library("deepseek-v2-lite@4", 4096, 2)
    yield library("gpt2-xl", 1024, 4)
    yield library("llama-3.2-1b", 64, trainer="deepspeed")
    yield library("llama-3-8b@8", 4096, 2, trainer="deepspeed")
    yield library("llama-3-8b@8", 4096, 2, trainer="deepspeed", stage=2)
    yield library("llama-3.2-1b", 2048, 4, trainer="deepspeed", stage=2, offload="cpu")
    yield library("llama-3.2-1b", 2048, 4, trainer="deepspeed", stage=3, offload="cpu")


def few_runs() -> Iterator[Run]:
    """One run of each kind, with tiny models: for a quick look, and for machines without a GPU."""
    yield Run("llama-tiny", length=64, steps=2, more={"world-size": 1, "trainer": "engine"})
    yield Run("llama-tiny", length=64, steps=2, checkpointing="full", more={"world-size": 256})


def few_library_runs() -> Iterator[Run]:
    """The same for Hugging Face's models."""
    yield library("gpt2@2", 64)
    yield library("gpt2@2", 64, compile="")
    yield library("granite-3.1-1b-a400m@2", 256, 1, "full")
    yield library("llama-3.2-1b@2", 64, 1, "full", lora=8)
    yield library("gpt2@2", 64, trainer="deepspeed")
    yield library("gpt2@2", 64, trainer="deepspeed", stage=2, offload="cpu")


def measure(run: Run, folder: Path, device: str, lock: Path) -> str:
    """Run one step in a separate process; returns its outcome in a word or two."""
    target, trace = folder / f"{run.name}.json", folder / f"{run.name}.kineto.json.gz"
    command = [sys.executable, "-m", f"validation.{run.program}", *run.words(device)]
    places = [f"--json={target}", f"--turn={lock}", *[f"--kineto={trace}"] * run.has_trace]
    done = subprocess.run([*command, *places], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return f"{json.loads(target.read_text())['step_seconds']['median']:.4f} s"
    last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode} and no message"])[-1]
    if done.returncode != -signal.SIGKILL and not any(words in done.stderr for words in DOES_NOT_FIT):
        (folder / f"{run.name}.failed").write_text(done.stderr[-6000:])
        return f"FAILED: {last}"
    origin = provenance(f"python -m validation.{run.program} {' '.join(run.words(device))}")
    target.write_text(json.dumps({"provenance": origin, "does_not_fit": last}, indent=1) + "\n")
    return f"does not fit: {last}"


def measure_all(asked: list[Run], folder: Path, device: str) -> bool:
    """Measure what is not there yet, two programs started at a time; whether all of it could be."""
    missing = [run for run in asked if not (folder / f"{run.name}.json").exists()]
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(2) as pool:
        lock = Path(place) / "turn"
        outcomes = pool.map(lambda run: measure(run, folder, device, lock), missing)
        has_failed = False
        for number, (run, outcome) in enumerate(zip(missing, outcomes, strict=True), 1):
            print(f"{number:4}/{len(missing)} {run.name}: {outcome}", flush=True)
            has_failed |= outcome.startswith("FAILED")
    return not has_failed


def main(words: list[str]) -> int:
    arguments = argparse.ArgumentParser(prog="python -m validation.gpu", description=__doc__)
    arguments.add_argument("--out", type=Path, default=Path("recordings"))
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arguments.add_argument("--quick", action="store_true", help="one run of each kind, few sizes")
    options = arguments.parse_args(words)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("SKIPPED: there is no GPU here (--device cpu --quick tries the code)", file=sys.stderr)
        return 3
    on_gpu = options.device == "cuda"
    folder = options.out / machine_folder(torch.cuda.get_device_name() if on_gpu else "")
    folder.mkdir(parents=True, exist_ok=True)
    costs = ["validation.microbench", "--device", options.device, "--out", str(folder / "microbench.json")]
    costs += [word for family in FAMILIES for word in ("--only", family)] if on_gpu else []
    costs += ["--quick"] if options.quick else []
    is_done = subprocess.run([sys.executable, "-m", *costs], check=False).returncode == 0
    asked = list(few_runs() if options.quick else runs())
    if on_gpu:
        (folder / "power.json").write_text(json.dumps({
            "provenance": provenance("python -m validation.gpu", device=torch.cuda.get_device_name()),
            "measurements": gpu_kernels.sustained(options.quick),
        }, indent=1) + "\n")  # fmt: skip
        torch.cuda.empty_cache()
        asked += list(few_library_runs()) if options.quick else []
    is_done &= measure_all(asked, folder, options.device)
    if options.out.name == "traces":
        write_checksums(options.out)
    return int(not is_done)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
