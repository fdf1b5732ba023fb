// clock.h: a virtual clock for the streams, in nanoseconds. It gives each operation its
// time on a device of a described cluster (llmc/sim). Off unless cpu_clock_start was
// called.
//
// Time follows from the flow of data alone, never from the order in which this machine
// works.
//   - The host has a time. Enqueuing costs it launch_host, and waiting for a stream advances it.
//   - An operation begins when the stream's operation before it has ended, and the host has
//     enqueued it. It also waits for its event, or for all ranks of its collective or
//     message (llmc/mpi/timing.h).
//   - It ends when its cost is over. An event holds the end of the operation before it.
// So a run's times do not depend on the load, CPU_STREAM_ORDER or NCCL_DELAY.
//
// stream.h and cuda_runtime.h call the functions here. simulate.h has the mode that runs no
// kernels.
#ifndef LLMC_CPU_CLOCK_H
#define LLMC_CPU_CLOCK_H

#define CPU_CLOCK 1  // tells trainers that the device may keep virtual time

#include <math.h>

#include <algorithm>
#include <utility>

#include "llmc/sim/cost.h"
#include "llmc/sim/kernel.h"

enum { CPU_MAX_STREAMS = 64, CPU_GAPS = 128 };

// The end of a stream's work when an event was recorded, and the communication in that
// work.
struct CpuMoment {
    double ns;
    unsigned stream;  // its number, from 1
    double begun;  // begin of the stream's last communication, or of the first that had no
                   // gap behind it
    double first, busy;  // begin of the first collective since the record before; ns of all
                         // collectives so far
    TimePart part = TIME_IDLE;  // of the last communication; IDLE: there was none
};

struct CpuTimes {
    bool computes;  // kernels were put into the stream
    double now;
    CpuMoment last;  // its communication so far, and when that ended
    // ns of other streams' collectives that it has waited for.
    double seen[CPU_MAX_STREAMS];
    double spent[TIME_PARTS];   // that of IDLE means nothing: a step is idle in the rest of
                                // its time
    double gaps[CPU_GAPS][2];   // [begin, end) of its last waits, in a ring
    size_t gap_count;
};

// The costs that are stated for an operation.
struct CpuCost {
    double seconds;
    TimePart part;
    double ns, host;  // of the operation; of the host when it was enqueued
};

// A step of a rank, as plain bytes, which ranks can send.
struct CpuStep {
    double ms, part[TIME_PARTS], bytes;  // ms; the parts sum to the step; of memory
};

struct CpuClock {
    bool on;
    bool simulates;  // kernels are not run, and device memory is not touched
    Cluster cluster;
    size_t shift;  // of a simulation: its ranks have the places of ranks with numbers so
                   // much higher
    CpuStep step;  // the last one
    double host;   // ns
    unsigned
        epoch;     // counts cpu_clock_zero: a communicator's times of earlier epochs are 0
    CpuCost next;  // of the next launch: the sum of what was stated
};

inline CpuClock &cpu_clock() {
    static CpuClock clock;
    return clock;
}

inline void cpu_clock_start(const Cluster *cluster, bool simulates) {
    CpuClock &c = cpu_clock();
    c.on = true;
    c.simulates = simulates;
    c.cluster = *cluster;
}

static inline bool cpu_simulates() {
    return cpu_clock().simulates;
}

// Times are whole ns. Their sums are exact for 104 days (2^53 ns) and never infinite,
// whatever a cluster file says.
static inline double cpu_ns(double seconds) {
    return round(1e9 * seconds);
}

// ---------------------------------------------------------------------------------- costs

static inline TimePart cpu_part_of(KernelKind kind) {
    if (kind == KERNEL_GEMM) return TIME_GEMM;
    if (kind == KERNEL_ATTENTION_FORWARD || kind == KERNEL_ATTENTION_BACKWARD)
        return TIME_ATTENTION;
    return kind == KERNEL_OPTIMIZER ? TIME_OPTIMIZER : TIME_MEMORY;
}

// Returns the seconds of attention by the cluster's law. Its rates are for 16 bits; fp32 is
// slower by the ratio of the peaks. Unfused attention also copies its operands out of qkv
// and back.
static inline double cpu_attention_seconds(const Cluster *c, const KernelWork *w) {
    bool backward = w->kind == KERNEL_ATTENTION_BACKWARD;
    double seconds = cost_attention(c, backward, w->B, w->T, w->NH, w->HS);
    if (w->width == 4)
        seconds = c->launch_device +
                  (seconds - c->launch_device) * c->peak_bf16 / c->peak_fp32;
    double copied = (double)(w->B * w->T * w->NH * w->HS * w->width) * (backward ? 8 : 2);
    return c->attention == ATTENTION_FLASH
               ? seconds
               : seconds + cost_memory(c, c->elementwise_efficiency, copied);
}

