"""One real rank of a fake world: `python -m validation.fake_rank --world-size 256 --device cuda`.

The real FSDP2, or this repository's engine, trains as rank 0 of a fake process group: real tensors of the
sharded sizes, real kernels, real allocator and host, but collectives that return at once and leave garbage.
So one GPU measures the cost of a step on 64 or 1,024 GPUs without its communication: kernel times, launch
gaps, peaks of allocated and reserved memory. (`validation.oracle` needs no GPU and has no times.)"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from validation.cases.cases import oracle_experiment
from validation.llama import Llama, find_shape
from validation.oracle.case import Case
from validation.oracle.run import fake_world
from validation.oracle.sharding import DTYPES, make_mesh, shard_case
from validation.provenance import provenance
from validation.record import kineto
from validation.zero.config import ZeroConfig
from validation.zero.engine import ZeroEngine

PLACES = ("nvme_folder", "kineto", "json")  # paths on this machine: not recorded


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m validation.fake_rank", description=__doc__)
    add = arguments.add_argument
    add("--model", default="llama-tiny")
    add("--world-size", type=int, default=64)
    add("--trainer", choices=("fsdp2", "engine"), default="fsdp2")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--activation-checkpointing", choices=("none", "full"), default="none")
    add("--optimizer-place", choices=("device", "host", "nvme"), default="device", help="of the engine")
    add("--nvme-folder", type=Path)
    add("--micro-batch-size", type=int, default=1)
    add("--sequence-length", type=int, default=64)
    add("--steps", type=int, default=8)
    add("--kineto", type=Path, help="also PyTorch's trace of one step, trimmed, to this .json.gz")
    add("--json", type=Path)
    return arguments


def case_of(options: argparse.Namespace) -> Case:
    """The corresponding question to the oracle: bf16 on a GPU, fp32 on a CPU."""
    return Case(
        options.model,
        options.world_size,
        activation_checkpointing=options.activation_checkpointing,
        micro_batch_size=options.micro_batch_size,
        sequence_length=options.sequence_length,
        param_dtype="bf16" if options.device == "cuda" else "fp32",
    )


def make_step(options: argparse.Namespace) -> tuple[Callable[[Tensor], None], Callable[[], None]]:
    """(step, close). The model is created on the meta device: no rank ever holds all of it."""
    case, device = case_of(options), options.device
    with torch.device("meta"):
        checkpointing = case.activation_checkpointing == "full"
        model = Llama(find_shape(case.model), checkpointing=checkpointing, code=case.code)
    if options.trainer == "engine":
        config = ZeroConfig(
            stage=3,
            compute_dtype=DTYPES[case.param_dtype],
            optimizer_place=options.optimizer_place,
            nvme_folder=options.nvme_folder,
            reduce_scatter="native",
        )
        engine = ZeroEngine(model, config, device=device, initialize=lambda _, tensor: fill(tensor))

        def step(tokens: Tensor) -> None:
            engine.backward(engine(tokens, tokens).loss)
            engine.step()

        return step, engine.close
    shard_case(model, make_mesh(options.world_size, 1, device), case)
    model.to_empty(device=device)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        with torch.no_grad():
            fill(parameter.to_local())
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def fsdp2_step(tokens: Tensor) -> None:
        model(tokens, tokens).loss.backward()
        adamw.step()
        adamw.zero_grad()

    return fsdp2_step, lambda: None


def fill(tensor: Tensor) -> None:
    """Small random numbers: a GPU multiplies zeros faster."""
    tensor.normal_(std=0.02)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Two steps to warm up, then each step's seconds and the allocator's peaks."""
    torch.manual_seed(0)
    with fake_world(options.world_size):
        step, close = make_step(options)
        shape = (options.micro_batch_size, options.sequence_length)
        tokens = torch.randint(0, find_shape(options.model).vocab_size, shape, device=options.device)
        seconds, host_seconds = [], []
        for number in range(2 + options.steps):
            if number == 2 and options.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            step(tokens)
            issued = time.perf_counter() - start
            if options.device == "cuda":
                torch.cuda.synchronize()
            if number >= 2:
                host_seconds.append(issued)
                seconds.append(time.perf_counter() - start)
        if options.kineto:
            trace_step(step, tokens, options)
        close()
    return {
        "step_seconds": {"median": statistics.median(seconds), "all": [round(s, 6) for s in seconds]},
        "host_issue_seconds": statistics.median(host_seconds),
        "cuda_memory": cuda_memory(options.device),
        "gpu_state": gpu_state() if options.device == "cuda" else {},
    }


def trace_step(step: Any, tokens: Tensor, options: argparse.Namespace) -> None:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if options.device == "cuda" else [])
    with profile(activities=activities, record_shapes=True) as profiler:
        step(tokens)
    raw = options.kineto.with_suffix(".raw")
    profiler.export_chrome_trace(str(raw))
    kineto.write_trimmed(raw, options.kineto, provenance(" ".join(sys.argv)))


def cuda_memory(device: str) -> dict[str, int]:
    """The caching allocator's statistics; empty on a CPU."""
    if device == "cpu":
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "peak_allocated": stats["allocated_bytes.all.peak"],
        "peak_reserved": stats["reserved_bytes.all.peak"],
        "inactive_split_peak": stats["inactive_split_bytes.all.peak"],
        "alloc_retries": stats["num_alloc_retries"],
    }


STATE = "clocks.sm clocks.mem power.draw temperature.gpu clocks_throttle_reasons.active driver_version"


def gpu_state() -> dict[str, str]:
    """Clocks, power and throttling reasons, just after the last step; empty without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {}
    names = STATE.split()
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return dict(zip(names, (value.strip() for value in answer.split(",")), strict=False))


def main(words: list[str]) -> int:
    options = parser().parse_args(words)
    result = measure(options)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    asked = {name: str(value) for name, value in vars(options).items() if name not in PLACES}
    command = shlex.join(f"--{name.replace('_', '-')}={value}" for name, value in asked.items())
    header = provenance(f"python -m validation.fake_rank {command}", device=device)
    told = oracle_experiment(asdict(case_of(options))).model_dump(exclude_unset=True, exclude={"cluster"})
    experiment = told if options.trainer == "fsdp2" else None
    text = json.dumps({"provenance": header, "asked": asked, "experiment": experiment, **result}, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
