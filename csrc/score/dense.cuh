// Dense calls: query blocks of rows with windows over keys [tokens, kDim] that lie in one piece.
#pragma once

#include "common/cuts.cuh"
#include "common/logits.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "score/range.cuh"
#include "score/storage.cuh"

namespace mqa::score {

// Field by field as in mqa/cuda/dense.py. Strides are in elements, those of q and k in bytes.
struct DenseArguments {
  const float* k_scale;
  const void* weights;
  const int32_t* start;
  const int32_t* end;
  const int32_t* schedule;  // [parts + 1, 2] or null
  void* logits;
  const unsigned char* k;  // where a kernel reads keys itself, else null
  const unsigned char* q;  // where it reads queries itself, else null
  const uint32_t* q_scale;
  int64_t k_scale_stride;
  int64_t q_row_stride;
  int64_t q_head_stride;
  int64_t k_row_stride;
  int64_t k_dim_stride;
  int64_t q_dim_stride;
  int64_t q_scale_row_stride;
  int64_t q_scale_head_stride;
  int64_t weights_row_stride;
  int64_t weights_head_stride;
  int64_t schedule_row_stride;
  int64_t schedule_column_stride;
  int64_t start_stride;
  int64_t end_stride;
  int64_t logits_stride;
  int32_t rows;
  int32_t tokens;
  int32_t width;
  int32_t heads;
  bool weights_are_bf16;
  bool compressed;
  bool clean;
};

template <typename Tiling>
struct Dense {
  using Arguments = DenseArguments;
  using Logit = typename Tiling::Logit;
  using Storage = typename Tiling::Storage;
  using StageRing = typename Tiling::StageRing;
  static constexpr bool kPaged = false;
  static constexpr int kAutoSplit = 128;  // tokens of a task where no schedule is given
  static constexpr auto kBlock = Tiling::kBlock;
  static constexpr auto kRows = Tiling::kRows;
  // Cut points name groups of 512 columns; those may be several blocks.
  static constexpr int kGroup = kScheduleColumns / Tiling::kHeads;
  static constexpr int kParts = ceil_div(kGroup, kBlock);
  static constexpr auto kRowBytes = Tiling::kRowBytes;
  static constexpr auto kPanelBytes = Tiling::kPanelBytes;
  static constexpr auto kStageRows = Tiling::kStageRows;

  // A block's part of a CTA's range.
  struct Task {
    int row;   // the first
    int rows;  // that exist
    int first;
    uint32_t length;
  };

  static __device__ __forceinline__ Windows windows(const Arguments& args) {
    return {args.start, args.end, args.start_stride, args.end_stride, args.rows, args.tokens};
  }

  static __device__ __forceinline__ Logits<Logit> logits(const Arguments& args) {
    return {static_cast<Logit*>(args.logits), args.logits_stride, args.width, args.compressed};
  }

  static __device__ __forceinline__ int groups(const Arguments& args) {
    return ceil_div(args.rows, kGroup);
  }

  static __device__ __forceinline__ Cut cut_of(const Arguments& args, Cut entry) {
    return cut_among(groups(args), entry);
  }

  static __device__ __forceinline__ Hull hull(const Arguments& args, int first, int count) {
    constexpr int kAtOnce = 3;  // all that registers allow
    return hull_of_rows<kAtOnce>(windows(args), first, count);
  }

  // The first row of a block, and how many are its own.
  static __device__ __forceinline__ int row_of(int block) {
    return block / kParts * kGroup + block % kParts * kBlock;
  }
  static __device__ __forceinline__ int rows_of(int block) {
    return kGroup % kBlock == 0 ? kBlock : min(kGroup - block % kParts * kBlock, kBlock);
  }

  // Warpgroup sets that split the tiles of a block of which `rows` rows exist.
  static __device__ __forceinline__ int groups_for(int rows) {
    return rows <= kRows ? 4 : rows <= 2 * kRows ? 2 : 1;
  }

  // What a group weighs where no schedule is given: its start takes about as long as a task.
  static __device__ __forceinline__ Weights weigh(const Arguments& args, int group) {
    const int tasks = hull(args, group * kGroup, kGroup).splits(kAutoSplit);
    const int rows = args.rows - group * kGroup;
    const int counted = Tiling::kSharesOut ? kBlock / groups_for(rows)
                                           : kBlock * min(ceil_div(rows, kBlock), kParts);
    return {tasks > 0 ? 1 + counted : 1, counted, tasks};
  }

  static __device__ __forceinline__ void prefetch(const Arguments&) {}
  static __device__ __forceinline__ void narrow(const Arguments&, Storage&) {}

  // Blocks of a range.
  static __device__ __forceinline__ int first_block(const Cut (&range)[2]) {
    return range[0].block * kParts;
  }
  static __device__ __forceinline__ int last_block(const Arguments& args, const Cut (&range)[2]) {
    return min(range[1].block, groups(args) - 1) * kParts + kParts - 1;
  }

