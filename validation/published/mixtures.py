"""The routed experts of a published run: the model, and how the row runs its experts.

Rows state this in `moe{...}` and `hybrid{...}` of their notes, in Megatron's flags behind these, and in the
words around them. Sources differ in where they put `etp` and `dispatcher`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from validation.published.table import PublishedRun
from zsim.errors import NotSimulatedError

_DISPATCHERS = {
    "allgather": "all-gather",
    "alltoall": "all-to-all",
    "deepep": "deepep",
    "hybridep": "hybridep",
}
_UNSTATED = ("", "None", "?")
_FLAG = r"(?:^|; )([a-z][a-z0-9-]+)=([^;{}]+)"  # one of Megatron's, in the notes
_LATENT = r"q(\d+|None)/kv(\d+)/nope(\d+)/rope(\d+)/v(\d+)"


_COLUMNS = {
    "n_experts": "experts", "top_k": "topk", "moe_ffn": "moe_ffn", "shared_ffn": "shared_ffn",
    "dense_layers": "dense_layers", "dispatcher": "dispatcher",
}  # fmt: skip


def is_mixture(run: PublishedRun) -> bool:
    """Whether the row's model has routed experts."""
    kind = run.text("arch_type").lower()
    return has_expert_settings(run) or kind == "moe" or bool(re.search(r"decoder.*moe|moe.*decoder", kind))


def has_expert_settings(run: PublishedRun) -> bool:
    """Whether the row says how many routed experts there are and how wide, in a note or in columns."""
    return "moe{" in run.text("notes") or bool(run.count("n_experts"))


def expert_settings(run: PublishedRun) -> dict[str, str]:
    """The `moe{...}` note, or the columns of experts: {"experts": "8", "topk": "2", ...}. Raises
    NotSimulatedError without either."""
    match = re.search(r"moe\{([^}]*)\}", run.text("notes"))
    columns = {key: run.text(column) for column, key in _COLUMNS.items() if run.text(column)}
    if match is None and "experts" not in columns:
        raise NotSimulatedError("the shape is not published: number and width of the routed experts")
    pairs = (item.partition("=") for item in (match[1] if match else "").split(",") if item)
    return {**columns, **{key.strip(): value.strip() for key, _, value in pairs}}


def expert_model(run: PublishedRun, dense: Mapping[str, Any]) -> dict[str, Any]:
    """The row's model in the form of a config.json. `dense` holds the keys of a decoder of the row's shape.

    GELU models are Megatron-Core's own GPT. The family of the others follows from their name and shape:
    DeepSeek-V3's with latent attention, gpt-oss's, Qwen 2's with a shared expert, Qwen 3's, else Mixtral's.
    Raises NotSimulatedError for shapes that no family has.
    """
    moe_note, shape = expert_settings(run), dict(dense)
    name = run.text("model").lower()
    count, top_k, width = (_number(moe_note, key) for key in ("experts", "topk", "moe_ffn"))
    shared, layers = _number(moe_note, "shared_ffn", 0), int(shape["num_hidden_layers"])
    dense_layers = _dense_layers(run, moe_note, layers)
    if moe_note.get("head_dim", "").isdigit():
        shape["head_dim"] = _number(moe_note, "head_dim")
    if re.search(r"next|qwen3\.5|linear|mamba|nemotron", name):
        raise NotSimulatedError(f"model '{run.text('model')}': not every layer's attention is softmax's")
    if "gdn" in moe_note or "linear" in moe_note:
        raise NotSimulatedError("linear attention is not simulated")
    if run.text("mlp_type") == "gelu":
        return _megatron_model(run, moe_note, shape, (count, top_k, width, shared), dense_layers)
    latent_ranks = _latent_ranks(run, moe_note)
    if latent_ranks is not None:
        return _latent_attention_model(latent_ranks, shape, (count, top_k, width, shared), dense_layers)
    if shared:
        return {
            **shape, "model_type": "qwen2_moe", "num_experts": count, "num_experts_per_tok": top_k,
            "moe_intermediate_size": width, "shared_expert_intermediate_size": shared, "qkv_bias": False,
            "mlp_only_layers": list(range(dense_layers)),
        }  # fmt: skip
    if "gpt-oss" in name:
        return {
            **shape, "model_type": "gpt_oss", "num_local_experts": count, "num_experts_per_tok": top_k,
            "intermediate_size": width, "sliding_window": 128,
        }  # fmt: skip
    if "qwen3" in name or dense_layers:
        return {
            **shape, "model_type": "qwen3_moe", "num_experts": count, "num_experts_per_tok": top_k,
            "moe_intermediate_size": width, "mlp_only_layers": list(range(dense_layers)),
        }  # fmt: skip
    return {
        **shape, "model_type": "mixtral", "num_local_experts": count, "num_experts_per_tok": top_k,
        "intermediate_size": width,
    }  # fmt: skip


