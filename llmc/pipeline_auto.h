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

// What a run works on. What is needed of the stages again and again lies together, [p] and up to a whole block of
// AUTO_BLOCK stages.
typedef struct {
    int p, m, blocks;
    const PipelineCosts *costs;
    AutoStage *stages;          // [p]
    double *clock;              // a stage does nothing before then; INFINITY: it is through
    double *wake;               // it waits until then, unless it hears from another stage; 0: it does not wait
    double *deadline;           // if it waits beyond that time, the run ends too late
    double *busy;               // its clock if it works beyond now, else INFINITY
    double *soonest, *working;  // [blocks] the least of clock and of busy, and up to a whole block of blocks
    PipelineStep *const *given; // lists to run; NULL: the policy decides
    AutoPolicy *policy;
    double latest, unit;        // the run gives up once its end must be later; how long to wait if nobody works
    bool sleeps, unsure;        // see auto_sleep
    double horizon, reach;
} AutoRun;

enum { AUTO_BLOCK = 8 };

static inline double auto_least(double a, double b) { return b < a ? b : a; }

// Of a block, in pairs, which a processor does side by side.
static inline double auto_least_of(const double *x) {
    double a = auto_least(auto_least(x[0], x[1]), auto_least(x[2], x[3]));
    return auto_least(a, auto_least(auto_least(x[4], x[5]), auto_least(x[6], x[7])));
}

// When the input of the stage's next forward or backward arrives; INFINITY if it must not run, or nobody knows yet.
static inline double auto_arrival(const AutoRun *r, const AutoStage *s, StepKind kind) {
    int next = s->done[kind];
    bool room = kind != STEP_FORWARD || next - s->done[STEP_WEIGHT] < r->costs->limit;
    return next < r->m && room ? s->arrival[kind][next] : INFINITY;
}

// For how long the stage can do nothing but weight steps.
static inline double auto_awaits(const AutoRun *r, int stage) {
    const AutoStage *s = &r->stages[stage];
    if (!r->given) return auto_least(auto_arrival(r, s, STEP_FORWARD), auto_arrival(r, s, STEP_BACKWARD));
    StepKind kind = r->given[stage][s->count].kind;
    return kind == STEP_WEIGHT ? INFINITY : auto_arrival(r, s, kind);
}

// What the stage does next at `now`, by its list, or by the policy: a forward while that wants more of them ahead; else
// a backward, a forward, and a weight step where it would otherwise wait longer than the policy's patience. -1: none.
static inline int auto_choose(const AutoRun *r, int stage, double now) {
    const AutoStage *s = &r->stages[stage];
    AutoPolicy *policy = r->policy;
    bool weight = s->done[STEP_WEIGHT] < s->done[STEP_BACKWARD];
    if (r->given) {
        StepKind kind = r->given[stage][s->count].kind;
        return (kind == STEP_WEIGHT ? weight : auto_arrival(r, s, kind) <= now) ? (int)kind : -1;
    }
    double forward = auto_arrival(r, s, STEP_FORWARD), backward = auto_arrival(r, s, STEP_BACKWARD);
    if (forward <= now && backward <= now) {
        int more = s->done[STEP_FORWARD] - s->done[STEP_BACKWARD] - (r->p - stage);
        if (more < policy->extra) return STEP_FORWARD;
        if (more < policy->same_extra) policy->same_extra = more;
        return STEP_BACKWARD;
    }
    if (backward <= now) return STEP_BACKWARD;
    if (forward <= now) return STEP_FORWARD;
    double wait = auto_least(forward, backward) - now;
    if (!weight || !(wait > policy->patience)) return -1;
    policy->same_patience = auto_least(policy->same_patience, wait);
    return STEP_WEIGHT;
}

