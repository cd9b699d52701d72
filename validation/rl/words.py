"""The words of published tables for GPUs, models and layouts, whoever wrote them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from zsim.errors import NotSimulatedError
from zsim.files import CHECKOUT
from zsim.reading import parse_toml
from zsim.specs.model.hub_names import preset_of
from zsim.specs.presets import model_preset_names

# Pattern of a GPU's name, the first that is found -> preset of a cluster.
CLUSTERS = (
    (r"GB300", "gb300-nvl72"),
    (r"GB200", "gb200-nvl72"),
    (r"B300", "hgx-b300"),
    (r"B200", "hgx-b200"),
    (r"GH200", "dgx-h100"),
    (r"H200", "hgx-h200"),
    (r"H20(?!\d)", "hgx-h20"),
    (r"H800", "hgx-h800"),
    (r"H100[- ]?(PCIE|NVL)", "h100-pcie-x8"),
    (r"H100|Hopper", "dgx-h100"),
    (r"A800", "hgx-a800"),
    (r"A100.*40 ?GB", "dgx-a100-40gb"),
    (r"A100.*PCIE", "a100-pcie-x8"),
    (r"A100", "dgx-a100-80gb"),
    (r"V100", "dgx-1"),
    (r"MI355", "mi355x-x8"),
    (r"MI325", "mi325x-x8"),
    (r"MI300", "mi300x-x8"),
    (r"RTX.?PRO.?6000", "rtx-pro-6000-x8"),
    (r"RTX.?A6000", "rtx-a6000-x8"),
    (r"5090", "rtx-5090-x8"),
    (r"4090", "rtx-4090-x8"),
    (r"L40S?", "l40s-x8"),
)
# What a name may have besides the model: its owner, what it was tuned for, the type of its weights.
_OWNER = r"^[\w.-]+/"
_TUNES = (
    r"[-_ .](instruct|base|chat|it|hf|thinking|math|coder|zero|r1|preview|\d{4}|v\d+(\.\d+)*|fp8|bf16|nvfp4|"
    r"fp4|dynamic|distill(ed)?|terminus|class|sft)\b"
)


def cluster_of(gpu: str) -> str:
    """The preset of a GPU's name. Raises NotSimulatedError if there is none."""
    for pattern, preset in CLUSTERS:
        if re.search(pattern, gpu, re.IGNORECASE):
            return preset
    if not gpu or "not stated" in gpu:
        raise NotSimulatedError("the GPU is not published")
    raise NotSimulatedError(f"GPU '{gpu}' has no hardware file")


@cache
def _shapes() -> dict[str, dict[str, Any]]:
    path = CHECKOUT / "validation" / "rl" / "models.toml"
    return parse_toml(path.read_text(encoding="utf-8"), path.name)


def model_of(name: str) -> str | dict[str, Any]:
    """The preset, or the shape, of a model's name. Raises NotSimulatedError for an unknown one.

    Models that were tuned from another have its shape: "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B" is a
    Qwen 2.5 of 7 billion parameters.
    """
    key = re.sub(r"\(.*?\)", "", name).strip()
    key = re.sub(_OWNER, "", key).lower().replace("_", "-").replace(" ", "-")
    key = re.sub(r"^meta-", "", key)
    distilled = re.search(r"distill-(qwen|llama)-([\d.]+b)", key)
    if distilled:
        key = f"qwen2.5-{distilled[2]}" if distilled[1] == "qwen" else f"llama-3.1-{distilled[2]}"
    short = key
    while (shorter := re.sub(_TUNES, "", short)) != short:
        short = shorter
    preset = preset_of(re.sub(r"\(.*?\)", "", name).strip())
    if preset is not None:
        return preset
    for candidate in (key, short, re.sub(r"^([a-z]+)-(?=\d)", r"\1", short)):
        if candidate in model_preset_names():
            return candidate
        for shape in _shapes().values():
            if re.fullmatch(shape["names"], candidate):
                return shape["preset"] if "preset" in shape else dict(shape["config"])
    raise NotSimulatedError(f"model '{name}' has no known shape")


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism that a text names, as in "megatron tp4 cp1 ep8 pp2 dp8 sp"."""

    text: str

    def degree(self, *names: str) -> int | None:
        """The number behind one of the names: "tp4", "TP=4", "tp 4", "tensor parallel 4"."""
        for name in names:
            match = re.search(rf"(?<![a-z]){name}(?: size)? ?[=:x]? ?(\d+)", self.text, re.IGNORECASE)
            if match:
                return int(match[1])
        return None

    def has(self, pattern: str) -> bool:
        return re.search(pattern, self.text, re.IGNORECASE) is not None

    @property
    def tensor(self) -> int:
        return self.degree("tp", "tensor parallel") or 1

    @property
    def pipeline(self) -> int:
        return self.degree("pp", "pipeline") or 1

    @property
    def context(self) -> int:
        return (self.degree("cp", "context") or 1) * (self.degree("ulysses", "ulysses sp") or 1)

    @property
    def expert(self) -> int:
        return self.degree("ep", "expert parallel") or 1

    @property
    def data(self) -> int | None:
        return self.degree("dp", "data parallel")


def split_of(text: str) -> tuple[int, int] | None:
    """GPUs of the trainer and of the rollout in "train 8 / gen 8", None where both have all."""
    train = re.search(r"(?:train|trainer|actor|learner)\w*[ :=]+(\d+)", text, re.IGNORECASE)
    rollout = re.search(r"(?:gen|rollout|generat\w+|infer\w*)[ :=]+(\d+)", text, re.IGNORECASE)
    if train and rollout:
        return int(train[1]), int(rollout[1])
    pair = re.match(r"\s*(\d+) ?[+:/] ?(\d+)\b", text)
    return (int(pair[1]), int(pair[2])) if pair else None


def dtype_of(text: str, default: str = "bf16") -> str:
    """The element type that a text names."""
    for pattern, dtype in (
        (r"nvfp4|mxfp4|fp4|int4", "fp4"),
        (r"fp8|int8", "fp8"),
        (r"bf16|bfloat16", "bf16"),
        (r"fp16|half", "fp16"),
    ):
        if re.search(pattern, text, re.IGNORECASE):
            return dtype
    return default


def reason_of(error: Exception) -> str:
    """One line that says why a row is skipped."""
    return " ".join(str(error).split())
