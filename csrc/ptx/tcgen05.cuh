// Blackwell's tensor memory and tensor unit, one function an instruction.
//
// Tensor memory has 128 lanes of 512 columns; an address holds the lane in its upper half. A warp
// reaches the 32 lanes of its number modulo 4.
#pragma once

#include <cuda/std/cstdint>

namespace mqa::ptx {

using cuda::std::uint32_t;
using cuda::std::uint64_t;

constexpr uint32_t kTensorLane = 1u << 16;  // from one lane to the next

// Stores the address of so many columns to shared memory once they are free; by a warp.
template <int kColumns>
__device__ __forceinline__ void tcgen05_alloc(uint32_t target) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(target),
               "n"(kColumns)
               : "memory");
}

// This CTA allocates no more; by a warp.
__device__ __forceinline__ void tcgen05_relinquish_alloc_permit() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}

template <int kColumns>
__device__ __forceinline__ void tcgen05_dealloc(uint32_t memory) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(memory), "n"(kColumns)
               : "memory");
}

// What this thread and those it waited for did with tensor memory comes before its next arrival.
__device__ __forceinline__ void tcgen05_fence_before_thread_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

// What others did before the wait that this thread ended comes before what it does from here on.
__device__ __forceinline__ void tcgen05_fence_after_thread_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// One arrival when all products and copies that this thread issued are done.
__device__ __forceinline__ void tcgen05_commit(uint32_t barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
      : "memory");
}

// Descriptor of a K-major tile whose rows are kRowBytes = 32, 64 or 128 bytes, swizzled with that
// span, groups of 8 rows following each other. The tile is aligned to 8 rows. A tile `bytes`
// further is at descriptor + bytes / 16, also for the next 32 bytes along K.
template <int kRowBytes>
__device__ __forceinline__ uint64_t tcgen05_descriptor(uint32_t address) {
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128, "rows span one swizzle");
  constexpr uint32_t kSwizzle = kRowBytes == 128 ? 2 : kRowBytes == 64 ? 4 : 6;
  constexpr uint32_t kHigh = kSwizzle << 29 | 1u << 14 | 8 * kRowBytes >> 4;
  return uint64_t{kHigh} << 32 | address >> 4;  // shared addresses have 18 bits, as the field
}

// Descriptor of rows of 16 bytes without a swizzle, one after the other.
__device__ __forceinline__ uint64_t tcgen05_descriptor_of_scales(uint32_t address) {
  constexpr uint32_t kHigh = 1u << 14 | 128 >> 4;
  return uint64_t{kHigh} << 32 | address >> 4;
}

// Copies 32 rows of 16 bytes to 4 columns, in each quarter of the lanes.
__device__ __forceinline__ void tcgen05_cp_32x128b(uint32_t memory, uint64_t descriptor) {
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(memory), "l"(descriptor)
               : "memory");
}

// Descriptor of 128 x kColumns products of E4M3 to float32, both operands K-major.
template <int kColumns>
constexpr uint32_t kE4m3Instruction = 1u << 4 | kColumns / 8 << 17 | 128 / 16 << 24;

// D = A B^T, or D += A B^T, over 32 bytes of K.
__device__ __forceinline__ void tcgen05_mma_f8f6f4(
    uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool adds) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               "setp.ne.b32 p, %4, 0;\n"
               "tcgen05.mma.cta_group::1.kind::f8f6f4 [%0], %1, %2, %3, p;\n"
               "}" ::"r"(d),
               "l"(a), "l"(b), "r"(instruction), "r"(static_cast<uint32_t>(adds))
               : "memory");
}

// Descriptors of 128 x `columns` products with UE8M0 scales, of which `first` is the first byte to use
// of each word.
__device__ __forceinline__ constexpr uint32_t mxf8_instruction(uint32_t columns, uint32_t first) {
  return 1u << 23 | columns / 8 << 17 | 128 / 16 << 24 | first << 29 | first << 4;
}
__device__ __forceinline__ constexpr uint32_t mxf4_instruction(uint32_t columns, uint32_t first) {
  return mxf8_instruction(columns, first) | 1u << 7 | 1u << 10;
}

// The same with scales of 32 elements in tensor memory: over 32 elements of E4M3, or 64 of E2M1.
__device__ __forceinline__ void tcgen05_mma_mxf8f6f4(uint32_t d,
                                                     uint64_t a,
                                                     uint64_t b,
                                                     uint32_t instruction,
                                                     uint32_t a_scales,
                                                     uint32_t b_scales,
                                                     bool adds) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               "setp.ne.b32 p, %6, 0;\n"
               "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32 "
               "[%0], %1, %2, %3, [%4], [%5], p;\n"
               "}" ::"r"(d),
               "l"(a), "l"(b), "r"(instruction), "r"(a_scales), "r"(b_scales),
               "r"(static_cast<uint32_t>(adds))
               : "memory");
}
__device__ __forceinline__ void tcgen05_mma_mxf4(uint32_t d,
                                                 uint64_t a,
                                                 uint64_t b,
                                                 uint32_t instruction,
                                                 uint32_t a_scales,
                                                 uint32_t b_scales,
                                                 bool adds) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               "setp.ne.b32 p, %6, 0;\n"
               "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32 "
               "[%0], %1, %2, %3, [%4], [%5], p;\n"
               "}" ::"r"(d),
               "l"(a), "l"(b), "r"(instruction), "r"(a_scales), "r"(b_scales),
               "r"(static_cast<uint32_t>(adds))
               : "memory");
}

#define MQA_VALUES_8(constraint, i)                                                                \
  constraint(v[i]), constraint(v[i + 1]), constraint(v[i + 2]), constraint(v[i + 3]),              \
      constraint(v[i + 4]), constraint(v[i + 5]), constraint(v[i + 6]), constraint(v[i + 7])
#define MQA_VALUES_16(constraint) MQA_VALUES_8(constraint, 0), MQA_VALUES_8(constraint, 8)
#define MQA_VALUES_32(constraint)                                                                  \
  MQA_VALUES_8(constraint, 0), MQA_VALUES_8(constraint, 8), MQA_VALUES_8(constraint, 16),          \
      MQA_VALUES_8(constraint, 24)

// 16 or 32 columns of this thread's lane, there after the wait.
__device__ __forceinline__ void tcgen05_ld_32x32b(uint32_t (&v)[16], uint32_t memory) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x16.b32 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, [%16];"
               : MQA_VALUES_16("=r")
               : "r"(memory));
}
__device__ __forceinline__ void tcgen05_ld_32x32b(uint32_t (&v)[32], uint32_t memory) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
               "[%32];"
               : MQA_VALUES_32("=r")
               : "r"(memory));
}

// Waits for all loads of this warp. The values pass through: nothing is made of them before.
__device__ __forceinline__ void tcgen05_wait_ld(uint32_t (&v)[16]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" : MQA_VALUES_16("+r")::"memory");
}
__device__ __forceinline__ void tcgen05_wait_ld(uint32_t (&v)[32]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" : MQA_VALUES_32("+r")::"memory");
}

#undef MQA_VALUES_8
#undef MQA_VALUES_16
#undef MQA_VALUES_32

}  // namespace mqa::ptx
