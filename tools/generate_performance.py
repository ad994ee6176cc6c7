"""Write the tables and pictures of docs/performance.md from the reports in docs/benchmarks.

    python tools/generate_performance.py

A report is what `mqa bench --suite hopper --json`, or another GPU suite, wrote. The tables of the
static model come from `tools/pipeline_model.py`. Only the text between the markers of the page is
replaced. Each picture carries the digest of the report it was drawn from, so that
`tests/test_performance_docs.py` fails while tables or pictures are stale.
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
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from mqa.cli.gpu.tables import tables  # noqa: E402
from mqa.cli.plots import draw_groups  # noqa: E402
from mqa.cli.tables import markdown  # noqa: E402
from pipeline_model import markdown_tables  # noqa: E402

BEGIN = "<!-- results: `make performance` writes what follows -->"
END = "<!-- end of results -->"
MODEL_BEGIN = "<!-- model: `make performance` writes what follows -->"
MODEL_END = "<!-- end of model -->"
_ORDER = ("hopper", "blackwell", "portable", "host")
_TITLES = {
    "hopper": "Kernels",
    "blackwell": "Kernels",
    "portable": "Portable kernels",
    "host": "Host",
}
_NOTHING = "No report is stored in `docs/benchmarks` yet.\n"


def render(page: str, folder: Path) -> str:
    """`page` with the results of every report in `folder` between its markers.

    Raises ValueError unless the page has each marker once, in order.
    """
    sections = [_section(path, report) for path, report in reports(folder)]
    return _between(page, BEGIN, "".join(sections) or _NOTHING, END)


def render_model(page: str) -> str:
    """`page` with the tables of the static model between their markers; raises likewise."""
    return _between(page, MODEL_BEGIN, markdown_tables(), MODEL_END)


def _between(page: str, begin: str, text: str, end: str) -> str:
    head, begins, rest = page.partition(begin)
    _, ends, tail = rest.partition(end)
    if not (begins and ends) or begin in rest or end in head + tail:
        raise ValueError(f"expected one line {begin!r} and, after it, one line {end!r}")
    return f"{head}{begin}\n\n{text}\n{end}{tail}"


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
    title = f"### {_TITLES[report['suite']]}: {gpu}"
    if report["suite"] == "portable":
        title += f", compiled for {report['settings']['arch']}"
    parts = [f"{title}\n", _facts(path, report)]
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
    usual = report["rounds"]
    ratios = [row["ratio"] for row in report["rows"] if "ratio" in row]
    fewer = sorted({ratio.get("rounds", usual) for ratio in ratios} - {usual})
    pairs = f"{usual} pairs a row{''.join(f', in some {count}' for count in fewer)}"
    return (
        f"{listed}. Measured {report['date'][:10]} by `{shlex.join(report['command'])}`, "
        f"{pairs}; all numbers are in {source}.\n"
    )


if __name__ == "__main__":
    page = render_model(render(PAGE.read_text("utf-8"), REPORTS))
    PAGE.write_text(page, encoding="utf-8")
    draw(REPORTS)
