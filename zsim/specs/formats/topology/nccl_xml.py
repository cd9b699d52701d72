"""NCCL's topology XML (`NCCL_TOPO_DUMP_FILE`): one node's PCIe tree, NVLinks and network cards.

The rates are NCCL's planning numbers (NVIDIA/nccl src/graph/topo.{h,cc}):

- PCIe: `width x generation / 80` GB/s, the minimum on the way up
- NVLink: `count x` the generation's rate
- cards: `speed / 8000` GB/s

Clouds ship files without GPUs, NVLinks or cards (a PCIe skeleton by class codes), and with wrong PCIe speeds.
Notes mention both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from zsim.errors import InputError
from zsim.specs.formats.topology.new_file import ImportedTopology

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

_PCIE = {"2.5": 15, "5": 30, "5.0": 30, "8": 60, "8.0": 60, "16": 120, "16.0": 120, "32": 240, "32.0": 240,
         "64": 480, "64.0": 480}  # fmt: skip
_NVLINK = ((60, 18.0), (70, 20.0), (80, 20.0), (86, 12.0), (90, 20.6), (100, 40.1))  # GB/s per link, by SM
_BASES = ((70, "dgx-2"), (80, "dgx-a100-80gb"), (90, "dgx-h100"), (100, "hgx-b200"))
_CLOUDS = (("azure-ndv5", "ndv5"), ("azure-ndv4", "ndv4"), ("aws-p4d", "p4d"), ("aws-p5", "p5"))
_GPU_CLASSES, _NIC_CLASSES = ("0x0302", "0x0380"), ("0x0207", "0x0200")
_MAX_DEPTH, _MAX_ELEMENTS = 40, 20_000
_NVSWITCH = "0x068000"


def read_nccl_topology(text: str, file: str, base: str | None) -> ImportedTopology:
    """The topology of one node. The preset `base` is guessed from the GPUs' SM version if it is None."""
    root = _parse(text, file)
    parents = {child: parent for parent in root.iter() for child in parent}
    gpus = [element for element in root.iter("gpu") if element.get("dev") is not None]
    skeleton = [e for e in root.iter("pci") if (e.get("class") or "").startswith(_GPU_CLASSES)]
    devices = [parents[gpu] for gpu in gpus] if gpus else skeleton
    notes: list[str] = []
    if not devices:
        raise InputError(
            f"{file}: no GPU in it, neither <gpu> nor a PCI device of class 0x0302; is it complete?"
        )
    sm = _number(gpus[0].get("sm"), 0.0, file) if gpus else 0.0
    base = base or _guess_base(file, sm, devices, notes)
    if not gpus:
        notes.append(f"{file} is a PCIe skeleton without GPUs, NVLinks and cards: those are {base}'s")
    source = f"imported from {file} with NCCL's planning numbers (NVIDIA/nccl src/graph/topo.h)"
    tables: dict[str, dict[str, Any]] = {}
    tables["pcie"] = _pcie(devices, parents, source, file, notes)
    nvlink = _nvlink(gpus, parents, sm, source, file, notes)
    if nvlink:
        tables["node_link"] = nvlink
    nic = _cards(root, len(devices), source, file, notes)
    if nic:
        tables["nic"] = nic
    return ImportedTopology(
        base, f"imported from {file} over {base}", tables, {"gpus_per_node": len(devices)}, tuple(notes)
    )


def _guess_base(file: str, sm: float, devices: list[Element], notes: list[str]) -> str:
    """A preset by the name that a cloud gives its file, else by the GPUs' SM version,
    else a guess by the PCIe
    generation.
    """
    if (cloud := _cloud(file)) is not None:
        return cloud
    if sm:
        return next((name for min_sm, name in reversed(_BASES) if sm >= min_sm), _BASES[0][1])
    speeds = {(device.get("link_speed") or "").replace("GT/s", "").strip() for device in devices}
    preset = "dgx-h100" if "32" in speeds else "dgx-a100-80gb" if "16" in speeds else "dgx-2"
    notes.append(
        f"{file} does not say which GPUs these are: {preset} is a guess from PCIe speeds, which such files "
        "often have wrong; say another preset with --base"
    )
    return preset


def _cloud(file: str) -> str | None:
    """The preset of the cloud's machine that a file is named after."""
    return next((preset for preset, word in _CLOUDS if word in file.lower()), None)


def _parse(text: str, file: str) -> Element:
    from defusedxml import DefusedXmlException
    from defusedxml.ElementTree import ParseError, fromstring

    try:
        root: Element = fromstring(text, forbid_dtd=True)
    except ParseError as error:
        raise InputError(f"{file}: not XML, or cut short: {error}") from None
    except DefusedXmlException:
        raise InputError(f"{file}: has a DTD or entities, which no topology needs") from None
    if root.tag == "graphs":
        raise InputError(
            f"{file}: a graph dump (NCCL_GRAPH_DUMP_FILE); expected NCCL_TOPO_DUMP_FILE's <system>"
        )
    if root.tag != "system":
        raise InputError(f"{file}: found <{root.tag[:40]}>, expected NCCL's <system>")
    depths, count = [(root, 1)], 0
    while depths:
        element, depth = depths.pop()
        count += 1
        if depth > _MAX_DEPTH or count > _MAX_ELEMENTS:
            raise InputError(f"{file}: nested or repeated beyond what a machine has")
        depths += [(child, depth + 1) for child in element]
    return root


