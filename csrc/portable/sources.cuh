// Where keys are: rows at a stride, or pages of a block table, at any address.
#pragma once

#include "common/cuts.cuh"
#include "common/logits.cuh"
#include "portable/storage.cuh"
#include "score/dense.cuh"
#include "score/paged.cuh"
#include "score/range.cuh"

namespace mqa::portable {

// Where a lane finds a token's key and scale; null if there is none.
struct Place {
  const unsigned char* key;
  const unsigned char* scale;
};

// Keys of a chunk that lie at one stride, and their scales.
struct Line {
  const unsigned char* key;
  const unsigned char* scale;
  int64_t key_stride;
  int64_t scale_stride;
};

// How many bytes at a time may be copied where addresses are multiples of what `bits` is: 16 or 4 or,
// 0, one by one.
__device__ __forceinline__ int aligned_bytes(uint64_t bits) {
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 0;
}

// Dense calls with any number of heads: groups of max(1, 512 / heads) rows, cut into blocks.
template <typename Tiling>
struct Dense {
  using Arguments = DenseArguments;
  using Logit = typename Tiling::Logit;
  using Storage = typename Tiling::Storage;
  static constexpr int kAutoSplit = 128;
  static constexpr auto kBlock = Tiling::kBlock;
  static constexpr auto kTokens = Tiling::kTokens;

  // A block's first row.
  struct Task {
    int row;
  };

  static __device__ __forceinline__ Windows windows(const Arguments& args) {
    return {args.start, args.end, args.start_stride, args.end_stride, args.rows, args.tokens};
  }
  static __device__ __forceinline__ Logits<Logit> logits(const Arguments& args) {
    return {static_cast<Logit*>(args.logits), args.logits_stride, args.width, args.compressed};
  }

  // Rows of a group, and blocks of one.
  static __device__ __forceinline__ int group_rows(const Arguments& args) {
    return max(kScheduleColumns / args.heads, 1);
  }
  static __device__ __forceinline__ int parts(const Arguments& args) {
    return ceil_div(group_rows(args), kBlock);
  }
  static __device__ __forceinline__ int groups(const Arguments& args) {
    return ceil_div(args.rows, group_rows(args));
  }

  static __device__ __forceinline__ Cut cut_of(const Arguments& args, Cut entry) {
    return cut_among(groups(args), entry);
  }

  // What a group weighs where no schedule is given.
  static __device__ __forceinline__ Weights weigh(const Arguments& args, int group) {
    const int most = group_rows(args), first = group * most;
    const int tasks = hull_of_rows<3>(windows(args), first, most).splits(kAutoSplit);
    const int rows = min(args.rows - first, most);
    return {tasks > 0 ? 1 + rows : 1, rows, tasks};
  }

  static __device__ __forceinline__ int first_block(const Arguments& args, const Cut (&range)[2]) {
    return range[0].block * parts(args);
  }
  static __device__ __forceinline__ int last_block(const Arguments& args, const Cut (&range)[2]) {
    return (min(range[1].block, groups(args) - 1) + 1) * parts(args) - 1;
  }

  static __device__ __forceinline__ Task task(const Arguments& args, int block) {
    const int count = parts(args);
    return {block / count * group_rows(args) + block % count * kBlock};
  }

  // What the range has of a block, by one lane: of its group's tokens those that its own rows see.
  static __device__ __forceinline__ Found find(const Arguments& args,
                                               const Cut (&range)[2],
                                               int block) {
    const int most = group_rows(args), group = block / parts(args), row = task(args, block).row;
    const int before = row - group * most;
    // Of the group, whose end may lie past 2^31, those from `row` on.
    const int rows = min(min(most, args.rows - group * most) - before, kBlock);
    if (rows <= 0) return {};
    const Hull tokens = hull_of_rows<3>(windows(args), group * most, most);
    Found found = Range<Tiling, Dense>::part_of(args, range, group, rows, tokens);
    const Hull mine = hull_of_rows<3>(windows(args), row, rows);
    const int end = min(found.first + static_cast<int>(found.length), mine.end);
    found.first = max(found.first, mine.first);
    found.length = max(end - found.first, 0);
    return found;
  }

  // Where a row's queries begin, in bytes, and their scales.
  static __device__ __forceinline__ int64_t q_at(const Arguments& args, int row) {
    return row * args.q_row_stride;
  }
  static __device__ __forceinline__ int64_t q_scale_at(const Arguments& args, int row) {
    return row * args.q_scale_row_stride;
  }

  // Whether the keys of a chunk lie at one stride.
  static __device__ __forceinline__ bool in_line(const Arguments&) { return true; }
  // How keys may be copied.
  static __device__ __forceinline__ int copy_bytes(const Arguments& args) {
    const uint64_t bits = reinterpret_cast<uint64_t>(args.k) | args.k_row_stride;
    return args.k_dim_stride == Tiling::kElementBytes ? aligned_bytes(bits) : 0;
  }
  static __device__ __forceinline__ int64_t dim_stride(const Arguments& args) {
    return args.k_dim_stride;
  }
  static __device__ __forceinline__ const unsigned char* anywhere(const Arguments& args) {
    return args.k;
  }

  // What has to be looked up before a piece's or a chunk's keys are found: nothing.
  struct Keys {
    __device__ __forceinline__ Keys(const Arguments&, const Task&) {}
  };
  struct Chunk {
    __device__ __forceinline__ Chunk(const Arguments&, const Keys&, uint32_t, uint32_t) {}
  };

