"""The whole step in files of programs of reinforcement learning: `[rl]` as each has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.expect import of_kind, there
from zsim.engine.simulator import Simulator
from zsim.errors import NotSimulatedError
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.programs.rollout import assumed_response
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.rl import RlTable
from zsim.specs.experiment.tables import Experiment
from zsim.units import AS_IN_FILES
from zsim.workflows.rl.result import simulate_rl

VERL = """\
data: {train_batch_size: 64, max_prompt_length: 512, max_response_length: 1536}
actor_rollout_ref:
  model: {path: meta-llama/Llama-3.1-8B}
  actor:
    strategy: fsdp
    use_kl_loss: true
    ppo_mini_batch_size: 16
    ppo_micro_batch_size_per_gpu: 2
    fsdp_config: {param_offload: true, optimizer_offload: true}
  rollout: {name: vllm, tensor_model_parallel_size: 2, n: 4, gpu_memory_utilization: 0.6}
  ref: {fsdp_config: {param_offload: true}}
algorithm: {adv_estimator: grpo}
trainer: {n_gpus_per_node: 8, nnodes: 1}
"""
NEMO_BASE = """\
policy:
  model_name: meta-llama/Llama-3.1-8B
  train_global_batch_size: 256
  train_micro_batch_size: 2
  max_total_sequence_length: 2048
  precision: bfloat16
  max_grad_norm: 1.0
  dtensor_cfg: {enabled: true, activation_checkpointing: true, tensor_parallel_size: 1}
  generation: {backend: vllm, vllm_cfg: {tensor_parallel_size: 1, gpu_memory_utilization: 0.6}}
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16}
loss_fn: {reference_policy_kl_penalty: 0.01}
cluster: {gpus_per_node: 8, num_nodes: 2}
"""
NEMO = """\
defaults: base.yaml
policy:
  generation:
    vllm_cfg: {gpu_memory_utilization: 0.8}
    colocated: {enabled: false, resources: {num_nodes: 1, gpus_per_node: 8}}
