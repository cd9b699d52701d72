"""A fixed sample of measured kernels, each with the kernels that zsim prices for its shape.

The tables are AIConfigurator's (NVIDIA, Apache-2.0, commit 095f58a5), a Parquet file per operation. They are
not part of this repository. A row is in the sample by a checksum of its shape, so that the sample is the same
wherever the tables are read. Shapes are those that training has: a thousand tokens and more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from zsim.cost.kernels.kernel import Kernel, elementwise, gemm
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations import FORWARD, Activation, Attention, GroupedLinear, Module, Operation
from zsim.operations.mixers.convolution import Convolution
from zsim.operations.mixers.gated_delta import GatedDelta
from zsim.operations.mixers.kimi_delta import KimiDelta
from zsim.operations.mixers.mamba2 import StateSpace
from zsim.operations.mixers.sparse_attention import SparseAttention
from zsim.specs.cluster.gpu import Gpu, select_attention_variant

GPUS: Mapping[str, str] = {
    "a100_sxm": "a100-sxm-80gb",
    "h100_sxm": "h100-sxm-80gb",
    "h200_sxm": "h200-sxm-141gb",
    "b200_sxm": "b200-sxm-180gb",
    "b300_sxm": "b300-sxm-270gb",
    "gb200": "gb200-186gb",
    "gb300": "gb300-288gb",
    "l40s": "l40s-48gb",
    "rtx_pro_6000_server": "rtx-pro-6000-96gb",
}
SAMPLE = 60  # shapes of each GPU and kind
_BF16 = WorkOptions(compile=True)
_KERNELS_BEST = "cudnn"  # the variant of fused attention, where a GPU's file has it
_GLM = SparseAttention(64, 512, 64, 2048, 32, 128)

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KernelTable:
    """One kind of kernels in one file."""

    kind: str
    file: str
    is_sampled: Callable[[Row], bool]
    kernels: Callable[[Row], tuple[Kernel, ...]]
    columns: tuple[str, ...] = ()
    """What a shape is, besides GPU, engine and kernel."""


@dataclass(frozen=True, slots=True)
class MeasuredKernel:
    """A row of the sample."""

    gpu: str
    """The GPU's name in zsim."""
    kind: str
    engine: str
    source: str
    """The kernel's name in the table."""
    kernels: tuple[Kernel, ...]
    seconds: float


def read_sample(folder: Path) -> Iterator[MeasuredKernel]:
    """The sample of the tables in `folder`. Files that are not there are left out."""
    import pandas

    for table in TABLES:
        path = folder / table.file
        if not path.exists():
            continue
        frame = pandas.read_csv(path) if path.suffix == ".csv" else pandas.read_parquet(path)
        if "gpu" not in frame:
            frame["gpu"], frame["engine"] = "b200_sxm", "trtllm"  # the one table of a single GPU
        yield from _sample(table, frame)


def _sample(table: KernelTable, frame: Any) -> Iterator[MeasuredKernel]:
    names = ["gpu", "engine", "kernel_source", "latency", *table.columns]
    for gpu, group in frame[frame.gpu.isin(list(GPUS))].groupby("gpu"):
        rows = [dict(zip(names, values, strict=True)) for values in group[names].itertuples(index=False)]
        rows = [row for row in rows if row["latency"] > 0 and table.is_sampled(row)]
        rows.sort(key=lambda row: _checksum(row, table.columns))
        for row in rows[:SAMPLE]:
            yield MeasuredKernel(
                GPUS[gpu], table.kind, row["engine"], row["kernel_source"], table.kernels(row),
                row["latency"] * 1e-3,
            )  # fmt: skip


def _checksum(row: Row, columns: tuple[str, ...]) -> tuple[int, str]:
    text = ",".join(str(row[name]) for name in ("engine", "kernel_source", *columns))
    return crc32(text.encode()), text


