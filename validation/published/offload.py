"""Writes offload.md: how well zsim predicts published runs that offload, and published CPU optimizers.

python validation/published/offload.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from validation.published.cpu_adam import lines as cpu_adam_lines
from validation.published.cpu_adam import predictions
from validation.published.predict import predict_row, shipped_tables
from validation.published.strategy import is_offloaded
from validation.published.table import read_runs
from zsim.study.measured.prediction import RowResult

TARGET = Path(__file__).parent / "offload.md"

FITS = """\
The CPU's rate and FlashAttention-3's backward on H200, the CPU's rate, FlashAttention-4 and the
products on B200 are fitted to the rows of role calibrate
(`validation/published/calibrate_offload.py`). Each row left out of the fit in turn: H200 2.0 %
mean, 4.9 % worst (the 8k row, which alone tells the CPU's rate); B200, together with its rows
without offload, 7.4 % mean, 16.5 % worst.

Memory of the H200 and B200 rows is what torch reserved since the process began. At 8k tokens that
is the start: the script builds the model whole and moves it to every GPU before ZeRO-3 shards it
(`strategy.zero_init = false`). From 32k on it is what the simulated allocator reserves, 1 % less to
10 % more than measured; how much of that was allocated is not published. transformers'
FlashAttention asks the GPU in every layer whether its one sequence is several packed ones, so the
host does not run ahead; without that, gathered parameters would pile up to twice the memory.

Azure's ZeRO-3 rows come from DeepSpeed 0.6 on 2022's network, as its rows without offload do, whose
errors are as large; the two that should not fit have activations in host memory, by a hint of the
source that no row confirms.

The ZeRO-Offload tutorial (one V100, 10.3B parameters): its configuration holds the checkpoints in
host memory (`cpu_checkpointing`), whose pageable copies block the host. Forward and backward are
predicted 14 s where its log says 18 (forward alone 3.7 and 6.1: DeepSpeed 0.3 allocates the
checkpoints' memory anew in every step, so that each page is touched for the first time), what
follows backward 10 s where it says 7.8: DeepSpeed 0.3 copied weights to the GPU while the CPU
updated them; 0.10, the oldest release zsim knows, does not.

torch 2.10 and 2.11 take 12 to 17 % longer than 2.13 for the same step on the same machine
(stas00-h200-torchver): no model of the hardware tells that.

PyTorch's blog gives no seconds for its two models on GPUs of 40 GB. The checkpoints of the larger
alone are 54 GB (128 layers of 4 x 2048 x 25600 x 2 bytes): they cannot have stayed on the GPU, so
more was offloaded than the post says.
"""


def main() -> None:
    runs = [run for run in read_runs(shipped_tables()).runs if is_offloaded(run)]
    rows = [row for row in map(predict_row, runs) if row.status == "ok"]
    TARGET.write_text("\n".join(_page(rows)) + "\n", encoding="utf-8")
    print(f"wrote {TARGET}")


def _page(rows: Sequence[RowResult]) -> Iterator[str]:
    yield "# How well offloading is predicted"
    yield ""
    yield "Written by `python -m validation.published.offload`. Errors are predicted over measured, less one."
    for role, meaning in (("calibrate", "may be fitted"), ("report", "nothing is fitted to them")):
        of_role = [row for row in rows if row.role == role]
        yield from ("", f"## Rows of role {role} ({meaning})", "")
        yield from _table(of_role)
    yield from ("", "## What is fitted, and what is not explained", "", *FITS.splitlines(), "")
    yield from ("## Adam on CPUs", "", *cpu_adam_lines(predictions()))


def _table(rows: Sequence[RowResult]) -> Iterator[str]:
    yield "| row | measured | predicted | error | memory | predicted | error | fits |"
    yield "|---|---:|---:|---:|---:|---:|---:|---|"
    for row in rows:
        memory, predicted = row.measured_memory_bytes, row.predicted_memory_bytes
        cells = (
            row.row_id, _seconds(row.measured_seconds), _seconds(row.predicted_seconds),
            _signed(row.relative_error), "" if memory is None else f"{memory / 1e9:.1f} GB",
            "" if predicted is None else f"{predicted / 1e9:.1f} GB", _signed(row.memory_relative_error),
            _fits(row),
        )  # fmt: skip
        yield "| " + " | ".join(cells) + " |"
    errors = [abs(row.relative_error) for row in rows if row.relative_error is not None]
    held = [abs(row.memory_relative_error) for row in rows if row.memory_relative_error is not None]
    means = f"{fmean(errors):.1%}" if errors else "", f"{fmean(held):.1%}" if held else ""
    yield f"| **mean absolute** |  |  | {means[0]} |  |  | {means[1]} |  |"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4g} s"


def _signed(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"


def _fits(row: RowResult) -> str:
    word = "yes" if row.predicted_fits else "no"
    return word if row.predicted_fits == row.measured_fits else f"{word}, but it did"


if __name__ == "__main__":
    main()
