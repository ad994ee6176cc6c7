"""Stand-ins with which the GPU suites run on a CPU: a device, a peer, small rows."""

import itertools
import types

import pytest
import torch

from mqa.cli.gpu.calls import call_mqa
from mqa.cli.gpu.rows import MQA, PEER, Alone, Call, Comparison, Limit, Metadata, Party
from mqa.cli.gpu.windows import batch, causal, drawn, ending, packed


class Cpu:
    """Every run of a party takes as long as `ticks` say, 1 ms by default."""

    where = torch.device("cpu")
    sms = 10
    major = 9
    l2_bytes = 1
    arch = "sm_100f"

    def __init__(self, ticks=(1e-3,)):
        self.ticks, self.events = itertools.cycle(ticks), []

    def capture(self, work):
        result = work()
        return lambda: self.events.append("replay") or result.copy_(work()), result

    def keep_busy(self):
        self.events.append("busy")

    def seconds(self, work):
        work()
        self.events[-1] = "timed"
        return next(self.ticks)

    def clock_hz(self, work, seconds):
        return 1e9

    def synchronize(self):
        pass

    def free(self):
        self.events.append("free")


class OtherMqa:
    """A peer that is right, or off by `error` in its first logit."""

    name, version = "other-mqa", "1.2"

    def __init__(self, error=0.0):
        self.error = error

    def work(self, inputs, call):
        right = call_mqa(inputs, call)

        def run():
            result = right()
            result[0, 0] += self.error
            return result

        return run

    def settings(self):
        return {"num_sms": 10}


def _party(windows, who=MQA, heads=4, dim=32, **call):
    return Party(who, who, windows, heads, dim, Call(**call))


def _comparison(group, other, ours, **options):
    return Comparison(group, f"a row of {group}", other, ours, **options)


SMALL = causal(3, 40)
AGAINST_PEER = _comparison("main", _party(SMALL, PEER), _party(SMALL))
PAGED = batch(2, 3, 130)
"""Pages of 64: the last one of each request holds two tokens."""
PAGED_AGAINST_PEER = _comparison(
    "paged",
    _party(PAGED, PEER, schedule="fresh"),
    _party(PAGED, schedule="fresh"),
    limit=Limit("at_least", 0.98),
    after_kernel=True,
)
SMALL_ROWS = [
    AGAINST_PEER,
    _comparison("variants", _party(SMALL, compressed=True, clean=True), _party(SMALL)),
    _comparison("few rows", _party(causal(1, 40), PEER), _party(causal(1, 40))),
    _comparison("cleaning", _party(SMALL, clean=True), _party(SMALL)),
    _comparison("ragged", _party(SMALL), _party(packed([(3, 9)] * 2), schedule="fresh")),
    _comparison("sizes", _party(SMALL), _party(SMALL, heads=8)),
    Metadata("metadata", "S=3", SMALL, 4),
    PAGED_AGAINST_PEER,
    _comparison(
        "paged rows",
        _party(batch(1, 40, 40)),
        _party(causal(40, 40)),
        limit=Limit("at_most", 1.3),
    ),
    _comparison(
        "paged formats",
        _party(PAGED),
        _party(PAGED, format="mxfp4"),
        limit=Limit("at_least", 1.4),
    ),
    Metadata("paged metadata", "B=9", drawn(9, 1, 900), 4, varlen=True, at_most=5e-6),
    Alone("paged empty", "B=9", _party(ending(9, 70, 300), schedule="random"), at_most=15e-6),
]
CEILINGS = {"fp8": 1.5e15, "fill": 4e12, "read": 4.5e12}


@pytest.fixture
def stand():
    """Cpu, OtherMqa, party, comparison, windows, rows of `ROWS` by group, ceilings."""
    return types.SimpleNamespace(
        Cpu=Cpu,
        OtherMqa=OtherMqa,
        party=_party,
        comparison=_comparison,
        SMALL=SMALL,
        AGAINST_PEER=AGAINST_PEER,
        PAGED=PAGED,
        PAGED_AGAINST_PEER=PAGED_AGAINST_PEER,
        ROWS=SMALL_ROWS,
        row={row.group: row for row in SMALL_ROWS},
        CEILINGS=CEILINGS,
    )
