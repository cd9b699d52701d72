"""torchtitan's documented launch: run_train.sh with variables, and its registry of functions, never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.expect import of_kind
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.tables import Experiment

OLD_SCRIPT = """\
set -ex
NGPU=${NGPU:-"8"}
CONFIG_FILE=${CONFIG_FILE:-"./small.toml"}
TRAIN_FILE=${TRAIN_FILE:-"torchtitan.train"}
torchrun --nproc_per_node=${NGPU} --rdzv_backend c10d -m ${TRAIN_FILE} --job.config_file ${CONFIG_FILE} "$@"
"""
NEW_SCRIPT = """\
NGPU=${NGPU:-"8"}
MODULE=${MODULE:-"llama3"}
CONFIG=${CONFIG:-"llama3_debugmodel"}
COMM_MODE=${COMM_MODE:-""}
if [ -n "$COMM_MODE" ]; then
  python3 -m torchtitan.train --module ${MODULE} --config ${CONFIG} "$@" --training.steps 1
else
  torchrun --nproc_per_node=${NGPU} -m torchtitan.train --module ${MODULE} --config ${CONFIG} "$@"
fi
"""
REGISTRY = '''\
import os
from torchtitan.trainer import Trainer
os.system("touch ran")


def big() -> Trainer.Config:
    """A docstring."""
    spec = model_registry("8B", converters=[Float8LinearConverter.Config(recipe_name="rowwise")])
    return Trainer.Config(
        model_spec=spec,
        optimizer=default_adamw(lr=1e-4),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=2 * 4096, max_context_length=4096, steps=WHATEVER
        ),
        compile=CompileConfig(enable=True, components=["model"]),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
    )


def bigger() -> Trainer.Config:
    config = big()
    config.training.num_tokens_per_train_step = 64 * 4096
    config.model_spec = model_registry("70B")
    config.activation_checkpoint = SelectiveAC.Config()
    return config


def earlier() -> Trainer.Config:
    config = big()
    config.activation_checkpoint = ActivationCheckpointConfig(mode="selective")
    return config


def branching() -> Trainer.Config:
    config = big()
    if os.environ.get("X"):
        config.training.steps = 1
    return config


def unknown_batch() -> Trainer.Config:
    config = big()
    config.training.max_context_length = lengths()[0]
    return config


def other_optimizer() -> Trainer.Config:
    config = big()
    config.optimizer = OptimizersContainer.Config(name="Muon")
    return config


def rollouts() -> Controller.Config:
    return Controller.Config(model_spec=model_registry("8B"))


def graphs() -> GraphTrainer.Config:
    config = to_graph_trainer_config(big(), model_registry)
    config.model_spec = model_registry("8B")
    return config


def tuning() -> Trainer.Config:
    def text(sample):
        return sample["text"]

    config = big()
    config.model_spec = model_registry("3B", attn_backend="varlen")
    config.dataloader = Loader.Config(fn=text)
    return config


def predicting() -> Trainer.Config:
    config = big()
    config.model_spec = model_registry("8B", attn_backend="varlen", num_mtp_layers=1)
    return config


def dispatching() -> Trainer.Config:
    config = big()
    config.model_spec = model_registry("debugmodel", moe_comm_backend="deepep")
    config.parallelism = ParallelismConfig(expert_parallel_degree=4)
    return config


def choosing() -> Trainer.Config:
    config = big()
    config.model_spec = model_registry("8B", moe_comm_backend=backend)
    return config


def endless() -> Trainer.Config:
    return endless()
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "torchtitan" / "models" / "llama3"
    folder.mkdir(parents=True)
    (folder / "config_registry.py").write_text(REGISTRY)
    (tmp_path / "run_train.sh").write_text(NEW_SCRIPT)
    return tmp_path


def read(config: object) -> Experiment:
    data = {"cluster": "dgx-h100", "model": "llama-3-8b"}
    return build_experiment(data, {"strategy.config": str(config)}, origin="test")


def test_the_launch_up_to_0_2_names_its_toml(tmp_path: Path) -> None:
    (tmp_path / "run_train.sh").write_text(OLD_SCRIPT)
    (tmp_path / "small.toml").write_text("[training]\nlocal_batch_size = 2\nseq_len = 1024\n")
    (tmp_path / "other.toml").write_text("[training]\nlocal_batch_size = 4\nseq_len = 1024\n")
    script = tmp_path / "run_train.sh"
    found = read(script)
    assert (found.training.micro_batch_size, found.training.sequence_length, found.gpus) == (2, 1024, 8)
    found = read(f"NGPU=4 CONFIG_FILE=./other.toml {script} --training.seq_len 512")
    assert (found.training.micro_batch_size, found.training.sequence_length, found.gpus) == (4, 512, 4)
    (tmp_path / "small.toml").unlink()
    with pytest.raises(InputError, match=r"no such file; expected a torchtitan TOML; tried .*small\.toml"):
        read(script)


def test_todays_launch_reads_the_function_of_its_checkout(checkout: Path) -> None:
    """2 x 4,096 tokens are 2 sequences. The module's first lines are not run."""
    found = read(f"MODULE=llama3 CONFIG=big NGPU=8 {checkout}/run_train.sh")
    training = found.training
    assert (training.micro_batch_size, training.sequence_length) == (2, 4096)
    assert (training.precision, training.fp8_recipe) == ("fp8", "torchao-rowwise")
    assert (training.activation_checkpointing, training.compile) == ("full", True)
    assert found.parallelism.tensor == 2
    assert of_kind(found.strategy, Fsdp2Table).param_dtype == "bf16"
    assert found.program == "torchtitan-0.3"
    assert not (Path() / "ran").exists()
    assert any("CUDA graphs" in note for note in found.notes)


