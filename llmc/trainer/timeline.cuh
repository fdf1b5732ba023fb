// timeline.cuh: the times of work, for --trace. A span brackets work on a stream with two
// CUDA events. After a synchronisation the spans become trace events, in microseconds since
// timeline_start. Without --trace it costs nothing.
//
// defines: seconds_now, Timeline, timeline_start, span_begin, span_end, timeline_collect
#ifndef LLMC_TIMELINE_CUH
#define LLMC_TIMELINE_CUH

#include <chrono>
#include <utility>

#include <nvtx3/nvToolsExt.h>

#include "llmc/kernels/cuda_common.cuh"
#include "llmc/host/memory.h"
#include "llmc/host/trace.h"

// Returns seconds of a clock that never jumps: of the virtual clock if that is on.
static inline double seconds_now(void) {
#ifdef CPU_CLOCK
    if (cpu_clock().on) return 1e-9 * cpu_clock().host;
#endif
    return std::chrono::duration<double>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

typedef struct {
    cudaEvent_t begin, end;
    TraceEvent event;
} TimelineSpan;

typedef struct {
    bool on;  // spans are kept: under --trace, until its last step
    int rank;
    cudaEvent_t origin;  // at origin_us; it moves on with each collection, because CUDA
                         // measures times as floats
    double origin_us;
    TimelineSpan *spans;  // [created]; the first `open` are not yet collected, and all CUDA
                          // events are reused
    size_t open, created;
    TraceList trace;  // collected so far
} Timeline;

// Sets time zero of this rank's trace. Call it when all ranks have just met.
static inline void timeline_start(Timeline *t, bool on, int rank, cudaStream_t stream) {
    memset(t, 0, sizeof *t);
    t->on = on;
    t->rank = rank;
    if (!on) return;
    CUDA_CHECK(cudaEventCreate(&t->origin));
    CUDA_CHECK(cudaEventRecord(t->origin, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

// Opens a span of `kind` (forward, backward, send, all-reduce, optimizer, ...) on a stream,
// with the track's number and its micro-batch and chunk (-1: none). Returns a number for
// span_end. Profilers and reports of a hang show its name.
static inline size_t span_begin(Timeline *t, cudaStream_t stream, int track,
                                const char *kind, int micro, int chunk) {
    char label[64];
    snprintf(label, sizeof label, micro < 0 ? "%s" : "%s micro-batch %d chunk %d", kind,
             micro, chunk);
    nvtxRangePushA(label);
    if (!t->on) return SIZE_MAX;
    if (t->open == t->created) {
        t->spans =
            (TimelineSpan *)host_resize(t->spans, ++t->created, sizeof(TimelineSpan));
        CUDA_CHECK(cudaEventCreate(&t->spans[t->open].begin));
        CUDA_CHECK(cudaEventCreate(&t->spans[t->open].end));
    }
    TimelineSpan *span = &t->spans[t->open];
    span->event = trace_event(kind, t->rank, track, micro, chunk);
    span->event.step = -1;
    CUDA_CHECK(cudaEventRecord(span->begin, stream));
    return t->open++;
}

// Closes a span. A failed launch of its kernels is reported here: no synchronisation does
// that.
static inline void span_end(Timeline *t, cudaStream_t stream, size_t number) {
    nvtxRangePop();
    CUDA_CHECK(cudaGetLastError());
    if (number != SIZE_MAX) CUDA_CHECK(cudaEventRecord(t->spans[number].end, stream));
}

// Returns the time of a CUDA event in microseconds, rounded to nanoseconds. Of two events
// the later one has no smaller time. So spans that follow each other or nest do so in the
// trace: viewers drop one that ends after the one around it.
static inline double timeline_us(const Timeline *t, cudaEvent_t event) {
    float ms;
    CUDA_CHECK(cudaEventElapsedTime(&ms, t->origin, event));
    return 1e-3 * rint(1e3 * t->origin_us + 1e6 * (double)ms);
}

// Turns the spans that have ended into trace events of training step `step`, but for waits
// shorter than a nanosecond. Spans that still run stay for later. If there are none, the
// latest end becomes the origin.
static inline void timeline_collect(Timeline *t, size_t step) {
    size_t kept = 0;
    TimelineSpan *last = NULL;
    double latest = t->origin_us;
    for (size_t i = 0; i < t->open; i++) {
        TimelineSpan *span = &t->spans[i];
        if (span->event.step < 0) span->event.step = (long)step;
        if (cudaEventQuery(span->end) != cudaSuccess) {
            std::swap(t->spans[kept++], *span);
            continue;
        }
        double start = timeline_us(t, span->begin), end = timeline_us(t, span->end);
        span->event.start_us = start;
        span->event.duration_us = end - start;
        if (strncmp(span->event.kind, "wait", 4) != 0 || end > start)
            trace_add(&t->trace, &span->event);
        if (end >= latest) {
            latest = end;
            last = span;
        }
    }
    if (last && kept == 0) std::swap(t->origin, last->end), t->origin_us = latest;
    t->open = kept;
}

#endif
