// Asynchronous copies between global and shared memory, one function an instruction.
#pragma once

#include <cuda/std/cstdint>

namespace mqa::ptx {

using cuda::std::int32_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;

// 128 bytes that the driver encodes (cuTensorMapEncodeTiled) and only the copy engine reads.
struct alignas(128) TensorMap {
  unsigned char opaque[128];
};

__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Ask for the line of an address that may be read, in the SM's cache or in the chip's.
__device__ __forceinline__ void prefetch_l1(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Loads a box whose corner is (inner, outer); elements outside the tensor become zero. The barrier
// gets the bytes of the whole box. `target` is 128-byte aligned.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_load(
    uint32_t target, const TensorMap* map, int32_t inner, int32_t outer, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3}], [%4];" ::"r"(target),
               "l"(map), "r"(inner), "r"(outer), "r"(barrier)
               : "memory");
}

// The same in three dimensions.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_load(uint32_t target,
                                                             const TensorMap* map,
                                                             int32_t inner,
                                                             int32_t middle,
                                                             int32_t outer,
                                                             uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(target),
               "l"(map), "r"(inner), "r"(middle), "r"(outer), "r"(barrier)
               : "memory");
}

// How the chip's cache treats lines: the first to give way, or as any other.
__device__ __forceinline__ uint64_t cache_policy(bool evict_first) {
  uint64_t first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return evict_first ? first : normal;
}

// The same with such a policy.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_load(uint32_t target,
                                                             const TensorMap* map,
                                                             int32_t inner,
                                                             int32_t middle,
                                                             int32_t outer,
                                                             uint32_t barrier,
                                                             uint64_t policy) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(target),
               "l"(map), "r"(inner), "r"(middle), "r"(outer), "r"(barrier), "l"(policy)
               : "memory");
}

// Loads `bytes` (a multiple of 16) from global memory; both addresses are 16-byte aligned.
__device__ __forceinline__ void cp_async_bulk_load(
    uint32_t target, const void* source, uint32_t bytes, uint32_t barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1], %2, [%3], %4;" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
               : "memory");
}

// The same without a policy.
__device__ __forceinline__ void cp_async_bulk_load(uint32_t target,
                                                   const void* source,
                                                   uint32_t bytes,
                                                   uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// Writes `bytes` (a multiple of 16) to global memory; both addresses are 16-byte aligned.
__device__ __forceinline__ void cp_async_bulk_store(void* target, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__device__ __forceinline__ void cp_async_bulk_wait_group_0() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Copies 4 bytes of which the first `bytes` (0 or 4) are read and the rest become zero.
__device__ __forceinline__ void cp_async_4(uint32_t target, const void* source, uint32_t bytes) {
  asm volatile("cp.async.ca.shared::cta.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}

// Orders earlier ordinary writes to shared memory before later reads by the async proxy.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace mqa::ptx
