// One tensor load, whose transaction bytes are counted, and one tensor store.

struct alignas(128) TensorMap {
  unsigned char opaque[128];
};

constexpr int SHARED_BYTES = 24576;
constexpr unsigned EXPECTED_BYTES = 65536;  // more than any box here, so that the phase stays open
constexpr unsigned char UNTOUCHED = 0xAA;

unsigned shared_address(const void* pointer) {
  return (unsigned)__cvta_generic_to_shared(pointer);
}

bool phase_is_done(unsigned barrier) {
  unsigned done;
  asm volatile("{\n"
               ".reg .pred p;\n"
               "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], 0;\n"
               "selp.u32 %0, 1, 0, p;\n"
               "}\n"
               : "=r"(done)
               : "r"(barrier)
               : "memory");
  return done;
}

// Copies all shared bytes to `image`, those that the load left alone as UNTOUCHED.
// report: bytes counted by complete_tx, shared address of image[0].
extern "C" __global__ void __launch_bounds__(128) load(const __grid_constant__ TensorMap map,
                                                       int x,
                                                       int y,
                                                       int z,
                                                       unsigned offset,
                                                       unsigned char* image,
                                                       unsigned* report) {
  __shared__ alignas(1024) unsigned char shared[SHARED_BYTES];
  __shared__ alignas(8) unsigned long long barrier_storage;
  const unsigned barrier = shared_address(&barrier_storage);
  for (int i = threadIdx.x; i < SHARED_BYTES; i += 128)
    shared[i] = UNTOUCHED;
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n"
                 "fence.mbarrier_init.release.cluster;\n" ::"r"(barrier)
                 : "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier),
                 "r"(EXPECTED_BYTES)
                 : "memory");
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4}], [%5];\n" ::"r"(shared_address(shared) + offset),
                 "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
                 : "memory");
    for (int i = 0; i < 500; ++i)
      __nanosleep(1000);
    // What the load did not count is counted here, byte by byte, until the phase completes.
    unsigned missing = 0;
    while (!phase_is_done(barrier) && missing < EXPECTED_BYTES) {
      asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 1;\n" ::"r"(barrier)
                   : "memory");
      ++missing;
    }
    report[0] = EXPECTED_BYTES - missing;
    report[1] = shared_address(shared);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < SHARED_BYTES; i += 128)
    image[i] = shared[i];
}

// Stores the box at (x, y, z) from shared memory that holds `source` [bytes].
extern "C" __global__ void __launch_bounds__(128) store(const __grid_constant__ TensorMap map,
                                                        int x,
                                                        int y,
                                                        int z,
                                                        const unsigned char* source,
                                                        int bytes) {
  __shared__ alignas(1024) unsigned char shared[SHARED_BYTES];
  for (int i = threadIdx.x; i < bytes; i += 128)
    shared[i] = source[i];
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\n"
                 "cp.async.bulk.commit_group;\n"
                 "cp.async.bulk.wait_group 0;\n" ::"l"(&map),
                 "r"(x), "r"(y), "r"(z), "r"(shared_address(shared))
                 : "memory");
  }
}
