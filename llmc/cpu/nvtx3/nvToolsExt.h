// nvToolsExt.h: named ranges. Work that is enqueued inside a range carries its name into reports.
#ifndef LLMC_CPU_NVTOOLSEXT_H
#define LLMC_CPU_NVTOOLSEXT_H

#include "../stream.h"

// Opens a range inside the current one; returns its depth, 0 for the outermost.
static inline int nvtxRangePushA(const char *message) {
    CpuRuntime &r = cpu_runtime();
    r.labels.push_back(std::make_shared<const std::string>(message));
    return (int)r.labels.size() - 1;
}
// Closes the innermost range; returns its depth, or -1 when none is open.
static inline int nvtxRangePop() {
    CpuRuntime &r = cpu_runtime();
    if (r.labels.empty()) return -1;
    r.labels.pop_back();
    return (int)r.labels.size();
}
#define nvtxRangePush nvtxRangePushA

#endif
