"""What the tests of this folder share: its modules, importable by name, and the machine's check."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(scope="session")
def ampere() -> None:
    """Skips on GPUs before compute capability 8.0, which lack the instructions asked about."""
    import harness

    if harness.capability() < (8, 0):
        pytest.skip("needs a GPU of compute capability 8.0 or newer")


@pytest.fixture(scope="session")
def hopper() -> None:
    """Skips on anything but compute capability 9.0: the facts are Hopper's, and so is the code."""
    import harness

    if harness.capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
