// A CUDA runtime that launches nothing: device memory is memory of the host, and the first launch
// of a kernel that was asked for is written down, with its arguments, all allocations and the tensor
// maps, and ends the program. Launches of other kernels, which fill memory, do nothing.
//
// RECORD is the folder to write to; its file `sizes` has a line for each kernel asked for: the name,
// and the bytes of each parameter. CAPABILITY is the major compute capability of the device.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace {

constexpr char kMapMagic[16] = "recorded map";
constexpr int kSms = 132;
constexpr size_t kAlign = 512;  // what cudaMalloc promises, and more

// What stood between <<< and >>> last.
struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};

Configuration configuration;

struct Allocation {
  size_t size, number;
};

std::map<char*, Allocation> allocations;
size_t num_allocations = 0;
std::ostringstream maps;
uint64_t num_maps = 0;

// By the address of the host's function. Made when it is first asked for: kernels are registered
// before this file's own variables are there.
std::map<void const*, std::string>& kernels() {
  static std::map<void const*, std::string> found;
  return found;
}

std::string setting(char const* name) {
  char const* found = std::getenv(name);
  if (found == nullptr) {
    std::fprintf(stderr, "%s is not set\n", name);
    std::exit(3);
  }
  return found;
}

// False if the kernel was not asked for.
bool sizes_of(std::string const& kernel, std::vector<size_t>& found) {
  std::ifstream file(setting("RECORD") + "/sizes");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    if (name != kernel) continue;
    for (size_t size; words >> size;)
      found.push_back(size);
    return true;
  }
  return false;
}

void write(std::string const& name, void const* data, size_t size) {
  std::ofstream file(setting("RECORD") + "/" + name, std::ios::binary);
  file.write(static_cast<char const*>(data), static_cast<std::streamsize>(size));
}

cudaError_t record(
    void const* function, dim3 grid, dim3 block, dim3 cluster, size_t shared, void** args) {
  std::string const& name = kernels().at(function);
  std::vector<size_t> sizes;
  if (!sizes_of(name, sizes)) return cudaSuccess;
  std::ofstream out(setting("RECORD") + "/launch");
  out << "kernel " << name << "\n";
  out << "grid " << grid.x << " " << grid.y << " " << grid.z << "\n";
  out << "block " << block.x << " " << block.y << " " << block.z << "\n";
  out << "cluster " << cluster.x << " " << cluster.y << " " << cluster.z << "\n";
  out << "shared " << shared << "\n";
  for (size_t i = 0; i < sizes.size(); ++i) {
    auto const file = "param" + std::to_string(i);
    write(file, args[i], sizes[i]);
    out << "param " << file << "\n";
  }
  // In the order in which they were made.
  std::map<size_t, char*> ordered;
  for (auto const& [address, found] : allocations)
    ordered[found.number] = address;
  for (auto const& [number, address] : ordered) {
    auto const file = "memory" + std::to_string(number);
    write(file, address, allocations[address].size);
    out << "memory " << file << " " << reinterpret_cast<uintptr_t>(address) << "\n";
  }
  out << maps.str();
  out.close();
  std::fflush(nullptr);
  std::_Exit(0);
}

CUresult encode_tiled(CUtensorMap* map,
                      CUtensorMapDataType type,
                      cuuint32_t rank,
                      void* address,
                      cuuint64_t const* shape,
                      cuuint64_t const* strides,
                      cuuint32_t const* box,
                      cuuint32_t const* steps,
                      CUtensorMapInterleave interleave,
                      CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion,
                      CUtensorMapFloatOOBfill fill) {
  maps << "map " << type << " " << rank << " " << reinterpret_cast<uintptr_t>(address);
  for (cuuint32_t i = 0; i < rank; ++i)
    maps << " " << shape[i];
  for (cuuint32_t i = 0; i + 1 < rank; ++i)
    maps << " " << strides[i];
  for (cuuint32_t i = 0; i < rank; ++i)
    maps << " " << box[i];
  for (cuuint32_t i = 0; i < rank; ++i)
    maps << " " << steps[i];
  maps << " " << interleave << " " << swizzle << " " << fill << "\n";
  std::memset(map, 0, sizeof(*map));
  std::memcpy(map, kMapMagic, sizeof(kMapMagic));
  std::memcpy(reinterpret_cast<char*>(map) + sizeof(kMapMagic), &num_maps, sizeof(num_maps));
  ++num_maps;
  return CUDA_SUCCESS;
}

cudaError_t entry_point(char const* symbol, void** function) {
  *function = nullptr;
  if (std::strcmp(symbol, "cuTensorMapEncodeTiled") != 0) return cudaErrorNotSupported;
  *function = reinterpret_cast<void*>(&encode_tiled);
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t size) {
  size_t const padded = (size + kAlign - 1) / kAlign * kAlign;
  char* found = static_cast<char*>(std::aligned_alloc(kAlign, padded == 0 ? kAlign : padded));
  std::memset(found, 0xff, size);  // NaN until it is written
  allocations[found] = {size, num_allocations++};
  *pointer = found;
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  allocations.erase(static_cast<char*>(pointer));
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, void const* from, size_t size, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t) {
  std::memset(to, value, size);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  *available = *total = size_t{1} << 37;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void const*) {
  std::memset(attributes, 0, sizeof(*attributes));
  attributes->maxThreadsPerBlock = 1024;
  attributes->ptxVersion = attributes->binaryVersion = 10 * std::stoi(setting("CAPABILITY"));
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof(*properties));
  properties->major = std::stoi(setting("CAPABILITY"));
  properties->multiProcessorCount = kSms;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(char const* symbol,
                                             void** function,
                                             unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  cudaError_t const error = entry_point(symbol, function);
  if (result != nullptr) {
    *result =
        error == cudaSuccess ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return error;
}

cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* config,
                                void const* function,
                                void** args) {
  dim3 cluster(1, 1, 1);
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    cudaLaunchAttribute const& one = config->attrs[i];
    if (one.id != cudaLaunchAttributeClusterDimension) continue;
    cluster = dim3(one.val.clusterDim.x, one.val.clusterDim.y, one.val.clusterDim.z);
  }
  return record(function, config->gridDim, config->blockDim, cluster, config->dynamicSmemBytes,
                args);
}

cudaError_t cudaLaunchKernel(
    void const* function, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t) {
  return record(function, grid, block, dim3(1, 1, 1), shared, args);
}

// What nvcc's host code calls to find a kernel and launch it with <<<>>>.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, void const* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t) {
  return record(kernel, grid, block, dim3(1, 1, 1), shared, args);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<void**>(stream) = configuration.stream;
  return cudaSuccess;
}
char __cudaInitModule(void**) {
  return 1;
}
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, char const*, int, size_t, int, int) {}
void __cudaRegisterFunction(
    void**, char const* function, char*, char const* name, int, void*, void*, void*, void*, int*) {
  kernels()[function] = name;
}

char const* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess ? "cudaSuccess" : "an error";
}
char const* cudaGetErrorString(cudaError_t error) {
  return cudaGetErrorName(error);
}

// Nothing runs, so there is nothing to wait for and nothing that fails.
cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(void const*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
cudaError_t cudaPeekAtLastError() {
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t*) {
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) {
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* time, cudaEvent_t, cudaEvent_t) {
  *time = 1;
  return cudaSuccess;
}

}  // extern "C"
