"""The `[training]` of a published run: precision, recomputation, attention, optimizer, adapters."""

from __future__ import annotations

import re
from typing import Any

from validation.published.cluster import attention_variant
from validation.published.table import PublishedRun
from validation.published.vocabulary import read_words
from zsim.cost.kernels.update import OptimizerImplementation
from zsim.errors import NotSimulatedError

# Not of words in any order: "bf16, fp32 states" is another thing.
_PURE = (
    r"\b(pure|full|all)[ _-]?bf16|bf16[ _-]?(true|states|params|weights|only|pure)|"
    r"(states|weights) (in )?bf16"
)
_MODULE_NAMES = {"norm": "layernorm", "act": "moe_act"}
_MODULES = (
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out",
)  # fmt: skip
_MODULE_LIST = r"(?i)selective\W*(?:\(|:|\[)\s*\[?([a-z_+, ]+)\]?\)?$"
_PRECISIONS = {
    "nvfp4": "fp8", "mxfp8": "fp8", "fp8": "fp8", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"
}  # fmt: skip
_RECIPES = {
    "nvfp4": "nvfp4", "mxfp8": "mxfp8", "block scales": "block", "current scales": "current",
    "delayed scales": "delayed", "row scales": "torchao-rowwise",
}  # fmt: skip
_STATES = ("adafactor", "lion", "muon", "paged-adamw-8bit", "adamw-8bit", "paged-adamw", "sgd")
_PROJECTIONS = {
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "gate": "gate_proj", "up": "up_proj",
    "down": "down_proj",
}  # fmt: skip
# Megatron-Core's names of the products of latent attention, core/transformer/multi_latent_attention.py.
_LATENT_PROJECTIONS = {
    "linear_q_proj": "q_proj", "linear_q_down_proj": "q_a_proj", "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa", "linear_kv_up_proj": "kv_b_proj",
}  # fmt: skip
_BRIDGE_RANK = 32  # Megatron-Bridge's and NeMo's LoRA, `dim` of peft/lora.py


def precision_keys(run: PublishedRun, kind: str, assumptions: list[str]) -> dict[str, Any]:
    """Keys of the precision, with the recipe of fp8 training where the row says it. "tensorwise" is
    Megatron's word for current scales. Without any it is bf16's, by default."""
    text = run.text("precision")
    reading = read_words("precision", text)
    if not text:
        assumptions.append("precision")
        return {}
    precision = next((precision for word, precision in _PRECISIONS.items() if reading.has(word)), None)
    if precision is None and reading.has("4 bits", "int8"):
        precision = "bf16"  # of the products, whose weights are stored so
    if precision is None and re.search(r"(?i)mixed|amp|half|true|default|unstated", text):
        assumptions.append(f"precision: '{text}' taken as bf16")
        return {"precision": "bf16"}
    if precision is None:
        raise NotSimulatedError(f"precision '{text}' is not simulated")
    if precision != "fp8":
        return {"precision": precision}
    recipe = next((recipe for word, recipe in _RECIPES.items() if reading.has(word)), None)
    if reading.has("in parts") or "?" in text:
        assumptions.append(f"precision: '{text}' taken as {recipe or precision} throughout")
    if recipe is None and kind == "megatron" and reading.has("tensor scales"):
        recipe = "current"
    return {"precision": precision, "fp8_recipe": recipe} if recipe else {"precision": precision}


# -- recomputation ----------------------------------------------------------------------------------------


