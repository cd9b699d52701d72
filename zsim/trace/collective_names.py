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


def parse_dtype(name: str) -> tuple[str, int]:
    """zsim's name of a dtype and its bytes, or ("", 0) for an unknown one."""
    element = ELEMENT_TYPES.get(_DTYPES.get(name.strip().lower(), ""))
    return ("", 0) if element is None else (element.name, element.bytes)


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


def count_elements(dims: Any) -> int:
    """Elements of the first tensor, or list of tensors, in the profiler's `Input Dims`."""
    if not isinstance(dims, Sequence) or isinstance(dims, str) or not dims:
        return 0
    if all(isinstance(size, int) for size in dims):
        return math.prod(dims)
    return sum(count_elements(part) for part in dims)


def parse_ranks(text: Any, size: int) -> tuple[int, ...]:
    """The ranks of `"[0, 1]"` or of a list, or () if they are not known.

    Kineto cuts long lists, `[0, 1, ..., 63]`. They are completed if the ranks are evenly spaced.
    """
    if isinstance(text, list | tuple):
        text = ", ".join(str(part) for part in text)
    if not isinstance(text, str):
        return ()
    numbers = [int(number) for number in _NUMBERS.findall(text)]
    if "..." not in text:
        return tuple(numbers)
    if len(numbers) < 3 or size < 2:
        return ()
    stride, remainder = divmod(numbers[-1] - numbers[0], size - 1)
    completed = tuple(range(numbers[0], numbers[-1] + 1, stride)) if stride and not remainder else ()
    return completed if len(completed) == size and set(numbers) <= set(completed) else ()


def group_name(arguments: Mapping[str, Any], size: int, world_size: int) -> str:
    """Name of a process group: its description if it has one, "world" if it has all ranks."""
    description = str(arguments.get("Process Group Description", "") or "").strip()
    if description in ("", "default_pg", "undefined"):
        if size == world_size:
            return "world"
        number = str(arguments.get("Process Group Name", "") or "").strip()
        return f"group {number}" if number else f"group of {size}"
    return description


def parse_int(value: Any, default: int = 0) -> int:
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
    group_names = dict.fromkeys(info.group for info in infos if info.kind in COLLECTIVES)
    return {name: index for index, name in enumerate(group_names)}


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
    rank_text = ", ".join(str(rank) for rank in ranks[:_MAX_RANKS_WRITTEN])
    if len(ranks) > _MAX_RANKS_WRITTEN:
        rank_text += f", ..., {ranks[-1]}"
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
        "Process Group Ranks": f"[{rank_text}]",
        "Seq": sequence,
        **({"Messages": [list(message) for message in info.messages]} if info.messages else {}),
    }


def parse_messages(arguments: Mapping[str, Any]) -> tuple[tuple[str, int, int], ...]:
    """The messages of a call as `collective_metadata` writes them (zsim's key), or () if they are not
    known.
    """
    rows = arguments.get("Messages")
    if not isinstance(rows, list):
        return ()
    messages = [message for message in rows if isinstance(message, list) and len(message) == 3]
    parsed_messages = tuple(
        (str(way), parse_int(count), parse_int(num_places)) for way, count, num_places in messages
    )
    is_known = len(parsed_messages) == len(rows) and all(
        way in ("send", "recv") and n > 0 for way, n, _ in parsed_messages
    )
    return parsed_messages if is_known else ()
