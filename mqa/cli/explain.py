"""`mqa explain`: who would run a problem, and every reason against the others."""

from __future__ import annotations

import re
from typing import Annotated

import torch
import typer

from mqa.backends import explain as reasons
from mqa.backends import explain_elsewhere
from mqa.cli.console import Stop, parse_problems, print_whole, standard_output, usable_device


def explain(
    problem: Annotated[
        str, typer.Argument(help="One line, like 'dense fp8 S=512 N=8192 H=64 D=128'.")
    ],
    device: Annotated[
        str,
        typer.Option(
            help="cpu, cuda, cuda:1, or a GPU by its capability, here or not: sm80, sm_100f."
        ),
    ] = "",
) -> None:
    """Say which backends can run a problem on a device, and why the others can't.

    Of a GPU that this machine does not have it says what would be so where driver, compiler and
    headers are as they have to be.

    \b
    Examples:
      mqa explain "dense fp8 S=512 N=8192 H=64 D=128"
      mqa explain "paged mxfp4 B=4 next_n=2 H=64 D=128 P=64 blocks=40 columns=9 L=576" --device sm90
      mqa explain "paged bf16 B=4 next_n=1 H=48 D=128 P=48 blocks=40 columns=9 L=400" --device sm86
    """
    parsed = parse_problems([problem])[0]
    where = _device(device)
    if isinstance(where, torch.device):
        print_whole(standard_output(), reasons(parsed, where))
    else:
        print_whole(standard_output(), explain_elsewhere(parsed, *where))


def _device(name: str) -> torch.device | tuple[int, int]:
    """A device of this machine, or the compute capability of one that it does not have."""
    architecture = re.fullmatch(r"sm_?(\d+)(\d)[af]?", name)
    if not name:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not architecture:
        if re.fullmatch(r"cpu|cuda(:\d+)?", name):
            return usable_device(name)
        raise Stop(f"--device {name!r}: expected cpu, cuda, cuda:<index>, or sm80 and the like")
    wanted = (int(architecture[1]), int(architecture[2]))
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_capability(index)
        family = name.endswith("f") and found[0] == wanted[0] and found[1] >= wanted[1]
        if family or found == wanted:
            return torch.device("cuda", index)
    return wanted
