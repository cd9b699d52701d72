"""Python scripts of people's own, read as text: what their objects say, and what is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.expect import there
from tests.programs.reading import notes_of, read_job, read_text
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.load import build_experiment
from zsim.specs.formats.detect import read_training_file

MODEL = 'AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", torch_dtype=torch.bfloat16)\n'
ARGUMENTS = "per_device_train_batch_size=2, gradient_accumulation_steps=4, bf16=True"
SFT = (
    f"model = {MODEL}args = SFTConfig({ARGUMENTS}, max_length=2048)\n"
    "SFTTrainer(model=model, args=args, train_dataset=data).train()\n"
)
ADAPTED = SFT.replace("args=args", "args=args, peft_config=a")
BATCH = SFT.replace("batch_size=2", "batch_size=batch")
PLAIN = f"model = {MODEL}Trainer(model, TrainingArguments({ARGUMENTS}))\n"


def notebook(*sources: object) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "source": source} for source in sources]})


def indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


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
        f"model = {MODEL.replace(')', ', quantization_config=bnb)')}"
        "model = prepare_model_for_kbit_training(model)\n"
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
        "        gradient_accumulation_steps=args.steps, bf16=torch.cuda.is_available())\n"
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
        f"class SFTConfig(trl.SFTConfig):\n    x = 1\nmodel = {MODEL}"
        "(args,) = TrlParser(SFTConfig).parse_args_and_config()\nSFTTrainer(model=model, args=args)\n"
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
    ("text", "key"),
    [
        (f"batch = 2\nbatch *= 4\n{BATCH}", "training.micro_batch_size"),
        (f"batch = 4\nbatch, steps = 16, 2\n{BATCH}", "training.micro_batch_size"),
        (f"batch = 4\nfor batch in sizes:\n    pass\n{BATCH}", "training.micro_batch_size"),
        (f"batch = 4\nif fast():\n    batch = 8\n{BATCH}", "training.micro_batch_size"),
        (f"batch = 4\ndef change():\n    global batch\n    batch = 8\n{BATCH}", "training.micro_batch_size"),
        (
            f"batch = 4\ndef train(batch=16):\n{indented(BATCH)}fire.Fire(train)\n",
            "training.micro_batch_size",
        ),
        (
            f"def train(batch):\n{indented(BATCH)}train(2)\ntrain(4)\n",
            "training.micro_batch_size",
        ),
        (
            "class Sizes:\n    batch = 4\nsizes = Sizes()\nsizes.batch = 16\n"
            + BATCH.replace("=batch", "=sizes.batch"),
            "training.micro_batch_size",
        ),
        (
            "kw = dict(per_device_train_batch_size=8)\nother = kw\nother['per_device_train_batch_size'] = 1\n"
            + SFT.replace("per_device_train_batch_size=2", "**kw"),
            "training.micro_batch_size",
        ),
        (
            SFT.replace("SFTTrainer", "args.per_device_train_batch_size = 16\nSFTTrainer"),
            "training.micro_batch_size",
        ),
        (f"{SFT}trainer.args.gradient_checkpointing = False\n", "training.activation_checkpointing"),
        (f"{SFT}model.gradient_checkpointing_disable()\n", "training.activation_checkpointing"),
        (f"a = LoraConfig(r=8)\na.r = 64\n{ADAPTED}", "training.lora.rank"),
        (f"tokenizer(x, max_length=4096)\ntokenizer(y, max_length=64)\n{PLAIN}", "training.sequence_length"),
        (
            f"tokenizer(x, max_length=longest())\ntokenizer(y, max_length=64)\n{PLAIN}",
            "training.sequence_length",
        ),
        (SFT.replace("bf16=True", "bf16=not torch.backends.mps.is_available()"), "training.precision"),
        (
            SFT.replace("bf16=True", "gradient_checkpointing_kwargs={'use_reentrant': f()}"),
            "training.checkpoint_is_reentrant",
        ),
        (BATCH.replace("=batch", "=16 // int(os.environ.get('WORLD_SIZE', 1))"), "training.micro_batch_size"),
        (
            f"model = {MODEL}prepare_model_for_kbit_training(model, use_gradient_checkpointing=f())\n"
            + SFT.replace(f"model = {MODEL}", ""),
            "training.activation_checkpointing",
        ),
        (f"model = load()\n{SFT.replace('model = ', 'teacher = ')}", "model"),
        (SFT.replace("from_pretrained", "from_config"), "model"),
        (f"{SFT}model = AutoModelForCausalLM.from_pretrained('gpt2')\n", "model"),
    ],
)
def test_what_has_more_than_one_value_is_asked_for(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(InputError, match=f"does not follow .* give --set {key}=VALUE"):
        read_text(tmp_path, text, "train.py", model=None)


def test_a_functions_names_are_its_own_and_its_one_call_binds_its_parameters(tmp_path: Path) -> None:
    text = (
        "batch = 2\ndef evaluate():\n    batch = 1\n"
        f"def train(batch, steps=4):\n{indented(BATCH)}train(batch=16)\n"
    )
    assert read_text(tmp_path, text, "train.py").training.micro_batch_size == 16


@pytest.mark.parametrize(
    "batch",
    [
        "max([3, 5], key=lambda size: -size)",
        "int('11', base=2)",
        "len('1,2'.split(sep=','))",
        "len('x'.split(''))",
    ],
)
def test_calls_that_are_not_followed_are_asked_for(tmp_path: Path, batch: str) -> None:
    """The rest of a script is never run: a wrong call there is no error."""
    text = f"def unused():\n    return 'a'.replace('a'), len()\nbatch = {batch}\n{BATCH}"
    with pytest.raises(InputError, match=r"give --set training\.micro_batch_size=VALUE"):
        read_text(tmp_path, text, "train.py", model=None)


def test_what_a_with_statement_unpacks_has_no_value(tmp_path: Path) -> None:
    text = f"batch = 2\nwith opened() as (batch, other):\n    pass\n{BATCH}"
    with pytest.raises(InputError, match=r"give --set training\.micro_batch_size=VALUE"):
        read_text(tmp_path, text, "train.py", model=None)


def test_what_is_built_and_not_used_is_not_read(tmp_path: Path) -> None:
    text = f"b = BitsAndBytesConfig(load_in_4bit=True)\na = LoraConfig() if False else None\n{ADAPTED}"
    assert read_text(tmp_path, text, "train.py").training.lora is None
    adapted = read_text(tmp_path, text.replace("False", "True"), "train.py").training.lora
    assert there(adapted).quantized is None


def test_the_model_is_the_trainers(tmp_path: Path) -> None:
    """Through functions that hand it on, and by its name in TRL's short form."""
    text = f"teacher = AutoModelForCausalLM.from_pretrained('meta-llama/Llama-3.1-70B')\n{SFT}"
    assert read_text(tmp_path, text, "train.py", model=None).model == "llama-3.1-8b"
    inside = f"def load():\n    return {MODEL.strip()}, 1\nmodel, tokenizer = load()\n"
    text = SFT.replace(f"model = {MODEL}", inside + "model = get_peft_model(model, LoraConfig())\n")
    assert read_text(tmp_path, text, "train.py", model=None).model == "llama-3.1-8b"
    text = SFT.replace("model=model", "model='Qwen/Qwen2.5-7B-Instruct'").replace(f"model = {MODEL}", "")
    assert read_text(tmp_path, text, "train.py", model=None).model == "qwen2.5-7b"


