// pipeline.h: pipeline schedules as lists of steps, and the rules by which a trainer executes any such list.
//
// defines: PIPELINE_BUFFERS, PipelineStep, pipeline_steps, pipeline_warmup, pipeline_check, pipeline_bubble,
//          PipelineLists, pipeline_make, pipeline_read, pipeline_link_count, pipeline_link_ends, pipeline_neighbours,
//          pipeline_walk, pipeline_prove, pipeline_lists, PipelinePlan, stage_layer_count, chunk_layers,
//          pipeline_slots, pipeline_plan
//
// p stages in a row, m micro-batches a training step, v model chunks a stage. The model is cut into p * v chunks; chunk
// c of stage s is global chunk c * p + s. With v > 1 the model goes round the stages v times, so stage 0 follows the
// last stage. A schedule gives the order in which ONE stage runs its forwards and backwards. Messages follow from it.
//
// Papers: GPipe (Huang et al. 2019); PipeDream-Flush's 1F1B and interleaved 1F1B as in PTD-P (Narayanan et al. 2021),
// section 2.2, figures 3 and 4.
//
// HOW A LIST IS EXECUTED, AND WHY IT CANNOT HANG
//
// A send completes only when its receive is posted, and the operations of one communicator pair up in order. With send,
// receive and compute on one stream 1F1B hangs at once: stage 0 sends the activations of micro-batch 1 while stage 1
// sends the gradients of micro-batch 0, and neither comes to its receive. So:
//
// 1. A link carries one kind of message in one direction between two neighbours: activations s -> s+1 or gradients
//    s -> s-1 (modulo p; the wrap-around links exist only with v > 1). Each link has its own two-rank communicator and,
//    at each end, its own stream. A stage has at most four link ends. At p = 2 previous and next are one rank, but
//    still four links.
// 2. A link end has PIPELINE_BUFFERS buffers; message k of a link uses buffer k % PIPELINE_BUFFERS. Send k meets
//    receive k, so both ends must use messages in one order (pipeline_prove checks it).
// 3. The host walks the list and only enqueues. For a step that reads message k of one link and makes message j of
//    another:
//      receiving stream:  wait until the reader of message k - PIPELINE_BUFFERS has copied it; ncclRecv
//      compute stream:    wait until message k has arrived, and message j - PIPELINE_BUFFERS is sent; compute
//      sending stream:    wait until computed; ncclSend
//    The host runs ahead of the GPU, so a receive is posted as soon as its buffer is free: transfers overlap compute.
//
// No stream ever chooses: each operation waits for a fixed set of others. Such a system (a marked graph) reaches the
// same end in any order and at any speed. Hence, if ONE order comes to the end, EVERY order does. pipeline_walk finds
// that order; dev/test/test_pipeline.c proves p <= 16, m <= 64, v <= 8. The walk frees a buffer at the end of its step;
// to free it earlier only removes waiting. Tensor ranks of a stage run one list, so step i of all of them is one
// operation. With one buffer at each end the schedules here cannot hang; two lose no time against unlimited ones. A
// list of your own runs with m * v buffers if it runs at all.
//
// llmc/trainer/ranks.cuh has the rules for links on real GPUs.
#ifndef LLMC_PIPELINE_H
#define LLMC_PIPELINE_H

#include <ctype.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/grid.h"
#include "llmc/host/choices.h"
#include "llmc/host/error.h"
#include "llmc/host/file.h"
#include "llmc/host/memory.h"

#define PIPELINE_BUFFERS 2  // at each end of a link
#define PIPELINE_NONE (-1)  // no neighbour: the input is tokens, or the output is the loss or nothing

// Also the index of a stage's link ends: a forward receives and sends activations, a backward gradients. With a split
// backward (zero_bubble.h) a backward makes only the gradient of its input, and a weight step the weights' gradients.
typedef enum { STEP_FORWARD, STEP_BACKWARD, STEP_WEIGHT } StepKind;

