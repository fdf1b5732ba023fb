// test_pipeline.c: proves the schedules of llmc/pipeline.h, zero_bubble.h, v_schedules.h and text
// files, and the rules by which a trainer executes them. The proof is for all legal p <= 16, m <=
// 64, v <= 8 (fewer with a sanitizer, and fewer m with a split backward). Other tests show that
// wrong lists and wrong rules are noticed.
#include <stdio.h>
#include <time.h>

#include "dev/plot/pipeline_pairs.h"
#include "dev/plot/pipeline_run.h"
#include "dev/plot/pipeline_streams.h"
#include "dev/test/check.h"

#ifdef __SANITIZE_ADDRESS__
enum { MAX_P = 8, MAX_M = 32, MAX_V = 4 };
#else
enum { MAX_P = 16, MAX_M = 64, MAX_V = 8 };
#endif
enum { MOST_STAGES = 64 };

static Check c;

typedef PipelineLists Lists;

static const PipelineTimes EQUAL = {{1, 1, 1}, 0, NULL};

static Lists lists_make(Schedule schedule, int p, int m, int v) {
    return zero_bubble_make(schedule, p, m, v, &EQUAL, (size_t)m);
}

// Runs the lists on streams and releases them; complete, wrong and makespan stay in the Machine.
static Machine machine_try(const Lists *l, size_t buffers, const PipelineTimes *times,
                           uint64_t order) {
    Machine mc = {.p = l->p,
                  .m = l->m,
                  .v = l->v,
                  .buffers = buffers,
                  .stream_of = {0, 1, 2, 3, 4},
                  .order = order};
    memcpy(mc.cost, times->step, sizeof mc.cost);
    mc.transfer = times->transfer;
    machine_run(&mc, l);
    machine_free(&mc);
    return mc;
}

static double end_of_run(const Lists *l, size_t buffers, const PipelineTimes *times) {
    PipelineRun run;
    Error err;
    double end = list_run(&run, l, buffers, times, &err) ? run.end : INFINITY;
    list_run_free(&run, l);
    return end;
}

// ---- all sizes -------------------------------------------------------------------------

enum {
    PROVED,
    ONE_BUFFER,
    FLIGHT,
    MESSAGES,
    STREAMS,
    SAME,
    BUBBLE,
    WORSE,
    SLOWER,
    RANDOM,
    PROPERTIES
};

static const char *const PROPERTY[PROPERTIES] = {
    "each step once, inputs first, link orders equal, no deadlock",
    "one buffer cannot hang either",
    "micro-batches in flight: m, p - s, as PTD-P, p, or at most the limit",
    "2 m (p v - 1) messages",
    "streams with rendezvous messages come to the right end",
    "streams and the walk give every step the same times",
    ("the bubble is the formula's: (p-1)/(v m); zb-h1 from m = p on (p-1)(T_F+T_B-T_W) / (m "
     "(T_F+T_B+T_W)); with "
     "zb-auto, equal times, 2p in flight and m from 2p on no stage idles in its own span; none "
     "beats (p-1) T_F"),
    "the bubble is never larger than that of 1f1b",
    "two buffers lose no time against unlimited ones",
    "random orders of streams end alike",
};

typedef struct {
    size_t cases, bad[PROPERTIES];
    char first[1200];
} Sweep;

static void expect(Sweep *w, int property, bool good, const Lists *l, const char *what) {
    if (good) return;
    if (!w->first[0])
        snprintf(w->first, sizeof w->first, "p=%d m=%d v=%d: %s", l->p, l->m, l->v, what);
    w->bad[property]++;
}

// Returns true if the stage holds the expected number of micro-batches. limit: of
// zb-auto.
static bool flight_is_right(Schedule schedule, const Lists *l, int stage, int limit) {
    int p = l->p, most = 2 * (p - stage - 1) + (l->v - 1) * p + 1;
    if (schedule == SCHEDULE_GPIPE) most = l->m;
    if (schedule == SCHEDULE_1F1B) most = p - stage;
    if (schedule >= SCHEDULE_ZB_H1) most = limit;
    if (most > l->m * l->v) most = l->m * l->v;
    int held = (int)pipeline_slots(l, stage, NULL);
    return schedule == SCHEDULE_ZB_AUTO ? held <= most : held == most;
}

// Checks lists without times.
static void sweep_lists(Sweep *w, Schedule schedule, const Lists *l, int limit) {
    Error err = {{0}};
    size_t messages = 0, kinds = schedule >= SCHEDULE_ZB_H1 ? 3 : 2;
    expect(w, PROVED, pipeline_prove(l, PIPELINE_BUFFERS, &err), l, err.text);
    expect(w, ONE_BUFFER, pipeline_prove(l, 1, &err), l, err.text);
    for (int s = 0; s < l->p; s++) {
        expect(w, PROVED, l->counts[s] == kinds * l->m * l->v, l, "length");
        expect(w, FLIGHT, flight_is_right(schedule, l, s, limit), l, "in flight");
        for (size_t i = 0; i < l->counts[s]; i++) {
            int from, to;
            pipeline_neighbours(l, s, l->steps[s][i], &from, &to);
            messages += from != PIPELINE_NONE;
        }
    }
    expect(w, MESSAGES, messages == (size_t)2 * l->m * (l->p * l->v - 1), l, "messages");
    for (uint64_t seed = 1; seed <= 10 && l->p * l->m * l->v <= 128;
         seed++) {  // also with a single buffer
        const PipelineTimes times = {{1, 1, 1}, 0.25, NULL};
        Machine mc = machine_try(l, 1 + seed % 2, &times, seed);
        bool same = fabs(mc.makespan - end_of_run(l, 1 + seed % 2, &times)) < 1e-9;
        expect(w, RANDOM, mc.complete && !mc.wrong && same, l, "random order");
    }
}

