"""Default times of recovery of the frameworks (`zsim/presets/recovery.toml`)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from zsim.resources import PRESETS
from zsim.specs.cluster.files import read_toml
from zsim.specs.cluster.table import Table
from zsim.specs.messages import validate_table
from zsim.units import Duration

_FILE = PRESETS / "recovery.toml"


class HangTimeouts(Table):
    """Until a rank that no longer answers ends the job, by the strategy's kind."""

    fsdp2: Duration
    fsdp1: Duration
    ddp: Duration
    deepspeed: Duration
    megatron: Duration
    reference: Duration


class Stall(Table):
    """A lost replica's time-out, which the other replicas wait for."""

    seconds: Duration


class KeptSaves(Table):
    """The number of saves that are kept. All where a kind is not named."""

    fsdp2: int


class RecoveryDefaults(BaseModel):
    """The file."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    hang_timeout: HangTimeouts
    stall: Stall
    keep: KeptSaves

    def hang_seconds(self, kind: str) -> float:
        """The time-out of a strategy's kind."""
        return float(getattr(self.hang_timeout, kind))

    def num_kept(self, kind: str) -> int | None:
        """The number of saves that a kind keeps. None for all."""
        return getattr(self.keep, kind, None)


def recovery_defaults() -> RecoveryDefaults:
    """The file's content."""
    return validate_table(read_toml(_FILE), _FILE.name, RecoveryDefaults)
