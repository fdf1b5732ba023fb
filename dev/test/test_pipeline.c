// test_pipeline.c: proves the schedules of llmc/pipeline.h and pipeline_auto.h, those of text files, and the rules by
// which a trainer executes them, for all legal p <= 16, m <= 64, v <= 8 (sanitized, which is slow, and under zero
// bubble for fewer m), and shows that wrong lists and wrong rules are noticed.
#include <math.h>
#include <stdio.h>
#include <time.h>

#include "dev/test/check.h"
#include "dev/plot/pipeline_streams.h"
#include "llmc/pipeline_text.h"

#ifdef __SANITIZE_ADDRESS__
enum { MAX_P = 8, MAX_M = 32, MAX_V = 4 };
#else
enum { MAX_P = 16, MAX_M = 64, MAX_V = 8 };
#endif
enum { MOST_STAGES = 64 };

static Check c;

typedef PipelineLists Lists;

static const PipelineCosts EQUAL = {{1, 1, 1}, 0, INT_MAX};  // what zb-auto searches with unless a test says else

static void lists_make(Lists *l, Schedule schedule, int p, int m, int v) {
    *l = pipeline_lists_make(schedule, p, m, v, &EQUAL);
}

static void lists_free(Lists *l) { pipeline_lists_free(l); }

static bool lists_prove(const Lists *l, size_t buffers, Error *err) { return pipeline_lists_prove(l, buffers, err); }

// backward: both halves.
static Machine machine_make(const Lists *l, size_t buffers, double forward, double backward,
                            double transfer) {
    Machine mc = {.p = l->p, .m = l->m, .v = l->v, .buffers = buffers, .transfer = transfer};
    mc.cost[STEP_FORWARD] = forward;
    mc.cost[STEP_BACKWARD] = backward;
    for (int role = 0; role < STREAM_COUNT; role++) mc.stream_of[role] = role;
    return mc;
}

// Runs and releases; the summary stays in the Machine.
static void machine_try(Machine *mc, const Lists *l) {
    machine_run(mc, l->steps, l->counts);
    machine_free(mc);
}

// Counts of one sweep over all sizes; a problem's first sentence is kept.
typedef struct {
    size_t cases, bad_list, bad_count, bad_flight, bad_run, bad_bubble, bad_one, slower, random_bad,
        random_runs, bad_messages;
    size_t one_slower;
    char first[1200];
} Sweep;

static void sweep_note(Sweep *w, size_t *count, Schedule schedule, int p, int m, int v, const char *what) {
    if (!w->first[0])
        snprintf(w->first, sizeof w->first, "%s p=%d m=%d v=%d: %s", pipeline_schedule_name(schedule), p, m,
                 v, what);
    (*count)++;
}

static size_t expected_in_flight(Schedule schedule, int p, int stage, int m, int v) {
    int most = 2 * (p - stage - 1) + (v - 1) * p + 1;
    if (schedule == SCHEDULE_GPIPE) most = m;
    if (schedule == SCHEDULE_1F1B) most = p - stage;
    return (size_t)(most < m * v ? most : m * v);
}

