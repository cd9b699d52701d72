"""Hugging Face configs become models whose parameters are exact to the unit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.model.families import LazyFunction, decoders
from zsim.specs.model.huggingface import FAMILIES, load_model, model_from_config, read_model_config
from zsim.specs.model.multimodal import MULTIMODAL_FAMILIES
from zsim.specs.model.spec import Block, Embedding, Linear
from zsim.specs.presets import model_preset_names

# name: (total, layers, distinct block sizes, outside the blocks, tied, entries of named_parameters()).
# Counted by transformers 5.23 on the meta device.
GOLDEN: dict[str, tuple[int, int, list[int], int, bool, int]] = {
    "llama-2-7b": (6738415616, 32, [202383360], 262148096, False, 291),
    "llama-2-70b": (68976648192, 80, [855654400], 524296192, False, 723),
    "llama-3-8b": (8030261248, 32, [218112000], 1050677248, False, 291),
    "llama-3-70b": (70553706496, 80, [855654400], 2101354496, False, 723),
    "llama-3.1-405b": (405853388800, 126, [3187703808], 4202708992, False, 1137),
    "gpt2": (124439808, 12, [7087872], 39385344, True, 148),
    "gpt2-xl": (1557611200, 48, [30740800], 82052800, True, 580),
    "starcoder": (15517456384, 40, [379128064], 352333824, True, 484),
    "gpt-neox-20b": (20554567680, 44, [453064704], 619720704, False, 532),
    "mistral-7b": (7241732096, 32, [218112000], 262148096, False, 291),
    "mixtral-8x7b": (46702792704, 32, [1451270144], 262148096, False, 291),
    "qwen2-7b": (7615616512, 28, [233057792], 1089998336, False, 339),
    "qwen3-8b": (8190735360, 36, [192946432], 1244663808, False, 399),
    "qwen3-30b-a3b": (30532122624, 48, [623120640], 622331904, False, 531),
    "falcon-7b": (6921720704, 32, [207070080], 295478144, True, 195),
    "falcon-40b": (41303293952, 60, [679510016], 532692992, True, 483),
    "mpt-7b": (6649286656, 32, [201334784], 206573568, True, 194),
    "mpt-30b": (29957200896, 48, [616577024], 361503744, True, 290),
    "bloom-7b1": (7069016064, 30, [201379840], 1027620864, True, 365),
    "bloom-176b": (176247271424, 70, [2466437120], 3596673024, True, 845),
    "opt-6.7b": (6658473984, 32, [201379840], 214319104, True, 516),
    "opt-175b": (174604468224, 96, [1812099072], 642957312, True, 1540),
    "gemma2-9b": (9241705984, 42, [198195200], 917507584, True, 464),
    "phi3-mini": (3821079552, 32, [113252352], 197004288, False, 195),
    "deepseek-v3": (671026404352, 61, [583483392, 11507286016], 1853365248, False, 909),
}

# The smallest configs that build.
LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 96, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 8}


def build(config: dict[str, Any], **changes: Any) -> Any:
    return model_from_config({**config, **changes}, "tiny", "tiny.json")


def names(block: Block) -> list[str]:
    return [module.name for module in block.modules]


@pytest.mark.parametrize("name", GOLDEN)
def test_parameter_counts_equal_those_of_transformers(name: str) -> None:
    """Total, distinct blocks, rest and the number of parameter tensors of each model of the table."""
    total, layers, blocks, rest, is_tied, tensors = GOLDEN[name]
    model = load_model(name)
    assert model.numel == total
    assert len(model.blocks) == layers
    assert sorted({block.numel for block in model.blocks}) == blocks
    assert model.numel_outside_blocks == rest
    assert model.is_tied is is_tied
    listed = list(model.named_parameters())
    assert len(listed) == tensors
    assert sum(parameter.numel for _, parameter in listed) == total


@pytest.mark.parametrize(
    ("name", "total"),
    [
        # h = 12288, L = 96: L (12 h^2 + 13 h) + (50257 + 2048) h + 2 h
        ("gpt-3-175b", 96 * (12 * 12288**2 + 13 * 12288) + (50257 + 2048 + 2) * 12288),
        # h = 1024, L = 24 and h = 1280, L = 36, with 1024 positions
        ("gpt2-medium", 24 * (12 * 1024**2 + 13 * 1024) + (50257 + 1024 + 2) * 1024),
        ("gpt2-large", 36 * (12 * 1280**2 + 13 * 1280) + (50257 + 1024 + 2) * 1280),
        # h = 5120, f = 13824, L = 40, V = 32000: L (4 h^2 + 3 h f + 2 h) + 2 V h + h
        ("llama-2-13b", 40 * (4 * 5120**2 + 3 * 5120 * 13824 + 2 * 5120) + (2 * 32000 + 1) * 5120),
    ],
)
def test_other_presets_have_the_parameters_of_their_shape(name: str, total: int) -> None:
    """Totals worked out from the shapes of the papers."""
    assert load_model(name).numel == total


@pytest.mark.parametrize(
    ("name", "total", "is_tied"),
    [
        # h = 3072, f = 12288, 24 heads on 2, L = 30, V = 49152, all with biases: its card's 3,030,371,328
        ("starcoder2-3b", 3_030_371_328, True),
        # h = 18432, f = 73728, 96 heads on 8, L = 96, V = 256000, no biases but the norms':
        # L (2 h^2 + 2 h 1536 + 2 h f + 4 h) + 2 V h + 2 h
        (
            "nemotron-4-340b",
            96 * (2 * 18432**2 + 2 * 18432 * 1536 + 2 * 18432 * 73728 + 4 * 18432) + 2 * 256001 * 18432,
            False,
        ),
    ],
)
def test_grouped_queries_with_a_plain_mlp(name: str, total: int, is_tied: bool) -> None:
    model = load_model(name)
    assert (model.numel, model.is_tied) == (total, is_tied)
    norms = [module for module in model.blocks[0].modules if "layernorm" in module.name]
    assert [len(module.parameters) for module in norms] == [2, 2]


def test_every_builder_that_is_imported_late_is_there() -> None:
    """49 families beside the decoders, and 35 towers of images and sounds."""
    builders = [family.build for family in FAMILIES.values() if isinstance(family.build, LazyFunction)]
    names = [name for family in MULTIMODAL_FAMILIES.values() for name in family.builders.values()]
    assert min(len(builders), len(names)) >= 30
    for function in (*builders, *map(LazyFunction, names)):
        assert callable(function.load()), function.name


def test_a_llama_block_lists_its_leaf_modules_in_the_order_they_run() -> None:
    """As `LlamaDecoderLayer.forward` calls them; core, activation and adds have no module of their own."""
    assert names(build(LLAMA).blocks[0]) == [
        "input_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.core",
        "self_attn.o_proj",
        "self_attn.residual",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.act_fn",
        "mlp.down_proj",
        "mlp.residual",
    ]


def test_named_parameters_stand_in_registration_order() -> None:
    """Llama registers attention, MLP, then the norms; weights are [out, in]; 2 key/value heads of 8 make
    k and v 16 wide."""
    listed = [(name, p.shape) for name, p in build(LLAMA, num_key_value_heads=2).named_parameters()]
    assert listed[:11] == [
        ("model.embed_tokens.weight", (96, 64)),
        ("model.layers.0.self_attn.q_proj.weight", (64, 64)),
        ("model.layers.0.self_attn.k_proj.weight", (16, 64)),
        ("model.layers.0.self_attn.v_proj.weight", (16, 64)),
        ("model.layers.0.self_attn.o_proj.weight", (64, 64)),
        ("model.layers.0.mlp.gate_proj.weight", (80, 64)),
        ("model.layers.0.mlp.up_proj.weight", (80, 64)),
        ("model.layers.0.mlp.down_proj.weight", (64, 80)),
        ("model.layers.0.input_layernorm.weight", (64,)),
        ("model.layers.0.post_attention_layernorm.weight", (64,)),
        ("model.layers.1.self_attn.q_proj.weight", (64, 64)),
    ]
    assert listed[-2:] == [("model.norm.weight", (64,)), ("lm_head.weight", (96, 64))]


def test_gpt2_weights_are_transposed_and_its_head_is_tied() -> None:
    """Conv1D keeps [in, out]; the head computes 64 -> 96 without a parameter of its own."""
    model = build(GPT2)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (64, 192)
    assert shapes["transformer.h.0.attn.c_attn.bias"] == (192,)
    assert "lm_head.weight" not in shapes
    head = model.after[1]
    assert (head.name, head.op_spec, head.parameters) == ("lm_head", Linear(64, 96), ())


def test_opt_registers_its_final_norm_before_the_blocks() -> None:
    """`OPTDecoder.__init__` makes embed_tokens, embed_positions, final_layer_norm, then the layers."""
    listed = [name for name, _ in load_model("opt-6.7b").named_parameters()]
    assert listed[:5] == [
        "model.decoder.embed_tokens.weight",
        "model.decoder.embed_positions.weight",
        "model.decoder.final_layer_norm.weight",
        "model.decoder.final_layer_norm.bias",
        "model.decoder.layers.0.self_attn.k_proj.weight",
    ]


def test_learned_positions_of_opt_have_two_spare_rows() -> None:
    """2048 positions are stored as 2050 rows."""
    assert load_model("opt-6.7b").before[1].op_spec == Embedding(2050, 4096)


def test_blocks_of_one_shape_are_one_object() -> None:
    """Work is derived once per shape; Gemma 2 alternates two shapes (with and without window)."""
    assert len({id(block) for block in load_model("llama-3-70b").blocks}) == 1
    assert len({id(block) for block in load_model("gemma2-9b").blocks}) == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"n_embd": 64, "n_layer": 2, "n_head": 8}, {"hidden_size": 64, "num_layers": 2, "num_heads": 8}),
        ({"n_embd": 64, "n_layer": 2}, {"n_embed": 64, "num_hidden_layers": 2}),
        ({"n_positions": 32}, {"max_position_embeddings": 32}),
    ],
)
def test_old_spellings_of_keys_are_read(old: dict[str, int], new: dict[str, int]) -> None:
    """GPT-2's `attribute_map` and the spellings of older files."""
    renamed = {key: value for key, value in GPT2.items() if key not in old}
    assert build({**renamed, **new}).numel == build(GPT2).numel


