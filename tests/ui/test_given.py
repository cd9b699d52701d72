"""What the user has, pasted or uploaded: models, clusters, training files, recordings."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

import pytest

from tests.expect import of_kind
from tests.ui.test_form import made, turned
from zsim.engine.micro_batches import simulate_step
from zsim.errors import InputError
from zsim.files import PRESETS
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.run.run import TrainingRunTable
from zsim.specs.formats.export import export_files
from zsim.ui.files import apply_text, decode_text, decode_upload, set_line, setting_of
from zsim.ui.form import make_form
from zsim.ui.layout import MAX_UPLOAD
from zsim.ui.recordings import Recordings, is_recorded

ROOT = Path(__file__).parents[2]

TOPO = "\n".join(
    [
        "        GPU0  GPU1  GPU2  GPU3  NIC0  CPU Affinity  NUMA Affinity",
        "GPU0     X    NV12  NV12  NV12  PXB   0-31          0",
        "GPU1    NV12   X    NV12  NV12  SYS   0-31          0",
        "GPU2    NV12  NV12   X    NV12  SYS   32-63         1",
        "GPU3    NV12  NV12  NV12   X    SYS   32-63         1",
        "NIC0    PXB   SYS   SYS   SYS    X",
    ]
)


def test_a_config_json_is_the_pages_model_with_what_was_turned_kept() -> None:
    """GPT-2 of two layers: the fields stay as they are, and a second paste replaces the first."""
    text = (PRESETS / "models" / "gpt2.json").read_text().replace('"n_layer": 12', '"n_layer": 2')
    key, value = setting_of(text, "mine.json")
    more = set_line("model = 1\ntraining.expandable_segments = true", key, value)
    assert more.count("\n") == 1
    experiment = turned(make_form(made()), more, nodes=1)
    assert len(resolve(experiment).model.blocks) == 2
    assert resolve(experiment).world_size == 8
    assert experiment.training.expandable_segments


def test_nvidia_smis_matrix_is_the_pages_cluster() -> None:
    """Four GPUs a node, as the matrix has."""
    key, value = setting_of(TOPO, "the pasted text")
    assert key == "cluster"
    assert resolve(turned(make_form(made()), set_line("", key, value))).world_size == 2 * 4


def test_a_topology_toml_is_the_pages_cluster() -> None:
    key, value = setting_of('schema = 1\nextends = "dgx-a100-80gb"\nname = "mine"\n', "mine.toml")
    assert resolve(turned(make_form(made()), set_line("", key, value))).cluster.name == "mine"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty; expected a model's config.json"),
        ("{", "is no JSON"),
        ('{"model_type": "llama"}', "hidden_size"),
        ("hello", "not recognised"),
        ('extends = "dgx-h100"\nname = "a"\nschema = 1\nlinkz = 2\n', "linkz"),
        ("[" * 5000, "not recognised"),
        ("{" * 5000, "is no JSON"),
        ("x" * (MAX_UPLOAD + 1), "expected at most 200,000"),
    ],
)
def test_anything_else_is_one_paragraph(text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        setting_of(text, "the pasted text")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_uploaded_file_must_be_text_of_a_size() -> None:
    assert decode_text(decode_upload("data:text/plain;base64," + b64encode(TOPO.encode()).decode())) == TOPO
    with pytest.raises(InputError, match="did not arrive whole"):
        decode_upload("data:;base64,abc")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        decode_text(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="expected at most"):
        decode_text(b"x" * (MAX_UPLOAD + 1))


TORCHTITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""
DEEPSPEED = """{
  "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2, "reduce_bucket_size": 100000000, "offload_optimizer": {"device": "cpu"}},
  "gradient_clipping": 1.0
}"""


def test_a_deepspeed_json_turns_fields_and_leaves_the_rest_as_lines() -> None:
    """Stage 2, offloading and batch sizes have fields; the bucket has none. Model and tokens stay."""
    form = make_form(made())
    shown, more, said = apply_text(form, form.initial, "", DEEPSPEED, "ds_config.json")
    assert shown["strategy.stage"] == "2: gradients too"
    assert shown["offload_optimizer"] == "host memory"
    assert shown["training.micro_batch_size"] == 2
    assert "strategy.config.zero_optimization.reduce_bucket_size = 100000000" in more.splitlines()
    assert "ds_config.json" in said
    job = resolve(form.experiment(shown, more))
    strategy = of_kind(job.strategy, DeepSpeedConfig)
    assert (strategy.zero.stage, strategy.zero.reduce_bucket_size, strategy.precision) == (2, 10**8, "bf16")
    assert (job.training.gradient_accumulation_steps, job.training.sequence_length) == (4, 512)
    assert job.model.name == "gpt2"


def test_a_torchtitan_toml_brings_its_model_and_degrees() -> None:
    form = make_form(made())
    shown, more, _ = apply_text(form, form.initial, "", TORCHTITAN, "train.toml")
    job = resolve(form.experiment(shown, more))
    assert (job.model.name, job.kind, job.parallelism.tensor) == ("llama-3-8b", "fsdp2", 2)
    assert (job.training.sequence_length, job.training.compile, job.world_size) == (8192, True, 16)


def test_an_accelerate_yaml_is_known_by_its_keys() -> None:
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n"
    text += "fsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    form = make_form(made())
    shown, more, _ = apply_text(form, form.initial, "", text, "the pasted text")
    assert resolve(form.experiment(shown, more)).kind == "fsdp2"


def test_an_experiment_taken_along_comes_back() -> None:
    """The page's own experiment.toml, of another strategy, size and run."""
    there = made(strategy={"kind": "fsdp2", "replicate": 2}, nodes=4, run={"tokens": 1e9})
    text = export_files(resolve(there)).files["experiment.toml"]
    form = make_form(made())
    shown, more, _ = apply_text(form, form.initial, "", text, "experiment.toml")
    back = resolve(form.experiment(shown, more))
    assert (back.strategy, back.world_size) == (resolve(there).strategy, 32)
    assert of_kind(form.experiment(shown, more).run, TrainingRunTable).tokens == 1e9


