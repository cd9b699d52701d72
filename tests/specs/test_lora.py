"""`[training.lora]` and `training.frozen`: what they make of a model, and bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment


def model(strategy: dict[str, Any] | None = None, name: str = "llama-3-8b", /, **training: Any) -> Any:
    table = {"sequence_length": 512, **training}
    kind = strategy or {"kind": "ddp"}
    return resolve(Experiment(model=name, cluster="dgx-h100", gpus=8, training=table, strategy=kind)).model


def notes(**changes: Any) -> list[str]:
    table = {"sequence_length": 512, **lora(**changes)}
    job = resolve(Experiment(model="llama-3-8b", cluster="dgx-h100", gpus=8, training=table))
    return [note for note in job.notes if "training.lora" in note]


def lora(**changes: Any) -> dict[str, Any]:
    return {"lora": {"rank": 16, "targets": ["q_proj", "v_proj"], **changes}}


def test_peft_trains_so_many_parameters() -> None:
    """Llama-3-8B, rank 16: q and v are 4096 x 4096 and 4096 x 1024, so 32 x 16 (8192 + 5120); on all products
    41,943,040, as PEFT's `print_trainable_parameters` says of both."""
    assert model(**lora()).trainable_numel == 6_815_744
    assert model(**lora(targets="all-linear")).trainable_numel == 41_943_040
    assert model(**lora(targets=r".*\.(q|v)_proj")).trainable_numel == 6_815_744
    assert model(lora={"rank": 16}).trainable_numel == 6_815_744  # PEFT's default for Llama
    assert model(**lora(layers=[0, 31])).trainable_numel == 6_815_744 // 16
    assert model(**lora(rank_pattern={"v_proj": 8})).trainable_numel == 32 * (16 * 8192 + 8 * 5120)


def test_a_target_may_be_excluded_but_not_all_of_them() -> None:
    """Of q and v, v's 32 x 16 (4,096 + 1,024) are left."""
    assert model(**lora(exclude=["q_proj"])).trainable_numel == 32 * 16 * 5120
    with pytest.raises(InputError, match="exclude: leaves no product"):
        model(**lora(exclude=["q_proj", "v_proj"]))


def test_no_targets_at_all_are_an_error() -> None:
    with pytest.raises(InputError, match="found none, expected products of 'llama-3-8b': q_proj, k_proj"):
        model(**lora(targets=[]))


def test_modules_to_save_are_trained_whole() -> None:
    assert model(**lora(modules_to_save=["lm_head"])).trainable_numel == 6_815_744 + 128_256 * 4096


def test_what_is_trained_whole_gets_no_adapter() -> None:
    """PEFT excludes what `modules_to_save` names: of q and v, v's 32 x 16 x 5,120 are left, and q's
    32 x 4096^2; "head" is the end of lm_head."""
    assert model(**lora(modules_to_save=["q_proj"])).trainable_numel == 32 * (16 * 5120 + 4096 * 4096)
    assert model(**lora(modules_to_save=["head"])).trainable_numel == 6_815_744 + 128_256 * 4096
    with pytest.raises(InputError, match="modules_to_save: leaves no product that gets an adapter"):
        model(**lora(modules_to_save=["self_attn.q_proj", "self_attn.v_proj"]))