typedef struct {
    StepKind kind;
    int micro, chunk;  // micro-batch in [0, m), local chunk in [0, v)
} PipelineStep;

enum { SCHEDULE_COUNT = SCHEDULE_ZB_AUTO + 1 };

static inline const char *pipeline_schedule_name(Schedule schedule) {
    static const char *const names[SCHEDULE_COUNT] = {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-auto"};
    return names[schedule];
}

// ---- schedules ------------------------------------------------------------------------------------------------------

static inline void pipeline_add(PipelineStep *out, size_t *n, StepKind kind, int micro, int chunk) {
    out[*n].kind = kind;
    out[*n].micro = micro;
    out[(*n)++].chunk = chunk;
}

// Writes a stage's list and returns its length, 2 m v: `warmup` forwards, then forward and backward in turn, then the
// remaining backwards. The schedules here differ in nothing else. With v chunks, micro-batches go in groups of p: a
// group runs through chunk 0, then chunk 1, ...: p steps later stage 0 has back its own output, from the last stage. So
// p must divide m. Backwards go from the last chunk down. The backwards of a chunk go 0, 1, 2, ... in all schedules, so
// that gradients are summed in one order and have the same bits.
static inline size_t pipeline_steps(int p, int m, int v, int warmup, PipelineStep *out) {
    int total = m * v, group = p * v;
    if (warmup > total) warmup = total;
    size_t n = 0;
    for (int i = 0; i < total + warmup; i++) {
        int f = i, b = i - warmup;  // the f-th forward and the b-th backward, if they exist
        if (f < total) pipeline_add(out, &n, STEP_FORWARD, f / group * p + f % p, f % group / p);
        if (b >= 0) pipeline_add(out, &n, STEP_BACKWARD, b / group * p + b % p, v - 1 - b % group / p);
    }
    return n;
}

// Returns how many forwards a stage runs ahead.
//   GPipe (PTD-P figure 3): all. Every stage keeps m micro-batches of activations.
//   1F1B (figure 4, top): just enough for the first gradient to come back. The same bubble, but stage s keeps at most
//     p - s micro-batches.
//   Interleaved 1F1B (figure 4, bottom): through all chunks. A bubble v times smaller for v times as many messages.
static inline int pipeline_warmup(Schedule schedule, int p, int stage, int m, int v) {
    if (schedule == SCHEDULE_GPIPE) return m;
    if (schedule == SCHEDULE_1F1B) return p - stage - 1;
    return (p - stage - 1) * 2 + (v - 1) * p;
}

// False, with a sentence that says what to change, if the schedule does not exist for these sizes.
static inline bool pipeline_check(Schedule schedule, int p, int m, int v, Error *err) {
    const char *name = pipeline_schedule_name(schedule);
    if (p < 1 || m < 1 || v < 1)
        return error_set(err, "a pipeline has at least 1 stage, 1 micro-batch and 1 chunk, not %d, %d, %d", p, m, v);
    if ((long long)m * v > INT_MAX / 8 || (long long)m * v * p > INT_MAX / 8)
        return error_set(err, "%d stages, %d micro-batches and %d chunks are too many", p, m, v);
    if (schedule != SCHEDULE_INTERLEAVED && v > 1)
        return error_set(err, "%d chunks a stage need --schedule interleaved: use it, or --virtual 1", v);
    if (schedule == SCHEDULE_INTERLEAVED && v == 1)
        return error_set(err, "--schedule interleaved needs 2 or more chunks a stage: use --virtual 2, or "
                              "--schedule 1f1b");
    if (schedule >= SCHEDULE_INTERLEAVED && p == 1)
        return error_set(err, "--schedule %s needs 2 or more stages: use --pipeline 2, or --schedule 1f1b", name);
    return schedule != SCHEDULE_INTERLEAVED || m % p == 0 ||
           error_set(err, "--schedule interleaved needs a multiple of %d (stages) micro-batches, not %d: change "
                          "--global-batch or --micro-batch, or use --schedule 1f1b", p, m);
}

// Returns the bubble, idle time over work of a stage, if all chunks cost the same and messages nothing: (p-1)/m,
// interleaved (p-1)/(v m).
static inline double pipeline_bubble(int p, int m, int v) { return (double)(p - 1) / ((double)v * m); }

// Returns the kind of step after which the activations of a micro-batch and chunk are no longer needed.
static inline StepKind pipeline_last_use(const PipelineStep *steps, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (steps[i].kind == STEP_WEIGHT) return STEP_WEIGHT;
    }
    return STEP_BACKWARD;
}

