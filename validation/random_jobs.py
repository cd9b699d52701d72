"""Random jobs, each held to laws that every job keeps, whatever its settings.

    python -m validation.random_jobs --jobs 2000 --seed 7

A job that breaks a law, or ends in anything but an answer or a refusal, is printed as an experiment file. The
tests run some hundred (`tests/validation/test_random_jobs.py`), with seeds that stay; hours of it belong to a
change of plans, memory or folding.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from zsim.api import Result, simulate
from zsim.engine.simulator import Simulator
from zsim.errors import ZsimError
from zsim.reference import schema_of
from zsim.specs.experiment.load import build_experiment, load_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.export import export_files
from zsim.specs.formats.toml import experiment_text, experiment_toml
from zsim.specs.presets import model_preset_names, model_preset_path
from zsim.study.whole_runs import simulate_run
from zsim.workflows.rl.job import resolve_rl
from zsim.workflows.rl.result import simulate_rl

Tables = dict[str, Any]

_CLUSTERS = (
    "dgx-h100", "dgx-a100-80gb", "dgx-1", "hgx-b200", "gb200-nvl72", "l40s-x8", "aws-g5", "mi300x-x8",
    "rtx-4090-x8", "dgx-superpod-a100", "azure-ndv4",
)  # fmt: skip
_SMALL_MODELS = (
    "gpt2", "bert-base", "llama-3.2-1b", "qwen3-8b", "gemma3-1b", "mixtral-8x7b", "deepseek-v2-lite",
    "qwen3-30b-a3b", "gpt-oss-20b", "exaone-4.0-1.2b", "qwen3-next-80b-a3b", "nemotron-h-4b", "jamba-v0.1",
    "qwen2-vl-2b", "gemma3-4b", "smolvlm-256m",
)  # fmt: skip
_MOST_UNFOLDED = 16  # ranks that are simulated one by one as well
_EQUAL = 1e-9  # relative; both ways add the same numbers
_ROUNDING = 1e-6  # of sums of parts


class Broken(NamedTuple):
    """A law that a job broke, or an error that no user's mistake is."""

    law: str
    said: str
    tables: Tables

    def text(self) -> str:
        return f"{self.law}: {self.said}\n{experiment_text(self.tables)}"


# -- drawing ---------------------------------------------------------------------------------------------


def draw(random: random.Random) -> Tables:
    """The tables of an experiment file: a plain job and changes to it, of which most that are refused are
    taken back. What is left mostly runs, and has much beside each other.
    """
    kind = random.choice(_KINDS)
    tables: Tables = {
        "model": _model(random),
        "cluster": random.choice(_CLUSTERS),
        "gpus": random.choice((1, 2, 4, 8, 8, 16, 16, 24)),
        "training": {"sequence_length": random.choice((17, 128, 512, 1000))},
        "strategy": {"kind": kind},
    }
    if kind == "deepspeed":
        zero = {"stage": random.choice((0, 1, 2, 3, 3))}
        tables["strategy"]["config"] = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": zero}
    if random.random() < 0.04:
        tables |= copy.deepcopy(random.choice(_WORKFLOWS))
    for _ in range(random.randrange(20)):
        changed = copy.deepcopy(tables)
        for path, value in _change(random, tables):
            _set(changed, path, copy.deepcopy(value))
        tables = tables if _is_refused(changed) and random.random() < 0.995 else changed
    return tables


def _model(random: random.Random) -> Tables:
    """A preset with few layers, which behave as many do."""
    names = _SMALL_MODELS if random.random() < 0.6 else model_preset_names()
    config: Tables = json.loads(model_preset_path(random.choice(names)).read_text(encoding="utf-8"))
    config.pop("_source", None)
    part = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    key = next((key for key in ("num_hidden_layers", "n_layer", "n_layers") if key in part), None)
    if key is not None:
        layers = random.choice((2, 4, 8))
        for by_layer, entries in part.items():
            if isinstance(entries, list | str) and len(entries) == part[key]:
                part[by_layer] = entries[:layers]
        part[key] = layers
    return config


def _set(tables: Tables, path: str, value: Any) -> None:
    """Set a key by its path, or leave it out for None."""
    *parents, key = path.split(".")
    for parent in parents:
        tables = tables.setdefault(parent, {})
    tables[key] = value
    if value is None:
        del tables[key]


