"""Reference, as resolving asks for it."""

from __future__ import annotations

from zsim.frameworks.reference.settings import ReferenceConfig, ReferenceTable
from zsim.specs.strategy.framework import MODEL_PARALLEL_KEYS, PIPELINE_KEYS, Framework


class Reference(Framework[ReferenceTable, ReferenceConfig]):
    table = ReferenceTable
    title = "the reference engine"
    order = 6
    unread_keys = (
        MODEL_PARALLEL_KEYS
        | PIPELINE_KEYS
        | {"training.lora", "training.frozen", "training.frozen_dtype", "training.autocast"}
        | {"training.stored_dtype"}
    )


FRAMEWORK = Reference()