def test_speech_and_reward_models_are_read(tmp_path: Path) -> None:
    text = PLAIN.replace("CausalLM", "SpeechSeq2Seq").replace(
        "meta-llama/Llama-3.1-8B", "openai/whisper-small"
    )
    assert read_text(tmp_path, text, "train.py", model=None).model == "whisper-small"
    text = SFT.replace("SFT", "Reward").replace("CausalLM", "SequenceClassification")
    text = text.replace("torch_dtype", "num_labels=1, torch_dtype")
    assert read_text(tmp_path, text, "train.py", model=None).model == "llama-3.1-8b"


def test_a_flag_that_stores_false_is_true_without_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "parser.add_argument('--no_lora', dest='lora', action='store_false')\noptions = parser.parse_args()\n"
        f"a = LoraConfig() if options.lora else None\n{ADAPTED}"
    )
    for flag, has_adapter in (("", True), (" --no_lora", False)):
        command = f"torchrun {tmp_path}/train.py{flag}"
        found = build_experiment({"cluster": "dgx-h100"}, {"strategy.config": command}, origin="test")
        assert (found.training.lora is not None) == has_adapter


def test_preparation_is_for_4_bits_under_ddp(tmp_path: Path) -> None:
    text = f"model = {MODEL}prepare_model_for_kbit_training(model)\n" + ADAPTED.replace(
        f"model = {MODEL}", ""
    )
    found = read_text(tmp_path, f"a = LoraConfig()\n{text}", "train.py")
    assert there(found.training.lora).preparation is None
    text = f"a = LoraConfig()\n{text}".replace(")\nprep", ", load_in_4bit=True)\nprep")
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    )
    command = f"accelerate launch --config_file {tmp_path}/fsdp.yaml {tmp_path}/train.py"
    launched = build_experiment({"cluster": "dgx-h100"}, {"strategy.config": command}, origin="test")
    assert there(launched.training.lora).quantized == "nf4"
    assert there(launched.training.lora).preparation == "none"
    assert "prepare_model_for_kbit_training: zsim" in notes_of(found)


