// stream.h: streams as real in-order queues, and the scheduler that runs them at synchronisation points.
//
// Enqueuing never runs anything. A synchronising call asks the scheduler to run ready heads of the queues,
// the oldest first (or any, with CPU_STREAM_ORDER=random:SEED), until what it waits for is done and not
// further: work that nobody waits for stays undone as long as possible. One host thread makes all calls.
#ifndef LLMC_CPU_STREAM_H
#define LLMC_CPU_STREAM_H

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "allocation.h"
#include "cuda_error.h"
#include "llmc/host/stall.h"

struct CpuOp {
    std::string name;
    std::shared_ptr<const std::string> label;  // innermost nvtx range when it was enqueued, or none
    std::function<bool()> run;
    uint64_t number;  // in order of enqueuing
    double started;   // seconds; 0 before the first call
    bool timed;       // it is work, which takes time by itself: see cpu_clock_work
    uint64_t ns, least;
};

struct CUstream_st {
    std::deque<CpuOp> queue;
    unsigned number, flags;
    int priority;
    CpuTimes times;
    CUstream_st *origin;  // where the event was recorded for which the stream was last told to wait
};
typedef CUstream_st *cudaStream_t;

// A point in a stream: what cudaEventRecord makes. A wait holds the one it saw, whatever is recorded later.
struct CpuRecord {
    bool done;
    double seconds;
    CpuMoment moment;
    cudaStream_t stream;
};
struct CUevent_st {
    std::shared_ptr<CpuRecord> last;  // none before the first record
    unsigned flags;
};
typedef CUevent_st *cudaEvent_t;

struct CpuProfile {
    size_t calls;
    double seconds, bytes, flops;
};

struct CpuRuntime {
    std::vector<cudaStream_t> streams;
    std::unordered_set<CUevent_st *> events;
    std::vector<std::shared_ptr<const std::string>> labels;
    uint64_t ops;
    unsigned streams_made;
    bool running;       // inside the scheduler
    Stall stall;        // how long no operation has completed
    bool profiling;
    std::unordered_map<std::string, CpuProfile> profile;
    cudaError_t last_error;
    std::unordered_set<uint64_t> gemms;  // the products that have been computed before
    bool warm;          // the program's warm-up is over
};

inline CpuRuntime &cpu_runtime() {
    static CpuRuntime runtime;
    return runtime;
}

// Tests may assign to it while nothing is queued.
inline CpuOrder &cpu_stream_order() {
    static CpuOrder order = cpu_parse_order("CPU_STREAM_ORDER", getenv("CPU_STREAM_ORDER"));
    return order;
}

// Waits until another process of a simulation may have moved something; llmc/cpu/simulate.h sets it.
inline void (*cpu_idle_hook)(void) = NULL;

// Called after the report of a stall, instead of _exit(1); nccl.h makes it end the whole job.
inline void (*cpu_stall_hook)(void) = NULL;

// Misuse that the real thing would not report, or not here: one sentence, then abort().
[[noreturn]] __attribute__((noinline, cold, format(printf, 1, 2))) inline void cpu_abort(const char *format,
                                                                                         ...) {
    va_list args;
    va_start(args, format);
    fflush(stdout);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    abort();
}

// The innermost nvtx range, "" outside of all.
static inline const char *cpu_current_label() {
    CpuRuntime &r = cpu_runtime();
    return r.labels.empty() ? "" : r.labels.back()->c_str();
}

// Names a send or receive of this rank that is not complete, "" if there is none; nccl.h sets it.
inline std::string (*cpu_message_in_flight)(void) = NULL;

// CUDA loads a kernel at its first launch, cuBLASLt's too, and that may wait for all work that runs (CUDA
// programming guide, "Lazy Loading"). Beside a receive from a peer that waits for us in turn it would wait for
// ever, so a first use beside a send or receive ends the program here. CPU_FIRST_USES=1 lists the later ones on stderr,
// those after the program's warm-up, even if nothing is in flight.
__attribute__((noinline, cold)) inline void cpu_first_use(const char *name) {
    static const bool list = getenv("CPU_FIRST_USES") != NULL;
    if (list && cpu_runtime().warm) fprintf(stderr, "first use after the warm-up: %s\n", name);
    std::string pending = cpu_message_in_flight ? cpu_message_in_flight() : "";
    if (pending.empty()) return;
    cpu_abort("%s is used for the first time while %s is in flight: CUDA loads it now and may wait for all that "
              "runs; use it once before, with nothing in flight", name, pending.c_str());
}

