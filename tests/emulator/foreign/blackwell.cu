// All Blackwell tutorials as one program, so that headers are compiled once:
//
// program NUMBER M N K: the tutorial of that number, from 1.

// What they include; a namespace that they are in must not get these.
#include <cstdio>
#include <iostream>

#include <thrust/device_vector.h>
#include <thrust/host_vector.h>

#include <cutlass/arch/barrier.h>
#include <cutlass/cluster_launch.hpp>
#include <cutlass/half.h>
#include <cutlass/util/print_error.hpp>

#include <cute/algorithm/cooperative_copy.hpp>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/tmem_allocator_sm100.hpp>
#include <cute/numeric/integral_constant.hpp>
#include <cute/tensor.hpp>

#include "example_utils.hpp"

#define main run
namespace tutorial01 {
#include "01_mma_sm100.cu"
}
namespace tutorial02 {
#include "02_mma_tma_sm100.cu"
}
namespace tutorial03 {
#include "03_mma_tma_multicast_sm100.cu"
}
namespace tutorial04 {
#include "04_mma_tma_2sm_sm100.cu"
}
namespace tutorial05 {
#include "05_mma_tma_epi_sm100.cu"
}
#undef main

int main(int count, char** words) {
  using Program = int(int, char**);
  Program* const all[] = {tutorial01::run, tutorial02::run, tutorial03::run, tutorial04::run,
                          tutorial05::run};
  int const number = count > 1 ? std::atoi(words[1]) : 0;
  if (number < 1 || number > 5) return 2;
  return all[number - 1](count - 1, words + 1);
}
