"""Products of experts as timed on B200 and A100."""

from __future__ import annotations

from collections import defaultdict

import pytest

from validation.curves.grouped import Timed, host_seconds_per_expert, read_grouped
from zsim.cost.rates.gpu import kernel_seconds
from zsim.specs.cluster.files import load_gpu


def test_calls_on_b200_take_together_what_was_timed() -> None:
    """Within 10 %, but for weights' gradients in bf16: there short sums of 128 to 1,232 rows are said to take
    half as long again."""
    b200 = load_gpu("b200-sxm-180gb")
    said: dict[str, float] = defaultdict(float)
    timed: dict[str, float] = defaultdict(float)
    for call in read_grouped():
        if call.gpu == b200.name and not (call.product == "weight" and call.gradient == "bf16"):
            said[call.product] += kernel_seconds(call.kernel, b200)
            timed[call.product] += call.seconds
    assert set(timed) == {"forward", "input", "weight"}
    for product, seconds in timed.items():
        assert said[product] == pytest.approx(seconds, rel=0.10), product


def test_many_experts_take_the_host_s_launches() -> None:
    """Ten calls, of 10 to 19 us for each of 80 experts: the quickest is the tenth. Calls of few experts and
    of weights' gradients say nothing of the host."""
    calls = [Timed("gpu", 80, 128, 64, 64, "input", "bf16", 80e-6 * (10 + i)) for i in range(10)]
    others = [
        Timed("gpu", 8, 128, 64, 64, "input", "bf16", 8e-6),
        Timed("gpu", 80, 128, 64, 64, "weight", "bf16", 80e-6),
    ]
    assert host_seconds_per_expert([*calls, *others]) == pytest.approx(10e-6)
    known = [call for call in read_grouped() if call.gpu == "b200-sxm-180gb"]
    assert 8e-6 < host_seconds_per_expert(known) < 10e-6