// What the GPU whose place we take can do: 90 is compute capability 9.0. CPU_DEVICE_CAPABILITY=70 makes an old one, for
// which there is no code: launches are refused.
inline int cpu_capability() {
    static const char *text = getenv("CPU_DEVICE_CAPABILITY");
    return text ? atoi(text) : 90;
}

static inline bool cpu_is_stream(cudaStream_t s) {
    const std::vector<cudaStream_t> &all = cpu_runtime().streams;
    return s && std::find(all.begin(), all.end(), s) != all.end();
}

static inline bool cpu_is_event(cudaEvent_t e) { return cpu_runtime().events.count(e) != 0; }

static inline void cpu_check_enqueue(cudaStream_t stream, const char *name) {
    if (!cpu_is_stream(stream))
        cpu_abort("%s was given %s", name, stream ? "a stream that does not exist" : "stream 0");
    if (cpu_runtime().running) cpu_abort("%s was enqueued from inside an operation", name);
}

// Adds an operation to the stream's queue. The scheduler calls fn until it returns true; false means begun but not
// complete: ask again later. fn may throw nothing and may not enqueue or synchronise. On the virtual clock it takes no
// time of its own.
inline void cpu_enqueue(cudaStream_t stream, const char *name, std::function<bool()> fn) {
    CpuRuntime &r = cpu_runtime();
    cpu_check_enqueue(stream, name);
    stream->queue.push_back(
        {name, r.labels.empty() ? nullptr : r.labels.back(), std::move(fn), r.ops++, 0, false, 0, 0});
}

// Profiles are by name; what follows a name of one word (sizes, peers) is left out.
static inline void cpu_profile(const std::string &name, double seconds) {
    size_t word = name.find('<') == std::string::npos ? name.find(' ') : std::string::npos;
    CpuProfile &p = cpu_runtime().profile[name.substr(0, word)];
    p.calls++;
    p.seconds += seconds;
}

// Adds an operation that takes time by itself: a kernel, product, copy or fill, with the cost that was stated for it. A
// simulation does not run it, and makes one operation of those that follow each other on a stream.
template <class Run>
static inline void cpu_enqueue_work(cudaStream_t stream, const char *name, Run run) {
    CpuRuntime &r = cpu_runtime();
    CpuCost cost = cpu_take_cost();
    if (r.profiling) {
        CpuProfile &p = r.profile[name];
        p.bytes += cost.bytes, p.flops += cost.flops;
    }
    if (!cpu_clock().on) return cpu_enqueue(stream, name, std::move(run));
    cpu_check_enqueue(stream, name);
    stream->times.computes = true;
    stream->times.spent[cost.part] = cpu_later(stream->times.spent[cost.part], cost.ns);
    bool simulates = cpu_simulates();
    if (simulates && r.profiling) cpu_profile(name, 1e-9 * (double)cost.ns);
    if (simulates) r.ops++;
    if (simulates && !stream->queue.empty() && stream->queue.back().timed) {
        CpuOp &op = stream->queue.back();
        op.ns = cpu_later(op.ns, cost.ns);
        op.least = cpu_later(std::max(op.least, cost.host), cost.ns);
        return;
    }
    if (simulates) cpu_enqueue(stream, "kernels", [] { return true; });
    else cpu_enqueue(stream, name, std::move(run));
    CpuOp &op = stream->queue.back();
    op.timed = true;
    op.ns = cost.ns;
    op.least = cost.host + cost.ns;
}

// An operation that is begun and takes long may say that it is alive.
static inline void cpu_note_progress() { stall_over(&cpu_runtime().stall); }

// Nothing has completed for too long: prints what each stream waits for and ends the program.
__attribute__((noinline, cold)) inline void cpu_report_stall(double now) {
    CpuRuntime &r = cpu_runtime();
    fflush(stdout);
    fprintf(stderr, "no progress for %.0f seconds; waiting operations:\n", r.stall.waited);
    for (cudaStream_t s : r.streams) {
        if (s->queue.empty()) continue;
        const CpuOp &op = s->queue.front();
        fprintf(stderr, "  stream %u: %s%s%s, for %.1f s, %zu behind it\n", s->number, op.name.c_str(),
                op.label ? " in " : "", op.label ? op.label->c_str() : "", op.started ? now - op.started : 0,
                s->queue.size() - 1);
    }
    fflush(stderr);
    if (cpu_stall_hook) cpu_stall_hook();
    _exit(1);
}

