"""What NVRTC makes of CUDA's arithmetic intrinsics is modelled, instruction by instruction."""

from __future__ import annotations

import pytest

from mqa.cuda import compiler
from mqa.emulator import PtxError
from mqa.emulator.parser import parse
from mqa.emulator.program import Program, Step

pytestmark = pytest.mark.skipif(compiler.unavailable() is not None, reason="NVRTC is missing")
FLOATS = """
exp2f(x) __expf(x) __logf(x) __log2f(y) rsqrtf(x) sqrtf(x) __fsqrt_rz(x) __frcp_rn(x) __frcp_ru(x)
__fdividef(x,y) x/y fmaxf(fmaxf(x,y),z) fminf(fminf(x,y),z) __fadd_rz(x,y) __fadd_ru(x,y)
__fadd_rd(x,y) __fmul_rz(x,y) __fmaf_rz(x,y,z) __fsub_ru(x,y) __saturatef(x) __saturatef(x*y+z)
fmaf(x,y,z) copysignf(x,y) truncf(x) rintf(x) floorf(x) ceilf(x) roundf(x) tanhf(x) __tanhf(x)
__sinf(x) __cosf(x) logf(x) expf(x) ldexpf(x,3) scalbnf(x,n) powf(x,y) fmodf(x,y) erff(x)
isnan(x)||isinf(y) (x>y&&y==z)?x:z __int2float_ru(n) __uint2float_rz(n) float(double(x)*double(y))
"""
INTEGERS = """
__reduce_max_sync(~0u,n) __reduce_add_sync(~0u,n) __reduce_xor_sync(~0u,n) __ballot_sync(~0u,n&1)
__match_any_sync(~0u,n) __fns(n,3,2) __ffs(n) __clz(n) __brev(n) __popc(n) __clzll(n*77ull)
__byte_perm(n,m,0x5140) __funnelshift_l(n,m,n&7) __vmaxs2(n,m) __vadd4(n,m) __vabsdiffu4(n,m)
__dp4a((int)n,(int)m,7) __dp2a_lo((int)n,(int)m,7) __mulhi((int)n,77) __umul64hi(n*77ull,m*99ull)
__sad((int)n,4,9) __usad(n,4,9) __hadd((int)n,9) __vimax3_s32((int)n,3,(int)m)
__vimax_s32_relu((int)n,3) __vimax_s16x2_relu(n,m) (unsigned)(short)n n/7 n%13 (int)n/5
__float2int_rn(x) __float2uint_rz(x) (unsigned)(int64_t)x (unsigned)(uint8_t)x
__isShared(p)+__isGlobal(p)
"""
NARROW = """
__nv_cvt_float2_to_fp8x2(v,__NV_SATFINITE,__NV_E4M3)
__nv_cvt_float2_to_fp8x2(v,__NV_NOSAT,__NV_E5M2)
__nv_cvt_float_to_fp8(x,__NV_SATFINITE,__NV_E4M3) __nv_cvt_fp8x2_to_halfraw2(n,__NV_E4M3).x
__nv_cvt_fp8x2_to_halfraw2(n,__NV_E5M2).y __nv_cvt_halfraw2_to_fp8x2(h,__NV_SATFINITE,__NV_E4M3)
__nv_cvt_bfloat16raw2_to_fp8x2(b,__NV_SATFINITE,__NV_E4M3)
__nv_cvt_float2_to_e8m0x2(v,__NV_SATFINITE,cudaRoundZero)
__nv_cvt_float2_to_e8m0x2(v,__NV_NOSAT,cudaRoundPosInf)
__nv_cvt_bfloat162raw_to_e8m0x2(b,__NV_SATFINITE,cudaRoundPosInf)
__nv_cvt_e8m0x2_to_bf162raw(n).x __nv_cvt_float2_to_fp4x2(v,__NV_E2M1,cudaRoundNearest)
__nv_cvt_fp4x2_to_halfraw2(n,__NV_E2M1).x __nv_cvt_halfraw2_to_fp4x2(h,__NV_E2M1,cudaRoundNearest)
__nv_cvt_float2_to_fp6x2(v,__NV_E2M3,cudaRoundNearest) __nv_cvt_fp6x2_to_halfraw2(n,__NV_E3M2).x
__nv_cvt_float2_to_fp6x2(v,__NV_E3M2,cudaRoundNearest) __nv_cvt_fp6x2_to_halfraw2(n,__NV_E2M3).x
"""
HALVES = """
__hfma2(a,b,c) __hfma2_relu(a,b,c) __hfma2_sat(a,b,c) __hadd2(a,b) __hadd2_rn(a,b) __hmul2(a,b)
__hsub2(a,b) __hmax2(a,b) __hmax2_nan(a,b) __hmin2(a,b) __habs2(a) __hneg2(a) __heq2(a,b)
__hgt2(a,b) __hltu2(a,b) h2exp2(a) h2log2(a) h2rcp(a) h2rsqrt(a) h2exp(a) h2tanh_approx(a) h2ceil(a)
h2rint(a) __h2div(a,b) __hcmadd(a,b,c)
"""
PACKED = "__ffma2_rn(v,w,v) __fadd2_rd(v,w) __fmul2_ru(v,w) __ffma2_rz(v,w,v)"


