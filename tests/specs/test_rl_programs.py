"""verl's and NeMo-RL's YAML: the update of the trained model, with its parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.expect import of_kind, there
from zsim.engine.simulator import Simulator
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.fsdp1.settings import Fsdp1Table
from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.tables import Experiment
from zsim.workflows.rl.job import resolve_rl

VERL = """\
data: {train_batch_size: 1024, max_prompt_length: 512, max_response_length: 1536}
actor_rollout_ref:
  model: {path: meta-llama/Llama-3.1-8B, enable_gradient_checkpointing: true}
  actor:
    strategy: fsdp
    ppo_mini_batch_size: 256
    ppo_micro_batch_size_per_gpu: 2
    fsdp_config: {param_offload: true, optimizer_offload: true, fsdp_size: -1}
  rollout: {name: vllm, tensor_model_parallel_size: 2, n: 4}
trainer: {n_gpus_per_node: 8, nnodes: 2}
"""
MEGATRON = """\
data: {train_batch_size: 256, max_prompt_length: 512, max_response_length: 512}
actor_rollout_ref:
  model: {path: x}
  actor:
    strategy: megatron
    ppo_mini_batch_size: 64
    ppo_micro_batch_size_per_gpu: 1
    megatron: {tensor_model_parallel_size: 4, pipeline_model_parallel_size: 2, param_offload: true}
trainer: {n_gpus_per_node: 8, nnodes: 1}
"""
POLICY = """\
policy:
  model_name: meta-llama/Llama-3.1-8B
  train_global_batch_size: 256
  train_micro_batch_size: 2
  max_total_sequence_length: 4096
  precision: bfloat16
  max_grad_norm: 1.0
  dtensor_cfg: {enabled: true, activation_checkpointing: true, tensor_parallel_size: 2,
    sequence_parallel: true}
  megatron_cfg: {enabled: false, tensor_model_parallel_size: 8}
  optimizer: {name: torch.optim.AdamW, kwargs: {foreach: false, fused: false}}
cluster: {gpus_per_node: 8, num_nodes: 2}
"""


def read(path: Path, **overrides: Any) -> Experiment:
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    return build_experiment(
        {"cluster": "dgx-h100", "model": "llama-3.1-8b"},
        {"strategy.config": str(path), **changes},
        origin="test",
    )


def write(folder: Path, text: str, name: str = "a.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_verls_actor_is_fsdp_over_all_gpus_and_only_the_rollout_is_split(tmp_path: Path) -> None:
    """256 prompts with 4 responses are 1,024 sequences, on 16 ranks in micro-batches of 2: 32 of them."""
    found = read(write(tmp_path, VERL))
    table, training = of_kind(found.strategy, Fsdp1Table), found.training
    assert (found.gpus, found.parallelism.tensor) == (16, 1)
    assert (table.sharding_strategy, table.param_dtype, table.reduce_dtype) == ("FULL_SHARD", "bf16", "fp32")
    assert (table.cpu_offload, table.no_sync) == (False, False)
    assert (training.sequence_length, training.micro_batch_size) == (2048, 2)
    assert (training.gradient_accumulation_steps, training.activation_checkpointing) == (32, "full")
    assert training.optimizer_implementation == "foreach"
    update = "one of 4 of the actor, over 1,024 sequences of 2,048 tokens, the longest"
    assert [update in note for note in found.notes].count(True) == 1
    assert any(
        "param_offload, optimizer_offload: on the GPU during the update" in note for note in found.notes
    )


def test_verls_groups_of_shards_are_replicas(tmp_path: Path) -> None:
    text = VERL.replace("fsdp_size: -1", "fsdp_size: 8, reshard_after_forward: false")
    table = of_kind(read(write(tmp_path, text)).strategy, Fsdp1Table)
    assert (table.sharding_strategy, table.replicate) == ("_HYBRID_SHARD_ZERO2", 2)
    text = VERL.replace("strategy: fsdp", "strategy: fsdp2").replace("fsdp_size: -1", "offload_policy: true")
    second = of_kind(read(write(tmp_path, text)).strategy, Fsdp2Table)
    assert (second.cpu_offload, second.reshard_after_forward) == (True, True)


def test_verls_micro_batches_by_tokens_are_whole_sequences(tmp_path: Path) -> None:
    """16,384 tokens hold 8 of 2,048, and a rank's 64 sequences are 8 such micro-batches."""
    text = VERL.replace("ppo_micro_batch_size_per_gpu: 2", "use_dynamic_bsz: true")
    training = read(write(tmp_path, text)).training
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (8, 8)


