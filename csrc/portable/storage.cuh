// Sizes of the portable kernels, and what their CTAs keep in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/cuts.cuh"
#include "portable/elements.cuh"
#include "score/storage.cuh"

namespace mqa::portable {

using namespace score;

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kTurnBarrier = 4;  // the first of one for each warp
constexpr int kColumns = 128;    // most columns (row, head) of a block

// kGivenHeads: 8, 16, 32, 64 or 128, not below the true number of heads, or 256 for more than 128,
// which are done 128 at a time.
template <typename Format_, int kGivenHeads, int kDim_, typename Logit_>
struct Tiling {
  using Format = Format_;
  using Logit = Logit_;
  using Row = RowOf<Format, kDim_>;
  static constexpr int kThreads = portable::kThreads;
  static constexpr int kDim = kDim_;
  static constexpr bool kManyHeads = kGivenHeads > kColumns;
  static constexpr int kHeads = kManyHeads ? kColumns : kGivenHeads;
  static constexpr int kBlock = kColumns / kHeads;  // rows
  static constexpr int kRowBytes = Row::kBytes;
  static constexpr int kElementBytes = Format::kBits == 16 ? 2 : 1;  // or of two of E2M1
  static constexpr int kSteps = Row::kSteps;
  // Tokens that a warp has at a time: their keys take up to 128 registers of a thread.
  static constexpr int kTokens = kRowBytes > 128 ? 32 : 64;
  static constexpr int kTiles = kTokens / 16;
  static constexpr int kRound = kWarps * kTokens;

  // What score::Paged asks.
  static constexpr int kStageRows = kTokens;
  static constexpr int kPanelBytes = kRowBytes;
  static constexpr bool kKeyScales = Format::kScaled;
  static constexpr int kMostColumns = kColumns;
  static constexpr int kSets = 1;
  static constexpr bool kPaced = false;
  struct StageRing {};

  struct Storage {
    // A warp's tokens: its keys, and their scales. Rows of 128 bytes and more are swizzled.
    alignas(16) unsigned char k[kWarps][kTokens * kRowBytes];
    // In fragments: 8 columns by two steps, 16 bytes for each lane.
    uint4 q[kColumns / 8][kSteps / 2][kWarpSize];
    alignas(16) uint32_t scales[kWarps][kTokens];
    float weights[kColumns];
    score::Row rows[kBlock];
    CutStorage<kThreads> cuts;
    // The block that is scored, and its part; without tokens there is none.
    int32_t block;
    Found found;
  };
};

}  // namespace mqa::portable
