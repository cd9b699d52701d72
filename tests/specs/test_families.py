"""Families of config.json: parameters as transformers registers them, and what each does differently."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from zsim import Experiment, make_plan, simulate
from zsim.cost.flops import active_numel
from zsim.errors import InputError, NotSimulatedError
from zsim.files import PRESETS
from zsim.plan.ops import Collective, Plan
from zsim.plan.workload.workload import make_workloads
from zsim.specs.model.families import decoders
from zsim.specs.model.huggingface import load_model, model_from_config
from zsim.specs.model.spec import Attention, Block, ModelSpec, Norm, Residual
from zsim.specs.presets import model_preset_names
from zsim.specs.strategy.training import TrainingConfig

COUNTED = json.loads((Path(__file__).parent / "transformers_counts.json").read_text())["models"]
DECODERS = json.loads((Path(__file__).parent / "decoder_counts.json").read_text())["models"]
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}


def build(model_type: str, **changes: Any) -> ModelSpec:
    return model_from_config({"model_type": model_type, **SIZES, **changes}, "tiny", "tiny.json")


def cores(block: Block) -> list[Attention]:
    return [module.op_spec for module in block.modules if isinstance(module.op_spec, Attention)]


def core(block: Block) -> Attention:
    (only,) = cores(block)
    return only


def in_order(model: ModelSpec) -> list[tuple[str, list[int]]]:
    """Names and shapes; T5's encoder ends with its norm, which zsim lists behind the decoder's blocks, and
    BART's halves each with their tables before their blocks and norms behind.
    """
    listed = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    if model.family in ("bart", "mbart", "m2m_100", "marian", "pegasus"):
        order = ("shared", "encoder.embed_p", "encoder.layers", "encoder.layernorm", "encoder.layer_norm",
                 "decoder.embed_p", "decoder.layers", "decoder.layernorm", "decoder.layer_norm")  # fmt: skip
        listed.sort(key=lambda one: next(i for i, part in enumerate(order) if f"model.{part}" in one[0]))
    if model.family == "t5":
        own = next(one for one in listed if one[0] == "encoder.final_layer_norm.weight")
        listed.remove(own)
        place = next(place for place, one in enumerate(listed) if one[0].startswith("decoder."))
        listed.insert(place, own)
    return listed


@pytest.mark.parametrize("entry", DECODERS, ids=lambda entry: entry["config"]["model_type"])
def test_decoders_of_the_table_have_the_parameters_of_transformers(entry: dict[str, Any]) -> None:
    """Total, tensors, and all names with their shapes in order, of small and of whole configurations."""
    model = model_from_config(entry["config"], "tiny", "config.json")
    listed = in_order(model)
    lines = "".join(f"{name} {shape}\n" for name, shape in listed)
    assert (model.numel, len(listed)) == (entry["parameters"], entry["tensors"])
    assert hashlib.sha256(lines.encode()).hexdigest()[:16] == entry["sha256"]


def test_a_family_is_read_from_its_part_of_the_table() -> None:
    tables = tomllib.loads((PRESETS / "decoders.toml").read_text(encoding="utf-8"))
    assert list(decoders.names()) == list(tables)
    for name, table in tables.items():
        base = tables.get(table.get("extends"), {})
        whole = {key: value for key, value in {**base, **table}.items() if key != "extends"}
        if "extends" not in base and "experts" not in whole:
            assert decoders.decoder(name) == decoders.Decoder.model_validate(whole)


def test_every_family_of_the_table_is_counted_somewhere() -> None:
    counted = {entry["config"]["model_type"] for entry in DECODERS}
    presets = {load_model(name).family for name in model_preset_names()}
    with_towers = {name for name in decoders.names() if "_vl_" in name or "_omni_" in name}
    with_towers |= {"glm4v_text", "glm4v_moe_text", "glm_ocr_text", "step3p5"}
    assert set(decoders.names()) - with_towers <= counted | presets


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_and_their_order_are_those_of_transformers(name: str) -> None:
    """Total, number of tensors, and every name with its shape in the order of `named_parameters()`, counted
    by transformers on the meta device (`validation/models/count_parameters.py`)."""
    model, counted = load_model(name), COUNTED[name]
    listed = in_order(model)
    lines = "".join(f"{name} {shape}\n" for name, shape in listed)
    assert model.numel == counted["parameters"]
    assert len(listed) == counted["tensors"]
    assert hashlib.sha256(lines.encode()).hexdigest()[:16] == counted["sha256"]


def test_longcat_flash_has_the_parameters_of_its_checkpoint() -> None:
    """741,053,585,408 of transformers' class, without the gates of 256 experts that have no product: 28 x 256
    x 4096 x 6144. Of 12 experts of a token 12 x 512 / 768 = 8 have one.
    """
    model = model_from_config({"model_type": "longcat_flash"}, "longcat-flash", "config.json")
    assert model.numel == 741_053_585_408 - 28 * 256 * 4096 * 6144
    experts = next(module for module in model.blocks[0].modules if module.name == "mlp.experts")
    assert experts.op_spec.active_fraction == 8 / 512


ZAMBA2 = {
    "model_type": "zamba2", "vocab_size": 96, "hidden_size": 64, "num_attention_heads": 4,
    "num_mem_blocks": 1, "adapter_rank": 8, "n_mamba_heads": 4, "mamba_d_state": 16,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"], "num_hidden_layers": 5,
}  # fmt: skip
QUERY = "model.layers.1.shared_transformer.self_attn.q_proj"


def shared_plan(**strategy: Any) -> Plan:
    return make_plan(
        Experiment(
            model=ZAMBA2,
            cluster="dgx-h100",
            nodes=1,
            strategy=strategy,
            training={"sequence_length": 512, "micro_batch_size": 1},
        )
    )


def test_a_layer_that_shares_a_block_uses_the_parameters_of_the_first() -> None:
    """Queries, keys and values of 128 x 128, an output of 64 x 128, an MLP of 64 x 512 and 256 x 64, norms of
    128 and 64, and in the first three adapters of 8 (64 + 512).
    """
    model = model_from_config(ZAMBA2, "tiny", "tiny.json")
    first, later = model.blocks[1], model.blocks[3]
    shared = 3 * 128 * 128 + 64 * 128 + 64 * 512 + 256 * 64 + 128 + 64 + 3 * 8 * (64 + 512)
    assert first.numel - later.numel == shared
    assert QUERY in {module.lender for module in later.modules}


def test_zero_3_gathers_a_shared_block_for_every_layer_and_reduces_its_gradient_once() -> None:
    """The query of 128 x 128 in 16 bits for the forward and the backward of each of three layers. The small
    norms, below the threshold of persistent parameters, make no difference.
    """
    nothing_stays = ("param_persistence_threshold", "prefetch_bucket_size", "max_live_parameters")
    zero = {"stage": 3, **{f"stage3_{key}": 0 for key in (*nothing_stays, "max_reuse_distance")}}
    plan = shared_plan(kind="deepspeed", config={"zero_optimization": zero, "bf16": {"enabled": True}})
    gathers = [op.name for op in plan.ops if isinstance(op.work, Collective) and QUERY in op.name]
    sums = [op.name for op in plan.ops if op.name.startswith("add tied gradient") and "q_proj" in op.name]
    assert len(gathers) == 6, gathers
    assert sums == [f"add tied gradient {name}" for name in (QUERY.replace("layers.1", "layers.3"), QUERY)]


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "megatron"])
def test_layers_that_share_a_block_are_refused_where_units_gather_their_own(kind: str) -> None:
    with pytest.raises(NotSimulatedError, match=r"share a block of attention, .* 'ddp' or 'deepspeed'"):
        shared_plan(kind=kind)


def test_gemma_3n_goes_on_with_four_streams_of_which_a_checkpoint_holds_all() -> None:
    """The input of each block: 4 x 2048 features in 16 bits for each of 1024 tokens."""
    sizes = {"vocab_size": 96, "vocab_size_per_layer_input": 96, "num_hidden_layers": 6}
    config = {"model_type": "gemma3n_text", "num_kv_shared_layers": 0, **sizes}
    training = TrainingConfig(
        sequence_length=1024, micro_batch_size=1, gradient_accumulation_steps=1, precision="bf16",
        activation_checkpointing="full", attention="flash", compile=False, optimizer="sgd",
        gradient_clipping=0.0,
    )  # fmt: skip
    (workload,) = make_workloads([model_from_config(config, "tiny", "config.json")], training)
    inputs = {segment.input_bytes for segment in workload.segments if segment.kind == "block"}
    assert inputs == {4 * 2048 * 1024 * 2}


def test_every_preset_is_counted_but_those_whose_class_is_elsewhere() -> None:
    """MPT's key names are llm-foundry's, the class of Qwen of 2023 beside its weights, that of RWKV-7 fla's.
    EXAONE 3 is counted by hand. LongCat's class has weights that its checkpoint has not.
    Models with towers are counted in test_towers.py.
    """
    rest = {name for name in model_preset_names() if load_model(name).vision_tower is None} - set(COUNTED)
    own_tests = {"longcat-flash", "rwkv7-1.5b", "rwkv7-2.9b"}
    assert rest == {"mpt-7b", "mpt-30b", "exaone-3.5-7.8b", "qwen-7b"} | own_tests


def test_exaone_3_has_the_parameters_of_its_card() -> None:
    """32 (2 x 4096^2 + 2 x 1024 x 4096 + 3 x 4096 x 14336 + 2 x 4096) + 2 x 102400 x 4096 + 4096."""
    model = load_model("exaone-3.5-7.8b")
    assert model.numel == 7_818_448_896
    assert model.blocks[0].kind == "LlamaDecoderLayer"  # which transformers runs


def test_gemma_3_has_one_layer_in_six_without_a_window_and_caps_nothing() -> None:
    model = build("gemma3_text", sliding_window=16)
    assert [core(block).window for block in model.blocks] == [16] * 5 + [None] + [16] * 2
    assert not any(core(block).softcaps for block in model.blocks)
    assert [module.name for module in model.after] == ["model.norm", "lm_head", "loss"]


def test_the_text_part_of_a_multimodal_file_has_the_defaults_of_its_class() -> None:
    """gemma-3-4b's file says no vocabulary and no heads for its text."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    whole = {"model_type": "gemma3", "text_config": text, "text_only": True}
    assert model_from_config(whole, "gemma-3-4b", "config.json").numel == load_model("gemma3-4b").numel


