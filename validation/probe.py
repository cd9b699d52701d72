"""How fast this core is just now: products and passes over memory, of known size.

Cores are shared with other machines' work, and two virtual ones may be one: the same product has taken 30
to 40 ms within hours here, and one step half as long again as the next. Predictions of a run therefore scale
what microbenchmarks said by these, timed between its steps on all ranks at once.
"""

from __future__ import annotations

import time

import torch

WIDTH, NUM_PRODUCTS = 512, 12
ELEMENTS, NUM_ADDITIONS = 2**24, 4  # no cache holds them


class Probe:
    """Call it for thread seconds of one product (512 x 512 x 512, fp32) and one addition (64 MiB each)."""

    def __init__(self, device: str) -> None:
        self.is_on = device == "cpu"
        if self.is_on:
            self.left, self.right = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
            self.first, self.second, self.sum = (torch.randn(ELEMENTS) for _ in range(3))

    def __call__(self) -> tuple[float, float]:
        if not self.is_on:
            return 0.0, 0.0
        start = time.thread_time()
        for _ in range(NUM_PRODUCTS):
            torch.mm(self.left, self.right.t())
        middle = time.thread_time()
        for _ in range(NUM_ADDITIONS):
            torch.add(self.first, self.second, out=self.sum)
        end = time.thread_time()
        return (middle - start) / NUM_PRODUCTS, (end - middle) / NUM_ADDITIONS