// ---- the lists of all stages ----------------------------------------------------------------------------------------

typedef struct {
    int p, m, v;           // stages, micro-batches of a training step, chunks of a stage
    PipelineStep **steps;  // [p] lists
    size_t *counts;        // [p] their lengths
} PipelineLists;

// Returns empty lists with room for 3 steps of every micro-batch and chunk. Release with pipeline_lists_free.
static inline PipelineLists pipeline_empty(int p, int m, int v) {
    PipelineLists l = {p, m, v, NULL, NULL};
    l.steps = (PipelineStep **)host_alloc(p, sizeof *l.steps);
    l.counts = (size_t *)host_alloc(p, sizeof *l.counts);
    for (int s = 0; s < p; s++) l.steps[s] = (PipelineStep *)host_alloc(3 * (size_t)m * v, sizeof **l.steps);
    return l;
}

static inline void pipeline_lists_free(PipelineLists *l) {
    for (int s = 0; s < l->p; s++) free(l->steps[s]);
    free(l->steps);
    free(l->counts);
    memset(l, 0, sizeof *l);
}

// Makes the lists of gpipe, 1f1b or interleaved for sizes that pipeline_check accepts.
static inline PipelineLists pipeline_make(Schedule schedule, int p, int m, int v) {
    PipelineLists l = pipeline_empty(p, m, v);
    for (int s = 0; s < p; s++)
        l.counts[s] = pipeline_steps(p, m, v, pipeline_warmup(schedule, p, s, m, v), l.steps[s]);
    return l;
}

// Reads a word of `length` characters as a step: F3, B3 or W3, and with several chunks F3.1.
static inline bool pipeline_word(const char *word, size_t length, PipelineStep *step) {
    const char *kind = strchr("FBW", *word);
    char *at = (char *)word + 1;
    const unsigned long long most = 1000000;
    unsigned long long micro = isdigit((unsigned char)*at) ? strtoull(at, &at, 10) : most, chunk = 0;
    if (*at == '.') chunk = isdigit((unsigned char)at[1]) ? strtoull(at + 1, &at, 10) : most;
    step->kind = !kind || *kind == 'F' ? STEP_FORWARD : *kind == 'B' ? STEP_BACKWARD : STEP_WEIGHT;
    step->micro = (int)micro;
    step->chunk = (int)chunk;
    return kind && micro < most && chunk < most && at == word + length;
}

