"""Write the tables and pictures of docs/performance.md from the reports in docs/benchmarks.

    python tools/generate_performance.py

A report is what `mqa bench --suite hopper --json` or `--suite host --json` wrote. Only the text
between the two markers of the page is replaced. Each picture carries the digest of the report it
was drawn from, so that `tests/test_performance_docs.py` fails while tables or pictures are stale.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
REPORTS = ROOT / "docs" / "benchmarks"
sys.path.insert(0, str(ROOT))

from mqa.cli.gpu.tables import tables  # noqa: E402
from mqa.cli.plots import draw_groups  # noqa: E402
from mqa.cli.tables import markdown  # noqa: E402

BEGIN = "<!-- results: `make performance` writes what follows -->"
END = "<!-- end of results -->"
_ORDER = ("hopper", "host")
_TITLES = {"hopper": "Kernels", "host": "Host"}
_NOTHING = "No report is stored in `docs/benchmarks` yet.\n"


def render(page: str, folder: Path) -> str:
    """`page` with the results of every report in `folder` between its markers.

    Raises ValueError unless the page has each marker once, in order.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in head + tail:
        raise ValueError(f"expected one line {BEGIN!r} and, after it, one line {END!r}")
    sections = [_section(path, report) for path, report in reports(folder)]
    return f"{head}{BEGIN}\n\n{''.join(sections) or _NOTHING}\n{END}{tail}"


def reports(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The reports of `folder` with their files, suites in order, then by name."""
    found = [(path, json.loads(path.read_text("utf-8"))) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda pair: _ORDER.index(pair[1]["suite"]))


def picture(path: Path, report: Mapping[str, Any]) -> Path | None:
    """Where the picture of a report lies; None for one that compares nothing with a peer."""
    compared = any(row.get("other", {}).get("who") == "peer" for row in report["rows"])
    return path.with_suffix(".png") if compared else None


def digest(path: Path) -> str:
    """What the picture of the report `path` carries."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def draw(folder: Path) -> None:
    """Draw the picture of each report that has one."""
    for path, report in reports(folder):
        target = picture(path, report)
        if target is not None:
            draw_groups(target, report, mark=digest(path))


def _section(path: Path, report: Mapping[str, Any]) -> str:
    gpu = report["machine"]["gpus"][0]["name"]
    parts = [f"### {_TITLES[report['suite']]}: {gpu}\n", _facts(path, report)]
    drawn = picture(path, report)
    if drawn is not None:
        parts.append(f"![Ratio to the peer, row by row]({path.parent.name}/{drawn.name})\n")
    parts += [markdown(table) for table in tables(report)]
    return "\n".join(parts) + "\n"


def _facts(path: Path, report: Mapping[str, Any]) -> str:
    versions, peer = report["versions"], report["peer"]
    named = {
        "mqa": versions["mqa"],
        "commit": versions.get("commit"),  # reports of earlier versions have neither of these
        "kernels": versions.get("kernels"),
        peer["name"]: peer["version"],
        "torch": versions["torch"],
        "CUDA": versions["cuda"],
        "driver": versions["driver"],
        "cuda-bindings": versions["cuda-bindings"],
        "NVRTC": versions["nvidia-cuda-nvrtc"],
    }
    listed = ", ".join(f"{name} {version}" for name, version in named.items() if version)
    source = f"[{path.name}]({path.parent.name}/{path.name})"
    return (
        f"{listed}. Measured {report['date'][:10]} by `{shlex.join(report['command'])}`, "
        f"{report['rounds']} pairs a row; all numbers are in {source}.\n"
    )


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text("utf-8"), REPORTS), encoding="utf-8")
    draw(REPORTS)
