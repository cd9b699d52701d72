"""Hand-made traces for the tests: every span is typed in, so every expectation can be worked out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from zsim.trace.spans import MemoryEvents, SpanInfo, Trace


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
        infos=tuple(infos),
        ranks=np.array(columns[0], dtype=np.int64),
        info_indices=np.array(columns[1], dtype=np.int64),
        issue_seconds=np.array(columns[2], dtype=np.float64),
        start_seconds=np.array(columns[3], dtype=np.float64),
        end_seconds=np.array(columns[4], dtype=np.float64),
        world_size=world_size,
        step_seconds=step_seconds if step_seconds is not None else max(columns[4], default=0.0),
        memory=build_memory(memory) if memory else None,
        host_blocks=tuple((rank, start, end, names.index(name)) for rank, start, end, name in host_blocks),
        metadata=metadata or {},
    )


@pytest.fixture
def make_trace() -> Callable[..., Trace]:
    return build_trace


@pytest.fixture
def make_memory() -> Callable[..., MemoryEvents]:
    return build_memory
