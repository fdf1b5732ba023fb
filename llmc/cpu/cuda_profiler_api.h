// cuda_profiler_api.h: the range that a profiler looks at. None is here.
#ifndef LLMC_CPU_CUDA_PROFILER_API_H
#define LLMC_CPU_CUDA_PROFILER_API_H

#include "cuda_runtime.h"

static inline cudaError_t cudaProfilerStart() {
    return cudaSuccess;
}
static inline cudaError_t cudaProfilerStop() {
    return cudaSuccess;
}

#endif
