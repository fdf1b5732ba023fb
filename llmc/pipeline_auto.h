// pipeline_auto.h: a zero-bubble schedule found by a search: what each stage does next follows from what steps cost,
// what a message takes, and how many micro-batches a stage may hold (Qi et al. 2024, section 3.1, "automatic
// schedule").
//
// defines: PipelineCosts, pipeline_zb_auto
#ifndef LLMC_PIPELINE_AUTO_H
#define LLMC_PIPELINE_AUTO_H

#include <math.h>

#include "llmc/pipeline.h"

// Durations in any one unit: of a stage's forward, of the two halves of its backward, of a message; and the most
// micro-batches of which a stage may hold activations (2p: no bubble is left in the middle; p: the memory of 1F1B).
typedef struct {
    double step[3], transfer;  // by StepKind
    int limit;
} PipelineCosts;

// One stage while the search runs.
typedef struct {
    double clock;       // it is free from here on
    double wake;        // it can do nothing before that time, unless it hears from another stage
    double first;       // start of its first step
    double *arrival[2]; // [m] when the input of a forward, and of a backward, is there; INFINITY: not known yet
    int done[3];        // steps of each kind
    PipelineStep *steps;
    size_t count;
} AutoStage;

// When the stage can start its next step of a kind; INFINITY if it must not, or does not know yet.
static inline double auto_start(const AutoStage *s, StepKind kind, int m, int limit) {
    int next = s->done[kind];
    if (next == m || (kind == STEP_FORWARD && next - s->done[STEP_WEIGHT] >= limit)) return INFINITY;
    if (kind == STEP_WEIGHT) return next < s->done[STEP_BACKWARD] ? s->clock : INFINITY;
    return fmax(s->clock, s->arrival[kind][next]);
}

// What the stage does next, at its clock: a forward while it has fewer than `ahead` forwards more than backwards; else
// a backward, a forward, and a weight step where it would otherwise wait longer than `patience`. -1: it waits until
// *until.
static inline int auto_choose(const AutoStage *s, int m, int limit, int ahead, double patience, double *until) {
    double start[3];
    for (int kind = 0; kind < 3; kind++) start[kind] = auto_start(s, (StepKind)kind, m, limit);
    bool fill = s->done[STEP_FORWARD] - s->done[STEP_BACKWARD] < ahead;
    if (fill && start[STEP_FORWARD] <= s->clock) return STEP_FORWARD;
    if (start[STEP_BACKWARD] <= s->clock) return STEP_BACKWARD;
    if (start[STEP_FORWARD] <= s->clock) return STEP_FORWARD;
    *until = fmin(start[STEP_FORWARD], start[STEP_BACKWARD]);
    return start[STEP_WEIGHT] <= s->clock && *until - s->clock > patience ? STEP_WEIGHT : -1;
}

// The earliest time at which a stage can be through: what it still has to do takes so long even without waiting.
static inline double auto_earliest_end(const AutoStage *s, int m, const PipelineCosts *costs) {
    double end = s->clock;
    for (int kind = 0; kind < 3; kind++) end += (m - s->done[kind]) * costs->step[kind];
    return end;
}

// Runs the stage's next step of a kind at its clock, and sends what it makes.
static inline void auto_step(AutoStage *stages, int p, int stage, StepKind kind, const PipelineCosts *costs) {
    AutoStage *s = &stages[stage];
    int micro = s->done[kind]++;
    if (s->count == 0) s->first = s->clock;
    s->clock += costs->step[kind];
    s->wake = 0;
    pipeline_add(s->steps, &s->count, kind, micro, 0);
    double arrives = s->clock + costs->transfer;
    int to = kind == STEP_WEIGHT ? -1 : kind == STEP_FORWARD ? stage + 1 : stage - 1;
    if (to >= 0 && to < p) stages[to].arrival[kind][micro] = arrives, stages[to].wake = 0;
    else if (kind == STEP_FORWARD) s->arrival[STEP_BACKWARD][micro] = s->clock;
}

// What the stage does at its clock, by its list or by the policy; -1: nothing before its wake.
static inline int auto_next(AutoStage *s, int m, int limit, int ahead, double patience, const PipelineStep *given) {
    if (s->wake > s->clock) return -1;
    s->wake = INFINITY;
    if (!given) return auto_choose(s, m, limit, ahead, patience, &s->wake);
    double start = auto_start(s, given[s->count].kind, m, limit);
    if (start > s->clock) s->wake = start;
    return start > s->clock ? -1 : (int)given[s->count].kind;
}