def test_an_exclusion_that_is_a_string_is_a_pattern() -> None:
    """v's of 32 layers, and q's of layers 10 to 31: 22 x 16 x 8,192."""
    left = model(**lora(exclude=r".*layers\.\d\..*q_proj|.*layers\.1\.mlp")).trainable_numel
    assert left == 32 * 16 * 5120 + 22 * 16 * 8192


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"rank_pattern": {"k_proj": 4}}, "rank_pattern: 'k_proj' matches nothing that has an adapter"),
        ({"rank_pattern": {"q_prj": 4, "v_proj": 4}}, "'q_prj' matches nothing .*; did you mean 'q_proj'?"),
        (
            {"alpha_pattern": {"v_prj": 4}},
            "alpha_pattern: 'v_prj' matches nothing .*; did you mean 'v_proj'?",
        ),
        ({"exclude": ["gate"]}, "exclude: 'gate' excludes nothing .*; did you mean 'gate_proj'?"),
        (
            {"exclude": "q_proj"},
            r"exclude: 'q_proj' excludes nothing .*; a pattern is of whole names, such as",
        ),
        ({"modules_to_save": ["score"]}, "modules_to_save: 'score' is no module of 'llama-3-8b'"),
        ({"modules_to_save": ["lm_heads"]}, "'lm_heads' is no module .*; did you mean 'lm_head'?"),
    ],
)
def test_a_name_that_matches_nothing_is_noted(changes: dict[str, Any], note: str) -> None:
    (found,) = notes(**changes)
    assert re.search(note, found)


def test_names_that_match_are_not_noted() -> None:
    patterns = {"layers.3.self_attn.q_proj": 4, r"layers\.\d\..*v_proj": 4}
    assert not notes(rank_pattern=patterns, alpha_pattern=patterns, exclude=["layers.0.self_attn.q_proj"],
                     modules_to_save=["embed_tokens", "mlp"])  # fmt: skip


@pytest.mark.parametrize(
    ("name", "head", "sentence"),
    [
        (
            "llama-3.2-1b",
            "lm_head",
            "'lm_head' has the weight of 'model.embed_tokens' .*; expected 'embed_tokens'",
        ),
        ("whisper-small", "proj_out", "'proj_out' has the weight of 'model.decoder.embed_tokens'"),
    ],
)
def test_a_tied_head_alone_is_not_trained_whole(name: str, head: str, sentence: str) -> None:
    with pytest.raises(NotSimulatedError, match=sentence):
        model(None, name, sequence_length=256, **lora(modules_to_save=[head]))


def test_a_tied_head_and_the_embedding_are_trained_once() -> None:
    """Llama-3.2-1B, rank 16 on q and v: 16 x 16 (4096 + 2560), and an embedding of 128,256 x 2048."""
    table = {"sequence_length": 512, **lora(modules_to_save=["lm_head", "embed_tokens"])}
    job = resolve(Experiment(model="llama-3.2-1b", cluster="dgx-h100", gpus=8, training=table))
    assert job.model.trainable_numel == 16 * 16 * 6656 + 128_256 * 2048
    assert any("which is trained once; PEFT trains a copy for each" in note for note in job.notes)


def test_adapters_leave_the_models_parameters_alone() -> None:
    found = model(**lora())
    assert found.numel - found.trainable_numel == 8_030_261_248
    names = [name for name, one in found.named_parameters() if one.trainable]
    assert names[:2] == [
        "model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "model.layers.0.self_attn.q_proj.lora_B.default.weight",
    ]


def test_an_adapter_config_of_peft_is_read(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["v_proj", "q_proj"],
              "lora_dropout": 0.1, "bias": "none", "use_dora": False}  # fmt: skip
    path.write_text(json.dumps(config))
    assert model(lora={"config": str(path)}).trainable_numel == 6_815_744
    with pytest.raises(InputError, match=r"training.lora.rank: found 4, but .* says 16"):
        model(lora={"config": str(path), "rank": 4})
    path.write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(NotSimulatedError, match="use_dora = True is not simulated"):
        model(lora={"config": str(path)})
    path.write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(InputError, match="found peft_type 'IA3', expected 'LORA'"):
        model(lora={"config": str(path)})
    with pytest.raises(InputError, match="no such file"):
        model(lora={"config": str(tmp_path / "none.json")})


