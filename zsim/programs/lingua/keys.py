"""The keys of lingua's YAML that a step depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.specs.formats.file_values import silent_keys
from zsim.specs.formats.program import ConfigMapping
from zsim.specs.formats.program_key import ProgramKey, tuned_mappings

_LINGUA = "lingua 437d680e, "
_TRAIN, _DISTRIBUTED = _LINGUA + "apps/main/train.py", _LINGUA + "lingua/distributed.py"

_KEYS = (
    ProgramKey(
        "data.batch_size", int, "sequences of a micro-batch", "training.micro_batch_size", is_plain=True,
        default=2, tuned=(), source=_LINGUA + "lingua/data.py",
    ),
    ProgramKey(
        "data.seq_len", int, "tokens of a sequence", "training.sequence_length", is_plain=True, default=2048,
    ),
    ProgramKey(
        "grad_acc_steps", int, "micro-batches of a step", "training.gradient_accumulation_steps",
        is_plain=True, default=1, tuned=(), source=_TRAIN,
    ),
    ProgramKey(
        "optim.clip", float, "norm that gradients are clipped to", "training.gradient_clipping",
        is_plain=True, default=1.0,
    ),
    ProgramKey(
        "distributed.compile", bool, "whether torch.compile is used", "training.compile", is_plain=True,
        default=False, tuned=(False, True), source=_DISTRIBUTED,
    ),
    ProgramKey(
        "distributed.model_dtype", str, "the type of products and of what is gathered", "training.precision",
        is_plain=True, values={"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}, default="bf16",
    ),
    ProgramKey("distributed.fsdp_type", str, "full_shard; no_shard is refused by name", "strategy.kind"),
    ProgramKey("distributed.dp_shard", int, "ranks that shard the model; 1 for all", "strategy.replicate"),
    ProgramKey("distributed.dp_replicate", int, "replicas, which lingua makes of the other degrees"),
    ProgramKey(
        "distributed.tp_size", int, "ranks that share a layer's products", "parallelism.tensor", tuned=(),
        source=_DISTRIBUTED,
    ),
    ProgramKey("distributed.selective_activation_checkpointing", bool, "some outputs of the model kept"),
    ProgramKey("distributed.float8_recipe", str, "products in fp8"),
    ProgramKey("model.dim", int, "width of the model", "model"),
    ProgramKey("model.n_layers", int, "blocks", "model"),
    ProgramKey("model.n_heads", int, "heads of queries", "model"),
    ProgramKey("model.n_kv_heads", int, "heads of keys and values", "model"),
    ProgramKey("model.head_dim", int, "width of a head", "model"),
    ProgramKey("model.ffn_dim_multiplier", float, "a factor of the MLP's width", "model"),
    ProgramKey("model.multiple_of", int, "what the MLP's width is rounded up to", "model"),
    ProgramKey("model.vocab_size", int, "words, of the tokenizer where left out", "model"),
    ProgramKey("model.weight_tying", bool, "whether the head is the embedding", "model"),
    ProgramKey("model.max_seqlen", int, "positions", "model"),
    ProgramKey("data.tokenizer.name", str, "bytes, whose words are known, or another", "model"),
    ProgramKey("model.state_dim", int, "state-space models", treatment="refused"),
    ProgramKey("model.conv_size", int, "recurrent models", treatment="refused"),
    ProgramKey("model.dimensions", list, "models of several levels", treatment="refused"),
    ProgramKey("model.n_future_head", int, "heads of further tokens", treatment="refused", neutral=(1,)),
)  # fmt: skip
KEYS: Mapping[str, ProgramKey] = {key.key: key for key in _KEYS}
CONFIG_MAPPINGS: Sequence[ConfigMapping] = tuned_mappings(KEYS.values())
# Keys without effect on a step: duration, data, logs, saves, evaluation, and how weights are drawn.
IDLE = silent_keys(
    """
    name dump_dir seed steps probe_freq gc_collect_freq profiling checkpoint logging eval async_eval_gpus env
    slurm optim.lr optim.weight_decay optim.epsilon optim.beta1 optim.beta2 optim.scheduler optim.warmup
    optim.lr_min_ratio optim.cycle_length optim.cosine_theta optim.annealing_step optim.decay_fraction
    optim.exp_factor data.root_dir data.sources data.prefetch_size data.n_views data.load_async data.tokenizer
    data.seed data.add_bos data.add_eos distributed.matmul_allow_tf32
    distributed.allow_bf16_reduced_precision_reduction distributed.detect_anomaly
    distributed.compile_cache_size_limit distributed.spawn_method distributed.float8_filter model.rope_theta
    model.norm_eps model.init_base_std model.init_std_factor model.seed
    """
)
