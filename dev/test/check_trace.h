// check_trace.h: checks a --trace file against its training run. On every rank and in every step
// each forward and backward is there once, in a possible order. Every message is there at both
// its ends.
#ifndef LLMC_CHECK_TRACE_H
#define LLMC_CHECK_TRACE_H

#include "dev/plot/trace_read.h"

// The run: t * d ranks on each of p stages of v chunks, m micro-batches a step, steps 1 .. steps.
typedef struct {
    int across, p, v, m, steps;
} TracedRun;

enum { RAN_FORWARD, RAN_BACKWARD, RAN_LOSS, RAN_OPTIMIZER, RAN_RECV, RAN_SEND, RAN_KINDS };

// Returns the place of an event's kind among the checked kinds, RAN_KINDS for the others.
static inline int trace_kind(const TraceEvent *e) {
    static const char *const NAMES[RAN_KINDS] = {"forward",   "backward", "loss",
                                                 "optimizer", "recv",     "send"};
    int kind = 0;
    while (kind < RAN_KINDS && strcmp(e->kind, NAMES[kind]) != 0) kind++;
    return kind;
}

static inline int trace_by_start(const void *a, const void *b) {
    double x = ((const TraceEvent *)a)->start_us, y = ((const TraceEvent *)b)->start_us;
    return x < y ? -1 : x > y;
}

// Checks one event of compute on a rank. The one before ended at *clock, and *clock becomes this
// one's end. done[micro * v + chunk] is 1 after the forward, 2 after the backward. ran: the
// events of each kind before this one, in this step.
static inline bool trace_check_event(const TracedRun *run, const TraceEvent *e, int kind,
                                     double *clock, unsigned char *done,
                                     const size_t ran[RAN_KINDS], Error *err) {
    const double slack_us = 10;  // start and duration are floats, in ms
    bool overlaps = e->start_us < *clock - slack_us;
    *clock = e->start_us + e->duration_us;
    if (overlaps) return error_set(err, "%s begins before what was before it has ended", e->kind);
    if (ran[RAN_OPTIMIZER]) return error_set(err, "%s after the optimizer", e->kind);
    if (kind == RAN_OPTIMIZER) return true;
    if (e->micro < 0 || e->micro >= run->m || e->chunk < 0 || e->chunk >= run->v)
        return error_set(err, "%s of micro-batch %d, chunk %d", e->kind, e->micro, e->chunk);
    if (kind != RAN_LOSS && done[e->micro * run->v + e->chunk]++ != kind)
        return error_set(err, "%s of micro-batch %d, chunk %d at a wrong place", e->kind,
                         e->micro, e->chunk);
    return true;
}

// Checks one rank and step. list: the events of all ranks and steps, by their starts.
// done[m * v] is scratch.
static inline bool trace_check_step(const TracedRun *run, const TraceList *list, int rank,
                                    long step, double *clock, unsigned char *done,
                                    size_t messages[2], Error *err) {
    size_t pairs = (size_t)run->m * (size_t)run->v, ran[RAN_KINDS] = {0};
    Error why = {""};
    memset(done, 0, pairs);
    for (size_t i = 0; i < list->count && !why.text[0]; i++) {
        const TraceEvent *e = &list->events[i];
        int kind = trace_kind(e);
        if (e->rank != rank || e->step != step || kind == RAN_KINDS) continue;
        if (kind < RAN_RECV) trace_check_event(run, e, kind, clock, done, ran, &why);
        ran[kind]++;
    }
    size_t losses = rank / run->across == run->p - 1 ? (size_t)run->m : 0;
    if (!why.text[0] && (ran[RAN_FORWARD] != pairs || ran[RAN_BACKWARD] != pairs ||
                         ran[RAN_LOSS] != losses || ran[RAN_OPTIMIZER] != 1))
        error_set(&why, "%zu forwards, %zu backwards, %zu losses, %zu optimizers",
                  ran[RAN_FORWARD], ran[RAN_BACKWARD], ran[RAN_LOSS], ran[RAN_OPTIMIZER]);
    messages[0] += ran[RAN_RECV];
    messages[1] += ran[RAN_SEND];
    return !why.text[0] || error_set(err, "rank %d, step %ld: %.900s", rank, step, why.text);
}

// Checks the whole trace. Returns false with an error if it is wrong. Work between the steps
// belongs to step 0 and is not checked.
static inline bool trace_check(const char *path, const TracedRun *run, Error *err) {
    TraceList list = {NULL, 0};
    unsigned char *done = (unsigned char *)malloc((size_t)run->m * (size_t)run->v);
    bool ok = done ? trace_read(path, &list, err) : error_set(err, "out of memory");
    size_t messages[2] = {0, 0},
           due = 2 * (size_t)(run->p * run->v - 1) * (size_t)(run->m * run->across * run->steps);
    int ranks = run->across * run->p;
    if (ok) qsort(list.events, list.count, sizeof *list.events, trace_by_start);
    for (size_t i = 0; i < list.count && ok; i++)
        if (list.events[i].rank >= ranks || list.events[i].step > run->steps)
            ok = error_set(err, "an event of rank %d, step %ld", list.events[i].rank,
                           list.events[i].step);
    for (int rank = 0; rank < ranks && ok; rank++) {
        double clock = -INFINITY;
        for (long step = 1; step <= run->steps && ok; step++)
            ok = trace_check_step(run, &list, rank, step, &clock, done, messages, err);
    }
    if (ok && (messages[0] != due || messages[1] != due))
        ok = error_set(err, "%zu messages received and %zu sent, not %zu", messages[0],
                       messages[1], due);
    trace_free(&list);
    free(done);
    return ok;
}

#endif
