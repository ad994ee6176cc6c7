// Paged calls: groups of rows of one request, whose keys lie in pages that a block table names.
#pragma once

#include "common/cuts.cuh"
#include "common/groups.cuh"
#include "common/logits.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/score/range.cuh"
#include "sm90/score/storage.cuh"

namespace mqa::sm90 {

// Field by field as in mqa/cuda/sm90_paged.py. Strides are in elements, those of pages in bytes.
struct PagedArguments {
  const unsigned char* cache;
  const void* weights;
  const int32_t* lens;
  const int32_t* table;
  const int32_t* indices;   // or null
  const int32_t* schedule;  // [parts + 1, 2] or null
  void* logits;
  const unsigned char* q;  // of converted formats, else null
  const uint32_t* q_scale;
  int64_t page_stride;
  int64_t q_row_stride;  // in bytes
  int64_t q_head_stride;
  int64_t q_scale_row_stride;
  int64_t q_scale_head_stride;
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
  int32_t next_n;
  int32_t limit;  // most tokens that a row may have: columns of the result and of the block table
  int32_t pages;
  int32_t page_rows;
  int32_t width;
  bool last_only;  // lens are [B], of the last row of each request
  bool weights_are_bf16;
  bool clean;
};

template <typename Tiling>
struct Paged {
  using Arguments = PagedArguments;
  using Logit = typename Tiling::Logit;
  using Storage = typename Tiling::Storage;
  using StageRing = typename Tiling::StageRing;
  static constexpr int kMathRegisters = Tiling::kColumns < 128 ? 96 : 112;
  static constexpr int kAutoSplit = kScheduleSplit;  // tokens of a task where no schedule is given
  static constexpr auto kBlock = Tiling::kBlock;
  static constexpr auto kRowBytes = Tiling::kRowBytes;
  static constexpr auto kStageRows = Tiling::kStageRows;
  // Blocks of a group, which may have more rows than a block.
  static constexpr int kParts = Tiling::kSets > 1 && kBlock < kGroupRows ? kGroupRows / kBlock : 1;
  static constexpr int kLaneRows = kStageRows / kWarpSize;  // tokens of a stage that a lane loads
  static_assert(kLaneRows % 4 == 0 && kLaneRows <= 8, "a lane's tokens lie in one page");

  // A block's part of a CTA's range.
  struct Task {
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
    return {args.indices, args.indices_stride, args.rows, args.next_n};
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

  // What a group weighs where no schedule is given. Up to 3 sets of 64 columns are scored while
  // their keys are read.
  static __device__ __forceinline__ Weights weigh(const Arguments& args, int index) {
    const Group group = grouping(args)[index];
    if (group.rows == 0) return {};
    const Hull hull = hull_of_rows(windows(args), group.row, group.rows);
    const int counted = max(ceil_div(group.rows * Tiling::kHeads, 64), 3);
    const int tasks = hull.splits(kAutoSplit);
    return {tasks > 0 ? 1 + counted : 1, counted, tasks};
  }

  // Moves the ends of a long range to the first and past the last group that has tokens. A schedule
  // of another batch may give a CTA all groups, and warps get past 32 empty ones in the time that
  // all threads need for 8 each.
  static __device__ __forceinline__ void narrow(const Arguments& args, Storage& shared) {
    constexpr int kEach = 8;
    if (args.schedule == nullptr && groups(args) <= kWarpSize) return;  // found by each warp
    const Cut begin = shared.cuts.cuts[0], end = shared.cuts.cuts[1];
    if (end.block - begin.block <= 4 * kWarpSize) return;
    const Groups all = grouping(args);
    const Lens lens = windows(args);
    const int from = all.row_of(begin.block);
    const int to =
        end.block < all.count() ? min(all.row_of(end.block) + kGroupRows, args.rows) : args.rows;
    int first = args.rows, last = -1;
#pragma unroll 1
    for (int base = from + threadIdx.x; base < to; base += kEach * kThreads) {
#pragma unroll
      for (int i = 0; i < kEach; i++) {
        const int row = min(base + i * kThreads, to - 1);
        if (!lens[row].empty()) first = min(first, row), last = max(last, row);
      }
    }
    if (threadIdx.x == 0) shared.used[0] = args.rows, shared.used[1] = -1;
    __syncthreads();
    first = __reduce_min_sync(kAllLanes, first), last = __reduce_max_sync(kAllLanes, last);
    if (threadIdx.x % kWarpSize == 0 && last >= 0)
      atomicMin(&shared.used[0], first), atomicMax(&shared.used[1], last);
    __syncthreads();
    if (threadIdx.x == 0) {
      const int low = all.with_row(shared.used[0]),
                high = all.with_row(shared.used[1]) + kGroupRows;
      if (shared.used[1] < 0)
        shared.cuts.cuts[1] = begin;
      else if (low > begin.block)
        shared.cuts.cuts[0] = {low, 0};
      if (shared.used[1] >= 0 && high < end.block) shared.cuts.cuts[1] = {high, 0};
    }
    __syncthreads();
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
                                               int block) {
    const Group group = grouping(args)[block / kParts];
    const int before = block % kParts * kBlock;
    const int row = group.row + before, rows = min(group.rows - before, kBlock);
    if (rows <= 0) return {};
    return Range<Tiling, Paged>::part_of(args, range, block / kParts, rows,
                                         hull_of_rows(windows(args), row, rows));
  }

