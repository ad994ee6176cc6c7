"""Every kernel of this folder compiles to machine code; that needs NVRTC and no GPU."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("cuda.bindings", reason="needs cuda-python, which brings NVRTC")

import harness

ACCUMULATE = [
    (f"FP8={fp8}", f"SEPARATE={separate}", f"SWIZZLED={swizzled}")
    for fp8, separate, swizzled in itertools.product((0, 1), repeat=3)
]
MMA = [(f'TYPES="{element}.{element}"',) for element in ("bf16", "f16")]
COMPILED = {"accumulate.cu": ACCUMULATE, "instructions.cu": [()], "mma.cu": MMA, "tma.cu": [()]}


@pytest.mark.parametrize(
    ("file", "defines"), [(file, defines) for file, sets in COMPILED.items() for defines in sets]
)
def test_a_kernel_compiles_to_machine_code(file: str, defines: tuple[str, ...]) -> None:
    assert harness.cubin(file, *defines).startswith(b"\x7fELF")


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_120"])
def test_products_of_a_warp_compile_for_gpus_before_and_after_hopper(arch: str) -> None:
    for defines in MMA:
        assert harness.cubin("mma.cu", *defines, arch=arch).startswith(b"\x7fELF")


def test_no_file_is_left_out() -> None:
    assert sorted(path.name for path in harness.HERE.glob("*.cu")) == sorted(COMPILED)


def test_a_compile_error_carries_its_log() -> None:
    with pytest.raises(RuntimeError, match=r"accumulate.cu FP8=\?.*\n.*error: "):
        harness.cubin("accumulate.cu", "FP8=?", "SEPARATE=0", "SWIZZLED=0")
