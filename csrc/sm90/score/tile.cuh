// 64 keys against the columns of a warpgroup: products in FP8, or in bfloat16 after a conversion.
#pragma once

#include "common/logits.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/score/elements.cuh"
#include "sm90/score/epilogue.cuh"
#include "sm90/score/storage.cuh"

namespace mqa::sm90 {

// Both operands are read from shared memory as they came. `Keys` and `Queries` are descriptors.
template <typename Tiling>
struct Fp8Tile : Epilogue<Tiling> {
  using Base = Epilogue<Tiling>;
  using Logit = typename Tiling::Logit;
  using Storage = typename Tiling::Storage;
  using Thread = typename Base::Thread;
  using Keys = uint64_t;
  static constexpr auto kColumns = Tiling::kColumns;
  static constexpr auto kDim = Tiling::kDim;

  static __device__ __forceinline__ uint64_t queries(const Storage& shared, int buffer, int set) {
    return ptx::matrix_descriptor<kDim>(ptx::shared_address(shared.q[buffer]) +
                                        set * kColumns * kDim);
  }
  static __device__ __forceinline__ Keys keys(const Storage& shared, int stage) {
    return ptx::matrix_descriptor<kDim>(ptx::shared_address(shared.k[stage]));
  }
  // Of the tile that is `tiles` further.
  static __device__ __forceinline__ Keys further(Keys keys, int tiles) {
    return keys + tiles * (kTileRows * kDim / 16);
  }

  // `release` is called once the tile is read.
  template <typename Release, typename Store>
  static __device__ __forceinline__ void tile(uint64_t q,
                                              Keys k,
                                              const float* k_scale_at,
                                              const Thread& thread,
                                              Release release,
                                              Store store) {
    float dots[kColumns / 2];
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 32; step++)
      ptx::wgmma_k32_e4m3(dots, k + step * 2, q + step * 2, step == 0);
    ptx::wgmma_commit_group();
    const float k_scale = *k_scale_at;
    ptx::wgmma_wait_group_0(dots);
    release();
    float sums[Base::kRows][2], totals[Base::kOutputs];
    Base::weigh_heads(dots, thread.kept, true, sums);
    Base::reduce(sums, totals);
    // + 0.0 so that no scale turns a zero into -0.
#pragma unroll
    for (int i = 0; i < Base::kOutputs; i++)
      store(i, round_to<Logit>(fmaf(totals[i], k_scale, 0.0f)));
  }
};

// Keys are read into registers and become bfloat16 there; queries lie converted in shared memory,
// their dims in the same order (queries.cuh).
template <typename Tiling>
struct ConvertedTile : Epilogue<Tiling> {
  using Base = Epilogue<Tiling>;
  using Logit = typename Tiling::Logit;
  using Storage = typename Tiling::Storage;
  using Thread = typename Base::Thread;
  using Format = typename Tiling::Format;
  using Row = RowOf<Format, Tiling::kDim>;
  using Keys = const unsigned char*;
  using TestedStore = typename Base::TestedStore;
  static constexpr auto kBlockColumns = Tiling::kBlockColumns;
  static constexpr int kSteps = Row::kSteps;
  static constexpr int kProduct = Base::kColumns * 128 / 16;  // from one to the next in descriptors
  static constexpr int kProductsOfSet = Tiling::kColumns / Base::kColumns;
  static constexpr bool kWideRows = Tiling::kHeads > Base::kColumns;  // two products each

  // Of a product's rows, or of a row that takes two products.
  struct Sums {
    float of[Base::kRows][2];
  };

  static __device__ __forceinline__ uint64_t queries(const Storage& shared, int buffer, int) {
    return ptx::matrix_descriptor<128>(ptx::shared_address(shared.q[buffer]));
  }
  static __device__ __forceinline__ Keys keys(const Storage& shared, int stage) {
    return shared.k[stage];
  }
  static __device__ __forceinline__ Keys further(Keys keys, int tiles) {
    return keys + tiles * kTileRows * Row::kBytes;
  }

