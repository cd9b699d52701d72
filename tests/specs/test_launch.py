"""Commands that start a training: the launcher's machines, the program's flags, and the files named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.expect import of_kind, there
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.fsdp1.settings import Fsdp1Config, Fsdp1Table
from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.programs.launch.commands import flag_values, parse_command
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

MODEL = "--model_name_or_path meta-llama/Llama-3.1-8B"
FLAGS = f"{MODEL} --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --bf16 True"
ZERO_3 = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
FSDP = """\
distributed_type: FSDP
mixed_precision: 'no'
num_machines: 2
num_processes: 16
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "zero3.json").write_text(json.dumps(ZERO_3))
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    (tmp_path / "sft.yaml").write_text(
        "model_name_or_path: meta-llama/Meta-Llama-3-8B\nstage: sft\nfinetuning_type: full\ncutoff_len: "
        "2048\n"
        "per_device_train_batch_size: 1\nbf16: true\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(command: str, **changes: Any) -> Experiment:
    overrides = {key.replace("__", "."): value for key, value in changes.items()}
    return build_experiment({"cluster": "dgx-h100"}, {"strategy.config": command, **overrides}, origin="test")


def test_deepspeeds_launcher_names_gpus_and_its_program_the_json(folder: Path) -> None:
    found = read(f"deepspeed --num_gpus=4 train.py --deepspeed zero3.json {FLAGS} --model_max_length 2048")
    assert (found.strategy.kind, found.gpus, found.model) == ("deepspeed", 4, "llama-3.1-8b")
    training = resolve(found).training
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (2, 4)
    assert (training.sequence_length, training.precision) == (2048, "bf16")
    two = read(f"deepspeed --include localhost:2,3 train.py --deepspeed zero3.json {FLAGS}")
    assert two.gpus == 2


def test_a_script_of_ones_own_tells_deepspeeds_json_alone(folder: Path) -> None:
    found = read(
        "deepspeed --num_gpus 8 mine.py --deepspeed_config zero3.json --epochs 3",
        model="llama-3-8b", training__micro_batch_size=1, training__precision="bf16",
    )  # fmt: skip
    assert (found.strategy.kind, found.gpus) == ("deepspeed", 8)
    assert any("mine.py: its own flags are not read: --epochs" in note for note in found.notes)
    with pytest.raises(
        NotSimulatedError, match=r"mine.py: .* of a script of one's own only --deepspeed_config"
    ):
        read("torchrun --nproc_per_node 8 mine.py --epochs 3")


def test_accelerates_file_gives_the_engine_and_the_program_the_precision(folder: Path) -> None:
    """transformers sets the precision of Accelerate by its own arguments."""
    found = read(f"accelerate launch --config_file fsdp.yaml train.py {FLAGS}")
    assert of_kind(found.strategy, Fsdp2Table).param_dtype == "bf16"
    assert (found.nodes, found.gpus, found.training.precision) == (2, 16, "bf16")
    assert found.training.gradient_accumulation_steps == 4


@pytest.mark.parametrize(
    ("launcher", "stored"), [("--multi_gpu", "bf16"), ("--config_file fsdp.yaml", "fp32")]
)
def test_weights_loaded_in_bf16_are_kept_as_the_launchers_engine_keeps_them(
    folder: Path, launcher: str, stored: str
) -> None:
    """DDP trains them in bf16. Under FSDP Accelerate casts what is trained to fp32."""
    found = read(f"accelerate launch {launcher} train.py {FLAGS} --torch_dtype bfloat16")
    assert found.training.stored_dtype == stored
    assert all("DDP is simulated" not in note for note in found.notes)


def test_a_launchers_fp16_is_refused_for_weights_in_bf16_where_nothing_casts_them(folder: Path) -> None:
    """As the program's own fp16 is. FSDP's weights are cast to fp32."""
    flags = f"train.py {FLAGS} --torch_dtype bfloat16".replace(" --bf16 True", "")
    with pytest.raises(NotSimulatedError, match="products in fp16 of weights in bf16"):
        read(f"accelerate launch --multi_gpu --mixed_precision fp16 {flags}")
    found = read(f"accelerate launch --config_file fsdp.yaml --mixed_precision fp16 {flags}")
    assert (found.training.precision, found.training.stored_dtype) == ("fp16", "fp32")
    plain = read(f"accelerate launch --multi_gpu {flags}")
    assert (plain.training.precision, plain.training.stored_dtype) == ("bf16", "bf16")


def test_a_program_that_names_an_engine_keeps_it(folder: Path) -> None:
    found = read(f"accelerate launch --config_file fsdp.yaml train.py --deepspeed zero3.json {FLAGS}")
    assert (found.strategy.kind, found.gpus) == ("deepspeed", 16)


@pytest.mark.parametrize("target", ["trl/scripts/dpo.py", "-m trl.scripts.dpo", "-m swift.cli.rlhf"])
def test_a_json_of_the_launcher_counts_rows_of_pairs(folder: Path, target: str) -> None:
    """The script's name is the trainer, whose rows are two sequences each."""
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    engine = "distributed_type: DEEPSPEED\nnum_processes: 8\n"
    engine += "deepspeed_config: {deepspeed_config_file: rows.json}\n"
    (folder / "rows.yaml").write_text(engine)
    (folder / "rows.json").write_text(json.dumps({**config, "bf16": {"enabled": True}}))
    flags = "--per_device_train_batch_size 2 --max_length 1024"
    flags += " --rlhf_type dpo --torch_dtype bfloat16" if "swift" in target else " --bf16"
    name = "model" if "swift" in target else "model_name_or_path"
    flags += f" --{name} meta-llama/Llama-3.1-8B"
    command = f"accelerate launch --config_file rows.yaml {target} {flags}"
    found = read(command)
    assert (found.strategy.kind, found.training.micro_batch_size) == ("deepspeed", 4)
    assert resolve(found).training.micro_batch_size == 4
    with pytest.raises(
        InputError, match=r"rows.json: train_micro_batch_size_per_gpu: found 2, expected .* 3"
    ):
        read(command.replace("size 2", "size 3"))


def test_accelerates_flags_are_its_file(folder: Path) -> None:
    command = (
        "accelerate launch --num_processes 8 --use_deepspeed --zero_stage 2 --offload_optimizer_device cpu"
    )
    job = resolve(read(f"{command} sft.py {FLAGS} --max_length 2048 --packing"))
    assert (job.strategy.kind, job.world_size, job.training.sequence_length) == ("deepspeed", 8, 2048)
    flags = "--use_fsdp --fsdp_version 1 --fsdp_sharding_strategy SHARD_GRAD_OP --num_processes 8"
    found = read(f"accelerate launch {flags} train.py {FLAGS}")
    assert of_kind(found.strategy, Fsdp1Table).sharding_strategy == "SHARD_GRAD_OP"


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun --nproc_per_node 8 --nnodes=2 --master_addr x",
        "python -m torch.distributed.run --nproc-per-node=8 --nnodes 2",
        "srun torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d",
    ],
)
def test_torchruns_processes_are_gpus(folder: Path, launcher: str) -> None:
    found = read(f"{launcher} train.py {FLAGS} --fsdp 'full_shard auto_wrap'")
    assert (found.nodes, found.gpus, found.strategy.kind) == (2, 16, "fsdp2")


