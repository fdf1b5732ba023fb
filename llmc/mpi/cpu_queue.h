// cpu_queue.h: puts communication into the streams of the CPU stand-in, whose scheduler then polls it.
#ifndef LLMC_MPI_CPU_QUEUE_H
#define LLMC_MPI_CPU_QUEUE_H

#include <cuda_runtime.h>

#include "llmc/mpi/progress.h"

namespace nccl_mpi {

// The scheduler calls this when nothing has completed for CPU_STALL_SECONDS. All ranks of a deadlock stall at
// nearly the same time; the two seconds let each of them print before the first abort ends the job.
inline void on_stall() {
    std::string text = waiting_report();
    fputs(text.c_str(), stderr);
    fprintf(stderr, "nccl: no progress, ending the job (CPU_STALL_SECONDS sets the patience)\n");
    end_job(2);
}

inline bool queue_start(std::string *) {
    cpu_stall_hook = on_stall;
    return true;
}

inline void queue_drain() { cudaDeviceSynchronize(); }

inline bool is_stream(cudaStream_t stream) { return cpu_is_stream(stream); }

inline bool is_device_memory(const void *p, size_t bytes) { return cpu_is_device_range(p, bytes); }

inline const char *current_label() { return cpu_current_label(); }

// Queues the group on each of its streams: it starts when all of them have reached it, and all wait until it
// is done. op_streams: the stream of each operation.
inline bool queue_group(const std::shared_ptr<Group> &g, const std::vector<cudaStream_t> &op_streams,
                        std::string *) {
    std::vector<cudaStream_t> streams;
    for (cudaStream_t s : op_streams) {
        if (std::find(streams.begin(), streams.end(), s) == streams.end()) streams.push_back(s);
    }
    state().active.push_back(g);
    std::shared_ptr<std::vector<bool>> reached(new std::vector<bool>(streams.size(), false));
    for (size_t i = 0; i < streams.size(); i++) {
        cpu_enqueue(streams[i], g->name.c_str(), [g, reached, i]() {
            (*reached)[i] = true;
            if (std::find(reached->begin(), reached->end(), false) != reached->end()) return false;
            bool moved, done = progress(g.get(), &moved);
            if (moved) cpu_note_progress();
            if (done) {
                std::vector<std::shared_ptr<Group>> &active = state().active;
                active.erase(std::remove(active.begin(), active.end(), g), active.end());
            }
            return done;
        });
    }
    return true;
}

}  // namespace nccl_mpi

#endif