def test_verls_megatron_is_megatrons(tmp_path: Path) -> None:
    """64 sequences on one replica of 4 x 2 GPUs."""
    found = read(write(tmp_path, MEGATRON))
    table = of_kind(found.strategy, MegatronTable)
    assert (found.parallelism.tensor, found.parallelism.pipeline) == (4, 2)
    assert found.parallelism.sequence_parallel is True
    assert table.distributed_optimizer is True
    assert found.training.gradient_accumulation_steps == 64
    assert found.training.precision == "bf16"
    assert found.training.activation_checkpointing == "none"
    full = "override_transformer_config: {recompute_granularity: full, recompute_method: uniform, "
    text = MEGATRON.replace("param_offload: true", f"{full}recompute_num_layers: 1}}")
    assert read(write(tmp_path, text)).training.activation_checkpointing == "full"


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("strategy: fsdp", "strategy: veomni", NotSimulatedError, "does not simulate 'veomni'"),
        ("ppo_micro_batch_size_per_gpu: 2", "x: 1", InputError, "which verl asks for unless use_dynamic_bsz"),
        ("fsdp_size: -1", "dtype: float16", NotSimulatedError, "float16 of verl's; expected bfloat16"),
    ],
)
def test_what_verl_cannot_be_simulated_with_is_refused(
    tmp_path: Path, old: str, new: str, error: type[Exception], message: str
) -> None:
    assert old in VERL
    with pytest.raises(error, match=message):
        read(write(tmp_path, VERL.replace(old, new)))


def test_nemo_rls_policy_is_fsdp2_with_dtensor(tmp_path: Path) -> None:
    """256 sequences on 16 / 2 replicas in micro-batches of 2: 16 of them."""
    found = read(write(tmp_path, POLICY))
    table, training = of_kind(found.strategy, Fsdp2Table), found.training
    assert (found.gpus, found.parallelism.tensor, found.parallelism.sequence_parallel) == (16, 2, True)
    assert (table.param_dtype, table.reduce_dtype, table.no_sync) == ("bf16", "fp32", False)
    assert (training.gradient_accumulation_steps, training.optimizer_implementation) == (16, "for_loop")
    assert training.activation_checkpointing == "full"


def test_nemo_rls_files_extend_others(tmp_path: Path) -> None:
    write(tmp_path, POLICY, "base.yaml")
    write(tmp_path, "defaults: base.yaml\npolicy: {train_micro_batch_size: 4}\n", "middle.yaml")
    child = write(
        tmp_path,
        "defaults: [middle.yaml]\ngrpo: {num_prompts_per_step: 8}\npolicy:\n  train_global_batch_size: 512\n"
        "  dtensor_cfg: {_override_: true, enabled: true}\n",
    )
    found = read(child)
    assert (found.training.micro_batch_size, found.training.sequence_length) == (4, 4096)
    assert found.parallelism.tensor == 1
    assert found.training.gradient_accumulation_steps == 8


def test_references_are_followed_once_files_are_merged(tmp_path: Path) -> None:
    """The parent's micro-batch is a reference to a key that the child changes."""
    parent = POLICY.replace("train_micro_batch_size: 2", "train_micro_batch_size: ${policy.size}\n  size: 2")
    write(tmp_path, parent, "base.yaml")
    child = write(tmp_path, "defaults: base.yaml\npolicy: {size: 8}\ncluster: {num_nodes: 2}\n")
    assert read(child).training.micro_batch_size == 8


def test_a_file_is_nemo_rls_where_the_file_that_it_extends_is(tmp_path: Path) -> None:
    """Recipes that change the machines alone have no mark of their own."""
    write(tmp_path, POLICY, "base.yaml")
    child = write(tmp_path, "defaults: base.yaml\nlogger: {x: 1}\ncluster: {num_nodes: 4}\n")
    assert (read(child).program, read(child).gpus) == ("nemo-rl", 32)
    other = write(tmp_path, "defaults: nowhere.yaml\nlogger: {}\n", "other.yaml")
    with pytest.raises(InputError, match="is no file of a program that zsim reads"):
        read(other)


def test_a_file_that_is_extended_and_missing_is_named(tmp_path: Path) -> None:
    child = write(tmp_path, "defaults: none.yaml\npolicy: {model_name: x}\ncluster: {num_nodes: 1}\n")
    with pytest.raises(InputError, match=r"defaults: 'none.yaml': .*tried .*none.yaml"):
        read(child)
    loop = write(tmp_path, "defaults: loop.yaml\npolicy: {model_name: x}\ncluster: {}\n", "loop.yaml")
    with pytest.raises(InputError, match="defaults: expected the name of a file"):
        read(loop)