def test_swift_takes_its_processes_from_the_environment(folder: Path) -> None:
    flags = (
        "--model meta-llama/Llama-3.1-8B --tuner_type full --per_device_train_batch_size 1 --max_length 4096"
    )
    found = read(f"NPROC_PER_NODE=4 swift sft {flags} --deepspeed zero3")
    assert (found.strategy.kind, found.gpus, found.training.sequence_length) == ("deepspeed", 4, 4096)
    assert found.program == "ms-swift"


def test_swifts_megatron_takes_fields_of_megatron(folder: Path) -> None:
    flags = "--model meta-llama/Llama-3.1-8B --tensor_model_parallel_size 2 --micro_batch_size 1"
    flags += " --max_length 4096"
    found = read(f"NPROC_PER_NODE=8 megatron sft {flags} --global_batch_size 16 --sequence_parallel true")
    table = of_kind(found.strategy, MegatronTable)
    assert (found.parallelism.tensor, table.distributed_optimizer) == (2, True)
    assert found.training.gradient_accumulation_steps == 4
    assert found.training.activation_checkpointing == "selective"
    lora = there(read(f"NPROC_PER_NODE=8 megatron sft {flags} --tuner_type lora").training.lora)
    assert (lora.rank, lora.targets) == (8, ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))
    assert lora.share_expert_adapters  # said for experts alone


def test_a_file_behind_a_program_is_its_file_with_changes_behind(folder: Path) -> None:
    found = read("llamafactory-cli train sft.yaml per_device_train_batch_size=2", gpus=8)
    assert (found.program, found.training.micro_batch_size) == ("llama-factory", 2)
    again = read("torchrun --nproc_per_node 8 src/train.py sft.yaml")
    assert (again.program, again.gpus) == ("llama-factory", 8)
    with pytest.raises(InputError, match=r"'none.yaml': no such file; expected the program's file; tried"):
        read("llamafactory-cli train none.yaml")


def test_a_script_is_followed_to_its_launch(folder: Path) -> None:
    (folder / "run.sh").write_text(
        "export NCCL_ALGO=Ring\nBS=${1:-2}\nGPUS=4\n"
        f"deepspeed --num_gpus $GPUS train.py --deepspeed zero3.json {MODEL} \\\n"
        "  --per_device_train_batch_size $BS --bf16 True --output_dir out\n"
    )
    found = read("run.sh 8")
    assert (found.gpus, found.training.micro_batch_size) == (4, 8)
    assert isinstance(found.cluster, dict)
    assert found.cluster["collectives"]["force_algorithm"] == "ring"


def test_megatrons_commands_are_megatrons(folder: Path) -> None:
    words = ["torchrun", "--nproc_per_node", "8", "pretrain_gpt.py", "--num-layers", "2"]
    assert parse_command(words, "command line", {}) is None
    assert parse_command(["echo", "accelerate"], "command line", {}) is None


def test_flags_have_values_lists_and_truths() -> None:
    words = ["a.yaml", "--x-y", "1", "--on", "--off", "False", "--lr", "2e-5", "--names", "a", "b", "--s=3"]
    loose, values = flag_values(words, "test")
    assert loose == ["a.yaml"]
    assert values == {"x_y": 1, "on": True, "off": False, "lr": 2e-5, "names": ["a", "b"], "s": 3}


@pytest.mark.parametrize("flag", ["--rlhf_type kto", "--task_type embedding", "--teacher_model x"])
def test_another_job_of_megatron_swift_is_refused_by_name(flag: str) -> None:
    with pytest.raises(NotSimulatedError, match="is of Megatron-SWIFT"):
        read(f"megatron rlhf --model x --tensor_model_parallel_size 2 {flag}", model="llama-3-8b")


def test_megatron_swifts_word_says_the_loss(folder: Path) -> None:
    """`megatron rlhf` is DPO where nothing says more, whose rows are two sequences each."""
    flags = "--model Qwen/Qwen2.5-7B --max_length 2048 --micro_batch_size 2 --global_batch_size 16"
    found = read(f"NPROC_PER_NODE=4 megatron rlhf {flags} --tuner_type lora")
    assert (found.training.micro_batch_size, found.training.gradient_accumulation_steps) == (4, 2)
    assert found.training.reference == "base"
    (folder / "sft.yaml").write_text("model: Qwen/Qwen2.5-7B\nmax_length: 512\nmicro_batch_size: 4\n")
    file = read("NPROC_PER_NODE=2 megatron sft sft.yaml --global_batch_size 8")
    assert (file.strategy.kind, file.training.micro_batch_size, file.training.sequence_length) == (
        "megatron", 4, 512,
    )  # fmt: skip
    assert file.training.gradient_accumulation_steps == 1


