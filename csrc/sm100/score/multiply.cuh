// The warp that multiplies: keys by queries, tile by tile, into tensor memory.
#pragma once

#include "ptx/control.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "sm100/score/storage.cuh"

namespace mqa::sm100 {

template <typename Tiling>
struct Multiply {
  using Storage = typename Tiling::Storage;
  using StageRing = typename Tiling::StageRing;
  using Format = typename Tiling::Format;

  // By one thread: what load brings is multiplied as it comes, and others are told when it is done.
  static __device__ __forceinline__ void multiply(Storage& shared) {
    const uint32_t memory = shared.tensor_memory;
    BlockRing blocks;
    StageRing stages, behind;  // the second, where math has to be through with an accumulator
    uint32_t tiles = 0;
    while (true) {
      const int block = blocks.stage();
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.q_full[block]), blocks.parity());
      const Piece piece = shared.piece[block];
      if (piece.groups == 0) break;
      const uint32_t q_scales =
          memory + Tiling::kQScaleColumns + block * Tiling::kQScaleTiles * kScaleColumns;
      if constexpr (Tiling::kScaled) copy_q_scales(shared, block, q_scales);
#pragma unroll 1
      for (uint32_t done = 0; done < Tiling::padded(piece.length);
           done += kTileRows, stages.advance(), tiles++) {
        ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_full[stages.stage]), stages.parity);
        if constexpr (Tiling::kScaled)
          ptx::mbarrier_wait_parity(ptx::shared_address(&shared.scales_full[stages.stage]),
                                    stages.parity);
        // With fewer stages than accumulators the stage's own barrier told so.
        if (Tiling::kStages > Tiling::kSlots && tiles >= Tiling::kSlots) {
          ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_empty[behind.stage]),
                                    behind.parity);
          behind.advance();
        }
        ptx::tcgen05_fence_after_thread_sync();
        // Empty stages are told of alone.
        if (done < piece.length)
          multiply_tile(shared, block, stages.stage, memory, tiles % Tiling::kSlots, q_scales);
        ptx::tcgen05_commit(ptx::shared_address(&shared.sums_full[tiles % Tiling::kSlots]));
        ptx::tcgen05_commit(ptx::shared_address(&shared.k_empty[stages.stage]));
      }
      ptx::tcgen05_commit(ptx::shared_address(&shared.q_empty[block]));
      blocks.advance();
    }
    // All are through with tensor memory when they are with the last two blocks.
#pragma unroll
    for (int i = 0; i < 2; i++, blocks.advance())
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.q_empty[blocks.stage()]),
                                blocks.parity() ^ 1);
  }

  // Products of the block before the last one have read what was there: its barrier said so to those
  // who filled this one.
  static __device__ __forceinline__ void copy_q_scales(Storage& shared,
                                                       int block,
                                                       uint32_t target) {
    ptx::tcgen05_fence_after_thread_sync();
    const uint64_t scales =
        ptx::tcgen05_descriptor_of_scales(ptx::shared_address(shared.q_scales[block]));
#pragma unroll
    for (int i = 0; i < Tiling::kQScaleTiles; i++)
      ptx::tcgen05_cp_32x128b(target + i * kScaleColumns, scales + i * (kScaleBytes >> 4));
  }

  static __device__ __forceinline__ void multiply_tile(const Storage& shared,
                                                       int block,
                                                       int stage,
                                                       uint32_t memory,
                                                       uint32_t slot,
                                                       uint32_t q_scales) {
    const uint64_t q =
        ptx::tcgen05_descriptor<Tiling::kRowBytes>(ptx::shared_address(shared.q[block]));
    const uint64_t k =
        ptx::tcgen05_descriptor<Tiling::kRowBytes>(ptx::shared_address(shared.k[stage]));
    const uint32_t sums = memory + slot * Tiling::kBlockColumns;
    const uint32_t k_scales = memory + Tiling::kKScaleColumns + slot * kScaleColumns;
    if constexpr (Tiling::kScaled)
      ptx::tcgen05_cp_32x128b(
          k_scales, ptx::tcgen05_descriptor_of_scales(ptx::shared_address(shared.k_scales[stage])));
#pragma unroll
    for (int step = 0; step < Tiling::kRowBytes / 32; step++) {
      if constexpr (!Tiling::kScaled) {
        ptx::tcgen05_mma_f8f6f4(sums, k + step * 2, q + step * 2,
                                ptx::kE4m3Instruction<Tiling::kBlockColumns>, step > 0);
      } else if constexpr (Format::kBits == 8) {
        ptx::tcgen05_mma_mxf8f6f4(sums, k + step * 2, q + step * 2,
                                  ptx::mxf8_instruction<Tiling::kBlockColumns>(step), k_scales,
                                  q_scales, step > 0);
      } else {
        ptx::tcgen05_mma_mxf4(sums, k + step * 2, q + step * 2,
                              ptx::mxf4_instruction<Tiling::kBlockColumns>(step * 2), k_scales,
                              q_scales, step > 0);
      }
    }
  }
};

}  // namespace mqa::sm100
