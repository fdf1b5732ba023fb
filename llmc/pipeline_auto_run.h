// pipeline_auto_run.h: one run of the search of llmc/pipeline_auto.h: p stages in virtual time, which do what a policy
// says, or what given lists say.
//
// defines: PipelineCosts, AutoPolicy, AutoRun, auto_run
#ifndef LLMC_PIPELINE_AUTO_RUN_H
#define LLMC_PIPELINE_AUTO_RUN_H

#include <math.h>
#include <stdint.h>

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

// Times at which something happens to a stage, earliest first, for they are posted in this order; behind the last one
// stands INFINITY.
typedef struct {
    double time;
    int stage;
} AutoEvent;

typedef struct {
    AutoEvent *events;  // [size], in a ring
    size_t size, first, end;
} AutoQueue;

// Ends of steps of a kind follow each other as their starts do, and so do arrivals of forwards and of backwards.
enum { AUTO_ARRIVALS = 3, AUTO_QUEUES = AUTO_ARRIVALS + 2, AUTO_BLOCK = 8, AUTO_BITS = 64 };

// What a run works on. What auto_look needs of the stages again and again lies together, [p] and up to a whole block of
// AUTO_BLOCK stages.
typedef struct {
    int p, m, blocks;
    const PipelineCosts *costs;
    AutoStage *stages;          // [p]
    double *clock;              // a stage does nothing before then; INFINITY: it is through
    double *wake;               // it waits until then, unless it hears from another stage; 0: it does not wait
    double *deadline;           // if it waits beyond that time, the run ends too late
    double *soonest;            // [blocks] the least of clock
    PipelineStep *const *given; // lists to run; NULL: the policy decides
    AutoPolicy *policy;
    double latest, unit;        // the run gives up once its end must be later; how long to wait if nobody works
    // see auto_sleep
    AutoQueue queue[AUTO_QUEUES];
    uint64_t *due, *waiting;    // a bit for each stage: it has something to do now; it waits
    int *worked;                // [p] the stages that have begun a step now
    double horizon;
    bool sleeps, unsure;
} AutoRun;

static inline double auto_least(double a, double b) { return b < a ? b : a; }

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

static inline double auto_first(const AutoRun *r, int queue) {
    return r->queue[queue].events[r->queue[queue].first].time;
}

static inline void auto_post(AutoRun *r, int queue, double time, int stage) {
    AutoQueue *q = &r->queue[queue];
    q->events[q->end].time = time;
    q->events[q->end].stage = stage;
    if (++q->end == q->size) q->end = 0;
    q->events[q->end].time = INFINITY;
}

// When the first of the stages that work is done; INFINITY: none works.
static inline double auto_working(const AutoRun *r) {
    return auto_least(auto_least(auto_first(r, STEP_FORWARD), auto_first(r, STEP_BACKWARD)),
                      auto_first(r, STEP_WEIGHT));
}

static inline void auto_mark(uint64_t *bits, int stage) { bits[stage / AUTO_BITS] |= 1ull << stage % AUTO_BITS; }
static inline void auto_clear(uint64_t *bits, int stage) { bits[stage / AUTO_BITS] &= ~(1ull << stage % AUTO_BITS); }

// Tells a neighbour that something is on its way. One that looks up often looks when it next does so. One that sleeps
// wakes when it arrives; we are not sure of that if it might have looked up only later.
static inline void auto_tell(AutoRun *r, int stage, int to, double now) {
    if (!r->sleeps) r->wake[to] = 0;
    if (!r->sleeps || r->wake[to] <= now) return;
    double until = auto_awaits(r, to);
    if (until >= r->wake[to]) return;
    r->unsure = r->unsure || until < r->horizon;
    if (to < stage) {
        double working = auto_working(r);  // when it may look up next, of those that have chosen up to now
        r->unsure = r->unsure || until < (isinf(working) ? now + r->unit : working);
    }
    r->wake[to] = r->clock[to] = until;
    if (until <= now) auto_mark(r->due, to);
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
        double arrival = r->stages[to].arrival[kind][micro] = s->end + r->costs->transfer;
        if (r->sleeps) auto_post(r, AUTO_ARRIVALS + (int)kind, arrival, to);
        auto_tell(r, stage, to, now);
    } else if (kind == STEP_FORWARD) {
        s->arrival[STEP_BACKWARD][micro] = s->end;
    }
    return s->end;
}

// A stage waits at `now`: beyond which time must it not, or the run ends too late? It still has its own work to do; and
// its last forward has to reach the last stage and to come back to stage 0, its last backward to come there. These two
// count from the first time at which it may go on, as what no neighbour has begun may still wake it before `wake`.
static inline double auto_deadline(const AutoRun *r, int stage, double now) {
    const AutoStage *s = &r->stages[stage];
    const double *step = r->costs->step;
    int forwards = r->m - s->done[STEP_FORWARD], backwards = r->m - s->done[STEP_BACKWARD];
    double up = step[STEP_FORWARD] + r->costs->transfer, down = step[STEP_BACKWARD] + r->costs->transfer, left = 0;
    double on = auto_least(r->wake[stage], now + auto_least(up, down)) + forwards * step[STEP_FORWARD];
    double there = on + (r->p - 1 - stage) * up + step[STEP_BACKWARD] + (r->p - 1) * down + step[STEP_WEIGHT];
    double back = on + backwards * step[STEP_BACKWARD] + stage * down + step[STEP_WEIGHT];
    if ((forwards && there > r->latest) || (backwards && back > r->latest)) return -INFINITY;
    for (int k = 0; k < 3; k++) left += (r->m - s->done[k]) * step[k];
    return r->latest - left;
}