  // Of the tokens from `first` on.
  static __device__ __forceinline__ Line line(const Arguments& args, const Chunk&, uint32_t first) {
    const Place place = of_token(args, first);
    return {place.key, place.scale, args.k_row_stride, args.k_scale_stride * 4};
  }

  static __device__ __forceinline__ Place place(const Arguments& args,
                                                const Keys&,
                                                uint32_t token,
                                                uint32_t end) {
    if (token >= end) return {};
    return of_token(args, token);
  }

  static __device__ __forceinline__ Place of_token(const Arguments& args, int64_t token) {
    return {args.k + token * args.k_row_stride,
            reinterpret_cast<const unsigned char*>(args.k_scale + token * args.k_scale_stride)};
  }
};

// Paged calls with pages of any number of tokens: groups as everywhere.
template <typename Tiling>
struct Paged : score::Paged<Tiling> {
  using Base = score::Paged<Tiling>;
  using Arguments = PagedArguments;
  static constexpr auto kTokens = Tiling::kTokens;
  static constexpr auto kBlock = Tiling::kBlock;

  struct Task {
    int row;
    int request;
  };

  static __device__ __forceinline__ int first_block(const Arguments&, const Cut (&range)[2]) {
    return Base::first_block(range);
  }

  static __device__ __forceinline__ Task task(const Arguments& args, int block) {
    const Groups all = Base::grouping(args);
    const int group = block / Base::kParts;
    return {all.row_of(group) + block % Base::kParts * kBlock, all.request_of(group)};
  }

  static __device__ __forceinline__ Found find(const Arguments& args,
                                               const Cut (&range)[2],
                                               int block) {
    const int index = block / Base::kParts, before = block % Base::kParts * kBlock;
    const Group group = Base::grouping(args)[index];
    const int rows = min(group.rows - before, kBlock);
    if (rows <= 0) return {};
    const Hull hull = Base::grouping(args).hull(Base::windows(args), group, before, rows);
    return Range<Tiling, Paged>::part_of(args, range, index, rows, hull);
  }

  // Where a row's queries begin, in bytes, and their scales: requests may have gaps between them.
  static __device__ __forceinline__ int64_t q_at(const Arguments& args, int row) {
    return of_request(args, row, args.q_request_stride, args.q_row_stride);
  }
  static __device__ __forceinline__ int64_t q_scale_at(const Arguments& args, int row) {
    return of_request(args, row, args.q_scale_request_stride, args.q_scale_row_stride);
  }
  static __device__ __forceinline__ int64_t of_request(const Arguments& args,
                                                       int row,
                                                       int64_t request_stride,
                                                       int64_t row_stride) {
    const int request = args.next_n.divide(row);
    return request * request_stride + (row - request * args.next_n.value) * row_stride;
  }

  // Chunks begin at multiples of kTokens.
  static __device__ __forceinline__ bool in_line(const Arguments& args) {
    return args.page.value % kTokens == 0;
  }
  static __device__ __forceinline__ int copy_bytes(const Arguments& args) {
    return aligned_bytes(reinterpret_cast<uint64_t>(args.cache) | args.page_stride);
  }
  static __device__ __forceinline__ int64_t dim_stride(const Arguments&) {
    return Tiling::kElementBytes;
  }
  static __device__ __forceinline__ const unsigned char* anywhere(const Arguments& args) {
    return args.cache;
  }

  // The request's row of the block table.
  struct Keys {
    const int32_t* table;
    __device__ __forceinline__ Keys(const Arguments& args, const Task& task)
        : table(args.table + Base::table_row(args, task.request) * args.table_row_stride) {}
  };

  // What the block table says of a chunk's first token, or of the last one before `end`: of all, if
  // they are in line. Without a condition, so that nothing waits for it here.
  struct Chunk {
    int page;
    __device__ __forceinline__
    Chunk(const Arguments& args, const Keys& keys, uint32_t first, uint32_t end)
        : page(page_of(args, keys, min(first, end - 1))) {}
  };

  static __device__ __forceinline__ int page_of(const Arguments& args,
                                                const Keys& keys,
                                                uint32_t token) {
    return keys.table[args.page.divide(token) * args.table_column_stride];
  }

  static __device__ __forceinline__ Place of_page(const Arguments& args, int page, uint32_t token) {
    if (static_cast<uint32_t>(page) >= static_cast<uint32_t>(args.pages)) return {};
    // A page of many tokens may have more than 2^31 bytes.
    const int64_t rows = args.page.value, row = token - args.page.divide(token) * args.page.value;
    const unsigned char* begin = args.cache + page * args.page_stride;
    return {begin + row * Tiling::kRowBytes, begin + rows * Tiling::kRowBytes + row * 4};
  }

  static __device__ __forceinline__ Line line(const Arguments& args,
                                              const Chunk& chunk,
                                              uint32_t first) {
    const Place place = of_page(args, chunk.page, first);
    return {place.key, place.scale, Tiling::kRowBytes, 4};
  }

  static __device__ __forceinline__ Place place(const Arguments& args,
                                                const Keys& keys,
                                                uint32_t token,
                                                uint32_t end) {
    if (token >= end) return {};
    return of_page(args, page_of(args, keys, token), token);
  }
};

}  // namespace mqa::portable
