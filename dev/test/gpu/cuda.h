// cuda.h: the calls of CUDA in llmc/mpi/gpu_queue.h that the stand-in lacks, so that a CPU runs
// it (`make GPU_QUEUE=1`). The helper thread, the flags and the ring of pinned memory are those
// of a GPU; streams are the stand-in's queues, so the host's thread writes and awaits the flags.
#ifndef LLMC_TEST_GPU_CUDA_H
#define LLMC_TEST_GPU_CUDA_H

#include <cuda_runtime.h>

#define CUDART_VERSION 12050

typedef int CUresult;
typedef cudaStream_t CUstream;
typedef uintptr_t CUdeviceptr;
typedef uint32_t cuuint32_t;
enum { CU_STREAM_WRITE_VALUE_DEFAULT = 0, CU_STREAM_WAIT_VALUE_GEQ = 0 };

static inline CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr flag, cuuint32_t value,
                                            unsigned) {
    cpu_enqueue(stream, "cuStreamWriteValue32", [=] {
        __sync_synchronize();  // as a GPU's: after the copies before it
        *(volatile uint32_t *)flag = value;
        return true;
    });
    return 0;
}
static inline CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr flag, cuuint32_t value,
                                           unsigned) {
    cpu_enqueue(stream, "cuStreamWaitValue32", [=] {
        bool raised = *(volatile uint32_t *)flag >= value;
        stall_over(&cpu_runtime().stall);  // the helper thread has a watchdog of its own
        __sync_synchronize();
        return raised;
    });
    return 0;
}

enum cudaDriverEntryPointQueryResult {
    cudaDriverEntryPointSuccess,
    cudaDriverEntryPointSymbolNotFound
};
enum { cudaEnableDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2 };
enum cudaMemoryType {
    cudaMemoryTypeUnregistered,
    cudaMemoryTypeHost,
    cudaMemoryTypeDevice,
    cudaMemoryTypeManaged
};
struct cudaPointerAttributes { cudaMemoryType type; };

static inline cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **found, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult *result) {
    bool writes = strcmp(name, "cuStreamWriteValue32") == 0,
         waits = strcmp(name, "cuStreamWaitValue32") == 0;
    *found = writes ? (void *)cuStreamWriteValue32 : waits ? (void *)cuStreamWaitValue32 : NULL;
    *result = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
static inline cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) {
    return cudaMallocHost(p, bytes);
}
static inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p) {
    a->type = cpu_is_device_range(p, 1) ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    return cudaSuccess;
}

#endif