def test_a_trainers_word_that_trains_nothing_is_named(folder: Path) -> None:
    with pytest.raises(InputError, match="swift infer trains nothing; expected swift sft or pt or rlhf"):
        read("swift infer --model x --stream true")
    (folder / "both.sh").write_text(
        "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-7B --max_length 2048\nswift export --adapters x\n"
    )
    assert read("both.sh").program == "ms-swift"


def test_a_script_that_names_a_model_need_not_train(folder: Path) -> None:
    with pytest.raises(NotSimulatedError, match="a script of one's own"):
        read("python scripts/pissa_init.py --model_name_or_path x --output_dir y", model="llama-3-8b")


NANOTRON = """
parallelism: {dp: 2, tp: 2, pp: 1}
tokens: {sequence_length: 2048, micro_batch_size: 3, batch_accumulation_per_replica: 4}
model: {ddp_bucket_cap_mb: 25}
"""
FOUNDRY = "max_seq_len: 2048\nglobal_train_batch_size: 64\ndevice_train_microbatch_size: 4\n"
LITGPT = "checkpoint_dir: meta-llama/Llama-2-7b-hf\ntrain: {global_batch_size: 16, micro_batch_size: 4}\n"
TUNE = """
model: {_component_: torchtune.models.llama3_1.llama3_1_8b}
optimizer: {_component_: torch.optim.AdamW}
tokenizer: {max_seq_len: 1024}
dtype: bf16
batch_size: 2
"""
SFT = '[model]\nname = "Qwen/Qwen3-0.6B"\nseq_len = 1024\n[data]\nseq_len = 1024\nbatch_size = 8\n'
NEMO = """
policy: {train_global_batch_size: 64, train_micro_batch_size: 2, max_total_sequence_length: 512,
  dtensor_cfg: {enabled: true}}
grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 8}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""


@pytest.mark.parametrize(
    ("command", "name", "text", "program", "expected"),
    [
        ("torchrun --nproc_per_node 4 run_train.py --config-file {}", "a.yaml", NANOTRON, "nanotron",
         (3, 2048)),
        ("composer -n 8 train.py {} max_seq_len=1024", "b.yaml", FOUNDRY, "llm-foundry", (4, 1024)),
        ("litgpt finetune --config {} --train.micro_batch_size 2 --train.max_seq_length 256", "c.yaml",
         LITGPT, "litgpt", (2, 256)),
        ("tune run --nproc_per_node 4 full --config {} batch_size=4 tokenizer.max_seq_len=512",
         "full/single_device.yaml", TUNE, "torchtune", (4, 512)),
        ("uv run sft @ {} --data.micro_batch_size 4", "d.toml", SFT, "prime-rl", (4, 1024)),
        ("uv run examples/run_grpo.py --config {} policy.train_micro_batch_size=4 ++grpo.seed=1", "e.yaml",
         NEMO, "nemo-rl", (4, 512)),
    ],
)  # fmt: skip
def test_a_programs_own_file_is_read_with_what_stands_behind_it(
    folder: Path, command: str, name: str, text: str, program: str, expected: tuple[int, int]
) -> None:
    """torchtune's names of files have no ending, and stand below recipes/configs."""
    path = folder / ("recipes/configs" if command.startswith("tune") else "") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    name = name.removesuffix(".yaml") if command.startswith("tune") else name
    found = read(command.format(name), model="llama-3-8b")
    assert found.program == program
    assert (found.training.micro_batch_size, found.training.sequence_length) == expected


@pytest.mark.parametrize(
    ("command", "model", "rank"),
    [
        ("finetune EleutherAI/pythia-1.4b --config a.yaml", "pythia-1.4b", 8),
        ("finetune_lora --config a.yaml --lora_r 4", "llama-2-7b", 4),
        ("finetune_full EleutherAI/pythia-1.4b --config a.yaml", "pythia-1.4b", None),
        ("finetune_lora EleutherAI/pythia-1.4b --devices 1 --train.micro_batch_size 4", "pythia-1.4b", 8),
        ("pretrain pythia-1.4b --config b.yaml --train.micro_batch_size 4", "pythia-1.4b", None),
    ],
)
def test_litgpts_word_is_its_model_and_its_subcommand_the_adapters(
    folder: Path, command: str, model: str, rank: int | None
) -> None:
    (folder / "a.yaml").write_text(LITGPT)
    (folder / "b.yaml").write_text("model_name: Llama-3-8B\ntrain: {global_batch_size: 32}\n")
    found = read(f"litgpt {command} --train.max_seq_length 256")
    lora = found.training.lora
    assert (found.program, found.model, lora and lora.rank) == ("litgpt", model, rank)
    assert found.training.micro_batch_size == 4


def test_what_a_script_runs_besides_training_is_not_its_training(folder: Path) -> None:
    (folder / "run.sh").write_text(
        "python -m torch.distributed.run --nproc_per_node 4 train.py --config-file a.yaml\n"
        "python tools/convert.py --in x\nuv run tests/check_metrics.py out.json\n"
    )
    (folder / "a.yaml").write_text(NANOTRON)
    assert read("run.sh", model="llama-3-8b").program == "nanotron"
    (folder / "run.sh").write_text("python tools/convert.py --in x\n")
    with pytest.raises(InputError, match=r"convert\.py trains nothing; expected a command that trains"):
        read("run.sh")


