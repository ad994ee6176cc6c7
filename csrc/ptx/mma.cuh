// Products of warps and copies that every GPU from SM80 on has, one function an instruction.
#pragma once

#include <cuda/std/cstdint>

namespace mqa::ptx {

using cuda::std::uint32_t;

// sums += a b for a 16 x 16, row by row, and b 16 x 8, column by column.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&sums)[4],
                                                  const uint32_t (&a)[4],
                                                  uint32_t b0,
                                                  uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16_f16(float (&sums)[4],
                                                 const uint32_t (&a)[4],
                                                 uint32_t b0,
                                                 uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// a * b, two bfloat16 each, subnormal ones too. A zero keeps its sign.
__device__ __forceinline__ uint32_t fma_mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000));
  return result;
}

__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// a & b, of which the compiler makes nothing else.
__device__ __forceinline__ uint32_t and_b32(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("and.b32 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// Bits of a where the mask has ones, of b where it has zeros.
__device__ __forceinline__ uint32_t select_bits(uint32_t a, uint32_t b, uint32_t mask) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(result) : "r"(a), "r"(b), "r"(mask));
  return result;
}

// Copies 16 bytes; both addresses are 16-byte aligned.
__device__ __forceinline__ void cp_async_16(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

// Copies 16 bytes of which the first `bytes` (0 or 16) are read and the rest become zero; both
// addresses are 16-byte aligned.
__device__ __forceinline__ void cp_async_16(uint32_t target, const void* source, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Returns once all copies of this thread have landed.
__device__ __forceinline__ void cp_async_wait_group_0() {
  asm volatile("cp.async.wait_group 0;" ::: "memory");
}

}  // namespace mqa::ptx
