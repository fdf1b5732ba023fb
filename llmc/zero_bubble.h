// zero_bubble.h: schedules with a split backward: zb-h1, and zb-auto, which a search finds.
// lesson: zero_bubble
// From Zero Bubble Pipeline Parallelism (Qi et al. 2024).
//
// defines: zero_bubble_h1, zero_bubble_auto, zero_bubble_make, zero_bubble_lists,
//          zero_bubble_times
//
// A backward makes the gradient of its input (B), for which the stage before waits. It also
// makes the gradients of its weights (W), for which no stage waits. A stage that would idle
// runs a W instead. Steps take the times T_F, T_B and T_W.
#ifndef LLMC_ZERO_BUBBLE_H
#define LLMC_ZERO_BUBBLE_H

#include <stdint.h>

#include "llmc/pipeline_lists.h"

// ZB-H1 (section 2): 1F1B with a split backward. Stage s puts off its weight steps until s
// of them wait, so it has work when no gradient has come. The remaining ones fill the end,
// during which 1F1B idles. The bubble shrinks from (p - 1)(T_F + T_B + T_W) to (p - 1)(T_F
// + T_B - T_W). Every stage holds at most p micro-batches, as stage 0 of 1F1B does. This
// bound forbids forwards further ahead. Stage s has p - s micro-batches between F and B,
// and s between B and W, which makes p. One more forward would be number p + 1.
static inline size_t zero_bubble_h1(int p, int stage, int m, PipelineStep *out) {
    int warmup = p - stage - 1 < m ? p - stage - 1 : m, weights = 0;
    size_t n = 0;
    for (int i = 0; i < warmup; i++) pipeline_add(out, &n, STEP_FORWARD, i, 0);
    for (int i = 0; i < m; i++) {
        if (warmup + i < m) pipeline_add(out, &n, STEP_FORWARD, warmup + i, 0);
        pipeline_add(out, &n, STEP_BACKWARD, i, 0);
        if (i + 1 - weights > stage) pipeline_add(out, &n, STEP_WEIGHT, weights++, 0);
    }
    while (weights < m) pipeline_add(out, &n, STEP_WEIGHT, weights++, 0);
    return n;
}

// ---- the search ------------------------------------------------------------------------
// Stages run in virtual time by a policy that chooses the next step (section 3.1,
// "automatic schedule").

typedef struct {
    double *arrival[2];  // [m] when the input of a forward, and of a backward, is there;
                         // INFINITY: not known yet
    double sent[2];      // when its last message up, and down, has arrived
    double first, end;   // start of its first step, end of its last so far
    int done[3];         // steps of each kind
    bool waits;
} AutoStage;

typedef struct {
    uint64_t bits;  // of the time when the stage continues; INFINITY: not known, or it has
                    // finished
    uint64_t stage;
} AutoClock;

typedef struct {
    int p, m;
    PipelineLists lists;
    size_t limit;  // micro-batches of which a stage may hold activations
    const PipelineTimes *times;
    AutoStage *stages;
    // The policy: a stage does forwards while they are less than p - s + extra ahead of
    // its backwards. It does a weight step if it would otherwise wait longer than
    // `patience`.
    int extra;
    double patience;
    int least_ahead;  // the least lead at which `extra` made a backward go first: a run with
                      // any `extra` up to it is the same
    // A tree of the stages by their clocks, [2 * leaves]. Node i is the earlier of nodes 2i
    // and 2i + 1, of equals the first. Stage s is leaf leaves + s.
    AutoClock *tree;
    int leaves;
} AutoRun;

static inline double auto_clock(const AutoClock *c) {
    double time;
    memcpy(&time, &c->bits, sizeof time);
    return time;
}

static inline void auto_set_clock(AutoRun *r, int stage, double time) {
    uint64_t bits, at = (uint64_t)stage;
    memcpy(&bits, &time, sizeof bits);
    for (int i = r->leaves + stage; i > 0; i /= 2) {
        AutoClock *node = &r->tree[i], other = r->tree[i ^ 1];
        node->bits = bits;
        node->stage = at;
        bool wins = other.bits < bits + (uint64_t)(i & 1);
        bits = wins ? other.bits : bits;
        at = wins ? other.stage : at;
    }
}

// Returns when the input of the stage's next forward or backward arrives; INFINITY if not
// known, or if the stage may not run it.
static inline double auto_arrival(const AutoRun *r, const AutoStage *s, StepKind kind) {
    int next = s->done[kind];
    bool room = kind == STEP_BACKWARD || (size_t)(next - s->done[STEP_WEIGHT]) < r->limit;
    return next < r->m && room ? s->arrival[kind][next] : INFINITY;
}

