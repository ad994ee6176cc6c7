"""Hunts for races in named kernels: none is found, and logits are right under every schedule."""

from __future__ import annotations

import pytest

from mqa.cuda import compiler
from mqa.emulator import scheduled
from mqa.problem import parse
from mqa.testing import make_case
from mqa.testing.check import assert_logits

pytestmark = pytest.mark.skipif(
    compiler.unavailable() is not None, reason="NVRTC is missing, which compiles the kernels"
)

QUICK = {
    "dense_fp8_64_128": "dense fp8 S=9 N=200 H=64 D=128 sms=2 regime=exact windows=random",
    "dense_fp8_32_64": "dense fp8 S=9 N=140 H=32 D=64 out=bfloat16 regime=exact windows=packed",
    "paged_fp8_64_128": "paged fp8 B=3 next_n=1 H=64 D=128 P=64 blocks=20 columns=5 L=300 sms=2 "
    "regime=exact lens=random",
    "paged_fp8_16_64": "paged fp8 B=2 next_n=8 H=16 D=64 P=16 blocks=30 columns=11 L=160 clean=1 "
    "regime=exact lens=ramp",
    "dense_mxfp8_64_64": "dense mxfp8 S=5 N=70 H=64 D=64 regime=exact windows=random",
    "paged_mxfp4_32_128": "paged mxfp4 B=2 next_n=1 H=32 D=128 P=32 blocks=12 columns=4 L=120 "
    "regime=exact lens=random",
}
OTHERS = {
    "dense_fp8_8_32": "dense fp8 S=70 N=600 H=8 D=32 sms=3 regime=exact windows=random",
    "dense_fp8_128_128": "dense fp8 S=9 N=700 H=128 D=128 M=690 sms=2 regime=exact windows=causal",
    "paged_fp8_128_128": "paged fp8 B=2 next_n=8 H=128 D=128 P=64 blocks=20 columns=8 L=450 sms=2 "
    "regime=exact",
    "paged_fp8_32_64_varlen": "paged fp8 B=19 next_n=1 H=32 D=64 P=8 blocks=400 columns=20 L=150 "
    "varlen=1 sms=2 regime=exact lens=random",
    "dense_mxfp4_16_128": "dense mxfp4 S=35 N=300 H=16 D=128 sms=2 regime=exact windows=random",
    "dense_accurate_64_128": "dense fp8 S=11 N=300 H=64 D=128 sms=2 regime=exact windows=packed",
}
BLACKWELL = {
    "dense_fp8_64_128": "dense fp8 S=6 N=150 H=64 D=128 regime=exact windows=random",
    "dense_mxfp8_16_64": "dense mxfp8 S=13 N=130 H=16 D=64 out=bfloat16 regime=exact "
    "windows=packed",
    "dense_mxfp4_128_64": "dense mxfp4 S=3 N=260 H=128 D=64 out=float16 regime=exact "
    "windows=random",
    "paged_fp8_64_32": "paged fp8 B=3 next_n=1 H=64 D=32 P=64 blocks=20 columns=5 L=300 sms=2 "
    "regime=exact lens=random",
    "paged_mxfp8_16_128": "paged mxfp8 B=2 next_n=8 H=16 D=128 P=16 blocks=20 columns=9 L=140 "
    "clean=1 regime=exact lens=ramp",
    "paged_mxfp4_8_128": "paged mxfp4 B=5 next_n=1 H=8 D=128 P=8 blocks=90 columns=17 L=130 "
    "varlen=1 regime=exact lens=random",
}
BLACKWELL_OTHERS = {
    "dense_fp8_8_32": "dense fp8 S=70 N=600 H=8 D=32 sms=3 regime=exact windows=random",
    "dense_fp8_128_128": "dense fp8 S=9 N=700 H=128 D=128 M=690 sms=2 regime=exact windows=causal",
    "dense_mxfp8_64_128": "dense mxfp8 S=11 N=700 H=64 D=128 sms=2 regime=exact windows=packed",
    "dense_mxfp4_64_64": "dense mxfp4 S=11 N=900 H=64 D=64 sms=2 regime=exact windows=random",
    "paged_fp8_128_128": "paged fp8 B=2 next_n=8 H=128 D=128 P=64 blocks=20 columns=8 L=450 sms=2 "
    "regime=exact",
    "paged_mxfp4_32_128": "paged mxfp4 B=3 next_n=6 H=32 D=128 P=32 blocks=40 columns=12 L=350 "
    "sms=2 regime=exact lens=random",
}
SEEDS, DEEP_SEEDS, DEEP_STEP = 20, 200, 50


def hunt(line: str, seeds: range, backend: str) -> None:
    case = make_case(parse(line))
    for seed in seeds:
        with scheduled("hunt", seed=seed):
            logits = case.run(backend=backend)
        try:
            assert_logits(case, logits)
        except AssertionError as error:
            error.add_note(f"hunted with seed {seed}")
            raise


def hopper(name: str) -> str:
    return "sm90-accurate-emulated" if "accurate" in name else "sm90-emulated"


@pytest.mark.parametrize("name", QUICK)
def test_a_kernel_is_hunted(name: str) -> None:
    hunt(QUICK[name], range(SEEDS), hopper(name))


@pytest.mark.parametrize("name", BLACKWELL)
def test_a_kernel_of_blackwell_is_hunted(name: str) -> None:
    hunt(BLACKWELL[name], range(SEEDS), "sm100-emulated")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, DEEP_SEEDS, DEEP_STEP))
@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_a_kernel_is_hunted_with_many_seeds(name: str, first: int) -> None:
    hunt((QUICK | OTHERS)[name], range(first, first + DEEP_STEP), hopper(name))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, DEEP_SEEDS, DEEP_STEP))
@pytest.mark.parametrize("name", [*BLACKWELL, *BLACKWELL_OTHERS])
def test_a_kernel_of_blackwell_is_hunted_with_many_seeds(name: str, first: int) -> None:
    line = (BLACKWELL | BLACKWELL_OTHERS)[name]
    hunt(line, range(first, first + DEEP_STEP), "sm100-emulated")
