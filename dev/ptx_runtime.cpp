// ptx_runtime.cpp: the part of the CUDA runtime that the programs of dev/cuda call, for
// dev/ptx.py, which loads a program as a shared library. Device memory is a piece of host
// memory. A launch calls back into the interpreter.
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { FENCE = 256, MOST = 4096 };
enum Event {
    ALLOCATED,
    FREED,
    WRITTEN
};  // what becomes of a range of device memory; ptx.py has the same
static constexpr size_t ARENA = (size_t)1 << 29;

static struct {
    int (*launch)(const char *name, const unsigned *grid, const unsigned *block, size_t shared,
                  void **args);
    void (*memory)(size_t at, size_t bytes, int event);
    unsigned char *arena;
    struct { size_t at, bytes; } live[MOST];  // by address
    int count;
    struct { const void *host; const char *name; } kernels[MOST];
    int kernel_count;
    struct {
        dim3 grid, block;
        size_t shared;
        cudaStream_t stream;
    } call;  // between the two halves of <<< >>>
    cudaError_t error;
} runtime;

// Starts the runtime. ptx.py calls it before main. Returns the address of device memory.
extern "C" void *ptx_start(decltype(runtime.launch) launch, decltype(runtime.memory) memory,
                           size_t *bytes) {
    runtime.launch = launch, runtime.memory = memory, *bytes = ARENA;
    void *p = mmap(NULL, ARENA, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return runtime.arena = p == MAP_FAILED ? NULL : (unsigned char *)p;
}

// ---- kernels ---------------------------------------------------------------------------

extern "C" void **__cudaRegisterFatBinary(void *) { static void *handle; return &handle; }
extern "C" void __cudaRegisterFatBinaryEnd(void **) {}
extern "C" void __cudaUnregisterFatBinary(void **) {}
extern "C" char __cudaInitModule(void **) { return 0; }
extern "C" void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int,
                                       uint3 *, uint3 *, dim3 *, dim3 *, int *) {
    if (runtime.kernel_count == MOST) abort();
    runtime.kernels[runtime.kernel_count].host = host;
    runtime.kernels[runtime.kernel_count++].name = name;
}
extern "C" unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                                cudaStream_t stream) {
    runtime.call = {grid, block, shared, stream};
    return 0;
}
extern "C" cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared,
                                                  void *stream) {
    *grid = runtime.call.grid, *block = runtime.call.block, *shared = runtime.call.shared;
    *(cudaStream_t *)stream = runtime.call.stream;
    return cudaSuccess;
}
extern "C" cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **args,
                                        size_t shared, cudaStream_t) {
    const unsigned g[] = {grid.x, grid.y, grid.z}, b[] = {block.x, block.y, block.z};
    for (int i = 0; i < runtime.kernel_count; i++)
        if (runtime.kernels[i].host == host &&
            runtime.launch(runtime.kernels[i].name, g, b, shared, args))
            runtime.error = cudaErrorLaunchFailure;
    return runtime.error;
}
// Returns the host's function itself: CUDA 13 launches through a handle.
extern "C" cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
    return *kernel = (cudaKernel_t)host, cudaSuccess;
}
extern "C" cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args,
                                          size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel((const void *)kernel, grid, block, args, shared, stream);
}

// ---- memory ----------------------------------------------------------------------------

static bool is_device(const void *p) {
    return (const unsigned char *)p >= runtime.arena &&
           (const unsigned char *)p < runtime.arena + ARENA;
}
static void written(const void *p, size_t bytes) {
    if (is_device(p))
        runtime.memory((size_t)((const unsigned char *)p - runtime.arena), bytes, WRITTEN);
}

// Takes the first gap that is large enough, with a fence before and behind.
extern "C" cudaError_t cudaMalloc(void **p, size_t bytes) {
    size_t need = (bytes + 2 * FENCE - 1) / FENCE * FENCE, at = FENCE;
    int i = 0;
    for (; i < runtime.count && runtime.live[i].at - at < need; i++)
        at = (runtime.live[i].at + runtime.live[i].bytes + 2 * FENCE - 1) / FENCE * FENCE;
    if (runtime.count == MOST || at + need > ARENA)
        return runtime.error = cudaErrorMemoryAllocation;
    memmove(&runtime.live[i + 1], &runtime.live[i],
            (size_t)(runtime.count++ - i) * sizeof *runtime.live);
    runtime.live[i] = {at, bytes};
    memset(runtime.arena + at, 0xFF, bytes);
    runtime.memory(at, bytes, ALLOCATED);
    return *p = runtime.arena + at, cudaSuccess;
}
extern "C" cudaError_t cudaFree(void *p) {
    for (int i = 0; p && i < runtime.count; i++) {
        if (runtime.arena + runtime.live[i].at != p) continue;
        runtime.memory(runtime.live[i].at, runtime.live[i].bytes, FREED);
        memmove(&runtime.live[i], &runtime.live[i + 1],
                (size_t)(--runtime.count - i) * sizeof *runtime.live);
        return cudaSuccess;
    }
    return p ? runtime.error = cudaErrorInvalidValue : cudaSuccess;
}
extern "C" cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
    return memmove(to, from, bytes), written(to, bytes), cudaSuccess;
}
extern "C" cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes,
                                       cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy(to, from, bytes, kind);
}
extern "C" cudaError_t cudaMemset(void *p, int byte, size_t bytes) {
    return memset(p, byte, bytes), written(p, bytes), cudaSuccess;
}
extern "C" cudaError_t cudaMemsetAsync(void *p, int byte, size_t bytes, cudaStream_t) {
    return cudaMemset(p, byte, bytes);
}

