"""The reference engine in searches, whole runs and on the page: what to vary, bounds, saves, its fields.

Its checkpoint format (`validation/zero/checkpoint.py`): each unit's flat tensors are saved without padding,
cut evenly, through DCP. Beside them are a file of random state per rank, buffers and a manifest.
"""

from __future__ import annotations

import numpy as np

from zsim.frameworks.reference.settings import ReferenceConfig, ReferenceTable
from zsim.frameworks.torch.studies import ZERO_STAGE
from zsim.goodput.checkpoints.saved import (
    VALUE_BYTES,
    FrameworkCheckpoint,
    ModelStates,
    SavedFile,
    SavedFiles,
    StateTensor,
    archive_bytes,
    untied_tensors,
)
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.run.checkpoint import CheckpointTable
from zsim.specs.model.spec import ModelSpec
from zsim.study.tune.axes import MICRO_BATCHES
from zsim.study.tune.framework import FrameworkTuning
from zsim.ui.field import FrameworkFields


class ReferenceTuning(FrameworkTuning[ReferenceTable]):
    """Only the batch is varied."""

    label = "engine"
    structure = (MICRO_BATCHES,)


TUNING = ReferenceTuning()


_STATES = 3  # master, exp_avg, exp_avg_sq, in fp32
_RANDOM_STATE_BYTES = 5056  # of torch's generator on the host
_MANIFEST_BYTES = 5000
_METADATA_BYTES, _METADATA_CHUNK = 970, 104  # recorded (traces/checkpoints/files.json)


def reference_files(model_states: ModelStates, model: ModelSpec) -> SavedFiles:
    """The files of `checkpoint.save`."""
    ranks, units = model_states.data_ranks, _units(model_states.tensors[0], model.block_prefix)
    files = [SavedFile("buffers.pt", 0, overhead=VALUE_BYTES),
             SavedFile("manifest.json", 0, overhead=_MANIFEST_BYTES)]  # fmt: skip
    for rank in range(ranks):
        overhead = archive_bytes(_RANDOM_STATE_BYTES) - _RANDOM_STATE_BYTES
        files.append(SavedFile(f"rank{rank}.pt", rank, 0, _RANDOM_STATE_BYTES, overhead))
    staged = np.zeros(ranks, dtype=np.int64)
    for name, numel in units.items():
        metadata = _METADATA_BYTES + _METADATA_CHUNK * _STATES * ranks
        files.append(SavedFile(f"{name}/.metadata", 0, overhead=metadata))
        shard = -(-numel // ranks)
        for rank in range(ranks):
            chunk = 4 * max(0, min(shard, numel - rank * shard))
            overhead = _STATES * (archive_bytes(chunk) - chunk)
            files.append(SavedFile(f"{name}/__{rank}_0.distcp", rank, chunk, 2 * chunk, overhead))
            staged[rank] += _STATES * chunk
    items = _STATES * len(units) * ranks
    return SavedFiles(
        "reference", tuple(files), staged, staged, items=items, chunks=items, read_items=items,
        is_synced=True, is_copied_ahead=True,
    )  # fmt: skip


def _units(tensors: tuple[StateTensor, ...], block_prefix: str) -> dict[str, int]:
    """Elements of the root and of every block."""
    unit_numels = {"root": 0}
    for tensor in untied_tensors(tensors):
        name = "root"
        if tensor.name.startswith(f"{block_prefix}."):
            number = tensor.name[len(block_prefix) + 1 :].partition(".")[0]
            name = f"{block_prefix}.{number}"
        unit_numels[name] = unit_numels.get(name, 0) + tensor.numel
    return unit_numels


class ReferenceCheckpoint(FrameworkCheckpoint[ReferenceConfig]):
    """Masters and both moments of every unit, in fp32."""

    formats = ("reference",)
    has_fixed_states = True

    def files(
        self, job: Job, config: ReferenceConfig, states: ModelStates, table: CheckpointTable
    ) -> SavedFiles:
        return reference_files(states, job.model)


CHECKPOINT = ReferenceCheckpoint()


FIELDS = FrameworkFields(fields=(ZERO_STAGE,))