// Tells a neighbour that something is on its way. One that looks up often looks when it next does so. One that sleeps
// wakes when it arrives; we are not sure of that if it might have looked up only later.
static inline void auto_tell(AutoRun *r, int stage, int to, double now) {
    if (!r->sleeps) r->wake[to] = 0;
    if (!r->sleeps || r->wake[to] <= now) return;
    double until = auto_awaits(r, to), *soonest = &r->soonest[to / AUTO_BLOCK];
    if (until >= r->wake[to]) return;
    r->unsure = r->unsure || until < r->horizon || (to < stage && until < r->reach);
    r->wake[to] = r->clock[to] = until;
    *soonest = auto_least(*soonest, until);
}

// Runs the stage's next step of a kind at `now`, sends what it makes, and returns when it is done.
static inline double auto_step(AutoRun *r, int stage, StepKind kind, double now) {
    AutoStage *s = &r->stages[stage];
    int micro = s->done[kind]++;
    if (s->count == 0) s->first = now;
    s->end = now + r->costs->step[kind];
    pipeline_add(s->steps, &s->count, kind, micro, 0);
    int to = kind == STEP_WEIGHT ? -1 : kind == STEP_FORWARD ? stage + 1 : stage - 1;
    if (to >= 0 && to < r->p) {
        r->stages[to].arrival[kind][micro] = s->end + r->costs->transfer;
        auto_tell(r, stage, to, now);
    } else if (kind == STEP_FORWARD) {
        s->arrival[STEP_BACKWARD][micro] = s->end;
    }
    return s->end;
}

// Goes on with a stage that may have something to do at `now`, until it has worked or must wait; false: it must wait.
static inline bool auto_works(AutoRun *r, int stage, double now) {
    AutoStage *s = &r->stages[stage];
    r->wake[stage] = 0;
    do {
        int kind = auto_choose(r, stage, now);
        if (kind < 0) {
            double left = 0;  // to do
            for (int k = 0; k < 3; k++) left += (r->m - s->done[k]) * r->costs->step[k];
            r->deadline[stage] = r->latest - left;
            r->wake[stage] = auto_awaits(r, stage);
            return false;
        }
        r->clock[stage] = auto_step(r, stage, (StepKind)kind, now);
        if (s->done[STEP_WEIGHT] == r->m) r->clock[stage] = INFINITY;
    } while (r->clock[stage] == now);
    return true;
}

