"""Validated runs made by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from zsim.validated.features import Features
from zsim.validated.runs import Settings, ValidatedRun
from zsim.validated.spread import SpreadEstimates

FEATURES = Features("FSDP", "FSDP2", "h100-sxm-80gb", 2, 16, "RoCE", "kernels", 8 * 10**9)
SETTINGS = Settings("llama-3-8b", 8192, 1, 1.0, "bf16, none", 400.0)


def estimates(
    parts: Mapping[str, float],
    extrapolation: Mapping[str, float] | None = None,
    opened: Mapping[str, float] | None = None,
) -> SpreadEstimates:
    """Estimates whose interval is one spread on either side."""
    return SpreadEstimates(parts, extrapolation or {}, opened or {}, -1.0, 1.0)


@pytest.fixture
def make_run() -> Callable[..., ValidatedRun]:
    """A run of a source with an error; features and settings may be changed by name."""
    made = 0

    def build(source: str, error: float, **changes: Any) -> ValidatedRun:
        nonlocal made
        made += 1
        features = {key: value for key, value in changes.items() if key in Features.__dataclass_fields__}
        settings = {key: value for key, value in changes.items() if key in Settings.__slots__}
        return ValidatedRun(
            f"{source}-{made}", source, "report", "A", replace(FEATURES, **features),
            replace(SETTINGS, **settings), error, error,
        )  # fmt: skip

    return build
