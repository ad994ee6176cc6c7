// Queries of a format that is converted, or bfloat16: from global memory to bfloat16 in shared
// memory, dims in the order of elements.cuh. A panel holds 64 dims of all columns, rows of 128 bytes,
// swizzled.
#pragma once

#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "sm90/score/elements.cuh"
#include "sm90/score/storage.cuh"

namespace mqa::sm90 {

template <typename Tiling>
struct Queries {
  using Storage = typename Tiling::Storage;
  using Format = typename Tiling::Format;
  using Row = RowOf<Format, Tiling::kDim>;
  static constexpr auto kHeads = Tiling::kHeads;
  static constexpr auto kBlockColumns = Tiling::kBlockColumns;
  static_assert(Tiling::kQBytes == ceil_div(Row::kSteps, 4) * kBlockColumns * 128, "whole panels");

  // Brings the columns of the rows from `row` on, by all math threads. Rows that do not exist become
  // zeros.
  template <typename Arguments>
  static __device__ __forceinline__ void bring(const Arguments& args,
                                               int row,
                                               int buffer,
                                               Storage& shared) {
    // With one buffer everybody has to be through with it; with two, all that met here last are.
    if constexpr (Tiling::kQBuffers == 1) ptx::bar_sync(kMathBarrier, kMathThreads);
    unsigned char* target = shared.q[buffer];
    const int c = threadIdx.x % 4;
#pragma unroll 1
    for (int at = threadIdx.x / 4; at < kBlockColumns; at += kMathThreads / 4) {
      const int mine = row + at / kHeads, head = at % kHeads;
      const bool exists = mine < args.rows;
      uint32_t codes = 0;
      if (Format::kBlockScaled && exists)
        codes = args.q_scale[mine * args.q_scale_row_stride + head * args.q_scale_head_stride];
#pragma unroll
      for (int part = 0; part < Row::kParts; part++) {
        uint32_t words[Row::kWords] = {};
        if (exists)
          load(args.q + mine * args.q_row_stride + head * args.q_head_stride +
                   (part * 4 + c) * Row::kChunk,
               words);
        store(words, typename Format::Scale(Row::code(codes, part, c)), part, at, c, target);
      }
    }
    ptx::fence_proxy_async_shared();
    ptx::bar_sync(kMathBarrier, kMathThreads);
  }

  static __device__ __forceinline__ void load(const unsigned char* source,
                                              uint32_t (&words)[Row::kWords]) {
    if constexpr (Row::kChunk == 16) {
      const uint4 loaded = *reinterpret_cast<const uint4*>(source);
      words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
    } else {
      const uint2 loaded = *reinterpret_cast<const uint2*>(source);
      words[0] = loaded.x, words[1] = loaded.y;
    }
  }

  // Four bytes each to columns 2c and 2c + 8 of every step.
  static __device__ __forceinline__ void store(const uint32_t (&words)[Row::kWords],
                                               const typename Format::Scale& scale,
                                               int part,
                                               int column,
                                               int c,
                                               unsigned char* target) {
#pragma unroll
    for (int word = 0; word < Row::kWords; word += Format::kWordsOfStep)
#pragma unroll
      for (int i = 0; i < Format::kStepsOfWord; i++) {
        Pairs pairs = scale(Format::decode(&words[word], i));
        if constexpr (Format::kTwoFactors)
          pairs = {ptx::mul_bf16x2(pairs.low, scale.rest), ptx::mul_bf16x2(pairs.high, scale.rest)};
        const int step =
            (part * Row::kWords + word) / Format::kWordsOfStep * Format::kStepsOfWord + i;
        unsigned char* panel = target + step / 4 * kBlockColumns * 128 + column * 128 + c * 4;
        const int chunk = step % 4 * 2;
        *reinterpret_cast<uint32_t*>(panel + (chunk ^ column % 8) * 16) = pairs.low;
        *reinterpret_cast<uint32_t*>(panel + ((chunk + 1) ^ column % 8) * 16) = pairs.high;
      }
  }
};

}  // namespace mqa::sm90
