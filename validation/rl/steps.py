"""The experiment of a published step of reinforcement learning."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from validation.rl.table import RlRow
from validation.rl.words import Layout, cluster_of, dtype_of, model_of, split_of
from zsim.errors import NotSimulatedError
from zsim.programs.rollout import assumed_response
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.tables import Experiment
from zsim.specs.library import Library
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.registry import workflow_names
from zsim.workflows.rl.framework import workflow_of

_ASSUMED_SAMPLES = (64, 8)  # prompts and samples of each, of rows about one phase alone
ASSUMED_RESPONSES = "responses of"
_ASSUMED_PROMPT = 128.0  # tokens, where nothing is said
_TRIGGER_STEPS, _SCRIPT_STALENESS = 4, 0.5  # of verl's fully asynchronous scripts
_ONE_STEP_OFF = r"(one|1)[ _-]?step[ _-]?off"
_ONE_STEP_OFF_COLUMNS = ("placement", "algorithm", "framework", "source", "source_location")
"""The words for verl's recipe that generates a batch while the one before it is trained on, which streams no
prompts."""
_SMALL_OPT = {
    "model_type": "opt", "vocab_size": 50272, "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "max_position_embeddings": 2048, "word_embed_proj_dim": 512,
    "do_layer_norm_before": False, "tie_word_embeddings": True,
}  # fmt: skip
"""OPT-350M, the critic and the reward model of DeepSpeed-Chat's tables."""
_PRIME_RL_FIRST = r"^Jan 2026"
"""prime-rl's first benchmarks, 15 January 2026 at 11d87ee8. Optimizer states stayed on the GPUs
(`optim_cpu_offload` came with e41036a1 of 3 February), and the tokens a second that `train_s` comes from are
of the time from step to step, in which full fine-tuning gathers its weights on the first rank and copies them
to ordinary memory (trainer/rl/broadcast/filesystem.py, trainer/weights.py `gather_weights_on_master`).
Between forward and backward the host reads the position of every token of a micro-batch from the GPU, one by
one, to find where responses begin: a kernel and a copy each (trainer/utils.py `get_response_lengths`, until
fa21395a of 15 June)."""
_ENGINE_VERSIONS: Mapping[str, Mapping[tuple[int, int], str]] = {
    "nemo-rl": {(0, 3): "0.9.0", (0, 4): "0.10.0", (0, 5): "0.11.2", (0, 6): "0.17.1", (0, 7): "0.20.0"},
    "verl": {
        (0, 3): "0.8.2",
        (0, 4): "0.8.5",
        (0, 5): "0.8.5",
        (0, 6): "0.11.0",
        (0, 7): "0.12.0",
        (0, 8): "0.12.0",
    },
}
"""vLLM's by release: NeMo-RL's pyproject.toml, and the newest that verl's setup.py takes."""
_CHAT_SAMPLES = 16
"""Samples of a GPU that DeepSpeed-Chat generates and trains at once where nobody says (DeepSpeedExamples
45b4b715 training/step3_rlhf_finetuning/main.py, `per_device_generation_batch_size`)."""
_VERL_LOGS = r"-bsz?\d+_(\d+)-"
"""Samples of a micro-batch on a GPU, in names of verl's logs as in "Qwen2.5-7B-bsz64_8-prompt512-...": their
scripts have one `ppo_micro_batch_size` of 64 for all of 8 GPUs, and `use_remove_padding` (verl-project/verl
281ecd4c examples/tuning)."""
_FUSED_PERMUTATION = r"235B|DeepSeek-V3"
"""Models whose recipes of NeMo-RL v0.4 and v0.5 set `moe_permute_fusion`; those of 30B-A3B leave it off
(NVIDIA-NeMo/RL c751f811 and 6c708930 examples/configs/recipes/llm/performance)."""
_DYNAMIC_TOKENS = 16384  # of a micro-batch, the default of verl and its like


@dataclass(frozen=True)
class RowExperiment:
    """The experiment of a row."""

    experiment: Experiment
    phase: str | None
    """The phase that the row is about, None if it is about whole steps."""
    assumptions: tuple[str, ...]
    """What the row leaves open, and how it was settled."""
    gathers_weights: bool = False
    """Its seconds of training have the copy of all weights to the host of the first rank in them."""
    read_tokens: int = 0
    """Tokens of a replica's step whose positions the host reads one by one while the GPU waits."""