def _change(random: random.Random, tables: Tables) -> Iterable[tuple[str, Any]]:
    """Keys of an experiment, by path, and what they become."""
    if random.random() < 0.3:
        has_json = "config" in tables["strategy"]
        path = random.choice(
            [path for path in _VALUES if _VALUES[path] and (has_json or "config." not in path)]
        )
        return [(path, random.choice(_VALUES[path]))]
    if random.random() < 0.2:
        return random.choice(_TOGETHER).items()
    without = {"rl", "run"} - set(tables)
    name = random.choice([name for name in _SCHEMA_TABLES if name.partition(".")[0] not in without])
    fields = schema = _schema()
    for part in name.split("."):
        field = fields["properties"][part]
        of_kind = field.get("discriminator", {}).get("mapping", {}).get(tables["strategy"]["kind"])
        fields = schema["$defs"][str(of_kind or field["$ref"]).rpartition("/")[2]]
    key = random.choice(sorted(fields["properties"]))
    path = f"{name}.{key}"
    values = () if key == "kind" else _VALUES.get(path) or _values(fields["properties"][key])
    return [(path, random.choice(values))] if values else []


@functools.cache
def _schema() -> Tables:
    return schema_of("experiment")


def _values(field: dict[str, Any]) -> tuple[Any, ...]:
    """What a key of a schema takes; nothing for text and lists, whose values `_VALUES` has."""
    if "const" in field or "enum" in field:
        return tuple(field.get("enum", (field.get("const"),)))
    if field.get("type") == "boolean":
        return (True, False)
    if field.get("type") == "array" and "enum" in field["items"]:
        return tuple([value] for value in field["items"]["enum"])
    if field.get("type") in ("integer", "number"):
        least = float(field.get("minimum", field.get("exclusiveMinimum", 0)))
        return tuple(n for n in (0, 1, 2, 3, 8, 100, 4096) if least <= n <= field.get("maximum", 4096))
    if "format" in field:
        return tuple(field["examples"])
    return tuple(value for option in field.get("anyOf", ()) for value in _values(option))


