"""Random jobs, each held to laws that every job keeps, whatever its settings.

    python -m validation.random_jobs --jobs 2000 --seed 7

A job that breaks a law, or ends in anything but an answer or a refusal, is printed as an experiment file. The
tests run some hundred (`tests/validation/test_random_jobs.py`), with seeds that stay; hours of it belong to a
change of plans, memory or folding.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zsim.api import Result, simulate
from zsim.errors import ZsimError
from zsim.specs.experiment.load import build_experiment, load_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.export import export_files
from zsim.specs.formats.toml import experiment_text
from zsim.specs.presets import model_preset_path

Tables = dict[str, Any]

_CLUSTERS = (
    "dgx-h100", "dgx-a100-80gb", "dgx-1", "hgx-b200", "gb200-nvl72", "l40s-x8", "aws-g5", "mi300x-x8",
    "rtx-4090-x8", "dgx-superpod-a100", "azure-ndv4",
)  # fmt: skip
_MODELS = (
    "gpt2", "bert-base", "llama-3.2-1b", "qwen3-8b", "gemma3-1b", "mixtral-8x7b", "deepseek-v2-lite",
    "qwen3-30b-a3b", "gpt-oss-20b", "exaone-4.0-1.2b",
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
    """The tables of an experiment file; many contradict themselves, as people's do."""
    kind = random.choice(("fsdp2", "fsdp2", "fsdp1", "ddp", "deepspeed", "deepspeed", "megatron", "megatron"))
    tables: Tables = {
        "model": _model(random),
        "cluster": random.choice(_CLUSTERS),
        "training": _training(random),
        "strategy": {"kind": kind, **_STRATEGIES[kind](random)},
    }
    if random.random() < 0.7:
        tables["gpus"] = random.choice((1, 2, 4, 8, 8, 16, 16, 24))
    else:
        tables["nodes"] = random.choice((1, 2, 3, 4, 8))
    if kind in ("megatron", "fsdp2", "deepspeed") and random.random() < 0.5:
        tables["parallelism"] = _parallelism(random)
    if random.random() < 0.1:
        tables["faults"] = {"slow_gpus": {"0": random.choice((1.1, 2.0))}}
    return tables


def _model(random: random.Random) -> Tables:
    """A preset with few layers, which behave as many do."""
    config: Tables = json.loads(model_preset_path(random.choice(_MODELS)).read_text(encoding="utf-8"))
    config["num_hidden_layers" if "num_hidden_layers" in config else "n_layer"] = random.choice((2, 4, 8))
    for of_layers in ("layer_types", "_source"):
        config.pop(of_layers, None)
    return config


def _some(random: random.Random, choices: dict[str, tuple[Any, ...]], probability: float) -> Tables:
    """Some of the keys, each with one of its values."""
    return {key: random.choice(values) for key, values in choices.items() if random.random() < probability}


def _training(random: random.Random) -> Tables:
    choices: dict[str, tuple[Any, ...]] = {
        "sequence_length": (1, 17, 128, 512, 1000, 2048),
        "micro_batch_size": (1, 2, 3, 8),
        "gradient_accumulation_steps": (1, 2, 4, 5),
        "activation_checkpointing": ("none", "full", "selective"),
        "precision": ("bf16", "bf16", "fp16", "fp32", "fp8"),
        "attention": ("flash", "math"),
        "compile": (True, False),
        "optimizer": ("adamw", "sgd", "adamw-8bit", "adafactor"),
        "gradient_clipping": (1.0,),
    }
    training = _some(random, choices, 0.4)
    if random.random() < 0.2:
        lora: Tables = {"rank": random.choice((1, 8, 64))}
        if random.random() < 0.4:
            lora["quantized"] = "nf4"
        training["lora"] = lora
    if random.random() < 0.15:
        training["lengths"] = {
            **random.choice(_LENGTHS),
            "batching": random.choice(("padded", "packed")),
        }
    return training


_LENGTHS: tuple[Tables, ...] = (
    {"law": "exponential", "mean": 400},
    {"law": "exponential", "mean": 3},
    {"law": "constant", "mean": 40},
    {"law": "uniform", "low": 1, "high": 900},
)


def _parallelism(random: random.Random) -> Tables:
    choices: dict[str, tuple[Any, ...]] = {
        "tensor": (2, 4),
        "pipeline": (2, 4),
        "context": (2,),
        "expert": (2, 4, 8),
        "sequence_parallel": (True,),
    }
    found = _some(random, choices, 0.35)
    if "pipeline" in found:
        schedules = {"virtual_stages": (2,), "schedule": ("1f1b", "interleaved-1f1b", "zbv-zero-bubble")}
        found |= _some(random, schedules, 0.3)
    return found