@pytest.mark.parametrize("name", ["tune", "composer", "accelerate"])
def test_names_of_jobs_are_no_launchers(folder: Path, name: str) -> None:
    assert read(f"srun --job-name {name} torchrun --nproc_per_node 4 train.py {FLAGS}").gpus == 4


@pytest.mark.parametrize("name", ["check_and_train.py", "run_roundtrip_sft.py", "reward_server_sft.py"])
def test_flags_of_a_training_and_its_name_say_that_a_script_trains(folder: Path, name: str) -> None:
    """A script that is named for another job too is not preferred to the one that trains."""
    assert read(f"torchrun --nproc_per_node 4 {name} {FLAGS}").gpus == 4
    assert read(f"torchrun --nproc_per_node 4 prepare.py {FLAGS}").gpus == 4
    command = f"deepspeed --num_gpus 8 {name} --deepspeed_config zero3.json --epochs 3"
    model = {"model": "llama-3-8b", "training__micro_batch_size": 1, "training__precision": "bf16"}
    assert read(command, **model).strategy.kind == "deepspeed"
    (folder / "run.sh").write_text(f"torchrun --nproc_per_node 4 train.py {FLAGS}\npython {name} --in x\n")
    assert read("run.sh").gpus == 4


def test_overrides_with_variables_in_a_list_stay_texts(folder: Path) -> None:
    command = (
        "python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=8 trainer.nnodes=1 "
        "data.train_batch_size=64 data.max_prompt_length=512 data.max_response_length=512 "
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B actor_rollout_ref.actor.ppo_mini_batch_size=64 "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 "
        "'data.train_files=[${gsm8k_train},${math_train}]'"
    )
    found = read(command)
    assert (found.program, found.model, found.gpus) == ("verl", "qwen2.5-7b", 8)


def test_uvs_extras_are_no_launchers() -> None:
    """`uv run` starts what stands behind its flags, of which `--extra megatron` names no trainer."""
    words = ["uv", "run", "--frozen", "--extra", "megatron", "python3", "-m", "verl.trainer.main_ppo", "a=b"]
    launch = parse_command(words, "command line", {})
    assert there(launch).target == "verl.trainer.main_ppo"
    assert there(launch).words == ["a=b"]


def test_verls_fine_tuning_is_fsdp_over_padded_sequences(folder: Path) -> None:
    """256 sequences on 4 GPUs, 4 at a time, are 16 micro-batches. Four epochs are the trainer's default."""
    command = (
        "torchrun --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=google/gemma-2b"
    )
    found = read(f"{command} data.max_length=2048 +model.lora_rank=0", cost__samples=1000)
    table, training = of_kind(found.strategy, Fsdp2Table), found.training
    assert (table.param_dtype, table.reduce_dtype, found.gpus, found.model) == ("bf16", "fp32", 4, "gemma-2b")
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (4, 16)
    assert (training.sequence_length, training.activation_checkpointing) == (2048, "full")
    assert (training.stored_dtype, training.optimizer_implementation) == ("fp32", "foreach")
    assert found.cost is not None
    assert found.cost.epochs == 4
    sharded = read(f"{command} model.strategy=fsdp model.fsdp_config.model_dtype=bf16 model.lora_rank=32")
    assert of_kind(sharded.strategy, Fsdp1Table).sharding_strategy == "FULL_SHARD"
    assert (sharded.training.stored_dtype, sharded.training.frozen_dtype) == ("bf16", None)
    adapted = read(f"{command} model.lora_rank=32 ulysses_sequence_parallel_size=2")
    assert adapted.training.frozen_dtype == "fp32"
    assert adapted.parallelism is not None
    assert (adapted.parallelism.context, adapted.parallelism.context_method) == (2, "all-to-all")
    assert sharded.training.lora is not None
    assert sharded.training.lora.targets == "all-linear"
    assert of_kind(resolve(sharded).strategy, Fsdp1Config).wrapping == "peft"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.strategy=veomni", "model.strategy: zsim does not simulate 'veomni' of verl's"),
        ("optim.optimizer=SGD", r"optim\.optimizer: zsim does not simulate 'SGD'"),
        ("model.lora_adapter_path=a", "adapters whose rank a checkpoint says"),
    ],
)
def test_what_verls_fine_tuning_does_and_zsim_does_not_is_refused(
    folder: Path, override: str, words: str
) -> None:
    with pytest.raises(NotSimulatedError, match=words):
        read(f"torchrun -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=google/gemma-2b {override}")


def test_a_recipe_of_megatron_bridge_by_name_says_which_file_to_give(folder: Path) -> None:
    command = "torchrun --nproc_per_node=8 scripts/training/run_recipe.py --recipe llama3_8b_sft_config"
    with pytest.raises(NotSimulatedError, match=r"--recipe llama3_8b_sft_config: .* run_config.yaml"):
        read(command)


def test_trl_passes_accelerates_file_on_by_path_or_by_name(folder: Path) -> None:
    """TRL's own `zero3` is for 8 GPUs, unless a flag says otherwise. DDP is what no file brings."""
    command = "trl dpo --model_name_or_path Qwen/Qwen2-7B --dataset_name a/b"
    assert (read(command).strategy.kind, read(command).gpus) == ("ddp", None)
    assert read(f"{command} --accelerate_config fsdp.yaml").strategy.kind == "fsdp2"
    zero = read(f"{command} --accelerate_config=zero3 --num_processes 4")
    assert (zero.strategy.kind, zero.gpus, zero.training.stored_dtype) == ("deepspeed", 4, "fp32")
    assert not any("DDP is simulated" in note for note in zero.notes)
    with pytest.raises(InputError, match="--accelerate_config: found nothing behind it"):
        read(f"{command} --accelerate_config")
    with pytest.raises(
        InputError, match=r"zero9.*one of TRL's own: .*zero2, zero3, fsdp1, fsdp2; did you mean 'zero"
    ):
        read(f"{command} --accelerate_config zero9")


