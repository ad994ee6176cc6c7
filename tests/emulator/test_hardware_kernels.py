"""The kernel by which GPUs are asked how `mma.sync` sums, in the emulator, which sums as the models
say: a slip of the kernel, its tiles or its comparison shows without the GPUs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqa.emulator import run

pytest.importorskip("cuda.bindings", reason="needs cuda-python, which brings NVRTC")

HARDWARE = Path(__file__).parents[1] / "hardware"
CAPABILITIES = {"sm_80": (8, 0), "sm_90": (9, 0)}


@pytest.fixture(params=CAPABILITIES)
def asked(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of these tests, its GPU an emulated one."""
    monkeypatch.syspath_prepend(str(HARDWARE))
    module = importlib.import_module("test_hardware_mma")
    harness, arch = module.harness, request.param

    def emulated(batch: Any, element: str) -> np.ndarray:
        text = harness.ptx("mma.cu", f'TYPES="{element}.{element}"', arch=arch)
        d = np.zeros((len(batch.a), module.tiles.ROWS, module.tiles.ROWS), np.float32)
        c = d if batch.c is None else batch.c.astype(np.float32)
        operands = [codes.view(np.uint16) for codes in (batch.a, batch.b)]
        sizes = [batch.a.shape[2], int(batch.c is not None)]
        run(text, "multiply", len(batch.a), 128, [*operands, c, d, *sizes], smem_bytes=0)
        return d.view(np.uint32)

    monkeypatch.setattr(module, "run", emulated)
    monkeypatch.setattr(harness, "capability", lambda: CAPABILITIES[arch])
    yield module
    for name in ("test_hardware_mma", "tiles", "harness"):
        sys.modules.pop(name, None)


def test_random_tiles_have_the_bits_of_the_model(asked: Any) -> None:
    asked.test_random_tiles_have_the_bits_of_the_model("peaks")
    asked.test_e4m3_in_float16_has_the_bits_of_the_model("peaks", asked.SHIFTS["shifted"])


def test_extremes_have_the_bits_of_the_model(asked: Any) -> None:
    asked.test_zeros_nans_and_extremes_have_the_bits_of_the_model()
    for shifts in asked.SHIFTS.values():
        asked.test_extremes_of_e4m3_in_float16_have_the_bits_of_the_model(shifts)


def test_another_model_has_other_bits(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        asked,
        "model",
        lambda before, later: later if asked.harness.capability() < (9, 0) else before,
    )
    for question in (
        lambda: asked.test_random_tiles_have_the_bits_of_the_model("peaks"),
        lambda: asked.test_e4m3_in_float16_has_the_bits_of_the_model("peaks", (0, 0)),
    ):
        with pytest.raises(AssertionError, match="Mismatched elements"):
            question()
