"""States and updates of the optimizers, against what their libraries allocate and compute."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.cost.optimizers import (
    STATES,
    UpdatedTensor,
    state_tensors,
    update_kernels,
)
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.strategy.optimizers import OPTIMIZERS, optimizer_of


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        # bitsandbytes 0.50.2 on a CPU, bytes of the tensors in `optimizer.state[p]` without the shared maps
        ("adamw-8bit", (4095,), 32_760),
        ("adamw-8bit", (4096,), 8_320),
        ("adamw-8bit", (10_000,), 20_320),
        ("lion-8bit", (4095,), 16_380),
        ("lion-8bit", (4096,), 4_160),
        ("lion-8bit", (10_000,), 10_160),
        ("paged-adamw", (10_000,), 80_000),
        ("paged-adamw-8bit", (10_000,), 20_320),
        # torchao 0.18.0: `_new_buffer` makes codes, scales and (8 and 4 bits) a map for each of two moments
        ("adamw-8bit-torchao", (4096,), 2 * (4096 + 16 * 4 + 256 * 4)),
        ("adamw-4bit-torchao", (4096,), 2 * (2048 + 32 * 4 + 16 * 4)),
        ("adamw-fp8-torchao", (10_240,), 2 * (10_240 + 40 * 4)),
        ("adamw-8bit-torchao", (10_000,), 80_000),
        ("adamw-8bit-torchao", (4095,), 8 * 4095),
    ],
)
def test_states_have_the_bytes_that_the_library_allocates(
    name: str, shape: tuple[int, ...], expected: int
) -> None:
    assert sum(state_tensors(name, [UpdatedTensor(shape)])) == expected


def test_states_equal_those_of_torch_on_a_cpu() -> None:
    """One step of each of torch's optimizers on a matrix and a vector; the step counter (a scalar) is not
    counted."""
    torch = pytest.importorskip("torch")
    made: dict[str, Any] = {
        "adamw": lambda tensors: torch.optim.AdamW(tensors),
        "sgd": lambda tensors: torch.optim.SGD(tensors),
        "sgd_momentum": lambda tensors: torch.optim.SGD(tensors, momentum=0.9),
        "adagrad": lambda tensors: torch.optim.Adagrad(tensors),
        "adafactor": lambda tensors: torch.optim.Adafactor(tensors),
        "muon": lambda tensors: torch.optim.Muon(tensors[:1]),
    }
    shapes = [(48, 80), (80,)]
    for name, make in made.items():
        tensors = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        for tensor in tensors:
            tensor.grad = torch.ones_like(tensor)
        optimizer = make(tensors)
        optimizer.step()
        states = [state for one in optimizer.state.values() for state in one.values()]
        counted = sum(s.numel() * 4 for s in states if torch.is_tensor(s) and s.dim())
        count = 1 if name == "muon" else 2
        parts = [UpdatedTensor(shape, shape, is_matrix=len(shape) == 2) for shape in shapes[:count]]
        assert sum(state_tensors(name, parts)) == counted, name


def test_muon_keeps_one_moment_of_a_matrix_and_two_of_the_rest() -> None:
    parts = [
        UpdatedTensor((64, 32), (64, 32), is_matrix=True),
        UpdatedTensor((64, 32), (64, 32)),
        UpdatedTensor((64,)),
    ]
    assert state_tensors("muon", parts) == (8192, 8192, 8192, 256, 256)


def test_newton_schulz_counts_what_torch_computes() -> None:
    """torch's FlopCounterMode counts the products of `torch.optim.Muon`."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    for shape in ((24, 56), (56, 24), (32, 32)):
        tensor = torch.nn.Parameter(torch.randn(shape))
        tensor.grad = torch.randn(shape)
        with FlopCounterMode(display=False) as counter:
            torch.optim.Muon([tensor]).step()
        kernels = update_kernels("muon", [UpdatedTensor(shape, shape, is_matrix=True)])
        assert sum(kernel.flops for kernel in kernels) == counter.get_total_flops()


def test_an_update_in_one_pass_moves_weights_gradient_and_states() -> None:
    """AdamW in 8 bits reads and writes 4 bytes of weight and 2 of moments with 2 x 4 / 256 bytes of maxima,
    and reads 4 of gradient: 8 + 4 + 2 (2 + 1/32) bytes a parameter. Fused AdamW moves 28."""
    numel = 2**20
    (kernel,) = update_kernels("adamw-8bit", [UpdatedTensor((numel,))])
    assert kernel.hbm_bytes == numel * (12 + 2 * (2 + 1 / 32))
    (fused,) = update_kernels("adamw", [UpdatedTensor((numel,))])
    assert fused.hbm_bytes == 28 * numel
    (half,) = update_kernels("adamw-bf16", [UpdatedTensor((numel,))])
    assert half.hbm_bytes == 20 * numel


def test_every_optimizer_has_states() -> None:
    assert set(STATES) == set(OPTIMIZERS)


def test_a_name_that_is_none_gets_the_nearest_and_a_known_one_its_reason() -> None:
    with pytest.raises(InputError, match="did you mean 'adafactor'"):
        optimizer_of("adafctor")
    with pytest.raises(NotSimulatedError, match="eigenbases"):
        optimizer_of("SOAP")