def checkpointing_keys(run: PublishedRun, kind: str, assumptions: list[str]) -> dict[str, Any]:
    """Keys of activation checkpointing: by default reentrant, and recomputing the whole block, unless a rule
    on the source says otherwise."""
    text = run.text("act_ckpt")
    modules, unknown = recomputed_modules(text)
    if unknown:
        assumptions.append(f"checkpointing: left out of '{text}': {', '.join(unknown)}")
    if modules:
        return {"activation_checkpointing": "selective", "recompute_modules": modules}
    policy, every = checkpointing_policy(run, kind, assumptions)
    groups: dict[str, Any] = {}
    block = re.search(r"(?i)\bblock\b\D*(\d+)", text) if kind == "megatron" else None
    if block is not None and policy == "full" and int(block[1]) > 1:
        groups = {"recompute_method": "block", "recompute_layers": int(block[1])}
    return {
        "activation_checkpointing": policy,
        "checkpoint_every": every,
        "checkpoint_is_reentrant": True,
        "checkpoint_stops_early": False,
        **groups,
    }


def recomputed_modules(text: str) -> tuple[list[str], list[str]]:
    """The modules of Megatron's `--recompute-modules` in "selective (layernorm+moe_act)", and the names there
    that it has not. Both are [] for other policies. The model zoo's "norm" and "act" are Megatron's layernorm
    and moe_act."""
    match = re.fullmatch(_MODULE_LIST, text.strip())
    names = [name for name in re.split(r"[+, ]+", match[1].lower()) if name] if match else []
    modules = [_MODULE_NAMES.get(name, name) for name in names]
    if not any(name in _MODULES for name in modules):
        return [], []
    return [name for name in modules if name in _MODULES], [name for name in modules if name not in _MODULES]


def checkpointing_policy(run: PublishedRun, kind: str, assumptions: list[str]) -> tuple[str, int]:
    """What is recomputed, and every how manieth block. Nothing where the row does not say."""
    text = run.text("act_ckpt")
    reading = read_words("checkpointing", text)
    interval = re.search(r"(?i)every\W*(\d+)", text)
    every = int(interval[1]) if interval else 1
    if reading.has("another policy") and not reading.has("operators"):
        return "full", _taken(f"checkpointing: '{text}' taken as full", assumptions)
    if reading.has("none") and (reading.has("unstated") or not reading.has("selective", "half")):
        return "none", 1
    if not reading.words or reading.words == {"unstated"}:
        taken = f"'{text}' taken as" if text and not reading.words else "not published, taken as"
        return "none", _taken(f"checkpointing: {taken} none", assumptions)
    if reading.has("near full"):  # according to the row's hardware and model FLOPs
        return "full", 1
    if reading.has("half") and (reading.has("full", "selective") or every == 2):
        return "full", 2
    if reading.has("operators"):
        return "selective-op", 1
    if reading.has("selective"):
        return _selective(text, kind, assumptions), 1
    return "full", every


def _taken(sentence: str, assumptions: list[str]) -> int:
    assumptions.append(sentence)
    return 1


def _selective(text: str, kind: str, assumptions: list[str]) -> str:
    """Megatron's is the core of attention, torchtitan's by operators; others are taken as Megatron's."""
    if kind == "fsdp2":
        assumptions.append(f"checkpointing: '{text}' taken as by operators, torchtitan's default")
        return "selective-op"
    if kind != "megatron" and not re.search(r"(?i)core[ _-]?att", text):
        assumptions.append(f"checkpointing: '{text}' taken as the core of attention")
    return "selective"


# -- the rest ---------------------------------------------------------------------------------------------


def attention_key(run: PublishedRun) -> str | None:
    """The attention of the row, or None for the GPU file's default."""
    return attention_variant(run) or None


def is_compiled(run: PublishedRun, assumptions: list[str]) -> bool:
    """Whether torch.compile compiles the blocks. Raises NotSimulatedError for other compilers."""
    text = run.text("compile").lower()
    if "thunder" in text:
        raise NotSimulatedError(f"compiler '{run.text('compile')}' is not torch.compile")
    if re.match(r"(yes|true|on|per[- ]block|torch\.?compile|inductor|full|max-autotune|1)\b", text):
        return True
    if text and not re.match(r"(no|none|false|off|eager|0|xla)\b", text):
        assumptions.append(f"compile: '{text}' taken as no")
    return False


