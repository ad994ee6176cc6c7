// out = A B^T on Blackwell's tensor unit, tile after tile: what the emulator is tested with.
//
// A CTA takes every gridDim.x-th tile of 128 rows. Warp 0 copies A, B and scales to a ring of stages,
// warp 1 copies scales to tensor memory and multiplies, warps 2 to 5 take the sums out of one of two
// accumulators and store them.
#pragma once

#include <cuda/std/cstdint>

#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"

namespace mqa::test {

using cuda::std::int32_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;

enum class Format { kFp8, kMxFp8, kMxFp4 };

constexpr int kRows = 128, kColumns = 64, kStepBytes = 128, kStages = 2, kWarps = 6;
constexpr int kPieces = 4;  // products of a step: 32 bytes of K each
constexpr int kScaleBytes = 512;  // four blocks of 128 rows
constexpr int kTensorColumns = 256;
constexpr uint32_t kScales = 2 * kColumns;  // where the columns of scales begin

template <Format kFormat>
struct Policy {
  static constexpr bool kScaled = kFormat != Format::kFp8;
  // Words of scales of a row in a step: 4 blocks of 32 elements each.
  static constexpr int kWords = kFormat == Format::kMxFp4 ? 2 : kScaled ? 1 : 0;
  static constexpr uint32_t kExpected =
      (kRows + kColumns) * kStepBytes + 2 * kWords * kScaleBytes;
};

struct SharedStorage {
  alignas(1024) unsigned char a[kStages][kRows * kStepBytes];
  alignas(1024) unsigned char b[kStages][kColumns * kStepBytes];
  alignas(128) unsigned char scales[kStages][4 * kScaleBytes];
  uint64_t full[kStages], empty[kStages], sums_full[2], sums_empty[2];
  uint32_t tensor_memory;
};

struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <Format kFormat>
__device__ __forceinline__ void load(SharedStorage& shared,
                                     const ptx::TensorMap* a,
                                     const ptx::TensorMap* b,
                                     const unsigned char* scales,
                                     int tiles,
                                     int steps) {
  using P = Policy<kFormat>;
  Ring ring;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    for (int step = 0; step < steps; ++step, ring.next()) {
      const int stage = ring.stage;
      const uint32_t full = ptx::shared_address(&shared.full[stage]);
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.empty[stage]), ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, P::kExpected);
      ptx::cp_async_bulk_tensor_2d_load(
          ptx::shared_address(shared.a[stage]), a, step * kStepBytes, tile * kRows, full);
      ptx::cp_async_bulk_tensor_2d_load(
          ptx::shared_address(shared.b[stage]), b, step * kStepBytes, 0, full);
      for (int word = 0; word < 2 * P::kWords; ++word) {  // those of A, then those of B
        const int row_tile = word < P::kWords ? tile : tiles;
        const int at = (row_tile * steps + step) * P::kWords + word % (P::kWords ? P::kWords : 1);
        ptx::cp_async_bulk_load(ptx::shared_address(shared.scales[stage]) + word * kScaleBytes,
                                scales + at * kScaleBytes, kScaleBytes, full);
      }
    }
  }
}

// Multiply one stage. Its scales are in tensor memory at `scales`: first those of A.
template <Format kFormat>
__device__ __forceinline__ void multiply(
    const SharedStorage& shared, int stage, uint32_t sums, uint32_t scales, bool first) {
  using P = Policy<kFormat>;
  const uint64_t a = ptx::tcgen05_descriptor<kStepBytes>(ptx::shared_address(shared.a[stage]));
  const uint64_t b = ptx::tcgen05_descriptor<kStepBytes>(ptx::shared_address(shared.b[stage]));
  const uint64_t rows =
      ptx::tcgen05_descriptor_of_scales(ptx::shared_address(shared.scales[stage]));
  for (int word = 0; word < 2 * P::kWords; ++word) {
    ptx::tcgen05_cp_32x128b(scales + word * 4, rows + word * (kScaleBytes >> 4));
  }
  for (int piece = 0; piece < kPieces; ++piece) {
    const bool adds = !first || piece > 0;
    const uint64_t a_piece = a + piece * 2, b_piece = b + piece * 2;
    if constexpr (kFormat == Format::kFp8) {
      ptx::tcgen05_mma_f8f6f4(sums, a_piece, b_piece, ptx::kE4m3Instruction<kColumns>, adds);
    } else if constexpr (kFormat == Format::kMxFp8) {
      const uint32_t id = piece;
      ptx::tcgen05_mma_mxf8f6f4(sums, a_piece, b_piece, ptx::mxf8_instruction(kColumns, id), scales,
                                scales + 4, adds);
    } else {
      const uint32_t id = piece % 2 * 2, word = piece / 2 * 4;
      ptx::tcgen05_mma_mxf4(sums, a_piece, b_piece, ptx::mxf4_instruction(kColumns, id),
                            scales + word, scales + 8 + word, adds);
    }
  }
}

