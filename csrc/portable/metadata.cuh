// Cut points of a schedule by one CTA, without what GPUs before SM90 lack.
#pragma once

#include "score/metadata.cuh"

namespace mqa::portable {

template <typename Source>
__global__ void __launch_bounds__(score::kMetadataThreads, 1)
    metadata(const __grid_constant__ Source source) {
  __shared__ score::MetadataStorage storage;
  score::write_cuts<1>(source, storage);
}

}  // namespace mqa::portable
