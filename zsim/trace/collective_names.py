"""Reading collectives back from what torch.profiler and the Flight Recorder call them.

Sources: pytorch/kineto, libkineto/src/output_json.cpp (keys); torch/csrc/distributed/c10d (names of
collectives, `record_param_comms`); NCCL and RCCL kernel names in recorded traces.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

# torch's ScalarType, and the C++ names that older profilers write -> zsim's name, bytes per element
_DTYPES: dict[str, tuple[str, int]] = {
    "float": ("fp32", 4), "double": ("fp64", 8), "half": ("fp16", 2), "bfloat16": ("bf16", 2),
    "float8_e4m3fn": ("fp8", 1), "float8_e5m2": ("fp8", 1), "float8_e4m3fnuz": ("fp8", 1),
    "float8_e5m2fnuz": ("fp8", 1), "byte": ("uint8", 1), "char": ("int8", 1), "short": ("int16", 2),
    "int": ("int32", 4), "long": ("int64", 8), "bool": ("bool", 1), "long int": ("int64", 8),
    "unsigned char": ("uint8", 1), "signed char": ("int8", 1), "c10::half": ("fp16", 2),
    "c10::bfloat16": ("bf16", 2), "c10::float8_e4m3fn": ("fp8", 1), "c10::float8_e5m2": ("fp8", 1),
    "long long": ("int64", 8), "short int": ("int16", 2),
}  # fmt: skip

# the first that occurs in a name without its underscores says what it is
_KINDS = (
    ("reducescatter", "reduce_scatter"), ("allgather", "all_gather"), ("allreduce", "all_reduce"),
    ("alltoall", "all_to_all"), ("broadcast", "broadcast"), ("gather", "gather"), ("scatter", "scatter"),
    ("barrier", "barrier"), ("reduce", "reduce"), ("send", "send"), ("recv", "recv"),
)  # fmt: skip
_NUMBERS = re.compile(r"\d+")


def collective_kind(name: str) -> str:
    """`_allgather_base`, `nccl:all_reduce`, `c10d::alltoall_base_` -> all_gather, ...; "" for none of them.

    NCCL's all-to-all kernels are called SendRecv; so are its send and recv, and the name does not tell.
    """
    plain = name.lower().replace("_", "")
    if "sendrecv" in plain:
        return "all_to_all"
    return next((kind for part, kind in _KINDS if part in plain), "")


def is_collective_kernel(name: str) -> bool:
    """Whether a GPU kernel's name is one of NCCL's, RCCL's or MSCCL's (or zsim's gloo export's)."""
    lower = name.lower()
    return "nccl" in lower or "rccl" in lower or "msccl" in lower or lower.startswith("gloo:")


def dtype_of(name: str) -> tuple[str, int]:
    """zsim's name of a dtype and its bytes; ("", 0) for one that is not known."""
    return _DTYPES.get(name.strip().lower(), ("", 0))


def full_tensor_bytes(
    kind: str, in_elements: int, out_elements: int, dtype_bytes: int, group_size: int
) -> int:
    """Bytes of the full tensor: an all-gather's output, a reduce-scatter's input, an all-reduce's buffer."""
    if kind in ("all_gather", "gather", "recv"):
        elements = out_elements or in_elements * group_size
    elif kind in ("reduce_scatter", "scatter"):
        elements = in_elements or out_elements * group_size
    else:
        elements = max(in_elements, out_elements)
    return elements * dtype_bytes


def elements_of(dims: Any) -> int:
    """Elements of the first tensor, or list of tensors, in the profiler's `Input Dims`."""
    if not isinstance(dims, Sequence) or isinstance(dims, str) or not dims:
        return 0
    if all(isinstance(size, int) for size in dims):
        return math.prod(dims)
    return sum(elements_of(part) for part in dims)


def parse_ranks(text: Any, size: int) -> tuple[int, ...]:
    """`"[0, 1]"` or a list -> ranks. Kineto cuts long lists, `[0, 1, ..., 63]`: filled in where the ranks are
    evenly spaced; () where the ranks are not known."""
    if isinstance(text, list | tuple):
        text = ", ".join(str(part) for part in text)
    if not isinstance(text, str):
        return ()
    found = [int(number) for number in _NUMBERS.findall(text)]
    if "..." not in text:
        return tuple(found)
    if len(found) < 3 or size < 2:
        return ()
    stride, odd = divmod(found[-1] - found[0], size - 1)
    filled = tuple(range(found[0], found[-1] + 1, stride)) if stride and not odd else ()
    return filled if len(filled) == size and set(found) <= set(filled) else ()


def group_name(arguments: Mapping[str, Any], size: int, world_size: int) -> str:
    """What to call a process group: its description where it has one, "world" where it is that."""
    description = str(arguments.get("Process Group Description", "") or "").strip()
    if description in ("", "default_pg", "undefined"):
        if size == world_size:
            return "world"
        number = str(arguments.get("Process Group Name", "") or "").strip()
        return f"group {number}" if number else f"group of {size}"
    return description


def as_int(value: Any, default: int = 0) -> int:
    """An integer out of a trace's args, where numbers are sometimes text."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return default
