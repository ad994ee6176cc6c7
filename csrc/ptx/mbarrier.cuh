// mbarrier objects in shared memory, one function an instruction.
//
// Barriers are named by their address in the shared window. Arrivals release and waits acquire at
// CTA scope; bytes that a bulk copy delivers are visible once a wait on its barrier returned.
#pragma once

#include <cuda/std/cstdint>

namespace mqa::ptx {

using cuda::std::uint32_t;
using cuda::std::uint64_t;

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to the async proxy; a barrier among threads makes them known to those.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same by those threads alone that say `arrives`, without a branch.
__device__ __forceinline__ void mbarrier_arrive_if(uint32_t barrier, bool arrives) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               "setp.ne.u32 p, %1, 0;\n"
               "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n"
               "}" ::"r"(barrier),
               "r"(static_cast<uint32_t>(arrives))
               : "memory");
}

// Arrivals of mbarrier_arrive_warp. One after __syncwarp() is enough, but compute-sanitizer's
// racecheck does not follow that order: MQA_EVERY_LANE_ARRIVES is for it.
#ifdef MQA_EVERY_LANE_ARRIVES
constexpr uint32_t kWarpArrivals = 32;
#else
constexpr uint32_t kWarpArrivals = 1;
#endif

// This warp is through: whatever its lanes did comes before what follows a wait.
__device__ __forceinline__ void mbarrier_arrive_warp(uint32_t barrier) {
  __syncwarp();
  mbarrier_arrive_if(barrier, threadIdx.x % 32 < kWarpArrivals);
}

// Adds `bytes` to what the phase expects, then arrives.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Returns once the phase of that parity is over: parity 1 returns at once on a fresh barrier.
__device__ __forceinline__ void mbarrier_wait_parity(uint32_t barrier, uint32_t parity) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               "WAIT:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
               "@!p bra WAIT;\n"
               "}" ::"r"(barrier),
               "r"(parity)
               : "memory");
}

// One arrival when all earlier cp.async of this thread have landed. The barrier's count includes
// it.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace mqa::ptx
