// Blackwell's tensor unit and tensor memory, one function an instruction, for kernels of tests.
#pragma once

#include <cuda/std/cstdint>

namespace mqa::test {

using cuda::std::uint32_t;
using cuda::std::uint64_t;

// Tensor memory is addressed by lane and column.
constexpr uint32_t kLane = 1u << 16;

template <uint32_t kColumns>
__device__ __forceinline__ void tcgen05_alloc(uint32_t address_of_result) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(
                   address_of_result),
               "n"(kColumns)
               : "memory");
}

__device__ __forceinline__ void tcgen05_relinquish() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}

template <uint32_t kColumns>
__device__ __forceinline__ void tcgen05_dealloc(uint32_t memory) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(memory), "n"(kColumns)
               : "memory");
}

__device__ __forceinline__ void tcgen05_fence_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

__device__ __forceinline__ void tcgen05_fence_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// One arrival when all products and copies that this thread issued before are done.
__device__ __forceinline__ void tcgen05_commit(uint32_t barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
      : "memory");
}

// 32 rows of 16 bytes, to all four quarters of the lanes.
__device__ __forceinline__ void tcgen05_cp_32x128b(uint32_t memory, uint64_t descriptor) {
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(memory), "l"(descriptor)
               : "memory");
}

// D = A B^T, or D += A B^T: FP8 without scales, FP8 and FP4 with UE8M0 scales of 32 elements.
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
#define MQA_SCALED(name, kind)                                                                     \
  __device__ __forceinline__ void name(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction,   \
                                       uint32_t a_scales, uint32_t b_scales, bool adds) {          \
    asm volatile("{\n"                                                                             \
                 ".reg .pred p;\n"                                                                 \
                 "setp.ne.b32 p, %6, 0;\n"                                                         \
                 "tcgen05.mma.cta_group::1.kind::" kind                                            \
                 ".block_scale.block32 [%0], %1, %2, %3, [%4], [%5], p;\n"                         \
                 "}" ::"r"(d),                                                                     \
                 "l"(a), "l"(b), "r"(instruction), "r"(a_scales), "r"(b_scales),                   \
                 "r"(static_cast<uint32_t>(adds))                                                  \
                 : "memory");                                                                      \
  }
MQA_SCALED(tcgen05_mma_mxf8f6f4, "mxf8f6f4")
MQA_SCALED(tcgen05_mma_mxf4, "mxf4")
#undef MQA_SCALED

#define MQA_16(constraint)                                                                         \
  constraint(v[0]), constraint(v[1]), constraint(v[2]), constraint(v[3]), constraint(v[4]),        \
      constraint(v[5]), constraint(v[6]), constraint(v[7]), constraint(v[8]), constraint(v[9]),    \
      constraint(v[10]), constraint(v[11]), constraint(v[12]), constraint(v[13]),                  \
      constraint(v[14]), constraint(v[15])

// 16 columns of the lane of this thread.
__device__ __forceinline__ void tcgen05_ld_16(uint32_t (&v)[16], uint32_t memory) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
               "%10, %11, %12, %13, %14, %15}, [%16];"
               : MQA_16("=r")
               : "r"(memory));
}

// What was loaded passes through, so that nothing is made of it before.
__device__ __forceinline__ void tcgen05_wait_ld(uint32_t (&v)[16]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" : MQA_16("+r")::"memory");
}
#undef MQA_16

}  // namespace mqa::test