def test_gemma_2_caps_scores_and_logits() -> None:
    model = load_model("gemma2-9b")
    assert {core(block).softcaps for block in model.blocks} == {True}
    assert not core(build("gemma2", attn_logit_softcapping=None).blocks[0]).softcaps


def test_a_bidirectional_gemma_sees_half_its_window_on_each_side() -> None:
    model = build("gemma3_text", sliding_window=16, use_bidirectional_attention=True)
    assert (core(model.blocks[0]).window, core(model.blocks[0]).is_causal) == (8, False)


def test_exaone_4_has_positions_only_where_it_has_a_window() -> None:
    """The last of four layers sees everything, without rotary positions; without windows all have them."""
    model = build("exaone4", num_key_value_heads=8, sliding_window_pattern="LLLG")
    assert [core(block).window for block in model.blocks[:4]] == [4096, 4096, 4096, None]
    assert [core(block).rotary for block in model.blocks[:4]] == [True, True, True, False]
    whole = build("exaone4", num_key_value_heads=8, sliding_window=None)
    assert {(core(block).window, core(block).rotary) for block in whole.blocks} == {(None, True)}


def test_cohere_2_has_positions_only_where_it_has_a_window_and_one_norm_for_both_branches() -> None:
    model = build("cohere2")
    assert [core(block).rotary for block in model.blocks[:4]] == [True, True, True, False]
    norms = [module for module in model.blocks[0].modules if isinstance(module.op_spec, Norm)]
    assert [module.name for module in norms] == ["input_layernorm"]


