"""The reference engine's part in a search."""

from __future__ import annotations

from zsim.frameworks.reference.settings import ReferenceTable
from zsim.study.tune.axes import MICRO_BATCHES
from zsim.study.tune.framework import FrameworkTuning


class ReferenceTuning(FrameworkTuning[ReferenceTable]):
    """Only the batch is varied."""

    label = "engine"
    structure = (MICRO_BATCHES,)


TUNING = ReferenceTuning()
