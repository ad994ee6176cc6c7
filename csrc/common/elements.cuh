// Elements of keys and queries on their way to products that take 16 dims a step, the same for all
// kernels whose warps hold keys in registers.
//
// Which dims a step takes is free as long as q and k agree: thread c of four gets the c'th kChunk bytes
// of each part of a row, and takes step after step from them, four elements each.
#pragma once

#include <cuda/std/cstdint>

namespace mqa {

// Four elements of a step: those of columns 2c, 2c + 1 of a fragment, its lower half, and those 8
// further.
struct Pairs {
  cuda::std::uint32_t low;
  cuda::std::uint32_t high;
};

__device__ __forceinline__ constexpr cuda::std::uint32_t twice(cuda::std::uint32_t half) {
  return half | half << 16;
}

// Element i of a word of E2M1 and element i + 4, which lie at the same place of its halves. Their bits,
// put where bfloat16 has sign, exponent and mantissa, are the value times 2^-126, also those of the
// subnormal 0.5.
__device__ __forceinline__ cuda::std::uint32_t e2m1_pair(cuda::std::uint32_t word, int i) {
  const cuda::std::uint32_t sign = word << (12 - 4 * i) & 0x80008000;
  const cuda::std::uint32_t rest = (i == 0   ? word << 6
                                    : i == 1 ? word << 2
                                    : i == 2 ? word >> 2
                                             : word >> 6);
  return sign | (rest & 0x01c001c0);
}

// Step `step` of the two that a word of E2M1 has.
__device__ __forceinline__ Pairs e2m1_pairs(cuda::std::uint32_t word, int step) {
  return {e2m1_pair(word, 2 * step), e2m1_pair(word, 2 * step + 1)};
}

// How rows of kDim elements of kBits lie in memory, and what a thread has of them.
template <int kBits, int kDim>
struct Chunks {
  static constexpr int kBytes = kDim * kBits / 8;
  // Words that are operands as they are come in two parts at least, or tensor cores would wait.
  static constexpr int kMostOfRow = kBytes / (kBits == 16 ? 8 : 4);
  static constexpr int kChunk = kMostOfRow < 16 ? kMostOfRow : 16;
  static constexpr int kParts = kBytes / 4 / kChunk;
  static constexpr int kWords = kChunk / 4;  // of a thread, in each part
  static constexpr int kSteps = kDim / 16;
  static constexpr int kPartSteps = kSteps / kParts;

  // The scale code of thread c's chunk in a part, from a row's four.
  static __device__ __forceinline__ cuda::std::uint32_t code(cuda::std::uint32_t codes,
                                                             int part,
                                                             int c) {
    constexpr int kChunkDims = kChunk * 8 / kBits;
    return codes >> 8 * (part * (kBytes / kParts * 8 / kBits) / 32 + c * kChunkDims / 32) & 255;
  }
};

}  // namespace mqa