@pytest.mark.parametrize("command", ["python {}", "CUDA_VISIBLE_DEVICES=0 python3 -u {}", "run.sh"])
def test_a_command_may_be_the_script_alone(tmp_path: Path, command: str) -> None:
    (tmp_path / "train.py").write_text(SFT)
    (tmp_path / "run.sh").write_text("CUDA_VISIBLE_DEVICES=0 python train.py\n")
    command = f"{tmp_path}/run.sh" if command == "run.sh" else command.format(f"{tmp_path}/train.py")
    found = build_experiment({"cluster": "dgx-h100"}, {"strategy.config": command}, origin="test")
    assert (found.model, found.training.micro_batch_size) == ("llama-3.1-8b", 2)


def test_a_launchs_variables_are_the_scripts_and_other_flags_are_noted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BATCH.replace("=batch", "=int(os.environ.get('BS', 2))"))
    command = f"BS=16 torchrun {tmp_path}/train.py --per_device_train_batch_size 3"
    found = build_experiment({"cluster": "dgx-h100"}, {"strategy.config": command}, origin="test")
    assert found.training.micro_batch_size == 16
    assert "--per_device_train_batch_size: not read" in notes_of(found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            f"if fast():\n    get_peft_model(x, LoraConfig())\n{SFT}",
            r"line 2: LoraConfig: depends on 'fast\(",
        ),
        (
            f"a = None\nif fast():\n    a = LoraConfig()\n{ADAPTED}",
            "line 6: 'a': zsim simulates the adapters",
        ),
        (f"a = PrefixTuningConfig()\n{ADAPTED}", "PrefixTuningConfig: zsim simulates the adapters of a Lora"),
        (f"a = LoraConfig(r=4)\nget_peft_model(m, LoraConfig())\n{ADAPTED}", "one adapter, found two"),
        (f"exec(text)\n{SFT}", "exec: zsim does not follow what it changes"),
        (f"model = {MODEL.strip()}.to(torch.float32)\n{SFT}", "to: zsim reads the model's dtype where"),
        (f"model = {MODEL}model = torch.compile(model)\n{SFT}", "torch.compile: zsim reads"),
        (f"p.requires_grad = False\n{SFT}", "line 1: requires_grad: zsim does not follow which"),
        (f"model.requires_grad_(False)\n{SFT}", "line 1: requires_grad_: zsim does not follow which"),
        (SFT.replace("args=args", "args=args, optimizers=(Adafactor(x), None)"), "optimizers: zsim does not"),
        (SFT.replace("bfloat16)", "bfloat16, quantization_config=HqqConfig())"), "simulate 'HqqConfig"),
        (
            SFT.replace("SFTTrainer(", "args = replace(args, bf16=False)\nSFTTrainer("),
            "replace: zsim does not",
        ),
        (f"setattr(args, key, 4)\n{SFT}", r"line 1: zsim does not follow 'setattr\(args, key, 4\)'"),
        (SFT.replace("max_length=2048", "**load()"), r"does not follow 'load\(\)'"),
        (f"kw = dict(bf16=True)\nkw.update(x)\n{SFT.replace('bf16=True', '**kw')}", "does not follow 'kw'"),
        (
            f"class Mine(SFTTrainer):\n    x = 1\n{SFT.replace('SFTTrainer', 'Mine')}",
            "Mine: is a trainer of the",
        ),
        (
            SFT.replace("AutoModelForCausalLM", "AutoModelForSequenceClassification"),
            "zsim does not simulate Auto",
        ),
        (SFT.replace("AutoModelForCausalLM", "ViTForImageClassification"), "not simulate ViTForImage"),
        (SFT.replace("AutoModelForCausalLM", "FastVisionModel"), "use_unsloth"),
        (SFT.replace("AutoModelForCausalLM", "FastModel").replace("SFT", "DPO"), "use_unsloth"),
        (f"a = FastModel.get_peft_model(model, finetune_mlp_modules=False)\n{SFT}", "FastModel: zsim adapts"),
        (f"{SFT}other = SFTConfig()\n", "makes 2 of SFTConfig"),
        (f"a = LoraConfig(use_dora=True)\n{ADAPTED}", "DoRA"),
        (f"a = LoraConfig(r=8, layers_to_transform=[1])\n{ADAPTED}", "lora_layers_to_transform"),
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
        (notebook(None), "train.ipynb", "cell 1: source: expected text"),
        (notebook([1, 2]), "train.ipynb", "cell 1: source: expected text"),
        (notebook("x = 1\n!ls\nx = = 2\n"), "train.ipynb", "cell 1: line 3: is not Python"),
        (notebook(BATCH), "train.ipynb", "cell 1, line 2: per_device_train_batch_size"),
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
    commands = ("out = !ls\n", "?model\n", "model?\n", "n = (3\n  % 2)\n", "y = '''\n%foo\n'''\n")
    cells += [{"cell_type": "code", "source": text} for text in commands]
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


