"""Megatron's command line, as a script or a list of arguments, as an experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.expect import of_kind
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.frameworks.megatron.settings.muon import MegatronMuon, MuonOrthogonalization
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.programs.megatron_lm.arguments import read_arguments
from zsim.programs.megatron_lm.flags import FLAGS, LISTS, SWITCHES, VALUES
from zsim.programs.megatron_lm.read import read_megatron
from zsim.specs.experiment.load import build_experiment, load_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

NETWORK = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --max-position-embeddings 8192 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --vocab-size 128256 "
    "--tokenizer-type HuggingFaceTokenizer"
)
BATCH = "--seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --bf16"
SCRIPT = f"""#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${{NUM_NODES:-2}}
TP=${{TP:-4}}

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr localhost
)
GPT_MODEL_ARGS=(
    {NETWORK} # as published
)
MODEL_PARALLEL_ARGS="
    --tensor-model-parallel-size $TP \\
    --pipeline-model-parallel-size 2 --sequence-parallel"
DDP_ARGS=()
if [[ $NUM_NODES -gt 1 ]]; then
    DDP_ARGS+=(--use-distributed-optimizer --overlap-grad-reduce "--overlap-param-gather")
fi
torchrun ${{DISTRIBUTED_ARGS[@]}} pretrain_gpt.py \\
    ${{GPT_MODEL_ARGS[@]}} {BATCH} \\
    $MODEL_PARALLEL_ARGS ${{DDP_ARGS[@]}} \\
    --save $CHECKPOINT_PATH --lr 1.0e-4 --log-throughput
