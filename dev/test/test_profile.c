// test_profile.c: dev/plot/step_profile.h on hand-made events whose answers are known, and
// dev/plot/profile.c as users run it. With a folder as argument the pictures stay there to be
// looked at.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "dev/test/check.h"
#include "dev/test/run_plots.h"

static Check c;

// Adds an event; times in milliseconds.
static void add(TraceList *list, const char *kind, int rank, int track, long step, double start,
                double end) {
    TraceEvent e = trace_event(kind, rank, track, -1, 0);
    e.step = step;
    e.start_us = 1e3 * start;
    e.duration_us = 1e3 * (end - start);
    trace_add(list, &e);
}

static bool near(double a, double b) { return fabs(a - b) < 1e-9 * (1 + fabs(b)); }

// Returns true if a rank has these numbers (milliseconds). Prints the ones that differ.
static bool matches(const StepProfile *p, size_t steps, double wall,
                    const double part[PROFILE_PARTS], double bubble, double ideal) {
    double sum = 0;
    bool ok = p->steps == steps && near(p->wall, wall) && near(p->bubble, bubble) &&
              near(p->ideal, ideal);
    for (int i = 0; i < PROFILE_PARTS; i++) {
        sum += p->part[i];
        if (near(p->part[i], part[i])) continue;
        printf("     %s is %.9g, not %.9g\n", profile_part_name(i), p->part[i], part[i]);
        ok = false;
    }
    ok = ok && near(sum, p->wall);
    if (!ok)
        printf("     %zu steps of %.9g (parts %.9g), bubble %.9g, ideal %.9g\n", p->steps,
               p->wall, sum, p->bubble, p->ideal);
    return ok;
}

// Every kind of span once, three levels deep, and gaps; `late` moves the whole step.
static void add_step(TraceList *list, int rank, long step, double late, double stretch) {
    static const struct {
        const char *kind;
        int track;
        double start, end;
    } spans[] = {
        {"forward", 0, 0, 30},
        {"wait pipeline", 0, 0, 4},
        {"wait data", 0, 4, 6},
        {"all-reduce", 0, 10, 13},
        {"wait tensor", 0, 11, 12},  // inside the all-reduce
        {"all-gather", 0, 20, 21},
        {"loss", 0, 30, 32},
        {"wait pipeline", 0, 33, 37},  // between, with a gap of 1 before it
        {"backward", 0, 37, 77},
        {"wait tensor", 0, 40, 45},
        {"reduce-scatter", 0, 50, 52},
        {"all-reduce", 1, 40, 45},
        {"recv", 2, 0, 37},
        {"reduce-scatter", 6, 60, 85},
        {"wait data", 0, 77, 85},
        {"something", 0, 85, 86},
        {"optimizer", 0, 87, 92},
        {"wait data", 0, 90, 91},
        {"all-gather", 6, 92, 120},
    };
    for (size_t i = 0; i < sizeof spans / sizeof spans[0]; i++)
        add(list, spans[i].kind, rank, spans[i].track, step, late + stretch * spans[i].start,
            late + stretch * spans[i].end);
}

// compute 30-4-2-3-1 + 2 + 40-5-2; tensor 3+1+5+2; pipeline 4+4; data 2+8+1; other 1+1+1
static const double parts[PROFILE_PARTS] = {55, 4, 11, 8, 11, 3};

