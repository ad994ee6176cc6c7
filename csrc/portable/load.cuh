// A warp's tokens on their way to shared memory.
#pragma once

#include "portable/sources.cuh"
#include "portable/storage.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"

namespace mqa::portable {

// 16-byte piece `piece` of row `row`, where rows of 128 bytes and more would put those that are read
// together into the same banks.
template <int kRowBytes>
__device__ __forceinline__ int swizzled(int row, int piece) {
  return row * kRowBytes + (kRowBytes >= 128 ? piece ^ (row & 1) * 4 : piece) * 16;
}

// Bytes [at, at + 4) of a row, one by one, elements of kElementBytes at a stride.
template <int kElementBytes>
__device__ __forceinline__ uint32_t gather_word(const unsigned char* row,
                                                int at,
                                                int64_t dim_stride) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int byte = at + i;
    const uint32_t value = row[byte / kElementBytes * dim_stride + byte % kElementBytes];
    word |= value << 8 * i;
  }
  return word;
}

template <typename Tiling, typename Source>
struct Load {
  using Arguments = typename Source::Arguments;
  using Storage = typename Tiling::Storage;
  using Format = typename Tiling::Format;
  static constexpr auto kRowBytes = Tiling::kRowBytes;
  static constexpr auto kTokens = Tiling::kTokens;
  static constexpr int kPieces = kRowBytes / 16;  // of a row
  static constexpr int kRowsAtOnce = kWarpSize / kPieces;

  // Begins to load tokens [first, end), kTokens at most, for this warp. Keys of others become zeros.
  static __device__ __forceinline__ void begin(const Arguments& args,
                                               const typename Source::Keys& keys,
                                               const typename Source::Chunk& chunk,
                                               uint32_t first,
                                               uint32_t end,
                                               Storage& shared) {
    const int bytes = Source::copy_bytes(args);
    const Line line = Source::line(args, chunk, first);
    if (bytes == 16 && Source::in_line(args) && line.key != nullptr && end - first >= kTokens)
      copy_line(line, shared);
    else
      copy_any(args, bytes, keys, first, end, shared);
    ptx::cp_async_commit_group();
  }

  // What most chunks are, in few instructions: all tokens exist, and all is aligned.
  static __device__ __forceinline__ void copy_line(const Line& line, Storage& shared) {
    static_assert(kRowBytes < 128 || kRowsAtOnce % 2 == 0, "a lane's pieces are swizzled alike");
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int row = lane / kPieces, piece = lane % kPieces;
    const uint32_t target = ptx::shared_address(shared.k[warp]) + swizzled<kRowBytes>(row, piece);
    const unsigned char* from = line.key + row * line.key_stride + piece * 16;
#pragma unroll
    for (int step = 0; step < kTokens / kRowsAtOnce; step++) {
      ptx::cp_async_16(target + step * kRowsAtOnce * kRowBytes, from);
      from += line.key_stride * kRowsAtOnce;
    }
    if constexpr (Format::kScaled) {
#pragma unroll
      for (int token = lane; token < kTokens; token += kWarpSize)
        ptx::cp_async_4(ptx::shared_address(&shared.scales[warp][token]),
                        line.scale + token * line.scale_stride, 4);
    }
  }

  // Any chunk, token by token.
  static __device__ __forceinline__ void copy_any(const Arguments& args,
                                                  int bytes,
                                                  const typename Source::Keys& keys,
                                                  uint32_t first,
                                                  uint32_t end,
                                                  Storage& shared) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll 1
    for (int token = lane; token < kTokens; token += kWarpSize) {
      const Place place = Source::place(args, keys, first + token, end);
      // Rows are copied by several lanes, whose address the one knows whose token it is.
#pragma unroll 1
      for (int row = lane / kPieces; row < kWarpSize; row += kRowsAtOnce) {
        const uint64_t key = __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(place.key), row);
        copy_piece(args, bytes, reinterpret_cast<const unsigned char*>(key),
                   shared.k[warp] + swizzled<kRowBytes>(token - lane + row, lane % kPieces));
      }
      if constexpr (Format::kScaled) copy_scale(args, place.scale, &shared.scales[warp][token]);
    }
  }

  // A lane's piece of a row, of zeros if there is none.
  static __device__ __forceinline__ void copy_piece(const Arguments& args,
                                                    int bytes,
                                                    const unsigned char* row,
                                                    unsigned char* to) {
    const int piece = threadIdx.x % kPieces;
    const bool exists = row != nullptr;
    if (bytes == 0) {
      uint4 loaded{};
      if (exists) loaded = gather(row, piece, Source::dim_stride(args));
      *reinterpret_cast<uint4*>(to) = loaded;
      return;
    }
    const unsigned char* from = exists ? row + piece * 16 : Source::anywhere(args);
    const uint32_t target = ptx::shared_address(to);
    if (bytes == 16) {
      ptx::cp_async_16(target, from, exists ? 16 : 0);
    } else {
#pragma unroll
      for (int at = 0; at < 16; at += 4)
        ptx::cp_async_4(target + at, exists ? from + at : from, exists ? 4 : 0);
    }
  }

  // 16 bytes of a row, byte by byte, elements at a stride.
  static __device__ __forceinline__ uint4 gather(const unsigned char* row,
                                                 int piece,
                                                 int64_t dim_stride) {
    uint32_t words[4];
#pragma unroll
    for (int word = 0; word < 4; word++)
      words[word] = gather_word<Tiling::kElementBytes>(row, piece * 16 + word * 4, dim_stride);
    return {words[0], words[1], words[2], words[3]};
  }

  static __device__ __forceinline__ void copy_scale(const Arguments& args,
                                                    const unsigned char* from,
                                                    uint32_t* to) {
    const bool exists = from != nullptr;
    if (reinterpret_cast<uint64_t>(from) % 4 == 0) {
      ptx::cp_async_4(ptx::shared_address(to), exists ? from : aligned(Source::anywhere(args)),
                      exists ? 4 : 0);
    } else {
      *to = from[0] | from[1] << 8 | from[2] << 16 | static_cast<uint32_t>(from[3]) << 24;
    }
  }

  static __device__ __forceinline__ const unsigned char* aligned(const unsigned char* address) {
    return reinterpret_cast<const unsigned char*>(reinterpret_cast<uint64_t>(address) & ~15ull);
  }
};

}  // namespace mqa::portable
