"""The spread of a rate around the value in its file, by grade of evidence."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zsim.files import PRESETS
from zsim.specs.cluster.cluster import Cluster, HostDevice
from zsim.specs.cluster.files import read_toml
from zsim.specs.cluster.host_speeds import SPEED_KEYS, host_speeds
from zsim.specs.lazy_model import FiniteTable, StrictTable
from zsim.specs.messages import validate_table

_PRESET = PRESETS / "spreads.toml"
End = Literal["slow", "fast"]


class Spread(FiniteTable):
    """Factors on a rate at the `slow` and at the `fast` end of its spread."""

    slow: float = Field(gt=0, le=1)
    fast: float = Field(ge=1)
    source: str


class Spreads(StrictTable):
    """One spread per grade of evidence."""

    schema_version: Literal[1] = Field(alias="schema")
    measured: Spread
    calibrated: Spread
    data_sheet: Spread = Field(alias="data sheet")
    assumed: Spread

    def factor(self, evidence: str, end: End) -> float:
        """The factor on a rate with this grade."""
        factors: Spread = getattr(self, evidence.replace(" ", "_"))
        return factors.slow if end == "slow" else factors.fast


def load_spreads() -> Spreads:
    """The shipped `presets/spreads.toml`."""
    return validate_table(read_toml(_PRESET), _PRESET.name, Spreads)


def scale_offload_rates(cluster: Cluster, end: End, spreads: Spreads) -> Cluster:
    """The cluster with all rates that offloading depends on at one end of their spreads.

    These are PCIe or C2C, host memory and CPU (as [offload] says, or by its grade), and drives.
    """
    pcie, rates = cluster.pcie, cluster.offload
    pcie_factor, host_factor = spreads.factor(pcie.evidence, end), spreads.factor(rates.evidence, end)
    end_index = 0 if end == "slow" else 1
    fractions = {
        name: rates.spread[name][end_index]
        if name in rates.spread
        else min(1.0, getattr(rates, name) * host_factor)
        for name in ("optimizer_fraction", "copy_fraction", "dma_fraction")
    }
    fractions["pageable_bandwidth"] = rates.pageable_bandwidth * host_factor
    if rates.thread_bandwidth is not None:
        fractions["thread_bandwidth"] = rates.thread_bandwidth * host_factor
    changes: dict[str, object] = {
        "pcie": pcie.model_copy(update={"bandwidth": pcie.bandwidth * pcie_factor}),
        "offload": rates.model_copy(update=fractions),
    }
    if (c2c := cluster.c2c) is not None:
        c2c_factor = spreads.factor(c2c.evidence, end)
        changes["c2c"] = c2c.model_copy(update={"bandwidth": c2c.bandwidth * c2c_factor})
    if cluster.nvme is not None:
        factor = spreads.factor(cluster.nvme.evidence, end)
        names = ("read_bandwidth", "write_bandwidth")
        drives = {name: getattr(cluster.nvme, name) * factor for name in names}
        changes["nvme"] = cluster.nvme.model_copy(update=drives)
    return cluster.model_copy(update=changes)


def scale_host_speeds(cluster: Cluster, end: End) -> Cluster:
    """The cluster with the time that all hosts take to issue work at one end of its spread."""
    factor = getattr(host_speeds().spread, end)

    def scale(host: HostDevice) -> HostDevice:
        return host.model_copy(update={key: getattr(host, key) * factor for key in SPEED_KEYS})

    nodes = tuple(node.model_copy(update={"host": scale(node.host)}) for node in cluster.nodes)
    return cluster.model_copy(update={"host": scale(cluster.host), "nodes": nodes})
