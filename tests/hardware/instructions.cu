// Single instructions whose result the PTX manual leaves open.

// leaders[i]: the lane that elect.sync chose among the lanes of masks[i]; named[i]: the lane that
// every one of them was told, or -1 if they were told different ones.
extern "C" __global__ void elect(const unsigned* masks, int* leaders, int* named, int count) {
  const int lane = threadIdx.x;
  for (int i = 0; i < count; ++i) {
    const unsigned mask = masks[i];
    if (mask >> lane & 1) {
      unsigned chosen, told;
      asm volatile("{\n"
                   ".reg .pred p;\n"
                   "elect.sync %1|p, %2;\n"
                   "selp.u32 %0, 1, 0, p;\n"
                   "}\n"
                   : "=r"(chosen), "=r"(told)
                   : "r"(mask));
      if (chosen) leaders[i] = lane;
      const bool same = __match_any_sync(mask, told) == mask;
      if (chosen) named[i] = same ? (int)told : -1;
    }
    __syncwarp();
  }
}

// For each CTA of a cluster: the address of a shared variable as the CTA itself sees it, then as
// mapa gives it for every rank, then what a load from each of those addresses finds.
extern "C" __global__ void __cluster_dims__(4, 1, 1) cluster_addresses(unsigned* out) {
  __shared__ unsigned variable;
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  variable = 100 + rank;
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n" ::: "memory");
  const unsigned own = (unsigned)__cvta_generic_to_shared(&variable);
  out += rank * 9;
  out[0] = own;
  for (unsigned target = 0; target < 4; ++target) {
    unsigned address, found;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(own), "r"(target));
    asm volatile("ld.shared::cluster.u32 %0, [%1];\n" : "=r"(found) : "r"(address) : "memory");
    out[1 + target] = address;
    out[5 + target] = found;
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n" ::: "memory");
}

// Where dynamic shared memory starts in a kernel that has no other.
extern "C" __global__ void shared_start(unsigned* out) {
  extern __shared__ unsigned char dynamic[];
  *out = (unsigned)__cvta_generic_to_shared(dynamic);
}

// e4m3[i]: high[i] in the high byte, low[i] in the low byte. bf16[i]: the same of bfloat16.
extern "C" __global__ void convert(
    const float* high, const float* low, unsigned short* e4m3, unsigned* bf16, int count) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    asm volatile("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n"
                 : "=h"(e4m3[i])
                 : "f"(high[i]), "f"(low[i]));
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(bf16[i]) : "f"(high[i]), "f"(low[i]));
  }
}