def gpu_of_tables(gpu: Gpu) -> Gpu:
    """The GPU with the fused attention that inference engines call."""
    return select_attention_variant(gpu, _KERNELS_BEST) if _KERNELS_BEST in gpu.attention.variants else gpu


# -- shapes -----------------------------------------------------------------------------------------------


def _forward(work: Operation, sequences: int, length: int) -> tuple[Kernel, ...]:
    return Module("core", work).kernels(FORWARD, BatchShape(sequences, length), _BF16)


def _product(row: Row) -> tuple[Kernel, ...]:
    m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
    if row["gemm_dtype"] == "bfloat16":
        return (gemm(m, n, k, 2, "bf16"),)
    cast = elementwise(3 * m * k, "bf16")
    return (cast, Kernel("gemm", 2.0 * m * n * k, float(m * k + n * k + 2 * m * n), "fp8", (m, n, k)))


def _attention(row: Row) -> tuple[Kernel, ...]:
    heads, groups, width = (int(row[key]) for key in ("num_heads", "num_key_value_heads", "head_dim"))
    work = Attention(heads, groups or heads, width, width, rotary=False)
    return _forward(work, int(row["batch_size"]), int(row["isl"]))


# Experts of Nemotron 3, of 1,856, 2,688 and 5,120 features: TensorRT-LLM's rows of them are all "nongated".
_UNGATED = {(6, 128, 1856), (22, 512, 2688), (22, 512, 5120)}


def _experts(row: Row) -> tuple[Kernel, ...]:
    """Two grouped products of even rows, the activation between them, and the rows' moves: copies of tokens
    in the order of experts, and the sum over a token's experts. They are part of what was timed.
    """
    tokens = int(row["num_tokens"])
    rows = tokens * int(row["topk"])
    count, hidden, width = (int(row[key]) for key in ("num_experts", "hidden_size", "inter_size"))
    is_gated = (int(row["topk"]), count, width) not in _UNGATED
    works: tuple[Operation, ...] = (
        GroupedLinear(count, hidden, width * (1 + is_gated), has_even_rows=True),
        Activation(width, gated=is_gated, name="silu" if is_gated else "relu"),
        GroupedLinear(count, width, hidden, has_even_rows=True),
    )
    moves = elementwise(2.0 * hidden * (3 * rows + tokens), "bf16", 2)
    return (moves, *(kernel for work in works for kernel in _forward(work, 1, rows)))


def _batch(row: Row) -> tuple[int, int]:
    return int(row["batch_size"]), int(row["seq_len"])


def _delta(row: Row) -> tuple[Kernel, ...]:
    shape = (row["num_k_heads"], row["num_v_heads"], row["head_k_dim"], row["head_v_dim"])
    return _forward(GatedDelta(*(int(size) for size in shape)), *_batch(row))[-1:]


def _kimi(row: Row) -> tuple[Kernel, ...]:
    return _forward(KimiDelta(int(row["num_v_heads"]), int(row["head_k_dim"])), *_batch(row))[-1:]


def _state_space(row: Row) -> tuple[Kernel, ...]:
    shape = (row["nheads"], row["head_dim"], row["d_state"], row["n_groups"], row["chunk_size"])
    return _forward(StateSpace(*(int(size) for size in shape)), *_batch(row))


def _convolution(row: Row) -> tuple[Kernel, ...]:
    keys, values = row["num_k_heads"] * row["head_k_dim"], row["num_v_heads"] * row["head_v_dim"]
    return _forward(Convolution(int(2 * keys + values), int(row["d_conv"])), *_batch(row))


def _of_glm(kind: str) -> Callable[[Row], tuple[Kernel, ...]]:
    """One of the kernels of GLM-5's sparse attention. Engines score keys in fp8."""

    def kernels(row: Row) -> tuple[Kernel, ...]:
        made = _forward(_GLM, int(row["batch_size"]), int(row["isl"]))
        dtype = "fp8" if kind == "indexer" else "bf16"
        return tuple(replace(kernel, dtype=dtype) for kernel in made if kernel.kind == kind)

    return kernels