// Returns the kind of the stage's next step at `now`, or -1 if it waits. It is a forward
// while the policy wants more of them ahead, else a backward, a forward, or a weight
// step. *until: when its next input arrives.
static inline int auto_choose(AutoRun *r, int stage, double now, double *until) {
    const AutoStage *s = &r->stages[stage];
    double forward = auto_arrival(r, s, STEP_FORWARD);
    double backward = auto_arrival(r, s, STEP_BACKWARD);
    int ahead = s->done[STEP_FORWARD] - s->done[STEP_BACKWARD] - (r->p - stage);
    *until = fmin(forward, backward);
    if (forward <= now && (backward > now || ahead < r->extra)) return STEP_FORWARD;
    if (forward <= now && ahead < r->least_ahead) r->least_ahead = ahead;
    if (backward <= now) return STEP_BACKWARD;
    bool weight = s->done[STEP_WEIGHT] < s->done[STEP_BACKWARD];
    return weight && *until - now > r->patience ? STEP_WEIGHT : -1;
}

// Runs the stage's next step of a kind at `now` and sends its message. A link carries one
// message at a time.
static inline void auto_step(AutoRun *r, int stage, StepKind kind, double now) {
    AutoStage *s = &r->stages[stage];
    int micro = s->done[kind]++, to = kind == STEP_FORWARD ? stage + 1 : stage - 1;
    if (r->lists.counts[stage] == 0) s->first = now;
    s->end = now + r->times->step[kind];
    pipeline_add(r->lists.steps[stage], &r->lists.counts[stage], kind, micro, 0);
    auto_set_clock(r, stage, s->done[STEP_WEIGHT] == r->m ? INFINITY : s->end);
    if (kind == STEP_FORWARD && to == r->p) s->arrival[STEP_BACKWARD][micro] = s->end;
    if (kind == STEP_WEIGHT || to < 0 || to == r->p) return;
    AutoStage *next = &r->stages[to];
    next->arrival[kind][micro] = s->sent[kind] = fmax(s->end, s->sent[kind]) +
                                                 r->times->transfer;
    if (next->waits)
        auto_set_clock(
            r, to, fmin(auto_clock(&r->tree[r->leaves + to]), auto_arrival(r, next, kind)));
}

// Runs all stages by the policy, which makes r->lists. Returns the time from the first
// start to the last end. Sets *span to the longest time of one stage from its own first
// start to its own last end. Gives up, and returns INFINITY, once the end must be later
// than `latest`.
static inline double auto_run(AutoRun *r, double latest, double *span) {
    const double *step = r->times->step;
    for (int s = 0; s < r->p; s++) {
        AutoStage *x = &r->stages[s];
        x->first = x->end = x->sent[0] = x->sent[1] = 0;
        x->waits = false;
        r->lists.counts[s] = 0;
        memset(x->done, 0, sizeof x->done);
        for (int i = 0; i < r->m; i++) x->arrival[STEP_FORWARD][i] = s == 0 ? 0 : INFINITY;
        for (int i = 0; i < r->m; i++) x->arrival[STEP_BACKWARD][i] = INFINITY;
        auto_set_clock(r, s, 0);
    }
    *span = INFINITY;
    r->least_ahead = INT_MAX;
    for (double now; now = auto_clock(&r->tree[1]), !isinf(now);) {
        int s = (int)r->tree[1].stage;
        AutoStage *x = &r->stages[s];
        double until, left = 0;
        int kind = auto_choose(r, s, now, &until);
        x->waits = kind < 0;
        if (kind >= 0) {
            auto_step(r, s, (StepKind)kind, now);
            continue;
        }
        for (int k = 0; k < 3; k++) left += (r->m - x->done[k]) * step[k];
        if (!isinf(until) && until + left > latest) return INFINITY;
        auto_set_clock(r, s, until);
    }
    double end = *span = 0;
    for (int s = 0; s < r->p; s++) {
        end = fmax(end, r->stages[s].end);
        *span = fmax(*span, r->stages[s].end - r->stages[s].first);
    }
    return end;
}

// Returns true if a run that ends at `end`, in which the longest stage takes `span`, is
// better than the best so far.
static inline bool auto_better(double end, double span, const PipelineRun *best,
                               double small) {
    return end < best->end - small ||
           (end < best->end + small && span < best->longest - small);
}

static inline void auto_swap(PipelineLists *a, PipelineLists *b) {
    PipelineLists c = *a;
    *a = *b;
    *b = c;
}

