"""Bytes that Megatron-Core keeps of a layer of experts that runs once more, on the CPU.

    python -m validation.recomputed_experts FOLDER

FOLDER holds Megatron-Core (`pip install --target FOLDER --no-deps megatron-core==0.16.1`). One rank, a norm
and a layer of 8 experts (Megatron's own modules, one after the other, its fused SwiGLU), with and without
shared ones: per list of `--recompute-modules` the bytes that saved-tensor hooks see, parameters and the
norm's input left out, as they are after forward; and whether backward ran.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from validation.checkpoints.megatron_core import no_gpu
from validation.megatron_host import load_from

SEQUENCE, SEQUENCES, HIDDEN, EXPERTS, WIDTH, SHARED = 128, 2, 256, 8, 128, 192
CASES: tuple[tuple[str, ...], ...] = ((), ("moe",), ("moe", "layernorm"), ("shared_experts",))


def _core(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def _prepare(folder: Path) -> None:
    """Megatron-Core among stand-ins for CUDA's random numbers and for Transformer Engine's checkpoints."""
    load_from(folder)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    _core("parallel_state").initialize_model_parallel(1, 1)
    _core("transformer.moe.moe_utils").te_general_gemm = None
    checkpoints = _core("tensor_parallel.random")
    checkpoints._get_all_rng_states = lambda *_: (None, None, None)
    checkpoints._set_all_rng_states = lambda *_: None
    nothing = lambda *_, **__: contextlib.nullcontext()  # noqa: E731
    checkpoints._fork_rng = checkpoints.activation_recompute_forward = checkpoints.fp8_autocast = nothing
    checkpoints.FP8GlobalStateManager = type(
        "Fp8",
        (),
        {"is_fp8_enabled": staticmethod(lambda: False), "get_fp8_recipe": staticmethod(lambda: None)},
    )


def _layer(modules: tuple[str, ...], shared: int | None) -> Any:
    again = {"recompute_granularity": "selective", "recompute_modules": list(modules)} if modules else {}
    config = _core("transformer.transformer_config").TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=2 * HIDDEN,
        add_bias_linear=False, gated_linear_unit=True, activation_func=nn.functional.silu, bf16=True,
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, use_cpu_initialization=True,
        normalization="RMSNorm", gradient_accumulation_fusion=False, masked_softmax_fusion=False,
        bias_activation_fusion=True, num_moe_experts=EXPERTS, moe_router_topk=2, moe_ffn_hidden_size=WIDTH,
        moe_token_dispatcher_type="alltoall", moe_shared_expert_intermediate_size=shared,
        hidden_dropout=0.0, **again,
    )  # fmt: skip
    spec = _core("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(
        num_experts=EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm"
    )
    model = _core("models.gpt").GPTModel(
        config, spec, vocab_size=512, max_sequence_length=SEQUENCE, position_embedding_type="rope"
    )
    return model.bfloat16().decoder.layers[0].train()


def kept(modules: tuple[str, ...], shared: int | None) -> tuple[int, bool]:
    """Bytes that are kept from forward to backward, and whether the experts got gradients."""
    layer = _layer(modules, shared)
    given = torch.randn(SEQUENCE, SEQUENCES, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with no_gpu():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = layer._forward_mlp(given)
        own = {one.untyped_storage().data_ptr() for one in (given, *layer.parameters())}
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in saved}
        count = sum(size for pointer, size in storages.items() if pointer not in own)
        (output[0] if isinstance(output, tuple) else output).float().sum().backward()
    return count, layer.mlp.experts.local_experts[0].linear_fc1.weight.grad is not None


def main(folder: Path) -> None:
    """Print what is kept, by case."""
    _prepare(folder)
    with no_gpu():
        for shared in (None, SHARED):
            for modules in CASES:
                print(
                    f"shared {shared or 0}, {', '.join(modules) or 'none'}:",
                    *kept(modules, shared),
                    flush=True,
                )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