def test_nemo_rls_megatron_takes_its_fields(tmp_path: Path) -> None:
    text = POLICY.replace("dtensor_cfg: {enabled: true,", "dtensor_cfg: {enabled: false,").replace(
        "megatron_cfg: {enabled: false,",
        "megatron_cfg: {enabled: true, activation_checkpointing: true, mtp_num_layers: 0,\n"
        "    moe_token_dispatcher_type: alltoall, optimizer: "
        "{optimizer: adam, use_distributed_optimizer: true},\n"
        "    distributed_data_parallel_config: {overlap_grad_reduce: true, grad_reduce_in_fp32: false},",
    )
    found = read(write(tmp_path, text))
    table = of_kind(found.strategy, MegatronTable)
    assert (found.parallelism.tensor, table.distributed_optimizer, table.overlap_grad_reduce) == (
        8,
        True,
        True,
    )
    assert table.grad_reduce_dtype == "bf16"
    assert (found.training.activation_checkpointing, found.training.gradient_clipping) == ("full", 1.0)


def under_megatron(keys: str) -> str:
    text = POLICY.replace("dtensor_cfg: {enabled: true,", "dtensor_cfg: {enabled: false,")
    return text.replace("megatron_cfg: {enabled: false,", f"megatron_cfg: {{enabled: true, {keys},")


def test_megatrons_fp8_of_nemo_rl_is_its_recipe(tmp_path: Path) -> None:
    text = under_megatron("fp8_cfg: {enabled: true, fp8: e4m3, fp8_recipe: blockwise, fp8_param: false}")
    training = read(write(tmp_path, text)).training
    assert (training.precision, training.fp8_recipe) == ("fp8", "block")
    off = read(write(tmp_path, text.replace("fp8_cfg: {enabled: true", "fp8_cfg: {enabled: false")))
    assert (off.training.precision, off.training.fp8_recipe) == ("bf16", None)


def test_megatrons_adapters_of_nemo_rl_without_targets_are_on_every_layer(tmp_path: Path) -> None:
    """But not on the routed experts, whose grouped layers are of no type that its `ModuleMatcher` takes."""
    text = under_megatron("peft: {enabled: true, dim: 16, alpha: 32, target_modules: [], dropout: 0.0}")
    lora = there(read(write(tmp_path, text)).training.lora)
    assert (lora.rank, lora.alpha, lora.exclude) == (16, 32, r".*\.experts\..*")
    assert lora.targets == ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def test_what_nemo_rls_megatron_leaves_out_is_named(tmp_path: Path) -> None:
    keys = "use_fused_linear_logprobs: true, defer_fp32_logits: false"
    notes = " ".join(read(write(tmp_path, under_megatron(keys))).notes)
    assert "use_fused_linear_logprobs: left out, so the loss keeps its logits" in notes
    assert "defer_fp32_logits" not in notes


def test_nothing_overlaps_a_gather_of_one_bucket(tmp_path: Path) -> None:
    """Without overlap_grad_reduce Megatron-Core makes one bucket, whose gather forward waits for."""
    section = "distributed_data_parallel_config: {overlap_grad_reduce: false, overlap_param_gather: true}"
    found = read(write(tmp_path, under_megatron(section)))
    assert not of_kind(found.strategy, MegatronTable).overlap_param_gather
    assert any("overlap_param_gather: without overlap_grad_reduce" in note for note in found.notes)


def test_experts_of_nemo_rls_dtensor_are_split_among_ranks(tmp_path: Path) -> None:
    """Automodel keeps what forward gathers, unless `moe_parallelizer` says otherwise."""

    def dispatched(backend: str) -> Experiment:
        keys = f"expert_parallel_size: 8, automodel_kwargs: {{backend: {{{backend}}}}},"
        text = POLICY.replace("dtensor_cfg: {enabled: true,", f"dtensor_cfg: {{enabled: true, {keys}")
        return read(write(tmp_path, text))

    found = dispatched("enable_deepep: true")
    assert dispatched("enable_deepep: true, dispatcher: torch").parallelism.dispatcher == "deepep"
    assert dispatched("dispatcher: hybridep").parallelism.dispatcher == "hybridep"
    with pytest.raises(NotSimulatedError, match=r"backend\.dispatcher: zsim does not simulate 'uccl'"):
        dispatched("dispatcher: uccl")
    table = of_kind(found.strategy, Fsdp2Table)
    assert (found.parallelism.expert, found.parallelism.dispatcher) == (8, "deepep")
    assert (table.wrapping, table.reshard_after_forward) == ("torchtitan", False)


