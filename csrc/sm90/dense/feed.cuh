// The warps that feed math: q, k and k scales, weights, and what is to be known of rows.
#pragma once

#include "common/logits.cuh"
#include "common/windows.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/dense/range.cuh"
#include "sm90/dense/storage.cuh"

namespace mqa::sm90 {

template <typename Tiling>
struct Feed {
  using Logit = typename Tiling::Logit;
  using Storage = typename Tiling::Storage;
  using StageRing = typename Tiling::StageRing;
  using BlockRing = typename Tiling::BlockRing;
  static constexpr auto kRows = Tiling::kRows;
  static constexpr auto kBlock = Tiling::kBlock;
  static constexpr auto kAligned = Tiling::kAligned;
  static constexpr auto kBoxRows = Tiling::kBoxRows;
  static constexpr auto kQBytes = Tiling::kQBytes;
  static constexpr auto kKBytes = Tiling::kKBytes;
  static constexpr auto kHeads = Tiling::kHeads;
  static constexpr auto kDim = Tiling::kDim;
  static constexpr auto kStageRows = Tiling::kStageRows;

  // What load, rows and weights do: for every block of this CTA's range that has tokens for it,
  // hand over this warp's part. They share the walk, so that its code is fetched once. Blocks are
  // looked at a warp at a time: empty ones cost next to nothing.
  static __device__ __forceinline__ void feed(int warp,
                                              const ptx::TensorMap& q_map,
                                              const ptx::TensorMap& k_map,
                                              const DenseArguments& args,
                                              Storage& shared) {
    const Windows windows = Tiling::windows_of(args);
    // Kept in shared memory: these warps are short of registers.
    Cut(&range)[2] = shared.range[warp - kMathWarps];
    {
      Cut cuts[2];
      Range<Tiling>::find_range(args, windows, shared, cuts);
      if (threadIdx.x % kWarpSize == 0) range[0] = cuts[0], range[1] = cuts[1];
      __syncwarp();
    }
    const int last = min(range[1].block, ceil_div(args.rows, kBlock) - 1);
    BlockRing ring;
    StageRing stages;
    for (int base = range[0].block; base <= last; base += kWarpSize) {
      const int mine = base + static_cast<int>(threadIdx.x) % kWarpSize;
      const Piece found =
          mine <= last ? Range<Tiling>::piece_of(args, windows, range, mine) : Piece{};
      uint32_t left = __ballot_sync(kAllLanes, found.length > 0);
      for (; left != 0; left &= left - 1) {
        const int lane = __ffs(left) - 1;
        const Piece piece{__shfl_sync(kAllLanes, found.first, lane),
                          __shfl_sync(kAllLanes, found.length, lane), 1, 0};
        wait_block(ring, shared);
        if (warp == kLoadWarp) {
          load_q(q_map, base + lane, args.rows - (base + lane) * kBlock, ring, shared);
          load_k(k_map, args, piece, stages, shared);
        } else if (warp == kRowsWarp) {
          describe_rows(args, windows, base + lane, piece, ring, shared);
        } else if (args.weights_are_bf16) {
          load_bf16_weights(args, base + lane, ring, shared);
        } else {
          load_f32_weights(args, base + lane, ring, shared);
        }
        ring.advance();
      }
    }
    wait_block(ring, shared);
    if (warp == kRowsWarp && threadIdx.x % kWarpSize == 0) shared.piece[ring.stage] = Piece{};
    __syncwarp();
    const uint32_t arrivals = warp == kLoadWarp   ? 1
                              : warp == kRowsWarp ? ptx::kWarpArrivals
                                                  : kWarpSize;
    ptx::mbarrier_arrive_if(ptx::shared_address(&shared.q_full[ring.stage]),
                            threadIdx.x % kWarpSize < arrivals);
  }