// Reads schedules written by hand, one line for each stage:
//
//   # two stages, two micro-batches
//   F0 F1 B0 B1
//   F0 B0 F1 B1
//
// F is a forward, B a backward, W a weight step; then the micro-batch, from 0; with several chunks a stage a dot and
// the chunk, from 0: F3.1. A semicolon ends a line as well; '#' starts a comment. In a line without W a backward makes
// both gradients. p, m and v follow from the text. name: its name in an error. Release the lists in either case.
static inline bool pipeline_parse(const char *name, const char *text, PipelineLists *l, Error *err) {
    memset(l, 0, sizeof *l);
    size_t line = 1, word = 0;
    for (const char *at = text; *at;) {
        size_t length = strcspn(at, " \t\r\n\v\f;#");
        if (length == 0) {
            if (*at == '\n' || *at == ';') line++, word = 0;
            at += *at == '#' ? strcspn(at, "\n") : 1;
            continue;
        }
        PipelineStep step;
        word++;
        if (!pipeline_word(at, length, &step))
            return error_set(err, "%s, line %zu, word %zu: '%.*s' is no step: write F, B or W and a micro-batch from "
                                  "0 to 999999, as in F0, and with several chunks a dot and the chunk, as in F0.1",
                             name, line, word, length < 20 ? (int)length : 20, at);
        if (word == 1) {  // the first word of a line: one more stage
            l->steps = (PipelineStep **)host_resize(l->steps, (size_t)l->p + 1, sizeof *l->steps);
            l->counts = (size_t *)host_resize(l->counts, (size_t)l->p + 1, sizeof *l->counts);
            l->steps[l->p] = (PipelineStep *)host_alloc(strcspn(at, "\n;") / 2 + 1, sizeof step);
            l->counts[l->p++] = 0;
        }
        l->steps[l->p - 1][l->counts[l->p - 1]++] = step;
        if (step.micro + 1 > l->m) l->m = step.micro + 1;
        if (step.chunk + 1 > l->v) l->v = step.chunk + 1;
        at += length;
    }
    return l->p > 0 || error_set(err, "%s has no steps: write one line for each stage, as in F0 F1 B0 B1", name);
}

static inline bool pipeline_read(const char *path, PipelineLists *l, Error *err) {
    size_t bytes;
    memset(l, 0, sizeof *l);
    char *text = file_read(path, 64 << 20, &bytes, err);
    if (!text) return false;
    bool ok = strlen(text) == bytes ? pipeline_parse(path, text, l, err)
                                    : error_set(err, "%s is not a text: it holds a zero byte", path);
    free(text);
    return ok;
}

// ---- links, and the walk that proves and times lists ----------------------------------------------------------------

// Links are numbered 0 .. 2p-1: link s carries stage s's activations to s + 1, link p + s its gradients to s - 1
// (modulo p). The wrap-around links (p - 1 to 0, and back) are used when v > 1.
static inline int pipeline_link_count(int p) { return 2 * p; }

static inline bool pipeline_link_ends(int p, int v, int link, int *from, int *to) {
    *from = link % p;
    *to = link < p ? (*from + 1) % p : (*from + p - 1) % p;
    bool wraps = link < p ? *from == p - 1 : *from == 0;
    return p > 1 && (v > 1 || !wraps);
}

// Sets the stages that send a step's input and get its output; PIPELINE_NONE at the model's ends. Forwards go up the
// global chunks, backwards down; a weight step has no message.
static inline void pipeline_neighbours(int p, int stage, int v, PipelineStep step, int *from, int *to) {
    bool first = stage == 0 && step.chunk == 0, last = stage == p - 1 && step.chunk == v - 1;
    int previous = first ? PIPELINE_NONE : stage > 0 ? stage - 1 : p - 1;
    int next = last ? PIPELINE_NONE : stage < p - 1 ? stage + 1 : 0;
    *from = step.kind == STEP_WEIGHT ? PIPELINE_NONE : step.kind == STEP_FORWARD ? previous : next;
    *to = step.kind == STEP_WEIGHT ? PIPELINE_NONE : step.kind == STEP_FORWARD ? next : previous;
}

static inline const char *pipeline_step_name(StepKind kind) {
    return kind == STEP_FORWARD ? "forward" : kind == STEP_BACKWARD ? "backward" : "weight step";
}

// Durations, in any one unit.
typedef struct {
    double step[3], transfer;  // T_F, T_B, T_W of a chunk; of a message
    const double *scale;       // [p * v] factor of a global chunk's steps; NULL: 1
} PipelineTimes;

// Start and end of a step, and when its message has arrived (0 without one).
typedef struct {
    double start, end, sent;
} PipelineTime;

typedef struct {
    PipelineTime **steps;       // [p][counts[p]], or NULL if not wanted
    double end, busy, longest;  // end of the last step; sum of all; the longest from first start to end of one stage
} PipelineRun;

