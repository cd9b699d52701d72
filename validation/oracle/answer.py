"""The oracle's answer as a value and as a JSON file. It needs no torch, so plan tests can read it
anywhere."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from validation.oracle.case import Case
from zsim.comparison.plan_check import Call, fold, unfold


@dataclass(frozen=True)
class Answer:
    """The collectives that one rank issues and the bytes that it holds in one steady step.

    `peak_bytes`: zsim's categories, each at its separate maximum, and the maximum of the sum. `at_peak`: the
    tracker's categories at the moment of that maximum. `tracker_peaks`: the tracker's categories, each at its
    separate maximum. `between_steps`: the bytes held between steps.
    """

    case: Case
    parameters: int
    calls: tuple[Call, ...]
    peak_bytes: dict[str, int]
    at_peak: dict[str, int]
    tracker_peaks: dict[str, int]
    between_steps: dict[str, int]

    def to_json(self, provenance: dict[str, Any]) -> str:
        """The answer as JSON with one row per line, repetitions folded; see traces/README.md."""
        head = {
            "provenance": provenance,
            "case": asdict(self.case),
            "parameters": self.parameters,
            "peak_bytes": self.peak_bytes,
            "at_peak": self.at_peak,
            "tracker_peaks": self.tracker_peaks,
            "between_steps": self.between_steps,
        }
        parts = [f'  "{key}": {json.dumps(value)}' for key, value in head.items()]
        rows = ",\n".join(f"    {json.dumps(row)}" for row in fold(self.calls))
        parts.append(f'  "calls": [\n{rows}\n  ]')
        return "{\n" + ",\n".join(parts) + "\n}\n"

    @classmethod
    def read(cls, path: Path) -> Answer:
        """Read a recorded answer."""
        data = json.loads(path.read_text())
        return cls(
            case=Case(**data["case"]),
            parameters=data["parameters"],
            calls=tuple(unfold(data["calls"])),
            peak_bytes=data["peak_bytes"],
            at_peak=data["at_peak"],
            tracker_peaks=data["tracker_peaks"],
            between_steps=data["between_steps"],
        )