static void sweep_case(Sweep *w, Schedule schedule, int p, int m, int v) {
    Error err;
    Lists l;
    lists_make(&l, schedule, p, m, v);
    w->cases++;
    for (int s = 0; s < p; s++) {
        if (l.counts[s] != (size_t)2 * m * v) sweep_note(w, &w->bad_count, schedule, p, m, v, "length");
        size_t most = pipeline_max_in_flight(l.steps[s], l.counts[s]);
        if (most != expected_in_flight(schedule, p, s, m, v))
            sweep_note(w, &w->bad_flight, schedule, p, m, v, "in flight");
    }
    size_t messages = 0;
    for (int s = 0; s < p; s++)
        for (size_t i = 0; i < l.counts[s]; i++) {
            PipelineRoute route;
            pipeline_neighbours(p, s, v, l.steps[s][i], &route);
            messages += route.from != PIPELINE_NONE;
        }
    if (messages != (size_t)2 * m * (p * v - 1))
        sweep_note(w, &w->bad_messages, schedule, p, m, v, "messages");
    if (!lists_prove(&l, PIPELINE_BUFFERS, &err)) sweep_note(w, &w->bad_list, schedule, p, m, v, err.text);
    if (!lists_prove(&l, 1, &err)) sweep_note(w, &w->bad_one, schedule, p, m, v, err.text);
    double formula = pipeline_bubble(p, m, v);
    for (int backward = 1; backward <= 2; backward++) {
        Machine mc = machine_make(&l, PIPELINE_BUFFERS, 1, backward, 0);
        machine_try(&mc, &l);
        if (!mc.complete || mc.wrong)
            sweep_note(w, &w->bad_run, schedule, p, m, v, mc.complete ? "wrong input" : "hung");
        if (fabs(machine_bubble(&mc) - formula) > 1e-12)
            sweep_note(w, &w->bad_bubble, schedule, p, m, v, "bubble");
    }
    // Two buffers against more than a step can fill, when transfers take time
    if (m <= 24 || m == MAX_M) {
        static const double transfers[] = {0.25, 1};
        for (int i = 0; i < 2; i++) {
            Machine one = machine_make(&l, 1, 1, 2, transfers[i]),
                    two = machine_make(&l, PIPELINE_BUFFERS, 1, 2, transfers[i]);
            Machine all = machine_make(&l, (size_t)m * v, 1, 2, transfers[i]);
            machine_try(&one, &l);
            machine_try(&two, &l);
            machine_try(&all, &l);
            if (two.makespan > all.makespan + 1e-9)
                sweep_note(w, &w->slower, schedule, p, m, v, "two buffers are slower");
            if (one.makespan > all.makespan + 1e-9) w->one_slower++;
        }
    }
    if ((size_t)p * m * v <= 128)  // small ones in ten random orders, also with a single buffer
        for (uint64_t seed = 1; seed <= 10; seed++) {
            Machine mc = machine_make(&l, 1 + seed % 2, 1, 2, 0.25), in_turn = mc;
            mc.order = seed;
            machine_try(&mc, &l);
            machine_try(&in_turn, &l);
            w->random_runs++;
            if (!mc.complete || mc.wrong || mc.makespan != in_turn.makespan)
                sweep_note(w, &w->random_bad, schedule, p, m, v, "random order");
        }
    lists_free(&l);
}

static void test_schedules(Schedule schedule) {
    Sweep w = {0};
    size_t refused = 0;
    Error err;
    for (int p = 1; p <= MAX_P; p++)
        for (int m = 1; m <= MAX_M; m++)
            for (int v = 1; v <= MAX_V; v++) {
                if (pipeline_check(schedule, p, m, v, &err)) sweep_case(&w, schedule, p, m, v);
                else refused++;
            }
    const char *name = pipeline_schedule_name(schedule);
    check(&c, w.cases > 0 && w.cases + refused == MAX_P * MAX_M * MAX_V, "%s: %zu sizes are legal", name,
          w.cases);
    check(&c, w.bad_list + w.bad_count == 0,
          "%s: each step once, inputs first, link orders equal, no deadlock: %zu wrong", name,
          w.bad_list + w.bad_count);
    check(&c, w.bad_flight == 0, "%s: activations in flight as the paper says: %zu wrong", name,
          w.bad_flight);
    check(&c, w.bad_messages == 0, "%s: 2 m (p v - 1) messages: %zu wrong", name, w.bad_messages);
    check(&c, w.bad_run == 0, "%s: streams with rendezvous messages and %d buffers: %zu wrong", name,
          PIPELINE_BUFFERS, w.bad_run);
    check(&c, w.bad_bubble == 0, "%s: bubble (p-1)/(v m) at costs 1:1 and 1:2: %zu differ", name,
          w.bad_bubble);
    check(&c, w.bad_one == 0, "%s: one buffer cannot hang either: %zu do", name, w.bad_one);
    check(&c, w.slower == 0,
          "%s: two buffers lose no time against unlimited ones: %zu do (one buffer: %zu do)", name, w.slower,
          w.one_slower);
    check(&c, w.random_bad == 0, "%s: %zu runs in random stream orders end alike: %zu do not", name,
          w.random_runs, w.random_bad);
    if (w.first[0]) printf("     first: %s\n", w.first);
}

// A list as the papers print it: micro-batches from 1, backwards in brackets, weight steps in square ones, chunks as
// letters.
static void list_text(const PipelineStep *steps, size_t count, char *out, size_t size) {
    static const char *const forms[] = {"%s%c%d", "%s(%c%d)", "%s[%c%d]"};
    size_t n = 0;
    out[0] = 0;
    for (size_t i = 0; i < count && n < size; i++)
        n += (size_t)snprintf(out + n, size - n, forms[steps[i].kind], i ? " " : "", 'a' + steps[i].chunk,
                              steps[i].micro + 1);
}

static void test_figure(Schedule schedule, int p, int stage, int m, int v, const char *expected) {
    PipelineStep steps[256];
    char text[2048];
    list_text(steps, pipeline_schedule(schedule, p, stage, m, v, steps), text, sizeof text);
    if (!check(&c, strcmp(text, expected) == 0, "%s p=%d m=%d v=%d stage %d as in the paper's figure",
               pipeline_schedule_name(schedule), p, m, v, stage))
        printf("     got %s\n", text);
}