static void test_parts(void) {
    StepProfile p[3];
    TraceList list = {0};
    add_step(&list, 0, 1, 5, 1);
    check(&c, profile_steps(list.events, list.count, 1, 0, p) && matches(p, 1, 92, parts, 9, 68),
          "profile: every part of one step, nested spans and gaps");
    check(&c, near(p[0].own, 77), "profile: from the rank's first work to its last");

    // Shuffled, and a second step 3 times as long, after a warm-up step that is left out
    add_step(&list, 0, 2, 1000, 3);
    add_step(&list, 0, 0, -500, 50);
    for (size_t i = list.count; i-- > 1;) {
        size_t j = (i * 7919 + 13) % (i + 1);
        TraceEvent swap = list.events[i];
        list.events[i] = list.events[j];
        list.events[j] = swap;
    }
    double twice[PROFILE_PARTS];
    for (int i = 0; i < PROFILE_PARTS; i++) twice[i] = 2 * parts[i];
    check(
        &c,
        profile_steps(list.events, list.count, 1, 1, p) && matches(p, 2, 2 * 92, twice, 18, 136),
        "profile: events in any order, mean of two steps, warm-up left out");
    check(&c, near(p[0].own, 154), "profile: the same as a mean of steps");

    // Rank 2 has one step and starts 10 later, so both idle 10 while the other one works; rank 1
    // has none
    trace_free(&list);
    add_step(&list, 0, 1, 0, 1);
    add_step(&list, 2, 1, 10, 1);
    static const double none[PROFILE_PARTS] = {0};
    bool ok = profile_steps(list.events, list.count, 3, 1, p);
    check(&c, ok && matches(&p[0], 1, 92, parts, 19, 68) && matches(&p[2], 1, 92, parts, 19, 68),
          "profile: two ranks, one later than the other");
    StepProfile mean = profile_mean(p, 3);
    check(&c, matches(&p[1], 0, 0, none, 0, 0) && matches(&mean, 1, 92, parts, 19, 68),
          "profile: a rank without events is no part of the mean");

    // A clock that rounds: children that stick out of their parents, siblings that overlap
    trace_free(&list);
    add(&list, "forward", 0, 0, 1, 0, 10);
    add(&list, "wait tensor", 0, 0, 1, 8, 10.5);
    add(&list, "backward", 0, 0, 1, 10.25, 20);
    add(&list, "backward", 0, 0, 1, 19.5, 30);
    add(&list, "optimizer", 0, 0, 1, 30, 30);
    static const double rounded[PROFILE_PARTS] = {27.75, 0, 2.25, 0, 0, 0};
    check(&c, profile_steps(list.events, list.count, 1, 0, p) && matches(p, 1, 30, rounded, 0, 30),
          "profile: no instant counted twice when spans overlap");
    trace_free(&list);
}

static void test_edges(void) {
    StepProfile p[2];
    TraceList list = {0};
    static const double none[PROFILE_PARTS] = {0};
    check(&c,
          profile_steps(NULL, 0, 2, 0, p) && matches(&p[0], 0, 0, none, 0, 0) &&
              matches(&p[1], 0, 0, none, 0, 0),
          "profile: an empty trace");
    check(&c, profile_steps(NULL, 0, 0, 0, NULL), "profile: no ranks");
    add(&list, "all-reduce", 0, 1, 1, 0, 5);
    check(&c, profile_steps(list.events, 1, 2, 0, p) && matches(&p[0], 0, 0, none, 0, 0),
          "profile: nothing on the compute stream");
    add(&list, "optimizer", 0, 0, 1, 3, 3);
    check(&c,
          profile_steps(list.events, 2, 2, 0, p) && matches(&p[0], 1, 0, none, 0, 0) &&
              profile_bubble(p) == 0,
          "profile: a step that takes no time");
    check(&c, profile_steps(list.events, 2, 2, 2, p) && p[0].steps == 0,
          "profile: all steps are warm-up");
    add(&list, "forward", 2, 0, 1, 0, 1);
    bool refused = !profile_steps(list.events, 3, 2, 0, p);
    list.events[2].rank = -1;
    refused = refused && !profile_steps(list.events, 3, 2, 0, p);
    check(&c, refused, "profile refuses: a rank that is not there");
    list.events[2].rank = 1;
    list.events[2].duration_us = -1;
    refused = !profile_steps(list.events, 3, 2, 0, p);
    list.events[2].duration_us = NAN;
    refused = refused && !profile_steps(list.events, 3, 2, 0, p);
    list.events[2].duration_us = 1;
    list.events[2].start_us = INFINITY;
    check(&c, refused && !profile_steps(list.events, 3, 2, 0, p),
          "profile refuses: times that are none");
    trace_free(&list);
}

