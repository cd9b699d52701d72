"""Other people's files of measurements, each as its tool writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zsim
from tests.expect import about
from zsim.calibrate.hardware_file import calibrate
from zsim.calibrate.measurements import Measurement, Measurements, merge_measurements
from zsim.calibrate.readers import read_measurements
from zsim.errors import InputError
from zsim.specs.cluster.files import load_cluster
from zsim.trace.chrome import write_chrome_traces

NCCL_TESTS = """\
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 5 iters: 20
# Using devices
#  Rank  0 Group  0 Pid  1 on  node-a device  0 [0x0f] NVIDIA H100
#  Rank  1 Group  0 Pid  2 on  node-b device  0 [0x0f] NVIDIA H100
#
# Collective test starting: all_gather_perf
#       size         count   type redop root    time  algbw  busbw #wrong   time  algbw  busbw #wrong
     1048576        131072    float  none  -1   50.00  20.97  10.49  0   51.00  20.56  10.28  0
     4194304        524288    float  none  -1  150.00  27.96  13.98  0  151.00  27.78  13.89  0
# Out of bounds values : 0 OK
"""
COMMS_LOGGER = """\
rank=0 comm op: all_gather_into_tensor | time (ms): 2.00 | msg size: 1.0 MB | algbw (Gbps): 8.4
rank=0 comm op: reduce_scatter_tensor | time (ms): 4.00 | msg size: 8.0 MB | algbw (Gbps): 8.4
rank=0 comm op: barrier | time (ms): 0.10 | msg size: 0 B | algbw (Gbps): 0 | busbw (Gbps): 0
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_nccl_tests_says_its_collective_its_ranks_and_its_nodes(tmp_path: Path) -> None:
    found = read_measurements(write(tmp_path, "log.txt", NCCL_TESTS))
    assert [(row["kind"], row.bytes, row.seconds, row["ranks"], row["nodes"]) for row in found.rows] == [
        ("all_gather", 1048576.0, about(50e-6), 2, 2),
        ("all_gather", 4194304.0, about(150e-6), 2, 2),
    ]


def test_a_log_that_does_not_name_its_collective_is_known_by_its_files_name(tmp_path: Path) -> None:
    text = NCCL_TESTS.replace("# Collective test starting: all_gather_perf\n", "")
    assert read_measurements(write(tmp_path, "reduce_scatter.txt", text)).rows[0]["kind"] == "reduce_scatter"
    with pytest.raises(InputError, match="which collective"):
        read_measurements(write(tmp_path, "log.txt", text))


def test_comms_logger_gives_the_shard_of_an_all_gather(tmp_path: Path) -> None:
    """1.0 MB is 2^20 bytes from each of 8 ranks; the barrier is left out aloud."""
    found = read_measurements(write(tmp_path, "ds.log", COMMS_LOGGER), ranks=8)
    assert [(row["kind"], row.bytes, row.seconds) for row in found.rows] == [
        ("all_gather", 8 * 2.0**20, about(2e-3)),
        ("reduce_scatter", 8 * 2.0**20, about(4e-3)),
    ]
    assert found.notes == ("ds.log: 1 lines of other operations or empty times left out",)
    with pytest.raises(InputError, match="--ranks"):
        read_measurements(tmp_path / "ds.log")


