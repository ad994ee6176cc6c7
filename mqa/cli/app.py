"""The commands put together, and what becomes of their errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import mqa
from mqa import config
from mqa.cli import INTERRUPTED, bench, check, compile, demo, doctor, emulate, explain
from mqa.cli.console import Stop, one_line, print_whole, standard_error, standard_output

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""Typer exports none of click's other usage errors, and has a click of its own since 0.2x."""


class _Commands(TyperGroup):
    """Prints each error as one line."""

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        run = super().main
        code = _guarded(lambda: run(args, standalone_mode=False, **extra))
        if standalone_mode:
            sys.exit(code)
        return code


def _guarded(command: Callable[[], Any]) -> int:
    """Run the command; its exit code, with any error of the user's told in one line."""
    try:
        return int(command() or 0)
    except Stop as stop:
        _complain(str(stop))
        return stop.exit_code
    except _UsageError as error:
        _complain(f"{one_line(error.format_message())} (see mqa --help)")  # type: ignore[attr-defined]
        return 2
    except typer.Abort:  # An older Typer's answer to Ctrl-C, which newer ones exit with 130 for.
        return INTERRUPTED


def _complain(message: str) -> None:
    print_whole(standard_error(), f"mqa: {message}")


def _version(wanted: bool) -> None:
    if wanted:
        print_whole(standard_output(), f"mqa-logits {mqa.__version__}")
        raise typer.Exit


def _check_variables() -> None:
    """Stops at the first variable of ours that is wrong, before a command is half-way."""
    try:
        config.check()
    except ValueError as error:
        raise Stop(str(error)) from error


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Scores of sparse-attention indexers from FP8, MXFP8, MXFP4 and BF16 inputs.

    \b
    mqa demo                          a first look, with a picture
    mqa doctor                        what this machine can run
    mqa check                         does a backend compute what it should
    mqa explain "dense fp8 S=..."     who would run this call, and why not the others
    mqa emulate "dense fp8 S=..."     run its kernel on the CPU, races looked for
    mqa bench                         how fast, against what people use today
    mqa compile --arch sm_90a         compile every kernel ahead of its first call
    """
    if context.invoked_subcommand not in (None, "doctor"):  # which tells all that is wrong
        _check_variables()
    if context.invoked_subcommand is None:
        print_whole(standard_output(), context.get_help())


app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("check")(check.check)
app.command("explain")(explain.explain)
app.command("emulate")(emulate.emulate)
app.command("bench")(bench.bench)
app.command("compile")(compile.compile)
