// pipeline_lists.h: lists of steps written by hand, and the proof that lists can be
// executed and train rightly.
//
// defines: pipeline_check, pipeline_read, PipelineTimes, PipelineRun, pipeline_walk,
//          pipeline_prove, pipeline_begin, pipeline_proved, pipeline_lists
#ifndef LLMC_PIPELINE_LISTS_H
#define LLMC_PIPELINE_LISTS_H

#include <ctype.h>
#include <math.h>

#include "llmc/host/error.h"
#include "llmc/host/file.h"
#include "llmc/pipeline.h"

// Returns false, with an error that says what to change, if the schedule does not exist for
// these sizes.
static inline bool pipeline_check(Schedule schedule, int p, int m, int v, Error *err) {
    const char *name = pipeline_schedule_name(schedule);
    if (p < 1 || m < 1 || v < 1)
        return error_set(
            err,
            "a pipeline has at least 1 stage, 1 micro-batch and 1 chunk, not %d, %d, %d", p,
            m, v);
    if ((long long)m * v > INT_MAX / 8 || (long long)m * v * p > INT_MAX / 8)
        return error_set(err, "%d stages, %d micro-batches and %d chunks are too many", p,
                         m, v);
    if (schedule >= SCHEDULE_ZB_V)
        return error_set(
            err, "--schedule %s has its chunks in a V: train with train_v, or use zb-auto",
            name);
    if (schedule != SCHEDULE_INTERLEAVED && v > 1)
        return error_set(
            err, "%d chunks a stage need --schedule interleaved: use it, or --virtual 1",
            v);
    if (schedule == SCHEDULE_INTERLEAVED && v == 1)
        return error_set(
            err,
            "--schedule interleaved needs 2 or more chunks a stage: use --virtual 2, or "
            "--schedule 1f1b");
    if (schedule >= SCHEDULE_INTERLEAVED && p == 1)
        return error_set(
            err,
            "--schedule %s needs 2 or more stages: use --pipeline 2, or --schedule 1f1b",
            name);
    return schedule != SCHEDULE_INTERLEAVED || m % p == 0 ||
           error_set(err,
                     "--schedule interleaved needs a multiple of %d (stages) "
                     "micro-batches, not %d: change "
                     "--global-batch or --micro-batch, or use --schedule 1f1b",
                     p, m);
}

// ---- reading ---------------------------------------------------------------------------