typedef struct {
    int name;            // of the last message in it: micro * p * v + the global chunk that reads it
    double time;         // when that was computed, or arrived; once the buffer is free: since when
    PipelineTime *step;  // that computed it, or NULL
} PipelineBuffer;

typedef struct {
    PipelineBuffer *from, *to;        // of its two ends; message k uses buffer k % buffers
    size_t computed, sent, consumed;  // how many messages so far; sent also means received
    double clock;                     // when the last one has arrived
} PipelineLink;

typedef struct {
    const PipelineLists *lists;
    const PipelineTimes *times;
    size_t buffers;         // at each end of a link
    PipelineLink *links;
    double *begin, *clock;  // [p] a stage's first start; end of its last step
    size_t *next;           // [p]
    PipelineRun *run;
} PipelineWalk;

// Sends the messages of a link that are computed and have a free buffer at the other end.
static inline void pipeline_walk_send(const PipelineWalk *w, PipelineLink *l) {
    for (; l->sent < l->computed && l->sent < l->consumed + w->buffers; l->sent++) {
        PipelineBuffer *from = &l->from[l->sent % w->buffers], *to = &l->to[l->sent % w->buffers];
        from->time = l->clock = fmax(fmax(from->time, to->time), l->clock) + w->times->transfer;
        if (from->step) from->step->sent = l->clock;
        *to = *from;
    }
}

// Runs a stage's next step if its input is there and its output has a free buffer; *ran says whether it did.
static inline bool pipeline_walk_step(PipelineWalk *w, int stage, bool *ran, Error *err) {
    int p = w->lists->p, v = w->lists->v, from, to;
    bool split = w->lists->counts[stage] > 2 * (size_t)w->lists->m * v;
    size_t at = w->next[stage];
    PipelineStep step = w->lists->steps[stage][at];
    PipelineTime *time = w->run->steps ? &w->run->steps[stage][at] : NULL;
    int side = step.kind == STEP_FORWARD ? 0 : p, up = step.kind == STEP_FORWARD ? 1 : -1;
    int chunk = step.chunk * p + stage;  // global
    pipeline_neighbours(p, stage, v, step, &from, &to);
    PipelineLink *in = from == PIPELINE_NONE ? NULL : &w->links[side + from];
    PipelineLink *out = to == PIPELINE_NONE ? NULL : &w->links[side + stage];
    *ran = !(in && in->consumed == in->sent) && !(out && out->computed == out->sent + w->buffers);
    if (!*ran) return true;
    PipelineBuffer *read = in ? &in->to[in->consumed % w->buffers] : NULL;
    PipelineBuffer *made = out ? &out->from[out->computed % w->buffers] : NULL;
    if (read && read->name != step.micro * p * v + chunk)
        return error_set(err, "stage %d takes micro-batch %d, chunk %d in another order than stage %d sends it", stage,
                         step.micro, step.chunk, from);
    double start = fmax(w->clock[stage], fmax(read ? read->time : 0, made ? made->time : 0));
    double duration = w->times->step[step.kind];
    if (step.kind == STEP_BACKWARD && !split) duration += w->times->step[STEP_WEIGHT];
    if (w->times->scale) duration *= w->times->scale[chunk];
    double end = w->clock[stage] = start + duration;
    if (w->next[stage]++ == 0) w->begin[stage] = start;
    w->run->busy += duration;
    if (time) time->start = start, time->end = end;
    if (read) read->time = end, in->consumed++, pipeline_walk_send(w, in);
    if (!made) return true;
    made->name = step.micro * p * v + chunk + up, made->time = end, made->step = time;
    out->computed++;
    pipeline_walk_send(w, out);
    return true;
}

