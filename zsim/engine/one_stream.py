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

from zsim.engine.prepare import Prepared
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


def is_one_rank(prepared: Prepared) -> bool:
    """Whether all ranks are simulated as one, which does nothing but kernels and collectives."""
    if len(prepared.classes.representatives) > 1 or len(prepared.programs) > 1 or prepared.allocators:
        return False
    (priced,), plan = prepared.programs, prepared.plan
    return priced.behind is None and priced.recorded is None and not (plan.has_offload or plan.has_messages)


def serial_times(prepared: Prepared) -> SerialTimes:
    """The times of the rank of a job that `is_one_rank`, if its kernels and collectives ran one after the
    other.

    `now` is the clock's time when the host last went on. An op that the host issues ahead of it starts a
    difference later, as on a clock.
    """
    (priced,), (kernel_seconds,) = prepared.programs, prepared.kernel_seconds
    fabric, (rank,) = prepared.fabric, prepared.classes.representatives
    transfers: dict[int, tuple[float, float]] = {}  # by the id of their work, seconds of latency and sending
    count, nothing = priced.num_ops, array("d", [math.nan])
    issue, ended = nothing * count, nothing * count
    now = time = last = 0.0
    works = priced.program.once(op_columns).work
    rows = zip(works, priced.host_seconds, kernel_seconds, priced.host_waits, strict=True)
    for number, (work, host, seconds, waits) in enumerate(rows):
        for other in waits:
            end = ended[other]
            if end > time:
                time = end
            if end > now and works[other] is not None:  # the host is blocked
                now = end
        time += host
        issue[number] = time
        if work is None:
            ended[number] = time
            continue
        start = last if last > now else now
        if time > start:
            start += time - start
        if seconds is None:
            assert isinstance(work, Collective)
            known = transfers.get(id(work))
            if known is None:
                transfer = fabric.transfer(work, fabric.communicator_of(work.group, rank))
                known = transfers[id(work)] = _seconds_alone(fabric.pool, transfer)
            last = start + known[0] + known[1]
        else:
            last = start + seconds
        ended[number] = last
    before = count - len(prepared.plan.program.ops)
    return SerialTimes(issue, ended, max(time, last) - max(ended[:before], default=0.0))


def _seconds_alone(pool: FluidPool, transfer: Transfer) -> tuple[float, float]:
    """Seconds of latency, and of sending while no other transfer runs and no kernels on its GPUs."""
    latency = max(transfer.latency_seconds, 0.0)
    if transfer.size <= 0 or not transfer.profile.usage:
        return latency, 0.0
    return latency, transfer.size / pool.rate_alone(transfer.profile)
