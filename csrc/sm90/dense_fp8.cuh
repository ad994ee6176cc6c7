// logits[s, n] = k_scale[n] * sum_h weights[s, h] * relu(dot(q[s, h], k[n])),  n in the window of s
// Meaning: docs/semantics.md. Why this shape, and what others gave: docs/performance.md.
//
// A CTA takes a range of tasks (query block, KV tokens) and goes through it block by block. A query
// block is 512 / H rows, so 512 columns (row, head) of q stay in shared memory while key stages of
// kStageRows tokens stream past them.
//
//   math     4 warpgroups   each owns 128 columns (128 / H rows); all read the same 64-key tiles:
//                           wgmma, relu, weighted head sum, k scale, one store per logit
//   load     1 warp         q and k by TMA, k scales by bulk copies or cp.async
//   rows     1 warp         windows and result addresses of a block's rows
//   weights  1 warp         weights of a block's rows, by cp.async if they are float32
//   clean    1 warp         -inf outside the windows, by bulk stores
//
//   barrier   filled by                                          arrivals   waited on by
//   q_full    load (tx bytes), rows, weights (every lane)              34   math
//   q_empty   math, a lane of each warp                                16   load, rows, weights
//   k_full    load (tx bytes), its cp.async if scales need them   1 or 33   math
//   k_empty   math, a lane of each warp                                16   load
//
// load, rows and weights go through the same blocks in the same order, each by its own arithmetic,
// and end the sequence with an empty block. Each block's stages are filled up with empty ones to a
// multiple of kAligned, so that the hot loop's stages lie at fixed places. Blocks of few rows use fewer
// columns: then warpgroups share columns and split the tiles.
//
// Writes logits[s, n] for n in the window of s alone, and -inf elsewhere if asked; reads q, k and
// scales of existing rows and tokens alone, whatever windows and schedule hold. Keys past the last
// token are zeros that TMA fills in.
#pragma once

#include "common/logits.cuh"
#include "common/windows.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

namespace mqa::sm90 {

constexpr int kMathGroups = 4;
constexpr int kMathThreads = kMathGroups * 128;
constexpr int kMathWarps = kMathThreads / kWarpSize;
constexpr int kOtherThreads = 128;
constexpr int kThreads = kMathThreads + kOtherThreads;
constexpr int kLoadWarp = kMathWarps, kRowsWarp = kMathWarps + 1;
constexpr int kWeightsWarp = kMathWarps + 2, kCleanWarp = kMathWarps + 3;
constexpr int kColumns = 128;  // of one warpgroup
constexpr int kBlockColumns = kMathGroups * kColumns;
constexpr int kTileRows = 64;    // of one wgmma
constexpr int kAutoSplit = 128;  // tokens of a task where no schedule is given
constexpr int kMathRegisters = 112, kOtherRegisters = 32;
static_assert(kMathRegisters * kMathThreads + kOtherRegisters * 128 <= 96 * kThreads,
              "setmaxnreg hands out what the launch got: 96 a thread");

// Field by field as in mqa/cuda/sm90.py. Strides are in elements.
struct DenseArguments {
  const float* k_scale;
  const void* weights;
  const int32_t* start;
  const int32_t* end;
  const int32_t* schedule;  // [parts + 1, 2] or null
  void* logits;
  int64_t k_scale_stride;
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
  bool weights_are_bf16;
  bool compressed;
  bool clean;
};

// What math needs of a row: where token 0 of its window form lies, and which tokens to write.
struct alignas(16) Row {
  uint64_t origin;  // address of token 0's logit, whether or not it exists
  int32_t start;
  uint32_t length;
};

// What a CTA does of one query block: `length` tokens from `first` on. Loops count in tokens done,
// unsigned, since the end of the last stage may lie past 2^31.
struct Piece {
  int32_t first;
  uint32_t length;
  int32_t groups;  // sets of warpgroups that split the tiles: 1, 2 or 4; 0 ends the sequence
  int32_t base;    // which 128 columns the first of a set has
};

// Tokens of the rows of 128 columns.
struct alignas(16) Columns {
  int32_t first;  // [first, end): that some row has
  int32_t end;
  int32_t whole_first;  // [whole_first, whole_end): that every row has, so that nothing is tested
  int32_t whole_end;
};

template <int kDim, int kBlock, int kStages, int kStageRows>
struct SharedStorage {
  alignas(1024) unsigned char q[2][kBlockColumns * kDim];
  alignas(1024) unsigned char k[kStages][kStageRows * kDim];
  FillStorage fill;
  float weights[2][kBlockColumns];
  float k_scale[kStages][kStageRows];
  Row rows[2][kBlock];
  Piece piece[2];
  Columns columns[2][kMathGroups];
  uint64_t q_full[2], q_empty[2];
  uint64_t k_full[kStages], k_empty[kStages];
  CutStorage<kThreads> cuts;
  Cut range[kOtherThreads / kWarpSize][2];  // each feeding warp's copy of [begin, end)
};

// Where a ring of stages stands.
template <int kDepth>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int steps = 1) {
    stage += steps;
    if (stage >= kDepth) {
      parity ^= stage / kDepth & 1;
      stage %= kDepth;
    }
  }
};

