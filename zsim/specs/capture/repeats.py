"""The modules that are blocks: those that frameworks wrap individually.

If a module names the classes itself (`_no_split_modules`, transformers' and accelerate's), these are taken.
Of blocks inside one another the innermost count. Otherwise blocks are children of the same class in a
ModuleList or a Sequential, if they have children of their own and are not plain containers. If a child (a
stage of a vision model) keeps nearly all its parameters in lists of its own, the blocks are looked for inside
it.
"""

from __future__ import annotations

from collections import Counter

from zsim.specs.capture.recording import ModuleRecord, ModuleRecording

# The part of a child's parameters from which on the lists in it are the ones that repeat.
_MIN_FRACTION = 0.75
_CONTAINERS = {"Sequential", "ModuleList", "ModuleDict"}


def block_paths(recording: ModuleRecording) -> list[str]:
    """Paths of the blocks in the order of the module tree, none inside another."""
    named_blocks = _named_blocks(recording)
    if named_blocks:
        return named_blocks
    numels = _numels(recording)
    paths: list[str] = []
    _search(recording.modules, "", numels, paths)
    return paths


def _named_blocks(recording: ModuleRecording) -> list[str]:
    class_names = {kind for module in recording.modules.values() for kind in module.no_split}
    called_paths = {call.path for call in recording.calls}
    paths = [
        path
        for path, module in recording.modules.items()
        if module.kind in class_names and path in called_paths and path
    ]
    return [path for path in paths if not any(inner_path.startswith(path + ".") for inner_path in paths)]


def _search(modules: dict[str, ModuleRecord], path: str, numels: dict[str, int], paths: list[str]) -> None:
    """Adds the blocks below `path`."""
    for child in modules[path].children:
        repeated = _repeated(modules, modules[path]) if modules[path].is_list else set()
        if child not in repeated:
            _search(modules, child, numels, paths)
            continue
        inner_blocks: list[str] = []
        _search(modules, child, numels, inner_blocks)
        if inner_blocks and sum(numels[block] for block in inner_blocks) >= _MIN_FRACTION * max(
            1, numels[child]
        ):
            paths.extend(inner_blocks)
        else:
            paths.append(child)


def _repeated(modules: dict[str, ModuleRecord], owner: ModuleRecord) -> set[str]:
    """Children of a class that occurs at least twice in a list, with children of their own."""
    composites = [child for child in owner.children if _is_composite(modules[child])]
    count = Counter(modules[child].kind for child in composites)
    return {child for child in composites if count[modules[child].kind] > 1}


def _is_composite(module: ModuleRecord) -> bool:
    return bool(module.children) and module.kind not in _CONTAINERS


def _numels(recording: ModuleRecording) -> dict[str, int]:
    """Elements of the parameters at and below every module."""
    total = dict.fromkeys(recording.modules, 0)
    for parameter in recording.parameters:
        numel = 1
        for size in parameter.shape:
            numel *= size
        path = parameter.name.rpartition(".")[0]
        while True:
            total[path] = total.get(path, 0) + numel
            if not path:
                break
            path = path.rpartition(".")[0]
    return total