def test_fio_gives_rates_by_block_and_depth(tmp_path: Path) -> None:
    data = {
        "fio version": "fio-3.36",
        "global options": {"bs": "1M"},
        "jobs": [
            {
                "job options": {"iodepth": "32", "numjobs": "2"},
                "read": {"bw_bytes": 6.5e9},
                "write": {"bw_bytes": 0},
            },
            {
                "job options": {"bs": "128k", "iodepth": "8"},
                "read": {"bw_bytes": 0},
                "write": {"bw_bytes": 3e9},
            },
        ],
    }
    rows = read_measurements(write(tmp_path, "fio.json", json.dumps(data))).rows
    assert [(row["op"], row["block_bytes"], row["depth"], row.rate_bytes_per_second) for row in rows] == [
        ("read", 2**20, 64, 6.5e9),
        ("write", 128 * 2**10, 8, 3e9),
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"jobs": "none"}, r"fio\.json: jobs: found 'none', expected a list of jobs"),
        ({"jobs": 3.7}, r"jobs: found 3\.7, expected a list of jobs"),
        ({"jobs": ["one"]}, "job 0: found 'one', expected a table"),
        ({"global options": "x"}, "global options: found 'x', expected a table"),
        ({"jobs": [{"read": 5}]}, "job 0: read: found 5, expected a table"),
        ({"jobs": [{"read": {"bw_bytes": "a"}}]}, "job 0: read: bw_bytes: found 'a', expected a number"),
        ({"global options": {"iodepth": "x"}}, "job 0: options: iodepth: found 'x', expected a whole number"),
        (
            {"global options": {"numjobs": []}},
            r"job 0: options: numjobs: found \[\], expected a whole number",
        ),
        ({"global options": {"bs": "big"}}, "job 0: options: bs: found 'big', expected a block size"),
    ],
)
def test_fio_of_another_shape_is_refused_where_it_differs(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    data = {"fio version": "fio-3.36", "jobs": [{"read": {"bw_bytes": 6.5e9}}], **changes}
    with pytest.raises(InputError, match=reason):
        read_measurements(write(tmp_path, "fio.json", json.dumps(data)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("log.txt", NCCL_TESTS.replace("  50.00", "  fifty")),
        ("ds.log", COMMS_LOGGER.replace("2.00", "2.0.0")),
        ("ds.log", COMMS_LOGGER.replace("8.0 MB", f"{'9' * 400} MB")),
        ("t.txt", "E2E Read Speed = 3.0.1 GB/sec\n"),
    ],
)
def test_a_log_with_something_else_in_a_numbers_place_is_refused(
    tmp_path: Path, name: str, text: str
) -> None:
    with pytest.raises(InputError, match=rf"{name}: found '.*', expected a number below 1e\+24"):
        read_measurements(write(tmp_path, name, text), ranks=8)


def test_ds_nvme_tune_is_a_folder_of_logs_named_by_their_settings(tmp_path: Path) -> None:
    """Speeds are in GiB (DeepSpeed 0.19.8, nvme/test_ds_aio_utils.py: BYTES_PER_GB = 1024**3)."""
    text = "Task Read Speed = 3.1 GB/sec\nE2E Read Speed = 3.0 GB/sec\n"
    write(tmp_path, "read/read_single_overlap_t2_p1_d16_bs1M.txt", text)
    (row,) = read_measurements(tmp_path).rows
    assert (row["op"], row["block_bytes"], row["depth"]) == ("read", 2**20, 32)
    assert row.rate_bytes_per_second == 3.0 * 2**30


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.txt", "", "empty"),
        ("a.json", '{"measurements": [', "cut short"),
        ("a.json", "{}", "neither 'measurements'"),
        ("a.json", '{"format": 2, "measurements": []}', "format 2, expected 1"),
        ("a.json", '{"format": 1, "measurements": 3}', "measurements: found 3, expected a list of rows"),
        ("a.json", '{"format": 1, "measurements": [{}]}', "measurement 0: 'family' is missing"),
        ("a.json", '{"format": 1, "measurements": [{"family": "gemm"}]}', "0: 'parameters' is missing"),
        ("a.txt", "hello\n", "not a file of measurements"),
        ("a.json", '{"fio version": "fio-3.36", "jobs": []}', "no job of fio"),
    ],
)
def test_what_is_no_measurement_is_one_clear_error(tmp_path: Path, name: str, text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        read_measurements(write(tmp_path, name, text))


def row(family: str = "gemm", **changes: object) -> dict[str, object]:
    """A row of validation.microbench; "parameters_m" replaces one entry of a table, None takes it away."""
    made: dict[str, dict[str, object]] = {
        "parameters": {"m": 128, "n": 128, "k": 128, "dtype": "fp32", "kind": "fused", "place": "cpu",
                       "numel": 1024, "threads": 1},
        "work": {"flops": 4194304.0, "bytes": 196608.0},
        "seconds": {"median": 5e-5, "p10": 4e-5, "p90": 6e-5},
    }  # fmt: skip
    for name, value in changes.items():
        table, _, key = name.partition("_")
        made[table] = {**made[table], key: value}
        if value is None:
            del made[table][key]
    return {"family": family, "threads": 1, **made}


def test_a_row_of_the_microbenchmarks_is_a_measurement(tmp_path: Path) -> None:
    text = json.dumps({"format": 1, "measurements": [row()]})
    (found,) = read_measurements(write(tmp_path, "m.json", text)).rows
    assert (found.family, found["m"], found.seconds, found.flops) == ("gemm", 128, 5e-5, 4194304.0)
    assert found.relative_deviation == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (row(parameters_m=0), "measurement 1: parameters: m: found 0, expected a number above 0"),
        (row(parameters_k=1e-320), "parameters: k: found 1e-320, expected a number above 0"),
        (row(parameters_n=1e308), r"parameters: n: found 1e\+308, expected a number above 0, below 1e\+24"),
        (row(parameters_n=10**400), "parameters: n: found 1000000.*, expected a number above 0"),
        (row(parameters_n="128"), "parameters: n: found '128', expected a number above 0"),
        (row(parameters_k=None), "parameters: 'k' is missing"),
        (row(parameters_dtype="bf61"), "dtype: found 'bf61', expected one of .*did you mean 'bf16'"),
        (row("gem"), "measurement 1: unknown family 'gem', expected gemm, .*; did you mean 'gemm'"),
        (row("adamw", parameters_kind="fusd"), "kind: found 'fusd', expected one of .*did you mean 'fused'"),
        (row(seconds_median="fast"), "seconds: median: found 'fast', expected a number above 0"),
        (row(seconds_median=float("nan")), "median: found nan, expected a number above 0"),
        (row(seconds_p90=[]), "p90: found \\[\\], expected a number, 0 or more"),
        (row(work_flops=None), "work: 'flops' is missing"),
        ({**row(), "seconds": 3}, "seconds: found 3, expected a table"),
        ("gemm", "measurement 1: found 'gemm', expected a table"),
    ],
)
def test_a_row_that_says_too_little_is_named(tmp_path: Path, bad: object, reason: str) -> None:
    text = json.dumps({"format": 1, "measurements": [row(), bad]})
    with pytest.raises(InputError, match=reason):
        read_measurements(write(tmp_path, "m.json", text))


