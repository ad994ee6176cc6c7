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
      const uint64_t q =
          ptx::tcgen05_descriptor<Tiling::kRowBytes>(ptx::shared_address(shared.q[block]));
#pragma unroll 1
      for (uint32_t done = 0; done < piece.length; done += kTileRows, stages.advance(), tiles++) {
        ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_full[stages.stage]), stages.parity);
        // With fewer stages than accumulators the stage's own barrier told so.
        if (Tiling::kStages > Tiling::kSlots && tiles >= Tiling::kSlots) {
          ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_empty[behind.stage]),
                                    behind.parity);
          behind.advance();
        }
        ptx::tcgen05_fence_after_thread_sync();
        const uint64_t k = ptx::tcgen05_descriptor<Tiling::kRowBytes>(
            ptx::shared_address(shared.k[stages.stage]));
        const uint32_t slot = tiles % Tiling::kSlots;
#pragma unroll
        for (int step = 0; step < Tiling::kRowBytes / 32; step++)
          ptx::tcgen05_mma_f8f6f4(memory + slot * Tiling::kBlockColumns, k + step * 2, q + step * 2,
                                  ptx::kE4m3Instruction<Tiling::kBlockColumns>, step > 0);
        ptx::tcgen05_commit(ptx::shared_address(&shared.sums_full[slot]));
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
};

}  // namespace mqa::sm100
