"""The current speed of this core: products and passes over memory, of known size.

Cores are shared with other machines' work, and two virtual ones may be one: the same product has taken 30 to
40 ms within hours here, and one step half as long again as the next. So predictions of a run scale the
microbenchmarks' results by these measurements, made between its steps on all ranks at once."""

from __future__ import annotations

import time

import torch

WIDTH, NUM_PRODUCTS = 512, 12
ELEMENTS, NUM_ADDITIONS = 2**24, 4  # larger than any cache


class Probe:
    """A call measures the thread seconds of (one product of 512 x 512 x 512 in fp32, one addition of 64 MiB
    tensors)."""

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
