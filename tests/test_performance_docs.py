"""docs/performance.md says what the reports in docs/benchmarks say, and shows their pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

STALE = "run make performance"


@pytest.fixture(scope="module")
def generator(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("generate_performance")


def _side(who: str) -> dict[str, Any]:
    numbers = {"clocks_per_pair": 2.0, "tflops": 3.0, "share_of_floor": 0.5}
    return {"who": who, "label": who, **numbers}


def _report(suite: str) -> dict[str, Any]:
    """A made-up report: one row that was measured, one that failed."""
    ratio = {"median": 1.5, "low": 1.25, "high": 1.75, "a_seconds": 3e-6, "b_seconds": 2e-6}
    measured = {
        "hopper": {"ratio": ratio, "other": _side("peer"), "ours": _side("mqa")},
        "host": {"warm_seconds": 4e-6, "rotating_seconds": 5e-6},
    }
    row = {"group": "main", "name": "S|N", **measured[suite]}
    packages = ("mqa", "torch", "cuda", "driver", "cuda-bindings", "nvidia-cuda-nvrtc")
    return {
        "suite": suite,
        "command": ["mqa", "bench", "--only", "a b"],
        "date": "2001-02-03T04:05:06+00:00",
        "rounds": 7,
        "machine": {"gpus": [{"name": "Abacus 200"}]},
        "versions": dict.fromkeys(packages, "1.2.3") | {"driver": None},
        "peer": {"name": "other-mqa", "version": "9"},
        "ceilings": {"fp8": 1.5e15},
        "rows": [row, {"group": "main", "name": "broken", "failure": "RuntimeError: no beads"}],
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for suite in ("host", "hopper"):
        (tmp_path / f"{suite}.json").write_text(json.dumps(_report(suite)))
    return tmp_path


def _page(generator: ModuleType, inside: str = "old") -> str:
    return f"before\n{generator.BEGIN}\n{inside}\n{generator.END}\nafter\n"


def test_the_page_is_up_to_date(generator: ModuleType) -> None:
    page = generator.PAGE.read_text("utf-8")
    assert generator.render(page, generator.REPORTS) == page, STALE
    assert generator.render_model(page) == page, STALE


def test_the_pictures_are_up_to_date(generator: ModuleType) -> None:
    for path, report in generator.reports(generator.REPORTS):
        target = generator.picture(path, report)
        if target is not None:
            assert generator.digest(path).encode() in target.read_bytes(), f"{target}: {STALE}"


def test_stored_reports_name_no_folder_of_the_machine(generator: ModuleType) -> None:
    for path, _ in generator.reports(generator.REPORTS):
        assert not re.search(r"/(home|root|tmp|work)/", path.read_text("utf-8")), path


def test_results_come_between_the_markers_and_nothing_else_changes(
    generator: ModuleType, folder: Path
) -> None:
    page = generator.render(_page(generator), folder)
    assert page.startswith("before\n")
    assert page.endswith(f"{generator.END}\nafter\n")
    assert "old" not in page
    assert generator.render(page, folder) == page
    kernels, host = page.index("### Kernels: Abacus 200"), page.index("### Host: Abacus 200")
    assert kernels < host
    assert "| S\\|N | 3.00 | 2.00 | 1.500 [1.250, 1.750] | 2.00 | 3 | 50% | 0% |" in page
    assert "| main: broken | RuntimeError: no beads |" in page
    assert "| S\\|N | 4.00 | 5.00 |" in page
    assert "mqa 1.2.3, other-mqa 9, torch 1.2.3, CUDA 1.2.3, cuda-bindings" in page
    assert "Measured 2001-02-03 by `mqa bench --only 'a b'`, 7 pairs a row" in page


def test_the_code_that_was_measured_is_named_where_the_report_does(
    generator: ModuleType, folder: Path
) -> None:
    report = _report("hopper")
    report["versions"] |= {"commit": "v1-2-gabc-dirty", "kernels": "0123456789ab"}
    (folder / "hopper.json").write_text(json.dumps(report))
    page = generator.render(_page(generator), folder)
    assert "mqa 1.2.3, commit v1-2-gabc-dirty, kernels 0123456789ab, other-mqa 9" in page
    assert "mqa 1.2.3, other-mqa 9" in page  # the other report does not


def test_paged_rows_show_limits_and_what_was_left_out(generator: ModuleType, folder: Path) -> None:
    report = _report("hopper")
    measured = report["rows"][0]
    rates = {"read_rate": 3e12, "share_of_read": 0.75}
    wrong = {"limit": {"at_least": 1.6}, "held": False}
    time = {"limit_seconds": 5e-6, "held": True, "extra_seconds": 1e-6}
    report["rows"] = [
        measured | rates | {"group": "paged", "limit": {"at_least": 0.98}, "held": True},
        measured | wrong | {"group": "paged formats"},
        measured | time | {"group": "paged metadata"},
        {"group": "paged formats", "name": "mxfp4", "left_out": "sm90: not yet"},
    ]
    (folder / "hopper.json").write_text(json.dumps(report))
    page = generator.render(_page(generator), folder)
    assert "| S\\|N | 3.00 | 2.00 | 1.500 [1.250, 1.750] | ≥ 0.98 | 3.00 | 75% |" in page
    assert "| S\\|N | 3.00 | 2.00 | 1.500 [1.250, 1.750] | ≥ 1.6, missed |" in page
    assert "| S\\|N | 3.00 | 2.00 | 1.00 | ≤ 5.00 µs |" in page
    assert "**Left out**" in page
    assert "| paged formats: mxfp4 | sm90: not yet |" in page


def test_a_changed_number_makes_the_page_stale(generator: ModuleType, folder: Path) -> None:
    page = generator.render(_page(generator), folder)
    report = _report("hopper")
    report["rows"][0]["ratio"]["median"] = 1.4
    (folder / "hopper.json").write_text(json.dumps(report))
    assert generator.render(page, folder) != page


def test_pictures_carry_the_digest_of_their_report(generator: ModuleType, folder: Path) -> None:
    generator.draw(folder)
    assert [path.name for path in folder.glob("*.png")] == ["hopper.png"]
    digest = generator.digest(folder / "hopper.json").encode()
    assert digest in (folder / "hopper.png").read_bytes()
    assert f"({folder.name}/hopper.png)" in generator.render(_page(generator), folder)


def test_without_reports_the_page_says_so(generator: ModuleType, tmp_path: Path) -> None:
    assert "No report is stored" in generator.render(_page(generator), tmp_path)


@pytest.mark.parametrize("broken", ["", "{begin}", "{end}{begin}", "{begin}{begin}{end}"])
def test_markers_are_needed_once_each(generator: ModuleType, tmp_path: Path, broken: str) -> None:
    page = broken.format(begin=generator.BEGIN, end=generator.END)
    with pytest.raises(ValueError, match="expected one line"):
        generator.render(page, tmp_path)
