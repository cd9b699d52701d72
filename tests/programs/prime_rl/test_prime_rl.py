"""prime-rl's TOML: an update of the trainer with its defaults, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import zsim
from tests.expect import of_kind, there
from tests.programs.reading import notes_of, read_text
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.detect import read_training_file
from zsim.workflows.rl.samples import draw_samples

RL = """
max_steps = 100
seq_len = 4096
[model]
name = "Qwen/Qwen3-8B"
[deployment]
num_train_gpus = 4
num_infer_gpus = 4
[orchestrator]
batch_size = 256
group_size = 16
[trainer.optim]
lr = 1e-6
[inference]
"""
SFT = """
max_steps = 100
[model]
name = "Qwen/Qwen3-8B"
optim_cpu_offload = false
[data]
name = "someone/chats"
batch_size = 64
seq_len = 2048
[deployment]
num_train_gpus = 8
"""


def read(folder: Path, text: str, name: str = "rl.toml", model: str | None = None) -> Experiment:
    return read_text(folder, text, name=name, model=model)


def test_an_update_of_rl_has_prime_rls_defaults(tmp_path: Path) -> None:
    """256 rollouts on 4 GPUs, one to a micro-batch, are 64 micro-batches."""
    found = read(tmp_path, RL)
    table, training = of_kind(found.strategy, Fsdp2Table), found.training
    assert (found.program, found.model, found.gpus) == ("prime-rl", "qwen3-8b", 8)
    assert (training.sequence_length, training.micro_batch_size) == (4096, 1)
    assert training.gradient_accumulation_steps == 64
    assert (training.compile, training.activation_checkpointing) == (True, "full")
    assert (training.checkpoint_offload, training.cross_entropy) == ("stream", "prime-rl-chunked")
    assert (table.offload_states, table.param_dtype, table.reduce_dtype) == (True, "bf16", "fp32")
    assert (table.no_sync, table.reshard_after_forward, training.optimizer_implementation) == (
        False,
        True,
        "foreach",
    )
    assert "optim_cpu_offload is on where left out" in notes_of(found)
    assert "one update alone: of the trainer, over 256 sequences of 4,096 tokens" in notes_of(found)
    assert "not read" not in notes_of(found)


def test_sft_has_its_tables_at_the_top(tmp_path: Path) -> None:
    found = read(tmp_path, SFT, "sft.toml")
    training = found.training
    assert (training.sequence_length, training.gradient_accumulation_steps) == (2048, 8)
    assert (training.cross_entropy, training.optimizer_implementation) == ("eager", "fused")
    assert not of_kind(found.strategy, Fsdp2Table).offload_states
    assert "not read" not in notes_of(found)


def test_tables_are_switched_off_by_a_word(tmp_path: Path) -> None:
    off = '[trainer.model]\ncompile = "None"\nac = "None"\nac_offloading = "None"\n'
    training = read(tmp_path, RL + off).training
    assert (training.compile, training.activation_checkpointing, training.checkpoint_offload) == (
        False,
        "none",
        None,
    )


def test_a_mixture_splits_its_experts_over_a_node(tmp_path: Path) -> None:
    mixture = RL.replace("Qwen3-8B", "Qwen3-30B-A3B")
    assert read(tmp_path, mixture).parallelism.expert == 4
    assert read(tmp_path, mixture + "[trainer.model]\nep = 1\n").parallelism.expert == 1


def test_adapters_and_replicas(tmp_path: Path) -> None:
    nodes = RL.replace("num_train_gpus = 4\nnum_infer_gpus = 4", 'type = "multi_node"\nnum_train_nodes = 2')
    found = read(tmp_path, nodes + "[trainer.model]\ndp_replicate = 2\n[trainer.model.lora]\nrank = 8\n")
    lora = there(found.training.lora)
    assert (found.nodes, found.gpus, lora.rank, lora.alpha) == (3, 24, 8, 32)
    assert found.training.frozen_dtype == "fp32"
    assert lora.targets == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert of_kind(found.strategy, Fsdp2Table).replicate == 2


def test_states_on_the_host_leave_the_gpu_between_updates(tmp_path: Path) -> None:
    """Qwen3-8B has 8,190,735,360 parameters, so a rank of 8 has 2 x 4 x 1,023,841,920 bytes of states, with
    what FSDP2 pads. They come and go over PCIe, and the way back is to pageable memory.
    """
    text = SFT.replace("batch_size = 64", "batch_size = 8")
    on_gpu = zsim.simulate(read(tmp_path, text)).report.to_dict()
    waiting = zsim.simulate(
        read(tmp_path, text.replace("optim_cpu_offload = false", "optim_cpu_offload = true"))
    ).report.to_dict()
    states = 8 * 1_023_841_920
    assert waiting["peak_bytes"]["host"]["optimizer_states"] == pytest.approx(8 * states, rel=1e-3)
    assert on_gpu["peak_bytes"]["host"]["optimizer_states"] == 0
    assert waiting["peak_bytes"]["gpu"]["optimizer_states"] == pytest.approx(states, rel=1e-3)
    assert waiting["step_seconds"] > on_gpu["step_seconds"] + 2 * states / 64e9


@pytest.mark.parametrize(("style", "method"), [("ulysses", "all-to-all"), ("ring", "all-gather")])
def test_ranks_share_sequences(tmp_path: Path, style: str, method: str) -> None:
    text = RL + f'[trainer.model]\ncp = 2\ncp_style = "{style}"\n'
    parallelism = read(tmp_path, text).parallelism
    assert (parallelism.context, parallelism.context_method) == (2, method)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('ep = 1\n[orchestrator.algo]\ntype = "opd"\n', "'opd', which has passes or scores"),
        ('ep = 1\n[orchestrator.algo]\ntype = "mine"\n', "'mine', which has passes or scores"),
        ("full_offload = true\n", r"full_offload: .* does not simulate masters"),
        ('quantization = {type = "fp8"}\n', "does not simulate fp8 of prime-rl's"),
        ('ac = {mode = "selective"}\n', "selective checkpointing; expected full"),
        ("[trainer.optim]", "'muon' of prime-rl's; expected adamw or sgd"),
    ],
)
def test_another_job_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    changed = RL.replace("[trainer.optim]", '[trainer.optim]\ntype = "muon"')
    lines = changed if text.startswith("[") else RL + "[trainer.model]\n" + text
    with pytest.raises(NotSimulatedError, match=message):
        read(tmp_path, lines)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_train_gpus = 4", "num_train_gpus = 64", "found 64 .*more than a node's 8; expected type"),
        ("num_infer_gpus = 4", "num_infer_gpus = 8", "num_train_gpus: found 4 beside num_infer_gpus = 8, "),
        ("batch_size = 256", "batch_size = 0", "found 0, expected a whole number of at least 1"),
        ("batch_size = 256", 'batch_size = "many"', "found 'many', expected a whole number"),
        ("seq_len = 4096", "seq_len = [", "not valid TOML|Invalid value|not TOML"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, RL.replace(old, new))


def test_a_misspelt_key_is_named_with_the_nearest(tmp_path: Path) -> None:
    found = read(tmp_path, RL + "[trainer.model]\nreshard_after_foward = false\n")
    assert "reshard_after_foward (did you mean 'reshard_after_forward'?)" in notes_of(found)


def test_an_orchestrators_file_trains_nothing(tmp_path: Path) -> None:
    text = 'batch_size = 8\n[model]\nname = "x"\n[[train.source]]\nname = "y"\n[train]\n'
    (tmp_path / "orch.toml").write_text(text.replace("[train]\n", ""))
    with pytest.raises(InputError, match="is an orchestrator's, which trains nothing"):
        read_training_file(str(tmp_path / "orch.toml"))


def test_rollouts_have_the_orchestrators_length(tmp_path: Path) -> None:
    """The trainer packs them into longer sequences. Up to 8,192 tokens less a prompt of 128 are answered."""
    text = RL.replace("[orchestrator]", "[orchestrator]\nseq_len = 8192")
    text += '\n[trainer.model]\nseq_len = 16384\nattn = "flash_attention_3"\n'
    experiment = read(tmp_path, text)
    lengths = experiment.rl.lengths if experiment.rl is not None else None
    assert experiment.training.sequence_length == 16384
    assert lengths is not None
    assert lengths.max_response == 8192 - 128
    assert experiment.training.attention == "flash3"
    older = read(tmp_path, text.replace("flash_attention_3", "fa4"))
    assert older.training.attention == "flash4"
    with pytest.raises(InputError, match=r"model\.attn: found 'flash5', expected one of auto, sdpa, fl"):
        read(tmp_path, text.replace("flash_attention_3", "flash5"))
    assert "not read: trainer.model.attn" not in notes_of(experiment)


def test_responses_may_take_what_the_prompt_leaves_of_a_sequence(tmp_path: Path) -> None:
    """The file has no cap: behind prompts of 129 tokens a response has up to 3,967 of the 4,096."""
    longer = there(change_experiment(read(tmp_path, RL), {"rl.lengths.prompt.mean": 129}).rl)
    assert longer.lengths.max_response is None
    assert draw_samples(longer.lengths, 64, 16, 4096).responses.max() == 4096 - 129


@pytest.mark.parametrize(
    "key",
    ["max_inflight_rollouts", "max_inflight_episodes", "concurrency.max_inflight", "oversampling_factor"],
)
def test_a_groups_older_name_is_read_and_rollouts_that_run_at_once_are_named(
    tmp_path: Path, key: str
) -> None:
    """256 rollouts in groups of 16 are 16 prompts (configs/orchestrator.py, `AliasChoices`)."""
    experiment = read(tmp_path, RL.replace("group_size = 16", f"rollouts_per_example = 16\n{key} = 512"))
    table = there(experiment.rl)
    assert (table.prompts_per_step, table.samples_per_prompt) == (16, 16)
    assert f"{key.split('.')[0]}: left out: at most 1,024 rollouts run at once" in notes_of(experiment)


def test_vllms_arguments_are_read_from_their_table_and_from_the_older_place(tmp_path: Path) -> None:
    """Two nodes of 8 GPUs that generate are 16, and one with a replica more of each 32."""
    table = """