def test_stages_of_megatron_whose_ends_have_less_are_split_once_the_model_is_known(tmp_path: Path) -> None:
    """32 layers: 7 on the first of 4 ranks, 9 on the last, and 8 on those between."""
    text = POLICY.replace("dtensor_cfg: {enabled: true,", "dtensor_cfg: {enabled: false,").replace(
        "megatron_cfg: {enabled: false, tensor_model_parallel_size: 8",
        "megatron_cfg: {enabled: true, pipeline_model_parallel_size: 4, "
        "num_layers_in_first_pipeline_stage: 7, num_layers_in_last_pipeline_stage: 9",
    )
    assert read(write(tmp_path, text)).parallelism.layers_per_stage == (7, 8, 8, 9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (POLICY + "distillation: {max_num_steps: 10}\n", "distillation: zsim does not simulate .*a teacher"),
        (POLICY.replace("policy:\n", "policy:\n  quant_cfg: NVFP4_DEFAULT_CFG\n"), "quantisation-aware"),
    ],
)
def test_what_nemo_rl_trains_otherwise_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(NotSimulatedError, match=words):
        read(write(tmp_path, text))


def test_dpo_of_nemo_rl_counts_pairs_and_asks_a_reference(tmp_path: Path) -> None:
    """Twice the sequences in a micro-batch and in an update, so as many micro-batches as of GRPO."""
    alone, pairs = (
        read(write(tmp_path, POLICY + text)).training for text in ("", "dpo: {max_num_steps: 10}\n")
    )
    assert (alone.reference, pairs.reference) == (None, "copy")
    assert (alone.micro_batch_size, pairs.micro_batch_size) == (2, 4)
    assert pairs.gradient_accumulation_steps == alone.gradient_accumulation_steps
    adapters = POLICY.replace(
        "dtensor_cfg: {enabled: true,", "dtensor_cfg: {enabled: true, lora_cfg: {enabled: true},"
    )
    assert read(write(tmp_path, adapters + "dpo: {max_num_steps: 10}\n")).training.reference == "base"


def test_ppo_of_nemo_rl_has_a_critic_and_its_own_names(tmp_path: Path) -> None:
    loop = "ppo: {num_prompts_per_step: 128, num_generations_per_prompt: 2, ppo_epochs: 3}\n"
    found = read(write(tmp_path, POLICY + loop + "value: {model_name: Qwen/Qwen2.5-1.5B}\n"))
    table = there(found.rl)
    assert (table.algorithm, table.prompts_per_step, table.samples_per_prompt) == ("ppo", 128, 2)
    assert (table.epochs, table.critic.model) == (3, "qwen2.5-1.5b")
    job = resolve_rl(found, Simulator())
    assert (there(job.critic_job).model.name, job.updates) == ("qwen2.5-1.5b", 3)
    with pytest.raises(InputError, match=r"value\.model_name"):
        read(write(tmp_path, POLICY + loop + "value: {model_name: nobody/nothing}\n"))


def test_what_changes_nemo_rls_policy_is_named(tmp_path: Path) -> None:
    more = "policy:\n  draft: {enabled: true}\n  hf_config_overrides: {num_hidden_layers: 4, rope_theta: 1}\n"
    text = POLICY.replace("policy:\n", more).replace(
        "dtensor_cfg: {enabled: true,",
        "dtensor_cfg: {enabled: true, env_vars: {PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:True'}, "
        "automodel_kwargs: {backend: {linear: te}},",
    )
    found = read(write(tmp_path, text))
    notes = " ".join(found.notes)
    assert found.training.expandable_segments
    assert "policy.draft: the draft model" in notes
    assert "left out: num_hidden_layers; --set" in notes
    assert "linear te" in notes


@pytest.mark.parametrize(
    ("name", "pattern"), [("*down_proj*", ".*down_proj.*"), ("down_proj", r"(.*\.)?down_proj")]
)
def test_adapters_of_nemo_rl_leave_out_what_is_excluded(tmp_path: Path, name: str, pattern: str) -> None:
    """Without targets every product but the excluded ones has an adapter."""
    adapters = f"lora_cfg: {{enabled: true, dim: 4, match_all_linear: false, exclude_modules: ['{name}']}},"
    text = POLICY.replace("dtensor_cfg: {enabled: true,", f"dtensor_cfg: {{enabled: true, {adapters}")
    lora = there(read(write(tmp_path, text)).training.lora)
    assert (lora.rank, lora.targets, lora.exclude) == (4, "all-linear", pattern)


def test_gpus_that_generate_do_not_train(tmp_path: Path) -> None:
    resources = "  generation: {colocated: {enabled: false, resources: {num_nodes: 1}}}\ncluster:"
    found = read(write(tmp_path, POLICY.replace("cluster:", resources)))
    assert found.gpus == 8
    assert any("8 of 16 GPUs generate; 8 train" in note for note in found.notes)


VERL_COMMAND = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=512 "
    "data.max_prompt_length=512 data.max_response_length=512 +actor_rollout_ref.actor.grad_clip=0.5 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 trainer.n_gpus_per_node=8 "
)


def launched(command: str) -> Experiment:
    data = {"cluster": "dgx-h100", "model": "llama-3.1-8b"}
    return build_experiment(data, {"strategy.config": command}, origin="test")