_KINDS = (
    ("fsdp2",) * 6 + ("fsdp1",) * 3 + ("ddp",) * 3 + ("deepspeed",) * 7 + ("megatron",) * 7 + ("reference",)
)
_SCHEMA_TABLES = (
    "training", "training", "training.lora", "training.images", "training.lengths",
    "parallelism", "parallelism",
    "trainer", "data", "simulation", "strategy", "strategy", "strategy", "jitter", "cost",
    "rl", "rl.lengths", "rl.rollout", "rl.sync", "rl.offload", "rl.reward", "rl.environment",
    "run", "run.checkpoint", "run.storage", "run.failures", "run.recovery", "run.local", "run.evaluation",
)  # fmt: skip
_WORKFLOWS: tuple[Tables, ...] = (
    {
        "rl": {
            "prompts_per_step": 8,
            "samples_per_prompt": 4,
            "lengths": {"max_response": 256, "prompt": {"mean": 50}, "response": {"mean": 100}},
        }
    },
    {"run": {"steps": 1000, "seeds": 2}},
)
_VALUES: dict[str, tuple[Any, ...]] = {
    "gpus": (1, 2, 4, 8, 16, 24),
    "faults.slow_gpus": ({"0": 1.1}, {"0": 2.0}),
    "training.sequence_length": (1, 17, 128, 512, 1000, 2048),
    "training.micro_batch_size": (1, 2, 3, 8),
    "training.gradient_accumulation_steps": (1, 2, 4, 5, 8),
    "training.activation_checkpointing": ("none", "full", "selective", "selective-op"),
    "training.precision": ("bf16", "fp16", "fp32", "fp8"),
    "training.optimizer": (
        "adamw", "sgd", "adamw-8bit", "paged-adamw-8bit", "adamw-4bit", "adafactor", "lion", "muon",
        "galore-adamw", "lamb", "adam-mini",
    ),
    "training.lora": ({"rank": 8}, {"rank": 64, "targets": "all-linear"}, {"rank": 1, "quantized": "nf4"}),
    "training.lora.targets": ("all-linear", ["q_proj", "v_proj"]),
    "training.lora.target_parameters": (["experts.gate_up_proj", "experts.down_proj"],),
    "training.lora.modules_to_save": (["lm_head"], ["embed_tokens", "lm_head"]),
    "training.lora.exclude": (["lm_head"],),
    "training.lora.layers": ([0], [0, 1]),
    "training.lora.rank_pattern": ({"q_proj": 4},),
    "training.lora.alpha_pattern": ({"q_proj": 4},),
    "training.lora.config": (),
    "training.images": (
        {"per_sample": 1, "width": 512, "height": 384},
        {"counts": [0, 1, 3], "sizes": [[336, 336], [1024, 512]]},
    ),
    "training.lengths": (
        {"law": "exponential", "mean": 400},
        {"law": "exponential", "mean": 3, "batching": "padded"},
        {"law": "constant", "mean": 40},
        {"law": "uniform", "low": 1, "high": 900, "batching": "padded"},
    ),
    "training.software": ("2023", "2024", "transformers 4.44, torch 2.4", "torch 2.8"),
    "training.transformers": ("4.44", "5.1"),
    "training.frozen": (["model.embed_tokens"], ["model.visual"], ["*norm*"]),
    "training.block_checkpointing": ({"0": "full"}, {"1": "none"}),
    "parallelism.tensor": (2, 4),
    "parallelism.pipeline": (2, 4),
    "parallelism.context": (2, 4),
    "parallelism.expert": (2, 4, 8),
    "parallelism.expert_imbalance": (1.0, 1.5, "seed:3"),
    "parallelism.order": ("tp-cp-dp-pp", "tp-pp-dp"),
    "parallelism.layers_per_stage": ([1, 1], [2, 2, 2, 2], [1, 3]),
    "parallelism.schedule_csv": (),
    "strategy.version": ("0.8", "0.12.0", "0.14", "0.19"),
    "strategy.wrapping": ("huggingface", "torchtitan", "size:10000000"),
    "strategy.tile_numel": (1_000_000,),
    "strategy.leaf_modules": (["MixtralSparseMoeBlock"],),
    "strategy.config": (),
    "strategy.config.zero_optimization.overlap_comm": (True, False),
    "strategy.config.zero_optimization.reduce_bucket_size": (1e6, 5e8),
    "strategy.config.zero_optimization.stage3_prefetch_bucket_size": (0, 1e7),
    "strategy.config.zero_optimization.stage3_param_persistence_threshold": (0, 1e6),
    "strategy.config.zero_optimization.stage3_max_live_parameters": (1e6,),
    "strategy.config.zero_optimization.zero_hpz_partition_size": (2, 8),
    "strategy.config.zero_optimization.zero_quantized_weights": (True,),
    "strategy.config.zero_optimization.zero_quantized_gradients": (True,),
    "strategy.config.zero_optimization.round_robin_gradients": (True,),
    "strategy.config.zero_optimization.contiguous_gradients": (False,),
    "strategy.config.zero_optimization.offload_optimizer": (
        {"device": "cpu"},
        {"device": "cpu", "ratio": 0.4},
        {"device": "cpu", "super_offload": True},
        {"device": "nvme", "nvme_path": "/n"},
        {"device": "nvme", "nvme_path": "/n", "pipeline_read": True, "pipeline_write": True},
    ),
    "strategy.config.zero_optimization.offload_param": (
        {"device": "cpu"},
        {"device": "nvme", "nvme_path": "/n"},
    ),
    "strategy.config.fp16": ({"enabled": True},),
    "strategy.config.bf16": ({"enabled": True},),
    "strategy.config.optimizer": ({"type": "AdamW"}, {"type": "Muon"}, {"type": "Lion"}),
    "strategy.config.communication_data_type": ("fp32", "bf16"),
    "strategy.config.activation_checkpointing": (
        {"partition_activations": True},
        {"cpu_checkpointing": True},
    ),
    "strategy.config.compile": ({"deepcompile": True},),
    "rl.framework": ("verl", "trl", "nemo-rl", "openrlhf", "prime-rl", "slime", "areal", "deepspeed-chat"),
    "rl.lengths.prompt": ({"mean": 300}, {"values": [20, 40]}),
    "rl.lengths.response": ({"mean": 30}, {"mean": 200, "sigma": 1.5}),
    "run.failures.preset": ("llama-3", "typical"),
    "run.seeds": (2,),
    "run.days": (1, 30),
    "run.tokens": ("1G",),
    "cost.tokens": ("1G",),
    "cost.samples": ("1M",),
}  # fmt: skip
"""Values that are drawn for themselves; none for keys that name a file."""
_TOGETHER: tuple[Tables, ...] = (
    {"training.reference": "copy", "training.micro_batch_size": 2},
    {"training.lora": {"rank": 8, "targets": "all-linear"}, "training.reference": "base"},
    {"parallelism.pipeline": 2, "parallelism.virtual_stages": 2, "training.gradient_accumulation_steps": 4},
    {"parallelism.tensor": 2, "parallelism.expert": 2, "parallelism.sequence_parallel": True},
    {"strategy.distributed_optimizer": True, "strategy.overlap_grad_reduce": True},
    {
        "strategy.distributed_optimizer": True,
        "strategy.overlap_grad_reduce": True,
        "strategy.overlap_param_gather": True,
    },
    {"strategy.distributed_optimizer": True, "strategy.fsdp_sharding": "optim_grads_params"},
    {
        "strategy.config.zero_optimization.offload_optimizer": {"device": "cpu"},
        "strategy.config.zero_optimization.zenflow": {
            "topk_ratio": 0.1,
            "update_interval": 4,
            "full_warm_up_rounds": 0,
        },
    },
    {"strategy.version": "0.18.9", "strategy.config.zero_optimization.mics_shard_size": 2},
    {
        "strategy.version": "0.16",
        "strategy.config.optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 10}},
    },
    {"parallelism.tensor": 2},
    {"parallelism.pipeline": 2},
    {"parallelism.context": 2},
    {"parallelism.expert": 4},
    {"training.images": {"per_sample": 1, "width": 512, "height": 384}},
    {"nodes": 2, "gpus": None},
    {"nodes": 3, "gpus": None},
)


