"""The pages of the site are followed by the letter, and their links lead somewhere; `--update` rewrites what
their commands print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import followed

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FOLLOWED = [
    ROOT / "README.md",
    DOCS / "index.md",
    DOCS / "report.md",
    *sorted((DOCS / "tutorials").glob("*.md")),
]
WITH_LINKS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "RELEASING.md",
    *sorted(DOCS.rglob("*.md")),
]
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", FOLLOWED, ids=name_of)
def test_the_page_can_be_followed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    anew = followed(text, tmp_path)
    if request.config.getoption("--update"):
        page.write_text(anew, encoding="utf-8")
    else:
        assert anew == text


@pytest.mark.parametrize("page", WITH_LINKS, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        target, _, anchor = link.partition("#")
        if target.startswith(("http://", "https://")):
            continue
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), link
        assert not anchor or anchor in anchors(found.read_text(encoding="utf-8")), link


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as the site and code hosts make them."""
    found = set()
    for heading in re.findall(r"(?m)^#+ (.+)$", text):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
        found.add(re.sub(r"[\s]+", "-", plain.strip()))
    return found
