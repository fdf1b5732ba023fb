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

// How a run decides. A stage does forwards while it has fewer than p - s + extra of them more than backwards, and no
// weight step where it would wait no longer than `patience` otherwise. same_extra and same_patience: the run would go
// the same way with an extra up to the one, and with a patience below the other, for no decision would change.
typedef struct {
    int extra, same_extra;
    double patience, same_patience;
} AutoPolicy;

// One stage while the search runs.
typedef struct {
    double first, end;  // start of its first step, end of its last so far
    double *arrival[2]; // [m] when the input of a forward, and of a backward, is there; INFINITY: not known yet
    int done[3];        // steps of each kind
    PipelineStep *steps;
    size_t count;
} AutoStage;

// What a run works on. Stages wait often, and look up at each time at which another one may send something: what that
// needs lies together, [p] and up to a whole block of AUTO_BLOCK stages.
typedef struct {
    int p, m, blocks;
    const PipelineCosts *costs;
    AutoStage *stages;  // [p]
    double *clock;      // a stage is free from there on; INFINITY: it is through
    double *wake;       // it can do nothing before that time, unless it hears from another stage
    double *deadline;   // if it waits beyond that time, the run ends too late
    double *soonest;    // [blocks] the earliest clock
} AutoRun;

enum { AUTO_BLOCK = 8 };

static inline double auto_least(double a, double b) { return b < a ? b : a; }

// What the stage does next at `now`: a forward while the policy wants more of them ahead; else a backward, a forward,
// and a weight step where it would otherwise wait longer than the policy's patience. -1: it waits until *until.
static inline int auto_choose(const AutoRun *r, const AutoStage *s, int ahead, double now, AutoPolicy *policy,
                              double *until) {
    const int *done = s->done;
    bool room = done[STEP_FORWARD] < r->m && done[STEP_FORWARD] - done[STEP_WEIGHT] < r->costs->limit;
    double forward = room ? s->arrival[STEP_FORWARD][done[STEP_FORWARD]] : INFINITY;
    double backward = done[STEP_BACKWARD] < r->m ? s->arrival[STEP_BACKWARD][done[STEP_BACKWARD]] : INFINITY;
    if (forward <= now && backward <= now) {
        int more = done[STEP_FORWARD] - done[STEP_BACKWARD] - ahead;
        if (more < policy->extra) return STEP_FORWARD;
        if (more < policy->same_extra) policy->same_extra = more;
        return STEP_BACKWARD;
    }
    if (backward <= now) return STEP_BACKWARD;
    if (forward <= now) return STEP_FORWARD;
    *until = auto_least(forward, backward);
    double wait = *until - now;
    if (done[STEP_WEIGHT] == done[STEP_BACKWARD] || !(wait > policy->patience)) return -1;
    policy->same_patience = auto_least(policy->same_patience, wait);
    return STEP_WEIGHT;
}

// The next step of its list, as soon as it can start.
static inline int auto_given(const AutoRun *r, const AutoStage *s, StepKind kind, double now, double *until) {
    int next = s->done[kind];
    bool room = next < r->m && (kind != STEP_FORWARD || next - s->done[STEP_WEIGHT] < r->costs->limit);
    *until = INFINITY;
    if (kind == STEP_WEIGHT) return next < s->done[STEP_BACKWARD] ? (int)kind : -1;
    if (room) *until = s->arrival[kind][next];
    return *until <= now ? (int)kind : -1;
}

// How long the stage still works.
static inline double auto_work_left(const AutoRun *r, const AutoStage *s) {
    double left = 0;
    for (int kind = 0; kind < 3; kind++) left += (r->m - s->done[kind]) * r->costs->step[kind];
    return left;
}

// Runs the stage's next step of a kind at `now`, sends what it makes, and returns when it is done.
static inline double auto_step(const AutoRun *r, int stage, StepKind kind, double now) {
    AutoStage *s = &r->stages[stage];
    int micro = s->done[kind]++;
    if (s->count == 0) s->first = now;
    s->end = now + r->costs->step[kind];
    r->wake[stage] = 0;
    pipeline_add(s->steps, &s->count, kind, micro, 0);
    int to = kind == STEP_WEIGHT ? -1 : kind == STEP_FORWARD ? stage + 1 : stage - 1;
    if (to >= 0 && to < r->p) {
        r->stages[to].arrival[kind][micro] = s->end + r->costs->transfer;
        r->wake[to] = 0;
    } else if (kind == STEP_FORWARD) {
        s->arrival[STEP_BACKWARD][micro] = s->end;
    }
    return s->end;
}

