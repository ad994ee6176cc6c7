"""From a problem's one line to its tensors: the same bits on every machine and device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mqa.problem import DenseProblem, PagedProblem, Problem, parse
from mqa.testing._codes import I64, U8, Codes, pack_nibbles, pack_scales
from mqa.testing.data import Data, Group
from mqa.testing.draws import Draw
from mqa.testing.layout import Layout, Raw
from mqa.testing.regimes import (
    MIN_NONZERO,
    Operands,
    assert_bounded,
    assert_exact,
    draw_bounded,
    draw_exact,
    nonzero_share,
)
from mqa.testing.windows import (
    Paging,
    cut_windows,
    draw_lens,
    draw_paging,
    draw_windows,
    valid_counts,
)

CORPORA = ("smoke", "ci", "all", "portable")

_LEANS = (0.8, 1.3, 2.0)
"""How much q and k of exact cases lean towards each other, in sigmas of a dot; the first to do."""


@dataclass(frozen=True)
class Case:
    """A problem with its tensors, ready to run.

    `tensors` are named as in the problem's layout: dense q, q_scale, kv, kv_scale, w, start, end;
    paged q, q_scale, cache, w, lens, table, indices (q_scale only for mx formats, kv_scale not for
    bf16, indices only for varlen). `data` holds the same content as plain numpy arrays, for the
    oracle.
    """

    problem: Problem
    tensors: Mapping[str, Tensor]
    data: Data
    device: torch.device

    @property
    def out_dtype(self) -> torch.dtype:
        return _dtype(self.problem.out)

    @property
    def kwargs(self) -> dict[str, Any]:
        """The public function's arguments by name, without schedule_meta, out and backend.

        A q without a scale is passed bare by even seeds, as the pair (q, None) by odd ones.
        """
        tensors, problem = self.tensors, self.problem
        scale = tensors.get("q_scale")
        bare = scale is None and problem.seed % 2 == 0
        common = {
            "q": tensors["q"] if bare else (tensors["q"], scale),
            "weights": tensors["w"],
            "clean_logits": problem.clean,
            "logits_dtype": self.out_dtype,
        }
        if isinstance(problem, DenseProblem):
            return common | {
                "kv": (tensors["kv"], tensors.get("kv_scale")),
                "cu_seq_len_k_start": tensors["start"],
                "cu_seq_len_k_end": tensors["end"],
                "max_seqlen_k": problem.M,
            }
        return common | {
            "kv_cache": tensors["cache"],
            "context_lens": tensors["lens"],
            "block_table": tensors["table"],
            "max_context_len": problem.L,
            "indices": tensors.get("indices"),
        }

    def run(
        self,
        fn: Callable[..., Tensor] | None = None,
        *,
        backend: str | None = None,
        out: Tensor | None = None,
        schedule_meta: Tensor | None = None,
    ) -> Tensor:
        """Call `fn` (default: the public function of `mqa`) on the case; returns its logits.

        `fn` gets `kwargs` and `schedule_meta` by keyword, and `backend` and `out` only where given.
        Where the layout speaks of `out`, `new_out()` is passed by default. Where the problem has a
        schedule (sms > 0), `stale_schedule()` is.
        """
        options = {"backend": backend, "out": out}
        if out is None and Layout(self.problem).mentions("out"):
            options["out"] = self.new_out()
        given = {name: value for name, value in options.items() if value is not None}
        if schedule_meta is None and self.problem.sms:
            schedule_meta = self.stale_schedule()
        fn = fn or _public_function(self.problem)
        return fn(**self.kwargs, schedule_meta=schedule_meta, **given)

    def new_out(self) -> Tensor:
        """A fresh result tensor [rows, width] of the layout's strides, full of NaN.

        `guards_intact` tells whether anything around its entries was written.
        """
        shape = (self.problem.rows, self.problem.width)
        return Layout(self.problem).out(shape, self.out_dtype, self.device)

    def stale_schedule(self) -> Tensor:
        """int32 [sms + 1, 2] cut points of some other batch: legal, and must change nothing."""
        draw = Draw(self.problem.seed, "schedule")
        cuts = draw.between(-1, 2 * self.problem.rows, (self.problem.sms + 1, 2))
        return torch.from_numpy(cuts.astype(np.int32)).to(self.device)


def make_case(problem: Problem, device: str | torch.device = "cpu") -> Case:
    """Draw the data of `problem` and build its tensors on `device`.

    Strides and addresses are those of `problem.layout`; every other tensor is contiguous and
    aligned. Each allocation ends behind the last needed element and gaps hold poison. Unused pages,
    page tails and their scales are NaN; table entries past the need are -1, huge or another page.

    Raises AssertionError if the drawn data break a limit of the problem's regime, ValueError if the
    layout can't be had.
    """
    builder = _Builder(problem, torch.device(device))
    case = builder.dense() if isinstance(problem, DenseProblem) else builder.paged()
    builder.layout.assert_all_used()
    if problem.regime == "exact":
        assert_exact(case.data)
    else:
        assert_bounded(case.data)
    return case


def read_corpus(path: str | Path) -> list[Problem]:
    """The problems of a corpus file: one a line, `#` starts a comment, empty lines are skipped.

    Raises ValueError with file and line number where a line is no problem.
    """
    problems = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            problems.append(parse(text))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    return problems


def corpus(name: str) -> list[Problem]:
    """The problems of one of the project's own corpora: smoke, ci, all, or portable, which is all
    and every choice that the `portable` backend's kernels are compiled for.

    Raises ValueError for another name.
    """
    here = Path(__file__).parent
    homes = (here / "corpus", here.parents[1] / "tests" / "corpus")  # installed, in a checkout
    if name not in CORPORA:
        raise ValueError(f"name={name!r}, expected one of {', '.join(CORPORA)}")
    home = next(home for home in homes if home.is_dir())
    names = ("all", name) if name == "portable" else (name,)
    return [problem for name in names for problem in read_corpus(home / f"{name}.txt")]


class _Builder:
    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.problem, self.device, self.layout = problem, device, Layout(problem)
        self.tensors: dict[str, Tensor] = {}
        self.filler = Draw(problem.seed, "filler")

    def dense(self) -> Case:
        problem = self.problem
        assert isinstance(problem, DenseProblem)
        start, end = draw_windows(problem)
        start = self.layout.settle("start", start)
        end = self.layout.settle("end", cut_windows(start, end, problem.N, problem.M))
        first, last = np.clip(start, 0, problem.N), np.clip(end, 0, problem.N)
        groups = (Group(0, problem.S, np.arange(problem.N, dtype=np.int64)),)
        origin = np.maximum(start, 0) if problem.M else np.zeros_like(start)
        operands, data = self._operands(problem.N, first, np.maximum(first, last), origin, groups)
        self._place_rows(operands, (problem.S,))
        self._place("kv", *self._elements(operands.k_codes))
        if operands.k_scales is not None:
            self._place("kv_scale", self._packed(operands.k_scales), torch.int32)
        elif problem.format == "fp8":
            self._place("kv_scale", operands.key_scale, torch.float32)
        self._place("start", start.astype(np.int32), torch.int32)
        self._place("end", end.astype(np.int32), torch.int32)
        return Case(problem, self.tensors, data, self.device)

    def paged(self) -> Case:
        problem = self.problem
        assert isinstance(problem, PagedProblem)
        lens = self.layout.settle("lens", draw_lens(problem))
        counts = valid_counts(problem, lens)
        paging = draw_paging(problem, counts)
        slots = [group.keys for group in paging.groups]
        used = np.unique(np.concatenate([np.zeros(0, np.int64), *slots]))
        groups = tuple(
            Group(g.first, g.last, np.searchsorted(used, g.keys).astype(np.int64))
            for g in paging.groups
        )
        zero = np.zeros_like(counts)
        operands, data = self._operands(len(used), zero, counts, zero, groups)
        self._place_rows(operands, (problem.B, problem.next_n))
        self._place_pool(operands, used)
        self._place("lens", lens, torch.int32)
        self._place_table(paging)
        return Case(problem, self.tensors, data, self.device)

    def _operands(
        self, num_keys: int, start: I64, end: I64, origin: I64, groups: tuple[Group, ...]
    ) -> tuple[Operands, Data]:
        problem = self.problem

        def as_data(operands: Operands) -> Data:
            fields = vars(operands) | {"start": start, "end": end, "origin": origin}
            return Data(
                problem.format, **fields, groups=groups, width=problem.width, clean=problem.clean
            )

        def settled(operands: Operands) -> Operands:
            weights = self.layout.settle("w", operands.weights)
            return Operands(**(vars(operands) | {"weights": weights}))

        if problem.regime == "bounded":
            operands = settled(draw_bounded(problem, num_keys))
            return operands, as_data(operands)
        for lean in _LEANS:
            operands = settled(draw_exact(problem, num_keys, lean))
            if nonzero_share(as_data(operands)) >= MIN_NONZERO:
                break
        return operands, as_data(operands)

    def _place_rows(self, operands: Operands, leading: tuple[int, ...]) -> None:
        """q, its scales and the weights; `leading` are the dims that make the rows."""
        raw, dtype = self._elements(operands.q_codes)
        self._place("q", raw.reshape(*leading, *raw.shape[1:]), dtype)
        if operands.q_scales is not None:
            packed = self._packed(operands.q_scales)
            self._place("q_scale", packed.reshape(*leading, packed.shape[1]), torch.int32)
        if self.problem.weights == "bfloat16":
            halves = (operands.weights.view(np.uint32) >> 16).astype(np.uint16)
            self._place("w", halves, torch.bfloat16)
        else:
            self._place("w", operands.weights, torch.float32)

    def _place_pool(self, operands: Operands, used: I64) -> None:
        """The cache [blocks, P, 1, elements]: in a block all values first, then 4 bytes a token,
        of bfloat16 none."""
        problem = self.problem
        assert isinstance(problem, PagedProblem)
        values, dtype = self._elements(operands.k_codes)
        item, plain = values.shape[1], dtype == torch.bfloat16
        nan = 0x7FFF if plain else 0x7F
        pool = np.full((problem.blocks, problem.P, 1, item), nan, values.dtype)
        pool.reshape(-1, item)[used] = values
        if plain:
            self._place("cache", pool, dtype)
            return
        scales = (
            operands.key_scale if operands.k_scales is None else self._packed(operands.k_scales)
        )
        tails = np.full((problem.blocks, problem.P, 4), 0xFF, np.uint8)
        tails.reshape(-1, 4)[used] = np.ascontiguousarray(scales).view(np.uint8).reshape(-1, 4)
        flat = np.concatenate(
            [part.reshape(problem.blocks, problem.P * part.shape[-1]) for part in (pool, tails)], 1
        ).reshape(problem.blocks, problem.P, 1, item + 4)
        self._place("cache", flat, torch.uint8)

    def _place_table(self, paging: Paging) -> None:
        self._place("table", paging.table, torch.int32)
        if len(paging.indices) or (isinstance(self.problem, PagedProblem) and self.problem.varlen):
            self._place("indices", paging.indices, torch.int32)

    def _place(self, name: str, raw: Raw, dtype: torch.dtype) -> None:
        self.tensors[name] = self.layout.place(name, raw, dtype, self.device)

    def _elements(self, codes: Codes) -> tuple[Codes, torch.dtype]:
        """Element codes as stored, and their dtype. FP4 is uint8 if seed & 2, else int8."""
        if self.problem.format == "mxfp4":
            return pack_nibbles(codes), torch.uint8 if self.problem.seed & 2 else torch.int8
        plain = self.problem.format == "bf16"
        return codes, torch.bfloat16 if plain else torch.float8_e4m3fn

    def _packed(self, scales: U8) -> Raw:
        shape = (*scales.shape[:-1], 4)
        return pack_scales(scales, self.filler.below(256, shape).astype(np.uint8))


def _dtype(name: str) -> torch.dtype:
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[name]


def _public_function(problem: Problem) -> Callable[..., Tensor]:
    from mqa import ops  # Imported late: the kit serves other people's kernels without it.

    name = "fp8_fp4_mqa_logits"
    if isinstance(problem, PagedProblem):
        name = "fp8_fp4_paged_mqa_logits"
    return getattr(ops, name)  # type: ignore[no-any-return]
