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
from zsim.specs.experiment.run.failures import apply_preset
from zsim.units import BytesPerSecond, Duration

_FILE = "storage.toml"
_BANDWIDTHS = ("write_bandwidth_per_writer", "write_bandwidth_per_node", "write_bandwidth")


class StorageTable(Table):
    """`[run.storage]`: what takes the saves, and how fast."""

    preset: str | None = Field(
        default=None,
        description="a published store by name, which the other keys change; left out: the other keys "
        'alone; without the table "writers"',
    )
    write_bandwidth_per_writer: BytesPerSecond | None = Field(
        default=None,
        description="of one thread of a rank, from tensor to store; a bandwidth left out is no limit",
    )
    write_bandwidth_per_node: BytesPerSecond | None = Field(
        default=None, description="of one node; left out: no limit"
    )
    write_bandwidth: BytesPerSecond | None = Field(
        default=None, description="of all nodes together; left out: no limit"
    )
    read_bandwidth_per_reader: BytesPerSecond | None = Field(
        default=None, description="of one thread of a rank; left out: as writing"
    )
    read_bandwidth_per_node: BytesPerSecond | None = Field(
        default=None, description="of one node; left out: as writing"
    )
    read_bandwidth: BytesPerSecond | None = Field(
        default=None, description="of all nodes together; left out: as writing"
    )
    efficiency: Fraction = Field(default=1.0, description="what all nodes together reach of the stated rates")
    latency: Duration = Field(default=0.0, description="of opening a file")
    metadata_per_second: float | None = Field(
        default=None,
        gt=0,
        description="files that all ranks together can create or open in a second; left out: no limit",
    )

    @model_validator(mode="after")
    def _has_bandwidth(self) -> Self:
        for name in type(self).model_fields:
            if "bandwidth" in name and getattr(self, name) == 0:
                raise ValueError(f"{name}: found 0, expected a rate; nothing would ever be saved")
        if self.preset is None and not any(getattr(self, name) for name in _BANDWIDTHS):
            raise ValueError(f"storage without bandwidth: expected {', '.join(_BANDWIDTHS)}, or a preset")
        return self


def resolve_storage(table: StorageTable | None) -> StorageTable:
    """The table with its preset's numbers filled in.

    A missing table has the rate that one writer thread is known to reach and no other limit. Raises
    InputError for an unknown preset.
    """
    return apply_preset(table or StorageTable(preset="writers"), _FILE, "run.storage")
