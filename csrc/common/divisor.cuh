// Division by a number that the host knows: a multiplication and a shift instead of some 25
// instructions.
#pragma once

#include <cuda/std/cstdint>

namespace mqa {

// Field by field as `divisor` in mqa/cuda/plan.py. For numerators below 2^31, value from 1 to 2^31 - 1:
// with shift = 31 + ceil(log2(value)) and multiplier = floor(2^shift / value) + 1, the error of
// n * multiplier / 2^shift is positive and below 2^31 / 2^shift <= 1 / value, so that its floor is that
// of n / value (T. Granlund and P. L. Montgomery, Division by Invariant Integers, 1994).
struct Divisor {
  cuda::std::int32_t value;
  cuda::std::uint32_t multiplier;
  cuda::std::uint32_t shift;

  __device__ __forceinline__ int divide(int n) const {
    return static_cast<int>(
        (static_cast<cuda::std::uint64_t>(static_cast<cuda::std::uint32_t>(n)) * multiplier) >>
        shift);
  }
};

}  // namespace mqa
