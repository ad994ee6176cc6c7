"""Hypothesis profiles, skips by hardware, and what several test files share."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

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
_CACHE_DIR = "MQA_CACHE_DIR"
_MOST_FILES = 1000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _kernel_cache(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Kernels that tests compile are kept between runs, in a folder that `make clean` removes; of
    this run alone where the checkout cannot be written. The user's own cache stays as it is."""
    folder = request.config.rootpath / ".pytest_cache" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        for path in sorted(folder.iterdir(), key=os.path.getmtime)[:-_MOST_FILES]:
            path.unlink(missing_ok=True)  # Sources that were edited leave what nobody asks for.
    except OSError:
        folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_CACHE_DIR, str(folder))
        yield


@pytest.fixture(autouse=True)
def _fresh_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees an environment variable of ours but the cache of this run, or what another
    test set."""
    for name in os.environ:
        if name.startswith("MQA_") and name != _CACHE_DIR:
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


def _tool(name: str) -> ModuleType:
    path = Path(__file__).parent.parent / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tool() -> Callable[[str], ModuleType]:
    """Imports a script of tools/ by its name."""
    return _tool


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


@pytest.fixture(
    params=["cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "reference"))]
)
def device(request: pytest.FixtureRequest, setenv: Callable[[str, str], None]) -> torch.device:
    """Where tensors live: on a CPU, on a GPU with the best backend that can, there with the
    reference."""
    setenv("MQA_FALLBACK", "silent")
    if request.param == "reference":
        setenv("MQA_BACKEND", "reference")
    return torch.device("cpu" if request.param == "cpu" else "cuda")
