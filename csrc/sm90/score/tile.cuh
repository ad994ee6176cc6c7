// 64 keys against the columns of a warpgroup: products in FP8, or in bfloat16, after a conversion
// where elements are shorter.
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

// Keys are read into registers and become bfloat16 there, if they are not; queries lie converted in
// shared memory, their dims in the same order (queries.cuh). A thread's dims of a key come in two
// portions.
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
  static constexpr int kProduct = Base::kColumns * 128 / 16;  // from one to the next in descriptors
  static constexpr int kProductsOfSet = Tiling::kColumns / Base::kColumns;
  static constexpr bool kWideRows = Tiling::kHeads > Base::kColumns;  // two products each
  static constexpr int kSteps = Row::kSteps / 2;                      // of a portion
  static constexpr int kWords = Row::kParts * Row::kWords / 2;
  // Parts of a row that are read at once: those of a portion, or a row that is one part.
  static constexpr int kReadParts = Row::kParts > 1 ? Row::kParts / 2 : 1;
  static constexpr int kPanel = Tiling::kStageRows * Row::kPanelBytes;  // of keys

  // The operand A, by portion and step.
  using Operand = uint32_t[2][kSteps][4];

  // What a thread reads of its two keys, which are 8 apart.
  struct Read {
    uint32_t words[2][kReadParts * Row::kWords];
    uint32_t codes[2];  // the scale of each key, or its block scales
    typename Format::Scale scales[2]{0, 0};

    // The scale of the key whose logits this thread stores.
    __device__ __forceinline__ float k_scale() const {
      return __uint_as_float(threadIdx.x % 2 == 0 ? codes[0] : codes[1]);
    }
  };

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
    return keys + tiles * kTileRows * Row::kPanelBytes;
  }

  // One portion of A; portion 0 comes first. `scales` are those of the tile's first key on.
  template <int kPortion>
  static __device__ __forceinline__ void convert(Keys keys,
                                                 const float* scales,
                                                 Read& read,
                                                 Operand& a) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
    const int key = warp * 16 + Tiling::key_of(lane / 4);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (kPortion == 0)
        read.codes[i] = Tiling::kKeyScales ? __float_as_uint(scales[key + i * 8]) : 0;
      if (kPortion == 0 || Row::kParts > 1) {
#pragma unroll
        for (int part = 0; part < kReadParts; part++)
          load_words(keys, key + i * 8, kPortion * kReadParts + part,
                     read.words[i] + part * Row::kWords);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (kPortion == 0 || Row::kParts > 1)
        read.scales[i] = typename Format::Scale(Row::code(read.codes[i], kPortion, lane % 4));
      convert_key<kPortion>(read.words[i], read.scales[i], i, a);
    }
  }

  // This thread's words of a part of a key.
  static __device__ __forceinline__ void load_words(Keys keys, int key, int part, uint32_t* words) {
    const int c = threadIdx.x % 4;
    const int in_order = part % Row::kPartsOfPanel * 4 + c;
    // Panels of 128 bytes a key lie swizzled.
    const int chunk = Row::kPanelBytes == 128 ? in_order ^ key % 8 : in_order;
    const unsigned char* at =
        keys + part / Row::kPartsOfPanel * kPanel + key * Row::kPanelBytes + chunk * Row::kChunk;
    if constexpr (Row::kChunk == 16) {
      const uint4 loaded = *reinterpret_cast<const uint4*>(at);
      words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
    } else {
      const uint2 loaded = *reinterpret_cast<const uint2*>(at);
      words[0] = loaded.x, words[1] = loaded.y;
    }
  }

  // Registers `at` and `at` + 2 of A for every step of a portion, from a key's words.
  template <int kPortion>
  static __device__ __forceinline__ void convert_key(
      const uint32_t (&words)[kReadParts * Row::kWords],
      const typename Format::Scale& scale,
      int at,
      Operand& a) {
    constexpr int kFirst = Row::kParts > 1 ? 0 : kPortion * kWords;
#pragma unroll
    for (int word = 0; word < kWords; word += Format::kWordsOfStep)
#pragma unroll
      for (int i = 0; i < Format::kStepsOfWord; i++) {
        const Pairs pairs = scale(Format::decode(&words[kFirst + word], i));
        const int step = word / Format::kWordsOfStep * Format::kStepsOfWord + i;
        a[kPortion][step][at] = pairs.low, a[kPortion][step][at + 2] = pairs.high;
      }
    if constexpr (Format::kTwoFactors) {
      if (__any_sync(kAllLanes, scale.large)) {
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
          a[kPortion][step][at] = ptx::mul_bf16x2(a[kPortion][step][at], scale.rest);
          a[kPortion][step][at + 2] = ptx::mul_bf16x2(a[kPortion][step][at + 2], scale.rest);
        }
      }
    }
  }

  // All columns of the block.
  static __device__ __forceinline__ void tile(
      uint64_t q, Keys k, const float* scales, const Thread& thread, TestedStore store) {
    Read read;
    Operand a;
    convert<0>(k, scales, read, a);
    convert<1>(k, scales, read, a);
    uint32_t sets = sets_with_tokens(thread, store.token - thread.tile_row);
#pragma unroll 1
    for (; sets != 0; sets &= sets - 1) {
      const int set = __ffs(sets) - 1;
      Sums sums{};
#pragma unroll 1
      for (int i = 0; i < kProductsOfSet; i++) {
        const int product = set * kProductsOfSet + i;
        float dots[Base::kColumns / 2];
        multiply<0>(a, q + product * kProduct, dots);
        multiply<1>(a, q + product * kProduct, dots);
        ptx::wgmma_wait_group_0(dots);
        keep<0>(a), keep<1>(a);
        weigh(dots, thread, product, !kWideRows, sums);
        if (!kWideRows || i == kProductsOfSet - 1)
          finish(sums, read.k_scale(), kWideRows ? set : product, store);
      }
    }
  }

  // Bit i: rows of set i see some of the 64 tokens from `first` on.
  static __device__ __forceinline__ uint32_t sets_with_tokens(const Thread& thread, int first) {
    const int lane = threadIdx.x % kWarpSize;
    const Columns columns = thread.columns[lane % Tiling::kSets];
    return __ballot_sync(kAllLanes, lane < Tiling::kSets && columns.first - first < kTileRows &&
                                        columns.end > first);
  }

  // Begins to multiply a portion of the keys by 64 columns, a group of its own.
  template <int kPortion>
  static __device__ __forceinline__ void multiply(const Operand& a,
                                                  uint64_t q,
                                                  float (&dots)[Base::kColumns / 2]) {
    constexpr int kPanel = kBlockColumns * 128 / 16;  // 64 dims of all columns
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; i++) {
      const int step = kPortion * kSteps + i;
      ptx::wgmma_k16_bf16(dots, a[kPortion][i], q + step / 4 * kPanel + step % 4 * 2, step == 0);
    }
    ptx::wgmma_commit_group();
  }

  template <int kPortion>
  static __device__ __forceinline__ void keep(Operand& a) {
#pragma unroll
    for (int step = 0; step < kSteps; step++)
      ptx::keep(a[kPortion][step]);
  }

  static __device__ __forceinline__ void weigh(const float (&dots)[Base::kColumns / 2],
                                               const Thread& thread,
                                               int product,
                                               bool first,
                                               Sums& sums) {
    if constexpr (Base::kKeepWeights) {
      Base::weigh_heads(dots, thread.kept, first, sums.of);
    } else {
      float weights[Base::kColumns / 4];
      Base::load_weights(thread.weights + product * Base::kColumns, weights);
      Base::weigh_heads(dots, weights, first, sums.of);
    }
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
      const float logit = Format::kKeyScaled ? fmaf(totals[i], k_scale, 0.0f) : totals[i];
      store(index * Base::kRows + i, round_to<Logit>(logit));
    }
  }
};

}  // namespace mqa::sm90