def test_both_spellings_of_rotary_and_type_are_read_past() -> None:
    """`rope_parameters` and `dtype` (v5), `rope_theta`, `rope_scaling` and `torch_dtype` (before)."""
    new = build(LLAMA, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, dtype="bfloat16")
    old = build(LLAMA, rope_theta=5e5, rope_scaling=None, torch_dtype="bfloat16")
    assert new.numel == old.numel == build(LLAMA).numel


def test_the_language_model_of_a_multimodal_file_is_asked_for_by_name() -> None:
    """Ovis 2 keeps it under `text_config`, beside a tower that zsim does not know."""
    config = {"model_type": "ovis2", "vision_config": {"hidden_size": 32}, "text_config": LLAMA}
    with pytest.raises(NotSimulatedError, match=r"vision_config besides text_config.*model\.text_only"):
        build(config)
    model = build({**config, "text_only": True})
    assert model.numel == build(LLAMA).numel
    assert "text_config" in model.source


def test_an_explicit_head_dim_frees_the_hidden_size() -> None:
    """72 is no multiple of 16 heads; with head_dim 8 the queries are 128 wide."""
    model = build(LLAMA, hidden_size=72, num_attention_heads=16, head_dim=8)
    assert model.blocks[0].modules[1].op_spec == Linear(72, 128)