grpo: {async_grpo: {enabled: true, max_trajectory_age_steps: 2, in_flight_weight_updates: true}}
"""
OPENRLHF = (
    "python3 -m openrlhf.cli.train_ppo_ray --actor.num_nodes 1 --actor.num_gpus_per_node 4 --ds.zero_stage 3 "
    "--vllm.num_engines 2 --vllm.tensor_parallel_size 2 --rollout.batch_size 64 "
    "--rollout.n_samples_per_prompt 4 --train.batch_size 64 --train.micro_batch_size 2 --data.max_len 2048 "
    "--rollout.max_new_tokens 1024 --algo.advantage.estimator group_norm --algo.kl.init_coef 0 "
)


PRIME = """\
seq_len = 4096
[model]
name = "Qwen/Qwen3-8B"
[deployment]
num_train_gpus = 4
num_infer_gpus = 4
[orchestrator]
batch_size = 64
group_size = 8
max_off_policy_steps = 2
[trainer.optim]
lr = 1e-6
[inference.parallel]
tp = 2
"""


def read(source: str, **overrides: Any) -> Experiment:
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    return build_experiment(
        {"cluster": "dgx-h100", "model": "llama-3.2-1b"},
        {"strategy.config": source, **changes},
        origin="test",
    )


def verl(folder: Path, text: str = VERL) -> str:
    (folder / "verl.yaml").write_text(text)
    return str(folder / "verl.yaml")


def nemo(folder: Path) -> str:
    (folder / "base.yaml").write_text(NEMO_BASE)
    (folder / "nemo.yaml").write_text(NEMO)
    return str(folder / "nemo.yaml")


def prime(folder: Path, text: str = PRIME) -> str:
    (folder / "rl.toml").write_text(text)
    return str(folder / "rl.toml")


def openrlhf(folder: Path) -> str:
    return OPENRLHF


def rollout_of(found: Experiment) -> RlTable:
    assert found.rl is not None
    return found.rl


def test_no_mean_is_assumed_beyond_those_that_were_published() -> None:
    """0.51 of a cap of 4,096 tokens, and at most 3,252."""
    assert [assumed_response(cap) for cap in (1, 4096, 28672)] == [1, 2089, 3252]


def test_verls_units_are_prompts(tmp_path: Path) -> None:
    """64 prompts with 4 responses, updates of 16 prompts: 256 samples, 64 an update."""
    table = rollout_of(read(verl(tmp_path)))
    assert (table.framework, table.algorithm, table.placement) == ("verl", "grpo", "colocated")
    assert (table.prompts_per_step, table.samples_per_prompt, table.mini_batch_samples) == (64, 4, 64)
    assert (table.reference, table.epochs, table.lengths.max_response) == ("host", 1, 1536)
    assert (table.rollout.tensor, table.rollout.gpu_memory_utilization) == (2, 0.6)
    assert (table.offload.parameters, table.offload.optimizer) == (True, True)


def test_verls_defaults_have_a_critic_and_no_reference(tmp_path: Path) -> None:
    text = VERL.replace("    use_kl_loss: true\n", "").replace("adv_estimator: grpo", "gamma: 1.0")
    table = rollout_of(read(verl(tmp_path, text)))
    assert (table.algorithm, table.reference) == ("ppo", "none")


def test_what_is_not_simulated_leaves_the_update(tmp_path: Path) -> None:
    for old, new in (("name: vllm", "name: hf"), ("adv_estimator: grpo", "adv_estimator: remax")):
        found = read(verl(tmp_path, VERL.replace(old, new)))
        assert found.rl is None
        assert any("one update alone is simulated, one of 4 of the actor" in note for note in found.notes)


def test_verls_command_line_is_its_file() -> None:
    table = rollout_of(
        read(
            "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=512 "
            "actor_rollout_ref.rollout.n=5 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 "
            "actor_rollout_ref.rollout.max_num_seqs=128 data.max_response_length=2048"
        )
    )
    assert (table.prompts_per_step, table.samples_per_prompt, table.mini_batch_samples) == (512, 5, 1280)
    assert (table.rollout.tensor, table.rollout.max_num_seqs, table.lengths.max_response) == (2, 128, 2048)


VERL_COMMAND = (
    "python3 -m {target} algorithm.adv_estimator=grpo data.train_batch_size=64 actor_rollout_ref.rollout.n=8 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 "
)


def test_verls_engine_is_a_group_of_files() -> None:
    """`model_engine` chooses Megatron's actor, as ppo_megatron_trainer did."""
    command = VERL_COMMAND.format(target="verl.trainer.main_ppo")
    found = read(
        f"{command} model_engine=megatron actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    )
    assert (found.strategy.kind, found.parallelism.tensor) == ("megatron", 2)
    with pytest.raises(NotSimulatedError, match="does not simulate 'veomni' of verl's"):
        read(f"{command} model_engine=veomni")


def test_verls_optimizer_may_update_on_the_host(tmp_path: Path) -> None:
    """Megatron's actor takes `override_optimizer_config` as Megatron's own fields, and its reference may wait
    on the host by a key of its own.
    """
    text = VERL.replace("strategy: fsdp\n", "strategy: megatron\n")
    text = text.replace("ref: {fsdp_config", "ref: {megatron")
    text = text.replace(
        "    fsdp_config: {param_offload: true, optimizer_offload: true}\n",
        "    optim: {override_optimizer_config: {optimizer_cpu_offload: true, "
        "optimizer_offload_fraction: 0.5, use_precision_aware_optimizer: true}}\n",
    )
    path = tmp_path / "ppo.yaml"
    path.write_text(text)
    found = read(str(path))
    table = of_kind(found.strategy, MegatronTable)
    assert (table.optimizer_offload_fraction, table.precision_aware_optimizer) == (0.5, True)
    assert there(found.rl).reference == "host"
    path.write_text(VERL.replace("strategy: fsdp\n", "strategy: fsdp\n    optim: {optimizer: AdamW8bit}\n"))
    with pytest.raises(NotSimulatedError, match=r"'AdamW8bit' of torch\.optim under verl; expected AdamW"):
        read(str(path))


@pytest.mark.parametrize(
    ("changes", "kind", "tokens"),
    [
        ("use_dynamic_bsz: true\n    ulysses_sequence_parallel_size: 2", "packed", 2 * 16384),
        ("use_dynamic_bsz: true\n    ppo_max_token_len_per_gpu: 9000", "packed", 9000),
        ("grad_clip: 1.0", "unpadded", None),
    ],
)
def test_verls_micro_batches_are_by_tokens_or_by_samples(
    tmp_path: Path, changes: str, kind: str, tokens: int | None
) -> None:
    table = rollout_of(read(verl(tmp_path, VERL.replace("use_kl_loss: true", changes))))
    assert (table.batching, table.micro_batch_tokens) == (kind, tokens)


@pytest.mark.parametrize(
    ("rollout", "actor", "expected"),
    [
        ("log_prob_micro_batch_size_per_gpu: 8", "", (8, None)),
        ("log_prob_micro_batch_size: 32", "", (4, None)),
        ("log_prob_max_token_len_per_gpu: 32768", "use_dynamic_bsz: true", (None, 32768)),
        ("seed: 0", "", (None, None)),
    ],
)
def test_verls_old_log_probabilities_have_micro_batches_of_their_own(
    tmp_path: Path, rollout: str, actor: str, expected: tuple[int | None, int | None]
) -> None:
    """32 samples of all 8 GPUs are 4 of each."""
    text = VERL.replace("rollout: {", f"rollout: {{{rollout}, ")
    text = text.replace("    ppo_mini_batch_size: 16\n", f"    ppo_mini_batch_size: 16\n    {actor}\n")
    table = rollout_of(read(verl(tmp_path, text)))
    assert (table.logprob_micro_batch_size, table.logprob_micro_batch_tokens) == expected


def test_passes_of_verl_that_are_not_as_the_actors_are_named(tmp_path: Path) -> None:
    text = VERL.replace(
        "rollout: {",
        "rollout: {log_prob_micro_batch_size_per_gpu: 8, log_prob_use_dynamic_bsz: true, ",
    ).replace("ref: {", "ref: {log_prob_micro_batch_size_per_gpu: 2, ")
    found = read(verl(tmp_path, text))
    for words in (
        "log_prob_use_dynamic_bsz: found True, which is not the actor's",
        "per_gpu: found 2: the ref",
    ):
        assert sum(words in note for note in found.notes) == 1, found.notes
    same = read(verl(tmp_path, text.replace("use_dynamic_bsz: true", "use_dynamic_bsz: false")))
    assert not any("log_prob_use_dynamic_bsz" in note for note in same.notes)


def test_verls_entropy_has_a_gradient_of_its_own(tmp_path: Path) -> None:
    """A second tensor of 2 bytes a logit beside the gradient of log-probabilities, in micro-batches of 4,096
    tokens with 128,256 words. None with the fused head, nor without a coefficient."""
    peaks = []
    for line in ("entropy_coeff: 0.001", "entropy_coeff: 0"):
        text = VERL.replace("    strategy: fsdp\n", f"    strategy: fsdp\n    {line}\n")
        found = read(verl(tmp_path, text), nodes=1)
        peaks.append(simulate_rl(found).memory["training"].total)
        assert (found.training.cross_entropy == "verl-entropy") == (not line.endswith(" 0"))
    assert 0.5 < (peaks[0] - peaks[1]) / (4096 * 128256 * 2) < 1.5
    fused = VERL.replace("  actor:\n", "  actor:\n    use_fused_kernels: true\n    entropy_coeff: 0.1\n")
    assert read(verl(tmp_path, fused)).training.cross_entropy == "fused_linear"


def test_verl_pads_to_the_cap_where_it_keeps_padding(tmp_path: Path) -> None:
    text = VERL.replace("{path: meta-llama/Llama-3.1-8B}", "{path: x, use_remove_padding: false}")
    assert rollout_of(read(verl(tmp_path, text))).batching == "padded"


def test_verls_fully_asynchronous_step_is_what_is_trained_on_between_syncs() -> None:
    """4 times 2 mini-batches of 16 prompts, on 8 GPUs beside 4 that generate."""
    command = VERL_COMMAND.format(target="verl.experimental.fully_async_policy.fully_async_main")
    command = command.replace("train_batch_size=64", "train_batch_size=0") + (
        "rollout.nnodes=1 rollout.n_gpus_per_node=4 async_training.require_batches=2 "
        "async_training.trigger_parameter_sync_step=4 async_training.staleness_threshold=0.5 "
    )
    found = read(command)
    table = rollout_of(found)
    assert (found.gpus, table.rollout.gpus, table.placement) == (12, 4, "async")
    assert (table.prompts_per_step, table.mini_batch_samples, table.stream_prompts) == (128, 128, 32)
    assert (table.max_staleness, table.partial_rollout, table.old_logprobs) == (0.5, True, "rollout")
    assert any("between two syncs: 4 times 2 mini-batches" in note for note in found.notes)
    exact = rollout_of(read(command.replace("threshold=0.5", "threshold=0")))
    assert (exact.max_staleness, exact.partial_rollout) == (0, None)


def test_verls_one_step_off_generates_the_next_batch_while_one_trains() -> None:
    command = VERL_COMMAND.format(target="verl.experimental.one_step_off_policy.main_ppo")
    found = read(f"{command} rollout.nnodes=1 rollout.n_gpus_per_node=2 trainer.n_gpus_per_node=4")
    table = rollout_of(found)
    assert (found.gpus, table.rollout.gpus, table.prompts_per_step) == (6, 2, 64)
    assert (table.placement, table.max_staleness, table.partial_rollout) == ("async", 1, False)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (
            "trainer.v1.trainer_mode=separate_async",
            "trainer.v1.trainer_mode 'separate_async' is not simulated",
        ),
        ("distillation.enabled=True", "passes of a teacher are not simulated"),
    ],
)
def test_other_loops_of_verls_leave_the_update(key: str, reason: str) -> None:
    found = read(f"{VERL_COMMAND.format(target='verl.trainer.main_ppo')} {key}")
    assert found.rl is None
    assert any(reason in note for note in found.notes)