def stored(name: str, kind: str, expressions: str, first: str = "") -> str:
    lines = [f"to[{32 * i} + threadIdx.x] = {text};" for i, text in enumerate(expressions.split())]
    declared = f"""
extern "C" __global__ void {name}({kind}* to, const float* p, unsigned n, unsigned m) {{
float x = p[threadIdx.x], y = p[threadIdx.x + 32], z = p[threadIdx.x + 64];
float2 v = make_float2(x, y), w = make_float2(y, z);
{first}
"""
    return declared + "\n".join(lines) + "\n}\n"


def source() -> str:
    headers = "".join(f"#include <cuda_{x}.h>\n" for x in ("fp16", "bf16", "fp8", "fp6", "fp4"))
    raw = "__half2_raw h{(unsigned short)n, (unsigned short)m}; "
    raw += "__nv_bfloat162_raw b{(unsigned short)n, (unsigned short)m};"
    packed = stored("packed", "float2", PACKED)
    parts = [
        stored("floats", "float", FLOATS),
        stored("integers", "unsigned", INTEGERS),
        stored("narrow", "unsigned", NARROW, raw),
        f"#if __CUDA_ARCH__ >= 1000\n{packed}#endif\n",
    ]
    for kind in ("__half2", "__nv_bfloat162"):
        operands = f"auto *q = ({kind}*)p; auto a = q[n], b = q[m], c = q[n + m];"
        parts.append(stored(f"of{kind}", kind, HALVES, operands))
    return headers + "using int64_t = long long;\nusing uint8_t = unsigned char;\n" + "".join(parts)


def ptx_for(arch: str, *options: str) -> str:
    from cuda.bindings import nvrtc

    flags = [*compiler._include_flags(), f"-arch={arch}", "-std=c++17", "-default-device", *options]
    program = nvrtc.nvrtcCreateProgram(source().encode(), b"intrinsics.cu", 0, [], [])[1]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [x.encode() for x in flags])
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    assert int(status) == 0, log.decode()
    text = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode().rstrip("\0")


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("80", ()),
        ("89", ()),
        ("90a", ()),
        ("100f", ()),
        ("100a", ("--use_fast_math",)),
        ("120", ()),
    ],
)
def test_every_instruction_of_intrinsics_is_modelled(
    target: str, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = parse(ptx_for(f"compute_{target}", *options))
    assert module.target == f"sm_{target}"
    refused, bind = [], Program._bind

    def noted(program: Program, index: int, at: object) -> object:
        try:
            return bind(program, index, at)  # type: ignore[arg-type]
        except PtxError as error:
            refused.append(str(error))
            return Step(lambda warp, mask: None, None)

    monkeypatch.setattr(Program, "_bind", noted)
    for entry in module.entries.values():
        Program(module, entry)
    assert not refused
    assert len(module.entries) == (5 if target in ("80", "89", "90a") else 6)