def test_every_fourth_layer_of_smollm_3_has_no_positions() -> None:
    assert [core(block).rotary for block in build("smollm3").blocks] == [True, True, True, False] * 2
    listed = build("smollm3", no_rope_layers=[0, 1] * 4)
    assert [core(block).rotary for block in listed.blocks] == [False, True] * 4
    with pytest.raises(InputError, match="'no_rope_layers' has 3 numbers; expected 8"):
        build("smollm3", no_rope_layers=[1, 1, 0])


def test_olmo_2_normalises_all_heads_together_behind_each_branch() -> None:
    """8 heads of 8 features: one norm of 64 weights."""
    names = [module.name for module in build("olmo2").blocks[0].modules]
    assert names.index("post_attention_layernorm") == names.index("self_attn.residual") - 1
    assert "input_layernorm" not in names
    norm = next(one for one in build("olmo2").blocks[0].modules if one.name == "self_attn.q_norm")
    assert [parameter.shape for parameter in norm.parameters] == [(64,)]


def test_olmo_3_has_a_window_in_three_layers_of_four() -> None:
    assert [core(block).window for block in build("olmo3").blocks[:4]] == [4096, 4096, 4096, None]


def test_glm_4_rotates_half_of_each_head() -> None:
    assert core(build("glm4", head_dim=16).blocks[0]).rotary_width == 8
    assert core(build("glm4", head_dim=16, partial_rotary_factor=1).blocks[0]).rotary_width is None
    with pytest.raises(InputError, match="'partial_rotary_factor' is 2; expected a number above 0 up to 1"):
        build("glm4", partial_rotary_factor=2)