def test_a_file_that_hydra_is_told_is_read(tmp_path: Path) -> None:
    """Its keys stand over verl's own, and the command's over both. One that is not here is named."""
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ndata: {max_prompt_length: 100, max_response_length: 300}\n"
    )
    options = f"--config-path={tmp_path} --config-name=mine"
    command = VERL_COMMAND.replace("main_ppo", f"main_ppo {options}").replace(
        "data.max_prompt_length=512 data.max_response_length=512", "data.max_response_length=400"
    )
    assert launched(command).training.sequence_length == 100 + 400
    (tmp_path / "mine.yaml").rename(tmp_path / "no_megatron.yaml")
    assert launched(command.replace("=mine", "=no_megatron")).strategy.kind == "fsdp1"
    assert launched(command.replace("=mine", "=megatron_elsewhere")).strategy.kind == "megatron"
    missing = launched(command.replace("mine", "none"))
    assert any("--config-name none: not here" in note for note in missing.notes)
    with pytest.raises(InputError, match=r"ppo_micro_batch_size_per_gpu: missing.*--config-name none: not h"):
        launched(f"python3 -m verl.trainer.main_ppo --config-path={tmp_path} --config-name=none")


def test_the_defaults_of_a_file_that_hydra_is_told_are_read(tmp_path: Path) -> None:
    """In their order, Megatron's keys of verl's among them. A group of options is named in a note."""
    (tmp_path / "more.yaml").write_text("data: {max_prompt_length: 100, max_response_length: 300}\n")
    command = VERL_COMMAND.replace("data.max_prompt_length=512 data.max_response_length=512", "")
    command += f"--config-path={tmp_path} --config-name=mine"

    def composed(defaults: str) -> Experiment:
        (tmp_path / "mine.yaml").write_text(f"defaults: {defaults}\ndata: {{max_prompt_length: 200}}\n")
        return launched(command)

    assert composed("[ppo_trainer, more, _self_]").training.sequence_length == 200 + 300
    assert composed("[ppo_trainer, _self_, more]").training.sequence_length == 100 + 300
    assert composed("[ppo_megatron_trainer]").strategy.kind == "megatron"
    noted = composed("[ppo_trainer, absent, {model: big}]")
    assert noted.strategy.kind == "fsdp1"
    for note in ("mine.yaml: defaults: absent: not here", "mine.yaml: defaults: {'model': 'big'}: not read"):
        assert any(note in each for each in noted.notes)
    (tmp_path / "run.sh").write_text(command.replace(str(tmp_path), '"$PWD"'))
    composed("[more]")
    assert launched(str(tmp_path / "run.sh")).training.sequence_length == 200 + 300
    with pytest.raises(InputError, match="do not name one another"):
        composed("[mine]")


def test_verls_command_overrides_its_own_files() -> None:
    """Its example scripts have no file. 256 prompts, verl's default, on 8 ranks in micro-batches of 4: 8."""
    found = launched(f"{VERL_COMMAND} actor_rollout_ref.rollout.n=1")
    assert (found.program, found.strategy.kind, found.gpus) == ("verl", "fsdp1", 8)
    training = found.training
    assert (training.micro_batch_size, training.sequence_length) == (4, 1024)
    assert (training.gradient_accumulation_steps, training.gradient_clipping) == (8, 0.5)
    megatron = launched(
        f"{VERL_COMMAND} --config-name=ppo_megatron_trainer.yaml "
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    )
    assert (megatron.strategy.kind, megatron.parallelism.tensor) == ("megatron", 2)
    fused = launched(f"{VERL_COMMAND} actor_rollout_ref.model.use_fused_kernels=True").training
    assert (fused.cross_entropy, training.cross_entropy) == ("fused_linear", None)
    dapo = launched(VERL_COMMAND.replace("verl.trainer.main_ppo", "recipe.dapo.main_dapo"))
    assert dapo.training == launched(VERL_COMMAND).training
    nodes = launched(f"{VERL_COMMAND} trainer.nnodes=$NODES")
    assert "trainer.nnodes: $NODES is nothing that the script sets" in "".join(nodes.notes)
    with pytest.raises(NotSimulatedError, match="does not read this trainer of verl's"):
        launched("torchrun --nproc_per_node 8 -m verl.experimental.vla.main_ppo data.x=1")


