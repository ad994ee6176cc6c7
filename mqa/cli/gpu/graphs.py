"""A party's calls as graphs, one for each set of inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mqa.cli.gpu.calls import backend_of, call_mqa
from mqa.cli.gpu.device import Device
from mqa.cli.gpu.inputs import Inputs
from mqa.cli.gpu.judge import assert_defined
from mqa.cli.gpu.peers import Peer
from mqa.cli.gpu.rows import PEER, Party
from mqa.testing.timing import Work


class Turn:
    """Works that take turns: each call runs the next one."""

    def __init__(self, works: Sequence[Work], first: int = 0) -> None:
        self._works, self._at = works, first

    def __call__(self) -> None:
        self._works[self._at % len(self._works)]()
        self._at += 1


class Prepared:
    """A party with a graph for each set of inputs; `result` is what the first one fills."""

    def __init__(self, party: Party, sets: Sequence[Inputs], device: Device, peer: Peer) -> None:
        self.party, self.inputs = party, sets[0]
        self.backend = None if party.who == PEER else backend_of(party, device.where)
        # Replays read what the calls hold, such as schedules, so the calls must live as long.
        self._calls: list[Work] = []
        captured: list[tuple[Work, Tensor]] = []
        for inputs in sets:
            if party.who == PEER:
                work = peer.work(inputs, party.call)
            else:
                work = call_mqa(inputs, party.call)
            if not captured:
                work()  # compiles and loads
                device.synchronize()
            self._calls.append(work)
            captured.append(device.capture(work))
        self.replays = [replay for replay, _ in captured]
        self.results = [result for _, result in captured]
        self.results[0].fill_(torch.nan)
        for replay in self.replays:
            replay()
        device.synchronize()

    def error(self) -> float:
        return assert_defined(self.results[0], self.inputs, self.party.call)