def test_granite_multiplies_its_branches_and_logits() -> None:
    model = build("granite")
    adds = [module.op_spec for module in model.blocks[0].modules if isinstance(module.op_spec, Residual)]
    assert [add.scales for add in adds] == [True, True]
    assert "logit_scale" in [module.name for module in model.after]


def test_internlm_3_has_a_setting_for_biases_of_queries_keys_and_values_and_one_for_the_others() -> None:
    """`q_proj` of 64 x 1,024, `o_proj` back."""
    weights = 64 * 1024
    for settings, biases in (({"qkv_bias": True}, (1024, 0)), ({"bias": True}, (0, 64)), ({}, (0, 0))):
        modules = {module.name: module.numel for module in build("internlm3", **settings).blocks[0].modules}
        assert modules["self_attn.q_proj"] == weights + biases[0]
        assert modules["self_attn.o_proj"] == weights + biases[1]


def test_tokens_of_an_encoder_see_all_others() -> None:
    for name in ("bert-base", "roberta-large", "modernbert-base"):
        assert {core(block).is_causal for block in load_model(name).blocks} == {False}
    windows = [core(block).window for block in load_model("modernbert-base").blocks[:4]]
    assert windows == [None, 64, 64, None]


def test_an_encoder_with_another_head_is_refused() -> None:
    with pytest.raises(
        InputError, match="'architectures' is BertForMultipleChoice; zsim knows Bert with the heads"
    ):
        build("bert", architectures=["BertForMultipleChoice"])
    with pytest.raises(InputError, match="'is_decoder' is true; expected false"):
        build("bert", is_decoder=True)


@pytest.mark.parametrize(
    ("family", "kind", "head", "refused"),
    [
        ("bart", "Bart", "ForConditionalGeneration", "ForSequenceClassification"),
        ("bart", "Bart", "ForConditionalGeneration", "ForCausalLM"),
        ("marian", "Marian", "MTModel", "ForCausalLM"),
        ("umt5", "UMT5", "ForConditionalGeneration", "EncoderModel"),
    ],
)
def test_a_translator_with_another_head_is_refused(family: str, kind: str, head: str, refused: str) -> None:
    """Published checkpoints of BART's name the class without a head, from which a translator is made."""
    plain = build(family)
    for name in (head, "Model"):
        assert build(family, architectures=[f"{kind}{name}"]) == plain
    with pytest.raises(
        InputError, match=f"{kind}{refused}; zsim knows {kind} as a translator: expected {kind}{head}"
    ):
        build(family, architectures=[f"{kind}{refused}"])
    with pytest.raises(InputError, match="'is_encoder_decoder' is false; expected true"):
        build(family, is_encoder_decoder=False)


