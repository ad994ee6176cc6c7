"""`mqa explain`: who would run a problem, and every reason against the others."""

from __future__ import annotations

import re
from typing import Annotated

import torch
import typer

from mqa.backends import explain as reasons
from mqa.cli.console import Stop, parse_problems, print_whole, standard_output, usable_device


def explain(
    problem: Annotated[
        str, typer.Argument(help="One line, like 'dense fp8 S=512 N=8192 H=64 D=128'.")
    ],
    device: Annotated[
        str,
        typer.Option(help="cpu, cuda, cuda:1, or the first GPU of a capability: sm90, sm100f."),
    ] = "",
) -> None:
    """Say which backends can run a problem on a device, and why the others can't.

    \b
    Examples:
      mqa explain "dense fp8 S=512 N=8192 H=64 D=128"
      mqa explain "paged mxfp4 B=4 next_n=2 H=64 D=128 P=64 blocks=40 columns=9 L=576" --device sm90
    """
    parsed = parse_problems([problem])[0]
    print_whole(standard_output(), reasons(parsed, _device(device)))


def _device(name: str) -> torch.device:
    architecture = re.fullmatch(r"sm_?(\d+)(\d)[af]?", name)
    if not name:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not architecture:
        return usable_device(name)
    wanted = (int(architecture[1]), int(architecture[2]))
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_capability(index)
        family = name.endswith("f") and found[0] == wanted[0] and found[1] >= wanted[1]
        if family or found == wanted:
            return torch.device("cuda", index)
    raise Stop(f"--device {name!r}: this machine has no GPU of capability {wanted[0]}.{wanted[1]}")