# -- laws ------------------------------------------------------------------------------------------------


def check(tables: Tables) -> Iterator[Broken]:
    """The laws that a job breaks; none for one that is refused."""
    workflow = next((name for name in WORKFLOW_LAWS if name in tables), "")
    try:
        experiment = build_experiment(tables, {}, origin="random job")
        result = _answer(experiment, workflow)
    except ZsimError as error:
        if not str(error).strip():
            yield Broken("a refusal says why", repr(error), tables)
        return
    except Exception:
        yield Broken("an answer or a refusal", traceback.format_exc(limit=-3), tables)
        return
    content = result.report.to_dict() if workflow == "" else result.to_dict()
    for law, check_law in (WORKFLOW_LAWS[workflow] if workflow else LAWS).items():
        try:
            for said in check_law(experiment, result, content):
                yield Broken(law, said, tables)
        except Exception:
            yield Broken(law, traceback.format_exc(limit=-3), tables)


def _answer(experiment: Experiment, workflow: str) -> Any:
    if workflow == "rl":
        return simulate_rl(experiment)
    if workflow == "run":
        return simulate_run(experiment, jobs=1, compares=False)
    return simulate(experiment)


def _no_negative_number(experiment: Experiment, result: Result, content: Tables) -> Iterator[str]:
    for path, number in _numbers(content):
        if not math.isfinite(number):
            yield f"{path} is {number}"
        elif number < 0 and not path.endswith(_SIGNED):
            yield f"{path} is {number:.6g}"


_SIGNED = ("rank", "relative_error", "change", "degraded")  # a drawn step may be faster than the mean one


def _parts_sum(experiment: Experiment, result: Result, content: Tables) -> Iterator[str]:
    step, parts = content["step_seconds"], sum(content["breakdown_seconds"].values())
    if not math.isclose(parts, step, rel_tol=_ROUNDING):
        yield f"parts of {parts:.9g} s make a step of {step:.9g} s"


