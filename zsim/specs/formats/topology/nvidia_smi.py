"""`nvidia-smi topo -m`: the connections between GPUs and cards of one node, as a matrix without rates.

NV# counts NVLinks, PIX is one PCIe switch, PXB several, PHB a host bridge, NODE several of a socket, SYS
the link between sockets. Rates are those of the preset `base`.

`rocm-smi --showtopo`: how the GPUs of one node reach one another, as matrices without rates.

The link types are XGMI, which is Infinity Fabric, and PCIE (rocm_smi_lib of ROCm 6.3, a1295714:
python_smi_tools/rocm_smi.py, `showTypeTopology`). It prints XXXX for a pair that it could not read. The text
names no GPU, so a preset supplies all else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from zsim.errors import InputError
from zsim.specs.formats.topology.new_file import ImportedTopology, natural_order

_CELL = re.compile(r"^(X|NV\d+|PIX|PXB|PHB|NODE|SYS)$")
_MAXIMUM = 512
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_HEAD = re.compile(r"^\s*GPU0(\s+GPU\d+)*\s", re.MULTILINE)
_NVLINK_GIGABYTES = 25.0  # a second and direction: NVLink 2, 3 and 4, of V100, A100 and H100
# NVLinks of a GPU in all -> the machine with a switch between them, and the one with direct links.
_SWITCHED = {6: "dgx-2", 12: "dgx-a100-80gb", 18: "dgx-h100"}
_DIRECT = {6: "dgx-1", 12: "dgx-a100-80gb", 18: "dgx-h100"}


def is_nvidia_smi(text: str) -> bool:
    """Whether a text has a line of columns as `nvidia-smi topo -m` prints it."""
    return _HEAD.search(_COLORS.sub("", text)) is not None


def read_nvidia_smi(text: str, file: str, base: str | None) -> ImportedTopology:
    """The topology of one node, from its matrix. The preset is guessed from the number of NVLinks unless
    `base` is given.
    """
    rows = _matrix(_COLORS.sub("", text), file)
    gpus = [name for name in rows if name.startswith("GPU")]
    cards = [name for name in rows if name.startswith(("NIC", "mlx", "bnxt", "efa"))]
    if not gpus:
        raise InputError(f"{file}: no row for a GPU; expected what `nvidia-smi topo -m` prints")
    notes = ["nvidia-smi gives no rates: bandwidths are the preset's"]
    tables: dict[str, dict[str, Any]] = {}
    source = f"imported from {file} (nvidia-smi topo -m)"
    kind, per_gpu, guess = _links(rows, gpus, notes)
    if base is None:
        base = guess
        notes.append(f"{per_gpu} NVLinks per GPU: taken over {base}; say another preset with --base")
    if kind == "none":
        tables["node_link"] = {"source": source, "evidence": "assumed", "kind": "none"}
    elif kind == "mesh":
        tables["node_link"] = {
            "source": f"{source}; {_NVLINK_GIGABYTES:g} GB/s per NVLink and direction",
            "evidence": "assumed", "kind": "mesh", "bandwidth": f"{per_gpu * _NVLINK_GIGABYTES:g} GB/s",
            "efficiency": 0.8,
        }  # fmt: skip
        notes.append("NVLinks between GPUs directly: taken as spread evenly over all pairs")
    gpus_per_switch = [sum(rows[gpu][peer] == "PIX" for peer in gpus) + 1 for gpu in gpus]
    tables["pcie"] = {
        "source": source, "evidence": "assumed",
        "gpus_per_switch": max(set(gpus_per_switch), key=gpus_per_switch.count),
    }  # fmt: skip
    if cards:
        num_cards = min(len(cards), len(gpus))
        if num_cards < len(cards):
            notes.append(f"{len(cards)} cards for {len(gpus)} GPUs: {num_cards} are taken")
        tables["nic"] = {"source": source, "evidence": "assumed", "per_node": num_cards}
    return ImportedTopology(
        base, f"imported from {file} over {base}", tables, {"gpus_per_node": len(gpus)}, tuple(notes)
    )


def _links(
    rows: Mapping[str, Mapping[str, str]], gpus: Sequence[str], notes: list[str]
) -> tuple[str, int, str]:
    """(the kind of link between GPUs, NVLinks of a GPU, the preset with so many).

    With a switch every cell counts all links of a GPU, with direct links those of the pair. So a number that
    times the other GPUs makes as many as a GPU of some generation has is of a pair. Bridges that join some
    GPUs alone are no way between all.
    """
    counts = {
        (gpu, peer): int(cell[2:])
        for gpu in gpus
        for peer in gpus
        if gpu != peer and (cell := rows[gpu][peer]).startswith("NV")
    }
    totals = [sum(counts.get((gpu, peer), 0) for peer in gpus) for gpu in gpus]
    if not counts:
        return "none", 0, "rtx-4090-x8"
    if len(_reachable(gpus, counts)) < len(gpus):
        group = ", ".join(sorted(_reachable(gpus, counts), key=natural_order))
        notes.append(
            f"NVLink joins some GPUs alone ({group} ...): GPUs are taken to talk over PCIe, as any ring over "
            "more of them does; a group of just those is faster"
        )
        return "none", max(totals), "a100-pcie-x8" if max(totals) == 12 else "h100-pcie-x8"
    is_complete = len(counts) == len(gpus) * (len(gpus) - 1) and len(set(counts.values())) == 1
    links = max(counts.values())
    if is_complete and totals[0] not in _DIRECT and links in _SWITCHED:
        return "switch", links, _SWITCHED[links]
    if is_complete and len(gpus) == 2 and links in _SWITCHED:
        return "switch", links, _SWITCHED[links]
    return "mesh", min(totals), _DIRECT.get(min(totals), "dgx-a100-80gb")


def _reachable(gpus: Sequence[str], counts: Mapping[tuple[str, str], int]) -> set[str]:
    """The GPUs that NVLinks lead to from the first."""
    reached, waiting = {gpus[0]}, [gpus[0]]
    while waiting:
        gpu = waiting.pop()
        neighbors = {peer for first, peer in counts if first == gpu} - reached
        reached |= neighbors
        waiting += sorted(neighbors)
    return reached


def _matrix(text: str, file: str) -> dict[str, dict[str, str]]:
    """{row: {column: cell}} of the square part of the table."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    head = next((number for number, words in enumerate(lines) if words[0] == "GPU0"), None)
    if head is None:
        raise InputError(f"{file}: no line of columns that starts with GPU0; expected `nvidia-smi topo -m`")
    names = [word for word in lines[head] if re.match(r"^(GPU\d+|NIC\d+|mlx\S+|bnxt\S+|efa\S+)$", word)]
    rows: dict[str, dict[str, str]] = {}
    for words in lines[head + 1 :]:
        name, cells = words[0], words[1 : len(names) + 1]
        if name not in names:
            break
        if len(cells) < len(names) or not all(_CELL.match(cell) for cell in cells):
            raise InputError(
                f"{file}: row {name}: expected {len(names)} cells of X, NV#, PIX, PXB, PHB, NODE, SYS"
            )
        rows[name] = dict(zip(names, cells, strict=True))
    if len(rows) < len(names) or len(names) > _MAXIMUM:
        raise InputError(f"{file}: found {len(rows)} rows for {len(names)} columns; is it cut short?")
    return rows


