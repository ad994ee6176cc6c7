// The warps that feed math: q, k and k scales, weights, and what is to be known of rows.
#pragma once

#include "common/logits.cuh"
#include "common/windows.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "score/clean.cuh"
#include "score/range.cuh"
#include "score/storage.cuh"

namespace mqa::score {

// The barrier that all warps have to know before they wait for the others, by one thread.
template <typename Tiling>
__device__ __forceinline__ void prepare_first(const ptx::TensorMap& q_map,
                                              const ptx::TensorMap& k_map,
                                              typename Tiling::Storage& shared) {
  if (threadIdx.x != kPreparingWarp * kWarpSize) return;
  ptx::mbarrier_init(ptx::shared_address(&shared.range_known), 2 * ptx::kWarpArrivals);
  ptx::prefetch_tensormap(&q_map);
  ptx::prefetch_tensormap(&k_map);
}

template <typename Tiling, typename Source>
struct Feed {
  using Arguments = typename Source::Arguments;
  using Task = typename Source::Task;
  using Logit = typename Tiling::Logit;
  using Storage = typename Tiling::Storage;
  using StageRing = typename Tiling::StageRing;
  static constexpr auto kRows = Tiling::kRows;
  static constexpr auto kBlock = Tiling::kBlock;
  static constexpr auto kBlockColumns = Tiling::kBlockColumns;
  static constexpr auto kSets = Tiling::kSets;
  static constexpr auto kQBytes = Tiling::kQBytes;
  static constexpr auto kHeads = Tiling::kHeads;

  // What load, rows and weights do: for every block of this CTA's range that has tokens for it,
  // hand over this warp's part. They share the walk, so that its code is fetched once. Blocks are
  // looked at a warp at a time: empty ones cost next to nothing. While a schedule is on its way, those
  // that have time look at blocks that may turn out to be theirs, which brings the code and what it
  // reads nearer.
  static __device__ __forceinline__ void feed(int warp,
                                              const ptx::TensorMap& q_map,
                                              const ptx::TensorMap& k_map,
                                              const Arguments& args,
                                              Storage& shared) {
    Feeder& feeder = shared.feeders[warp - kMathWarps];
    Cut(&range)[2] = feeder.range;
    // The first of the blocks that this warp looks at, or what comes before it is known.
    constexpr int kGuess = -2, kBegin = -1;
    // Load goes on at once when the schedule is there.
    int base = args.schedule == nullptr || warp == kLoadWarp ? kBegin : kGuess;
    BlockRing ring;
    StageRing stages;
    while (true) {
      // Opaque, or the compiler would make copies of the code between.
      const int guess = ptx::opaque(base) == kGuess;
      if (ptx::opaque(base) == kBegin) base = begin_range(args, shared, range);
      if (ptx::opaque(guess)) base = look_around(args, range);
      if (!guess && base > Source::last_block(args, range)) break;
      const int lane = threadIdx.x % kWarpSize;
      if (lane == 0) feeder.base = base;
      Found own{};
      if (base + lane <= Source::last_block(args, range)) own = Source::find(args, range, base);
      feeder.found[lane] = own;
      __syncwarp();
      if (ptx::opaque(guess)) {
        base = kBegin;
        continue;
      }
      hand_over(warp, __ballot_sync(kAllLanes, own.length > 0), q_map, k_map, args, ring, stages,
                shared);
      base = feeder.base + kWarpSize;
      __syncwarp();  // lane 0 will write it
    }
    if (warp == kLoadWarp) Clean<Tiling, Source>::loads_are_out(shared);
    wait_block(ring, shared);
    if (warp == kRowsWarp && threadIdx.x % kWarpSize == 0) shared.piece[ring.stage()] = Piece{};
    __syncwarp();
    const uint32_t arrivals = warp == kLoadWarp   ? 1
                              : warp == kRowsWarp ? ptx::kWarpArrivals
                                                  : kWarpSize;
    ptx::mbarrier_arrive_if(ptx::shared_address(&shared.q_full[ring.stage()]),
                            threadIdx.x % kWarpSize < arrivals);
  }