// Executes the lists by the rules above with `buffers` at each link end. False, with a sentence, if they end in a
// deadlock (then run->steps has the times of the steps before it) or the two ends of a link differ in their order. Each
// list must be in order by itself (pipeline_prove_list).
static inline bool pipeline_walk(const PipelineLists *l, size_t buffers, const PipelineTimes *times, PipelineRun *run,
                                 Error *err) {
    size_t links = (size_t)pipeline_link_count(l->p), pairs = (size_t)l->m * l->v;
    size_t used = buffers < pairs ? buffers : pairs;  // a link has at most `pairs` messages
    PipelineWalk w = {l, times, used, NULL, NULL, NULL, NULL, run};
    w.links = (PipelineLink *)host_alloc(links, sizeof *w.links);
    w.begin = (double *)host_alloc(2 * (size_t)l->p, sizeof *w.begin);
    w.clock = w.begin + l->p;
    w.next = (size_t *)host_alloc(l->p, sizeof *w.next);
    PipelineBuffer *ends = (PipelineBuffer *)host_alloc(2 * links * used, sizeof *ends);
    for (size_t i = 0; i < links; i++) w.links[i].from = ends + 2 * i * used, w.links[i].to = w.links[i].from + used;
    run->end = run->busy = run->longest = 0;
    bool ok = true;
    for (bool moved = true; ok && moved;) {
        moved = false;
        for (int s = 0; ok && s < l->p; s++)
            for (bool ran = true; ok && ran && w.next[s] < l->counts[s]; moved = moved || ran)
                ok = pipeline_walk_step(&w, s, &ran, err);
    }
    for (int s = 0; ok && s < l->p; s++) {
        run->end = fmax(run->end, w.clock[s]);
        run->longest = fmax(run->longest, w.clock[s] - w.begin[s]);
        if (w.next[s] == l->counts[s]) continue;
        PipelineStep step = l->steps[s][w.next[s]];
        ok = error_set(err, "deadlock with %zu buffers: stage %d never runs the %s of micro-batch %d, chunk %d",
                       buffers, s, pipeline_step_name(step.kind), step.micro, step.chunk);
    }
    free(w.links), free(w.begin), free(w.next), free(ends);
    return ok;
}

// Checks the list of one stage by itself: every step is of one of m micro-batches and v chunks, every forward and
// backward (and weight step) is there exactly once, inputs before their use, and the backwards of each chunk in the order of the micro-batches. Trainers
// rely on this order: the first writes the gradients, the others add to them with the same bits under any schedule, the
// last has them reduced.
static inline bool pipeline_prove_list(const PipelineLists *l, int stage, Error *err) {
    int m = l->m, v = l->v;
    const PipelineStep *steps = l->steps[stage];
    size_t pairs = (size_t)m * v, count = l->counts[stage];
    bool split = pipeline_last_use(steps, count) == STEP_WEIGHT;
    if (count != (split ? 3 : 2) * pairs)
        return error_set(err, "stage %d has %zu step%s, and %d micro-batches in %d chunks are %zu%s", stage, count,
                         count == 1 ? "" : "s", m, v, (split ? 3 : 2) * pairs, split ? " with their weight steps" : "");
    unsigned char *done = (unsigned char *)host_alloc(pairs, 1);  // steps of each micro-batch and chunk
    int *ordered = (int *)host_alloc(3 * (size_t)v, sizeof *ordered);  // [3][v] steps of a kind and chunk
    bool ok = true;
    for (size_t i = 0; ok && i < count; i++) {
        int micro = steps[i].micro, chunk = steps[i].chunk, kind = (int)steps[i].kind;
        if (kind < STEP_FORWARD || kind > STEP_WEIGHT || micro < 0 || micro >= m || chunk < 0 || chunk >= v) {
            ok = error_set(err, "stage %d has a step of kind %d, micro-batch %d, chunk %d: none of %d kinds, %d "
                           "micro-batches and %d chunks", stage, kind, micro, chunk, STEP_WEIGHT + 1, m, v);
            break;
        }
        const char *name = pipeline_step_name(steps[i].kind);
        int before = done[(size_t)micro * v + chunk]++, next = ordered[kind * v + chunk]++;
        if (before > kind)
            ok = error_set(err, "stage %d runs the %s of micro-batch %d, chunk %d twice", stage, name, micro, chunk);
        else if (before < kind)
            ok = error_set(err, "stage %d runs the %s of micro-batch %d, chunk %d before its %s", stage, name, micro,
                           chunk, pipeline_step_name((StepKind)(kind - 1)));
        else if (kind != STEP_FORWARD && micro != next)
            ok = error_set(err,
                           "stage %d runs the %s of micro-batch %d, chunk %d when that of micro-batch %d is next: "
                           "the %ss of a chunk go 0, 1, 2, ..., because the first writes the gradients, the others "
                           "add to them in this order, and the last has them reduced",
                           stage, name, micro, chunk, next, name);
    }
    free(done);
    free(ordered);
    return ok;
}

