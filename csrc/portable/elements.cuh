// Element formats: how tensor cores get them. All are exact in bfloat16, with their block scales; E4M3
// without is also exact in float16, in fewer instructions.
#pragma once

#include <cuda/std/cstdint>

#include "common/elements.cuh"
#include "ptx/control.cuh"
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"

namespace mqa::portable {

using cuda::std::uint16_t;
using cuda::std::uint32_t;

__device__ __forceinline__ Pairs multiply(Pairs pairs, uint32_t factor) {
  return {ptx::fma_mul_bf16x2(pairs.low, factor), ptx::fma_mul_bf16x2(pairs.high, factor)};
}

// Of 2^(code - 127 + kShift), two factors that bfloat16 has, as pairs. The second one is 1 unless the
// first would be out of range. Code 255 is NaN.
template <int kShift>
struct Factors {
  static constexpr uint32_t kMost = 254 - kShift;  // the largest code that one factor is enough for
  uint32_t factor;
  uint32_t rest;
  bool large;

  __device__ __forceinline__ Factors(uint32_t code)
      : factor(twice(code == 255 ? 0x7fc0 : min(code, kMost) + kShift << 7)),
        rest(twice(max(code, kMost) + 127 - kMost << 7)), large(code > kMost) {}
};

// E4M3. Its bits, put where a 16-bit number has sign, exponent and mantissa if its exponent takes
// kShift bits more, are the value times a power of two, also of subnormal ones. NaN would become 480.
struct E4m3 {
  static constexpr int kBits = 8;
  static constexpr bool kScaled = true;

  // Elements 0 and 2, and 1 and 3, and in `nan` bit 7 of every byte that is NaN; its other bits mean
  // nothing. Of signs there are more than the mask leaves, which takes one instruction less.
  template <int kShift>
  static __device__ __forceinline__ Pairs pairs(uint32_t word, uint32_t& nan) {
    constexpr uint32_t kMask = twice(0x7f00 >> kShift);
    const uint32_t signs = ptx::and_b32(word, 0x80808080), rest = ptx::and_b32(word, 0x7f7f7f7f);
    nan = rest + 0x01010101;
    return {ptx::select_bits(rest << (8 - kShift), signs << 8, kMask),
            ptx::select_bits(rest >> kShift, signs, kMask)};
  }
  // The pairs of a word, NaN where it has NaN.
  static __device__ __forceinline__ Pairs with_nan(Pairs pairs, uint32_t nan) {
    const uint32_t found = nan & 0x80808080;
    return {pairs.low | (found >> 7 & 0x00010001) * 0x7fff,
            pairs.high | (found >> 15 & 0x00010001) * 0x7fff};
  }
};

// float8_e4m3fn with a float32 scale of keys, after the sum. Products are in float16.
#if __CUDA_ARCH__ >= 890
struct Fp8 : E4m3 {
  static constexpr bool kHalf = true;
  static constexpr bool kBlockScaled = false;
  static constexpr bool kLosesNan = false;
  static constexpr bool kInfinities = false;

  static __device__ __forceinline__ Pairs decode(uint32_t word, uint32_t&) {
    return {ptx::f16x2_from_e4m3x2(static_cast<uint16_t>(word)),
            ptx::f16x2_from_e4m3x2(static_cast<uint16_t>(word >> 16))};
  }
  static __device__ __forceinline__ Pairs query(Pairs pairs) { return pairs; }
  static __device__ __forceinline__ float relu(float dot) { return ptx::max_nan(dot, 0.0f); }
};
#else
// Keys are multiplied by 2^-8, which bits cost nothing, and queries by 2^7, at which 448 is still in
// range. So a dot comes halved, and x + |x| is twice its relu.
struct Fp8 : E4m3 {
  static constexpr bool kHalf = true;
  static constexpr bool kBlockScaled = false;
  static constexpr bool kLosesNan = true;
  static constexpr bool kInfinities = false;

  static __device__ __forceinline__ Pairs decode(uint32_t word, uint32_t& nan) {
    return pairs<1>(word, nan);
  }
  static __device__ __forceinline__ Pairs query(Pairs pairs) {
    constexpr uint32_t kFactor = twice(15 + 15 << 10);  // 2^15
    return {ptx::mul_f16x2(pairs.low, kFactor), ptx::mul_f16x2(pairs.high, kFactor)};
  }
  static __device__ __forceinline__ float relu(float half) { return half + fabsf(half); }
};
#endif

struct Mxfp8 : E4m3 {
  static constexpr int kShift = 120;  // bits give the value times 2^-120
  static constexpr bool kHalf = false;
  static constexpr bool kBlockScaled = true;
  static constexpr bool kLosesNan = true;
  static constexpr bool kInfinities = false;

  static __device__ __forceinline__ Pairs decode(uint32_t word, uint32_t& nan) {
    return pairs<4>(word, nan);
  }
  static __device__ __forceinline__ float relu(float dot) { return ptx::max_nan(dot, 0.0f); }
};

// E2M1, whose bits give the value times 2^-126.
struct Mxfp4 {
  static constexpr int kBits = 4;
  static constexpr int kShift = 126;
  static constexpr bool kHalf = false;
  static constexpr bool kBlockScaled = true;
  static constexpr bool kScaled = true;
  static constexpr bool kLosesNan = false;
  static constexpr bool kInfinities = false;

  static __device__ __forceinline__ Pairs decode(uint32_t word, int step) {
    return e2m1_pairs(word, step);
  }
  static __device__ __forceinline__ float relu(float dot) { return ptx::max_nan(dot, 0.0f); }
};

struct Bf16 {
  static constexpr int kBits = 16;
  static constexpr bool kHalf = false;
  static constexpr bool kBlockScaled = false;
  static constexpr bool kScaled = false;
  static constexpr bool kLosesNan = false;
  static constexpr bool kInfinities = true;

  static __device__ __forceinline__ float relu(float dot) { return ptx::max_nan(dot, 0.0f); }
};

// How rows lie in memory, and which dims a thread takes of them.
template <typename Format, int kDim>
struct RowOf : Chunks<Format::kBits, kDim> {
  using Base = Chunks<Format::kBits, kDim>;
  static constexpr auto kWords = Base::kWords, kPartSteps = Base::kPartSteps;

  // Step `step` of a part, without scales, and where it has NaN that is lost.
  static __device__ __forceinline__ Pairs decode(const uint32_t (&words)[kWords],
                                                 int step,
                                                 uint32_t& nan) {
    if constexpr (Format::kBits == 16) {
      return {words[2 * step], words[2 * step + 1]};
    } else if constexpr (Format::kBits == 8) {
      return Format::decode(words[step], nan);
    } else {
      return Format::decode(words[step / 2], step % 2);
    }
  }

  // All steps of a part, with their scale, into `pairs`. By a warp.
  static __device__ __forceinline__ void convert(const uint32_t (&words)[kWords],
                                                 uint32_t code,
                                                 Pairs (&pairs)[kPartSteps],
                                                 uint32_t (&nan)[kPartSteps]) {
#pragma unroll
    for (int step = 0; step < kPartSteps; step++)
      pairs[step] = decode(words, step, nan[step]);
    if constexpr (Format::kBlockScaled) {
      const Factors<Format::kShift> factors(code);
#pragma unroll
      for (int step = 0; step < kPartSteps; step++)
        pairs[step] = multiply(pairs[step], factors.factor);
      if (__any_sync(0xffffffff, factors.large)) {
#pragma unroll
        for (int step = 0; step < kPartSteps; step++)
          pairs[step] = multiply(pairs[step], factors.rest);
      }
    }
  }
};

}  // namespace mqa::portable