def test_nemo_rls_units_are_samples_and_its_files_extend_others(tmp_path: Path) -> None:
    found = read(nemo(tmp_path))
    table = rollout_of(found)
    assert (found.gpus, table.rollout.gpus, table.placement) == (16, 8, "async")
    assert (table.prompts_per_step, table.samples_per_prompt, table.mini_batch_samples) == (32, 16, 256)
    assert (table.max_staleness, table.partial_rollout, table.reference) == (2, True, "resident")
    assert table.rollout.gpu_memory_utilization == 0.8
    assert (table.batching, table.micro_batch_tokens) == ("padded", None)
    assert found.training.gradient_accumulation_steps == 16  # 256 over 8 that train, in micro-batches of 2


def test_nemo_rls_passes_without_backward_have_micro_batches_of_their_own(tmp_path: Path) -> None:
    """As large as an update's, of two responses, unless the file says otherwise."""
    assert rollout_of(read(nemo(tmp_path))).logprob_micro_batch_size == 2
    base = NEMO_BASE.replace("policy:\n", "policy:\n  logprob_batch_size: 4\n")
    path = tmp_path / "padded.yaml"
    path.write_text(base)
    assert rollout_of(read(str(path))).logprob_micro_batch_size == 4
    path = tmp_path / "packed.yaml"
    path.write_text(
        base.replace("policy:\n", "policy:\n  sequence_packing: {enabled: true, logprob_mb_tokens: 9000}\n")
    )
    table = rollout_of(read(str(path)))
    assert (table.logprob_micro_batch_size, table.logprob_micro_batch_tokens) == (None, 9000)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}", 4096),
        ("3000", 3000),
        ("${div:${policy.max_total_sequence_length}, 2}", 1024),
        ("${pow:${policy.max_total_sequence_length}, 2}", None),
    ],
)
def test_nemo_rls_packed_micro_batches_have_tokens(tmp_path: Path, tokens: str, expected: int | None) -> None:
    """2,048 tokens of two sequences."""
    text = NEMO_BASE.replace(
        "  precision:", f"  sequence_packing: {{enabled: true, train_mb_tokens: '{tokens}'}}\n  precision:"
    ).replace("'3000'", "3000")
    (tmp_path / "packed.yaml").write_text(text)
    table = rollout_of(read(str(tmp_path / "packed.yaml")))
    assert (table.batching, table.micro_batch_tokens) == ("packed", expected)


