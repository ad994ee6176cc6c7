// What a CTA of the dense kernels keeps in shared memory, and the sizes of everything.
#pragma once

#include "common/logits.cuh"
#include "common/windows.cuh"

namespace mqa::sm90 {

constexpr int kMathGroups = 4;
constexpr int kMathThreads = kMathGroups * 128;
constexpr int kMathWarps = kMathThreads / kWarpSize;
constexpr int kOtherThreads = 128;
constexpr int kThreads = kMathThreads + kOtherThreads;
constexpr int kLoadWarp = kMathWarps, kRowsWarp = kMathWarps + 1;
constexpr int kWeightsWarp = kMathWarps + 2, kCleanWarp = kMathWarps + 3;
constexpr int kFeedingWarps = 3;
constexpr int kColumns = 128;  // of one warpgroup
constexpr int kBlockColumns = kMathGroups * kColumns;
constexpr int kTileRows = 64;    // of one wgmma
constexpr int kAutoSplit = 128;  // tokens of a task where no schedule is given
constexpr int kMathRegisters = 112, kOtherRegisters = 32;
static_assert(kMathRegisters * kMathThreads + kOtherRegisters * 128 <= 96 * kThreads,
              "setmaxnreg hands out what the launch got: 96 a thread");

// Field by field as in mqa/cuda/sm90.py. Strides are in elements.
struct DenseArguments {
  const float* k_scale;
  const void* weights;
  const int32_t* start;
  const int32_t* end;
  const int32_t* schedule;  // [parts + 1, 2] or null
  void* logits;
  int64_t k_scale_stride;
  int64_t weights_row_stride;
  int64_t weights_head_stride;
  int64_t schedule_row_stride;
  int64_t schedule_column_stride;
  int64_t start_stride;
  int64_t end_stride;
  int64_t logits_stride;
  int32_t rows;
  int32_t tokens;
  int32_t width;
  bool weights_are_bf16;
  bool compressed;
  bool clean;
};

// What math needs of a row: where token 0 of its window form lies, and which tokens to write.
struct alignas(16) Row {
  uint64_t origin;  // address of token 0's logit, whether or not it exists
  int32_t start;
  uint32_t length;
};

// What a CTA does of one query block: `length` tokens from `first` on. Loops count in tokens done,
// unsigned, since the end of the last stage may lie past 2^31.
struct Piece {
  int32_t first;
  uint32_t length;
  int32_t groups;  // sets of warpgroups that split the tiles: 1, 2 or 4; 0 ends the sequence
  int32_t base;    // which 128 columns the first of a set has
};

// Tokens of the rows of 128 columns.
struct alignas(16) Columns {
  int32_t first;  // [first, end): that some row has
  int32_t end;
  int32_t whole_first;  // [whole_first, whole_end): that every row has, so that nothing is tested
  int32_t whole_end;
};

template <int kDim, int kBlock, int kStages, int kStageRows>
struct SharedStorage {
  alignas(1024) unsigned char q[2][kBlockColumns * kDim];
  alignas(1024) unsigned char k[kStages][kStageRows * kDim];
  FillStorage fill;
  float weights[2][kBlockColumns];
  float k_scale[kStages][kStageRows];
  Row rows[2][kBlock];
  Piece piece[2];
  Columns columns[2][kMathGroups];
  uint64_t q_full[2], q_empty[2];
  uint64_t k_full[kStages], k_empty[kStages];
  CutStorage<kThreads> cuts;
  Cut range[kFeedingWarps][2];  // each one's copy of [begin, end)
};

// Where a ring of stages stands.
template <int kDepth>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int steps = 1) {
    stage += steps;
    if (stage >= kDepth) {
      parity ^= stage / kDepth & 1;
      stage %= kDepth;
    }
  }
};

// All sizes that follow from a kernel's template arguments.
template <int heads, int dim, typename LogitType, int stages, int stage_rows>
struct Tiling {
  static constexpr int kHeads = heads, kDim = dim, kStages = stages, kStageRows = stage_rows;
  using Logit = LogitType;

  static_assert(kHeads % 8 == 0 && kColumns % kHeads == 0, "a warpgroup owns whole rows");
  static_assert(kStageRows % kTileRows == 0, "a stage is whole tiles");

  static constexpr int kRows = kColumns / kHeads;     // of one warpgroup
  static constexpr int kBlock = kMathGroups * kRows;  // of a CTA
  static constexpr int kTiles = kStageRows / kTileRows;
  static constexpr int kBodyTiles = 8;  // of the hot loop
  static constexpr int kBodyStages = kBodyTiles / kTiles;
  static constexpr uint32_t kBody = kBodyTiles * kTileRows;  // tokens
  // Bodies start at ring stages that are multiples of this, so that a body's stages lie in order.
  static constexpr int kAligned = kBodyStages < kStages ? kBodyStages : kStages;
  static constexpr int kOutputs = kRows > 1 ? kRows / 2 : 1;  // logits of a thread and tile
  static constexpr int kBoxRows = kStageRows < 256 ? kStageRows : 256;
  static constexpr int kQBytes = kBlockColumns * kDim;
  static constexpr int kKBytes = kStageRows * kDim;
  static constexpr int kLogitBytes = sizeof(Logit);

  static_assert(kBodyTiles % kTiles == 0 && kStages % kAligned == 0, "a body is whole stages");

  using Storage = SharedStorage<kDim, kBlock, kStages, kStageRows>;
  using StageRing = Ring<kStages>;
  using BlockRing = Ring<2>;

  static __device__ __forceinline__ Windows windows_of(const DenseArguments& args) {
    return {args.start, args.end, args.start_stride, args.end_stride, args.rows, args.tokens};
  }

  static __device__ __forceinline__ Logits<Logit> logits_of(const DenseArguments& args) {
    return {static_cast<Logit*>(args.logits), args.logits_stride, args.width, args.compressed};
  }

  // Tokens of a piece's stages, the empty ones included.
  static __device__ __forceinline__ uint32_t padded(uint32_t length) {
    constexpr uint32_t kUnit = kAligned * kStageRows;
    return (length + kUnit - 1) / kUnit * kUnit;
  }

  // Whether scales come by bulk copies, which want contiguous, 16-byte-aligned memory. Pieces start
  // at multiples of 4 tokens.
  static __device__ __forceinline__ bool bulk_scales(const DenseArguments& args) {
    return args.k_scale_stride == 1 && reinterpret_cast<uint64_t>(args.k_scale) % 16 == 0;
  }
};

}  // namespace mqa::sm90