@pytest.mark.parametrize(
    ("flags", "kind", "gpus"),
    [
        ("--config_file fsdp.yaml", "fsdp2", 16),
        ("--use_deepspeed --zero_stage 3 --num-processes 4", "deepspeed", 4),
        (
            "--use_fsdp --fsdp_version=2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --machine_rank 0",
            "fsdp2",
            None,
        ),
        ("--gradient_accumulation_steps 2", "ddp", None),
    ],
)
def test_trl_passes_accelerates_flags_on(folder: Path, flags: str, kind: str, gpus: int | None) -> None:
    command = f"trl sft --model_name_or_path Qwen/Qwen2-7B --dataset_name a/b {flags}"
    assert (read(command).strategy.kind, read(command).gpus) == (kind, gpus)


def test_trls_file_passes_accelerates_keys_on_but_no_switches(folder: Path) -> None:
    """TRL writes `--use_fsdp True`, whose value Accelerate takes for the script."""
    text = "model_name_or_path: Qwen/Qwen2-7B\ndataset_name: a/b\nnum_processes: 4\nzero_stage: 3\n"
    (folder / "trl.yaml").write_text(text)
    assert read("trl sft --config trl.yaml").gpus == 4
    assert read("trl sft --config trl.yaml --num_processes 2 --use_deepspeed").gpus == 2
    (folder / "trl.yaml").write_text(text + "use_fsdp: true\n")
    with pytest.raises(InputError, match=r"use_fsdp: TRL passes it on as .* expected --use_fsdp in the comm"):
        read("trl sft --config trl.yaml")


def test_a_file_of_trl_names_accelerates_too(folder: Path) -> None:
    """Its key is the command's, so that the file alone asks for the command."""
    text = "model_name_or_path: Qwen/Qwen2-7B\ndataset_name: a/b\nuse_peft: true\naccelerate_config: fsdp1\n"
    (folder / "trl.yaml").write_text(text)
    table = of_kind(read("trl sft --config trl.yaml").strategy, Fsdp1Table)
    assert (table.forward_prefetch, table.wrapping) == (True, "peft")
    assert read("trl sft --config trl.yaml --accelerate_config zero2").strategy.kind == "deepspeed"
    with pytest.raises(InputError, match=r"accelerate_config: found 'fsdp1', .*'trl sft --config trl.yaml'"):
        read("trl.yaml")


def test_an_evaluation_in_a_folder_called_torchtitan_trains_nothing(folder: Path) -> None:
    (folder / "e.sh").write_text("C=/x/torchtitan/evals\nsrun tune run eleuther_eval --config $C/a.yaml\n")
    with pytest.raises(InputError, match="tune eleuther_eval trains nothing"):
        read("e.sh")


@pytest.mark.parametrize("target", ["-m lm_eval --tasks arc", "examples/chatbot.py --deepspeed zero3.json"])
def test_evaluations_and_chats_train_nothing(folder: Path, target: str) -> None:
    with pytest.raises(InputError, match="trains nothing"):
        read(f"accelerate launch {target} {MODEL}")


def test_a_learning_rate_alone_makes_no_trainer(folder: Path) -> None:
    with pytest.raises(NotSimulatedError, match=r"train\.py: zsim knows flags of TrainingArguments"):
        read(
            "torchrun --nproc_per_node 8 train.py --train_batch_size 1 --learning_rate 1e-4 --max_width 4096"
        )


def test_other_trainers_of_open_instruct_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(NotSimulatedError, match="Open Instruct"):
        read(f"python mason.py --gpus 8 -- accelerate launch open_instruct/dpo.py {FLAGS}")
    with pytest.raises(NotSimulatedError, match=r"flame\.train: is of flame"):
        read("torchrun --nproc_per_node 8 -m flame.train --job.config_file flame.toml")
    (folder / "flame.sh").write_text("torchrun -m flame.train --job.config_file flame.toml\n")
    with pytest.raises(NotSimulatedError, match=r"flame\.train: is of flame"):
        read("flame.sh")
    with pytest.raises(NotSimulatedError, match="Open Instruct"):
        read(f"python -m open_instruct.grpo_fast {FLAGS}")
    assert read(f"torchrun train.py {FLAGS} --output_dir /data/open_instruct/run").program == "transformers"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--use_lora False --lora_r 64 --lora_alpha 16", None),
        ("--lora_enable False --lora_rank 64", None),
        ("--exploration_coef 0.1 --supervision_weight 2", None),
        ("--lora_r 64", "lora_r 64: is a script's own"),
        ("--use_my_lora True", "use_my_lora True: is a script's own"),
        ("--use_lora False --freeze_layers 4", "freeze_layers 4: is a script's own"),
        ("--vision_tower clip", "vision_tower clip: is a script's own"),
        ("--training_method REFUEL", "training_method REFUEL: is a script's own"),
        ("--optimizer adamw", "optimizer adamw: is a script's own"),
    ],
)
def test_keys_of_a_script_tell_another_job_unless_they_are_off(
    folder: Path, flags: str, words: str | None
) -> None:
    command = f"torchrun --nproc_per_node 8 train.py {FLAGS} {flags}"
    if words is None:
        assert read(command).training.lora is None
    else:
        with pytest.raises(NotSimulatedError, match=words):
            read(command)


def test_numbers_of_the_launcher_that_nothing_sets_are_asked_for(folder: Path) -> None:
    notes = " ".join(read(f"torchrun --nnodes $NODES --nproc_per_node $GPUS train.py {FLAGS}").notes)
    assert "nodes is $NODES, which nothing sets: --nodes gives it" in notes
    assert "gpus is $GPUS, which nothing sets: --gpus gives it" in notes


