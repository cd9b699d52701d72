"""Python scripts of people's own, read as text: what their objects say, and what is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.expect import there
from tests.programs.reading import notes_of, read_job, read_text
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.load import build_experiment

MODEL = 'AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", torch_dtype=torch.bfloat16)\n'
ARGUMENTS = "per_device_train_batch_size=2, gradient_accumulation_steps=4, bf16=True"
SFT = (
    f"model = {MODEL}args = SFTConfig({ARGUMENTS}, max_length=2048)\n"
    "SFTTrainer(model=model, args=args, train_dataset=data).train()\n"
)


def test_what_a_script_builds_is_read(tmp_path: Path) -> None:
    found = read_text(tmp_path, SFT, "train.py", model=None)
    assert (found.model, found.program, found.strategy.kind) == ("llama-3.1-8b", "trl", "ddp")
    training = read_job(tmp_path, SFT, name="train.py").training
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (2, 4)
    assert (training.sequence_length, training.precision) == (2048, "bf16")
    assert found.training.activation_checkpointing == "full"  # TRL's default


def test_transformers_own_trainer_has_its_defaults(tmp_path: Path) -> None:
    """Nothing is checkpointed or in bf16 unless it says so; sequences are as the tokenizer cuts them."""
    text = (
        f"model = {MODEL}tokenizer(x, max_length=1024)\nTrainer(args=TrainingArguments(optim='adafactor'))\n"
    )
    found = read_text(tmp_path, text, "train.py")
    assert found.program == "transformers"
    assert found.training.activation_checkpointing in (None, "none")
    assert (found.training.sequence_length, found.training.optimizer) == (1024, "adafactor-transformers")
    notes = read_job(tmp_path, text, name="train.py").notes
    assert any("so as transformers' Trainer has it: " in note for note in notes)
    assert not any("TRL" in note for note in notes)


def test_adapters_have_pefts_defaults_and_its_preparation(tmp_path: Path) -> None:
    """LoraConfig's rank is 8. `prepare_model_for_kbit_training` checkpoints and casts what stays."""
    text = (
        "bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)\n"
        f"model = {MODEL}model = prepare_model_for_kbit_training(model)\n"
        "model = get_peft_model(model, LoraConfig(target_modules=['q_proj'], task_type='CAUSAL_LM'))\n"
        f"tokenizer(x, max_length=512)\nTrainer(model, TrainingArguments({ARGUMENTS}))\n"
    )
    training = read_text(tmp_path, text, "train.py").training
    lora = there(training.lora)
    assert (lora.rank, lora.quantized, lora.double_quantization, lora.preparation) == (8, "nf4", True, "peft")
    assert lora.dtype is None
    assert (training.activation_checkpointing, training.checkpoint_is_reentrant) == ("full", True)


def test_names_classes_and_declared_arguments_have_values(tmp_path: Path) -> None:
    text = (
        "def main():\n"
        "    if args.adapters:\n        config = LoraConfig(r=4)\n"
        "    train = SFTConfig(per_device_train_batch_size=Settings.batch * 2,\n"
        "        max_length=settings['length'],\n"
        "        gradient_accumulation_steps=args.steps, bf16=torch.cuda.is_bf16_supported())\n"
        f"    SFTTrainer({MODEL.strip()}, args=train)\n"
        "class Settings:\n    batch: int = 3\n"
        "settings = {'length': int(os.environ.get('LENGTH', '4096'))}\n"
        "parser.add_argument('--steps', type=int, default=5)\n"
        "parser.add_argument('--adapters', action='store_true')\n"
        "args = parser.parse_args()\n"
    )
    training = read_text(tmp_path, text, "train.py").training
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (6, 5)
    assert (training.sequence_length, training.precision, training.lora) == (4096, "bf16", None)


def test_flags_behind_a_script_are_those_that_it_declares(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "parser.add_argument('--batch-size', default=1)\noptions = parser.parse_args()\n"
        + SFT.replace("batch_size=2", "batch_size=options.batch_size")
    )
    command = f"torchrun --nproc_per_node 4 {tmp_path}/train.py --batch-size 16"
    found = build_experiment({"cluster": "dgx-h100"}, {"strategy.config": command}, origin="test")
    assert (found.gpus, found.training.micro_batch_size) == (4, 16)


