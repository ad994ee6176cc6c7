// Conversions to bfloat16, one function an instruction. Pairs have the lower element in the lower
// half.
#pragma once

#include <cuda/std/cstdint>

namespace mqa::ptx {

using cuda::std::uint16_t;
using cuda::std::uint32_t;

// Two E4M3 values to float16, exactly; NaN stays NaN.
__device__ __forceinline__ uint32_t f16x2_from_e4m3x2(uint16_t pair) {
  uint32_t result;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(pair));
  return result;
}

// Two float16 values to bfloat16, by way of float32: exact where bfloat16 has the value.
__device__ __forceinline__ uint32_t bf16x2_from_f16x2(uint32_t pair) {
  uint32_t result;
  asm("{\n"
      ".reg .b16 low, high;\n"
      ".reg .f32 a, b;\n"
      "mov.b32 {low, high}, %1;\n"
      "cvt.f32.f16 a, low;\n"
      "cvt.f32.f16 b, high;\n"
      "cvt.rn.bf16x2.f32 %0, b, a;\n"
      "}"
      : "=r"(result)
      : "r"(pair));
  return result;
}

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

}  // namespace mqa::ptx
