// The CUDA runtime (cudart): memory is the host's, copies are real and done at once, kernels do nothing.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "shared.h"

static const size_t DEVICE_BYTES = 80ull << 30;
static const int MOST_DEVICES = 64;
// Fresh device memory is filled with this byte, since nothing ever computes into it. With 1 a bool is true (a NaN check
// that would have been computed says "finite"), a float is tiny and finite, and a count is not 0.
static const int FRESH_BYTE = 1;

int device_count() {
  const char* value = getenv("PRETENDED_GPUS");
  return value ? atoi(value) : 1;
}

// What the tests read, through ctypes.
static std::atomic<long> launches{0}, pageable_copies{0};
static std::atomic<int> captures{0};  // under way: what is recorded is not launched
void count_launch() {
  if (captures == 0) ++launches;
}
API long pretended_launches() { return launches; }
API long pretended_pageable_copies() { return pageable_copies; }

static thread_local int current_device = 0;

// ---- Devices

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3");
  p->major = 9;
  p->totalGlobalMem = DEVICE_BYTES;
  p->multiProcessorCount = 132;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->warpSize = 32;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->l2CacheSize = 50 << 20;
  p->memPitch = 2147483647;
  p->memoryBusWidth = 5120;
  p->textureAlignment = 512;
  p->asyncEngineCount = 3;
  p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->canMapHostMemory = 1;
  p->streamPrioritiesSupported = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, device);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = p.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[2]; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:00:%02x.0", device + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
API const char* cudaGetErrorString(cudaError_t error) { return error ? "pretended CUDA error" : "no error"; }
API const char* cudaGetErrorName(cudaError_t error) { return error ? "cudaErrorPretended" : "cudaSuccess"; }

// ---- Memory: each range is remembered with its kind and device, for PyTorch asks which memory is pinned

struct Range {
  size_t bytes;
  cudaMemoryType type;
  int device;
};
static std::mutex memory_lock;
static std::map<uintptr_t, Range> ranges;
static size_t used_bytes[MOST_DEVICES];

