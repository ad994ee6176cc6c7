// What a CTA of the kernels keeps in shared memory, and the sizes of everything.
#pragma once

#include "common/cuts.cuh"
#include "common/logits.cuh"
#include "score/storage.cuh"
#include "sm90/score/elements.cuh"

namespace mqa::sm90 {

using namespace score;

constexpr int kOtherThreads = 128;
constexpr int kThreads = kMathThreads + kOtherThreads;
constexpr int kTileRows = 64;  // of one wgmma

template <int kQBuffers,
          int kQBytes,
          int kBlock,
          int kBlockColumns,
          int kSets,
          int kStages,
          int kStageRows,
          int kRowBytes,
          int kScaleRows>
struct SharedStorage {
  alignas(1024) unsigned char q[kQBuffers][kQBytes];
  alignas(1024) unsigned char k[kStages][kStageRows * kRowBytes];
  FillStorage fill;
  Page pages[kWarpSize];
  float weights[2][kBlockColumns];
  float k_scale[kStages][kScaleRows];
  Row rows[2][kBlock];
  Piece piece[2];
  Columns columns[2][kSets];
  uint64_t q_full[2], q_empty[2];
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t loading;      // all keys of this CTA are on their way
  uint64_t range_known;  // this CTA's range is in cuts, and the barriers above are initialised
  CutStorage<kThreads> cuts;
  Feeder feeders[kFeedingWarps];
  int32_t used[2];  // first and last row of a range that have tokens
};

// All sizes that follow from a kernel's template arguments.
//
// A block is block_columns / heads rows. Its columns (row, head) are sets of at most 128. If there are
// four, each warpgroup has one, where all have tokens. Of one or two sets, all or half of the
// warpgroups share each and take stages in turn. So they do with all sets where keys are converted,
// so that this is done once.
template <typename FormatType,
          int heads,
          int dim,
          typename LogitType,
          int stages,
          int stage_rows,
          int block_columns>
struct Tiling {
  static constexpr int kHeads = heads, kDim = dim, kStages = stages, kStageRows = stage_rows;
  using Logit = LogitType;
  using Format = FormatType;
  static constexpr int kThreads = sm90::kThreads;

  static constexpr int kBlockColumns = block_columns;
  static constexpr int kColumns = kBlockColumns < 128 ? kBlockColumns : 128;  // of one set
  static constexpr int kSets = kBlockColumns / kColumns;
  static constexpr int kTurns = Format::kConverted ? kMathGroups : kMathGroups / kSets;
  static constexpr int kReaderWarps = kMathWarps / kTurns;  // of a stage
  static constexpr int kActiveWarps = kMathWarps;

  // Whether keys have scales of any kind.
  static constexpr bool kKeyScales = Format::kBlockScaled || Format::kKeyScaled;

  // Converted queries are read by the threads that multiply them.
  static constexpr bool kScaled = false;  // scales of queries are math's matter
  static constexpr bool kHalvesWeights = false;
  static __host__ __device__ constexpr bool doubled(int) { return false; }
  static constexpr bool kPaired = false;  // nor are rows paired: columns are (row, head)
  static __device__ __forceinline__ int row_of(int column) { return column / kHeads; }
  static __device__ __forceinline__ int head_of(int column) { return column % kHeads; }
  static constexpr bool kMathBringsQ = Format::kConverted;
  // Whether warpgroups share the columns of a block of few rows: where each has its own else.
  static constexpr bool kSharesOut = kTurns == 1;
  static constexpr bool kMostColumns = kSets == 4;  // no block has more
  // Whether keys are read as fast as memory delivers them.
  static constexpr bool kReadBound = kSets == 1 && !Format::kConverted;
  // Beside products cleaning costs nothing. Beside keys that are read as fast as memory delivers them it
  // takes longer than after.
  static constexpr Cleaning cleaning(bool paged) {
    return paged && kReadBound ? Cleaning::kAfterLoads : Cleaning::kBeside;
  }
  static constexpr bool kPaced = kBlockColumns == 64 && !Format::kConverted;