// Checks one run: streams and walk must agree, and the bubble must be the formula's.
static void sweep_times(Sweep *w, Schedule schedule, const Lists *l, const double *cost,
                        int limit) {
    const PipelineTimes times = {{cost[0], cost[1], cost[2]}, 0, NULL};
    Machine mc = {.p = l->p,
                  .m = l->m,
                  .v = l->v,
                  .buffers = PIPELINE_BUFFERS,
                  .stream_of = {0, 1, 2, 3, 4}};
    memcpy(mc.cost, cost, sizeof mc.cost);
    w->cases++;
    machine_run(&mc, l);
    expect(w, STREAMS, mc.complete && !mc.wrong, l, mc.complete ? "wrong input" : "hung");
    PipelineRun run;
    Error err;
    bool same = list_run(&run, l, PIPELINE_BUFFERS, &times, &err);
    for (int s = 0; same && s < l->p; s++)
        for (size_t i = 0; i < l->counts[s]; i++) {
            const StreamOp *op = &machine_stream(&mc, s, STREAM_COMPUTE)->ops[i];
            same = same &&
                   fabs(op->start - run.steps[s][i].start) + fabs(op->end - run.steps[s][i].end) <
                       1e-9;
        }
    expect(w, SAME, same, l, "streams and walk differ");
    int p = l->p, m = l->m;
    double sum = cost[0] + cost[1] + cost[2], bubble = list_run_bubble(&run, p),
           formula = pipeline_bubble(p, m, l->v);
    expect(w, WORSE, bubble < pipeline_bubble(p, m, 1) + 1e-9, l, "worse than 1f1b");
    expect(w, SLOWER, run.end < end_of_run(l, (size_t)m * l->v, &times) + 1e-9, l,
           "two buffers are slower");
    if (schedule == SCHEDULE_ZB_H1) formula *= (cost[0] + cost[1] - cost[2]) / sum;
    if (schedule < SCHEDULE_ZB_H1 || (schedule == SCHEDULE_ZB_H1 && m >= p))
        expect(w, BUBBLE, fabs(bubble - formula) < 1e-9, l, "bubble");
    bool equal = cost[0] == cost[1] && cost[1] == cost[2];
    if (schedule == SCHEDULE_ZB_AUTO && equal && limit == 2 * p && m >= 2 * p)
        expect(w, BUBBLE, run.longest < m * sum + 1e-9, l, "a stage idles");
    if (l->v == 1)
        expect(w, BUBBLE, run.end > m * sum + (p - 1) * cost[0] - 1e-9, l,
               "earlier than possible");
    list_run_free(&run, l);
    machine_free(&mc);
}

// Compares two buffers with unlimited ones if messages take time. (Not so with a split backward.)
static void sweep_messages(Sweep *w, const Lists *l) {
    for (double transfer = 0.25; transfer <= 1 && (l->m <= 24 || l->m == MAX_M); transfer += 0.75) {
        const PipelineTimes times = {{1, 1, 1}, transfer, NULL};
        double two = end_of_run(l, PIPELINE_BUFFERS, &times),
               all = end_of_run(l, (size_t)l->m * l->v, &times);
        expect(w, SLOWER, two < all + 1e-9, l, "two buffers are slower");
    }
}

static void test_schedule(Schedule schedule) {
    static const double plain[][3] = {{1, 1, 1}, {1, 0.5, 0.5}},
                        split[][3] = {{1, 1, 1}, {1, 1.5, 1}, {1, 1, 0.5}};
    Sweep w = {0};
    Error err;
    size_t refused = 0, sizes = 0;
    bool halves = schedule >= SCHEDULE_ZB_H1;
    for (int p = 1; p <= MAX_P; p++)
        for (int m = 1; m <= MAX_M; m += halves && m >= 2 * p ? 5 : 1)
            for (int v = 1; v <= MAX_V; v++, sizes++) {
                if (!pipeline_check(schedule, p, m, v, &err)) {
                    refused++;
                    continue;
                }
                for (int limit = p; limit <= (schedule == SCHEDULE_ZB_AUTO ? 2 * p : p); limit += p)
                    for (int k = 0; k < (halves ? 3 : 2); k++) {
                        const double *cost = halves ? split[k] : plain[k];
                        const PipelineTimes times = {{cost[0], cost[1], cost[2]}, 0, NULL};
                        Lists l = zero_bubble_make(schedule, p, m, v, &times, (size_t)limit);
                        if (k == 0 || schedule == SCHEDULE_ZB_AUTO)
                            sweep_lists(&w, schedule, &l, limit);
                        if (k == 0 && !halves) sweep_messages(&w, &l);
                        sweep_times(&w, schedule, &l, cost, limit);
                        pipeline_lists_free(&l);
                    }
            }
    const char *name = pipeline_schedule_name(schedule);
    check(&c, w.cases > 100 && refused < sizes, "%s: %zu runs, %zu of %zu sizes are refused",
          name, w.cases, refused, sizes);
    for (int i = 0; i < PROPERTIES; i++)
        check(&c, w.bad[i] == 0, "%s: %s: %zu wrong", name, PROPERTY[i], w.bad[i]);
    if (w.first[0]) printf("     first: %s\n", w.first);
}

// ---- the papers' figures ---------------------------------------------------------------

// Prints a list as the papers do: micro-batches from 1, backwards in brackets, weight steps in
// square ones, chunks as letters.
static void list_text(const PipelineStep *steps, size_t count, char *out, size_t size) {
    static const char *const forms[] = {"%s%c%d", "%s(%c%d)", "%s[%c%d]"};
    size_t n = 0;
    out[0] = 0;
    for (size_t i = 0; i < count && n < size; i++)
        n += (size_t)snprintf(out + n, size - n, forms[steps[i].kind], i ? " " : "",
                              'a' + steps[i].chunk, steps[i].micro + 1);
}

static void test_figure(Schedule schedule, int p, int stage, int m, int v, const char *expected) {
    char text[2048];
    Lists l = lists_make(schedule, p, m, v);
    list_text(l.steps[stage], l.counts[stage], text, sizeof text);
    pipeline_lists_free(&l);
    if (!check(&c, strcmp(text, expected) == 0,
               "%s p=%d m=%d v=%d stage %d as in the paper's figure",
               pipeline_schedule_name(schedule), p, m, v, stage))
        printf("     got %s\n", text);
}

static void test_figures(void) {
    test_figure(SCHEDULE_GPIPE, 4, 2, 4, 1, "a1 a2 a3 a4 (a1) (a2) (a3) (a4)");
    test_figure(SCHEDULE_1F1B, 4, 0, 8, 1,
                "a1 a2 a3 a4 (a1) a5 (a2) a6 (a3) a7 (a4) a8 (a5) (a6) (a7) (a8)");
    test_figure(SCHEDULE_1F1B, 4, 3, 3, 1, "a1 (a1) a2 (a2) a3 (a3)");
    test_figure(SCHEDULE_1F1B, 4, 0, 2, 1, "a1 a2 (a1) (a2)");
    test_figure(SCHEDULE_INTERLEAVED, 4, 0, 8, 2,
                "a1 a2 a3 a4 b1 b2 b3 b4 a5 a6 a7 (b1) a8 (b2) b5 (b3) b6 (b4) b7 (a1) b8 (a2) "
                "(a3) (a4) (b5) (b6) (b7) (b8) (a5) (a6) (a7) (a8)");
    test_figure(SCHEDULE_INTERLEAVED, 4, 3, 8, 2,
                "a1 a2 a3 a4 b1 (b1) b2 (b2) b3 (b3) b4 (b4) a5 (a1) a6 (a2) a7 (a3) a8 (a4) "
                "b5 (b5) b6 (b6) b7 (b7) b8 (b8) (a5) (a6) (a7) (a8)");
    // Zero Bubble, figure 2: the last stage puts off three weight steps, the first none. A stage
    // may not run a forward further ahead: it would hold p + 1 micro-batches (test_h1_limit).
    test_figure(SCHEDULE_ZB_H1, 4, 0, 8, 1,
                "a1 a2 a3 a4 (a1) [a1] a5 (a2) [a2] a6 (a3) [a3] a7 (a4) [a4] a8 (a5) [a5] (a6) "
                "[a6] (a7) [a7] "
                "(a8) [a8]");
    test_figure(SCHEDULE_ZB_H1, 4, 3, 8, 1,
                "a1 (a1) a2 (a2) a3 (a3) a4 (a4) [a1] a5 (a5) [a2] a6 (a6) [a3] a7 (a7) [a4] a8 "
                "(a8) [a5] "
                "[a6] [a7] [a8]");
}

