"""All measurements on one GPU: `python -m validation.gpu --out traces`, into `traces/h200` on an H200.

Steps of a single rank, over model sizes, sequence lengths, batches, checkpointing and offload; and of rank 0
in fake worlds of 64 to 1,024 ranks (`validation.fake_rank`), with the kernels, launches and memory of the
sharded sizes. Each step has a file of numbers and a trimmed profiler trace. A step that does not fit is a
result too.

Results that are in the folder already are not measured again, so an interrupted run continues where it
stopped."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from validation.provenance import machine_folder, provenance, write_checksums

# Errors of a step that does not fit: out of GPU memory, host memory, disk.
DOES_NOT_FIT = ("OutOfMemoryError", "can't allocate memory", "No space left on device")


@dataclass(frozen=True)
class Run:
    """One step to measure, as arguments of `validation.fake_rank`."""

    model: str
    world_size: int = 1
    trainer: str = "fsdp2"
    checkpointing: str = "none"
    length: int = 2048
    batch: int = 1
    place: str = "device"

    @property
    def name(self) -> str:
        """A file name that describes the measurement."""
        parts = [self.model, f"w{self.world_size}", self.trainer, f"t{self.length}", f"b{self.batch}"]
        parts += [f"ac-{self.checkpointing}"] * (self.checkpointing != "none")
        parts += [self.place] * (self.place != "device")
        return "_".join(parts)

    def words(self, device: str, nvme: Path) -> list[str]:
        options = {
            "model": self.model, "world-size": self.world_size, "trainer": self.trainer, "device": device,
            "activation-checkpointing": self.checkpointing, "sequence-length": self.length,
            "micro-batch-size": self.batch, "optimizer-place": self.place,
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in options.items()]
        return words + ([f"--nvme-folder={nvme}"] if self.place == "nvme" else [])


def runs() -> Iterator[Run]:
    """The runs for a GPU of 80 GB or more; on a smaller one, some report that they do not fit."""
    for model, length, batch, kept in product(
        ("llama-3.2-1b", "llama-3-8b@8"), (2048, 8192), (1, 4), ("none", "full")
    ):
        yield Run(model, checkpointing=kept, length=length, batch=batch)
    for trainer, place in (("engine", "device"), ("engine", "host"), ("engine", "nvme")):
        yield Run("llama-3.2-1b", trainer=trainer, place=place)
    # 18 bytes of each of 3.7 billion parameters in host memory, of 2.8 billion in files: 66 GB and 50 GB
    yield Run("llama-3-8b@12", trainer="engine", place="host", checkpointing="full")
    yield Run("llama-3-8b@8", trainer="engine", place="nvme", checkpointing="full")
    for world_size, trainer, kept in product((64, 256), ("fsdp2", "engine"), ("none", "full")):
        yield Run("llama-3-8b", world_size, trainer, kept, length=8192)
    for world_size, trainer in product((64, 256, 1024), ("fsdp2", "engine")):
        yield Run("llama-3-70b", world_size, trainer, "full", length=8192)


def few_runs() -> Iterator[Run]:
    """One run of each kind, with the tiny model: for a quick look, and for machines without a GPU."""
    yield Run("llama-tiny", length=64)
    yield Run("llama-tiny", trainer="engine", place="nvme", length=64)
    yield Run("llama-tiny", 256, checkpointing="full", length=64)


def measure(run: Run, folder: Path, device: str, nvme: Path, steps: int) -> str:
    """Run one step in a separate process; returns its outcome in a word or two."""
    target, trace = folder / f"{run.name}.json", folder / f"{run.name}.kineto.json.gz"
    words = [*run.words(device, nvme), f"--steps={steps}"]
    command = [sys.executable, "-m", "validation.fake_rank", *words]
    done = subprocess.run(
        [*command, f"--json={target}", f"--kineto={trace}"], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return f"{json.loads(target.read_text())['step_seconds']['median']:.4f} s"
    last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode} and no message"])[-1]
    if done.returncode != -signal.SIGKILL and not any(words in done.stderr for words in DOES_NOT_FIT):
        return f"FAILED: {last}"
    asked = [word for word in words if not word.startswith("--nvme-folder")]
    origin = provenance(f"python -m validation.fake_rank {' '.join(asked)}")
    target.write_text(json.dumps({"provenance": origin, "does_not_fit": last}, indent=1) + "\n")
    return f"does not fit: {last}"


def main(words: list[str]) -> int:
    arguments = argparse.ArgumentParser(prog="python -m validation.gpu", description=__doc__)
    arguments.add_argument("--out", type=Path, default=Path("recordings"))
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arguments.add_argument("--quick", action="store_true", help="one run of each kind, few sizes")
    arguments.add_argument("--steps", type=int, default=8)
    arguments.add_argument("--nvme-folder", type=Path, help="on the disk to measure; a temporary one else")
    options = arguments.parse_args(words)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("SKIPPED: there is no GPU here (--device cpu --quick tries the code)", file=sys.stderr)
        return 3
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else ""
    folder = options.out / machine_folder(gpu)
    folder.mkdir(parents=True, exist_ok=True)
    asked = list(few_runs() if options.quick else runs())
    has_failed = False
    with tempfile.TemporaryDirectory(dir=options.nvme_folder) as nvme:
        for number, run in enumerate(asked, 1):
            if not (folder / f"{run.name}.json").exists():
                outcome = measure(run, folder, options.device, Path(nvme), options.steps)
                has_failed |= outcome.startswith("FAILED")
                print(f"{number:4}/{len(asked)} {run.name}: {outcome}", flush=True)
    costs = ["validation.microbench", "--device", options.device, "--out", str(folder / "microbench.json")]
    costs += ["--quick"] if options.quick else []
    has_failed |= subprocess.run([sys.executable, "-m", *costs], check=False).returncode != 0
    if options.out.name == "traces":
        write_checksums(options.out)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