def test_electra_without_a_width_is_as_wide_as_its_blocks() -> None:
    model = model_from_config({"model_type": "electra", "num_hidden_layers": 2}, "tiny", "tiny.json")
    (query, *_) = model.blocks[0].modules
    assert (model.hidden_size, query.numel) == (256, 256 * 256 + 256)


def test_relatives_of_roberta_are_roberta() -> None:
    sizes = {"vocab_size": 96, "type_vocab_size": 1, "num_hidden_layers": 2}
    roberta, *relatives = (
        model_from_config({"model_type": name, **sizes}, "tiny", "tiny.json")
        for name in ("roberta", "xlm-roberta", "camembert")
    )
    for relative in relatives:
        assert [block.modules for block in relative.blocks] == [block.modules for block in roberta.blocks]
        assert relative.numel == roberta.numel


def test_roberta_uses_two_rows_less_of_its_positions() -> None:
    assert load_model("roberta-large").learned_positions == 512


def test_t5_attends_to_its_encoder_and_learns_distances_once_per_half() -> None:
    model = load_model("t5-large")
    assert (len(model.blocks), model.block_name(23), model.block_name(24)) == (
        48, "encoder.block.23", "decoder.block.0",
    )  # fmt: skip
    assert model.block_lists == ("encoder.block", "decoder.block")
    assert [(one.is_causal, one.bias) for one in cores(model.blocks[0])] == [(False, "made")]
    assert [(one.is_causal, one.bias) for one in cores(model.blocks[1])] == [(False, "read")]
    assert [(one.is_causal, one.bias) for one in cores(model.blocks[24])] == [
        (True, "made"),
        (False, "zeros"),
    ]


def test_t5_reads_its_activation_from_one_key() -> None:
    changes = {"d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 2, "num_heads": 8, "vocab_size": 96}
    gated = {"model_type": "t5", **changes, "feed_forward_proj": "gated-gelu"}
    names = [module.name for module in model_from_config(gated, "tiny", "tiny.json").blocks[0].modules]
    assert "layer.1.DenseReluDense.wi_1" in names
    with pytest.raises(InputError, match="'feed_forward_proj' is 'glued-gelu'; expected an activation"):
        model_from_config({**gated, "feed_forward_proj": "glued-gelu"}, "tiny", "tiny.json")


@pytest.mark.parametrize(
    ("model", "degrees", "what"),
    [
        ("t5-large", {"pipeline": 2}, "parallelism.pipeline: found 2, but 't5-large' is an encoder with a"),
        (
            "t5-large",
            {"tensor": 2},
            "parallelism.tensor: found 2, but 't5-large' is an encoder with a",
        ),
        ("bert-large", {"context": 2}, "the attention of 'bert-large' sees all tokens, which zsim does not"),
    ],
)
def test_degrees_that_an_encoder_does_not_take_are_refused(
    model: str, degrees: dict[str, int], what: str
) -> None:
    experiment = Experiment(
        model=model,
        cluster="dgx-h100",
        nodes=1,
        training={"sequence_length": 512},
        strategy={"kind": "fsdp2"},
        parallelism=degrees,
    )
    with pytest.raises(NotSimulatedError) as refused:
        make_plan(experiment)
    assert what in str(refused.value)


def test_an_encoder_with_a_decoder_is_not_wrapped_by_size() -> None:
    experiment = Experiment(
        model="t5-large",
        cluster="dgx-h100",
        nodes=1,
        training={"sequence_length": 512},
        strategy={"kind": "fsdp1", "wrapping": "size:100000000"},
    )
    with pytest.raises(NotSimulatedError, match="whose halves would be units too"):
        make_plan(experiment)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_t5_trains_on_as_many_tokens_in_each_half(kind: str) -> None:
    """48 blocks, 6 N + 12 L d S per token: 24 self-attentions of the encoder, 24 of the decoder and 24
    across, of 16 heads of 64."""
    experiment = Experiment(
        model="t5-large",
        cluster="dgx-h100",
        nodes=1,
        training={"sequence_length": 512, "micro_batch_size": 1},
        strategy={"kind": kind},
    )
    report = simulate(experiment).report.to_dict()
    flops = report["model_flops_per_second_per_gpu"] * report["step_seconds"]
    assert flops == pytest.approx(512 * (6 * 737_668_096 + 12 * 72 * 1024 * 512), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "active", "prediction"),
    [
        ("deepseek-v2-lite", 2.661, 0),
        ("deepseek-v2", 21.376, 0),
        # a block of 11,507,286,016, a product of two hidden states to one (2 x 7168^2) and three norms
        ("deepseek-v3", 37.552, 11_507_286_016 + 2 * 7168**2 + 3 * 7168),
        ("qwen3-235b-a22b", 22.191, 0),
        ("gpt-oss-20b", 4.187, 0),
        ("gpt-oss-120b", 5.712, 0),
    ],
)
def test_active_parameters_and_those_of_multi_token_prediction(
    name: str, active: float, prediction: int
) -> None:
    """Billions, worked out from the published shapes: all but (E - k)/E of routed experts."""
    model = load_model(name)
    assert round(active_numel(model) / 1e9, 3) == active
    assert model.mtp_parameters == prediction