static void test_figures(void) {
    test_figure(SCHEDULE_GPIPE, 4, 2, 4, 1, "a1 a2 a3 a4 (a1) (a2) (a3) (a4)");
    test_figure(SCHEDULE_1F1B, 4, 0, 8, 1, "a1 a2 a3 a4 (a1) a5 (a2) a6 (a3) a7 (a4) a8 (a5) (a6) (a7) (a8)");
    test_figure(SCHEDULE_1F1B, 4, 3, 3, 1, "a1 (a1) a2 (a2) a3 (a3)");
    test_figure(SCHEDULE_1F1B, 4, 0, 2, 1, "a1 a2 (a1) (a2)");
    test_figure(SCHEDULE_INTERLEAVED, 4, 0, 8, 2,
                "a1 a2 a3 a4 b1 b2 b3 b4 a5 a6 a7 (b1) a8 (b2) b5 (b3) b6 (b4) b7 (a1) b8 (a2) "
                "(a3) (a4) (b5) (b6) (b7) (b8) (a5) (a6) (a7) (a8)");
    test_figure(SCHEDULE_INTERLEAVED, 4, 3, 8, 2,
                "a1 a2 a3 a4 b1 (b1) b2 (b2) b3 (b3) b4 (b4) a5 (a1) a6 (a2) a7 (a3) a8 (a4) "
                "b5 (b5) b6 (b6) b7 (b7) b8 (b8) (a5) (a6) (a7) (a8)");
    // Zero Bubble, figure 2: the last stage puts off three weight steps, the first none.
    test_figure(SCHEDULE_ZB_H1, 4, 0, 8, 1,
                "a1 a2 a3 a4 (a1) [a1] a5 (a2) [a2] a6 (a3) [a3] a7 (a4) [a4] a8 (a5) [a5] (a6) [a6] (a7) [a7] "
                "(a8) [a8]");
    test_figure(SCHEDULE_ZB_H1, 4, 3, 8, 1,
                "a1 (a1) a2 (a2) a3 (a3) a4 (a4) [a1] a5 (a5) [a2] a6 (a6) [a3] a7 (a7) [a4] a8 (a8) [a5] "
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
        {SCHEDULE_1F1B, 2, INT_MAX, 1, "too many"},
        {SCHEDULE_INTERLEAVED, INT_MAX, INT_MAX, INT_MAX, "too many"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Error err = {{0}};
        bool ok = pipeline_check(cases[i].schedule, cases[i].p, cases[i].m, cases[i].v, &err);
        check(&c, !ok && strstr(err.text, cases[i].part), "refused: %s", err.text);
    }
}

static void test_routes(void) {
    bool slots_ok = true, links_ok = true;
    for (int p = 1; p <= 8; p++)
        for (int stage = 0; stage < p; stage++) {
            PipelineStep steps[64];
            PipelineRoute routes[64];
            size_t n = pipeline_1f1b(p, stage, 20, steps);
            slots_ok = slots_ok && pipeline_routes(p, stage, 20, 1, steps, n, routes) == (size_t)(p - stage);
            for (size_t i = 0; i < n; i++)
                slots_ok = slots_ok && routes[i].slot == (size_t)(steps[i].micro % (p - stage));
        }
    check(&c, slots_ok, "1f1b: activation slot = micro-batch %% (p - stage)");
    for (int p = 1; p <= 8; p++)
        for (int v = 1; v <= 2; v++) {
            int used = 0, from, to;
            for (int link = 0; link < pipeline_link_count(p); link++)
                if (pipeline_link_ends(p, v, link, &from, &to)) {
                    used++;
                    // A step at the sending end that uses this link names its other end
                    for (int chunk = 0; chunk < v; chunk++) {
                        PipelineStep step = {link < p ? STEP_FORWARD : STEP_BACKWARD, 0, chunk};
                        PipelineRoute route;
                        pipeline_neighbours(p, from, v, step, &route);
                        links_ok = links_ok && (route.to == to || route.to == PIPELINE_NONE);
                    }
                }
            links_ok = links_ok && used == (p == 1 ? 0 : v > 1 ? 2 * p : 2 * (p - 1));
        }
    check(&c, links_ok, "links: 2(p-1) of them, 2p in a ring, and the routes agree");
}

// Wrong lists: each must be refused with a sentence that names the reason.
static void wrong_list(const Lists *l, const char *part, const char *name) {
    Error err = {{0}};
    bool ok = lists_prove(l, PIPELINE_BUFFERS, &err);
    check(&c, !ok && strstr(err.text, part), "wrong list, %s: %s", name, err.text);
}

static void swap(Lists *l, int stage, size_t a, size_t b) {
    PipelineStep t = l->steps[stage][a];
    l->steps[stage][a] = l->steps[stage][b];
    l->steps[stage][b] = t;
}

static void test_wrong_lists(void) {
    Lists l;
    lists_make(&l, SCHEDULE_1F1B, 4, 8, 1);
    l.counts[2]--;
    wrong_list(&l, "stage 2 has 15 steps", "a step is missing");
    l.counts[2]++;
    l.steps[0][1].micro = 0;
    wrong_list(&l, "stage 0 runs the forward of micro-batch 0, chunk 0 twice", "a step twice");
    lists_free(&l);
    lists_make(&l, SCHEDULE_1F1B, 4, 8, 1);
    l.steps[3][4].micro = 8;
    wrong_list(&l, "does not exist", "micro-batch out of range");
    l.steps[3][4].micro = 2;
    l.steps[0][0].chunk = -1;
    wrong_list(&l, "does not exist", "chunk out of range");
    l.steps[0][0].chunk = 0;
    swap(&l, 3, 0, 1);
    wrong_list(&l, "before its forward", "backward first");
    lists_free(&l);
    lists_make(&l, SCHEDULE_GPIPE, 4, 8, 1);
    swap(&l, 2, 1, 2);
    wrong_list(&l, "in another order", "ends of a link in different orders");
    lists_free(&l);
    lists_make(&l, SCHEDULE_GPIPE, 2, 2, 1);
    swap(&l, 0, 1, 2);  // stage 0: F B F B; stage 1: F F B B. Each waits for the other's second step
    wrong_list(&l, "deadlock", "circular wait");
    lists_free(&l);
}

// GPipe as in its paper, the newest micro-batch first: a stack. The streams run it to the right end with every message
// in its place, and yet it would train wrongly: micro-batch 0's backward, which overwrites the gradients, comes last,
// and the buckets are reduced after the first. At every p, since one stage has no link that could tell.
static void test_reversed_backwards(void) {
    for (int p = 1; p <= 4; p++) {
        Lists l;
        lists_make(&l, SCHEDULE_GPIPE, p, 8, 1);
        for (int s = 0; s < p; s++)
            for (size_t i = 0; i < 4; i++) swap(&l, s, 8 + i, 15 - i);
        Machine mc = machine_make(&l, PIPELINE_BUFFERS, 1, 2, 0);
        machine_try(&mc, &l);
        check(&c, mc.complete && !mc.wrong, "gpipe with reversed backwards, p=%d: the streams see nothing wrong", p);
        wrong_list(&l, "stage 0 runs the backward of micro-batch 7, chunk 0 when that of micro-batch 0 is next",
                   "gpipe with reversed backwards");
        lists_free(&l);
    }
    // Only the last one is not last.
    Lists l;
    lists_make(&l, SCHEDULE_GPIPE, 2, 8, 1);
    swap(&l, 0, 14, 15), swap(&l, 1, 14, 15);
    wrong_list(&l, "backward of micro-batch 7, chunk 0 when that of micro-batch 6 is next", "last backward early");
    lists_free(&l);
}

// What a trainer asks before it starts, at the largest size that is expected of it.
static void test_proof_is_quick(void) {
    Lists l;
    Error err;
    clock_t begin = clock();
    lists_make(&l, SCHEDULE_INTERLEAVED, MOST_STAGES, 512, 8);
    bool ok = lists_prove(&l, PIPELINE_BUFFERS, &err);
    double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    lists_free(&l);
    check(&c, ok && seconds < 0.5, "lists and proof for p=64 m=512 v=8 take %.0f ms (bound 500)", 1e3 * seconds);
}

// Right lists, wrong execution. Each of these has hung or corrupted someone's training.
static void test_wrong_rules(void) {
    Lists l;
    Error err = {{0}};
    lists_make(&l, SCHEDULE_1F1B, 2, 16, 1);
    pipeline_gpipe(16, l.steps[0]);  // stage 0 as GPipe, stage 1 as 1F1B: in order, but it needs more buffers
    check(&c, !lists_prove(&l, 2, &err) && strstr(err.text, "deadlock") && lists_prove(&l, 16, &err),
          "a mix of schedules hangs with 2 buffers and runs with 16: both found");
    Machine mc = machine_make(&l, 2, 1, 2, 0), enough = machine_make(&l, 16, 1, 2, 0);
    machine_try(&mc, &l);
    machine_try(&enough, &l);
    check(&c, !mc.complete && enough.complete && !enough.wrong, "and so the streams do");
    lists_free(&l);

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
        lists_make(&l, layouts[i].v > 1 ? SCHEDULE_INTERLEAVED : SCHEDULE_1F1B, layouts[i].p, layouts[i].m,
                   layouts[i].v);
        Machine wrong = machine_make(&l, PIPELINE_BUFFERS, 1, 2, 0), right = wrong;
        memcpy(wrong.stream_of, layouts[i].stream_of, sizeof wrong.stream_of);
        machine_try(&wrong, &l);
        machine_try(&right, &l);
        check(&c, right.complete && !right.wrong && (!wrong.complete || wrong.wrong),
              "%s: %s; a stream per link end: runs", layouts[i].name,
              wrong.complete ? "wrong messages" : "hangs");
        lists_free(&l);
    }

    static const char *waits[WAIT_COUNT] = {"input arrived", "output buffer sent", "input buffer free",
                                            "output computed"};
    lists_make(&l, SCHEDULE_INTERLEAVED, 4, 8, 2);
    for (int w = 0; w < WAIT_COUNT; w++) {
        int noticed = 0;
        for (uint64_t seed = 1; seed <= 10; seed++) {
            Machine without = machine_make(&l, PIPELINE_BUFFERS, 1, 2, 0);
            without.order = seed;
            without.drop[w] = true;
            machine_try(&without, &l);
            noticed += !without.complete || without.wrong;
        }
        check(&c, noticed > 0, "without the wait for '%s' random orders compute wrong things: %d of 10",
              waits[w], noticed);
    }
    lists_free(&l);
}

