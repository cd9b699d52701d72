"""One real rank of a fake world: `python -m validation.fake_rank --world-size 256 --device cuda`.

The real FSDP2, or this repository's engine, trains as rank 0 of a fake process group: real tensors of the
sharded sizes, real kernels, real allocator and host, but collectives that return at once and leave garbage.
So one GPU measures the cost of a step on 64 or 1,024 GPUs without its communication: kernel times, launch
gaps, peaks of allocated and reserved memory. (`validation.oracle` needs no GPU and has no times.)"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from validation.cases.cases import oracle_experiment
from validation.llama import Llama, find_shape
from validation.oracle.case import Case
from validation.oracle.run import fake_world
from validation.oracle.sharding import DTYPES, make_mesh, shard_case
from validation.provenance import provenance
from validation.timed_step import (
    add_step_options,
    asked_of,
    command_of,
    profile_step,
    release_memory,
    time_steps,
    turn,
    write_trace,
)  # fmt: skip
from validation.zero.config import ZeroConfig
from validation.zero.engine import ZeroEngine


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
    add_step_options(arguments, steps=8)
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
        if options.world_size > 1:  # what a fake reduction left is no gradient
            for parameter in model.parameters():
                assert isinstance(parameter.grad, DTensor)
                parameter.grad.to_local().zero_()
        adamw.step()
        adamw.zero_grad()

    return fsdp2_step, lambda: None


def fill(tensor: Tensor) -> None:
    """Small random numbers: a GPU multiplies zeros faster."""
    tensor.normal_(std=0.02)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and peaks of the steps, and the trace that is asked for."""
    torch.manual_seed(0)
    with turn(options.turn), fake_world(options.world_size):
        result, profiler = run_steps(options)
        release_memory(options.device)
    if profiler is not None:
        write_trace(profiler, options.kineto, provenance(command_of("fake_rank", options)))
    return result


def run_steps(options: argparse.Namespace) -> tuple[dict[str, Any], torch.profiler.profile | None]:
    """The times, and the profile of one more step where a trace is asked for."""
    step, close = make_step(options)
    shape = (options.micro_batch_size, options.sequence_length)
    tokens = torch.randint(0, find_shape(options.model).vocab_size, shape, device=options.device)
    with filled_gathers():
        step(tokens)
    result = time_steps(lambda: step(tokens), options.device, options.steps)
    profiler = profile_step(lambda: step(tokens), options.device) if options.kineto else None
    close()
    return result, profiler


@contextmanager
def filled_gathers() -> Iterator[None]:
    """A fake gather leaves what was in its buffer. While this lasts it leaves random weights, which stay in
    the blocks that later gathers get: a GPU multiplies zeros faster, and would compute NaN from the rest."""
    gather = dist.all_gather_into_tensor

    def fill_and_gather(output: Tensor, part: Tensor, *rest: Any, **more: Any) -> Any:
        own = part.clone()
        fill(output)
        part.copy_(own)
        return gather(output, part, *rest, **more)

    dist.all_gather_into_tensor = fill_and_gather  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_gather_into_tensor = gather


def main(words: list[str]) -> int:
    options = parser().parse_args(words)
    result = measure(options)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    asked = {name: str(value) for name, value in asked_of(options).items()}
    header = provenance(command_of("fake_rank", options), device=device)
    told = oracle_experiment(asdict(case_of(options))).model_dump(exclude_unset=True, exclude={"cluster"})
    experiment = told if options.trainer == "fsdp2" else None
    text = json.dumps({"provenance": header, "asked": asked, "experiment": experiment, **result}, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