static cudaError_t take(void** pointer, size_t bytes, cudaMemoryType type) {
  if (bytes == 0) bytes = 1;
  std::lock_guard<std::mutex> guard(memory_lock);
  bool is_device = type == cudaMemoryTypeDevice;
  if (is_device && used_bytes[current_device] + bytes > DEVICE_BYTES) return cudaErrorMemoryAllocation;
  if (posix_memalign(pointer, 4096, bytes)) return cudaErrorMemoryAllocation;
  if (is_device) {
    memset(*pointer, FRESH_BYTE, bytes);
    used_bytes[current_device] += bytes;
  }
  ranges[(uintptr_t)*pointer] = {bytes, type, current_device};
  return cudaSuccess;
}
static cudaError_t give_back(void* pointer) {
  std::lock_guard<std::mutex> guard(memory_lock);
  auto found = ranges.find((uintptr_t)pointer);
  if (found == ranges.end()) return cudaSuccess;
  if (found->second.type == cudaMemoryTypeDevice) used_bytes[found->second.device] -= found->second.bytes;
  ranges.erase(found);
  free(pointer);
  return cudaSuccess;
}
API cudaError_t cudaMalloc(void** pointer, size_t bytes) { return take(pointer, bytes, cudaMemoryTypeDevice); }
API cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
API cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned) { return cudaMalloc(pointer, bytes); }
API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return take(pointer, bytes, cudaMemoryTypeHost);
}
API cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return take(pointer, bytes, cudaMemoryTypeHost); }
API cudaError_t cudaFree(void* pointer) { return give_back(pointer); }
API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return give_back(pointer); }
API cudaError_t cudaFreeHost(void* pointer) { return give_back(pointer); }
API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> guard(memory_lock);
  ranges[(uintptr_t)pointer] = {bytes, cudaMemoryTypeHost, current_device};
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* pointer) {
  std::lock_guard<std::mutex> guard(memory_lock);
  ranges.erase((uintptr_t)pointer);
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  std::lock_guard<std::mutex> guard(memory_lock);
  *total_bytes = DEVICE_BYTES;
  *free_bytes = DEVICE_BYTES - used_bytes[current_device];
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* pointer) {
  memset(a, 0, sizeof *a);
  a->type = cudaMemoryTypeUnregistered;
  a->device = -1;
  std::lock_guard<std::mutex> guard(memory_lock);
  auto next = ranges.upper_bound((uintptr_t)pointer);
  if (next == ranges.begin()) return cudaSuccess;
  auto range = std::prev(next);
  if ((uintptr_t)pointer >= range->first + range->second.bytes) return cudaSuccess;
  a->type = range->second.type;
  a->device = range->second.device;
  a->devicePointer = a->hostPointer = (void*)pointer;
  return cudaSuccess;
}
// A copy between a GPU and memory that is not pinned holds up the host, whatever PyTorch calls it.
static void count_if_pageable(const void* host) {
  cudaPointerAttributes a;
  cudaPointerGetAttributes(&a, host);
  if (a.type == cudaMemoryTypeUnregistered) ++pageable_copies;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  if (kind == cudaMemcpyHostToDevice) count_if_pageable(from);
  if (kind == cudaMemcpyDeviceToHost) count_if_pageable(to);
  memmove(to, from, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; ++row) {
    memmove((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width);
  }
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t) {
  memset(pointer, value, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  return cudaMemsetAsync(pointer, value, bytes, nullptr);
}
API cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static char space[4096];
  *pointer = space;
  return cudaSuccess;
}

// ---- Streams and events: a stream is a number, an event the time at which it was recorded

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  static std::atomic<uintptr_t> next{0x1000};
  *stream = (cudaStream_t)next.fetch_add(16);
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
// Graphs: what is captured does nothing, now or when it is launched, which counts as one kernel.
static std::mutex capture_lock;
static std::map<cudaStream_t, unsigned long long> capturing;  // stream -> number of its capture
API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  static unsigned long long next{0};
  std::lock_guard<std::mutex> guard(capture_lock);
  capturing[stream] = ++next;
  ++captures;
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  std::lock_guard<std::mutex> guard(capture_lock);
  *graph = (cudaGraph_t)(uintptr_t)(16 * capturing[stream]);
  if (capturing.erase(stream)) --captures;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                         size_t* count) {
  std::lock_guard<std::mutex> guard(capture_lock);
  auto found = capturing.find(stream);
  bool is_capturing = found != capturing.end();
  *status = is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = is_capturing ? found->second : 0;
  if (graph) *graph = is_capturing ? (cudaGraph_t)(uintptr_t)(16 * found->second) : nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  *count = 1;
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = (cudaGraphExec_t)graph;
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                              unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  count_launch();
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}

using Clock = std::chrono::steady_clock;
struct Event {
  Clock::time_point at;
};
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = (cudaEvent_t) new Event{Clock::now()};
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t, unsigned) {
  ((Event*)event)->at = Clock::now();
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  *ms = std::chrono::duration<float, std::milli>(((Event*)end)->at - ((Event*)start)->at).count();
  return cudaSuccess;
}

// ---- Kernels: counted, not run

static cudaError_t launched() {
  count_launch();
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return launched(); }
API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return launched(); }
API cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return launched();
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return launched(); }

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = 90;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                       unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

// What nvcc puts around each kernel<<<...>>>: the configuration is handed over in a thread's variable.
struct CallConfiguration {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};
static thread_local CallConfiguration configuration;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, struct CUstream_st* stream) {
  configuration = {grid, block, shared_bytes, stream};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *(void**)stream = configuration.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
API void** __cudaRegisterFatBinary(void*) {
  static void* handle[8];
  return handle;
}

// ---- The way from the runtime to the driver's functions

static int driver_call() { return 0; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (*function == nullptr) *function = (void*)driver_call;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