  // Waits for this CTA's range, copies it, and returns its first block.
  static __device__ __forceinline__ int begin_range(const Arguments& args,
                                                    Storage& shared,
                                                    Cut (&range)[2]) {
    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.range_known), 0);
    if (threadIdx.x % kWarpSize < 2)
      range[threadIdx.x % kWarpSize] = shared.cuts.cuts[threadIdx.x % kWarpSize];
    __syncwarp();
    return Source::first_block(range);
  }

  // Before that, all blocks are the range; returns one that is likely to be this CTA's.
  static __device__ __forceinline__ int look_around(const Arguments& args, Cut (&range)[2]) {
    if (threadIdx.x % kWarpSize == 0) range[0] = {0, 0}, range[1] = {Source::groups(args), 0};
    __syncwarp();
    return Source::likely_block(args);
  }

  // This warp's part of the blocks it looked at that have their bit of `left` set.
  static __device__ __forceinline__ void hand_over(int warp,
                                                   uint32_t left,
                                                   const ptx::TensorMap& q_map,
                                                   const ptx::TensorMap& k_map,
                                                   const Arguments& args,
                                                   BlockRing& ring,
                                                   StageRing& stages,
                                                   Storage& shared) {
    for (; left != 0; left &= left - 1) {
      const int lane = __ffs(left) - 1;
      const Feeder& feeder = shared.feeders[warp - kMathWarps];
      const Task task = Source::task(args, feeder.found[lane], feeder.base + lane);
      if (warp == kLoadWarp) {
        const auto place = Source::look_up(args, task);
        wait_block(ring, shared);
        if constexpr (Tiling::kMathBringsQ) {
          // Math loads q itself.
          ptx::mbarrier_arrive_if(ptx::shared_address(&shared.q_full[ring.stage()]),
                                  threadIdx.x % kWarpSize == 0);
        } else {
          load_q(q_map, task, ring, shared);
        }
        Source::load_k(k_map, args, task, place, stages, shared);
      } else {
        wait_block(ring, shared);
        if constexpr (Tiling::kScaled) {
          if (warp == kWeightsWarp) load_q_scales(args, task.row, ring, shared);
        }
        if (warp == kRowsWarp) {
          describe_rows(args, task, ring, shared);
        } else if (args.weights_are_bf16) {
          load_weights<__nv_bfloat16>(args, task.row, ring, shared);
        } else if constexpr (Tiling::kHalvesWeights) {
          load_weights<float>(args, task.row, ring, shared);
        } else {
          copy_weights(args, task.row, ring, shared);
        }
      }
      ring.advance();
    }
  }

  // Waits until math is through with the block before the last one.
  static __device__ __forceinline__ void wait_block(BlockRing ring, Storage& shared) {
    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.q_empty[ring.stage()]),
                              ring.parity() ^ 1);
  }

  // Of a block of few rows, some of the columns may be enough.
  static __device__ __forceinline__ void load_q(const ptx::TensorMap& q_map,
                                                const Task& task,
                                                BlockRing ring,
                                                Storage& shared) {
    if (threadIdx.x % kWarpSize != 0) return;
    constexpr int kBox = Tiling::kQBoxRows, kBoxes = kBlock / kBox, kBytes = kQBytes / kBoxes;
    const uint32_t q_full = ptx::shared_address(&shared.q_full[ring.stage()]);
    const int boxes = min(ceil_div(task.rows, kBox), kBoxes);
    ptx::mbarrier_arrive_expect_tx(q_full, boxes * kBytes);
#pragma unroll 1
    for (int i = 0; i < boxes; i++)
      ptx::cp_async_bulk_tensor_3d_load(ptx::shared_address(shared.q[ring.stage()]) + i * kBytes,
                                        &q_map, 0, Tiling::kPaired ? task.row + i * kBox : 0,
                                        Tiling::kPaired ? 0 : task.row + i * kBox, q_full);
  }

  static __device__ __forceinline__ void describe_rows(const Arguments& args,
                                                       const Task& task,
                                                       BlockRing ring,
                                                       Storage& shared) {
    const int lane = threadIdx.x % kWarpSize;
    const Logits<Logit> logits = Source::logits(args);
    const auto windows = Source::windows(args);
    Row* rows = shared.rows[ring.stage()];
#pragma unroll 1
    for (int row = lane; row < kBlock; row += kWarpSize)
      rows[row] = describe_row(logits, windows, task, row);
    __syncwarp();
    const int set = lane % kSets;
    const Columns columns = describe_columns(&rows[set * kRows]);
    if (lane < kSets) shared.columns[ring.stage()][lane] = columns;
    const int end = task.first + static_cast<int>(task.length);
    const bool used = max(columns.first, task.first) < min(columns.end, end);
    Piece piece{task.first, task.length, Tiling::kTurns, 0, task.row};
    const uint32_t sets = __ballot_sync(kAllLanes, used) & ((1 << kSets) - 1);
    if constexpr (Tiling::kSharesOut) share_out(sets, piece);
    if (lane == 0) shared.piece[ring.stage()] = piece;
    ptx::mbarrier_arrive_warp(ptx::shared_address(&shared.q_full[ring.stage()]));
  }

  static __device__ __forceinline__ Columns describe_columns(const Row* rows) {
    Columns columns{0x7fffffff, 0, 0, 0x7fffffff};
#pragma unroll 1
    for (int i = 0; i < kRows; i++) {
      const int first = rows[i].start, end = first + static_cast<int>(rows[i].length);
      columns.whole_first = max(columns.whole_first, first);
      columns.whole_end = min(columns.whole_end, end);
      if (first >= end) continue;
      columns.first = min(columns.first, first);
      columns.end = max(columns.end, end);
    }
    return columns;
  }

  // If the piece's tokens belong to one or two of the four sets of columns alone, more warpgroups
  // take each and split the tiles. Bit i of `used`: set i has some.
  static __device__ __forceinline__ void share_out(uint32_t used, Piece& piece) {
    if (__popc(used) == 1) {
      piece.groups = 4;
      piece.base = __ffs(used) - 1;
    } else if (used == 0b0011 || used == 0b1100) {
      piece.groups = 2;
      piece.base = used == 0b0011 ? 0 : 2;
    }
  }

  // Row `i` of a block; one that is not the task's has no tokens.
  template <typename RowWindows>
  static __device__ __forceinline__ Row
  describe_row(const Logits<Logit>& logits, const RowWindows& windows, const Task& task, int i) {
    const int row = task.row + i;
    Window window = windows[row];
    if (i >= task.rows) window.end = 0;
    return score::describe_row(logits, window, row);
  }

  // Offset in elements of a column's weight; of some weight that exists if the row does not.
  static __device__ __forceinline__ int64_t weight_at(const Arguments& args,
                                                      int first,
                                                      int column) {
    const int row = min(first + Tiling::row_of(column), args.rows - 1);
    return row * args.weights_row_stride + Tiling::head_of(column) * args.weights_head_stride;
  }

  static __device__ __forceinline__ bool row_exists(const Arguments& args, int first, int column) {
    return first + Tiling::row_of(column) < args.rows;
  }

  // Block scales of the block's queries, in the order that tensor memory takes; weights' arrivals
  // tell of them. Rows that do not exist get ones.
  static __device__ __forceinline__ void load_q_scales(const Arguments& args,
                                                       int first,
                                                       BlockRing ring,
                                                       Storage& shared) {
    uint32_t* target = reinterpret_cast<uint32_t*>(shared.q_scales[ring.stage()]);
#pragma unroll 2
    for (int column = threadIdx.x % kWarpSize; column < sizeof(shared.q_scales[0]) / 4;
         column += kWarpSize) {
      const bool exists = column < kBlockColumns && row_exists(args, first, column);
      const int row = first + (exists ? Tiling::row_of(column) : 0);
      const uint32_t word = args.q_scale[row * args.q_scale_row_stride +
                                         Tiling::head_of(column) * args.q_scale_head_stride];
      target[Tiling::scale_word_of(column)] = exists ? word : 0x7f7f7f7f;
    }
    ptx::fence_proxy_async_shared();
  }

  // Weights of the block from `row` on; zeros for rows that do not exist. Every lane arrives.
  static __device__ __forceinline__ void copy_weights(const Arguments& args,
                                                      int row,
                                                      BlockRing ring,
                                                      Storage& shared) {
    const uint32_t target = ptx::shared_address(shared.weights[ring.stage()]);
#pragma unroll 4
    for (int column = ptx::lane_read_anew(); column < kBlockColumns; column += kWarpSize)
      ptx::cp_async_4(target + column * 4,
                      static_cast<const float*>(args.weights) + weight_at(args, row, column),
                      row_exists(args, row, column) ? 4 : 0);
    ptx::cp_async_mbarrier_arrive_noinc(ptx::shared_address(&shared.q_full[ring.stage()]));
  }

  // The same through registers, where they are not what math takes.
  template <typename Weight>
  static __device__ __forceinline__ void load_weights(const Arguments& args,
                                                      int row,
                                                      BlockRing ring,
                                                      Storage& shared) {
    constexpr int kBatch = kBlockColumns % 128 == 0 ? 4 : 2;  // loads on their way at once
    const Weight* weights = static_cast<const Weight*>(args.weights);
#pragma unroll 1
    for (int first = threadIdx.x % kWarpSize; first < kBlockColumns; first += kBatch * kWarpSize) {
      Weight loaded[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; i++)
        loaded[i] = weights[weight_at(args, row, first + i * kWarpSize)];
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        const int column = first + i * kWarpSize;
        float weight = static_cast<float>(loaded[i]);
        if (Tiling::kHalvesWeights && Tiling::doubled(column % Tiling::kColumns / 2))
          weight *= 0.5f;
        shared.weights[ring.stage()][column] = row_exists(args, row, column) ? weight : 0.0f;
      }
    }
    ptx::mbarrier_arrive(ptx::shared_address(&shared.q_full[ring.stage()]));
  }
};

}  // namespace mqa::score
