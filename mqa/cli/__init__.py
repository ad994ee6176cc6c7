"""The `mqa` command: demo, doctor, check, explain, emulate, bench, compile.

Needs the extras `cli` and, for pictures, `plots`.
"""

from __future__ import annotations

import importlib.util
import sys

INSTALL = 'pip install "mqa-logits[cli,plots]"'
INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def main() -> None:
    """Entry point of the command; ends the process with its exit code.

    0: done, 1: something is wrong (a mismatch, a missing package), 2: wrong arguments, 130: Ctrl-C.
    """
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(f"mqa: {' and '.join(missing)} missing: {INSTALL}\n")
        raise SystemExit(1)
    try:
        from mqa.cli.app import app  # Imported late: only now is it known that typer is there.

        app(prog_name="mqa")
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