// True if the lists can be executed with `buffers` at each link end and train as one rank would; otherwise one
// sentence says why not.
static inline bool pipeline_prove(const PipelineLists *l, size_t buffers, Error *err) {
    static const PipelineTimes nothing = {{0, 0, 0}, 0, NULL};
    PipelineRun run = {NULL, 0, 0, 0};
    for (int s = 0; s < l->p; s++) {
        if (!pipeline_prove_list(l, s, err)) return false;
    }
    return pipeline_walk(l, buffers, &nothing, &run, err);
}

// ---- a trainer's plan -----------------------------------------------------------------------------------------------

// Checks the sizes for a schedule, or reads the lists of `file` if it is not NULL and refuses lists for other sizes.
static inline bool pipeline_begin(PipelineLists *l, Schedule schedule, const char *file, size_t p, size_t m, size_t v,
                                  Error *err) {
    memset(l, 0, sizeof *l);
    if (m > INT_MAX) return error_set(err, "%zu micro-batches are too many: raise --micro-batch", m);
    if (!file) return pipeline_check(schedule, (int)p, (int)m, (int)v, err);
    if (!pipeline_read(file, l, err)) return false;
    return (l->p == (int)p && l->m == (int)m && l->v == (int)v) ||
           error_set(err, "%s is for %d stages, %d micro-batches and %d chunks a stage, and here are %zu, %zu and %zu: "
                          "change it, or --pipeline, --global-batch and --micro-batch, --virtual",
                     file, l->p, l->m, l->v, p, m, v);
}

// Proves lists for a trainer. name: of the schedule or the file.
static inline bool pipeline_proved(const PipelineLists *l, const char *name, Error *err) {
    Error why;
    return pipeline_prove(l, PIPELINE_BUFFERS, &why) || error_set(err, "%s: %s", name, why.text);
}

// Makes and proves the lists of a schedule without weight steps, or reads them from `file` if it is not NULL. Release
// with pipeline_lists_free in either case.
static inline bool pipeline_lists(PipelineLists *l, Schedule schedule, const char *file, size_t p, size_t m, size_t v,
                                  Error *err) {
    memset(l, 0, sizeof *l);
    if (!file && schedule >= SCHEDULE_ZB_H1)
        return error_set(err, "--schedule %s splits backwards: train with train_zero_bubble, or use --schedule 1f1b",
                         pipeline_schedule_name(schedule));
    if (!pipeline_begin(l, schedule, file, p, m, v, err)) return false;
    if (!file) *l = pipeline_make(schedule, (int)p, (int)m, (int)v);
    for (int s = 0; s < l->p; s++)
        if (pipeline_last_use(l->steps[s], l->counts[s]) == STEP_WEIGHT)
            return error_set(err, "%s has weight steps: train with train_zero_bubble, or leave them out", file);
    return pipeline_proved(l, file ? file : pipeline_schedule_name(schedule), err);
}

// The plan of one stage: its layers, dealt to chunks, and its list of steps with their activation slots.
typedef struct {
    size_t chunks;          // v
    size_t *first, *count;  // [chunks] the layers of a chunk, in the numbering of this stage's parameter table
    size_t most_layers;     // the largest count
    size_t layer_count;     // of all chunks together
    size_t *layers;         // [layer_count] their numbers in the whole model
    PipelineStep *steps;    // [step_count] this stage's part of a training step
    size_t *slot;           // [step_count] slot of the activations of the step's micro-batch and chunk
    size_t step_count, slots;
} PipelinePlan;