static inline void auto_begin(AutoRun *r, bool sleeps) {
    r->sleeps = sleeps;
    r->unit = r->costs->step[STEP_FORWARD] > 0 ? r->costs->step[STEP_FORWARD] : 1;
    r->unsure = false;
    r->horizon = r->reach = 0;
    r->policy->same_extra = INT_MAX;
    r->policy->same_patience = INFINITY;
    for (int s = 0; s < r->blocks * AUTO_BLOCK; s++) {
        r->clock[s] = s < r->p ? 0 : INFINITY;
        r->busy[s] = INFINITY;
        r->wake[s] = 0;
    }
    for (int block = 0; block < r->blocks; block++) {
        r->soonest[block] = block * AUTO_BLOCK < r->p ? 0 : INFINITY;
        r->working[block] = INFINITY;
    }
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

// Runs all stages. One that waits looks up at each time at which another may begin something. False: gave up.
static inline bool auto_look(AutoRun *r) {
    auto_begin(r, false);
    for (double now = 0; !isinf(now);) {
        double later = auto_later(r, now);  // up to there no other stage sends anything
        for (int block = 0; block < r->blocks; block++) {
            if (r->soonest[block] > now) continue;
            double soonest = INFINITY;
            for (int s = block * AUTO_BLOCK; s < (block + 1) * AUTO_BLOCK; s++) {
                if (r->clock[s] == now) {  // what the others have sent up to now is known
                    if (r->wake[s] > now || !auto_works(r, s, now)) {
                        r->clock[s] = auto_least(r->wake[s], later);
                        if (isinf(r->clock[s])) r->clock[s] = now + r->unit;
                        if (r->clock[s] > r->deadline[s]) return false;
                    }
                    later = auto_least(later, r->clock[s]);
                }
                soonest = auto_least(soonest, r->clock[s]);
            }
            r->soonest[block] = soonest;
        }
        now = later;
    }
    return true;
}

// When one of the stages that work beyond `now` is done, the first or a later one; INFINITY: none does.
static inline double auto_working(const AutoRun *r, double now) {
    double least = INFINITY;
    for (int block = 0; block < r->blocks; block++)
        if (r->working[block] > now) least = auto_least(least, r->working[block]);
    for (int s = 0; s < r->p && isinf(least); s++)
        if (r->busy[s] > now) least = r->busy[s];
    return least;
}

// The same run, in which a stage that waits sleeps until what it waits for is there. Where messages take long that is
// many times faster, as nobody looks up in vain. In auto_look a stage may look up too late for what has arrived in the
// meantime. It does not if all times at which it may look up next are earlier: `horizon` is the last of those that it
// may have chosen up to now, and `reach` of those that it may choose now, before the stages that come after it work.
// Else the run is unsure.
static inline bool auto_sleep(AutoRun *r) {
    auto_begin(r, true);
    for (double now = 0; !isinf(now) && !r->unsure;) {
        double working = auto_working(r, now), first = working, next = INFINITY;
        r->reach = isinf(working) ? now + r->unit : working;
        for (int block = 0; block < r->blocks; block++) {
            if (r->soonest[block] > now) continue;
            double *clock = r->clock + block * AUTO_BLOCK, *wake = r->wake + block * AUTO_BLOCK;
            double *busy = r->busy + block * AUTO_BLOCK;
            for (int i = 0, s = block * AUTO_BLOCK; i < AUTO_BLOCK; i++, s++) {
                if (clock[i] != now) continue;
                if (auto_works(r, s, now)) {
                    busy[i] = clock[i];
                    working = auto_least(working, clock[i]);
                    if (!isinf(working)) r->reach = working;
                    continue;
                }
                busy[i] = INFINITY;
                clock[i] = wake[i];
                if (!isinf(clock[i]) && clock[i] > r->deadline[s]) return false;
            }
            r->soonest[block] = auto_least_of(clock);
            r->working[block] = auto_least_of(busy);
        }
        for (int s = 0; s < r->p && r->wake[s] == 0; s++) first = auto_least(first, r->clock[s]);
        r->horizon = fmax(r->horizon, isinf(first) ? now + r->unit : first);  // of the first stage that waits
        for (int block = 0; block < r->blocks; block += AUTO_BLOCK)
            next = auto_least(next, auto_least_of(r->soonest + block));
        now = next;
    }
    return true;
}

// Runs all stages by one policy, or by the lists in `given` (NULL: by the policy); the lists are in the stages. Returns
// the time from the first start to the last end, and *span, the longest that one stage takes from its own first start
// to its own last end. Gives up, and returns INFINITY, once the end must be later than `latest`.
static inline double auto_run(AutoRun *r, AutoPolicy *policy, PipelineStep *const *given, double latest, double *span) {
    r->policy = policy;
    r->given = given;
    r->latest = latest;
    bool ended = auto_sleep(r);
    if (r->unsure) ended = auto_look(r);
    *span = INFINITY;
    if (!ended) return INFINITY;
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
    int square = AUTO_BLOCK * AUTO_BLOCK, blocks = (p + square - 1) / square * AUTO_BLOCK;
    AutoStage *stages = (AutoStage *)host_alloc(p, sizeof *stages);
    size_t padded = (size_t)blocks * AUTO_BLOCK;
    double *clocks = (double *)host_alloc(6 * padded, sizeof *clocks);
    double *arrivals = (double *)host_alloc(2 * (size_t)p * m, sizeof *arrivals);
    PipelineStep *steps = (PipelineStep *)host_alloc(3 * (size_t)p * m, sizeof *steps);
    AutoRun run;
    memset(&run, 0, sizeof run);
    run.p = p, run.m = m, run.blocks = blocks, run.costs = costs, run.stages = stages;
    run.clock = clocks, run.wake = clocks + padded, run.deadline = clocks + 2 * padded;
    run.busy = clocks + 3 * padded, run.soonest = clocks + 4 * padded, run.working = clocks + 5 * padded;
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
