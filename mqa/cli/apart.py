"""Cases judged in a process of their own: what a kernel does to its GPU, or never ends doing, costs
one case and not the run.

A kernel that faults leaves its process without a GPU, and one that hangs keeps it forever. Both are
failures like any other here: the process is replaced and the next case goes on.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from mqa.cli.console import Stop, one_line
from mqa.cli.verdict import FAILED, Outcome, Ran, judge
from mqa.problem import Problem
from mqa.testing import make_case

Judge = Callable[[Problem, torch.device, str | None, Ran], Outcome]
Answer = tuple[Outcome | Stop, bool]
"""What became of a case, and whether the process can take another one."""

STARTING_SECONDS = 300.0
"""For a new process to import what it needs."""


def judge_problem(
    problem: Problem, device: torch.device, backend: str | None, ran: Ran = lambda: None
) -> Outcome:
    """Draw the problem's case and judge it (`mqa.cli.verdict`). Stops at a problem that no case can
    be drawn of, and at a name that no backend has."""
    try:
        case = make_case(problem, device)
    except (ValueError, AssertionError) as error:
        raise Stop(f"{problem}: {one_line(str(error))}") from error
    return judge(case, backend, ran)


class Apart:
    """Judges cases, one after the other, in a process that is started when it is first needed.

    `seconds` is how long a case may take until the device is through, what has to be compiled
    included; its oracle, on the CPU, may take any time.
    """

    def __init__(
        self,
        device: torch.device,
        backend: str | None,
        seconds: float,
        judge: Judge = judge_problem,
    ) -> None:
        self._about = (judge, device, backend)
        self._seconds = seconds
        self._process: Any = None
        self._ours: Connection | None = None
        self.lost = 0
        """Processes that did not survive their case."""

    def __enter__(self) -> Apart:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def __call__(self, problem: Problem) -> Outcome:
        """What became of the case. Raises the Stop of the judge."""
        pipe = self._started()
        begin = time.perf_counter()
        answer = self._asked(pipe, problem)
        if isinstance(answer, str):
            self._lose()
            seconds = time.perf_counter() - begin
            return Outcome(problem, self._about[2] or "none", FAILED, None, answer, seconds)
        outcome, fit = answer
        if not fit:
            self._lose()
        if isinstance(outcome, Stop):
            raise outcome
        return outcome

    def _asked(self, pipe: Connection, problem: Problem) -> Answer | str:
        """The answer, or why there is none."""
        try:
            pipe.send(problem)
            limit: float | None = self._seconds
            while pipe.poll(limit):
                answer: Answer | None = pipe.recv()
                if answer is not None:
                    return answer
                limit = None  # the device is through
        except (EOFError, OSError):
            self._process.join()
            return f"its process ended with exit code {self._process.exitcode}"
        return f"no result after {self._seconds:g} s: its process was ended"

    def _started(self) -> Connection:
        if self._ours is not None:
            return self._ours
        # Forked processes cannot use CUDA.
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, *self._about), daemon=True)
        self._process.start()
        theirs.close()  # so that its end is seen here
        try:
            if self._ours.poll(STARTING_SECONDS):
                self._ours.recv()
                return self._ours
        except EOFError:
            pass
        self._end()
        raise Stop("the process that judges cases does not start", exit_code=1)

    def _lose(self) -> None:
        self.lost += 1
        self._end()

    def _end(self) -> None:
        if self._ours is None:
            return
        self._ours.close()
        self._process.kill()
        self._process.join()
        self._ours = None


def _serve(pipe: Connection, judge: Judge, device: torch.device, backend: str | None) -> None:
    """What the process does: say that it is there, then answer problems until nobody asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the command, which ends this
    pipe.send(None)
    while True:
        try:
            problem = pipe.recv()
        except EOFError:
            return
        try:
            outcome: Outcome | Stop = judge(problem, device, backend, lambda: pipe.send(None))
        except Stop as stop:
            outcome = stop
        except RuntimeError as error:  # of torch: the device is gone before the case was drawn
            detail = f"{type(error).__name__}: {one_line(str(error))}"
            outcome = Outcome(problem, backend or "none", FAILED, None, detail, seconds=0.0)
        pipe.send((outcome, answers(device)))


def answers(device: torch.device) -> bool:
    """Whether the device still does what it is asked; after a fault it no longer does."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).add_(1.0).item()
    except RuntimeError:
        return False
    return True