template <int kHeads, int kDim, typename Logit, int kStages, int kStageRows>
struct DenseFp8 {
  static_assert(kHeads % 8 == 0 && kColumns % kHeads == 0, "a warpgroup owns whole rows");
  static_assert(kStageRows % kTileRows == 0, "a stage is whole tiles");

  static constexpr int kRows = kColumns / kHeads;     // of one warpgroup
  static constexpr int kBlock = kMathGroups * kRows;  // of a CTA
  static constexpr int kTiles = kStageRows / kTileRows;
  static constexpr int kBodyTiles = 8;  // of the hot loop
  static constexpr int kBodyStages = kBodyTiles / kTiles;
  static constexpr uint32_t kBody = kBodyTiles * kTileRows;  // tokens
  // Bodies start at ring stages that are multiples of this, so that a body's stages lie in order.
  static constexpr int kAligned = kBodyStages < kStages ? kBodyStages : kStages;
  static constexpr int kOutputs = kRows > 1 ? kRows / 2 : 1;  // logits of a thread and tile
  static constexpr int kBoxRows = kStageRows < 256 ? kStageRows : 256;
  static constexpr int kQBytes = kBlockColumns * kDim;
  static constexpr int kKBytes = kStageRows * kDim;
  static constexpr int kLogitBytes = sizeof(Logit);

  static_assert(kBodyTiles % kTiles == 0 && kStages % kAligned == 0, "a body is whole stages");

  using Storage = SharedStorage<kDim, kBlock, kStages, kStageRows>;
  using StageRing = Ring<kStages>;
  using BlockRing = Ring<2>;

  static __device__ __forceinline__ Windows windows_of(const DenseArguments& args) {
    return {args.start, args.end, args.start_stride, args.end_stride, args.rows, args.tokens};
  }

  static __device__ __forceinline__ Logits<Logit> logits_of(const DenseArguments& args) {
    return {static_cast<Logit*>(args.logits), args.logits_stride, args.width, args.compressed};
  }

  // Warpgroup sets that split the tiles of a block of which `rows` rows exist.
  static __device__ __forceinline__ int groups_for(int rows) {
    return rows <= kRows ? 4 : rows <= 2 * kRows ? 2 : 1;
  }

  // What a block weighs where no schedule is given: a start as much as two tasks.
  static __device__ __forceinline__ Weights weigh(int rows, int tasks) {
    const int counted = kBlock / groups_for(rows);
    return {tasks > 0 ? 1 + 2 * counted : 1, counted, tasks};
  }

  // Whether all threads have to find this CTA's range together; else each warp does that for itself.
  static __device__ __forceinline__ bool range_by_all(const DenseArguments& args) {
    return args.schedule == nullptr && args.rows > kBlock * kWarpSize;
  }

  static __device__ __forceinline__ void find_range_by_all(const DenseArguments& args,
                                                           Storage& shared) {
    find_cuts<kThreads>(windows_of(args), kBlock, kAutoSplit, blockIdx.x, gridDim.x, shared.cuts,
                        weigh);
  }

