"""Collectives as torch.profiler writes them down: kernel names and the metadata of `record_param_comms`.

Source: pytorch/kineto, libkineto/src/output_json.cpp (keys), and recorded traces (values, kernel names).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zsim.trace.trace import COLLECTIVES, SpanInfo

# torch's scalar type, its bytes, and NCCL's name of the type
_DTYPES: dict[str, tuple[str, int, str]] = {
    "bf16": ("BFloat16", 2, "bf16"),
    "fp16": ("Half", 2, "f16"),
    "fp32": ("Float", 4, "f32"),
    "tf32": ("Float", 4, "f32"),
    "fp64": ("Double", 8, "f64"),
    "fp8": ("Float8_e4m3fn", 1, "u8"),
    "int8": ("Char", 1, "i8"),
    "int32": ("Int", 4, "u32"),
    "int64": ("Long", 8, "u64"),
}

# the profiler's collective name, and the function in NCCL's kernel name
_KINDS: dict[str, tuple[str, str]] = {
    "all_gather": ("_allgather_base", "AllGather"),
    "reduce_scatter": ("_reduce_scatter_base", "ReduceScatter_Sum"),
    "all_reduce": ("allreduce", "AllReduce_Sum"),
    "all_to_all": ("all_to_allv", "SendRecv"),
    "broadcast": ("broadcast", "Broadcast"),
    "reduce": ("reduce", "Reduce_Sum"),
    "gather": ("gather", "SendRecv"),
    "scatter": ("scatter", "SendRecv"),
    "send": ("send", "SendRecv"),
    "recv": ("recv", "SendRecv"),
}
_MOST_RANKS_WRITTEN = 30  # longer lists are cut in the metadata, not in `pg_config`


def kernel_name(info: SpanInfo, backend: str) -> str:
    """E.g. `ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)`."""
    if backend == "gloo":
        return f"gloo:{info.kind}"
    function = _KINDS[info.kind][1]
    if function == "SendRecv":
        return "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    reduced = f"_{_DTYPES[info.dtype][2]}" if function.endswith("Sum") and info.dtype in _DTYPES else ""
    return f"ncclDevKernel_{function}{reduced}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def process_groups(infos: Iterable[SpanInfo]) -> dict[str, int]:
    """The groups that are used, numbered in the order of their first use."""
    used = dict.fromkeys(info.group for info in infos if info.kind in COLLECTIVES)
    return {name: index for index, name in enumerate(used)}


def group_ranks(name: str, group_size: int, rank: int, metadata: Mapping[str, Any]) -> list[int]:
    """The ranks of the group that `rank` is in; `metadata["groups"]` maps its name to (size, stride)."""
    size, stride = metadata.get("groups", {}).get(name, (group_size, 1))
    first = rank // (size * stride) * (size * stride) + rank % stride
    return list(range(first, first + size * stride, stride))


def collective_metadata(info: SpanInfo, group_index: int, ranks: list[int], sequence: int) -> dict[str, Any]:
    """What the profiler attaches to a collective; element counts are of this rank's input and output."""
    dtype, dtype_bytes, _ = _DTYPES.get(info.dtype, ("Byte", 1, "u8"))
    full = info.bytes // dtype_bytes
    shard = full // max(info.group_size, 1)
    written = ", ".join(str(rank) for rank in ranks[:_MOST_RANKS_WRITTEN])
    if len(ranks) > _MOST_RANKS_WRITTEN:
        written += f", ..., {ranks[-1]}"
    return {
        "Collective name": _KINDS[info.kind][0],
        "In msg nelems": shard if info.kind == "all_gather" else full,
        "Out msg nelems": shard if info.kind == "reduce_scatter" else full,
        "Group size": info.group_size,
        "dtype": dtype,
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": str(group_index),
        "Process Group Description": info.group or "default_pg",
        "Process Group Ranks": f"[{written}]",
        "Seq": sequence,
    }
