"""The backend's own record of what ran: PyTorch's Flight Recorder, which is on by default in torch 2.13.

It is a second witness: `CollectiveLog` records what the code requests, the Flight Recorder what gloo or NCCL
is given. gloo's reduce-scatter, for example, is an all-reduce here. The interface is private, so a torch
without it gives None."""

from __future__ import annotations

import json
from typing import Any

import torch


def entries() -> list[dict[str, Any]] | None:
    """Every collective of this process so far, oldest first; None if torch has no Flight Recorder."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    found: list[dict[str, Any]] = json.loads(dump()).get("entries", [])
    return sorted(found, key=lambda entry: entry["record_id"])


def rows(found: list[dict[str, Any]]) -> list[list[Any]]:
    """[operation, input sizes, output sizes, dtype, group] of each."""
    return [
        [
            entry["profiling_name"],
            entry["input_sizes"],
            entry["output_sizes"],
            entry["input_dtypes"][0] if entry["input_dtypes"] else "",
            entry["process_group"][0],
        ]
        for entry in found
    ]
