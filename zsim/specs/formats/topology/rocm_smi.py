"""`rocm-smi --showtopo`: how the GPUs of one node reach one another, as matrices without rates.

The link types are XGMI, which is Infinity Fabric, and PCIE (rocm_smi_lib of ROCm 6.3, a1295714:
python_smi_tools/rocm_smi.py, `showTypeTopology`). It prints XXXX for a pair that it could not read. The text
names no GPU, so a preset supplies all else.
"""

from __future__ import annotations

import re
from typing import Any

from zsim.errors import InputError
from zsim.specs.formats.topology.imported_topology import ImportedTopology

_TYPES = re.compile(r"^=+ *Link Type between two GPUs *=+$", re.MULTILINE)
_HEADING = re.compile(r"^=+", re.MULTILINE)
_MAXIMUM = 64


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
            f"with "
            "--base, such as mi300x-x8"
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
    if not names or not is_square or len(names) > _MAXIMUM:
        raise InputError(
            f"{file}: found {len(rows)} rows for {len(names)} columns of 'Link Type between two GPUs'; is "
            f"it cut "
            "short? Expected what `rocm-smi --showtopo` prints"
        )
    return rows