// Whether the backwards of each chunk of each stage go 0, 1, 2, ...
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

// Random damage to right lists, to one stage or the same to all: pipeline_prove must say yes exactly when the streams
// come to the right end and the gradients are summed in their order.
static void test_mutants(void) {
    uint64_t random = 1;
    size_t accepted = 0, refused = 0, differ = 0, order_alone = 0;
    for (int trial = 0; trial < 6000; trial++) {
        int p = 2 + trial % 3, v = 1 + trial / 3 % 2, m = p * (1 + trial / 6 % 2);
        Lists l;
        lists_make(&l, v > 1 ? SCHEDULE_INTERLEAVED : trial % 5 ? SCHEDULE_1F1B : SCHEDULE_GPIPE, p, m, v);
        for (int change = 0; change <= trial % 3; change++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            int stage = (int)((random >> 33) % (unsigned)p);
            size_t at = (size_t)(random >> 40) % (l.counts[stage] - 1);
            for (int s = 0; s < p; s++) {
                PipelineStep a = l.steps[s][at], b = l.steps[s][at + 1];
                bool pair = a.kind == STEP_FORWARD && b.kind == STEP_BACKWARD && a.micro == b.micro &&
                            a.chunk == b.chunk;
                if ((s == stage || trial % 7 == 0) && !pair) swap(&l, s, at, at + 1);
            }
        }
        size_t buffers = 1 + trial / 12 % 2;
        Error err;
        bool proved = lists_prove(&l, buffers, &err);
        Machine mc = machine_make(&l, buffers, 1, 2, 0);
        mc.order = trial / 24 % 2 ? random : 0;
        machine_try(&mc, &l);
        bool runs = mc.complete && !mc.wrong, ascend = backwards_ascend(&l);
        if (proved != (runs && ascend)) differ++;
        if (runs && !ascend) order_alone++;
        if (proved) accepted++;
        else refused++;
        lists_free(&l);
    }
    check(&c, differ == 0 && accepted > 100 && refused > 100 && order_alone > 20,
          "damaged lists: proof and streams agree: %zu run, %zu do not (%zu for the order of gradients alone), "
          "%zu differ", accepted, refused, order_alone, differ);
}

