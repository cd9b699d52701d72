"""The time until a store has taken, or given, the bytes of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.specs.experiment.run.storage import StorageTable

_CLASSES = 64  # ranks with about as many bytes move together


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bytes per second of one rank, of one node, of all ranks. Infinite where there is no limit."""

    rank: float
    node: float
    total: float
    open_seconds: float = 0.0
    """Per file."""
    files_per_second: float = np.inf
    """The rate of all ranks."""


def write_limits(table: StorageTable, threads: int, node: float) -> StoreLimits:
    """The limits of writing with `threads` per rank through `node` bytes per second of a node's cards,
    where the table says nothing of a node."""
    return _limits(
        table, threads, node, table.write_bandwidth_per_writer, table.write_bandwidth_per_node,
        table.write_bandwidth,
    )  # fmt: skip


def read_limits(table: StorageTable, threads: int, node: float) -> StoreLimits:
    """The limits of reading, which are those of writing where the table says nothing."""
    return _limits(
        table, threads, node,
        table.read_bandwidth_per_reader or table.write_bandwidth_per_writer,
        table.read_bandwidth_per_node or table.write_bandwidth_per_node,
        table.read_bandwidth or table.write_bandwidth,
    )  # fmt: skip


def _limits(
    table: StorageTable,
    threads: int,
    node: float,
    per_thread: float | None,
    per_node: float | None,
    total: float | None,
) -> StoreLimits:
    efficiency = table.efficiency
    return StoreLimits(
        threads * per_thread if per_thread else np.inf,
        per_node or node,
        total * efficiency if total else np.inf,
        table.latency,
        table.metadata_per_second or np.inf,
    )


def transfer_seconds(amounts: Ints, node_of: Ints, limits: StoreLimits) -> float:
    """Seconds until the last rank's bytes are through, all beginning at once.

    Rates are max-min fair under the limits of ranks, nodes and the store, and rise as other ranks end.
    """
    left_bytes = _round_up_to_classes(amounts)
    nodes = int(node_of.max(initial=0)) + 1
    seconds = 0.0
    while True:
        active = left_bytes > 0
        if not active.any():
            return seconds
        active_per_node = np.bincount(node_of[active], minlength=nodes)
        caps = np.minimum(limits.rank, limits.node / active_per_node[node_of[active]])
        rates = np.minimum(caps, _fair_rate(caps, limits.total))
        if np.isinf(rates).all():
            return seconds
        step = float((left_bytes[active] / rates).min())
        left_bytes[active] = left_bytes[active] - rates * step
        left_bytes[left_bytes < 1.0] = 0.0
        seconds += step


def file_seconds(files: Ints, limits: StoreLimits) -> float:
    """Seconds of creating or opening `files` per rank."""
    return float(files.max(initial=0)) * limits.open_seconds + float(files.sum()) / limits.files_per_second


def _round_up_to_classes(amounts: Ints) -> Floats:
    """The amounts in `_CLASSES` classes at most, each as its largest member."""
    values = np.unique(amounts[amounts > 0])
    rounded = amounts.astype(np.float64)
    if len(values) > _CLASSES:
        edges = np.linspace(values[0], values[-1], _CLASSES + 1)[1:]
        positive = amounts > 0
        class_index = np.minimum(np.searchsorted(edges, rounded[positive] - 0.5), _CLASSES - 1)
        largest = np.zeros(_CLASSES)
        np.maximum.at(largest, class_index, rounded[positive])
        rounded[positive] = largest[class_index]
    return rounded


def _fair_rate(caps: Floats, total: float) -> float:
    """The rate of every rank that can reach it, so that all ranks do not exceed `total`."""
    if caps.sum() <= total:
        return float(np.inf)
    ordered = np.sort(caps)
    cumulative = np.concatenate([[0.0], np.cumsum(ordered)[:-1]])
    levels = (total - cumulative) / np.arange(len(ordered), 0, -1)
    return float(levels[np.argmax(levels <= ordered)])
