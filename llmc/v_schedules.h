// v_schedules.h: schedules whose two chunks a stage lie in a V: zb-v, v-half, dualpipe-v.
// lesson: v
// Papers: Pipeline Parallelism with Controllable Memory (Qi et al. 2024). DualPipe
// (DeepSeek-V3, 2024), which DualPipeV cuts in half.
//
// defines: v_check, v_make, v_lists, v_link_count, v_link_ends
//
// Chunk 0 of stage s is global chunk s, chunk 1 is global chunk 2p - 1 - s. So a micro-batch
// goes up through all chunks 0, turns at the last stage without a message, and comes down
// through all chunks 1. Stage 0 has both ends of the model. Its chunk 0 keeps activations
// longest and its chunk 1 shortest, and the last stage keeps both equally long. So all
// stages hold about the same number of activations.
//
// T_F, T_B, T_W are the times of a chunk's steps, which are half of a stage's.
#ifndef LLMC_V_SCHEDULES_H
#define LLMC_V_SCHEDULES_H

#include "llmc/zero_bubble.h"

// ---- blocks ----------------------------------------------------------------------------
// A micro-batch is a block: 2 forwards and 2 backwards on each stage, at fixed times. A new
// block begins every 6 steps, as 2 weight steps belong to it. A list has the order of these
// times, not the times. A block that holds a stage's activations longer needs more of them.

// The four runs of a block through the stages, in their order. step: from one stage to the
// next. gap: from the end of the run before.
enum { V_RUNS = 4, V_PERIOD = 6 };
typedef struct {
    int step[V_RUNS], gap[V_RUNS];
} VBlock;

// Returns how many pairs of micro-batch and chunk a stage may hold. That is p
// micro-batches, or (p + 2) / 2 rounded down. Schedule dualpipe-v takes one pair more
// than p micro-batches.
static inline int v_limit(Schedule schedule, int p) {
    return schedule == SCHEDULE_DUALPIPE_V ? 2 * p + 1
           : schedule == SCHEDULE_ZB_V     ? 2 * p
                                           : (p + 2) / 2 * 2;
}

// Returns the block of zb-v or v-half. Steps of 1, 5, 1, 5 hold a stage's activations for
// 12 (p - 1) and a few steps, which makes 2p pairs; steps of 1, 2, 1, 2 half as long. The
// gaps are the best of a search over 1 to 6, for p = 3, 4, 5 and 7. At equal times zb-v
// idles (p - 1) T_F, and v-half (3p - 5) T_F for even p, (3p - 4) T_F for odd p > 1. A
// stage's work is 2m (T_F + T_B + T_W).
static inline VBlock v_block(Schedule schedule, int p) {
    static const VBlock zero = {{1, 5, 1, 5}, {0, 1, 1, 1}};
    static const VBlock even = {{1, 2, 1, 2}, {0, 4, 1, 5}}, odd = {{1, 2, 1, 2}, {0, 1, 1, 2}};
    if (v_limit(schedule, p) == 2 * p) return zero;
    return p % 2 ? odd : even;
}

// Writes the forwards and backwards of a stage in the order of their times.
static inline void v_order(VBlock block, int p, int stage, int m, PipelineStep *out) {
    static const StepKind kinds[V_RUNS] = {STEP_FORWARD, STEP_FORWARD, STEP_BACKWARD,
                                           STEP_BACKWARD};
    static const int chunks[V_RUNS] = {0, 1, 1, 0};
    long time[V_RUNS], begin = 0;
    int done[V_RUNS] = {0, 0, 0, 0};
    for (int i = 0; i < V_RUNS; i++) {
        bool up = chunks[i] == (kinds[i] == STEP_FORWARD ? 0 : 1);
        begin += block.gap[i];
        time[i] = begin + (long)block.step[i] * (up ? stage : p - 1 - stage);
        begin += (long)block.step[i] * (p - 1);
    }
    for (size_t n = 0; n < (size_t)V_RUNS * m;) {
        int next = -1;
        for (int i = 0; i < V_RUNS; i++) {
            bool earlier = next < 0 || time[i] < time[next];
            if (done[i] < m && earlier) next = i;
        }
        pipeline_add(out, &n, kinds[next], done[next]++, chunks[next]);
        time[next] += V_PERIOD;
    }
}

// ---- weight steps ----------------------------------------------------------------------

// A stage that runs its forwards and backwards in a given order, and puts weight steps where
// it would wait.
typedef struct {
    PipelineStep *order;       // [4m]
    double *ready[2];          // [2m] when the input of a forward or backward is there, by
                               // micro * 2 + chunk; INFINITY: not known yet
    size_t next, put, waiting; // of order; weight steps that are done, backwards that are
    int held;                  // pairs of micro-batch and chunk
    double clock;
} VStage;

