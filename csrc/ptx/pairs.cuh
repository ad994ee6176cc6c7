// Pairs of float32 in one 64-bit register, SM100, one function an instruction.
#pragma once

#include <cuda/std/cstdint>

namespace mqa::ptx {

using cuda::std::uint32_t;
using cuda::std::uint64_t;

// The first in the low half.
__device__ __forceinline__ uint64_t pair_of(uint32_t first, uint32_t second) {
  uint64_t pair;
  asm("mov.b64 %0, {%1, %2};" : "=l"(pair) : "r"(first), "r"(second));
  return pair;
}
__device__ __forceinline__ float2 halves_of(uint64_t pair) {
  float2 halves;
  asm("mov.b64 {%0, %1}, %2;" : "=f"(halves.x), "=f"(halves.y) : "l"(pair));
  return halves;
}

// A pair from shared memory at a uniform address. `nothing` is 0, uniform, and nothing the compiler
// knows of: integer arithmetic on uniform values is done in uniform registers, and there they stay. Two
// instructions of it, since one alone is not always found worth the way there.
__device__ __forceinline__ uint64_t ld_shared_uniform_pair(uint32_t address, uint32_t nothing) {
  uint32_t first, second;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(first), "=r"(second)
               : "r"(address)
               : "memory");
  return pair_of((first ^ nothing) + nothing, (second ^ nothing) + nothing);
}

// Two pairs from shared memory, read where the program says so: not ahead and kept.
__device__ __forceinline__ void ld_shared_pairs(uint64_t& first,
                                                uint64_t& second,
                                                uint32_t address) {
  asm volatile("ld.shared.v2.b64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "r"(address));
}

__device__ __forceinline__ uint64_t fma_f32x2(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t result;
  asm("fma.rn.f32x2 %0, %1, %2, %3;" : "=l"(result) : "l"(a), "l"(b), "l"(c));
  return result;
}
__device__ __forceinline__ uint64_t add_f32x2(uint64_t a, uint64_t b) {
  uint64_t result;
  asm("add.rn.f32x2 %0, %1, %2;" : "=l"(result) : "l"(a), "l"(b));
  return result;
}
// |a| of both: a modifier of the instruction that takes it.
__device__ __forceinline__ uint64_t abs_f32x2(uint64_t a) {
  const float2 halves = halves_of(a);
  return pair_of(__float_as_uint(fabsf(halves.x)), __float_as_uint(fabsf(halves.y)));
}

}  // namespace mqa::ptx
