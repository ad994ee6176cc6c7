"""Pictures: the demo's heat map and the benchmark's bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mqa.cli.gpu.rows import GROUPS_OF

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 1024
"""Tokens are pooled to at most this many columns, so that single ones stay visible."""
_GREY = "#b8b8b8"
_INK = "#222222"
_ERROR_FLOOR = 1e-3
_LOG_FROM = 4.0
"""Ratios beyond this are drawn on a logarithmic axis."""

Array = npt.NDArray[np.float64]


def draw_scores(path: Path, exact: Tensor, scores: Mapping[str, Tensor], planted: Tensor) -> None:
    """A PNG: scores of the unquantised tensors above, and how far each format is off below.

    `exact`, `planted` and each of `scores` are [queries, tokens], -inf outside the windows.
    """
    figure, axes = _canvas(1 + len(scores), (12, 2.6 + 2.0 * len(scores)))
    step = -(-exact.shape[1] // _COLUMNS)
    extent = (0, exact.shape[1], exact.shape[0], 0)
    reference = exact.double().numpy()
    spread = float(np.std(reference[np.isfinite(reference)])) or 1.0
    low, high = np.percentile(reference[np.isfinite(reference)], (1, 99.5))
    pooled = _pool(reference, step)
    _heat(figure, axes[0], pooled, extent, "score", cmap="viridis", vmin=low, vmax=high)
    axes[0].set_title("float32, nothing quantised (rings: planted tokens)", loc="left")
    _ring(axes[0], planted.numpy() & np.isfinite(reference))
    from matplotlib.colors import LogNorm

    for axis, (name, values) in zip(axes[1:], scores.items(), strict=True):
        with np.errstate(invalid="ignore"):
            error = np.abs(values.double().numpy() - reference) / spread
        worst = _pool(np.where(np.isfinite(error), np.maximum(error, _ERROR_FLOOR), -np.inf), step)
        scale = LogNorm(_ERROR_FLOOR, 1.0)
        _heat(figure, axis, worst, extent, "|error| / σ", cmap="inferno", norm=scale)
        typical = float(np.sqrt(np.nanmean(np.where(np.isfinite(error), error, np.nan) ** 2)))
        axis.set_title(f"{name}: error in standard deviations of a score, rms {typical:.3f}",
                       loc="left")  # fmt: skip
    for axis in axes:
        axis.set_ylabel("query")
    axes[-1].set_xlabel("KV token (grey: after the query, −inf)")
    title = "Indexer scores of a long context, and what quantisation does to them"
    figure.suptitle(title, fontsize=14, fontweight="bold")
    _save(figure, path)


def draw_ratios(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A PNG of `mqa bench`: for each problem, time of the others over ours with its 5-95 % range.

    Each row has `problem` and `contenders`, a list of `name` and `ratio`: median, low, high.
    """
    figure, (axis,) = _canvas(1, (11, 1.6 + 1.1 * len(rows)))
    names = [contender["name"] for contender in rows[0]["contenders"]]
    colours = ("#3b528b", "#5ec962")
    height = 0.8 / len(names)
    for index, name in enumerate(names):
        ratios = [row["contenders"][index]["ratio"] for row in rows]
        at = np.arange(len(rows)) + (index - (len(names) - 1) / 2) * height
        medians = np.array([ratio["median"] for ratio in ratios])
        low = medians - [ratio["low"] for ratio in ratios]
        high = [ratio["high"] for ratio in ratios] - medians
        bars = axis.barh(at, medians, height * 0.9, xerr=(low, high), color=colours[index],
                         ecolor=_INK, capsize=2, label=name)  # fmt: skip
        texts = [f"{median:.2f}×" for median in medians]
        axis.bar_label(bars, labels=texts, padding=8, bbox={"color": "white", "pad": 1})
    axis.axvline(1, color=_INK, linewidth=1, linestyle="--")
    axis.set_yticks(range(len(rows)), [_folded(row["problem"]) for row in rows])
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set_xlabel("time of the other / time of mqa (right of the line: mqa is faster)")
    axis.legend(loc="lower right", frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    title = "mqa against others on this CPU: medians of interleaved runs, 5–95 % range"
    figure.suptitle(title, fontsize=13, fontweight="bold")
    _save(figure, path)


def draw_groups(path: Path, report: Mapping[str, Any], mark: str = "") -> None:
    """A PNG of a GPU report: for each row against the peer, the peer's time over ours.

    A panel a group, bars with their 5-95 % range and a line where both are equal. Long ratios get
    a logarithmic axis. `mark` goes into the file's metadata. Raises ValueError if no such row was
    measured.
    """
    rows = [row for row in report["rows"] if row.get("other", {}).get("who") == "peer"]
    titles = GROUPS_OF[report["suite"]]
    groups = [[row for row in rows if row["group"] == name] for name in titles]
    groups = [group for group in groups if group]
    if not groups:
        raise ValueError("no row of this report was measured against a peer")
    heights = [1.2 + 0.36 * len(group) for group in groups]
    figure, axes = _canvas(len(groups), (10, 0.8 + sum(heights)), heights, sharex=False)
    for axis, group in zip(axes, groups, strict=True):
        _bars(axis, group)
        axis.set_title(titles[group[0]["group"]], loc="left", fontsize=11)
    peer = " ".join(filter(None, (report["peer"]["name"], report["peer"]["version"])))
    axes[-1].set_xlabel(f"time of {peer} / time of mqa (right of the line: mqa is faster)")
    figure.suptitle(f"mqa against {peer} on {report['machine']['gpus'][0]['name']}: medians of "
                    "interleaved graph replays, 5–95 % range", fontweight="bold")  # fmt: skip
    _save(figure, path, mark)


def _bars(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    ratios = [row["ratio"] for row in rows]
    medians = np.array([ratio["median"] for ratio in ratios])
    low = medians - [ratio["low"] for ratio in ratios]
    high = [ratio["high"] for ratio in ratios] - medians
    base = 0.0
    if medians.max() > _LOG_FROM:
        axis.set_xscale("log")
        base = min(0.5, 0.8 * medians.min())
        axis.xaxis.set_major_formatter("{x:g}")
    bars = axis.barh(range(len(rows)), medians - base, 0.75, left=base, xerr=(low, high),
                     color="#3b528b", ecolor=_INK, capsize=2)  # fmt: skip
    texts = [f"{median:.{1 if median >= 10 else 2}f}×" for median in medians]
    axis.bar_label(bars, labels=texts, padding=8, bbox={"color": "white", "pad": 0.5})
    axis.axvline(1, color="#c0392b", linewidth=1.2, linestyle="--")
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.spines[["top", "right"]].set_visible(False)


def _canvas(
    rows: int,
    size: tuple[float, float],
    heights: Sequence[float] | None = None,
    *,
    sharex: bool = True,
) -> tuple[Figure, list[Axes]]:
    """A figure without pyplot: no global state, no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(h_pad=0.08)  # type: ignore[union-attr, call-arg]
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, 1, sharex=sharex, squeeze=False, height_ratios=heights)
    return figure, list(grid[:, 0])


def _save(figure: Figure, path: Path, mark: str = "") -> None:
    figure.savefig(path, dpi=150, format="png", metadata={"Comment": mark} if mark else None)


def _pool(values: Array, step: int) -> Array:
    """The largest of each `step` columns; the last group may be short."""
    missing = -values.shape[1] % step
    padded = np.pad(values, ((0, 0), (0, missing)), constant_values=-np.inf)
    return np.asarray(padded.reshape(len(values), -1, step).max(axis=2), np.float64)


def _heat(
    figure: Figure,
    axis: Axes,
    values: Array,
    extent: tuple[float, float, float, float],
    label: str,
    cmap: str,
    **scale: Any,
) -> None:
    axis.set_facecolor(_GREY)
    masked = np.ma.masked_where(~np.isfinite(values), values)
    image = axis.imshow(
        masked, aspect="auto", interpolation="nearest", extent=extent, cmap=cmap, **scale
    )
    figure.colorbar(image, ax=axis, label=label, pad=0.01, extend="both")
    axis.spines[:].set_visible(False)


def _ring(axis: Axes, planted: npt.NDArray[np.bool_]) -> None:
    """One ring around each planted token, at the middle of the queries that look for it."""
    for token in np.flatnonzero(planted.any(axis=0)):
        queries = np.flatnonzero(planted[:, token])
        axis.plot(token, queries.mean() + 0.5, "o", markersize=9, fillstyle="none",
                  color="white", markeredgewidth=1.2)  # fmt: skip


def _folded(line: str) -> str:
    words = line.split()
    half = (len(words) + 1) // 2
    return " ".join(words[:half]) + "\n" + " ".join(words[half:])
