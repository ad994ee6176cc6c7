// Paged calls: groups of rows of one request, whose keys lie in pages that a block table names.
#pragma once

#include "common/cuts.cuh"
#include "common/groups.cuh"
#include "common/logits.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "score/range.cuh"
#include "score/storage.cuh"

namespace mqa::score {

// Field by field as in mqa/cuda/paged.py. Strides are in elements, those of pages and of
// q in bytes.
struct PagedArguments {
  const unsigned char* cache;
  const void* weights;
  const int32_t* lens;
  const int32_t* table;
  const int32_t* indices;   // or null
  const int32_t* schedule;  // [parts + 1, 2] or null
  void* logits;
  const unsigned char* q;  // where a kernel reads queries itself, else null
  const uint32_t* q_scale;
  int64_t page_stride;
  int64_t q_row_stride;
  int64_t q_head_stride;
  int64_t q_dim_stride;
  int64_t q_request_stride;
  int64_t q_scale_row_stride;
  int64_t q_scale_head_stride;
  int64_t q_scale_request_stride;
  int64_t weights_row_stride;
  int64_t weights_head_stride;
  int64_t lens_request_stride;
  int64_t lens_row_stride;
  int64_t table_row_stride;
  int64_t table_column_stride;
  int64_t indices_stride;
  int64_t schedule_row_stride;
  int64_t schedule_column_stride;
  int64_t logits_stride;
  int32_t rows;
  int32_t requests;
  Divisor next_n;
  Divisor groups_of_request;
  Divisor table_lines;  // that the block table of a request may take, of 128 bytes if contiguous
  int32_t limit;  // most tokens that a row may have: columns of the result and of the block table
  int32_t pages;
  int32_t page_shift;  // log2 of a page's tokens, where they are a power of 2
  Divisor page;        // a page's tokens
  int32_t heads;
  int32_t width;
  float groups_of_part;  // of an even schedule
  bool last_only;        // lens are [B], of the last row of each request
  bool weights_are_bf16;
  bool clean;
};

// The scales of tokens without a page: zeros, like their values.
static __device__ uint4 no_scales[256 / 4];

template <typename Tiling>
struct Paged {
  using Arguments = PagedArguments;
  using Logit = typename Tiling::Logit;
  using Storage = typename Tiling::Storage;
  using StageRing = typename Tiling::StageRing;
  static constexpr bool kPaged = true;
  static constexpr int kAutoSplit = kScheduleSplit;  // tokens of a task where no schedule is given
  static constexpr auto kBlock = Tiling::kBlock;
  static constexpr auto kRowBytes = Tiling::kRowBytes;
  static constexpr auto kPanelBytes = Tiling::kPanelBytes;
  static constexpr int kScaleBytes = Tiling::kKeyScales ? 4 : 0;  // of a key
  static constexpr auto kStageRows = Tiling::kStageRows;
  // Blocks of a group, which may have more rows than a block.
  static constexpr int kParts =
      Tiling::kMostColumns && kBlock < kGroupRows ? ceil_div(kGroupRows, kBlock) : 1;
  static_assert(kStageRows / 8 <= kWarpSize, "a lane loads at most one page of a stage");

  // Of a task, tokens that are loaded at no more than 25 bytes a clock, which is more than an SM's share
  // of what memory delivers. If all SMs fill their rings at once, those that are served first stay
  // ahead for long. A task of few tokens takes no ring, and one of many may be of an SM that has
  // memory for itself.
  static constexpr bool kPaced = Tiling::kPaced;
  static constexpr uint32_t kPacedFrom = 256, kPacedTo = 1536, kPacedMost = 4096;
  static constexpr uint32_t kPace = kStageRows * (kRowBytes + kScaleBytes) / 25;  // clocks a stage

  // A block's part of a CTA's range.
  struct Task {
    int request;
    int row;   // the first
    int rows;  // of the group, from it on
    int first;
    uint32_t length;
  };

  static __device__ __forceinline__ Lens windows(const Arguments& args) {
    return {args.lens,
            args.lens_request_stride,
            args.lens_row_stride,
            args.rows,
            args.next_n,
            args.limit,
            args.last_only};
  }

