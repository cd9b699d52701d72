"""`python -m validation.deepspeed_calls.pipeline`: what DeepSpeed's PipelineEngine sends and reduces.

A Llama as a PipelineModule on CPU ranks (gloo), its collectives and messages of one steady step on every
rank, in order. The layers are whole on every rank also where the mesh has a model axis: there the engine cuts
its messages all the same.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from validation.collective_log import CollectiveLog
from validation.deepspeed_calls.recording import options_of, write_cases
from validation.examples import make_batch
from validation.launch import run
from validation.llama import DecoderLayer, LlamaShape, RMSNorm, RotaryEmbedding

SHAPE = LlamaShape(64, 128, 6, 4, 4, 256)
LENGTH, MICRO_BATCHES = 16, 4
BF16 = {"bf16": {"enabled": True}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
SMALL = {"reduce_bucket_size": 40_000}
WHOLE = {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}

# name: (pipeline ranks, ranks of the model axis, tied, keys of the JSON)
CASES: dict[str, tuple[int, int, bool, dict[str, Any]]] = {
    "zero 0, fp32": (2, 1, False, {"zero_optimization": {"stage": 0}, "gradient_clipping": 1.0}),
    "zero 1, fp32": (2, 1, False, {"zero_optimization": {"stage": 1, **SMALL}, "gradient_clipping": 1.0}),
    "zero 1, bf16": (2, 1, False, {"zero_optimization": {"stage": 1}, **BF16}),
    "zero 1, bf16, tied": (2, 1, True, {"zero_optimization": {"stage": 1, **SMALL}, **BF16}),
    "zero 1, fp32 sums, tied": (2, 1, True, {"zero_optimization": {"stage": 1}, **BF16, **FP32_SUMS}),
    "4 stages": (4, 1, False, {"zero_optimization": {"stage": 1}, **BF16}),
    "parts": (2, 2, False, {"zero_optimization": {"stage": 1}, **BF16}),
    "parts, 3 stages": (3, 2, False, {"zero_optimization": {"stage": 1}, **BF16}),
    "whole messages": (2, 2, False, {"zero_optimization": {"stage": 1}, **BF16, **WHOLE}),
}


def world_size(stages: int, sharing: int) -> int:
    """Ranks of a case: two replicas of two stages, else one."""
    return max(4, stages * sharing)


class Block(nn.Module):
    """A decoder layer that makes its rotary positions itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = DecoderLayer(SHAPE, checkpointing=False, code="transformers")
        self.rotary = RotaryEmbedding(SHAPE)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x, *self.rotary(x))
        return out


def as_head(embedding: nn.Embedding, x: Tensor) -> Tensor:
    """The tied head."""
    return F.linear(x, embedding.weight)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in fp32."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def calls_of(rank: int, ranks: int, name: str) -> dict[str, Any]:
    """{"layers": of this rank's stage, "calls": (kind, bytes, dtype, ranks of the group, their distance)}."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(rank))
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    stages, sharing, is_tied, keys = CASES[name]
    torch.manual_seed(0)
    embedding = (nn.Embedding, SHAPE.vocab_size, SHAPE.hidden_size)
    head = LayerSpec(nn.Linear, SHAPE.hidden_size, SHAPE.vocab_size, bias=False)
    first = LayerSpec(*embedding)
    if is_tied:
        first = TiedLayerSpec("embed", *embedding)
        head = TiedLayerSpec("embed", *embedding, forward_fn=as_head)
    blocks = [LayerSpec(Block) for _ in range(SHAPE.num_hidden_layers)]
    replicas = ranks // (stages * sharing)
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=sharing, num_dp=replicas)
    layers = [first, *blocks, LayerSpec(RMSNorm, SHAPE.hidden_size), head]
    method = "type:Block" if sharing > 1 else "parameters"
    module = PipelineModule(layers, topology=topology, loss_fn=loss_of, partition_method=method)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        **keys,
    }  # fmt: skip
    adamw = partial(torch.optim.AdamW, lr=1e-3, foreach=False)
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=adamw(module.parameters()), config=config, dist_init_required=False
    )
    batches = (make_batch(number, 1, LENGTH, SHAPE.vocab_size) for number in range(3 * MICRO_BATCHES))
    for _ in range(2):
        engine.train_batch(batches)
    with CollectiveLog() as log:
        engine.train_batch(batches)
    blocks_here = sum(isinstance(layer, Block) for layer in module.forward_funcs)
    return {"layers": blocks_here, "calls": [call.wire for call in log.calls]}


def main(words: list[str]) -> int:
    options = options_of(words, "pipeline")
    found = {}
    for name, (stages, sharing, _, _) in CASES.items():
        if (options.only or "") in name:
            place = "validation.deepspeed_calls.pipeline:calls_of"
            found[name] = run(place, world_size(stages, sharing), (name,), timeout=300)
            print(name, [len(rank["calls"]) for rank in found[name]], file=sys.stderr, flush=True)
    if options.out is None:
        print(json.dumps(found, indent=1))
    else:
        write_cases(found, options.out, "pipeline")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
