"""Record one case on this rank."""

from __future__ import annotations

import gzip
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from validation.backends import Optimization, Strategy, Trainer, make_trainer
from validation.collective_log import CollectiveLog
from validation.examples import make_batch
from validation.llama import Llama, LlamaShape
from validation.machine_load import CpuLoad
from validation.probe import Probe
from validation.record import flight_recorder, kineto
from validation.record.cases import SHAPES, Recording
from validation.tracing import Tracer, now
from zsim.comparison.plan_check import Call, fold

WARM_UP_STEPS = 5
TRACED_STEPS = 2


@dataclass(frozen=True)
class Order:
    """How to record: the number of timed steps, whether with Kineto, the folder to write to."""

    folder: str
    timed_steps: int = 12
    with_kineto: bool = False
    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True)
class Recorded:
    """The results of one rank."""

    calls: list[Any]
    flight_recorder: list[Any] | None
    step_seconds: list[float]
    step_cpu_seconds: list[float]
    step_minor_faults: list[int]
    probe_seconds: list[tuple[float, float]]
    phase_seconds: dict[str, list[float]]
    held_before_update: dict[str, dict[str, int]]
    held_between_steps: dict[str, dict[str, int]]
    losses: list[float]
    cpu_ticks: tuple[float, float, float]
    cuda_bytes: dict[str, int]
    parameters: int


def shape_of(model: str) -> LlamaShape:
    config = SHAPES[model]
    return LlamaShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        vocab_size=config["vocab_size"],
        tie_word_embeddings=config["tie_word_embeddings"],
    )


def options_of(strategy: Recording, order: Order) -> dict[str, Any]:
    """The backend's options on this rank: its folder for files, and the device for backends that do not take
    the model's."""
    options = dict(strategy.options)
    if "nvme" in options.values():
        options["nvme_folder"] = Path(os.environ.get("ZSIM_NVME_FOLDER", Path(order.folder) / "nvme"))
    if strategy.backend in ("engine", "fsdp2"):
        options["device"] = order.device
    return options


def record(
    rank: int, world_size: int, strategy: Recording, model_name: str, order: Order, header: dict[str, Any]
) -> Recorded:
    """Warm up, time, then trace; the log of the traced steps goes to `order.folder`."""
    folder, options = Path(order.folder), options_of(strategy, order)
    torch.manual_seed(order.seed)
    model = Llama(shape_of(model_name)).to(order.device)
    tracer = Tracer(is_on=False)
    trainer = make_trainer(Strategy(strategy.backend, options), model, Optimization(), tracer)
    steps = Steps(trainer, tracer, strategy, rank, world_size, shape_of(model_name).vocab_size, order.device)
    count = sum(p.numel() for p in Llama(shape_of(model_name)).parameters())

    for _ in range(WARM_UP_STEPS):
        steps.run()
    load, probe = CpuLoad(), Probe(order.device)
    timed, probed = [], []
    for _ in range(order.timed_steps):
        faults = minor_faults()
        timed.append((*steps.run(), minor_faults() - faults))
        dist.barrier()
        probed.append(probe())
    cpu_ticks = load.since()
    tracer.is_on = True
    for _ in range(order.timed_steps):
        steps.run()
    phase_seconds = phases(tracer)
    tracer.events.clear()
    calls, backend_rows = trace_steps(steps, tracer, is_engine=strategy.backend == "engine")
    name = f"rank{rank}.jsonl.gz"
    clock = {"perf_counter_ns": now(), "epoch_ns": time.time_ns()}
    lines = tracer.lines({**header, "rank": rank, "world_size": world_size, "clock": clock})
    (folder / name).write_bytes(gzip.compress(lines.encode(), mtime=0))
    if order.with_kineto:
        steps.run_under_kineto(folder / f"rank{rank}.kineto.json.gz", header)
    between = trainer.held_bytes()
    trainer.close()
    return Recorded(
        calls=fold(calls),
        flight_recorder=backend_rows,
        step_seconds=[wall for wall, _, _ in timed],
        step_cpu_seconds=[cpu for _, cpu, _ in timed],
        step_minor_faults=[faults for _, _, faults in timed],
        probe_seconds=probed,
        phase_seconds=phase_seconds,
        held_before_update=steps.held_before_update,
        held_between_steps=between,
        losses=steps.losses,
        cpu_ticks=cpu_ticks,
        cuda_bytes=cuda_bytes(order.device),
        parameters=count,
    )