// Deals L layers to chunks. The first L % chunks of them have one layer more.
static inline size_t stage_layer_count(size_t L, size_t chunks, size_t chunk) {
    return L / chunks + (chunk < L % chunks ? 1 : 0);
}

// Returns the layers of a chunk. Chunk c * p + s of the p * v is chunk c of stage s. Layers follow each other through
// the chunks. With a list a stage's layers are dealt to its chunks, without one (NULL) all layers to all chunks.
static inline size_t chunk_layers(size_t L, const char *list, size_t p, size_t v, size_t chunk) {
    return list ? stage_layer_count(stage_listed(list, chunk % p), v, chunk / p) : stage_layer_count(L, p * v, chunk);
}

// Deals L layers to the p * v chunks as chunk_layers does, and gives `stage` its own.
static inline void pipeline_plan_layers(PipelinePlan *plan, size_t L, const char *list, size_t p, size_t stage,
                                        size_t v) {
    plan->chunks = v;
    plan->first = (size_t *)host_alloc(v, sizeof(size_t));
    plan->count = (size_t *)host_alloc(v, sizeof(size_t));
    plan->layers = (size_t *)host_alloc(L, sizeof(size_t));
    for (size_t chunk = 0, first = 0, n; chunk < p * v; chunk++, first += n) {
        n = chunk_layers(L, list, p, v, chunk);
        if (chunk % p != stage) continue;
        plan->first[chunk / p] = plan->layer_count;
        plan->count[chunk / p] = n;
        if (n > plan->most_layers) plan->most_layers = n;
        for (size_t i = 0; i < n; i++) plan->layers[plan->layer_count++] = first + i;
    }
}

// Gives each step of a proved list the slot in which the activations of its micro-batch and chunk stay until their last
// use: the last one freed. slot: [counts[stage]], or NULL. Returns the number of slots, which is the largest number of
// pairs of micro-batch and chunk in flight. In 1F1B, slot = micro-batch % (p - stage).
static inline size_t pipeline_slots(const PipelineLists *l, int stage, size_t *slot) {
    const PipelineStep *steps = l->steps[stage];
    size_t count = l->counts[stage], slots = 0, top = 0, pairs = (size_t)l->m * l->v;
    StepKind last_use = pipeline_last_use(steps, count);
    size_t *slot_of = (size_t *)host_alloc(2 * pairs, sizeof *slot_of), *unused = slot_of + pairs;  // a stack
    for (size_t i = 0; i < count; i++) {
        size_t *mine = &slot_of[(size_t)steps[i].micro * l->v + steps[i].chunk];
        if (steps[i].kind == STEP_FORWARD) *mine = top > 0 ? unused[--top] : slots++;
        if (slot) slot[i] = *mine;
        if (steps[i].kind == last_use) unused[top++] = *mine;
    }
    free(slot_of);
    return slots;
}

// Returns the plan of `stage` for L layers and proved lists, which it releases. stages: --layers-per-stage, or NULL.
static inline PipelinePlan pipeline_plan(PipelineLists *l, size_t L, const char *stages, size_t stage) {
    PipelinePlan plan;
    memset(&plan, 0, sizeof plan);
    pipeline_plan_layers(&plan, L, stages, (size_t)l->p, stage, (size_t)l->v);
    size_t count = plan.step_count = l->counts[stage];
    plan.steps = (PipelineStep *)host_alloc(count, sizeof *plan.steps);
    plan.slot = (size_t *)host_alloc(count, sizeof *plan.slot);
    memcpy(plan.steps, l->steps[stage], count * sizeof *plan.steps);
    plan.slots = pipeline_slots(l, (int)stage, plan.slot);
    pipeline_lists_free(l);
    return plan;
}

#endif