def test_verls_fine_tuning_by_an_engine_packs_micro_batches_by_tokens(folder: Path) -> None:
    """8,192 tokens on each of two ranks of a sequence hold 16 sequences of 1,024, of 256 / 4 of a rank."""
    command = (
        "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer engine=fsdp optim=fsdp engine.strategy=fsdp2"
    )
    found = read(
        f"{command} model.path=Qwen/Qwen2.5-0.5B engine.ulysses_sequence_parallel_size=2 optim.clip_grad=0.5"
    )
    training = found.training
    assert (found.strategy.kind, found.gpus, found.model) == ("fsdp2", 8, "qwen2.5-0.5b")
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (16, 4)
    assert (training.activation_checkpointing, training.gradient_clipping) == ("full", 0.5)
    fixed = read(f"{command} model.path=Qwen/Qwen2.5-0.5B data.use_dynamic_bsz=False").training
    assert (fixed.micro_batch_size, fixed.gradient_accumulation_steps) == (4, 8)
    megatron = command.replace(
        "engine=fsdp optim=fsdp engine.strategy=fsdp2", "engine=megatron optim=megatron"
    )
    split = read(f"{megatron} model.path=Qwen/Qwen2.5-0.5B engine.tensor_model_parallel_size=2")
    assert (split.strategy.kind, split.parallelism.tensor, split.training.micro_batch_size) == (
        "megatron",
        2,
        8,
    )
    with pytest.raises(NotSimulatedError, match="'veomni'"):
        read(f"{command} engine=veomni model.path=Qwen/Qwen2.5-0.5B")
    with pytest.raises(NotSimulatedError, match=r"engine\.strategy: zsim does not simulate 'ddp'"):
        read(f"{command} engine.strategy=ddp model.path=Qwen/Qwen2.5-0.5B")


def test_a_batch_of_all_ranks_is_refused_unless_a_gpus_is_there_too(folder: Path) -> None:
    command = "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer data.micro_batch_size=16"
    command += " model.partial_pretrain=google/gemma-2b"
    with pytest.raises(InputError, match=r"data\.micro_batch_size: is of all ranks"):
        read(command)
    (folder / "both.yaml").write_text(
        "data: {micro_batch_size: 16, micro_batch_size_per_gpu: 2}\n"
        "model: {partial_pretrain: google/gemma-2b}\n"
    )
    for both in ("both.yaml", f"{command} data.micro_batch_size_per_gpu=2"):
        found = read(both, gpus=8)
        assert found.training.micro_batch_size == 2
        assert any("micro_batch_size_per_gpu counts" in note for note in found.notes)


def test_the_engine_of_verls_fine_tuning_is_the_one_that_a_file_names(folder: Path) -> None:
    def engine(name: str, keys: str) -> Experiment:
        (folder / "engine.yaml").write_text(
            f"{name}data: {{train_files: a.parquet, train_batch_size: 64, pad_mode: no_padding}}\n"
            f"model: {{path: Qwen/Qwen2.5-0.5B}}\nengine: {{{keys}}}\n"
        )
        return read("engine.yaml", gpus=8)

    defaults = "defaults: [{model@model: hf_model}, {engine@engine: NAME}, _self_]\n"
    for name, keys in (
        (defaults.replace("NAME", "megatron"), "tensor_model_parallel_size: 2"),
        ("", "strategy: megatron, tensor_model_parallel_size: 2"),
    ):
        found = engine(name, keys)
        assert (found.strategy.kind, found.parallelism.tensor) == ("megatron", 2)
    assert engine(defaults.replace("NAME", "fsdp"), "strategy: fsdp2").strategy.kind == "fsdp2"
    for keys, words in (
        ("fsdp_size: 3", r"engine\.fsdp_size: found 3"),
        ("wrap_policy: {min_num_params: 9}", r"engine\.wrap_policy\.min_num_params: found 9"),
    ):
        with pytest.raises((InputError, NotSimulatedError), match=rf"engine\.yaml: {words}"):
            engine("", keys)
    notes = "\n".join(engine("", "param_offload: true, fsdp_siz: 4").notes)
    assert "actor" not in notes
    assert "engine.fsdp_siz" in notes
    with pytest.raises(InputError, match=r"engine\.tensor_model_parallel_size: is of verl's Megatron"):
        engine("", "tensor_model_parallel_size: 2")
    with pytest.raises(
        NotSimulatedError, match=r"'megatron' .* with the engine fsdp; expected fsdp or fsdp2"
    ):
        engine(defaults.replace("NAME", "fsdp"), "strategy: megatron")
    with pytest.raises(NotSimulatedError, match="'automodel' of verl's; expected fsdp or megatron"):
        engine(defaults.replace("NAME", "automodel"), "strategy: fsdp")


def test_verls_files_of_fine_tuning_are_read(folder: Path) -> None:
    (folder / "sft_trainer.yaml").write_text(
        "data: {train_batch_size: 256, micro_batch_size_per_gpu: 4, max_length: 512}\n"
        "model: {partial_pretrain: google/gemma-2b, fsdp_config: {model_dtype: bf16}}\n"
    )
    found = read("sft_trainer.yaml", gpus=8)
    assert (found.program, found.strategy.kind, found.training.stored_dtype) == ("verl", "fsdp2", "bf16")
    assert (found.training.sequence_length, found.training.gradient_accumulation_steps) == (512, 8)
    (folder / "older.yaml").write_text(
        "data: {micro_batch_size: 16}\nmodel: {partial_pretrain: google/gemma-2b}\n"
    )
    with pytest.raises(InputError, match=r"data\.micro_batch_size: is of all ranks"):
        read("older.yaml", gpus=8)


@pytest.mark.parametrize("name", ["max_seq_length", "max_length", "model_max_length", "block_size"])
def test_scripts_of_ones_own_say_a_length_by_many_names(folder: Path, name: str) -> None:
    found = read(f"torchrun --nproc_per_node 8 train.py {FLAGS} --{name} 1024")
    assert found.training.sequence_length == 1024
    unsaid = read(f"torchrun --nproc_per_node 8 train.py {FLAGS}")
    assert any("no key says how long sequences are" in note for note in unsaid.notes)


