// stream.h: streams as real in-order queues, and the scheduler that runs them at
// synchronisation points.
//
// Enqueuing never runs anything. A synchronising call asks the scheduler to run ready heads
// of the queues, the oldest first (or any, with CPU_STREAM_ORDER=random:SEED). It stops as
// soon as its condition holds, so that all other work is delayed as long as possible. One
// host thread makes all calls.
#ifndef LLMC_CPU_STREAM_H
#define LLMC_CPU_STREAM_H

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>

#include "allocation.h"

// CUDA's error codes, as far as the stand-in returns them, with CUDA's numbers and words.
typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidMemcpyDirection = 21,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
} cudaError_t;

static inline const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        case cudaErrorInvalidMemcpyDirection: return "invalid copy direction for memcpy";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorInvalidResourceHandle: return "invalid resource handle";
        case cudaErrorNotReady: return "device not ready";
    }
    return "unrecognized error code";
}

struct CpuOp {
    std::string name;  // with the innermost nvtx range when it was enqueued
    std::function<bool()> run;
    uint64_t number;  // in order of enqueuing
    double started;   // seconds; 0 before the first call
    bool message;     // a send or receive
};

struct CUstream_st {
    std::deque<CpuOp> queue;
    unsigned flags;
    CpuTimes times;
    CUstream_st *origin;  // the stream of the event that this one was last told to wait for
};
typedef CUstream_st *cudaStream_t;

// A point in a stream, made by cudaEventRecord. A wait holds the record it saw, even if the
// event is recorded again.
struct CpuRecord {
    bool done;
    CpuMoment moment;  // off the virtual clock in ns of this machine
    cudaStream_t stream;
};
struct CUevent_st {
    std::shared_ptr<CpuRecord> last;  // none before the first record
    unsigned flags;
};
typedef CUevent_st *cudaEvent_t;

struct CpuRuntime {
    std::vector<cudaStream_t> streams;
    std::unordered_set<CUevent_st *> events;
    std::vector<std::string> labels;  // the open nvtx ranges
    uint64_t ops;
    bool running;  // inside the scheduler
    Stall stall;   // seconds without a completed operation
    cudaError_t last_error;
    std::unordered_set<uint64_t> gemms;  // products that were computed before
    bool warm;                           // the program's warm-up is over
    // Tests may assign to them while nothing is queued.
    Random thread_order = environment_random("CPU_THREAD_ORDER", false);
    Random stream_order = environment_random("CPU_STREAM_ORDER", false);
};

inline CpuRuntime &cpu_runtime() {
    static CpuRuntime runtime;
    return runtime;
}

// Waits until another process of a simulation may have made progress; llmc/cpu/simulate.h
// sets it.
inline void (*cpu_idle_hook)(void) = NULL;

// Called after the report of a stall, instead of _exit(1); nccl.h makes it end the whole
// job.
inline void (*cpu_stall_hook)(void) = NULL;

// Returns the innermost nvtx range, "" outside of all.
static inline const char *cpu_current_label() {
    CpuRuntime &r = cpu_runtime();
    return r.labels.empty() ? "" : r.labels.back().c_str();
}

// Ends the program at a first use beside a send or receive. CUDA loads a kernel at its
// first launch, cuBLASLt's too. Loading may wait for all running work (CUDA programming
// guide, "Lazy Loading"): a deadlock if the peer waits for us. CPU_FIRST_USES=1 lists the
// first uses after the program's warm-up on stderr.
__attribute__((noinline, cold)) inline void cpu_first_use(const char *name) {
    static const bool list = getenv("CPU_FIRST_USES") != NULL;
    if (list && cpu_runtime().warm)
        fprintf(stderr, "first use after the warm-up: %s\n", name);
    for (cudaStream_t s : cpu_runtime().streams)
        for (const CpuOp &op : s->queue)
            if (op.message)
                cpu_abort(
                    "%s is used for the first time while %s is in flight: CUDA loads it "
                    "now and may wait for all "
                    "that runs; use it once before, with nothing in flight",
                    name, op.name.c_str());
}

static inline bool cpu_is_stream(cudaStream_t s) {
    const std::vector<cudaStream_t> &all = cpu_runtime().streams;
    return s && std::find(all.begin(), all.end(), s) != all.end();
}

static inline bool cpu_is_event(cudaEvent_t e) {
    return cpu_runtime().events.count(e) != 0;
}

static inline void cpu_check_enqueue(cudaStream_t stream, const char *name) {
    if (!cpu_is_stream(stream))
        cpu_abort("%s was given %s", name,
                  stream ? "a stream that does not exist" : "stream 0");
    if (cpu_runtime().running) cpu_abort("%s was enqueued from inside an operation", name);
}

