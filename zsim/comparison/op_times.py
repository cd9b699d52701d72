"""How long ops took, and how much of a collective was transfer and how much waiting for other ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from zsim.arrays import Floats
from zsim.trace.trace import COLLECTIVES, Trace


def with_transfers(trace: Trace) -> Trace:
    """The trace with `transfer_seconds` where they are known.

    A recording brings them (and loses them here where they are only bounds: one rank of many cannot tell
    waiting from transfer). Of a simulation of several ranks, the one that came last waited for nobody: each
    op's transfer is its shortest span; the only rank of a class waits for nobody.
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
    once = np.bincount(trace.info_indices, minlength=len(trace.infos)) <= len(np.unique(trace.ranks))
    transfers = np.where((is_collective & once)[trace.info_indices], shortest[trace.info_indices], np.nan)
    return replace(trace, transfer_seconds=transfers)


def with_alike_times(one: Trace, other: Trace) -> tuple[Trace, Trace]:
    """Both with `transfer_seconds`, or neither: what is compared must be the same."""
    one, other = with_transfers(one), with_transfers(other)
    if one.transfer_seconds is None or other.transfer_seconds is None:
        return replace(one, transfer_seconds=None), replace(other, transfer_seconds=None)
    return one, other


def op_seconds(trace: Trace) -> Floats:
    """Seconds of each span: of a collective its transfer where that is known."""
    lengths: Floats = trace.end_seconds - trace.start_seconds
    if trace.transfer_seconds is None:
        return lengths
    return np.where(np.isnan(trace.transfer_seconds), lengths, trace.transfer_seconds)


def waiting_seconds(trace: Trace) -> float | None:
    """What the trace's collectives spent waiting for other ranks; None where that cannot be told."""
    if trace.transfer_seconds is None:
        return None
    return float((trace.end_seconds - trace.start_seconds - op_seconds(trace)).sum())
