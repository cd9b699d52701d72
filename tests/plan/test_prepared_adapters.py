"""QLoRA as PEFT prepares it: what is not in 4 bits is fp32, and so is the residual stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import peak_bytes
from zsim.plan.memory.tensors import plan_peaks
from zsim.plan.workload.issued_work import kernels_of
from zsim.plan.workload.workload import ModuleCall, make_workload
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

SMALL: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
# Elements of the adapters of rank 8 on all products, of all products of a block, and of embedding and head.
TRAINED, PRODUCTS, ENDS = 65_536, 589_824, 2 * 1000 * 256
NORMS = 5 * 256


def job(model: dict[str, Any] = SMALL, *, lora: dict[str, Any] | None = None, **training: Any) -> Any:
    table = {
        "sequence_length": 64, "micro_batch_size": 2, "precision": "bf16", "attention": "flash",
        "activation_checkpointing": "full",
        "lora": {"rank": 8, "targets": "all-linear", **(lora or {})}, **training,
    }  # fmt: skip
    given: dict[str, Any] = {"model": model, "cluster": "dgx-h100", "gpus": 1}
    return resolve(Experiment(**given, training=table, strategy={"kind": "ddp"}))


def quantised(preparation: str, **changes: Any) -> Any:
    lora = {"quantized": "nf4", "preparation": preparation, **changes.pop("lora", {})}
    return job(lora=lora, **changes)


def calls(found: Any) -> list[ModuleCall]:
    """All modules but head and loss, with everything kept."""
    workload = make_workload(found.model, replace(found.training, activation_checkpointing="none"))
    every = [call for segment in workload.segments for call in segment.calls]
    return [call for call in every if not call.name.startswith(("lm_head", "loss"))]


@pytest.mark.parametrize(
    ("preparation", "measured", "positions"),
    [("peft", 3_738_112, 2 * 64 * 64 * 4), ("none", 2_542_080, 2 * 64 * 64 * 2)],
)
def test_what_autograd_keeps_is_what_it_keeps_of_peft(
    preparation: str, measured: int, positions: int
) -> None:
    """Bytes of the tensors that autograd saves of transformers 5.24's Llama under torch.autocast, with
    bitsandbytes 0.50.2 and PEFT 0.21.2, by `saved_tensors_hooks` on a CPU (sdpa; PEFT told that autocast is
    on, of which it asks CUDA alone), parameters left out. zsim has casts of the adapters' weights elsewhere,
    2 bytes each, and leaves out cosines and sines and the statistics of five norms (512 bytes each)."""
    left_out = 2 * TRAINED + positions + 5 * 512
    assert sum(call.work.saved_bytes for call in calls(quantised(preparation))) + left_out == measured


def test_dropout_keeps_a_mask_and_its_output() -> None:
    """Seven masks of a byte in each of two blocks: 128 tokens of 6 x 256 + 512; adapters of k, v and up keep
    rows of their own in both cases."""
    more = {
        preparation: sum(
            call.work.saved_bytes * sign
            for sign, dropout in ((1, 0.05), (-1, 0.0))
            for call in calls(quantised(preparation, lora={"dropout": dropout}))
        )
        for preparation in ("peft", "none")
    }
    masks = 2 * 128 * (6 * 256 + 512)
    assert more == {"peft": masks, "none": masks + 2 * 128 * 3 * 256 * 2}


@pytest.mark.parametrize(("preparation", "element_bytes"), [("peft", 4), ("none", 2)])
def test_embedding_head_and_norms_are_in_fp32(preparation: str, element_bytes: int) -> None:
    """Four bits of 589,824 products' weights a block: as in test_four_bit_weights_and_their_scales."""
    resident = make_plan(quantised(preparation)).programs[0].resident
    sizes = (65_536, 32_768, 32_768, 65_536, 131_072, 131_072, 131_072)
    assert sum(sizes) == PRODUCTS
    packed = 2 * sum(n // 2 + n // 64 + 4 * -(-(n // 64) // 256) + 1092 for n in sizes)
    rest = element_bytes * (ENDS + NORMS) + 4 * TRAINED
    assert sum(one.bytes for one in resident if one.category == "parameters") == packed + rest


def test_the_head_is_cast_for_its_product_and_kept_for_its_backward() -> None:
    """256,000 elements in 16 bits, beside the casts of all adapters, which autocast caches while it is on:
    2 bytes of 65,536. Unprepared the head is in 16 bits as it is; gradients of a whole block's adapters are
    what is most then."""
    assert plan_peaks(make_plan(quantised("peft")))["buffers"] == 2 * 256_000 + 2 * TRAINED
    assert plan_peaks(make_plan(quantised("none")))["buffers"] < 2 * 256_000


def test_a_tied_head_is_cast_too() -> None:
    tied = {**SMALL, "tie_word_embeddings": True}
    lora = {"quantized": "nf4", "preparation": "peft"}
    assert plan_peaks(make_plan(job(tied, lora=lora)))["buffers"] == 2 * 256_000 + 2 * TRAINED


def test_casts_of_frozen_weights_are_not_cached() -> None:
    """Frozen weights in fp32 under checkpointing: autocast caches only what is trained. Most are there while
    a block is run again, which keeps its own: 2 bytes of 589,824 and of half the adapters, and of one
    gradient of 8 x 256. All blocks' and the head's would be 3,002,368."""
    found = job(frozen_dtype="fp32")
    assert plan_peaks(make_plan(found))["buffers"] == 2 * (PRODUCTS + TRAINED // 2) + 2 * 8 * 256


def test_a_product_in_4_bits_casts_what_it_reads_and_makes() -> None:
    """gate_proj on 128 tokens, 256 to 512: 6 bytes an element of its input, 6 and PEFT's copy of 8 of its
    output; in backward 6 of both gradients. o_proj reads 16 bits from the core of attention."""
    found = {}
    for preparation in ("peft", "none"):
        of_block = {call.name: call.work for call in calls(quantised(preparation))}
        for part in ("mlp.gate_proj", "self_attn.o_proj"):
            work = of_block[f"model.layers.1.{part}.base_layer"]
            found[preparation, part] = [
                sum(one.hbm_bytes for one in kernels_of(way).kernels) for way in (work.forward, work.backward)
            ]
    gate = [
        a - b for a, b in zip(found["peft", "mlp.gate_proj"], found["none", "mlp.gate_proj"], strict=True)
    ]
    assert gate == [128 * (256 * 6 + 512 * 14), 128 * (256 + 512) * 6]
    assert found["peft", "self_attn.o_proj"] == found["none", "self_attn.o_proj"]


@pytest.mark.parametrize(("preparation", "element_bytes"), [("peft", 4), ("none", 2)])
def test_a_checkpoint_keeps_the_stream_as_it_is(preparation: str, element_bytes: int) -> None:
    """The input of a block, 128 tokens of 256."""
    found = quantised(preparation)
    block = make_workload(found.model, found.training).segments[1]
    assert block.input_bytes == 128 * 256 * element_bytes


QWEN: dict[str, Any] = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 151936, "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"rank": 8}, 13.72e9),
        ({"rank": 64}, 16.01e9),
        ({"rank": 8, "preparation": "none"}, 8.43e9),
    ],
)
def test_qlora_of_a_dense_7b_takes_what_people_saw(changes: dict[str, Any], reported: float) -> None:
    """Qwen1.5-7B on a V100, 1,024 tokens, 16 micro-batches (unslothai/unsloth pull request 428). Weights:
    products 32 x (4 x 4096^2 + 3 x 4096 x 11008) = 6.476 billion in 4 bits, 3.24 GB and 0.10 of scales;
    embedding and head 1.245 billion, in fp32 4.98 GB, and the head's cast 1.24. Figures of unsloth's own
    kernels are those without preparation, with its loss and fused norms. What remains is 6 % at most."""
    training = {"liger": True, "cross_entropy": "unsloth"} if "preparation" in changes else {}
    lora = {"targets": "all-linear", "dropout": 0.05, "quantized": "nf4", **changes}
    table = {
        "sequence_length": 1024, "micro_batch_size": 1, "gradient_accumulation_steps": 16,
        "precision": "fp16", "activation_checkpointing": "full", "lora": lora, **training,
    }  # fmt: skip
    given: dict[str, Any] = {
        "model": QWEN,
        "cluster": "dgx-2",
        "gpus": 1,
        "training": table,
        "strategy": {"kind": "ddp"},
    }
    found = resolve(Experiment(**given))
    in_use = peak_bytes(found, make_plan(found))
    assert abs(in_use / reported - 1) < 0.06