@pytest.mark.parametrize(
    "flags",
    [
        "--micro_train_batch_size 2 --train_batch_size 128 --max_len 1024 --zero_stage 3 --bf16 --zpg 1 "
        "--gradient_checkpointing --adam_offload --pretrain meta-llama/Llama-3.1-8B",
        "--train.micro_batch_size 2 --train.batch_size 128 --data.max_len 1024 --ds.zero_stage 3 "
        "--model.gradient_checkpointing_enable --ds.adam_offload --model.model_name_or_path x",
    ],
)
def test_openrlhfs_flags_of_both_generations_are_deepspeeds(flags: str) -> None:
    """128 sequences on 8 ranks in micro-batches of 2: 8 of them."""
    found = launched(f"deepspeed --num_gpus 8 --module openrlhf.cli.train_sft {flags}")
    assert (found.program, found.strategy.kind, found.gpus) == ("openrlhf", "deepspeed", 8)
    zero = found.strategy.model_dump()["config"]["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]["device"]) == (3, "cpu")
    training = found.training
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (2, 8)
    assert (training.sequence_length, training.activation_checkpointing) == (1024, "full")
    assert training.precision == "bf16"


def test_openrlhfs_dpo_counts_pairs_and_has_a_reference_of_its_own() -> None:
    """64 pairs on 8 GPUs in micro-batches of 2 pairs are 4 of 4 sequences, also beside adapters, of 512
    tokens where nothing is said (train_dpo.py `--max_len`).
    """
    flags = (
        "--train.batch_size 64 --train.micro_batch_size 2 --ds.zero_stage 3 --ds.lora.rank 8 --model.beta 0.1"
    )
    found = launched(f"deepspeed --num_gpus 8 --module openrlhf.cli.train_dpo {flags}")
    training = found.training
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (4, 4)
    assert (training.reference, training.cross_entropy, training.sequence_length) == ("copy", "eager", 512)
    assert not any("model.beta" in note for note in found.notes)
    command = f"deepspeed --num_gpus 8 --module openrlhf.cli.train_dpo {flags}"
    for flag in ("--ref.offload", "--ref_offload"):
        with pytest.raises(
            NotSimulatedError, match=r"ref\.offload: .* a reference of OpenRLHF's on the host"
        ):
            launched(f"{command} {flag}")
    command += " --model.model_name_or_path meta-llama/Llama-3.1-8B --ref.model_name_or_path meta-llama"
    assert launched(f"{command}/Llama-3.1-8B").training.reference == "copy"
    with pytest.raises(NotSimulatedError, match=r"ref\.model_name_or_path: .* of another model"):
        launched(f"{command}/Llama-3.1-70B")


def test_openrlhfs_reward_model_has_pairs_and_one_output() -> None:
    """128 pairs on 8 GPUs, one at a time, of 512 tokens where nothing is said."""
    found = launched("deepspeed --num_gpus 8 --module openrlhf.cli.train_rm --bf16 --zero_stage 3")
    training = found.training
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (2, 16)
    assert (training.labels, training.sequence_length, training.reference) == (1, 512, None)


def test_openrlhfs_ppo_is_the_actors_update() -> None:
    command = "python3 -m openrlhf.cli.train_ppo_ray --actor_num_nodes 1 --actor_num_gpus_per_node 4 --bf16 "
    found = launched(
        f"{command} --micro_train_batch_size 4 --train_batch_size 64 --prompt_max_len 512 "
        f"--generate_max_len 1536"
    )
    assert (found.gpus, found.training.sequence_length) == (4, 2048)
    assert found.training.gradient_accumulation_steps == 4
    assert any("one update alone is simulated, of the actor" in note for note in found.notes)
    with pytest.raises(NotSimulatedError, match="expected train_sft, train_dpo, train_rm or train_ppo_ray"):
        launched("deepspeed --num_gpus 8 --module openrlhf.cli.train_kto --bf16 --pretrain x")
    with pytest.raises(NotSimulatedError, match=r"ds.ring_attn_size: .*ring attention"):
        launched("deepspeed --num_gpus 8 --module openrlhf.cli.train_sft --bf16 --ring_attn_size 2")


def test_openrlhfs_responses_have_a_cap_of_their_own_by_either_name() -> None:
    command = (
        "python3 -m openrlhf.cli.train_ppo_ray --actor_num_gpus_per_node 8 --vllm_num_engines 8 --bf16 "
        "--colocate_all_models --advantage_estimator reinforce_baseline --micro_train_batch_size 1 "
        "--pretrain Qwen/Qwen3-8B --max_len 9216 --max_new_tokens 8192 --dynamic_filtering"
    )
    found = launched(command)
    assert there(found.rl).lengths.max_response == 8192
    assert any("algo.dynamic_filtering_enable: left out: rl.sampling_rounds" in note for note in found.notes)
    assert there(launched(f"{command} --async_train --partial_rollout").rl).partial_rollout


def test_verls_actor_says_the_ranks_of_a_sequence_before_the_engine_does() -> None:
    """A value above 1 is written over the engine's, which a whole configuration has as 1."""
    command = (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
    )
    key = "ulysses_sequence_parallel_size"
    actor = f"{command} actor_rollout_ref.actor.{key}=2"
    for engine in ("", f" actor_rollout_ref.actor.fsdp_config.{key}=1"):
        assert launched(f"{actor}{engine}").parallelism.context == 2
    own = launched(f"{command} actor_rollout_ref.actor.fsdp_config.{key}=4")
    assert own.parallelism.context == 4
    assert not any(key in note for note in own.notes)


def test_verls_reward_model_scores_and_dapo_draws_more_prompts_than_it_trains_on() -> None:
    """512 prompts are trained on. Without a filter all that are drawn are."""
    scored = launched(
        f"{VERL_COMMAND} reward_model.enable=True reward_model.model.path=meta-llama/Llama-3.1-8B"
    )
    assert there(scored.rl).reward.model == "llama-3.1-8b"
    unknown = launched(f"{VERL_COMMAND} reward_model.enable=True reward_model.model.path=/mine")
    assert "'/mine' is left out: rl.reward.model" in " ".join(unknown.notes)
    drawn = f"{VERL_COMMAND} data.gen_batch_size=1536"
    filtered = there(launched(f"{drawn} algorithm.filter_groups.enable=True").rl)
    assert (filtered.prompts_per_step, filtered.sampling_rounds) == (512, 3.0)
    whole = there(launched(drawn).rl)
    assert (whole.prompts_per_step, whole.sampling_rounds) == (1536, 1.0)
    fork = launched(f"{VERL_COMMAND} data.n_samples=4")
    assert fork.rl is None
    assert "PRIME's fork are not simulated" in " ".join(fork.notes)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.gen_batch_size=0", "gen_batch_size: found 0, expected a whole number of at least 1"),
        ("data.gen_batch_size=many", "gen_batch_size: found 'many', expected a whole number"),
        (
            "actor_rollout_ref.actor.fsdp_config.fsdp_size=3",
            "fsdp_size: found 3, expected a divisor of 8 GPUs",
        ),
        ("model=3", "model: found 3, expected keys and values below it"),
    ],
)
def test_what_verl_would_stumble_over_is_one_error(override: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        launched(f"{VERL_COMMAND} {override}")


def test_openrlhfs_models_on_gpus_of_their_own_leave_the_actors_update() -> None:
    """A critic, a reference or a reward model beside the actor: its GPUs are no part of the actor's."""
    command = (
        "python3 -m openrlhf.cli.train_ppo_ray --actor_num_nodes 1 --actor_num_gpus_per_node 4 --bf16 "
        "--pretrain meta-llama/Meta-Llama-3-8B --vllm_num_engines 2 --micro_train_batch_size 4 "
        "--train_batch_size 64 "
    )
    found = launched(f"{command} --critic_num_gpus_per_node 4 --reward_pretrain x/reward")
    assert (found.rl, found.gpus) == (None, 4)
    words = "a reference and a critic and a reward model on GPUs of their own are not simulated"
    assert any(words in note for note in found.notes)
    assert any("attn_implementation: taken as flash_attention_2" in note for note in found.notes)
    joint = launched(f"{command} --advantage_estimator group_norm --colocate_actor_ref --flash_attn")
    assert (there(joint.rl).placement, joint.gpus) == ("split", 6)
    assert not any("attn_implementation" in note for note in joint.notes)


def test_verls_dynamic_update_takes_no_more_prompts_than_a_step_has() -> None:
    command = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=512 actor_rollout_ref.actor.use_dynamic_bsz=True "
        "actor_rollout_ref.rollout.n=8 actor_rollout_ref.model.path=Qwen/Qwen3-8B"
    )
    training = launched(command).training
    assert (training.micro_batch_size or 0) * (training.gradient_accumulation_steps or 0) * 8 == 64 * 8
    agent = launched(f"{command} actor_rollout_ref.rollout.n_agent=5")
    assert agent.rl is None
    assert any("turns of an agent of Search-R1's fork are not simulated" in note for note in agent.notes)
    assert there(launched(f"{command} actor_rollout_ref.rollout.n_agent=1").rl).samples_per_prompt == 8
    with pytest.raises(InputError, match=r"trainer\.val_only true: trains nothing"):
        launched(f"{command} +trainer.val_only=true")


