// Writes -inf outside windows, and nothing else.
#pragma once

#include "common/logits.cuh"

namespace mqa::test {

template <typename Logit>
__global__ void clean(Logit* data,
                      const int32_t* start,
                      const int32_t* end,
                      int64_t stride,
                      int rows,
                      int tokens,
                      int width,
                      int compressed) {
  clean_rows_by_stores(Logits<Logit>{data, stride, width, compressed != 0},
                       Windows{start, end, 1, 1, rows, tokens}, blockIdx.x, gridDim.x);
}

}  // namespace mqa::test
