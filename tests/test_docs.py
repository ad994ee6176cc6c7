"""The documentation says what is so: its code runs, its links resolve, its tables are current."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import mqa
import mqa.testing
from mqa import devices

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(.*)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _parts(page: Path) -> list[tuple[int, str | None, str]]:
    """(first line, language or None for prose, text) of each stretch of a page."""
    parts: list[tuple[int, str | None, str]] = []
    language, begin, lines = None, 1, page.read_text(encoding="utf-8").splitlines()
    first = 1
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        parts.append((first, language, "\n".join(lines[first - 1 : number - 1])))
        begin, first = number, number + 1
        language = (fence[1].split() or [""])[0] if language is None else None
    assert language is None, f"{_name(page)}:{begin}: a fence is not closed"
    parts.append((first, None, "\n".join(lines[first - 1 :])))
    return parts


def _prose(page: Path) -> str:
    return "\n".join(text for _, language, text in _parts(page) if language is None)


def _anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    headings = (h.lower().replace("`", "") for h in _HEADING.findall(_prose(page)))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_python_block_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backends = importlib.import_module("mqa.backends")
    monkeypatch.setattr(devices, "_num_sms", {})  # what a page changes lasts as long as the page
    monkeypatch.setattr(backends, "BACKENDS", backends.BACKENDS)
    namespace: dict[str, object] = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]):
        for first, language, code in _parts(page):
            if language == "python":  # blank lines in front: errors name the page's own lines
                exec(compile("\n" * (first - 1) + code, _name(page), "exec"), namespace)


@pytest.mark.parametrize("name", ["README.md", "docs/semantics.md", "docs/numerics.md"])
def test_the_pages_have_code_to_run(name: str) -> None:
    assert [part for part in _parts(ROOT / name) if part[1] == "python"]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_internal_links_resolve(page: Path) -> None:
    for link in _LINK.findall(_prose(page)):
        if link.startswith(("https://", "http://")):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{_name(page)}: {link}: no such file"
        assert path.is_relative_to(ROOT), f"{_name(page)}: {link}: outside the repository"
        if anchor:
            assert anchor in _anchors(path), f"{_name(page)}: {link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_nobody_is_told_to_install_another_project(page: Path) -> None:
    wrong = re.findall(r"pip install[^\n]*[\s'\"]mqa(?!-logits)\b.*", page.read_text("utf-8"))
    assert not wrong, f"{_name(page)}: {wrong}: the distribution is mqa-logits"


def test_api_page_is_up_to_date(tool: Callable[[str], ModuleType]) -> None:
    generator = tool("generate_docs")
    assert generator.PAGE.read_text(encoding="utf-8") == generator.render(), "run make docs"


def test_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for module in (mqa, mqa.formats, mqa.cuda, mqa.testing):
        for name in module.__all__:
            assert re.search(rf"^##.* {module.__name__}\.{name}\b", page, re.MULTILINE), name


def _variables_read() -> set[str]:
    """Names of environment variables in the code, docstrings aside, of mqa/config.py."""
    tree = ast.parse((ROOT / "mqa" / "config.py").read_text(encoding="utf-8"))
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {s for s in strings if isinstance(s, str) and re.fullmatch("MQA_[A-Z_]+", s)}


@pytest.mark.parametrize("name", ["docs/architecture.md", "mqa/config.py"])
def test_environment_table_lists_exactly_what_is_read(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(MQA_[A-Z_]+)` \|", text, re.MULTILINE)
    assert sorted(rows) == sorted(_variables_read())