def test_a_window_of_null_is_no_window() -> None:
    """Mistral's default is 4096; its later files say null."""
    mistral = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 2}
    assert build(mistral).blocks[0].modules[4].op_spec.window == 4096
    assert build(mistral, sliding_window=None).blocks[0].modules[4].op_spec.window is None


def test_mistral_has_eight_key_value_heads_unless_the_file_says_null() -> None:
    """An absent key takes the family's default of 8; null means as many as heads."""
    mistral = {**LLAMA, "model_type": "mistral", "num_attention_heads": 16}
    assert build(mistral).blocks[0].modules[4].op_spec.num_kv_heads == 8
    assert build(mistral, num_key_value_heads=None).blocks[0].modules[4].op_spec.num_kv_heads == 16


@pytest.mark.parametrize("clip", [None, False])
def test_what_is_off_may_be_null(clip: bool | None) -> None:
    assert build({**LLAMA, "model_type": "olmo"}, clip_qkv=clip).blocks


def test_a_folder_or_a_file_is_loaded_under_its_own_name(tmp_path: Path) -> None:
    """`my-model/config.json` is my-model; `shape.json` is shape."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "shape.json").write_text(json.dumps(GPT2))
    assert load_model(folder).name == "my-model"
    assert load_model(folder / "config.json").name == "my-model"
    assert load_model(str(tmp_path / "shape.json")).name == "shape"


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LLAMA, {"model_type": None}, "tiny.json: no 'model_type'"),
        (LLAMA, {"model_type": "olmo", "clip_qkv": 8.0}, "'clip_qkv' is 8.0; expected null or false"),
        (LLAMA, {"model_type": "laguna", "gating": None}, "'gating' is null; expected true"),
        (LLAMA, {"model_type": "resnet"}, "'resnet' is not a transformer that zsim knows"),
        (LLAMA, {"model_type": "lama"}, "did you mean 'llama'?"),
        (LLAMA, {"hidden_size": None}, "tiny.json: no 'hidden_size', which a llama model needs"),
        (LLAMA, {"hidden_size": 0}, "tiny.json: 'hidden_size' is 0; expected a whole number of at least 1"),
        (LLAMA, {"hidden_size": -64}, "'hidden_size' is -64"),
        (LLAMA, {"hidden_size": float("nan")}, "'hidden_size' is nan"),
        (LLAMA, {"hidden_size": 64.0}, "'hidden_size' is 64.0; expected a whole number"),
        (LLAMA, {"hidden_size": True}, "'hidden_size' is True"),
        (LLAMA, {"num_hidden_layers": "3"}, "'num_hidden_layers' is '3'"),
        (LLAMA, {"hidden_size": 68}, "hidden size 68 is not divisible by 8 attention heads"),
        (LLAMA, {"num_key_value_heads": 3}, "8 attention heads are not divisible by 3 key/value heads"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes'; expected true or false"),
        (LLAMA, {"attention_dropout": 1.5}, "'attention_dropout' is 1.5"),
        (LLAMA, {"attention_dropout": 10**400}, "expected a number from 0 up to 1"),
        (LLAMA, {"attention_dropout": float("nan")}, "'attention_dropout' is nan"),
        (GPT2, {"hidden_size": 128}, "'n_embd' is 64 and 'hidden_size' is 128"),
        (GPT2, {"n_head": None}, "no 'n_head' or 'num_attention_heads' or 'num_heads'"),
        (
            {**LLAMA, "model_type": "gemma2"},
            {"layer_types": ["full_attention"]},
            "names 1 layers; expected 3",
        ),
        (
            {**LLAMA, "model_type": "mixtral"},
            {"num_local_experts": 4, "num_experts_per_tok": 5},
            "expected at most the number of experts, 4",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_one_sentence(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    """The file, the key, what was found, what was expected."""
    with pytest.raises(InputError) as refused:
        build(config, **changes)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("tiny.json: ")


MEGATRON = {
    "model_type": "megatron",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 128,
    "vocab_size": 128,
}


WITHOUT_PRESET = (
    "bamba", "falcon_h1", "lfm2_moe", "lfm3", "xlm-roberta", "camembert", "rwkv7_fla", "mt5", "umt5",
)  # fmt: skip


def test_too_many_layers_are_refused_by_their_key_before_a_list_of_them_is_made() -> None:
    """One preset of each family; a list of 10^15 would be more than any memory."""
    families = {}
    for name in model_preset_names():
        config, _, _ = read_model_config(name)
        if "vision_config" not in config:
            families[config["model_type"]] = config
    families["megatron"] = MEGATRON  # of a command line: no preset has it
    families["qwen"] = {**MEGATRON, "model_type": "qwen"}  # nor Qwen of 2023
    hybrid = {**MEGATRON, "num_key_value_heads": 4}
    families |= {
        name: {**hybrid, "model_type": name} for name in (*WITHOUT_PRESET, "lara_mini", "gemma4_unified_text")
    }
    families |= {
        name: {**MEGATRON, "vocab_size": 256, **facts.defaults, "num_key_value_heads": 4, "model_type": name}
        for name, facts in ((name, decoders.decoder(name)) for name in decoders.names())
        if name not in families and "_vl_" not in name and "_omni_" not in name
    }
    multimodal = {name for name in FAMILIES if "_vl_" in name or "_omni_" in name}
    assert set(families) == set(FAMILIES) - multimodal - {"minimax_m3", "mllama_text_model"}
    for config in families.values():
        keys = "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"
        key = next(key for key in keys if key in config)
        with pytest.raises(InputError) as refused:
            build({**config, key: 10**15})
        assert str(refused.value) == (
            f"tiny.json: '{key}' is 1,000,000,000,000,000; expected at most 50,000 layers"
        )


def test_attention_types_of_too_many_layers_are_refused_before_a_list_of_them_is_made() -> None:
    config, _, _ = read_model_config("gpt-neo-2.7b")
    with pytest.raises(InputError, match="gives 1000000000000000 layers; expected 32"):
        build({**config, "attention_types": [[["global"], 10**15]]})


def test_a_missing_key_names_a_misspelled_one() -> None:
    """`hiden_size` is close to `hidden_size`."""
    config = {key: value for key, value in LLAMA.items() if key != "hidden_size"}
    with pytest.raises(InputError, match="did you mean 'hiden_size'"):
        build(config, hiden_size=64)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "llama", "hidden', "not valid JSON"),
        ("[1, 2]", "holds a list; expected a JSON object"),
        ("", "not valid JSON"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """Truncated, not an object, empty."""
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        load_model(path)
    assert str(path) in str(refused.value)
    assert message in str(refused.value)


def test_a_missing_file_and_an_unknown_name_are_refused(tmp_path: Path) -> None:
    """A path that is not there; a name that is no preset gets the nearest one."""
    with pytest.raises(InputError, match="no such file"):
        load_model(tmp_path / "config.json")
    with pytest.raises(InputError, match="no such file"):
        load_model(tmp_path)
    with pytest.raises(InputError, match="did you mean 'llama-3-70b'"):
        load_model("lama-3-70b")


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    """Not UTF-8 text."""
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(InputError, match="cannot be read as text"):
        load_model(path)


def test_every_family_of_the_table_is_known() -> None:
    """Decoders, encoders, an encoder with a decoder, and Megatron's own."""
    assert sorted(FAMILIES) == [
        "afmoe", "apertus", "apertus1p5_text", "arcee", "axk1", "bailing_hybrid", "bamba", "bart", "beam",
        "bert", "bloom", "camembert", "cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3",
        "deepseek_v32", "deepseek_v4", "distilbert", "dots1", "electra", "ernie4_5", "ernie4_5_moe", "exaone",
        "exaone4", "exaone_moe", "falcon", "falcon_h1", "flex_olmo", "flint", "gemma", "gemma2",
        "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe",
        "glm4_moe_lite", "glm4v_moe_text", "glm4v_text", "glm_moe_dsa", "glm_ocr_text", "gpt2", "gpt_bigcode",
        "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa",
        "granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3",
        "hyperclovax", "internlm3", "iquestcoder", "jais2", "jamba", "kimi_k2", "kimi_linear", "kolibri1",
        "laguna", "lara_mini", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4_text", "longcat_flash", "m2m_100",
        "marian", "mbart", "megatron", "mellum", "mimo", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2",
        "minimax_m3", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mistral4", "mixtral",
        "mllama_text_model", "modernbert", "mpt", "mt5", "nanochat", "nemotron", "nemotron_h", "olmo",
        "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "pegasus", "phi", "phi3", "phimoe", "qwen", "qwen2",
        "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_5_moe_text",
        "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_text", "qwen3_vl_moe_text",
        "qwen3_vl_text", "roberta", "rwkv7", "rwkv7_fla", "sarvam_mla", "sarvam_moe", "seed_oss", "smollm3",
        "solar_open", "stablelm", "starcoder2", "step3p5", "t5", "umt5", "vaultgemma", "whisper",
        "xlm-roberta", "youtu", "zamba2",
    ]  # fmt: skip


def test_an_activation_that_transformers_has_not_is_refused() -> None:
    """It would be priced as torch's own kernel, whatever it is."""
    config = dict(read_model_config("llama-3-8b")[0]) | {"hidden_act": "slu"}
    with pytest.raises(InputError, match=r"'hidden_act' is 'slu', an activation .* did you mean 'silu'"):
        model_from_config(config, "tiny", "tiny.json")
