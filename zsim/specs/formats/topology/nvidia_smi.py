"""`nvidia-smi topo -m`: the connections between GPUs and cards of one node, as a matrix without rates.

NV# counts NVLinks, PIX is one PCIe switch, PXB several, PHB a host bridge, NODE several of a socket, SYS
the link between sockets. Rates are those of the preset `base`.
"""

from __future__ import annotations

import re
from typing import Any

from zsim.errors import InputError
from zsim.specs.formats.topology.imported_topology import ImportedTopology

_CELL = re.compile(r"^(X|NV\d+|PIX|PXB|PHB|NODE|SYS)$")
_MAXIMUM = 512
# GB/s of one NVLink one way by the number that a GPU has: 6 V100, 12 A100, 18 H100 or B200 (the slower one)
_LINKS = {6: (25.0, "dgx-2"), 12: (25.0, "dgx-a100-80gb"), 18: (25.0, "dgx-h100")}


def read_nvidia_smi(text: str, file: str, base: str | None) -> ImportedTopology:
    """The topology of one node, from its matrix. The preset is guessed from the number of NVLinks unless
    `base` is given.
    """
    rows = _matrix(re.sub(r"\x1b\[[0-9;]*m", "", text), file)
    gpus = [name for name in rows if name.startswith("GPU")]
    cards = [name for name in rows if name.startswith(("NIC", "mlx", "bnxt", "efa"))]
    if not gpus:
        raise InputError(f"{file}: no row for a GPU; expected what `nvidia-smi topo -m` prints")
    pairs = [rows[gpu][peer] for gpu in gpus for peer in gpus if gpu != peer]
    links = [int(cell[2:]) for cell in pairs if cell.startswith("NV")]
    notes = ["nvidia-smi gives no rates: bandwidths are the preset's"]
    per_gpu = 0
    tables: dict[str, dict[str, Any]] = {}
    source = f"imported from {file} (nvidia-smi topo -m)"
    if links and len(links) == len(pairs) and len(set(links)) == 1 and links[0] in _LINKS:
        per_gpu, kind = links[0], "switch"
    elif links:
        per_gpu = sum(
            int(rows[gpus[0]][peer][2:]) for peer in gpus[1:] if rows[gpus[0]][peer].startswith("NV")
        )
        kind = "mesh"
    else:
        kind = "none"
    if base is None:
        base = _LINKS.get(per_gpu, (0.0, "rtx-4090-x8" if not links else "dgx-a100-80gb"))[1]
        notes.append(f"{per_gpu} NVLinks per GPU: taken over {base}; say another preset with --base")
    if kind == "none":
        tables["node_link"] = {"source": source, "evidence": "assumed", "kind": "none"}
    elif kind == "mesh":
        rate = per_gpu * 25.0
        tables["node_link"] = {
            "source": f"{source}; 25 GB/s per NVLink and direction",
            "evidence": "assumed", "kind": "mesh", "bandwidth": f"{rate:g} GB/s", "efficiency": 0.8,
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
