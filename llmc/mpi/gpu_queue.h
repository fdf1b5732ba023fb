// gpu_queue.h: puts communication into the streams of a real GPU, so that several ranks may
// share one (NCCL=mpi).
//
// A group copies its operands into pinned host memory, raises a flag there, and lets its
// stream wait for another flag. A helper thread sees the first flag, runs the MPI side, and
// raises the second; then the stream copies the result back. For tests on one GPU, never
// for speed. Order, matching, strictness, bits and reports are as on the CPU.
//
// It cannot hang by itself:
//   - The streams write and await the flags (cuStreamWriteValue32, cuStreamWaitValue32), so
//     a waiting group holds no callback thread of the driver and no multiprocessor.
//   - The helper thread calls no CUDA function.
//   - All pinned memory is allocated at the start. A later allocation could wait for the streams.
// When the pinned memory (NCCL_MPI_PINNED_MIB, default 256) is in use, the host waits for
// the oldest group. NCCL's host does the same when its queue is full.
//
// With more than 8 streams set CUDA_DEVICE_MAX_CONNECTIONS=32. Otherwise streams share a
// hardware queue and wait for each other. MPI needs MPI_THREAD_MULTIPLE.
#ifndef LLMC_MPI_GPU_QUEUE_H
#define LLMC_MPI_GPU_QUEUE_H

#include <cuda.h>
#include <cuda_runtime.h>
#include <sched.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "llmc/mpi/transport.h"

#define NCCL_MPI_HELPER 1  // tells programs that another thread calls MPI too

