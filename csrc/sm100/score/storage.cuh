// What a CTA of the kernels keeps in shared and tensor memory, and the sizes of everything.
#pragma once

#include "common/cuts.cuh"
#include "common/logits.cuh"
#include "score/storage.cuh"

namespace mqa::sm100 {

using namespace score;

constexpr int kMmaWarp = kCleanWarp + 1, kScalesWarp = kCleanWarp + 2;
constexpr int kOtherThreads = 256;
constexpr int kThreads = kMathThreads + kOtherThreads;
constexpr int kTileRows = 128;  // keys of one product, a lane of tensor memory each
constexpr int kTensorColumns = 512;

// How keys and queries are multiplied. Fp8: E4M3, with a float32 scale for each key that its sums
// are multiplied by. Mxfp8, Mxfp4: E4M3 and E2M1, with a UE8M0 scale for each 32 elements.
//
// A product has kProductColumns at most: two accumulators, and block scales, fit into tensor memory.
// From kPassesFrom heads on, the largest block has kScheduleColumns instead, in several products. That
// pays where shared memory is the busiest unit, or where a row is more than half of a product.
struct Fp8 {
  static constexpr int kBits = 8;
  static constexpr bool kBlockScaled = false;
  static constexpr int kProductColumns = 256, kPassesFrom = 256;
};
struct Mxfp8 {
  static constexpr int kBits = 8;
  static constexpr bool kBlockScaled = true;
  static constexpr int kProductColumns = 192, kPassesFrom = 64;
};
struct Mxfp4 {
  static constexpr int kBits = 4;
  static constexpr bool kBlockScaled = true;
  static constexpr int kProductColumns = 192, kPassesFrom = 128;
};

// Scales of 128 rows as tensor memory takes them: the word with the four of row r is at
// 16 (r % 32) + 4 (r / 32).
constexpr int kScaleBytes = 512;
constexpr int kScaleColumns = 4;  // that these take in tensor memory

template <int kQBytes,
          int kBlock,
          int kBlockColumns,
          int kSets,
          int kStages,
          int kSums,
          int kRowBytes,
          int kQScales,
          int kKScales>
struct SharedStorage {
  alignas(1024) unsigned char q[2][kQBytes];
  alignas(1024) unsigned char k[kStages][kTileRows * kRowBytes];
  alignas(128) unsigned char q_scales[2][kQScales];
  alignas(128) unsigned char k_scales[kStages][kKScales];
  FillStorage fill;
  Page pages[kWarpSize];
  alignas(16) float weights[2][kBlockColumns];
  alignas(16) float k_scale[kStages][kTileRows];
  Row rows[2][kBlock];
  Piece piece[2];
  Columns columns[2][kSets];
  uint64_t q_full[2], q_empty[2];
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t scales_full[kStages];
  uint64_t sums_full[kSums], sums_empty[kSums];
  uint64_t loading;      // all keys of this CTA are on their way
  uint64_t range_known;  // this CTA's range is in cuts, and the barriers above are initialised
  CutStorage<kThreads> cuts;
  Feeder feeders[kFeedingWarps];
  int32_t used[2];  // first and last row of a range that have tokens
  uint32_t tensor_memory;
};

// All sizes that follow from a kernel's template arguments.
//
// A block is block_columns / heads rows. Its columns (row, head) are sets of 64, or of a row where
// that has more; a warpgroup sums one set. A single set is that of several warpgroups, which take
// tiles in turn.
//
// A block of more columns than an accumulator is multiplied in passes over a tile, each with a barrier
// pair of its own. Its sets are a quarter of the columns each, in strips of 64. Strips are dealt out in
// turn, so that all warpgroups have some of a pass, if they are whole rows.
template <typename FormatType,
          int heads,
          int dim,
          typename LogitType,
          int stages,
          int block_columns>
struct Tiling {
  static constexpr int kHeads = heads, kDim = dim, kStages = stages;
  using Logit = LogitType;
  using Format = FormatType;
  static constexpr int kThreads = sm100::kThreads;

  static constexpr int kBlockColumns = block_columns;
  static constexpr bool kScaled = Format::kBlockScaled;
  static constexpr int kPassColumns =  // the last may have fewer
      kBlockColumns < Format::kProductColumns ? kBlockColumns : Format::kProductColumns;
  static constexpr int kPasses = ceil_div(kBlockColumns, kPassColumns);
  static constexpr int kLeastColumns = heads > 64 ? heads : 64;
  static constexpr int kColumns =  // of one set
      kPasses > 1 ? kBlockColumns / kMathGroups : kLeastColumns;
  static constexpr int kSets = kBlockColumns / kColumns;
  static constexpr int kGroups = kSets > 1 ? kSets : kHeads > 64 || kHeads == 8 ? 2 : 3;
  static constexpr int kTurns = kGroups / kSets;
  static constexpr int kReaderWarps = kPasses > 1 ? 0 : kSets * 4;  // of a stage
  static constexpr int kActiveWarps = kGroups * 4;
  // Accumulators in tensor memory, then scales: those of keys, one set for each accumulator, or for
  // each of two tiles, and those of queries, one set for each of two blocks.
  static constexpr int kQScaleTiles = (kBlockColumns + 127) / 128;
  static constexpr int kMostSlots = (kTensorColumns - (kScaled ? 64 : 0)) / kPassColumns;
  static constexpr int kSlots = kMostSlots < 2 * kTurns ? kMostSlots / kTurns * kTurns : 2 * kTurns;
  static constexpr int kSums = kPasses > 1 ? kPasses : kSlots;  // barrier pairs of products
  static constexpr int kKScaleColumns = kSlots * kPassColumns;
  static constexpr int kQScaleColumns = kKScaleColumns + kSlots * kScaleColumns;
  static_assert(!kScaled || kQScaleColumns + 2 * kQScaleTiles * kScaleColumns <= kTensorColumns,
                "tensor memory has 512 columns");
  static constexpr int kRows = kColumns / kHeads;  // of one set
  static constexpr int kBlock = kSets * kRows;
  static constexpr int kStripColumns = kPasses > 1 ? 64 : kColumns;
  static constexpr int kStrips = kColumns / kStripColumns;  // of one set
  static constexpr bool kDealt = kStrips > 1 && kHeads <= kStripColumns;
  static constexpr int kStageRows = kTileRows, kBoxRows = kTileRows;
  // Rows of few heads come in pairs: columns are (pair of rows, head, row of the pair), and the halves of
  // a pair of float32 two rows, so that nothing has to be added across it. A box of queries, two rows
  // with the head outermost, has that order. Other columns are (row, head).
  static constexpr bool kPaired = heads <= 32;
  static constexpr int kQBoxRows = kPaired ? 2 : kBlock % 2 == 0 ? kBlock / 2 : kBlock;
  static constexpr int kRowBytes = kDim * Format::kBits / 8;  // of a key
  static constexpr int kPanelBytes = kRowBytes;               // one copy brings whole keys
  static constexpr bool kKeyScales = true;
  static constexpr int kQBytes = kBlockColumns * kRowBytes;
  static constexpr int kKBytes = kStageRows * kRowBytes;
  static constexpr int kLogitBytes = sizeof(Logit);