def test_a_missing_file_and_an_empty_set_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_measurements(tmp_path / "gone.json")
    empty = write(tmp_path, "m.json", '{"format": 1, "measurements": []}')
    with pytest.raises(InputError, match=r"no measurement in m\.json"):
        merge_measurements([read_measurements(empty)])


OLD_NCCL_TESTS = """\
#  Rank  0 Pid  1 on  node-a device  0 [0x0f] NVIDIA A100
#  Rank  1 Pid  2 on  node-a device  1 [0x0f] NVIDIA A100
#  Rank  2 Pid  3 on  node-a device  2 [0x0f] NVIDIA A100
#  Rank  3 Pid  4 on  node-a device  3 [0x0f] NVIDIA A100
#                                                     out-of-place                       in-place
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     8388608       2097152   float     sum    100.0   83.89  125.83  5e-07    101.6   59.24  103.67  5e-07
    16777216       4194304   float     sum    200.0   83.89  125.83  5e-07    222.3   75.47  132.07  5e-07
"""


def test_the_header_says_in_which_column_the_time_is(tmp_path: Path) -> None:
    """Before 2.11 there is no `root`, so the sixth column is a bandwidth in GB/s and not a time."""
    found = read_measurements(write(tmp_path, "all_reduce_perf.txt", OLD_NCCL_TESTS))
    assert [(row.bytes, row.seconds) for row in found.rows] == [
        (8388608.0, about(100e-6)),
        (16777216.0, about(200e-6)),
    ]