def test_a_wrong_training_file_is_one_paragraph() -> None:
    form = make_form(made())
    with pytest.raises(InputError) as caught:
        apply_text(form, form.initial, "", DEEPSPEED.replace("stage", "stagge"), "ds_config.json")
    message = "ds_config.json: zero_optimization: unknown key 'stagge'; did you mean 'stage'?"
    assert str(caught.value) == message


def test_a_recorded_trace_stands_beside_the_simulated_step() -> None:
    """Two ranks of gloo on CPUs were recorded, the page has 16: the recording stands alone, and says so; on
    two ranks both are compared."""
    trace = ROOT / "traces/gloo/ddp-even-2ranks/rank0.kineto.json.gz"
    content = trace.read_bytes()
    assert is_recorded(content, trace.name)
    assert not is_recorded(DEEPSPEED.encode(), "ds_config.json")
    recordings = Recordings()
    key = recordings.take(content, trace.name)
    beside = recordings.compare_step(key, trace.name, simulate_step(resolve(made())))
    assert "on 2 ranks" in beside["words"]
    assert "The page's job has 16 ranks" in beside["words"]
    two = simulate_step(resolve(made(nodes=None, gpus=2, strategy={"kind": "ddp"})))
    compared = recordings.compare_step(key, trace.name, two)
    assert "differ" in compared["words"]
    assert compared["twins"]["data"]
    with pytest.raises(InputError, match=r"broken\.gz"):
        recordings.take(b"\x1f\x8bnot gzip", "broken.gz")
    with pytest.raises(InputError, match=r"rank0.* stood here; .* choose the file again"):
        Recordings().compare_step(key, trace.name, two)


def test_experts_have_fields() -> None:
    """Mixtral's eight experts on eight ranks, from a field of the page."""
    form = make_form(made(model="mixtral-8x7b", strategy={"kind": "fsdp2"}))
    assert resolve(turned(form, parallelism__expert=8)).parallelism.experts.ranks == 8
