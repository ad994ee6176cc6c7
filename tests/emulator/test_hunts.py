"""Hunts for races in named kernels: none is found, and logits are right under every schedule."""

from __future__ import annotations

from typing import Any

import pytest

from mqa.cuda import compiler
from mqa.emulator import scheduled, sync
from mqa.problem import parse
from mqa.testing import make_case
from mqa.testing.check import assert_logits

pytestmark = [
    pytest.mark.skipif(
        compiler.unavailable() is not None, reason="NVRTC is missing, which compiles the kernels"
    ),
    pytest.mark.no_cover,
]

HOPPER = {
    "dense_fp8_64_128": "dense fp8 S=9 N=200 H=64 D=128 sms=2 regime=exact windows=random",
    "dense_fp8_32_64": "dense fp8 S=9 N=140 H=32 D=64 out=bfloat16 regime=exact windows=packed",
    "paged_fp8_64_128": "paged fp8 B=3 next_n=1 H=64 D=128 P=64 blocks=20 columns=5 L=300 sms=2 "
    "regime=exact lens=random",
    "paged_fp8_16_64": "paged fp8 B=2 next_n=8 H=16 D=64 P=16 blocks=30 columns=11 L=160 clean=1 "
    "regime=exact lens=ramp",
    "dense_mxfp8_64_64": "dense mxfp8 S=5 N=70 H=64 D=64 regime=exact windows=random",
    "paged_mxfp4_32_128": "paged mxfp4 B=2 next_n=1 H=32 D=128 P=32 blocks=12 columns=4 L=120 "
    "regime=exact lens=random",
    "paged_bf16_64_128": "paged bf16 B=2 next_n=1 H=64 D=128 P=32 blocks=12 columns=4 L=120 "
    "regime=exact lens=random",
}
HOPPER_OTHERS = {
    "dense_fp8_8_32": "dense fp8 S=70 N=600 H=8 D=32 sms=3 regime=exact windows=random",
    "dense_fp8_128_128": "dense fp8 S=9 N=700 H=128 D=128 M=690 sms=2 regime=exact windows=causal",
    "paged_fp8_128_128": "paged fp8 B=2 next_n=8 H=128 D=128 P=64 blocks=20 columns=8 L=450 sms=2 "
    "regime=exact",
    "paged_fp8_32_64_varlen": "paged fp8 B=19 next_n=1 H=32 D=64 P=8 blocks=400 columns=20 L=150 "
    "varlen=1 sms=2 regime=exact lens=random",
    "dense_mxfp4_16_128": "dense mxfp4 S=35 N=300 H=16 D=128 sms=2 regime=exact windows=random",
    "dense_bf16_64_128": "dense bf16 S=11 N=600 H=64 D=128 sms=2 regime=exact windows=packed",
    "dense_bf16_8_32": "dense bf16 S=70 N=600 H=8 D=32 sms=2 regime=exact windows=random",
    "dense_accurate_64_128": "dense fp8 S=11 N=300 H=64 D=128 sms=2 regime=exact windows=packed",
}
BLACKWELL = {
    "dense_fp8_64_128": "dense fp8 S=12 N=70 H=64 D=128 sms=2 regime=exact windows=random",
    "dense_mxfp8_64_64": "dense mxfp8 S=7 N=140 H=64 D=64 out=bfloat16 regime=exact windows=packed",
    "dense_mxfp4_16_128": "dense mxfp4 S=13 N=70 H=16 D=128 regime=exact windows=random",
    "paged_fp8_64_128": "paged fp8 B=5 next_n=1 H=64 D=128 P=64 blocks=40 columns=6 L=384 sms=1 "
    "regime=exact lens=full",
    "paged_mxfp8_16_64": "paged mxfp8 B=2 next_n=2 H=16 D=64 P=16 blocks=30 columns=11 L=160 "
    "clean=1 regime=exact lens=ramp",
    "paged_mxfp4_128_128": "paged mxfp4 B=2 next_n=2 H=128 D=128 P=64 blocks=20 columns=3 L=140 "
    "regime=exact lens=ramp",
}
AROUND = ("dense_fp8_64_128", "paged_fp8_64_128")
"""Those of Blackwell that use every place in shared memory and every accumulator again."""
BLACKWELL_OTHERS = {
    "dense_mxfp8_64_128": "dense mxfp8 S=17 N=130 H=64 D=128 out=bfloat16 regime=exact "
    "windows=random",
    "dense_fp8_8_32": "dense fp8 S=70 N=600 H=8 D=32 sms=3 regime=exact windows=random",
    "dense_fp8_128_128": "dense fp8 S=9 N=700 H=128 D=128 M=690 sms=2 regime=exact windows=causal",
    "dense_mxfp8_128_128": "dense mxfp8 S=9 N=500 H=128 D=128 sms=2 regime=exact windows=random",
    "dense_mxfp4_64_64": "dense mxfp4 S=3 N=4500 H=64 D=64 regime=exact windows=full",
    "paged_fp8_32_64_varlen": "paged fp8 B=19 next_n=1 H=32 D=64 P=8 blocks=400 columns=20 L=150 "
    "varlen=1 sms=2 regime=exact lens=random",
    "paged_mxfp4_64_128": "paged mxfp4 B=5 next_n=1 H=64 D=128 P=64 blocks=300 columns=70 L=4000 "
    "clean=1 sms=2 regime=exact lens=random",
}
PORTABLE = {
    "dense_fp8_24_32": "dense fp8 S=5 N=70 H=24 D=32 sms=2 regime=exact windows=random",
    "paged_bf16_5_32": "paged bf16 B=2 next_n=1 H=5 D=32 P=3 blocks=60 columns=25 L=70 "
    "regime=exact",
}
PORTABLE_OTHERS = {
    "dense_fp8_24_128": "dense fp8 S=9 N=1100 H=24 D=128 sms=2 regime=exact windows=random",
    "dense_mxfp8_130_64": "dense mxfp8 S=3 N=300 H=130 D=64 sms=2 regime=exact windows=packed",
    "dense_mxfp4_8_64": "dense mxfp4 S=40 N=600 H=8 D=64 sms=2 regime=exact windows=random",
    "paged_fp8_64_128": "paged fp8 B=3 next_n=2 H=64 D=128 P=64 blocks=90 columns=20 L=1100 sms=2 "
    "clean=1 regime=exact lens=random",
    "paged_mxfp4_24_64_varlen": "paged mxfp4 B=19 next_n=1 H=24 D=64 P=7 blocks=400 columns=90 "
    "L=600 varlen=1 sms=2 regime=exact lens=random",
}
SEEDS, DEEP_SEEDS, DEEP_STEP = 20, 200, 50


