// Multiplies matrices that have block scales with the collectives of CUTLASS: D = A * B in float32,
// where A is [M, K] and B is [N, K], K contiguous. MQA_BITS is 8 for MXF8 of E4M3, 4 for MXF4.
//
// program M N K: memory is not filled, a test does so in what was written down.

#include <cstdint>
#include <cstdlib>

#include <cutlass/cutlass.h>

#include <cutlass/detail/sm100_blockscaled_layout.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/gemm/kernel/tile_scheduler_params.h>

using namespace cute;
namespace collective = cutlass::gemm::collective;
namespace epilogue = cutlass::epilogue;

#if MQA_BITS == 8
using Element = cutlass::mx_float8_t<cutlass::float_e4m3_t>;
using Schedule = cutlass::gemm::KernelTmaWarpSpecialized1SmMxf8f6f4Sm100;
using Block = Shape<_128, _128, _128>;
constexpr int kAlign = 16;
#else
using Element = cutlass::mx_float4_t<cutlass::float_e2m1_t>;
using Schedule = cutlass::gemm::KernelTmaWarpSpecialized1SmMxf4Sm100;
using Block = Shape<_128, _128, _256>;
constexpr int kAlign = 32;
#endif
using Rows = cutlass::layout::RowMajor;
using Columns = cutlass::layout::ColumnMajor;
using Cluster = Shape<_1, _1, _1>;
using Architecture = cutlass::arch::Sm100;
using Unit = cutlass::arch::OpClassBlockScaledTensorOp;

using Epilogue = typename epilogue::collective::CollectiveBuilder<
    Architecture,
    Unit,
    Block,
    Cluster,
    epilogue::collective::EpilogueTileAuto,
    float,
    float,
    void,
    Rows,
    4,
    float,
    Rows,
    4,
    epilogue::NoSmemWarpSpecialized1Sm>::CollectiveOp;
using Mainloop = typename collective::CollectiveBuilder<Architecture,
                                                        Unit,
                                                        Element,
                                                        Rows,
                                                        kAlign,
                                                        Element,
                                                        Columns,
                                                        kAlign,
                                                        float,
                                                        Block,
                                                        Cluster,
                                                        collective::StageCount<2>,
                                                        Schedule>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>,
                                                    Mainloop,
                                                    Epilogue,
                                                    cutlass::gemm::StaticPersistentScheduler>;
constexpr int kCtas = 2;  // each takes several tiles of D
using Scales = typename Mainloop::Sm1xxBlkScaledConfig;

template <class Type>
Type* allocated(size_t size) {
  void* found = nullptr;
  cudaMalloc(&found, size);
  return static_cast<Type*>(found);
}

int main(int count, char** words) {
  if (count != 4) return 2;
  int const m = std::atoi(words[1]), n = std::atoi(words[2]), k = std::atoi(words[3]);
  auto const shape = make_shape(m, n, k, 1);
  using Value = typename Element::DataType;
  using Scale = typename Element::ScaleFactorType;
  int const per_byte = 8 / cutlass::sizeof_bits<Value>::value;
  auto const scales_a = Scales::tile_atom_to_shape_SFA(shape);
  auto const scales_b = Scales::tile_atom_to_shape_SFB(shape);
  auto* a = allocated<Value>(size_t(m) * k / per_byte);
  auto* b = allocated<Value>(size_t(n) * k / per_byte);
  auto* scale_a = allocated<Scale>(size(filter_zeros(scales_a)));
  auto* scale_b = allocated<Scale>(size(filter_zeros(scales_b)));
  auto* d = allocated<float>(size_t(m) * n * sizeof(float));
  auto const stride = [](int inner) { return make_stride(int64_t(inner), _1{}, int64_t(0)); };
  typename Kernel::Arguments arguments{
      cutlass::gemm::GemmUniversalMode::kGemm,
      shape,
      {a, stride(k), b, stride(k), scale_a, scales_a, scale_b, scales_b},
      {{1.0f, 0.0f}, nullptr, {}, d, stride(n)}};
  arguments.hw_info.sm_count = kCtas;
  cutlass::gemm::device::GemmUniversalAdapter<Kernel> multiply;
  if (multiply.can_implement(arguments) != cutlass::Status::kSuccess) return 4;
  if (multiply.initialize(arguments) != cutlass::Status::kSuccess) return 5;
  return multiply.run() == cutlass::Status::kSuccess ? 0 : 6;
}