  // Waits until math is through with the block before the last one.
  static __device__ __forceinline__ void wait_block(BlockRing ring, Storage& shared) {
    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.q_empty[ring.stage]), ring.parity ^ 1);
  }

  // Of a block of which `rows` rows exist, half the columns may be enough.
  static __device__ __forceinline__ void load_q(
      const ptx::TensorMap& q_map, int block, int rows, BlockRing ring, Storage& shared) {
    if (threadIdx.x % kWarpSize != 0) return;
    constexpr int kHalf = kBlock / 2, kHalfBytes = kQBytes / 2;
    const uint32_t q_full = ptx::shared_address(&shared.q_full[ring.stage]);
    const int halves = rows <= kHalf ? 1 : 2;
    ptx::mbarrier_arrive_expect_tx(q_full, halves * kHalfBytes);
#pragma unroll 1
    for (int i = 0; i < halves; i++)
      ptx::cp_async_bulk_tensor_3d_load(ptx::shared_address(shared.q[ring.stage]) + i * kHalfBytes,
                                        &q_map, 0, 0, block * kBlock + i * kHalf, q_full);
  }

  // The stages of a piece, then empty ones up to a multiple of kAligned.
  static __device__ __forceinline__ void load_k(const ptx::TensorMap& k_map,
                                                const DenseArguments& args,
                                                Piece piece,
                                                StageRing& ring,
                                                Storage& shared) {
    const bool bulk = Tiling::bulk_scales(args);
    for (uint32_t done = 0; done < Tiling::padded(piece.length);
         done += kStageRows, ring.advance()) {
      const uint32_t k_full = ptx::shared_address(&shared.k_full[ring.stage]);
      const int token = piece.first + static_cast<int>(min(done, piece.length));
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_empty[ring.stage]), ring.parity ^ 1);
      if (done >= piece.length) {
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
                                                    const DenseArguments& args,
                                                    int token,
                                                    bool bulk,
                                                    uint32_t k_full,
                                                    int stage,
                                                    Storage& shared) {
    // Bulk copies move 4 scales or more; the last ones of a ragged end come by hand.
    const int count = bulk ? min(kStageRows, args.tokens - token) : 0;
#pragma unroll 1
    for (int row = count / 4 * 4; row < count; row++)
      shared.k_scale[stage][row] = args.k_scale[token + row];
    if (count % 4 != 0) ptx::fence_proxy_async_shared();  // bulk copies will write here again
    ptx::mbarrier_arrive_expect_tx(k_full, kKBytes + count / 4 * 16);
#pragma unroll
    for (int row = 0; row < kStageRows; row += kBoxRows)
      ptx::cp_async_bulk_tensor_2d_load(ptx::shared_address(shared.k[stage]) + row * kDim, &k_map,
                                        0, token + row, k_full);
    if (count >= 4)
      ptx::cp_async_bulk_load(ptx::shared_address(shared.k_scale[stage]), args.k_scale + token,
                              count / 4 * 16, k_full);
  }

  // By a warp: scales at any address and stride.
  static __device__ __forceinline__ void load_scales(
      const DenseArguments& args, int token, uint32_t k_full, int stage, Storage& shared) {
    const uint32_t target = ptx::shared_address(shared.k_scale[stage]);
#pragma unroll 1
    for (int row = threadIdx.x % kWarpSize; row < kStageRows; row += kWarpSize) {
      const bool exists = row < args.tokens - token;
      const float* source = args.k_scale + (exists ? (token + row) * args.k_scale_stride : 0);
      ptx::cp_async_4(target + row * 4, source, exists ? 4 : 0);
    }
    ptx::cp_async_mbarrier_arrive_noinc(k_full);
  }

  static __device__ __forceinline__ void describe_rows(const DenseArguments& args,
                                                       const Windows& windows,
                                                       int block,
                                                       Piece piece,
                                                       BlockRing ring,
                                                       Storage& shared) {
    const int lane = threadIdx.x % kWarpSize;
    const Logits<Logit> logits = Tiling::logits_of(args);
    Row* rows = shared.rows[ring.stage];
#pragma unroll 1
    for (int row = lane; row < kBlock; row += kWarpSize)
      rows[row] = describe_row(logits, windows, block * kBlock + row);
    __syncwarp();
    const int set = lane % kMathGroups;
    const Columns columns = describe_columns(&rows[set * kRows]);
    if (lane < kMathGroups) shared.columns[ring.stage][lane] = columns;
    const int end = piece.first + static_cast<int>(piece.length);
    const bool used = max(columns.first, piece.first) < min(columns.end, end);
    share_out(__ballot_sync(kAllLanes, used) & ((1 << kMathGroups) - 1), piece);
    if (lane == 0) shared.piece[ring.stage] = piece;
    ptx::mbarrier_arrive_warp(ptx::shared_address(&shared.q_full[ring.stage]));
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

  static __device__ __forceinline__ Row describe_row(const Logits<Logit>& logits,
                                                     const Windows& windows,
                                                     int row) {
    const Window window = windows[row];
    const int2 filled = logits.filled(window);
    const Logit* line = logits.data + row * logits.stride - (logits.compressed ? window.start : 0);
    return {reinterpret_cast<uint64_t>(line), window.start,
            static_cast<uint32_t>(filled.y - filled.x)};
  }

  // Offset in elements of a column's weight; of some weight that exists if the row does not.
  static __device__ __forceinline__ int64_t weight_at(const DenseArguments& args,
                                                      int block,
                                                      int column) {
    const int row = min(block * kBlock + column / kHeads, args.rows - 1);
    return row * args.weights_row_stride + column % kHeads * args.weights_head_stride;
  }

  static __device__ __forceinline__ bool row_exists(const DenseArguments& args,
                                                    int block,
                                                    int column) {
    return block * kBlock + column / kHeads < args.rows;
  }

  // Weights of a block; zeros for rows that do not exist. Every lane arrives.
  static __device__ __forceinline__ void load_f32_weights(const DenseArguments& args,
                                                          int block,
                                                          BlockRing ring,
                                                          Storage& shared) {
    const uint32_t target = ptx::shared_address(shared.weights[ring.stage]);
#pragma unroll 4
    for (int column = threadIdx.x % kWarpSize; column < kBlockColumns; column += kWarpSize)
      ptx::cp_async_4(target + column * 4,
                      static_cast<const float*>(args.weights) + weight_at(args, block, column),
                      row_exists(args, block, column) ? 4 : 0);
    ptx::cp_async_mbarrier_arrive_noinc(ptx::shared_address(&shared.q_full[ring.stage]));
  }

  static __device__ __forceinline__ void load_bf16_weights(const DenseArguments& args,
                                                           int block,
                                                           BlockRing ring,
                                                           Storage& shared) {
    constexpr int kBatch = 4;  // loads on their way at once
    const __nv_bfloat16* weights = static_cast<const __nv_bfloat16*>(args.weights);
#pragma unroll 1
    for (int first = threadIdx.x % kWarpSize; first < kBlockColumns; first += kBatch * kWarpSize) {
      __nv_bfloat16 loaded[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; i++)
        loaded[i] = weights[weight_at(args, block, first + i * kWarpSize)];
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        const int column = first + i * kWarpSize;
        const float weight = __bfloat162float(loaded[i]);
        shared.weights[ring.stage][column] = row_exists(args, block, column) ? weight : 0.0f;
      }
    }
    ptx::mbarrier_arrive(ptx::shared_address(&shared.q_full[ring.stage]));
  }
};

}  // namespace mqa::sm90
