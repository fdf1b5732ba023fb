// simulate.c: runs a pipeline schedule in virtual time, without a model, and writes the trace that a trainer
// would write.
//
//   simulate SCHEDULE p m v FORWARD BACKWARD TRANSFER TRACE.json      (times in milliseconds, of one chunk)
//   simulate interleaved 4 8 2 1 2 0.2 trace.json && timeline --out timeline.svg trace.json
#include <math.h>

#include "dev/plot/pipeline_streams.h"
#include "llmc/host/trace.h"

static int fail(const char *text) {
    fprintf(stderr, "simulate: %s\n", text);
    return 1;
}

// A whole argument as a number from 0 to limit, or -1.
static double number(const char *text, double limit) {
    char *end;
    double x = strtod(text, &end);
    return *text && !*end && x >= 0 && x <= limit ? x : -1;
}

static void collect(const Machine *mc, TraceList *trace) {
    static const char *const kinds[] = {"", "send", "recv"};
    for (int i = 0; i < mc->p * STREAM_COUNT; i++)
        for (size_t k = 0; k < mc->streams[i].count; k++) {
            const StreamOp *op = &mc->streams[i].ops[k];
            const char *compute = op->step.kind == STEP_FORWARD ? "forward" : "backward";
            TraceEvent e = trace_event(op->type == OP_COMPUTE ? compute : kinds[op->type], i / STREAM_COUNT,
                                       i % STREAM_COUNT, op->step.micro, op->step.chunk);
            e.start_us = 1e3 * op->start;
            e.duration_us = 1e3 * (op->end - op->start);
            if (e.duration_us > 0) trace_add(trace, &e);
        }
}

int main(int argc, char **argv) {
    if (argc != 9)
        return fprintf(stderr,
                       "usage: simulate gpipe|1f1b|interleaved P M V FORWARD BACKWARD TRANSFER TRACE.json\n"),
               2;
    int schedule = 0;
    while (schedule < 3 && strcmp(argv[1], pipeline_schedule_name((Schedule)schedule)) != 0) schedule++;
    if (schedule == 3) return fail("the schedule must be gpipe, 1f1b or interleaved");
    int p = (int)number(argv[2], 1024), m = (int)number(argv[3], 65536), v = (int)number(argv[4], 1024);
    Machine mc = {.p = p,
                  .m = m,
                  .v = v,
                  .buffers = PIPELINE_BUFFERS,
                  .cost = {number(argv[5], 1e6), number(argv[6], 1e6)},
                  .transfer = number(argv[7], 1e6),
                  .stream_of = {0, 1, 2, 3, 4}};
    Error err;
    if (mc.cost[0] < 0 || mc.cost[1] < 0 || mc.transfer < 0)
        return fail("times must be numbers from 0 to 1000000");
    if (!pipeline_check((Schedule)schedule, p, m, v, &err)) return fail(err.text);
    PipelineStep **lists = malloc((size_t)p * sizeof *lists);
    size_t *counts = malloc((size_t)p * sizeof *counts);
    if (!lists || !counts) return fail("out of memory");
    for (int s = 0; s < p; s++) {
        counts[s] = pipeline_schedule((Schedule)schedule, p, s, m, v, NULL);
        lists[s] = malloc(counts[s] * sizeof **lists);
        if (!lists[s]) return fail("out of memory");
        pipeline_schedule((Schedule)schedule, p, s, m, v, lists[s]);
    }
    machine_run(&mc, lists, counts);
    TraceList trace = {0};
    collect(&mc, &trace);
    static const char *const streams[] = {"compute", "receive activations", "send activations",
                                          "receive gradients", "send gradients"};
    bool ok = mc.complete && trace_write(argv[8], trace.events, trace.count, streams, STREAM_COUNT, &err);
    machine_free(&mc);
    trace_free(&trace);
    for (int s = 0; s < p; s++) free(lists[s]);
    free(lists);
    free(counts);
    return ok ? 0 : fail(mc.complete ? err.text : "the schedule hung");
}
