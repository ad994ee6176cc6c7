"""Timelines are valid Chrome traces, and say what the launch did."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ptx_kernels import kernel
from tensor_kernels import COMMIT, WAIT, stored
from test_tcgen05_order import IMAGE, SCALED, kernel_of

from mqa.cuda import compiler
from mqa.emulator import EmulationError, Summary, run, scheduled
from mqa.emulator.scheduler import SCHEDULES
from mqa.problem import DenseProblem, parse
from mqa.testing import make_case

Event = dict[str, Any]
KEYS = {
    "X": {"name", "pid", "tid", "ts", "dur", "args"},
    "M": {"name", "pid", "tid", "args"},
    "C": {"name", "pid", "tid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    "i": {"name", "pid", "tid", "ts", "s", "args"},
}
needs_nvrtc = pytest.mark.skipif(
    compiler.unavailable() is not None, reason="NVRTC is missing, which compiles the kernels"
)


class Trace:
    """A file, checked: known events, named tracks, slices that do not overlap, whole arrows."""

    def __init__(self, path: Path) -> None:
        self.content = json.loads(path.read_text())
        self.events: list[Event] = self.content["traceEvents"]
        for event in self.events:
            assert {"ph", *KEYS[event["ph"]]} == event.keys()
        named = [e for e in self.events if e["name"] == "thread_name"]
        self.tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in named}
        assert len(self.tracks) == len(named)
        self.processes = {
            e["pid"]: e["args"]["name"] for e in self.events if e["name"] == "process_name"
        }
        self.slices: dict[tuple[int, int], list[Event]] = defaultdict(list)
        for event in self.of("X"):
            assert event["dur"] > 0
            self.slices[event["pid"], event["tid"]].append(event)
        assert self.slices.keys() <= self.tracks.keys()
        assert {event["pid"] for event in self.of("C")} <= self.processes.keys()
        self._check_order()
        self._check_arrows()

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["ph"] == kind]

    def _check_order(self) -> None:
        for slices in self.slices.values():
            for one, other in itertools.pairwise(slices):
                assert one["ts"] + one["dur"] <= other["ts"]

    def _check_arrows(self) -> None:
        begun = {event["id"]: event for event in self.of("s")}
        assert begun.keys() == {event["id"] for event in self.of("f")}
        for event in (*begun.values(), *self.of("f")):
            slices = self.slices[event["pid"], event["tid"]]
            assert any(x["ts"] <= event["ts"] < x["ts"] + x["dur"] for x in slices)

    def on(self, start: str) -> list[Event]:
        """Slices of the tracks whose names begin so."""
        return [
            event
            for track, name in self.tracks.items()
            if name.startswith(start)
            for event in self.slices[track]
        ]

    def instructions(self) -> dict[str, int]:
        """Executed, by track."""
        found: dict[str, int] = defaultdict(int)
        for track, name in self.tracks.items():
            if name.startswith("warp"):
                counts = (event["args"].get("instructions", 0) for event in self.slices[track])
                found[name] += sum(counts)
        return found


COPY = """
mov.u64 %rd8, shared;
cvt.u32.u64 %r8, %rd8;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r8], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r8], 512;
add.u32 %r3, %r8, 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], 512, [%r8];
READY: bar.sync 0;
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r8], {parity};
@!%p2 bra WAIT;
mul.wide.u32 %rd9, %r0, 4;
add.s64 %rd10, %rd8, %rd9;
ld.shared.u32 %r9, [%rd10+256];
add.s64 %rd9, %rd0, %rd9;
st.global.u32 [%rd9], %r9;
"""
SHARED = ".shared .align 128 .b8 shared[1024];"


def copied(path: Path | None, schedule: str = "lazy", parity: int = 0) -> Any:
    given, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    text = kernel(COPY.format(parity=parity), 2, shared=SHARED)
    summary = run(text, "k", 1, 128, [out, given], schedule=schedule, seed=4, trace=path)
    assert (out == given).all()
    return summary


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_copy_and_who_waits_for_it_are_on_the_timeline(tmp_path: Path, schedule: str) -> None:
    summary = copied(tmp_path / "trace.json", schedule)
    trace = Trace(tmp_path / "trace.json")
    assert trace.processes == {1: "CTA 0 of k"}
    assert trace.instructions() == {f"warp {i:02}": n for i, n in summary.instructions.items()}
    (copy,) = trace.on("bulk copy")
    assert copy["args"]["bytes"] == 512
    assert copy["args"]["by"] == "warp 00"
    assert copy["args"]["shared address"] == "0x500"
    assert copy["args"]["PTX"].startswith("cp.async.bulk")
    flips = [event for event in trace.of("C") if event["name"] == "mbarrier 0x400"]
    assert [event["args"]["phase"] for event in flips] == [0, 1]
    # What ends the copy ends the phase, and then only may anybody go on who waits for it.
    assert copy["ts"] <= flips[1]["ts"] <= copy["ts"] + copy["dur"]
    waits = [event for event in trace.of("X") if event["name"] == "mbarrier 0x400 parity 0"]
    assert all(event["ts"] + event["dur"] >= flips[1]["ts"] for event in waits)
    if schedule == "lazy":
        assert len(waits) == 4
        assert "512 bytes to come" in waits[0]["args"]["waits for"]
    last = max(event["ts"] + event["dur"] for event in trace.of("X"))
    assert last == sum(summary.instructions.values())


def test_a_launch_that_fails_has_a_timeline_up_to_there(tmp_path: Path) -> None:
    with pytest.raises(EmulationError) as caught:
        copied(tmp_path / "trace.json", parity=1)  # of the phase before the first
    trace = Trace(tmp_path / "trace.json")
    (finding,) = trace.of("i")
    assert finding["args"]["report"] == str(caught.value)
    assert finding["ts"] == max(event["ts"] + event["dur"] for event in trace.on("warp"))
    (copy,) = trace.on("bulk copy")
    assert copy["args"]["completed"] is False


def test_an_instruction_that_fails_after_it_issued_has_no_arrow(tmp_path: Path) -> None:
    body = COPY[: COPY.index("READY:")].replace("%p1, %r0, 0", "%p1, %r9, %r9")
    body = body.replace("mbarrier.init", "setp.lt.u32 %p2, %r0, 1;\n@%p2 mbarrier.init")
    body = body.replace("mbarrier.arrive", "@%p2 mbarrier.arrive")
    # The second thread's copy is not aligned.
    body = body.replace("cp.async", "mad.lo.u32 %r3, %r0, 8, %r3;\ncp.async")
    text = kernel(body + "READY:", 2, shared=SHARED)
    given = [np.zeros(128, np.uint32)] * 2
    with pytest.raises(EmulationError, match="not multiples of 16"):
        run(text, "k", 1, 32, given, schedule="lazy", trace=tmp_path / "trace.json")
    trace = Trace(tmp_path / "trace.json")
    assert len(trace.on("bulk copy")) == 1
    assert trace.of("s") == []


def test_waits_that_never_end_are_on_the_timeline(tmp_path: Path) -> None:
    body = "setp.lt.u32 %p1, %r0, 32;\n@%p1 bar.sync 1, 96;\nbar.sync 2, 96;\nadd.u32 %r3, %r3, 1;"
    with pytest.raises(EmulationError, match="deadlock"):
        run(kernel(body, 0), "k", 1, 64, [], trace=tmp_path / "trace.json")
    (wait,) = (e for e in Trace(tmp_path / "trace.json").of("X") if e["name"] == "barrier 1")
    assert wait["args"]["over"] is False


def test_divided_threads_have_tracks_of_their_own(tmp_path: Path) -> None:
    body = """
    setp.lt.u32 %p1, %r0, 8;
    @%p1 bra OTHER;
    bar.warp.sync 0xffffffff;
    bra DONE;
    OTHER: add.u32 %r3, %r0, 1;
    bar.warp.sync 0xffffffff;
    DONE: add.u32 %r3, %r0, 2;
    """
    summary = run(kernel(body, 0), "k", 1, 32, [], trace=tmp_path / "trace.json")
    trace = Trace(tmp_path / "trace.json")
    assert trace.instructions()["warp 00"] == summary.instructions[0]
    assert {"0x000000ff", "0xffffff00"} <= {
        event["args"].get("threads") for event in trace.on("warp 00")
    }
    assert {event["name"] for event in trace.on("warp 00, divided 1")} == {"threads of the warp"}


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        run(kernel("", 0), "k", 1, 32, [], trace=tmp_path / "missing" / "trace.json")


LINE = "dense fp8 S=8 N=512 H=64 D=128 sms=1 regime=exact"


@needs_nvrtc
@pytest.mark.parametrize("schedule", ["eager", "hunt"])
def test_a_kernel_of_the_library_tells_its_roles_and_bytes(tmp_path: Path, schedule: str) -> None:
    problem = parse(LINE)
    assert isinstance(problem, DenseProblem)
    with scheduled(schedule, 3, trace=tmp_path / "trace.json") as launches:
        make_case(problem).run(backend="sm90-emulated")
    (summary,), trace = launches, Trace(tmp_path / "trace.json")
    assert len(trace.processes) == 1
    of_role = {role.name: role.warps for role in summary.warp_roles}
    names = {warp: f"warp {warp:02} {name}" for name, warps in of_role.items() for warp in warps}
    assert trace.instructions() == {names[i]: n for i, n in summary.instructions.items()}
    assert sum(summary.roles.values()) == sum(summary.instructions.values())
    # One block of 8 rows: each of q and of the keys comes once.
    tiles = problem.S * problem.H * problem.D + problem.N * problem.D
    assert sum(event["args"]["bytes"] for event in trace.on("TMA")) == tiles
    assert {event["args"]["by"] for event in trace.on("TMA")} == {names[16]}
    # 4 steps of 32 dims for each 64 keys and 128 columns (two of the rows).
    assert len(trace.on("wgmma")) == problem.N // 64 * problem.S // 2 * 4
    assert {track for track in trace.tracks.values() if track.startswith("wgmma")} >= {
        f"wgmma of warpgroup {i} 0" for i in range(4)
    }


@needs_nvrtc
def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    case = make_case(parse("dense fp8 S=3 N=70 H=8 D=32 sms=2 regime=exact"))
    files = []
    for number, seed in enumerate((3, 3, 4)):
        files.append(tmp_path / f"{number}.json")
        with scheduled("hunt", seed, trace=files[-1]):
            case.run(backend="sm90-emulated")
    first, again, other = (Trace(path).content for path in files)
    assert first == again
    assert first != other


@needs_nvrtc
def test_launches_of_a_block_follow_each_other(tmp_path: Path) -> None:
    case = make_case(parse("dense fp8 S=3 N=70 H=8 D=32 sms=1 regime=exact"))
    with scheduled(trace=tmp_path / "trace.json") as launches:
        for _ in range(2):
            case.run(backend="sm90-emulated")
    trace = Trace(tmp_path / "trace.json")
    assert len(trace.processes) == len(launches) == 2
    first = sum(launches[0].instructions.values())
    starts = {pid: min(e["ts"] for e in trace.of("X") if e["pid"] == pid) for pid in (1, 2)}
    assert starts == {1: 0, 2: first}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_tensor_pipe_has_tracks(schedule: str, tmp_path: Path) -> None:
    path = tmp_path / "tensor.json"
    summary = tensor_trace(schedule, path)
    trace = Trace(path)
    (product,) = trace.on("tcgen05.mma")
    assert product["args"]["by"] == "warp 00"
    assert product["args"]["tensor memory"] == "lanes 0-127, columns 448-463 of tensor memory"
    assert product["args"]["bytes"] == 32 * (128 + 16)
    assert [len(trace.on(f"tcgen05.{what}")) for what in ("cp", "ld", "commit")] == [2, 4, 1]
    loads = {event["args"]["tensor memory"] for event in trace.on("tcgen05.ld")}
    assert loads == {
        f"lanes {32 * q}-{32 * q + 31}, columns 448-463 of tensor memory" for q in range(4)
    }
    assert summary.classes["tcgen05"] == sum(
        count for opcode, count in summary.opcodes.items() if opcode.startswith("tcgen05")
    )


def tensor_trace(schedule: str, path: Path) -> Summary:
    """A launch with copies to tensor memory, a product, a commit, and loads by four warps."""
    text = kernel_of(SCALED + COMMIT + WAIT + stored(16))
    out = np.zeros((128, 16), np.float32)
    return run(text, "k", 1, 128, [out, IMAGE], schedule=schedule, seed=1, trace=path)
