"""The reference names the frameworks that read a key: those take it, the others refuse it, by this table."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.errors import ZsimError
from zsim.reference import keys_of
from zsim.reference.keys import frameworks_of
from zsim.specs.experiment.resolve import resolve
from zsim.specs.strategy.registry import framework_of

KINDS = ("ddp", "fsdp1", "fsdp2", "deepspeed", "megatron", "reference")
_EXPERTS = {"expert": 2}
# key -> what is asked for with it; "model" and "strategy" beside the tables
ASKED: dict[str, dict[str, Any]] = {
    "training.lora": {"training": {"lora": {"rank": 8}}},
    "training.lora.preparation": {"training": {"lora": {"quantized": "nf4", "preparation": "peft"}}},
    "training.frozen": {"training": {"frozen": ["model.embed_tokens*"]}},
    "training.frozen_dtype": {"training": {"frozen": ["model.embed_tokens*"], "frozen_dtype": "bf16"}},
    "training.autocast": {"training": {"autocast": True}},
    "training.stored_dtype": {"training": {"stored_dtype": "bf16"}},
    "parallelism.tensor": {"parallelism": {"tensor": 2}},
    "parallelism.sequence_parallel": {"parallelism": {"tensor": 2, "sequence_parallel": True}},
    "parallelism.async_tensor": {
        "parallelism": {"tensor": 2, "sequence_parallel": True, "async_tensor": True},
        "training": {"compile": True},
    },
    "parallelism.gather_per_product": {"parallelism": {"tensor": 2, "gather_per_product": True}},
    "parallelism.pipeline": {"parallelism": {"pipeline": 2}},
    "parallelism.schedule": {"parallelism": {"pipeline": 2, "schedule": "1f1b"}},
    "parallelism.virtual_stages": {"parallelism": {"pipeline": 2, "virtual_stages": 2}},
    "parallelism.first_stage_less_layers": {"parallelism": {"pipeline": 2, "first_stage_less_layers": 1}},
    "parallelism.last_stage_less_layers": {"parallelism": {"pipeline": 2, "last_stage_less_layers": 1}},
    "parallelism.layers_per_stage": {"parallelism": {"pipeline": 2, "layers_per_stage": [16, 16]}},
    "parallelism.passes": {"parallelism": {"pipeline": 2, "passes": 2}},
    "parallelism.context": {"parallelism": {"context": 2, "context_method": "all-to-all"}},
    "parallelism.order": {"parallelism": {"tensor": 2, "order": "tp-cp-pp-dp"}},
    "parallelism.expert": {"parallelism": _EXPERTS},
    "parallelism.expert_tensor": {"parallelism": {**_EXPERTS, "expert_tensor": 1}},
    "parallelism.dispatcher": {"parallelism": {**_EXPERTS, "dispatcher": "all-to-all"}},
    "parallelism.capacity_factor": {
        "parallelism": {**_EXPERTS, "dispatcher": "all-to-all", "capacity_factor": 1.5}
    },
    "parallelism.expert_imbalance": {"parallelism": {**_EXPERTS, "expert_imbalance": 1.5}},
    "parallelism.expert_padding": {"parallelism": {"expert": 1, "expert_padding": True}},
}
KEYS = {key.path: key for key in keys_of("experiment")}


def is_taken(asked: dict[str, Any], kind: str) -> bool:
    """Whether a job of this kind resolves with what is asked for."""
    has_experts = "expert" in asked.get("parallelism", {})
    strategy: dict[str, Any] = {"kind": kind}
    if kind in ("deepspeed", "reference"):
        strategy["stage"] = 1
    if kind == "fsdp2" and "parallelism" in asked:
        strategy["wrapping"] = "torchtitan"
    training = {"gradient_accumulation_steps": 4, **asked.get("training", {})}
    experiment = zsim.Experiment(
        model="mixtral-8x7b" if has_experts else "llama-3-8b",
        cluster="dgx-h100",
        nodes=2,
        strategy=strategy,
        **{**asked, "training": training},
    )
    try:
        resolve(experiment)
    except ZsimError:
        return False
    return True


def test_every_key_that_names_frameworks_is_tried() -> None:
    unread = frozenset[str]().union(*(framework_of(kind).unread_keys for kind in KINDS))
    assert set(ASKED) == unread
    assert not {path for path in unread if path not in KEYS and f"{path}.rank" not in KEYS}


@pytest.mark.parametrize("path", ASKED)
def test_the_frameworks_named_read_the_key_and_the_others_refuse_it(path: str) -> None:
    assert frameworks_of(path) == tuple(kind for kind in KINDS if is_taken(ASKED[path], kind))


def test_an_entry_names_them() -> None:
    from zsim.reference.pages import entry_lines

    assert "  read by: ddp, fsdp1, fsdp2" in list(entry_lines(KEYS["training.stored_dtype"]))
    assert "  read by: ddp, fsdp1, fsdp2, deepspeed, megatron" in list(
        entry_lines(KEYS["training.lora.rank"])
    )
    assert not [line for line in entry_lines(KEYS["training.compile"]) if "read by" in line]
