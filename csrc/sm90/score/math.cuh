// The math warpgroups: which tiles they do, and the rings that they read.
#pragma once

#include <cuda/std/type_traits>

#include "ptx/control.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/score/storage.cuh"
#include "sm90/score/tile.cuh"

namespace mqa::sm90 {

template <typename Tiling>
struct Math {
  using Tiles =
      cuda::std::conditional_t<Tiling::Format::kConverted, ConvertedTile<Tiling>, Fp8Tile<Tiling>>;
  using Thread = typename Tiles::Thread;
  using Keys = typename Tiles::Keys;
  using WholeStore = typename Tiles::WholeStore;
  using TestedStore = typename Tiles::TestedStore;
  using Logit = typename Tiling::Logit;
  using Storage = typename Tiling::Storage;
  using StageRing = typename Tiling::StageRing;
  static constexpr auto kColumns = Tiling::kColumns;
  static constexpr auto kTiles = Tiling::kTiles;
  static constexpr auto kBodyTiles = Tiling::kBodyTiles;
  static constexpr auto kBodyStages = Tiling::kBodyStages;
  static constexpr auto kBody = Tiling::kBody;
  static constexpr auto kAligned = Tiling::kAligned;
  static constexpr auto kStages = Tiling::kStages;
  static constexpr auto kStageRows = Tiling::kStageRows;
  static constexpr auto kTurns = Tiling::kTurns;

  // What a warpgroup knows of its block.
  struct Block {
    uint64_t q;  // descriptor of its columns
    int first;
    uint32_t length;
    uint32_t groups;  // sets of warpgroups that split the tiles
    uint32_t turn;    // which of these it is in
    uint32_t begin;   // tokens from `first` that its columns have
    uint32_t end;
    uint32_t
        whole_begin;  // tokens from `first` that need no tests; none if warpgroups split stages
    uint32_t whole_end;

    // Whether `count` tokens from the `done`th on need no tests.
    __device__ __forceinline__ bool whole(uint32_t done, uint32_t count) const {
      return done >= whole_begin && done + count <= whole_end;
    }
    // Whether the tile from the `done`th token on is this warpgroup's to do.
    __device__ __forceinline__ bool mine(uint32_t done) const {
      return done < end && done + kTileRows > begin && (done / kTileRows & (groups - 1)) == turn;
    }
    // How many times kBody tokens from the `done`th on need none.
    __device__ __forceinline__ uint32_t bodies(uint32_t done) const {
      return whole(done, kBody) ? (whole_end - done) / kBody : 0;
    }
  };

  // The hot loop: `bodies` times kBody tokens, whole stages with nothing to decide.
  static __device__ __forceinline__ void whole_stages(Storage& shared,
                                                      StageRing& ring,
                                                      uint32_t bodies,
                                                      int token,
                                                      const Block& block,
                                                      const Thread& thread) {
    WholeStore store(thread.rows, token + thread.tile_row);
#pragma unroll 1
    for (; bodies > 0; bodies--) {
      // Where a body is the whole ring, its stages lie at fixed places.
      const int from = kAligned == kStages ? 0 : ring.stage;
      const Keys k = Tiles::keys(shared, from);
      const uint32_t k_full = ptx::shared_address(&shared.k_full[from]);
      const uint32_t k_empty = ptx::shared_address(&shared.k_empty[from]);
      const float* k_scales = shared.k_scale[from] + thread.tile_row;
#pragma unroll
      for (int i = 0; i < kBodyTiles; i++) {
        const int stage = i / kTiles % kStages, slot = i % (kTiles * kStages);
        const uint32_t parity = ring.parity ^ (i / (kTiles * kStages) & 1);
        if (i % kTiles == 0) ptx::mbarrier_wait_parity(k_full + stage * 8, parity);
        Tiles::tile(
            block.q, Tiles::further(k, slot), k_scales + slot * kTileRows, thread,
            [&] {
              if (i % kTiles == kTiles - 1) ptx::mbarrier_arrive_warp(k_empty + stage * 8);
            },
            [&](int output, Logit logit) { store(output, i, logit); });
      }
      store.advance(kBody);
      ring.advance(kBodyStages);
    }
  }