namespace nccl_mpi {

typedef CUresult (*FlagCall)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

struct GpuRegion {  // a part of the pinned memory, in the order of use
    size_t begin, end;
    cudaEvent_t copied;  // its results
};

struct GpuQueue {
    std::mutex mutex;  // of state().active
    std::condition_variable filled;
    char *pinned;
    size_t bytes, head;
    std::deque<GpuRegion> regions;
    FlagCall write_flag, await_flag;
};

// Never freed: the helper thread may outlive main's statics.
inline GpuQueue &gpu_queue() {
    static GpuQueue *q = new GpuQueue();
    return *q;
}

inline std::vector<std::shared_ptr<Group>> queue_active() {
    std::lock_guard<std::mutex> lock(gpu_queue().mutex);
    return state().active;
}

inline bool is_device_memory(const void *p, size_t) {
    cudaPointerAttributes a;
    if (cudaPointerGetAttributes(&a, p) != cudaSuccess) return false;
    return a.type == cudaMemoryTypeDevice || a.type == cudaMemoryTypeManaged;
}

inline void gpu_helper() {
    GpuQueue &q = gpu_queue();
    std::vector<std::shared_ptr<Group>> &active = state().active;
    Stall stall = {0, 0};
    std::unique_lock<std::mutex> lock(q.mutex);
    for (;;) {
        while (active.empty()) {
            q.filled.wait(lock);
            stall_over(&stall);
        }
        bool moved = false, ready = false;
        for (size_t i = 0; i < active.size() && !moved; i++) {
            std::shared_ptr<Group> g = active[i];
            if (!g->flags[1]) continue;
            __sync_synchronize();  // the operands are read after the flag
            ready = true;
            lock.unlock();  // the host may queue more meanwhile; only this thread removes
            bool done = progress(g.get(), &moved);
            lock.lock();
            if (!done) continue;
            active.erase(active.begin() + (long)i);
            __sync_synchronize();
            g->flags[0] = 1;
            moved = true;
        }
        if (moved || !ready) stall_over(&stall);
        if (stall_wait(&stall)) give_up();
        lock.unlock();
        if (!moved) sched_yield();
        lock.lock();
    }
}

inline bool driver_call(const char *name, FlagCall *call) {
    void *found = NULL;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
    cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
    *call = (FlagCall)found;
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess && found;
}

// Returns what is missing, "" if nothing is.
inline std::string queue_start() {
    GpuQueue &q = gpu_queue();
    if (q.pinned) return "";
    int level = 0;
    MPI_Query_thread(&level);
    if (level < MPI_THREAD_MULTIPLE)
        return "NCCL over MPI on a GPU needs MPI_Init_thread with MPI_THREAD_MULTIPLE";
    if (!driver_call("cuStreamWriteValue32", &q.write_flag) ||
        !driver_call("cuStreamWaitValue32", &q.await_flag))
        return "the CUDA driver has no cuStreamWaitValue32";
    q.bytes = (size_t)environment_number("NCCL_MPI_PINNED_MIB", 256) << 20;
    if (cudaHostAlloc((void **)&q.pinned, q.bytes,
                      cudaHostAllocPortable | cudaHostAllocMapped) != cudaSuccess) {
        q.pinned = NULL;
        return "no pinned host memory left: lower NCCL_MPI_PINNED_MIB";
    }
    std::thread(gpu_helper).detach();
    return "";
}

inline void release_oldest(GpuQueue *q) {
    cudaEventSynchronize(q->regions.front().copied);
    cudaEventDestroy(q->regions.front().copied);
    q->regions.pop_front();
}

// Returns the next bytes of the pinned ring, NULL if it is smaller.
inline char *take_pinned(GpuQueue *q, size_t bytes) {
    if (bytes > q->bytes) return NULL;
    while (!q->regions.empty() && cudaEventQuery(q->regions.front().copied) == cudaSuccess)
        release_oldest(q);
    size_t begin = q->head + bytes <= q->bytes ? q->head : 0;
    for (bool clear = false;
         !clear;) {  // waits for the oldest groups until the new part overlaps none
        clear = true;
        for (const GpuRegion &r : q->regions)
            clear = clear && (r.end <= begin || begin + bytes <= r.begin);
        if (!clear) release_oldest(q);
    }
    q->head = begin + bytes;
    q->regions.push_back({begin, begin + bytes, NULL});
    return q->pinned + begin;
}

inline size_t pad(size_t bytes) {
    return (bytes + 255) / 256 * 256;
}

// Enqueues a group. Returns why it cannot be done, "" if it is.
inline std::string queue_group(const std::shared_ptr<Group> &g) {
    GpuQueue &q = gpu_queue();
    size_t flag_bytes = pad(2 * sizeof(uint32_t)), total = flag_bytes;
    for (const Operation &op : g->ops) total += pad(op.reads) + pad(op.writes);
    char *block = take_pinned(&q, total), *at = block + flag_bytes;
    if (!block)
        return "a group of " + std::to_string(total) +
               " bytes does not fit: raise NCCL_MPI_PINNED_MIB";
    g->flags = (volatile uint32_t *)block;
    g->flags[0] = g->flags[1] = 0;
    std::vector<char *> results(g->ops.size());
    cudaError_t worst = cudaSuccess;
    auto note = [&worst](cudaError_t e) {
        if (worst == cudaSuccess) worst = e;
    };
    for (size_t i = 0; i < g->ops.size(); i++) {
        Operation *op = &g->ops[i];
        if (op->reads)
            note(cudaMemcpyAsync(at, op->send, op->reads, cudaMemcpyDeviceToHost,
                                 g->stream));
        results[i] = op->recv;
        op->send = at;
        op->recv = at + pad(op->reads);
        at += pad(op->reads) + pad(op->writes);
    }
    {
        std::lock_guard<std::mutex> lock(q.mutex);
        state().active.push_back(g);
    }
    q.filled.notify_one();
    int refused = q.write_flag((CUstream)g->stream, (CUdeviceptr)&g->flags[1], 1,
                               CU_STREAM_WRITE_VALUE_DEFAULT);
    refused |= q.await_flag((CUstream)g->stream, (CUdeviceptr)g->flags, 1,
                            CU_STREAM_WAIT_VALUE_GEQ);
    for (size_t i = 0; i < g->ops.size(); i++) {
        const Operation *op = &g->ops[i];
        if (op->writes)
            note(cudaMemcpyAsync(results[i], op->recv, op->writes, cudaMemcpyHostToDevice,
                                 g->stream));
    }
    note(cudaEventCreateWithFlags(&q.regions.back().copied, cudaEventDisableTiming));
    note(cudaEventRecord(q.regions.back().copied, g->stream));
    if (worst == cudaSuccess && !refused) return "";
    return "queueing " + g->name + " failed: " + cudaGetErrorString(worst);
}

}  // namespace nccl_mpi

#endif