[inference.vllm]
tensor_parallel_size = 4
data_parallel_size = 2
enable_expert_parallel = true
gpu_memory_utilization = 0.5
quantization = "fp8"
max_num_seqs = 64
"""
    rollout = there(read(tmp_path, RL.replace("[inference]\n", table)).rl).rollout
    assert (rollout.tensor, rollout.expert, rollout.gpu_memory_utilization) == (4, 4, 0.5)
    assert (rollout.precision, rollout.max_num_seqs) == ("fp8", 64)
    older = there(read(tmp_path, RL + "gpu_memory_utilization = 0.4\nparallel = { tp = 2 }\n").rl).rollout
    assert (older.tensor, older.gpu_memory_utilization) == (2, 0.4)
    nodes = RL.replace("num_train_gpus = 4\nnum_infer_gpus = 4", NODES)
    assert there(read(tmp_path, nodes).rl).rollout.gpus == 32
    over_nodes = there(read(tmp_path, nodes.replace("[inference]\n", table)).rl).rollout
    assert (over_nodes.tensor, over_nodes.expert) == (4, 8)
    of_older = nodes + "parallel = {tp = 4, dp = 4}\nvllm = {enable_expert_parallel = true}\n"
    assert there(read(tmp_path, of_older).rl).rollout.expert == 16
    apart = nodes.replace("[inference]", '[inference.deployment]\ntype = "disaggregated"')
    assert "prefill and decode on nodes of their own" in notes_of(read(tmp_path, apart))


NODES = 'type = "multi_node"\nnum_train_nodes = 2\nnum_infer_nodes = 2\nnum_infer_replicas = 2'


def test_experts_are_over_all_gpus_of_one_node_that_generate(tmp_path: Path) -> None:
    """prime-rl sets vLLM's data_parallel_size to 4 / 2, whatever the file says."""
    vllm = "[inference.vllm]\ntensor_parallel_size = 2\nenable_expert_parallel = true\n"
    rollout = there(read(tmp_path, RL.replace("[inference]\n", vllm)).rl).rollout
    assert (rollout.tensor, rollout.expert) == (2, 4)


def test_replicas_that_do_not_divide_the_gpus_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tensor_parallel_size: found 3, which does not divide the 4 GPUs"):
        read(tmp_path, RL.replace("[inference]", "[inference.vllm]\ntensor_parallel_size = 3"))
    with pytest.raises(InputError, match=r"inference\.parallel\.tp: found 3, which does not divide the 4"):
        read(tmp_path, RL + "parallel = {tp = 3}\n")


def test_a_source_with_a_teacher_is_refused_beside_others(tmp_path: Path) -> None:
    sources = "[[orchestrator.train.source]]\nname = 'a'\n[[orchestrator.train.source]]\nname = 'b'\n"
    assert read(tmp_path, RL + sources).rl is not None
    with pytest.raises(NotSimulatedError, match=r"train\.source\[1\]\.algo\.type: .* 'opd', which has"):
        read(tmp_path, RL + sources + "[orchestrator.train.source.algo]\ntype = 'opd'\n")
