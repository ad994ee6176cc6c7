"""Peak memory of one call, measured in a process of its own.

`python -m mqa.cli.memory "<problem>" <contender>` prints one JSON line.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import resource
import subprocess
import sys
from pathlib import Path

from mqa.cli.console import Stop
from mqa.cli.contenders import CONTENDERS
from mqa.problem import DenseProblem, Problem, parse
from mqa.testing import make_case

_STATUS = Path("/proc/self/status")
_KIB = 1 << 10
_MINUTES = 600


def measure(problem: Problem, contender: str) -> int:
    """Bytes by which a fresh process grows, at its peak, in one call; the result counts too."""
    command = [sys.executable, "-m", "mqa.cli.memory", str(problem), contender]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MINUTES, check=True)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise Stop(f"measuring memory of {contender} failed: {last}", exit_code=1) from error
    return int(json.loads(done.stdout)["bytes"])


def peak_growth(problem: Problem, contender: str) -> int:
    """`measure` in this process: right only if nothing else has run in it."""
    make_work = CONTENDERS[contender]
    make_work(make_case(_tiny(problem)))()  # Loads libraries, starts threads.
    work = make_work(make_case(problem))
    before = _settle()
    work()
    return max(0, _peak() - before)


def _tiny(problem: Problem) -> Problem:
    kind = "dense" if isinstance(problem, DenseProblem) else "paged"
    shape = "S=2 N=64" if kind == "dense" else "B=1 next_n=1 P=16 blocks=4 columns=4 L=64"
    return parse(f"{kind} {problem.format} {shape} H={problem.H} D={problem.D}")


def _settle() -> int:
    """Give freed memory back and restart the peak at what is in use now; returns that."""
    gc.collect()
    if not _STATUS.exists():
        return _peak()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """Peak resident bytes of this process, since `_settle` on Linux."""
    if _STATUS.exists():
        found = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * _KIB
    unit = 1 if sys.platform == "darwin" else _KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
    """Measure what the arguments name."""
    line, contender = sys.argv[1:]
    sys.stdout.write(json.dumps({"bytes": peak_growth(parse(line), contender)}) + "\n")


if __name__ == "__main__":
    main()