  // This CTA's range of tasks [cuts[0], cuts[1]): from the schedule, else balanced by cost.
  static __device__ __forceinline__ void find_range(const DenseArguments& args,
                                                    const Windows& windows,
                                                    const Storage& shared,
                                                    Cut (&cuts)[2]) {
    const int part = blockIdx.x, parts = gridDim.x, blocks = ceil_div(args.rows, kBlock);
    if (range_by_all(args)) {
      cuts[0] = shared.cuts.cuts[0], cuts[1] = shared.cuts.cuts[1];
    } else if (args.schedule == nullptr) {
      find_cuts_by_warp(windows, kBlock, kAutoSplit, part, parts, cuts, weigh);
    } else {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int32_t* entry = args.schedule + (part + i) * args.schedule_row_stride;
        cuts[i] = {entry[0], max(entry[args.schedule_column_stride], 0)};
        if (cuts[i].block < 0) cuts[i] = {0, 0};
        if (cuts[i].block >= blocks) cuts[i] = {blocks, 0};
      }
      if (part == 0) cuts[0] = {0, 0};
      if (part == parts - 1) cuts[1] = {blocks, 0};
    }
  }

  // What load, rows and weights do: for every block of this CTA's range that has tokens for it, hand
  // over this warp's part. They share the walk, so that its code is fetched once. Blocks are looked at
  // a warp at a time: empty ones cost next to nothing.
  static __device__ __forceinline__ void feed(int warp,
                                              const ptx::TensorMap& q_map,
                                              const ptx::TensorMap& k_map,
                                              const DenseArguments& args,
                                              Storage& shared) {
    const Windows windows = windows_of(args);
    // Kept in shared memory: these warps are short of registers.
    Cut(&range)[2] = shared.range[warp - kMathWarps];
    {
      Cut cuts[2];
      find_range(args, windows, shared, cuts);
      if (threadIdx.x % kWarpSize == 0) range[0] = cuts[0], range[1] = cuts[1];
      __syncwarp();
    }
    const int last = min(range[1].block, ceil_div(args.rows, kBlock) - 1);
    BlockRing ring;
    StageRing stages;
    for (int base = range[0].block; base <= last; base += kWarpSize) {
      const int mine = base + static_cast<int>(threadIdx.x) % kWarpSize;
      const Piece found = mine <= last ? piece_of(args, windows, range, mine) : Piece{};
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
    const uint32_t q_full = ptx::shared_address(&shared.q_full[ring.stage]);
    ptx::mbarrier_arrive_if(q_full, warp == kWeightsWarp || threadIdx.x % kWarpSize == 0);
  }

  // What a range has of a block, by one thread.
  static __device__ __forceinline__ Piece piece_of(const DenseArguments& args,
                                                   const Windows& windows,
                                                   const Cut (&range)[2],
                                                   int block) {
    const int split = args.schedule == nullptr ? kAutoSplit : kScheduleSplit;
    const Hull hull = hull_of_block(windows, kBlock, block);
    const int splits = hull.splits(split);
    const int from = block == range[0].block ? min(range[0].split, splits) : 0;
    const int to = block == range[1].block ? min(range[1].split, splits) : splits;
    if (from >= to) return {};
    const int first = hull.first + from * split;
    const int end = to == splits ? hull.end : hull.first + to * split;
    return {first, static_cast<uint32_t>(end - first), 1, 0};
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
    const bool bulk = bulk_scales(args);
    for (uint32_t done = 0; done < padded(piece.length); done += kStageRows, ring.advance()) {
      const uint32_t k_full = ptx::shared_address(&shared.k_full[ring.stage]);
      const int token = piece.first + static_cast<int>(min(done, piece.length));
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_empty[ring.stage]), ring.parity ^ 1);
      if (done >= piece.length) {
        ptx::mbarrier_arrive_if(k_full, threadIdx.x % kWarpSize == 0);
      } else if (threadIdx.x % kWarpSize == 0) {
        load_stage(k_map, args, token, bulk, k_full, ring.stage, shared);
      }
      if (!bulk) load_scales(args, token, k_full, ring.stage, shared);
    }
  }

  // Tokens of a piece's stages, the empty ones included.
  static __device__ __forceinline__ uint32_t padded(uint32_t length) {
    constexpr uint32_t kUnit = kAligned * kStageRows;
    return (length + kUnit - 1) / kUnit * kUnit;
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

  // Whether scales come by bulk copies, which want contiguous, 16-byte-aligned memory. Pieces start
  // at multiples of 4 tokens.
  static __device__ __forceinline__ bool bulk_scales(const DenseArguments& args) {
    return args.k_scale_stride == 1 && reinterpret_cast<uint64_t>(args.k_scale) % 16 == 0;
  }

  static __device__ __forceinline__ void describe_rows(const DenseArguments& args,
                                                       const Windows& windows,
                                                       int block,
                                                       Piece piece,
                                                       BlockRing ring,
                                                       Storage& shared) {
    const int lane = threadIdx.x % kWarpSize;
    const Logits<Logit> logits = logits_of(args);
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
    __syncwarp();
    ptx::mbarrier_arrive_if(ptx::shared_address(&shared.q_full[ring.stage]), lane == 0);
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

  // One thread's part of a warpgroup's columns, 2 of every 8, and of its results.
  struct Thread {
    float weights[kColumns / 4];
    int tile_row;     // of a tile's 64 keys, the one whose logits this thread stores
    const Row* rows;  // of those logits

    // Whether relu of this head is taken as x + |x| = 2 relu(x), with half the weight: every other
    // one. Splitting the relus between two pipes pays; the product is the same, and NaN and +0 stay.
    static __device__ __forceinline__ constexpr bool doubled(int i) { return i % 2 == 1; }
  };

  static __device__ __forceinline__ void start_block(const Storage& shared,
                                                     int stage,
                                                     int columns,
                                                     Thread& thread) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
    const float* weights = shared.weights[stage] + columns + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kColumns / 4; i += 2) {
      const float2 pair = *reinterpret_cast<const float2*>(weights + i * 4);
      thread.weights[i] = Thread::doubled(i) ? pair.x * 0.5f : pair.x;
      thread.weights[i + 1] = Thread::doubled(i + 1) ? pair.y * 0.5f : pair.y;
    }
    const int row = columns / kHeads + (kRows > 1 ? lane / 2 % 2 * kOutputs : 0);
    thread.rows = &shared.rows[stage][row];
    thread.tile_row = warp * 16 + lane / 4 + lane % 2 * 8;
  }

  // Sums over this thread's heads: [row][key, of two that are 8 apart].
  static __device__ __forceinline__ void weigh_heads(const float (&dots)[kColumns / 2],
                                                     const Thread& thread,
                                                     float (&sums)[kRows][2]) {
    constexpr int kPerRow = kHeads / 4;
#pragma unroll
    for (int head = 0; head < kPerRow; head++)
#pragma unroll
      for (int row = 0; row < kRows; row++)
#pragma unroll
        for (int key = 0; key < 2; key++) {
          const int i = row * kPerRow + head;
          const float x = dots[i / 2 * 4 + key * 2 + i % 2];
          const float relu = Thread::doubled(i) ? x + fabsf(x) : ptx::max_nan(x, 0.0f);
          // A chain starts from +0: a negative weight times 0 must not leave -0.
          sums[row][key] = fmaf(thread.weights[i], relu, head == 0 ? 0.0f : sums[row][key]);
        }
  }

  // Adds the four lanes that share a key, (0 + 1) + (2 + 3), leaving each with the rows it stores:
  // lane bit 0 picks the key, bit 1 the half of the rows.
  static __device__ __forceinline__ void reduce(const float (&sums)[kRows][2],
                                                float (&totals)[kOutputs]) {
    const bool key = threadIdx.x & 1, half = threadIdx.x & 2;
    float pairs[kRows];
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      const float other = __shfl_xor_sync(kAllLanes, key ? sums[row][0] : sums[row][1], 1);
      pairs[row] = (key ? sums[row][1] : sums[row][0]) + other;
    }
    if constexpr (kRows == 1) {
      totals[0] = pairs[0] + __shfl_xor_sync(kAllLanes, pairs[0], 2);
    } else {
#pragma unroll
      for (int i = 0; i < kOutputs; i++) {
        const float other = __shfl_xor_sync(kAllLanes, half ? pairs[i] : pairs[i + kOutputs], 2);
        totals[i] = (half ? pairs[i + kOutputs] : pairs[i]) + other;
      }
    }
  }

  // Where a thread's logits of one key go: tests windows.
  struct TestedStore {
    const Row* rows;
    int token;

    __device__ __forceinline__ void operator()(int i, Logit logit) const {
      const Row row = rows[i];
      if (static_cast<uint32_t>(token - row.start) < row.length)
        ptx::st_global(row.origin + static_cast<int64_t>(token) * kLogitBytes, logit);
    }
  };

  // The same where every row has the token. Addresses stay in registers if there are few.
  struct WholeStore {
    static constexpr bool kKeep = kOutputs <= 2;
    const Row* rows;
    uint64_t at[kKeep ? kOutputs : 1];  // of this thread's key in the first tile
    int token;                          // that key

    __device__ __forceinline__ void advance(int tokens) {
      token += tokens;
      if constexpr (kKeep) {
#pragma unroll
        for (int i = 0; i < kOutputs; i++)
          at[i] += tokens * kLogitBytes;
      }
    }
    __device__ __forceinline__ WholeStore(const Row* rows, int token) : rows(rows), token(token) {
      if constexpr (kKeep) {
#pragma unroll
        for (int i = 0; i < kOutputs; i++)
          at[i] = address(i, token);
      }
    }
    __device__ __forceinline__ uint64_t address(int i, int token) const {
      return rows[i].origin + static_cast<int64_t>(token) * kLogitBytes;
    }
    __device__ __forceinline__ void operator()(int i, int tile, Logit logit) const {
      if constexpr (kKeep) {
        ptx::st_global(at[i] + tile * kTileRows * kLogitBytes, logit);
      } else {
        ptx::st_global(address(i, token + tile * kTileRows), logit);
      }
    }
  };

  // 64 keys against this warpgroup's columns. `k` and `q` are descriptors. `release` is called once the
  // stage is read.
  template <typename Release, typename Store>
  static __device__ __forceinline__ void tile(uint64_t q,
                                              uint64_t k,
                                              const float* k_scale_at,
                                              const Thread& thread,
                                              Release release,
                                              Store store) {
    float dots[kColumns / 2];
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 32; step++)
      ptx::wgmma_m64n128k32_e4m3(dots, k + step * 2, q + step * 2, step == 0);
    ptx::wgmma_commit_group();
    const float k_scale = *k_scale_at;
    ptx::wgmma_wait_group_0(dots);
    release();
    float sums[kRows][2], totals[kOutputs];
    weigh_heads(dots, thread, sums);
    reduce(sums, totals);
    // + 0.0 so that no scale turns a zero into -0.