// ---- weight steps ---------------------------------------------------------------------------------------------------

static Machine machine_halves(const Lists *l, size_t buffers, const double *cost, double transfer) {
    Machine mc = machine_make(l, buffers, cost[STEP_FORWARD], cost[STEP_BACKWARD], transfer);
    mc.cost[STEP_WEIGHT] = cost[STEP_WEIGHT];
    machine_run(&mc, l->steps, l->counts);
    return mc;
}

// The longest that one stage takes by itself: what a step costs if no stage waited for the others at its end.
static double longest_span(const Machine *mc) {
    double longest = 0;
    for (int s = 0; s < mc->p; s++) longest = fmax(longest, machine_own_span(mc, s));
    return longest;
}

typedef struct {
    size_t cases, bad_list, bad_one, bad_flight, bad_run, bad_bubble, worse, slower;
    char first[1200];
} HalvesSweep;

static void halves_note(HalvesSweep *w, size_t *count, const Lists *l, const char *what) {
    if (!w->first[0]) snprintf(w->first, sizeof w->first, "p=%d m=%d: %s", l->p, l->m, what);
    (*count)++;
}

// Costs F, B, W of the sweep: equal ones, those of layers with long sequences, and a weight half that is cheap.
static const double COSTS[][3] = {{1, 1, 1}, {1, 1.5, 1}, {1, 1, 0.5}};

