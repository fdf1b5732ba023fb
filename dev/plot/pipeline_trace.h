// pipeline_trace.h: what a Machine ran, as the trace that a trainer would write.
//
// defines: machine_trace_write
#ifndef LLMC_PIPELINE_TRACE_H
#define LLMC_PIPELINE_TRACE_H

#include "dev/plot/pipeline_streams.h"
#include "llmc/host/trace.h"

static inline void machine_trace(const Machine *mc, TraceList *trace) {
    static const char *const kinds[] = {"", "send", "recv"}, *const steps[] = {"forward", "backward", "weight"};
    for (int i = 0; i < mc->p * STREAM_COUNT; i++)
        for (size_t k = 0; k < mc->streams[i].count; k++) {
            const StreamOp *op = &mc->streams[i].ops[k];
            const char *kind = op->type == OP_COMPUTE ? steps[op->step.kind] : kinds[op->type];
            TraceEvent e = trace_event(kind, i / STREAM_COUNT, i % STREAM_COUNT, op->step.micro, op->step.chunk);
            e.start_us = 1e3 * op->start;
            e.duration_us = 1e3 * (op->end - op->start);
            if (e.duration_us > 0) trace_add(trace, &e);
        }
}

// Writes what ran, one unit of the machine's time as a millisecond. After machine_run, before machine_free.
static inline bool machine_trace_write(const Machine *mc, const char *path, Error *err) {
    static const char *const streams[] = {"compute", "receive activations", "send activations",
                                          "receive gradients", "send gradients"};
    TraceList trace;
    memset(&trace, 0, sizeof trace);
    machine_trace(mc, &trace);
    bool ok = trace_write(path, trace.events, trace.count, streams, STREAM_COUNT, err);
    trace_free(&trace);
    return ok;
}

#endif
