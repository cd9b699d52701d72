"""A file is its program's by marks that no other program has, and is never read as another program's."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.errors import NotSimulatedError
from zsim.programs.marks import marks_of, table
from zsim.specs.experiment.programs import programs, readable_programs
from zsim.specs.formats.detect import is_training_file, names_training_file, read_training_file
from zsim.specs.formats.program import ProgramSource

# A file of each program, of the keys that an example of its own has first.
FILES = {
    "verl": "data: {train_batch_size: 8}\nactor_rollout_ref: {actor: {strategy: fsdp}}\n",
    "verl-part": "_target_: verl.workers.config.FSDPEngineConfig\nparam_offload: false\n",
    "nemo-rl": "defaults: base.yaml\npolicy: {model_name: x, precision: bfloat16}\ncluster: {num_nodes: 1}\n",
    "oumi": "model: {model_name: x}\ntraining: {trainer_type: TRL_SFT}\n",
    "open-instruct": "model_name_or_path: x\ndataset_mixer: {a: 1}\nwith_tracking: true\n",
    "nanotron": "parallelism: {dp: 2, tp: 1, pp: 1}\ntokens: {sequence_length: 8}\n",
    "olmo": "model: {d_model: 8, block_type: sequential}\ndevice_train_microbatch_size: 2\n",
    "llm-foundry": "max_seq_len: 8\nmodel: {name: mpt_causal_lm}\ndevice_train_microbatch_size: 8\n"
    "fsdp_config: {sharding_strategy: FULL_SHARD}\n",
    "lingua": "distributed: {fsdp_type: full_shard}\nmodel: {dim: 8}\n",
    "gpt-neox": "pipe_parallel_size: 1\nnum_layers: 2\ntrain_micro_batch_size_per_gpu: 4\n",
    "maxtext": "base_config: base.yml\nuse_sft: true\npacking: true\n",
    "areal": "experiment_name: a\ntrial_name: b\nactor: {path: x}\nstats_logger: {wandb: {mode: disabled}}\n",
    "roll": "exp_name: a\npretrain: x\nsft_train: {training_args: {}}\n",
    "nemo-automodel": "recipe: x\ndist_env: {backend: nccl}\nrecipe_args: {}\n",
    "nemo-aligner": "trainer: {num_nodes: 8, kto: {max_steps: -1}}\nmodel: {mcore_gpt: true}\n",
    "olmo-core": "run_name: r\nmodel: {}\ndataset: {}\ndata_loader: {}\ntrain_module: {}\ntrainer: {}\n",
    "lightning": "seed_everything: true\ntrainer: {max_epochs: 1}\nmodel: {width: 8}\n",
    "mistral-finetune": "model_id_or_path: x\nlora: {rank: 64}\nseq_len: 8\n",
    "mergekit": "base_model: x\ngate_mode: hidden\nexperts: [{source_model: y}]\n",
    "kubernetes": "apiVersion: v1\nkind: Pod\n",
    "skypilot": "num_nodes: 2\nrun: torchrun train.py\n",
    "compose": "services: {train: {image: x}}\n",
    "github-actions": "on: [push]\njobs: {test: {runs-on: x}}\n",
    "conda": "name: a\nchannels: [conda-forge]\ndependencies: [python]\n",
    "hf-config": "architectures: [LlamaForCausalLM]\nmodel_type: llama\n",
    "peft-adapter": "base_model_name_or_path: x\npeft_type: LORA\nr: 8\n",
}
TOMLS = {"prime-rl": "max_steps = 2\n[model]\nname = 'x'\n[data]\nname = 'y'\n[optim]\nlr = 1e-5\n"}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", [*FILES, *TOMLS])
def test_a_file_is_recognised_by_its_marks(tmp_path: Path, name: str) -> None:
    text = FILES.get(name) or TOMLS[name]
    path = write(tmp_path, f"a.{'yaml' if name in FILES else 'toml'}", text)
    marks = marks_of(ProgramSource(str(path)))
    assert marks is not None
    assert marks.name == name
    assert names_training_file(path)
    assert is_training_file(str(path))


@pytest.mark.parametrize("name", [name for name in [*FILES, *TOMLS] if name not in readable_programs()])
def test_a_program_that_is_not_read_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    text = FILES.get(name) or TOMLS[name]
    path = write(tmp_path, f"a.{'yaml' if name in FILES else 'toml'}", text)
    title = next(row.title for row in table() if row.name == name)
    with pytest.raises(NotSimulatedError, match=rf"is a file of {title}, which zsim does not read"):
        read_training_file(str(path))


def test_no_program_claims_a_file_with_another_programs_marks(tmp_path: Path) -> None:
    """`fsdp_config` and `gradient_checkpointing` are TrainingArguments' too, and a recipe has `model`."""
    for name, text in FILES.items():
        source = ProgramSource(str(write(tmp_path, "a.yaml", text)))
        first = next(program for program in programs() if program.recognises(source))
        assert first.name == (name if name in readable_programs() else "unread")


def test_every_row_names_its_source_and_marks() -> None:
    names = [row.name for row in table()]
    assert len(set(names)) == len(names) > 20
    for row in table():
        assert row.read_at
        assert row.marks
        assert all(row.marks)


def test_files_without_marks_are_nobodys(tmp_path: Path) -> None:
    assert marks_of(ProgramSource(str(write(tmp_path, "a.yaml", "per_device_train_batch_size: 1\n")))) is None
    assert marks_of(ProgramSource(str(write(tmp_path, "b.yaml", "- a\n- b\n")))) is None
    assert marks_of(ProgramSource(str(tmp_path / "none.yaml"))) is None
