"""Other programs' words lead to the keys that they mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.errors import InputError
from zsim.reference.keys import explained_keys, find_keys
from zsim.specs.experiment.load import load_experiment
from zsim.specs.key_index import concept_of, concepts


def test_every_concept_names_keys_that_there_are() -> None:
    for concept in concepts():
        assert concept.keys or concept.see, concept.name
        for key in concept.keys:
            assert find_keys(key), key


def test_no_word_belongs_to_two_concepts() -> None:
    words = [word for concept in concepts() for word in concept.words]
    assert len(set(words)) == len(words)
    assert all(concept_of(word.upper().replace("_", "-")) == concept_of(word) for word in words)


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("qlora", "training.lora.quantized"),
        ("gradient_checkpointing", "training.activation_checkpointing"),
        ("packing", "training.lengths.batching"),
        ("zero", "strategy.kind"),
        ("ZeRO-3", "strategy.kind"),
        ("--flash-attn", "training.attention"),
        ("per_device_train_batch_size", "training.micro_batch_size"),
    ],
)
def test_a_word_finds_the_key_that_it_means(word: str, key: str) -> None:
    assert explained_keys(word, concept_of(word))[0].path == key


def test_the_name_of_a_table_still_lists_its_keys() -> None:
    assert len(explained_keys("lora", concept_of("lora"))) > 10


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("gradient_checkpointing = true", "training.activation_checkpointing"),
        ("bf16 = true", "training.precision"),
        ("max_length = 2048", "training.sequence_length"),
    ],
)
def test_another_program_s_key_is_corrected_to_what_it_means(tmp_path: Path, table: str, key: str) -> None:
    """`gradient_checkpointing` is not a slip of `gradient_clipping`."""
    file = tmp_path / "x.toml"
    file.write_text(
        f'model = "gpt2"\ncluster = "dgx-h100"\nnodes = 1\n[training]\n{table}\n[strategy]\nkind = "ddp"\n'
    )
    with pytest.raises(InputError) as refused:
        load_experiment(file)
    assert f"did you mean '{key}'?" in str(refused.value)


@pytest.mark.parametrize("table", ["strategy", "training"])
@pytest.mark.parametrize(
    ("kind", "key", "proposed"),
    [
        ("deepspeed", "offload_optimizer", "strategy.config.zero_optimization.offload_optimizer"),
        ("fsdp2", "offload_optimizer", "strategy.cpu_offload"),
        ("megatron", "offload_optimizer", "strategy.optimizer_offload_fraction"),
        ("ddp", "offload_optimizer", None),
        ("deepspeed", "offload_param", "strategy.config.zero_optimization.offload_param"),
        ("fsdp1", "offload_param", "strategy.cpu_offload"),
        ("megatron", "offload_param", None),
    ],
)
def test_a_key_means_what_the_strategy_has(
    tmp_path: Path, kind: str, key: str, proposed: str | None, table: str
) -> None:
    """FSDP has `cpu_offload`, DeepSpeed sections of its JSON, and DDP nothing of the kind."""
    file = tmp_path / "x.toml"
    lines = {"strategy": f'kind = "{kind}"', "training": "sequence_length = 512"}
    text = "".join(
        f"[{name}]\n{line}\n{f'{key} = true' if name == table else ''}\n" for name, line in lines.items()
    )
    file.write_text(f'model = "gpt2"\ncluster = "dgx-h100"\n{text}')
    with pytest.raises(InputError, match=f"unknown key '{key}'") as refused:
        load_experiment(file)
    hint = str(refused.value).partition(f"unknown key '{key}'; ")[2]
    assert hint == f"did you mean '{proposed}'?" if proposed else "strategy." not in hint
