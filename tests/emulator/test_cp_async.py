"""Copies of threads, cp.async: what they bring, when it is there, and what is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ptx_kernels import Array, kernel

from mqa.emulator import EmulationError, Kind, Report, run
from mqa.emulator.scheduler import SCHEDULES

TILE = ".shared .align 16 .b8 tile[1024];\n.shared .align 8 .b8 bar[8];"
START = """
mov.u64 %rd8, tile;
cvt.u32.u64 %r8, %rd8;
mul.lo.u32 %r9, %r0, $SIZE;
cvt.u64.u32 %rd9, %r9;
add.u32 %r8, %r8, %r9;
add.s64 %rd10, %rd1, %rd9;
add.s64 %rd11, %rd8, %rd9;
setp.lt.u32 %p1, %r0, 20;
setp.ge.u32 %p2, %r0, 20;
selp.u32 %r3, $SIZE, 0, %p1;
createpolicy.fractional.L2::evict_first.b64 %rd12, 1.0;
"""
SHARE = """
ld.shared.b32 %r4, [%rd11+$WORD];
add.s64 %rd13, %rd0, %rd9;
st.global.b32 [%rd13+$WORD], %r4;
"""
DONE = "cp.async.wait_all;\n"


def text(copy: str, size: int, after: str = DONE, *, target: str = "sm_80") -> str:
    """Thread i copies `size` bytes and stores what it then finds there."""
    body = START + f"{copy}\n{after}"
    body += "".join(SHARE.replace("$WORD", str(word)) for word in range(0, size, 4))
    return kernel(body.replace("$SIZE", str(size)), 2, shared=TILE, target=target)


def copied(ptx: str, size: int, given: Array, **how: Any) -> Array:
    """Bytes that threads found, [32, size]."""
    out = np.full((32, size), 0xEE, np.uint8)
    run(ptx, "k", 1, 32, [out, given], **how)
    return out


def report(ptx: str, size: int, given: Array, **how: Any) -> Report:
    with pytest.raises(EmulationError) as caught:
        copied(ptx, size, given, **how)
    return caught.value.report


FORMS = [
    # Behind the opcode and the addresses; bytes that threads 0 to 19 and the others read.
    ("ca.shared.global", 4, "", 4, 4),
    ("ca.shared::cta.global.L2::64B", 8, "", 8, 8),
    ("ca.shared.global", 16, "", 16, 16),
    ("cg.shared.global.L2::256B", 16, "", 16, 16),
    ("cg.shared.global.L2::cache_hint", 16, ", %rd12", 16, 16),
    ("ca.shared.global", 4, ", 3", 3, 3),
    ("cg.shared.global.L2::128B", 16, ", %r3", 16, 0),
    ("ca.shared.global", 8, ", %p1", 0, 8),
    ("ca.shared.global", 8, ", !%p1", 8, 0),
    ("cg.shared.global.L2::cache_hint.L2::128B", 16, ", 7, %rd12", 7, 7),
    ("cg.shared.global.L2::cache_hint", 16, ", %p2, %rd12", 16, 0),
]


def form_text(form: str, size: int, rest: str) -> str:
    return text(f"cp.async.{form} [%r8], [%rd10], {size}{rest};", size)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("form", "size", "rest", "first", "others"), FORMS)
def test_bytes_that_are_not_read_become_zero(
    form: str, size: int, rest: str, first: int, others: int, schedule: str
) -> None:
    given = np.random.default_rng(size).integers(1, 256, (32, size), np.uint8)
    got = copied(form_text(form, size, rest), size, given, schedule=schedule, checks=True)
    want = given.copy()
    want[:20, first:] = 0
    want[20:, others:] = 0
    assert np.array_equal(got, want)


def test_ptxas_takes_the_forms(assembles: Callable[[list[str]], None]) -> None:
    assembles([form_text(*form[:3]) for form in FORMS])


@pytest.mark.parametrize("rest", [", %r3", ", %p2"])
def test_a_source_of_which_nothing_is_read_may_be_anywhere(rest: str) -> None:
    """20 threads have rows, the others' addresses are past the end and off 16 bytes."""
    given = np.full((20, 16), 7, np.uint8)
    move = "selp.b64 %rd10, %rd10, 3, %p1;\n"
    got = copied(text(f"{move}cp.async.cg.shared.global [%r8], [%rd10], 16{rest};", 16), 16, given)
    assert (got[:20] == 7).all()
    assert not got[20:].any()


