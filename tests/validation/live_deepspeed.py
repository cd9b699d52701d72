"""Whether DeepSpeed can train here, on CPUs."""

from __future__ import annotations

import importlib.util
import shutil

import pytest


def need_live_deepspeed(what: str) -> None:
    """Skips a test, saying why: DeepSpeed is missing, or what it compiles its CPU collectives with."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip(f"DeepSpeed is not installed (pip install zsim[interop]): {what}")
    if shutil.which("ninja") is None or shutil.which("g++") is None:
        pytest.skip(f"DeepSpeed compiles its CPU collectives with ninja and g++, not there: {what}")
