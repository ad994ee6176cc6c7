// Element formats: bytes of a row, and how a thread makes bfloat16 of them.
//
// Products in bfloat16 take 16 dims a step. Which ones is free as long as q and k agree: thread c of
// four gets the c'th kChunk bytes of each part of a row, and takes step after step from them, four
// elements each. A part has 64 bytes, or what a short row has.
#pragma once

#include <cuda/std/cstdint>

#include "ptx/convert.cuh"

namespace mqa::sm90 {

using cuda::std::uint16_t;
using cuda::std::uint32_t;

// Four elements of a step, scaled: those of columns 2c, 2c + 1 and those 8 further.
struct Pairs {
  uint32_t low;
  uint32_t high;
};

// float8_e4m3fn, multiplied by tensor cores as it is.
struct Fp8 {
  static constexpr bool kConverted = false;
  static constexpr bool kInfinities = false;
  static constexpr bool kBlockScaled = false;
  static constexpr bool kKeyScaled = true;
  static constexpr int kBits = 8;
};

// What the formats share that reach the tensor cores as bfloat16. A UE8M0 scale code e means
// 2^(e - 127), 255 NaN.
struct Converted {
  static constexpr bool kConverted = true;
  static constexpr bool kInfinities = false;  // whether elements may be infinite

  // A format of no block scales.
  struct NoScale {
    __device__ __forceinline__ NoScale(uint32_t) {}
    __device__ __forceinline__ Pairs operator()(Pairs pairs) const { return pairs; }
  };

  static __device__ __forceinline__ uint32_t twice(uint32_t bf16) { return bf16 | bf16 << 16; }
};

struct E4m3 : Converted {
  static constexpr bool kTwoFactors = false;
  static constexpr int kBits = 8;
  static constexpr int kWordsOfStep = 1, kStepsOfWord = 1;

  static __device__ __forceinline__ Pairs decode(const uint32_t* words, int) {
    const uint32_t word = *words;
    return {ptx::bf16x2_from_f16x2(ptx::f16x2_from_e4m3x2(static_cast<uint16_t>(word))),
            ptx::bf16x2_from_f16x2(ptx::f16x2_from_e4m3x2(static_cast<uint16_t>(word >> 16)))};
  }
};

// bfloat16: as it is, and without scales.
struct Bf16 : Converted {
  static constexpr bool kInfinities = true;
  static constexpr bool kTwoFactors = false;
  static constexpr bool kBlockScaled = false;
  static constexpr bool kKeyScaled = false;
  static constexpr int kBits = 16;
  static constexpr int kWordsOfStep = 2, kStepsOfWord = 1;
  using Scale = NoScale;

  static __device__ __forceinline__ Pairs decode(const uint32_t* words, int) {
    return {words[0], words[1]};
  }
};

// float8_e4m3fn with a float32 scale after the sum, by way of bfloat16: sums keep more bits.
struct Fp8Accurate : E4m3 {
  static constexpr bool kBlockScaled = false;
  static constexpr bool kKeyScaled = true;
  using Scale = NoScale;
};

struct Mxfp8 : E4m3 {
  static constexpr bool kBlockScaled = true;
  static constexpr bool kKeyScaled = false;
  struct Scale {
    uint32_t factor;
    __device__ __forceinline__ Scale(uint32_t code)
        : factor(twice(code << 7 | (code + 1) >> 8 << 6)) {}
    __device__ __forceinline__ Pairs operator()(Pairs pairs) const {
      return {ptx::mul_bf16x2(pairs.low, factor), ptx::mul_bf16x2(pairs.high, factor)};
    }
  };
};

// E2M1. Its bits, put where bfloat16 has sign, exponent and mantissa, are the value times 2^-126,
// also those of the subnormal 0.5.
struct Mxfp4 : Converted {
  static constexpr bool kTwoFactors = true;
  static constexpr bool kBlockScaled = true;
  static constexpr bool kKeyScaled = false;
  static constexpr int kBits = 4;
  static constexpr int kWordsOfStep = 1, kStepsOfWord = 2;

  // Element i of a word and element i + 4, which lie at the same place of its halves.
  static __device__ __forceinline__ uint32_t pair(uint32_t word, int i) {
    const uint32_t sign = word << (12 - 4 * i) & 0x80008000;
    const uint32_t rest = (i == 0   ? word << 6
                           : i == 1 ? word << 2
                           : i == 2 ? word >> 2
                                    : word >> 6);
    return sign | (rest & 0x01c001c0);
  }
  static __device__ __forceinline__ Pairs decode(const uint32_t* words, int step) {
    return {pair(*words, 2 * step), pair(*words, 2 * step + 1)};
  }

  // 2^126 and the scale are one factor unless the scale exceeds 2: then the rest is a second one.
  struct Scale {
    uint32_t factor;
    uint32_t rest;
    bool large;
    __device__ __forceinline__ Scale(uint32_t code)
        : factor(twice(code == 255 ? 0x7fc0 : min(code, 128u) + 126 << 7)),
          rest(twice(max(code, 128u) - 1 << 7)), large(code > 128) {}
    __device__ __forceinline__ Pairs operator()(Pairs pairs) const {
      return {ptx::mul_bf16x2(pairs.low, factor), ptx::mul_bf16x2(pairs.high, factor)};
    }
  };
};

// How the rows of a converted format lie in memory, and which dims a thread takes of them.
template <typename Format, int kDim>
struct RowOf {
  static constexpr int kBytes = kDim * Format::kBits / 8;
  // Words that are operands as they are come by their portion, or tensor cores would wait: two parts.
  static constexpr int kMostOfRow = kBytes / (Format::kBits == 16 ? 8 : 4);
  static constexpr int kChunk = kMostOfRow < 16 ? kMostOfRow : 16;
  static constexpr int kParts = kBytes / 4 / kChunk;
  static constexpr int kWords = kChunk / 4;  // of a thread, in each part
  static constexpr int kSteps = kDim / 16;
  static_assert(kSteps == kParts * kWords / Format::kWordsOfStep * Format::kStepsOfWord,
                "each element once");
  // A longer row lies in two panels, each with 128 bytes of every key.
  static constexpr int kPanelBytes = kBytes < 128 ? kBytes : 128;
  static constexpr int kPartsOfPanel = kPanelBytes / 4 / kChunk;

  // The scale code of thread c's chunk in a part, from a row's four.
  static __device__ __forceinline__ uint32_t code(uint32_t codes, int part, int c) {
    constexpr int kChunkDims = kChunk * 8 / Format::kBits;
    return codes >> 8 * (part * (kBytes / kParts * 8 / Format::kBits) / 32 + c * kChunkDims / 32) &
           255;
  }
};

}  // namespace mqa::sm90
