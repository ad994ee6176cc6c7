// out = A B^T on the tensor unit that every GPU from SM80 on has: what the emulator is tested with.
//
// A CTA of four warps makes a tile of 64 rows and 64 columns, 32 of each a warp. Threads copy steps
// of 32 elements of K to a ring of stages by cp.async, two steps ahead; rows past the ends become
// zeros. A row of a stage has four chunks of 16 bytes, which its number permutes, so that the eight
// rows of a matrix of ldmatrix lie in different banks.
#pragma once

#include <cuda/std/cstdint>

namespace mqa::test {

using cuda::std::int32_t;
using cuda::std::uint16_t;
using cuda::std::uint32_t;

constexpr int kRows = 64, kColumns = 64, kDepth = 32, kStages = 3, kThreads = 128;
constexpr int kChunks = kDepth / 8;  // of a row, 16 bytes each

struct Tile {
  uint16_t a[kRows * kDepth], b[kColumns * kDepth];  // bfloat16
};

struct SharedStorage {
  alignas(128) Tile stages[kStages];
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Where a chunk of a row lies in its part of a stage, in elements.
__device__ __forceinline__ int place_of(int row, int chunk) {
  return (row * kChunks + (chunk ^ row / 2 % kChunks)) * 8;
}

__device__ __forceinline__ void copy_chunk(uint32_t to, const uint16_t* from, bool exists) {
  const int bytes = exists ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :
               : "r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// Rows [first, first + 64) of a matrix [rows, depth], elements [k, k + 32).
__device__ __forceinline__ void copy_part(
    uint16_t* to, const uint16_t* from, int first, int rows, int k, int depth) {
  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool exists = first + row < rows && k + chunk * 8 < depth;
    const auto source = static_cast<long long>(first + row) * depth + k + chunk * 8;
    copy_chunk(shared_address(to + place_of(row, chunk)), from + (exists ? source : 0), exists);
  }
}

// Four 8x8 matrices: rows are those of lanes 0 to 7, 8 to 15, ...
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void multiply(float (&sums)[4],
                                         const uint32_t (&a)[4],
                                         uint32_t b0,
                                         uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A warp's 32 rows and 32 columns of a step.
__device__ __forceinline__ void multiply_step(float (&sums)[2][4][4], const Tile& tile) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int top = warp / 2 * 32, left = warp % 2 * 32;
  for (int half = 0; half < kDepth / 16; ++half) {
    uint32_t a[2][4], b[2][4];
    for (int i = 0; i < 2; ++i) {
      const int row = top + i * 16 + lane % 16, column = left + i * 16 + lane / 16 * 8 + lane % 8;
      load_matrices(a[i], shared_address(tile.a + place_of(row, half * 2 + lane / 16)));
      load_matrices(b[i], shared_address(tile.b + place_of(column, half * 2 + lane / 8 % 2)));
    }
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 4; ++j)
        multiply(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }
}

__device__ __forceinline__ void store(float* out,
                                      const float (&sums)[2][4][4],
                                      int first_row,
                                      int first_column,
                                      int rows,
                                      int columns) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 4; ++j) {
      for (int value = 0; value < 4; ++value) {
        const int row = first_row + warp / 2 * 32 + i * 16 + value / 2 * 8 + lane / 4;
        const int column = first_column + warp % 2 * 32 + j * 8 + lane % 4 * 2 + value % 2;
        if (row < rows && column < columns) {
          out[static_cast<long long>(row) * columns + column] = sums[i][j][value];
        }
      }
    }
  }
}

// a: bfloat16 [rows, depth], b: bfloat16 [columns, depth], out: float32 [rows, columns]; depth is a
// multiple of 8. The grid has a CTA for each 64 columns (x) and 64 rows (y).
template <int kWaitFor>
__global__ void __launch_bounds__(kThreads)
    product(const uint16_t* a, const uint16_t* b, float* out, int rows, int columns, int depth) {
  __shared__ SharedStorage shared;
  const int row = blockIdx.y * kRows, column = blockIdx.x * kColumns;
  const int steps = (depth + kDepth - 1) / kDepth;
  const auto copy_step = [&](int step) {
    Tile& tile = shared.stages[step % kStages];
    if (step < steps) {
      copy_part(tile.a, a, row, rows, step * kDepth, depth);
      copy_part(tile.b, b, column, columns, step * kDepth, depth);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  for (int step = 0; step < kStages - 1; ++step)
    copy_step(step);
  float sums[2][4][4] = {};
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kWaitFor) : "memory");
    __syncthreads();
    copy_step(step + kStages - 1);
    multiply_step(sums, shared.stages[step % kStages]);
  }
  store(out, sums, row, column, rows, columns);
}

}  // namespace mqa::test
