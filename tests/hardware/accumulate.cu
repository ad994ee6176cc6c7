// D = A * B^T (+ C) by a chain of wgmma instructions, one tile a CTA of one warpgroup.
//
//   a, b  [tiles, 64, steps * 32 bytes]   rows of E4M3 (FP8 = 1) or bfloat16 (FP8 = 0)
//   c, d  [tiles, 64, 64] float32         c is read only if use_c
//
// SEPARATE = 1 waits for each instruction before the next; SWIZZLED = 1 lays the operands out for
// the 128-byte swizzle instead of none. Neither may change a bit of d.

constexpr int ROWS = 64;
constexpr int MAX_STEPS = 8;
constexpr int STEP_BYTES = ROWS * 32;

#if FP8
#  define MMA "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"
#  define IMMEDIATES "1, 1"
#else
#  define MMA "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
#  define IMMEDIATES "1, 1, 0, 0"
#endif

// Where 16-byte chunk `chunk` of a row lies; a step has two chunks.
int chunk_offset(int row, int chunk) {
#if SWIZZLED
  return chunk / 8 * (ROWS * 128) + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
#else
  return chunk / 2 * STEP_BYTES + row / 8 * 256 + chunk % 2 * 128 + row % 8 * 16;
#endif
}

unsigned long long descriptor(unsigned tile, int step) {
#if SWIZZLED
  const unsigned start = tile + step / 4 * (ROWS * 128) + step % 4 * 32;
  const unsigned leading = 16, stride = 1024;
  const unsigned long long mode = 1ull << 62;
#else
  const unsigned start = tile + step * STEP_BYTES;
  const unsigned leading = 128, stride = 256;
  const unsigned long long mode = 0;
#endif
  return mode | (unsigned long long)(stride >> 4) << 32 | (unsigned long long)(leading >> 4) << 16 |
         (start & 0x3FFFF) >> 4;
}

void mma(float (&d)[32], unsigned long long a, unsigned long long b, int add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %34, 0;\n" MMA
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19,"
      " %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, " IMMEDIATES
      ";\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(add)
      : "memory");
}

void fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

void finish() {
  asm volatile("wgmma.commit_group.sync.aligned;\n"
               "wgmma.wait_group.sync.aligned 0;\n" ::
                   : "memory");
}

extern "C" __global__ void __launch_bounds__(128)
    accumulate(const uint4* a, const uint4* b, const float* c, float* d, int steps, int use_c) {
  __shared__ alignas(1024) unsigned char shared[2][MAX_STEPS * STEP_BYTES];
  const int thread = threadIdx.x;
  const int chunks = steps * 2;
  for (int i = thread; i < ROWS * chunks; i += 128) {
    const int offset = chunk_offset(i / chunks, i % chunks);
    const long long source = (long long)blockIdx.x * ROWS * chunks + i;
    *(uint4*)&shared[0][offset] = a[source];
    *(uint4*)&shared[1][offset] = b[source];
  }
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
  __syncthreads();

  const float* c_tile = c + (long long)blockIdx.x * ROWS * ROWS;
  float* d_tile = d + (long long)blockIdx.x * ROWS * ROWS;
  const int row = 16 * (thread / 32) + thread % 32 / 4;
  const int column = 2 * (thread % 4);
  float sums[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int at = (row + 8 * (i / 2 % 2)) * ROWS + column + 8 * (i / 4) + i % 2;
    sums[i] = use_c ? c_tile[at] : 0;
  }

  const unsigned base = (unsigned)__cvta_generic_to_shared(&shared[0][0]);
  fence();
  for (int step = 0; step < steps; ++step) {
    mma(sums, descriptor(base, step), descriptor(base + MAX_STEPS * STEP_BYTES, step),
        use_c || step > 0);
#if SEPARATE
    finish();
    fence();
#endif
  }
  finish();
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int at = (row + 8 * (i / 2 % 2)) * ROWS + column + 8 * (i / 4) + i % 2;
    d_tile[at] = sums[i];
  }
}
