// lists.c: checks the lists and the slots of a copy of llmc/pipeline.h, without a trainer, for
// puzzles 9 to 11. For puzzle 19 it checks a list that a person wrote. A run prints one line and
// takes part of a second. COPY is the learner's folder.
//
//   lists COPY 1f1b|interleaved|slots right     Every list can be executed, and no slot is shared.
//   lists COPY 1f1b|interleaved|slots budget    They take no more time and memory than they must.
//   lists COPY FILE right P M                   The list of COPY/FILE can be executed.
//   lists COPY FILE holds P M LIMIT             No stage holds more than LIMIT micro-batches.
//   lists COPY FILE ends P M TIME               A step takes at most TIME, with F = B = W = 1.
//
// The exit code is 0 if it holds. If it is 1, the line says why.
#include <stdio.h>

#include "llmc/zero_bubble.h"

enum { MAX_P = 8, MAX_M = 16, MAX_V = 4 };

// A list may be wrong in any way, so it gets room for this many times its right length.
enum { ROOM = 8 };

static const PipelineTimes EQUAL = {{1, 1, 1}, 0, NULL};

// A schedule and its sizes. With `group` it is no schedule: all forwards and then all backwards of
// `group` micro-batches alternate. So several slots are free at once.
typedef struct {
    Schedule schedule;
    int p, m, v, group;
} Case;

// Prints the sizes of a case and its error. Returns false.
static bool wrong(const Case *c, const char *text) {
    if (c->group) printf("all forwards, then all backwards of %d micro-batches", c->group);
    else printf("%s", pipeline_schedule_name(c->schedule));
    printf(", p = %d, m = %d", c->p, c->m);
    if (c->v > 1) printf(", v = %d", c->v);
    printf(": %s\n", text);
    return false;
}

// Makes the lists of a case. False, and prints why, if a list has not one forward and one backward
// for each micro-batch and chunk.
static bool make(const Case *c, PipelineLists *l) {
    char text[160];
    size_t pairs = (size_t)c->m * c->v, want = 2 * pairs;
    *l = pipeline_empty(c->p, c->m, c->v);
    PipelineStep *steps = (PipelineStep *)host_alloc(ROOM * (want + c->p), sizeof *steps);
    bool ok = true;
    for (int s = 0; ok && s < c->p; s++) {
        int warmup = pipeline_warmup(c->schedule, c->p, s, c->m, c->v);
        if (warmup < 0) {
            snprintf(text, sizeof text, "stage %d is to run %d forwards ahead", s, warmup);
            ok = wrong(c, text);
            break;
        }
        size_t count = pipeline_steps(c->p, c->m, c->v, warmup, steps);
        if (count != want) {
            snprintf(text, sizeof text, "the list of stage %d has %zu steps, not %zu", s, count,
                     want);
            ok = wrong(c, text);
            break;
        }
        memcpy(l->steps[s], steps, count * sizeof *steps);
        l->counts[s] = count;
    }
    free(steps);
    return ok;
}

static bool proved(const Case *c, const PipelineLists *l) {
    Error err;
    return pipeline_prove(l, PIPELINE_BUFFERS, &err) || wrong(c, err.text);
}

// Returns the most pairs of micro-batch and chunk that a stage holds at once.
static size_t most_in_flight(const PipelineLists *l, int stage) {
    size_t now = 0, most = 0;
    StepKind last_use = pipeline_last_use(l->steps[stage], l->counts[stage]);
    for (size_t i = 0; i < l->counts[stage]; i++) {
        StepKind kind = l->steps[stage][i].kind;
        if (kind == STEP_FORWARD && ++now > most) most = now;
        if (kind == last_use) now--;
    }
    return most;
}

// Returns the least that a stage can hold without losing time.
static size_t fewest_in_flight(const Case *c, int stage) {
    size_t pairs = (size_t)c->m * c->v, ahead = (size_t)(c->p - stage - 1);
    size_t held = c->schedule == SCHEDULE_1F1B ? ahead + 1 : 2 * ahead + (c->v - 1) * c->p + 1;
    return held < pairs ? held : pairs;
}

