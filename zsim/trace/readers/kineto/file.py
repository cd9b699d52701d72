"""One rank's Kineto JSON (torch.profiler, 2021 to now, and zsim's export) as a Recording.

Three generations describe collectives in different places:
- torch 2.3 and newer: on the GPU kernel itself
- before: on the CPU op `record_param_comms`, joined by `External id`, else by the launch inside it
- 2022 and 2023: only as `Input Dims` of `record_param_comms` or of the range `nccl:...` around the launch

gloo has no kernels. Its collectives are ranges `gloo:...` on worker threads, called by `c10d::...` ops.

Files of hundreds of megabytes are read event by event. Kernels, copies, launches, collectives and annotations
are kept, and of each CPU op four numbers.

Ranges of a profile that name the unit of the model that a framework works on.

Phase (forward, backward, optimizer) and module at a time of a host thread, from the ranges that torch
writes around its work.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

from zsim.errors import InputError
from zsim.specs.strategy.registry import kinds, role_of
from zsim.trace.collective_names import is_collective_kernel, parse_int
from zsim.trace.readers.content import EXPECTED, WRONG_VALUE, JsonStream, wrong_value
from zsim.trace.readers.recording import Ranges

Event = dict[str, Any]
Thread = tuple[Any, Any]  # pid, tid

_CATEGORIES = {
    "kernel": "kernel", "gpu_memcpy": "memcpy", "memcpy": "memcpy", "gpu_memset": "memset",
    "memset": "memset", "cuda_runtime": "runtime", "cuda_driver": "runtime", "runtime": "runtime",
    "hip_runtime": "runtime", "privateuse1_runtime": "runtime", "cpu_op": "op", "operator": "op",
    "user_annotation": "annotation", "allocator": "allocator",
}  # fmt: skip
_SYNCHRONIZE = re.compile(r"^(cuda|hip)\w*Synchronize$")
_STEP = re.compile(r"^ProfilerStep#(\d+)")
_OPTIMIZER_STEP = "Optimizer.step#"
_LONGEST = 2**61  # 73 years in nanoseconds; columns hold 64 bits
_BACKWARD = "autograd::engine::evaluate_function"


@dataclass(slots=True)
class DeviceEvent:
    """A kernel, copy or memset on a device's stream."""

    kind: str
    name: str
    device: Any
    stream: Any
    start: int
    end: int
    correlation: int
    external_id: int
    args: Event


@dataclass(slots=True)
class HostEvent:
    """An event on a thread of the host."""

    name: str
    thread: Thread
    start: int
    end: int
    external_id: int
    args: Event


