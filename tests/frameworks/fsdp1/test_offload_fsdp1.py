"""FSDP1's CPUOffload: what crosses PCIe, counted by hand; when the host waits; what stays where."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.errors import InputError
from zsim.plan.checks import check_plan
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, Copy, HostWork, Plan
from zsim.specs.experiment.resolve import resolve

MODEL = {
    "model_type": "gpt2", "n_embd": 1024, "n_layer": 2, "n_head": 16, "n_positions": 128, "vocab_size": 4096,
}  # fmt: skip
# As in test_offload_bytes: two blocks of 12,596,224, the rest 4,327,424; a quarter each, and no padding.
NUMEL = 29_519_872
BLOCK, ROOT = 12_596_224 // 4, (NUMEL - 2 * 12_596_224) // 4
SHARD = NUMEL // 4


def plan_of(
    micro_batches: int = 1, *, clipping: float = 0.0, frozen: tuple[str, ...] = (), **strategy: Any
) -> Plan:
    training = {
        "sequence_length": 128, "gradient_accumulation_steps": micro_batches, "gradient_clipping": clipping,
        "frozen": list(frozen),
    }  # fmt: skip
    experiment = zsim.Experiment(
        model=MODEL, cluster="dgx-h100", gpus=4, training=training,
        strategy={"kind": "fsdp1", "cpu_offload": True, **strategy},
    )  # fmt: skip
    return make_plan(resolve(experiment))


def copied(plan: Plan, direction: str) -> int:
    return sum(o.work.bytes for o in plan.ops if isinstance(o.work, Copy) and o.work.direction == direction)


def test_every_unshard_brings_the_fp32_shard_and_gradients_go_back_once() -> None:
    """Blocks are unsharded for forward and backward, and so, though it is still whole, is the root."""
    plan = plan_of()
    assert copied(plan, "h2d") == 4 * (2 * 2 * BLOCK + 2 * ROOT)
    assert copied(plan, "d2h") == 4 * SHARD
    assert [op.work.bytes for op in plan.ops if isinstance(op.work, HostWork)] == [28 * SHARD]


def test_a_frozen_unit_is_brought_but_not_updated() -> None:
    """The first block, behind the embedding, whose gradient must pass it."""
    plan = plan_of(clipping=1.0, frozen=("*.h.0.*",))
    trained = SHARD - BLOCK
    assert copied(plan, "d2h") == 4 * trained + 4  # and the gradients' norm
    work = {op.name: op.work.bytes for op in plan.ops if isinstance(op.work, HostWork)}
    assert work == {
        "gradient norm": 4 * trained,
        "clip gradients": 8 * trained,
        "optimizer step": 28 * trained,
    }
    check_plan(plan)


def test_with_no_sync_only_the_last_micro_batch_sends_gradients() -> None:
    """Parameters stay whole inside no_sync, but their shards are brought at every unshard all the same."""
    assert copied(plan_of(2, no_sync=True), "d2h") == 4 * SHARD


def test_gradients_that_would_be_lost_are_an_error() -> None:
    with pytest.raises(InputError, match="keeps only the newest reduced gradient; expected no_sync = true"):
        plan_of(2)


def test_the_host_waits_for_the_gradients_before_the_optimizer() -> None:
    plan = plan_of()
    copies = [n for n, op in enumerate(plan.ops) if isinstance(op.work, Copy) and op.work.direction == "d2h"]
    update = next(n for n, op in enumerate(plan.ops) if isinstance(op.work, HostWork))
    waited = {wait for op in plan.ops[: update + 1] for wait in op.host_waits}
    assert max(copies) in waited


@pytest.mark.parametrize(
    ("sharding", "groups"), [("FULL_SHARD", ["shard"]), ("HYBRID_SHARD", ["shard"]), ("NO_SHARD", [])]
)
def test_norms_of_host_gradients_are_summed_on_the_gpu(sharding: str, groups: list[str]) -> None:
    """One fp32 number goes to the GPU, is all-reduced over the group that the units are sharded over, and
    comes back before the gradients are scaled; with NO_SHARD all ranks have the same norm."""
    strategy: dict[str, Any] = {"replicate": 2} if sharding == "HYBRID_SHARD" else {}
    plan = plan_of(clipping=1.0, sharding_strategy=sharding, **strategy)
    names = [op.name for op in plan.ops]
    first, last = names.index("gradient norm"), names.index("clip gradients")
    between = range(first + 1, last)
    works = [(plan.ops[number].stream, plan.ops[number].work) for number in between]
    reduced = [(work.bytes, work.group, stream) for stream, work in works if isinstance(work, Collective)]
    assert reduced == [(4, group, "compute") for group in groups]
    moved = [(work.direction, work.bytes) for _, work in works if isinstance(work, Copy)]
    assert moved == [("h2d", 4), ("d2h", 4)][: 2 * len(groups)]
    waited = {wait for op in plan.ops[first : last + 1] for wait in op.host_waits}
    assert {number for number in between if isinstance(plan.ops[number].work, Copy)} <= waited


def test_no_shards_copies_block() -> None:
    plan = plan_of(sharding_strategy="NO_SHARD")
    copies = {n for n, op in enumerate(plan.ops) if isinstance(op.work, Copy) and op.work.direction == "d2h"}
    assert copies <= {wait for op in plan.ops for wait in op.host_waits}
    assert copied(plan, "d2h") == 4 * NUMEL


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("param_dtype", ["bf16", "fp32"])
def test_everything_is_in_host_memory_between_steps(sharding: str, param_dtype: str) -> None:
    """Weights and gradients (4 bytes, pinned) and both moments (8); what the step takes it gives back."""
    replicas: dict[str, Any] = {"replicate": 2} if sharding == "HYBRID_SHARD" else {}
    plan = plan_of(sharding_strategy=sharding, param_dtype=param_dtype, **replicas)
    ranks = {"NO_SHARD": 1, "HYBRID_SHARD": 2}.get(sharding, 4)
    assert {memory.device for memory in plan.resident} == {"host"}
    assert sum(memory.bytes for memory in plan.resident) == 16 * NUMEL // ranks
    assert sum(memory.bytes for memory in plan.resident if memory.is_pinned) == 8 * NUMEL // ranks
    left: dict[str, int] = {}
    for change in plan.memory:
        left[change.category] = left.get(change.category, 0) + change.bytes
    assert {category: size for category, size in left.items() if size} == {}


def test_offloading_costs_time_and_saves_memory() -> None:
    reports = [
        zsim.simulate(
            zsim.Experiment(
                model="gpt2-xl", cluster="dgx-h100", gpus=4, training={"sequence_length": 512},
                strategy={"kind": "fsdp1", "cpu_offload": flag},
            )
        ).report
        for flag in (False, True)
    ]  # fmt: skip
    assert reports[1].step_seconds > reports[0].step_seconds
    assert reports[1].peaks["gpu"].total < reports[0].peaks["gpu"].total
    assert reports[1].offload is not None


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 1000, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
# Bytes of a quarter of two blocks' products in nf4 and their norms, of the rest, and of adapters of rank 8.
BLOCKS, REST, ADAPTERS = (2 * 589_824 // 2 + 4 * 512) // 4, (2 * 1000 * 256 * 2 + 512) // 4, 65_536 * 2 // 4


def qlora(**strategy: Any) -> Plan:
    """bf16 adapters of rank 8 beside nf4 weights, under full checkpoints."""
    training = {
        "sequence_length": 64, "stored_dtype": "bf16", "gradient_clipping": 1.0,
        "activation_checkpointing": "full",
        "lora": {"rank": 8, "targets": "all-linear", "dtype": "bf16", "quantized": "nf4"},
    }  # fmt: skip
    given = {"kind": "fsdp1", "cpu_offload": True, "reduce_dtype": "bf16", **strategy}
    experiment = zsim.Experiment(
        model=LLAMA, cluster="dgx-h100", gpus=4, training=training, strategy=given
    )  # fmt: skip
    return make_plan(resolve(experiment))


def test_packed_weights_wait_on_the_host_and_their_scales_on_the_gpu() -> None:
    """Half a byte for a weight of a product, 2 bytes for the others, once as a shard and once more as pinned
    memory for gradients, which frozen units have too. The states are two bf16 moments of the adapters. Of the
    products' 18,432 scales in double quantization a byte each, 72 fp32 scales of scales, and 14 times the
    maps of 16 and 256 fp32 values and a mean.
    """
    plan = qlora(wrapping="peft", use_orig_params=False)
    sizes = {(memory.device, memory.category): memory.bytes for memory in plan.resident}
    assert sizes == {
        ("host", "parameters"): BLOCKS + REST + ADAPTERS,
        ("host", "gradients"): BLOCKS + REST + ADAPTERS,
        ("host", "optimizer_states"): 2 * ADAPTERS,
        ("gpu", "parameters"): 18_432 + 72 * 4 + 14 * (64 + 1024 + 4),
    }


def test_only_adapters_in_units_of_their_own_go_back_and_are_updated() -> None:
    """A checkpointed block's adapters are unsharded for forward, for its recomputation and for backward,
    except the last of a block (8 x 256), whose pre-backward hook has run before. What is not in 4 bits or in
    an adapter comes twice, as everywhere. torch's AdamW on the CPU reads and writes 14 bytes of an element.
    """
    plan = qlora(wrapping="peft", use_orig_params=False)
    last = 2 * 8 * 256 * 2 // 4
    assert copied(plan, "h2d") == 2 * BLOCKS + 2 * REST + 3 * ADAPTERS - last + 4
    assert copied(plan, "d2h") == ADAPTERS + 4
    work = {op.name: op.work.bytes for op in plan.ops if isinstance(op.work, HostWork)}
    elements = ADAPTERS // 2
    assert work == {
        "gradient norm": 2 * elements,
        "clip gradients": 4 * elements,
        "optimizer step": 14 * elements,
    }
    check_plan(plan)


def test_adapters_inside_a_blocks_unit_send_back_all_of_it() -> None:
    """With `use_orig_params` a block is one flat parameter, whose gradient has zeros for frozen weights."""
    assert copied(qlora(wrapping="huggingface"), "d2h") == BLOCKS + ADAPTERS + 4