COPY = "cp.async.cg.shared.global [%r8], [%rd10], 16;\n"
COMMIT = "cp.async.commit_group;\n"
NEXT = "add.u32 %r8, %r8, 512;\n"
LATE = "add.s64 %rd11, %rd11, 512;\n"
TWO = f"{COPY}{COMMIT}{NEXT}{COPY}{COMMIT}"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("copies", "wait", "found"),
    [
        (COPY, "", True),
        (COPY, "cp.async.wait_group 0;\n", True),
        (COPY + COMMIT, "", True),
        (COPY + COMMIT, "cp.async.wait_group 1;\n", True),
        (COPY + COMMIT, "cp.async.wait_group 0;\n", False),
        (TWO, f"cp.async.wait_group 1;\n{LATE}", True),
        (TWO, f"cp.async.wait_all;\n{LATE}", False),
        (COMMIT + TWO, f"cp.async.wait_group 1;\n{LATE}", True),
        (f"{TWO}{COMMIT}", f"cp.async.wait_group 1;\n{LATE}", False),
    ],
)
def test_what_no_wait_covers_is_a_race(
    copies: str, wait: str, schedule: str, *, found: bool
) -> None:
    given = np.full((32, 16), 9, np.uint8)
    ptx = text(copies, 16, wait)
    if found:
        assert report(ptx, 16, given, schedule=schedule, checks=True).kind is Kind.RACE
    else:
        assert (copied(ptx, 16, given, schedule=schedule, checks=True) == 9).all()


def test_the_older_group_is_there_while_the_newer_one_may_come() -> None:
    given = np.full((32, 16), 9, np.uint8)
    ptx = text(TWO, 16, "cp.async.wait_group 1;\n")
    for schedule in SCHEDULES:
        found = report(ptx, 16, given, schedule=schedule, checks=True)
        assert found.kind is Kind.UNFINISHED  # nobody ever waits for the newer one
        whole = ptx.replace("\nret;", f"\n{DONE}ret;")
        assert (copied(whole, 16, given, schedule=schedule, checks=True) == 9).all()


OTHERS = "xor.b32 %r5, %r9, 512;\ncvt.u64.u32 %rd14, %r5;\nadd.s64 %rd11, %rd8, %rd14;\n"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_other_warps_copied_needs_a_barrier_after_their_waits(schedule: str) -> None:
    """Each of two warps reads what the other one copied."""
    given = np.random.default_rng(1).integers(0, 256, (64, 16), np.uint8)
    out = np.zeros((64, 16), np.uint8)
    for barrier in ("", "bar.sync 0;\n"):
        ptx = text(COPY, 16, DONE + barrier + OTHERS)
        how = {"schedule": schedule, "checks": True}
        if not barrier:
            with pytest.raises(EmulationError) as caught:
                run(ptx, "k", 1, 64, [out, given], **how)
            # Where the other warp has not even issued its copy, nothing was written.
            assert caught.value.report.kind in (Kind.RACE, Kind.UNWRITTEN)
            continue
        run(ptx, "k", 1, 64, [out, given], **how)
        assert np.array_equal(out, np.concatenate([given[32:], given[:32]]))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("noinc", "count"), [("", 1), (".noinc", 32)])
def test_an_mbarrier_hears_of_copies(noinc: str, count: int, schedule: str) -> None:
    """On SM80, where a thread has to ask again and again. Without .noinc the arrivals of copies
    come on top of those that the barrier expects."""
    body = f"""
    mov.u64 %rd14, bar;
    cvt.u32.u64 %r6, %rd14;
    setp.ne.u32 %p3, %r0, 0;
    @%p3 bra READY;
    mbarrier.init.shared.b64 [%r6], {count};
    READY: bar.sync 0;
    {COPY}
    cp.async.mbarrier.arrive{noinc}.shared.b64 [%r6];
    bar.sync 0;
    {"" if noinc else "@!%p3 mbarrier.arrive.shared.b64 _, [%r6];"}
    AGAIN: mbarrier.test_wait.parity.shared.b64 %p4, [%r6], 0;
    @!%p4 bra AGAIN;
    """
    given = np.full((32, 16), 5, np.uint8)
    got = copied(text(body, 16, ""), 16, given, schedule=schedule, checks=True)
    assert (got == 5).all()


@pytest.mark.parametrize(
    ("before", "rest", "kind", "said"),
    [
        ("add.u32 %r8, %r8, 8;", "", Kind.MISALIGNED, "cp.async of 16 bytes"),
        ("add.s64 %rd10, %rd10, 4;", "", Kind.MISALIGNED, "cp.async of 16 bytes"),
        ("add.u32 %r8, %r8, 1024;", "", Kind.OUT_OF_BOUNDS, "cp.async of 16 bytes"),
        ("add.s64 %rd10, %rd10, 16;", "", Kind.OUT_OF_BOUNDS, "past the end of p1"),
        ("mov.u32 %r3, 20;", ", %r3", Kind.OUT_OF_BOUNDS, "cp.async of 20 bytes into 16"),
    ],
)
def test_mistakes_of_addresses_and_sizes_are_found(
    before: str, rest: str, kind: Kind, said: str
) -> None:
    given = np.zeros((32, 16), np.uint8)
    ptx = text(f"{before}\ncp.async.cg.shared.global [%r8], [%rd10], 16{rest};", 16)
    for schedule in SCHEDULES:
        found = report(ptx, 16, given, schedule=schedule)
        assert found.kind is kind
        assert said in str(found)
