/* CUDA's driver, runtime and BLAS on a machine without a GPU, as one library that is loaded before all others.

   Device memory is host memory: allocations and copies are real, and fresh memory is zero. A kernel does nothing, but its
   launch is counted, for the device that was current; copies and fills are counted apart. Each call that waits for the GPU
   is counted too. The functions are
   those that torch 2.14 and Triton 3.8 call here; all others are NVIDIA's own. Numbers of attributes are from cuda.h and driver_types.h. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "driver_types.h"

#define DEVICES 2
#define PINNED DEVICES /* the arena of page-locked host memory */
#define ARENA (1UL << 38)
#define OK(name) int name() { return 0; }

long hollow_launches[DEVICES], hollow_waits[DEVICES], hollow_copies[DEVICES];
static __thread int current;

/* A graph is a count of the kernels that were launched while its stream captured. Copies run at once, and a replay repeats
   none. A wait for the capturing stream is an error. */
static void *capturing;
static long captured;

static int launched(void) {
  __sync_fetch_and_add(capturing ? &captured : &hollow_launches[current], 1);
  return 0;
}
static void copied(void) { __sync_fetch_and_add(&hollow_copies[current], 1); }
static int waited_for(void *stream) {
  __sync_fetch_and_add(&hollow_waits[current], 1);
  return capturing && stream == capturing ? cudaErrorStreamCaptureUnsupported : 0;
}
static int waited(void) { return waited_for(capturing); }

/* Memory: one range of addresses for each device, so that an address tells its device. Nothing is freed: torch's
   allocator keeps its blocks, and untouched pages take no memory. */
static char *base[DEVICES + 1];
static size_t used[DEVICES + 1];
__attribute__((constructor)) static void reserve(void) {
  for (int i = 0; i <= DEVICES; i++)
    base[i] = mmap(0, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}
static int allocate(void **pointer, size_t bytes, int arena) {
  bytes = (bytes + 511) / 512 * 512;
  *pointer = base[arena] + __sync_fetch_and_add(&used[arena], bytes);
  return 0;
}
static int arena_of(const void *pointer) {
  for (int i = 0; i <= DEVICES; i++)
    if ((char *)pointer >= base[i] && (char *)pointer < base[i] + ARENA) return i;
  return -1;
}
int cudaMalloc(void **pointer, size_t bytes) { return allocate(pointer, bytes, current); }
int cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) { return allocate(pointer, bytes, PINNED); }
OK(cudaFree) OK(cudaFreeHost) OK(cudaHostRegister) OK(cudaHostUnregister)
int cudaMemGetInfo(size_t *left, size_t *total) { *left = *total = 80UL << 30; return 0; }
int cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  int arena = arena_of(pointer);
  memset(attributes, 0, sizeof *attributes);
  attributes->type = arena < 0 ? cudaMemoryTypeUnregistered : arena == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = arena == PINNED || arena < 0 ? 0 : arena;
  return 0;
}
int cuPointerGetAttribute(void *value, int attribute, unsigned long pointer) {
  if (arena_of((void *)pointer) < 0) return cudaErrorInvalidValue; /* Triton: "cannot be accessed" */
  *(unsigned long *)value = pointer;
  return 0;
}
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) { copied(); memmove(to, from, bytes); return 0; }
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { memmove(to, from, bytes); return waited(); }
int cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t bytes, void *s) { memmove(to, from, bytes); return 0; }
int cudaMemsetAsync(void *to, int value, size_t bytes, void *stream) { copied(); memset(to, value, bytes); return 0; }
int cudaMemset(void *to, int value, size_t bytes) { memset(to, value, bytes); return 0; }
int cudaGetSymbolAddress(void **pointer, const void *symbol) { return allocate(pointer, 4096, current); }
OK(cudaMemcpyToSymbol)

/* Devices: two H100. */
static int attribute(int *value, int name) {
  switch (name) {
    case 10: *value = 32; break;      /* threads of a warp */
    case 16: *value = 132; break;     /* multiprocessors */
    case 39: *value = 2048; break;    /* threads of a multiprocessor */
    case 75: *value = 9; break;       /* compute capability, major */
    case 76: *value = 0; break;       /* minor */
    case 81: *value = 233472; break;  /* shared memory of a multiprocessor */
    case 97: *value = 232448; break;  /* shared memory of a block, at most */
    default: *value = 1024;
  }
  return 0;
}
int cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "hollow H100");
  p->major = 9, p->warpSize = 32, p->multiProcessorCount = 132, p->maxThreadsPerMultiProcessor = 2048;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->sharedMemPerMultiprocessor = 233472, p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448;
  p->regsPerMultiprocessor = p->regsPerBlock = 65536, p->l2CacheSize = 50 << 20, p->totalGlobalMem = 80UL << 30;
  return 0;
}
int cudaGetDeviceCount(int *n) { *n = DEVICES; return 0; }
int cuDeviceGetCount(int *n) { *n = DEVICES; return 0; }
int cudaGetDevice(int *device) { *device = current; return 0; }
int cudaSetDevice(int device) { current = device; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cudaDeviceGetAttribute(int *value, int name, int device) { return attribute(value, name); }
int cuDeviceGetAttribute(int *value, int name, int device) { return attribute(value, name); }
int cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return 0; }
int cudaDeviceGetPCIBusId(char *text, int bytes, int device) { strcpy(text, "0:0:0"); return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
OK(cudaDeviceEnablePeerAccess) OK(cudaGetLastError) OK(cudaPeekAtLastError) OK(cuInit)
int cuGetErrorString(int error, const char **text) { *text = "refused by the hollow driver"; return 0; }

/* A context is its device's number and 64: no null pointer. */
int cuCtxGetCurrent(void **context) { *context = (void *)(64L + current); return 0; }
int cuCtxSetCurrent(void *context) { current = (long)context - 64; return 0; }
int cuCtxGetDevice(int *device) { *device = current; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(64L + device); return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0, *active = 1; return 0; }
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long flags, void *status) {
  *function = dlsym(RTLD_DEFAULT, name);
  return *function ? 0 : 500; /* not found */
}
int cuGetExportTable(const void **table, const void *id) { return 500; } /* NVRTC's cache, which it can do without */
OK(cuCtxGetLimit) OK(cuCtxSetLimit)