// Adds a step that ran a schedule with forwards of 1 / v and backwards of 2 / v. nested: the
// span of a forward or backward begins when its stream is free, and contains the wait for the
// neighbour. Else waits are gaps.
static void simulate_step(TraceList *list, Schedule schedule, int p, int m, int v, bool nested,
                          long step, double late) {
    PipelineTimes times = {{1.0 / v, 1.0 / v, 1.0 / v}, 0, NULL};
    PipelineLists lists = zero_bubble_make(schedule, p, m, v, &times, 0);
    PipelineRun run;
    Error err;
    if (!list_run(&run, &lists, PIPELINE_BUFFERS, &times, &err)) abort();
    for (int s = 0; s < p; s++) {
        double now = late;
        for (size_t i = 0; i < lists.counts[s]; i++) {
            double start = late + run.steps[s][i].start, end = late + run.steps[s][i].end;
            static const char *const kinds[] = {"forward", "backward", "weight"};
            const char *kind = kinds[lists.steps[s][i].kind];
            add(list, kind, s, 0, step, nested ? now : start, end);
            if (nested && start > now) add(list, "wait pipeline", s, 0, step, now, start);
            now = end;
        }
        add(list, "optimizer", s, 0, step, late + run.end, late + run.end + 5);
    }
    list_run_free(&run, &lists);
    pipeline_lists_free(&lists);
}

// Forward and both halves of a backward cost the same, so that F + B - W is a third of them.
static void test_bubble(Schedule schedule, int p, int m, int v) {
    double want = pipeline_bubble(p, m, v) / (schedule == SCHEDULE_ZB_H1 ? 3 : 1);
    for (int nested = 0; nested < 2; nested++) {
        TraceList list = {0};
        StepProfile *out = malloc((size_t)p * sizeof *out);
        for (long step = 1; step <= 3; step++)
            simulate_step(&list, schedule, p, m, v, nested, step, 1e3 * step);
        bool ok = profile_steps(list.events, list.count, p, 2, out);
        for (int s = 0; s < p; s++)
            ok = ok && out[s].steps == 2 && near(profile_bubble(&out[s]), want) &&
                 near(out[s].part[PROFILE_COMPUTE], 3.0 * m) &&
                 near(out[s].part[PROFILE_OPTIMIZER], 5);
        StepProfile mean = profile_mean(out, p);
        check(&c, ok && near(profile_bubble(&mean), want),
              "profile: %s p=%d m=%d v=%d has the bubble %.4f, waits %s",
              pipeline_schedule_name(schedule), p, m, v, want, nested ? "as spans" : "as gaps");
        free(out);
        trace_free(&list);
    }
}

// ---- the picture and the table ---------------------------------------------------------

static bool write_events(const char *dir, const char *name, const TraceList *list) {
    static const char *const tracks[] = {"compute", "all-reduce"};
    Error err;
    return trace_write(in(dir, name), list->events, list->count, tracks, 2, &err);
}

// MegaScale's first question: which rank is it?
static void test_slow_rank(const char *dir) {
    TraceList list = {0};
    for (long step = 1; step <= 3; step++)
        for (int rank = 0; rank < 8; rank++)
            add_step(&list, rank, step, 1e5 * step, rank == 5 ? 10 : 1 + 0.01 * rank);
    bool made = write_events(dir, "parts.json", &list);
    int drawn = run(profile_main, "profile --out %s/parts.svg %s/parts.json", dir, dir);
    char *table = read_output(run_output);
    check(
        &c,
        made && drawn == 0 && strstr(table, "\nThe others wait for rank 5, which computes for "),
        "a rank ten times slower is named");
    trace_free(&list);
    free(table);
}

