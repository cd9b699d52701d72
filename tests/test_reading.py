"""What people give is read within limits: hostile files are one paragraph each, whoever reads them."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from validation.published.table import read_runs
from zsim.calibrate.readers import read_measurements
from zsim.errors import InputError, ZsimError
from zsim.reading import parse_json, parse_toml, parse_whole_number, read_bytes, read_text
from zsim.specs.cluster.files import load_cluster, load_gpu
from zsim.specs.experiment.load import build_experiment, load_experiment, parse_setting
from zsim.specs.formats.topology.read import import_topology
from zsim.specs.model.huggingface import load_model
from zsim.study.check.baseline import read_baseline
from zsim.study.check.targets import find_targets
from zsim.study.topologies.bench import compare_curves
from zsim.trace.readers.read import read_trace

DIGITS = "9" * 5000
DEEP_JSON = ['{"a":' * 900 + "1" + "}" * 900, "[" * 100_000, '{"a":' * 100 + "1" + "}" * 100]
DEEP_TOML = ["[" * 100_000, "{a=" * 300 + "1" + "}" * 300, "{a." + "a." * 300 + "a=1}"]


def trained(path: Path) -> object:
    data = {"model": "gpt2", "cluster": "dgx-h100"}
    return build_experiment(data, {"strategy.config": str(path)}, origin="test")


EXPERIMENT = """model = "gpt2"
cluster = "dgx-h100"
nodes = 1
[training]
sequence_length = 1024
[strategy]
kind = "deepspeed"
stage = 3
"""
DEEPSPEED = """{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true},
"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "cpu"}},
"optimizer": {"params": {"lr": "auto"}}}"""
MODEL = """{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
"vocab_size": 50257}"""
CLUSTER = """extends = "dgx-h100"
[nic]
bandwidth = "100 Gb/s"
source = "a test of the reader"
evidence = "assumed"
"""
GPU = """extends = "h100-sxm-80gb"
[memory]
capacity = "64 GB"
source = "a test of the reader"
evidence = "assumed"
"""
ACCELERATE = """distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
TORCHTITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
"""
ARGUMENTS = (
    '{"per_device_train_batch_size": 2, "bf16": true, "fsdp": "full_shard", "fsdp_config": {"version": 1}}'
)
SLURM = "SwitchName=s0 Nodes=tux[0-2]\nSwitchName=top Switches=s[0-1] LinkSpeed=100\n"
NCCL = """<system version="1"><cpu numaid="0"><pci busid="1" class="0x060400" link_speed="32.0 GT/s PCIe">
<pci busid="2" class="0x030200" link_width="16"><gpu dev="0" sm="90"><nvlink target="f" count="18"/></gpu>
</pci></pci></cpu></system>"""
SMI = "\tGPU0\tGPU1\tNIC0\nGPU0\t X \tNV12\tPXB\nGPU1\tNV12\t X \tSYS\nNIC0\tPXB\tSYS\t X\n"
ASTRA = (
    "topology: [ Switch, Switch ]\nnpus_count: [ 8, 4 ]\nbandwidth: [ 400.0, 50.0 ]\nlatency: [ 500, 2000 ]\n"
)
NCCL_TESTS = """#  Rank  0 Group  0 Pid  1 on  a device  0
#  Rank  1 Group  0 Pid  2 on  b device  0
# Collective test starting: all_gather_perf
#  size count type redop root time algbw busbw #wrong time algbw busbw #wrong
 1048576 131072 float none -1 50.00 20.97 10.49 0 51.00 20.56 10.28 0