def test_a_script_that_takes_its_arguments_from_flags_is_read_by_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"class SFTConfig(trl.SFTConfig):\n    x = 1\nTrlParser(SFTConfig)\n{SFT}"
    )
    command = (
        f"torchrun {tmp_path}/train.py --per_device_train_batch_size 4 --packing --gradient_checkpointing"
    )
    found = build_experiment(
        {"cluster": "dgx-h100", "model": "gpt2"}, {"strategy.config": command}, origin="test"
    )
    assert found.training.micro_batch_size == 4


def test_what_is_not_followed_must_be_given(tmp_path: Path) -> None:
    text = SFT.replace("batch_size=2", "batch_size=table['batch']").replace("=2048", "=longest(data)")
    with pytest.raises(
        InputError, match=r"line 2: per_device.*'table\['batch'\]'.*micro_batch_size=VALUE; line 2: max"
    ):
        read_text(tmp_path, text, "train.py")
    given = {"training.micro_batch_size": 8, "training.sequence_length": 1024}
    training = read_text(tmp_path, text, "train.py", changes=given).training
    assert (training.micro_batch_size, training.sequence_length) == (8, 1024)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"if fast():\n    a = LoraConfig()\n{SFT}", r"line 2: LoraConfig: depends on 'fast\("),
        (
            f"class Mine(SFTTrainer):\n    x = 1\n{SFT.replace('SFTTrainer', 'Mine')}",
            "Mine: is a trainer of the",
        ),
        (
            SFT.replace("AutoModelForCausalLM", "AutoModelForSequenceClassification"),
            "zsim does not simulate Auto",
        ),
        (SFT.replace("AutoModelForCausalLM", "ViTForImageClassification"), "not simulate ViTForImage"),
        (SFT.replace("AutoModelForCausalLM", "FastLanguageModel"), "use_unsloth"),
        (f"{SFT}other = SFTConfig()\n", "makes 2 of SFTConfig"),
        (f"a = LoraConfig(use_dora=True)\n{SFT}", "DoRA"),
        (f"a = LoraConfig(r=8, layers_to_transform=[1])\n{SFT}", "lora_layers_to_transform"),
        (SFT.replace("max_length=2048", "**more"), r"does not follow 'more'"),
    ],
)
def test_another_job_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(NotSimulatedError, match=words):
        read_text(tmp_path, text, "train.py")


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("def f(:\n", "train.py", "is not Python"),
        ("print(1)\n", "train.py", r"expected a script that makes TrainingArguments.*found none"),
        ("{}", "train.ipynb", "is no notebook"),
        ("cells", "train.ipynb", "is no notebook"),
        (f"x = {'+'.join(['y'] * 700)}\n{SFT}", "train.py", "nested too deeply"),
        (SFT.replace("batch_size=2", "batch_size=4 // 0"), "train.py", "does not follow '4 // 0'"),
    ],
)
def test_what_is_no_training_is_one_sentence(tmp_path: Path, text: str, name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_text(tmp_path, text, name)


def test_a_notebook_is_its_cells(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# x"]},
        {"cell_type": "code", "source": ["!pip install \\\n  trl \\\n  peft\n%time\n", SFT]},
    ]
    cells.append({"cell_type": "code", "source": ["%%writefile x.py\n", "for it is no code of this\n"]})
    found = read_text(tmp_path, json.dumps({"cells": cells}), "train.ipynb")
    assert found.training.sequence_length == 2048
    assert "names neither deepspeed nor fsdp" in notes_of(found)


def test_a_placed_model_is_one_processs(tmp_path: Path) -> None:
    """The Trainer refuses `device_map="auto"` in a distributed run."""
    text = SFT.replace("torch.bfloat16", 'torch.bfloat16, device_map="auto"')
    found = read_text(tmp_path, text, "train.py")
    assert found.gpus == 1
    assert "device_map: one process" in notes_of(found)
    assert read_text(tmp_path, text, "train.py", changes={"gpus": 4}).gpus == 4
    assert read_text(tmp_path, SFT, "train.py").gpus is None