  // One stage of which only tiles that have tokens and are this warpgroup's turn are done.
  static __device__ __forceinline__ void any_stage(
      Storage& shared, StageRing ring, uint32_t done, const Block& block, const Thread& thread) {
    constexpr int kPair = 2;
    static_assert(kTiles % kPair == 0, "tiles come in pairs");
    const Keys k = Tiles::keys(shared, ring.stage);
    const float* k_scales = shared.k_scale[ring.stage] + thread.tile_row;
    const int token = block.first + static_cast<int>(done) + thread.tile_row;
    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_full[ring.stage]), ring.parity);
#pragma unroll 1
    for (int i = 0; i < kTiles && done + i * kTileRows < block.length; i += kPair) {
      if (block.whole(done + i * kTileRows, kPair * kTileRows)) {
        const WholeStore store(thread.rows, token + i * kTileRows);
#pragma unroll
        for (int j = 0; j < kPair; j++)
          Tiles::tile(
              block.q, Tiles::further(k, i + j), k_scales + (i + j) * kTileRows, thread, [] {},
              [&](int output, Logit logit) { store(output, j, logit); });
        continue;
      }
#pragma unroll 1
      for (int j = i; j < i + kPair && done + j * kTileRows < block.length; j++)
        if (block.mine(done + j * kTileRows))
          Tiles::tile(
              block.q, Tiles::further(k, j), k_scales + j * kTileRows, thread, [] {},
              TestedStore{thread.rows, token + j * kTileRows});
    }
    ptx::mbarrier_arrive_warp(ptx::shared_address(&shared.k_empty[ring.stage]));
  }

  // The stages of a piece where each warpgroup has columns of its own, or shares the tiles of each
  // stage.
  static __device__ __forceinline__ void every_stage(Storage& shared,
                                                     StageRing& ring,
                                                     const Block& block,
                                                     const Thread& thread) {
    for (uint32_t done = 0; done < Tiling::padded(block.length);) {
      const uint32_t bodies = ring.stage % kAligned == 0 ? block.bodies(done) : 0;
      if (bodies > 0) {
        whole_stages(shared, ring, bodies, block.first + static_cast<int>(done), block, thread);
        done += bodies * kBody;
      } else {
        any_stage(shared, ring, done, block, thread);
        done += kStageRows;
        ring.advance();
      }
    }
  }

  // Those that are this warpgroup's where several share its columns and take them in turn, the next one
  // being that of turn `turn`.
  static __device__ __forceinline__ void stages_in_turn(
      Storage& shared, StageRing& ring, uint32_t& turn, const Block& block, const Thread& thread) {
    const uint32_t stages = (block.length + kStageRows - 1) / kStageRows;
    const uint32_t skipped = (block.turn - turn) % kTurns;
    StageRing mine = ring;
    mine.advance(skipped);
    if constexpr (!Tiling::Format::kConverted) {
      fp8_stages(shared, mine, skipped * kStageRows, block, thread);
    } else if constexpr (Tiling::kBlockColumns == Tiling::kProductColumns) {
      overlapped_stages(shared, mine, skipped * kStageRows, block, thread);
    } else {
      converted_stages(shared, mine, skipped * kStageRows, block, thread);
    }
    ring.advance(stages);
    turn = (turn + stages) % kTurns;
  }

  // From the `done`th token on.
  static __device__ __forceinline__ void fp8_stages(
      Storage& shared, StageRing ring, uint32_t done, const Block& block, const Thread& thread) {
#pragma unroll 1
    for (; done < block.length; done += kTurns * kStageRows) {
      const Keys k = Tiles::keys(shared, ring.stage);
      const float* k_scales = shared.k_scale[ring.stage] + thread.tile_row;
      const int token = block.first + static_cast<int>(done) + thread.tile_row;
      const uint32_t k_empty = ptx::shared_address(&shared.k_empty[ring.stage]);
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_full[ring.stage]), ring.parity);
      if (block.whole(done, kStageRows)) {
        const WholeStore store(thread.rows, token);
#pragma unroll
        for (int i = 0; i < kTiles; i++)
          Tiles::tile(
              block.q, Tiles::further(k, i), k_scales + i * kTileRows, thread,
              [&] {
                if (i == kTiles - 1) ptx::mbarrier_arrive_warp(k_empty);
              },
              [&](int output, Logit logit) { store(output, i, logit); });
      } else {
#pragma unroll 1
        for (int i = 0; i < kTiles && done + i * kTileRows < block.end; i++)
          Tiles::tile(
              block.q, Tiles::further(k, i), k_scales + i * kTileRows, thread, [] {},
              TestedStore{thread.rows, token + i * kTileRows});
        ptx::mbarrier_arrive_warp(k_empty);
      }
      ring.template advance<kTurns>();
    }
  }

  static __device__ __forceinline__ void converted_stages(
      Storage& shared, StageRing ring, uint32_t done, const Block& block, const Thread& thread) {
#pragma unroll 1
    for (; done < block.length; done += kTurns * kStageRows) {
      const int token = block.first + static_cast<int>(done) + thread.tile_row;
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_full[ring.stage]), ring.parity);
#pragma unroll 1
      for (int i = 0; i < kTiles && done + i * kTileRows < block.length; i++)
        Tiles::tile(block.q, Tiles::further(Tiles::keys(shared, ring.stage), i),
                    shared.k_scale[ring.stage] + i * kTileRows, thread,
                    TestedStore{thread.rows, token + i * kTileRows});
      ptx::mbarrier_arrive_warp(ptx::shared_address(&shared.k_empty[ring.stage]));
      ring.template advance<kTurns>();
    }
  }

  // The same for blocks of one product: while the tensor cores work at one portion of a tile, the
  // other one, or the first of the next tile, is converted.
  static __device__ __forceinline__ void overlapped_stages(
      Storage& shared, StageRing ring, uint32_t done, const Block& block, const Thread& thread) {
    if (done >= block.length) return;
    typename Tiles::Read read;
    typename Tiles::Operand a;
    int i = 0;  // of a stage's tiles
    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_full[ring.stage]), ring.parity);
    Tiles::template convert<0>(Tiles::keys(shared, ring.stage), shared.k_scale[ring.stage], read,
                               a);
    for (bool more = true; more;) {
      const int token = block.first + static_cast<int>(done) + i * kTileRows + thread.tile_row;
      float dots[Tiling::kProductColumns / 2];
      Tiles::template multiply<0>(a, block.q, dots);
      Tiles::template convert<1>(Tiles::further(Tiles::keys(shared, ring.stage), i), nullptr, read,
                                 a);
      Tiles::template multiply<1>(a, block.q, dots);
      const float k_scale = read.k_scale();
      const bool last = ++i == kTiles || done + i * kTileRows >= block.length;
      if (last) {
        ptx::mbarrier_arrive_warp(ptx::shared_address(&shared.k_empty[ring.stage]));
        ring.template advance<kTurns>();
        done += kTurns * kStageRows, i = 0;
        more = done < block.length;
        if (more)
          ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_full[ring.stage]), ring.parity);
      }
      ptx::wgmma_wait_group_1();
      Tiles::template keep<0>(a);
      if (more)
        Tiles::template convert<0>(Tiles::further(Tiles::keys(shared, ring.stage), i),
                                   shared.k_scale[ring.stage] + i * kTileRows, read, a);
      ptx::wgmma_wait_group_0(dots);
      Tiles::template keep<1>(a);
      typename Tiles::Sums sums;
      Tiles::weigh(dots, thread, 0, true, sums);
      Tiles::finish(sums, k_scale, 0, TestedStore{thread.rows, token});
    }
  }

  // A value that all lanes have, in a form that the compiler knows to be uniform.
  template <typename T>
  static __device__ __forceinline__ T uniform(T value) {
    return __shfl_sync(kAllLanes, value, 0);
  }

  // `bring(piece, buffer)` is called by all math threads before they read queries from that buffer.
  template <typename Bring>
  static __device__ __forceinline__ void math(Storage& shared, Bring bring) {
    const uint32_t group = uniform(threadIdx.x / 128);
    BlockRing blocks;
    StageRing stages;
    uint32_t turn = 0;  // whose turn it is, where stages are taken in turn
    Thread thread;
    while (true) {
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.q_full[blocks.stage()]),
                                blocks.parity());
      const Piece& piece = shared.piece[blocks.stage()];
      Block block;
      block.first = uniform(piece.first);
      block.length = uniform(piece.length);
      block.groups = uniform(piece.groups);
      if (block.groups == 0) break;
      bring(piece, blocks.stage() % Tiling::kQBuffers);
      // With `groups` sets of warpgroups, each has 4 / groups sets of columns, from `base` on.
      const uint32_t size = kMathGroups / block.groups;
      const uint32_t set = uniform(piece.base) + group % size;
      block.turn = group / size;
      block.q = Tiles::queries(shared, blocks.stage() % Tiling::kQBuffers, set);
      const Columns& columns = shared.columns[blocks.stage()][set];
      auto within = [&](int token, uint32_t limit) {
        return min(static_cast<uint32_t>(max(uniform(token) - block.first, 0)), limit);
      };
      block.begin = within(columns.first, block.length);
      // Converted tiles look at each set themselves.
      block.end = Tiling::Format::kConverted ? block.length : within(columns.end, block.length);
      block.whole_begin = within(columns.whole_first, block.length);
      block.whole_end =
          within(columns.whole_end, kTurns > 1 || block.groups == 1 ? block.length : 0);
      Tiles::start_block(shared, blocks.stage(), set * kColumns, thread);
      if constexpr (kTurns > 1) {
        stages_in_turn(shared, stages, turn, block, thread);
      } else {
        every_stage(shared, stages, block, thread);
      }
      ptx::mbarrier_arrive_warp(ptx::shared_address(&shared.q_empty[blocks.stage()]));
      blocks.advance();
    }
  }
};

}  // namespace mqa::sm90
