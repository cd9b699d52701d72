"""Small Kineto files made by hand, in the shape of each generation."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
