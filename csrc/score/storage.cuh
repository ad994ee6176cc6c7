// What CTAs of all kernels that score keep in shared memory of their work, and who does what.
#pragma once

#include "common/cuts.cuh"
#include "common/logits.cuh"
#include "common/windows.cuh"

namespace mqa::score {

constexpr int kMathGroups = 4;
constexpr int kMathThreads = kMathGroups * 128;
constexpr int kMathWarps = kMathThreads / kWarpSize;
constexpr int kLoadWarp = kMathWarps, kRowsWarp = kMathWarps + 1;
constexpr int kWeightsWarp = kMathWarps + 2, kCleanWarp = kMathWarps + 3;
constexpr int kFeedingWarps = 3;
constexpr int kPreparingWarp = 1;  // initialises barriers; the one before reads the schedule
constexpr int kMathBarrier = 2;    // of the math threads
constexpr int kCleanBarrier = 3;   // of the math threads that are through, and the warp that cleans

// When -inf is written, of a CTA: beside all else, once all its keys are on their way, or once its math
// warps are through. -DMQA_CLEANING=kAfterMath, or another name, overrides every kernel's policy, for
// measuring what it is worth.
enum class Cleaning { kBeside, kAfterLoads, kAfterMath };
constexpr Cleaning cleaning_or(Cleaning policy) {
#ifdef MQA_CLEANING
  return Cleaning::MQA_CLEANING;
#else
  return policy;
#endif
}

// What math needs of a row: where token 0 of its window form lies, and which tokens to write.
struct alignas(16) Row {
  uint64_t origin;  // address of token 0's logit, whether or not it exists
  int32_t start;
  uint32_t length;
};

template <typename Logit>
__device__ __forceinline__ Row describe_row(const Logits<Logit>& logits, Window window, int row) {
  const int2 filled = logits.filled(window);
  const Logit* line = logits.data + row * logits.stride - (logits.compressed ? window.start : 0);
  return {reinterpret_cast<uint64_t>(line), window.start,
          static_cast<uint32_t>(filled.y - filled.x)};
}

// What a CTA does of one block of rows: `length` tokens from `first` on. Loops count in tokens done,
// unsigned, since the end of the last stage may lie past 2^31.
struct Piece {
  int32_t first;
  uint32_t length;
  int32_t groups;  // sets of warpgroups that split the work: 1, 2 or 4; 0 ends the sequence
  int32_t base;    // which set of columns the first warpgroup has
  int32_t row;     // the block's first
};

// What a lane of a feeding warp found a CTA's range to have of a block: `length` tokens from `first`
// on, for `rows` rows.
struct Found {
  int32_t first;
  uint32_t length;
  int32_t rows;
};

// What a feeding warp keeps here, since it is short of registers.
struct Feeder {
  Cut range[2];  // its copy of [begin, end)
  Found found[kWarpSize];
  int32_t base;  // the first block that it looks at
};

// A page of a KV cache: its scales in global memory, and its number, -1 for none.
struct alignas(16) Page {
  const unsigned char* scales;
  int32_t number;
};

// Tokens of the rows of a set of columns.
struct alignas(16) Columns {
  int32_t first;  // [first, end): that some row has
  int32_t end;
  int32_t whole_first;  // [whole_first, whole_end): that every row has, so that nothing is tested
  int32_t whole_end;
};

// Where a ring of stages stands.
template <int kDepth>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kDepth) stage = 0, parity ^= 1;
  }
  template <int kSteps>
  __device__ __forceinline__ void advance() {
    static_assert(kSteps <= kDepth, "at most once around");
    stage += kSteps;
    if (stage >= kDepth) stage -= kDepth, parity ^= 1;
  }
  __device__ __forceinline__ void advance(int steps) {
    stage += steps;
    if (stage >= kDepth) {
      parity ^= stage / kDepth & 1;
      stage %= kDepth;
    }
  }
};

// The same of the two blocks that are on their way, in one register.
struct BlockRing {
  uint32_t blocks = 0;

  __device__ __forceinline__ int stage() const { return blocks & 1; }
  __device__ __forceinline__ uint32_t parity() const { return blocks >> 1 & 1; }
  __device__ __forceinline__ void advance() { blocks++; }
};

}  // namespace mqa::score
