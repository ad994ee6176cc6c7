"""Every path of the kernels that score, on compact shapes, for sanitizers and the emulator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

ACCURATE, HOPPER_ONLY = "sm90-accurate", ("sm90-accurate", " bf16 ")
"""A backend, and words of paths that only Hopper has."""
MANY, FEW = "S=20 N=700", "S=2 N=700"
DENSE = (
    *(f"{MANY} H={H} D=64 windows=random" for H in (8, 16, 32, 64, 128)),
    *(f"{FEW} H={H} D=128 windows=full" for H in (8, 16, 32, 64, 128)),
    *(f"{size} H=64 D={D} windows=packed" for size in (MANY, FEW) for D in (32, 64, 128)),
    f"{MANY} H=32 D=128 out=bfloat16 out_off=2 out_stride=701 windows=random",
    f"{FEW} H=32 D=128 out=float16 out_off=6 out_stride=703 windows=random",
    f"{MANY} H=64 D=128 out_off=4 out_stride=701 clean=0 windows=random",
    f"{MANY} H=64 D=128 M=333 windows=random",
    f"{FEW} H=16 D=64 M=701 clean=0 out=bfloat16 out_off=2 windows=random",
    f"{MANY} H=8 D=32 weights=bfloat16 w_stride=13 w_off=2 kv_scale_off=4 windows=random",
    f"{FEW} H=8 D=32 kv_stride=48 kv_scale_stride=3 kv_scale_off=12 start_stride=2 windows=random",
    f"{MANY} H=64 D=128 windows=empty",
    "S=7 N=0 H=64 D=128 M=5",
    "S=7 N=3 H=64 D=128 windows=full",
    "S=1 N=1 H=128 D=32 windows=full",
    *(f"{size} H=64 D=128 sms={sms} windows=random" for size in (MANY, FEW) for sms in (1, 67)),
)


RUN, PAIR = "B=2 next_n=8 lens=random", "B=3 next_n=2 lens=random"
PAGED = (
    # 64, 128, 256 and 512 columns of a group, and groups of two blocks.
    *(f"B=3 next_n=1 H={H} D=64 P=64 clean=1 lens=random" for H in (8, 64, 128)),
    *(f"{PAIR} H=64 D={D} P=64" for D in (32, 64, 128)),
    *(f"{RUN} H={H} D=64 P=32 clean=1" for H in (8, 16, 32, 64, 128)),
    f"{RUN} H=128 D=128 P=16 out=bfloat16 out_off=2 out_stride=301",
    *(f"{PAIR} H={H} D=128 P={P} clean=1" for H in (8, 64) for P in (8, 256)),
    f"{PAIR} H=32 D=32 P=128 weights=bfloat16 w_stride=33 w_off=2 lens_off=4 table_stride=50",
    f"{PAIR} H=64 D=64 P=8 lens_rank=1 out=float16 out_off=6 out_stride=303 cache_stride=1024",
    "B=2 next_n=9 lens=ramp H=16 D=64 P=64",
    "B=2 next_n=3 lens=random H=64 D=128 P=64",
    # More tokens than a ring of stages has room for, by one CTA.
    *(f"B=2 next_n={n} lens=random H=64 D=128 P=64 sms=1 L=3000" for n in (1, 2, 4)),
    *(f"B=20 next_n=1 varlen=1 lens=random H={H} D=64 P=64 clean=1" for H in (8, 64)),
    "B=40 next_n=1 varlen=1 lens=zero H=64 D=128 P=64 clean=1 sms=67",
    *(f"{PAIR} H=64 D=128 P=64 clean={sms % 2} sms={sms}" for sms in (1, 66)),
    "B=20 next_n=1 varlen=1 lens=random H=32 D=64 P=16 sms=67",
)


# Formats that become bfloat16, with less of what they share with FP8.
CONVERTED_DENSE = (
    "S=10 N=400 H=64 D=128 windows=random",
    "S=2 N=400 H=8 D=64 windows=full",
)
CONVERTED_PAGED = (
    "B=3 next_n=1 H=64 D=128 P=64 clean=1 lens=random",
    "B=2 next_n=2 H=64 D=64 P=16 lens=random",
    "B=2 next_n=8 H=128 D=64 P=256 clean=1 lens=random",
    *(f"B=2 next_n={n} lens=random H=64 D=128 P=64 sms=1 L=3000" for n in (1, 2)),
)
MX_DENSE = ("S=5 N=301 H=16 D=64 q_stride=2080 q_scale_stride=19 kv_scale_off=4 windows=random",)
BF16_DENSE = (
    "S=5 N=301 H=16 D=32 q_stride=640x40 kv_stride=40 out=bfloat16 out_off=2 windows=random",
    "S=10 N=400 H=128 D=128 M=333 kv_stride=136 windows=random",
)
BF16_PAGED = (
    "B=9 next_n=1 varlen=1 H=32 D=128 P=8 lens=random cache_stride=1032",
    "B=2 next_n=9 H=8 D=32 P=64 clean=1 lens=ramp",
)
MX_PAGED = (
    "B=9 next_n=1 varlen=1 H=32 D=128 P=8 lens=random q_scale_off=4 cache_stride=1088",
    "B=9 next_n=1 H=128 D=64 P=64 clean=1 lens=random",
)


def sized(path: str, format: str = "fp8") -> str:
    """A table as wide as the logits need, 300 columns unless it says so, and a page to spare."""
    path = path if " L=" in path else f"{path} L=300"
    facts = dict(word.split("=") for word in path.split())
    columns = -(-int(facts["L"]) // int(facts["P"]))
    return f"paged {format} {path} columns={columns} blocks={int(facts['B']) * columns + 1}"


def converted(format: str, dense: Iterable[str], paged: Iterable[str]) -> Iterator[str]:
    yield from (f"dense {format} {path}" for path in dense)
    yield from (sized(path, format) for path in paged)


PATHS = (
    *converted("fp8", DENSE, PAGED),
    *converted("mxfp8", CONVERTED_DENSE + MX_DENSE, CONVERTED_PAGED + MX_PAGED),
    *converted("mxfp4", CONVERTED_DENSE + MX_DENSE, CONVERTED_PAGED + MX_PAGED),
    *converted("bf16", CONVERTED_DENSE + BF16_DENSE, CONVERTED_PAGED + BF16_PAGED),
    *(f"{ACCURATE} {path}" for path in converted("fp8", CONVERTED_DENSE, CONVERTED_PAGED)),
)
"""Problems, behind the name of the backend where that is not the GPU's first one."""