  static __device__ __forceinline__ Groups grouping(const Arguments& args) {
    return {args.indices, args.indices_stride, args.requests, args.next_n, args.groups_of_request};
  }

  static __device__ __forceinline__ Logits<Logit> logits(const Arguments& args) {
    return {static_cast<Logit*>(args.logits), args.logits_stride, args.width, false};
  }

  static __device__ __forceinline__ int groups(const Arguments& args) {
    return grouping(args).count();
  }

  static __device__ __forceinline__ Cut cut_of(const Arguments& args, Cut entry) {
    return grouping(args).cut_of(entry);
  }

  // Asks for what will be read later, one after the other, so that the waits overlap with that for the
  // schedule: lens and indices of the first rows by every CTA, block tables by all together. By all
  // threads; the last warp, which has the first rows, is not the one that reads the schedule.
  static __device__ __forceinline__ void prefetch(const Arguments& args) {
    const int row = Tiling::kThreads - 1 - threadIdx.x;
    if (row < args.rows) {
      const int request = args.next_n.divide(row);
      ptx::prefetch_l1(args.lens + request * args.lens_request_stride +
                       (row - request * args.next_n.value) * args.lens_row_stride);
      if (args.indices != nullptr) ptx::prefetch_l1(args.indices + row * args.indices_stride);
    }
    if (row >= kWarpSize) return;
    constexpr int kLine = 128 / sizeof(int32_t);
    const uint32_t line = row * gridDim.x + blockIdx.x;
    const int request = args.table_lines.divide(line);
    if (args.limit > 0 && line < 1u << 31 && request < args.requests)
      ptx::prefetch_l2(args.table + request * args.table_row_stride +
                       (line - request * args.table_lines.value) * kLine *
                           args.table_column_stride);
  }

  // What a group weighs where no schedule is given. Up to 3 sets of 64 columns are scored while
  // their keys are read, in the time that it takes to look past a few dozen empty groups.
  static __device__ __forceinline__ Weights weigh(const Arguments& args, int index) {
    const Group group = grouping(args)[index];
    if (group.rows == 0) return {};
    const Hull hull = grouping(args).hull(windows(args), group, 0, group.rows);
    const int counted = 16 * max(ceil_div(group.rows * Tiling::kHeads, 64), 3);
    const int tasks = hull.splits(kAutoSplit);
    return {tasks > 0 ? 1 + counted : 1, counted, tasks};
  }

  // Moves the ends of a long range to the first and past the last group that has tokens, by the math
  // threads. A schedule of another batch may give a CTA all groups, and warps get past 32 empty ones
  // in the time that so many threads need for 8 each. Rows that lack tokens because lens are cut count.
  static __device__ __forceinline__ void narrow(const Arguments& args, Storage& shared) {
    constexpr int kEach = 8;
    if (groups(args) <= 4 * kWarpSize) return;
    ptx::bar_sync(kMathBarrier, kMathThreads);
    const Cut begin = shared.cuts.cuts[0], end = shared.cuts.cuts[1];
    if (end.block - begin.block <= 4 * kWarpSize) return;
    const Groups all = grouping(args);
    const Lens lens = windows(args);
    const int from = all.row_of(begin.block);
    const int to =
        end.block < all.count() ? min(all.row_of(end.block) + kGroupRows, args.rows) : args.rows;
    int first = args.rows, last = -1;
#pragma unroll 1
    for (int base = from + threadIdx.x; base < to; base += kEach * kMathThreads) {
#pragma unroll
      for (int i = 0; i < kEach; i++) {
        const int row = min(base + i * kMathThreads, to - 1), request = args.next_n.divide(row);
        if (lens.given_of(request, row - request * args.next_n.value) > 0)
          first = min(first, row), last = max(last, row);
      }
    }
    if (threadIdx.x == 0) shared.used[0] = args.rows, shared.used[1] = -1;
    ptx::bar_sync(kMathBarrier, kMathThreads);
    first = __reduce_min_sync(kAllLanes, first), last = __reduce_max_sync(kAllLanes, last);
    if (threadIdx.x % kWarpSize == 0 && last >= 0)
      atomicMin(&shared.used[0], first), atomicMax(&shared.used[1], last);
    ptx::bar_sync(kMathBarrier, kMathThreads);
    if (threadIdx.x != 0) return;
    const int low = all.with_row(shared.used[0]);
    const int high = all.with_row(shared.used[1]) + kGroupRows;
    if (shared.used[1] < 0)
      shared.cuts.cuts[1] = begin;
    else if (low > begin.block)
      shared.cuts.cuts[0] = {low, 0};
    if (shared.used[1] >= 0 && high < end.block) shared.cuts.cuts[1] = {high, 0};
  }