def _peaks_hold(experiment: Experiment, result: Result, content: Tables) -> Iterator[str]:
    """A total is at most the sum of its categories' own peaks, at least the largest of them."""
    for pool, peaks in content["peak_bytes"].items():
        parts = [count for name, count in peaks.items() if name != "total"]
        if not max(parts, default=0) <= peaks["total"] <= sum(parts):
            yield f"{pool}: a total of {peaks['total']:,} with parts {parts}"
        is_over = peaks["total"] > content["capacity_bytes"].get(pool, math.inf)
        if is_over and content["fits"]:
            yield f"{pool}: fits with {peaks['total']:,} of {content['capacity_bytes'][pool]:,} bytes"
    if content["fits"] != (content["out_of_memory"] is None):
        yield f"fits is {content['fits']}, out_of_memory {content['out_of_memory']}"


def _range_holds(experiment: Experiment, result: Result, content: Tables) -> Iterator[str]:
    interval = content.get("step_seconds_range")
    if interval and not interval[0] <= content["step_seconds"] <= interval[1]:
        yield f"{content['step_seconds']} is outside {interval}"


def _rates_are_possible(experiment: Experiment, result: Result, content: Tables) -> Iterator[str]:
    """No more than the hardware does, and nothing waits longer for a collective than it takes."""
    overlap = content["overlap_fraction"]
    if overlap is not None and not 0 <= overlap <= 1 + _EQUAL:
        yield f"overlap_fraction is {overlap}"
    for group in content["collectives_by_group"]:
        if group["exposed_seconds"] > group["busy_seconds"] * (1 + _ROUNDING):
            yield f"{group['group']}: exposed {group['exposed_seconds']}, busy {group['busy_seconds']}"
    bubble = content["bubble_fraction"]
    if bubble is not None and not 0 <= bubble <= 1:
        yield f"bubble_fraction is {bubble}"
    for link in content["traffic"]:
        if link["utilisation_fraction"] > 1 + _ROUNDING:
            yield f"{link['link_class']} is used to {link['utilisation_fraction']:.3f} of its capacity"


def _folded_is_unfolded(experiment: Experiment, result: Result, content: Tables) -> Iterator[str]:
    if content["simulation"]["world_size"] > _MOST_UNFOLDED:
        return
    whole = simulate(experiment, unfold=True).report.to_dict()
    if not math.isclose(whole["step_seconds"], content["step_seconds"], rel_tol=_EQUAL):
        yield f"folded {content['step_seconds']:.12g} s, unfolded {whole['step_seconds']:.12g} s"
    if whole["peak_bytes"] != content["peak_bytes"]:
        yield f"folded {content['peak_bytes']}, unfolded {whole['peak_bytes']}"


def _is_repeated(experiment: Experiment, result: Result, content: Tables) -> Iterator[str]:
    again = simulate(experiment).report.to_dict()
    for key in content:
        if key != "simulation" and again[key] != content[key]:
            yield f"{key} differs the second time"


def _is_read_back(experiment: Experiment, result: Result, content: Tables) -> Iterator[str]:
    with _read_back(experiment) as read:
        again = simulate(read).report.to_dict()
    for key in ("step_seconds", "peak_bytes", "model", "collectives"):
        if again[key] != content[key]:
            yield f"{key}: {_short(content[key])}, exported and read back {_short(again[key])}"


@contextmanager
def _read_back(experiment: Experiment) -> Iterator[Experiment]:
    """The experiment after export, whose files are there as long as it is used."""
    with tempfile.TemporaryDirectory() as folder:
        files = {"experiment.toml": experiment_toml(experiment)}
        if experiment.rl is None:
            files = export_files(resolve(experiment)).files
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        yield load_experiment(Path(folder) / "experiment.toml")


def _phases_sum(experiment: Experiment, result: Any, content: Tables) -> Iterator[str]:
    step, parts = content["step_seconds"], sum(content["exposed_seconds"].values())
    if not math.isclose(parts, step, rel_tol=_ROUNDING):
        yield f"exposed phases of {parts:.9g} s make a step of {step:.9g} s"
    for phase, seconds in content["exposed_seconds"].items():
        if seconds > content["phases_seconds"][phase] * (1 + _ROUNDING):
            yield f"{phase}: exposed {seconds}, of {content['phases_seconds'][phase]}"
    for side, busy in content["busy_fraction"].items():
        if busy is not None and busy > 1 + _ROUNDING:
            yield f"the {side} is busy {busy:.4f} of the step"