// Returns the seconds of a kernel on a device of the cluster.
static inline double cpu_kernel_seconds(const Cluster *c, const KernelWork *w) {
    double bytes = w->bytes, masked = bytes + c->dropout * w->elements;
    double added = w->accumulates ? c->accumulate_bytes * (double)w->M * (double)w->N : 0;
    switch (w->kind) {
        case KERNEL_GEMM:
            return cost_gemm(c, w->M, w->N, w->K, w->width) +
                   cost_memory(c, c->elementwise_efficiency, added);
        case KERNEL_ATTENTION_FORWARD:
        case KERNEL_ATTENTION_BACKWARD: return cpu_attention_seconds(c, w);
        case KERNEL_RESIDUAL: return cost_memory(c, c->elementwise_efficiency, masked);
        case KERNEL_EXPONENTIAL: return cost_memory(c, c->softmax_efficiency, bytes);
        case KERNEL_RESIDUAL_LAYERNORM:
            return cost_memory(c, c->layernorm_forward_efficiency, masked);
        case KERNEL_LAYERNORM_FORWARD:
            return cost_memory(c, c->layernorm_forward_efficiency, bytes);
        case KERNEL_LAYERNORM_BACKWARD:
            return cost_memory(c, c->layernorm_backward_efficiency, bytes);
        case KERNEL_CLASSIFIER:
            return cost_memory(c, c->elementwise_efficiency,
                               c->classifier_bytes / 2 * w->elements);
        case KERNEL_OPTIMIZER:
            return cost_memory(c, c->optimizer_efficiency,
                               c->optimizer_bytes * w->elements);
        case KERNEL_COPY:
            return c->launch_device +
                   bytes / (c->host_bandwidth > 0 ? c->host_bandwidth : c->nic_bandwidth);
        default: return cost_memory(c, c->elementwise_efficiency, bytes);
    }
}

// Adds work to the next launch; kernel_state of llmc/kernels/work.cuh calls it.
inline void cpu_state_work(const KernelWork &work) {
    CpuClock &c = cpu_clock();
    if (!c.on || work.kind == KERNEL_NONE) return;
    c.next.seconds += cpu_kernel_seconds(&c.cluster, &work);
    c.next.part = cpu_part_of(work.kind);
}

static inline void cpu_state_bytes(KernelKind kind, double bytes) {
    KernelWork work = KernelWork();
    work.kind = kind;
    work.bytes = bytes;
    cpu_state_work(work);
}

// Lets the host work for `ns`, and returns its time.
static inline double cpu_clock_host_works(double ns) {
    return cpu_clock().host += ns;
}

// Returns the stated cost of an operation that is being enqueued, at least that of the
// shortest kernel.
static inline CpuCost cpu_take_cost() {
    CpuClock &c = cpu_clock();
    CpuCost cost = std::exchange(c.next, CpuCost());
    if (!c.on) return cost;
    cost.host = cpu_clock_host_works(cpu_ns(c.cluster.launch_host));
    cost.ns = cpu_ns(std::max(cost.seconds, c.cluster.launch_device));
    if (cost.seconds == 0) cost.part = TIME_MEMORY;
    return cost;
}

// -------------------------------------------------------------------------------- streams

// Does work that begins when the host has enqueued it, or later.
static inline void cpu_clock_work(CpuTimes *t, const CpuCost &cost) {
    t->spent[TIME_HOST] += std::max(0.0, cost.host - t->now);  // the host was late
    t->spent[cost.part] += cost.ns;
    t->now = std::max(t->now, cost.host) + cost.ns;
}

static inline CpuMoment cpu_clock_record(CpuTimes *t, double host) {
    CpuMoment m = t->last;
    m.ns = t->now = std::max(t->now, host);
    t->last.first = 0;
    return m;
}

// Remembers that the stream waited from..until.
static inline void cpu_clock_gap(CpuTimes *t, double from, double until) {
    double *gap = t->gaps[t->gap_count++ % CPU_GAPS];
    gap[0] = from;
    gap[1] = until;
}

// Returns how long the stream worked in from..until, by its remembered waits.
static inline double cpu_clock_worked(const CpuTimes *t, double from, double until) {
    double worked = until > from ? until - from : 0;
    size_t oldest = t->gap_count > CPU_GAPS ? t->gap_count - CPU_GAPS : 0;
    for (size_t i = t->gap_count; i > oldest && t->gaps[(i - 1) % CPU_GAPS][1] > from;
         i--) {
        const double *gap = t->gaps[(i - 1) % CPU_GAPS];
        double begin = std::max(gap[0], from), end = std::min(gap[1], until);
        worked -= end > begin ? end - begin : 0;
    }
    return worked;
}

// Slows the stream by overlap_slowdown while collectives ran beside it. That is the time
// that it worked since the first of them began, but no longer than they took.
static inline void cpu_clock_beside(CpuTimes *t, const CpuMoment &m) {
    double *seen = &t->seen[m.stream % CPU_MAX_STREAMS], busy = m.busy - *seen;
    if (busy <= 0) return;
    *seen = m.busy;
    if (!t->computes || t->now <= m.first) return;
    double both = std::min(busy, cpu_clock_worked(t, m.first, std::min(t->now, m.ns)));
    double slow = round(both * (cpu_clock().cluster.overlap_slowdown - 1));
    t->now += slow;
    t->spent[m.part] += slow;
}

static inline void cpu_clock_wait(CpuTimes *t, const CpuMoment &m) {
    cpu_clock_beside(t, m);
    if (m.ns <= t->now) return;
    t->spent[m.part] += std::min(m.ns - t->now, m.ns - m.begun);  // exposed
    cpu_clock_gap(t, t->now, m.ns);
    t->now = m.ns;
}

// Ends a communication that took begin..end.
static inline void cpu_clock_communicated(CpuTimes *t, double begin, double end,
                                          TimePart part, bool collective) {
    t->spent[part] += end - begin;
    cpu_clock_gap(t, t->now, end);
    t->now = end;
    if (begin > t->last.ns || part != t->last.part) t->last.begun = begin;
    t->last.ns = end;
    t->last.part = part;
    if (!collective) return;
    t->last.busy += end - begin;
    if (!t->last.first) t->last.first = begin;
}

// Lets the host wait for a stream or an event.
static inline void cpu_clock_host_waits(double ns) {
    if (cpu_clock().host < ns) cpu_clock().host = ns;
}

#endif
