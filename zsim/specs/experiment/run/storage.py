"""`[run.storage]` of an experiment: what takes the checkpoints, and how fast.

[run.storage]
preset = "tectonic"                          # or the numbers themselves, or both
write_bandwidth_per_node = "2 GB/s"
write_bandwidth = "240 GB/s"                 # of all nodes together
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from zsim.specs.cluster.table import Fraction, Table
from zsim.specs.experiment.run.presets import with_preset
from zsim.units import BytesPerSecond, Duration

_FILE = "storage.toml"
_BANDWIDTHS = ("write_bandwidth_per_writer", "write_bandwidth_per_node", "write_bandwidth")


class StorageTable(Table):
    """`[run.storage]`. A rate that is left out is no limit; reading is as fast as writing where it is left
    out. `..._per_writer`: one thread of a rank, from tensor to store. `efficiency`: of the stated rates that
    all nodes together reach. `latency`: of opening a file. `metadata_per_second`: files that all ranks
    together can create or open in a second."""

    preset: str | None = None
    write_bandwidth_per_writer: BytesPerSecond | None = None
    write_bandwidth_per_node: BytesPerSecond | None = None
    write_bandwidth: BytesPerSecond | None = None
    read_bandwidth_per_reader: BytesPerSecond | None = None
    read_bandwidth_per_node: BytesPerSecond | None = None
    read_bandwidth: BytesPerSecond | None = None
    efficiency: Fraction = 1.0
    latency: Duration = 0.0
    metadata_per_second: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _has_bandwidth(self) -> Self:
        for name in type(self).model_fields:
            if "bandwidth" in name and getattr(self, name) == 0:
                raise ValueError(f"{name}: found 0, expected a rate; nothing would ever be saved")
        if self.preset is None and not any(getattr(self, name) for name in _BANDWIDTHS):
            raise ValueError(f"storage without bandwidth: expected {', '.join(_BANDWIDTHS)}, or a preset")
        return self


def resolve_storage(table: StorageTable | None) -> StorageTable:
    """The table with its preset's numbers filled in; without a table, what one writer thread is known to
    reach and no other limit. Raises InputError for an unknown preset."""
    return with_preset(table or StorageTable(preset="writers"), _FILE, "run.storage")