static void test_refused(void) {
    static const struct {
        Schedule schedule;
        int p, m, v;
        const char *part;
    } cases[] = {
        {SCHEDULE_GPIPE, 0, 1, 1, "at least 1 stage"},
        {SCHEDULE_1F1B, 1, 0, 1, "at least 1 stage"},
        {SCHEDULE_1F1B, 2, 4, -1, "at least 1 stage"},
        {SCHEDULE_GPIPE, 2, 4, 2, "--schedule interleaved"},
        {SCHEDULE_1F1B, 2, 4, 2, "--schedule interleaved"},
        {SCHEDULE_INTERLEAVED, 4, 8, 1, "--virtual 2"},
        {SCHEDULE_INTERLEAVED, 4, 10, 2, "a multiple of 4"},
        {SCHEDULE_INTERLEAVED, 4, 2, 2, "a multiple of 4"},
        {SCHEDULE_INTERLEAVED, 1, 8, 2, "--pipeline 2"},
        {SCHEDULE_ZB_H1, 1, 8, 1, "--pipeline 2"},
        {SCHEDULE_ZB_AUTO, 1, 8, 1, "--pipeline 2"},
        {SCHEDULE_ZB_H1, 2, 8, 2, "--schedule interleaved"},
        {SCHEDULE_ZB_AUTO, 2, 8, 2, "--schedule interleaved"},
        {SCHEDULE_ZB_V, 2, 8, 2, "train with train_v"},
        {SCHEDULE_1F1B, 2, INT_MAX, 1, "too many"},
        {SCHEDULE_INTERLEAVED, INT_MAX, INT_MAX, INT_MAX, "too many"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Error err = {{0}};
        bool ok = pipeline_check(cases[i].schedule, cases[i].p, cases[i].m, cases[i].v, &err);
        check(&c, !ok && strstr(err.text, cases[i].part), "refused: %s", err.text);
    }
}

static void test_links(void) {
    bool slots_ok = true, links_ok = true;
    for (int p = 1; p <= 8; p++) {
        Lists l = lists_make(SCHEDULE_1F1B, p, 20, 1);
        for (int stage = 0; stage < p; stage++) {
            size_t slot[64];
            slots_ok = slots_ok && pipeline_slots(&l, stage, slot) == (size_t)(p - stage);
            for (size_t i = 0; i < l.counts[stage]; i++)
                slots_ok = slots_ok && slot[i] == (size_t)(l.steps[stage][i].micro % (p - stage));
        }
        pipeline_lists_free(&l);
    }
    check(&c, slots_ok, "1f1b: activation slot = micro-batch %% (p - stage)");
    for (int p = 1; p <= 8; p++)
        for (int v = 1; v <= 2; v++) {
            const Lists l = {.p = p, .m = 1, .v = v};
            int used = 0, from, to;
            for (int link = 0; link < pipeline_link_count(p); link++) {
                if (!pipeline_link_ends(p, v, link, &from, &to)) continue;
                used++;
                for (int chunk = 0; chunk < v;
                     chunk++) {  // a step at the sending end names the other end
                    PipelineStep step = {link < p ? STEP_FORWARD : STEP_BACKWARD, 0, chunk};
                    int before, after;
                    pipeline_neighbours(&l, from, step, &before, &after);
                    links_ok = links_ok && (after == to || after == PIPELINE_NONE);
                }
            }
            links_ok = links_ok && used == (p == 1 ? 0 : v > 1 ? 2 * p : 2 * (p - 1));
        }
    check(&c, links_ok, "links: 2(p-1) of them, 2p in a ring, and the neighbours agree");
}

// ---- wrong lists, wrong rules ----------------------------------------------------------

// Checks that a wrong list is refused with an error that names the reason.
static void wrong_list(const Lists *l, const char *part, const char *name) {
    Error err = {{0}};
    bool ok = pipeline_prove(l, PIPELINE_BUFFERS, &err);
    check(&c, !ok && strstr(err.text, part), "wrong list, %s: %s", name, err.text);
}

static void swap(Lists *l, int stage, size_t a, size_t b) {
    PipelineStep t = l->steps[stage][a];
    l->steps[stage][a] = l->steps[stage][b];
    l->steps[stage][b] = t;
}

static void test_wrong_lists(void) {
    static const struct {
        const char *name, *text, *part;
    } cases[] = {
        {"a step is missing", "F0 F1 B0 B1; F0 B0 F1", "stage 1 has 3 steps"},
        {"a step twice", "F0 F0 B0 B1; F0 B0 F1 B1",
         "stage 0 runs the forward of micro-batch 0, chunk 0 twice"},
        {"backward first", "F0 F1 B0 B1; B0 F0 F1 B1", "before its forward"},
        {"ends of a link in different orders", "F0 F1 B0 B1; F1 F0 B0 B1", "in another order"},
        // Each waits for the other's second step.
        {"circular wait", "F0 B0 F1 B1; F0 F1 B0 B1", "deadlock"},
        {"last backward early", "F0 F1 F2 B0 B2 B1; F0 F1 F2 B0 B2 B1",
         "backward of micro-batch 2, chunk 0 when that of micro-batch 1 is next"},
        {"weight step first", "F0 F1 W0 B0 B1 W1; F0 B0 F1 B1",
         "stage 0 runs the weight step of micro-batch 0, chunk 0 before its backward"},
        {"weight steps exchanged", "F0 F1 B0 W1 B1 W0; F0 B0 F1 B1",
         "weight step of micro-batch 1, chunk 0 before its backward"},
        {"weight step twice", "F0 F1 B0 W0 B1 W0; F0 B0 F1 B1",
         "stage 0 runs the weight step of micro-batch 0, chunk 0 twice"},
        {"weight step missing", "F0 F1 B0 W0 B1; F0 B0 F1 B1",
         "stage 0 has 5 steps, and 2 micro-batches in 1 chunks are 6 with their weight steps"},
        {"weight steps out of order", "F0 F1 B0 B1 W1 W0; F0 B0 F1 B1",
         "stage 0 runs the weight step of micro-batch 1, chunk 0 when that of micro-batch 0 is "
         "next: the weight "
         "steps of a chunk go 0, 1, 2"},
    };
    Error err = {{0}};
    Lists l;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (!pipeline_parse(cases[i].name, cases[i].text, &l, &err))
            check(&c, false, "%s", err.text);
        wrong_list(&l, cases[i].part, cases[i].name);
        pipeline_lists_free(&l);
    }
    // Lists of both kinds together: stage 0 splits its backwards, stage 1 does not.
    pipeline_parse("mixed", "F0 F1 B0 W0 B1 W1; F0 B0 F1 B1", &l, &err);
    Machine mc = machine_try(&l, PIPELINE_BUFFERS, &EQUAL, 0);
    check(&c, pipeline_prove(&l, 1, &err) && mc.complete && !mc.wrong && mc.busy == 12,
          "a stage with a split backward beside one with whole backwards runs");
    pipeline_lists_free(&l);
}