_TYPES = re.compile(r"^=+ *Link Type between two GPUs *=+$", re.MULTILINE)
_HEADING = re.compile(r"^=+", re.MULTILINE)
_MOST_AMD_GPUS = 64


def is_rocm_smi(text: str) -> bool:
    """Whether a text has rocm-smi's matrix of link types."""
    return _TYPES.search(text) is not None


def read_rocm_smi(text: str, file: str, base: str | None) -> ImportedTopology:
    """The topology of one node. Raises InputError without a `base`, and for a matrix that is cut short."""
    types = _types(text, file)
    kinds = {types[a][b] for a in range(len(types)) for b in range(len(types)) if a != b}
    if not kinds <= {"XGMI", "PCIE"}:
        raise InputError(
            f"{file}: found {', '.join(sorted(kinds - {'XGMI', 'PCIE'}))} among the link types, which "
            "rocm-smi prints where it cannot read one; expected XGMI or PCIE"
        )
    if base is None:
        raise InputError(
            f"{file}: rocm-smi does not say which GPUs these {len(types)} are; give a preset of the machine "
            "with --base, such as mi300x-x8"
        )
    source = f"imported from {file} (rocm-smi --showtopo)"
    tables: dict[str, dict[str, Any]] = {}
    notes = [f"rocm-smi gives no rates: bandwidths are {base}'s"]
    if kinds != {"XGMI"}:
        tables["node_link"] = {"source": source, "evidence": "assumed", "kind": "none"}
        words = "no links between GPUs but PCIe's" if "XGMI" not in kinds else "only some pairs have XGMI"
        notes.append(f"{words}: GPUs are taken to talk over PCIe, as a ring over all of them does")
    return ImportedTopology(
        base, f"imported from {file} over {base}", tables, {"gpus_per_node": len(types)}, tuple(notes)
    )


def _types(text: str, file: str) -> list[list[str]]:
    """The rows of the matrix of link types."""
    body = _HEADING.split(_TYPES.split(text, maxsplit=1)[1], maxsplit=1)[0] if is_rocm_smi(text) else ""
    lines = [line.split() for line in body.splitlines() if line.strip()]
    names = lines[0] if lines else []
    rows = [words[1:] for words in lines[1:]]
    is_square = len(rows) == len(names) and all(len(row) == len(names) for row in rows)
    if not names or not is_square or len(names) > _MOST_AMD_GPUS:
        raise InputError(
            f"{file}: found {len(rows)} rows for {len(names)} columns of 'Link Type between two GPUs'; is it "
            "cut short? Expected what `rocm-smi --showtopo` prints"
        )
    return rows
