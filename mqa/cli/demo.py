"""`mqa demo`: a first look at the formats, what they cost and what they keep."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import mqa
from mqa import config
from mqa.cli.console import (
    Stop,
    one_line,
    print_whole,
    require_matplotlib,
    standard_output,
    write_whole,
)
from mqa.cli.plots import draw_scores
from mqa.cli.workload import Workload, float32_scores, make_workload
from mqa.errors import BackendUnavailableError
from mqa.problem import QUANTIZED_FORMATS, Format
from mqa.testing import wall_clock

_PAGE = 64
_TOP_SHOWN = 8
_TIMED_RUNS = 3


Operands: TypeAlias = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""q, its scale (None for fp8), k, its scale"""


@dataclass(frozen=True)
class Scored:
    """A format's scores of the workload."""

    format: Format
    scores: Tensor
    """[S, N]"""
    bytes_per_token: int
    seconds: float
    backend: str
    paged_agrees: bool
    """Whether the paged call gave the same bits."""


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Another seed makes another workload.")] = 0,
    top_k: Annotated[int, typer.Option(min=1, help="Tokens that the indexer picks.")] = 256,
    rows: Annotated[int, typer.Option(min=4, hidden=True)] = 64,
    tokens: Annotated[int, typer.Option(min=128, hidden=True)] = 4096,
    heads: Annotated[int, typer.Option(min=1, hidden=True)] = 64,
    dims: Annotated[int, typer.Option(min=32, hidden=True)] = 128,
) -> None:
    """Score a made-up long context in every quantised format, dense and paged, and draw it all.

    Compares each format with float32 scores of the unquantised tensors: the error, how many of the
    top tokens stay the same, and whether the planted relevant tokens are found.

    \b
    Examples:
      mqa demo
      mqa demo --out pictures --seed 3 --top-k 512
    """
    require_matplotlib()
    console = standard_output()
    workload = make_workload(rows, tokens, heads, dims, seed)
    exact = float32_scores(workload)
    try:
        results = [_score(workload, fmt) for fmt in QUANTIZED_FORMATS]
    except (BackendUnavailableError, ValueError) as error:
        raise Stop(one_line(str(error))) from error
    console.print(
        f"{rows} queries of {heads} heads of {dims} dims, {tokens} KV tokens, causal; seed {seed}\n"
    )
    console.print(_top_tokens(workload, exact, results))
    console.print()
    console.print(_comparison(workload, exact, results, top_k))
    _print_agreement(console, results)
    path = out / "scores.png"
    panels = {str(result.format): result.scores for result in results}
    write_whole(path, lambda file: draw_scores(file, exact, panels, workload.planted))
    print_whole(console, f"picture: {path.resolve()}")
    if not all(result.paged_agrees for result in results):
        raise typer.Exit(1)


def _quantised(workload: Workload, fmt: Format) -> tuple[Operands, Tensor]:
    """The operands and the weights, into which q's FP8 scale is folded."""
    quantise = getattr(mqa.formats, f"quantize_{fmt}")
    q, q_scale = quantise(workload.q)
    k, k_scale = quantise(workload.k)
    if fmt != "fp8":
        return (q, q_scale, k, k_scale), workload.weights
    return (q, None, k, k_scale), workload.weights * q_scale


def _score(workload: Workload, fmt: Format) -> Scored:
    operands, weights = _quantised(workload, fmt)
    q, q_scale, k, k_scale = operands
    heads, dims = workload.q.shape[1:]

    def dense() -> Tensor:
        windows = (workload.start, workload.end)
        return mqa.fp8_fp4_mqa_logits((q, q_scale), (k, k_scale), weights, *windows)

    scores = dense()
    seconds = statistics.median(wall_clock(dense) for _ in range(_TIMED_RUNS))
    paged = _paged(workload, operands, weights)
    return Scored(
        fmt,
        scores,
        bytes_per_token=k[0].nbytes + k_scale[0].nbytes,
        seconds=seconds,
        backend=config.backend_name() or str(mqa.supports(heads, dims, fmt, device="cpu").backend),
        paged_agrees=torch.equal(scores.view(torch.int32), paged.view(torch.int32)),
    )