def test_without_a_header_no_column_is_guessed(tmp_path: Path) -> None:
    text = "\n".join(line for line in OLD_NCCL_TESTS.splitlines() if "redop" not in line)
    with pytest.raises(InputError, match="no header of nccl-tests"):
        read_measurements(write(tmp_path, "all_reduce_perf.txt", f"# busbw\n{text}"))


@pytest.mark.parametrize("tag", ["[1,0]<stdout>:", "[1,0]<stdout>: ", "0: ", "[0] "])
def test_tags_of_launchers_before_every_line_are_left_out(tmp_path: Path, tag: str) -> None:
    text = "".join(f"{tag}{line}\n" for line in NCCL_TESTS.splitlines())
    plain = read_measurements(write(tmp_path, "log.txt", NCCL_TESTS))
    assert read_measurements(write(tmp_path, "log.txt", text)).rows == plain.rows


@pytest.mark.parametrize(
    ("bandwidth", "kind"), [("125.83", "all_reduce"), ("62.92", "reduce_scatter"), ("83.89", None)]
)
def test_a_collective_without_a_name_is_known_by_its_bus_bandwidth(
    tmp_path: Path, bandwidth: str, kind: str | None
) -> None:
    """83.89 GB/s x 2 x 3 / 4 = 125.83 of an all-reduce on 4 ranks, half of it of a reduce-scatter."""
    path = write(tmp_path, "log.txt", OLD_NCCL_TESTS.replace("125.83", bandwidth))
    if kind is None:
        with pytest.raises(InputError, match="which collective"):
            read_measurements(path)
    else:
        assert {row["kind"] for row in read_measurements(path).rows} == {kind}


def test_milliseconds_of_a_header_are_milliseconds(tmp_path: Path) -> None:
    text = OLD_NCCL_TESTS.replace("(us)", "(ms)")
    assert read_measurements(write(tmp_path, "all_reduce.txt", text)).rows[0].seconds == about(0.1)


def test_log_summary_gives_the_average_of_every_size(tmp_path: Path) -> None:
    """2.0 MB is 2^21 bytes from each of 16 ranks. The table of stragglers repeats the ops and is left out."""
    head = (
        f"{'Comm. Op': <20}{'Message Size': <20}{'Count': <20}{'Total Latency(ms)': <20}{'Avg Latency(ms)'}"
    )
    text = (
        f"[INFO] [utils.py:135:log_summary]\n{head}\nall_gather_into_tensor\n                    2.0 "
        "MB              24                  6.05                0.25   397  372\n                    128.0 "
        "MB            96                  480.0               5.00   1700 "
        "1490\nreduce_scatter_tensor\n                    256.0 MB            12                  "
        "96.0                8.00   2100 1840\nbarrier\n                    0B                  "
        "12                  96.0                8.00      0 0\nBreakdown with straggler "
        "effect\nall_gather_into_tensor\n                    2.0 MB              24                  "
        "6.05                9.25   397  372\n"
    )
    path = write(tmp_path, "ds.log", text)
    found = read_measurements(path, ranks=16)
    assert [(row["kind"], row.bytes, row.seconds) for row in found.rows] == [
        ("all_gather", 16 * 2.0**21, about(0.25e-3)),
        ("all_gather", 16 * 2.0**27, about(5e-3)),
        ("reduce_scatter", 2.0**28, about(8e-3)),
    ]
    with pytest.raises(InputError, match="log_summary does not say how many ranks"):
        read_measurements(path)


def test_ds_bench_says_its_collective_and_its_ranks(tmp_path: Path) -> None:
    """One table per collective. A rank's input of an all-gather is a fourth of its full tensor."""
    text = (
        "---- Performance of all_reduce on 8 devices -----------\n\nSize (Bytes)         "
        "Description               Duration        Throughput (Gbps)    BusBW (Gbps)\n--------------\n1.0 "
        "MB               1024x1024x1               102.1 us        164.3                143.8\n256.0 "
        "MB             16384x8192x2              2.3 ms          1867.5               1634.1\n---- "
        "Performance of all_gather on 4 devices -----------\n4194304              1048576x4                 "
        "172.352         48.671               36.504\n"
    )
    found = read_measurements(write(tmp_path, "bench.log", text))
    assert [(row["kind"], row["ranks"], row.bytes, row.seconds) for row in found.rows] == [
        ("all_reduce", 8, 2.0**20, about(102.1e-6)),
        ("all_reduce", 8, 2.0**28, about(2.3e-3)),
        ("all_gather", 4, 4 * 2.0**22, about(172.352e-6)),
    ]


