import functools
import importlib
import importlib.metadata
import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

import mqa
from mqa import config
from mqa.cli import doctor, machine
from mqa.cuda import cache, compiler, driver, variants
from mqa.cuda.plan import Kernel

ROOT = Path(mqa.__file__).resolve().parent.parent


def test_doctor_shows_backends_versions_and_variables(run, more_backends, monkeypatch):
    monkeypatch.setenv("MQA_FALLBACK", "silent")
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "not usable: needs a GPU that nobody has: buy one" in result.stdout
    assert torch.__version__ in result.stdout
    assert "silent (set)" in result.stdout
    assert "67108864 (default)" in result.stdout
    assert "no problems found" in result.stdout


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MQA_DEBUG", "yes", "expected 0 or 1"),
        ("MQA_BACKEND", "abacus", "expected one of"),
        ("MQA_NVRTC_OPTIONS", 'a "b', "expected options separated as in a shell"),
        ("MQA_PORTABLE_ARCH", "sm_80", "expected a virtual one such as compute_80"),
    ],
)
def test_doctor_reports_a_variable_that_is_wrong(run, monkeypatch, name, value, words):
    monkeypatch.setenv(name, value)
    result = run("doctor")
    assert result.exit_code == 1
    assert f"problem: {name}='{value}'" in result.stdout
    assert words in result.stdout