static void test_picture(const char *dir) {
    TraceList list = {0};
    for (long step = 1; step <= 3; step++)
        for (int rank = 0; rank < 4; rank++)
            add_step(&list, rank, step, 1e4 * step, step == 1 ? 20 : 1 + 0.05 * rank);
    bool made = write_events(dir, "parts.json", &list);
    int drawn = run(profile_main, "profile --out %s/parts.svg %s/parts.json", dir, dir);
    char *picture = read_picture(dir, "parts"), *table = read_output(run_output);
    check(&c,
          made && drawn == 0 && occurrences(picture, ">rank ") == 4 &&
              occurrences(picture, ">59.8%<") == 5 && strstr(picture, "mean of 2 steps on 4 ranks"),
          "picture: four bars and their mean, without the warm-up step");
    check(&c,
          strstr(table, "mean of 2 steps\n") && strstr(table, "\n   0    92.00    55.00  59.8") &&
              strstr(table, "\nmean ") && occurrences(table, "\n") == 12 &&
              strstr(table,
                     "\nNo rank is slow, not even rank 3, which computes for 63.25 ms a step, "
                     "1.1 times"),
          "table: a row per rank, a mean, and what the columns mean");
    free(picture);
    free(table);
    drawn = run(profile_main,
                "profile --skip 0 --width 700 --title a<b --out %s/parts.svg %s/parts.json", dir,
                dir);
    picture = read_picture(dir, "parts");
    check(&c,
          drawn == 0 && strstr(picture, ">a&lt;b<") &&
              strstr(picture, "mean of 3 steps"),
          "picture: narrow, with a title and every step");
    free(picture);
    check(&c, run(profile_main, "profile --skip 3 --out %s/bad.svg %s/parts.json", dir, dir) == 1,
          "picture refuses: --skip leaves nothing");
    trace_free(&list);

    for (long step = 1; step <= 2; step++)
        simulate_step(&list, SCHEDULE_1F1B, 4, 8, 1, true, step, 100.0 * step);
    made = write_events(dir, "1f1b.json", &list);
    drawn = run(profile_main, "profile --out %s/1f1b.svg %s/1f1b.json", dir, dir);
    picture = read_picture(dir, "1f1b");
    check(&c, made && drawn == 0 && occurrences(picture, ">37.5%<") == 5,
          "picture: 1F1B on 4 stages, 8 micro-batches: bubble 37.5%%");
    free(picture);
    trace_free(&list);
}

static void test_bad_traces(const char *dir) {
    static const struct {
        const char *text, *name;
    } cases[] = {
        {"", "empty file"},
        {"{\"traceEvents\":[{", "truncated file"},
        {"{\"traceEvents\":7}", "no array"},
        {"[]", "no events"},
        {"[{\"ph\":\"X\",\"ts\":0,\"dur\":1,\"pid\":0,\"tid\":0,\"args\":{\"kind\":\"forward\"}}"
         "]",
         "no backward"},
        {"[{\"ph\":\"X\",\"ts\":0,\"dur\":1,\"pid\":999999,\"tid\":0,\"args\":{\"kind\":"
         "\"backward\","
         "\"step\":1}}]",
         "a million ranks"},
        {"[{\"ph\":\"X\",\"ts\":0,\"dur\":1e300,\"pid\":0,\"tid\":0,\"args\":{\"kind\":"
         "\"backward\"}}]",
         "longer than anything"},
        {"[{\"ph\":\"X\",\"ts\":0,\"dur\":-1,\"pid\":0,\"tid\":0,\"args\":{\"kind\":\"backward\","
         "\"step\":"
         "1e300}}]",
         "absurd numbers"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_in(dir, "bad.json", cases[i].text);
        check(&c, run(profile_main, "profile --skip 0 --out %s/bad.svg %s/bad.json", dir, dir) == 1,
              "picture refuses: %s", cases[i].name);
    }
    check(&c,
          run(profile_main, "profile %s/missing.json", dir) == 1 &&
              run(profile_main, "profile") == 2 &&
              run(profile_main, "profile --skip -1 %s/parts.json", dir) == 2 &&
              run(profile_main, "profile --help") == 0,
          "picture refuses: no file, a bad option");
    check(&c, run(profile_main, "profile --out %s/none/bad.svg %s/parts.json", dir, dir) == 1,
          "picture refuses: a place that cannot be written");
}

int main(int argc, char **argv) {
    char dir[512];
    picture_folder(dir, "test_profile", argc, argv);
    run_output = in(dir, "table.txt");
    test_parts();
    test_edges();
    test_bubble(SCHEDULE_1F1B, 4, 8, 1);
    test_bubble(SCHEDULE_1F1B, 3, 7, 1);
    test_bubble(SCHEDULE_1F1B, 1, 4, 1);
    test_bubble(SCHEDULE_GPIPE, 4, 6, 1);
    test_bubble(SCHEDULE_INTERLEAVED, 4, 8, 2);
    test_bubble(SCHEDULE_ZB_H1, 4, 8, 1);
    test_slow_rank(dir);
    test_picture(dir);
    test_bad_traces(dir);
    if (argc < 2) remove_tree(dir);
    return check_summary(&c);
}