// Makes the lists of zb-auto. Starts from zb-h1, if the limit allows it, then tries how far
// the stages fill before their first backward and how patiently they wait. Takes the lists
// that end first when trainers execute them; of these, the lists whose longest stage is
// shortest; of equals, the first.
static inline void zero_bubble_auto(PipelineLists *l, const PipelineTimes *times,
                                    size_t limit) {
    int p = l->p, m = l->m, leaves = 1;
    while (leaves < p) leaves *= 2;
    AutoStage *stages = (AutoStage *)host_alloc(p, sizeof *stages);
    double *arrivals = (double *)host_alloc(2 * (size_t)p * m, sizeof *arrivals);
    AutoRun run = {p,    m,     pipeline_empty(p, m, 1), limit, times, stages, 0, 0, 0,
                   NULL, leaves};
    run.tree = (AutoClock *)host_alloc(2 * (size_t)leaves, sizeof *run.tree);
    for (int i = 0; i < 2 * leaves; i++) run.tree[i].bits = ~0ull;
    // For each patience, of its last run.
    int same_up_to[4] = {INT_MIN, INT_MIN, INT_MIN, INT_MIN};
    for (int s = 0; s < p; s++) {
        stages[s].arrival[0] = arrivals + 2 * (size_t)s * m;
        stages[s].arrival[1] = stages[s].arrival[0] + m;
        l->counts[s] = zero_bubble_h1(p, s, m, l->steps[s]);
    }
    PipelineRun best = {NULL, INFINITY, 0, INFINITY}, now = best;
    Error err;
    double span, small = 1e-9 * m * times->step[STEP_FORWARD];
    if (limit >= (size_t)(p < m ? p : m) &&
        pipeline_walk(l, PIPELINE_BUFFERS, times, &now, &err))
        best = now;
    // The last stage must get its first input and then do all its work, and no stage does
    // its work in less.
    double work = m * (times->step[STEP_FORWARD] + times->step[STEP_BACKWARD] +
                       times->step[STEP_WEIGHT]);
    double bound = (p - 1) * (times->step[STEP_FORWARD] + times->transfer) + work;
    for (int i = 0;
         i < 5 * 4 && !(best.end < bound + small / 2 && best.longest < work + small / 2);
         i++) {
        run.extra = i / 4 * p / 4;
        run.patience = 0.25 * (i % 4) * times->step[STEP_WEIGHT];
        if (run.extra <= same_up_to[i % 4]) continue;
        // Without waiting for buffers: a lower bound.
        double end = auto_run(&run, best.end + 2 * small, &span);
        same_up_to[i % 4] = run.least_ahead;
        if (!auto_better(end, span, &best, small)) continue;
        if (!pipeline_walk(&run.lists, PIPELINE_BUFFERS, times, &now, &err)) continue;
        if (!auto_better(now.end, now.longest, &best, small)) continue;
        best = now;
        auto_swap(l, &run.lists);
    }
    if (isinf(best.end))
        auto_swap(l, &run.lists);  // all of them hang: the proof will say so
    pipeline_lists_free(&run.lists);
    free(stages);
    free(arrivals);
    free(run.tree);
}

// ---- for trainers and tools ------------------------------------------------------------

// Makes the lists of any schedule for sizes that pipeline_check accepts. Schedule zb-auto
// also takes times and limit: a stage holds activations of at most `limit` micro-batches.
// 2p leaves no idle time in the middle, p takes the memory of 1F1B. Release with
// pipeline_lists_free.
static inline PipelineLists zero_bubble_make(Schedule schedule, int p, int m, int v,
                                             const PipelineTimes *times, size_t limit) {
    if (schedule < SCHEDULE_ZB_H1) return pipeline_make(schedule, p, m, v);
    PipelineLists l = pipeline_empty(p, m, v);
    if (schedule == SCHEDULE_ZB_AUTO) zero_bubble_auto(&l, times, limit);
    for (int s = 0; s < p && schedule == SCHEDULE_ZB_H1; s++)
        l.counts[s] = zero_bubble_h1(p, s, m, l.steps[s]);
    return l;
}

// Returns the times of a layer's steps by their FLOPs for each token. The matrices take 24
// C^2 in each of F, B and W. Causal attention takes its FLOPs in F and 2.5 times as many in
// B. Messages are free.
static inline PipelineTimes zero_bubble_times(size_t C, size_t T) {
    double matrices = 24.0 * (double)C, attention = 2.0 * (double)T;
    PipelineTimes times = {
        {matrices + attention, matrices + 2.5 * attention, matrices}, 0.0, NULL};
    return times;
}

// As pipeline_lists, for lists with weight steps as well. limit: of zb-auto; 0: 2p.
static inline bool zero_bubble_lists(PipelineLists *l, Schedule schedule, const char *file,
                                     size_t p, size_t m, size_t v,
                                     const PipelineTimes *times, size_t limit, Error *err) {
    if (!pipeline_begin(l, schedule, file, p, m, v, err)) return false;
    if (!file)
        *l = zero_bubble_make(schedule, (int)p, (int)m, (int)v, times,
                              limit ? limit : 2 * p);
    return pipeline_proved(l, file ? file : pipeline_schedule_name(schedule), err);
}

#endif
