"""Hand-made traces for the tests: every span is typed in, so every expectation can be worked out."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

from tests.skips import skip_lines
from zsim.trace.trace import MemoryEvents, SpanInfo, SpanInfos, Trace

# No test waits on a clock, not even Hypothesis's, and two runs of the suite try the same examples.
# `make fuzz` tries others.
hypothesis.settings.register_profile("zsim", deadline=None, derandomize=True)
hypothesis.settings.register_profile("fuzz", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("ZSIM_HYPOTHESIS", "zsim"))

# A shell's background jobs ignore Ctrl-C, and so would the programs that tests start and end with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


STALE_SECONDS = 600  # no extension that tests load takes as long to compile


def pytest_configure(config: pytest.Config) -> None:
    """What DeepSpeed compiles lies in the environment. torch waits without end for the lock of a compilation
    that was killed: one that nobody can hold any more goes before the first test starts."""
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch-extensions")))
    for lock in folder.glob("*/lock"):
        with contextlib.suppress(FileNotFoundError):  # several processes of one run look
            if time.time() - lock.stat().st_mtime > STALE_SECONDS:
                lock.unlink()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update", action="store_true", help="rewrite expectations that are files, then look at the diff"
    )


# What tools keep in the folder that pytest is run from; the rest of .gitignore's names are there.
_KEPT_BY_TOOLS = ("__pycache__", "dist", "build", "site", "out", "demo-out")


@pytest.fixture(scope="session")
def at_the_start(request: pytest.FixtureRequest) -> frozenset[str]:
    return frozenset(os.listdir(request.config.invocation_params.dir))


@pytest.fixture(autouse=True)
def _nothing_is_left_in_the_working_folder(
    at_the_start: frozenset[str], request: pytest.FixtureRequest
) -> Iterator[None]:
    """A test leaves its files in `tmp_path`. With several processes the one at fault may be a neighbour."""
    yield
    folder = request.config.invocation_params.dir
    left = {name for name in os.listdir(folder) if not name.startswith(".")}
    left -= at_the_start | set(_KEPT_BY_TOOLS)
    assert not left, f"left in {folder}: {sorted(left)}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.getreports("skipped")
    if skipped:
        terminalreporter.section(f"{len(skipped)} skipped, by reason")
        for line in skip_lines(skipped):
            terminalreporter.line(line)


def build_memory(events: Sequence[tuple[Any, ...]]) -> MemoryEvents:
    """Events are (rank, seconds, device, category, delta, name); host and stream at the same time."""
    ranks, seconds, devices, categories, deltas, names = zip(*events, strict=True)
    return MemoryEvents(
        ranks=np.array(ranks, dtype=np.int64),
        host_seconds=np.array(seconds, dtype=np.float64),
        stream_seconds=np.array(seconds, dtype=np.float64),
        devices=devices,
        categories=categories,
        deltas=np.array(deltas, dtype=np.int64),
        names=names,
    )


def build_trace(
    spans: Sequence[Mapping[str, Any]],
    *,
    step_seconds: float | None = None,
    world_size: int = 8,
    memory: Sequence[tuple[Any, ...]] = (),
    host_blocks: Sequence[tuple[int, float, float, str]] = (),
    allocator_blocks: Sequence[tuple[int, float, float]] = (),
    metadata: Mapping[str, Any] | None = None,
) -> Trace:
    """Spans are dicts with `start`, `end`, maybe `issue` (default: the start) and `rank`, and the fields of
    SpanInfo (`kind` and `stream` default to "compute", `name` to the kind). A host block names what it
    waited for."""
    infos: list[SpanInfo] = []
    rows = []
    for span in spans:
        fields = {key: value for key, value in span.items() if key not in ("rank", "issue", "start", "end")}
        fields.setdefault("kind", "compute")
        fields.setdefault("stream", "compute")
        fields.setdefault("name", fields["kind"])
        info = SpanInfo(**fields)
        if info not in infos:
            infos.append(info)
        rows.append(
            (
                span.get("rank", 0),
                infos.index(info),
                span.get("issue", span["start"]),
                span["start"],
                span["end"],
            )
        )
    columns = list(zip(*rows, strict=True)) or [(), (), (), (), ()]
    names = [info.name for info in infos]
    return Trace(
        source="simulated",
        infos=SpanInfos(infos),
        ranks=np.array(columns[0], dtype=np.int64),
        info_indices=np.array(columns[1], dtype=np.int64),
        issue_seconds=np.array(columns[2], dtype=np.float64),
        start_seconds=np.array(columns[3], dtype=np.float64),
        end_seconds=np.array(columns[4], dtype=np.float64),
        world_size=world_size,
        step_seconds=step_seconds if step_seconds is not None else max(columns[4], default=0.0),
        memory=build_memory(memory) if memory else None,
        host_blocks=tuple((rank, start, end, names.index(name)) for rank, start, end, name in host_blocks),
        allocator_blocks=tuple(allocator_blocks),
        metadata=metadata or {},
    )


@pytest.fixture
def make_trace() -> Callable[..., Trace]:
    return build_trace


@pytest.fixture
def make_memory() -> Callable[..., MemoryEvents]:
    return build_memory


def build_sharded_step(num_blocks: int = 4, world_size: int = 16, rank: int = 0) -> Trace:
    """A step in FSDP2's shape: gathers on their own stream one block ahead, reduce-scatters behind backward.

    Forward 2 ms and backward 4 ms per block, gather 1 ms, reduce-scatter 2 ms, optimizer 3 ms; the host needs
    0.1 ms per op. A block is 1 GB of gathered bf16 parameters and 3 GB of activations.
    """
    millisecond = 1e-3
    group: dict[str, Any] = {"group": "shard", "group_size": world_size, "dtype": "bf16", "bytes": 10**9}
    spans: list[dict[str, Any]] = []
    free = {"compute": 0.0, "all_gather": 0.0, "reduce_scatter": 0.0}
    host = 0.0
    memory: list[tuple[Any, ...]] = [
        (rank, 0.0, "gpu", "framework", 2 * 10**9, "context"),
        (rank, 0.0, "gpu", "parameters", num_blocks * 10**9 // world_size, "shards"),
        (rank, 0.0, "gpu", "optimizer_states", num_blocks * 6 * 10**9 // world_size, "shards"),
    ]

    def run(stream: str, seconds: float, after: float = 0.0, **fields: Any) -> float:
        nonlocal host
        host += 0.1 * millisecond
        start = max(free[stream], after, host)
        free[stream] = start + seconds
        span = {"stream": stream, "issue": host, "start": start, "end": free[stream], "rank": rank, **fields}
        spans.append(span)
        return free[stream]

    def change(category: str, num_bytes: int, name: str) -> None:
        memory.append((rank, free["compute"], "gpu", category, num_bytes, name))

    def gather(block: int, phase: str) -> float:
        change("buffers", 10**9, f"all_gather blocks.{block}")
        name = f"all_gather blocks.{block}"
        return run(
            "all_gather",
            millisecond,
            kind="all_gather",
            name=name,
            module=f"blocks.{block}",
            phase=phase,
            **group,
        )

    gathered = gather(0, "forward")
    for block in range(num_blocks):
        own, module = gathered, f"blocks.{block}"
        gathered = gather(block + 1, "forward") if block + 1 < num_blocks else own
        run(
            "compute",
            2 * millisecond,
            own,
            name=f"{module} forward",
            module=module,
            phase="forward",
            flops=1e12,
        )
        change("activations", 3 * 10**9, f"{module} forward")
        change("buffers", -(10**9), f"{module} reshard")
    gathered = gather(num_blocks - 1, "backward")
    for block in reversed(range(num_blocks)):
        own, module = gathered, f"blocks.{block}"
        gathered = gather(block - 1, "backward") if block else own
        done = run(
            "compute",
            4 * millisecond,
            own,
            name=f"{module} backward",
            module=module,
            phase="backward",
            flops=2e12,
        )
        change("activations", -3 * 10**9, f"{module} backward")
        name = f"reduce_scatter {module}"
        run(
            "reduce_scatter",
            2 * millisecond,
            done,
            kind="reduce_scatter",
            name=name,
            module=module,
            phase="backward",
            **group,
        )
        change("gradients", 10**9 // world_size, name)
        change("buffers", -(10**9), f"{module} reshard")
    done = free["reduce_scatter"]
    run("compute", 3 * millisecond, done, kind="optimizer", name="adamw", phase="optimizer")
    change("gradients", -num_blocks * (10**9 // world_size), "zero_grad")
    return build_trace(
        spans,
        world_size=world_size,
        memory=memory,
        metadata={"model": "synthetic", "framework": "fsdp2", "gpus_per_node": 8, "backend": "nccl"},
    )


@pytest.fixture
def make_sharded_step() -> Callable[..., Trace]:
    return build_sharded_step


# -- Kineto files made by hand, in the shape of each generation ----------------------------------------

Event = dict[str, Any]
MAIN, DEVICE = 4000, 0


class KinetoBuilder:
    """Collects events; times are microseconds. `launch` is a kernel and the runtime call that starts it."""

    def __init__(self, rank: int = 0, world_size: int = 2, base: int = 0) -> None:
        self.head: Event = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
            "baseTimeNanoseconds": base,
        }
        self.events: list[Event] = []
        self.correlation = 100

    def complete(self, cat: str, name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> None:
        pid = DEVICE if cat in ("kernel", "gpu_memcpy", "gpu_memset") else MAIN
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}
        self.events.append({**event, "args": args})

    def step(self, number: int, ts: float, dur: float) -> None:
        self.complete("user_annotation", f"ProfilerStep#{number}", ts, dur)

    def launch(
        self,
        name: str,
        at: float,
        ts: float,
        dur: float,
        stream: int = 7,
        cat: str = "kernel",
        tid: int = MAIN,
        external: int | None = None,
        **args: Any,
    ) -> None:
        self.correlation += 1
        ids = {"correlation": self.correlation, "External id": external or self.correlation}
        self.complete("cuda_runtime", "cudaLaunchKernel", at, 2.0, tid=tid, **ids)
        self.complete(cat, name, ts, dur, tid=stream, device=DEVICE, stream=stream, **ids, **args)

    def write(self, path: Path) -> Path:
        text = json.dumps({**self.head, "traceEvents": self.events}).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path


@pytest.fixture
def kineto() -> Callable[..., KinetoBuilder]:
    return KinetoBuilder


def nccl_metadata(name: str, elements_in: int, elements_out: int, ranks: list[int], seq: int = 0) -> Event:
    """What torch 2.3 and newer write on a collective's kernel."""
    return {
        "Collective name": name,
        "In msg nelems": elements_in,
        "Out msg nelems": elements_out,
        "Group size": len(ranks),
        "dtype": "BFloat16",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": str(ranks),
        "Seq": seq,
    }


@pytest.fixture
def metadata() -> Callable[..., Event]:
    return nccl_metadata