// GPipe as in its paper, the newest micro-batch first: a stack. The streams run it to the right
// end with every message in its place, and yet it would train wrongly. Micro-batch 0's backward
// overwrites the gradients, and here it comes last. The buckets are reduced after the first.
// Tests every p, since one stage has no link that could tell.
static void test_reversed_backwards(void) {
    for (int p = 1; p <= 4; p++) {
        Lists l;
        l = lists_make(SCHEDULE_GPIPE, p, 8, 1);
        for (int s = 0; s < p; s++)
            for (size_t i = 0; i < 4; i++) swap(&l, s, 8 + i, 15 - i);
        Machine mc = machine_try(&l, PIPELINE_BUFFERS, &EQUAL, 0);
        check(&c, mc.complete && !mc.wrong,
              "gpipe with reversed backwards, p=%d: the streams see nothing wrong", p);
        wrong_list(&l,
                   "stage 0 runs the backward of micro-batch 7, chunk 0 when that of micro-batch "
                   "0 is next",
                   "gpipe with reversed backwards");
        pipeline_lists_free(&l);
    }
}

// Times the making and the proof of lists, which a trainer does before it starts, at the largest
// expected size. Sanitizers take some twenty times as long, and more beside other programs. So
// their build has a bound ten times as high.
static void test_proof_is_quick(void) {
#ifdef __SANITIZE_ADDRESS__
    const double bound = 5;
#else
    const double bound = 0.5;
#endif
    Error err;
    clock_t begin = clock();
    Lists l = lists_make(SCHEDULE_INTERLEAVED, MOST_STAGES, 512, 8);
    bool ok = pipeline_prove(&l, PIPELINE_BUFFERS, &err);
    double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    pipeline_lists_free(&l);
    check(&c, ok && seconds < bound,
          "lists and proof for p=64 m=512 v=8 take %.0f ms (bound %.0f)", 1e3 * seconds,
          1e3 * bound);
}

// Tries steps with a wrong micro-batch, chunk or kind at every place of a list. All are
// refused. The proof touches nothing outside of its own tables: the sanitized build sees it.
static void test_out_of_range(void) {
    enum { M = 4, V = 2, P = 2 };
    static const int micros[] = {-1, M, INT_MAX, INT_MIN}, chunks[] = {-1, V, INT_MAX, INT_MIN},
                     kinds[] = {-1, 3, 1 << 20};
    Error err;
    Lists l = lists_make(SCHEDULE_INTERLEAVED, P, M, V);
    size_t tried = 0, refused = 0;
    for (size_t at = 0; at < l.counts[1]; at++) {
        PipelineStep right = l.steps[1][at], wrong[11];
        for (int i = 0; i < 11; i++) wrong[i] = right;
        for (int i = 0; i < 4; i++) wrong[i].micro = micros[i], wrong[4 + i].chunk = chunks[i];
        for (int i = 0; i < 3; i++) wrong[8 + i].kind = (StepKind)kinds[i];
        for (int i = 0; i < 11; i++) {
            l.steps[1][at] = wrong[i];
            tried++;
            refused += !pipeline_prove(&l, PIPELINE_BUFFERS, &err) &&
                       strstr(err.text, "stage 1 has a step of kind ");
        }
        l.steps[1][at] = right;
    }
    check(&c,
          tried == 11 * l.counts[1] && refused == tried &&
              pipeline_prove(&l, PIPELINE_BUFFERS, &err),
          "%zu of %zu steps out of range are refused: %s", refused, tried, err.text);
    pipeline_lists_free(&l);
}

// Right lists, wrong execution. Each of these has hung or corrupted someone's training.
static void test_wrong_rules(void) {
    Lists l;
    Error err = {{0}};
    l = lists_make(SCHEDULE_1F1B, 2, 16, 1);
    // Stage 0 as GPipe, stage 1 as 1F1B: in order, but it needs more buffers.
    pipeline_steps(2, 16, 1, 16, l.steps[0]);
    check(&c,
          !pipeline_prove(&l, 2, &err) && strstr(err.text, "deadlock") &&
              pipeline_prove(&l, 16, &err),
          "a mix of schedules hangs with 2 buffers and runs with 16: both found");
    Machine mc = machine_try(&l, 2, &EQUAL, 0), enough = machine_try(&l, 16, &EQUAL, 0);
    check(&c, !mc.complete && enough.complete && !enough.wrong, "and so the streams do");
    pipeline_lists_free(&l);

    static const struct {
        int p, m, v, stream_of[STREAM_COUNT];
        const char *name;
    } layouts[] = {
        {2, 4, 1, {0, 0, 0, 0, 0}, "order of send and receive: everything on one stream, 1f1b"},
        {4, 8, 1, {0, 1, 1, 1, 1}, "order of send and receive: one communication stream, 1f1b"},
        {2, 4, 2, {0, 1, 1, 2, 2}, "p = 2 interleaved: one communicator for both directions"},
        {2, 4, 2, {0, 1, 1, 1, 1}, "p = 2 interleaved: one communication stream"},
    };
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        l = lists_make(layouts[i].v > 1 ? SCHEDULE_INTERLEAVED : SCHEDULE_1F1B, layouts[i].p,
                       layouts[i].m, layouts[i].v);
        Machine right = machine_try(&l, PIPELINE_BUFFERS, &EQUAL, 0), wrong = right;
        memcpy(wrong.stream_of, layouts[i].stream_of, sizeof wrong.stream_of);
        machine_run(&wrong, &l);
        machine_free(&wrong);
        check(&c, right.complete && !right.wrong && (!wrong.complete || wrong.wrong),
              "%s: %s; a stream per link end: runs", layouts[i].name,
              wrong.complete ? "wrong messages" : "hangs");
        pipeline_lists_free(&l);
    }

    static const char *waits[WAIT_COUNT] = {"input arrived", "output buffer sent",
                                            "input buffer free", "output computed"};
    l = lists_make(SCHEDULE_INTERLEAVED, 4, 8, 2);
    for (int w = 0; w < WAIT_COUNT; w++) {
        int noticed = 0;
        for (uint64_t seed = 1; seed <= 10; seed++) {
            Machine without = {.p = 4,
                               .m = 8,
                               .v = 2,
                               .buffers = PIPELINE_BUFFERS,
                               .cost = {1, 1, 1},
                               .stream_of = {0, 1, 2, 3, 4},
                               .order = seed};
            without.drop[w] = true;
            machine_run(&without, &l);
            machine_free(&without);
            noticed += !without.complete || without.wrong;
        }
        check(&c, noticed > 0,
              "without the wait for '%s' random orders compute wrong things: %d of 10", waits[w],
              noticed);
    }
    pipeline_lists_free(&l);
}