#pragma unroll
    for (int i = 0; i < kOutputs; i++)
      store(i, round_to<Logit>(fmaf(totals[i], k_scale, 0.0f)));
  }

  // What a warpgroup knows of its block.
  struct Block {
    uint64_t q;  // descriptor of its columns
    int first;
    uint32_t length;
    uint32_t groups;  // sets of warpgroups that split the tiles
    uint32_t turn;    // which of these it is in
    uint32_t begin;   // tokens from `first` that its columns have
    uint32_t end;
    uint32_t whole_begin;  // tokens from `first` that need no tests; none if warpgroups split tiles
    uint32_t whole_end;

    // Whether `count` tokens from the `done`th on need no tests.
    __device__ __forceinline__ bool whole(uint32_t done, uint32_t count) const {
      return done >= whole_begin && done + count <= whole_end;
    }
    // Whether the tile from the `done`th token on is this warpgroup's to do.
    __device__ __forceinline__ bool mine(uint32_t done) const {
      return done < end && done + kTileRows > begin && (done / kTileRows & (groups - 1)) == turn;
    }
    // How many times kBody tokens from the `done`th on need none.
    __device__ __forceinline__ uint32_t bodies(uint32_t done) const {
      return whole(done, kBody) ? (whole_end - done) / kBody : 0;
    }
  };

  // The hot loop: `bodies` times kBody tokens, whole stages with nothing to decide.
  static __device__ __forceinline__ void whole_stages(Storage& shared,
                                                      StageRing& ring,
                                                      uint32_t bodies,
                                                      int token,
                                                      const Block& block,
                                                      const Thread& thread) {
    const bool arrives = threadIdx.x % kWarpSize == 0;
    WholeStore store(thread.rows, token + thread.tile_row);
#pragma unroll 1
    for (; bodies > 0; bodies--) {
      // Where a body is the whole ring, its stages lie at fixed places.
      const int from = kAligned == kStages ? 0 : ring.stage;
      const uint64_t k = ptx::matrix_descriptor<kDim>(ptx::shared_address(shared.k[from]));
      const uint32_t k_full = ptx::shared_address(&shared.k_full[from]);
      const uint32_t k_empty = ptx::shared_address(&shared.k_empty[from]);
      const float* k_scales = shared.k_scale[from] + thread.tile_row;
#pragma unroll
      for (int i = 0; i < kBodyTiles; i++) {
        const int stage = i / kTiles % kStages, slot = i % (kTiles * kStages);
        const uint32_t parity = ring.parity ^ (i / (kTiles * kStages) & 1);
        if (i % kTiles == 0) ptx::mbarrier_wait_parity(k_full + stage * 8, parity);
        tile(
            block.q, k + slot * (kTileRows * kDim / 16), k_scales + slot * kTileRows, thread,
            [&] {
              if (i % kTiles == kTiles - 1) ptx::mbarrier_arrive_if(k_empty + stage * 8, arrives);
            },
            [&](int output, Logit logit) { store(output, i, logit); });
      }
      store.advance(kBody);
      ring.advance(kBodyStages);
    }
  }

  // One stage of which only tiles that have tokens and are this warpgroup's turn are done.
  static __device__ __forceinline__ void any_stage(
      Storage& shared, StageRing ring, uint32_t done, const Block& block, const Thread& thread) {
    constexpr int kPair = 2;
    static_assert(kTiles % kPair == 0, "tiles come in pairs");
    constexpr uint64_t kStep = kTileRows * kDim / 16;
    const uint64_t k = ptx::matrix_descriptor<kDim>(ptx::shared_address(shared.k[ring.stage]));
    const float* k_scales = shared.k_scale[ring.stage] + thread.tile_row;
    const int token = block.first + static_cast<int>(done) + thread.tile_row;
    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_full[ring.stage]), ring.parity);
