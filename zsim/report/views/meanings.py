"""Labels and colours of everything that is shown: the same colour for the same meaning everywhere.

The colours are distinct for colour-blind readers too, and readable on white and on near-black:
tests/report/test_colours.py measures both.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Meaning:
    """Words of a thing that is shown, its colour in HTML, and its colour in a terminal."""

    label: str
    color: str
    terminal: str


BREAKDOWN: dict[str, Meaning] = {
    "compute": Meaning("compute", "#2F7FBF", "blue"),
    "exposed_communication": Meaning("exposed communication", "#D55E00", "red"),
    "bubble": Meaning("pipeline bubble", "#ABBFCD", "bright_white"),
    "offload_stall": Meaning("offload stall", "#914E67", "magenta"),
    "optimizer": Meaning("optimizer", "#3FB669", "green"),
    "allocator": Meaning("torch's allocator", "#D0CF13", "yellow"),
    "host_bound": Meaning("host-bound", "#8A8F98", "bright_black"),
}

DATA_LOADING = "data_loading"
# The causes that a trace shows, and the wait for samples, which begins before it.
WHOLE_STEP: dict[str, Meaning] = {**BREAKDOWN, DATA_LOADING: Meaning("data loading", "#7B3F0A", "yellow")}

MEMORY: dict[str, Meaning] = {
    "parameters": Meaning("parameters", "#3C46B9", "blue"),
    "gradients": Meaning("gradients", "#EEC901", "yellow"),
    "optimizer_states": Meaning("optimizer states", "#3FB669", "green"),
    "activations": Meaning("activations", "#A4CEF2", "cyan"),
    "buffers": Meaning("buffers", "#9B96FA", "magenta"),
    "framework": Meaning("framework", "#8A8F98", "bright_black"),
}

# Kinds of spans on the timeline. Computing is blue, communication orange to brown (the strong orange is kept
# for waiting), traffic to and from the host pink to purple.
SPANS: dict[str, Meaning] = {
    "compute": BREAKDOWN["compute"],
    "recompute": Meaning("recomputation", "#8DBFE6", "cyan"),
    "optimizer": BREAKDOWN["optimizer"],
    "copy": Meaning("copy on the GPU", "#4FB3BF", "white"),
    "all_gather": Meaning("all-gather", "#F2A65A", "red"),
    "reduce_scatter": Meaning("reduce-scatter", "#9C5A2B", "yellow"),
    "all_reduce": Meaning("all-reduce", "#6E3B1E", "red"),
    "all_to_all": Meaning("all-to-all", "#E8836B", "red"),
    "broadcast": Meaning("broadcast", "#D9B38C", "red"),
    "reduce": Meaning("reduce", "#C98B3C", "yellow"),
    "send": Meaning("send", "#E07B39", "red"),
    "recv": Meaning("receive", "#B86A2D", "red"),
    "send_recv": Meaning("send and receive", "#C05A50", "red"),
    "h2d": Meaning("host to GPU", "#B8568F", "magenta"),
    "d2h": Meaning("GPU to host", "#D58BB8", "magenta"),
    "cpu": Meaning("CPU work", "#7B3F73", "magenta"),
    "nvme_read": Meaning("NVMe read", "#5E548E", "magenta"),
    "nvme_write": Meaning("NVMe write", "#9A8FC7", "magenta"),
    "host": BREAKDOWN["host_bound"],
}

COMMUNICATION = Meaning("communication", "#E0873A", "yellow")
CAPACITY = Meaning("capacity", "#C7362B", "red")
TOTAL = Meaning("total", "#5C6B7A", "white")
RESERVED = Meaning("reserved", "#5B6FA8", "blue")

EVIDENCE: dict[str, Meaning] = {
    "measured": Meaning("measured", "#3FB669", "green"),
    "calibrated": Meaning("calibrated", "#2F7FBF", "blue"),
    "data sheet": Meaning("data sheet", "#D07F01", "yellow"),
    "assumed": Meaning("assumed", "#A32E3E", "red"),
}

OFFLOAD_KINDS = frozenset({"h2d", "d2h", "cpu", "nvme_read", "nvme_write"})
COMPUTE_KINDS = frozenset({"compute", "optimizer", "copy"})

_INK = "#14181F"
_MIDDLE = 0.19  # of luminance, where both are read as well

_UNKNOWN = Meaning("", "#8A8F98", "white")


def span_meaning(kind: str) -> Meaning:
    """The meaning of a span's kind. An unknown kind is grey and shown by its name."""
    return SPANS.get(kind) or Meaning(kind, _UNKNOWN.color, _UNKNOWN.terminal)


def text_on(color: str) -> str:
    """Near-black or white, whichever is read better on a colour."""
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return _INK if luminance > _MIDDLE else "#FFFFFF"


def waiting_cause(kind: str) -> str:
    """The breakdown's name for a wait for a span of `kind` on another stream."""
    return "offload_stall" if kind in OFFLOAD_KINDS else "exposed_communication"