// Adds an operation to the stream's queue. The scheduler calls fn until it returns true;
// false means begun but not complete. fn may not throw, enqueue or synchronise.
inline void cpu_enqueue(cudaStream_t stream, const char *name, std::function<bool()> fn,
                        bool message = false) {
    CpuRuntime &r = cpu_runtime();
    cpu_check_enqueue(stream, name);
    const char *label = cpu_current_label();
    stream->queue.push_back({name + std::string(*label ? " in " : "") + label,
                             std::move(fn), r.ops++, 0, message});
}

// Adds an operation that takes time by itself: a kernel, product, copy or fill, with the
// cost that was stated for it. A simulation does not run it.
template <class Work>
static inline void cpu_enqueue_work(cudaStream_t stream, const char *name,
                                    const Work &work) {
    CpuCost cost = cpu_take_cost();
    cpu_check_enqueue(stream, name);
    CpuTimes *times = &stream->times;
    times->computes = true;
    if (cpu_simulates())
        return cpu_enqueue(stream, name, [=] { return cpu_clock_work(times, cost), true; });
    cpu_enqueue(stream, name, [=] { return work(), cpu_clock_work(times, cost), true; });
}

// Prints the operation that each stream waits for, after too long without progress, and
// ends the program.
__attribute__((noinline, cold)) inline void cpu_report_stall() {
    CpuRuntime &r = cpu_runtime();
    fflush(stdout);
    fprintf(stderr, "no progress for %.0f seconds; waiting operations:\n", r.stall.waited);
    for (cudaStream_t s : r.streams) {
        if (s->queue.empty()) continue;
        const CpuOp &op = s->queue.front();
        fprintf(stderr, "  stream %u: %s, for %.1f s, %zu behind it\n",
                s->times.last.stream, op.name.c_str(), seconds_wall() - op.started,
                s->queue.size() - 1);
    }
    fflush(stderr);
    if (cpu_stall_hook) cpu_stall_hook();
    _exit(1);
}

// Gives the head of each stream one chance, by age or at random, until one completes.
// Returns false if none did.
inline bool cpu_run_one() {
    CpuRuntime &r = cpu_runtime();
    if (r.running) cpu_abort("an operation on a stream may not synchronise");
    cudaStream_t ready[CPU_MAX_STREAMS];
    size_t count = 0;
    for (cudaStream_t s : r.streams)
        if (!s->queue.empty()) ready[count++] = s;
    if (r.stream_order.on)
        for (size_t i = count; i > 1; i--)
            std::swap(ready[i - 1], ready[random_next(&r.stream_order) % i]);
    else
        std::sort(ready, ready + count, [](cudaStream_t a, cudaStream_t b) {
            return a->queue.front().number < b->queue.front().number;
        });
    r.running = true;
    bool completed = false;
    for (size_t i = 0; i < count && !completed; i++) {
        CpuOp &op = ready[i]->queue.front();
        if (!op.started) op.started = seconds_wall();
        completed = op.run();
        if (!completed) continue;
        ready[i]->queue.pop_front();
    }
    r.running = false;
    if (completed) return stall_over(&r.stall), true;
    if (stall_wait(&r.stall)) cpu_report_stall();
    if (cpu_idle_hook)
        cpu_idle_hook();
    else if (r.stall.waited < 200e-6)
        sched_yield();  // ranks share cores, and small messages come soon
    else
        usleep(50);
    return false;
}

// Restarts time at 0, with nothing queued: a moment on which all ranks agree.
inline void cpu_clock_zero() {
    cpu_clock().epoch++;
    cpu_clock().host = 0;
    for (cudaStream_t s : cpu_runtime().streams) {
        CpuTimes times = CpuTimes();
        times.last.stream = s->times.last.stream;
        times.computes = s->times.computes;
        s->times = times;
    }
    for (cudaEvent_t e : cpu_runtime().events)
        if (e->last) e->last->moment = CpuMoment();
}

// Runs queued work until done() holds.
template <class Done>
static inline void cpu_run_until(Done done) {
    if (done()) return;
    bool before = cpu_open_memory(true);
    while (!done()) cpu_run_one();
    cpu_open_memory(before);
}

static inline void cpu_try_one() {
    bool before = cpu_open_memory(true);
    cpu_run_one();
    cpu_open_memory(before);
}

// Runs all work of the streams whose flags have none of these bits.
static inline void cpu_drain(unsigned without) {
    cpu_run_until([=] {
        for (cudaStream_t s : cpu_runtime().streams)
            if (!(s->flags & without) && !s->queue.empty()) return false;
        return true;
    });
}

#endif