// One list for one set of costs. limit: micro-batches that a stage may hold.
static void halves_case(HalvesSweep *w, Schedule schedule, const Lists *l, const double *cost, size_t limit) {
    Error err;
    int p = l->p, m = l->m;
    w->cases++;
    if (!lists_prove(l, PIPELINE_BUFFERS, &err)) halves_note(w, &w->bad_list, l, err.text);
    if (!lists_prove(l, 1, &err)) halves_note(w, &w->bad_one, l, err.text);
    for (int s = 0; s < p; s++) {
        size_t most = pipeline_max_in_flight(l->steps[s], l->counts[s]);
        bool right = schedule == SCHEDULE_ZB_H1 ? most == limit : most <= limit;
        if (!right || l->counts[s] != 3 * (size_t)m) halves_note(w, &w->bad_flight, l, "in flight");
    }
    Machine mc = machine_halves(l, PIPELINE_BUFFERS, cost, 0), all = machine_halves(l, (size_t)m, cost, 0);
    if (!mc.complete || mc.wrong) halves_note(w, &w->bad_run, l, mc.complete ? "wrong input" : "hung");
    if (mc.makespan > all.makespan + 1e-9) halves_note(w, &w->slower, l, "two buffers are slower");
    double sum = cost[0] + cost[1] + cost[2], bubble = machine_bubble(&mc);
    double h1 = pipeline_bubble(p, m, 1) * (cost[0] + cost[1] - cost[2]) / sum;
    if (schedule == SCHEDULE_ZB_H1 && m >= p && fabs(bubble - h1) > 1e-9) halves_note(w, &w->bad_bubble, l, "bubble");
    if (bubble > pipeline_bubble(p, m, 1) + 1e-9) halves_note(w, &w->worse, l, "worse than 1f1b");
    // With equal costs and the memory of 2p no stage idles in its own span.
    bool none = schedule == SCHEDULE_ZB_AUTO && limit == (size_t)(2 * p) && cost == COSTS[0] && m >= 2 * p;
    if (none && longest_span(&mc) > m * sum + 1e-9) halves_note(w, &w->bad_bubble, l, "a stage idles");
    // No list ends earlier than (p-1) F behind the ideal time: the last stage begins so late.
    if (mc.makespan < m * sum + (p - 1) * cost[0] - 1e-9) halves_note(w, &w->bad_bubble, l, "earlier than possible");
    machine_free(&mc);
    machine_free(&all);
}

static void test_halves(Schedule schedule) {
    HalvesSweep w = {0};
    for (int p = 2; p <= MAX_P; p++)
        for (int m = 1; m <= MAX_M; m += m < 2 * p ? 1 : 5)
            for (size_t k = 0; k < sizeof COSTS / sizeof *COSTS; k++)
                for (int memory = 1; memory <= (schedule == SCHEDULE_ZB_AUTO ? 2 : 1); memory++) {
                    PipelineCosts costs = {{COSTS[k][0], COSTS[k][1], COSTS[k][2]}, 0, memory * p};
                    Lists l = pipeline_lists_make(schedule, p, m, 1, &costs);
                    size_t limit = schedule == SCHEDULE_ZB_H1 && m < p ? (size_t)m : (size_t)(memory * p);
                    halves_case(&w, schedule, &l, COSTS[k], limit);
                    lists_free(&l);
                }
    const char *name = pipeline_schedule_name(schedule);
    check(&c, w.cases > 100 && w.bad_list == 0, "%s: %zu lists proved: %zu wrong", name, w.cases, w.bad_list);
    check(&c, w.bad_one == 0, "%s: one buffer cannot hang either: %zu do", name, w.bad_one);
    check(&c, w.bad_flight == 0, "%s: activations in flight %s: %zu wrong", name,
          schedule == SCHEDULE_ZB_H1 ? "p on every stage, as on stage 0 of 1f1b" : "p or 2p at most, as asked",
          w.bad_flight);
    check(&c, w.bad_run == 0, "%s: streams with rendezvous messages and %d buffers: %zu wrong", name, PIPELINE_BUFFERS,
          w.bad_run);
    check(&c, w.bad_bubble == 0, "%s: %s: %zu differ", name,
          schedule == SCHEDULE_ZB_H1 ? "bubble (p-1)(F+B-W) / (m (F+B+W)) from m = p on"
                                     : "equal costs, 2p in flight, m from 2p on: no stage idles in its own span",
          w.bad_bubble);
    check(&c, w.worse == 0, "%s: the bubble is never larger than that of 1f1b: %zu are", name, w.worse);
    check(&c, w.slower == 0, "%s: two buffers lose no time against unlimited ones: %zu do", name, w.slower);
    if (w.first[0]) printf("     first: %s\n", w.first);
}

