"""PyTorch's own trace of one step, trimmed to the events about communication."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

KEPT_CATEGORIES = {"user_annotation", "gpu_user_annotation", "kernel", "gpu_memcpy", "gpu_memset"}


def trim(trace: dict[str, Any]) -> dict[str, Any]:
    """The trace with collectives, annotations, kernels and copies; without operators, Python and the host's
    name."""
    trace["traceEvents"] = [event for event in trace["traceEvents"] if _is_kept(event)]
    for key in ("trace_id", "traceName", "hostName", "host_name"):
        trace.pop(key, None)
    return trace


def _is_kept(event: dict[str, Any]) -> bool:
    if event.get("ph") == "M":
        return event.get("name") in ("process_name", "thread_name")
    name = str(event.get("name", ""))
    return event.get("cat") in KEPT_CATEGORIES or name.startswith(("c10d::", "record_param_comms"))


def write_trimmed(raw: Path, path: Path, provenance: dict[str, Any]) -> None:
    """Trim the profiler's export `raw` into a gzipped `path`; the same content gives the same bytes."""
    text = json.dumps({"provenance": provenance, **trim(json.loads(raw.read_text()))})
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    raw.unlink()
