// Prints what CuTe says of Blackwell's operands, sums and scales, and of copies to and from tensor
// memory, one line each:
//
//   tile TYPE MAJOR SPAN ROWS STEP: descriptor, then the byte of each 16-byte chunk
//   sums ROWS COLUMNS CTAS: index in D, CTA, lane and column, of each element
//   scales WHAT ROWS PER CTAS: lane, column and byte, for each scale along K, each row, each copy
//   registers OPERATION: lane, column and bit of both halves, for each register of each thread
//   copy SHAPE: lane and column of each word of each copy of each row, words running first
//   source SHAPE: descriptor, then the byte of each row's first chunk
//
// Tiles begin at shared address 0, where descriptors and bytes are as at any multiple of 1024.

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include <cute/tensor.hpp>

#include <cute/atom/copy_traits_sm100.hpp>
#include <cute/atom/mma_traits_sm100.hpp>

using namespace cute;

constexpr int kChunk = 16;
constexpr int kStepBytes = 32;
constexpr int kRowBytes = 128;
constexpr int kLaneShift = 21;  // of bits of tensor memory, as CuTe numbers them

void fail(char const* why) {
  std::fprintf(stderr, "%s\n", why);
  std::exit(1);
}

// ---- operands in shared memory ----

template <UMMA::Major kMajor, class Type, class Atom, int kRows>
void print_tile(char const* type, int span, void* memory) {
  constexpr bool kAlongK = kMajor == UMMA::Major::K;
  constexpr int kPer = kChunk / int(sizeof(Type));
  constexpr int kDepth = kStepBytes / int(sizeof(Type));
  constexpr int kWhole = kRowBytes / int(sizeof(Type));
  auto const layout = tile_to_shape(Atom{}, Shape<Int<kRows>, Int<kWhole>>{});
  auto const tile = make_tensor(make_smem_ptr(static_cast<Type*>(memory)), layout);
  auto const base = reinterpret_cast<uintptr_t>(memory);
  auto const place = [&](auto const& part, int row, int k) {
    return int(reinterpret_cast<uintptr_t>(&part(row, k)) - base);
  };
  for (int step = 0; step < kWhole / kDepth; ++step) {
    auto const part = local_tile(tile, Shape<Int<kRows>, Int<kDepth>>{}, make_coord(0, step));
    auto descriptor = UMMA::make_umma_desc<kMajor>(part);
    // On a host CuTe leaves the start address at zero.
    auto const start = reinterpret_cast<uintptr_t>(raw_pointer_cast(part.data())) - base;
    descriptor.start_address_ = uint16_t(start >> 4);
    std::printf("tile %s %s %d %d %d: %llu", type, kAlongK ? "K" : "MN", span, kRows, step,
                static_cast<unsigned long long>(uint64_t(descriptor)));
    int const outer = kAlongK ? kRows : kDepth, inner = kAlongK ? kDepth : kRows;
    for (int i = 0; i < outer; ++i) {
      for (int j = 0; j < inner; ++j) {
        int const at = kAlongK ? place(part, i, j) : place(part, j, i);
        int const first = j / kPer * kPer;
        int const chunk = kAlongK ? place(part, i, first) : place(part, first, i);
        if (at != chunk + (j - first) * int(sizeof(Type))) fail("a chunk is not contiguous");
        if (j == first) std::printf(" %d", at);
      }
    }
    std::printf("\n");
  }
}

template <int kRows>
void print_k_major(void* memory) {
  constexpr auto kMajor = UMMA::Major::K;
  using Type = uint8_t;
  print_tile<kMajor, Type, UMMA::Layout_K_INTER_Atom<Type>, kRows>("b8", 0, memory);
  print_tile<kMajor, Type, UMMA::Layout_K_SW32_Atom<Type>, kRows>("b8", 32, memory);
  print_tile<kMajor, Type, UMMA::Layout_K_SW64_Atom<Type>, kRows>("b8", 64, memory);
  print_tile<kMajor, Type, UMMA::Layout_K_SW128_Atom<Type>, kRows>("b8", 128, memory);
}

template <class Type, int kRows>
void print_mn_major(char const* type, void* memory) {
  constexpr auto kMajor = UMMA::Major::MN;
  print_tile<kMajor, Type, UMMA::Layout_MN_INTER_Atom<Type>, kRows>(type, 0, memory);
  print_tile<kMajor, Type, UMMA::Layout_MN_SW32_Atom<Type>, kRows>(type, 32, memory);
  print_tile<kMajor, Type, UMMA::Layout_MN_SW64_Atom<Type>, kRows>(type, 64, memory);
  print_tile<kMajor, Type, UMMA::Layout_MN_SW128_Atom<Type>, kRows>(type, 128, memory);
}

