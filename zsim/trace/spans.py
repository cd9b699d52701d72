"""What happened, simulated or recorded: spans on streams, and memory over time.

A span is a row of four arrays (rank, info, start, end); what the spans are is told once per distinct op
in `infos`, so a trace of a thousand ranks stays small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pandas

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
SpanKind = Literal[
    "compute", "optimizer", "copy", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast",
    "reduce", "send", "recv", "h2d", "d2h", "cpu", "nvme_read", "nvme_write", "host",
]  # fmt: skip
COLLECTIVES = frozenset(
    {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "send", "recv"}
)


@dataclass(frozen=True, slots=True)
class SpanInfo:
    """What one op is; `bytes` as in `Collective.bytes` for collectives, moved bytes for copies, else 0."""

    name: str
    kind: str
    stream: str
    bytes: int = 0
    dtype: str = ""
    group: str = ""
    group_size: int = 1
    phase: str = ""
    module: str = ""
    flops: float = 0.0
    hbm_bytes: float = 0.0


@dataclass(frozen=True)
class MemoryEvents:
    """Changes of memory in the order they happened: bytes of `category` on `device` of a rank.

    `host_seconds` is when the host did it (what the allocator sees); `stream_seconds` when the compute
    stream reached that point of the program (what a timeline shows). `names` is the op that did it, one per
    event; empty where that is not known.
    """

    ranks: Ints
    host_seconds: Floats
    stream_seconds: Floats
    devices: tuple[str, ...]
    categories: tuple[str, ...]
    deltas: Ints
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trace:
    """All spans of one step (or of a recording).

    Arrays have one entry per span: `ranks`, `info_indices` (into `infos`), `issue_seconds` (when the host
    enqueued it; NaN if unknown), `start_seconds`, `end_seconds`. `metadata` holds what a reader needs to
    know of the source: model, cluster, framework, world size.
    """

    source: Literal["simulated", "recorded"]
    infos: tuple[SpanInfo, ...]
    ranks: Ints
    info_indices: Ints
    issue_seconds: Floats
    start_seconds: Floats
    end_seconds: Floats
    world_size: int
    step_seconds: float
    memory: MemoryEvents | None = None
    host_blocks: tuple[
        tuple[int, float, float, int], ...
    ] = ()  # rank, start, end, info of what it waited for
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ranks)

    def of_rank(self, rank: int) -> Trace:
        """The same trace with the spans of one rank only."""
        keep = self.ranks == rank
        return Trace(
            source=self.source,
            infos=self.infos,
            ranks=self.ranks[keep],
            info_indices=self.info_indices[keep],
            issue_seconds=self.issue_seconds[keep],
            start_seconds=self.start_seconds[keep],
            end_seconds=self.end_seconds[keep],
            world_size=self.world_size,
            step_seconds=self.step_seconds,
            memory=self.memory,
            host_blocks=tuple(block for block in self.host_blocks if block[0] == rank),
            metadata=self.metadata,
        )

    def rows(self) -> Iterator[tuple[int, SpanInfo, float, float]]:
        """(rank, info, start, end) of each span, in array order."""
        for rank, index, start, end in zip(
            self.ranks.tolist(),
            self.info_indices.tolist(),
            self.start_seconds.tolist(),
            self.end_seconds.tolist(),
            strict=True,
        ):
            yield rank, self.infos[index], start, end

    def to_frame(self) -> pandas.DataFrame:
        """rank, stream, name, kind, start_seconds, end_seconds, bytes (and dtype, group, phase, module)."""
        import pandas

        infos = pandas.DataFrame(
            [(i.stream, i.name, i.kind, i.bytes, i.dtype, i.group, i.phase, i.module) for i in self.infos],
            columns=["stream", "name", "kind", "bytes", "dtype", "group", "phase", "module"],
        )
        frame = infos.iloc[self.info_indices].reset_index(drop=True)
        frame.insert(0, "rank", self.ranks)
        frame.insert(4, "start_seconds", self.start_seconds)
        frame.insert(5, "end_seconds", self.end_seconds)
        return frame
