"""Hypothesis profiles, skips by hardware, and what several test files share."""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from mqa import config

_COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", max_examples=40, derandomize=True, **_COMMON)
settings.register_profile("deep", max_examples=1500, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _fresh_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees an environment variable of ours, or what another test set."""
    for name in os.environ:
        if name.startswith("MQA_"):
            monkeypatch.delenv(name)
    config.reload()
    yield
    config.reload()


@pytest.fixture
def setenv(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    def change(name: str, value: str) -> None:
        monkeypatch.setenv(name, value)
        config.reload()

    return change


@pytest.fixture
def backend_list(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the ordered list of backends for one test."""
    module = importlib.import_module("mqa.backends")

    def replace(*backends: object) -> None:
        monkeypatch.setattr(module, "BACKENDS", (*backends, module.REFERENCE))

    return replace


@pytest.fixture(scope="session")
def corpus() -> Path:
    return Path(__file__).parent / "corpus"


@contextlib.contextmanager
def _no_host_reads() -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="session")
def no_host_reads() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context in which anything that waits for the device raises."""
    return _no_host_reads


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, setenv: Callable[[str, str], None]) -> torch.device:
    """Where tensors live. On a GPU the reference is what these tests mean to run."""
    setenv("MQA_FALLBACK", "silent")
    return torch.device(request.param)
