// test_timeline.cu: tests llmc/trainer/timeline.cuh on streams that lag behind each other. It
// has nested spans, pauses, events that are used again, and spans that end in a later step. It
// also tests the labels in reports of a hang.
#include "dev/test/check.h"
#include "llmc/trainer/timeline.cuh"

enum { BYTES = 1 << 20 };
static Check c;
static void *memory;
static cudaStream_t stream, other;

// Something that takes a while.
static void work(cudaStream_t s) {
    for (int i = 0; i < 4; i++) CUDA_CHECK(cudaMemsetAsync(memory, i, BYTES, s));
}

static size_t begin(Timeline *t, const char *kind) { return span_begin(t, stream, 0, kind, -1, 0); }

static double end_of(const TraceEvent *e) { return e->start_us + e->duration_us; }

// Both ends of a span are inside of another one. Starts and durations are floats, in ms.
static bool inside(const TraceEvent *inner, const TraceEvent *outer) {
    return inner->start_us >= outer->start_us - 1 && end_of(inner) <= end_of(outer) + 1;
}

static bool is(const TraceEvent *e, const char *kind, int track, int micro, int chunk, long step) {
    return strcmp(e->kind, kind) == 0 && e->rank == 3 && e->stream == track &&
           e->micro == micro && e->chunk == chunk && e->step == step;
}

static void test_nested(void) {
    Timeline t;
    double host = seconds_now();
    timeline_start(&t, true, 3, stream);
    size_t outer = span_begin(&t, stream, 0, "forward", 5, 1);
    work(stream);
    size_t first = begin(&t, "wait tensor");
    work(stream);
    span_end(&t, stream, first);
    size_t second = begin(&t, "all-reduce"), deep = begin(&t, "wait data");
    work(stream);
    span_end(&t, stream, deep);
    span_end(&t, stream, second);
    span_end(&t, stream, outer);
    size_t next = span_begin(&t, stream, 0, "backward", 5, 1);
    work(stream);
    span_end(&t, stream, next);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    timeline_collect(&t, 7);
    host = 1e6 * (seconds_now() - host);
    const TraceEvent *e = t.trace.events;
    check(&c,
          t.trace.count == 5 && is(&e[0], "forward", 0, 5, 1, 7) &&
              is(&e[1], "wait tensor", 0, -1, 0, 7) && is(&e[2], "all-reduce", 0, -1, 0, 7) &&
              is(&e[3], "wait data", 0, -1, 0, 7) && is(&e[4], "backward", 0, 5, 1, 7),
          "five spans, three deep: what they are, in the order in which they were opened");
    check(&c,
          t.trace.count == 5 && inside(&e[1], &e[0]) && inside(&e[2], &e[0]) &&
              inside(&e[3], &e[2]) && e[1].duration_us > 0 &&
              e[0].duration_us > e[1].duration_us + e[2].duration_us - 2,
          "spans lie inside those that were open");
    check(&c,
          t.trace.count == 5 && e[2].start_us >= end_of(&e[1]) - 1 &&
              e[4].start_us >= end_of(&e[0]) - 1 && e[0].start_us >= 0 && end_of(&e[4]) <= host,
          "one after the other, within the time that passed on the host");
}

