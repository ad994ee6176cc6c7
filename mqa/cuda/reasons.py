"""What kernels of no architecture can do, said of a problem alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mqa.cuda.operands import ELEMENTS, HEADS, PAGE_SIZES, head_dims, row_bytes, scale_bytes
from mqa.cuda.tensor_map import ADDRESS_BYTES
from mqa.problem import Format, PagedProblem, Problem


def problem_reasons(problem: Problem, formats: Collection[Format]) -> Iterator[str]:
    """Every reason against `problem` where there are kernels for `formats`, on whatever device."""
    if problem.format not in formats:
        yield f"format={problem.format} is not among its kernels, only {', '.join(formats)}"
    if problem.H not in HEADS:
        yield f"H={problem.H} is not one of {', '.join(map(str, HEADS))}"
    dims = head_dims(problem.format)
    if problem.D not in dims:
        yield f"D={problem.D} is not one of {', '.join(map(str, dims))}"
    if isinstance(problem, PagedProblem) and problem.P not in PAGE_SIZES:
        yield f"P={problem.P} is not one of {', '.join(map(str, PAGE_SIZES))}"
    yield from _layout_reasons(problem)


def element_bytes(problem: Problem) -> int:
    """Of what q and k store: two packed E2M1 values, or one of another format."""
    return 2 if problem.format == "bf16" else 1


def stored_elements(problem: Problem) -> int:
    """Of a row of q for one head, and of a key."""
    return row_bytes(ELEMENTS[problem.format], problem.D) // element_bytes(problem)


def _layout_reasons(problem: Problem) -> Iterator[str]:
    """What the copy engine cannot address. The texts tell no strides, which may depend on S: each
    would be a new reason."""
    layout, heads = dict(problem.layout), problem.H
    size, stored = element_bytes(problem), stored_elements(problem)
    paged = isinstance(problem, PagedProblem)
    for tensor in ("q", "cache" if paged else "kv"):
        for offset in layout.get(f"{tensor}_off", ()):
            yield f"{tensor} is {offset} bytes off a multiple of {ADDRESS_BYTES}"
    if isinstance(problem, PagedProblem):
        sizes: tuple[int, ...] = (problem.B, problem.next_n, heads, stored)
        yield from _cache_reasons(problem, layout.get("cache_stride", ()), size)
    else:
        sizes = (problem.S, heads, stored)
        yield from _row_reasons("kv", (problem.N, stored), layout.get("kv_stride", ()), size)
    yield from _row_reasons("q", sizes, layout.get("q_stride", ()), size)
    yield from _request_reasons(problem)


def _request_reasons(problem: Problem) -> Iterator[str]:
    """Queries of a paged call whose rows are not one stride apart, from request to request too."""
    if not isinstance(problem, PagedProblem) or min(problem.B, problem.next_n) < 2:
        return
    layout, next_n = dict(problem.layout), problem.next_n
    row_of_q = problem.H * stored_elements(problem)
    for tensor, row in (("q", row_of_q), ("q_scale", problem.H)):
        # Strides of inner dimensions may be left out.
        request, *inner = layout.get(f"{tensor}_stride", (next_n * row,))
        if request != next_n * (*inner, row)[0]:
            yield (
                f"{tensor} has {request} from one request to the next, expected next_n times "
                f"its row, {next_n * (*inner, row)[0]}, as in {tensor}.contiguous()"
            )


def _row_reasons(
    tensor: str, sizes: tuple[int, ...], strides: tuple[int, ...], item: int
) -> Iterator[str]:
    """Of a tensor whose last dimension is a row for the copy engine; elements have `item` bytes."""
    row = sizes[-1] * item
    inner = strides[-1] if len(strides) == len(sizes) else 1
    steps = [step * item for size, step in zip(sizes[:-1], strides, strict=False) if size > 1]
    if inner != 1 or any(step % ADDRESS_BYTES or step < row for step in steps):
        yield f"{tensor} is not rows of {row} contiguous bytes at multiples of {ADDRESS_BYTES}"


def _cache_reasons(problem: PagedProblem, strides: tuple[int, ...], item: int) -> Iterator[str]:
    elements = ELEMENTS[problem.format]
    bytes_of_page = problem.P * (row_bytes(elements, problem.D) + scale_bytes(elements))
    page = strides[0] * item if strides and problem.blocks > 1 else bytes_of_page
    if page % ADDRESS_BYTES or page < bytes_of_page:
        yield f"pages of cache overlap, or do not begin at multiples of {ADDRESS_BYTES} bytes"