/* Streams and events. */
static int made(void **handle) { *handle = malloc(256); return 0; }
int cudaStreamCreate(void **stream) { return made(stream); }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { return made(stream); }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return made(stream); }
int cudaEventCreate(void **event) { return made(event); }
int cudaEventCreateWithFlags(void **event, unsigned flags) { return made(event); }
int cudaEventElapsedTime(float *milliseconds, void *a, void *b) { *milliseconds = 1; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = capturing && stream == capturing; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id, void **graph) {
  cudaStreamIsCapturing(stream, status);
  if (id) *id = *status;
  return 0;
}
int cudaStreamSynchronize(void *stream) { return waited_for(stream); }
int cudaDeviceSynchronize(void) { return waited(); }
int cudaEventSynchronize(void *event) { return waited(); }
OK(cudaStreamQuery) OK(cudaStreamWaitEvent) OK(cudaStreamDestroy) OK(cudaThreadExchangeStreamCaptureMode)
OK(cudaEventRecord) OK(cudaEventRecordWithFlags) OK(cudaEventQuery) OK(cudaEventDestroy)

int cudaStreamBeginCapture(void *stream, int mode) { capturing = stream, captured = 0; return 0; }
int cudaStreamEndCapture(void *stream, void **graph) {
  made(graph);
  **(long **)graph = captured;
  capturing = 0;
  return 0;
}
int cudaGraphGetNodes(void *graph, void **nodes, size_t *n) { *n = *(long *)graph; return 0; }
int cudaGraphInstantiateWithFlags(void **ready, void *graph, unsigned long long flags) { *ready = graph; return 0; }
int cudaGraphLaunch(void *ready, void *stream) { return launched(); }
OK(cudaGraphDestroy) OK(cudaGraphExecDestroy)

/* Kernels. */
int cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) { return launched(); }
int __cudaLaunchKernel() { return launched(); }
int cudaLaunchKernelExC(const void *config, const void *function, void **arguments) { return launched(); }
int cuLaunchKernel() { return launched(); }
int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra) { return launched(); }
int cuLaunchCooperativeKernel() { return launched(); }
int __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { return made(function); }
int cuModuleLoadData(void **module, const void *image) { return made(module); }
int cuModuleLoad(void **module, const char *path) { return made(module); }
int cuFuncGetAttribute(int *value, int name, void *function) { *value = name == 0 ? 1024 : name == 4 ? 40 : 0; return 0; }
int cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024, attributes->binaryVersion = attributes->ptxVersion = 90;
  return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t shared) { *n = 2; return 0; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned flags) { *n = 2; return 0; }
int cuModuleLoadDataEx(void **module, const void *image) { return made(module); }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int block, size_t shared) { *n = 2; return 0; }
OK(cudaFuncSetAttribute) OK(cudaKernelSetAttributeForDevice) OK(cuFuncSetAttribute) OK(cuFuncSetCacheConfig) OK(cuModuleUnload)

/* cuBLAS: the products that PyTorch calls for real numbers. */
#define PRODUCT(name) int name() { return launched(); }
#define MADE(name) int name(void **handle) { return made(handle); }
MADE(cublasCreate_v2) MADE(cublasLtMatmulDescCreate) MADE(cublasLtMatmulPreferenceCreate) MADE(cublasLtMatrixLayoutCreate)
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *e, void *p, int wanted, void *results, int *n) {
  memset(results, 0, 64); /* cublasLtMatmulHeuristicResult_t begins with 64 bytes of the algorithm; state 0 is success */
  *n = 1;
  return 0;
}
OK(cublasDestroy_v2) OK(cublasSetMathMode) OK(cublasSetPointerMode_v2) OK(cublasSetStream_v2) OK(cublasSetWorkspace_v2)
OK(cublasLtMatmulDescDestroy) OK(cublasLtMatmulDescSetAttribute) OK(cublasLtMatmulPreferenceDestroy)
OK(cublasLtMatmulPreferenceSetAttribute) OK(cublasLtMatrixLayoutDestroy) OK(cublasLtMatrixLayoutSetAttribute)
PRODUCT(cublasGemmEx) PRODUCT(cublasSgemm_v2) PRODUCT(cublasSgemmEx) PRODUCT(cublasDgemm_v2) PRODUCT(cublasLtMatmul)
PRODUCT(cublasGemmStridedBatchedEx) PRODUCT(cublasSgemmStridedBatched) PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasSgemv_v2) PRODUCT(cublasDgemv_v2) PRODUCT(cublasSdot_v2) PRODUCT(cublasDdot_v2) PRODUCT(cublasDotEx)
