"""hwloc's XML (`lstopo machine.xml`): the PCIe devices of one node, with the models of its GPUs.

Format: hwloc 2.12.2, hwloc/hwloc2.dtd and hwloc/topology-xml.c. Objects of type PCIDev have a class and a
`pci_link_speed` in GB/s, those of type Bridge stand above them, and a GPU's OSDev below it has its model.
hwloc knows neither NVLinks nor the rates of cards, so a preset supplies them.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from zsim.errors import InputError
from zsim.specs.formats.topology.new_file import ImportedTopology

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

_DOCTYPE = re.compile(r"<!DOCTYPE\s+topology\s+SYSTEM\s+\"hwloc2?\.dtd\"\s*>")
# PCI's classes: displays (VGA, 3D, other) and processing accelerators, both of which Linux's amdgpu drives
# (drivers/gpu/drm/amd/amdgpu/amdgpu_drv.c: pciidlist).
_GPU_CLASSES, _NIC_CLASSES = ("0300", "0302", "0380", "1200"), ("0207", "0200")
_MAX_ELEMENTS = 50_000
# Part of a GPU's model -> the preset of a machine with it.
_BASES = (
    ("b300", "hgx-b300"), ("b200", "hgx-b200"), ("h200", "hgx-h200"), ("h800", "hgx-h800"), ("h20",
    "hgx-h20"),
    ("h100 pcie", "h100-pcie-x8"), ("h100", "dgx-h100"), ("a800", "hgx-a800"), ("a100-pcie", "a100-pcie-x8"),
    ("a100 80gb pcie", "a100-pcie-x8"), ("a100-sxm4-40", "dgx-a100-40gb"), ("a100", "dgx-a100-80gb"),
    ("l40s", "l40s-x8"), ("4090", "rtx-4090-x8"), ("5090", "rtx-5090-x8"), ("mi300x", "mi300x-x8"),
    ("mi325x", "mi325x-x8"), ("mi355x", "mi355x-x8"),
)  # fmt: skip


def is_hwloc(text: str) -> bool:
    """Whether an XML is hwloc's."""
    return _DOCTYPE.search(text[:2000]) is not None or "<topology" in text[:2000]


def read_hwloc(text: str, file: str, base: str | None) -> ImportedTopology:
    """The PCIe of one node. The preset is guessed from the GPUs' model unless `base` is given."""
    root = _parse(text, file)
    parents = {child: parent for parent in root.iter() for child in parent}
    devices = [element for element in root.iter("object") if element.get("type") == "PCIDev"]
    models = {device: model for device in devices if (model := _model(device))}
    gpus = [
        device for device in devices if _class(device) in _GPU_CLASSES and (device in models or not models)
    ]
    if not gpus:
        raise InputError(
            f"{file}: no GPU in it; `lstopo --whole-io` lists PCI devices, run it where they are"
        )
    names = sorted(set(models.values()))
    base = base or next((preset for word, preset in _BASES for name in names if word in name.lower()), None)
    if base is None:
        raise InputError(
            f"{file}: GPUs are {', '.join(names) or 'of unknown model'}, of which zsim has no machine; give "
            "a preset with --base"
        )
    speeds = [float(text) for gpu in gpus if _is_rate(text := gpu.get("pci_link_speed", ""))]
    below = Counter(_bridge(gpu, parents) for gpu in gpus)
    pcie: dict[str, Any] = {
        "source": f"imported from {file} (hwloc): pci_link_speed of the GPUs, and the bridges above them",
        "evidence": "assumed",
        "gpus_per_switch": max(below.values()),
    }
    notes = [f"{len(gpus)} GPUs{', ' + ', '.join(names) if names else ''}: NVLinks and cards are {base}'s"]
    if speeds:
        pcie["bandwidth"] = f"{min(speeds):g} GB/s"
    num_cards = sum(_class(device) in _NIC_CLASSES for device in devices)
    if num_cards:
        notes.append(
            f"{num_cards} network cards without rates, which may be for management: {base}'s are kept"
        )
    return ImportedTopology(
        base, f"imported from {file} over {base}", {"pcie": pcie}, {"gpus_per_node": len(gpus)}, tuple(notes)
    )


def _parse(text: str, file: str) -> Element:
    from defusedxml import DefusedXmlException
    from defusedxml.ElementTree import ParseError, fromstring

    try:
        root: Element = fromstring(_DOCTYPE.sub("", text, count=1), forbid_dtd=True)
    except ParseError as error:
        raise InputError(f"{file}: not XML, or cut short: {error}") from None
    except DefusedXmlException:
        raise InputError(f"{file}: has a DTD or entities of its own, which no topology needs") from None
    if sum(1 for _ in root.iter()) > _MAX_ELEMENTS:
        raise InputError(f"{file}: more objects than a machine has")
    return root


def _class(device: Element) -> str:
    """The class code, which begins `pci_type`: "0302 [10de:2330] ..."."""
    return (device.get("pci_type") or "")[:4]


def _model(device: Element) -> str:
    infos = (info for info in device.iter("info") if info.get("name") == "GPUModel")
    return next((info.get("value", "") for info in infos), "")


def _bridge(device: Element, parents: dict[Element, Element]) -> Element | None:
    """The bridge of the host above a device, which GPUs with one uplink share."""
    bridge, element = None, parents.get(device)
    while element is not None:
        if element.get("type") == "Bridge":
            bridge = element
        element = parents.get(element)
    return bridge


def _is_rate(text: str) -> bool:
    return re.fullmatch(r"\d{1,4}(\.\d{1,9})?", text) is not None and float(text) > 0