// A span on a stream that waits for another one begins when the other has come so far.
static void test_two_streams(void) {
    Timeline t;
    cudaEvent_t ready;
    timeline_start(&t, true, 3, stream);
    CUDA_CHECK(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    size_t first = begin(&t, "forward");
    work(stream);
    span_end(&t, stream, first);
    CUDA_CHECK(cudaEventRecord(ready, stream));
    CUDA_CHECK(cudaStreamWaitEvent(other, ready, 0));
    size_t second = span_begin(&t, other, 3, "send", 2, 0);
    work(other);
    span_end(&t, other, second);
    CUDA_CHECK(cudaDeviceSynchronize());
    timeline_collect(&t, 1);
    const TraceEvent *e = t.trace.events;
    check(
        &c,
        t.trace.count == 2 && is(&e[1], "send", 3, 2, 0, 1) && e[1].start_us >= end_of(&e[0]) - 1,
        "a send that waits for a forward begins after it");
    CUDA_CHECK(cudaEventDestroy(ready));
}

// A span that still runs when its step is collected stays for later, and belongs to the step in
// which it was opened.
static void test_unfinished(void) {
    Timeline t;
    bool arrived = false;
    timeline_start(&t, true, 3, stream);
    span_end(&t, stream, begin(&t, "optimizer"));
    size_t late = span_begin(&t, other, 6, "all-gather", -1, 0);
    cpu_enqueue(other, "a message", [&] { return arrived; });
    span_end(&t, other, late);
    CUDA_CHECK(cudaEventSynchronize(t.spans[late].begin));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    timeline_collect(&t, 4);
    bool kept = t.open == 1 && t.trace.count == 1 &&
                is(&t.trace.events[0], "optimizer", 0, -1, 0, 4);
    size_t created = t.created;
    span_end(&t, stream, begin(&t, "forward"));
    arrived = true;
    CUDA_CHECK(cudaDeviceSynchronize());
    timeline_collect(&t, 5);
    const TraceEvent *e = t.trace.events;
    check(&c, kept && t.open == 0 && t.trace.count == 3 && is(&e[1], "all-gather", 6, -1, 0, 4) &&
          is(&e[2], "forward", 0, -1, 0, 5) && e[1].duration_us > 0 &&
          e[1].start_us < e[2].start_us,
          "a span that ends in the next step keeps its own step's number");
    check(&c, created == 2 && t.created == 2,
          "and its events are not given to another span before");
}

static void test_reuse(void) {
    enum { STEPS = 5, SPANS = 300 };  // more than there is room for at first
    Timeline t;
    timeline_start(&t, true, 3, stream);
    bool order = true;
    for (int step = 1; step <= STEPS; step++) {
        for (int i = 0; i < SPANS; i++)
            span_end(&t, stream, span_begin(&t, stream, 0, "forward", i, step));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        timeline_collect(&t, (size_t)step);
    }
    for (size_t i = 0; i < t.trace.count && order; i++) {
        const TraceEvent *e = &t.trace.events[i];
        int step = (int)(i / SPANS) + 1;
        order = is(e, "forward", 0, (int)(i % SPANS), step, step) &&
                (i == 0 || e->start_us >= end_of(e - 1) - 1);
    }
    check(&c, t.trace.count == STEPS * SPANS && order,
          "%d steps of %d spans are all there, in order", STEPS, SPANS);
    check(&c, fabs(t.origin_us - end_of(&t.trace.events[t.trace.count - 1])) < 1e-6,
          "times of a step are measured from the end of the one before");
    check(&c, t.created == SPANS && t.open == 0,
          "a step's events serve the next one: %zu pairs of them", t.created);
}

// 90 s after the origin a float of milliseconds is exact to 8 us. Spans still nest and follow
// each other.
static void test_late(void) {
    enum { SPANS = 300 };
    Timeline t;
    bool ok = true;
    timeline_start(&t, true, 3, stream);
    t.origin->last->moment.ns -= 9e10;
    for (int i = 0; i < SPANS; i++) {
        size_t outer = begin(&t, "forward"), inner = begin(&t, "all-reduce");
        span_end(&t, stream, inner);
        span_end(&t, stream, outer);
    }
    CUDA_CHECK(cudaStreamSynchronize(stream));
    timeline_collect(&t, 1);
    for (size_t i = 0; i < t.trace.count; i += 2) {
        const TraceEvent *outer = &t.trace.events[i], *inner = outer + 1;
        ok = ok && outer->start_us > 89e6 && inner->start_us >= outer->start_us;
        ok = ok && end_of(inner) <= end_of(outer) + 1e-6 &&
             (i == 0 || outer->start_us >= end_of(outer - 2) - 1e-6);
    }
    check(&c, t.trace.count == 2 * SPANS && ok,
          "%d late spans neither overlap nor leave the ones around them", SPANS);
}

static void test_off_and_paused(void) {
    Timeline t;
    timeline_start(&t, false, 3, stream);
    size_t number = begin(&t, "forward");
    span_end(&t, stream, number);
    timeline_collect(&t, 1);
    check(&c, number == SIZE_MAX && t.created == 0 && t.trace.count == 0,
          "off: nothing is made and nothing kept");
    timeline_start(&t, true, 3, stream);
    for (int i = 0; i < 6; i++) {
        t.on = i % 2 == 0;
        size_t outer = begin(&t, t.on ? "forward" : "paused"),
               inner = begin(&t, t.on ? "loss" : "paused");
        span_end(&t, stream, inner);
        span_end(&t, stream, outer);
        CUDA_CHECK(cudaStreamSynchronize(stream));
        timeline_collect(&t, (size_t)i);
    }
    bool ok = t.trace.count == 6 && t.created == 2;
    for (size_t i = 0; i < t.trace.count; i++) {
        ok = ok && is(&t.trace.events[i], i % 2 ? "loss" : "forward", 0, -1, 0, (long)(i / 2 * 2));
    }
    check(&c, ok, "paused: those steps are left out, the others are whole");
}

// The names of spans stand in reports of a hang, also without --trace.
static void test_labels(void) {
    for (int on = 0; on < 2; on++) {
        Timeline t;
        timeline_start(&t, on, 3, stream);
        size_t outer = span_begin(&t, stream, 0, "backward", 2, 1);
        bool ok = strcmp(cpu_current_label(), "backward micro-batch 2 chunk 1") == 0;
        size_t inner = begin(&t, "wait data");
        ok = ok && strcmp(cpu_current_label(), "wait data") == 0;
        span_end(&t, stream, inner);
        ok = ok && strcmp(cpu_current_label(), "backward micro-batch 2 chunk 1") == 0;
        span_end(&t, stream, outer);
        check(&c, ok && !*cpu_current_label(), "labels, %s: the innermost open span, then none",
              on ? "on" : "off");
        CUDA_CHECK(cudaStreamSynchronize(stream));
    }
}

int main(void) {
    CUDA_CHECK(cudaMalloc(&memory, BYTES));
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0));
    CUDA_CHECK(cudaStreamCreateWithPriority(&other, cudaStreamNonBlocking, 0));
    test_nested();
    test_two_streams();
    test_unfinished();
    test_reuse();
    test_late();
    test_off_and_paused();
    test_labels();
    return check_summary(&c);
}