def test_verls_fsdp_reduces_in_the_type_that_the_file_says() -> None:
    command = (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
    )
    key = "+actor_rollout_ref.actor.fsdp_config.mixed_precision"
    assert of_kind(launched(command).strategy, Fsdp1Table).reduce_dtype == "fp32"
    strategy = of_kind(launched(f"{command} {key}.reduce_dtype=bfloat16").strategy, Fsdp1Table)
    assert (strategy.param_dtype, strategy.reduce_dtype) == ("bf16", "bf16")
    with pytest.raises(NotSimulatedError, match=r"mixed_precision\.param_dtype: .* 'fp16'"):
        launched(f"{command} {key}.param_dtype=fp16")


EASY_R1 = """\
data: {max_prompt_length: 1024, max_response_length: 2048, rollout_batch_size: 256}
algorithm: {adv_estimator: grpo, disable_kl: false}
worker:
  actor:
    global_batch_size: 64
    micro_batch_size_per_device_for_update: 2
    model: {model_path: Qwen/Qwen2.5-7B-Instruct, lora: {rank: 32, exclude_modules: .*visual.*}}
    fsdp: {enable_full_shard: false, enable_rank0_init: true, torch_dtyp: bf16}
    offload: {offload_params: true}
  rollout: {n: 5, temperature: 1.0, tensor_parallel_size: 4}
  ref: {fsdp: {enable_cpu_offload: true}}
trainer: {n_gpus_per_node: 8, nnodes: 1}
"""