def test_openrlhfs_engines_have_gpus_of_their_own() -> None:
    found = read(OPENRLHF)
    table = rollout_of(found)
    assert (found.gpus, table.rollout.gpus, table.placement) == (8, 4, "split")
    assert (table.algorithm, table.reference, table.mini_batch_samples) == ("grpo", "none", 64)
    assert table.lengths.max_response == 1024
    colocated = rollout_of(read(f"{OPENRLHF} --train.colocate_all --vllm.enable_sleep --ds.enable_sleep"))
    assert (colocated.placement, colocated.rollout.gpus) == ("colocated", None)
    assert (colocated.offload.sleep_level, colocated.offload.optimizer) == (1, True)
    assert (colocated.batching, colocated.micro_batch_tokens) == (None, None)
    packed = rollout_of(read(f"{OPENRLHF} --ds.packing_samples"))
    dynamic = rollout_of(read(f"{OPENRLHF} --train.dynamic_batch_enable"))
    assert (packed.batching, dynamic.batching) == ("unpadded", "packed")
    assert dynamic.micro_batch_tokens == 16192
    running = rollout_of(read(f"{OPENRLHF} --train.async_enable --train.partial_rollout_enable"))
    assert (running.placement, running.max_staleness, running.partial_rollout) == ("async", 1, True)