def test_settings_of_modules_functions_and_files_are_followed(tmp_path: Path) -> None:
    """What stands in config.py, in a YAML that is loaded, or in what a function returns."""
    (tmp_path / "settings.yaml").write_text("lora: {r: 64, targets: 'q_proj, v_proj'}\n")
    (tmp_path / "config.py").write_text(
        "BATCH = 3\n"
        "def adapter(lora, is_on):\n"
        "    if not is_on:\n"
        "        return None\n"
        "    names = [name.strip() for name in lora['targets'].split(',') if name]\n"
        "    return LoraConfig(r=lora['r'], target_modules=names)\n"
    )
    text = (
        "from config import *\n"
        "with open('settings.yaml') as file:\n    loaded = yaml.safe_load(file)\n"
        f"a = adapter(loaded['lora'], True)\n{ADAPTED.replace('batch_size=2', 'batch_size=BATCH')}"
    )
    training = read_text(tmp_path, text, "train.py", model=None).training
    assert training.micro_batch_size == 3
    assert (there(training.lora).rank, there(training.lora).targets) == (64, ("q_proj", "v_proj"))
    text = text.replace("True", "False").replace("import *", "import BATCH, adapter")
    assert read_text(tmp_path, text, "train.py", model=None).training.lora is None
    text = text.replace("False", "choose()")
    with pytest.raises(
        NotSimulatedError, match=r"'adapter\(.*': zsim simulates the adapters of a LoraConfig alone"
    ):
        read_text(tmp_path, text, "train.py", model=None)
    (tmp_path / "config.py").write_text("BATCH = 3\nmodel.weight.requires_grad = False\n")
    with pytest.raises(NotSimulatedError, match=r"config\.py: line 2: requires_grad"):
        read_text(tmp_path, f"from config import BATCH\n{SFT}", "train.py", model=None)


