"""A Flight Recorder dump as JSON (torch 2.5 and newer, versions 2.x): the collectives, in order.

Without `TORCH_NCCL_ENABLE_TIMING=1` it has no durations. The spans then have no length, and
`Recording.is_timed` is False. It has no steps, so these are recognized as repetitions of the sequence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.trace.collective_names import (
    collective_kind,
    count_elements,
    full_tensor_bytes,
    parse_dtype,
    parse_int,
    parse_ranks,
)
from zsim.trace.readers.content import WRONG_VALUE, JsonStream, wrong_value
from zsim.trace.readers.recording import UNKNOWN, Recording
from zsim.trace.trace import SpanInfo

Entry = dict[str, Any]


def read_flight_recorder(path: Path, stream: JsonStream) -> Recording:
    """The recording of one rank. Raises InputError for a dump without entries and for another format."""
    entries = list(stream.items("entries"))
    head = stream.head
    version = str(head.get("version", ""))
    if "entries" not in head or not version.startswith("2."):
        raise InputError(f"{path}: has version '{version}'; expected a Flight Recorder dump of version 2.x")
    if not entries:
        raise InputError(
            f"{path}: has no entries; the recorder keeps none with TORCH_FR_BUFFER_SIZE=0 "
            "(TORCH_NCCL_TRACE_BUFFER_SIZE before torch 2.7)"
        )
    groups = _groups(head)
    world_size = max((len(ranks) for ranks in groups.values()), default=0)
    rank = parse_int(head.get("rank"), _rank_in_name(path))
    recording = Recording(path, rank, max(world_size, 1))
    recording.is_timed = any(entry.get("duration_ms") for entry in entries)
    recording.metadata = {"flight_recorder_version": version}
    entries.sort(key=lambda entry: parse_int(entry.get("record_id")))
    try:
        for entry in entries:
            _add_entry(recording, entry, groups)
    except WRONG_VALUE as error:
        raise wrong_value(path, f"entry {json.dumps(entry)[:80]}", error) from error
    _find_steps(recording)
    return recording


def _rank_in_name(path: Path) -> int:
    """`nccl_trace_rank_3`, `fr3.json` -> 3: a dump may lack its rank, but its name ends with it."""
    numbers = re.findall(r"\d+", path.name)
    return int(numbers[-1]) if numbers and len(numbers[-1]) < 7 else 0


def _groups(head: Entry) -> dict[str, tuple[int, ...]]:
    config = head.get("pg_config")
    groups: dict[str, tuple[int, ...]] = {}
    for name, group in config.items() if isinstance(config, dict) else ():
        if isinstance(group, dict):
            groups[str(name)] = parse_ranks(group.get("ranks"), 0)
    return groups


def _add_entry(recording: Recording, entry: Entry, groups: dict[str, tuple[int, ...]]) -> None:
    name = str(entry.get("profiling_name", ""))
    backend, _, call_name = name.partition(":")
    kind = collective_kind(call_name or name)
    if not kind or kind == "barrier":
        recording.metadata["barriers"] = recording.metadata.get("barriers", 0) + 1
        return
    recording.backend = recording.backend or backend
    number, description = [*map(str, entry.get("process_group") or ()), "", ""][:2]
    ranks = groups.get(number) or groups.get(description) or groups.get("", ())
    size = len(ranks) or recording.world_size
    group = "world" if size == recording.world_size else description or f"group {number}"
    recording.groups[group] = ranks or tuple(range(recording.world_size))
    dtypes = entry.get("input_dtypes") or entry.get("output_dtypes") or [""]
    dtype, dtype_bytes = parse_dtype(str(dtypes[0]))
    full = full_tensor_bytes(
        kind,
        count_elements(entry.get("input_sizes")),
        count_elements(entry.get("output_sizes")),
        dtype_bytes,
        size,
    )
    issue = parse_int(entry.get("time_created_ns"))
    start = parse_int(entry.get("time_discovered_started_ns")) or issue
    length = round(float(entry.get("duration_ms") or 0.0) * 1e6)
    sequence = parse_int(entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"), UNKNOWN)
    info = SpanInfo(name, kind, "", full, dtype, group, size)
    recording.add(info, start if length else issue, (start if length else issue) + length, issue, sequence)


def _find_steps(recording: Recording) -> None:
    """Cut the recording where the sequence of collectives begins again, counted back from the end of the
    dump."""
    period = repeating_period(recording.info_indices)
    if not period:
        return
    count = len(recording)
    ends = list(range(count, period - 1, -period))[::-1]
    for number, end in enumerate(ends):
        start = max(end - period, 0)
        end_time = recording.issue[end] if end < count else max(recording.end[start:end]) + 1
        recording.steps.append((number, recording.issue[start], end_time - 1))
    recording.notes.append(f"steps are told from the collectives: {period} of them repeat")


def repeating_period(values: Sequence[int]) -> int:
    """The shortest period in which the end of a sequence repeats over at least half of it, twice or more.

    0 if there is none.
    """
    count = len(values)
    for period in range(1, count // 2 + 1):
        num_repeated = 0
        while (
            num_repeated < count - period and values[-1 - num_repeated] == values[-1 - num_repeated - period]
        ):
            num_repeated += 1
        if num_repeated + period >= max(2 * period, (count + 1) // 2):
            return period
    return 0
