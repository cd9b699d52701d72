"""A rank's log of its operations and their times: cheap enough to be always on, about a kilobyte per unit and
step.

One JSON object per line. The first line is a header (`provenance`, model, strategy, clock); then events in
the order in which the host began them:

    {"kind": "coll", "op": "all_gather", "unit": "layers.0", "phase": "forward", "bytes": 1024,
     "dtype": "bf16", "group": 4, "stride": 1, "seq": 12, "step": 3, "micro": 0,
     "issue_ns": 1, "done_ns": 5, "wait0_ns": 4, "wait1_ns": 5, "post_ns": 6}

`issue_ns` is when the host called, `done_ns` when the backend reported the end (absent if it does not),
`wait0_ns` to `wait1_ns` the time during which the host blocked, `post_ns` the end of local work on the
result. `comp` events are a unit's forward or backward (`issue_ns`, `done_ns`, `cpu_ns` of the thread), `io`
events reads and writes of files, `mem` events changes of live bytes by category, `phase` events parts of the
step. Times are from `time.perf_counter_ns`, shared by all processes of a machine."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from zsim.comparison.plan_check import Call

now = time.perf_counter_ns


class Tracer:
    """Collects events; `Tracer(is_on=False)` collects nothing at almost no cost."""

    def __init__(self, is_on: bool = True) -> None:
        self.is_on = is_on
        self.events: list[dict[str, Any]] = []
        self.step = 0
        self.micro = 0
        self.phase = ""
        self._sequence = 0

    def collective(self, call: Call, issue_ns: int | None = None) -> CollectiveSpan:
        """Begin a collective's span at `issue_ns`, by default now; for a blocking call, the time of the
        call."""
        if not self.is_on:
            return _NO_SPAN
        self._sequence += 1
        event = self._begin(
            "coll",
            op=call.kind,
            unit=call.module,
            phase=self.phase,
            bytes=call.bytes,
            dtype=call.dtype,
            group=call.group_size,
            stride=call.group_stride,
            seq=self._sequence,
        )
        event["issue_ns"] = issue_ns or event["issue_ns"]
        return CollectiveSpan(event)

    @contextlib.contextmanager
    def span(self, kind: str, op: str, **fields: Any) -> Iterator[None]:
        """Trace a host operation from beginning to end."""
        if not self.is_on:
            yield
            return
        self.phase = op if kind == "phase" else self.phase
        event, cpu = self._begin(kind, op=op, phase=self.phase, **fields), time.thread_time_ns()
        try:
            yield
        finally:
            event["done_ns"] = now()
            event["cpu_ns"] = time.thread_time_ns() - cpu

    def begin(self, kind: str, op: str, **fields: Any) -> dict[str, Any]:
        """Begin a span that a later call of `end` ends."""
        return self._begin(kind, op=op, phase=self.phase, cpu_ns=-time.thread_time_ns(), **fields)

    def end(self, event: dict[str, Any]) -> None:
        """End a span of `begin`, on the same thread."""
        event["done_ns"] = now()
        event["cpu_ns"] += time.thread_time_ns()

    def memory(self, category: str, change: int, live: int, unit: str = "") -> None:
        """Record that the unit's bytes of `category` changed by `change` to `live`."""
        if self.is_on and change:
            self._begin("mem", op=category, unit=unit, phase=self.phase, bytes=change, live=live)

    def _begin(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"kind": kind, **fields, "step": self.step, "micro": self.micro, "issue_ns": now()}
        if self.is_on:
            self.events.append(event)
        return event

    def lines(self, header: dict[str, Any]) -> str:
        """The log as JSON lines, `header` first."""
        return "\n".join(json.dumps(item) for item in (header, *self.events)) + "\n"


class CollectiveSpan:
    """The times of one collective."""

    def __init__(self, event: dict[str, Any] | None) -> None:
        self.event = event

    def track(self, work: Any, *, is_blocking: bool = False) -> Any:
        """Record when the backend reports the end, if it can; for a blocking call, its return."""
        if self.event is None or work is None:
            return work
        event = self.event
        try:
            work.get_future().then(lambda _: event.setdefault("done_ns", now()))
        except RuntimeError:  # gloo's native reduce-scatter has no future
            if is_blocking:
                work.wait()  # waiting twice costs nothing
                event["done_ns"] = now()
        return work

    def waiting(self) -> None:
        if self.event is not None:
            self.event["wait0_ns"] = now()

    def waited(self) -> None:
        if self.event is not None:
            self.event["wait1_ns"] = now()

    def finished(self) -> None:
        if self.event is not None:
            self.event["post_ns"] = now()


_NO_SPAN = CollectiveSpan(None)
SILENT = Tracer(is_on=False)
