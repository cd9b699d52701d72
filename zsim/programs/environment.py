"""Environment variables of torch, NCCL and Transformer Engine, which launch scripts set.

Read in NCCL 2.30.7 (`docs/userguide/source/env.rst`, `src/init.cc`: `ncclAlgoStr`), torch 007b9bc0
(`c10/core/AllocatorConfig.h`), and Transformer Engine 2.17
(`pytorch/attention/dot_product_attention/utils.py`: `get_attention_backend`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from zsim.specs.formats.config_file import TrainingFile

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first that is set counts
_ALLOCATOR_NUMBERS = {  # with the values that torch takes
    "max_split_size_mb": r"2[1-9]|[3-9]\d|[1-9]\d{2,}", "roundup_power2_divisions": "1|2|4|8|16|32|64",
    "garbage_collection_threshold": r"0?\.\d*[1-9]\d*",
}  # fmt: skip
_ALGORITHMS = {"ring": "ring", "tree": "tree", "nvls": "nvls", "nvlstree": "nvls_tree", "pat": "pat"}
_PROTOCOLS = {"ll": "ll", "ll128": "ll128", "simple": "simple"}
_FLASH, _FUSED = "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"
_FAMILIES = ("NCCL_", "NVTE_", "TORCH_NCCL_", "RCCL_")
# Names, how errors are met, and how processes find each other: no effect on a step.
_IDLE = re.compile(
    r"DEBUG|TIMEOUT|RETRY|ASYNC_ERROR|BLOCKING_WAIT|SOCKET_IFNAME|SOCKET_FAMILY|GID_INDEX|ROCE_VERSION|HOME$|_DIR$"
    r"|TRACE_BUFFER|DUMP|MONITORING|HEARTBEAT|IB_TC$|IB_SL$|TOPO_FILE|VERSION$|HOSTID|DESYNC|LIB|PATH$|INCLUDE"
)


def read_environment(file: TrainingFile, variables: Mapping[str, str]) -> None:
    """Write what the variables set into `file`, and a note with those that could change a step and are not
    read.
    """
    read = set()
    connections = variables.get(_CONNECTIONS, "")
    if connections.isdecimal() and 1 <= int(connections) <= 32:
        file.settings["training.device_max_connections"] = int(connections)
    if (allocator := next(filter(variables.get, _ALLOCATORS), None)) is not None:
        _read_allocator(file, allocator, variables[allocator].replace(" ", ""))
    for name, key, words in (
        ("NCCL_ALGO", "collectives.force_algorithm", _ALGORITHMS),
        ("NCCL_PROTO", "collectives.force_protocol", _PROTOCOLS),
    ):
        word = words.get(variables.get(name, "").strip().lower())
        if word is not None:  # not a list of several, nor one of those that are left out ("^NVLS")
            file.cluster_changes[key] = word
            read.add(name)
    if file.cluster_changes.get("collectives.force_algorithm", "nvls") != "nvls":
        read.add("NCCL_NVLS_ENABLE")  # the algorithm is not that one anyway
    unread = [
        f"{name}={value[:40]}"
        for name, value in variables.items()
        if name.startswith(_FAMILIES)
        and name not in (*read, _FLASH, _FUSED)
        and value
        and not _IDLE.search(name)
    ]
    if unread:
        file.note(f"variables not read: {', '.join(unread)}")


def _read_allocator(file: TrainingFile, variable: str, text: str) -> None:
    """Write what torch's allocator is told by the text of a variable."""
    is_expandable = "expandable_segments:True" in text
    if is_expandable:
        file.settings["training.expandable_segments"] = True
    for name, number in _ALLOCATOR_NUMBERS.items():
        value = re.search(rf"\b{name}:({number})(?![\d.])", text)
        if value is not None and not (is_expandable and name == "max_split_size_mb"):
            file.settings[f"training.{name}"] = float(value[1]) if "." in value[1] else int(value[1])
        elif f"{name}:" in text:
            file.note(f"{variable}: {name} of '{text}' is not read")


def read_attention(file: TrainingFile, variables: Mapping[str, str]) -> None:
    """Write the core of attention that Transformer Engine is left with: flash-attention, cuDNN's, or
    its own without fusion.
    """
    is_off = {name: variables.get(name) == "0" for name in (_FLASH, _FUSED)}
    if all(is_off.values()):
        file.settings["training.attention"] = "math"
    elif is_off[_FLASH]:
        file.settings["training.attention"] = "flash"
    elif is_off[_FUSED]:
        file.settings["training.attention"] = "flash2"
