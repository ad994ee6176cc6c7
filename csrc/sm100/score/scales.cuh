// Block scales of keys, from a word a key to the order that tensor memory takes.
#pragma once

#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "sm100/score/storage.cuh"

namespace mqa::sm100 {

template <typename Tiling>
struct Scales {
  using Storage = typename Tiling::Storage;
  using StageRing = typename Tiling::StageRing;

  // By a warp, tile by tile as load brings them.
  static __device__ __forceinline__ void reorder(Storage& shared) {
    const int lane = threadIdx.x % kWarpSize;
    BlockRing blocks;
    StageRing stages;
    while (true) {
      const int block = blocks.stage();
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.q_full[block]), blocks.parity());
      const uint32_t length = shared.piece[block].length;
      if (shared.piece[block].groups == 0) break;
#pragma unroll 1
      for (uint32_t done = 0; done < Tiling::padded(length); done += kTileRows, stages.advance()) {
        ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_full[stages.stage]), stages.parity);
        const float* words = shared.k_scale[stages.stage];
        if (done < length)
          reinterpret_cast<float4*>(shared.k_scales[stages.stage])[lane] =
              make_float4(words[lane], words[32 + lane], words[64 + lane], words[96 + lane]);
        ptx::fence_proxy_async_shared();
        ptx::mbarrier_arrive_warp(ptx::shared_address(&shared.scales_full[stages.stage]));
      }
      ptx::mbarrier_arrive_warp(ptx::shared_address(&shared.q_empty[block]));
      blocks.advance();
    }
  }
};

}  // namespace mqa::sm100