@dataclass
class KinetoFile:
    """The kept content of a file."""

    path: Path
    head: Event
    base: int = 0
    device_events: list[DeviceEvent] = field(default_factory=list)
    launches: dict[int, tuple[int, int, Thread]] = field(default_factory=dict)
    """Correlation id -> (start, end, thread)."""
    blocks: list[tuple[int, int, Thread]] = field(default_factory=list)
    allocator_spans: list[tuple[int, int]] = field(default_factory=list)
    """The times in which zsim's host was in torch's allocator, which had run short."""
    waits: dict[Thread, list[int]] = field(default_factory=dict)
    """The times when a thread made a stream wait."""
    comms: list[HostEvent] = field(default_factory=list)
    backend_ranges: list[HostEvent] = field(default_factory=list)
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    optimizer_steps: list[tuple[int, int, int]] = field(default_factory=list)
    annotations: dict[Thread, Ranges[str]] = field(default_factory=dict)
    backward: dict[Thread, list[tuple[int, int]]] = field(default_factory=dict)
    ops: dict[Thread, tuple[array[int], array[int], array[int]]] = field(default_factory=dict)
    """The CPU ops of each thread as flat arrays (start, end, index of the name)."""
    op_names: dict[str, int] = field(default_factory=dict)
    memory: list[tuple[int, str, int, int]] = field(default_factory=list)
    counters: list[tuple[int, str, Event]] = field(default_factory=list)
    thread_names: dict[Thread, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    step_thread: Thread | None = None
    optimizer_thread: Thread | None = None

    @property
    def is_from_zsim(self) -> bool:
        return str(self.head.get("source", "")).startswith("zsim, ")


def load(path: Path, stream: JsonStream) -> KinetoFile:
    """Read the file to its end.

    Raises InputError if it is damaged or has no traceEvents.
    """
    file = KinetoFile(path, stream.head)
    event: Event = {}
    has_events = False
    try:
        for event in stream.items("traceEvents"):
            has_events = True
            _add_event(file, event)
    except WRONG_VALUE as error:
        raise wrong_value(path, f"event {stream.num_items}: {json.dumps(event)[:80]}", error) from error
    if not has_events and "traceEvents" not in stream.head:
        keys = ", ".join(list(stream.head)[:8])
        raise InputError(f"{path}: has no 'traceEvents' (it has {keys or 'nothing'}); {EXPECTED}")
    file.base = parse_int(stream.head.get("baseTimeNanoseconds"))
    for waits in file.waits.values():
        waits.sort()
    return file


def _add_event(file: KinetoFile, event: Event) -> None:
    phase = event.get("ph")
    if phase == "X":
        category = _CATEGORIES.get(str(event.get("cat", "")).lower())
        if category is None:
            return
        start = _nanoseconds(file.path, event, "ts")
        _HANDLERS[category](file, event, start, start + _nanoseconds(file.path, event, "dur"))
        file.counts[category] = file.counts.get(category, 0) + 1
    elif phase == "M" and event.get("name") == "thread_name":
        file.thread_names[_thread(event)] = str(_args(event).get("name", ""))
    elif phase in ("i", "I") and event.get("name") == "[memory]":
        _add_memory_event(file, event)
    elif phase == "C" and str(event.get("name", "")).endswith(" memory"):
        file.counters.append((_nanoseconds(file.path, event, "ts"), str(event["name"]), _args(event)))


def _nanoseconds(path: Path, event: Event, key: str) -> int:
    value = event.get(key, 0)
    try:
        nanoseconds = round(float(value) * 1000)
    except (TypeError, ValueError, OverflowError):
        nanoseconds = _LONGEST
    if not -_LONGEST < nanoseconds < _LONGEST:
        name = str(event.get("name", ""))[:60]
        raise InputError(f"{path}: event '{name}': {key} is {value!r}; expected microseconds")
    return nanoseconds


def _args(event: Event) -> Event:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _thread(event: Event) -> Thread:
    return event.get("pid"), event.get("tid")


def _add_device_event(file: KinetoFile, event: Event, start: int, end: int) -> None:
    args = _args(event)
    kind, name = _CATEGORIES[event["cat"].lower()], str(event.get("name", ""))
    kept_args: Event = {}
    if file.is_from_zsim or (kind == "kernel" and (is_collective_kernel(name) or "Collective name" in args)):
        kept_args = args
    elif "bytes" in args:
        kept_args = {"bytes": args["bytes"]}
    elif "grid" in args:
        kept_args = {"launch": sys.intern(f"{args['grid']} x {args.get('block')}")}
    device, stream = args.get("device", event.get("pid")), args.get("stream", event.get("tid"))
    hash((device, stream))  # a list or an object is refused here, where the event is known
    correlation, external = parse_int(args.get("correlation"), -1), parse_int(args.get("External id"), -1)
    file.device_events.append(
        DeviceEvent(kind, name, device, stream, start, end, correlation, external, kept_args)
    )


def _add_runtime_call(file: KinetoFile, event: Event, start: int, end: int) -> None:
    name = str(event.get("name", ""))
    if is_synchronize(name):
        file.blocks.append((start, end, _thread(event)))
    elif name.endswith("StreamWaitEvent"):
        file.waits.setdefault(_thread(event), []).append(start)
    correlation = parse_int(_args(event).get("correlation"), -1)
    if correlation >= 0:
        file.launches[correlation] = (start, end, _thread(event))


def _add_allocator_event(file: KinetoFile, event: Event, start: int, end: int) -> None:
    if file.is_from_zsim:
        file.allocator_spans.append((start, end))


def is_synchronize(name: str) -> bool:
    """Whether a runtime call makes the host wait for the device."""
    return _SYNCHRONIZE.match(name) is not None


def _add_op(file: KinetoFile, event: Event, start: int, end: int) -> None:
    name, thread = str(event.get("name", "")), _thread(event)
    if name == "record_param_comms" or name.startswith("c10d::"):
        args = _args(event)
        file.comms.append(HostEvent(name, thread, start, end, parse_int(args.get("External id"), -1), args))
    elif name.startswith(_BACKWARD):
        file.backward.setdefault(thread, []).append((start, end))
    columns = file.ops.get(thread)
    if columns is None:
        columns = file.ops[thread] = (array("q"), array("q"), array("q"))
    for column, value in zip(
        columns, (start, end, file.op_names.setdefault(name, len(file.op_names))), strict=True
    ):
        column.append(value)
    if file.is_from_zsim:
        _add_zsim_span(file, event, start, end)


def _add_zsim_span(file: KinetoFile, event: Event, start: int, end: int) -> None:
    """Record an op of host threads or drives, which zsim writes as a CPU op with its kind."""
    args = _args(event)
    if "kind" in args:
        external = parse_int(args.get("External id"), -1)
        thread = _thread(event)
        file.device_events.append(
            DeviceEvent("host", str(event.get("name", "")), *thread, start, end, -1, external, args)
        )


def _add_memory_event(file: KinetoFile, event: Event) -> None:
    """Record an allocator event (`profile_memory=True`): time, device, change, and bytes allocated after
    it."""
    args = _args(event)
    device = "host" if parse_int(args.get("Device Type")) == 0 else "gpu"
    change, total = parse_int(args.get("Bytes")), parse_int(args.get("Total Allocated"))
    file.memory.append((_nanoseconds(file.path, event, "ts"), device, change, total))


def _add_annotation(file: KinetoFile, event: Event, start: int, end: int) -> None:
    name, thread, args = str(event.get("name", "")), _thread(event), _args(event)
    if name.startswith(("nccl:", "gloo:", "rccl:", "ucc:", "mpi:")):
        file.backend_ranges.append(
            HostEvent(name, thread, start, end, parse_int(args.get("External id"), -1), args)
        )
        return
    add_range(file, thread, name, start, end)


def add_range(file: KinetoFile, thread: Thread, name: str, start: int, end: int) -> None:
    """Record a range that the program annotated: a step, the optimizer, or a part of one."""
    step = _STEP.match(name)
    if step:
        file.steps.append((int(step[1]), start, end))
        file.step_thread = thread
        return
    if name.startswith(_OPTIMIZER_STEP):
        file.optimizer_steps.append((len(file.optimizer_steps), start, end))
        file.optimizer_thread = thread
    file.annotations.setdefault(thread, Ranges()).add(start, end, name)


_HANDLERS: dict[str, Callable[[KinetoFile, Event, int, int], None]] = {
    "kernel": _add_device_event, "memcpy": _add_device_event, "memset": _add_device_event,
    "runtime": _add_runtime_call, "op": _add_op, "annotation": _add_annotation,
    "allocator": _add_allocator_event,
}  # fmt: skip


@dataclass(frozen=True)
class UnitRanges:
    """The ranges that a framework's hooks write.

    `RANGES` in the module `ranges` of the framework's folder.
    """

    unit: re.Pattern[str]
    """The name of a range of a unit, whose group `unit`, or else `next`, is the unit."""
    root_names: frozenset[str]
    """Names of ranges of the root, which has no name."""

    def module_of(self, name: str) -> str:
        """The unit of a range, "root" for the root. Empty for a range of another kind."""
        match = self.unit.match(name)
        if match:
            return match["unit"] or match["next"]
        return "root" if name in self.root_names else ""


_NONE = UnitRanges(re.compile(r"(?!)"), frozenset())


@cache
def _all_ranges() -> tuple[UnitRanges, ...]:
    """The ranges of all frameworks."""
    ranges = (cast(UnitRanges, role_of(kind, "ranges", "RANGES", _NONE)) for kind in kinds())
    return tuple(of_kind for of_kind in ranges if of_kind is not _NONE)


def module_of(name: str) -> str:
    """The unit that a range names, "root" for the root, or "" if none."""
    return next((unit for ranges in _all_ranges() if (unit := ranges.module_of(name))), "")


class Context:
    """Phase and module at a time of a thread, to be called in the order of time."""

    def __init__(self, file: KinetoFile) -> None:
        self._annotations = file.annotations
        self._main = file.step_thread or file.optimizer_thread
        self._backward: dict[Thread, Ranges[str]] = {}
        for thread, ranges in file.backward.items():
            self._backward[thread] = Ranges()
            for start, end in ranges:
                self._backward[thread].add(start, end, "backward")

    def at(self, thread: Thread, moment: int) -> tuple[str, str]:
        """(phase, module), each "" if not known."""
        ranges = self._annotations.get(thread)
        names = ranges.containing(moment) if ranges is not None else []
        module = next((unit for name in reversed(names) if (unit := module_of(name))), "")
        phase = next((phase for name in reversed(names) if (phase := phase_of(name))), "")
        return phase or self._phase_by_autograd(thread, moment), module

    def _phase_by_autograd(self, thread: Thread, moment: int) -> str:
        backward = self._backward.get(thread)
        if backward is None:
            return "forward" if self._backward else ""
        if self._main is not None and thread != self._main:
            return "backward"  # autograd's own thread
        return "backward" if backward.containing(moment) else "forward"


def phase_of(name: str) -> str:
    """The phase that a range names, as in `FSDP::pre_backward (layers.3)`, `## forward ##`, or "" if none."""
    if name.startswith("Optimizer.step#"):
        return "optimizer"
    lower = name.lower()
    is_forward, is_backward = "forward" in lower, "backward" in lower
    if is_forward != is_backward:
        return "forward" if is_forward else "backward"
    return "optimizer" if lower.strip("# ") in ("optimizer", "optimizer step", "update") else ""
