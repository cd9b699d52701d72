"""Towers and mixers against transformers' own classes: names, parameters, FLOPs, what autograd keeps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install zsim[capture]")
pytest.importorskip("transformers", reason="needs transformers: pip install zsim[transformers]")

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers.image_processing_utils import select_best_resolution
from transformers.models.kimi_linear import modeling_kimi_linear

from tests.saved_bytes import forward_work, saved_bytes
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.errors import InputError
from zsim.operations.mixers.kimi_delta import KimiDelta
from zsim.specs.model.huggingface import model_from_config
from zsim.specs.model.image_rules import SoundRule
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.images import SampledImages

TEXT = {
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "depth": 12, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "num_position_embeddings": 64,
    "out_hidden_size": 64,
}  # fmt: skip
OF_QWEN2_5 = {**VISION, "fullatt_block_indexes": [5, 11]}
OF_QWEN2 = {"depth": 3, "embed_dim": 128, "num_heads": 4, "hidden_size": 64}
SIGLIP = {
    "hidden_size": 64, "image_size": 448, "intermediate_size": 96, "num_attention_heads": 4,
    "num_hidden_layers": 3, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
CLIP = {
    "hidden_size": 64, "image_size": 56, "intermediate_size": 96, "num_attention_heads": 4,
    "num_hidden_layers": 3, "patch_size": 14,
}  # fmt: skip
INTERNVIT = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
LLAMA4_VISION = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256,
    "image_size": 336, "vision_output_dim": 96, "projector_input_dim": 96, "projector_output_dim": 96,
}  # fmt: skip
GEMMA4_VISION = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 16, "intermediate_size": 96, "use_clipped_linears": True, "standardize": True,
}  # fmt: skip
GLM_VISION = {
    "depth": 3, "hidden_size": 128, "num_heads": 4, "out_hidden_size": 64, "intermediate_size": 96,
    "image_size": 112,
}  # fmt: skip
MOONVIT = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
WHISPER = {"d_model": 64, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 256}
PIXTRAL = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16,
    "intermediate_size": 96, "image_size": 336, "patch_size": 14,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 32, "n_group": 1, "topk_group": 1}
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2}

MULTIMODAL = {
    "Qwen2VL": OF_QWEN2,
    "Qwen2_5_VL": OF_QWEN2_5,
    "Qwen3VL": {**VISION, "deepstack_visual_indexes": [1, 3]},
    "Qwen3VLMoe": {**VISION, "deepstack_visual_indexes": [1, 3]},
    "Qwen3_5": VISION,
    "Qwen3_5Moe": VISION,
    "Gemma3": SIGLIP,
    "Gemma4": GEMMA4_VISION,
    "Exaone4_5_": {**OF_QWEN2_5, "num_key_value_heads": 2},
    "Glm4v": GLM_VISION,
    "Glm4vMoe": GLM_VISION,
    "Glm46V": GLM_VISION,
    "Kimi_K25": MOONVIT,
    "InternVL": INTERNVIT,
    "Llama4": LLAMA4_VISION,
    "Mistral3": PIXTRAL,
    "Llava": CLIP,
    "LlavaNext": CLIP,
    "LlavaOnevision": {**CLIP, "vision_use_head": False},
    "Idefics3": CLIP,
    "SmolVLM": CLIP,
    "MiniMaxM3VL": CLIP,
    "Lfm2Vl": {**SIGLIP, "num_patches": 256, "patch_size": 16},
    "AyaVision": SIGLIP,
    "Cohere2Vision": SIGLIP,
    "LightOnOcr": PIXTRAL,
    "GlmOcr": {**GLM_VISION, "hidden_size": 128},
}
MIXERS: dict[str, dict[str, Any]] = {
    "Qwen3NextConfig": {**DELTA, **EXPERTS},
    "Qwen3_5TextConfig": DELTA,
    "OlmoHybridConfig": {},
    "NemotronHConfig": {
        "hybrid_override_pattern": "M-M*", "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
        "n_groups": 2,
    },
    "GraniteMoeHybridConfig": {
        **MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0,
        "shared_intermediate_size": 96,
    },
    "BambaConfig": {**MAMBA, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "FalconH1Config": {**MAMBA, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "JambaConfig": {
        "attn_layer_period": 4, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 4, "num_experts_per_tok": 2, "mamba_dt_rank": 8,
    },
    "KimiLinearConfig": {
        **LATENT, "linear_num_heads": 4, "linear_head_dim": 16, "q_lora_rank": None, "num_local_experts": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "MiniMaxConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Lfm2Config": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "Gemma4TextConfig": {
        "num_hidden_layers": 6, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "global_head_dim": 32, "enable_moe_block": True, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": 48,
    },
    "Gemma4TextConfig on devices": {
        "num_hidden_layers": 12, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100,
        "num_kv_shared_layers": 4, "use_double_wide_mlp": True, "global_head_dim": 32,
    },
    "DeepseekV32Config": {**LATENT, **INDEXER},
    "DeepseekV4Config": {
        "num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 24, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "o_groups": 2, "o_lora_rank": 8,
        "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8, "compress_ratios": [0, 4, 128, 4],
    },
    "GlmMoeDsaConfig": {**LATENT, **INDEXER},
    "MiniMaxM3VLTextConfig": {
        "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3, "index_n_heads": 2, "head_dim": 128,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3, "num_local_experts": 4,
    },
    "Gemma3nTextConfig": {
        "num_hidden_layers": 10, "num_kv_shared_layers": 4, "vocab_size_per_layer_input": 100,
        "intermediate_size": [96] * 5 + [128] * 5, "hidden_size_per_layer_input": 8,
    },
    "Zamba2Config": {
        "layers_block_type": ["hybrid", "mamba"] * 2, "n_mamba_heads": 8, "mamba_d_state": 16,
        "adapter_rank": 8, "use_shared_attention_adapter": True, "num_key_value_heads": 4,
    },
}  # fmt: skip


def named(model: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


def config_of(name: str, **values: Any) -> Any:
    """A configuration of transformers, where the release has the class."""
    kind = getattr(transformers, name.partition(" ")[0], None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return kind(**values)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_parameters_of_a_tower_have_the_names_and_shapes_of_transformers(family: str) -> None:
    text: dict[str, Any] = {**TEXT, **EXPERTS} if "Moe" in family else dict(TEXT)
    text |= {"model_type": "qwen2"} if family in ("InternVL", "LlavaOnevision") else {}
    text |= {"model_type": "exaone4"} if family == "Exaone4_5_" else {}
    text |= {"model_type": "ministral3"} if family == "Mistral3" else {}
    text |= {"model_type": "llama"} if family in ("Llava", "LlavaNext", "Idefics3", "SmolVLM") else {}
    text |= {"num_local_experts": 4, "head_dim": 128} if family == "MiniMaxM3VL" else {}
    text |= {"layer_types": ["conv", "full_attention"] * 2} if family == "Lfm2Vl" else {}
    text |= {"model_type": "glm4v_text"} if family == "Glm46V" else {}
    text |= {"model_type": "cohere2"} if family in ("AyaVision", "Cohere2Vision") else {}
    text |= {"model_type": "qwen3"} if family == "LightOnOcr" else {}
    text |= (
        {**LATENT, "model_type": "deepseek_v3", "n_group": 1, "topk_group": 1} if family == "Kimi_K25" else {}
    )
    text |= {"n_routed_experts": 4, "first_k_dense_replace": 1} if family == "Glm4vMoe" else {}
    text |= {"num_hidden_layers": 6, "hidden_size_per_layer_input": 8} if family == "Gemma4" else {}
    projector = {"projection_hidden_size": 128} if family == "Kimi_K25" else {}
    projector |= {"alignment_intermediate_size": 48} if family == "Cohere2Vision" else {}
    text |= {**DELTA} if family.startswith("Qwen3_5") else {}
    config = config_of(f"{family}Config", text_config=text, vision_config=MULTIMODAL[family], **projector)
    with torch.device("meta"):
        name = "MiniMaxM3Sparse" if family == "MiniMaxM3VL" else family
        module = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    model = model_from_config(config.to_dict(), "tiny", "tiny.json")
    assert sorted(named(model)) == sorted(named(module))
    if family.startswith("Qwen"):  # others register a norm or a projection in another order than they run it
        assert named(model) == named(module)


@pytest.mark.parametrize(("family", "side"), [("LlavaNext", 336), ("LlavaOnevision", 384)])
def test_an_image_on_canvases_has_the_tokens_and_tiles_of_transformers(family: str, side: int) -> None:
    """Of five sizes, among them one smaller than a tile and one far larger than all canvases."""
    config = config_of(
        f"{family}Config", text_config={**TEXT, "model_type": "qwen2"}, vision_config={
            **CLIP, "image_size": side, "vision_use_head": False, "model_type": "clip_vision_model",
        },
    )  # fmt: skip
    tower = model_from_config(config.to_dict(), "tiny", "tiny.json").vision_tower
    assert tower is not None
    kind = getattr(transformers, f"{family}Processor")
    processor = kind.__new__(kind)
    processor.image_processor = SimpleNamespace(image_grid_pinpoints=config.image_grid_pinpoints)
    processor.patch_size, processor.num_additional_image_tokens = 14, 0
    processor.num_image_tokens, processor.vision_aspect_ratio = (side // 14) ** 2, "anyres_max_9"
    for height, width in ((200, 300), (336, 672), (1000, 1500), (3000, 700), (4000, 4000)):
        size = tower.image_rule.size_of(width, height)
        assert size.tokens == processor._get_number_of_features(height, width, side, side)
        best = select_best_resolution((height, width), config.image_grid_pinpoints)
        assert size.tiles == 1 + best[0] * best[1] // side**2


def test_aya_vision_reads_one_layer_of_its_tower() -> None:
    config = {
        "model_type": "aya_vision",
        "text_config": {**TEXT, "model_type": "cohere2"},
        "vision_config": SIGLIP,
    }
    with pytest.raises(InputError, match=r"'vision_feature_layer' is \[-2, -1\]; expected one layer"):
        model_from_config({**config, "vision_feature_layer": [-2, -1]}, "tiny", "tiny.json")


@pytest.mark.parametrize("family", ["aya_vision", "cohere2_vision"])
def test_an_image_of_cohere_s_has_the_tiles_of_transformers(family: str) -> None:
    """Twelve at most, and with several one more of the whole image."""
    processors = {"aya_vision": "got_ocr2", "cohere2_vision": "cohere2_vision"}
    name = processors[family]
    module = pytest.importorskip(f"transformers.models.{name}.image_processing_{name}")
    model = model_from_config(
        {"model_type": family, "text_config": {**TEXT, "model_type": "cohere2"}, "vision_config": SIGLIP},
        "tiny", "tiny.json",
    )  # fmt: skip
    assert model.vision_tower is not None
    for height, width in ((200, 300), (336, 672), (1000, 1500), (3000, 700), (4000, 4000)):
        columns, rows = module.get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)
        tiles = columns * rows
        assert model.vision_tower.image_rule.size_of(width, height).tiles == tiles + (tiles > 1)


AUDIO: dict[str, dict[str, Any]] = {
    "Qwen2Audio": {"text_config": {**TEXT, "model_type": "qwen2"}, "audio_config": WHISPER},
    "Voxtral": {"text_config": {**TEXT, "model_type": "llama"}, "audio_config": WHISPER},
    "AudioFlamingo3": {"text_config": {**TEXT, "model_type": "qwen2"}, "audio_config": WHISPER},
    "Qwen3ASR": {
        "text_config": {**TEXT, "model_type": "qwen3"},
        "audio_config": {**WHISPER, "output_dim": 64, "downsample_hidden_size": 16},
    },
    "Qwen2_5OmniThinker": {
        "text_config": {**TEXT, "tie_word_embeddings": False}, "audio_config": {**WHISPER, "output_dim": 64},
        "vision_config": {**OF_QWEN2_5, "num_position_embeddings": None},
    },
    "Qwen3OmniMoeThinker": {
        "text_config": {**TEXT, **EXPERTS},
        "audio_config": {**WHISPER, "output_dim": 64, "downsample_hidden_size": 16},
        "vision_config": {**VISION, "deepstack_visual_indexes": [1, 3]},
    },
    "Gemma4": {
        "text_config": {**TEXT, "num_hidden_layers": 6}, "vision_config": MULTIMODAL["Gemma4"],
        "audio_config": {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2},
    },
    "Gemma4Unified": {
        "text_config": {**TEXT, "num_hidden_layers": 6},
        "vision_config": {"mm_embed_dim": 64, "output_proj_dims": 64},
        "audio_config": {},
    },
}  # fmt: skip
_OF_WHISPER = {
    "d_model": "hidden_size", "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads", "encoder_ffn_dim": "intermediate_size",
}  # fmt: skip


def audio_model(family: str) -> tuple[Any, Any]:
    """(transformers' class of a whole model on the meta device, its configuration)."""
    kind = getattr(transformers, f"{family}ForConditionalGeneration")
    values: dict[str, Any] = {**AUDIO[family]}
    if family in ("Voxtral", "AudioFlamingo3"):
        values["audio_config"] = {_OF_WHISPER.get(key, key): value for key, value in WHISPER.items()}
    config = kind.config_class(**values)
    with torch.device("meta"):
        return kind(config), config


@pytest.mark.parametrize("family", AUDIO)
def test_parameters_of_an_audio_tower_have_the_names_and_shapes_of_transformers(family: str) -> None:
    module, config = audio_model(family)
    model = model_from_config(config.to_dict(), "tiny", "tiny.json")
    assert sorted(named(model)) == sorted(named(module))


@pytest.mark.parametrize("family", ["Qwen2Audio", "Qwen2_5OmniThinker", "Qwen3OmniMoeThinker"])
def test_an_audio_tower_has_the_flops_and_keeps_the_bytes_of_transformers(family: str) -> None:
    """A sound of 8 seconds, padded to 30 in Qwen2-Audio's. FLOPs of products, convolutions included, exactly.
    Bytes within 1 %: with torch's own attention transformers copies each layer's output, which attention over
    packed rows does not, and Qwen2-Audio's average keeps its input.
    """
    module, config = audio_model(family)
    config.audio_config._attn_implementation = "eager"
    tower_class = type(module.model.audio_tower)
    tower = tower_class._from_config(config.audio_config).to(torch.bfloat16).train()
    frames = 3000 if family == "Qwen2Audio" else 800
    features = torch.zeros(128, frames, dtype=torch.bfloat16)

    def run() -> Any:
        if family == "Qwen2Audio":
            return tower(features[None])
        return tower(features, feature_lens=torch.tensor([frames]))

    spec = model_from_config(config.to_dict(), "tiny", "tiny.json").audio_tower
    assert spec is not None
    assert isinstance(spec.rule, SoundRule)
    size = spec.rule.size_of(frames / 100)
    shape = BatchShape(1, 1024, sounds=SampledImages(size, 1.0, 1.0))
    last = 2 if family == "Qwen2Audio" else 1  # Qwen2-Audio's projector is not the tower's
    modules = (
        *spec.before,
        *(module for block in spec.blocks for module in block.modules),
        *spec.after[:-last],
    )
    flops, kept = forward_work(modules, shape, WorkOptions())
    with FlopCounterMode(display=False) as counter:
        run()
    assert flops == counter.get_total_flops()
    tower.set_attn_implementation("sdpa")
    copies = (4 if family == "Qwen2Audio" else 3) * size.rows * 64 * 2
    assert kept + copies == pytest.approx(saved_bytes(tower.parameters(), run), rel=0.01)


def test_gemma_4_s_audio_tower_has_the_flops_and_keeps_the_bytes_of_transformers() -> None:
    """A sound of 9.6 seconds. FLOPs but for the product of each layer's 13 positions with its own weight, and
    bytes, within 1 %: the mask and what the first input's norm shares are left out.
    """
    module, config = audio_model("Gemma4")
    tower = type(module.model.audio_tower)._from_config(config.audio_config).to(torch.bfloat16).train()
    features = torch.zeros(1, 960, 128, dtype=torch.bfloat16)

    def run() -> Any:
        return tower(features, torch.ones(1, 960, dtype=torch.bool))

    spec = model_from_config(config.to_dict(), "tiny", "tiny.json").audio_tower
    assert spec is not None
    assert isinstance(spec.rule, SoundRule)
    size = spec.rule.size_of(9.6)
    assert size.tokens == 240
    shape = BatchShape(1, 1024, sounds=SampledImages(size, 1.0, 1.0))
    flops, kept = forward_work(spec.modules[:-3], shape, WorkOptions())
    with FlopCounterMode(display=False) as counter:
        run()
    positions = 2 * (2 * 13 * 256 * 256)
    assert flops + positions == pytest.approx(counter.get_total_flops(), rel=0.001)
    assert kept == pytest.approx(saved_bytes(tower.parameters(), run), rel=0.01)


@pytest.mark.parametrize("name", MIXERS)
def test_parameters_of_a_mixer_have_the_names_and_shapes_of_transformers(name: str) -> None:
    """In order, in which DistributedDataParallel fills its buckets."""
    config = config_of(name, **{**TEXT, **MIXERS[name]})
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    assert named(model_from_config(config.to_dict(), "tiny", "tiny.json")) == named(module)


def _work(model: ModelSpec, width: int, height: int) -> tuple[float, int]:
    """FLOPs of the tower's products and the bytes that it keeps, of one image."""
    assert model.vision_tower is not None
    rule = model.vision_tower.image_rule.set_bounds(min_pixels=1)
    images = SampledImages(rule.size_of(width, height), 1.0, 1.0)
    modules = model.vision_tower.modules[:-1]  # without the scatter among the tokens
    return forward_work(modules, BatchShape(1, 1024, images=images), WorkOptions())


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL", "Qwen3_5"])
def test_a_tower_has_the_flops_and_keeps_the_bytes_of_transformers(family: str) -> None:
    """FLOPs of matrix products exactly, those of windows included. What is kept within 1 %: with torch's own
    attention transformers concatenates the images' outputs, a copy of each layer's that attention over packed
    images has not. The rest is positions and norms' statistics.
    """
    config = config_of(f"{family}Config", text_config=dict(TEXT), vision_config=MULTIMODAL[family])
    config.vision_config._attn_implementation = "eager"
    with torch.device("meta"):
        kind = type(getattr(transformers, f"{family}ForConditionalGeneration")(config).model.visual)
    tower = kind._from_config(config.vision_config).to(torch.bfloat16).train()
    patch, rows, columns = config.vision_config.patch_size, 16, 24
    pixels = torch.zeros(rows * columns, 3 * 2 * patch * patch, dtype=torch.bfloat16)
    grid = torch.tensor([[1, rows, columns]])
    model = model_from_config(config.to_dict(), "tiny", "tiny.json")
    flops, kept = _work(model, columns * patch, rows * patch)
    with FlopCounterMode(display=False) as counter:
        tower(pixels, grid)
    assert flops == counter.get_total_flops()
    tower.set_attn_implementation("sdpa")
    copies = VISION["depth"] * rows * columns * VISION["hidden_size"] * 2
    assert kept + copies == pytest.approx(
        saved_bytes(tower.parameters(), lambda: tower(pixels, grid)), rel=0.01
    )


@pytest.mark.parametrize(("family", "attribute"), [("Idefics3", "vision_model"), ("Llava", "vision_tower")])
def test_a_tower_of_clips_blocks_has_the_flops_and_keeps_the_bytes_of_transformers(
    family: str, attribute: str
) -> None:
    """One tile of 224 pixels. A class token goes through zsim's patch embedding too, a row in 257."""
    vision = {**CLIP, "hidden_size": 128, "intermediate_size": 512, "image_size": 224}
    config = config_of(f"{family}Config", text_config={**TEXT, "model_type": "llama"}, vision_config=vision)
    config.vision_config._attn_implementation = "eager"
    with torch.device("meta"):
        kind = type(
            getattr(getattr(transformers, f"{family}ForConditionalGeneration")(config).model, attribute)
        )
    module = kind._from_config(config.vision_config).to(torch.bfloat16).train()
    pixels = torch.zeros(1, 3, 224, 224, dtype=torch.bfloat16)
    tower = model_from_config(config.to_dict(), "tiny", "tiny.json").vision_tower
    assert tower is not None
    tile = replace(tower.image_rule.size_of(224, 224), tiles=1)
    shape, options = BatchShape(1, 1024, images=SampledImages(tile, 1.0, 1.0)), WorkOptions()
    modules = (*tower.before, *(module for block in tower.blocks for module in block.modules), tower.after[0])
    flops, kept = forward_work(modules, shape, options)
    with FlopCounterMode(display=False) as counter:
        module(pixels)
    assert flops == pytest.approx(
        counter.get_total_flops(), rel=1e-3 if tower.image_rule.class_tokens else 1e-12
    )
    module.set_attn_implementation("sdpa")
    assert kept == pytest.approx(saved_bytes(module.parameters(), lambda: module(pixels)), rel=0.01)


def test_whisper_has_the_parameters_the_flops_and_keeps_the_bytes_of_transformers() -> None:
    """Two sounds of 30 seconds and twice 128 tokens, with attention written out: names and shapes in order,
    FLOPs exactly, bytes within 1 %.
    """
    config = config_of(
        "WhisperConfig", d_model=64, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, vocab_size=100, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    kind = transformers.WhisperForConditionalGeneration
    module = kind._from_config(config, attn_implementation="eager").to(torch.bfloat16).train()
    features, tokens = torch.zeros(2, 80, 3000, dtype=torch.bfloat16), torch.zeros(2, 128, dtype=torch.long)
    spec = model_from_config(config.to_dict(), "tiny", "tiny.json")
    assert named(spec) == named(module)
    assert spec.audio_tower is not None
    shape = BatchShape(2, 128, sounds=SampledImages(spec.audio_tower.rule.smallest, 1.0, 1.0))
    in_blocks = (one for block in spec.blocks for one in block.modules)
    modules = (*spec.before, *spec.audio_tower.modules, *in_blocks, *spec.after[:-2])
    flops, kept = forward_work(modules, shape, WorkOptions(attention="math"))

    def run() -> Any:
        return module.model(input_features=features, decoder_input_ids=tokens, use_cache=False)

    with FlopCounterMode(display=False) as counter:
        run()
    assert flops == counter.get_total_flops()
    assert kept == pytest.approx(saved_bytes(module.parameters(), run), rel=0.01)


def test_llama_3_2_vision_has_the_parameters_the_flops_and_keeps_the_bytes_of_transformers() -> None:
    """Two samples of 128 tokens with one image each, of four tiles, with attention written out: names and
    shapes, FLOPs of products, bytes within 1 %. A class token goes through zsim's patch embedding too, and so
    do rows that fill up tiles: 104 rows for 100 patches. transformers makes the tower's mask by a product.
    """
    config = config_of(
        "MllamaConfig",
        vision_config={
            "hidden_size": 64, "num_hidden_layers": 3, "num_global_layers": 2, "attention_heads": 4,
            "intermediate_size": 96, "image_size": 140, "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 192, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 2]],
        },
        text_config={**TEXT, "num_hidden_layers": 5, "cross_attention_layers": [1, 3]},
    )  # fmt: skip
    kind = transformers.MllamaForConditionalGeneration
    module = kind._from_config(config, attn_implementation="eager").to(torch.bfloat16).train()
    spec = model_from_config(config.to_dict(), "tiny", "tiny.json")
    assert sorted(named(spec)) == sorted(named(module))
    assert spec.vision_tower is not None
    size = spec.vision_tower.image_rule.smallest
    assert (size.rows, size.tokens) == (4 * 104, 4 * 101)
    shape = BatchShape(2, 128, images=SampledImages(size, 1.0, 1.0))
    in_blocks = (one for block in spec.blocks for one in block.modules)
    modules = (*spec.before, *spec.vision_tower.modules, *in_blocks, *spec.after[:-1])
    flops, kept = forward_work(modules, shape, WorkOptions(attention="math"))
    tokens, pixels = torch.zeros(2, 128, dtype=torch.long), torch.zeros(2, 1, 4, 3, 140, 140)

    def run() -> Any:
        return module(
            input_ids=tokens, pixel_values=pixels.to(torch.bfloat16),
            aspect_ratio_ids=torch.full((2, 1), 3), aspect_ratio_mask=torch.ones(2, 1, 4, dtype=torch.long),
            use_cache=False,
        ).logits  # fmt: skip

    with FlopCounterMode(display=False) as counter:
        run()
    filled, mask = 2 * 4 * 4 * 2 * 3 * 14 * 14 * 64, 2 * 2 * (4 * 104) ** 2
    assert flops - filled + mask == counter.get_total_flops()
    assert kept == pytest.approx(saved_bytes(module.parameters(), run), rel=0.01)


def test_a_block_of_gemma_3n_keeps_the_bytes_of_transformers() -> None:
    """Within 1 %, but for the cosines and sines that all blocks share: four streams, norms in fp32 twice, the
    router's inputs of both updates.
    """
    tokens, hidden, head = 256, 512, 128
    config = config_of(
        "Gemma3nTextConfig", hidden_size=hidden, num_attention_heads=4, num_key_value_heads=2, head_dim=head,
        num_hidden_layers=2, num_kv_shared_layers=0, intermediate_size=1024, vocab_size=100, laurel_rank=16,
        vocab_size_per_layer_input=100, hidden_size_per_layer_input=16, layer_types=["full_attention"] * 2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, attn_implementation="sdpa",
    )  # fmt: skip
    module = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train().model
    streams = torch.zeros(4, 1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    inputs = torch.zeros(1, tokens, 16, dtype=torch.bfloat16)
    rotary = module.rotary_emb(streams[0], torch.arange(tokens)[None], "full_attention")
    block = model_from_config(config.to_dict(), "tiny", "tiny.json").blocks[0]
    shape = BatchShape(1, tokens)
    kept = sum(one.saved_bytes(shape.seen_by(one), WorkOptions()) for one in block.modules)
    measured = saved_bytes(
        module.parameters(),
        lambda: module.layers[0](
            streams, position_embeddings=rotary, per_layer_input=inputs, shared_kv_states={}
        ),
    )
    assert kept == pytest.approx(measured - 2 * tokens * head * 2, rel=0.01)


def test_the_gate_of_kimi_delta_keeps_what_autograd_keeps() -> None:
    """Per channel, exp, the sum, softplus and a mask, and in fla's function the decays and their sums."""
    config = transformers.AutoConfig.for_model("kimi_linear")
    gate = modeling_kimi_linear.KimiLinearForgetGate(config).to(torch.bfloat16)
    hidden = torch.zeros(1, 64, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    low_rank = torch.zeros(1, 64, 128, dtype=torch.bfloat16)
    kept = saved_bytes([hidden, *gate.parameters()], lambda: gate(hidden)) - low_rank.nbytes
    work = KimiDelta(32, 128)
    sizes = work.kept_sizes(WorkOptions())[3:9]
    assert sum(sizes[:4]) * 64 == pytest.approx(kept, rel=0.01)
    assert sizes[4:] == (4096 * 4,) * 2