def pretend_gpu(monkeypatch, capability, missing=None):
    """One of that compute capability, on a machine that lacks `missing` to compile for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(machine, "gpus", list)
    monkeypatch.setattr(driver, "unavailable", lambda: missing)


@pytest.mark.parametrize(
    ("capability", "name", "value", "backend"),
    [((8, 6), "MQA_PORTABLE_ARCH", "sm_80", "portable"), ((9, 0), "MQA_ARCH", "sm_90", "sm90")],
)
def test_doctor_reports_on_a_gpu_that_an_architecture_is_wrong(
    run, monkeypatch, capability, name, value, backend
):
    pretend_gpu(monkeypatch, capability)
    monkeypatch.setenv(name, value)
    result = run("doctor")
    assert result.exit_code == 1
    assert f"not usable: {name}='{value}'" in result.stdout
    assert f"problem: {name}='{value}'" in result.stdout


def test_doctor_reports_that_a_gpu_gets_the_reference_and_why(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    for capability, names in (((8, 0), ["portable"]), ((9, 0), ["sm90", "portable"]), ((7, 5), [])):
        pretend_gpu(monkeypatch, capability, missing="cuda-python is not installed")
        result = run("doctor")
        told = "problem: calls on cuda:0 get the slow reference: "
        assert result.exit_code == (1 if names else 0)
        assert (told in result.stdout) == bool(names)
        for name in names:
            assert f"{name}: cuda-python is not installed" in result.stdout
    pretend_gpu(monkeypatch, (8, 0))
    assert run("doctor").exit_code == 0


def test_doctor_reports_that_the_backend_of_the_environment_is_not_usable(run, monkeypatch):
    monkeypatch.setenv("MQA_BACKEND", "portable")
    result = run("doctor")
    assert result.exit_code == 1
    assert "problem: MQA_BACKEND='portable' is not usable here: needs an NVIDIA" in result.stdout


def test_doctor_reports_another_distribution_named_mqa(run, monkeypatch):
    monkeypatch.setattr(machine, "installed", lambda name: "3.1" if name == "mqa" else None)
    result = run("doctor")
    assert result.exit_code == 1
    assert "another distribution named mqa (3.1)" in result.stdout


def test_doctor_shows_the_compiler_and_both_kinds_of_cache(run, monkeypatch, tmp_path):
    own, image = tmp_path / "own", tmp_path / "image"
    image.mkdir()
    (image / "a.bin").write_bytes(bytes(1 << 20))
    (image / "a.lock").touch()
    for name, value in (("DIR", own), ("PATH", image)):
        monkeypatch.setenv(f"MQA_CACHE_{name}", str(value))
    monkeypatch.setenv("COLUMNS", "300")
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "NVRTC, release 13." in result.stdout
    text = " ".join(result.stdout.split())
    assert f"{image}: 1 compiled, 1.0 MiB, 0 of " in text
    assert f"{own}: 0 compiled, 0.0 MiB, 0 of " in text
    assert "kernels of sm_90a present for this compiler, writable" in text
    assert not own.exists()
    assert f"{image} (set)" in result.stdout


def test_doctor_counts_the_kernels_that_this_compiler_would_find(monkeypatch, tmp_path, setenv):
    kernels = tuple(Kernel("a.cuh", "add", (step,)) for step in "123")
    monkeypatch.setattr(
        variants, "REGISTRY", {"sm_90a": lambda every: kernels[: 3 if every else 1]}
    )
    setenv("MQA_CACHE_DIR", str(tmp_path))
    for kernel in kernels[:2]:
        (tmp_path / f"{cache.key(kernel, 'sm_90a')}.bin").touch()
    (tmp_path / "of-another-compiler.bin").touch()
    _, (_, where) = doctor._cache_rows()
    assert "3 compiled, 0.0 MiB, 2 of 3 kernels of sm_90a present for this compiler, w" in where
    monkeypatch.setattr(compiler, "unavailable", lambda: "no NVRTC")
    _, (_, where) = doctor._cache_rows()
    assert "3 compiled, 0.0 MiB, writable" in where


def test_doctor_counts_portable_kernels_for_the_gpus_at_hand(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    found = {0: (8, 6), 1: (9, 0), 2: (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", found.get)
    monkeypatch.setattr(cache, "keys", lambda kernels, arch: [arch] * (len(kernels) > 0))
    assert {*doctor._wanted()} == {"sm_100f", "sm_90a", "sm_80", "sm_86", "sm_90"}


def test_doctor_says_why_kernels_are_not_kept(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MQA_CACHE_DIR", str(tmp_path / "file" / "deeper"))
    _, (_, where) = doctor._cache_rows()
    assert where.endswith(f"compiled anew in each process ({tmp_path / 'file'})")
    monkeypatch.setattr(config, "cache_dir", functools.cache(lambda: None))
    assert list(doctor._cache_rows()) == [
        ("sources", f"{machine.kernels()}, {compiler.sources()}"),
        ("read and written", "none: no home directory, and MQA_CACHE_DIR is not set"),
    ]


def test_doctor_says_in_a_line_what_the_compiler_lacks(monkeypatch):
    monkeypatch.setattr(compiler, "unavailable", lambda: "no headers, looked in\n  /usr\nget them")
    assert ("compiler", "no headers, looked in; /usr; get them") in list(doctor._toolchain_rows())


class _Installed:
    def __init__(self, folder, origin=None):
        self.folder, self.origin = folder, origin

    def read_text(self, name):
        return None if self.origin is None else json.dumps(self.origin)

    def locate_file(self, name):
        return self.folder / name


def test_doctor_reports_an_import_from_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "installed", lambda name: None)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: _Installed(tmp_path))
    assert any(f"installed in {tmp_path / 'mqa'}" in line for line in doctor.collisions())


def test_doctor_accepts_an_editable_install(monkeypatch, tmp_path):
    origin = {"url": ROOT.as_uri(), "dir_info": {"editable": True}}
    installed = _Installed(tmp_path, origin)
    monkeypatch.setattr(machine, "installed", lambda name: None)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    assert list(doctor.collisions()) == []


def test_doctor_is_content_where_mqa_is_not_installed(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert list(doctor.collisions()) == []


def test_doctor_lists_gpus_and_the_driver(run, monkeypatch):
    class Properties:
        name, major, minor, multi_processor_count, total_memory = "H200", 9, 0, 132, 140 << 30

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    answer = subprocess.CompletedProcess([], 0, stdout="580.1\n")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: answer)
    result = run("doctor")
    assert "H200, capability 9.0, 132 SMs, 140.0 GiB" in result.stdout
    assert "580.1" in result.stdout


@pytest.mark.parametrize(
    ("capability", "own", "portable"),
    [((8, 6), None, "sm_86"), ((9, 0), "sm_90a", "sm_90"), ((10, 3), "sm_100f", "sm_103")],
)
def test_reports_say_what_kernels_were_compiled_for_where_there_are_such(
    monkeypatch, capability, own, portable
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(machine, "gpus", lambda: [{"name": "Abacus"}])
    monkeypatch.setattr(compiler, "architectures", lambda: (80, 86, 90, 100, 103))
    monkeypatch.setattr(compiler, "unavailable", lambda: None)
    monkeypatch.setattr(compiler, "release", lambda: (13, 0))
    facts = machine.summary(torch.device("cuda", 0))
    assert (facts["compiled for"], facts["portable kernels compiled for"]) == (own, portable)


def test_machine_facts_survive_a_system_that_says_nothing(monkeypatch):
    def unknown(*_):
        raise OSError

    monkeypatch.setattr(machine.os, "sysconf", unknown)
    monkeypatch.setattr(machine.Path, "read_text", unknown)
    monkeypatch.delattr(machine.os, "sched_getaffinity", raising=False)
    facts = machine.machine()
    assert facts["memory_gib"] is None
    assert facts["cores"] >= 1


def test_the_digest_of_the_kernels_changes_with_their_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "sources", lambda: tmp_path)
    (tmp_path / "a.cuh").write_text("one")
    first = machine.kernels()
    assert re.fullmatch("[0-9a-f]{12}", first)
    (tmp_path / "notes.md").write_text("no source")
    assert machine.kernels() == first
    (tmp_path / "a.cuh").write_text("two")
    assert machine.kernels() != first


def test_the_commit_is_that_of_the_checkout_or_none(monkeypatch, tmp_path):
    package = tmp_path / "repository" / "mqa"
    package.mkdir(parents=True)
    monkeypatch.setattr(machine.mqa, "__file__", str(package / "__init__.py"))
    answer = subprocess.CompletedProcess([], 0, stdout="abc-dirty\n")
    asked = []
    monkeypatch.setattr(
        machine.subprocess, "run", lambda command, **_: asked.append(command) or answer
    )
    assert machine.commit() is None  # a folder inside someone else's repository, perhaps
    (package.parent / ".git").mkdir()
    assert machine.commit() == "abc-dirty"
    assert asked == [["git", "-C", str(package.parent), "describe", "--always", "--dirty"]]

    def failing(command, **_):
        raise subprocess.CalledProcessError(128, command)

    monkeypatch.setattr(machine.subprocess, "run", failing)
    assert machine.commit() is None