def named(hopper: dict[str, str], blackwell: dict[str, str], portable: dict[str, str]) -> list[Any]:
    """Backend and case of each kernel."""
    found = []
    for name, line in hopper.items():
        backend = "sm90-accurate-emulated" if "accurate" in name else "sm90-emulated"
        found.append(pytest.param(backend, line, id=name))
    for name, line in blackwell.items():
        found.append(pytest.param("sm100-emulated", line, id=f"sm100_{name}"))
    for name, line in portable.items():
        found.append(pytest.param("portable-emulated", line, id=f"portable_{name}"))
    return found


QUICK = named(HOPPER, BLACKWELL, PORTABLE)
OTHERS = named(HOPPER_OTHERS, BLACKWELL_OTHERS, PORTABLE_OTHERS)


def hunt(backend: str, line: str, seeds: range) -> None:
    case = make_case(parse(line))
    for seed in seeds:
        with scheduled("hunt", seed=seed):
            logits = case.run(backend=backend)
        try:
            assert_logits(case, logits)
        except AssertionError as error:
            error.add_note(f"hunted with seed {seed}")
            raise


@pytest.mark.parametrize(("backend", "line"), QUICK)
def test_a_kernel_is_hunted(backend: str, line: str) -> None:
    hunt(backend, line, range(SEEDS))


@pytest.mark.parametrize("name", AROUND)
def test_hunts_go_around_every_ring(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[sync.MBarrier] = []
    original = sync.MBarrier.__init__

    def keep(barrier: sync.MBarrier, *arguments: Any) -> None:
        original(barrier, *arguments)
        made.append(barrier)

    monkeypatch.setattr(sync.MBarrier, "__init__", keep)
    make_case(parse(BLACKWELL[name])).run(backend="sm100-emulated")
    phases = {ring: 0 for ring in ("q_full[0]", "k_full[0]", "sums_full[0]")}
    for barrier in made:
        ring = barrier.cta.shared.name_of(barrier.address)
        if ring in phases:
            phases[ring] = max(phases[ring], barrier.phase)
    assert min(phases.values()) >= 2, phases


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, DEEP_SEEDS, DEEP_STEP))
@pytest.mark.parametrize(("backend", "line"), [*QUICK, *OTHERS])
def test_a_kernel_is_hunted_with_many_seeds(backend: str, line: str, first: int) -> None:
    hunt(backend, line, range(first, first + DEEP_STEP))
