"""When -inf is written: each kernel's policy, and the option that overrides it for measuring."""

import re

import pytest

from mqa import config
from mqa.cuda import cache, compiler, sm100, sm100_tiles
from mqa.emulator.backend import scheduled
from mqa.problem import parse
from mqa.testing import assert_logits, make_case

POLICIES = ("kBeside", "kAfterLoads", "kAfterMath")
DENSE = "dense {} S=5 N=300 H=64 D=64 clean=1 windows=random regime=exact seed=3"
PAGED = "paged {} B=3 next_n=2 H=64 D=64 P=64 blocks=9 columns=3 L=192 clean=1 regime=exact seed=4"

pytestmark = pytest.mark.skipif(compiler.unavailable() is not None, reason="needs NVRTC")


@pytest.fixture
def override(monkeypatch):
    """Makes every kernel that is compiled from here on follow that policy; None: its own."""

    def choose(policy):
        config.nvrtc_options.cache_clear()
        cache.forget()  # the options of a process never change, so memory does not ask for them
        if policy is None:
            monkeypatch.delenv("MQA_NVRTC_OPTIONS", raising=False)
        else:
            monkeypatch.setenv("MQA_NVRTC_OPTIONS", f"-DMQA_CLEANING={policy}")

    yield choose
    config.nvrtc_options.cache_clear()
    cache.forget()


def _blackwell(kind, elements):
    dense = kind == sm100.DENSE
    t = (
        sm100_tiles.dense_tiles(64, 64, elements)
        if dense
        else sm100_tiles.paged_tiles(64, 64, 1, elements)
    )
    return sm100.kernel(kind, t, "float32")


@pytest.mark.parametrize(
    ("kind", "elements", "policy"),
    [
        (sm100.DENSE, "Fp8", "kBeside"),
        (sm100.PAGED, "Fp8", "kAfterLoads"),
        (sm100.DENSE, "Mxfp4", "kAfterMath"),
        (sm100.PAGED, "Mxfp8", "kAfterMath"),
    ],
)
def test_policy_of_each_blackwell_kernel(override, kind, elements, policy):
    kernel = _blackwell(kind, elements)
    found = {}
    for name in (None, policy):
        override(name)
        found[name] = _code(compiler.compile_kernel(kernel, "sm_100f").ptx)
    assert found[None] == found[policy]
    assert ("bar.arrive" in found[None]) is (policy == "kAfterMath")


def test_a_policy_that_is_not_the_kernels_changes_its_code(override):
    kernel, codes = _blackwell(sm100.DENSE, "Fp8"), set()
    for policy in POLICIES:
        override(policy)
        codes.add(_code(compiler.compile_kernel(kernel, "sm_100f").ptx))
    assert len(codes) == len(POLICIES)


def _code(ptx):
    """Without the digest of options that names of internal symbols carry."""
    return re.sub(r"kernel_cu_[0-9a-f]{8}", "", ptx)


@pytest.mark.parametrize(
    ("backend", "line", "policy"),
    [
        ("sm100-emulated", DENSE.format("mxfp8"), "kBeside"),
        ("sm100-emulated", DENSE.format("mxfp8"), "kAfterLoads"),
        ("sm100-emulated", PAGED.format("fp8"), "kAfterMath"),
        ("sm90-emulated", DENSE.format("fp8"), "kAfterMath"),
    ],
)
def test_results_are_right_under_another_policy(override, policy, backend, line):
    override(policy)
    case = make_case(parse(line))
    with scheduled("hunt", seed=5):
        out = case.run(backend=backend)
    assert_logits(case, out)
