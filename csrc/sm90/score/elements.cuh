// Element formats: how a thread makes bfloat16 of them.
#pragma once

#include <cuda/std/cstdint>

#include "common/elements.cuh"
#include "ptx/convert.cuh"

namespace mqa::sm90 {

using cuda::std::uint16_t;
using cuda::std::uint32_t;

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

// E2M1, whose bits give the value times 2^-126.
struct Mxfp4 : Converted {
  static constexpr bool kTwoFactors = true;
  static constexpr bool kBlockScaled = true;
  static constexpr bool kKeyScaled = false;
  static constexpr int kBits = 4;
  static constexpr int kWordsOfStep = 1, kStepsOfWord = 2;

  static __device__ __forceinline__ Pairs decode(const uint32_t* words, int step) {
    return e2m1_pairs(*words, step);
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
struct RowOf : Chunks<Format::kBits, kDim> {
  using Base = Chunks<Format::kBits, kDim>;
  static_assert(Base::kSteps ==
                    Base::kParts * Base::kWords / Format::kWordsOfStep * Format::kStepsOfWord,
                "each element once");
  // A longer row lies in two panels, each with 128 bytes of every key.
  static constexpr int kPanelBytes = Base::kBytes < 128 ? Base::kBytes : 128;
  static constexpr int kPartsOfPanel = kPanelBytes / 4 / Base::kChunk;
};

}  // namespace mqa::sm90