def _paged(workload: Workload, operands: Operands, weights: Tensor) -> Tensor:
    """The same scores from a paged cache whose pages lie in any order: one request, S queries."""
    q, q_scale, k, k_scale = operands
    pages = -(-len(k) // _PAGE)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
    where = torch.argsort(order)[:, None] * _PAGE + torch.arange(_PAGE)
    source = torch.argsort(where.flatten()).clamp(max=len(k) - 1)
    paged = [t[source].unflatten(0, (pages, _PAGE)) for t in (k.view(torch.uint8), k_scale)]
    cache = mqa.formats.pack_kv_cache(paged[0].view(k.dtype), paged[1])
    return mqa.fp8_fp4_paged_mqa_logits(
        (q[None], None if q_scale is None else q_scale[None]),
        cache,
        weights,
        context_lens=workload.end[None],
        block_table=torch.argsort(order)[None].to(torch.int32),
        schedule_meta=None,
        max_context_len=len(k),
        clean_logits=True,
    )


def _top_tokens(workload: Workload, exact: Tensor, results: list[Scored]) -> Table:
    table = Table(title="top tokens of the last query, with their rank", title_justify="left")
    table.add_column("token", justify="right")
    table.add_column("planted", justify="center")
    for name in ("float32", *(result.format for result in results)):
        table.add_column(name, justify="right")
    ranks = [_ranks(scores) for scores in (exact[-1], *(result.scores[-1] for result in results))]
    for token in exact[-1].topk(min(_TOP_SHOWN, exact.shape[1])).indices.tolist():
        columns = (exact[-1], *(result.scores[-1] for result in results))
        cells = [
            f"{float(column[token]):.4f}  #{int(rank[token]):<2}"
            for column, rank in zip(columns, ranks, strict=True)
        ]
        table.add_row(str(token), "yes" if workload.planted[-1, token] else "", *cells)
    return table


def _ranks(scores: Tensor) -> Tensor:
    return torch.argsort(torch.argsort(scores, descending=True)) + 1


def _comparison(workload: Workload, exact: Tensor, results: list[Scored], top_k: int) -> Table:
    table = Table(title="formats against unquantised float32", title_justify="left")
    table.add_column("format")
    planted = f"planted in top {_TOP_SHOWN}"
    names = ("bytes a token", "time", "relative error", f"recall@{top_k}", planted, "backend")
    for name in names:
        table.add_column(name, justify="right")
    wanted = workload.planted & ~workload.outside
    k = workload.k
    unquantised = f"{k[0].nbytes}"
    table.add_row("float32", unquantised, "", "0", "100.0 %", _found(exact, wanted), "")
    for result in results:
        table.add_row(
            result.format,
            str(result.bytes_per_token),
            f"{result.seconds * 1e3:.1f} ms",
            f"{relative_error(result.scores, exact):.2%}",
            f"{recall(result.scores, exact, top_k):.1%}".replace("%", " %"),
            _found(result.scores, wanted),
            result.backend,
        )
    return table


def relative_error(scores: Tensor, exact: Tensor) -> float:
    """Root mean square error over that of the scores, where they are finite."""
    seen = exact.isfinite()
    return float((scores - exact)[seen].norm() / exact[seen].norm())


def recall(scores: Tensor, exact: Tensor, top_k: int) -> float:
    """Share of the `top_k` best tokens by `exact` that are among those by `scores`."""
    shares = []
    for got, want in zip(scores, exact, strict=True):
        count = min(top_k, int(want.isfinite().sum()))
        chosen = torch.isin(want.topk(count).indices, got.topk(count).indices)
        shares.append(float(chosen.float().mean()))
    return sum(shares) / len(shares)


def _found(scores: Tensor, wanted: Tensor) -> str:
    top = torch.zeros_like(wanted).scatter_(1, scores.topk(_TOP_SHOWN).indices, True)
    return f"{int((top & wanted).sum())} of {int(wanted.sum())}"


def _print_agreement(console: Console, results: list[Scored]) -> None:
    for result in results:
        if result.paged_agrees:
            continue
        print_whole(console, f"{result.format}: the paged call gave other bits", style="bold red")
    if all(result.paged_agrees for result in results):
        print_whole(console, f"paged (pages of {_PAGE}, shuffled) gave the same bits as dense")
