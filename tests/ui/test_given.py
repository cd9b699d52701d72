"""A model or a cluster of the user's own, pasted or uploaded."""

from __future__ import annotations

from base64 import b64encode

import pytest

from tests.ui.test_form import made, turned
from zsim.errors import InputError
from zsim.resources import PRESETS
from zsim.specs.experiment.resolve import resolve
from zsim.ui.form import form_of
from zsim.ui.given import setting_of, uploaded, with_line
from zsim.ui.layout import MAX_UPLOAD

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
    more = with_line("model = 1\ntraining.compile = true", key, value)
    assert more.count("\n") == 1
    experiment = turned(form_of(made()), more, nodes=1)
    assert len(resolve(experiment).model.blocks) == 2
    assert resolve(experiment).world_size == 8
    assert experiment.training.compile


def test_nvidia_smis_matrix_is_the_pages_cluster() -> None:
    """Four GPUs a node, as the matrix has."""
    key, value = setting_of(TOPO, "the pasted text")
    assert key == "cluster"
    assert resolve(turned(form_of(made()), with_line("", key, value))).world_size == 2 * 4


def test_a_topology_toml_is_the_pages_cluster() -> None:
    key, value = setting_of('schema = 1\nextends = "dgx-a100-80gb"\nname = "mine"\n', "mine.toml")
    assert resolve(turned(form_of(made()), with_line("", key, value))).cluster.name == "mine"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty; expected a model's config.json"),
        ("{", "is no JSON"),
        ('{"zero_optimization": {"stage": 3}}', "so it is a training file"),
        ('{"model_type": "llama"}', "hidden_size"),
        ("hello", "not recognised"),
        ('extends = "dgx-h100"\nname = "a"\nschema = 1\nlinkz = 2\n', "linkz"),
        ('model = "gpt2"\ncluster = "dgx-h100"\n', "is an experiment or a training file"),
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
    assert uploaded("data:text/plain;base64," + b64encode(TOPO.encode()).decode()) == TOPO
    with pytest.raises(InputError, match="is not UTF-8 text"):
        uploaded("data:;base64," + b64encode(b"\xff\xfe\x00").decode())
    with pytest.raises(InputError, match="expected at most"):
        uploaded("data:;base64," + b64encode(b"x" * (MAX_UPLOAD + 1)).decode())


def test_experts_have_fields() -> None:
    """Mixtral's eight experts on eight ranks, from a field of the page."""
    form = form_of(made(model="mixtral-8x7b", strategy={"kind": "fsdp2"}))
    assert resolve(turned(form, parallelism__expert=8)).parallelism.experts.ranks == 8
