"""How fast this core is just now: a product and a pass over memory, of known size.

Cores are shared with other machines' work, and two virtual ones may be one: the same product has taken 30
to 40 ms within hours here. Predictions of a run therefore scale what microbenchmarks said by these, timed
between its steps on all ranks at once.
"""

from __future__ import annotations

import time

import torch

WIDTH, ELEMENTS, REPEATS = 512, 2**21, 12


class Probe:
    """Call it for thread seconds of one product (512 x 512 x 512, fp32) and one addition (8 MiB each)."""

    def __init__(self, device: str) -> None:
        self.is_on = device == "cpu"
        self.left, self.right = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
        self.first, self.second, self.sum = (torch.randn(ELEMENTS) for _ in range(3))

    def __call__(self) -> tuple[float, float]:
        if not self.is_on:
            return 0.0, 0.0
        start = time.thread_time()
        for _ in range(REPEATS):
            torch.mm(self.left, self.right.t())
        middle = time.thread_time()
        for _ in range(REPEATS):
            torch.add(self.first, self.second, out=self.sum)
        return (middle - start) / REPEATS, (time.thread_time() - middle) / REPEATS
