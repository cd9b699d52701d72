"""The comparison of zsim's prices with measured kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from validation.kernels.__main__ import ERRORS, KernelErrors, kernel_errors, main, section, table_lines
from validation.kernels.__main__ import HEAD as HEAD_OF_PAGE
from validation.kernels.measured import TABLES, read_sample
from zsim.cost.kernels.kernel import total_flops
from zsim.cost.rates.gpu import kernel_seconds
from zsim.specs.cluster.files import load_gpu
from zsim.specs.presets import gpu_preset_path

HEAD = (
    "framework,version,device,op_name,kernel_source,phase,batch_size,seq_len,num_tokens,d_model,d_state,"
    "d_conv,nheads,head_dim,n_groups,chunk_size,model_name,latency"
)
SCAN = "TRTLLM,1,NVIDIA B200,mamba2,mamba_chunk_scan_combined,context,{batch},{length},{tokens},4096,128,4,"
SCAN += "64,64,8,128,tiny,{latency}"


def write_scans(folder: Path, rows: list[tuple[int, int, float]]) -> None:
    lines = [
        SCAN.format(batch=batch, length=length, tokens=batch * length, latency=latency)
        for batch, length, latency in rows
    ]
    (folder / "mamba2_b200_trtllm_1.3.0rc15.csv").write_text("\n".join([HEAD, *lines]) + "\n")


def test_a_kernel_is_priced_by_the_shape_of_its_row(tmp_path: Path) -> None:
    """2 sequences of 4,096 tokens of Nemotron 3 Nano's scan: 64 heads of 64, 8 groups, states of 128."""
    pytest.importorskip("pandas")
    write_scans(tmp_path, [(2, 4096, 0.7), (1, 256, 0.03)])  # too short for the sample
    (measured,) = read_sample(tmp_path)
    assert (measured.gpu, measured.kind, measured.seconds) == ("b200-sxm-180gb", "Mamba-2", 0.7e-3)
    (kernel,) = measured.kernels
    assert (kernel.kind, kernel.shape) == ("state_space_scan", (2, 32))
    gpu = load_gpu(gpu_preset_path("b200-sxm-180gb"))
    (errors,) = kernel_errors([measured])
    assert errors.ratios == (kernel_seconds(kernel, gpu) / 0.7e-3,)


def test_errors_are_a_line_for_each_gpu_and_kind() -> None:
    """Of 0.5, 1, 1 and 4 the median is 1, and 4 is furthest from one."""
    errors = KernelErrors("b200", "scan", (1.0, 0.5, 4.0, 1.0))
    assert errors.quartiles[1] == 1.0
    assert errors.worst == 4.0
    assert table_lines([errors], is_markdown=True)[-1].startswith("| scan | b200 | 4 | ")


def test_a_folder_without_tables_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pandas")
    assert main([str(tmp_path)]) == 2
    assert "no tables of measured kernels" in capsys.readouterr().err


def test_the_section_has_every_kind_and_scans_are_not_far_off() -> None:
    """What was fitted to them is within a third of them in the median, but where the table is noise (Gated
    DeltaNet on H200 by SGLang).
    """
    table = ERRORS.read_text().removeprefix(HEAD_OF_PAGE).splitlines()[2:]
    rows = [line.strip("| ").split(" | ") for line in table]
    assert {row[0] for row in rows} == {table.kind for table in TABLES}
    assert "## Kernels" in section()
    fitted = ("Gated DeltaNet", "Kimi delta attention", "Mamba-2", "sparse attention", "indexer's scores")
    medians = {(row[0], row[1]): float(row[4]) for row in rows if row[0] in fitted}
    del medians["Gated DeltaNet", "h200-sxm-141gb"]
    assert all(0.67 < ratio < 1.5 for ratio in medians.values()), medians


@pytest.mark.parametrize(("top_k", "experts", "width", "products"), [(8, 128, 768, 3), (22, 512, 5120, 2)])
def test_experts_of_nemotron_have_no_gate(top_k: int, experts: int, width: int, products: int) -> None:
    """2 FLOPs for each row, its 2,048 elements and the features of every product."""
    (table,) = (table for table in TABLES if table.kind == "experts, bf16")
    sizes = {"num_experts": experts, "hidden_size": 2048, "inter_size": width}
    row = {"num_tokens": 4096, "topk": top_k, **sizes}
    assert total_flops(table.kernels(row)) == products * 2 * 4096 * top_k * 2048 * width
