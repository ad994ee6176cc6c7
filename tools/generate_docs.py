"""Write docs/api.md from the signatures and docstrings of the public names.

    python tools/generate_docs.py

What is shown depends on the source alone, not on the Python version: annotations and defaults of
fields are read as they are written. `tests/test_docs.py` fails while the page is out of date.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
sys.path.insert(0, str(ROOT))

import mqa  # noqa: E402
import mqa.testing  # noqa: E402

_HEAD = """\
# API

Every public name, from its signature and docstring. This page is generated: `make docs` writes it.
What the functions compute is in [semantics.md](semantics.md).

Names of types in signatures: `Query` is a tensor, or a pair (values, scale or None), and so is
`Keys`. `Format` is "fp8", "mxfp8", "mxfp4" or "bf16". `Problem` is a `DenseProblem` or
`PagedProblem` of `mqa.problem`. `F64`, `F32`, `I64`, `U8` and `Bool` are numpy arrays, `Logits` is
a tensor or `F64`. `Work` is called without arguments; a `Timer` takes a `Work` and returns seconds.
"""
_WIDTH = 100
_SECTION = re.compile(r"(Args|Returns|Raises):")
_ENTRY = re.compile(r"(\w+(?:, \w+)*): +(.*)")


def render() -> str:
    parts = [_HEAD]
    for title, module in (
        ("mqa", mqa),
        ("mqa.formats", mqa.formats),
        ("mqa.cuda", mqa.cuda),
        ("mqa.testing", mqa.testing),
    ):
        parts += [f"## {title}\n", _module_text(module), *_members(module)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(part for part in parts if part))


def _module_text(module: ModuleType) -> str:
    return _markdown(inspect.getdoc(module) or "")


def _members(module: ModuleType) -> Iterator[str]:
    """Functions first, then classes, then constants; each in the order of `__all__`."""
    values = [(name, getattr(module, name)) for name in module.__all__]
    groups: list[list[str]] = [[], [], []]
    for name, value in values:
        qualified = f"{module.__name__}.{name}"
        if inspect.isfunction(value):
            groups[0].append(_function(qualified, value))
        elif inspect.isclass(value):
            groups[1].append(_class(qualified, value))
        elif not inspect.ismodule(value):
            groups[2].append(_constant(qualified, module, name))
    for group in groups:
        yield from group


def _function(qualified: str, function: Any) -> str:
    text = _markdown(inspect.getdoc(function) or "")
    return f"### {qualified}\n\n{_code(_signature(qualified, function))}\n{text}"


def _class(qualified: str, cls: type) -> str:
    node = _class_node(cls)
    base = ", ".join(b.__name__ for b in cls.__bases__ if b is not object)
    lines = [f"### class {qualified}" + (f" ({base})" if base else ""), ""]
    if "__doc__" in cls.__dict__ and ast.get_docstring(node):
        lines.append(_markdown(inspect.getdoc(cls) or ""))
    fields = [_field(source, note) for source, note in _attributes(node)]
    lines += [*fields, ""] if fields else []
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        if isinstance(member, property):
            shown = f"{name}: {function.__annotations__['return']}"
        else:
            shown = _signature(name, function)
        lines += [_code(shown), _markdown(inspect.getdoc(member) or "")]
    return "\n".join(lines).rstrip() + "\n"


def _constant(qualified: str, module: ModuleType, name: str) -> str:
    for source_module in _modules_of(module):
        tree = ast.parse(inspect.getsource(source_module))
        for source, note in _attributes(tree):
            if source.partition(" = ")[0].partition(":")[0] == name:
                shown = _code(source) if len(source) <= _WIDTH else ""
                return f"### {qualified}\n\n{shown}\n{_escaped(note)}\n"
    raise LookupError(f"{qualified}: no assignment found")


def _modules_of(package: ModuleType) -> Iterator[ModuleType]:
    prefix = f"{package.__name__}."
    for name, module in sorted(sys.modules.items()):
        if name.startswith(prefix) and inspect.ismodule(module):
            yield module


def _attributes(node: ast.ClassDef | ast.Module) -> Iterator[tuple[str, str]]:
    """Assignments as written, each with the string that follows it."""
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        if not isinstance(target, ast.Name) or target.id.startswith("_"):
            continue
        note = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            note = inspect.cleandoc(str(after.value.value))
        yield ast.unparse(statement), note


def _class_node(cls: type) -> ast.ClassDef:
    tree = ast.parse(inspect.getsource(inspect.getmodule(cls) or cls))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            return node
    raise LookupError(f"{cls.__qualname__}: no class statement found")


def _field(source: str, note: str) -> str:
    return f"- `{source}`" + (f": {_escaped(' '.join(note.split()))}" if note else "")


def _signature(name: str, function: Any) -> str:
    """The `def` line as written, a parameter a line where it does not fit into one."""
    returns = function.__annotations__.get("return")
    tail = f" -> {returns}" if returns is not None else ""
    words: list[str] = []
    star = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            words.append("*")
            star = True
        words.append(_parameter(parameter))
    line = f"{name}({', '.join(words)}){tail}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join((f"{name}(", *(f"    {word}," for word in words), f"){tail}"))


def _parameter(parameter: inspect.Parameter) -> str:
    annotated = parameter.annotation is not parameter.empty
    text = f"{parameter.name}: {parameter.annotation}" if annotated else parameter.name
    if parameter.default is parameter.empty:
        return text
    default = parameter.default
    shown = default.__name__ if inspect.isfunction(default) else repr(default)
    return f"{text}{' = ' if annotated else '='}{shown}"


def _code(text: str) -> str:
    return f"```text\n{text}\n```\n"


def _markdown(text: str) -> str:
    """A docstring as Markdown: `Args:`, `Returns:` and `Raises:` become lists.

    Other indented lines stay: they are code.
    """
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        section = _SECTION.fullmatch(line)
        if section:
            inside = True
            lines += [f"**{section[1]}**", ""]
        elif line and not line.startswith(" "):
            inside = False
            lines.append(_escaped(line))
        elif inside and line.startswith("    "):
            lines.append(_escaped(_entry(line[4:])))
        else:
            lines.append(line)
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


def _escaped(text: str) -> str:
    """Powers are no bold type: `**` outside backquotes gets backslashes."""
    parts = text.split("`")
    parts[::2] = [part.replace("**", r"\*\*") for part in parts[::2]]
    return "`".join(parts)


def _entry(line: str) -> str:
    """A line of a section: `name: text`, its continuation, or plain text."""
    if line.startswith(" "):
        return f"  {line.strip()}"
    entry = _ENTRY.fullmatch(line)
    if entry is None:
        return line
    names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
    return f"- {names}: {entry[2]}"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