def row_experiment(row: RlRow, library: Library) -> RowExperiment:
    """The experiment of a row. Raises NotSimulatedError for one that leaves too much open."""
    assumptions: list[str] = []
    phase = _phase(row)
    layout = Layout(row.text("train_parallelism"))
    cluster_name = _cluster(row, phase, assumptions)
    cluster = library.cluster(cluster_name)
    per_node = row.count("gpus_per_node") or cluster.gpus_per_node
    placement = placement_of(row)
    gpus, training_gpus, rollout_gpus = _gpus(row, placement, phase, assumptions)
    model_name = model_of(row.text("model"))
    model = library.model(model_name)
    table: dict[str, Any] = {"extends": cluster_name, "gpus_per_node": per_node}
    cards = re.search(r"(\d+) NICs of ([\d.]+) GB/s", row.text("gpu"))
    if cards:
        table["nic"] = {"per_node": int(cards[1]), "bandwidth": f"{cards[2]} GB/s"}
    data: dict[str, Any] = {
        "model": model_name,
        "cluster": table if cards or per_node != cluster.gpus_per_node else cluster_name,
        "gpus": gpus,
        "nodes": -(-gpus // per_node),
        "simulation": {"known_to_fit": True},
        "strategy": _strategy(layout, training_gpus, has_adapters=row.has_word("lora", "algorithm")),
        "parallelism": _parallelism(row, layout, model),
        "training": _training(row, layout),
    }
    is_megatron = data["strategy"]["kind"] == "megatron"  # rows about a sync alone may not say so
    if is_megatron and row.has_word("nemo-rl", "framework") and row.has_word(_FUSED_PERMUTATION, "model"):
        data["strategy"]["moe_permute_fusion"] = True
    is_first = _is_first_prime_rl(row)
    if row.has_word("optimizer states on CPU", "offload") and not is_first:
        data["strategy"]["offload_states"] = True
    if phase == "training":
        _set_batch(row, data, training_gpus)
        batch = data["training"]
        read_tokens = batch["sequence_length"] * batch["gradient_accumulation_steps"] if is_first else 0
        gathers = is_first and not row.has_word("lora", "algorithm")
        experiment = Experiment.of_data(data, origin=row.row_id)
        return RowExperiment(experiment, phase, tuple(assumptions), gathers, read_tokens)
    data["rl"] = _rl_table(row, placement, rollout_gpus, phase, assumptions)
    _set_engine(data["rl"]["rollout"], row, model, cluster, rollout_gpus or gpus, assumptions)
    _set_micro_batch(row, data, layout)
    experiment = Experiment.of_data(data, origin=row.row_id)
    if phase == "weight_sync" and model.towers:
        experiment = change_experiment(experiment, {"model.text_only": True})
        assumptions.append("a language model alone")
    return RowExperiment(experiment, phase, tuple(assumptions))


def _is_first_prime_rl(row: RlRow) -> bool:
    return row.has_word("prime-rl", "framework") and row.has_word(_PRIME_RL_FIRST, "version")


def _cluster(row: RlRow, phase: str | None, assumptions: list[str]) -> str:
    """The preset of the row's GPU. Syncs of an unknown GPU are taken to be of the one that most rows have."""
    if phase == "weight_sync" and row.has_word(r"^$|not stated", "gpu"):
        assumptions.append("H100")
        return "dgx-h100"
    return cluster_of(row.text("gpu"))


def _phase(row: RlRow) -> str | None:
    if row.has_word(r"sync-only|weight sync only", "algorithm"):
        return "weight_sync"
    if row.has_word(r"trainer only|train phase|training only", "algorithm"):
        return "training"
    return None


def placement_of(row: RlRow) -> str:
    text = row.text("placement").lower()
    for pattern, placement in (
        (r"async|off-policy|one.?step|disaggregated async", "async"),
        (r"split|apart|disaggr|separat|non-?coloc", "split"),
    ):
        if re.search(pattern, text) and not text.startswith("coloc"):
            return placement
    return "colocated"


def _gpus(
    row: RlRow, placement: str, phase: str | None, assumptions: list[str]
) -> tuple[int, int, int | None]:
    """GPUs of the job, of its trainer, and of its rollout if they are its own."""
    total, split = row.count("n_gpus"), split_of(row.text("gpu_split"))
    if phase == "training":
        training = split[0] if split and split[0] else total
        if not training:
            raise NotSimulatedError("the number of GPUs is not published")
        return training, training, None
    if not total and split:
        total = sum(split)
    if not total:
        if phase != "weight_sync":
            raise NotSimulatedError("the number of GPUs is not published")
        trainer, engine = Layout(row.text("train_parallelism")), Layout(row.text("gen_parallelism"))
        training = _ranks(trainer)
        rollout = engine.tensor * (engine.data or 1)
        if placement == "colocated":
            return training, training, None
        assumptions.append(f"{training} GPUs train and {rollout} generate")
        return training + rollout, training, rollout
    if placement == "colocated":
        return total, total, None
    if split and all(split):
        return sum(split), split[0], split[1]
    assumptions.append("half of the GPUs generate")
    return total, total - total // 2, total // 2


def _ranks(layout: Layout) -> int:
    """GPUs that the degrees of a trainer multiply to. Expert ranks are taken from the data-parallel ones."""
    others = prod((layout.tensor, layout.pipeline, layout.context))
    dense = others * (layout.data or 1)
    experts = layout.pipeline * layout.expert * (layout.degree("etp") or 1)
    return dense if dense % experts == 0 else dense * experts // gcd(dense, experts)


def _strategy(layout: Layout, gpus: int, *, has_adapters: bool) -> dict[str, Any]:
    text = layout.text.lower()
    stage = re.search(r"zero[- ]?(?:stage )?-?([0-3])", text)
    if stage or "deepspeed" in text:
        return {"kind": "deepspeed", "stage": int(stage[1]) if stage else 3}
    if re.search(r"megatron|mcore|dist-opt", text):
        return {"kind": "megatron"}
    if re.search(r"\bddp\b", text):
        return {"kind": "ddp"}
    kind = "fsdp1" if re.search(r"fsdp ?1|fsdp1|fsdp(?! ?2)", text) and "fsdp2" not in text else "fsdp2"
    group = layout.degree("fsdp_size")
    offload: dict[str, Any] = (
        {"cpu_offload": True} if re.search(r"cpu_offload|params? (?:on|to) cpu", text) else {}
    )
    offload |= {"wrapping": "peft"} if kind == "fsdp1" and has_adapters else {}
    if group and group < gpus and gpus % group == 0:
        return {"kind": kind, "replicate": gpus // group, **offload}
    return {"kind": kind, **offload}


def _parallelism(row: RlRow, layout: Layout, model: ModelSpec) -> dict[str, Any]:
    is_megatron = layout.has(r"megatron|mcore|dist-opt")
    degrees = {
        "tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context,
        "expert": layout.expert,
    }  # fmt: skip
    table: dict[str, Any] = {name: degree for name, degree in degrees.items() if degree > 1}
    if layout.tensor > 1:
        table["sequence_parallel"] = layout.has(r"\bsp\b|sequence parallel") or is_megatron
    expert_tensor = layout.degree("etp")
    if layout.expert > 1 and (expert_tensor or is_megatron):
        table["expert_tensor"] = expert_tensor or 1
    virtual = layout.degree("vpp", "vp")
    if virtual and virtual > 1 and layout.pipeline > 1:
        table["virtual_stages"] = virtual
    if layout.context > 1 and layout.has("ulysses") and not layout.has("fsdp"):
        table["context_method"] = "all-to-all"
    layers = len(model.blocks)
    if layers % (layout.pipeline * (virtual or 1)):
        table["layers_per_stage"] = _stages(row, layers, layout.pipeline)
        table.pop("virtual_stages", None)
    return table


def _stages(row: RlRow, layers: int, stages: int) -> list[int]:
    """Layers of the stages where they are not alike: those that the row says of the first and the last, else
    the first and the last have one less than others, as embedding and head are beside them.
    """
    ends = re.search(r"first/last stage layers (\d+)/(\d+)", row.text("notes"))
    if ends and stages > 2:
        first, last = int(ends[1]), int(ends[2])
        size, rest = divmod(layers - first - last, stages - 2)
        return [first, *[size + (stage < rest) for stage in range(stages - 2)], last]
    size, rest = divmod(layers, stages)
    return [size + (0 < stage <= rest) for stage in range(stages)]


def _training(row: RlRow, layout: Layout) -> dict[str, Any]:
    precision = dtype_of(row.text("precision_train"))
    table: dict[str, Any] = {"precision": precision if precision in ("bf16", "fp16", "fp8") else "bf16"}
    if row.has_word(
        r"activation checkpointing(?! ?(false|off|none))|gradient checkpointing", "offload", "notes"
    ):
        table["activation_checkpointing"] = "full"
    if row.has_word(r"activation checkpointing:? ?(false|off|none)", "notes"):
        table["activation_checkpointing"] = "none"
    if row.has_word("sync-only", "algorithm"):
        table["precision"] = "bf16"
    table.setdefault("activation_checkpointing", "full" if not layout.has("megatron") else "none")
    lora = row.number("algorithm") if row.has_word("lora", "algorithm") else None
    if row.has_word("lora", "algorithm"):
        rank = re.search(r"r(?:ank)? ?(\d+)", row.text("algorithm"))
        table["lora"] = {"rank": int(rank[1]) if rank else int(lora or 16), "targets": "all-linear"}
        if row.has_word("prime-rl", "framework"):
            table["frozen_dtype"] = "fp32"  # `optimization_dtype` of all weights
    if row.has_word("activation offload", "offload"):
        table["checkpoint_offload"] = "stream"
    if layout.has(r"compile"):
        table["compile"] = True
    if row.has_word(r"prime-rl", "framework"):
        table["cross_entropy"] = "prime-rl-words" if _is_first_prime_rl(row) else "prime-rl-chunked"
    return table


def _lengths(row: RlRow, phase: str | None, assumptions: list[str]) -> dict[str, Any]:
    cap = row.count("response_len_max")
    total_cap = row.count("total_len_max")
    prompt = row.number("prompt_len_mean")
    mean = row.number("response_len_mean")
    total = row.number("total_len_mean")
    if prompt is None:
        prompt = max(16.0, total - mean) if total and mean else min(_ASSUMED_PROMPT, (total_cap or 1024) / 4)
        assumptions.append(f"prompts of {prompt:.0f} tokens")
    if cap is None and total_cap:
        cap = max(1, int(total_cap - prompt))
    if mean is None and total:
        mean = max(1.0, total - prompt)
    if mean is None:
        if cap is None:
            if phase is None:
                raise NotSimulatedError("the lengths of responses are not published")
            cap = 1024
        mean = float(assumed_response(cap))
        if phase is None:
            assumptions.append(f"{ASSUMED_RESPONSES} {mean:,.0f} tokens")
    is_constant = row.has_word(r"constant|exactly|fixed|static", "length_law")
    response: dict[str, Any] = {"mean": mean}
    if is_constant or (cap is not None and mean >= 0.98 * cap):
        return {
            "prompt": {"mean": prompt},
            "response": {"law": "constant", "mean": mean},
            "max_response": max(cap or 0, int(mean)),
        }
    return {
        "prompt": {"mean": prompt},
        "response": response,
        "max_response": cap or int(4 * mean),
    }


def _rl_table(
    row: RlRow, placement: str, rollout_gpus: int | None, phase: str | None, assumptions: list[str]
) -> dict[str, Any]:
    prompts, samples = row.count("prompts_per_step"), row.count("samples_per_prompt")
    if not prompts:
        if phase is None:
            raise NotSimulatedError("the number of prompts of a step is not published")
        prompts, samples = _ASSUMED_SAMPLES
    samples = samples or 1
    framework = _framework(row, placement, assumptions)
    table: dict[str, Any] = {
        "framework": framework,
        "algorithm": _algorithm(row),
        "placement": placement,
        "prompts_per_step": prompts,
        "samples_per_prompt": samples,
        "lengths": _lengths(row, phase, assumptions),
        "rollout": _rollout(row, rollout_gpus),
    }
    updates = row.number("updates_per_rollout")
    total = prompts * samples
    if updates and updates > 1 and total % round(updates) == 0:
        table["mini_batch_samples"] = total // round(updates)
    table |= _passes(row)
    sync = row.text("notes")
    if re.search(r"nccl_reshard|shard-to-shard|p2p reshard|rdma|ddma|multi sender", sync, re.IGNORECASE):
        table["sync"] = {"transport": "reshard"}
    elif row.has_word(r"checkpoint-engine", "framework") or re.search("weights from host memory", sync):
        table["sync"] = {"transport": "host"}
    elif sync.startswith("per-tensor"):
        table["sync"] = {"bucket": 0}
    elif "serial iteration" in sync:
        raise NotSimulatedError("NeMo-RL before v0.4.0 gathers, sends and loads in turn (pull request 1379)")
    flight = re.search(
        r"in-flight weight updates (true|false)|partial rollout", row.text("notes"), re.IGNORECASE
    )
    if flight and placement == "async":
        table["partial_rollout"] = (flight[1] or "true").lower() == "true"
    if framework == "deepspeed-chat":
        table["critic"] = {"model": _SMALL_OPT}
        table["reward"] = {"model": _SMALL_OPT}
    if placement == "colocated" and row.has_word(r"params? ?\+ ?optimizer", "offload", "train_parallelism"):
        table["offload"] = {"parameters": True, "optimizer": True}
    if placement == "async":
        age = re.search(
            r"max age (\d+)|(\d+)[ -](?:step )?off|staleness (\d+)", row.text("notes") + row.text("algorithm")
        )
        value = next((int(group) for group in age.groups() if group), 1) if age else 1
        table["max_staleness"] = max(1, value)
        if row.has_word("verl", "framework") and row.has_word(_ONE_STEP_OFF, *_ONE_STEP_OFF_COLUMNS):
            table |= {"max_staleness": 1, "partial_rollout": False}
        elif row.has_word("verl", "framework") and updates:
            table |= _stream(row, prompts, round(updates))
    return table


def _stream(row: RlRow, prompts: int, updates: int) -> dict[str, Any]:
    """verl's fully asynchronous loop. What a row does not say is that of its script, as
    `verl/experimental/fully_async_policy/shell/dapo_7b_math_fsdp2_64_64.sh` at b178a3cd has it.
    """
    notes = row.text("notes")
    staleness = re.search(r"staleness ([\d.]+)", notes)
    batches = re.search(r"require_batches (\d+)|sync every \d+ x (\d+)", notes)
    mini_batches = int(batches[1] or batches[2]) if batches else max(1, updates // _TRIGGER_STEPS)
    value = float(staleness[1]) if staleness else _SCRIPT_STALENESS
    return {
        "max_staleness": value,
        "partial_rollout": value > 0,
        "stream_prompts": prompts * mini_batches // updates,
    }


def _framework(row: RlRow, placement: str, assumptions: list[str]) -> str:
    """The framework of a row, or verl where zsim has none of that name with that placement."""
    name = re.sub(r"[^a-z0-9]+", "-", row.text("framework").lower()).strip("-")
    words = {known: known.replace("-", "") for known in workflow_names()}
    words |= {"nemo-rl": "nemo", "deepspeed-chat": r"deepspeed|ds-chat", "prime-rl": "prime"}
    for known, pattern in words.items():
        if re.search(pattern, name) or re.search(pattern, name.replace("-", "")):
            if placement in workflow_of(known).placements:
                return known
            break
    assumptions.append(f"framework '{row.text('framework')}', {placement}, as verl")
    return "verl"


def _algorithm(row: RlRow) -> str:
    text = row.text("algorithm").lower()
    for pattern, name in (
        (r"dapo", "dapo"), (r"grpo|gspo", "grpo"), (r"rloo|reinforce", "rloo"), (r"ppo", "ppo"),
        (r"online.?dpo", "online-dpo"), (r"\bdpo\b", "dpo"),
    ):  # fmt: skip
        if re.search(pattern, text):
            return name
    return "grpo"


def _passes(row: RlRow) -> Mapping[str, Any]:
    text = row.text("logprob_passes").lower()
    if not text:
        return {}
    table: dict[str, Any] = {}
    has_reference = re.search(r"\bref", text) is not None
    table["reference"] = "resident" if has_reference else "none"
    if re.search(r"none|rollout|skip|bypass", text):
        table["old_logprobs"] = "rollout"
    elif re.search(r"old|policy|actor", text):
        table["old_logprobs"] = "recomputed"
    return table


def _rollout(row: RlRow, gpus: int | None) -> dict[str, Any]:
    text = row.text("gen_parallelism")
    layout = Layout(text)
    table: dict[str, Any] = {"tensor": layout.tensor}
    expert = layout.expert
    if expert > layout.tensor and expert % layout.tensor == 0:
        table["expert"] = expert
    if gpus is not None:
        table["gpus"] = gpus
    memory = re.search(r"(?:gpu_mem\w*|mem(?:ory)?(?:_fraction)?\w*) ?[=:]? ?(0?\.\d+|1\.0)", text)
    if memory:
        table["gpu_memory_utilization"] = float(memory[1])
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        value = re.search(rf"{name} ?[=:]? ?(\d[\d,]*)", text)
        if value:
            table[name] = int(value[1].replace(",", ""))
    if re.search(r"eager", text):
        table["enforce_eager"] = True
    dtype = dtype_of(row.text("precision_gen"))
    table["precision"] = dtype if dtype in ("bf16", "fp16", "fp8") else "bf16"
    engine = next(
        (name for name in ("sglang", "vllm", "trtllm") if name in text.lower().replace("-", "")), None
    )
    if engine:
        table["engine"] = engine
    if engine in (None, "vllm") and (version := _engine_version(row)):
        table["engine_version"] = version
    return table


def _engine_version(row: RlRow) -> str | None:
    """vLLM's release in a release of a framework. None for the newest."""
    release = re.search(r"(\d+)\.(\d+)", row.text("version"))
    if release is None:
        return None
    for name, releases in _ENGINE_VERSIONS.items():
        if row.has_word(name, "framework"):
            return releases.get((int(release[1]), int(release[2])))
    return None


def _set_engine(
    table: dict[str, Any], row: RlRow, model: ModelSpec, cluster: Cluster, gpus: int, assumptions: list[str]
) -> None:
    """The tensor ranks of an engine that the row does not say: as few as leave half of their share of the
    memory to the cache.
    """
    if row.has_word("sync-only", "algorithm"):  # whatever its cache
        table.update(gpu_memory_utilization=0.98, max_num_batched_tokens=1024)
    text = re.sub(r"\(.*?\)", "", row.text("gen_parallelism"))
    if Layout(text).degree("tp", "tensor parallel") or table.get("expert"):
        table["tensor"] = Layout(text).tensor
    else:
        size = 1 if table["precision"] == "fp8" else 2
        share = table.get("gpu_memory_utilization", 0.6) * cluster.gpu.memory.capacity / 2
        tensor = 1
        while model.numel * size / tensor > share and tensor < gpus:
            tensor *= 2
        table["tensor"] = tensor
        if tensor > 1:
            assumptions.append(f"engines of {tensor} GPUs")
    if table["tensor"] > gpus or gpus % table["tensor"]:
        raise NotSimulatedError(f"engines of {table['tensor']} GPUs do not divide {gpus}")


def _set_batch(row: RlRow, data: dict[str, Any], gpus: int) -> None:
    """The batch of a trainer that is measured alone: sequences that are all as long as they may be."""
    length = row.count("total_len_max") or row.count("total_len_mean")
    samples = (row.count("prompts_per_step") or 0) * (row.count("samples_per_prompt") or 1)
    if not length or not samples:
        raise NotSimulatedError("the batch of the trainer is not published")
    parallelism = data["parallelism"]
    replicas = max(1, gpus // prod(parallelism.get(name, 1) for name in ("tensor", "pipeline", "context")))
    per_replica = max(1, samples // replicas)
    data["training"] |= {
        "sequence_length": length, "micro_batch_size": 1, "gradient_accumulation_steps": per_replica,
    }  # fmt: skip
    data["simulation"] = {"known_to_fit": True, "every_micro_batch": False}


def _set_micro_batch(row: RlRow, data: dict[str, Any], layout: Layout) -> None:
    """Tokens of a packed micro-batch, of which the longest sample has to fit one."""
    lengths = data["rl"]["lengths"]
    longest = int(lengths["max_response"] + lengths["prompt"]["mean"] + 1)
    length = max(longest, row.count("total_len_max") or 0)
    text = row.text("micro_batch")
    packed = re.search(r"(\d+) ?x ?([\d,]+) tokens", text)
    tokens = re.search(r"([\d,]{4,}) tokens", f"{text}; {layout.text}")
    if packed:
        size = int(packed[1]) * int(packed[2].replace(",", ""))
    elif tokens:
        size = int(tokens[1].replace(",", "")) * layout.context
    else:
        size = max(_DYNAMIC_TOKENS * layout.context, length)
    multiple = 16 * layout.context * layout.tensor
    length = -(-length // multiple) * multiple
    count = max(1, round(size / length))
    if passes := re.search(r"logprob (\d+)x(\d+)", text):
        data["rl"]["logprob_micro_batch_tokens"] = int(passes[1]) * int(passes[2])
    if samples := re.search(_VERL_LOGS, row.text("source_location")):
        data["rl"]["batching"], count = "unpadded", int(samples[1])
    if data["rl"]["framework"] == "deepspeed-chat":
        sequences = re.search(r"(\d+) (?:sequence|sample|pair|per|a GPU)", text)
        count = int(sequences[1]) if sequences else _CHAT_SAMPLES
        count = min(
            count, -(-data["rl"]["prompts_per_step"] * data["rl"]["samples_per_prompt"] // data["gpus"])
        )
    data["training"] |= {"sequence_length": length, "micro_batch_size": count}
