"""What nanotron and InternEvo do beside fused kernels, by hand: 200 tokens in bf16."""

from __future__ import annotations

from typing import Any

from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations import BACKWARD, FORWARD
from zsim.specs.model.spec import Activation, Attention, Loss, Module, Norm
from zsim.specs.strategy.training import layer_kernel_sets, losses

ONE, TWO = (BatchShape(sequences=count, sequence_length=200 // count) for count in (1, 2))
LIGER, NANOTRON, INTERNEVO = (
    WorkOptions("bf16", "flash", liger=True, layers=layer_kernel_sets()[name])
    for name in ("torch", "nanotron", "internevo")
)


def costs(module: Module, options: WorkOptions, shape: BatchShape = ONE) -> tuple[Any, Any]:
    """(bytes, launches) of elementwise kernels, forward and backward."""
    found = []
    for kernels in (module.kernels(FORWARD, shape, options), module.kernels(BACKWARD, shape, options)):
        plain = [kernel for kernel in kernels if kernel.kind == "elementwise"]
        found.append((sum(one.hbm_bytes for one in plain), sum(one.launches for one in plain)))
    return found[0], found[1]


def test_nanotrons_gated_activation_is_eager_and_joins_the_halves_gradients() -> None:
    """2,000 elements of 2 bytes: silu 2 and product 3 tensors; backward product 6, silu 3, and 4 to join.
    Kept are the gate, its silu and the other half; backward has both gradients, and the two joined."""
    module = Module("act", Activation(10, True, "silu"))
    assert costs(module, NANOTRON) == ((5 * 4_000, 2), (13 * 4_000, 4))
    assert costs(module, LIGER) == ((3 * 4_000, 1), (5 * 4_000, 1))
    assert [module.saved_bytes(ONE, options) for options in (NANOTRON, LIGER)] == [3 * 4_000, 2 * 4_000]
    assert module.backward_extra_bytes(ONE, NANOTRON) == 4 * 4_000


def test_nanotron_copies_queries_keys_and_values() -> None:
    """4 heads of 8 and 2 of keys and values: i = 64, g = 32, o = 32 elements a token, 200 tokens of 2 bytes.
    Forward 2 i + 4 g = 256, backward 2 i + 2 g = 192; with two sequences 2 o and 4 o more."""
    module = Module("core", Attention(4, 2, 8, 8, rotary=False))
    assert costs(module, LIGER) == ((0, 0), (0, 0))
    assert costs(module, NANOTRON) == ((256 * 400, 11), (192 * 400, 2))
    assert costs(module, NANOTRON, TWO) == (((256 + 64) * 400, 12), ((192 + 128) * 400, 4))


def test_internevos_norms_are_in_fp32_and_run_twice() -> None:
    """2,000 elements: cast 6 and norm 10 bytes; backward these again, 16, gradients of the input 16 and of
    the weight 6, and the cast 6. Liger's move 4 and 6. Both keep the stream."""
    module = Module("norm", Norm(10, "rms"))
    assert [part[0] / 2_000 for part in costs(module, INTERNEVO)] == [16, 44]
    assert [part[0] / 2_000 for part in costs(module, LIGER)] == [4, 6]
    assert [module.saved_bytes(ONE, options) for options in (INTERNEVO, LIGER)] == [4_000, 4_000]


def test_megatrons_fused_loss_keeps_the_softmax_and_has_fp32_logits_beside_it() -> None:
    """200 tokens of 50 logits: forward 6, 12 and 8 bytes in three kernels, unfused 38; backward 10. Kept are
    4, forward has 2 of the logits and 4 of the fp32 logits besides, backward the 16-bit gradient."""
    module = Module("loss", Loss(50))
    found = {}
    for kind in ("megatron", "megatron-fused"):
        options = WorkOptions("bf16", "flash", loss=losses()[kind])
        forward, backward = (module.kernels(in_pass, ONE, options)[0] for in_pass in (FORWARD, BACKWARD))
        kept = module.saved_bytes(ONE, options)
        extra = module.forward_extra_bytes(ONE, options), module.backward_extra_bytes(ONE, options)
        found[kind] = [size / 10_000 for size in (forward.hbm_bytes, backward.hbm_bytes, kept, *extra)]
    assert found == {"megatron": [38, 14, 4, 2, 2], "megatron-fused": [26, 10, 4, 6, 2]}