template <Format kFormat>
__device__ __forceinline__ void multiply_all(SharedStorage& shared,
                                             uint32_t memory,
                                             int tiles,
                                             int steps) {
  Ring ring;
  int done = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++done) {
    const int which = done % 2;
    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.sums_empty[which]), (done / 2 & 1) ^ 1);
    ptx::tcgen05_fence_after_thread_sync();
    for (int step = 0; step < steps; ++step, ring.next()) {
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.full[ring.stage]), ring.parity);
      // Copies of scales come after products of the stage's last turn, which nothing else orders.
      if constexpr (Policy<kFormat>::kScaled) ptx::tcgen05_fence_after_thread_sync();
      multiply<kFormat>(shared, ring.stage, memory + which * kColumns,
                        memory + kScales + ring.stage * 16, step == 0);
      ptx::tcgen05_commit(ptx::shared_address(&shared.empty[ring.stage]));
    }
    ptx::tcgen05_commit(ptx::shared_address(&shared.sums_full[which]));
  }
}

// A warp reaches a quarter of the lanes: that of its number modulo 4.
__device__ __forceinline__ void store(
    SharedStorage& shared, uint32_t memory, float* out, int tiles) {
  const int quarter = threadIdx.x / 32 % 4, row = quarter * 32 + threadIdx.x % 32;
  int done = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++done) {
    const int which = done % 2;
    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.sums_full[which]), done / 2 & 1);
    ptx::tcgen05_fence_after_thread_sync();
    const uint32_t sums = memory + quarter * 32 * ptx::kTensorLane + which * kColumns;
    float4* to = reinterpret_cast<float4*>(out + (tile * kRows + row) * kColumns);
    for (int first = 0; first < kColumns; first += 16) {
      uint32_t v[16];
      ptx::tcgen05_ld_32x32b(v, sums + first);
      ptx::tcgen05_wait_ld(v);
      for (int i = 0; i < 16; i += 4) {
        to[(first + i) / 4] = make_float4(__uint_as_float(v[i]), __uint_as_float(v[i + 1]),
                                          __uint_as_float(v[i + 2]), __uint_as_float(v[i + 3]));
      }
    }
    ptx::tcgen05_fence_before_thread_sync();
    ptx::mbarrier_arrive(ptx::shared_address(&shared.sums_empty[which]));
  }
}

// A is [tiles * 128, steps * 128 bytes], B [64, steps * 128 bytes], out [tiles * 128, 64]. Scales
// are 512-byte images of 128 rows and 4 blocks, by tile of A (B's last), step and word.
template <Format kFormat>
__global__ void __launch_bounds__(kWarps * 32, 1)
    product(const __grid_constant__ ptx::TensorMap a,
            const __grid_constant__ ptx::TensorMap b,
            const unsigned char* scales,
            float* out,
            int tiles,
            int steps) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(bytes);
  const int warp = threadIdx.x / 32;
  if (warp == 0 && ptx::elect_one()) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[i]), 1);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&shared.sums_full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.sums_empty[i]), 128);
    }
    ptx::fence_mbarrier_init();
  }
  if (warp == 1) {
    ptx::tcgen05_alloc<kTensorColumns>(ptx::shared_address(&shared.tensor_memory));
    ptx::tcgen05_relinquish_alloc_permit();
  }
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();
  const uint32_t memory = shared.tensor_memory;
  if (warp == 0 && ptx::elect_one()) load<kFormat>(shared, &a, &b, scales, tiles, steps);
  if (warp == 1 && ptx::elect_one()) multiply_all<kFormat>(shared, memory, tiles, steps);
  if (warp >= 2) store(shared, memory, out, tiles);
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();
  if (warp == 1) ptx::tcgen05_dealloc<kTensorColumns>(memory);
}

}  // namespace mqa::test