def _fsdp2(random: random.Random) -> Tables:
    choices: dict[str, tuple[Any, ...]] = {
        "reshard_after_forward": (True, False, 2, 4),
        "replicate": (2, 4),
        "cpu_offload": (True,),
        "reduce_dtype": ("fp32", "bf16"),
    }
    return _some(random, choices, 0.3)


def _fsdp1(random: random.Random) -> Tables:
    choices: dict[str, tuple[Any, ...]] = {
        "sharding_strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"),
        "backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "none"),
        "limit_all_gathers": (True, False),
        "cpu_offload": (True,),
    }
    return _some(random, choices, 0.3)


def _deepspeed(random: random.Random) -> Tables:
    zero: Tables = {"stage": random.choice((0, 1, 2, 3, 3))}
    choices: dict[str, tuple[Any, ...]] = {
        "overlap_comm": (True, False),
        "reduce_bucket_size": (1e6, 5e8),
        "stage3_prefetch_bucket_size": (0, 1e7),
        "zero_hpz_partition_size": (2, 8),
        "mics_shard_size": (2, 4),
        "offload_optimizer": ({"device": "cpu"}, {"device": "nvme", "nvme_path": "/n"}),
        "offload_param": ({"device": "cpu"},),
    }
    zero |= _some(random, choices, 0.2)
    return {"config": {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": zero}}


def _megatron(random: random.Random) -> Tables:
    choices: dict[str, tuple[Any, ...]] = {
        "distributed_optimizer": (True,),
        "overlap_grad_reduce": (True,),
        "overlap_param_gather": (True,),
        "gradient_accumulation_fusion": (False,),
        "mtp_layers": (1,),
    }
    return _some(random, choices, 0.3)


_STRATEGIES: dict[str, Callable[[random.Random], Tables]] = {
    "fsdp2": _fsdp2,
    "fsdp1": _fsdp1,
    "ddp": lambda random: {},
    "deepspeed": _deepspeed,
    "megatron": _megatron,
}


# -- laws ------------------------------------------------------------------------------------------------


def check(tables: Tables) -> Iterator[Broken]:
    """The laws that a job breaks; none for one that is refused."""
    try:
        experiment = build_experiment(tables, {}, origin="random job")
        result = simulate(experiment)
    except ZsimError as error:
        if not str(error).strip():
            yield Broken("a refusal says why", repr(error), tables)
        return
    except Exception:
        yield Broken("an answer or a refusal", traceback.format_exc(limit=-3), tables)
        return
    content = result.report.to_dict()
    for law, check_law in LAWS.items():
        try:
            for said in check_law(experiment, result, content):
                yield Broken(law, said, tables)
        except Exception:
            yield Broken(law, traceback.format_exc(limit=-3), tables)


def _no_negative_number(experiment: Experiment, result: Result, content: Tables) -> Iterator[str]:
    for path, number in _numbers(content):
        if not math.isfinite(number):
            yield f"{path} is {number}"
        elif number < 0 and not path.endswith(_SIGNED):
            yield f"{path} is {number:.6g}"


_SIGNED = ("rank", "relative_error", "change")


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
    with tempfile.TemporaryDirectory() as folder:
        for name, text in export_files(resolve(experiment)).files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        again = simulate(load_experiment(Path(folder) / "experiment.toml")).report.to_dict()
    for key in ("step_seconds", "peak_bytes", "model", "collectives"):
        if again[key] != content[key]:
            yield f"{key}: {_short(content[key])}, exported and read back {_short(again[key])}"


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


def broken_laws(seed: int, jobs: int) -> tuple[list[Broken], int]:
    """What `jobs` jobs drawn with `seed` break, and how many of them were simulated."""
    source = random.Random(seed)
    broken: list[Broken] = []
    refused = 0
    for _ in range(jobs):
        tables = draw(source)
        before = len(broken)
        broken += check(tables)
        if len(broken) == before and _is_refused(tables):
            refused += 1
    return broken, jobs - refused


def _is_refused(tables: Tables) -> bool:
    try:
        resolve(build_experiment(tables, {}, origin="random job"))
    except ZsimError:
        return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    broken, simulated = broken_laws(given.seed, given.jobs)
    for one in broken:
        print(one.text())
    counts = dict(Counter(one.law for one in broken))
    print(f"{given.jobs} jobs drawn, {simulated} not refused; laws broken: {counts or 'none'}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