// Prints a stage that holds too much, or a step that takes too long.
static bool within_budget(const Case *c, const PipelineLists *l) {
    char text[160];
    Error err;
    PipelineRun run = {NULL, 0, 0, 0};
    if (!pipeline_walk(l, PIPELINE_BUFFERS, &EQUAL, &run, &err)) return wrong(c, err.text);

    // Forwards take 1 and backwards 2. No stage can start before the ones below it have run one
    // forward each, nor end before they have run one backward each.
    double least = 3.0 * (c->m * c->v + c->p - 1);
    if (run.end > least + 1e-9) {
        snprintf(text, sizeof text, "the step takes %g units of time, and %g is enough", run.end,
                 least);
        return wrong(c, text);
    }
    for (int s = 0; c->schedule != SCHEDULE_GPIPE && s < c->p; s++) {
        size_t most = most_in_flight(l, s), fewest = fewest_in_flight(c, s);
        if (most <= fewest) continue;
        snprintf(text, sizeof text, "stage %d holds %zu %s at once, and needs %zu", s, most,
                 c->v > 1 ? "chunks" : "micro-batches", fewest);
        return wrong(c, text);
    }
    return true;
}

static bool check_lists(const Case *c, bool budget) {
    PipelineLists l;
    bool ok = make(c, &l) && proved(c, &l) && (!budget || within_budget(c, &l));
    for (int s = 0; ok && c->schedule == SCHEDULE_GPIPE && s < c->p; s++) {
        if (most_in_flight(&l, s) != (size_t)c->m)
            ok = wrong(c, "not all forwards come before the first backward");
    }
    pipeline_lists_free(&l);
    return ok;
}

// Checks that a pair of micro-batch and chunk keeps its slot from its forward to its last use, and
// that no other pair has it meanwhile.
static bool check_slots_of(const Case *c, const PipelineLists *l, int stage, bool budget) {
    enum { FREE = -1 };
    char text[200];
    const PipelineStep *steps = l->steps[stage];
    size_t count = l->counts[stage], pairs = (size_t)c->m * c->v;
    StepKind last_use = pipeline_last_use(steps, count);
    size_t *slot = (size_t *)host_alloc(count, sizeof *slot);
    int *holder = (int *)host_alloc(pairs, sizeof *holder);  // the pair in a slot, or FREE
    for (size_t i = 0; i < pairs; i++) holder[i] = FREE;
    size_t slots = pipeline_slots(l, stage, slot);
    *text = '\0';
    if (slots != pipeline_slots(l, stage, NULL))
        snprintf(text, sizeof text, "stage %d: another number of slots if `slot` is NULL", stage);
    for (size_t i = 0; i < count && !*text; i++) {
        int pair = steps[i].micro * c->v + steps[i].chunk;
        const char *name = pipeline_step_name(steps[i].kind);
        if (slot[i] >= slots || slots > pairs) {
            snprintf(text, sizeof text,
                     "stage %d, %s of micro-batch %d, chunk %d: slot %zu of %zu (at most %zu are "
                     "needed)",
                     stage, name, steps[i].micro, steps[i].chunk, slot[i], slots, pairs);
            break;
        }
        int *held = &holder[slot[i]];
        if (steps[i].kind == STEP_FORWARD && *held != FREE)
            snprintf(text, sizeof text,
                     "stage %d: the forward of micro-batch %d, chunk %d takes slot %zu, which "
                     "micro-batch %d, chunk %d still needs",
                     stage, steps[i].micro, steps[i].chunk, slot[i], *held / c->v, *held % c->v);
        else if (steps[i].kind != STEP_FORWARD && *held != pair)
            snprintf(text, sizeof text,
                     "stage %d: the %s of micro-batch %d, chunk %d reads slot %zu, which does not "
                     "have its activations",
                     stage, name, steps[i].micro, steps[i].chunk, slot[i]);
        *held = steps[i].kind == last_use ? FREE : pair;
    }
    size_t most = most_in_flight(l, stage);
    if (budget && !*text && slots > most)
        snprintf(text, sizeof text, "stage %d has %zu slots, and holds at most %zu at once", stage,
                 slots, most);
    free(slot);
    free(holder);
    return !*text || wrong(c, text);
}

// Makes the list of one stage in groups. With a split backward the weight steps follow.
static PipelineLists make_groups(const Case *c, bool split) {
    PipelineLists l = pipeline_empty(1, c->m, 1);
    for (int first = 0; first < c->m; first += c->group) {
        int behind = first + c->group < c->m ? first + c->group : c->m;
        for (int kind = STEP_FORWARD; kind <= (split ? STEP_WEIGHT : STEP_BACKWARD); kind++)
            for (int i = first; i < behind; i++)
                pipeline_add(l.steps[0], &l.counts[0], (StepKind)kind, i, 0);
    }
    return l;
}