# -- What a recorded trace says of the machine it ran on ---------------------------------------------------


GLOO = Path(__file__).resolve().parents[2] / "traces" / "gloo"


def recorded(folder: Path, model: str) -> Path:
    """All ranks of a node whose NVLinks reach half of their rate, also beside kernels."""
    origin = {"source": "a test", "evidence": "assumed"}
    cluster = {
        "extends": "dgx-h100",
        "node_link": {"efficiency": 0.5, **origin},
        "gpu": {"interference": {"compute_slowdown": 1.2, "communication_slowdown": 1.0, **origin}},
    }
    result = zsim.simulate(
        zsim.Experiment(model=model, cluster=cluster, nodes=1, training={"sequence_length": 512}), unfold=True
    )
    folder.mkdir()
    write_chrome_traces(result.trace, folder)
    return folder


def test_links_are_found_again_from_the_transfers_of_recorded_steps(tmp_path: Path) -> None:
    """Kineto files of 8 ranks, two models; the waits of collectives for the last rank do not count."""
    folders = [recorded(tmp_path / model, model) for model in ("gpt2", "llama-3.2-1b")]
    measured = merge_measurements([read_measurements(folder) for folder in folders])
    assert {row["kind"] for row in measured.rows} == {"all_gather", "reduce_scatter"}
    assert measured.machines == ("8 ranks",)
    found = calibrate(load_cluster("dgx-h100"), "dgx-h100", "half", measured)
    (tmp_path / "half.toml").write_text(found.toml())
    assert load_cluster(str(tmp_path / "half.toml")).node_link.efficiency == pytest.approx(0.5, rel=0.01)


def test_a_recording_of_gloo_gives_a_row_for_every_kind_and_size() -> None:
    """Two ranks of the reference engine's stage 3: gathers and reductions of the root and of a block."""
    measured = read_measurements(GLOO / "zero3-even-2ranks")
    rows = [(row["kind"], row["bytes"], row["ranks"], row["nodes"]) for row in measured.rows]
    assert rows == [
        ("all_gather", 524_800, 2, 1),
        ("all_gather", 738_304, 2, 1),
        ("reduce_scatter", 524_800, 2, 1),
        ("reduce_scatter", 738_304, 2, 1),
    ]
    assert "kernels are left out, their shapes are not in the trace" in measured.notes[0]


def test_points_that_no_link_explains_are_refused() -> None:
    """Twice the bytes in a hundredth of the time: beside other work, or stamped when calls had returned."""
    rows = tuple(
        Measurement("collective", {"kind": "all_gather", "ranks": 2, "nodes": 1}, seconds, "x", bytes=size)
        for size, seconds in ((1e6, 4e-2), (2e6, 4e-4), (4e6, 8e-2), (8e6, 1e-4), (16e6, 1e-1), (32e6, 2e-4))
    )
    with pytest.raises(InputError, match="no start, round and rate fit these 6 points"):
        calibrate(load_cluster("cpu-gloo"), "cpu-gloo", "x", Measurements(rows, ("2 x EPYC",), (), ("x",)))


def test_one_rank_of_many_does_not_tell_transfer_from_waiting(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "all", "gpt2")
    one = tmp_path / "one"
    one.mkdir()
    first = sorted(folder.iterdir())[0]
    (one / first.name).write_bytes(first.read_bytes())
    with pytest.raises(InputError, match="too few ranks to tell transfer from waiting"):
        read_measurements(one)


def test_a_truncated_trace_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "cut.json.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(InputError, match=r"cut\.json\.gz"):
        read_measurements(path)
