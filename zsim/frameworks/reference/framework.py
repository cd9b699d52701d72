"""Reference, as resolving asks for it."""

from __future__ import annotations

from zsim.frameworks.reference.settings import ReferenceConfig, ReferenceTable
from zsim.specs.strategy.framework import Framework


class Reference(Framework[ReferenceTable, ReferenceConfig]):
    table = ReferenceTable
    title = "the reference engine"
    order = 6


FRAMEWORK = Reference()