class Steps:
    """Runs one optimizer step after another on fresh batches."""

    def __init__(
        self,
        trainer: Trainer,
        tracer: Tracer,
        strategy: Recording,
        rank: int,
        world_size: int,
        vocab: int,
        device: str,
    ) -> None:
        self.trainer, self.tracer, self.strategy = trainer, tracer, strategy
        self.rank, self.world_size, self.vocab, self.device = rank, world_size, vocab, device
        self.number = 0
        self.losses: list[float] = []
        self.held_before_update: dict[str, dict[str, int]] = {}

    def run(self) -> tuple[float, float]:
        """Run one step; returns (wall seconds, this thread's CPU seconds). All ranks begin together."""
        each = self.strategy.micro_batch_size
        batch = make_batch(self.number, each * self.world_size, self.strategy.sequence_length, self.vocab)
        mine = slice(self.rank * each, (self.rank + 1) * each)
        tokens, labels = (tensor[mine].to(self.device) for tensor in batch)
        self.tracer.step = self.number
        self.number += 1
        dist.barrier()
        start, cpu = now(), time.thread_time_ns()
        loss = self.trainer.step([(tokens, labels)], self.note_memory if self.tracer.is_on else _nothing)
        if self.device != "cpu":
            torch.cuda.synchronize()
        seconds = (now() - start) / 1e9, (time.thread_time_ns() - cpu) / 1e9
        self.losses.append(float(loss))
        return seconds

    def note_memory(self) -> None:
        self.held_before_update = self.trainer.held_bytes()

    def run_under_kineto(self, path: Path, header: dict[str, Any]) -> None:
        """Run one step under PyTorch's profiler, with the shapes of operators' inputs."""
        from torch.profiler import ProfilerActivity, profile, record_function

        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device != "cpu" else [])
        step = record_function(f"ProfilerStep#{self.number}")  # torch's own profiler.step() names it so
        with profile(activities=activities, record_shapes=True) as profiler, step:
            self.run()
        raw = path.with_suffix(".raw")
        profiler.export_chrome_trace(str(raw))
        kineto.write_trimmed(raw, path, header["provenance"])


def minor_faults() -> int:
    """The number of pages that this process has touched for the first time so far. [Note: first touch]"""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _nothing() -> None:
    pass


def cuda_bytes(device: str) -> dict[str, int]:
    """The caching allocator's peaks; empty without a GPU."""
    if device == "cpu":
        return {}
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def trace_steps(steps: Steps, tracer: Tracer, *, is_engine: bool) -> tuple[list[Call], list[Any] | None]:
    """Run traced steps; returns the collectives of the last one, as requested and as given to the backend.

    The engine writes its collectives into the trace itself; for other backends the log does.
    """
    calls: list[Call] = []
    rows: list[Any] | None = None
    for _ in range(TRACED_STEPS):
        before = flight_recorder.entries()
        with CollectiveLog(Tracer(is_on=False) if is_engine else tracer) as log:
            steps.run()
        after = flight_recorder.entries()
        calls = list(log.calls)
        if is_engine:
            engine = steps.trainer.engine  # type: ignore[attr-defined]
            calls = engine.comm.calls[-len(log.calls) :]
        if before is not None and after is not None:
            new = [entry for entry in after if entry["record_id"] > max(e["record_id"] for e in before)]
            rows = flight_recorder.rows([e for e in new if not e["profiling_name"].endswith("barrier")])
    return calls, rows


def phases(tracer: Tracer) -> dict[str, list[float]]:
    """Seconds of each forward, backward and update in the log."""
    seconds: dict[str, list[float]] = {}
    for event in tracer.events:
        if event["kind"] == "phase" and event["op"] in ("forward", "backward", "update"):
            seconds.setdefault(event["op"], []).append((event["done_ns"] - event["issue_ns"]) / 1e9)
    return seconds
