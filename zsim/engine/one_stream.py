"""A rank whose kernels and collectives run one after the other, all on one stream.

Such a rank needs no clock. In issue order, an op starts when the host has issued it and the op before it has
ended. Everything else that it comes after was issued earlier, and has ended too. The host's waits are for ops
that it has issued, so one pass over the program gives all times. They are the times of an executor of a
program that is priced with `is_serial`, to the last bit, because the same numbers are added in the same
order.
"""

from __future__ import annotations

import math
from array import array
from typing import NamedTuple

from zsim.engine.prepare import PreparedJob
from zsim.fabric.communicators import Transfer
from zsim.fluid.pool import FluidPool
from zsim.plan.columns import op_columns
from zsim.plan.ops import Collective


class SerialTimes(NamedTuple):
    """The times of a rank whose ops run one after the other."""

    issue: array[float]
    """By op, when the host had issued it."""
    ended: array[float]
    """By op, when it ended."""
    step_seconds: float
    """Of the last step."""


def is_one_rank(prepared: PreparedJob) -> bool:
    """Whether all ranks are simulated as one, which does nothing but kernels and collectives."""
    if len(prepared.classes.representatives) > 1 or len(prepared.programs) > 1 or prepared.allocators:
        return False
    (priced,), plan = prepared.programs, prepared.plan
    return (
        priced.next_in_queue is None
        and priced.recorded is None
        and not (plan.has_offload or plan.has_messages)
    )


def serial_times(prepared: PreparedJob) -> SerialTimes:
    """The times of the rank of a job that `is_one_rank`, if its kernels and collectives ran one after the
    other.

    `now` is the clock's time when the host last went on. An op that the host issues ahead of it starts a
    difference later, as on a clock.
    """
    (priced,), (kernel_seconds,) = prepared.programs, prepared.kernel_seconds
    fabric, (rank,) = prepared.fabric, prepared.classes.representatives
    transfers: dict[int, tuple[float, float]] = {}  # by the id of their work, seconds of latency and sending
    count, no_times = priced.num_ops, array("d", [math.nan])
    issue, ended = no_times * count, no_times * count
    now = host_time = stream_time = 0.0
    payloads = priced.program.memoize(op_columns).work
    rows = zip(payloads, priced.host_seconds, kernel_seconds, priced.host_waits, strict=True)
    for number, (work, host, seconds, waits) in enumerate(rows):
        for op in waits:
            end = ended[op]
            if end > host_time:
                host_time = end
            if end > now and payloads[op] is not None:  # the host is blocked
                now = end
        host_time += host
        issue[number] = host_time
        if work is None:
            ended[number] = host_time
            continue
        start = stream_time if stream_time > now else now
        if host_time > start:
            start += host_time - start
        if seconds is None:
            assert isinstance(work, Collective)
            transfer_seconds = transfers.get(id(work))
            if transfer_seconds is None:
                transfer = fabric.transfer(work, fabric.communicator_of(work.group, rank))
                transfer_seconds = transfers[id(work)] = _idle_seconds(fabric.pool, transfer)
            stream_time = start + transfer_seconds[0] + transfer_seconds[1]
        else:
            stream_time = start + seconds
        ended[number] = stream_time
    first_op = count - len(prepared.plan.program.ops)
    return SerialTimes(issue, ended, max(host_time, stream_time) - max(ended[:first_op], default=0.0))


def _idle_seconds(pool: FluidPool, transfer: Transfer) -> tuple[float, float]:
    """Seconds of latency, and of sending while no other transfer runs and no kernels on its GPUs."""
    latency = max(transfer.latency_seconds, 0.0)
    if transfer.size <= 0 or not transfer.profile.usage:
        return latency, 0.0
    return latency, transfer.size / pool.isolated_rate(transfer.profile)