def _phases_hold(experiment: Experiment, result: Any, content: Tables) -> Iterator[str]:
    for phase, peaks in content["peak_bytes_by_phase"].items():
        parts = [count for name, count in peaks.items() if name != "total"]
        if not max(parts, default=0) <= peaks["total"] <= sum(parts):
            yield f"{phase}: a total of {peaks['total']:,} with parts {parts}"


def _days_sum(experiment: Experiment, result: Any, content: Tables) -> Iterator[str]:
    """What is lost and what is gained make the days; no fraction is above 1."""
    expected, ideal = content["expected_days"], content["ideal_days"]
    if expected < ideal * (1 - _ROUNDING):
        yield f"{expected} days, of which {ideal} are steps"
    for key in ("goodput_fraction", "goodput_by_mean_repairs_fraction", "simulated_fraction"):
        if content[key] is not None and not 0 <= content[key] <= 1 + _ROUNDING:
            yield f"{key} is {content[key]}"
    low, high = content["days_range"]
    if not low <= content["median_days"] <= high:
        yield f"a median of {content['median_days']} days in {content['days_range']}"


def _workflow_is_repeated(experiment: Experiment, result: Any, content: Tables) -> Iterator[str]:
    workflow = "rl" if "exposed_seconds" in content else "run"
    with _read_back(experiment) as read:
        answers = {"the second time": _answer(experiment, workflow), "read back": _answer(read, workflow)}
    for name, answer in answers.items():
        again = answer.to_dict()
        for key in ("step_seconds", "phases_seconds", "peak_bytes_by_phase", "expected_days", "checkpoint"):
            if again.get(key) != content.get(key):
                yield f"{key}: {_short(content[key])}, {name} {_short(again[key])}"


Law = Callable[[Experiment, Result, Tables], Iterator[str]]
LAWS: dict[str, Law] = {
    "numbers are finite, none is negative": _no_negative_number,
    "the parts of a step sum to it": _parts_sum,
    "peaks are of their parts": _peaks_hold,
    "the range holds the step": _range_holds,
    "rates are possible": _rates_are_possible,
    "folded is unfolded": _folded_is_unfolded,
    "the same twice": _is_repeated,
    "what is exported is read back": _is_read_back,
}
WORKFLOW_LAWS: dict[str, dict[str, Law]] = {
    "rl": {
        "numbers are finite, none is negative": _no_negative_number,
        "exposed phases sum to the step": _phases_sum,
        "peaks of phases are of their parts": _phases_hold,
        "the range holds the step": _range_holds,
        "the same twice, and read back": _workflow_is_repeated,
    },
    "run": {
        "numbers are finite, none is negative": _no_negative_number,
        "the days are those of the steps and more": _days_sum,
        "the same twice, and read back": _workflow_is_repeated,
    },
}


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, bool) or path.startswith(("validation", "notes")):
        return
    if isinstance(value, int | float):
        yield path, value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _numbers(entry, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _numbers(entry, path)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 200 else f"{text[:200]}..."


# -- running ---------------------------------------------------------------------------------------------


def broken_laws(
    seed: int, jobs: int, on_broken: Callable[[Broken], None] = lambda law: None
) -> tuple[list[Broken], int]:
    """What `jobs` jobs drawn with `seed` break, and how many of them were simulated. `on_broken` is called as
    soon as a law is.
    """
    source = random.Random(seed)
    broken: list[Broken] = []
    refused = 0
    for _ in range(jobs):
        tables = draw(source)
        before = len(broken)
        for law in check(tables):
            broken.append(law)
            on_broken(law)
        if len(broken) == before and _is_refused(tables):
            refused += 1
    return broken, jobs - refused


def _is_refused(tables: Tables) -> bool:
    try:
        experiment = build_experiment(tables, {}, origin="random job")
        resolve_rl(experiment, Simulator()) if "rl" in tables else resolve(experiment)
    except ZsimError:
        return True
    except Exception:
        return False  # `check` reports it
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    broken, simulated = broken_laws(given.seed, given.jobs, lambda law: print(law.text(), flush=True))
    counts = dict(Counter(one.law for one in broken))
    print(f"{given.jobs} jobs drawn, {simulated} not refused; laws broken: {counts or 'none'}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
