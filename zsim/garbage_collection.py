"""Python's search for cycles of objects, at rest while many objects are made and few of them are cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No search inside; a simulation makes millions of small tuples, and looking through them again and again
    took a fifth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