  static constexpr int kTrip = kPasses > 1 ? 2 : 4;  // tiles, in the hot loop
  static constexpr int kAligned =
      kTurns > 1 ? 1 : kTrip;  // a piece's stages are a multiple of this
  // Weights that a math thread reads again for every tile: all those of two strips do not fit into
  // registers.
  static constexpr int kReadAgain = kPasses > 1 ? 8 : 0;
  static constexpr bool kHalvesWeights = true;
  static constexpr bool kMathBringsQ = false;
  static constexpr bool kSharesOut = false;
  // No block has more.
  static constexpr bool kMostColumns =
      kBlockColumns == (heads < Format::kPassesFrom ? Format::kProductColumns : kScheduleColumns);
  static constexpr bool kReadBound = kSets == 1;
  static constexpr bool kPaced = false;  // measured on Hopper alone

  // Others found kernels with block scales much faster if -inf is written last, and FP8 ones a little
  // faster if it is written beside the main work. Where keys are read as fast as memory delivers them,
  // it waits for the loads, as on Hopper. None of it has been measured with these kernels.
  static constexpr Cleaning cleaning(bool paged) {
    return kScaled               ? Cleaning::kAfterMath
           : paged && kReadBound ? Cleaning::kAfterLoads
                                 : Cleaning::kBeside;
  }

  static_assert(kGroups % kSets == 0, "sets are shared out evenly");
  static_assert(kColumns % kHeads == 0, "a set is whole rows");
  static_assert(kStages % kAligned == 0, "trips of the hot loop fit into the ring");
  static_assert(kSlots % kTurns == 0, "an accumulator is always the same warpgroups'");

  using Storage = SharedStorage<kQBytes,
                                kBlock,
                                kBlockColumns,
                                kSets,
                                kStages,
                                kSums,
                                kRowBytes,
                                kScaled ? kQScaleTiles * kScaleBytes : 16,
                                kScaled ? kScaleBytes : 16>;
  using StageRing = Ring<kStages>;

  // Where strip `i`, and row `i`, of a set are in the block.
  static __device__ __forceinline__ int strip_in_block(int set, int i) {
    return kDealt ? i * kSets + set : set * kStrips + i;
  }
  static __device__ __forceinline__ int row_in_block(int set, int i) {
    constexpr int kTogether = kDealt ? kStripColumns / kHeads : kRows;
    return (i / kTogether * kSets + set) * kTogether + i % kTogether;
  }

  // Arrivals that say that a pass has been read: of a warpgroup's warps for each strip.
  static __host__ __device__ constexpr int readers_of(int pass) {
    const int left = kBlockColumns - pass * kPassColumns;
    return 4 * (left < kPassColumns ? left : kPassColumns) / kStripColumns;
  }

  // What a block's column is.
  static __device__ __forceinline__ int row_of(int column) {
    return kPaired ? column / (2 * kHeads) * 2 + column % 2 : column / kHeads;
  }
  static __device__ __forceinline__ int head_of(int column) {
    return kPaired ? column % (2 * kHeads) / 2 : column % kHeads;
  }

  static __device__ __forceinline__ int scale_word_of(int row) {
    return row / 128 * (kScaleBytes / 4) + row % 32 * 4 + row % 128 / 32;
  }

  // Tokens of a piece's stages, the empty ones included.
  static __device__ __forceinline__ uint32_t padded(uint32_t length) {
    constexpr uint32_t kUnit = kAligned * kStageRows;
    return (length + kUnit - 1) / kUnit * kUnit;
  }

  // Whether relu(x) of a pair of columns is x + |x|, with half the weight, rather than max(x, 0). The
  // first takes one instruction of the FMA pipe, the second two of the ALU pipe: each gets the
  // share that leaves neither behind, and few heads, which have the most other instructions, the shorter.
  static __host__ __device__ constexpr bool doubled(int pair) {  // of a set
    return kHeads == 8 ? true : kHeads == 16 ? pair % 3 != 0 : pair % 2 != 0;
  }
};

}  // namespace mqa::sm100