  // The row of the block table that a row uses: its request's, or in varlen calls that of the first
  // of the longest rows of its request. By a warp.
  static __device__ __forceinline__ int table_row(const Arguments& args, int row) {
    if (args.indices == nullptr) return row / args.next_n;
    Lens uncut = windows(args);  // the longest is so before lens are cut
    uncut.limit = 0x7fffffff;
    return longest_of_run(grouping(args), uncut, row);
  }

  static __device__ __forceinline__ Task task(const Arguments& args, Found found, int block) {
    const int row = grouping(args).row_of(block / kParts) + block % kParts * kBlock;
    return {row, found.rows, found.first, found.length};
  }

  // Arrivals of load at k_full.
  static __device__ __forceinline__ int k_arrivals(const Arguments&) { return 1 + kWarpSize; }

  // The page that has `token`, -1 for none: of tokens from `end` on, and of numbers that name no
  // page. The copy engine fills in zeros for it.
  static __device__ __forceinline__ int page_of(const Arguments& args,
                                                int table,
                                                uint32_t token,
                                                uint32_t end) {
    if (token >= end) return -1;
    const int32_t page = args.table[table * args.table_row_stride +
                                    token / args.page_rows * args.table_column_stride];
    return static_cast<uint32_t>(page) < static_cast<uint32_t>(args.pages) ? page : -1;
  }

  // The stages of a piece, then empty ones up to a multiple of kAligned. A lane loads the scales of
  // its tokens, and the values of the page if its tokens are the first of that page in the stage.
  static __device__ __forceinline__ void load_k(const ptx::TensorMap& k_map,
                                                const Arguments& args,
                                                const Task& task,
                                                StageRing& ring,
                                                Storage& shared) {
    const int lane = threadIdx.x % kWarpSize, box_rows = min(args.page_rows, kStageRows);
    const bool leads = lane * kLaneRows % box_rows == 0;
    const int table = table_row(args, task.row);
    const uint32_t end = task.first + task.length;
    uint32_t token = task.first + lane * kLaneRows;
    int page = page_of(args, table, token, end);
    for (uint32_t done = 0; done < Tiling::padded(task.length);
         done += kStageRows, ring.advance()) {
      // The next page's number is on its way while this stage waits.
      const int next = page_of(args, table, token + kStageRows, end);
      const uint32_t k_full = ptx::shared_address(&shared.k_full[ring.stage]);
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_empty[ring.stage]), ring.parity ^ 1);
      if (done < task.length) {
        const int within = token % args.page_rows;
        if (lane == 0) ptx::mbarrier_arrive_expect_tx(k_full, Tiling::kKBytes);
        if (leads)
          ptx::cp_async_bulk_tensor_3d_load(ptx::shared_address(shared.k[ring.stage]) +
                                                lane * kLaneRows * kRowBytes,
                                            &k_map, 0, within, page, k_full);
        load_scales(args, page, within, lane, ring.stage, shared);
      } else {
        ptx::mbarrier_arrive_if(k_full, lane == 0);
      }
      ptx::cp_async_mbarrier_arrive_noinc(k_full);
      __syncwarp();  // or a lane could get two phases ahead of the others
      token += kStageRows;
      page = next;
    }
  }

  // Those of this lane's tokens; zeros where there is no page. They follow a page's values.
  static __device__ __forceinline__ void load_scales(
      const Arguments& args, int page, int within, int lane, int stage, Storage& shared) {
    const unsigned char* source =
        args.cache + max(page, 0) * args.page_stride + args.page_rows * kRowBytes + within * 4;
    const uint32_t target = ptx::shared_address(&shared.k_scale[stage][lane * kLaneRows]);
#pragma unroll
    for (int i = 0; i < kLaneRows / 4; i++)
      ptx::cp_async_16(target + i * 16, source + i * 16, page >= 0 ? 16 : 0);
  }
};

}  // namespace mqa::sm90
