"""Speeds of the CPU that issues a GPU's work, by its name, and their spread among hosts of one kind.

# [Note: a host by the name of its CPU]
A cluster file has what an event and a launch take on its own CPU. A file that extends it and names another
CPU (`host.cpu`) without saying these has them in the inverse ratio of the two CPUs' single-thread ratings
(`presets/hosts.toml`). Where the extended file names no CPU, the rating of the reference is used.

`[offload]` of a cluster file has the rates of a host for offloaded work, besides the sizes in [host] and
[nvme].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from pydantic import Field

from zsim.errors import InputError, expected_text
from zsim.files import PRESETS, preset_table
from zsim.reading import parse_toml
from zsim.specs.lazy_model import Fraction, StrictTable, Table
from zsim.specs.messages import validate_table
from zsim.specs.strategy.requirement import left_out
from zsim.units import SECONDS, BytesPerSecond, Seconds, parse_quantity

_PRESET = PRESETS / "hosts.toml"
SPEED_KEYS = ("overhead_factor", "seconds_per_launch")
_MARKS = re.compile(r"\((r|tm)\)|®|™")
_EMPTY_WORDS = re.compile(r"@.*|\b(\d+th gen|amd|intel|processor|cpu|\d+-core)\b")


class Processor(StrictTable):
    """A CPU with PassMark's rating of a single thread, and the names of CPUs that are taken to be as fast."""

    name: str
    thread_rating: float = Field(gt=0)
    source: str
    alike: tuple[str, ...] = ()


class _Reference(StrictTable):
    """The CPU whose seconds `frameworks.toml` has."""

    cpu: str
    seconds_per_launch: Seconds
    source: str


class HostSpread(StrictTable):
    """Factors on a host's time between which 80 % of the hosts of one kind of machine lie."""

    fast: float = Field(gt=0, le=1)
    slow: float = Field(ge=1)
    source: str


class HostSpeeds(StrictTable):
    """The shipped `presets/hosts.toml`."""

    schema_version: Literal[1] = Field(alias="schema")
    reference: _Reference
    spread: HostSpread
    cpu: dict[str, Processor]

    def find(self, name: object) -> Processor | None:
        """The CPU of a name, which may be its table's or what lscpu prints. None where it is not known."""
        key = _key(name) if isinstance(name, str) else ""
        for table, processor in self.cpu.items():
            if key in (table, *map(_key, (processor.name, *processor.alike))):
                return processor
        return None

    def processor(self, name: str, where: str) -> Processor:
        """The CPU of a name. Raises InputError where it is not known."""
        processor = self.find(name)
        if processor is not None:
            return processor
        names = [entry.name for entry in self.cpu.values()]
        raise InputError(
            f"{where}host.cpu: unknown CPU '{name}'{expected_text(name, names)}; for others say "
            "host.overhead_factor and host.seconds_per_launch, which `zsim calibrate` makes of a measurement"
        )


@cache
def host_speeds() -> HostSpeeds:
    """The shipped speeds of hosts."""
    data = parse_toml(_PRESET.read_text(encoding="utf-8"), _PRESET.name)
    return validate_table(data, _PRESET.name, HostSpeeds)


def _key(name: str) -> str:
    words = _EMPTY_WORDS.sub(" ", _MARKS.sub("", name.lower())).split()
    return "-".join(words).replace("+", "-plus")


def scale_host_costs(
    host: Mapping[str, Any], child: Mapping[str, Any], parent: Mapping[str, Any] | None, file: str
) -> dict[str, Any]:
    """A `[host]` table with what an event and a launch take on the CPU that it names.

    `child` is what the file says of the host, and `parent` the table of the file that it extends. See [Note:
    a host by the name of its CPU].
    """
    name = child.get("cpu")
    if not isinstance(name, str) or any(key in child for key in SPEED_KEYS):
        return dict(host)
    speeds, parent_host = host_speeds(), parent or {}
    processor = speeds.processor(name, f"{file}: ")
    launch: Any = speeds.reference.seconds_per_launch
    reference, factor = speeds.find(parent_host.get("cpu")), 1.0
    if reference is None or "seconds_per_launch" not in parent_host:
        reference = speeds.processor(speeds.reference.cpu, "")
    else:
        launch, factor = parent_host["seconds_per_launch"], parent_host.get("overhead_factor", 1.0)
        launch = parse_quantity(launch, SECONDS) if isinstance(launch, str) else launch
    ratio = reference.thread_rating / processor.thread_rating
    return {
        **host,
        "overhead_factor": round(factor * ratio, 4),
        "seconds_per_launch": f"{launch * ratio * 1e6:.4g} us",
    }


class OffloadRates(Table):
    """Rates of CPU and host memory for offloaded work.

    `optimizer_fraction` and `copy_fraction` contain what remote memory, page walks and threads cost. Threads
    that are not bound (`deepspeed --bind_cores_to_rank`, numactl) run on all sockets.
    """

    optimizer_fraction: Fraction = Field(
        description="what CPU-Adam reaches of host.memory_bandwidth, with all cores"
    )
    copy_fraction: Fraction = Field(
        description="what the CPU's casts and copies reach of host.memory_bandwidth"
    )
    dma_fraction: Fraction = Field(
        default=0.8, description="what copy engines and drives can have of host.memory_bandwidth"
    )
    pageable_bandwidth: BytesPerSecond = Field(
        description="copies from and to memory that is not page-locked, per GPU"
    )
    threads_per_rank: int | None = Field(
        default=None,
        gt=0,
        description="threads of a rank (OMP_NUM_THREADS, torch.set_num_threads); left out: "
        f"{left_out('offload.threads_per_rank')}",
    )
    thread_bandwidth: BytesPerSecond | None = Field(
        default=None,
        description="of one thread that runs fused Adam on fp32 states; left out: all cores' divided evenly",
    )
    bound: bool = Field(default=False, description="a rank's threads stay on the socket of its GPU")
    placement: Literal["local", "interleaved", "first"] = Field(
        default="local",
        description="the socket of a rank's host memory: its GPU's, all in turn, or the first",
    )


def default_offload_table() -> dict[str, Any]:
    """`[offload]` of clusters whose file has none, in the file's shape (`presets/offload.toml`)."""
    return dict(preset_table("offload"))


def default_offload_rates() -> OffloadRates:
    return OffloadRates.model_validate(default_offload_table())
