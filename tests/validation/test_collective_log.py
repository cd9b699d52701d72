"""What the log writes down of other people's collectives: when they were called, and when they were over."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")

import torch.distributed as dist  # noqa: E402

from validation import collective_log, tracing  # noqa: E402
from validation.collective_log import CollectiveLog, blocks  # noqa: E402
from validation.oracle.run import fake_world  # noqa: E402
from validation.tracing import Tracer  # noqa: E402
from zsim.comparison.plan_check import Call  # noqa: E402

pytestmark = pytest.mark.torch


def test_a_call_that_blocks_is_stamped_before_it_and_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock ticks once per look: 1 before the operator, and more when the span is begun and ended."""
    ticks, tensor = itertools.count(1), torch.zeros(8)
    for module in (collective_log, tracing):
        monkeypatch.setattr(module, "now", lambda: next(ticks))
    tracer = Tracer()
    with fake_world(4), CollectiveLog(tracer) as log:
        dist.all_reduce(tensor)
    (event,) = tracer.events
    assert event["issue_ns"] == 1
    assert event["done_ns"] > 1
    assert (event["op"], event["bytes"], event["group"], event["stride"]) == ("all_reduce", 32, 4, 1)
    assert [call.kind for call in log.calls] == ["all_reduce"]


@pytest.mark.parametrize("is_async", [True, False])
def test_who_waits_for_a_call_is_told_by_the_operators_own_argument(is_async: bool) -> None:
    operator = torch.ops.c10d._reduce_scatter_base_.default
    assert blocks(operator, ("output", "input", "group", "sum", is_async)) is not is_async
    assert not blocks(operator, ("output", "input"))
    assert not blocks(torch.ops.aten.add.Tensor, ("a", "b"))


class LambdaWork:
    """gloo's native reduce-scatter: no future, and what waits runs its second half."""

    def __init__(self) -> None:
        self.waits = 0

    def get_future(self) -> None:
        raise RuntimeError("Work::getFuture not implemented.")

    def wait(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_call_without_a_future_has_an_end_where_its_caller_waits(is_blocking: bool) -> None:
    tracer, work = Tracer(), LambdaWork()
    call = Call("reduce_scatter", 64, "fp32", 2, 1)
    tracer.collective(call).track(work, is_blocking=is_blocking)
    (event,) = tracer.events
    assert ("done_ns" in event, work.waits) == (is_blocking, int(is_blocking))