// Gives the head of each stream one chance, in the order that rules, until one completes. False if none did.
inline bool cpu_run_one() {
    CpuRuntime &r = cpu_runtime();
    if (r.running) cpu_abort("an operation on a stream may not synchronise");
    cudaStream_t ready[CPU_MAX_STREAMS];
    size_t count = 0;
    for (cudaStream_t s : r.streams)
        if (!s->queue.empty()) ready[count++] = s;
    CpuOrder &order = cpu_stream_order();
    if (order.random)
        for (size_t i = count; i > 1; i--) std::swap(ready[i - 1], ready[cpu_random(&order.state) % i]);
    else
        std::sort(ready, ready + count, [](cudaStream_t a, cudaStream_t b) {
            return a->queue.front().number < b->queue.front().number;
        });
    r.running = true;
    bool completed = false;
    for (size_t i = 0; i < count && !completed; i++) {
        CpuOp &op = ready[i]->queue.front();
        if (!op.started) op.started = cpu_seconds();
        completed = op.run();
        if (!completed) continue;
        if (op.timed) cpu_clock_work(&ready[i]->times, op.ns, op.least);
        if (r.profiling && !cpu_simulates())
            cpu_profile(op.name, op.timed ? 1e-9 * (double)op.ns : cpu_seconds() - op.started);
        ready[i]->queue.pop_front();
    }
    r.running = false;
    if (completed || count == 0) {
        stall_over(&r.stall);  // the clock starts at the next fruitless try
        return completed;
    }
    double now = cpu_seconds(), waited = stall_wait(&r.stall, now);
    static const double patience = stall_patience();
    if (waited > patience) cpu_report_stall(now);
    if (cpu_idle_hook) cpu_idle_hook();
    else if (waited < 50e-6) sched_yield();
    else usleep(50);  // ranks that share cores with others: one that only yields gets, and burns, as much as they
    return false;
}

// Time begins anew, with nothing queued: all ranks have done the same so far, and agree on this moment.
inline void cpu_clock_zero() {
    cpu_clock().epoch++;
    cpu_clock().host = 0;
    for (cudaStream_t s : cpu_runtime().streams) {
        unsigned number = s->times.number;
        bool computes = s->times.computes;
        s->times = CpuTimes();
        s->times.number = number;
        s->times.computes = computes;
        s->times.last.part = TIME_IDLE;
    }
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
static inline void cpu_drain_all() { cpu_drain(0); }
static inline void cpu_drain_blocking() { cpu_drain(1); }  // 1 is cudaStreamNonBlocking

// Calls, time and share of each name; the rates at which it moved the bytes and did the FLOPs that its wrapper states,
// and on the virtual clock how close that is to what the device's memory or its peak allows.
static inline void cpu_print_profile() {
    CpuRuntime &r = cpu_runtime();
    const CpuClock &clock = cpu_clock();
    std::vector<std::pair<std::string, CpuProfile>> rows(r.profile.begin(), r.profile.end());
    std::sort(rows.begin(), rows.end(), [](const auto &a, const auto &b) {
        return a.second.seconds != b.second.seconds ? a.second.seconds > b.second.seconds : a.first < b.first;
    });
    double sum = 0;
    for (auto &row : rows) sum += row.second.seconds;
    printf("%-40s %9s %12s %7s %9s %9s%s\n", "operation", "calls", "total ms", "share", "GB/s", "GFLOP/s",
           clock.on ? "    roof" : "");
    for (auto &row : rows) {
        const CpuProfile &p = row.second;
        double rate = p.seconds > 0 ? 1e-9 / p.seconds : 0;
        printf("%-40s %9zu %12.3f %6.1f%%", row.first.c_str(), p.calls, 1e3 * p.seconds,
               sum > 0 ? 100 * p.seconds / sum : 0);
        if (p.bytes > 0) printf(" %9.4g %9.4g", rate * p.bytes, rate * p.flops);
        double computing = clock.peak > 0 ? p.flops / clock.peak : 0;  // s at the peak
        if (p.bytes > 0 && clock.on)
            printf(" %6.1f%%", 1e11 * rate * std::max(p.bytes / clock.cluster.hbm_bandwidth, computing));
        printf("\n");
    }
}

#endif
