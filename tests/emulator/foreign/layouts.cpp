// Prints what CuTe says of operands of wgmma in shared memory, and of its registers, one line each:
//
//   tile TYPE MAJOR SPAN ROWS STEP: descriptor, then the byte of each element, K running first
//   fragment NAME THREADS VALUES: index of each value in its matrix, values running first
//   load NAME THREADS VALUES: of ldmatrix, index among all elements of the rows of each of the 16-bit
//     values that threads get, then of the first element of the row that each thread gives
//
// The tile begins at shared address 0, where descriptors and bytes are as at any multiple of 1024.

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include <cute/tensor.hpp>

#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>

using namespace cute;
namespace gmma = SM90::GMMA;

constexpr int kSteps = 3;  // tiles hold that many products along K, rounded up to whole patterns
constexpr int kStepBytes = 32;

template <gmma::Major kMajor, class Type, class Atom, int kRows>
void print_tile(char const* type, int span, void* memory) {
  constexpr int kDepth = kStepBytes / int(sizeof(Type));
  constexpr int kAtom = size<1>(Atom{});
  constexpr int kWhole = (kSteps * kDepth + kAtom - 1) / kAtom * kAtom;
  auto const layout = tile_to_shape(Atom{}, Shape<Int<kRows>, Int<kWhole>>{});
  auto const tile = make_tensor(make_smem_ptr(static_cast<Type*>(memory)), layout);
  auto const base = reinterpret_cast<uintptr_t>(memory);
  for (int step = 0; step < kWhole / kDepth; ++step) {
    auto const part = local_tile(tile, Shape<Int<kRows>, Int<kDepth>>{}, make_coord(0, step));
    auto descriptor = gmma::make_gmma_desc<kMajor>(part);
    // On a host CuTe leaves the start address at zero.
    auto const start = reinterpret_cast<uintptr_t>(raw_pointer_cast(part.data())) - base;
    descriptor.bitfield.start_address_ = uint16_t(start >> 4);
    std::printf("tile %s %s %d %d %d: %llu", type, kMajor == gmma::Major::K ? "K" : "MN", span,
                kRows, step, static_cast<unsigned long long>(uint64_t(descriptor)));
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < kDepth; ++k) {
        auto const* element = &part(row, k);
        std::printf(" %d", int(reinterpret_cast<uintptr_t>(element) - base));
      }
    }
    std::printf("\n");
  }
}

template <class Type, int kRows>
void print_k_major(char const* type, void* memory) {
  constexpr auto kMajor = gmma::Major::K;
  print_tile<kMajor, Type, gmma::Layout_K_INTER_Atom<Type>, kRows>(type, 0, memory);
  print_tile<kMajor, Type, gmma::Layout_K_SW32_Atom<Type>, kRows>(type, 32, memory);
  print_tile<kMajor, Type, gmma::Layout_K_SW64_Atom<Type>, kRows>(type, 64, memory);
  print_tile<kMajor, Type, gmma::Layout_K_SW128_Atom<Type>, kRows>(type, 128, memory);
}

template <class Type, int kRows>
void print_mn_major(char const* type, void* memory) {
  constexpr auto kMajor = gmma::Major::MN;
  print_tile<kMajor, Type, gmma::Layout_MN_INTER_Atom<Type>, kRows>(type, 0, memory);
  print_tile<kMajor, Type, gmma::Layout_MN_SW32_Atom<Type>, kRows>(type, 32, memory);
  print_tile<kMajor, Type, gmma::Layout_MN_SW64_Atom<Type>, kRows>(type, 64, memory);
  print_tile<kMajor, Type, gmma::Layout_MN_SW128_Atom<Type>, kRows>(type, 128, memory);
}

template <class Layout>
void print_fragment(char const* name, Layout const& layout) {
  std::printf("fragment %s %d %d:", name, int(size<0>(layout)), int(size<1>(layout)));
  for (int thread = 0; thread < size<0>(layout); ++thread) {
    for (int value = 0; value < size<1>(layout); ++value) {
      std::printf(" %d", int(layout(thread, value)));
    }
  }
  std::printf("\n");
}

template <class Operation>
void print_mma(char const* a, char const* b, char const* c) {
  using Traits = MMA_Traits<Operation>;
  print_fragment(a, typename Traits::ALayout{});
  print_fragment(b, typename Traits::BLayout{});
  print_fragment(c, typename Traits::CLayout{});
}

template <class Operation>
void print_load(char const* name) {
  using Traits = Copy_Traits<Operation>;
  constexpr int kBits = 16;
  typename Traits::DstLayout const got{};
  typename Traits::SrcLayout const given{};
  int const values = int(size<1>(got)) / kBits;
  std::printf("load %s %d %d:", name, int(size<0>(got)), values);
  for (int thread = 0; thread < size<0>(got); ++thread) {
    for (int value = 0; value < values; ++value) {
      std::printf(" %d", int(got(thread, value * kBits)) / kBits);
    }
  }
  for (int thread = 0; thread < size<0>(given); ++thread) {
    std::printf(" %d", int(given(thread, 0)) / kBits);
  }
  std::printf("\n");
}

int main() {
  void* memory = std::aligned_alloc(1 << 16, 1 << 18);
  print_k_major<uint8_t, 192>("b8", memory);
  print_k_major<half_t, 256>("b16", memory);
  print_k_major<tfloat32_t, 64>("b32", memory);
  print_mn_major<half_t, 256>("b16", memory);
  print_fragment("C16", gmma::CLayout_64x16{});
  print_fragment("C64", gmma::CLayout_64x64{});
  print_fragment("C256", gmma::CLayout_64x256{});
  print_fragment("A8", gmma::ALayout_64x8{});
  print_fragment("A16", gmma::ALayout_64x16{});
  print_fragment("A32", gmma::ALayout_64x32{});
  print_mma<SM80_16x8x8_F32BF16BF16F32_TN>("mmaA8", "mmaB8", "mmaC8");
  print_mma<SM80_16x8x16_F32BF16BF16F32_TN>("mmaA16", "mmaB16", "mmaC16");
  print_mma<SM80_16x8x16_F16F16F16F16_TN>("halfA16", "halfB16", "halfC16");
  print_load<SM75_U32x1_LDSM_N>("x1");
  print_load<SM75_U32x2_LDSM_N>("x2");
  print_load<SM75_U32x4_LDSM_N>("x4");
  print_load<SM75_U16x2_LDSM_T>("x1.trans");
  print_load<SM75_U16x4_LDSM_T>("x2.trans");
  print_load<SM75_U16x8_LDSM_T>("x4.trans");
  std::free(memory);
  return 0;
}