def _number(moe_note: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = moe_note.get(key, "")
    if re.fullmatch(r"\d+(\.0*)?", text):
        return int(float(text))
    if default is None or text not in _UNSTATED:
        raise NotSimulatedError(f"the shape is not published: {key} of the routed experts is '{text}'")
    return default


def _dense_layers(run: PublishedRun, moe_note: Mapping[str, str], layers: int) -> int:
    """Leading layers without experts."""
    if moe_note.get("dense_layers", "").isdigit():
        return int(moe_note["dense_layers"])
    flag = re.search(r"moe-layer-freq=(\S+?)(?:;|$)", run.text("notes"))
    if flag is None:
        return layers - _number(moe_note, "moe_layers", layers)
    leading = re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*(\d+)\)?", flag[1])
    if leading is None:
        raise NotSimulatedError(f"experts in the layers '{flag[1]}' are not simulated from a table")
    return int(leading[1])


def _megatron_model(
    run: PublishedRun,
    moe_note: Mapping[str, str],
    shape: Mapping[str, Any],
    experts: tuple[int, int, int, int],
    dense_layers: int,
) -> dict[str, Any]:
    """Megatron-Core's GPT as its functional tests have it: biases, LayerNorm, learned positions unless the
    flags say otherwise, no shared experts' gate."""
    count, top_k, width, shared = experts
    layers = int(shape["num_hidden_layers"])
    flags = dict(re.findall(_FLAG, run.text("notes")))
    return {
        **shape,
        "model_type": "megatron",
        "position_embedding_type": flags.get("position-embedding-type", "learned_absolute"),
        "attention_dropout": float(flags.get("attention-dropout", "0.1")),
        "hidden_dropout": float(flags.get("hidden-dropout", "0.1")),
        "num_moe_experts": count,
        "moe_router_topk": top_k,
        "moe_ffn_hidden_size": width,
        "moe_layer_pattern": [int(number >= dense_layers) for number in range(layers)],
        **({"moe_shared_expert_intermediate_size": shared} if shared else {}),
    }


def _latent_ranks(run: PublishedRun, moe_note: Mapping[str, str]) -> str | None:
    """The ranks and widths of latent attention, in `moe{...}` or in a note `mla{q=0,kv=512,...}` of their
    own, whose rank of 0 is none. None without latent attention."""
    note = re.search(r"mla\{([^}]*)\}", run.text("notes"))
    if note is None:
        return moe_note.get("mla")
    sizes = dict(re.findall(r"(\w+)=(\d+)", note[1]))
    query = sizes.get("q", "0")
    return "/".join(
        f"{name}{'None' if name == 'q' and query == '0' else sizes.get(name, '')}"
        for name in ("q", "kv", "nope", "rope", "v")
    )


def _latent_attention_model(
    text: str, shape: Mapping[str, Any], experts: tuple[int, int, int, int], dense_layers: int
) -> dict[str, Any]:
    """A model with DeepSeek-V3's block. Kimi-K2's has one group of experts."""
    match = re.fullmatch(_LATENT, text)
    if match is None:
        raise NotSimulatedError(f"latent attention '{text}' is not simulated from a table")
    count, top_k, width, shared = experts
    if shared % width:
        raise NotSimulatedError(f"shared experts of {shared} are no whole number of {width}")
    groups = {} if count == 256 else {"n_group": 1, "topk_group": 1}
    return {
        **{key: value for key, value in shape.items() if key != "num_key_value_heads"},
        "model_type": "deepseek_v3",
        "q_lora_rank": None if match[1] == "None" else int(match[1]),
        "kv_lora_rank": int(match[2]),
        "qk_nope_head_dim": int(match[3]),
        "qk_rope_head_dim": int(match[4]),
        "v_head_dim": int(match[5]),
        "n_routed_experts": count,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": width,
        "n_shared_experts": shared // width,
        "first_k_dense_replace": dense_layers,
        **groups,
    }


# -- how they run ------------------------------------------------------------------------------------------


