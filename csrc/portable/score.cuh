// Dense and paged logits on every GPU from SM80 on. Meaning: docs/semantics.md.
//
//   logits[s, n] = sum_h weights[s, h] * relu(dot(q[s, h], k[n])) * k_scale[n]
//
// A CTA takes the blocks of rows of its range one after the other. Their queries lie in shared memory,
// converted once; its warps take 64 tokens each in turn, every one for itself: from memory to shared
// memory by asynchronous copies, from there to registers, where they stay for all columns of the
// block while the next ones are on their way.
#pragma once

#include "common/logits.cuh"
#include "portable/load.cuh"
#include "portable/math.cuh"
#include "portable/queries.cuh"
#include "portable/sources.cuh"
#include "portable/storage.cuh"
#include "ptx/control.cuh"
#include "score/range.cuh"

namespace mqa::portable {

template <typename Tiling, typename Source>
struct Score {
  using Arguments = typename Source::Arguments;
  using Storage = typename Tiling::Storage;
  using Ranges = Range<Tiling, Source>;
  using Task = typename Source::Task;
  using Loader = Load<Tiling, Source>;
  using Products = Math<Tiling>;
  static constexpr auto kTokens = Tiling::kTokens;

  static __device__ __forceinline__ void find_range(const Arguments& args, Storage& shared) {
    if (args.schedule != nullptr) {
      Ranges::store_entry(args, Ranges::read_entry(args), shared);
    } else if (Ranges::range_by_all(args)) {
      Ranges::find_range_by_all(args, shared);
    } else if (threadIdx.x < kWarpSize) {
      Ranges::find_range_by_warp(args, shared);
    }
    __syncthreads();
  }

  // The blocks of the range that have tokens, one after the other, which one warp looks for, 32 at a
  // time. All others have to see the same ones, even if somebody writes to windows meanwhile.
  struct Walk {
    Cut range[2];
    int base, last;
    Found own;
    uint32_t left = 0;  // which of the 32

    __device__ __forceinline__ Walk(const Arguments& args, const Storage& shared)
        : range{shared.cuts.cuts[0], shared.cuts.cuts[1]},
          base(Source::first_block(args, range) - kWarpSize),
          last(Source::last_block(args, range)) {}

    __device__ __forceinline__ void next(const Arguments& args, Storage& shared) {
      const int lane = threadIdx.x % kWarpSize;
      while (left == 0) {
        base += kWarpSize;
        if (base > last) {
          if (lane == 0) shared.found.length = 0;
          return;
        }
        own = {};
        if (base + lane <= last) own = Source::find(args, range, base + lane);
        left = __ballot_sync(kAllLanes, own.length > 0);
      }
      const int holder = __ffs(left) - 1;
      if (lane == holder) shared.block = base + lane, shared.found = own;
      left &= left - 1;
    }
  };

  static __device__ __forceinline__ void score(const Arguments& args, Storage& shared) {
    if constexpr (!Tiling::kManyHeads) Products::begin_turns();
    find_range(args, shared);
    Walk walk(args, shared);
    while (true) {
      if (threadIdx.x < kWarpSize) walk.next(args, shared);
      __syncthreads();
      const Found found = shared.found;
      if (found.length == 0) break;
      block(args, Source::task(args, shared.block), found, shared);
    }
    if constexpr (!Tiling::kManyHeads) Products::end_turns();
    if (args.clean)
      clean_rows_by_stores(Source::logits(args), Source::windows(args), blockIdx.x, gridDim.x);
  }