"""


def read(flags: str, *, network: str = NETWORK, batch: str = BATCH, **overrides: Any) -> Experiment:
    """The experiment of a list of arguments on two DGX H100."""
    config = f"{network} {batch} {flags}".split()
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    return build_experiment(
        {"cluster": "dgx-h100", "nodes": 2}, {"strategy.config": config, **changes}, origin="test"
    )


def test_python_takes_the_arguments_as_a_file_does() -> None:
    """`zsim.Experiment(strategy={"kind": "megatron", "config": [...]})`, with tables beside it."""
    config = f"{NETWORK} {BATCH} --use-distributed-optimizer".split()
    training = zsim.Training(device_max_connections=4)
    found = zsim.Experiment(
        cluster="dgx-h100", nodes=2, training=training, strategy={"kind": "megatron", "config": config}
    )
    assert of_kind(found.strategy, MegatronTable).distributed_optimizer
    assert found.model == read("--use-distributed-optimizer").model
    assert found.training.device_max_connections == 4
    with pytest.raises(InputError, match=r"strategy\.kind: found 'fsdp2'"):
        zsim.Experiment(cluster="dgx-h100", strategy={"kind": "fsdp2", "config": config})


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    return path


def test_a_script_is_an_experiment(script: Path) -> None:
    """16 GPUs, 4 x 2 of them share a model: 2 replicas, 64 sequences in 32 micro-batches each."""
    experiment = build_experiment({"cluster": "dgx-h100"}, {"strategy.config": str(script)}, origin="test")
    job = resolve(experiment)
    assert (job.world_size, job.parallelism.tensor, job.parallelism.pipeline) == (16, 4, 2)
    assert (job.parallelism.sequence_parallel, job.parallelism.schedule) == (True, "1f1b")
    training, table = job.training, of_kind(experiment.strategy, MegatronTable)
    assert (training.sequence_length, training.gradient_accumulation_steps) == (4096, 32)
    assert (training.precision, training.device_max_connections) == ("bf16", 1)
    assert (table.distributed_optimizer, table.overlap_grad_reduce, table.overlap_param_gather) == (True,) * 3
    assert table.grad_reduce_dtype == "fp32"
    assert experiment.program == "megatron"


def test_the_network_is_the_models(script: Path) -> None:
    """Llama 3 8B has 8,030,261,248 parameters, and 256 entries more, twice, in multiples of 128 x 4."""
    experiment = build_experiment({"cluster": "dgx-h100"}, {"strategy.config": str(script)}, origin="test")
    assert resolve(experiment).model.numel == 8_030_261_248 + 2 * 256 * 4096


def test_variables_before_a_script_are_its_environment(script: Path) -> None:
    experiment = build_experiment(
        {"cluster": "dgx-h100"}, {"strategy.config": f"TP=8 NUM_NODES=4 {script}"}, origin="test"
    )
    assert (experiment.parallelism.tensor, experiment.gpus) == (8, 32)


def test_flags_after_a_script_win_over_its_own(script: Path) -> None:
    experiment = build_experiment(
        {"cluster": "dgx-h100"},
        {"strategy.config": f"{script} --tensor-model-parallel-size 2 --micro-batch-size 4"},
        origin="test",
    )
    assert (experiment.parallelism.tensor, experiment.training.micro_batch_size) == (2, 4)


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.sh: no such file; expected a script that starts Megatron"):
        read_arguments(str(tmp_path / "none.sh"))
    with pytest.raises(InputError, match=r"\.sh: cannot be read: File name too long"):
        read_arguments("a" * 300 + ".sh")
    (tmp_path / "empty.sh").write_text("echo nothing\n")
    with pytest.raises(InputError, match=r"starts no Megatron: expected pretrain_gpt.py"):
        read_arguments(str(tmp_path / "empty.sh"))


def test_an_experiment_names_a_script_beside_itself(script: Path) -> None:
    path = script.with_name("experiment.toml")
    path.write_text('cluster = "dgx-h100"\n[strategy]\nkind = "megatron"\nconfig = "train.sh"\n')
    assert load_experiment(path).parallelism.tensor == 4


def test_flags_without_effect_are_named_in_one_note(script: Path) -> None:
    notes = build_experiment({"cluster": "dgx-h100"}, {"strategy.config": str(script)}, origin="test").notes
    assert notes == (f"{script}: read, no effect on a step: --save, --lr, --log-throughput",)


def test_a_script_that_only_sets_variables_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.sh"
    path.write_text(f'MODEL_ARGS=" {NETWORK}"\nALL="$MODEL_ARGS {BATCH}"\n')
    assert read_arguments(str(path)).integer("num-layers") == 32
    assert read_arguments(str(path)).has("bf16")


def test_set_wins_and_the_experiment_may_have_another_model(script: Path) -> None:
    overrides = {"strategy.config": str(script), "training.micro_batch_size": 2, "model": "llama-2-7b"}
    experiment = build_experiment({"cluster": "dgx-h100"}, overrides, origin="test")
    assert (experiment.model, experiment.training.gradient_accumulation_steps) == ("llama-2-7b", 16)
    assert any("written for a model of its own" in note for note in experiment.notes)


def test_defaults_are_megatrons() -> None:
    """Biases, LayerNorm, GELU, learned positions, tied, 4 h wide: GPT-2's 124,439,808 parameters, with 50,257
    entries padded to 50,304."""
    network = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --max-position-embeddings 1024"
    experiment = read("", network=network, batch="--seq-length 1024 --micro-batch-size 4 --bf16")
    job = resolve(experiment)
    padded = (50_304 - 50_257) * 768
    assert job.model.numel == 124_439_808 + padded
    assert (job.model.is_tied, job.training.gradient_clipping) == (True, 1.0)
    assert (job.training.optimizer, job.training.gradient_accumulation_steps) == ("adamw", 1)
    assert any("GPT-2's 50,257 entries are assumed" in note for note in job.notes)


_OVERLAPPED = (
    "--num-experts 8 --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall "
    "--overlap-moe-expert-parallel-comm"
)


@pytest.mark.parametrize(
    ("flags", "parameters"),
    [
        # Of 2 layers of 64: 4 x 64 x 64 in attention, 2 x 64 x 256 in the MLP.
        ("--disable-bias-linear --normalization RMSNorm", 2 * (16_384 + 32_768 + 128) + 64),
        # Biases of q, k, v, the output, up and down: 4 x 64 + 256 + 64; norms with weight and bias.
        ("", 2 * (16_384 + 32_768 + 576 + 256) + 128),
        ("--disable-bias-linear --add-qkv-bias --normalization RMSNorm", 2 * (49_152 + 192 + 128) + 64),
        # int(4 x 64 x 2 / 3 / 64) x 64 = 128 wide, of three products.
        ("--disable-bias-linear --swiglu --normalization RMSNorm", 2 * (16_384 + 24_576 + 128) + 64),
        # One head of 16 for keys and values.
        (
            "--disable-bias-linear --normalization RMSNorm --group-query-attention --num-query-groups 1",
            2 * (2 * 4_096 + 2 * 1_024 + 32_768 + 128) + 64,
        ),
        # Norms of 16 on every query and key head.
        ("--disable-bias-linear --normalization RMSNorm --qk-layernorm", 2 * (49_152 + 128 + 32) + 64),
    ],
)
def test_every_flag_of_the_network_counts(flags: str, parameters: int) -> None:
    network = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128 "
        "--position-embedding-type rope --vocab-size 128 --tokenizer-type HuggingFaceTokenizer "
        "--untie-embeddings-and-output-weights"
    )
    job = resolve(read(flags, network=network, batch="--seq-length 128 --micro-batch-size 1 --bf16"))
    assert job.model.numel == parameters + 2 * 128 * 64


def test_a_vocabulary_that_a_tokenizer_has_is_asked_for() -> None:
    network = NETWORK.replace("--vocab-size 128256 ", "")
    with pytest.raises(
        InputError, match=r"from the tokenizer's file; give it as --vocab-size, or --set model"
    ):
        resolve(read("", network=network))
    assert resolve(read("", network=network, model__vocab_size=32_000)).model.vocab_size == 32_000


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B", 128_256),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/Qwen/Qwen2.5-7B", 152_064),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /data/tokenizer.model", 32_000),
    ],
)
def test_a_tokenizer_that_names_a_model_has_its_vocabulary(flags: str, size: int) -> None:
    experiment = read(flags, network=NETWORK.replace("--vocab-size 128256 ", ""))
    assert resolve(experiment).model.vocab_size == size
    assert f"no --vocab-size: the {size:,} entries" in "\n".join(experiment.notes) or "Llama2" in flags


def test_the_vocabulary_is_padded_as_asked() -> None:
    flags = "--tensor-model-parallel-size 4 --make-vocab-size-divisible-by 1000"
    assert resolve(read(flags)).model.vocab_size == 132_000


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--context-parallel-size 2", "context_method", "p2p"),
        ("--context-parallel-size 2 --cp-comm-type a2a", "context_method", "all-to-all"),
        ("--context-parallel-size 2 --cp-comm-type all_gather", "context_method", "all-gather"),
        ("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", "async_tensor", True),
        ("--sequence-parallel", "sequence_parallel", False),
        ("--pipeline-model-parallel-size 4", "layers_per_stage", (8, 8, 8, 8)),
        (
            "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2",
            "layers_per_stage",
            (2,) * 16,
        ),
        (
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
            "schedule",
            "interleaved-1f1b",
        ),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 5 "
            "--decoder-last-pipeline-num-layers 7",
            "layers_per_stage",
            (5, 10, 10, 7),
        ),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--decoder-last-pipeline-num-layers 12",
            "layers_per_stage",
            (10, 6, 10, 6),
        ),
        (
            "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et*7|t*9|(t)*9|t*7,L",
            "layers_per_stage",
            (7, 9, 9, 7),
        ),
        (
            "--tensor-model-parallel-size 2 --use-tp-pp-dp-mapping",
            "order",
            ("data", "pipeline", "context", "tensor"),
        ),
    ],
)
def test_flags_of_parallelism_are_parallelism(flags: str, key: str, value: Any) -> None:
    assert getattr(resolve(read(flags)).parallelism, key) == value


def test_embedding_and_loss_may_count_as_a_layer() -> None:
    network = NETWORK.replace("--num-layers 32", "--num-layers 30")
    flags = (
        "--pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 4"
    )
    parallelism = resolve(read(flags, network=network)).parallelism
    assert parallelism.layers_per_stage == (3, 4, 4, 4, 4, 4, 4, 3)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("--bf16", "fp32"),
        ("--bf16 --grad-reduce-in-bf16", "bf16"),
        ("--fp16", "fp16"),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "fp32"),
        ("", "fp32"),
    ],
)
def test_gradients_have_megatrons_type(flags: str, dtype: str) -> None:
    """In fp32 with bf16 unless a flag says otherwise, in fp16 with fp16 unless a flag does."""
    experiment = read(flags, batch=BATCH.replace(" --bf16", ""))
    assert of_kind(experiment.strategy, MegatronTable).grad_reduce_dtype == dtype


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--recompute-activations", "activation_checkpointing", "selective"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "activation_checkpointing",
            "full",
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
            "block_checkpointing",
            ("full",) * 2 + ("none",) * 30,
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 0",
            "activation_checkpointing",
            "none",
        ),
        ("--use-flash-attn", "attention", "flash"),
        ("--attention-backend flash", "attention", "flash"),
        ("--attention-backend fused", "attention", "flash"),
        ("--attention-backend unfused", "attention", "math"),
        ("--transformer-impl local", "attention", "math"),
        ("--cross-entropy-loss-fusion", "cross_entropy", "megatron-fused"),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "cross_entropy", "fused"),
        ("", "cross_entropy", "megatron"),
        ("--clip-grad 0.5", "gradient_clipping", 0.5),
        ("--optimizer sgd", "optimizer", "sgd_momentum"),
        ("--fp8-format hybrid", "precision", "fp8"),
    ],
)
def test_flags_of_training_are_training(flags: str, key: str, value: Any) -> None:
    assert getattr(resolve(read(flags)).training, key) == value


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (
            "--use-distributed-optimizer --num-distributed-optimizer-instances 2",
            "optimizer_instances",
            2,
        ),
        ("--overlap-grad-reduce --ddp-bucket-size 1000000", "bucket_size", 1_000_000),
        ("--ddp-average-in-collective", "average_in_collective", True),
        ("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", False),
        ("--no-check-for-nan-in-loss-and-grad", "check_for_nan", False),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", "cuda_graph", True),
        ("--cuda-graph-impl full_iteration", "cuda_graph", True),
        (
            "--cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router",
            "cuda_graph_modules",
            ("attn", "moe_router"),
        ),
        ("--cuda-graph-impl local --cuda-graph-modules attn", "cuda_graph_modules", ("attn",)),
        (
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
            "--no-overlap-p2p-communication",
            "overlap_p2p",
            False,
        ),
        ("--no-align-grad-reduce", "align_grad_reduce", False),
        ("--pipeline-model-parallel-size 4 --no-align-param-gather", "align_param_gather", True),
        (
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
            "--microbatch-group-size-per-virtual-pipeline-stage 8",
            "micro_batch_group",
            8,
        ),
        (
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
            "--overlap-p2p-communication-warmup-flush",
            "overlap_p2p_warmup_flush",
            True,
        ),
        (_OVERLAPPED, "overlap_expert_parallel", True),
        (_OVERLAPPED, "delay_wgrad_compute", False),
        (f"{_OVERLAPPED} --delay-wgrad-compute", "delay_wgrad_compute", True),
        ("--mtp-num-layers 1 --mtp-loss-scaling-factor 0.1", "mtp_layers", 1),
        ("--test-mode", "test_mode", True),
        ("--timing-log-level 2", "timing_log_level", 2),
        ("--timing-log-level 1", "timing_log_level", 0),
        ("--transformer-impl local", "transformer_impl", "local"),
        ("", "transformer_impl", "transformer_engine"),
    ],
)
def test_flags_of_data_parallelism_are_the_strategys(flags: str, key: str, value: Any) -> None:
    assert getattr(of_kind(read(flags).strategy, MegatronTable), key) == value


def test_test_mode_without_norms_of_queries_and_keys_is_noted() -> None:
    """`run_realtime_tests` returns at once without --qk-layernorm."""

    def is_noted(flags: str) -> bool:
        return any("test_mode has no effect" in note for note in resolve(read(flags)).notes)

    assert is_noted("--test-mode")
    assert not is_noted("--test-mode --qk-layernorm")
    assert not is_noted("")


def test_muon_is_read_with_its_release() -> None:
    """dist_muon is the layer-wise optimizer; from 0.18 on the distributed optimizer is, and Nesterov's flag
    has another name."""
    own = read("--optimizer dist_muon --muon-tp-mode distributed --muon-use-nesterov --muon-momentum 0.9")
    table = of_kind(own.strategy, MegatronTable)
    assert (own.training.optimizer, table.layer_wise_optimizer) == ("muon", True)
    assert (table.muon_tp_mode, table.muon_nesterov) == ("distributed", True)
    assert of_kind(resolve(own).strategy, MegatronConfig).shards_states
    later = "--optimizer muon --use-distributed-optimizer --muon-nesterov --muon-scalar-optimizer lion"
    job = resolve(read(later, strategy__version="0.18.2"))
    assert of_kind(job.strategy, MegatronConfig).muon == MegatronMuon(
        "laid out", MuonOrthogonalization(nesterov=True), True, "lion"
    )
    with pytest.raises(InputError, match="refuses 'muon' with the distributed optimizer"):
        resolve(read(later))
    with pytest.raises(InputError, match="found 'low', which torch does not know"):
        read("--optimizer muon --muon-fp32-matmul-prec low")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-experts 8 --moe-layer-freq x", "reads a number, or lists of 0 and 1"),
        ("--num-experts 8 --moe-layer-freq [0]*3*[1]", "reads a number, or lists of 0 and 1"),
        ("--num-experts 8 --moe-layer-freq [0,2]*3", "reads a number, or lists of 0 and 1"),
        ("--use-megatron-fsdp --megatron-fsdp-main-params-dtype bf16", "main weights in fp32 alone"),
        (
            "--use-megatron-fsdp --megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype bf16",
            "reduced in the type that they are kept in",
        ),
        ("--use-torch-fsdp2", "torch's FSDP2 inside Megatron"),
        ("--fp8-format hybrid --no-fp8-wgrad", "weight gradients in bf16"),
        ("--optimizer muon --muon-use-syrk", "products of which half is computed"),
        ("--optimizer muon --muon-coefficient-type cubic5", "cubic5 leaves a product out"),
        ("--optimizer adaptive_muon", "'adaptive_muon', .* since 0.18, .*expected adam, sgd, lion or muon"),
        ("--optimizer soap", "'soap', .* since 0.18"),
        ("--ddp-num-buckets 4", "--ddp-bucket-size gives their size"),
        ("--cuda-graph-impl transformer_engine", "CUDA graphs of whole layers"),
        ("--cuda-graph-impl local --cuda-graph-scope moe", "CUDA graphs of whole layers"),
        ("--context-parallel-size 2 --cp-comm-type p2p a2a", "differs by layer"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(flags: str, message: str) -> None:
    with pytest.raises(NotSimulatedError, match=message):
        resolve(read(flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor-model-paralel-size 2", "no such flag; did you mean 'tensor-model-parallel-size'"),
        ("--tensor-model-parallel-size two", "found 'two', expected a whole number of at least 1"),
        ("--tensor-model-parallel-size $TP", "takes it from its environment: 'TP=... "),
        ("--tensor-model-parallel-size", "expected a value after it"),
        ("--overlap-grad-reduce=true", "takes no value, found 'true'"),
        ("--fp16", "Megatron refuses it beside --bf16"),
        ("--expert-model-parallel-size 4", "found 4 without --num-experts, which Megatron refuses"),
        ("--num-experts 8 --moe-layer-freq [0]*3", "found 3 layers in .*, expected --num-layers"),
        ("--tp-comm-overlap", "refuses it without --sequence-parallel and --tensor-model-parallel-size"),
        ("--multi-latent-attention --group-query-attention", "--group-query-attention: Megatron refuses it"),
        ("--recompute-granularity full", "--recompute-method: missing"),
        ("--recompute-granularity full --recompute-method block", "--recompute-num-layers: missing"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 0",
            "--recompute-num-layers: found '0', expected a whole number of at least 1",
        ),
        ("--recompute-activations --recompute-method block", "refuses it with .*selective"),
        ("--recompute-granularity some", "expected one of full, selective"),
        ("--context-parallel-size 2 --cp-comm-type ring", "expected one of p2p, a2a"),
        (
            "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3",
            "found 3: 32 layers on 4 .*the nearest that does is 2",
        ),
        (
            "--pipeline-model-parallel-size 5",
            "but 5 does not divide 16 GPUs; pipeline 4 would",
        ),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 4",
            "28 layers are left for 3 stages",
        ),
        (
            "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|t|tL",
            "found 3 stages on 4 pipeline ranks, expected a multiple; the nearest is 4",
        ),
        ("--num-attention-heads 30", "does not divide --hidden-size 4096.*the nearest that does is 32"),
        ("--seq-length 16384", "--max-position-embeddings: found 8192, which Megatron refuses below"),
        ("--overlap-param-gather", "only with distributed_optimizer"),
        ("--global-batch-size 40", "expected a multiple of micro-batch 1 x 16 GPUs"),
        ("--main-params-dtype fp16", "without precision_aware_optimizer, which Megatron refuses"),
    ],
)
def test_what_megatron_refuses_is_refused(flags: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(read(flags))


def test_kernels_that_are_not_fused_are_noted() -> None:
    notes = read("--no-bias-gelu-fusion --no-persist-layer-norm --log-params-norm").notes
    where = "strategy.config"
    assert (
        f"{where}: --no-bias-gelu-fusion, --no-persist-layer-norm: simulated as fused kernels all the same"
        in notes
    )
    assert f"{where}: --log-params-norm: a small cost that is left out" in notes


def test_a_flag_takes_one_kind_of_value() -> None:
    assert not SWITCHES & VALUES
    assert not SWITCHES & LISTS
    assert not VALUES & LISTS
    assert len(FLAGS) == len(SWITCHES) + len(VALUES) + len(LISTS)


def test_spellings_of_2022_are_understood() -> None:
    file = read_megatron(
        [
            "--DDP-impl",
            "local",
            "--activations-checkpoint-method",
            "uniform",
            *NETWORK.split(),
            *BATCH.split(),
        ]
    )
    assert file.settings["training.precision"] == "bf16"
    assert any("--DDP-impl" in note for note in file.notes)


def test_old_checkpointing_needs_no_granularity() -> None:
    """Megatron-LM 2.6: the method alone asks for full recomputation, of one layer by default."""
    job = resolve(read("--activations-checkpoint-method uniform"))
    assert job.training.activation_checkpointing == "full"


def test_a_program_that_trains_nothing_is_refused(tmp_path: Path) -> None:
    """A server has the flags of the network. Of two commands the one that trains counts."""
    server = f"torchrun --nproc-per-node 8 tools/run_text_generation_server.py {NETWORK} {BATCH}"
    script = tmp_path / "serve.sh"
    script.write_text(server + "\n")
    with pytest.raises(InputError, match=r"run_text_generation_server.py trains nothing"):
        read_arguments(str(script))
    script.write_text(f"torchrun --nproc-per-node 8 pretrain_gpt.py {NETWORK} {BATCH}\n{server}\n")
    assert read_arguments(str(script)).integer("seq-length") == 4096