  static_assert(kSets == 1 || kSets == 2 || kSets == 4, "sets are shared out evenly");
  static_assert(kHeads % 8 == 0 && kColumns % kHeads == 0, "a set is whole rows");
  static_assert(kStageRows % kTileRows == 0, "a stage is whole tiles");

  static constexpr int kRows = kColumns / kHeads;  // of one set
  static constexpr int kBlock = kSets * kRows;
  static constexpr int kTiles = kStageRows / kTileRows;
  static constexpr int kBodyTiles = 8;  // of the hot loop
  static constexpr int kBodyStages = kBodyTiles / kTiles;
  static constexpr uint32_t kBody = kBodyTiles * kTileRows;  // tokens
  // Bodies start at ring stages that are multiples of this, so that a body's stages lie in order.
  static constexpr int kAligned = kTurns > 1 ? 1 : kBodyStages < kStages ? kBodyStages : kStages;
  // Columns of one product. Converted keys take registers from the accumulator.
  static constexpr int kProductColumns = Format::kConverted ? 64 : kColumns;
  static constexpr int kProductRows = kProductColumns > kHeads ? kProductColumns / kHeads : 1;
  static constexpr int kOutputs = kProductRows > 1 ? kProductRows / 2 : 1;  // logits of a thread
  static constexpr int kQBoxRows = kBlock > 1 ? kBlock / 2 : 1;
  static constexpr int kBoxRows = kStageRows < 256 ? kStageRows : 256;
  static constexpr int kRowBytes = kDim * Format::kBits / 8;  // of a key
  // What one copy brings of a key: longer rows lie in two panels.
  static constexpr int kPanelBytes = kRowBytes < 128 ? kRowBytes : 128;
  // Converted queries lie in panels of 64 dims, 128 bytes a column, also where there are fewer.
  static constexpr int kQBytes =
      kBlockColumns * (Format::kConverted ? (kDim < 64 ? 64 : kDim) * 2 : kDim);
  // Queries that come by TMA are loaded ahead. Converted ones of several sets leave no room for that.
  static constexpr int kQBuffers = Format::kConverted && kSets > 1 ? 1 : 2;
  static constexpr int kKBytes = kStageRows * kRowBytes;
  static constexpr int kLogitBytes = sizeof(Logit);

  static_assert(kTurns > 1 || kBodyTiles % kTiles == 0, "a body is whole stages");
  static_assert(kStages % kAligned == 0, "bodies fit into the ring");
  // A warpgroup that had not waited for what a place of the ring held before could take the end of
  // that phase for the end of the next.
  static_assert(kStages % kTurns == 0, "a place of the ring is always the same warpgroups'");

  using Storage = SharedStorage<kQBuffers,
                                kQBytes,
                                kBlock,
                                kBlockColumns,
                                kSets,
                                kStages,
                                kStageRows,
                                kRowBytes,
                                kKeyScales ? kStageRows : 1>;
  using StageRing = Ring<kStages>;

  // Registers of a math thread.
  static constexpr int math_registers(bool paged) {
    return Format::kConverted ? 104 : paged && kBlockColumns < 128 ? 96 : 112;
  }

  // Which of 8 keys row `i` of 8 rows of products is. Converted panels of 128 bytes a key come
  // swizzled, and in this order two rows that are read at once lie in different banks.
  static __device__ __forceinline__ int key_of(int i) {
    return Format::kConverted && kPanelBytes == 128 ? i / 2 | i % 2 << 2 : i;
  }

  // Tokens of a piece's stages, the empty ones included.
  static __device__ __forceinline__ uint32_t padded(uint32_t length) {
    constexpr uint32_t kUnit = kAligned * kStageRows;
    return (length + kUnit - 1) / kUnit * kUnit;
  }
};

}  // namespace mqa::sm90
