// cuda_profiler_api.h: cudaProfilerStart and cudaProfilerStop, which live in the stand-in's cuda_runtime.h.
#ifndef LLMC_CPU_CUDA_PROFILER_API_H
#define LLMC_CPU_CUDA_PROFILER_API_H

#include "cuda_runtime.h"

#endif
