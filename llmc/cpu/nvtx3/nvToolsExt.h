// nvToolsExt.h: named ranges. Work that is enqueued inside a range carries its name into
// reports.
#ifndef LLMC_CPU_NVTOOLSEXT_H
#define LLMC_CPU_NVTOOLSEXT_H

#include "../stream.h"

// Opens a range inside the current one.
static inline void nvtxRangePushA(const char *message) {
    cpu_runtime().labels.push_back(message);
}
// Closes the innermost range.
static inline void nvtxRangePop() {
    cpu_runtime().labels.pop_back();
}

#endif