def test_easy_r1_is_verl_by_other_names(tmp_path: Path) -> None:
    """64 prompts with five answers are 320 sequences, 40 of each rank, two at a time."""
    found = read(write(tmp_path, EASY_R1))
    training, rl = found.training, there(found.rl)
    strategy = of_kind(found.strategy, Fsdp1Table)
    assert (found.program, found.gpus, strategy.sharding_strategy) == ("verl", 8, "SHARD_GRAD_OP")
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (2, 20)
    assert (training.sequence_length, training.optimizer_implementation) == (3072, "fused")
    assert training.frozen_dtype is None
    assert (there(training.lora).rank, there(training.lora).exclude) == (32, ".*visual.*")
    assert (rl.prompts_per_step, rl.samples_per_prompt, rl.mini_batch_samples) == (256, 5, 320)
    assert (rl.reference, rl.micro_batch_tokens, there(rl.rollout).tensor) == ("host", 6144, 4)
    assert any("not read: worker.actor.fsdp.torch_dtyp" in note for note in found.notes)
    fixed = read(write(tmp_path, EASY_R1.replace("  actor:\n", "  actor:\n    dynamic_batching: false\n")))
    assert there(fixed.rl).micro_batch_tokens is None
    plain = read(write(tmp_path, EASY_R1.replace("adv_estimator: grpo", "adv_estimator: rloo")))
    assert there(plain.rl).algorithm == "rloo"
    for old, new, words in (
        ("{rank: 32", "{rank: many", r"worker\.actor\.model\.lora\.rank: found 'many', expected a whole"),
        ("global_batch_size: 64", "global_batch_size: []", r"worker\.actor\.global_batch_size: found \[\]"),
        ("for_update: 2", "for_update: 0", r"worker\.actor\.micro_batch_size_per_device_for_update: found 0"),
        ("nnodes: 1}", "val_only: true}", "trains nothing"),
    ):
        with pytest.raises(InputError, match=words):
            read(write(tmp_path, EASY_R1.replace(old, new)))
    with pytest.raises(NotSimulatedError, match=r"worker\.actor\.optim\.strategy: found 'adamw_bf16'"):
        read(write(tmp_path, EASY_R1.replace("    model:", "    optim: {strategy: adamw_bf16}\n    model:")))


@pytest.mark.parametrize("ulysses", [1, 2])
def test_easy_r1s_micro_batches_are_those_of_all_ranks_of_ulysses(tmp_path: Path, ulysses: int) -> None:
    """Tokens of two longest samples in updates, and of three in passes without backward."""
    sizes = f"    ulysses_size: {ulysses}\n    micro_batch_size_per_device_for_experience: 3\n"
    found = read(write(tmp_path, EASY_R1.replace("  actor:\n", f"  actor:\n{sizes}")))
    rl = there(found.rl)
    assert (found.parallelism.context, found.training.micro_batch_size) == (ulysses, 2)
    assert (rl.micro_batch_tokens, rl.logprob_micro_batch_tokens) == (2 * 3072, 3 * 3072)


def test_the_command_of_easy_r1_changes_keys_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, EASY_R1, "config.yaml")
    monkeypatch.chdir(tmp_path)
    command = "python3 -m verl.trainer.main config=config.yaml worker.rollout.n=8 trainer.n_gpus_per_node=4"
    found = build_experiment({"cluster": "dgx-h100"}, {"strategy.config": command}, origin="test")
    assert (found.model, found.gpus, there(found.rl).samples_per_prompt) == ("qwen2.5-7b", 4, 8)


def test_lengths_that_are_assumed_are_named_unless_the_experiment_says_them(tmp_path: Path) -> None:
    """0.51 of a cap of 1,536 tokens are 783."""
    path = write(tmp_path, VERL)
    stated = read(path, rl__lengths__response__mean=600, rl__lengths__prompt__mean=200)
    assert any("responses of 783 tokens in the mean are assumed" in note for note in read(path).notes)
    assert not any("are assumed" in note for note in stated.notes)
