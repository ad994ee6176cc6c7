// d = a b^T + c for tiles of 64 x 64 by warp products of 16-bit numbers, m16n8k16 one after the other.
//
// TYPES: "bf16.bf16" or "f16.f16". a, b [tiles, 64, depth] of that type, c, d [tiles, 64, 64] float32; without has_c sums start at zero. A
// CTA of four warps has a tile, a warp 16 of its rows. Fragments are loaded element by element.

using Bits = unsigned short;

constexpr int kRows = 64;

// Two neighbours of a row.
__device__ unsigned pair_at(const Bits* matrix, int depth, int row, int column) {
  const Bits* first = matrix + row * depth + column;
  return first[0] | static_cast<unsigned>(first[1]) << 16;
}

__device__ void multiply_block(
    float (&sums)[4], const Bits* a, const Bits* b, int depth, int group, int member) {
  for (int k = 0; k < depth; k += 16) {
    const int low = k + 2 * member, high = low + 8;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPES ".f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(pair_at(a, depth, group, low)), "r"(pair_at(a, depth, group + 8, low)),
                   "r"(pair_at(a, depth, group, high)), "r"(pair_at(a, depth, group + 8, high)),
                   "r"(pair_at(b, depth, group, low)), "r"(pair_at(b, depth, group, high)));
  }
}

extern "C" __global__ void multiply(
    const Bits* a, const Bits* b, const float* c, float* d, int depth, int has_c) {
  const int lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
  const int top = threadIdx.x / 32 * 16;
  const Bits* rows = a + (blockIdx.x * kRows + top) * depth;
  for (int column = 0; column < kRows; column += 8) {
    float sums[4];
    int places[4];
    for (int i = 0; i < 4; ++i) {
      const int row = top + group + i / 2 * 8;
      places[i] = (blockIdx.x * kRows + row) * kRows + column + 2 * member + i % 2;
      sums[i] = has_c ? c[places[i]] : 0.0f;
    }
    multiply_block(sums, rows, b + (blockIdx.x * kRows + column) * depth, depth, group, member);
    for (int i = 0; i < 4; ++i)
      d[places[i]] = sums[i];
  }
}