def test_prime_rls_batch_is_of_rollouts(tmp_path: Path) -> None:
    """64 rollouts in groups of 8 are 8 prompts, and one update."""
    found = read(prime(tmp_path))
    table = rollout_of(found)
    assert (found.gpus, table.rollout.gpus, table.placement) == (8, 4, "async")
    assert (table.prompts_per_step, table.samples_per_prompt, table.mini_batch_samples) == (8, 8, None)
    assert (table.max_staleness, table.rollout.tensor) == (2, 2)
    assert found.training.gradient_accumulation_steps == 16  # 64 on the 4 that train
    text = PRIME.replace("batch_size = 64", "batch_size = 60")
    assert read(prime(tmp_path, text)).rl is None


@pytest.mark.parametrize("source", [verl, nemo, openrlhf, prime])
def test_a_file_and_its_experiment_are_the_same_step(source: Callable[[Path], str], tmp_path: Path) -> None:
    """What a file says, written as tables with [rl], and the lengths that the user sets."""
    mean: dict[str, Any] = {"rl.lengths.response.mean": 300.0}
    found = build_experiment(
        {"cluster": "dgx-h100", "model": "llama-3.2-1b"},
        {"strategy.config": source(tmp_path), **mean},
        origin="test",
    )
    assert rollout_of(found).lengths.response.mean == 300
    simulator = Simulator()
    data = found.model_dump(
        exclude_unset=True, exclude={"program", "notes"}, exclude_none=True, context=AS_IN_FILES
    )
    again = build_experiment(data, {}, origin="again")
    assert simulate_rl(again, simulator).step.seconds == simulate_rl(found, simulator).step.seconds


def test_the_update_alone_is_on_the_gpus_that_train(tmp_path: Path) -> None:
    result = zsim.simulate(read(nemo(tmp_path)))
    assert result.job.world_size == 8
    assert result.job.training.gradient_accumulation_steps == 16


def test_what_verls_engine_does_otherwise_is_named() -> None:
    changes = (
        "actor_rollout_ref.rollout.quantization=fp8 actor_rollout_ref.rollout.multi_turn.enable=True "
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 "
        "actor_rollout_ref.rollout.over_sample_rate=0.1"
    )
    command = VERL_COMMAND.format(target="verl.trainer.main_ppo")
    found = read(f"{command} {changes}")
    notes = " ".join(found.notes)
    assert there(found.rl).rollout.precision == "fp8"
    assert "rl.environment says the turns" in notes
    assert "rl.over_sampling says it" in notes
    assert (
        "the reference is simulated with the actor's degrees, without tensor_model_parallel_size 2" in notes
    )
