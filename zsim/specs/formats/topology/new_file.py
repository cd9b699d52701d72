"""Topology files: what an import reads, and a new file over a preset, the fabric in few words, commented."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zsim.errors import InputError, did_you_mean
from zsim.reading import parse_toml
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.files import load_cluster
from zsim.specs.cluster.network import KEYS
from zsim.specs.formats.toml import toml_text

Tables = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ImportedTopology:
    """An imported topology: tables over the preset `base`, keys of the top level, and notes for the user."""

    base: str
    description: str
    tables: Tables
    top: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts node9 before node10."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", name)]


def gigabits(rate: float) -> str:
    """Gb/s as files have it."""
    return f"{rate:g} Gb/s"


_COMMENTS = {
    "extends": "GPUs, NVLink, PCIe, host and drives as there",
    "kind": ", ".join(KEYS),
    "nodes_per_leaf": "nodes under one leaf switch",
    "oversubscription": "downlinks of a leaf over its uplinks",
    "evidence": "measured, calibrated, data sheet or assumed",
    "shape": "nodes along each dimension",
    "per_node": "network cards of a node",
}


def parse_fabric(text: str) -> str:
    """The kind of fabric. Raises InputError for a name that is none."""
    if text not in KEYS:
        raise InputError(
            f"--fabric: found '{text}'{did_you_mean(text, KEYS)}; expected one of {', '.join(KEYS)}"
        )
    return text


def parse_shape(text: str) -> tuple[int, ...]:
    """The numbers of nodes along each dimension of a torus, from "4x4". Raises InputError for another
    form.
    """
    if not re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){1,2}", text):
        raise InputError(f"--shape: found '{text}', expected nodes along two or three dimensions, as 4x4")
    return tuple(int(size) for size in text.split("x"))


@dataclass(frozen=True, slots=True)
class NewTopology:
    """A cluster as a person describes it: a preset with another fabric or other cards."""

    name: str
    like: str
    """The preset."""
    fabric: str
    nodes_per_leaf: int | None = None
    """Nodes under one leaf switch, for trees alone."""
    oversubscription: float | None = None
    """Downlinks of a leaf switch over its uplinks, for trees alone."""
    cards: int | None = None
    """Network cards of a node. None keeps the preset's."""
    card_bandwidth: str | None = None
    """Bandwidth of a card, as "400 Gb/s". None keeps the preset's."""
    source: str | None = None
    shape: tuple[int, ...] | None = None
    """Nodes along each dimension of a torus."""

    def text(self) -> str:
        """The text of the file, which is checked by reading it back.

        Raises InputError for what a topology file refuses.
        """
        parse_fabric(self.fabric)
        origin = {
            "source": self.source or "not stated; written by zsim topology new",
            "evidence": "data sheet" if self.source else "assumed",
        }
        network = {
            **origin,
            "kind": self.fabric,
            **{
                key: value
                for key in ("nodes_per_leaf", "oversubscription", "shape")
                if (value := getattr(self, key)) is not None
            },
        }
        card_keys = {"per_node": self.cards, "bandwidth": self.card_bandwidth}
        nic = {key: value for key, value in card_keys.items() if value is not None}
        head = {
            "schema": 1,
            "extends": self.like,
            "name": self.name,
            "description": f"{self.like} on a {self.fabric} fabric",
        }
        content = toml_text({**head, "network": network, **({"nic": {**origin, **nic}} if nic else {})})
        self.cluster(content)
        return "\n".join(_add_comment(line) for line in content.splitlines()) + "\n"

    def cluster(self, content: str) -> Cluster:
        """The cluster that the file describes."""
        return load_cluster(parse_toml(content, f"{self.name}.toml"))


def _add_comment(line: str) -> str:
    comment = _COMMENTS.get(line.partition(" = ")[0])
    return f"{line:<36} # {comment}" if comment else line