// Returns true if the backwards of each chunk of each stage go 0, 1, 2, ...
static bool backwards_ascend(const Lists *l) {
    for (int s = 0; s < l->p; s++)
        for (int chunk = 0; chunk < l->v; chunk++)
            for (size_t i = 0, last = 0; i < l->counts[s]; i++) {
                PipelineStep step = l->steps[s][i];
                if (step.kind != STEP_BACKWARD || step.chunk != chunk) continue;
                if ((size_t)step.micro != last++) return false;
            }
    return true;
}

// Damages right lists at random, on one stage or the same on all. The function
// pipeline_prove must accept exactly the lists whose streams come to the right end and whose
// gradients are summed in order.
static void test_mutants(void) {
    uint64_t random = 1;
    size_t accepted = 0, refused = 0, differ = 0, order_alone = 0;
    for (int trial = 0; trial < 6000; trial++) {
        int p = 2 + trial % 3, v = 1 + trial / 3 % 2, m = p * (1 + trial / 6 % 2);
        Lists l;
        l = lists_make(v > 1       ? SCHEDULE_INTERLEAVED
                       : trial % 5 ? SCHEDULE_1F1B
                                   : SCHEDULE_GPIPE,
                       p, m, v);
        for (int change = 0; change <= trial % 3; change++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            int stage = (int)((random >> 33) % (unsigned)p);
            size_t at = (size_t)(random >> 40) % (l.counts[stage] - 1);
            for (int s = 0; s < p; s++) {
                PipelineStep a = l.steps[s][at], b = l.steps[s][at + 1];
                bool pair = a.kind == STEP_FORWARD && b.kind == STEP_BACKWARD &&
                            a.micro == b.micro && a.chunk == b.chunk;
                if ((s == stage || trial % 7 == 0) && !pair) swap(&l, s, at, at + 1);
            }
        }
        size_t buffers = 1 + trial / 12 % 2;
        Error err;
        bool proved = pipeline_prove(&l, buffers, &err);
        Machine mc = machine_try(&l, buffers, &EQUAL, trial / 24 % 2 ? random : 0);
        bool runs = mc.complete && !mc.wrong, ascend = backwards_ascend(&l);
        if (proved != (runs && ascend)) differ++;
        if (runs && !ascend) order_alone++;
        if (proved) accepted++;
        else refused++;
        pipeline_lists_free(&l);
    }
    check(&c, differ == 0 && accepted > 100 && refused > 100 && order_alone > 20,
          "damaged lists: proof and streams agree: %zu run, %zu do not (%zu for the order of "
          "gradients alone), "
          "%zu differ",
          accepted, refused, order_alone, differ);
}

// ---- zero bubble -----------------------------------------------------------------------

// Schedule zb-h1 may not run more forwards ahead. Stage s holds p micro-batches. With one more
// forward before its first backward it would hold p + 1, more than any stage of 1f1b.
static void test_h1_limit(void) {
    bool limit = true;
    for (int p = 2; p <= MAX_P; p++) {
        Lists l = lists_make(SCHEDULE_ZB_H1, p, 4 * p, 1);
        for (int s = 0; s < p; s++) {
            PipelineStep *steps = l.steps[s];
            size_t first = 0, count = l.counts[s];
            while (steps[first].kind != STEP_BACKWARD) first++;
            limit = limit && first == (size_t)(p - s) && pipeline_slots(&l, s, NULL) == (size_t)p;
            // Every forward behind the first backward, one place of a forward earlier.
            for (size_t at = first, next = first + 1; next < count; next++) {
                if (steps[next].kind != STEP_FORWARD) continue;
                PipelineStep moved = steps[next];
                memmove(&steps[at + 1], &steps[at], (next - at) * sizeof *steps);
                steps[at] = moved;
                at = next + 1;
            }
            limit = limit && pipeline_slots(&l, s, NULL) == (size_t)(p + 1);
        }
        pipeline_lists_free(&l);
    }
    check(&c, limit,
          "zb-h1: one more forward ahead on a stage is p + 1 micro-batches there, more than "
          "1f1b's p");
}

// The search is a function of its arguments alone, keeps any limit, and with the memory of 1F1B
// is as good as zb-h1.
static void test_auto(void) {
    Error err;
    size_t over = 0, unproved = 0, worse = 0;
    bool same = true;
    const PipelineTimes times = {{1, 1.25, 0.75}, 0.1, NULL};
    for (int p = 2; p <= 8; p++)
        for (size_t limit = 1; limit <= 2 * (size_t)p; limit++) {
            Lists a = zero_bubble_make(SCHEDULE_ZB_AUTO, p, 3 * p, 1, &times, limit);
            Lists b = zero_bubble_make(SCHEDULE_ZB_AUTO, p, 3 * p, 1, &times, limit);
            Lists h1 = lists_make(SCHEDULE_ZB_H1, p, 3 * p, 1);
            unproved += !pipeline_prove(&a, PIPELINE_BUFFERS, &err);
            for (int s = 0; s < p; s++) {
                over += pipeline_slots(&a, s, NULL) > limit;
                same = same &&
                       memcmp(a.steps[s], b.steps[s], a.counts[s] * sizeof(PipelineStep)) == 0;
            }
            double mine = end_of_run(&a, PIPELINE_BUFFERS, &times),
                   its = end_of_run(&h1, PIPELINE_BUFFERS, &times);
            worse += limit >= (size_t)p && mine > its + 1e-9;
            pipeline_lists_free(&a), pipeline_lists_free(&b), pipeline_lists_free(&h1);
        }
    check(&c, same, "zb-auto: the same arguments give the same lists");
    check(&c, over == 0 && unproved == 0,
          "zb-auto: limits from 1 to 2p are kept, and the lists run: %zu, %zu do not", over,
          unproved);
    check(&c, worse == 0,
          "zb-auto: with the memory of zb-h1 or more and slow messages never later: %zu are",
          worse);
}

