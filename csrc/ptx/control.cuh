// Registers, dependent launches, addresses and small arithmetic, one function an instruction.
#pragma once

#include <cuda/std/cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace mqa::ptx {

using cuda::std::int32_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Returns once the grids that this one depends on are complete and their writes visible. What is
// compiled for GPUs before SM90 starts only then: it is launched without leave to start earlier.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets dependent grids start as soon as every CTA said so.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A barrier of `threads` threads of the CTA, one of 16 by number; __syncthreads() is number 0.
__device__ __forceinline__ void bar_sync(uint32_t number, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The same for a thread that does not wait for the others.
__device__ __forceinline__ void bar_arrive(uint32_t number, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The same value, of which the compiler knows nothing.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Whether this is the one thread that the warp, which comes here together, agreed on. The compiler
// then knows that there is only one, and makes no loop over threads of what takes uniform operands.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n"
               ".reg .pred p;\n"
               "elect.sync _|p, 0xffffffff;\n"
               "selp.u32 %0, 1, 0, p;\n"
               "}"
               : "=r"(elected));
  return elected != 0;
}

// Clocks of this SM, from some time on.
__device__ __forceinline__ uint32_t clock() {
  uint32_t clocks;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(clocks));
  return clocks;
}

// This thread's place in its warp, read anew at each call: what follows from it is not kept in
// registers until the next one.
__device__ __forceinline__ int lane_read_anew() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Stores to an address that is known to be global, in memory that the kernel never reads.
__device__ __forceinline__ void st_global(uint64_t address, float value) {
  asm volatile("st.global.f32 [%0], %1;" ::"l"(address), "f"(value));
}
__device__ __forceinline__ void st_global(uint64_t address, __nv_bfloat16 value) {
  asm volatile("st.global.b16 [%0], %1;" ::"l"(address), "h"(__bfloat16_as_ushort(value)));
}
__device__ __forceinline__ void st_global(uint64_t address, __half value) {
  asm volatile("st.global.b16 [%0], %1;" ::"l"(address), "h"(__half_as_ushort(value)));
}

// max that returns NaN if either operand is NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

}  // namespace mqa::ptx