// Returns when the stage's next step begins; INFINITY if that is not known, or the stage has
// finished. *weight: the step is a weight step.
static inline double v_next(const VStage *s, size_t count, int limit, double longest,
                            bool *weight) {
    bool has = s->put < s->waiting;
    *weight = has;
    if (s->next == count) return has ? s->clock : INFINITY;
    PipelineStep step = s->order[s->next];
    double start = fmax(s->clock, s->ready[step.kind][2 * step.micro + step.chunk]);
    bool full = step.kind == STEP_FORWARD && s->held >= limit;
    *weight = has && (full || start - s->clock > 0.999 * longest);
    return *weight ? s->clock : full ? INFINITY : start;
}

// Runs the stages in virtual time and writes their lists. Does not wait for free buffers.
static inline void v_fill(PipelineLists *l, VStage *stages, const PipelineTimes *times,
                          int limit) {
    size_t count = (size_t)V_RUNS * l->m;
    for (;;) {
        int at = -1;
        double start = INFINITY;
        bool weight = false;
        for (int s = 0; s < l->p; s++) {
            bool fills;
            double time = v_next(&stages[s], count, limit, times->step[STEP_WEIGHT], &fills);
            if (time >= start) continue;
            start = time;
            at = s;
            weight = fills;
        }
        if (at < 0) return;

        // The weight steps come in the order of the backwards, which the list has.
        VStage *s = &stages[at];
        PipelineStep *list = l->steps[at];
        if (weight) {
            size_t i = s->put++;
            PipelineStep step = s->order[count + i];
            s->held--;
            s->clock = start + times->step[STEP_WEIGHT];
            pipeline_add(list, &l->counts[at], STEP_WEIGHT, step.micro, step.chunk);
            continue;
        }
        PipelineStep step = s->order[s->next++];
        bool forward = step.kind == STEP_FORWARD;
        s->clock = start + times->step[step.kind];
        pipeline_add(list, &l->counts[at], step.kind, step.micro, step.chunk);
        if (forward) s->held++;
        else s->order[count + s->waiting++] = step;

        // Its output is the input of a chunk, or at the model's end of the backward.
        int chunk = pipeline_chunk(l, at, step.chunk), to = chunk + (forward ? 1 : -1);
        if (to < 0) continue;
        bool loss = to == 2 * l->p;
        if (loss) to = chunk;
        int peer = (int)chunk_stage((size_t)l->p, true, (size_t)to);
        stages[peer].ready[loss ? STEP_BACKWARD : step.kind][2 * step.micro + to / l->p] =
            s->clock + (peer == at ? 0 : times->transfer);
    }
}

// Makes the lists of a block's order.
static inline void v_of_block(PipelineLists *l, Schedule schedule, const PipelineTimes *times) {
    size_t pairs = 2 * (size_t)l->m, count = 2 * pairs;
    VStage *stages = (VStage *)host_alloc(l->p, sizeof *stages);
    VBlock block = v_block(schedule, l->p);
    for (int s = 0; s < l->p; s++) {
        VStage *x = &stages[s];
        x->order = (PipelineStep *)host_alloc(count + pairs, sizeof *x->order);
        x->ready[0] = (double *)host_alloc(2 * pairs, sizeof *x->ready[0]);
        x->ready[1] = x->ready[0] + pairs;
        for (size_t i = 0; i < 2 * pairs; i++) x->ready[0][i] = INFINITY;
        for (int i = 0; s == 0 && i < l->m; i++) x->ready[STEP_FORWARD][2 * i] = 0;
        v_order(block, l->p, s, l->m, x->order);
    }
    v_fill(l, stages, times, v_limit(schedule, l->p));
    for (int s = 0; s < l->p; s++) {
        free(stages[s].order);
        free(stages[s].ready[0]);
    }
    free(stages);
}

// ---- DualPipeV -------------------------------------------------------------------------

typedef struct {
    PipelineStep *list;
    size_t count;
    int done[2][2];          // forwards, backwards of each chunk
    PipelineStep *put_off;   // [2m] backwards whose weight steps wait
    size_t first, waiting;   // of these
} VWriter;

static inline void v_step(VWriter *w, StepKind kind, int chunk) {
    pipeline_add(w->list, &w->count, kind, w->done[kind][chunk]++, chunk);
    if (kind == STEP_BACKWARD) w->put_off[w->waiting++] = w->list[w->count - 1];
}

// Writes the weight step that has waited longest.
static inline void v_weight(VWriter *w) {
    PipelineStep step = w->put_off[w->first++];
    pipeline_add(w->list, &w->count, STEP_WEIGHT, step.micro, step.chunk);
}

// Writes a backward of both halves.
static inline void v_whole(VWriter *w, int chunk) {
    v_step(w, STEP_BACKWARD, chunk);
    v_weight(w);
}