  // Blocks of a range.
  static __device__ __forceinline__ int first_block(const Cut (&range)[2]) {
    return range[0].block * kParts;
  }
  static __device__ __forceinline__ int last_block(const Arguments& args, const Cut (&range)[2]) {
    return min(range[1].block, groups(args) - 1) * kParts + kParts - 1;
  }

  static __device__ __forceinline__ Found find(const Arguments& args,
                                               const Cut (&range)[2],
                                               int base) {
    const int block = base + threadIdx.x % kWarpSize;
    Hull hull;
    int rows = 1;
    if (Tiling::kSets == 1 && kParts == 1 && args.indices == nullptr && args.next_n.value == 1) {
      hull = {0, windows(args).at(block, 0)};  // what most calls are, in few instructions
    } else {
      const Group group = grouping(args)[block / kParts];
      const int before = block % kParts * kBlock;
      rows = min(group.rows - before, kBlock);
      if (rows <= 0) return {};
      hull = grouping(args).hull(windows(args), group, before, rows);
    }
    return Range<Tiling, Paged>::part_of(args, range, (base + ptx::lane_read_anew()) / kParts, rows,
                                         hull);
  }

  // Where the lookout for blocks begins while the schedule is on its way.
  static __device__ __forceinline__ int likely_block(const Arguments& args) {
    return static_cast<int>(args.groups_of_part * blockIdx.x) * kParts;
  }

  static __device__ __forceinline__ Task task(const Arguments& args, Found found, int block) {
    const int group = block / kParts;
    const int row = grouping(args).row_of(group) + block % kParts * kBlock;
    return {grouping(args).request_of(group), row, found.rows, found.first, found.length};
  }

  // A request's row of the block table; in varlen calls that of the first of its longest rows. By a
  // warp.
  static __device__ __forceinline__ int table_row(const Arguments& args, int request) {
    if (args.indices == nullptr) return request;
    Lens uncut = windows(args);  // the longest is so before lens are cut
    uncut.limit = 0x7fffffff;
    return longest_of_run(grouping(args), uncut, request);
  }

  // Arrivals of load at k_full.
  static __device__ __forceinline__ int k_arrivals(const Arguments&) { return 1; }

  // What the block table says of `token`; -1 from `end` on. Nothing waits for it here.
  static __device__ __forceinline__ int page_of(const Arguments& args,
                                                int row,
                                                uint32_t token,
                                                uint32_t end) {
    if (token >= end) return -1;
    return args
        .table[row * args.table_row_stride + (token >> args.page_shift) * args.table_column_stride];
  }

  // The row of the block table for a task, and what it says of this lane's first page.
  struct Place {
    int row;
    int page;
  };

  static __device__ __forceinline__ Place look_up(const Arguments& args, const Task& task) {
    const int row = table_row(args, task.request);
    const uint32_t token = task.first + (threadIdx.x % kWarpSize << args.page_shift);
    return {row, page_of(args, row, token, task.first + task.length)};
  }

