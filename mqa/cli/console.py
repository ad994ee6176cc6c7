"""What every command needs: consoles, one-line errors, files written whole or not at all."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mqa.cli import INSTALL
from mqa.problem import Problem, parse

_PLAIN_WIDTH = 132
"""Columns where the output is no terminal, so that tables in files and logs stay whole."""


class Stop(Exception):
    """Ends the command with one line on stderr and `exit_code`: 2 for a wrong argument."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def standard_output() -> Console:
    """Console of results: colours on a terminal only."""
    return _console(sys.stdout)


def standard_error() -> Console:
    """Console of progress and errors."""
    return _console(sys.stderr)


def print_whole(out: Console, text: str, style: str | None = None) -> None:
    """Print `text` as it is, never wrapped or interpreted, so that it can be copied."""
    out.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def one_line(text: str) -> str:
    """`text` with its line breaks turned into semicolons, and each run of blanks into one."""
    return "; ".join(" ".join(line.split()) for line in text.splitlines() if line.strip())


def progress_bar() -> Progress:
    """A progress bar on stderr that disappears when done, and is not there without a terminal."""
    console = standard_error()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def parse_problems(lines: Iterable[str]) -> list[Problem]:
    """The problems of these lines. Stops at the first that is none."""
    problems = []
    for line in lines:
        try:
            problems.append(parse(line))
        except ValueError as error:
            raise Stop(one_line(str(error))) from error
    return problems


def usable_device(name: str) -> torch.device:
    """The torch device of that name. Stops if there is none or this machine lacks it."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise Stop(f"--device {name!r}: expected cpu, cuda or cuda:<index>") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Stop(f"--device {name!r}: torch {torch.__version__} finds no such GPU here")
    if device.type not in ("cpu", "cuda"):
        raise Stop(f"--device {name!r}: expected cpu, cuda or cuda:<index>")
    return device


def require_matplotlib() -> None:
    """Stops, before any work is done, where a picture was asked for and can't be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise Stop(f"matplotlib missing: {INSTALL}", exit_code=1)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it: never a half-written file.

    Missing folders are made. Stops with one line where the file can't be written.
    """
    temporary = _beside(path)
    try:
        write(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise Stop(f"cannot write {path}: {error.strerror}", exit_code=1) from error
    finally:
        temporary.unlink(missing_ok=True)


def assert_writable(path: Path) -> None:
    """Stop where `path` cannot be written: before a long run rather than after it."""
    _beside(path).unlink()


def _beside(path: Path) -> Path:
    """A new temporary file in the folder of `path`, which is made if it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(suffix=path.suffix, prefix=".mqa-", dir=path.parent)
    except OSError as error:
        raise Stop(f"cannot write {path}: {error.strerror}", exit_code=1) from error
    os.close(handle)
    return Path(name)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a report, led by the command line and the date."""
    command = ["mqa", *sys.argv[1:]]
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    text = json.dumps({"command": command, "date": now, **content}, indent=2) + "\n"
    write_whole(path, lambda temporary: temporary.write_text(text))


def _console(stream: TextIO) -> Console:
    width = None if stream.isatty() else _PLAIN_WIDTH
    return Console(file=stream, width=width, highlight=False)