// The search is a function of its arguments alone, keeps any limit, and with the memory of 1F1B is as good as zb-h1.
static void test_auto(void) {
    Error err;
    size_t over = 0, unproved = 0, worse = 0;
    bool same = true;
    for (int p = 2; p <= 8; p++)
        for (int limit = 1; limit <= 2 * p; limit++) {
            PipelineCosts costs = {{1, 1.25, 0.75}, 0.1, limit};
            Lists a = pipeline_lists_make(SCHEDULE_ZB_AUTO, p, 3 * p, 1, &costs);
            Lists b = pipeline_lists_make(SCHEDULE_ZB_AUTO, p, 3 * p, 1, &costs);
            unproved += !lists_prove(&a, PIPELINE_BUFFERS, &err);
            for (int s = 0; s < p; s++) {
                over += pipeline_max_in_flight(a.steps[s], a.counts[s]) > (size_t)limit;
                same = same && memcmp(a.steps[s], b.steps[s], a.counts[s] * sizeof(PipelineStep)) == 0;
            }
            if (limit >= p) {
                Lists h1 = pipeline_lists_make(SCHEDULE_ZB_H1, p, 3 * p, 1, NULL);
                Machine mine = machine_halves(&a, PIPELINE_BUFFERS, costs.step, costs.transfer);
                Machine its = machine_halves(&h1, PIPELINE_BUFFERS, costs.step, costs.transfer);
                worse += mine.makespan > its.makespan + 1e-9;
                machine_free(&mine);
                machine_free(&its);
                lists_free(&h1);
            }
            lists_free(&a);
            lists_free(&b);
        }
    check(&c, same, "zb-auto: the same arguments give the same lists");
    check(&c, over == 0 && unproved == 0, "zb-auto: limits from 1 to 2p are kept, and the lists run: %zu, %zu do not",
          over, unproved);
    check(&c, worse == 0, "zb-auto: with the memory of zb-h1 or more and slow messages never later: %zu are", worse);
}

// The search finds what it found when it was written plainly, one stage after the other looking up at each event: a
// hash of all its lists. Where it gives a stage other work, they are other lists, and this number is another one.
static void test_auto_is_the_same(void) {
    static const int stages[] = {2, 3, 8, 17}, micros[] = {1, 6, 16, 40};
    static const double costs[][3] = {{1, 1, 1}, {1, 1.28, 0.9}, {0.3, 0.7, 0.2}, {1, 2, 5}, {2, 1, 0}};
    static const double transfers[] = {0, 0.3, 1, 3};
    unsigned long long hash = 14695981039346656037u;
    size_t searches = 0;
    for (int i = 0; i < 4 * 4 * 5 * 4 * 3; i++, searches++) {
        int p = stages[i % 4], m = micros[i / 4 % 4], limits[] = {p, 2 * p, 1 + p / 2};
        const double *cost = costs[i / 16 % 5];
        PipelineCosts given = {{cost[0], cost[1], cost[2]}, transfers[i / 80 % 4], limits[i / 320]};
        Lists l = pipeline_lists_make(SCHEDULE_ZB_AUTO, p, m, 1, &given);
        for (int s = 0; s < p; s++)
            for (size_t k = 0; k < l.counts[s]; k++)
                hash = (hash ^ (unsigned)(l.steps[s][k].kind * 65537 + l.steps[s][k].micro)) * 1099511628211u;
        lists_free(&l);
    }
    check(&c, hash == 0x8b651a7dd3090639u, "zb-auto: the lists of %zu searches are those of the plain search (%llx)",
          searches, hash);
}

