"""Families with other mixers than attention: patterns, parameters, modules for multi-token prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zsim import Experiment, make_plan
from zsim.cost.flops import active_numel
from zsim.errors import InputError, NotSimulatedError
from zsim.operations.mixers.convolution import GatedConvolution
from zsim.operations.mixers.gated_delta import GatedDelta
from zsim.operations.mixers.kimi_delta import KimiDelta
from zsim.operations.mixers.lightning import Lightning
from zsim.operations.mixers.mamba1 import SelectiveScan
from zsim.operations.mixers.mamba2 import StateSpace
from zsim.operations.mixers.sparse_attention import SparseAttention
from zsim.operations.operation import Role
from zsim.specs.model.huggingface import load_model, model_from_config
from zsim.specs.model.spec import Attention, Block, ModelSpec

COUNTED = json.loads((Path(__file__).parent / "published_counts.json").read_text())["models"]
RWKV7 = {
    "model_type": "rwkv7", "vocab_size": 65_536, "decay_low_rank_dim": 96, "a_low_rank_dim": 96,
    "v_low_rank_dim": 64,
}  # fmt: skip
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def build(model_type: str, **changes: Any) -> ModelSpec:
    return model_from_config({"model_type": model_type, **SIZES, **changes}, "tiny", "tiny.json")


def mixers(block: Block) -> list[type]:
    return [type(module.op_spec) for module in block.modules if module.role is Role.MIXER]


def pattern(model: ModelSpec) -> list[list[type]]:
    return [mixers(block) for block in model.blocks]


@pytest.mark.parametrize("entry", COUNTED, ids=lambda entry: entry["name"])
def test_parameters_are_those_of_the_published_model(entry: dict[str, Any]) -> None:
    """In all and active for one token, counted by transformers 5.24 on the meta device, without towers."""
    model = model_from_config(entry["config"], entry["name"], "config.json")
    assert model.numel == entry["total"]
    assert active_numel(model) == (entry["active"] or entry["total"])


def test_prediction_modules_are_those_of_the_cards() -> None:
    """Qwen3.8-27B's card has 27,781,427,952 with tower and module, transformers 27,356,728,560 without the
    module. Qwen3.6-35B-A3B's has 71,903,645,408 bytes in bf16, transformers 35,107,181,936 numbers.
    GLM-5.2's has 753,329,940,480, with biases of the choice of 256 experts in 76 layers, which are buffers,
    and transformers 743,377,000,704. Nemotron 3.5 Lightning's has 32,913,266,240, with those of 128 experts
    in 24 layers, and Nemotron 3 Nano, its shape without the module, 31,577,937,344.
    """
    assert load_model("qwen3.5-27b").mtp_parameters == 27_781_427_952 - 27_356_728_560
    assert load_model("qwen3.5-35b-a3b").mtp_parameters == 71_903_645_408 // 2 - 35_107_181_936
    assert load_model("glm-5.2").mtp_parameters == 753_329_940_480 - 76 * 256 - 743_377_000_704
    config = json.loads(json.dumps(_config("nemotron-3-nano-30b-a3b"))) | {"num_nextn_predict_layers": 1}
    assert model_from_config(config, "lightning", "x").mtp_parameters == (
        32_913_266_240 - 24 * 128 - 31_577_937_344
    )


def _config(preset: str) -> dict[str, Any]:
    from zsim.specs.presets import model_preset_path

    config: dict[str, Any] = json.loads(model_preset_path(preset).read_text())
    return config


def test_a_pattern_of_symbols_says_what_each_block_is() -> None:
    """M: Mamba-2, *: attention, -: an MLP, E: experts. Blocks of one kind are one object."""
    model = build(
        "nemotron_h", hybrid_override_pattern="M*-EM", mamba_num_heads=4, mamba_head_dim=16, n_groups=2,
        n_routed_experts=4, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32,
    )  # fmt: skip
    assert pattern(model) == [[StateSpace], [Attention], [], [], [StateSpace]]
    assert model.blocks[0] is model.blocks[4]
    assert len(model.unique_blocks) == 4
    assert [any(m.role is Role.EXPERTS for m in block.modules) for block in model.blocks] == [
        False, False, False, True, False,
    ]  # fmt: skip


def test_names_of_layers_say_the_same_as_symbols() -> None:
    names = ["mamba", "attention", "mlp", "linear_attention", "full_attention"]
    model = build("nemotron_h", layers_block_type=names)
    assert pattern(model) == [[StateSpace], [Attention], [], [StateSpace], [Attention]]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"hybrid_override_pattern": "M?-"}, "has '?'"),
        ({"layers_block_type": ["mamba", "rwkv"]}, "has 'rwkv'"),
        ({}, "no 'hybrid_override_pattern'"),
        ({"hybrid_override_pattern": "M*", "num_hidden_layers": 3}, "the pattern has 2 layers"),
    ],
)
def test_a_damaged_pattern_is_one_clear_error(changes: dict[str, Any], found: str) -> None:
    with pytest.raises(InputError, match=found.replace("?", r"\?").replace("*", r"\*")):
        build("nemotron_h", **changes)


def test_experts_of_a_latent_width_have_a_product_before_and_behind() -> None:
    """Experts of 16 of 64: 4 x (32 x 16 + 16 x 32) in the experts, 64 x 16 and 16 x 64 around them."""
    model = build(
        "nemotron_h", hybrid_override_pattern="E", n_routed_experts=4, moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32, moe_latent_size=16,
    )  # fmt: skip
    sizes = {module.name: module.numel for module in model.blocks[0].modules if module.parameters}
    assert sizes["mixer.experts"] == 4 * 2 * 32 * 16
    assert sizes["mixer.fc1_latent_proj"] == sizes["mixer.fc2_latent_proj"] == 64 * 16
    assert sizes["mixer.gate"] == 4 * 64


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("qwen3_5_text", {"num_hidden_layers": 4}, [GatedDelta] * 3 + [Attention]),
        ("qwen3_5_text", {"num_hidden_layers": 2, "full_attention_interval": 2}, [GatedDelta, Attention]),
        (
            "qwen3_next",
            {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]},
            [Attention, GatedDelta],
        ),
        ("olmo_hybrid", {"num_hidden_layers": 4}, [GatedDelta] * 3 + [Attention]),
        (
            "kimi_linear",
            {"num_hidden_layers": 3, "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3]}},
            [KimiDelta, Attention, KimiDelta],
        ),
        ("bailing_hybrid", {"num_hidden_layers": 2, "layer_group_size": 2}, [KimiDelta, Attention]),
        ("minimax", {"num_hidden_layers": 2, "attn_type_list": [0, 1]}, [Lightning, Attention]),
        ("bamba", {"num_hidden_layers": 2, "attn_layer_indices": [1]}, [StateSpace, Attention]),
        ("jamba", {"num_hidden_layers": 5}, [SelectiveScan] * 4 + [Attention]),
        ("lfm2", {"num_hidden_layers": 2, "full_attn_idxs": [1]}, [GatedConvolution, Attention]),
        (
            "granitemoehybrid",
            {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
            [StateSpace, Attention],
        ),
    ],
)
def test_each_familys_pattern(model_type: str, changes: dict[str, Any], expected: list[type]) -> None:
    assert pattern(build(model_type, **changes)) == [[kind] for kind in expected]


def test_falcon_h1_has_both_mixers_in_every_block() -> None:
    model = build("falcon_h1", num_hidden_layers=2, mamba_d_ssm=128, mamba_n_heads=4)
    assert pattern(model) == [[StateSpace, Attention]] * 2


def test_falcon_h1_has_a_key_for_the_bias_of_each_product_around_its_scan() -> None:
    """`mamba_proj_bias` is of the first, 2 x 128 + 2 x 256 + 4 numbers, `projectors_bias` of the last, 64."""
    tiny = {"num_hidden_layers": 1, "mamba_d_ssm": 128, "mamba_n_heads": 4}
    plain, first, last = (
        build("falcon_h1", **tiny, **flags).numel
        for flags in ({}, {"mamba_proj_bias": True}, {"projectors_bias": True})
    )
    assert (first - plain, last - plain) == (2 * 128 + 2 * 256 + 4, 64)


def test_glm_5_2_shares_choices_among_layers() -> None:
    """Layers 0, 1, 2, 6, 10, ... have an indexer: 3 + 18 of 78."""
    has_indexer = [
        module.op_spec.has_indexer
        for block in load_model("glm-5.2").blocks
        for module in block.modules
        if isinstance(module.op_spec, SparseAttention)
    ]
    assert [number for number, found in enumerate(has_indexer) if found][:5] == [0, 1, 2, 6, 10]
    assert (len(has_indexer), sum(has_indexer)) == (78, 21)


def test_layer_types_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(InputError, match="'layer_types' names 1 layers; expected 4"):
        build("qwen3_5_text", num_hidden_layers=4, layer_types=["full_attention"])


@pytest.mark.parametrize(
    ("hidden", "layers", "gate", "parameters"),
    [(2048, 24, 256, 1_527_404_544), (2560, 32, 320, 2_947_735_040)],
)
def test_rwkv_7_has_the_parameters_of_its_paper(hidden: int, layers: int, gate: int, parameters: int) -> None:
    """RWKV7-World3 1.5B and 2.9B (arXiv 2503.14456, table of released models)."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "gate_low_rank_dim": gate}
    model = model_from_config({**RWKV7, **sizes}, "rwkv7", "config.json")
    assert model.numel == parameters
    assert [len(block.registered_modules) for block in model.blocks[:3]] == [18, 19, 19]


def test_rwkv_7_costs_no_more_per_token_of_a_longer_sequence() -> None:
    """32 heads x (18 x 16 x 64 + 8 x 64^2 + 2/3 x 16^2)."""
    model = model_from_config({**RWKV7, "num_hidden_layers": 2}, "rwkv7", "config.json")
    mixer = next(module for module in model.blocks[1].modules if module.name == "attn")
    assert mixer.forward_flops(512) == mixer.forward_flops(8192) == pytest.approx(1_643_861.33)


def test_stages_do_not_send_the_first_layers_values(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**RWKV7, "num_hidden_layers": 4}))
    experiment = Experiment(
        model=str(path), cluster="dgx-h100", nodes=1, strategy={"kind": "fsdp2"},
        training={"sequence_length": 512, "gradient_accumulation_steps": 2}, parallelism={"pipeline": 2},
    )  # fmt: skip
    with pytest.raises(NotSimulatedError, match="read values of earlier layers"):
        make_plan(experiment)