def _is_long(row: Row) -> bool:
    return bool(row["phase"] == "context" and row["seq_len"] >= 512 and row["num_tokens"] >= 1024)


def _is_of_training(row: Row) -> bool:
    return bool(row["m"] >= 1024 and row["n"] >= 1024 and row["k"] >= 1024)


def _is_sparse(row: Row) -> bool:
    return bool(row["isl"] >= 4096 and row["step"] == 0)


_HEADS = ("num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim", "d_conv")
_CONTEXT = ("phase", "batch_size", "seq_len", "num_tokens")
_GLM_COLUMNS = ("batch_size", "isl", "step")
_EXPERTS = (
    "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size",
    "moe_ep_size", "distribution",
)  # fmt: skip
TABLES = (
    KernelTable(
        "products, bf16", "gemm.parquet",
        lambda row: row["gemm_dtype"] == "bfloat16" and _is_of_training(row), _product,
        ("gemm_dtype", "m", "n", "k"),
    ),
    KernelTable(
        "products, fp8", "gemm.parquet", lambda row: row["gemm_dtype"] == "fp8" and _is_of_training(row),
        _product, ("gemm_dtype", "m", "n", "k"),
    ),
    KernelTable(
        "attention, bf16", "context_attention.parquet",
        lambda row: row["isl"] >= 1024 and row["attn_dtype"] == row["kv_cache_dtype"] == "bfloat16"
        and row["step"] == 0 and not row["window_size"] > 0 and row["head_dim"] in (64, 128, 256), _attention,
        (
            "batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "attn_dtype",
            "kv_cache_dtype", "step", "window_size",
        ),
    ),
    KernelTable(
        "experts, bf16", "moe.parquet",
        lambda row: row["moe_dtype"] == "bfloat16" and row["distribution"] == "balanced"
        and row["num_tokens"] >= 2048 and row["moe_tp_size"] == row["moe_ep_size"] == 1
        and "triton" not in row["kernel_source"], _experts, _EXPERTS,
    ),
    KernelTable(
        "Gated DeltaNet", "gdn.parquet",
        lambda row: row["kernel_source"] in ("chunk_gated_delta_rule", "chunk_gated_delta_rule_triton")
        and _is_long(row), _delta, (*_CONTEXT, *_HEADS),
    ),
    KernelTable(
        "Kimi delta attention", "kda.parquet",
        lambda row: row["kernel_source"] == "chunk_kda" and _is_long(row), _kimi, (*_CONTEXT, *_HEADS),
    ),
    KernelTable(
        "Mamba-2", "mamba2_b200_trtllm_1.3.0rc15.csv",
        lambda row: row["kernel_source"] == "mamba_chunk_scan_combined" and _is_long(row), _state_space,
        (*_CONTEXT, "nheads", "head_dim", "d_state", "n_groups", "chunk_size"),
    ),
    KernelTable(
        "short convolutions", "gdn.parquet",
        # On A100 131,072 tokens take 0.8 ms with 6,144 channels as with 12,288, which is four times what its
        # memory moves: not all channels were computed.
        lambda row: row["kernel_source"] == "causal_conv1d_fn" and row["engine"] != "trtllm"
        and row["gpu"] != "a100_sxm" and _is_long(row), _convolution, (*_CONTEXT, *_HEADS),
    ),
    KernelTable(
        "sparse attention", "glm5_dsa_attention.parquet", _is_sparse, _of_glm("sparse_attention"),
        _GLM_COLUMNS,
    ),
    KernelTable(
        "indexer's scores", "glm5_indexer_logits.parquet", _is_sparse, _of_glm("indexer"), _GLM_COLUMNS
    ),
    KernelTable("choice of keys", "glm5_topk.parquet", _is_sparse, _of_glm("top_k"), _GLM_COLUMNS),
)  # fmt: skip