// Compares a hash of the lists of many searches, also with messages slower than steps. A change
// of the search gives other lists, and another number. All of them run with two buffers.
static void test_auto_is_the_same(void) {
    static const int stages[] = {2, 3, 8, 17}, micros[] = {1, 6, 16, 40};
    static const double costs[][3] = {
        {1, 1, 1}, {1, 1.28, 0.9}, {0.3, 0.7, 0.2}, {1, 2, 5}, {2, 1, 0}};
    static const double transfers[] = {0, 0.3, 1, 3};
    unsigned long long hash = 14695981039346656037u;
    size_t searches = 0, unproved = 0;
    Error err;
    for (int i = 0; i < 4 * 4 * 5 * 4 * 3; i++, searches++) {
        int p = stages[i % 4], m = micros[i / 4 % 4], limits[] = {p, 2 * p, 1 + p / 2};
        const double *cost = costs[i / 16 % 5];
        const PipelineTimes times = {{cost[0], cost[1], cost[2]}, transfers[i / 80 % 4], NULL};
        Lists l = zero_bubble_make(SCHEDULE_ZB_AUTO, p, m, 1, &times, (size_t)limits[i / 320]);
        unproved += !pipeline_prove(&l, PIPELINE_BUFFERS, &err);
        for (int s = 0; s < p; s++)
            for (size_t k = 0; k < l.counts[s]; k++)
                hash = (hash ^ (unsigned)(l.steps[s][k].kind * 65537 + l.steps[s][k].micro)) *
                       1099511628211u;
        pipeline_lists_free(&l);
    }
    check(&c, unproved == 0,
          "zb-auto: the lists of %zu searches run with two buffers: %zu do not", searches,
          unproved);
    check(&c, hash == 0x827d5ce51311aa41u, "zb-auto: and are the known ones (%llx)", hash);
}

// ---- chunks in a V ---------------------------------------------------------------------