def test_gpt_oss_has_a_sink_per_head_and_a_window_in_every_other_layer() -> None:
    model = load_model("gpt-oss-20b")
    assert [core(block).window for block in model.blocks[:4]] == [128, None, 128, None]
    sinks = next(module for module in model.blocks[0].modules if module.name == "self_attn")
    assert core(model.blocks[0]).has_sinks
    assert [(one.name, one.shape) for one in sinks.parameters] == [("sinks", (64,))]


def test_llama_4_attends_within_chunks_where_it_has_positions_and_interleaves_experts() -> None:
    model = load_model("llama-4-maverick")
    assert [core(block).chunk for block in model.blocks[:4]] == [8192, 8192, 8192, None]
    assert [core(block).rotary for block in model.blocks[:4]] == [True, True, True, False]
    routed = ["feed_forward.experts" in [one.name for one in block.modules] for block in model.blocks[:4]]
    assert routed == [False, True, False, True]


def test_transformers_own_llama_4_is_refused_as_it_computes_every_expert() -> None:
    experiment = Experiment(
        model="llama-4-scout",
        cluster="dgx-h100",
        nodes=8,
        training={"sequence_length": 512},
        strategy={"kind": "deepspeed", "stage": 3},
    )
    with pytest.raises(NotSimulatedError, match="computes every expert for every token"):
        make_plan(experiment)


def test_latent_attention_rotates_64_of_192_features() -> None:
    one = core(load_model("kimi-k2").blocks[0])
    assert (one.qk_head_dim, one.v_head_dim, one.rotary_width, one.is_latent) == (192, 128, 64, True)


@pytest.mark.parametrize("model_type", ["mamba", "mamba2"])
def test_attention_without_a_price_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(NotSimulatedError, match=f"model type '{model_type}' is not simulated: most of its"):
        build(model_type)


@pytest.mark.parametrize("kind", ["fsdp2", "deepspeed"])
@pytest.mark.parametrize("name", ["gpt-oss-20b", "olmoe-1b-7b", "granite-3.1-1b-a400m", "deepseek-v2-lite"])
def test_small_mixtures_of_experts_run(name: str, kind: str) -> None:
    """A step of at most a few tenths of its bound by FLOPs, and longer than it."""
    strategy = {"kind": kind, **({"stage": 3} if kind == "deepspeed" else {})}
    experiment = Experiment(
        model=name, cluster="dgx-h100", nodes=1, training={"sequence_length": 4096}, strategy=strategy
    )
    report = simulate(experiment).report.to_dict()
    assert 0.01 < report["mfu_fraction"] < 0.6