  // The stages of a piece, then empty ones up to a multiple of kAligned. Lanes look up 32 pages
  // together, and the next 32 while one of them, elected, loads these.
  static __device__ __forceinline__ void load_k(const ptx::TensorMap& k_map,
                                                const Arguments& args,
                                                const Task& task,
                                                Place place,
                                                StageRing& ring,
                                                Storage& shared) {
    uint32_t token =
        task.first + (threadIdx.x % kWarpSize << args.page_shift);  // of this lane's page
    int page = place.page;
    uint32_t last = ptx::clock();  // when a load left
    for (uint32_t done = 0; done < Tiling::padded(task.length);) {
      const bool exists = static_cast<uint32_t>(page) < static_cast<uint32_t>(args.pages);
      const unsigned char* scales =
          args.cache + page * args.page_stride + (kRowBytes << args.page_shift);
      if (!exists) scales = reinterpret_cast<const unsigned char*>(no_scales);
      shared.pages[threadIdx.x % kWarpSize] = {scales, exists ? page : -1};
      token += kWarpSize << args.page_shift;
      page = page_of(args, place.row, token, task.first + task.length);
      const uint32_t left = Tiling::padded(task.length) - done;
      const uint32_t stages =
          min((left + kStageRows - 1) / kStageRows, (kWarpSize << args.page_shift) / kStageRows);
      __syncwarp();
      if (ptx::elect_one()) load_stages(k_map, args, task, done, stages, last, ring, shared);
      __syncwarp();
      ring.advance(stages);
      done += stages * kStageRows;
    }
  }

  // Stages of the pages in shared.pages, from the first on, by one thread.
  static __device__ __forceinline__ void load_stages(const ptx::TensorMap& k_map,
                                                     const Arguments& args,
                                                     const Task& task,
                                                     uint32_t done,
                                                     uint32_t stages,
                                                     uint32_t& last,
                                                     StageRing ring,
                                                     Storage& shared) {
    // Keys that one block alone reads, prefixes that requests share aside, should not drive out what
    // is read again.
    const uint64_t policy = ptx::cache_policy(kParts == 1 && args.indices == nullptr &&
                                              args.groups_of_request.value == 1);
    const uint32_t end = stages * kStageRows;
#pragma unroll 1
    for (uint32_t row = 0; row < end;) {
      // Opaque, or what follows from it is kept from the kernel's start on.
      const int page_shift = ptx::opaque(args.page_shift);
      const uint32_t page_rows = 1 << page_shift, rows = min(page_rows, uint32_t{kStageRows});
      const uint32_t k_full = ptx::shared_address(&shared.k_full[ring.stage]);
      const uint32_t of_stage = row % kStageRows, of_page = row & (page_rows - 1);
      if (of_stage == 0) {
        ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_empty[ring.stage]),
                                  ring.parity ^ 1);
        if (Tiling::kAligned > 1 && done + row >= task.length) {
          ptx::mbarrier_arrive(k_full);
          row += kStageRows, ring.advance();
          continue;
        }
        if (kPaced && task.length <= kPacedMost && done + row >= kPacedFrom &&
            done + row < kPacedTo)
          last = wait_since(last, kPace);
        ptx::mbarrier_arrive_expect_tx(k_full, Tiling::kKBytes + kStageRows * kScaleBytes);
      }
      const Page page = shared.pages[row >> page_shift];
#pragma unroll
      for (int first = 0; first < kRowBytes; first += kPanelBytes)
        ptx::cp_async_bulk_tensor_3d_load(ptx::shared_address(shared.k[ring.stage]) +
                                              first * kStageRows + of_stage * kPanelBytes,
                                          &k_map, first, of_page, page.number, k_full, policy);
      if constexpr (Tiling::kKeyScales)
        ptx::cp_async_bulk_load(ptx::shared_address(&shared.k_scale[ring.stage][of_stage]),
                                page.scales + of_page * 4, rows * 4, k_full, policy);
      row += rows;
      if (row % kStageRows == 0) ring.advance();
    }
  }

  // Waits until so many clocks have gone by since `time`, and returns the time then.
  static __device__ __forceinline__ uint32_t wait_since(uint32_t time, uint32_t clocks) {
    uint32_t now;
    do {
      now = ptx::clock();
    } while (now - time < clocks);
    return now;
  }
};

}  // namespace mqa::score