  // This thread's words of a key: [half][word].
  static __device__ __forceinline__ void load_words(Keys keys,
                                                    int key,
                                                    uint32_t (&words)[Row::kHalves][Row::kWords]) {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < Row::kHalves; half++) {
      // Rows of 128 bytes lie swizzled.
      const int chunk = Row::kBytes == 128 ? (half * 4 + c) ^ key % 8 : c;
      const unsigned char* at = keys + key * Row::kBytes + chunk * Row::kChunk;
      if constexpr (Row::kChunk == 16) {
        const uint4 loaded = *reinterpret_cast<const uint4*>(at);
        words[half][0] = loaded.x, words[half][1] = loaded.y;
        words[half][2] = loaded.z, words[half][3] = loaded.w;
      } else {
        const uint2 loaded = *reinterpret_cast<const uint2*>(at);
        words[half][0] = loaded.x, words[half][1] = loaded.y;
      }
    }
  }

  // Registers `at` and `at` + 2 of A for every step, from a key's words and scales.
  static __device__ __forceinline__ void convert(const uint32_t (&words)[Row::kHalves][Row::kWords],
                                                 uint32_t codes,
                                                 int at,
                                                 uint32_t (&a)[kSteps][4]) {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < Row::kHalves; half++) {
      const typename Format::Scale scale(Row::code(codes, half, c));
#pragma unroll
      for (int word = 0; word < Row::kWords; word++)
#pragma unroll
        for (int i = 0; i < Format::kStepsOfWord; i++) {
          const Pairs pairs = scale(Format::decode(words[half][word], i));
          const int step = (half * Row::kWords + word) * Format::kStepsOfWord + i;
          a[step][at] = pairs.low, a[step][at + 2] = pairs.high;
        }
      if constexpr (Format::kTwoFactors) {
        if (__any_sync(kAllLanes, scale.large)) {
#pragma unroll
          for (int step = 0; step < kSteps; step++) {
            a[step][at] = ptx::mul_bf16x2(a[step][at], scale.rest);
            a[step][at + 2] = ptx::mul_bf16x2(a[step][at + 2], scale.rest);
          }
        }
      }
    }
  }

  // All columns of the block.
  template <typename Release>
  static __device__ __forceinline__ void tile(uint64_t q,
                                              Keys k,
                                              const float* k_scale_at,
                                              const Thread& thread,
                                              Release release,
                                              TestedStore store) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
    const int key = warp * 16 + Tiling::key_of(lane / 4);
    // k_scale_at is that of the key whose logits this thread stores, `key` or the one 8 further.
    const float* scales = k_scale_at - lane % 2 * 8;
    uint32_t words[2][Row::kHalves][Row::kWords], codes[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      load_words(k, key + i * 8, words[i]);
      codes[i] = Format::kBlockScaled ? __float_as_uint(scales[i * 8]) : 0;
    }
    const float k_scale = Format::kBlockScaled ? 1.0f : *k_scale_at;
    uint32_t a[kSteps][4];
    convert(words[0], codes[0], 0, a);
    convert(words[1], codes[1], 1, a);
    release();
    uint32_t sets = sets_with_tokens(thread, store.token - thread.tile_row);
#pragma unroll 1
    for (; sets != 0; sets &= sets - 1) {
      const int set = __ffs(sets) - 1;
      Sums sums{};
#pragma unroll 1
      for (int i = 0; i < kProductsOfSet; i++) {
        const int product = set * kProductsOfSet + i;
        float dots[Base::kColumns / 2];
        multiply(a, q + product * kProduct, dots);
        weigh(dots, thread, product, !kWideRows, sums);
        if (!kWideRows || i == kProductsOfSet - 1)
          finish(sums, k_scale, kWideRows ? set : product, store);
      }
    }
  }

  // Bit i: rows of set i see some of the 64 tokens from `first` on.
  static __device__ __forceinline__ uint32_t sets_with_tokens(const Thread& thread, int first) {
    const int lane = threadIdx.x % kWarpSize;
    const Columns columns = thread.columns[lane % Tiling::kSets];
    return __ballot_sync(kAllLanes, lane < Tiling::kSets && columns.first < first + kTileRows &&
                                        columns.end > first);
  }

  // Keys by 64 columns.
  static __device__ __forceinline__ void multiply(uint32_t (&a)[kSteps][4],
                                                  uint64_t q,
                                                  float (&dots)[Base::kColumns / 2]) {
    constexpr int kPanel = kBlockColumns * 128 / 16;  // 64 dims of all columns
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; step++)
      ptx::wgmma_k16_bf16(dots, a[step], q + step / 4 * kPanel + step % 4 * 2, step == 0);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group_0(dots);
#pragma unroll
    for (int step = 0; step < kSteps; step++)
      ptx::keep(a[step]);
  }

  static __device__ __forceinline__ void weigh(const float (&dots)[Base::kColumns / 2],
                                               const Thread& thread,
                                               int product,
                                               bool first,
                                               Sums& sums) {
    float weights[Base::kColumns / 4];
    Base::load_weights(thread.weights + product * Base::kColumns, weights);
    Base::weigh_heads(dots, weights, first, sums.of);
  }

  // The logits of the `index`'th product, or of the `index`'th row where two products are one.
  static __device__ __forceinline__ void finish(const Sums& sums,
                                                float k_scale,
                                                int index,
                                                const TestedStore& store) {
    float totals[Base::kOutputs];
    Base::reduce(sums.of, totals);
#pragma unroll
    for (int i = 0; i < Base::kOutputs; i++) {
      const float logit = Format::kBlockScaled ? totals[i] : fmaf(totals[i], k_scale, 0.0f);
      store(index * Base::kRows + i, round_to<Logit>(logit));
    }
  }
};

}  // namespace mqa::sm90