// Goes on with a stage that may have something to do at `now`, until it has worked or must wait; false: it must wait.
static inline bool auto_works(AutoRun *r, int stage, double now) {
    AutoStage *s = &r->stages[stage];
    int kind;
    r->wake[stage] = 0;
    do {
        kind = auto_choose(r, stage, now);
        if (kind < 0) {
            r->wake[stage] = auto_awaits(r, stage);
            r->deadline[stage] = auto_deadline(r, stage, now);
            return false;
        }
        r->clock[stage] = auto_step(r, stage, (StepKind)kind, now);
        if (s->done[STEP_WEIGHT] == r->m) r->clock[stage] = INFINITY;
    } while (r->clock[stage] == now);
    if (r->sleeps && !isinf(r->clock[stage])) auto_post(r, kind, r->clock[stage], stage);
    return true;
}

static inline void auto_begin(AutoRun *r, bool sleeps) {
    r->sleeps = sleeps;
    r->unit = r->costs->step[STEP_FORWARD] > 0 ? r->costs->step[STEP_FORWARD] : 1;
    r->unsure = false;
    r->horizon = 0;
    r->policy->same_extra = INT_MAX;
    r->policy->same_patience = INFINITY;
    for (int s = 0; s < r->blocks * AUTO_BLOCK; s++) {
        r->clock[s] = s < r->p ? 0 : INFINITY;
        r->wake[s] = 0;
    }
    for (int block = 0; block < r->blocks; block++) r->soonest[block] = 0;
    for (AutoQueue *q = r->queue; q < r->queue + AUTO_QUEUES; q++) {
        q->first = q->end = 0;
        q->events[0].time = INFINITY;
    }
    memset(r->due, 0, ((size_t)r->p / AUTO_BITS + 1) * sizeof *r->due);
    memset(r->waiting, 0, ((size_t)r->p / AUTO_BITS + 1) * sizeof *r->waiting);
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

// Goes to the next time at which a stage has something to do, and marks the stages that have; INFINITY: there is none.
static inline double auto_next(AutoRun *r) {
    for (bool any = false;;) {
        double now = auto_working(r);
        for (int i = AUTO_ARRIVALS; i < AUTO_QUEUES; i++) now = auto_least(now, auto_first(r, i));
        if (isinf(now)) return now;
        for (int i = 0; i < AUTO_QUEUES; i++) {
            AutoQueue *q = &r->queue[i];
            while (auto_first(r, i) == now) {
                int stage = q->events[q->first].stage;
                if (++q->first == q->size) q->first = 0;
                if (r->clock[stage] != now) continue;
                auto_mark(r->due, stage);
                any = true;
            }
        }
        if (any) return now;
    }
}

// The times up to which those that wait may now look up next: the first of them, when the first stage that works is
// done, of those that worked before and of the `count` earlier stages that now began to.
static inline double auto_look_up(const AutoRun *r, double now, double working, int count) {
    int word = 0, words = r->p / AUTO_BITS + 1;
    while (word < words && !r->waiting[word]) word++;
    int waits = word < words ? word * AUTO_BITS + __builtin_ctzll(r->waiting[word]) : r->p;
    for (int i = 0; i < count && r->worked[i] < waits; i++) working = auto_least(working, r->clock[r->worked[i]]);
    return isinf(working) ? now + r->unit : working;
}

// The same run, in which a stage that waits sleeps until what it waits for is there: nobody looks up in vain, and what
// happens next is at the head of a queue. In auto_look a stage may look up too late for what has arrived in the
// meantime. It does not if all times at which it may look up next are earlier: `horizon` is the last of those that it
// may have chosen up to now. Else the run is unsure.
static inline bool auto_sleep(AutoRun *r) {
    auto_begin(r, true);
    for (int s = 0; s < r->p; s++) auto_mark(r->due, s);
    for (double now = 0; !isinf(now) && !r->unsure; now = auto_next(r)) {
        double working = auto_working(r);
        int count = 0;
        for (int word = 0; word * AUTO_BITS < r->p; word++) {
            for (uint64_t later = ~0ull; r->due[word] & later;) {
                int bit = __builtin_ctzll(r->due[word] & later), s = word * AUTO_BITS + bit;
                later = ~1ull << bit;
                auto_clear(r->due, s);
                if (auto_works(r, s, now)) {
                    auto_clear(r->waiting, s);
                    r->worked[count++] = s;
                    continue;
                }
                auto_mark(r->waiting, s);
                r->clock[s] = r->wake[s];
                if (!isinf(r->clock[s]) && r->clock[s] > r->deadline[s]) return false;
            }
        }
        double look_up = auto_look_up(r, now, working, count);
        if (look_up > r->horizon) r->horizon = look_up;
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

#endif