  static __device__ __forceinline__ void block(const Arguments& args,
                                               const Task& task,
                                               const Found& found,
                                               Storage& shared) {
    // Loops count tokens unsigned, since the end of the last round may lie past 2^31.
    const uint32_t end = found.first + found.length;
    uint32_t token = found.first + threadIdx.x / kWarpSize * kTokens;
    const typename Source::Keys keys(args, task);
    const typename Source::Chunk first(args, keys, token, end);
    typename Source::Chunk coming(args, keys, token + Tiling::kRound, end);
    if (token < end) Loader::begin(args, keys, first, token, end, shared);
    if constexpr (!Tiling::kManyHeads)
      Queries<Tiling, Source>::bring(args, task.row, found.rows, 0, shared);
    __syncthreads();
    // All warps take part in all rounds, with tokens or without.
    for (uint32_t done = 0; done < found.length; done += Tiling::kRound, token += Tiling::kRound) {
      typename Products::Keys operand;
      typename Products::Scales scales;
      if (token < end) {
        ptx::cp_async_wait_group_0();
        __syncwarp();
        Products::take(shared, operand, scales);
        __syncwarp();  // the place is free again
        if (token + Tiling::kRound < end)
          Loader::begin(args, keys, coming, token + Tiling::kRound, end, shared);
      }
      coming = typename Source::Chunk(args, keys, token + 2 * Tiling::kRound, end);
      if constexpr (Tiling::kManyHeads)
        many_heads(args, task.row, token, end, operand, scales, shared);
      else
        rows(found.rows, args.heads, token, end, operand, scales, shared);
    }
  }

  // All rows of a block that see some of the tokens.
  static __device__ __forceinline__ void rows(int count,
                                              int heads,
                                              uint32_t token,
                                              uint32_t end,
                                              const typename Products::Keys& operand,
                                              const typename Products::Scales& scales,
                                              const Storage& shared) {
#pragma unroll 1
    for (int row = 0; row < count; row++) {
      const score::Row of_row = shared.rows[row];
      const int64_t start = of_row.start, from = token;
      const bool sees = token < end && from + kTokens > start && from < start + of_row.length;
      typename Products::Sums sums{};
      Products::take_turn();
      if (!sees) {
        Products::pass_turn();
        continue;
      }
      Products::multiply(shared, operand, row, heads, sums, Products::pass_turn);
      Products::store(of_row, token, end, sums, scales);
    }
  }

  // A row with more heads than shared memory holds: they come again for each round of tokens.
  static __device__ __forceinline__ void many_heads(const Arguments& args,
                                                    int row,
                                                    uint32_t token,
                                                    uint32_t end,
                                                    const typename Products::Keys& operand,
                                                    const typename Products::Scales& scales,
                                                    Storage& shared) {
    typename Products::Sums sums{};
#pragma unroll 1
    for (int head = 0; head < args.heads; head += kColumns) {
      __syncthreads();
      Queries<Tiling, Source>::bring(args, row, 1, head, shared);
      __syncthreads();
      if (token < end)
        Products::multiply(shared, operand, 0, min(args.heads - head, kColumns), sums, [] {});
    }
    if (token < end) Products::store(shared.rows[0], token, end, sums, scales);
  }
};

template <typename Tiling, typename Source, int kSharedBytes>
__device__ __forceinline__ void run(const typename Source::Arguments& args) {
  using Storage = typename Tiling::Storage;
  static_assert(sizeof(Storage) <= kSharedBytes, "mqa/cuda/portable.py gives too little");
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  Score<Tiling, Source>::score(args, *reinterpret_cast<Storage*>(shared_bytes));
}

template <typename Format, int kHeads, int kDim, typename Logit, int kSharedBytes>
__global__ void __launch_bounds__(kThreads, 1) dense(const __grid_constant__ DenseArguments args) {
  using Kernel = Tiling<Format, kHeads, kDim, Logit>;
  run<Kernel, Dense<Kernel>, kSharedBytes>(args);
}

template <typename Format, int kHeads, int kDim, typename Logit, int kSharedBytes>
__global__ void __launch_bounds__(kThreads, 1) paged(const __grid_constant__ PagedArguments args) {
  using Kernel = Tiling<Format, kHeads, kDim, Logit>;
  run<Kernel, Paged<Kernel>, kSharedBytes>(args);
}

}  // namespace mqa::portable
