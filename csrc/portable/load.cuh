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

template <typename Tiling, typename Source>
struct Load {
  using Arguments = typename Source::Arguments;
  using Storage = typename Tiling::Storage;
  using Format = typename Tiling::Format;
  static constexpr auto kRowBytes = Tiling::kRowBytes;
  static constexpr auto kTokens = Tiling::kTokens;
  static constexpr int kPieces = kRowBytes / 16;  // of a row
  static constexpr int kRowsAtOnce = kWarpSize / kPieces;
  static constexpr int kElementBytes = Format::kBits == 16 ? 2 : 1;

  // Begins to load tokens [first, end), kTokens at most, for this warp. Keys of others become zeros.
  static __device__ __forceinline__ void begin(const Arguments& args,
                                               const typename Source::Keys& keys,
                                               const typename Source::Chunk& chunk,
                                               uint32_t first,
                                               uint32_t end,
                                               Storage& shared) {
    const int lane = threadIdx.x % kWarpSize;
    const int bytes = Source::copy_bytes(args);
    if (Source::in_line(args)) {
      const Line line = Source::line(args, chunk, first, end);
      if (bytes == 16 && line.count == kTokens) {
        copy_line(line, shared);
      } else {
        copy(args, bytes, shared, [&](int row, int) {
          return row < line.count ? line.key + row * line.key_stride : nullptr;
        });
        if constexpr (Format::kScaled)
          copy_scales(args, shared, [&](int row) {
            return row < line.count ? line.scale + row * line.scale_stride : nullptr;
          });
      }
    } else {
      copy(args, bytes, shared, [&](int row, int step) {
        // The row's address is known to the lane whose token it is.
        const uint32_t token = first + step / kPieces * kWarpSize + lane;
        const uint64_t key = reinterpret_cast<uint64_t>(Source::place(args, keys, token, end).key);
        return reinterpret_cast<const unsigned char*>(__shfl_sync(kAllLanes, key, row % kWarpSize));
      });
      if constexpr (Format::kScaled)
        copy_scales(args, shared,
                    [&](int row) { return Source::place(args, keys, first + row, end).scale; });
    }
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

  // All rows, whose addresses `address_of` tells, with the step that they are copied in.
  template <typename AddressOf>
  static __device__ __forceinline__ void copy(const Arguments& args,
                                              int bytes,
                                              Storage& shared,
                                              AddressOf address_of) {
    unsigned char* target = shared.k[threadIdx.x / kWarpSize];
    if (bytes == 16) {
#pragma unroll 1
      for (int step = 0; step < kTokens / kRowsAtOnce; step++)
        copy_step<16>(args, target, address_of, step);
    } else if (bytes == 4) {
#pragma unroll 1
      for (int step = 0; step < kTokens / kRowsAtOnce; step++)
        copy_step<4>(args, target, address_of, step);
    } else {
#pragma unroll 1
      for (int step = 0; step < kTokens / kRowsAtOnce; step++)
        copy_step<1>(args, target, address_of, step);
    }
  }

  // A piece of 16 bytes for each lane.
  template <int kBytes, typename AddressOf>
  static __device__ __forceinline__ void copy_step(const Arguments& args,
                                                   unsigned char* target,
                                                   AddressOf address_of,
                                                   int step) {
    const int lane = threadIdx.x % kWarpSize, piece = lane % kPieces;
    const int row = step * kRowsAtOnce + lane / kPieces;
    const unsigned char* from = address_of(row, step);
    const bool exists = from != nullptr;
    if (!exists) from = Source::anywhere(args);
    unsigned char* to = target + swizzled<kRowBytes>(row, piece);
    if constexpr (kBytes == 1) {
      uint4 loaded{};
      if (exists) loaded = gather(from, piece, Source::dim_stride(args));
      *reinterpret_cast<uint4*>(to) = loaded;
    } else {
      const unsigned char* source = exists ? from + piece * 16 : from;
#pragma unroll
      for (int at = 0; at < 16; at += kBytes) {
        const uint32_t address = ptx::shared_address(to) + at;
        if constexpr (kBytes == 16)
          ptx::cp_async_16(address, source, exists ? 16 : 0);
        else
          ptx::cp_async_4(address, exists ? source + at : source, exists ? 4 : 0);
      }
    }
  }

  // 16 bytes of a row, byte by byte, elements at a stride.
  static __device__ __forceinline__ uint4 gather(const unsigned char* row,
                                                 int piece,
                                                 int64_t dim_stride) {
    uint32_t words[4];
#pragma unroll
    for (int word = 0; word < 4; word++) {
      words[word] = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int byte = piece * 16 + word * 4 + i;
        const uint32_t value = row[byte / kElementBytes * dim_stride + byte % kElementBytes];
        words[word] |= value << 8 * i;
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }

  // All scales, whose addresses `address_of` tells.
  template <typename AddressOf>
  static __device__ __forceinline__ void copy_scales(const Arguments& args,
                                                     Storage& shared,
                                                     AddressOf address_of) {
#pragma unroll 1
    for (int token = threadIdx.x % kWarpSize; token < kTokens; token += kWarpSize) {
      const unsigned char* from = address_of(token);
      const bool exists = from != nullptr;
      uint32_t* to = &shared.scales[threadIdx.x / kWarpSize][token];
      if (reinterpret_cast<uint64_t>(from) % 4 == 0) {
        ptx::cp_async_4(ptx::shared_address(to), exists ? from : aligned(Source::anywhere(args)),
                        exists ? 4 : 0);
      } else {
        *to = from[0] | from[1] << 8 | from[2] << 16 | static_cast<uint32_t>(from[3]) << 24;
      }
    }
  }

  static __device__ __forceinline__ const unsigned char* aligned(const unsigned char* address) {
    return reinterpret_cast<const unsigned char*>(reinterpret_cast<uint64_t>(address) & ~15ull);
  }
};

}  // namespace mqa::portable