// Goes on with a stage that may have something to do at `now`, until it has worked or must wait; false: it must wait.
// latest: of the run. given: the stage's list, NULL: the policy decides.
static inline bool auto_works(const AutoRun *r, int stage, double now, double latest, AutoPolicy *policy,
                              const PipelineStep *given) {
    AutoStage *s = &r->stages[stage];
    do {
        int kind = -1;
        r->wake[stage] = INFINITY;
        if (given) kind = auto_given(r, s, given[s->count].kind, now, &r->wake[stage]);
        else kind = auto_choose(r, s, r->p - stage, now, policy, &r->wake[stage]);
        if (kind < 0) {
            r->deadline[stage] = latest - auto_work_left(r, s);
            return false;
        }
        r->clock[stage] = auto_step(r, stage, (StepKind)kind, now);
        if (s->done[STEP_WEIGHT] == r->m) r->clock[stage] = INFINITY;
    } while (r->clock[stage] == now);
    return true;
}

static inline void auto_begin(AutoRun *r) {
    for (int s = 0; s < r->blocks * AUTO_BLOCK; s++) {
        r->clock[s] = s < r->p ? 0 : INFINITY;
        r->wake[s] = 0;
    }
    for (int block = 0; block < r->blocks; block++) r->soonest[block] = 0;
    for (int s = 0; s < r->p; s++) {
        AutoStage *stage = &r->stages[s];
        stage->first = stage->end = 0;
        stage->count = 0;
        memset(stage->done, 0, sizeof stage->done);
        for (int i = 0; i < r->m; i++) stage->arrival[STEP_FORWARD][i] = s == 0 ? 0 : INFINITY;
        for (int i = 0; i < r->m; i++) stage->arrival[STEP_BACKWARD][i] = INFINITY;
    }
}

// The earliest clock after `now`.
static inline double auto_later(const AutoRun *r, double now) {
    double later = INFINITY;
    for (int block = 0; block < r->blocks; block++) {
        const double *clock = r->clock + block * AUTO_BLOCK;
        if (r->soonest[block] > now) later = auto_least(later, r->soonest[block]);
        for (int i = 0; i < AUTO_BLOCK && r->soonest[block] <= now; i++)
            if (clock[i] > now) later = auto_least(later, clock[i]);
    }
    return later;
}

// Runs all stages by one policy, or by the lists in `given` (NULL: by the policy); the lists are in the stages. Returns
// the time from the first start to the last end, and *span, the longest that one stage takes from its own first start
// to its own last end. Gives up, and returns INFINITY, once the end must be later than `latest`.
static inline double auto_run(AutoRun *r, AutoPolicy *policy, PipelineStep *const *given, double latest, double *span) {
    *span = INFINITY;
    policy->same_extra = INT_MAX;
    policy->same_patience = INFINITY;
    auto_begin(r);
    double unit = r->costs->step[STEP_FORWARD] > 0 ? r->costs->step[STEP_FORWARD] : 1;
    for (double now = 0; !isinf(now);) {
        double later = auto_later(r, now);  // up to there no other stage sends anything
        for (int block = 0; block < r->blocks; block++) {
            if (r->soonest[block] > now) continue;
            double soonest = INFINITY;
            for (int s = block * AUTO_BLOCK; s < (block + 1) * AUTO_BLOCK; s++) {
                if (r->clock[s] == now) {  // what the others have sent up to now is known
                    if (r->wake[s] > now || !auto_works(r, s, now, latest, policy, given ? given[s] : NULL)) {
                        r->clock[s] = auto_least(r->wake[s], later);
                        if (isinf(r->clock[s])) r->clock[s] = now + unit;
                        if (r->clock[s] > r->deadline[s]) return INFINITY;
                    }
                    later = auto_least(later, r->clock[s]);
                }
                soonest = auto_least(soonest, r->clock[s]);
            }
            r->soonest[block] = soonest;
        }
        now = later;
    }
    double end = *span = 0;
    for (int s = 0; s < r->p; s++) {
        end = fmax(end, r->stages[s].end);
        *span = fmax(*span, r->stages[s].end - r->stages[s].first);
    }
    return end;
}

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
    AutoRun run = {p, m, blocks, costs, stages, clocks, clocks + padded, clocks + 2 * padded, clocks + 3 * padded};
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
    free(stages);
    free(clocks);
    free(arrivals);
    free(steps);
}

#endif