def test_a_mode_that_trains_adapters_is_another_job(folder: Path) -> None:
    values = {"model_name_or_path": "meta-llama/Llama-3.1-8B", "per_device_train_batch_size": 1}
    for mode in ("qlora", "LoRA", "adapter"):
        (folder / "args.json").write_text(json.dumps({**values, "train_mode": mode}))
        with pytest.raises(NotSimulatedError, match=f"train_mode {mode}: is a script's own"):
            read("args.json")
    (folder / "args.json").write_text(json.dumps({**values, "train_mode": "full"}))
    assert read("args.json").training.lora is None


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("accelerate launch --num_processes 8 run_evals_accelerate.py --tasks a.txt", "trains nothing"),
        ("accelerate launch -m lmms_eval --batch_size 1", "trains nothing"),
        (f"python qlora.py {FLAGS}", "is a script whose name says another job"),
        (f"torchrun --nproc_per_node 8 train_reward.py {FLAGS}", "whose name says another job"),
        (f"deepspeed --module align_anything.trainers.mine.sft {FLAGS}", "is of Align-Anything"),
        ("accelerate launch --config_file fsdp.yaml mine.py --batch_size 8", "--batch_size: is a script's"),
        ("deepspeed mine.py --deepspeed_config zero3.json --lora_dim 8", "--lora_dim: is a script's"),
    ],
)
def test_evaluations_and_other_peoples_trainers_are_refused(folder: Path, command: str, words: str) -> None:
    with pytest.raises((InputError, NotSimulatedError), match=words):
        read(command)


def test_the_trainers_fsdp_was_of_version_1_before_release_5(folder: Path) -> None:
    command = f"torchrun --nproc_per_node 8 train.py {FLAGS} --fsdp 'full_shard auto_wrap'"
    assert read(command).strategy.kind == "fsdp2"
    for flag in ("--evaluation_strategy no", "--fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer"):
        older = of_kind(read(f"{command} {flag}").strategy, Fsdp1Table)
        assert older.sharding_strategy == "FULL_SHARD"


def test_transformers_examples_are_the_trainers_and_torchrun_starts_one_process(folder: Path) -> None:
    found = read(f"torchrun run_mlm.py {FLAGS} --dataset_name wikitext --max_seq_length 512")
    assert (found.program, found.gpus, found.training.sequence_length) == ("transformers", 1, 512)
    assert found.training.activation_checkpointing == "none"
    assert any("torchrun starts one process" in note for note in found.notes)


def test_a_script_behind_a_launchers_is_no_training(folder: Path) -> None:
    """The name of the launcher's script tells TRL's trainer."""
    (folder / "job.yaml").write_text(
        "model_name_or_path: meta-llama/Meta-Llama-3-8B\ndataset_name: x\nper_device_train_batch_size: 1\n"
    )
    (folder / "run.sh").write_text(
        "accelerate launch --config_file fsdp.yaml run_dpo.py --config job.yaml\n"
        "python model_save.py --config job.yaml\n"
    )
    found = read("run.sh")
    assert (found.strategy.kind, found.gpus, found.training.reference) == ("fsdp2", 16, "copy")
    assert not any("commands start a training" in note for note in found.notes)


def test_accelerates_deepspeed_takes_optimizers_that_no_json_has(folder: Path) -> None:
    (folder / "zero2.yaml").write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n"
        "deepspeed_config: {zero_stage: 2}\n"
    )
    found = read(f"accelerate launch --config_file zero2.yaml train.py {FLAGS} --optim paged_adamw_8bit")
    assert resolve(found).training.optimizer == "paged-adamw-8bit"


def test_overrides_behind_the_name_of_verls_file_are_overrides(folder: Path) -> None:
    (folder / "sft").mkdir()
    (folder / "sft" / "turns.yaml").write_text("data: {max_length: 512}\nmodel: {strategy: fsdp}\n")
    found = read(
        "torchrun --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer --config-path sft --config-name "
        "turns.yaml data.max_length=25600 data.train_batch_size=8 data.micro_batch_size_per_gpu=1 "
        "model.partial_pretrain=Qwen/Qwen3-4B"
    )
    training = resolve(found).training
    assert (training.sequence_length, training.micro_batch_size) == (25600, 1)
    assert (found.strategy.kind, found.gpus, found.model) == ("fsdp1", 4, "qwen3-4b")


def test_any_script_that_names_a_job_config_file_is_torchtitans(folder: Path) -> None:
    (folder / "job.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nbatch_size = 3\nseq_len = 4096\n'
    )
    (folder / "run.sh").write_text(
        "CONFIG_FILE=${CONFIG_FILE:-./job.toml}\n"
        "srun torchrun --nnodes 2 --nproc_per_node 8 ./train.py --job.config_file ${CONFIG_FILE} "
        "--training.seq_len 2048 $overrides"
    )
    found = read("run.sh")
    assert (found.program, found.gpus, found.training.micro_batch_size) == ("torchtitan", 16, 3)
    assert found.training.sequence_length == 2048
    (folder / "s").mkdir()
    (folder / "s/t").write_text((folder / "job.toml").read_text())
    for option in ("--job.config_file t", "--job.config_file=t"):
        (folder / "s/t.sh").write_text(
            f"srun torchrun --nproc_per_node 8 train.py {option} --training.seq_len 2048"
        )
        assert read("s/t.sh").training.sequence_length == 2048


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("play.py --solver_deepspeed_path zero3.json", "--solver_deepspeed_path: is a script's own"),
        ("play.py --num_generations 4", "--num_generations: is a script's own"),
        ("src/train_grpo.py", "whose name says another job"),
        ("main.py --config-name=x mode=train peft_config.r=8", r"peft_config\.r: is a script's own"),
        ("main.py --config-name x +max_length=2048", "max_length: is a script's own"),
    ],
)
def test_accelerates_scripts_of_another_job_are_refused(folder: Path, script: str, words: str) -> None:
    with pytest.raises(NotSimulatedError, match=words):
        read(f"accelerate launch --num_processes 4 {script}", model="llama-3-8b")