// Reads a word of `length` characters as a step: F3, B3 or W3, and with several chunks
// F3.1.
static inline bool pipeline_word(const char *word, size_t length, PipelineStep *step) {
    const char *kind = strchr("FBW", *word);
    char *at = (char *)word + 1;
    const unsigned long long most = 1000000;
    unsigned long long micro = isdigit((unsigned char)*at) ? strtoull(at, &at, 10) : most,
                       chunk = 0;
    if (*at == '.')
        chunk = isdigit((unsigned char)at[1]) ? strtoull(at + 1, &at, 10) : most;
    step->kind = !kind || *kind == 'F' ? STEP_FORWARD
                 : *kind == 'B'        ? STEP_BACKWARD
                                       : STEP_WEIGHT;
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
// F is a forward, B a backward, W a weight step. The number is the micro-batch, from 0.
// With several chunks a stage a dot and the chunk follow, from 0: F3.1. A semicolon ends a
// line as well; '#' starts a comment. In a line without W a backward makes both gradients.
// p, m and v follow from the text. name: its name in an error. Release the lists in either
// case.
static inline bool pipeline_parse(const char *name, const char *text, PipelineLists *l,
                                  Error *err) {
    memset(l, 0, sizeof *l);
    size_t line = 1, word = 0;
    for (const char *at = text; *at;) {
        size_t length = strcspn(at, " \t\r\n\v\f;#");
        if (length == 0) {
            if (*at == '\n' || *at == ';') {
                line++;
                word = 0;
            }
            at += *at == '#' ? strcspn(at, "\n") : 1;
            continue;
        }
        PipelineStep step;
        word++;
        if (!pipeline_word(at, length, &step))
            return error_set(err,
                             "%s, line %zu, word %zu: '%.*s' is no step: write F, B or W "
                             "and a micro-batch from "
                             "0 to 999999, as in F0, and with several chunks a dot and the "
                             "chunk, as in F0.1",
                             name, line, word, length < 20 ? (int)length : 20, at);
        if (word == 1) {  // the first word of a line: one more stage
            l->steps =
                (PipelineStep **)host_resize(l->steps, (size_t)l->p + 1, sizeof *l->steps);
            l->counts =
                (size_t *)host_resize(l->counts, (size_t)l->p + 1, sizeof *l->counts);
            l->steps[l->p] =
                (PipelineStep *)host_alloc(strcspn(at, "\n;") / 2 + 1, sizeof step);
            l->counts[l->p++] = 0;
        }
        l->steps[l->p - 1][l->counts[l->p - 1]++] = step;
        if (step.micro + 1 > l->m) l->m = step.micro + 1;
        if (step.chunk + 1 > l->v) l->v = step.chunk + 1;
        at += length;
    }
    return l->p > 0 ||
           error_set(err,
                     "%s has no steps: write one line for each stage, as in F0 F1 B0 B1",
                     name);
}

static inline bool pipeline_read(const char *path, PipelineLists *l, Error *err) {
    size_t bytes;
    memset(l, 0, sizeof *l);
    char *text = file_read(path, 64 << 20, &bytes, err);
    if (!text) return false;
    bool ok = strlen(text) == bytes
                  ? pipeline_parse(path, text, l, err)
                  : error_set(err, "%s is not a text: it holds a zero byte", path);
    free(text);
    return ok;
}

// ---- the walk that proves and times lists ----------------------------------------------

static inline const char *pipeline_step_name(StepKind kind) {
    return kind == STEP_FORWARD    ? "forward"
           : kind == STEP_BACKWARD ? "backward"
                                   : "weight step";
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
    double end, busy, longest;  // end of the last step; sum of all; the longest from first
                                // start to end of one stage
} PipelineRun;

typedef struct {
    int name;  // of the last message in it: micro * p * v + the global chunk that reads it
    double time;  // when that was computed, or arrived; once the buffer is free: since when
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
    size_t buffers;  // at each end of a link
    PipelineLink *links;
    double *begin, *clock;  // [p] a stage's first start; end of its last step
    size_t *next;           // [p]
    PipelineRun *run;
} PipelineWalk;

// Sends the messages of a link that are computed and have a free buffer at the other end.
static inline void pipeline_walk_send(const PipelineWalk *w, PipelineLink *l) {
    for (; l->sent < l->computed && l->sent < l->consumed + w->buffers; l->sent++) {
        PipelineBuffer *from = &l->from[l->sent % w->buffers],
                       *to = &l->to[l->sent % w->buffers];
        from->time = l->clock = fmax(fmax(from->time, to->time), l->clock) +
                                w->times->transfer;
        if (from->step) from->step->sent = l->clock;
        *to = *from;
    }
}

// Runs a stage's next step if its input is there and its output has a free buffer. Sets
// *ran to true if it did.
static inline bool pipeline_walk_step(PipelineWalk *w, int stage, bool *ran, Error *err) {
    int p = w->lists->p, v = w->lists->v, from, to;
    bool split = w->lists->counts[stage] > 2 * (size_t)w->lists->m * v;
    size_t at = w->next[stage];
    PipelineStep step = w->lists->steps[stage][at];
    PipelineTime *time = w->run->steps ? &w->run->steps[stage][at] : NULL;
    int side = step.kind == STEP_FORWARD ? 0 : p, up = step.kind == STEP_FORWARD ? 1 : -1;
    int chunk = pipeline_chunk(w->lists, stage, step.chunk);  // global
    if (w->lists->folded) side += 2 * p * step.chunk;         // each chunk has its own links
    pipeline_neighbours(w->lists, stage, step, &from, &to);
    PipelineLink *in = from == PIPELINE_NONE ? NULL : &w->links[side + from];
    PipelineLink *out = to == PIPELINE_NONE ? NULL : &w->links[side + stage];
    *ran = !(in && in->consumed == in->sent) &&
           !(out && out->computed == out->sent + w->buffers);
    if (!*ran) return true;
    PipelineBuffer *read = in ? &in->to[in->consumed % w->buffers] : NULL;
    PipelineBuffer *made = out ? &out->from[out->computed % w->buffers] : NULL;
    if (read && read->name != step.micro * p * v + chunk)
        return error_set(err,
                         "stage %d takes micro-batch %d, chunk %d in another order than "
                         "stage %d sends it",
                         stage, step.micro, step.chunk, from);
    double start =
        fmax(w->clock[stage], fmax(read ? read->time : 0, made ? made->time : 0));
    double duration = w->times->step[step.kind];
    if (step.kind == STEP_BACKWARD && !split) duration += w->times->step[STEP_WEIGHT];
    if (w->times->scale) duration *= w->times->scale[chunk];
    double end = w->clock[stage] = start + duration;
    if (w->next[stage]++ == 0) w->begin[stage] = start;
    w->run->busy += duration;
    if (time) {
        time->start = start;
        time->end = end;
    }
    if (read) {
        read->time = end;
        in->consumed++;
        pipeline_walk_send(w, in);
    }
    if (!made) return true;
    made->name = step.micro * p * v + chunk + up;
    made->time = end;
    made->step = time;
    out->computed++;
    pipeline_walk_send(w, out);
    return true;
}

// Executes the lists by the rules above with `buffers` at each link end. Returns false,
// with an error, if they end in a deadlock or if the two ends of a link differ in their
// order. After a deadlock run->steps has the times of the steps before it. Each list must
// be in order by itself (pipeline_prove_list).
static inline bool pipeline_walk(const PipelineLists *l, size_t buffers,
                                 const PipelineTimes *times, PipelineRun *run, Error *err) {
    size_t links = (size_t)pipeline_link_count(l->p) * (l->folded ? 2 : 1);
    size_t pairs = (size_t)l->m * l->v;
    size_t used = buffers < pairs ? buffers : pairs;  // a link has at most `pairs` messages
    PipelineWalk w = {l, times, used, NULL, NULL, NULL, NULL, run};
    w.links = (PipelineLink *)host_alloc(links, sizeof *w.links);
    w.begin = (double *)host_alloc(2 * (size_t)l->p, sizeof *w.begin);
    w.clock = w.begin + l->p;
    w.next = (size_t *)host_alloc(l->p, sizeof *w.next);
    PipelineBuffer *ends = (PipelineBuffer *)host_alloc(2 * links * used, sizeof *ends);
    for (size_t i = 0; i < links; i++) {
        w.links[i].from = ends + 2 * i * used;
        w.links[i].to = w.links[i].from + used;
    }
    run->end = run->busy = run->longest = 0;
    bool ok = true;
    for (bool moved = true; ok && moved;) {
        moved = false;
        for (int s = 0; ok && s < l->p; s++)
            for (bool ran = true; ok && ran && w.next[s] < l->counts[s];
                 moved = moved || ran)
                ok = pipeline_walk_step(&w, s, &ran, err);
    }
    for (int s = 0; ok && s < l->p; s++) {
        run->end = fmax(run->end, w.clock[s]);
        run->longest = fmax(run->longest, w.clock[s] - w.begin[s]);
        if (w.next[s] == l->counts[s]) continue;
        PipelineStep step = l->steps[s][w.next[s]];
        ok = error_set(err,
                       "deadlock with %zu buffers: stage %d never runs the %s of "
                       "micro-batch %d, chunk %d",
                       buffers, s, pipeline_step_name(step.kind), step.micro, step.chunk);
    }
    free(w.links);
    free(w.begin);
    free(w.next);
    free(ends);
    return ok;
}

// Checks the list of one stage by itself:
//   Every step belongs to one of m micro-batches and v chunks.
//   Every forward and backward (and weight step) is there exactly once.
//   An input comes before its use.
//   The backwards of each chunk are in the order of the micro-batches.
// Trainers rely on this order. The first backward writes the gradients, and the others add to
// them, with the same bits under any schedule. The last one starts their reduction.
static inline bool pipeline_prove_list(const PipelineLists *l, int stage, Error *err) {
    int m = l->m, v = l->v;
    const PipelineStep *steps = l->steps[stage];
    size_t pairs = (size_t)m * v, count = l->counts[stage];
    bool split = pipeline_last_use(steps, count) == STEP_WEIGHT;
    if (count != (split ? 3 : 2) * pairs)
        return error_set(
            err, "stage %d has %zu step%s, and %d micro-batches in %d chunks are %zu%s",
            stage, count, count == 1 ? "" : "s", m, v, (split ? 3 : 2) * pairs,
            split ? " with their weight steps" : "");
    // Steps of each micro-batch and chunk.
    unsigned char *done = (unsigned char *)host_alloc(pairs, 1);
    // [3][v] steps of a kind and chunk.
    int *ordered = (int *)host_alloc(3 * (size_t)v, sizeof *ordered);
    bool turns = l->folded && stage == l->p - 1;  // chunk 0 hands its output to chunk 1
    bool ok = true;
    for (size_t i = 0; ok && i < count; i++) {
        int micro = steps[i].micro, chunk = steps[i].chunk, kind = (int)steps[i].kind;
        if (kind < STEP_FORWARD || kind > STEP_WEIGHT || micro < 0 || micro >= m ||
            chunk < 0 || chunk >= v) {
            ok = error_set(err,
                           "stage %d has a step of kind %d, micro-batch %d, chunk %d: none "
                           "of %d kinds, %d "
                           "micro-batches and %d chunks",
                           stage, kind, micro, chunk, STEP_WEIGHT + 1, m, v);
            break;
        }
        const char *name = pipeline_step_name(steps[i].kind);
        int before = done[(size_t)micro * v + chunk]++, next = ordered[kind * v + chunk]++;
        int source = kind == STEP_FORWARD ? 0 : 1;
        bool fed = !turns || kind == STEP_WEIGHT || chunk == source ||
                   done[(size_t)micro * v + source] > kind;
        if (before > kind)
            ok = error_set(err, "stage %d runs the %s of micro-batch %d, chunk %d twice",
                           stage, name, micro, chunk);
        else if (before < kind)
            ok = error_set(
                err, "stage %d runs the %s of micro-batch %d, chunk %d before its %s",
                stage, name, micro, chunk, pipeline_step_name((StepKind)(kind - 1)));
        else if (!fed)
            ok = error_set(
                err,
                "stage %d runs the %s of micro-batch %d, chunk %d before that of chunk %d",
                stage, name, micro, chunk, source);
        else if (kind != STEP_FORWARD && micro != next)
            ok = error_set(err,
                           "stage %d runs the %s of micro-batch %d, chunk %d when that of "
                           "micro-batch %d is next: "
                           "the %ss of a chunk go 0, 1, 2, ..., because the first writes "
                           "the gradients, the others "
                           "add to them in this order, and the last has them reduced",
                           stage, name, micro, chunk, next, name);
    }
    free(done);
    free(ordered);
    return ok;
}

// Returns true if the lists can be executed with `buffers` at each link end and train as
// one rank would. Else returns false, with the reason as an error.
static inline bool pipeline_prove(const PipelineLists *l, size_t buffers, Error *err) {
    static const PipelineTimes nothing = {{0, 0, 0}, 0, NULL};
    PipelineRun run = {NULL, 0, 0, 0};
    for (int s = 0; s < l->p; s++) {
        if (!pipeline_prove_list(l, s, err)) return false;
    }
    return pipeline_walk(l, buffers, &nothing, &run, err);
}

// ---- a trainer's lists -----------------------------------------------------------------

// Checks the sizes for a schedule, or reads the lists of `file` if it is not NULL and
// refuses lists for other sizes.
static inline bool pipeline_begin(PipelineLists *l, Schedule schedule, const char *file,
                                  size_t p, size_t m, size_t v, Error *err) {
    memset(l, 0, sizeof *l);
    if (m > INT_MAX)
        return error_set(err, "%zu micro-batches are too many: raise --micro-batch", m);
    if (!file) return pipeline_check(schedule, (int)p, (int)m, (int)v, err);
    if (!pipeline_read(file, l, err)) return false;
    return (l->p == (int)p && l->m == (int)m && l->v == (int)v) ||
           error_set(
               err,
               "%s is for %d stages, %d micro-batches and %d chunks a stage, and here are "
               "%zu, %zu and %zu: "
               "change it, or --pipeline, --global-batch and --micro-batch, --virtual",
               file, l->p, l->m, l->v, p, m, v);
}

// Proves lists for a trainer. name: of the schedule or the file.
static inline bool pipeline_proved(const PipelineLists *l, const char *name, Error *err) {
    Error why;
    return pipeline_prove(l, PIPELINE_BUFFERS, &why) ||
           error_set(err, "%s: %s", name, why.text);
}

// Makes and proves the lists of a schedule without weight steps, or reads them from `file`
// if it is not NULL. Release with pipeline_lists_free in either case.
static inline bool pipeline_lists(PipelineLists *l, Schedule schedule, const char *file,
                                  size_t p, size_t m, size_t v, Error *err) {
    memset(l, 0, sizeof *l);
    if (!file && schedule >= SCHEDULE_ZB_H1)
        return error_set(err,
                         "--schedule %s splits backwards: train with %s, or "
                         "use --schedule 1f1b",
                         pipeline_schedule_name(schedule),
                         schedule < SCHEDULE_ZB_V ? "train_zero_bubble" : "train_v");
    if (!pipeline_begin(l, schedule, file, p, m, v, err)) return false;
    if (!file) *l = pipeline_make(schedule, (int)p, (int)m, (int)v);
    for (int s = 0; s < l->p; s++)
        if (pipeline_last_use(l->steps[s], l->counts[s]) == STEP_WEIGHT)
            return error_set(
                err, "%s has weight steps: train with train_zero_bubble, or leave them out",
                file);
    return pipeline_proved(l, file ? file : pipeline_schedule_name(schedule), err);
}

#endif
