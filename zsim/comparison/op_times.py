"""Seconds of ops, and of collectives the seconds of the transfer and of waiting for other ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from zsim.arrays import Floats
from zsim.trace.trace import COLLECTIVES, Trace


def add_transfers(trace: Trace) -> Trace:
    """The trace with `transfer_seconds` where they are known.

    A recording has them. They are dropped where they are only bounds, since one rank of many cannot tell
    waiting from transfer. In a simulation the transfer of each op is its shortest span over the ranks, since
    the last rank to arrive waits for no other.
    """
    if trace.transfer_seconds is not None:
        is_bound = bool(trace.metadata.get("transfers_bounded"))
        return replace(trace, transfer_seconds=None) if is_bound else trace
    if trace.source == "recorded" or not len(trace):
        return trace
    lengths = trace.end_seconds - trace.start_seconds
    shortest = np.full(len(trace.infos), np.inf)
    np.minimum.at(shortest, trace.info_indices, lengths)
    is_collective = np.array([info.kind in COLLECTIVES for info in trace.infos], dtype=bool)
    is_once_per_rank = np.bincount(trace.info_indices, minlength=len(trace.infos)) <= len(
        np.unique(trace.ranks)
    )
    transfers = np.where(
        (is_collective & is_once_per_rank)[trace.info_indices], shortest[trace.info_indices], np.nan
    )
    return replace(trace, transfer_seconds=transfers)


def match_transfers(first: Trace, second: Trace) -> tuple[Trace, Trace]:
    """Both traces with `transfer_seconds`, or both without, so that like is compared with like."""
    first, second = add_transfers(first), add_transfers(second)
    if first.transfer_seconds is None or second.transfer_seconds is None:
        return replace(first, transfer_seconds=None), replace(second, transfer_seconds=None)
    return first, second


def op_seconds(trace: Trace) -> Floats:
    """Seconds of each span. For a collective those of its transfer, where known."""
    lengths: Floats = trace.end_seconds - trace.start_seconds
    if trace.transfer_seconds is None:
        return lengths
    return np.where(np.isnan(trace.transfer_seconds), lengths, trace.transfer_seconds)


def waiting_seconds(trace: Trace) -> float | None:
    """Seconds that the trace's collectives waited for other ranks. None where transfers are not known."""
    if trace.transfer_seconds is None:
        return None
    return float((trace.end_seconds - trace.start_seconds - op_seconds(trace)).sum())