// ---- sums ----

template <class Operation, int kM, int kN, int kCtas>
void print_sums() {
  using Traits = MMA_Traits<Operation>;
  using Shape_ = Shape<Shape<Int<kM / kCtas>, Int<kN>>, _1, _1>;
  auto const cells = Traits::FrgTypeC::make(Shape_{}).layout();
  typename Traits::CLayout const elements;
  std::printf("sums %d %d %d:", kM, kN, kCtas);
  for (int cta = 0; cta < kCtas; ++cta) {
    for (int i = 0; i < kM / kCtas * kN; ++i) {
      uint32_t const cell = cells(i);
      std::printf(" %d %d %d %d", int(elements(cta, i)), cta, int(cell >> 16), int(cell & 0xffff));
    }
  }
  std::printf("\n");
}

template <int kM, int kN>
void print_sums_of_one() {
  print_sums<SM100_MMA_F16BF16_SS<half_t, half_t, float, kM, kN, UMMA::Major::K, UMMA::Major::K>,
             kM, kN, 1>();
}

template <int kM, int kN>
void print_sums_of_pair() {
  print_sums<
      SM100_MMA_F16BF16_2x1SM_SS<half_t, half_t, float, kM, kN, UMMA::Major::K, UMMA::Major::K>, kM,
      kN, 2>();
}

template <int... kN>
void print_all_sums() {
  (print_sums_of_one<64, kN>(), ...);
  (print_sums_of_one<128, kN>(), ...);
  (print_sums_of_pair<128, kN * 2>(), ...);
  (print_sums_of_pair<256, kN * 2>(), ...);
}

// ---- scales ----

// kScales of each row and product, of products that take kProducts * kScales of them.
template <class Fragment, int kRows, int kPer, int kScales, int kProducts>
void print_scales(char const* what, int ctas) {
  using Row = Shape<Int<kPer>, Int<kScales>>;
  auto const cells = Fragment::make(Shape<Shape<Int<kRows>, Row>, _1, Int<kProducts>>{}).layout();
  std::printf("scales %s %d %d %d:", what, kRows, kScales, ctas);
  int const copies = int(size<0, 0>(cells)) / kRows;
  for (int product = 0; product < kProducts; ++product) {
    for (int scale = 0; scale < kScales; ++scale) {
      for (int row = 0; row < kRows; ++row) {
        for (int copy = 0; copy < copies; ++copy) {
          auto const at = make_coord(row + kRows * copy, make_coord(0, scale));
          uint32_t const cell = cells(at, 0, product);
          std::printf(" %d %d %d", int(cell >> 18), int(cell >> 2 & 0xffff), int(cell & 3));
        }
      }
    }
  }
  std::printf("\n");
}

template <int kRows, int kPer, int kScales, int kProducts>
void print_scales_of_one() {
  using Type = float_ue8m0_t;
  print_scales<UMMA::tmem_sf_frg<Type, kPer, 1, true>, kRows, kPer, kScales, kProducts>("A", 1);
  print_scales<UMMA::tmem_sf_frg<Type, kPer, 1, false>, kRows, kPer, kScales, kProducts>("B", 1);
}

template <int kRows>
void print_all_scales() {
  print_scales_of_one<kRows, 32, 1, 8>();
  print_scales_of_one<kRows, 32, 2, 4>();
  print_scales_of_one<kRows, 16, 4, 2>();
  constexpr auto kParted = UMMA::TmemAllocMode::ScaleFactorDuplicated2by2;
  using Parted = UMMA::tmem_sf_frg<float_ue8m0_t, 32, 2, false, kParted>;
  using Parted16 = UMMA::tmem_sf_frg<float_ue8m0_t, 16, 2, false, kParted>;
  print_scales<Parted, kRows, 32, 1, 8>("B", 2);
  print_scales<Parted, kRows, 32, 2, 4>("B", 2);
  print_scales<Parted16, kRows, 16, 4, 2>("B", 2);
}

// ---- loads and stores ----

template <class Registers, class Cells>
void print_registers(char const* name, Registers const& registers, Cells const& cells) {
  constexpr int kHalf = 16;
  std::printf("registers %s:", name);
  for (int half = 0; half < size<1>(registers) / kHalf; ++half) {
    for (int thread = 0; thread < size<0>(registers); ++thread) {
      int64_t const bit = cells(registers(thread, half * kHalf));
      for (int i = 0; i < kHalf; ++i)
        if (cells(registers(thread, half * kHalf + i)) != bit + i) fail("half is not contiguous");
      int64_t const inside = bit & (int64_t(1) << kLaneShift) - 1;
      std::printf(" %d %d %d", int(bit >> kLaneShift), int(inside / 32), int(inside % 32));
    }
  }
  std::printf("\n");
}

