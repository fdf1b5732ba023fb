// pipeline_auto.h: a zero-bubble schedule found by a search: what each stage does next follows from what steps cost,
// what a message takes, and how many micro-batches a stage may hold (Qi et al. 2024, section 3.1, "automatic
// schedule").
//
// defines: pipeline_zb_auto
#ifndef LLMC_PIPELINE_AUTO_H
#define LLMC_PIPELINE_AUTO_H

#include "llmc/pipeline_auto_run.h"

// Has one of the policies that were run gone the way of this one?
static inline bool auto_seen(const AutoPolicy *seen, size_t count, const AutoPolicy *policy) {
    for (const AutoPolicy *s = seen; s < seen + count; s++) {
        bool extra = s->extra <= policy->extra && policy->extra <= s->same_extra;
        if (extra && s->patience <= policy->patience && policy->patience < s->same_patience) return true;
    }
    return false;
}

// The lists of all p stages: lists[s] has room for 3 * m steps; counts[s] becomes 3 * m. Tries zb-h1, if
// the limit allows it, then how far the stages fill before their first backward and how patiently they wait, and takes
// what ends first; of these, what keeps a stage shortest; of equals, what was tried first.
static inline void pipeline_zb_auto(int p, int m, const PipelineCosts *costs, PipelineStep *const *lists,
                                    size_t *counts) {
    enum { FILLS = 5, WAITS = 4 };
    int blocks = (p + AUTO_BLOCK - 1) / AUTO_BLOCK;
    AutoStage *stages = (AutoStage *)host_alloc(p, sizeof *stages);
    size_t padded = (size_t)blocks * AUTO_BLOCK;
    double *clocks = (double *)host_alloc(4 * padded, sizeof *clocks);
    double *arrivals = (double *)host_alloc(2 * (size_t)p * m, sizeof *arrivals);
    PipelineStep *steps = (PipelineStep *)host_alloc(3 * (size_t)p * m, sizeof *steps);
    AutoRun run;
    memset(&run, 0, sizeof run);
    run.p = p, run.m = m, run.blocks = blocks, run.costs = costs, run.stages = stages;
    run.clock = clocks, run.wake = clocks + padded, run.deadline = clocks + 2 * padded;
    run.soonest = clocks + 3 * padded;
    size_t words = (size_t)p / AUTO_BITS + 1;
    run.due = (uint64_t *)host_alloc(2 * words, sizeof *run.due);
    run.waiting = run.due + words;
    run.worked = (int *)host_alloc(p, sizeof *run.worked);
    for (int i = 0; i < AUTO_QUEUES; i++) {
        AutoQueue *q = &run.queue[i];
        q->size = i < AUTO_ARRIVALS ? (size_t)p + 1 : (size_t)p * m + 1;  // a stage does one step at a time
        q->events = (AutoEvent *)host_alloc(q->size, sizeof *q->events);
    }
    AutoPolicy tried[FILLS * WAITS], listed = {0, 0, 0, 0};
    size_t count = 0;
    double best = INFINITY, best_span = INFINITY, span, small = 1e-9 * m * costs->step[STEP_FORWARD];
    for (int s = 0; s < p; s++) {
        stages[s].arrival[0] = arrivals + 2 * (size_t)s * m;
        stages[s].arrival[1] = stages[s].arrival[0] + m;
        stages[s].steps = steps + 3 * (size_t)s * m;
    }
    for (int s = 0; s < p; s++) counts[s] = pipeline_zb_h1(p, s, m, lists[s]);
    if (costs->limit >= (p < m ? p : m)) best = auto_run(&run, &listed, lists, INFINITY, &best_span);
    // The last stage must get its first input and then do all its work, and no stage does its work in less.
    double work = m * (costs->step[STEP_FORWARD] + costs->step[STEP_BACKWARD] + costs->step[STEP_WEIGHT]);
    double bound = (p - 1) * (costs->step[STEP_FORWARD] + costs->transfer) + work;
    for (int fill = 0; fill < FILLS; fill++) {
        for (int patience = 0; patience < WAITS; patience++) {
            if (best < bound + small / 2 && best_span < work + small / 2) break;  // none can be better
            AutoPolicy *policy = &tried[count], now = {fill * p / 4, 0, 0.25 * patience * costs->step[STEP_WEIGHT], 0};
            if (auto_seen(tried, count, &now)) continue;
            *policy = now;
            count++;
            double end = auto_run(&run, policy, NULL, best + 2 * small, &span);
            if (end > best + small || (end > best - small && span > best_span - small)) continue;
            best = end;
            best_span = span;
            for (int s = 0; s < p; s++) memcpy(lists[s], stages[s].steps, 3 * (size_t)m * sizeof *steps);
        }
    }
    for (int i = 0; i < AUTO_QUEUES; i++) free(run.queue[i].events);
    free(run.due);
    free(run.worked);
    free(stages);
    free(clocks);
    free(arrivals);
    free(steps);
}

#endif