def test_a_function_that_changes_another_and_flags_behind(checkout: Path) -> None:
    """64 sequences on 4 replicas of 2 are 8 micro-batches of 2; of half as long ones, twice as many."""
    found = read(f"CONFIG=bigger {checkout}/run_train.sh")
    assert found.training.gradient_accumulation_steps == 8
    assert (found.training.activation_checkpointing, found.training.precision) == ("selective-op", "bf16")
    assert read(f"CONFIG=earlier {checkout}/run_train.sh").training.activation_checkpointing == "selective-op"
    found = read(f"CONFIG=bigger {checkout}/run_train.sh --training.max_context_length 2048")
    assert (found.training.micro_batch_size, found.training.sequence_length) == (4, 2048)


def test_the_registrys_own_arguments_are_read(checkout: Path) -> None:
    """Its DeepSeek-V3 of tests: 6 layers of a width of 256 with 8 experts of 256, and two shared ones."""
    folder = checkout / "torchtitan" / "models" / "deepseek_v3"
    folder.mkdir()
    (folder / "config_registry.py").write_text(REGISTRY)
    command = f"MODULE=deepseek_v3 CONFIG=dispatching {checkout}/run_train.sh"
    found = build_experiment({"cluster": "dgx-h100"}, {"strategy.config": command}, origin="test")
    assert (found.parallelism.expert, found.parallelism.dispatcher) == (4, "deepep")
    shape = found.model if isinstance(found.model, dict) else {}
    assert (shape["hidden_size"], shape["num_hidden_layers"], shape["n_routed_experts"]) == (256, 6, 8)
    assert shape["model_type"] == "deepseek_v2"


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ("branching", NotSimulatedError, "does not follow the 'if' in branching; give the JSON"),
        ("unknown_batch", NotSimulatedError, "training.max_context_length: zsim does not follow 'lengths"),
        ("other_optimizer", NotSimulatedError, "default_adamw only, found 'OptimizersContainer.Config'"),
        ("rollouts", NotSimulatedError, "does not simulate reinforcement learning of torchtitan's"),
        ("graphs", NotSimulatedError, "does not simulate steps that are compiled as one graph"),
        ("predicting", NotSimulatedError, "model_registry: zsim does not simulate num_mtp_layers 1"),
        ("choosing", NotSimulatedError, "does not simulate moe_comm_backend backend"),
        ("endless", InputError, "call one another without end"),
        ("bik", InputError, "no function 'bik'; did you mean 'big'"),
    ],
)
def test_what_a_function_computes_is_not_guessed(
    checkout: Path, config: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read(f"CONFIG={config} {checkout}/run_train.sh")


def test_a_function_in_a_function_makes_no_value_of_a_step(checkout: Path) -> None:
    """A size has the model of torchtitan's registry, and one without a preset is asked for."""
    script = f"{checkout}/run_train.sh"
    found = build_experiment(
        {"cluster": "dgx-h100"}, {"strategy.config": f"CONFIG=tuning {script}"}, origin="t"
    )
    assert found.model == "llama-3.2-3b"
    assert any("attn_backend: 'varlen' is simulated as" in note for note in found.notes)
    with pytest.raises(InputError, match=r"model llama3 13B: has no preset; give one \(--model\)"):
        build_experiment(
            {"cluster": "dgx-h100"}, {"strategy.config": f"CONFIG=tuning {script} --model.flavor 13B"},
            origin="t",
        )  # fmt: skip


def test_batches_of_tokens_are_whole_sequences() -> None:
    command = "--module llama3 --config llama3_8b --training.max_context_length 8192"
    found = read(f"{command} --training.num_tokens_per_microbatch_per_dp_rank 16384")
    assert (found.training.micro_batch_size, found.training.sequence_length) == (2, 8192)
    with pytest.raises(InputError, match="expected a multiple of max_context_length, 8192"):
        read(f"{command} --training.num_tokens_per_microbatch_per_dp_rank 10000")


def test_a_module_without_a_checkout_says_where_one_is_needed() -> None:
    with pytest.raises(InputError, match=r"zsim knows --module llama3 .* torchtitan/models/qwen9/config_reg"):
        read("--module qwen9 --config qwen9_8b")


def test_a_toml_with_a_flag_that_names_a_yaml_is_torchtitans(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[training]\nlocal_batch_size = 2\n")
    found = read(f"{tmp_path}/a.toml --training.seq_len=1024 --comm.save_traces_folder=x.yaml")
    assert (found.program, found.training.micro_batch_size) == ("torchtitan", 2)