// ---- everything else: there is one device, and all work is done when its call returns --

extern "C" cudaError_t cudaGetLastError(void) {
    cudaError_t error = runtime.error;
    return runtime.error = cudaSuccess, error;
}
extern "C" const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorLaunchFailure ? "the interpreter stopped it"
                                           : "an error of the stand-in for CUDA";
}
extern "C" cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
extern "C" cudaError_t cudaGetDeviceProperties(cudaDeviceProp *prop, int) {
    memset(prop, 0, sizeof *prop);
    strcpy(prop->name, "CPU (PTX interpreter)");
    return cudaSuccess;
}
// Describes an A100. The interpreter knows no instruction of sm_90a, so the kernels of
// llmc/kernels/wgmma.cuh are not chosen.
extern "C" cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr name, int) {
    *value = name == cudaDevAttrComputeCapabilityMajor             ? 8
             : name == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? 167936
                                                                   : 0;
    return *value ? cudaSuccess : cudaErrorNotSupported;
}
extern "C" cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    return *available = *total = ARENA, cudaSuccess;
}
extern "C" cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return *stream = (cudaStream_t)&runtime, cudaSuccess;
}
extern "C" cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
extern "C" cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }

#define NONE(result, name, ...) extern "C" result name(__VA_ARGS__) { return (result)0; }
NONE(cudaError_t, cudaFuncSetAttribute, const void *, cudaFuncAttribute, int)
NONE(cudaError_t, cudaEventCreate, cudaEvent_t *)
NONE(cudaError_t, cudaEventDestroy, cudaEvent_t)
NONE(cudaError_t, cudaEventRecord, cudaEvent_t, cudaStream_t)
NONE(cudaError_t, cudaEventSynchronize, cudaEvent_t)
NONE(cudaError_t, cudaEventElapsedTime, float *, cudaEvent_t, cudaEvent_t)

// PTX has no registers of a device: a program that asks for them is refused.
#define UNKNOWN(name, ...) \
    extern "C" cudaError_t name(__VA_ARGS__) { return cudaErrorNotSupported; }
UNKNOWN(cudaFuncGetAttributes, cudaFuncAttributes *, const void *)
UNKNOWN(cudaOccupancyMaxActiveBlocksPerMultiprocessor, int *, const void *, int, size_t)
UNKNOWN(cudaGetDriverEntryPointByVersion, const char *, void **, unsigned, unsigned long long,
        cudaDriverEntryPointQueryResult *)

// Products of matrices are the library's: a program that multiplies is refused.
#define REFUSE(name, ...) \
    extern "C" cublasStatus_t name(__VA_ARGS__) { return CUBLAS_STATUS_NOT_SUPPORTED; }
extern "C" void *cJSON_GetObjectItemCaseSensitive(const void *, const char *) { return NULL; }
NONE(cublasStatus_t, cublasLtCreate, cublasLtHandle_t *)
NONE(cublasStatus_t, cublasLtDestroy, cublasLtHandle_t)
REFUSE(cublasLtMatmulDescCreate, cublasLtMatmulDesc_t *, cublasComputeType_t, cudaDataType_t)
REFUSE(cublasLtMatmulDescSetAttribute, cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t,
       const void *, size_t)
REFUSE(cublasLtMatmulDescDestroy, cublasLtMatmulDesc_t)
REFUSE(cublasLtMatrixLayoutCreate, cublasLtMatrixLayout_t *, cudaDataType, uint64_t, uint64_t,
       int64_t)
REFUSE(cublasLtMatrixLayoutDestroy, cublasLtMatrixLayout_t)
REFUSE(cublasLtMatmulPreferenceCreate, cublasLtMatmulPreference_t *)
REFUSE(cublasLtMatmulPreferenceDestroy, cublasLtMatmulPreference_t)
REFUSE(cublasLtMatmulPreferenceSetAttribute, cublasLtMatmulPreference_t,
       cublasLtMatmulPreferenceAttributes_t, const void *, size_t)
REFUSE(cublasLtMatmulAlgoGetHeuristic, cublasLtHandle_t, cublasLtMatmulDesc_t,
       cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
       cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t *,
       int *)
REFUSE(cublasLtMatmul, cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *,
       cublasLtMatrixLayout_t, const void *, cublasLtMatrixLayout_t, const void *, const void *,
       cublasLtMatrixLayout_t, void *, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t *,
       void *, size_t, cudaStream_t)
