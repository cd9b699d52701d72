"""What mkdocs is told besides mkdocs.yml: pages that lie outside docs/, links to files that are no pages, the
list of recipes, and the public names of zsim."""

from __future__ import annotations

import ast
import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = (
    "CHANGELOG.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md", "traces/README.md",
    "validation/README.md", "validation/gpu_steps.md", "validation/plan_check.md",
    "validation/curves/README.md", "validation/curves/errors.md", "validation/kernels/errors.md",
    "validation/published/README.md", "validation/published/errors.md", "validation/published/checkpoints.md",
    "validation/published/goodput.md", "validation/published/offload.md", "validation/rl/README.md",
    "validation/scaling/README.md",
)  # fmt: skip
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.hooks.site")


def on_config(config: Any) -> Any:
    """The recipes in the navigation, by their headings: those that the index numbers first."""
    folder = ROOT / "docs" / "recipes"
    elsewhere = {"README.md", "regression-check.md"}
    pages = sorted(path for path in folder.glob("*.md") if path.name not in elsewhere)
    recipes = ["recipes/README.md", *({heading(path): f"recipes/{path.name}"} for path in pages)]
    config.nav = [
        {name: recipes if pages == "RECIPES" else pages for name, pages in tab.items()} for tab in config.nav
    ]
    return config


def heading(path: Path) -> str:
    return path.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ").replace("`", "")


def on_files(files: Any, config: Any) -> Any:
    """The pages outside docs/ join those inside."""
    for name in OUTSIDE:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links between pages inside and outside docs/; a link to another file of the repository is its text."""
    own = page.file.src_uri
    home = own if own in OUTSIDE else f"docs/{own}"

    def link(match: re.Match[str]) -> str:
        target = match["target"]
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(home), target))
        page_of = path.removeprefix("docs/") if path.startswith("docs/") else path
        if files.get_file_from_path(page_of) is not None:
            relative = posixpath.relpath(page_of, posixpath.dirname(own) or ".")
            return f"{match['image']}[{match['text']}]({relative}{match['anchor'] or ''})"
        if path == "README.md":
            return match["text"]
        if not (ROOT / path).exists():
            log.warning("%s: no such file: %s", own, target)
        return match["text"]

    if own == "python.md":
        markdown = markdown.replace("::: zsim\n", "\n".join(public_names()))
    parts = re.split(r"(?ms)(^```.*?^```)", markdown)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def public_names() -> list[str]:
    """A section per kind of public name: functions, classes, errors; each name from where it is written."""
    tree = ast.parse((ROOT / "zsim" / "__init__.py").read_text(encoding="utf-8"))
    homes: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("zsim."):
            homes |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    names = [name for name in exported(tree) if name in homes]
    groups = {
        "Functions": [name for name in names if name[0].islower()],
        "Classes": [name for name in names if name[0].isupper() and not name.endswith("Error")],
        "Errors": [name for name in names if name.endswith("Error")],
    }
    lines = []
    for title, group in groups.items():
        lines += [f"## {title}", "", *(f"::: {homes[name]}\n" for name in group)]
    return lines


def exported(tree: ast.Module) -> list[str]:
    """The value of `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(one, "id", "") == "__all__" for one in node.targets):
            return list(ast.literal_eval(node.value))
    raise ValueError("zsim/__init__.py has no __all__")