// Runs all stages by one policy, or by the lists in `given` (NULL: by the policy); the lists are in the stages. Returns
// the time from the first start to the last end, and *span, the longest that one stage takes from its own first start
// to its own last end. Gives up, and returns INFINITY, once the end must be later than `latest`.
static inline double auto_run(AutoStage *stages, int p, int m, const PipelineCosts *costs, int extra, double patience,
                              PipelineStep *const *given, double latest, double *span) {
    *span = INFINITY;
    for (int s = 0; s < p; s++) {
        stages[s].clock = stages[s].first = stages[s].wake = 0;
        stages[s].count = 0;
        memset(stages[s].done, 0, sizeof stages[s].done);
        for (int i = 0; i < 2 * m; i++) stages[s].arrival[i / m][i % m] = s == 0 && i < m ? 0 : INFINITY;
    }
    for (;;) {
        double now = INFINITY, later = INFINITY;  // the earliest clock, and the earliest one after it
        for (int s = 0; s < p; s++) {
            double clock = stages[s].done[STEP_WEIGHT] < m ? stages[s].clock : INFINITY;
            if (clock < now) later = now, now = clock;
            else if (clock > now && clock < later) later = clock;
        }
        if (isinf(now)) break;
        for (int next = 0; next < p; next++) {  // what the others have sent up to now is known
            AutoStage *s = &stages[next];
            while (s->done[STEP_WEIGHT] < m && s->clock == now) {
                int kind = auto_next(s, m, costs->limit, p - next + extra, patience, given ? given[next] : NULL);
                if (kind >= 0) {
                    auto_step(stages, p, next, (StepKind)kind, costs);
                    continue;
                }
                double until = fmin(s->wake, later);  // before that, no other stage sends anything
                if (isinf(until)) until = now + (costs->step[STEP_FORWARD] > 0 ? costs->step[STEP_FORWARD] : 1);
                s->clock = until;
                if (auto_earliest_end(s, m, costs) > latest) return INFINITY;
            }
            if (s->done[STEP_WEIGHT] < m) later = fmin(later, s->clock);
        }
    }
    double end = *span = 0;
    for (int s = 0; s < p; s++) {
        end = fmax(end, stages[s].clock);
        *span = fmax(*span, stages[s].clock - stages[s].first);
    }
    return end;
}

// The lists of all p stages: lists[s] has room for 3 * m steps; counts[s] becomes 3 * m. Tries zb-h1, if
// the limit allows it, then how far the stages fill before their first backward and how patiently they wait, and takes
// what ends first; of these, what keeps a stage shortest; of equals, what was tried first.
static inline void pipeline_zb_auto(int p, int m, const PipelineCosts *costs, PipelineStep *const *lists,
                                    size_t *counts) {
    AutoStage *stages = (AutoStage *)host_alloc(p, sizeof *stages);
    double *arrivals = (double *)host_alloc(2 * (size_t)p * m, sizeof *arrivals);
    double best = INFINITY, best_span = INFINITY, span, small = 1e-9 * m * costs->step[STEP_FORWARD];
    PipelineStep *steps = (PipelineStep *)host_alloc(3 * (size_t)p * m, sizeof *steps);
    for (int s = 0; s < p; s++) {
        stages[s].arrival[0] = arrivals + 2 * (size_t)s * m;
        stages[s].arrival[1] = stages[s].arrival[0] + m;
        stages[s].steps = steps + 3 * (size_t)s * m;
    }
    for (int s = 0; s < p; s++) counts[s] = pipeline_zb_h1(p, s, m, lists[s]);
    if (costs->limit >= (p < m ? p : m)) best = auto_run(stages, p, m, costs, 0, 0, lists, INFINITY, &best_span);
    // The last stage must get its first input and then do all its work, and no stage does its work in less.
    double work = m * (costs->step[STEP_FORWARD] + costs->step[STEP_BACKWARD] + costs->step[STEP_WEIGHT]);
    double bound = (p - 1) * (costs->step[STEP_FORWARD] + costs->transfer) + work;
    for (int fill = 0; fill < 5; fill++) {
        for (int patience = 0; patience < 4; patience++) {
            if (best < bound + small / 2 && best_span < work + small / 2) break;  // none can be better
            double wait = 0.25 * patience * costs->step[STEP_WEIGHT];
            double end = auto_run(stages, p, m, costs, fill * p / 4, wait, NULL, best + 2 * small, &span);
            if (end > best + small || (end > best - small && span > best_span - small)) continue;
            best = end;
            best_span = span;
            for (int s = 0; s < p; s++) memcpy(lists[s], stages[s].steps, 3 * (size_t)m * sizeof *steps);
        }
    }
    free(stages);
    free(arrivals);
    free(steps);
}

#endif
