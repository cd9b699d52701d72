"""Phase (forward, backward, optimizer) and module at a time of a host thread, from the ranges that torch
writes around its work."""

from __future__ import annotations

from zsim.trace.readers.kineto.file import KinetoFile, Thread
from zsim.trace.readers.kineto.ranges import module_of
from zsim.trace.readers.recording import Ranges


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