def _pcie(
    devices: list[Element], parents: dict[Element, Element], source: str, file: str, notes: list[str]
) -> dict[str, Any]:
    """The slowest path of a GPU up to its CPU, and how many GPUs share the switch above them."""
    rates, gpus_sharing = [], []
    gpu_devices = set(devices)
    gpus_below: dict[Element, int] = {}
    for device in devices:
        chain = list(_chain(device, parents))
        rates.append(min(_pcie_rate(element, file) for element in chain))
        switch = chain[1] if len(chain) > 1 else None
        if switch is not None and switch not in gpus_below:
            gpus_below[switch] = sum(element in gpu_devices for element in switch.iter("pci"))
        gpus_sharing.append(gpus_below[switch] if switch is not None else 1)
    if len(set(rates)) > 1:
        notes.append(
            f"{file}: GPUs have PCIe links of {min(rates):g} to {max(rates):g} GB/s; the slowest is taken"
        )
    if any((device.get("link_speed") or "") == "" for device in devices):
        notes.append(f"{file}: empty PCIe speeds (a virtual machine) count as 8 GT/s, as in NCCL; check them")
    per_switch = max(set(gpus_sharing), key=gpus_sharing.count)
    return {
        "source": source,
        "evidence": "assumed",
        "bandwidth": f"{min(rates):g} GB/s",
        "efficiency": 1.0,
        "gpus_per_switch": per_switch,
    }


def _chain(device: Element, parents: dict[Element, Element]) -> Iterator[Element]:
    """A PCI device and the switches above it."""
    element: Element | None = device
    while element is not None and element.tag == "pci":
        yield element
        element = parents.get(element)


def _pcie_rate(element: Element, file: str) -> float:
    speed = (element.get("link_speed") or "").replace("GT/s", "").replace("PCIe", "").strip()
    generation = _PCIE.get(speed, 60)
    width = _number(element.get("link_width"), 0.0, file) or 16.0
    return width * generation / 80


def _nvlink(
    gpus: list[Element], parents: dict[Element, Element], sm: float, source: str, file: str, notes: list[str]
) -> dict[str, Any]:
    """NVLink per GPU: kind "switch" if links go to an NVSwitch, else a mesh of direct links."""
    counts, has_switch, self_links = [], False, 0
    for gpu in gpus:
        links = list(gpu.iter("nvlink"))
        external_links = [link for link in links if link.get("target") != parents[gpu].get("busid")]
        self_links += len(links) - len(external_links)
        counts.append(sum(_number(link.get("count"), 1.0, file) for link in external_links))
        has_switch |= any((link.get("tclass") or "").lower() == _NVSWITCH for link in external_links)
    if self_links:
        notes.append(
            f"{file}: {self_links} NVLinks whose target is the GPU itself connect nothing and are left out"
        )
    if not gpus:
        return {}
    if not any(counts) and _cloud(file) is not None:
        notes.append(f"{file}: no NVLinks, which NCCL asks the driver for there: the preset's are kept")
        return {}
    if not any(counts):
        notes.append(f"{file}: no NVLinks: GPUs talk over PCIe")
        return {"source": source, "evidence": "assumed", "kind": "none"}
    if len(set(counts)) > 1:
        notes.append(f"{file}: GPUs have {min(counts):g} to {max(counts):g} NVLinks; the fewest are taken")
    rate = next((gb for min_sm, gb in reversed(_NVLINK) if sm >= min_sm), 20.0)
    return {
        "source": source,
        "evidence": "assumed",
        "kind": "switch" if has_switch else "mesh",
        "bandwidth": f"{min(counts) * rate:g} GB/s",
        "efficiency": 1.0,
    }


def _cards(root: Element, num_gpus: int, source: str, file: str, notes: list[str]) -> dict[str, Any]:
    """The network cards of the highest speed. Slower ones (for management) are left out."""
    speeds = []
    for net in root.iter("net"):
        speed = _number(net.get("speed"), 0.0, file)
        speeds.append(speed if speed > 0 else 10_000.0)
    if not speeds:
        skeleton = sum((e.get("class") or "").startswith(_NIC_CLASSES) for e in root.iter("pci"))
        if skeleton:
            notes.append(
                f"{file}: {skeleton} network cards by class code, without speeds: the preset's are kept"
            )
        return {}
    fastest = max(speeds)
    chosen = speeds.count(fastest)
    if chosen < len(speeds):
        notes.append(f"{file}: {len(speeds) - chosen} slower cards are left out")
    if chosen > num_gpus:
        notes.append(f"{file}: {chosen} cards for {num_gpus} GPUs are taken as {num_gpus} faster ones")
        fastest, chosen = fastest * chosen / num_gpus, num_gpus
    return {
        "source": source,
        "evidence": "assumed",
        "per_node": chosen,
        "bandwidth": f"{fastest / 1000:g} Gb/s",
        "efficiency": 1.0,
    }


def _number(text: str | None, default: float, file: str) -> float:
    if text is None or text.strip() == "":
        return default
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{file}: found '{text[:40]}', expected a number") from None
    if not 0 <= value < 1e9:
        raise InputError(f"{file}: found {text[:40]}, expected a number that hardware can have")
    return value