  // Of the block that this lane looks at.
  static __device__ __forceinline__ Found find(const Arguments& args,
                                               const Cut (&range)[2],
                                               int base) {
    const int block = base + threadIdx.x % kWarpSize;
    const Hull tokens = hull(args, block / kParts * kGroup, kGroup);
    const int group = (base + ptx::lane_read_anew()) / kParts;
    Found found = Range<Tiling, Dense>::part_of(args, range, group, kBlock, tokens);
    if constexpr (kParts > 1) narrow_to(hull(args, row_of(block), rows_of(block)), found);
    return found;
  }

  // Leaves out tokens at the ends that no row of a block sees, though others of its group do.
  static __device__ __forceinline__ void narrow_to(Hull own, Found& found) {
    const int end = min(found.first + static_cast<int>(found.length), own.end);
    found.first = max(found.first, own.first);
    found.length = max(end - found.first, 0);
  }

  static __device__ __forceinline__ Task task(const Arguments& args, Found found, int block) {
    const int row = row_of(block);
    return {row, min(args.rows - row, rows_of(block)), found.first, found.length};
  }

  // Where the lookout for blocks begins while the schedule is on its way.
  static __device__ __forceinline__ int likely_block(const Arguments& args) {
    return groups(args) / gridDim.x * blockIdx.x * kParts;
  }

  struct Place {};
  static __device__ __forceinline__ Place look_up(const Arguments&, const Task&) { return {}; }

  // Whether scales come by bulk copies, which want contiguous, 16-byte-aligned memory. Pieces start
  // at multiples of 4 tokens.
  static __device__ __forceinline__ bool bulk_scales(const Arguments& args) {
    if constexpr (!Tiling::kKeyScales) return true;
    return args.k_scale_stride == 1 && reinterpret_cast<uint64_t>(args.k_scale) % 16 == 0;
  }

  // Arrivals of load at k_full.
  static __device__ __forceinline__ int k_arrivals(const Arguments& args) {
    return bulk_scales(args) ? 1 : 1 + kWarpSize;
  }

  // The stages of a piece, then empty ones up to a multiple of kAligned.
  static __device__ __forceinline__ void load_k(const ptx::TensorMap& k_map,
                                                const Arguments& args,
                                                const Task& task,
                                                Place,
                                                StageRing& ring,
                                                Storage& shared) {
    const bool bulk = bulk_scales(args);
    for (uint32_t done = 0; done < Tiling::padded(task.length);
         done += kStageRows, ring.advance()) {
      const uint32_t k_full = ptx::shared_address(&shared.k_full[ring.stage]);
      const int token = task.first + static_cast<int>(min(done, task.length));
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_empty[ring.stage]), ring.parity ^ 1);
      if (done >= task.length) {
        ptx::mbarrier_arrive_if(k_full, threadIdx.x % kWarpSize == 0);
      } else if (threadIdx.x % kWarpSize == 0) {
        load_stage(k_map, args, token, bulk, k_full, ring.stage, shared);
      }
      if (!bulk) load_scales(args, token, k_full, ring.stage, shared);
      __syncwarp();  // or lane 0, which alone loads, could get two phases ahead of the others
    }
  }

  // By one thread: keys, and their scales if they come in bulk.
  static __device__ __forceinline__ void load_stage(const ptx::TensorMap& k_map,
                                                    const Arguments& args,
                                                    int token,
                                                    bool bulk,
                                                    uint32_t k_full,
                                                    int stage,
                                                    Storage& shared) {
    // Bulk copies move 4 scales or more; the last ones of a ragged end come by hand.
    const int count = Tiling::kKeyScales && bulk ? min(kStageRows, args.tokens - token) : 0;
#pragma unroll 1
    for (int row = count / 4 * 4; row < count; row++)
      shared.k_scale[stage][row] = args.k_scale[token + row];
    if (count % 4 != 0) ptx::fence_proxy_async_shared();  // bulk copies will write here again
    ptx::mbarrier_arrive_expect_tx(k_full, Tiling::kKBytes + count / 4 * 16);
#pragma unroll
    for (int first = 0; first < kRowBytes; first += kPanelBytes)
#pragma unroll
      for (int row = 0; row < kStageRows; row += Tiling::kBoxRows)
        ptx::cp_async_bulk_tensor_2d_load(ptx::shared_address(shared.k[stage]) +
                                              first * kStageRows + row * kPanelBytes,
                                          &k_map, first, token + row, k_full);
    if (count >= 4)
      ptx::cp_async_bulk_load(ptx::shared_address(shared.k_scale[stage]), args.k_scale + token,
                              count / 4 * 16, k_full);
  }

  // By a warp: scales at any address and stride.
  static __device__ __forceinline__ void load_scales(
      const Arguments& args, int token, uint32_t k_full, int stage, Storage& shared) {
    const uint32_t target = ptx::shared_address(shared.k_scale[stage]);
#pragma unroll 1
    for (int row = threadIdx.x % kWarpSize; row < kStageRows; row += kWarpSize) {
      const bool exists = row < args.tokens - token;
      const float* source = args.k_scale + (exists ? (token + row) * args.k_scale_stride : 0);
      ptx::cp_async_4(target + row * 4, source, exists ? 4 : 0);
    }
    ptx::cp_async_mbarrier_arrive_noinc(k_full);
  }
};

}  // namespace mqa::score