@pytest.mark.parametrize(
    ("strategy", "training", "sentence"),
    [
        (None, lora(targets=["q_prj"]), "'q_prj' matches no product of .*; did you mean 'q_proj'"),
        (None, lora(targets=["q_proj", "v_prj"]), "'v_prj' matches no product of .*; did you mean 'v_proj'"),
        (None, lora(targets=["query"]), "its products are q_proj, k_proj, v_proj, o_proj"),
        (None, lora(rank=8192), "a product of 4,096 x 4,096; expected at most 4,096"),
        (None, lora(layers=[32]), "found 32, but .* has the blocks 0 to 31"),
        (None, {"frozen": ["model.embed"]}, "'model.embed' matches .*; did you mean 'model.embed_tokens'?"),
        (None, {"frozen": ["*"]}, "no parameter of .* is left to train"),
        ({"kind": "megatron"}, lora(quantized="nf4"), "found 'nf4' under Megatron"),
        (None, {**lora(quantized="nf4"), "precision": "fp32"}, "'nf4' with precision fp32"),
    ],
)
def test_bad_input_is_one_sentence(
    strategy: dict[str, Any] | None, training: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        model(strategy, **training)


BLOCKS_ALONE = {"wrapping": "huggingface"}


def test_fsdp1_does_not_flatten_what_differs() -> None:
    """fp32 adapters beside bf16 weights need units of their own, which they are by default; so do frozen ones
    without `use_orig_params`."""
    from zsim.plan.make import make_plan

    def planned(strategy: dict[str, Any], **training: Any) -> Any:
        table = {"sequence_length": 512, **training}
        given = {"kind": "fsdp1", **strategy}
        return make_plan(
            resolve(Experiment(model="gpt2", cluster="dgx-h100", gpus=8, training=table, strategy=given))
        )

    adapters = {"rank": 8, "targets": ["c_attn"]}
    with pytest.raises(InputError, match="Must flatten tensors with uniform dtype"):
        planned(BLOCKS_ALONE, lora=adapters)
    with pytest.raises(InputError, match=r"strategy.use_orig_params: found false"):
        planned({**BLOCKS_ALONE, "use_orig_params": False}, lora={**adapters, "dtype": "bf16"})
    assert planned(BLOCKS_ALONE, lora={**adapters, "dtype": "bf16"})
    assert planned({"use_orig_params": False}, lora=adapters)


@pytest.mark.parametrize(
    ("strategy", "more", "sentence"),
    [
        ({"kind": "fsdp2"}, {"parallelism": {"pipeline": 2}}, "not simulated with pipeline parallelism"),
        ({"kind": "reference"}, {}, "the reference engine trains every parameter"),
    ],
)
def test_what_zsim_lacks_is_said(strategy: dict[str, Any], more: dict[str, Any], sentence: str) -> None:
    training = {"sequence_length": 512, **lora()}
    with pytest.raises(NotSimulatedError, match=sentence):
        resolve(
            Experiment(
                model="llama-3-8b", cluster="dgx-h100", gpus=8, training=training, strategy=strategy, **more
            )
        )


def test_a_name_of_other_models_products_adapts_nothing_and_is_noted() -> None:
    """Lists that go from model to model name Wqkv, which Llama has in three; PEFT passes it over."""
    (note,) = notes(targets=["q_proj", "v_proj", "Wqkv"])
    assert note == "training.lora.targets: 'Wqkv' is no product of 'llama-3-8b', and gets no adapter"
    assert model(**lora(targets=["q_proj", "v_proj", "Wqkv"])).trainable_numel == 6_815_744


def test_a_gate_of_one_output_gets_an_adapter_of_any_rank() -> None:
    """The gate of Qwen's shared expert is 2048 x 1, so 24 blocks have 16 x 2049 elements more."""
    names = ["q_proj", "shared_expert_gate"]
    few, more = (
        model({"kind": "ddp"}, "qwen1.5-moe-a2.7b", **lora(targets=names[:count])) for count in (1, 2)
    )
    assert more.trainable_numel - few.trainable_numel == 24 * 16 * 2049
