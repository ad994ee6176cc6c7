"""The tables of a GPU report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mqa.cli.gpu.ceilings import CEILINGS, SIDE
from mqa.cli.gpu.rows import GROUPS_OF
from mqa.cli.tables import TextTable

Entry = Mapping[str, Any]


def tables(report: Mapping[str, Any]) -> list[TextTable]:
    """The tables of a report of any GPU suite."""
    if report["suite"] == "host":
        return [_host(report)]
    found = [_ceilings(report)]
    for group, title in GROUPS_OF[report["suite"]].items():
        entries = [entry for entry in report["rows"] if entry["group"] == group]
        done = [entry for entry in entries if not {"failure", "left_out"} & set(entry)]
        if done:
            found.append(_group(group, title, done, report))
    for title, key in {"left out": "left_out", "failed": "failure"}.items():
        missing = [entry for entry in report["rows"] if key in entry]
        if missing:
            found.append(_reasons(title, key, missing))
    return found


def interval(ratio: Entry) -> str:
    """A ratio with its interval, as it stands in tables."""
    digits = 1 if ratio["median"] >= 10 else 3
    return f"{ratio['median']:.{digits}f} [{ratio['low']:.{digits}f}, {ratio['high']:.{digits}f}]"


def microseconds(seconds: float) -> str:
    """Three digits or more, in microseconds."""
    value = seconds * 1e6
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0}f}"


def _ceilings(report: Mapping[str, Any]) -> TextTable:
    units = {"FLOP": "TFLOP/s", "B": "TB/s"}
    rows = [
        (CEILINGS[name].title, f"{rate / 1e12:.2f} {units[CEILINGS[name].unit]}")
        for name, rate in report["ceilings"].items()
    ]
    return TextTable("ceilings measured in the same run", ("what", "rate"), tuple(rows))


def _group(
    group: str, title: str, entries: Sequence[Entry], report: Mapping[str, Any]
) -> TextTable:
    columns = (_ROW, *_COLUMNS[group])
    names = tuple(column.name.format(peer=report["peer"]["name"]) for column in columns)
    cells = (tuple(column.cell(entry, report) for column in columns) for entry in entries)
    return TextTable(title, names, tuple(cells))


class _Column(NamedTuple):
    name: str
    cell: Callable[[Entry, Mapping[str, Any]], str]


def _time(name: str, key: str) -> _Column:
    """Microseconds of the ratio's `a_seconds` or `b_seconds`, or of an entry's own time."""

    def cell(entry: Entry, report: Mapping[str, Any]) -> str:
        return microseconds(entry["ratio"][key] if key in entry["ratio"] else entry[key])

    return _Column(f"{name}, µs", cell)


def _limit(entry: Entry, report: Mapping[str, Any]) -> str:
    """What the ratio or the time has to be, and whether it, or one end of its interval, misses; a
    dash where nothing is asked."""
    met = False
    if not {"limit", "limit_seconds"} & set(entry):
        return "–"
    if "limit_seconds" in entry:
        text = f"≤ {microseconds(entry['limit_seconds'])} µs"
    else:
        ((sense, value),) = entry["limit"].items()
        text = f"{'≥' if sense == 'at_least' else '≤'} {value:.3g}"
        median = entry["ratio"]["median"]
        met = median >= value if sense == "at_least" else median <= value
    if entry["held"]:
        return text
    return f"{text}, missed by an end of the interval" if met else f"{text}, missed"


def _of_product(entry: Entry, report: Mapping[str, Any]) -> str:
    """A dash where the product could not be measured."""
    rate = report["ceilings"].get("fp8")
    return f"{entry['ours']['tflops'] * 1e12 / rate:.0%}" if rate else "–"


def _reported(entry: Entry, report: Mapping[str, Any]) -> str:
    """What others measured, and on what; a dash where nobody has said."""
    said = entry.get("reported")
    return f"{microseconds(said['seconds'])} ({said['who']})" if said else "–"


_ROW = _Column("row", lambda entry, report: str(entry["name"]))
_RATIO = _Column("ratio [5 %, 95 %]", lambda entry, report: interval(entry["ratio"]))
_CLOCKS = _Column("clocks/pair", lambda entry, report: f"{entry['ours']['clocks_per_pair']:.2f}")
_TFLOPS = _Column("TFLOP/s", lambda entry, report: f"{entry['ours']['tflops']:.0f}")
_FLOOR = _Column("of floor", lambda entry, report: f"{entry['ours']['share_of_floor']:.0%}")
_PRODUCT = _Column(f"of {SIDE}³", _of_product)
_LIMIT = _Column("limit", _limit)
_REPORTED = _Column("reported, µs", _reported)
_TWO = (_time("first", "a_seconds"), _time("second", "b_seconds"), _RATIO)
_AGAINST_PEER = (_time("{peer}", "a_seconds"), _time("mqa", "b_seconds"), _RATIO)
_READING = (
    _Column("KV, TB/s", lambda entry, report: f"{entry['read_rate'] / 1e12:.2f}"),
    _Column("of reading", lambda entry, report: f"{entry['share_of_read']:.0%}"),
)
_PORTABLE = (_time("sm90", "a_seconds"), _time("portable", "b_seconds"), _RATIO)
_COLUMNS: dict[str, tuple[_Column, ...]] = {
    "main": (*_AGAINST_PEER, _CLOCKS, _TFLOPS, _FLOOR, _PRODUCT),
    "variants": _TWO,
    "few rows": (*_AGAINST_PEER, _time("reading the inputs", "read_seconds"), _TFLOPS),
    "cleaning": (
        _time("cleaned", "a_seconds"),
        _time("uncleaned", "b_seconds"),
        _RATIO,
        _time("cleaning adds", "extra_seconds"),
        _time("filling what is outside", "outside_seconds"),
        _time("filling all", "fill_seconds"),
    ),
    "ragged": (
        _time("even", "a_seconds"),
        _time("uneven", "b_seconds"),
        _time("limit", "limit_seconds"),
        _Column("of limit", lambda entry, report: f"{entry['of_limit']:.2f}"),
    ),
    "sizes": (
        _time("H=64 D=128", "a_seconds"),
        _time("this", "b_seconds"),
        _RATIO,
        _CLOCKS,
        _TFLOPS,
        _FLOOR,
        _Column(
            "FLOP rate / that of H=64 D=128", lambda entry, report: f"{entry['rate_over_even']:.2f}"
        ),
    ),
    "metadata": (
        _time("one number", "a_seconds"),
        _time("schedule", "b_seconds"),
        _time("difference", "extra_seconds"),
    ),
    "paged": (
        *_AGAINST_PEER,
        _LIMIT,
        *_READING,
    ),
    "portable dense": (*_PORTABLE, _LIMIT, _CLOCKS, _TFLOPS),
    "portable paged": (*_PORTABLE, *_READING),
    "portable fallback": (
        _time("reference", "a_seconds"),
        _time("portable", "b_seconds"),
        _RATIO,
        _LIMIT,
    ),
    "complete": (
        _time("uncleaned", "a_seconds"),
        _time("cleaned", "b_seconds"),
        _RATIO,
        _REPORTED,
        _CLOCKS,
        _TFLOPS,
        _FLOOR,
        _PRODUCT,
    ),
    "compressed": (
        _time("full", "a_seconds"),
        _time("compressed", "b_seconds"),
        _RATIO,
        _REPORTED,
    ),
    "formats": (_time("fp8", "a_seconds"), _REPORTED, _time("this", "b_seconds"), _RATIO, _TFLOPS),
    "schedules": (
        _time("one number", "a_seconds"),
        _time("schedule", "b_seconds"),
        _time("difference", "extra_seconds"),
        _REPORTED,
    ),
    "peer": (*_AGAINST_PEER, _CLOCKS, _TFLOPS, _FLOOR),
    "paged rows": (*_TWO, _LIMIT),
    "paged formats": (*_TWO, _LIMIT),
    "paged metadata": (
        _time("one number", "a_seconds"),
        _time("schedule", "b_seconds"),
        _time("difference", "extra_seconds"),
        _LIMIT,
    ),
    "paged empty": (_time("one number", "a_seconds"), _time("call", "b_seconds"), _LIMIT),
}


def _host(report: Mapping[str, Any]) -> TextTable:
    rows = []
    for entry in report["rows"]:
        if "failure" in entry:
            rows.append((entry["name"], "failed", entry["failure"]))
            continue
        names = ("warm_seconds", "rotating_seconds")
        rows.append((entry["name"], *(f"{entry[name] * 1e6:.2f}" for name in names)))
    columns = ("call", "same tensors, µs", "64 sets of tensors, µs")
    return TextTable("host time of one call", columns, tuple(rows))


def _reasons(title: str, key: str, entries: Sequence[Entry]) -> TextTable:
    rows = tuple((f"{entry['group']}: {entry['name']}", entry[key]) for entry in entries)
    return TextTable(title, ("row", "why"), rows)