#define PRINT_ONE(NAME)                                                                            \
  {                                                                                                \
    using Load = Copy_Traits<SM100_TMEM_LOAD_##NAME>;                                              \
    using Store = Copy_Traits<SM100_TMEM_STORE_##NAME>;                                            \
    print_registers("ld_" #NAME, Load::DstLayout{}, Load::ValID{});                                \
    print_registers("st_" #NAME, Store::SrcLayout{}, Store::ValID{});                              \
  }
#define PRINT(SHAPE, COUNT) PRINT_ONE(SHAPE##COUNT##x) PRINT_ONE(SHAPE##COUNT##x_16b)
#define PRINT_TO_32(SHAPE)                                                                         \
  PRINT(SHAPE, 1) PRINT(SHAPE, 2) PRINT(SHAPE, 4) PRINT(SHAPE, 8) PRINT(SHAPE, 16) PRINT(SHAPE, 32)
#define PRINT_TO_64(SHAPE) PRINT_TO_32(SHAPE) PRINT(SHAPE, 64)
#define PRINT_TO_128(SHAPE) PRINT_TO_64(SHAPE) PRINT(SHAPE, 128)

void print_fragments() {
  PRINT_TO_32(16dp256b)
  PRINT_TO_64(16dp128b)
  PRINT_TO_128(16dp64b)
  PRINT_TO_128(16dp32b)
  PRINT_TO_128(32dp32b)
}

// ---- copies into tensor memory ----

template <class Operation>
void print_copy(char const* name) {
  using Traits = Copy_Traits<Operation>;
  auto const cells = typename Traits::ValID{};
  int const rows = int(size<0>(cells)), bits = int(size<1>(cells));
  int const rest = int(size(cells)) / (rows * bits);
  std::printf("copy %s %d %d:", name, rows, rest);
  for (int more = 0; more < rest; ++more) {
    for (int row = 0; row < rows; ++row) {
      for (int bit = 0; bit < bits; ++bit) {
        int64_t const at = cells(row + rows * (bit + bits * more));
        if (bit % 32 == 0)
          std::printf(" %d %d", int(at >> kLaneShift), int((at & (1 << kLaneShift) - 1) / 32));
        else if (at != cells(row + rows * (bit - 1 + bits * more)) + 1)
          fail("a word is not contiguous");
      }
    }
  }
  std::printf("\n");
}

// Rows of 16 bytes that lie one behind the other, as those of a tile of scales.
template <int kRows>
void print_source(char const* name, void* memory) {
  using Rows = Layout<Shape<Int<kRows>, Int<kChunk>>, Stride<Int<kChunk>, _1>>;
  auto const tile = make_tensor(make_smem_ptr(static_cast<uint8_t*>(memory)), Rows{});
  auto const descriptor = make_tensor<UMMA::smem_desc<UMMA::Major::K>>(group_modes<0, 2>(tile));
  UMMA::SmemDescriptor const found = descriptor.data().desc_;
  std::printf("source %s: %llu", name, static_cast<unsigned long long>(uint64_t(found)));
  for (int row = 0; row < kRows; ++row)
    std::printf(" %d", int(&tile(row, 0) - &tile(0, 0)));
  std::printf("\n");
}

int main() {
  void* memory = std::aligned_alloc(1 << 16, 1 << 18);
  print_k_major<8>(memory);
  print_k_major<24>(memory);
  print_k_major<128>(memory);
  print_k_major<256>(memory);
  print_mn_major<half_t, 256>("b16", memory);
  print_mn_major<uint8_t, 128>("b8", memory);
  print_all_sums<16, 32, 64, 128>();
  print_sums_of_one<64, 8>();
  print_sums_of_one<64, 24>();
  print_sums_of_one<64, 256>();
  print_sums_of_one<128, 256>();
  print_sums_of_pair<128, 16>();
  print_all_scales<64>();
  print_all_scales<128>();
  print_all_scales<192>();
  print_all_scales<256>();
  print_fragments();
  print_copy<SM100_UTCCP_128dp256bit_1cta>("128x256b");
  print_copy<SM100_UTCCP_128dp128bit_1cta>("128x128b");
  print_copy<SM100_UTCCP_2x64dp128bitlw0213_1cta>("64x128b.warpx2::02_13");
  print_copy<SM100_UTCCP_2x64dp128bitlw0123_1cta>("64x128b.warpx2::01_23");
  print_copy<SM100_UTCCP_4x32dp128bit_1cta>("32x128b.warpx4");
  print_source<32>("32x128b.warpx4", memory);
  print_source<64>("64x128b.warpx2::02_13", memory);
  print_source<128>("128x128b", memory);
  std::free(memory);
  return 0;
}
