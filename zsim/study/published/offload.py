"""From the offload column of a published run to what leaves the GPU."""

from __future__ import annotations

import re
from typing import Any

from zsim.errors import NotSimulatedError
from zsim.study.published.table import PublishedRun


def is_offloaded(run: PublishedRun) -> bool:
    """Whether the row says that something leaves the GPU."""
    text = run.text("offload")
    return bool(text) and not text.startswith("none")


def offload_blocks(run: PublishedRun, assumptions: list[str]) -> dict[str, Any]:
    """The blocks of `zero_optimization`; empty where everything stays on the GPU.

    Raises NotSimulatedError where the row does not say, or says what zsim cannot do.
    """
    if not is_offloaded(run):
        return {}
    text = run.text("offload")
    if re.match("unknown|unstated", text):
        raise NotSimulatedError(f"whether anything is offloaded is not published (offload '{text}')")
    if re.search("NVMe", text):
        raise NotSimulatedError(f"offload to NVMe of unknown drives (offload '{text}')")
    if not re.search(r"optimizer", text):
        raise NotSimulatedError(f"offload '{text}' is not simulated")
    if "likely" in text:
        assumptions.append("offload")
    device: dict[str, Any] = {"device": "cpu"}
    # Memory is pinned where the script says so; before 0.19.5 the default was not to, and before 0.3.16
    # there was no choice: buffers were pinned.
    if is_stas00(run) or run.text("date") < "2021":
        device["pin_memory"] = True
    blocks: dict[str, Any] = {"offload_optimizer": device, "overlap_comm": True}
    if "params" in text:
        blocks["offload_param"] = device
    return blocks


def is_stas00(run: PublishedRun) -> bool:
    """The runs of ml-engineering's "when to upgrade GPUs", whose script is published (`benchmark.py`: pinned
    memory, non-reentrant checkpoints, a model that is built on the CPU without `deepspeed.zero.Init`)."""
    return run.source.startswith("stas00-h200")