static bool check_slots(const Case *c, bool budget) {
    PipelineLists l =
        c->group ? make_groups(c, c->schedule >= SCHEDULE_ZB_H1)
                 : zero_bubble_make(c->schedule, c->p, c->m, c->v, &EQUAL, (size_t)(2 * c->p));
    bool ok = true;
    for (int s = 0; ok && s < c->p; s++) ok = check_slots_of(c, &l, s, budget);
    pipeline_lists_free(&l);
    return ok;
}

// Checks all sizes of the given schedules, small ones first. Returns how many, or 0 if one is
// wrong.
static int check_all(const Schedule *schedules, int count, bool slots, bool budget) {
    int checked = 0;
    for (int p = 1; p <= MAX_P; p++)
        for (int m = 1; m <= MAX_M; m++)
            for (int v = 1; v <= MAX_V; v++)
                for (int i = 0; i < count; i++) {
                    Case c = {schedules[i], p, m, v, 0};
                    Error err;
                    if (!pipeline_check(c.schedule, p, m, v, &err)) continue;
                    if (!(slots ? check_slots(&c, budget) : check_lists(&c, budget))) return 0;
                    checked++;
                }
    for (int m = 1; slots && m <= MAX_M; m++)
        for (int group = 1; group <= m; group++) {
            Case whole = {SCHEDULE_1F1B, 1, m, 1, group}, split = {SCHEDULE_ZB_H1, 1, m, 1, group};
            if (!check_slots(&whole, budget) || !check_slots(&split, budget)) return 0;
            checked += 2;
        }
    return checked;
}

// Checks a list that a person wrote.
static bool check_file(const char *path, const char *level, int p, int m, int limit) {
    PipelineLists l;
    PipelineRun run = {NULL, 0, 0, 0};
    Error err;
    bool ok = pipeline_begin(&l, SCHEDULE_1F1B, path, (size_t)p, (size_t)m, 1, &err) &&
              pipeline_prove(&l, PIPELINE_BUFFERS, &err) &&
              pipeline_walk(&l, PIPELINE_BUFFERS, &EQUAL, &run, &err);
    if (!ok) {
        printf("refused: %s\n", err.text);
        return false;
    }
    size_t most = 0;
    printf("proved; in flight");
    for (int s = 0; s < p; s++) {
        size_t held = most_in_flight(&l, s);
        printf(" %zu", held);
        if (held > most) most = held;
    }
    double work = run.busy / p;
    printf("; the step takes %g, of which %g is bubble: %.2f%%\n", run.end, run.end - work,
           100 * (run.end - work) / work);
    pipeline_lists_free(&l);
    if (strcmp(level, "holds") == 0 && most > (size_t)limit) {
        printf("a stage holds %zu micro-batches, and %d are allowed\n", most, limit);
        return false;
    }
    if (strcmp(level, "ends") == 0 && run.end > limit + 1e-9) {
        printf("the step takes %g, and %d is possible\n", run.end, limit);
        return false;
    }
    return true;
}

int main(int argc, char **argv) {
    static const Schedule ONE_CHUNK[] = {SCHEDULE_1F1B, SCHEDULE_GPIPE};
    static const Schedule CHUNKS[] = {SCHEDULE_INTERLEAVED, SCHEDULE_1F1B, SCHEDULE_GPIPE};
    static const Schedule ALL[] = {SCHEDULE_1F1B, SCHEDULE_GPIPE, SCHEDULE_INTERLEAVED,
                                   SCHEDULE_ZB_H1, SCHEDULE_ZB_AUTO};
    const char *what = argc > 3 ? argv[2] : "", *level = argc > 3 ? argv[3] : "";
    if (argc > 5) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", argv[1], what);
        return !check_file(path, level, atoi(argv[4]), atoi(argv[5]), argc > 6 ? atoi(argv[6]) : 0);
    }
    bool budget = strcmp(level, "budget") == 0, slots = strcmp(what, "slots") == 0;
    int checked = -1;
    if (budget || strcmp(level, "right") == 0) {
        if (strcmp(what, "1f1b") == 0) checked = check_all(ONE_CHUNK, 2, false, budget);
        if (strcmp(what, "interleaved") == 0) checked = check_all(CHUNKS, 3, false, budget);
        if (slots) checked = check_all(ALL, 5, true, budget);
    }
    if (checked < 0) {
        fprintf(stderr, "usage: lists COPY 1f1b|interleaved|slots|FILE LEVEL [P M [LIMIT]]\n");
        return 2;
    }
    if (checked == 0) return 1;
    printf("%d lists of up to %d stages, %d micro-batches and %d chunks are right%s\n", checked,
           MAX_P, MAX_M, MAX_V,
           !budget ? ""
           : slots ? ", with as few slots as can be"
                   : ", and none takes more time or memory than it must");
    return 0;
}
