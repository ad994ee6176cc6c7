// What m16n8k16 products of a warp cost, alone and with other instructions beside them, in clocks of
// the quarter of an SM that runs them: the law that docs/performance.md says of the portable kernels.
//
//   nvcc -O3 -std=c++17 -arch=sm_90 -o mma_rate tools/mma_rate.cu && ./mma_rate
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

constexpr int kTiles = 4, kEights = 2, kSteps = 8;  // as a warp of the portable kernels has them
constexpr int kProducts = kTiles * kEights * kSteps, kSums = kTiles * kEights * 4;
constexpr int kRounds = 2000;

__device__ void product(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// kOthers: instructions for each of the kSums results of a round. 1: a multiply-add; 2: the relu
// before it too; 4: and two on integers.
template <int kOthers>
__global__ void __launch_bounds__(256, 1)
    round_trip(const uint32_t* in, float* out, long long* clocks) {
  uint32_t a[kTiles][kSteps][4], b[kEights][kSteps][2];
  for (int i = 0; i < kTiles * kSteps * 4; i++)
    (&a[0][0][0])[i] = in[(threadIdx.x * 131 + i) % 4096];
  for (int i = 0; i < kEights * kSteps * 2; i++)
    (&b[0][0][0])[i] = in[(threadIdx.x * 37 + i) % 4096];
  float totals[kTiles * 2] = {};
  __syncthreads();
  const long long begin = clock64();
  float sums[kTiles][kEights][4] = {};
#pragma unroll 1
  for (int round = 0; round < kRounds; round++) {
#pragma unroll
    for (int step = 0; step < kSteps; step++)
#pragma unroll
      for (int eight = 0; eight < kEights; eight++)
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++)
          product(sums[tile][eight], a[tile][step], b[eight][step]);
#pragma unroll
    for (int i = 0; i < kSums; i++) {
      float value = (&sums[0][0][0])[i];
      if constexpr (kOthers >= 4) value = __int_as_float((__float_as_int(value) ^ round) + round);
      if constexpr (kOthers >= 2) value = value + fabsf(value);
      if constexpr (kOthers >= 1)
        totals[i % (kTiles * 2)] =
            fmaf(__uint_as_float(b[i % 2][0][0]), value, totals[i % (kTiles * 2)]);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) clocks[blockIdx.x] = clock64() - begin;
  for (int i = 1; i < kTiles * 2; i++)
    totals[0] += totals[i];
  for (int i = 0; i < kSums; i++)
    totals[0] += (&sums[0][0][0])[i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = totals[0];
}

template <int kOthers>
void measure(const uint32_t* in, float* out, long long* clocks, int blocks) {
  for (int warps = 4; warps <= 8; warps += 4) {
    round_trip<kOthers><<<blocks, warps * 32>>>(in, out, clocks);
    round_trip<kOthers><<<blocks, warps * 32>>>(in, out, clocks);
    long long taken;
    cudaMemcpy(&taken, clocks, sizeof(taken), cudaMemcpyDeviceToHost);
    const double each = static_cast<double>(taken) / kRounds / kProducts / (warps / 4);
    printf("%d others a result, %.2f a product; %d warps a scheduler: %.2f clocks a product\n",
           kOthers, static_cast<double>(kOthers) * kSums / kProducts, warps / 4, each);
  }
}

int main() {
  int blocks;
  cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0);
  static uint32_t values[4096];
  for (uint32_t& value : values)  // pairs of float16 from 0.5 to 2, of both signs
    value = 0x3c003c00u ^ (rand() & 0x83ffu) ^ (rand() & 0x83ffu) << 16;
  uint32_t* in;
  float* out;
  long long* clocks;
  cudaMalloc(&in, sizeof(values)), cudaMalloc(&out, blocks * 256 * sizeof(float));
  cudaMalloc(&clocks, blocks * sizeof(*clocks));
  cudaMemcpy(in, values, sizeof(values), cudaMemcpyHostToDevice);
  measure<0>(in, out, clocks, blocks);
  measure<1>(in, out, clocks, blocks);
  measure<2>(in, out, clocks, blocks);
  measure<4>(in, out, clocks, blocks);
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) printf("%s\n", cudaGetErrorString(error));
  return error != cudaSuccess;
}
