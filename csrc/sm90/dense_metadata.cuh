// Cut points of a dense schedule, int32 [parts + 1, 2]: CTA i finds and writes cut i.
// Meaning: mqa/reference/schedule.py, equal bit for bit.
#pragma once

#include "common/windows.cuh"
#include "ptx/control.cuh"

namespace mqa::sm90 {

constexpr int kMetadataThreads = 512;

// Field by field as in mqa/cuda/sm90.py. Strides are in elements.
struct MetadataArguments {
  const int32_t* start;
  const int32_t* end;
  int32_t* cuts;
  int64_t start_stride;
  int64_t end_stride;
  int64_t cuts_stride;
  int32_t rows;
  int32_t tokens;
  int32_t block;  // rows of a query block
};

__global__ void __launch_bounds__(kMetadataThreads, 1)
    dense_metadata(const __grid_constant__ MetadataArguments args) {
  __shared__ CutStorage<kMetadataThreads> storage;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const Windows windows{args.start,      args.end,  args.start_stride,
                        args.end_stride, args.rows, args.tokens};
  find_cuts<kMetadataThreads>(windows, args.block, kScheduleSplit, blockIdx.x, gridDim.x - 1,
                              storage, [](int rows, int tasks) { return Weights{1, rows, tasks}; });
  __syncthreads();
  if (threadIdx.x == 0) {
    args.cuts[blockIdx.x * args.cuts_stride] = storage.cuts[0].block;
    args.cuts[blockIdx.x * args.cuts_stride + 1] = storage.cuts[0].split;
  }
}

}  // namespace mqa::sm90