@pytest.mark.parametrize(
    "head",
    [
        "for size in sizes:\n        ",
        "match sizes:\n        case 2: ",
        "try:\n        raise sizes\n    except* E: ",
    ],
)
def test_a_result_in_a_block_that_may_not_run_is_not_followed(tmp_path: Path, head: str) -> None:
    text = f"def batch():\n    {head}pass; return 8\n    return 4\nbatch = batch()\n"
    text = text.replace("except* E: pass; return 8", "except* E: pass\n    finally: return 8")
    with pytest.raises(InputError, match=r"give --set training\.micro_batch_size=VALUE"):
        read_text(tmp_path, f"{text}{BATCH}", "train.py", model=None)


DATACLASSES = (
    "@dataclass\n"
    "class Model:\n"
    "    name: str\n"
    "    use_lora: bool = field(default=False)\n"
    "    targets: list[str] = field(default_factory=lambda: ['q_proj'])\n"
    "@dataclass\n"
    "class Arguments(transformers.TrainingArguments):\n"
    "    optim: str = field(default='adafactor')\n"
    "    model_max_length: int = field(default=512)\n"
    "def main(model_args, args):\n"
    "    model = AutoModelForCausalLM.from_pretrained(model_args.name, torch_dtype=torch.bfloat16)\n"
    "    if model_args.use_lora:\n"
    "        model = get_peft_model(model, LoraConfig(r=4, target_modules=model_args.targets))\n"
    "    Trainer(model=model, args=args).train()\n"
    "parser = HfArgumentParser((Model, Arguments))\n"
    "if len(sys.argv) == 2 and sys.argv[1].endswith('.json'):\n"
    "    model_args, args = parser.parse_json_file(sys.argv[1])\n"
    "else:\n"
    "    model_args, args = parser.parse_args_into_dataclasses()\n"
    "main(model_args, args)\n"
)


def test_flags_of_dataclasses_are_followed_in_the_script(tmp_path: Path) -> None:
    """Where the flags alone do not say the job: `use_lora` is the script's own."""
    (tmp_path / "train.py").write_text(DATACLASSES)
    command = (
        f"torchrun --nproc_per_node 2 {tmp_path}/train.py --name meta-llama/Llama-3.1-8B "
        f"--per_device_train_batch_size 3 --bf16 True --use_lora True"
    )
    found = build_experiment({"cluster": "dgx-h100"}, {"strategy.config": command}, origin="test")
    training = found.training
    assert (found.model, found.gpus, training.micro_batch_size) == ("llama-3.1-8b", 2, 3)
    assert (training.sequence_length, training.precision) == (512, "bf16")
    assert training.optimizer == "adafactor-transformers"
    assert (there(training.lora).rank, there(training.lora).targets) == (4, ("q_proj",))


def test_the_code_of_a_script_comes_before_its_flags_alone(tmp_path: Path) -> None:
    """Its adapters, optimizer and length are not in the flags, which alone are a full fine-tuning."""
    text = DATACLASSES.replace("if model_args.use_lora", "if True").replace("name:", "model_name_or_path:")
    (tmp_path / "tune.py").write_text(text.replace("model_args.name", "model_args.model_name_or_path"))
    flags = "--model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 3 --bf16 True"
    command = f"torchrun --nproc_per_node 2 {tmp_path}/tune.py {flags}"
    found = build_experiment({"cluster": "dgx-h100"}, {"strategy.config": command}, origin="test")
    assert there(found.training.lora).rank == 4
    assert (found.training.sequence_length, found.training.optimizer) == (512, "adafactor-transformers")
    (tmp_path / "tune.py").write_text("HfArgumentParser(Arguments)\nmodel.requires_grad_(False)\n")
    command += " --model_max_length 1024"
    alone = build_experiment({"cluster": "dgx-h100"}, {"strategy.config": command}, origin="test")
    assert (alone.training.lora, alone.training.sequence_length) == (None, 1024)
    assert "taken by its flags alone, for its code was not read: " in notes_of(alone)


