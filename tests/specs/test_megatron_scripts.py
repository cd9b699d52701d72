"""Scripts of programs on top of Megatron: parameters, functions, own flags, variables of libraries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.expect import of_kind
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.operations.operation import operations_of
from zsim.programs.environment import read_attention, read_environment
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.library import Library
from zsim.specs.model.spec import Attention

NETWORK = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --max-position-embeddings 4096 "
    "--vocab-size 32000 --bf16 --global-batch-size 64"
)


def write(folder: Path, text: str) -> Path:
    path = folder / "run.sh"
    path.write_text(f"#!/bin/bash\n{text}\n")
    return path


def experiment(config: object) -> Experiment:
    return build_experiment(
        {"cluster": "dgx-h100", "nodes": 1}, {"strategy.config": str(config)}, origin="test"
    )


@pytest.mark.parametrize("shell", ["", "bash "])
def test_words_behind_a_script_are_its_parameters_and_flags_win(tmp_path: Path, shell: str) -> None:
    path = write(
        tmp_path,
        "SIZE=$1\nSEQ=${3:-4096}\nif [ $SIZE = small ]; then MBS=2; else MBS=1; fi\n"
        f"torchrun --nproc_per_node 8 pretrain_gpt.py {NETWORK} --seq-length $SEQ --micro-batch-size $MBS "
        "--tensor-model-parallel-size $2",
    )
    found = experiment(f"{shell}{path} small 4")
    assert found.training.micro_batch_size == 2
    assert found.training.sequence_length == 4096
    assert found.parallelism.tensor == 4
    found = experiment(f"{path} large 4 2048 --micro-batch-size 4")
    assert found.training.sequence_length == 2048
    assert found.training.micro_batch_size == 4
    with pytest.raises(
        InputError, match=r"found '\$2'.*it takes parameters: '.*run.sh ARG1 ARG2 ARG3' gives"
    ):
        experiment(path)


def test_the_micro_batch_may_stand_behind_the_script(tmp_path: Path) -> None:
    path = write(tmp_path, f"torchrun --nproc_per_node 8 pretrain_gpt.py {NETWORK} --seq-length 4096")
    assert experiment(f"{path} --micro-batch-size 2").training.micro_batch_size == 2
    with pytest.raises(InputError, match="--micro-batch-size: missing, as Megatron asks for it"):
        experiment(path)


def test_a_function_and_a_loop_that_start_training_are_followed(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"run() {{\n torchrun --nproc_per_node 8 pretrain_gpt.py {NETWORK} --seq-length 4096 "
        "--micro-batch-size $1\n}\nfor size in 1 2; do run $size; done",
    )
    found = experiment(path)
    assert found.training.micro_batch_size == 2
    assert any("2 commands start Megatron" in note for note in found.notes)
    uncalled = write(tmp_path, f"run() {{\n torchrun pretrain_gpt.py {NETWORK}\n}}")
    with pytest.raises(InputError, match=r"starts no Megatron: .*function 'run' is not called"):
        experiment(uncalled)


def test_flags_of_a_programs_own_are_noted_and_take_their_values_along(tmp_path: Path) -> None:
    flags = f"{NETWORK} --seq-length 4096 --own-sizes 1 2 --micro-batch-size 2 --use-own"
    slip = f"torchrun --nproc_per_node 8 train.py {flags} --tensor-model-paralel-size 2"
    notes = experiment(write(tmp_path, slip)).notes
    assert any("--tensor-model-paralel-size (or --tensor-model-parallel-size?)" in note for note in notes)
    found = experiment(write(tmp_path, f"torchrun --nproc_per_node 8 train.py {flags}"))
    assert found.training.micro_batch_size == 2
    assert any(note.endswith("not Megatron's, and not read: --own-sizes, --use-own") for note in found.notes)
    assert experiment(f"torchrun --nproc_per_node 8 train.py {flags}").training.micro_batch_size == 2


def test_a_flag_that_megatrons_own_program_would_refuse_is_refused() -> None:
    with pytest.raises(InputError, match="--own-size: Megatron has no such flag"):
        experiment(f"torchrun --nproc_per_node 8 pretrain_gpt.py {NETWORK} --seq-length 4096 --own-size 1")


def test_the_last_batch_of_a_schedule_is_simulated(tmp_path: Path) -> None:
    flags = f"{NETWORK} --seq-length 4096 --micro-batch-size 1 --step-batch-size-schedule '0:8 2.4B:16'"
    found = experiment(write(tmp_path, f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags}"))
    assert found.training.gradient_accumulation_steps == 2
    assert any("its last batch is simulated" in note for note in found.notes)


def test_what_a_script_leaves_open_is_asked_for_only_where_it_matters(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"DATA=$1\ntorchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py {NETWORK} --seq-length 4096 "
        "--micro-batch-size $MBS --tensor-model-parallel-size ${TP} --data-path $DATA",
    )
    with pytest.raises(InputError, match=r"tensor-model-parallel-size: found '\$\{TP\}', which nothing sets.*"
                       "'TP=.*gives it, and so does --set parallelism.tensor="):  # fmt: skip
        experiment(f"MBS=2 {path}")
    found = build_experiment(
        {"cluster": "dgx-h100", "nodes": 1},
        {"strategy.config": str(path), "parallelism.tensor": 4, "training.micro_batch_size": 2},
        origin="test",
    )
    assert found.training.gradient_accumulation_steps == 16  # 64 / (2 x 2 replicas)
    assert any("the launcher's nodes are $NNODES, which nothing sets" in note for note in found.notes)


OPEN = (
    "torchrun --nproc_per_node 16 pretrain_gpt.py --num-layers 32 --hidden-size 1024 --bf16 "
    "--num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --vocab-size 50257 "
    "--micro-batch-size 2 --global-batch-size 64 --tensor-model-parallel-size $1 --sequence-parallel"
)


def of_open(path: Path, settings: dict[str, object], data: dict[str, object] | None = None) -> Experiment:
    return build_experiment(
        {"cluster": "dgx-h100", "nodes": 2, **(data or {})},
        {"strategy.config": str(path), **settings},
        origin="test",
    )


def test_flags_that_depend_on_open_degrees_are_read_with_the_experiments_degrees(tmp_path: Path) -> None:
    flags = (
        "--pipeline-model-parallel-size $2 --num-layers-per-virtual-pipeline-stage 2 "
        "--context-parallel-size $3 --cp-comm-type a2a --num-experts 8 --tp-comm-overlap"
    )
    path = write(tmp_path, f"{OPEN} {flags}")
    degrees: dict[str, object] = {"tensor": 2, "pipeline": 4, "context": 2}
    by_override = of_open(path, {f"parallelism.{key}": value for key, value in degrees.items()})
    by_table = of_open(path, {}, {"parallelism": degrees})
    by_parameter = of_open(path, {"strategy.config": f"{path} 2 4 2"})
    for found in (by_override, by_table):
        assert found.parallelism == by_parameter.parallelism
    assert by_override.parallelism.sequence_parallel
    assert by_override.parallelism.async_tensor
    assert by_override.parallelism.context_method == "all-to-all"
    assert by_override.parallelism.schedule == "interleaved-1f1b"
    assert by_override.parallelism.virtual_stages == 4  # 32 layers / 4 ranks / 2
    with pytest.raises(InputError, match=r"tensor-model-parallel-size: found '\$1', which nothing sets"):
        of_open(path, {"parallelism.pipeline": 4, "parallelism.context": 2})


@pytest.mark.parametrize(
    ("key", "value"), [("training.global_batch_size", 64), ("training.gradient_accumulation_steps", 2)]
)
def test_an_open_global_batch_is_the_experiments(tmp_path: Path, key: str, value: int) -> None:
    path = write(tmp_path, OPEN.replace("-size 64", "-size $GBS").replace("$1", "1"))
    assert resolve(of_open(path, {key: value})).training.gradient_accumulation_steps == 2  # 64 / 2 / 16
    with pytest.raises(InputError, match=r"--set training\.global_batch_size="):
        of_open(path, {})


@pytest.mark.parametrize(
    ("launcher", "tasks", "num_gpus"),
    [
        ("deepspeed --hostfile hosts", 1, 16),
        ("srun torchrun $DISTRIBUTED_ARGS", 1, 16),
        ("srun --ntasks-per-node=1 python -m torch.distributed.run", 8, 16),
        ("srun python", 8, 16),
        ("srun python", 4, 8),
    ],
)
def test_slurms_tasks_are_gpus_only_without_a_launcher_of_processes(
    tmp_path: Path, launcher: str, tasks: int, num_gpus: int
) -> None:
    options = f"#SBATCH --nodes=2\n#SBATCH --ntasks-per-node={tasks}\n#SBATCH --gpus-per-node=8\n"
    command = OPEN.replace("torchrun --nproc_per_node 16", launcher).replace("$1", "1")
    path = write(tmp_path, f"{options}{command}")
    found = build_experiment({"cluster": "dgx-h100"}, {"strategy.config": str(path)}, origin="test")
    assert (found.nodes, found.gpus) == (2, num_gpus)
    assert any("one GPU per task is simulated" in note for note in found.notes) == (num_gpus == 8)


def test_a_folder_of_the_path_does_not_make_pretrain_gpt_multimodal() -> None:
    flags = f"{NETWORK} --seq-length 4096 --micro-batch-size 1"
    for program in ("/a/multimodal/Megatron-LM/pretrain_gpt.py", "/a/multimodal/b/train.py"):
        found = experiment(f"torchrun --nproc_per_node 8 {program} {flags}")
        assert len(Library().model(found.model).blocks) == 8


def test_a_job_of_slurm_has_its_tasks_as_gpus(tmp_path: Path) -> None:
    """As in the scripts of arXiv 2104.04473: one file has the flags, one submits, and one is the job."""
    (tmp_path / "config.sh").write_text(
        f'export PARAMS="{NETWORK} --seq-length 4096 --micro-batch-size $MBS"\n'
    )
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\n#SBATCH --exclusive --ntasks-per-node=8\n"
        'CMD="python -u /code/pretrain_gpt.py ${PARAMS}"\nsrun -l sh -c "${CMD}"\n'
    )
    path = write(tmp_path, "MBS=2\n. `pwd`/config.sh\nsbatch -A <slurm account> --nodes=4 job.sh\nexit 0")
    found = build_experiment({"cluster": "dgx-h100"}, {"strategy.config": str(path)}, origin="test")
    assert (found.nodes, found.gpus, found.training.micro_batch_size) == (4, 32, 2)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("examples/multimodal/train.py", "the models of examples/multimodal/train.py"),
        ("train.py --freeze-LM", "vision towers"),
        ("pretrain_bert.py", "the models of pretrain_bert.py"),
        ("pretrain_gpt.py --spec my.layers spec", "layers of one's own"),
        ("pretrain_gpt.py --hybrid-layer-pattern MM*G --disable-bias-linear", "does not simulate 'G' of it"),
    ],
)
def test_programs_that_train_another_model_are_refused(tmp_path: Path, command: str, message: str) -> None:
    flags = f"{NETWORK} --seq-length 4096 --micro-batch-size 1"
    with pytest.raises(NotSimulatedError, match=message):
        experiment(write(tmp_path, f"torchrun --nproc_per_node 8 {command} {flags}"))


def test_flags_of_a_hybrid_model_make_the_published_one(tmp_path: Path) -> None:
    """Nemotron-H 8B, whose parameters its preset has, of 52 layers."""
    path = write(
        tmp_path,
        "torchrun --nproc_per_node 8 pretrain_hybrid.py --hidden-size 4096 --ffn-hidden-size 21504 "
        "--squared-relu --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
        "--mamba-num-heads 128 --bf16 "
        "--hybrid-layer-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M- "
        "--vocab-size 131072 --seq-length 4096 --max-position-embeddings 4096 --disable-bias-linear "
        "--normalization RMSNorm "
        "--untie-embeddings-and-output-weights --position-embedding-type none --micro-batch-size 1 "
        "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec",
    )
    model = Library().model(experiment(path).model)
    assert model.numel == Library().model("nemotron-h-8b").numel
    assert len(model.blocks) == 52


def test_what_a_hybrid_does_not_have_is_noted(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"torchrun --nproc_per_node 8 pretrain_hybrid.py {NETWORK} --seq-length 4096 --micro-batch-size 1 "
        "--hybrid-layer-pattern M*-M*-M- --disable-bias-linear",
    )
    notes = " ".join(experiment(path).notes)
    assert "learned positions are left out" in notes
    assert "norms are simulated as RMSNorm" in notes
    said = " ".join(experiment(f"{path} --position-embedding-type none --normalization RMSNorm").notes)
    assert "hybrid's" not in said
    with pytest.raises(NotSimulatedError, match="relative positions"):
        experiment(f"{path} --position-embedding-type relative")


def test_a_window_on_some_layers_leaves_the_others_unlimited(tmp_path: Path) -> None:
    """Every second layer of gpt-oss sees all keys (core/transformer/utils.py `is_layer_window_attention`)."""
    flags = f"{NETWORK} --seq-length 4096 --micro-batch-size 1 --window-size 127,0"
    path = write(tmp_path, f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags}")
    for skipped, expected in (("2", [128, None] * 4), ("[1]*7+[0]", [128] * 7 + [None])):
        model = Library().model(experiment(f"{path} --window-attn-skip-freq {skipped}").model)
        assert [operations_of(block.modules, Attention)[0].window for block in model.blocks] == expected


def test_flags_of_older_releases_have_their_names_of_today(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"torchrun --nproc_per_node 8 pretrain_gpt.py {NETWORK} --seq-length 4096 --batch-size 4 "
        "--model-parallel-size 2 --checkpoint-activations",
    )
    found = experiment(path)
    assert (found.training.micro_batch_size, found.parallelism.tensor) == (4, 2)
    assert (found.training.activation_checkpointing, found.training.recompute_method) == ("full", "uniform")
    flags = f"{NETWORK} --seq-length 4096 --micro-batch-size 1 --num-experts 4 --moe-layer-recompute"
    found = experiment(write(tmp_path, f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags}"))
    assert found.training.recompute_modules == ("core_attn", "moe")


def test_variables_of_nccl_force_what_they_say_and_the_rest_is_named(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "export NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_NVLS_ENABLE=0 NCCL_MAX_NCHANNELS=4 NCCL_DEBUG=INFO\n"
        f"torchrun --nproc_per_node 8 pretrain_gpt.py {NETWORK} --seq-length 4096 --micro-batch-size 1",
    )
    found = experiment(path)
    assert isinstance(found.cluster, dict)
    assert found.cluster["collectives"]["force_algorithm"] == "ring"
    assert found.cluster["collectives"]["force_protocol"] == "simple"
    assert [note for note in found.notes if "variables" in note] == [
        f"{path}: variables not read: NCCL_MAX_NCHANNELS=4"
    ]


@pytest.mark.parametrize("value", ["^NVLS", "Tree,Ring", "allreduce:tree", "CollNetDirect"])
def test_an_algorithm_that_is_no_single_one_is_named(value: str) -> None:
    file = TrainingFile("a.sh")
    read_environment(file, {"NCCL_ALGO": value, "PATH": "/bin"})
    assert file.cluster_changes == {}
    assert file.notes == [f"a.sh: variables not read: NCCL_ALGO={value}"]


@pytest.mark.parametrize(
    ("flash", "fused", "attention"),
    [("0", "0", "math"), ("0", "1", "flash"), ("1", "0", "flash2"), ("1", "1", None)],
)
def test_transformer_engine_has_the_attention_that_is_left(
    flash: str, fused: str, attention: str | None
) -> None:
    file = TrainingFile("a.sh")
    read_attention(file, {"NVTE_FLASH_ATTN": flash, "NVTE_FUSED_ATTN": fused})
    assert file.settings.get("training.attention") == attention


DOCUMENT = """
cat <<EOT > ds.json
{"train_micro_batch_size_per_gpu": $MBS, "zero_optimization": {"stage": 1}, "fp16": {"enabled": true}}
EOT
"""
DEEPSPEED = (
    f"--seq-length 2048 --micro-batch-size $MBS {NETWORK.replace('--bf16', '--fp16')} --deepspeed "
    "--deepspeed_config ds.json --zero-stage 1 --pipeline-model-parallel-size 2 --checkpoint-activations"
)


TEMPLATE = """
sed "s/MBSIZE/${MBS}/" template.json \\
  | sed "s/STAGE/1/" > ds.json
