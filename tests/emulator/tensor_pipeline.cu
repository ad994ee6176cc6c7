// out[t, m] = sum_n relu(sum_k a[t, m, k] b[n, k]) of MXFP8 operands, for tiles of 128 rows by
// N = 64 columns and K = 128: the protocol of a scoring kernel on Blackwell, as small as it gets.
//
//   warp 0     copies: tiles of A with their scales, in two stages; B once
//   warp 1     allocates and frees tensor memory; one thread copies scales and multiplies
//   warps 2-5  load sums, each those of its quarter of the lanes, and store
//
//   barrier    filled by                   arrivals   waited on by
//   b_full     copies, tx bytes                   1   products
//   full       copies, tx bytes                   1   products
//   empty      commit of a tile's products        1   copies
//   sums_full  commit of a tile's products        1   loads
//   sums_empty loads, every thread              128   products
//
// Operands come as they lie in shared memory, without a swizzle: four steps of 32 bytes a row, then
// the 512 bytes of scales. Columns: two tiles of sums, two of scales of A, those of scales of B.

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 kRows = 128, kColumns = 64, kSteps = 4, kScaleBytes = 512, kAllocated = 256;
constexpr u32 kStageBytes = kSteps * kRows * 32 + kScaleBytes;
constexpr u32 kBBytes = kSteps * kColumns * 32 + kScaleBytes;
constexpr u32 kScalesOfA = 2 * kColumns, kScalesOfB = kScalesOfA + 8;
constexpr u64 kOperand = 1ull << 46 | 256ull >> 4 << 32 | 128ull >> 4 << 16;
constexpr u64 kScales = 1ull << 46 | 128ull >> 4 << 32;
constexpr u32 kInstruction = 1u << 23 | kColumns >> 3 << 17 | kRows >> 4 << 24;

struct __align__(1024) Shared {
  u8 stage[2][kStageBytes];
  u8 b[kBBytes];
  u64 full[2], empty[2], sums_full[2], sums_empty[2], b_full;
  u32 slot;
};

__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void init(u64* barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void wait(u64* barrier, u32 parity) {
  asm volatile(
      "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;"
      " @!p bra AGAIN; }" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void copy_in(void* to, const u8* from, u32 bytes, u64* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ u64 descriptor(const u8* place, u64 fields) {
  return fields | shared_address(place) >> 4;
}

__device__ __forceinline__ void copy_scales(u32 to, const u8* from) {
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;"
               ::"r"(to), "l"(descriptor(from, kScales)) : "memory");
}

__device__ __forceinline__ void multiply(u32 d, u64 a, u64 b, u32 scales_a, u32 scales_b, u32 id,
                                         u32 adds) {
  const u32 instruction = kInstruction | id << 29 | id << 4;
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %6, 0;"
      " tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%0], %1, %2, %3, [%4], [%5], p; }"
      ::"r"(d), "l"(a), "l"(b), "r"(instruction), "r"(scales_a), "r"(scales_b), "r"(adds)
      : "memory");
}

__device__ __forceinline__ void commit(u64* barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
               ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void before_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

__device__ __forceinline__ void after_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

__device__ __forceinline__ void free_memory(u32 memory) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;"
               ::"r"(memory), "n"(kAllocated));
}

__device__ __forceinline__ void copy_warp(Shared& s, const u8* a, const u8* b, u32 tiles) {
  copy_in(s.b, b, kBBytes, &s.b_full);
  for (u32 t = 0; t < tiles; ++t) {
    const u32 stage = t % 2;
    wait(&s.empty[stage], (t / 2 + 1) & 1);
    copy_in(s.stage[stage], a + t * kStageBytes, kStageBytes, &s.full[stage]);
  }
}

__device__ __forceinline__ void product_thread(Shared& s, u32 memory, u32 tiles) {
  wait(&s.b_full, 0);
  copy_scales(memory + kScalesOfB, s.b + kSteps * kColumns * 32);
  for (u32 t = 0; t < tiles; ++t) {
    const u32 stage = t % 2;
    const u32 scales = memory + kScalesOfA + 4 * stage;
    wait(&s.sums_empty[stage], (t / 2 + 1) & 1);
    wait(&s.full[stage], t / 2 & 1);
    after_sync();  // of sums_empty
    copy_scales(scales, s.stage[stage] + kSteps * kRows * 32);
    for (u32 k = 0; k < kSteps; ++k) {
      const u64 rows = descriptor(s.stage[stage] + k * kRows * 32, kOperand);
      const u64 columns = descriptor(s.b + k * kColumns * 32, kOperand);
      multiply(memory + kColumns * stage, rows, columns, scales, memory + kScalesOfB, k, k > 0);
    }
    commit(&s.empty[stage]);
    commit(&s.sums_full[stage]);
  }
}

__device__ __forceinline__ void load_warp(Shared& s, u32 memory, u32 tiles, float* out) {
  const u32 quarter = threadIdx.x / 32 % 4;
  for (u32 t = 0; t < tiles; ++t) {
    const u32 stage = t % 2;
    float sum = 0;
    wait(&s.sums_full[stage], t / 2 & 1);
    after_sync();  // of sums_full
    for (u32 n = 0; n < kColumns; n += 4) {
      float x[4];
      asm volatile("tcgen05.ld.sync.aligned.32x32b.x4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                   : "r"(memory + kColumns * stage + n + (quarter << 21)));
      asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
      for (u32 i = 0; i < 4; ++i) sum += x[i] > 0 ? x[i] : 0;
    }
    before_sync();  // of sums_empty
    arrive(&s.sums_empty[stage]);
    out[t * kRows + quarter * 32 + threadIdx.x % 32] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(192)
    score(float* out, const u8* a, const u8* b, u32 tiles) {
  __shared__ Shared s;
  const u32 warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < 2; ++i) {
      init(&s.full[i], 1);
      init(&s.empty[i], 1);
      init(&s.sums_full[i], 1);
      init(&s.sums_empty[i], 128);
    }
    init(&s.b_full, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (warp == 1) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;"
                 ::"r"(shared_address(&s.slot)), "n"(kAllocated) : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
  }
  __syncthreads();
  const u32 memory = s.slot;
  if (warp == 0 && threadIdx.x == 0) copy_warp(s, a, b, tiles);
  if (warp == 1 && threadIdx.x == 32) product_thread(s, memory, tiles);
  if (warp > 1) load_warp(s, memory, tiles, out);
  __syncthreads();
  if (warp == 1) free_memory(memory);
}
