// pipeline_run.h: the times that pipeline_walk finds for lists, as the trace that a trainer would
// write.
//
// defines: list_run, list_run_span, list_run_bubble, list_run_write, list_run_free
#ifndef DEV_PLOT_PIPELINE_RUN_H
#define DEV_PLOT_PIPELINE_RUN_H

#include "llmc/host/trace.h"
#include "llmc/v_schedules.h"

// Runs lists that pipeline_prove_list accepts and keeps the times of all steps. False, with an
// error message, if they hang. Release with list_run_free in either case.
static inline bool list_run(PipelineRun *r, const PipelineLists *l, size_t buffers,
                            const PipelineTimes *times, Error *err) {
    r->steps = (PipelineTime **)host_alloc((size_t)l->p, sizeof *r->steps);
    for (int s = 0; s < l->p; s++)
        r->steps[s] = (PipelineTime *)host_alloc(l->counts[s], sizeof **r->steps);
    return pipeline_walk(l, buffers, times, r, err);
}

static inline void list_run_free(PipelineRun *r, const PipelineLists *l) {
    for (int s = 0; s < l->p; s++) free(r->steps[s]);
    free(r->steps);
}

// Returns the time from a stage's first start to its last end.
static inline double list_run_span(const PipelineRun *r, const PipelineLists *l, int stage) {
    return r->steps[stage][l->counts[stage] - 1].end - r->steps[stage][0].start;
}

// Returns the bubble, idle time over work, of all stages from the first start to the last end.
static inline double list_run_bubble(const PipelineRun *r, int p) {
    double work = r->busy / p;
    return (r->end - work) / work;
}

static inline void list_run_event(TraceList *trace, const char *kind, int stage, int stream,
                                  PipelineStep step, double start, double end) {
    TraceEvent e = trace_event(kind, stage, stream, step.micro, step.chunk);
    e.start_us = 1e3 * start;
    e.duration_us = 1e3 * (end - start);
    if (end > start) trace_add(trace, &e);
}

// Writes the trace: steps on stream 0; receives and sends of activations on 1 and 2, of gradients
// on 3 and 4, and of chunk 1 in a V on 5 to 8. One unit of time is a millisecond.
static inline bool list_run_write(const PipelineRun *r, const PipelineLists *l, double transfer,
                                  const char *path, Error *err) {
    static const char *const kinds[] = {"forward", "backward", "weight"};
    static const char *const streams[] = {
        "compute", "receive activations", "send activations", "receive gradients",
        "send gradients", "receive activations 1", "send activations 1", "receive gradients 1",
        "send gradients 1"};
    TraceList trace;
    memset(&trace, 0, sizeof trace);
    for (int s = 0; s < l->p; s++)
        for (size_t i = 0; i < l->counts[s]; i++) {
            PipelineStep step = l->steps[s][i];
            const PipelineTime *t = &r->steps[s][i];
            int from, to;
            int port = (int)step.kind + (l->folded ? 2 * step.chunk : 0);
            pipeline_neighbours(l, s, step, &from, &to);
            list_run_event(&trace, kinds[step.kind], s, 0, step, t->start, t->end);
            if (to == PIPELINE_NONE) continue;
            PipelineStep read = step;  // at the other end
            int up = step.kind == STEP_FORWARD ? 1 : -1;
            read.chunk = (pipeline_chunk(l, s, step.chunk) + up) / l->p;
            double sending = t->sent - transfer;
            list_run_event(&trace, "send", s, 2 + 2 * port, step, sending, t->sent);
            list_run_event(&trace, "recv", to, 1 + 2 * port, read, sending, t->sent);
        }
    qsort(trace.events, trace.count, sizeof *trace.events, trace_order);  // a rank after the other
    bool ok = trace_write(path, trace.events, trace.count, streams, l->folded ? 9 : 5, err);
    free(trace.events);
    return ok;
}

#endif