// Writes the list of a stage. It begins with forwards and ends with split backwards. Its
// middle is pairs: a forward of one chunk and a whole backward of the other. DeepSeek's
// pairs overlap: the messages of the experts of one step travel while the other computes.
// Here the two steps of a pair follow each other. Needs m >= 2p.
static inline size_t v_dualpipe(int p, int stage, int m, PipelineStep *out) {
    VWriter w = {out, 0, {{0, 0}, {0, 0}}, NULL, 0, 0};
    w.put_off = (PipelineStep *)host_alloc(2 * (size_t)m, sizeof *w.put_off);
    int above = p - 1 - stage, halves = 2 * (stage + 1);
    for (int i = 0; i < 2 * above; i++) v_step(&w, STEP_FORWARD, 0);
    for (int i = 0; i < halves; i++) v_step(&w, STEP_FORWARD, i % 2);
    for (int i = 0; i < above; i++) {
        v_whole(&w, 1);
        v_step(&w, STEP_FORWARD, 1);
    }
    for (int i = 0; i < m - 2 * p + stage + 1; i++) {
        v_step(&w, STEP_FORWARD, 0);
        v_whole(&w, 1);
        v_step(&w, STEP_FORWARD, 1);
        v_whole(&w, 0);
    }
    for (int i = 0; i < above; i++) {
        v_whole(&w, 1);
        v_step(&w, STEP_FORWARD, 1);
        v_whole(&w, 0);
    }

    // The second half of these backwards puts its weight steps off, to the end.
    for (int i = 0; i < halves; i++) {
        if (i < stage + 1) v_whole(&w, 1 - i % 2);
        else v_step(&w, STEP_BACKWARD, 1 - i % 2);
    }
    for (int i = 0; i < above; i++) {
        v_weight(&w);
        v_step(&w, STEP_BACKWARD, 0);
    }
    while (w.first < w.waiting) v_weight(&w);
    free(w.put_off);
    return w.count;
}

// ---- for trainers and tools ------------------------------------------------------------

// Returns false, with an error that says what to change, if the schedule does not exist for
// these sizes.
static inline bool v_check(Schedule schedule, int p, int m, int v, Error *err) {
    const char *name = pipeline_schedule_name(schedule);
    if (schedule < SCHEDULE_ZB_V)
        return error_set(
            err,
            "--schedule %s has no V: use zb-v, v-half or dualpipe-v, or another trainer",
            name);
    if (p < 1 || m < 1 || v != 2)
        return error_set(err, "--schedule %s has 2 chunks a stage, not %d: use --virtual 2",
                         name, v);
    if ((long long)m * p > INT_MAX / 32)
        return error_set(err, "%d stages and %d micro-batches are too many", p, m);
    return schedule != SCHEDULE_DUALPIPE_V || m >= 2 * p ||
           error_set(err,
                     "--schedule dualpipe-v needs %d (2 for each stage) or more "
                     "micro-batches, not %d: change --global-batch or --micro-batch, or use "
                     "--schedule zb-v",
                     2 * p, m);
}

// Makes the lists of a V schedule for sizes that v_check accepts. times: of a chunk's steps.
// Release with pipeline_lists_free.
static inline PipelineLists v_make(Schedule schedule, int p, int m,
                                   const PipelineTimes *times) {
    PipelineLists l = pipeline_empty(p, m, 2);
    l.folded = true;
    if (schedule != SCHEDULE_DUALPIPE_V) v_of_block(&l, schedule, times);
    for (int s = 0; s < p && schedule == SCHEDULE_DUALPIPE_V; s++)
        l.counts[s] = v_dualpipe(p, s, m, l.steps[s]);
    return l;
}

// As zero_bubble_lists, for chunks in a V.
static inline bool v_lists(PipelineLists *l, Schedule schedule, const char *file, size_t p,
                           size_t m, size_t v, const PipelineTimes *times, Error *err) {
    memset(l, 0, sizeof *l);
    if (p > INT_MAX || m > INT_MAX || v > INT_MAX)
        return error_set(err, "%zu micro-batches are too many: raise --micro-batch", m);
    if (!v_check(file ? SCHEDULE_ZB_V : schedule, (int)p, (int)m, (int)v, err)) return false;
    if (!file) *l = v_make(schedule, (int)p, (int)m, times);
    else if (!pipeline_begin(l, schedule, file, p, m, v, err)) return false;
    l->folded = true;
    return pipeline_proved(l, file ? file : pipeline_schedule_name(schedule), err);
}

// Links are numbered 0 .. 4p - 1. Each chunk has p for activations and p for gradients, as
// pipeline_link_ends numbers them. Chunk 0's activations go up and chunk 1's down, gradients
// the other way. The turn of the V needs no link.
static inline int v_link_count(int p) {
    return 4 * p;
}

static inline bool v_link_ends(int p, int link, int *from, int *to) {
    bool up = link / p == 0 || link / p == 3;
    *from = link % p;
    *to = up ? *from + 1 : *from - 1;
    return *to >= 0 && *to < p;
}

#endif
