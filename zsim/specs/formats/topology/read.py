"""Other programs' descriptions of machines and fabrics -> zsim's topology TOML.

Every importer yields tables over a preset (`extends`). They hold what the file says, with the file as source,
and the preset supplies the rest. Files are untrusted, so size and depth are limited first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zsim.errors import InputError, check_choice
from zsim.reading import read_user_file
from zsim.specs.cluster.files import read_toml
from zsim.specs.formats.toml import toml_text
from zsim.specs.formats.topology.astra_sim import read_astra_sim
from zsim.specs.formats.topology.hwloc import is_hwloc, read_hwloc
from zsim.specs.formats.topology.ibnetdiscover import read_ibnetdiscover
from zsim.specs.formats.topology.lldp import is_lldp, read_lldp
from zsim.specs.formats.topology.nccl_xml import read_nccl_topology
from zsim.specs.formats.topology.new_file import ImportedTopology
from zsim.specs.formats.topology.nvidia_smi import is_nvidia_smi, is_rocm_smi, read_nvidia_smi, read_rocm_smi
from zsim.specs.formats.topology.slurm import read_slurm_topology

_MAX_BYTES = 4_000_000


@dataclass(frozen=True, slots=True)
class TopologyToml:
    """A topology TOML as text, and notes for the user."""

    toml: str
    notes: tuple[str, ...]


def import_topology(
    path: Path,
    *,
    format_: str | None = None,
    base: str | None = None,
    network: Path | None = None,
    name: str | None = None,
) -> TopologyToml:
    """Read the topology description in `path`. The format is recognised from the content if `format_` is
    None.

    `base` is the preset for what the file does not say. If it is None, it is guessed from the file. `network`
    is a TOML file whose `[network]` table joins the nodes. Raises InputError for files that are not what they
    claim.
    """
    readers: dict[str, Callable[[str, str, str | None], ImportedTopology]] = {
        "nccl": read_nccl_topology,
        "nvidia-smi": read_nvidia_smi,
        "rocm-smi": read_rocm_smi,
        "hwloc": read_hwloc,
        "ibnetdiscover": read_ibnetdiscover,
        "lldp": read_lldp,
        "slurm": read_slurm_topology,
        "astra-sim": read_astra_sim,
    }
    text = _read(path)
    kind = format_ or _guess_format(path, text)
    check_choice(f"--format: found '{kind}', ", kind, readers)
    topology = readers[kind](text, path.name, base)
    tables = dict(topology.tables)
    notes = list(topology.notes)
    if network is not None:
        network_table = read_toml(network).get("network")
        if not isinstance(network_table, dict):
            raise InputError(f"{network.name}: expected a [network] table")
        tables["network"] = network_table
    elif "network" not in tables:
        notes.append(f"nothing in {path.name} says what joins the nodes: taken from {topology.base}")
    head = {
        "schema": 1,
        "extends": topology.base,
        "name": name or path.stem,
        "description": topology.description,
    }
    return TopologyToml(toml_text(_replace_unprintable(head | dict(topology.top) | tables)), tuple(notes))


def _guess_format(path: Path, text: str) -> str:
    start = text.lstrip()[:2000].lower()
    if start.startswith("<"):
        return "hwloc" if is_hwloc(text) else "nccl"
    if "switchguid=" in text or "# topology file: generated" in start:
        return "ibnetdiscover"
    if is_rocm_smi(text):
        return "rocm-smi"
    if is_nvidia_smi(text):
        return "nvidia-smi"
    if is_lldp(text):
        return "lldp"
    if "npus_count" in start:
        return "astra-sim"
    if any(word in text.lower() for word in ("switchname=", "blockname=", "switches:", "block:", "tree:")):
        return "slurm"
    raise InputError(
        f"{path.name}: not recognised; expected an NCCL topology XML, `nvidia-smi topo -m`, `rocm-smi "
        "--showtopo`, hwloc's XML, `ibnetdiscover`, `lldpctl`, a Slurm topology.conf or .yaml, or an "
        "ASTRA-sim network yml (say which with --format)"
    )


def _read(path: Path) -> str:
    content = read_user_file(path, _MAX_BYTES)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path.name}: not UTF-8 text") from None


def _replace_unprintable(value: Any) -> Any:
    """The value with unprintable characters replaced by spaces: names from files are printed on terminals."""
    if isinstance(value, str):
        return "".join(character if character.isprintable() else " " for character in value)
    if isinstance(value, Mapping):
        return {_replace_unprintable(key): _replace_unprintable(entry) for key, entry in value.items()}
    return [_replace_unprintable(entry) for entry in value] if isinstance(value, list | tuple) else value
