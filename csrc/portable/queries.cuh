// A block's queries: from global memory to fragments in shared memory, with their weights and rows.
#pragma once

#include "portable/load.cuh"
#include "portable/sources.cuh"
#include "portable/storage.cuh"

namespace mqa::portable {

template <typename Tiling, typename Source>
struct Queries {
  using Arguments = typename Source::Arguments;
  using Storage = typename Tiling::Storage;
  using Format = typename Tiling::Format;
  using Row = typename Tiling::Row;
  static constexpr auto kHeads = Tiling::kHeads;

  // Heads from `first_head` on of `rows` rows from `row` on, by all threads. Heads that do not exist
  // become zeros, with weights of zero.
  static __device__ __forceinline__ void bring(
      const Arguments& args, int row, int rows, int first_head, Storage& shared) {
    const int c = threadIdx.x % 4;
#pragma unroll 1
    for (int column = threadIdx.x / 4; column < rows * kHeads; column += kThreads / 4) {
      const int mine = row + column / kHeads, head = first_head + column % kHeads;
      const bool exists = head < args.heads;
      uint32_t codes = 0;
      if (Format::kBlockScaled && exists)
        codes = args.q_scale[Source::q_scale_at(args, mine) + head * args.q_scale_head_stride];
      const unsigned char* from = args.q + Source::q_at(args, mine) + head * args.q_head_stride;
#pragma unroll
      for (int part = 0; part < Row::kParts; part++) {
        uint32_t words[Row::kWords] = {};
        if (exists) load(from, (part * 4 + c) * Row::kChunk, args.q_dim_stride, words);
        store(words, Row::code(codes, part, c), part, column, shared);
      }
      if (c == 0) shared.weights[column] = exists ? weight(args, mine, head) : 0.0f;
    }
    if (static_cast<int>(threadIdx.x) < rows) {
      const int own = row + threadIdx.x;
      shared.rows[threadIdx.x] =
          describe_row(Source::logits(args), Source::windows(args)[own], own);
    }
  }

  static __device__ __forceinline__ float weight(const Arguments& args, int row, int head) {
    const int64_t at = row * args.weights_row_stride + head * args.weights_head_stride;
    return args.weights_are_bf16
               ? __bfloat162float(static_cast<const __nv_bfloat16*>(args.weights)[at])
               : static_cast<const float*>(args.weights)[at];
  }

  // A thread's words of a part of a row, from byte `at` on.
  static __device__ __forceinline__ void load(const unsigned char* row,
                                              int at,
                                              int64_t dim_stride,
                                              uint32_t (&words)[Row::kWords]) {
    const bool whole =
        dim_stride == Tiling::kElementBytes && reinterpret_cast<uint64_t>(row) % 4 == 0;
#pragma unroll
    for (int word = 0; word < Row::kWords; word++)
      words[word] = whole ? *reinterpret_cast<const uint32_t*>(row + at + word * 4)
                          : gather_word<Tiling::kElementBytes>(row, at + word * 4, dim_stride);
  }

  // The steps of a part, four bytes each to both halves of a fragment.
  static __device__ __forceinline__ void store(
      const uint32_t (&words)[Row::kWords], uint32_t code, int part, int column, Storage& shared) {
    Pairs pairs[Row::kPartSteps];
    uint32_t nan[Row::kPartSteps];
    Row::convert(words, code, pairs, nan);
    const int lane = column % 8 * 4 + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < Row::kPartSteps; i++) {
      if constexpr (Format::kHalf) pairs[i] = Format::query(pairs[i]);
      if constexpr (Format::kLosesNan) pairs[i] = Format::with_nan(pairs[i], nan[i]);
      const int step = part * Row::kPartSteps + i;
      *reinterpret_cast<Pairs*>(
          reinterpret_cast<unsigned char*>(&shared.q[column / 8][step / 2][lane]) +
          step % 2 * sizeof(Pairs)) = pairs[i];
    }
  }
};

}  // namespace mqa::portable
