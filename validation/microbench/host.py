"""Host time for issuing work, and the time of an optimizer update on the host or the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn

from validation.microbench.bench import Benchmark
from validation.microbench.kernels import Prepared, clock
from validation.tracing import Tracer
from zsim.comparison.plan_check import Call

CALLS = 1000


def optimizers(device: str, quick: bool) -> Iterator[Benchmark]:
    """AdamW, 28 bytes per parameter (reads p, g, m, v; writes p, m, v); on a GPU also the CPU's AdamW.

    On the CPU with one thread, like a rank of the recorded runs, and with all threads.
    """
    for place in dict.fromkeys((device, "cpu")):
        for threads in sorted({1, torch.get_num_threads()}) if place == "cpu" else (1,):
            largest = 10**8 if place == "cuda" else 10**7
            for numel in (10**6,) if quick else (10**4, 10**5, 10**6, largest):
                for kind in ("fused", "foreach", "loop"):

                    def prepare(place: str = place, numel: int = numel, kind: str = kind) -> Prepared:
                        parameter = nn.Parameter(torch.randn(numel, device=place))
                        parameter.grad = torch.randn(numel, device=place)
                        return torch.optim.AdamW(
                            [parameter], fused=kind == "fused", foreach=kind == "foreach"
                        ).step

                    parameters = {"kind": kind, "place": place, "numel": numel, "threads": threads}
                    work = {"bytes": 28.0 * numel, "elements": float(numel)}
                    yield Benchmark("adamw", parameters, prepare, work, clock(place), threads)


def host(device: str, quick: bool) -> Iterator[Benchmark]:
    """A thousand repetitions each of: kernel launches, their backward, modules, hooks, trace events."""
    prepared: dict[str, Callable[[], Prepared]] = {
        "launch": lambda: launch(device),
        "autograd": lambda: autograd(device),
        "module_call": lambda: module_call(hooks=0),
        "module_call_with_4_hooks": lambda: module_call(hooks=4),
        "linear_forward": lambda: linear(device, backward=False),
        "linear_forward_and_backward": lambda: linear(device, backward=True),
        "trace_event": trace_event,
    }
    if device != "cpu":
        prepared["launch_and_synchronize"] = lambda: launch(device, synchronize=True)
    for name, prepare in prepared.items():
        yield Benchmark("host", {"what": name}, prepare, {"calls": float(CALLS)})


def times(work: Callable[[], Any]) -> Prepared:
    def run() -> None:
        for _ in range(CALLS):
            work()

    return run


def launch(device: str, synchronize: bool = False) -> Prepared:
    """A kernel on one element: the host's time to launch, and with `synchronize` the round trip."""
    x = torch.zeros(1, device=device)

    def once() -> None:
        x.add_(1)
        torch.cuda.synchronize()

    return times(once if synchronize else lambda: x.add_(1))


def autograd(device: str) -> Prepared:
    """Record a chain of a thousand operators, and run it backward."""
    x = torch.zeros(1, device=device, requires_grad=True)

    def run() -> None:
        y = x
        for _ in range(CALLS):
            y = y + 1
        y.backward()

    return run


def module_call(hooks: int) -> Prepared:
    layer, x = nn.Identity(), torch.zeros(1)
    for _ in range(hooks // 2):
        layer.register_forward_pre_hook(lambda module, args: None)
        layer.register_forward_hook(lambda module, args, output: None)
    return times(lambda: layer(x))


def linear(device: str, backward: bool) -> Prepared:
    """A linear layer too small for its kernel to take time: module, dispatch, autograd."""
    layer, x = nn.Linear(1, 1, bias=False, device=device), torch.zeros(1, 1, device=device)
    upstream = torch.ones(1, 1, device=device)
    return times((lambda: layer(x).backward(upstream)) if backward else (lambda: layer(x)))


def trace_event() -> Prepared:
    call = Call("all_gather", 1, "fp32", 2)

    def run() -> None:
        tracer = Tracer()
        for _ in range(CALLS):
            tracer.collective(call).finished()

    return run