"""
FIO = """{"fio version": "3", "global options": {"bs": "1M"}, "jobs": [{"job options": {"iodepth": "32"},
"read": {"bw_bytes": 6.5e9}, "write": {"bw_bytes": 0}}]}"""
KINETO = """{"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2},
"traceEvents": [{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 90, "tid": 5},
{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1, "dur": 2, "args": {"correlation": 1}},
{"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather", "ts": 9, "dur": 40, "args": {"correlation": 1,
"stream": 20, "Collective name": "_allgather_base", "In msg nelems": 10, "Group size": 2,
"dtype": "Float"}}]}"""
SPANS = """{"rank": 0, "world_size": 2}
{"kind": "phase", "op": "forward", "step": 1, "issue_ns": 10, "done_ns": 90}
{"kind": "coll", "op": "all_gather", "step": 1, "issue_ns": 20, "done_ns": 40, "bytes": 8, "unit": "a"}
"""
CALL = """{"record_id": 0, "profiling_name": "nccl:_all_gather_base", "process_group": ["0", "default_pg"],
"input_sizes": [[10]], "output_sizes": [[20]], "input_dtypes": ["Float"], "time_created_ns": 5}"""
FLIGHT = f"""{{"version": "2.10", "entries": [{CALL}, {CALL}, {CALL}, {CALL}],
"pg_config": {{"0": {{"name": "0", "ranks": "[0, 1]"}}}}}}"""
CURVES = """curve,cluster,nodes,gpus,collective,size_bytes,bus_gigabytes_per_second,harness_seconds,ids,how,\
source
one,dgx-a100-80gb,1,8,all_reduce,32768,1.308,3e-05,a,b,c
"""
BASELINE = '{"format": 1, "tolerances": {"step": 0.02}, "cases": {"a": {"step": 1.5}}, "known": []}'
Reader = Callable[[Path], object]
READERS: dict[str, tuple[str, str, Reader]] = {
    "experiment": ("e.toml", EXPERIMENT, load_experiment),
    "DeepSpeed": ("ds.json", DEEPSPEED, trained),
    "config.json": ("config.json", MODEL, load_model),
    "cluster": ("c.toml", CLUSTER, load_cluster),
    "GPU": ("g.toml", GPU, load_gpu),
    "Accelerate": ("a.yaml", ACCELERATE, trained),
    "torchtitan": ("t.toml", TORCHTITAN, trained),
    "TrainingArguments": ("t.json", ARGUMENTS, trained),
    "Slurm": ("topology.conf", SLURM, import_topology),
    "NCCL": ("topo.xml", NCCL, import_topology),
    "nvidia-smi": ("topo.txt", SMI, import_topology),
    "ASTRA-sim": ("network.yml", ASTRA, import_topology),
    "nccl-tests": ("log.txt", NCCL_TESTS, read_measurements),
    "fio": ("fio.json", FIO, read_measurements),
    "Kineto": ("rank0.json", KINETO, read_trace),
    "span log": ("rank0.jsonl", SPANS, read_trace),
    "Flight Recorder": ("fr_0.json", FLIGHT, read_trace),
    "curves": ("curves.csv", CURVES, compare_curves),
    "baseline": ("baseline.json", BASELINE, read_baseline),
}
IN_JSON = ("DeepSpeed", "config.json", "TrainingArguments", "fio", "Kineto", "Flight Recorder", "baseline")
IN_TOML = ("experiment", "cluster", "GPU", "torchtitan")


def refused(folder: Path, kind: str, text: str) -> str:
    name, _, read = READERS[kind]
    (folder / name).write_text(text)
    with pytest.raises(InputError) as error:
        read(folder / name)
    assert name in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", READERS)
def test_the_files_that_are_damaged_below_are_read_when_whole(tmp_path: Path, kind: str) -> None:
    name, text, read = READERS[kind]
    (tmp_path / name).write_text(text)
    assert read(tmp_path / name) is not None


@pytest.mark.parametrize("kind", [*IN_JSON, *IN_TOML])
def test_a_number_of_5000_digits_is_refused_in_words(tmp_path: Path, kind: str) -> None:
    _, text, _ = READERS[kind]
    value = re.search(r"(?<=[:=] )[^ ,}\[{\n]+", text)  # the first
    assert value is not None
    message = refused(tmp_path, kind, text[: value.start()] + DIGITS + text[value.end() :])
    assert "digits" in message
    assert DIGITS not in message


@pytest.mark.parametrize("kind", [*IN_JSON, *IN_TOML])
@pytest.mark.parametrize("which", range(3))
def test_deep_nesting_is_refused_in_words(tmp_path: Path, kind: str, which: int) -> None:
    if kind in ("Kineto", "Flight Recorder"):
        return  # read piece by piece: tests/trace/test_content.py
    text = f'{{"a": {DEEP_JSON[which]}}}' if kind in IN_JSON else f"a = {DEEP_TOML[which]}\n"
    assert "is nested more than 64 levels deep" in refused(tmp_path, kind, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"a.b={DIGITS}", "--set a.b: has a number of more than 4,000 digits"),
        ("a.b=" + "[" * 100_000, "--set a.b: is nested more than 64 levels deep"),
        ("a." * 3000 + "b=1", "found 3,001 parts, expected a few"),
    ],
)
def test_a_hostile_setting_is_refused_in_words(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        parse_setting(text)


def test_a_file_is_read_up_to_its_limit_and_so_is_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(b"x" * 11)
    assert read_bytes(path, max_bytes=11) == b"x" * 11
    with pytest.raises(InputError, match="is of 11 bytes; expected at most 10"):
        read_bytes(path, max_bytes=10)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(b"a\r\nb"))
    writer.start()
    assert read_text(pipe) == "a\nb"
    writer.join()


def test_what_is_deep_or_long_but_within_reason_is_read() -> None:
    """64 levels, as many as are allowed; and the 10^30 that tokenizers have for no limit."""
    assert parse_json('{"n": 1000000000000000019884624838656}', "x") == {"n": 1000000000000000019884624838656}
    deep = "[" * 63 + "1" + "]" * 63
    assert json.dumps(parse_json(deep, "x")) == deep
    with pytest.raises(InputError, match="nested"):
        parse_json(f"[{deep}]", "x")
    assert parse_toml("a = 0xffff_ffff\nb = [1.5]", "x") == {"a": 2**32 - 1, "b": [1.5]}


@pytest.mark.parametrize(
    ("text", "number"), [("12", 12), ("0", 0), ("", None), ("-1", None), ("\N{SUPERSCRIPT TWO}", None)]
)
def test_whole_numbers_are_plain_digits_and_not_without_end(text: str, number: int | None) -> None:
    assert parse_whole_number(text) == number
    assert parse_whole_number(DIGITS) is None


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ("tux[1e-320]", "is not a host list"),
        ("s[]", "is not a host list"),
        ("a[[0-1]", "is not a host list"),
        (f"tux[{DIGITS}]", "is not a host list"),
        ("tux[0-9][0-9][0-9][0-9][0-9][0-9][0-9]", "more than 20,000 nodes"),
        ("tux[0-99999999]", "more than 20,000 nodes"),
    ],
)
def test_host_lists_that_expand_without_end_are_refused(tmp_path: Path, ranges: str, message: str) -> None:
    assert message in refused(tmp_path, "Slurm", f"SwitchName=s0 Nodes={ranges}\n")


def test_ten_thousand_gpus_under_one_switch_are_counted_once(tmp_path: Path) -> None:
    """Each with the others is 10^8; a count for each of them over all of them is seconds, not minutes."""
    gpu = '<pci class="0x030200"><gpu dev="0" sm="90"/></pci>'
    path = tmp_path / "topo.xml"
    path.write_text(f'<system version="1"><cpu><pci class="0x060400">{gpu * 9000}</pci></cpu></system>')
    assert "gpus_per_switch = 9000" in import_topology(path).toml


@pytest.mark.parametrize(
    ("number", "other"), [("32768", "-1"), ("32768", "0"), ("1.308", "nan"), (",8,", ",0,"), (",1,", ",3,")]
)
def test_a_curve_with_numbers_that_cannot_be_is_refused_by_its_line(
    tmp_path: Path, number: str, other: str
) -> None:
    message = refused(tmp_path, "curves", CURVES.replace(number, other))
    assert "line 2: expected numbers in" in message


def test_a_log_with_one_endless_word_is_read_through_once(tmp_path: Path) -> None:
    """A search that begins anew at each of a million letters would take hours."""
    path = tmp_path / "log.txt"
    path.write_text("# nThread 1\n 8 2 float sum -1 10.0 0.1 busbw\n" + "A" * 1_000_000)
    with pytest.raises(InputError):
        read_measurements(path)


@pytest.mark.parametrize(
    "command",
    [
        "--module llama3 --config 'llama3_8b",
        f"torchrun --nproc_per_node={DIGITS} -m torchtitan.train --module llama3",
    ],
)
def test_a_command_line_that_cannot_be_read_is_refused(command: str) -> None:
    data = {"model": "llama-3-8b", "cluster": "dgx-h100", "gpus": 8}
    with pytest.raises(InputError):
        build_experiment(data, {"strategy.config": command}, origin="test")


# -- what a fuzzer does: small damage anywhere, often with something that other readers stumble over ------

HOSTILE = [
    "", "0", "-1", "1e309", "nan", "inf", "9" * 20, "9" * 400, DIGITS, "true", "null", '""', "[]", "{}", "[[",
    "{", "a.b", "\x00", "\N{SUPERSCRIPT TWO}", "\n", '"', "'", "A" * 5000, "1979-05-27", "[0-99999999]",
    "{a=" * 99, "[" * 2000, "0x7fffffffffffffff",
]  # fmt: skip
TOKEN = re.compile(r'"[^"\n]*"|[A-Za-z_]\w*|-?[0-9][0-9._eE+-]*|[^\s]')


@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=st.lists(st.tuples(st.integers(0, 400), st.sampled_from(HOSTILE)), min_size=1, max_size=3))
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    tmp_path: Path, kind: str, damage: list[tuple[int, str]]
) -> None:
    name, text, read = READERS[kind]
    for place, what in damage:
        tokens = list(TOKEN.finditer(text))
        if tokens:
            token = tokens[place % len(tokens)]
            text = text[: token.start()] + what + text[token.end() :]
    (tmp_path / name).write_text(text)
    with suppress(ZsimError, OverflowError):  # the second of sizes: the command line says they are too large
        read(tmp_path / name)


def test_a_table_of_runs_and_a_folder_hold_what_they_hold(tmp_path: Path) -> None:
    """A cell of a megabyte, and a summary that is nested without end."""
    (tmp_path / "runs.csv").write_text("row_id,n_layers,n_gpus\n" + "x" * 2**20 + ",1,8\n")
    with pytest.raises(InputError, match=r"runs\.csv"):
        read_runs([tmp_path / "runs.csv"])
    (tmp_path / "case").mkdir()
    (tmp_path / "case" / "summary.json").write_text('{"a":' * 900 + "1" + "}" * 900)
    with pytest.raises(InputError, match="nested"):
        find_targets([tmp_path / "case"], tmp_path)