def expert_parallelism(
    run: PublishedRun, settings: Mapping[str, str], kind: str, assumptions: list[str]
) -> dict[str, Any]:
    """The keys of `[parallelism]` for routed experts. `settings` are the row's launch settings.

    Raises NotSimulatedError for features that zsim lacks, and for settings that the row leaves open and no
    default settles.
    """
    if not is_mixture(run):
        if (run.count("ep") or 1) > 1:
            raise NotSimulatedError(f"expert parallelism (ep = {run.count('ep')}) without routed experts")
        return {}
    combined = {**settings, **expert_settings(run)}
    _refuse_unsupported(run)
    if combined.get("balanced") == "0":
        assumptions.append("routing: how uneven is not published, taken as the default")
    degree = run.count("ep") or 1
    table: dict[str, Any] = {"expert": degree} if degree > 1 else {}
    tensor = combined.get("etp", "").lower()
    if tensor == "tp":
        tensor = run.text("tp") or "1"
    if re.fullmatch(r"\d+(\.0*)?", tensor) and kind == "megatron":
        table["expert_tensor"] = int(float(tensor))
    elif kind == "megatron" and degree > 1 and not _divides(run, degree * (run.count("tp") or 1)):
        table["expert_tensor"] = 1
        assumptions.append("expert tensor parallelism: not published, taken as 1")
    dispatcher = re.sub(r"[^a-z]", "", combined.get("dispatcher", "").lower())
    is_used = degree > 1 or (kind == "megatron" and dispatcher == "allgather")
    if dispatcher in _DISPATCHERS and kind in ("megatron", "fsdp2") and is_used:
        table["dispatcher"] = _DISPATCHERS[dispatcher]
    elif degree > 1 and dispatcher not in _DISPATCHERS:
        assumptions.append("dispatcher: not published, taken as the framework's default")
    if _drops_tokens(run, combined):
        table["capacity_factor"] = _capacity(combined)
    if combined.get("balanced") == "1" or "force-balanced" in run.text("notes"):
        table["expert_imbalance"] = 1.0
    return table


def _divides(run: PublishedRun, ranks: int) -> bool:
    """Whether so many ranks divide the GPUs of a pipeline stage."""
    stage = (run.count("n_gpus") or 1) // (run.count("pp") or 1)
    return stage % ranks == 0


def expert_strategy(run: PublishedRun, settings: Mapping[str, str]) -> dict[str, Any]:
    """The keys of Megatron's strategy for routed experts, or {} without any.

    `settings` are the row's launch settings. Their `ep_overlap`, from recipes, comes with delayed gradients
    of weights (Megatron-Bridge's `_set_moe_a2a_overlap_overrides`, the model zoo's sbatch_benchmarking.sh).
    """
    if not is_mixture(run):
        return {}
    moe_note = expert_settings(run)
    table: dict[str, Any] = {"moe_grouped_gemm": moe_note.get("grouped_gemm", "1") != "0"}
    mtp_match = re.search(r"MTP: on(?: \((\d+) layers?\))?", run.text("notes"))
    if mtp_match is not None:
        table["mtp_layers"] = int(mtp_match[1] or 1)
    flags = dict(re.findall(_FLAG, run.text("notes")))
    if int(flags.get("mtp-num-layers", "0") or 0):
        table["mtp_layers"] = int(flags["mtp-num-layers"])
    resolved = re.search(r"resolved at [^:]*: mtp=(\d+)", run.text("notes"))
    count = resolved[1] if resolved is not None else settings.get("mtp", "")
    if count.isdigit():
        table["mtp_layers"] = int(count)
    is_overlapped = settings.get("ep_overlap", "0") == "1"
    if is_overlapped or flags.get("overlap-moe-expert-parallel-comm") == "True":
        table["overlap_expert_parallel"] = True
        table["delay_wgrad_compute"] = is_overlapped or flags.get("delay-wgrad-compute") == "True"
    return {**table, "moe_pad_to_capacity": True} if _drops_tokens(run, moe_note) else table


def _drops_tokens(run: PublishedRun, moe_note: Mapping[str, str]) -> bool:
    return "token dropping" in run.text("notes") or moe_note.get("capacity", "dropless") != "dropless"


def _capacity(moe_note: Mapping[str, str]) -> float:
    """The row's capacity factor, or 1, at which balanced experts drop nothing."""
    text = moe_note.get("capacity", "")
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 1.0


def _refuse_unsupported(run: PublishedRun) -> None:
    notes = run.text("notes")
    flags = dict(re.findall(_FLAG, notes))
    if flags.get("fine-grained-activation-offloading") == "True":
        raise NotSimulatedError("offload of single modules' activations is not simulated")
