"""Runs the command in this process, with backends of our own beside the reference."""

import importlib

import pytest
import torch
from typer.testing import CliRunner

from mqa.cli.app import app

BACKENDS = importlib.import_module("mqa.backends")  # mqa.backends is the public function.


@pytest.fixture
def run():
    """run("check", "--suite", "ci") -> exit_code, stdout, stderr"""
    return lambda *arguments: CliRunner().invoke(app, arguments, prog_name="mqa")


@pytest.fixture
def error_line():
    """The one line that a refused command prints."""

    def line(result, exit_code=2):
        assert result.exit_code == exit_code, result.output
        lines = result.stderr.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("mqa: ")
        return lines[0]

    return line


class Broken(BACKENDS.Reference):
    """The reference with a fault: one logit is off by three units in the last place."""

    name = "broken"

    def dense(self, call, out):
        super().dense(call, out)
        for _ in range(3):
            out[0, 0] = torch.nextafter(out[0, 0], torch.tensor(torch.inf, dtype=out.dtype))


class Crashing(BACKENDS.Reference):
    name = "crashing"

    def dense(self, call, out):
        raise RuntimeError("launch failed:\nillegal address")


class Choosy(BACKENDS.Reference):
    name = "choosy"

    def reasons_against(self, problem, device):
        yield f"H={problem.H} is not 99"

    def unusable_here(self):
        return "needs a GPU that nobody has: buy one"


@pytest.fixture
def more_backends(monkeypatch):
    monkeypatch.setattr(BACKENDS, "BACKENDS", (Choosy(), BACKENDS.REFERENCE, Broken(), Crashing()))