def test_modules_are_read_from_pythons_folders_and_where_they_are_used(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text(
        "BATCH = 3\ndef seed(n):\n    inner(n)\ndef inner(n):\n    set_seed(n)\n"
        "def freeze(model):\n    model.requires_grad_(False)\n"
    )
    text = f"from utils import BATCH as batch, seed\nseed(1)\n{BATCH}"
    assert read_text(tmp_path, text, "train.py", model=None).training.micro_batch_size == 3
    with pytest.raises(NotSimulatedError, match=r"utils\.py: line 7: requires_grad_"):
        read_text(tmp_path, f"{text}import utils\nutils.freeze(model)\n", "train.py", model=None)
    (tmp_path / "below").mkdir()
    with pytest.raises(InputError, match=r"training\.micro_batch_size=VALUE"):
        read_text(tmp_path / "below", text, "train.py", model=None)


@pytest.mark.parametrize(
    "question",
    ["torch.cuda.is_bf16_supported()", "torch.cuda.get_device_capability()[0] >= 9", "FLAG is not None"],
)
def test_gpus_say_whether_they_have_bf16_where_a_script_asks(tmp_path: Path, question: str) -> None:
    text = f"FLAG = 1\nif 3 in (4, 8):\n    FLAG = None\n{SFT.replace('bf16=True', f'bf16={question}')}"
    found = read_text(tmp_path, text, "train.py", model=None)
    assert found.training.precision == "bf16"
    assert "asks whether the GPUs have bf16" not in notes_of(found)
    batch = BATCH.replace("=batch", "=4 if torch.cuda.get_device_capability()[0] >= 9 else 1")
    for cluster, size in (("dgx-h100", 4), ("dgx-a100-80gb", 1)):
        read = read_text(tmp_path, batch, "train.py", None, {"cluster": cluster})
        assert read.training.micro_batch_size == size


def test_torch_emulates_bf16_before_ampere_and_unsloth_does_without(tmp_path: Path) -> None:
    """`is_bf16_supported` of torch is true on a T4 from 2.4 on, unsloth's `is_bfloat16_supported` never."""
    turing = {"cluster": "aws-g4dn"}
    text = SFT.replace("bf16=True", "bf16=ask(), fp16=not ask()")
    torchs = text.replace("ask", "torch.cuda.is_bf16_supported")
    with pytest.raises(InputError, match=r"give --set training\.precision=VALUE"):
        read_text(tmp_path, torchs, "train.py", model=None, changes=turing)
    stated = {**turing, "training.precision": "fp16"}
    unsloth = (
        'model, _ = FastLanguageModel.from_pretrained("unsloth/llama-3-8b")\n'
        "model = FastLanguageModel.get_peft_model(model)\n"
        "SFTTrainer(model, args=SFTConfig(per_device_train_batch_size=2"
    )
    for arguments in ("", ", bf16=is_bfloat16_supported(), fp16=not is_bfloat16_supported()"):
        for changes in (turing, stated):
            read = read_text(tmp_path, f"{unsloth}{arguments}))\n", "train.py", model=None, changes=changes)
            assert (read.training.precision, read.training.stored_dtype) == ("fp16", "fp32")
            assert "asks whether" not in notes_of(read)
    file = read_training_file(str(tmp_path / "train.py"))
    assert file.settings["training.precision"] == "bf16"
    assert any("unsloth asks whether the GPUs have bf16" in note for note in file.notes)


def test_flags_of_transformers_own_trainer_have_its_loss(tmp_path: Path) -> None:
    """`max_length` is a flag of TRL's too, whose default loss keeps no logits."""
    (tmp_path / "train.py").write_text(
        "parser = HfArgumentParser((Names, TrainingArguments))\n"
        "names, args = parser.parse_args_into_dataclasses()\nTrainer(load(names), args).train()\n"
    )
    command = (
        f"torchrun {tmp_path}/train.py --model_name_or_path meta-llama/Llama-3.1-8B --max_length 512 "
        "--per_device_train_batch_size 1 --bf16"
    )
    found = build_experiment({"cluster": "dgx-h100"}, {"strategy.config": command}, origin="test")
    assert found.training.sequence_length == 512
    assert (found.program, "chunked_nll" in notes_of(found)) == ("transformers", False)


def test_a_tokenizer_of_any_name_tells_the_length(tmp_path: Path) -> None:
    text = f"rows.map(lambda row: tok(row['text'], truncation=True, max_length=640))\n{PLAIN}"
    assert read_text(tmp_path, text, "train.py", model=None).training.sequence_length == 640


def test_a_name_tells_the_length_that_no_tokenizer_is_told(tmp_path: Path) -> None:
    """Transformers' Trainer cuts nothing, so a length that nothing says is asked for."""
    found = read_text(tmp_path, f"MAX_LEN = 768\n{PLAIN}del model\n", "train.py", model=None)
    assert found.training.sequence_length == 768
    with pytest.raises(
        InputError, match=r"no tokenizer call has max_length.*training\.sequence_length=VALUE"
    ):
        read_text(tmp_path, f"MAX_LEN = 768\ncutoff_len = 512\n{PLAIN}", "train.py", model=None)


def test_unsloth_is_taken_as_liger_with_its_own_defaults(tmp_path: Path) -> None:
    """unsloth 015bdef0 quantises to 4 bits twice, cuts at 2,048 tokens, and keeps checkpoints on the host
    from 512 tokens on.
    """
    text = (
        'model, tokenizer = FastLanguageModel.from_pretrained(model_name="unsloth/llama-3-8b-bnb-4bit")\n'
        'model = FastLanguageModel.get_peft_model(model, r=8, bias="none", random_state=3407)\n'
        "SFTTrainer(model, args=SFTConfig(per_device_train_batch_size=2), tokenizer=tokenizer)\n"
    )
    found = read_text(tmp_path, text, "train.py", model=None)
    training, lora = found.training, there(found.training.lora)
    assert (found.model, found.gpus, training.precision) == ("llama-3-8b", 1, "bf16")
    assert (training.sequence_length, training.liger) == (2048, True)
    assert (training.activation_checkpointing, training.checkpoint_offload) == ("full", "pinned")
    assert (lora.rank, lora.alpha, lora.quantized, lora.preparation) == (8, 16, "nf4", "none")
    assert (training.cross_entropy, lora.kernels, lora.dtype) == ("unsloth-fused", "unsloth", None)
    assert lora.double_quantization in (None, True)
    assert "unsloth: its norms and activations are taken as Liger's" in notes_of(found)
    dropped = read_text(tmp_path, text.replace("r=8", "r=8, lora_dropout=0.1"), "train.py", model=None)
    assert there(dropped.training.lora).kernels == "peft"  # `patch_peft_model` asks for no dropout
    short = text.replace('-bnb-4bit")', '", max_seq_length=256, load_in_4bit=False)')
    training = read_text(tmp_path, short, "train.py", model=None).training
    assert (training.sequence_length, training.checkpoint_offload) == (256, None)
    assert there(training.lora).quantized is None
    chosen = text.replace('-bnb-4bit")', '", full_finetuning=choose())')
    with pytest.raises(InputError, match=r"give --set training\.lora\.quantized=VALUE"):
        read_text(tmp_path, chosen, "train.py", model=None)
    kept = text.replace("r=8", "r=8, use_gradient_checkpointing=False")
    assert read_text(tmp_path, kept, "train.py", model=None).training.activation_checkpointing != "full"
    both = text.replace("FastLanguageModel", "FastModel").replace("r=8", "r=8, finetune_vision_layers=False")
    assert there(read_text(tmp_path, both, "train.py", model=None).training.lora).targets == "all-linear"
    adapted = read_text(tmp_path, text + "extra = {}\nextra['output_dir'] = 'x'\n", "train.py", model=None)
    assert adapted.training == found.training


def test_preparation_casts_what_is_loaded_in_bf16(tmp_path: Path) -> None:
    """What stays beside the 4 bits is in fp32 behind it, in whichever type it was loaded."""
    text = "a = LoraConfig()\nbnb = BitsAndBytesConfig(load_in_4bit=True)\n" + ADAPTED.replace(
        "torch_dtype", "quantization_config=bnb, torch_dtype"
    ).replace("args = ", "prepare_model_for_kbit_training(model)\nargs = ")
    training = read_text(tmp_path, text, "train.py").training
    assert (there(training.lora).preparation, training.stored_dtype) == ("peft", "fp32")
    assert read_job(tmp_path, text, name="train.py").training.precision == "bf16"
