// Warpgroup matrix products, SM90, one function an instruction.
//
// A warpgroup's accumulator of a 64 x N product in float32: register i of thread t (0..127) holds
//   row 16 * (t / 32) + (t % 32) / 4 + 8 * ((i >> 1) & 1),
//   column 8 * (i / 4) + 2 * (t % 4) + (i & 1)
#pragma once

#include <cuda/std/cstdint>

namespace mqa::ptx {

using cuda::std::uint32_t;
using cuda::std::uint64_t;

// Descriptor of a K-major tile whose rows are kRowBytes = 32, 64 or 128 bytes, swizzled with that
// span, groups of 8 rows following each other. The tile is aligned to 8 rows. A tile `bytes`
// further is at descriptor + bytes / 16, also for the next 32 bytes along K.
template <int kRowBytes>
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128, "rows span one swizzle");
  constexpr uint32_t kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  constexpr uint32_t kHigh = kSwizzle << 30 | 8 * kRowBytes >> 4;
  return uint64_t{kHigh} << 32 | address >> 4;  // shared addresses have 18 bits, as the field
}

// Orders register accesses of the warpgroup before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// The registers of accumulator d as operands, constraint "+f" or "=f", and their names in PTX.
#define MQA_OPERANDS_8(constraint, i)                                                              \
  constraint(d[i]), constraint(d[i + 1]), constraint(d[i + 2]), constraint(d[i + 3]),              \
      constraint(d[i + 4]), constraint(d[i + 5]), constraint(d[i + 6]), constraint(d[i + 7])
#define MQA_OPERANDS_32(constraint)                                                                \
  MQA_OPERANDS_8(constraint, 0), MQA_OPERANDS_8(constraint, 8), MQA_OPERANDS_8(constraint, 16),    \
      MQA_OPERANDS_8(constraint, 24)
#define MQA_OPERANDS_64(constraint)                                                                \
  MQA_OPERANDS_32(constraint), MQA_OPERANDS_8(constraint, 32), MQA_OPERANDS_8(constraint, 40),     \
      MQA_OPERANDS_8(constraint, 48), MQA_OPERANDS_8(constraint, 56)
#define MQA_REGISTERS_32                                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, "                                                               \
  "%8, %9, %10, %11, %12, %13, %14, %15, "                                                         \
  "%16, %17, %18, %19, %20, %21, %22, %23, "                                                       \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define MQA_REGISTERS_64                                                                           \
  MQA_REGISTERS_32                                                                                 \
  ", "                                                                                             \
  "%32, %33, %34, %35, %36, %37, %38, %39, "                                                       \
  "%40, %41, %42, %43, %44, %45, %46, %47, "                                                       \
  "%48, %49, %50, %51, %52, %53, %54, %55, "                                                       \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define MQA_WGMMA_E4M3(n, registers, operands, scale_d)                                            \
  "wgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3 {" registers "}, " operands             \
  ", " scale_d ", 1, 1;"

// Waits for every product of the warpgroup. `d` is an operand so that no use of it moves up.
__device__ __forceinline__ void wgmma_wait_group_0(float (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : MQA_OPERANDS_32("+f") : : "memory");
}
__device__ __forceinline__ void wgmma_wait_group_0(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : MQA_OPERANDS_64("+f") : : "memory");
}

// Waits for all products but those of the last group.
__device__ __forceinline__ void wgmma_wait_group_1() {
  asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

// d = A * B, or d += A * B unless `first`, for E4M3 tiles A [64, 32] and B [N, 32], N twice the
// registers of d. The first product has its accumulator as an output alone: as an operand that is
// read, ptxas keeps a copy of it alive across loops.
__device__ __forceinline__ void wgmma_k32_e4m3(float (&d)[32], uint64_t a, uint64_t b, bool first) {
  if (first)
    asm volatile(MQA_WGMMA_E4M3("64", MQA_REGISTERS_32, "%32, %33", "0")
                 : MQA_OPERANDS_32("=f")
                 : "l"(a), "l"(b));
  else
    asm volatile(MQA_WGMMA_E4M3("64", MQA_REGISTERS_32, "%32, %33", "1")
                 : MQA_OPERANDS_32("+f")
                 : "l"(a), "l"(b));
}
__device__ __forceinline__ void wgmma_k32_e4m3(float (&d)[64], uint64_t a, uint64_t b, bool first) {
  if (first)
    asm volatile(MQA_WGMMA_E4M3("128", MQA_REGISTERS_64, "%64, %65", "0")
                 : MQA_OPERANDS_64("=f")
                 : "l"(a), "l"(b));
  else
    asm volatile(MQA_WGMMA_E4M3("128", MQA_REGISTERS_64, "%64, %65", "1")
                 : MQA_OPERANDS_64("+f")
                 : "l"(a), "l"(b));
}

// d = A * B, or d += A * B unless `first`, for bfloat16 tiles A [64, 16], in registers, and B [N, 16].
// Register i of thread t holds rows 16 * (t / 32) + (t % 32) / 4 + 8 * (i % 2), columns
// 2 * (t % 4) + 8 * (i / 2) and the next one. They must stay until the product is waited for.
#define MQA_WGMMA_BF16(n, registers, operands, scale_d)                                            \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" registers "}, " operands             \
  ", " scale_d ", 1, 1, 0;"

__device__ __forceinline__ void wgmma_k16_bf16(float (&d)[32],
                                               const uint32_t (&a)[4],
                                               uint64_t b,
                                               bool first) {
  if (first)
    asm volatile(MQA_WGMMA_BF16("64", MQA_REGISTERS_32, "{%32, %33, %34, %35}, %36", "0")
                 : MQA_OPERANDS_32("=f")
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else
    asm volatile(MQA_WGMMA_BF16("64", MQA_REGISTERS_32, "{%32, %33, %34, %35}, %36", "1")
                 : MQA_OPERANDS_32("+f")
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// Keeps registers as they are up to here: those of an A that products may still read.
__device__ __forceinline__ void keep(uint32_t (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]));
}

#undef MQA_WGMMA_BF16
#undef MQA_WGMMA_E4M3
#undef MQA_REGISTERS_64
#undef MQA_REGISTERS_32
#undef MQA_OPERANDS_64
#undef MQA_OPERANDS_32
#undef MQA_OPERANDS_8

}  // namespace mqa::ptx