def stored_dtype(run: PublishedRun) -> str:
    """The dtype in which weights and optimizer states are stored. transformers and litgpt can train in bf16
    throughout."""
    text = f"{run.text('precision')}, {run.text('optimizer')}"
    return "bf16" if re.search(_PURE, text.lower().replace("bfloat16", "bf16")) else "fp32"


def optimizer_name(run: PublishedRun) -> str:
    """The optimizer of the row, AdamW where it names none that zsim tells from it."""
    reading = read_words("optimizer", run.text("optimizer"))
    return next((name for name in _STATES if reading.has(name)), "adamw")


def optimizer_implementation(run: PublishedRun) -> OptimizerImplementation:
    """torch's foreach, the default of transformers, for "(HF)". A loop over tensors for composer's
    DecoupledAdamW. Fused for all others."""
    reading = read_words("optimizer", run.text("optimizer"))
    return "foreach" if reading.has("foreach") else "for_loop" if reading.has("loop") else "fused"


def adapter_keys(run: PublishedRun, kind: str, assumptions: list[str]) -> dict[str, Any]:
    """The keys of LoRA, {} for a run that trains all weights.

    A row is LoRA's that says so in its strategy, precision, optimizer, model, notes or `lora_rank`. What it
    does not say is the program's own: rank 8 of PEFT and 32 of Megatron-Bridge, its targets by name."""
    texts = [run.text(name) for name in ("strategy", "precision", "optimizer", "model", "notes", "flags")]
    whole = " ; ".join(texts)
    is_named = re.search(r"(?i)\bq?lora\b(?!\W*(off|none|no\b|0))|\bpeft\b(?!\W*(off|none|no\b))", whole)
    if not is_named and not run.count("lora_rank"):
        return {}
    rank = run.count("lora_rank") or _stated_rank(whole)
    table: dict[str, Any] = {}
    if rank is None:
        rank = _BRIDGE_RANK if kind == "megatron" else 8
        assumptions.append(f"adapters: rank not published, taken as {rank}")
    table["rank"] = rank
    targets = adapter_targets(run.text("lora_targets") or whole)
    if targets is None:
        assumptions.append("adapters: targets not published, taken as the program's own")
    else:
        table["targets"] = targets
    if kind != "megatron" and (
        re.search(r"(?i)\bqlora\b", whole) or read_words("precision", run.text("precision")).has("4 bits")
    ):
        table["quantized"] = "nf4"
    return {"lora": table}


def _stated_rank(text: str) -> int | None:
    match = re.search(r"(?i)\b(?:lora[_ -]?)?(?:r|rank|dim)\s*[=: ]\s*(\d+)|\blora[_ -]?(\d+)\b", text)
    return int(match[1] or match[2]) if match else None


def adapter_targets(text: str) -> str | list[str] | None:
    """The products that have adapters: "all-linear", names, or None where the text says nothing."""
    if re.search(r"(?i)all[ _-]?linear|every linear|all products", text):
        return "all-linear"
    named = re.findall(r"\b([a-z]+_proj|linear_(?:qkv|proj|fc1|fc2|(?:q|kv)(?:_down|_up)?_proj))\b", text)
    if named:
        return list(dict.fromkeys(_LATENT_PROJECTIONS.get(name, name) for name in named))
    letters = re.search(r"(?i)\b[qkvo](?: ?[,+/&] ?(?:[qkvo]|gate|up|down)\b)+", text)
    if letters:
        return [_PROJECTIONS[name.lower()] for name in re.findall(r"(?i)[a-z]+", letters[0])]
    if re.search(r"(?i)\b(qkvo|attention only|attn only)\b", text):
        return [_PROJECTIONS[name] for name in "qkvo"]
    return ["q_proj", "v_proj"] if re.search(r"(?i)\bqv\b", text) else None