#pragma unroll 1
    for (int i = 0; i < kTiles && done + i * kTileRows < block.length; i += kPair) {
      if (block.whole(done + i * kTileRows, kPair * kTileRows)) {
        const WholeStore store(thread.rows, token + i * kTileRows);
#pragma unroll
        for (int j = 0; j < kPair; j++)
          tile(
              block.q, k + (i + j) * kStep, k_scales + (i + j) * kTileRows, thread, [] {},
              [&](int output, Logit logit) { store(output, j, logit); });
        continue;
      }
#pragma unroll 1
      for (int j = i; j < i + kPair && done + j * kTileRows < block.length; j++)
        if (block.mine(done + j * kTileRows))
          tile(
              block.q, k + j * kStep, k_scales + j * kTileRows, thread, [] {},
              TestedStore{thread.rows, token + j * kTileRows});
    }
    ptx::mbarrier_arrive_if(ptx::shared_address(&shared.k_empty[ring.stage]),
                            threadIdx.x % kWarpSize == 0);
  }

  // A value that all lanes have, in a form that the compiler knows to be uniform.
  template <typename T>
  static __device__ __forceinline__ T uniform(T value) {
    return __shfl_sync(kAllLanes, value, 0);
  }

  static __device__ __forceinline__ void math(Storage& shared) {
    const uint32_t group = uniform(threadIdx.x / 128);
    BlockRing blocks;
    StageRing stages;
    Thread thread;
    while (true) {
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.q_full[blocks.stage]), blocks.parity);
      const Piece& piece = shared.piece[blocks.stage];
      Block block;
      block.first = uniform(piece.first);
      block.length = uniform(piece.length);
      block.groups = uniform(piece.groups);
      if (block.groups == 0) break;
      // With `groups` sets of warpgroups, each set has the 4 / groups sets of columns from `base` on.
      const uint32_t size = kMathGroups / block.groups;
      const uint32_t set = uniform(piece.base) + group % size;
      block.turn = group / size;
      block.q = ptx::matrix_descriptor<kDim>(ptx::shared_address(shared.q[blocks.stage]) +
                                             set * kColumns * kDim);
      const Columns& columns = shared.columns[blocks.stage][set];
      auto within = [&](int token, uint32_t limit) {
        return min(static_cast<uint32_t>(max(uniform(token) - block.first, 0)), limit);
      };
      block.begin = within(columns.first, block.length);
      block.end = within(columns.end, block.length);
      block.whole_begin = within(columns.whole_first, block.length);
      block.whole_end = within(columns.whole_end, block.groups == 1 ? block.length : 0);
      start_block(shared, blocks.stage, set * kColumns, thread);
      for (uint32_t done = 0; done < padded(block.length);) {
        const uint32_t bodies = stages.stage % kAligned == 0 ? block.bodies(done) : 0;
        if (bodies > 0) {
          whole_stages(shared, stages, bodies, block.first + static_cast<int>(done), block, thread);
          done += bodies * kBody;
        } else {
          any_stage(shared, stages, done, block, thread);
          done += kStageRows;
          stages.advance();
        }
      }
      __syncwarp();
      ptx::mbarrier_arrive_if(ptx::shared_address(&shared.q_empty[blocks.stage]),
                              threadIdx.x % kWarpSize == 0);
      blocks.advance();
    }
  }

  static __device__ __forceinline__ void prepare(const ptx::TensorMap& q_map,
                                                 const ptx::TensorMap& k_map,
                                                 const DenseArguments& args,
                                                 Storage& shared) {
    if (threadIdx.x != 0) return;
    ptx::prefetch_tensormap(&q_map);
    ptx::prefetch_tensormap(&k_map);
    for (int i = 0; i < 2; i++) {
      ptx::mbarrier_init(ptx::shared_address(&shared.q_full[i]), 2 + kWarpSize);
      ptx::mbarrier_init(ptx::shared_address(&shared.q_empty[i]), kMathWarps);
    }
    for (int i = 0; i < kStages; i++) {
      ptx::mbarrier_init(ptx::shared_address(&shared.k_full[i]),
                         bulk_scales(args) ? 1 : 1 + kWarpSize);
      ptx::mbarrier_init(ptx::shared_address(&shared.k_empty[i]), kMathWarps);
    }
    ptx::fence_mbarrier_init();
  }
};