static void test_wrong_halves(void) {
    Lists l;
    lists_make(&l, SCHEDULE_ZB_H1, 4, 8, 1);  // stage 0: F0 F1 F2 F3 B0 W0 F4 B1 W1 ...
    swap(&l, 0, 4, 5);
    wrong_list(&l, "stage 0 runs the weight step of micro-batch 0, chunk 0 before its backward", "weight step first");
    swap(&l, 0, 4, 5);
    l.steps[0][5].micro = 1, l.steps[0][8].micro = 0;
    wrong_list(&l, "weight step of micro-batch 1, chunk 0 before its backward", "weight steps exchanged");
    l.steps[0][5].micro = 0, l.steps[0][8].micro = 0;
    wrong_list(&l, "stage 0 runs the weight step of micro-batch 0, chunk 0 twice", "weight step twice");
    l.steps[0][8].micro = 1;
    l.counts[0]--;
    wrong_list(&l, "stage 0 has 23 steps, and 8 micro-batches in 1 chunks are 24 with their weight steps",
               "weight step missing");
    l.counts[0]++;
    size_t n = l.counts[3];  // stage 3 ends with W4 W5 W6 W7
    swap(&l, 3, n - 1, n - 2);
    wrong_list(&l, "stage 3 runs the weight step of micro-batch 7, chunk 0 when that of micro-batch 6 is next: the "
                   "weight steps of a chunk go 0, 1, 2",
               "weight steps out of order");
    swap(&l, 3, n - 1, n - 2);
    l.steps[2][3].kind = (StepKind)3;
    wrong_list(&l, "does not exist", "a fourth kind");
    lists_free(&l);
    // Lists of both kinds beside each other: stage 0 by halves, stage 1 not.
    Error err;
    pipeline_text_parse("mixed", "F0 F1 B0 W0 B1 W1; F0 B0 F1 B1", &l, &err);
    const double equal[] = {1, 1, 1};
    Machine mc = machine_halves(&l, PIPELINE_BUFFERS, equal, 0);
    check(&c, lists_prove(&l, 1, &err) && mc.complete && !mc.wrong && mc.busy == 12,
          "a stage by halves beside one with whole backwards runs");
    machine_free(&mc);
    lists_free(&l);
}

// ---- lists from text ------------------------------------------------------------------------------------------------

static void test_text(void) {
    static const struct {
        const char *text, *part;
    } refused[] = {
        {"", "has no steps"},
        {"# nothing\n\n ; \n", "has no steps"},
        {"F0 B0\nF0 X0", "t, line 2, word 2: 'X0' is no step"},
        {"F0 F", "line 1, word 2: 'F' is no step"},
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
        bool ok = pipeline_text_parse("t", refused[i].text, &l, &err);
        check(&c, !ok && strstr(err.text, refused[i].part), "text refused: %s", err.text);
        lists_free(&l);
    }
    // What is written and read again is the same schedule.
    size_t differ = 0;
    for (int schedule = 0; schedule < SCHEDULE_COUNT; schedule++) {
        int v = schedule == SCHEDULE_INTERLEAVED ? 2 : 1;
        Lists l, back;
        Error err;
        lists_make(&l, (Schedule)schedule, 4, 8, v);
        char text[8192] = "# by name\r\n\n", *end = text + strlen(text);
        for (int s = 0; s < 4; s++) {
            for (size_t i = 0; i < l.counts[s]; i++) {
                PipelineStep step = l.steps[s][i];
                end += sprintf(end, v > 1 || i % 2 ? "%c%d.%d\t" : "%c%d ", "FBW"[step.kind], step.micro, step.chunk);
            }
            end += sprintf(end, s % 2 ? "# stage\r\n" : ";\n");
        }
        bool ok = pipeline_text_parse("t", text, &back, &err) && back.p == 4 && back.m == 8 && back.v == v;
        for (int s = 0; ok && s < 4; s++)
            ok = l.counts[s] == back.counts[s] &&
                 memcmp(l.steps[s], back.steps[s], l.counts[s] * sizeof(PipelineStep)) == 0;
        differ += !ok;
        lists_free(&l);
        lists_free(&back);
    }
    check(&c, differ == 0, "text: all schedules come back as they were written: %zu do not", differ);
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
        const double equal[] = {1, 1, 1};
        bool ok = pipeline_text_read(examples[i].path, &l, &err) && lists_prove(&l, PIPELINE_BUFFERS, &err);
        double bubble = NAN;
        if (ok) {
            Machine mc = machine_halves(&l, PIPELINE_BUFFERS, equal, 0);
            bubble = machine_bubble(&mc);
            ok = !strstr(examples[i].path, "no-idle") || longest_span(&mc) == 3.0 * l.m;
            machine_free(&mc);
        }
        check(&c, ok && l.p == examples[i].p && l.m == examples[i].m && fabs(bubble - examples[i].bubble) < 1e-12,
              "%s runs, bubble %.4f %s", examples[i].path, bubble, err.text);
        lists_free(&l);
    }
}

int main(void) {
    test_figures();
    test_refused();
    test_routes();
    test_wrong_lists();
    test_reversed_backwards();
    test_proof_is_quick();
    test_wrong_rules();
    test_mutants();
    test_wrong_halves();
    test_text();
    test_examples();
    test_auto();
    test_auto_is_the_same();
    test_halves(SCHEDULE_ZB_H1);
    test_halves(SCHEDULE_ZB_AUTO);
    test_schedules(SCHEDULE_GPIPE);
    test_schedules(SCHEDULE_1F1B);
    test_schedules(SCHEDULE_INTERLEAVED);
    return check_summary(&c);
}
