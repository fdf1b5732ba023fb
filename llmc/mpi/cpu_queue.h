// cpu_queue.h: puts communication into the streams of the CPU stand-in, whose scheduler
// polls it.
#ifndef LLMC_MPI_CPU_QUEUE_H
#define LLMC_MPI_CPU_QUEUE_H

#include <cuda_runtime.h>

#include "llmc/mpi/transport.h"

namespace nccl_mpi {

inline std::vector<std::shared_ptr<Group>> queue_active() {
    return state().active;
}

inline std::string queue_start() {
    cpu_stall_hook = give_up;
    return "";
}

inline bool is_device_memory(const void *p, size_t bytes) {
    return cpu_is_device_range(p, bytes);
}

inline std::string queue_group(const std::shared_ptr<Group> &g) {
    state().active.push_back(g);
    bool message = false;
    for (const Operation &op : g->ops) message |= is_p2p(&op);
    const auto poll = [g] {
        bool moved, done = progress(g.get(), &moved);
        if (moved) stall_over(&cpu_runtime().stall);
        if (done) {
            std::vector<std::shared_ptr<Group>> &active = state().active;
            active.erase(std::remove(active.begin(), active.end(), g), active.end());
        }
        return done;
    };
    cpu_enqueue(g->stream, g->name.c_str(), poll, message);
    g->name = g->stream->queue.back().name;  // with the nvtx range
    return "";
}

}  // namespace nccl_mpi

#endif