"""


@pytest.mark.parametrize("document", [DOCUMENT, TEMPLATE])
def test_megatron_deepspeed_is_deepspeeds_engine_with_the_scripts_json(tmp_path: Path, document: str) -> None:
    content = {"train_micro_batch_size_per_gpu": "MBSIZE", "zero_optimization": {"stage": "STAGE"}}
    text = json.dumps({**content, "fp16": {"enabled": True}}).replace('"MBSIZE"', "MBSIZE")
    (tmp_path / "template.json").write_text(text.replace('"STAGE"', "STAGE"))
    path = write(tmp_path, f"MBS=2\n{document}torchrun --nproc_per_node 8 pretrain_gpt.py {DEEPSPEED}")
    found = experiment(path)
    job = resolve(found)
    assert found.strategy.kind == "deepspeed"
    assert of_kind(job.strategy, DeepSpeedConfig).stage == 1
    assert (job.parallelism.pipeline, job.training.micro_batch_size, job.training.precision) == (2, 2, "fp16")
    assert (job.training.activation_checkpointing, job.training.attention) == ("full", "math")


def test_a_json_of_megatron_deepspeed_that_is_not_here_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, f"MBS=2\ntorchrun --nproc_per_node 8 pretrain_gpt.py {DEEPSPEED}")
    with pytest.raises(InputError, match=r"'ds\.json': no such file"):
        experiment(path)


ZEROS = "".join(
    f'cat <<EOT > zero{stage}.json\n{{"steps_per_print": {stage}, "train_micro_batch_size_per_gpu": 2, '
    f'"zero_optimization": {{"stage": {stage}}}, "fp16": {{"enabled": true}}}}\nEOT\n'
    for stage in (1, 2)
)


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        (f"{ZEROS}sed -i 's/1/3/' hostfile", 1),
        (f"{ZEROS}sed -i 's/1/2/g' zero1.json", 2),
        (f"{ZEROS}sed 's/2/7/' zero2.json | tee zero1.json", 2),
        (f"{ZEROS}cat <<EOT > zero1.json\n{ZEROS.splitlines()[4]}\nEOT", 2),
        (f"cat <<EOT | sed 's/1/2/g' > zero1.json\n{ZEROS.splitlines()[1]}\nEOT", 2),
        (ZEROS.split("EOT\n", 1)[1].replace("cat <<EOT > zero2.json", "cat > zero2.json <<EOT"), 3),
    ],
    ids=["two", "in-place", "first-of-a-line", "over", "pipe", "of-disk"],
)
def test_the_json_is_the_file_that_the_flag_names(tmp_path: Path, text: str, stage: int) -> None:
    """A script writes several. Without `g` sed changes the first of a line, which is no stage here."""
    content = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "fp16": {"enabled": True},
    }
    (tmp_path / "zero1.json").write_text(json.dumps(content))
    (tmp_path / "hostfile").write_text("node1 slots=8\n")
    flags = (
        DEEPSPEED.replace("ds.json", "zero1.json")
        .replace("$MBS", "2")
        .replace(" --pipeline-model-parallel-size 2", " --no-pipeline-parallel")
    )
    path = write(tmp_path, f"{text}\ntorchrun --nproc_per_node 8 pretrain_gpt.py {flags}")
    assert of_kind(resolve(experiment(path)).strategy, DeepSpeedConfig).stage == stage


def test_megatron_deepspeed_without_a_json_is_refused(tmp_path: Path) -> None:
    flags = DEEPSPEED.replace("--deepspeed_config ds.json ", "").replace("$MBS", "2")
    path = write(tmp_path, f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags}")
    with pytest.raises(InputError, match="--deepspeed_config: missing; expected a DeepSpeed JSON"):
        experiment(path)
    path = write(
        tmp_path,
        f"cat <<EOT > ds.json\n{{,}}\nEOT\ndeepspeed pretrain_gpt.py {flags} --deepspeed_config ds.json",
    )
    with pytest.raises(InputError, match=r"ds\.json, as the script writes it: no JSON"):
        experiment(path)


def test_another_job_of_megatron_deepspeed_is_refused(tmp_path: Path) -> None:
    command = f"{DOCUMENT}torchrun --nproc_per_node 8 pretrain_gpt.py {DEEPSPEED}"
    for flag, message in (
        ("--kd", "--kd"),
        ("--enable-zbh1-pipeline", "--enable-zbh1-pipeline"),
        ("--force-ds-sequence-parallel", "--force-ds-sequence-parallel"),
        ("--ds-sequence-parallel-fpdt", "--ds-sequence-parallel-fpdt"),
        ("--num-experts 64", "--num-experts 64: .*the experts of Megatron-DeepSpeed"),
        ("--checkpoint-num-layers 4", "one checkpoint around 4 layers"),
    ):
        path = write(tmp_path, f"MBS=2\n{command} {flag}")
        with pytest.raises((InputError, NotSimulatedError), match=message):
            resolve(experiment(path))


def test_a_dense_model_and_an_optimizer_of_megatron_deepspeed_are_read(tmp_path: Path) -> None:
    command = f"MBS=2\n{DOCUMENT}torchrun --nproc_per_node 8 pretrain_gpt.py {DEEPSPEED}"
    plain = resolve(experiment(write(tmp_path, command)))
    path = write(tmp_path, f"{command} --num-experts 1 --normalization rmsnorm --optimizer sgd")
    untested = path.read_text().replace(', "fp16"', ', "zero_allow_untested_optimizer": true, "fp16"')
    path.write_text(untested)
    found = resolve(experiment(path))
    assert plain.model.numel - found.model.numel == (2 * 8 + 1) * 1024  # biases of norms
    assert (plain.training.optimizer, found.training.optimizer) == ("adamw", "sgd_momentum")
    path.write_text(untested.replace('"fp16"', '"optimizer": {"type": "AdamW", "params": {}}, "fp16"'))
    assert resolve(experiment(path)).training.optimizer == "adamw"


def test_networks_of_forks_are_read(tmp_path: Path) -> None:
    """BLOOM's ALiBi has no weights, its embedding a norm of two times 1,024 (bigscience's fork), and
    StarCoder one head of keys and values, of 64 (BigCode's).
    """
    base = f"--seq-length 2048 --micro-batch-size 1 {NETWORK} --position-embedding-type"
    command = "torchrun --nproc_per_node 8 pretrain_gpt.py"
    plain = resolve(experiment(write(tmp_path, f"{command} {base} none"))).model.numel
    alibi = resolve(experiment(write(tmp_path, f"{command} {base} alibi --embed-layernorm"))).model.numel
    assert alibi - plain == 2 * 1024
    query = resolve(experiment(write(tmp_path, f"{command} {base} none --attention-head-type multiquery")))
    assert plain - query.model.numel == 8 * 2 * (1024 - 64) * (1024 + 1)


def test_a_model_of_images_is_asked_for(tmp_path: Path) -> None:
    network = f"--seq-length 2048 --micro-batch-size 1 {NETWORK} --position-embedding-type mrope"
    with pytest.raises(InputError, match="mrope is of a model of images"):
        experiment(write(tmp_path, f"torchrun --nproc_per_node 8 pretrain_gpt.py {network}"))


def test_flags_in_a_variable_that_nothing_sets_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"PARAMS.*: stands for flags, and nothing sets it"):
        experiment(write(tmp_path, "python pretrain_gpt.py ${PARAMS}"))
    network = f"{NETWORK} --seq-length 2048 --micro-batch-size 1"
    found = experiment(write(tmp_path, f"python pretrain_gpt.py {network} $EXTRA"))
    assert any("$EXTRA: nothing sets it" in note for note in found.notes)


def test_flags_that_a_comment_cut_off_start_no_megatron(tmp_path: Path) -> None:
    path = write(tmp_path, "deepspeed own.py --x 1 \\\n # words\n --seed 42 \\\n # words\n --bf16")
    with pytest.raises(NotSimulatedError, match=r"own\.py: zsim knows flags of TrainingArguments"):
        experiment(path)


def test_flags_in_one_text_are_flags(tmp_path: Path) -> None:
    network = f"{NETWORK} --seq-length 2048 --micro-batch-size 4"
    found = experiment(write(tmp_path, f"mpirun -np 8 bash entry.sh pretrain_llama.py ' {network} '"))
    assert found.training.micro_batch_size == 4
    with pytest.raises(InputError, match="--pad-vocab-size-to: found 'many'"):
        experiment(write(tmp_path, f"torchrun pretrain_gpt.py '{network} --pad-vocab-size-to many'"))


def test_a_script_that_only_converts_is_none_of_megatrons(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--micro-batch-size: missing"):
        experiment(write(tmp_path, "torchrun tools/torchdist.py --bf16 --load a --save b"))