def test_what_stands_in_the_code_of_accelerates_script_is_named(folder: Path) -> None:
    found = read("accelerate launch --num_processes 4 play.py --out x", model="llama-3-8b")
    assert any("play.py: batch, length and what is trained stand in its code" in note for note in found.notes)


def test_variables_before_a_command_are_that_commands(folder: Path) -> None:
    (folder / "run.sh").write_text(
        f"CUDA_VISIBLE_DEVICES=0,1,2 llamafactory-cli train sft.yaml\npython train.py {FLAGS}\n"
    )
    assert read("run.sh").gpus is None


def test_a_variable_that_a_script_demands_and_compares_is_asked_for(folder: Path) -> None:
    (folder / "run.sh").write_text(
        ': "${DATA:?where it is}" "${ENGINE:?must be ds or ddp}"\nA=()\n'
        'if [ "$ENGINE" = ds ]; then A+=(--deepspeed zero3.json); fi\n'
        f'torchrun --nproc_per_node 4 train.py {FLAGS} --data "$DATA" "${{A[@]}}"\n'
    )
    with pytest.raises(InputError, match=r"ENGINE: is not set, .*\(must be ds or ddp\).*ENGINE=VALUE SCRIPT"):
        read("run.sh")
    assert read("ENGINE=ds run.sh").strategy.kind == "deepspeed"


def test_two_dashes_end_a_launchers_flags(folder: Path) -> None:
    found = read(f"accelerate launch --config_file fsdp.yaml --num_processes=4 -- train.py {FLAGS}")
    assert (found.strategy.kind, found.gpus, found.model) == ("fsdp2", 4, "llama-3.1-8b")


def test_a_scripts_own_names_of_batch_and_json(folder: Path) -> None:
    found = read(f"deepspeed --num_gpus 2 finetune.py --deepspeed_config zero3.json {FLAGS}")
    assert (found.strategy.kind, resolve(found).training.micro_batch_size) == ("deepspeed", 2)
    with pytest.raises(NotSimulatedError, match="batch_size 2: is a script's own"):
        read(f"torchrun --nproc_per_node 8 tune.py {MODEL} --batch_size 2 --gradient_checkpointing --bf16")


def test_files_that_a_script_writes_are_read(folder: Path) -> None:
    """By their variables' values, and in place of files of these names."""
    (folder / "ds.sh").write_text(
        'STAGE=2\nDS="run_$(date +%s)/ds.json"\ncat > "$DS" <<EOF\n{"zero_optimization": {"stage": $STAGE}, '
        '"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}\nEOF\n'
        f'deepspeed --num_gpus 4 train.py --deepspeed "$DS" {FLAGS}\n'
    )
    found = read("ds.sh")
    assert (found.gpus, of_kind(resolve(found).strategy, DeepSpeedConfig).stage) == (4, 2)
    (folder / "lf.sh").write_text(
        "cat > new.yaml <<'EOF'\nmodel_name_or_path: meta-llama/Meta-Llama-3-8B\nstage: sft\n"
        "finetuning_type: full\ncutoff_len: 1024\nEOF\n"
        "llamafactory-cli train new.yaml per_device_train_batch_size=3\n"
    )
    found = read("lf.sh", gpus=8)
    assert (found.program, found.training.sequence_length) == ("llama-factory", 1024)
    assert found.training.micro_batch_size == 3
    (folder / "acc.sh").write_text(
        f"cat <<EOF > a.yaml\n{FSDP}EOF\naccelerate launch --config_file a.yaml train.py {FLAGS}\n"
    )
    found = read("acc.sh")
    assert (found.strategy.kind, found.gpus) == ("fsdp2", 16)
    (folder / "swift.sh").write_text(
        'cat > f.json <<EOF\n{"fsdp": "full_shard offload", "fsdp_config": {"fsdp_version": 2}}\nEOF\n'
        "swift sft --model meta-llama/Llama-3.1-8B --train_type full --fsdp f.json --max_length 512\n"
    )
    assert of_kind(read("swift.sh", gpus=8).strategy, Fsdp2Table).cpu_offload


def test_numbers_of_accelerate_that_nothing_sets_are_asked_for(folder: Path) -> None:
    (folder / "run.sh").write_text(
        f"accelerate launch --config_file fsdp.yaml --num_machines $N --num_processes $1 train.py {FLAGS}\n"
    )
    found = read("run.sh")
    assert (found.strategy.kind, found.nodes, found.gpus) == ("fsdp2", None, None)
    assert any("--num_processes $1: nothing sets it" in note for note in found.notes)


@pytest.mark.parametrize(
    "name", ["~/mine/configs/z.json", "/data/mine/configs/z.json", "$HOME/configs/z.json"]
)
def test_a_file_of_another_machine_is_looked_for_by_the_end_of_its_path(folder: Path, name: str) -> None:
    """With a folder: of one that only has the file's name, another may be meant."""
    (folder / ".git").mkdir()
    (folder / "configs").mkdir()
    (folder / "configs/z.json").write_text(json.dumps(ZERO_3))
    (folder / "jobs").mkdir()
    (folder / "jobs/run.sh").write_text(f"deepspeed --num_gpus 2 train.py --deepspeed {name} {FLAGS}\n")
    assert of_kind(resolve(read("jobs/run.sh")).strategy, DeepSpeedConfig).stage == 3
    (folder / "configs/z.json").rename(folder / "z.json")
    with pytest.raises(InputError, match="no such file"):
        read("jobs/run.sh")
