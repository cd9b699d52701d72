"""Pauses Python's search for cycles of objects while many objects are made, few of them in cycles."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause() -> Iterator[None]:
    """A context without garbage collection: a simulation makes millions of small tuples, and scanning them
    again and again took a fifth of its time. At the end they count as old, so that Python does not scan them
    all at once right after. A simulation leaves little in cycles: torch's blocks of memory, which name their
    neighbours (711 objects for GPT-2 medium's on eight GPUs)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # from the frozen objects to the oldest generation
            gc.enable()


def raise_threshold() -> None:
    """Let Python search for cycles after 200,000 new objects, not after 700: importing the packages of a
    command makes 50,000 to 110,000, which stay, and scanning them 60 times took a tenth of `zsim run`."""
    gc.set_threshold(200_000, *gc.get_threshold()[1:])


def freeze_at_exit() -> None:
    """Let the process end without a last search for cycles in memory that it gives back anyway."""
    atexit.register(gc.freeze)
