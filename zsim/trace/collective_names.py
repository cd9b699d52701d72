"""Names of collectives in torch.profiler and the Flight Recorder, written and read by one table.

Sources: pytorch/kineto, libkineto/src/output_json.cpp (keys), torch/csrc/distributed/c10d (names of
collectives, `record_param_comms`), and NCCL and RCCL kernel names in recorded traces.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zsim.dtypes import ELEMENT_TYPES
from zsim.trace.trace import COLLECTIVES, SpanInfo

# A dtype's names in profiles, in lower case -> its name here; tf32 is Float, which is fp32's name.
_DTYPES: dict[str, str] = {
    spelling: element.name
    for element in ELEMENT_TYPES.values()
    if element.name != "tf32"
    for spelling in (element.scalar_type.lower(), *element.aliases)
}

# Kind -> (the profiler's collective name, the function in NCCL's kernel name). A name is read as the first of
# these kinds that it contains.
_KINDS: dict[str, tuple[str, str]] = {
    "reduce_scatter": ("_reduce_scatter_base", "ReduceScatter_Sum"),
    "all_gather": ("_allgather_base", "AllGather"),
    "all_reduce": ("allreduce", "AllReduce_Sum"),
    "all_to_all": ("all_to_allv", "SendRecv"),
    "broadcast": ("broadcast", "Broadcast"),
    "gather": ("gather", "SendRecv"),
    "scatter": ("scatter", "SendRecv"),
    "barrier": ("barrier", "AllReduce_Sum"),
    "reduce": ("reduce", "Reduce_Sum"),
    "send": ("send", "SendRecv"),
    "recv": ("recv", "SendRecv"),
    "send_recv": ("send_recv", "SendRecv"),  # zsim's own: a batch that does both
}
_MAX_RANKS_WRITTEN = 30  # longer lists are cut in the metadata, not in `pg_config`
_NUMBERS = re.compile(r"\d+")


def collective_kind(name: str) -> str:
    """`_allgather_base`, `nccl:all_reduce`, `c10d::alltoall_base_` -> all_gather, ..., and "" for any other
    name.

    NCCL's all-to-all kernels are called SendRecv, as are its send and recv. The name does not tell them
    apart.
    """
    if name == "send_recv":
        return name
    plain = name.lower().replace("_", "")
    if "sendrecv" in plain:
        return "all_to_all"
    return next((kind for kind in _KINDS if kind.replace("_", "") in plain), "")


def is_collective_kernel(name: str) -> bool:
    """Whether a GPU kernel's name is one of NCCL's, RCCL's or MSCCL's (or zsim's gloo export's)."""
    lower = name.lower()
    return "nccl" in lower or "rccl" in lower or "msccl" in lower or lower.startswith("gloo:")


def dtype_of(name: str) -> tuple[str, int]:
    """zsim's name of a dtype and its bytes, or ("", 0) for an unknown one."""
    found = ELEMENT_TYPES.get(_DTYPES.get(name.strip().lower(), ""))
    return ("", 0) if found is None else (found.name, found.bytes)


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
    """The ranks of `"[0, 1]"` or of a list, or () if they are not known.

    Kineto cuts long lists, `[0, 1, ..., 63]`. They are completed if the ranks are evenly spaced.
    """
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
    """Name of a process group: its description if it has one, "world" if it has all ranks."""
    description = str(arguments.get("Process Group Description", "") or "").strip()
    if description in ("", "default_pg", "undefined"):
        if size == world_size:
            return "world"
        number = str(arguments.get("Process Group Name", "") or "").strip()
        return f"group {number}" if number else f"group of {size}"
    return description


def as_int(value: Any, default: int = 0) -> int:
    """An integer from a trace's args, where numbers may be text, or `default` if it is not one."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return default


def kernel_name(info: SpanInfo, backend: str) -> str:
    """Name of a collective's kernel, such as
    `ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)`."""
    if backend == "gloo":
        return f"gloo:{info.kind}"
    function = _KINDS[info.kind][1]
    if function == "SendRecv":
        return "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    element = ELEMENT_TYPES.get(info.dtype)
    reduced = f"_{element.nccl}" if function.endswith("Sum") and element is not None else ""
    return f"ncclDevKernel_{function}{reduced}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def process_groups(infos: Iterable[SpanInfo]) -> dict[str, int]:
    """The groups in use, numbered in the order of their first use."""
    used = dict.fromkeys(info.group for info in infos if info.kind in COLLECTIVES)
    return {name: index for index, name in enumerate(used)}


def group_ranks(name: str, group_size: int, rank: int, metadata: Mapping[str, Any]) -> list[int]:
    """The ranks of the group that `rank` is in.

    `metadata["groups"]` maps its name to (size, stride). If ranks are at unequal distances (stride None),
    `metadata["group_members"]` maps it to the ranks of all communicators of that name.
    """
    size, stride = metadata.get("groups", {}).get(name, (group_size, 1))
    if stride is None:
        return next(list(ranks) for ranks in metadata["group_members"][name] if rank in ranks)
    first = rank // (size * stride) * (size * stride) + rank % stride
    return list(range(first, first + size * stride, stride))


def collective_metadata(info: SpanInfo, group_index: int, ranks: list[int], sequence: int) -> dict[str, Any]:
    """The profiler's metadata of a collective. Element counts are of this rank's input and output."""
    element = ELEMENT_TYPES.get(info.dtype, ELEMENT_TYPES["uint8"])
    full = info.bytes // element.bytes
    shard = full // max(info.group_size, 1)
    written = ", ".join(str(rank) for rank in ranks[:_MAX_RANKS_WRITTEN])
    if len(ranks) > _MAX_RANKS_WRITTEN:
        written += f", ..., {ranks[-1]}"
    return {
        "Collective name": _KINDS[info.kind][0],
        "In msg nelems": shard if info.kind == "all_gather" else full,
        "Out msg nelems": shard if info.kind == "reduce_scatter" else full,
        "Group size": info.group_size,
        "dtype": element.scalar_type,
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": str(group_index),
        "Process Group Description": info.group or "default_pg",
        "Process Group Ranks": f"[{written}]",
        "Seq": sequence,
        **({"Messages": [list(message) for message in info.messages]} if info.messages else {}),
    }


def messages_of(arguments: Mapping[str, Any]) -> tuple[tuple[str, int, int], ...]:
    """The messages of a call as `collective_metadata` writes them (zsim's key), or () if they are not
    known.
    """
    found = arguments.get("Messages")
    if not isinstance(found, list):
        return ()
    messages = [message for message in found if isinstance(message, list) and len(message) == 3]
    read = tuple((str(way), as_int(count), as_int(places)) for way, count, places in messages)
    is_known = len(read) == len(found) and all(way in ("send", "recv") and n > 0 for way, n, _ in read)
    return read if is_known else ()
