// Clusters of CTAs: ranks, each other's shared memory, barriers. One function an instruction.
#pragma once

#include <cuda/std/cstdint>

namespace mqa::ptx {

using cuda::std::int64_t;
using cuda::std::uint32_t;

__device__ __forceinline__ uint32_t cluster_ctarank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Where the variable at `address` of this CTA's shared memory lies in that of CTA `rank`.
__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Stores to an address that mapa gave.
__device__ __forceinline__ void st_shared_cluster(uint32_t address, int64_t value) {
  asm volatile("st.shared::cluster.s64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}

// Says that this CTA runs, whose shared memory others may use once they waited for all to say so.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// All threads of all CTAs of the cluster; what was written before is visible after.
__device__ __forceinline__ void barrier_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n"
               "barrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

}  // namespace mqa::ptx