template <int kHeads, int kDim, typename Logit, int kStages, int kStageRows, int kSharedBytes>
__global__ void __launch_bounds__(kThreads, 1)
    dense_fp8(const __grid_constant__ ptx::TensorMap q_map,
              const __grid_constant__ ptx::TensorMap k_map,
              const __grid_constant__ DenseArguments args) {
  using Kernel = DenseFp8<kHeads, kDim, Logit, kStages, kStageRows>;
  using Storage = typename Kernel::Storage;
  static_assert(sizeof(Storage) == kSharedBytes, "mqa/cuda/sm90.py and SharedStorage disagree");
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Storage& shared = *reinterpret_cast<Storage*>(shared_bytes);

  Kernel::prepare(q_map, k_map, args, shared);
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (Kernel::range_by_all(args)) Kernel::find_range_by_all(args, shared);
  __syncthreads();

  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  if (warp < kMathWarps) {
    ptx::setmaxnreg_inc<kMathRegisters>();
    Kernel::math(shared);
  } else {
    ptx::setmaxnreg_dec<kOtherRegisters>();
    if (warp != kCleanWarp) {
      Kernel::feed(warp, q_map, k_map, args, shared);
    } else if (args.clean) {
      clean_rows(Kernel::logits_of(args), Kernel::windows_of(args), blockIdx.x, gridDim.x,
                 shared.fill);
    }
  }
}

}  // namespace mqa::sm90