static void test_v_refused(void) {
    static const struct {
        Schedule schedule;
        int p, m, v;
        const char *part;
    } cases[] = {
        {SCHEDULE_1F1B, 2, 4, 2, "--schedule 1f1b has no V"},
        {SCHEDULE_ZB_V, 2, 4, 3, "2 chunks a stage, not 3"},
        {SCHEDULE_V_HALF, 2, 4, 1, "2 chunks a stage, not 1"},
        {SCHEDULE_DUALPIPE_V, 2, 3, 2, "dualpipe-v needs 4 (2 for each stage) or more"},
        {SCHEDULE_DUALPIPE_V, 8, 15, 2, "or use --schedule zb-v"},
        {SCHEDULE_ZB_V, INT_MAX, INT_MAX, 2, "too many"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Error err = {{0}};
        bool ok = v_check(cases[i].schedule, cases[i].p, cases[i].m, cases[i].v, &err);
        check(&c, !ok && strstr(err.text, cases[i].part), "refused: %s", err.text);
    }
}

// Tries lists by hand. The turn sends no message, but its order counts. Each link of a V belongs
// to one chunk, so a stage may take chunk 1 before chunk 0.
static void test_v_lists(void) {
    static const struct {
        const char *name, *text, *part;  // part: of the refusal, or NULL
    } cases[] = {
        {"a V by hand", "F0.0 F0.1 B0.1 B0.0; F0.0 F0.1 B0.1 B0.0", NULL},
        {"of one stage", "F0.0 F0.1 B0.1 W0.1 B0.0 W0.0", NULL},
        {"two micro-batches", "F0.0 F1.0 F0.1 B0.1 F1.1 B0.0 B1.1 B1.0; "
                              "F0.0 F1.0 F0.1 F1.1 B0.1 B0.0 B1.1 B1.0", NULL},
        {"forward before the turn", "F0.0 F0.1 B0.1 B0.0; F0.1 F0.0 B0.1 B0.0",
         "stage 1 runs the forward of micro-batch 0, chunk 1 before that of chunk 0"},
        {"backward before the turn", "F0.0 F0.1 B0.1 B0.0; F0.0 F0.1 B0.0 B0.1",
         "stage 1 runs the backward of micro-batch 0, chunk 0 before that of chunk 1"},
        {"chunks of a ring", "F0.0 F0.1 B0.1 B0.0; F0.0 B0.1 F0.1 B0.0", "before its forward"},
        {"circular wait", "F0.0 F0.1 B0.1 B0.0 F1.0 F1.1 B1.1 B1.0; "
                          "F0.0 F1.0 F0.1 F1.1 B0.1 B0.0 B1.1 B1.0", "deadlock"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Lists l;
        Error err = {{0}};
        bool ok = pipeline_parse(cases[i].name, cases[i].text, &l, &err);
        l.folded = true;
        ok = ok && pipeline_prove(&l, PIPELINE_BUFFERS, &err);
        check(&c, cases[i].part ? !ok && strstr(err.text, cases[i].part) : ok, "V, %s: %s",
              cases[i].name, ok ? "runs" : err.text);
        pipeline_lists_free(&l);
    }
}

// Lists of p = 2, by hand. zb-v, stage 0: blocks begin every 6 steps, with a1 at 0, b1 at 7, (b1)
// at 8, (a1) at 15, and the stage holds 4 pairs.
static void test_v_figure(void) {
    static const struct {
        Schedule schedule;
        int stage;
        const char *expected;
    } figures[] = {
        {SCHEDULE_ZB_V, 0,
         "a1 a2 b1 (b1) a3 [b1] b2 (b2) (a1) [b2] a4 [a1] b3 (b3) (a2) [b3] b4 (b4) (a3) [a2] "
         "(a4) [b4] [a3] [a4]"},
        {SCHEDULE_DUALPIPE_V, 1,
         "a1 b1 a2 b2 a3 (b1) [b1] b3 (a1) [a1] a4 (b2) [b2] b4 (a2) [a2] (b3) [b3] (a3) [a3] "
         "(b4) (a4) [b4] [a4]"},
    };
    for (size_t i = 0; i < sizeof figures / sizeof *figures; i++) {
        char text[2048];
        Lists l = v_make(figures[i].schedule, 2, 4, &EQUAL);
        list_text(l.steps[figures[i].stage], l.counts[figures[i].stage], text, sizeof text);
        pipeline_lists_free(&l);
        if (!check(&c, strcmp(text, figures[i].expected) == 0, "%s p=2 m=4 stage %d as by hand",
                   pipeline_schedule_name(figures[i].schedule), figures[i].stage))
            printf("     got %s\n", text);
    }
}

// Returns the idle time of a V schedule at equal times of the steps of a chunk, in such steps.
static double v_idle(Schedule schedule, int p) {
    if (schedule != SCHEDULE_V_HALF || p == 1) return p - 1;
    return p % 2 ? 3 * p - 4 : 3 * p - 5;
}

static Machine v_machine(const Lists *l, size_t buffers, const PipelineTimes *times,
                         uint64_t order) {
    Machine mc = {.p = l->p,
                  .m = l->m,
                  .v = 2,
                  .buffers = buffers,
                  .stream_of = {0, 1, 2, 3, 4, 5, 6, 7, 8},
                  .order = order};
    memcpy(mc.cost, times->step, sizeof mc.cost);
    mc.transfer = times->transfer;
    machine_run(&mc, l);
    machine_free(&mc);
    return mc;
}

static void test_v(Schedule schedule) {
    enum { MOST_P = MAX_P < 8 ? MAX_P : 8 };
    static const double costs[][4] = {{1, 1, 1, 0}, {1, 1.28, 0.9, 0}, {1, 2, 0.5, 0.25}};
    Sweep w = {0};
    Error err = {{0}};
    const char *name = pipeline_schedule_name(schedule);
    for (int p = 1; p <= MOST_P; p++)
        for (int m = 1; m <= MAX_M; m++)
            for (int k = 0; k < 3; k++) {
                const PipelineTimes times = {{costs[k][0], costs[k][1], costs[k][2]}, costs[k][3],
                                             NULL};
                if (!v_check(schedule, p, m, 2, &err)) continue;
                Lists l = v_make(schedule, p, m, &times);
                w.cases++;
                expect(&w, PROVED, pipeline_prove(&l, PIPELINE_BUFFERS, &err), &l, err.text);
                expect(&w, ONE_BUFFER, pipeline_prove(&l, 1, &err), &l, err.text);
                size_t messages = 0;
                int most = schedule == SCHEDULE_V_HALF ? (p + 2) / 2 * 2 : 2 * p;
                if (schedule == SCHEDULE_DUALPIPE_V) most++;
                for (int s = 0; s < p; s++) {
                    int from, to, held = (int)pipeline_slots(&l, s, NULL);
                    bool exact = m < 2 * p || held == most;  // as the planner counts them
                    expect(&w, FLIGHT, held <= most && exact, &l, "in flight");
                    for (size_t i = 0; i < l.counts[s]; i++) {
                        pipeline_neighbours(&l, s, l.steps[s][i], &from, &to);
                        messages += from != PIPELINE_NONE;
                    }
                }
                expect(&w, MESSAGES, messages == (size_t)4 * m * (p - 1), &l, "messages");
                Machine mc = v_machine(&l, PIPELINE_BUFFERS, &times, 0);
                double end = end_of_run(&l, PIPELINE_BUFFERS, &times);
                expect(&w, STREAMS, mc.complete && !mc.wrong, &l, "streams");
                expect(&w, SAME, fabs(mc.makespan - end) < 1e-9, &l, "streams and walk differ");
                for (uint64_t seed = 1; seed <= 4 && p * m <= 48; seed++) {
                    mc = v_machine(&l, 1 + seed % 2, &times, seed);
                    bool same = fabs(mc.makespan - end_of_run(&l, 1 + seed % 2, &times)) < 1e-9;
                    expect(&w, RANDOM, mc.complete && !mc.wrong && same, &l, "random order");
                }
                double work = 2 * m * (costs[k][0] + costs[k][1] + costs[k][2]);
                double bound = work + (p - 1) * (costs[k][0] + costs[k][3]);
                expect(&w, BUBBLE, end > bound - 1e-9, &l, "earlier than possible");
                if (k == 0 && m >= 2 * p)
                    expect(&w, BUBBLE, fabs(end - work - v_idle(schedule, p)) < 1e-9, &l,
                           "bubble");
                if (k < 2 && m >= p)
                    expect(&w, WORSE, end - work < (p - 1) * work / m + 1e-9, &l,
                           "worse than 1f1b");
                pipeline_lists_free(&l);
            }
    static const char *const properties[PROPERTIES] = {
        PROPERTY[PROVED], PROPERTY[ONE_BUFFER], "at most p, (p + 2) / 2, p + 1/2 micro-batches",
        "4 m (p - 1) messages", PROPERTY[STREAMS], PROPERTY[SAME],
        "the bubble at equal times is (p-1) T_F, of v-half (3p-5) T_F (3p-4 for odd p)",
        PROPERTY[WORSE], PROPERTY[SLOWER], PROPERTY[RANDOM]};
    check(&c, w.cases > 100, "%s: %zu runs", name, w.cases);
    for (int i = 0; i < PROPERTIES; i++)
        if (i != SLOWER)
            check(&c, w.bad[i] == 0, "%s: %s: %zu wrong", name, properties[i], w.bad[i]);
    if (w.first[0]) printf("     first: %s\n", w.first);
}

// DeepSeek's formula for p stages of two chunks: (p - 1)(F&B + B - 3W), where B has both halves. A
// pair that takes as long as its steps one after the other shortens nothing.
static void test_pairs(void) {
    bool formula = true, shorter = true;
    for (int p = 2; p <= 8; p++) {
        Lists l = v_make(SCHEDULE_DUALPIPE_V, p, 3 * p, &EQUAL);
        PipelineRun whole, overlapped;
        pairs_walk(&l, &EQUAL, 3, &whole);
        pairs_walk(&l, &EQUAL, 2, &overlapped);
        formula = formula && fabs(whole.end - whole.busy / p - 2 * (p - 1)) < 1e-9 &&
                  whole.busy == 18.0 * p * p;
        shorter = shorter && overlapped.end < whole.end - p;
        pipeline_lists_free(&l);
    }
    check(&c, formula, "dualpipe-v by pairs: idle time is (p-1)(F&B + B - 3W)");
    check(&c, shorter, "dualpipe-v by pairs: pairs that overlap make a shorter step");
}

// ---- lists from text -------------------------------------------------------------------

static void test_text(void) {
    static const struct {
        const char *text, *part;
    } refused[] = {
        {"", "has no steps"},
        {"# nothing\n\n ; \n", "has no steps"},
        {"F0 B0\nF0 X0", "t, line 2, word 2: 'X0' is no step"},
        {"F0 F", "line 1, word 2: 'F' is no step"},
        {"F0 F999999999", "write F, B or W and a micro-batch from 0 to 999999"},
        {"# c\nF0 B-1", "line 2, word 2: 'B-1' is no step"},
        {"F0 B1x", "'B1x' is no step"},
        {"F0 b0", "'b0' is no step"},
        {"F0. B0", "'F0.' is no step"},
        {"F.0 B0", "'F.0' is no step"},
        {"F0.0.0", "'F0.0.0' is no step"},
        {"F12345678901234567890 B0", "line 1, word 1: 'F1234567890123456789' is no step"},
        {"F0,B0", "'F0,B0' is no step"},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        Lists l;
        Error err = {{0}};
        bool ok = pipeline_parse("t", refused[i].text, &l, &err);
        check(&c, !ok && strstr(err.text, refused[i].part), "text refused: %s", err.text);
        pipeline_lists_free(&l);
    }
    // A schedule that is written and read again is the same.
    size_t differ = 0;
    for (int schedule = 0; schedule < SCHEDULE_ZB_V; schedule++) {
        int v = schedule == SCHEDULE_INTERLEAVED ? 2 : 1;
        Error err;
        Lists back, l = lists_make((Schedule)schedule, 4, 8, v);
        char text[8192] = "# by name\r\n\n", *end = text + strlen(text);
        for (int s = 0; s < 4; s++) {
            for (size_t i = 0; i < l.counts[s]; i++) {
                PipelineStep step = l.steps[s][i];
                end += sprintf(end, v > 1 || i % 2 ? "%c%d.%d\t" : "%c%d ", "FBW"[step.kind],
                               step.micro, step.chunk);
            }
            end += sprintf(end, s % 2 ? "# stage\r\n" : ";\n");
        }
        bool ok = pipeline_parse("t", text, &back, &err) && back.p == 4 && back.m == 8 &&
                  back.v == v;
        for (int s = 0; ok && s < 4; s++)
            ok = l.counts[s] == back.counts[s] &&
                 memcmp(l.steps[s], back.steps[s], l.counts[s] * sizeof(PipelineStep)) == 0;
        differ += !ok;
        pipeline_lists_free(&l);
        pipeline_lists_free(&back);
    }
    check(&c, differ == 0, "text: all schedules come back as they were written: %zu do not",
          differ);
}

// The examples that the documentation shows are legal and as good as it says.
static void test_examples(void) {
    static const struct {
        const char *path;
        int p, m;
        double bubble;  // at equal costs of forward, input half and weight half
    } examples[] = {
        {"doc/schedules/1f1b.txt", 3, 4, 2.0 / 4},
        {"doc/schedules/zb-h1.txt", 3, 4, 2.0 / 12},
        {"doc/schedules/no-idle.txt", 2, 4, 1.0 / 12},
    };
    for (size_t i = 0; i < sizeof examples / sizeof *examples; i++) {
        Lists l;
        Error err = {{0}};
        bool ok = pipeline_read(examples[i].path, &l, &err) &&
                  pipeline_prove(&l, PIPELINE_BUFFERS, &err);
        double bubble = NAN;
        if (ok) {
            PipelineRun run;
            ok = list_run(&run, &l, PIPELINE_BUFFERS, &EQUAL, &err);
            bubble = list_run_bubble(&run, l.p);
            ok = ok && (!strstr(examples[i].path, "no-idle") || run.longest == 3.0 * l.m);
            list_run_free(&run, &l);
        }
        check(&c,
              ok && l.p == examples[i].p && l.m == examples[i].m &&
                  fabs(bubble - examples[i].bubble) < 1e-12,
              "%s runs, bubble %.4f %s", examples[i].path, bubble, err.text);
        pipeline_lists_free(&l);
    }
}

// "dropped layers": the plans of all stages hold each of L layers once, and consecutive chunks
// consecutive layers.
static bool plans_hold(size_t L, const char *list, size_t p, size_t v) {
    size_t next[64] = {0}, held = 0;  // [chunk] its first layer, then its end
    bool ok = true;
    for (size_t s = 0; s < p; s++) {
        PipelinePlan plan;
        memset(&plan, 0, sizeof plan);
        pipeline_plan_layers(&plan, L, list, p, s, v, false);
        for (size_t k = 0, n = 0; k < v; n += plan.count[k++]) {
            size_t chunk = k * p + s, first = plan.layers[n];
            ok = ok && plan.first[k] == n && plan.count[k] > 0 && plan.count[k] <= plan.most_layers;
            for (size_t i = 0; ok && i < plan.count[k]; i++) ok = plan.layers[n + i] == first + i;
            next[chunk] = first;
            held += plan.count[k];
        }
        free(plan.first), free(plan.count), free(plan.layers);
    }
    for (size_t chunk = 0, first = 0; ok && chunk < p * v; chunk++) {
        ok = next[chunk] == first;
        first += chunk_layers(L, list, p, v, chunk);
    }
    return ok && held == L;
}

static void test_plans(void) {
    bool ok = true;
    for (size_t L = 12; L <= 40; L++)
        for (size_t p = 1; p <= 4; p++)
            for (size_t v = 1; v <= 3; v++) ok = ok && plans_hold(L, NULL, p, v);
    check(&c, ok, "dropped layers: plans of equal stages hold each layer once");
    check(&c,
          plans_hold(13, "5,1,7", 3, 1) && plans_hold(13, "5,2,6", 3, 2) &&
              plans_hold(13, "3,3,7", 3, 3) && plans_hold(9, "9", 1, 1),
          "dropped layers: and plans of stages of unequal length");
}

int main(void) {
    test_plans();
    test_figures();
    test_refused();
    test_links();
    test_wrong_lists();
    test_reversed_backwards();
    test_proof_is_quick();
    test_out_of_range();
    test_wrong_rules();
    test_mutants();
    test_text();
    test_examples();
    test_h1_limit();
    test_auto();
    test_auto_is_the_same();
    for (int schedule = 0; schedule < SCHEDULE_ZB_V; schedule++) test_schedule((Schedule)schedule);
    test_v_refused();
    test_v_lists();
    test_v_figure();
    test_pairs();
    for (int schedule = SCHEDULE_ZB_V; schedule < SCHEDULE_COUNT; schedule++)
        test_v((Schedule)schedule);
    return check_summary(&c);
}
