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
  static constexpr auto kPassColumns = Tiling::kPassColumns;

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
      const int columns = Tiling::kPasses > 1 ? columns_of(shared, block) : Tiling::kBlockColumns;
#pragma unroll 1
      for (uint32_t done = 0; done < Tiling::padded(piece.length);
           done += kTileRows, stages.advance(), tiles++) {
        ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_full[stages.stage]), stages.parity);
        if constexpr (Tiling::kScaled)
          ptx::mbarrier_wait_parity(ptx::shared_address(&shared.scales_full[stages.stage]),
                                    stages.parity);
        // Empty stages are told of alone.
        const bool exists = done < piece.length;
        if constexpr (Tiling::kPasses > 1) {
          multiply_in_passes(shared, block, stages.stage, memory, tiles, exists ? columns : 0,
                             q_scales);
        } else {
          // With fewer stages than accumulators the stage's own barrier told so.
          if (Tiling::kStages > Tiling::kSlots && tiles >= Tiling::kSlots) {
            ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_empty[behind.stage]),
                                      behind.parity);
            behind.advance();
          }
          ptx::tcgen05_fence_after_thread_sync();
          const uint32_t slot = tiles % Tiling::kSlots;
          if (exists) {
            const uint32_t k_scales = k_scales_of(memory, slot);
            if constexpr (Tiling::kScaled) copy_k_scales(shared, stages.stage, k_scales);
            multiply_columns(shared, block, stages.stage, 0, kPassColumns, sums_of(memory, slot),
                             k_scales, q_scales);
          }
          ptx::tcgen05_commit(ptx::shared_address(&shared.sums_full[slot]));
        }
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

  // Of the rows up to the last one that has tokens.
  static __device__ __forceinline__ int columns_of(const Storage& shared, int block) {
    int rows = Tiling::kBlock;
#pragma unroll 1
    while (rows > 1 && shared.rows[block][rows - 1].length == 0)
      rows--;
    return rows * Tiling::kHeads;
  }

  // The first `columns` of a block by a tile, pass after pass: who reads one waits for no other. A pass
  // overwrites what math read kSlots passes before.
  static __device__ __forceinline__ void multiply_in_passes(Storage& shared,
                                                            int block,
                                                            int stage,
                                                            uint32_t memory,
                                                            uint32_t tile,
                                                            int columns,
                                                            uint32_t q_scales) {
    constexpr int kPasses = Tiling::kPasses, kSlots = Tiling::kSlots;
    static_assert(kSlots == 2 && kPasses >= 2,
                  "a tile's second pass comes after all of the last's");
#pragma unroll 1
    for (int pass = 0; pass < kPasses; pass++) {
      const int before = (pass + kPasses - kSlots) % kPasses;  // which had the accumulator
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.sums_empty[before]),
                                (before < pass ? tile : tile + 1) & 1);
      ptx::tcgen05_fence_after_thread_sync();
      const int first = pass * kPassColumns;  // a column of q_scales is of 32
      const uint32_t k_scales = k_scales_of(memory, tile % 2);
      if (pass == 0 && columns > 0) copy_k_scales(shared, stage, k_scales);
      if (first < columns)
        multiply_columns(shared, block, stage, first, min(columns - first, kPassColumns),
                         sums_of(memory, (tile * kPasses + pass) % kSlots), k_scales,
                         q_scales + first / 32);
      ptx::tcgen05_commit(ptx::shared_address(&shared.sums_full[pass]));
    }
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

  static __device__ __forceinline__ uint32_t sums_of(uint32_t memory, uint32_t slot) {
    return memory + slot * kPassColumns;
  }
  static __device__ __forceinline__ uint32_t k_scales_of(uint32_t memory, uint32_t number) {
    return memory + Tiling::kKScaleColumns + number * kScaleColumns;
  }

  static __device__ __forceinline__ void copy_k_scales(const Storage& shared,
                                                       int stage,
                                                       uint32_t target) {
    ptx::tcgen05_cp_32x128b(
        target, ptx::tcgen05_descriptor_of_scales(ptx::shared_address(shared.k_scales[stage])));
  }

  // A tile by `columns` of a block, from column `first` on.
  static __device__ __forceinline__ void multiply_columns(const Storage& shared,
                                                          int block,
                                                          int stage,
                                                          int first,
                                                          uint32_t columns,
                                                          uint32_t sums,
                                                          uint32_t k_scales,
                                                          uint32_t q_scales) {
    constexpr auto kRowBytes = Tiling::kRowBytes;
    const uint64_t q = ptx::tcgen05_descriptor<kRowBytes>(ptx::shared_address(shared.q[block])) +
                       (first * kRowBytes >> 4);
    const uint64_t k = ptx::tcgen05_descriptor<kRowBytes>(ptx::shared_address(shared.k[stage]));
#pragma unroll
    for (int step = 0; step < kRowBytes / 32; step++) {
      if constexpr (!Tiling::kScaled) {
        ptx::tcgen05_mma_f8f6f4(sums, k + step * 2, q + step * 2,
                                ptx::kE4m3Instruction<kPassColumns>, step > 0);
      } else if constexpr (Format::kBits == 8) {
        ptx::tcgen05_mma_mxf8f6f4(sums, k + step * 2, q + step * 2,
                                  ptx::mxf8_instruction(columns, step), k_scales, q_scales,
                                  step > 0);
      } else {
        ptx::tcgen05_mma_mxf4(sums, k + step * 2, q + step * 2,
                              ptx::mxf4_instruction(columns, step * 2), k_scales, q_scales,
                              step > 0);
      }
    }
  }
};

}  // namespace mqa::sm100
