// bubbles.c: the idle time of the stages of a pipeline as a share of a step, under every
// schedule, by the trainer's own clock. It stands beside the formulas, or beside the published
// values of Zero Bubble Pipeline Parallelism (Qi et al., ICLR 2024). Prints tables in Markdown.
//
//   bubbles formulas|paper BUILD CLUSTER.json [ROWS]
//   bubbles v            lists with chunks in a V, on the paper's times; no trainer runs
//
// BUILD is a folder with train_gpt_3d and train_zero_bubble. They simulate a step of each row and
// write a trace. dev/plot/step_profile.h finds each stage's work in it. ROWS: only the rows with
// this p, or of this model.
//
// As in the paper, a bubble is a share of time, (cost - work) / cost:
//   All stages  The cost runs from the first start to the last end of any stage, and work is the
//               mean of the stages.
//   One stage   The stage that takes longest from its own first start to its own last end, alone.
//               This is the paper's cost.
#include <stdlib.h>
#include <unistd.h>

#include "dev/plot/pipeline_run.h"
#include "dev/plot/step_profile.h"
#include "dev/plot/tool.h"
#include "dev/plot/trace_read.h"
#include "llmc/host/file.h"

enum { TEMPORARY_PATH = 512 };  // short enough for a command line

// Makes an empty file in the folder TMPDIR, or in /tmp, and opens it. Returns -1, with an error
// message, if it cannot.
static int temporary_file(char path[TEMPORARY_PATH], const char *name, Error *err) {
    const char *folder = getenv("TMPDIR");
    if (!folder || !*folder) folder = "/tmp";
    if (snprintf(path, TEMPORARY_PATH, "%s/%s-XXXXXX", folder, name) >= TEMPORARY_PATH) {
        error_set(err, "the path %.200s... is too long", path);
        return -1;
    }
    int fd = mkstemp(path);
    if (fd < 0)
        error_set(err, "cannot make a temporary file in %s (TMPDIR): %s", folder,
                  strerror(errno));
    return fd;
}

// The model of a run: its width, layers a stage, sequences a micro-batch. Its vocabulary is so
// small that the ends of the model do not count.
typedef struct {
    const char *name;
    int C, heads, T, layers, p, micro;
} Model;

// How a column runs: --schedule with v chunks (0: a layer a chunk), and the limit of zb-auto as a
// multiple of p.
typedef struct {
    Schedule schedule;
    int v, limit;
} How;

// Shares of time, and the shortest steps of the middle stage, by StepKind.
typedef struct {
    double all, one, step[3];
} Bubble;

typedef struct {
    const char *build, *cluster, *rows;
    char trace[TEMPORARY_PATH];
} Bench;

static bool run(const Bench *b, const Model *x, int p, int m, How how, Error *err) {
    char command[4096], limit[48] = "";
    int v = how.v ? how.v : x->layers;
    if (how.limit) snprintf(limit, sizeof limit, "--max-in-flight %d", how.limit * p);
    const char *trainer = how.schedule >= SCHEDULE_ZB_H1 ? "train_zero_bubble" : "train_gpt_3d";
    snprintf(command, sizeof command,
             "'%s/%s' --simulate '%s' --ranks %d --pipeline %d --layers %d --channels %d --heads "
             "%d --seq %d "
             "--vocab 100 --micro-batch %d --global-batch %d --schedule %s --virtual %d %s "
             "--steps 1 --trace '%s' 2>&1",
             b->build, trainer, b->cluster, p, p, p * x->layers, x->C, x->heads, x->T, x->micro,
             m * x->micro, pipeline_schedule_name(how.schedule), v, limit, b->trace);
    char line[1024], said[512] = "it said nothing";
    FILE *out = popen(command, "r");
    while (out && fgets(line, sizeof line, out))
        snprintf(said, sizeof said, "%.*s", (int)strcspn(line, "\n"), line);
    return (out && pclose(out) == 0) || error_set(err, "%.400s failed: %s", command, said);
}

// Stores the shortest step of each kind on one rank: it did not wait.
static void shortest(const TraceList *list, int rank, double *step) {
    static const char *const kinds[3] = {"forward", "backward", "weight"};
    for (int kind = 0; kind < 3; kind++) {
        step[kind] = INFINITY;
        for (size_t i = 0; i < list->count; i++) {
            const TraceEvent *e = &list->events[i];
            if (e->rank == rank && strcmp(e->kind, kinds[kind]) == 0)
                step[kind] = fmin(step[kind], e->duration_us);
        }
    }
}

static bool measure(const Bench *b, int p, Bubble *bubble, Error *err) {
    TraceList list = {0};
    StepProfile *stages = (StepProfile *)host_alloc((size_t)p, sizeof *stages);
    bool ok = trace_read(b->trace, &list, err);
    if (ok && !profile_steps(list.events, list.count, p, 0, stages))
        ok = error_set(err, "%s has other ranks than 0 to %d", b->trace, p - 1);
    if (ok) {
        StepProfile mean = profile_mean(stages, p), *longest = stages;
        for (int s = 1; s < p; s++)
            if (stages[s].own > longest->own) longest = &stages[s];
        bubble->all = mean.bubble / (mean.bubble + mean.ideal);
        bubble->one = 1 - longest->ideal / longest->own;
        shortest(&list, p / 2, bubble->step);
    }
    trace_free(&list);
    free(stages);
    return ok;
}

// Returns idle / (idle + work) for idle / work.
static double share(double bubble) { return 100 * bubble / (1 + bubble); }

static bool wanted(const Bench *b, const char *name) {
    return !b->rows || strcmp(b->rows, name) == 0;
}

// ---- the formulas ----------------------------------------------------------------------

static const Model plain = {"plain", 4096, 32, 1024, 4, 0, 1};

static bool row_of_formulas(const Bench *b, int p, int m, Error *err) {
    static const How hows[] = {{SCHEDULE_GPIPE, 1, 0},       {SCHEDULE_1F1B, 1, 0},
                               {SCHEDULE_INTERLEAVED, 2, 0}, {SCHEDULE_ZB_H1, 1, 0},
                               {SCHEDULE_ZB_AUTO, 1, 1},     {SCHEDULE_ZB_AUTO, 1, 2}};
    Bubble x[6];
    for (int i = 0; i < 6; i++)
        if (!run(b, &plain, p, m, hows[i], err) || !measure(b, p, &x[i], err)) return false;
    const double *step = x[3].step;
    double base = pipeline_bubble(p, m, 1), work = step[0] + step[1] + step[2];
    printf(
        "| %d | %d | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f "
        "|\n",
        p, m, 100 * x[0].all, 100 * x[1].all, share(base), 100 * x[2].all,
        share(pipeline_bubble(p, m, 2)), 100 * x[3].all,
        share(base * (step[0] + step[1] - step[2]) / work), 100 * x[4].all, 100 * x[5].all,
        share(base * step[0] / work), 100 * x[5].one);
    return true;
}

static bool print_formulas(const Bench *b, Error *err) {
    printf(
        "| p | m | gpipe | 1f1b | formula | interleaved | formula | zb-h1 | formula | zb-auto, p "
        "| zb-auto, 2p "
        "| bound | one stage |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|\n");
    for (int p = 4; p <= 16; p *= 2)
        for (int m = p; m <= 4 * p; m *= 2) {
            char name[16];
            snprintf(name, sizeof name, "%d", p);
            if (wanted(b, name) && !row_of_formulas(b, p, m, err)) return false;
        }
    return true;
}

// ---- the paper -------------------------------------------------------------------------

// Table 5: rates of 1F1B, 1F1B-I, ZB-H1, ZB-1p and ZB-2p, in %. Table 9: ms of F, B, W and a
// message, from which Table 5 is computed.
typedef struct {
    int m;
    double rate[5], ms[4];
} Published;

// The paper's models have one layer less on the first and on the last stage, for the embedding
// and the head. Here the ends have all their layers, and next to no vocabulary.
static const struct {
    Model model;
    Published row[3];
} paper[] = {
    {{"1.5B", 2304, 24, 1024, 3, 8, 6},
     {{24, {24.31, 10.55, 15.85, 15.85, 4.33}, {18.522, 18.086, 9.337, 0.601}},
      {32, {19.85, 8.18, 12.42, 12.42, 0.39}, {18.513, 18.086, 9.331, 0.626}},
      {64, {12.40, 4.43, 6.74, 6.74, 0.26}, {18.546, 18.097, 9.321, 0.762}}}},
    {{"6.2B", 4096, 32, 1024, 4, 8, 3},
     {{24, {23.47, 8.08, 13.23, 13.23, 0.29}, {29.718, 29.444, 19.927, 0.527}},
      {32, {18.98, 6.28, 10.45, 10.45, 0.22}, {29.802, 29.428, 19.530, 0.577}},
      {64, {10.91, 3.20, 5.54, 5.54, 0.10}, {29.935, 29.621, 19.388, 0.535}}}},
    {{"14.6B", 5120, 40, 1024, 3, 16, 1},
     {{48, {25.52, 11.04, 13.97, 13.97, 0.66}, {11.347, 11.248, 8.132, 0.377}},
      {64, {20.82, 8.52, 10.88, 10.88, 0.54}, {11.307, 11.254, 8.101, 0.379}},
      {128, {12.51, 4.45, 5.76, 5.76, 0.28}, {11.325, 11.308, 8.109, 0.378}}}},
    {{"28.3B", 6144, 48, 1024, 2, 32, 1},
     {{96, {26.46, 14.93, 14.21, 14.21, 0.38}, {10.419, 10.207, 7.715, 0.408}},
      {128, {21.68, 11.64, 11.06, 11.06, 0.29}, {10.408, 10.204, 7.703, 0.408}},
      {256, {13.52, 6.24, 5.94, 5.94, 0.18}, {10.402, 10.248, 7.698, 0.460}}}},
};

// Returns the rate of one stage when the lists run on the paper's times, by the small machine of
// build/tools/schedule.
static double of_list(const Model *x, const Published *row, How how) {
    int v = how.v ? how.v : x->layers;
    PipelineTimes stage = {{row->ms[0], row->ms[1], row->ms[2]}, row->ms[3], NULL}, chunk = stage;
    PipelineLists l =
        zero_bubble_make(how.schedule, x->p, row->m, v, &stage, (size_t)(how.limit * x->p));
    for (int kind = 0; kind < 3; kind++) chunk.step[kind] /= v;
    PipelineRun run;
    Error err;
    bool ok = list_run(&run, &l, PIPELINE_BUFFERS, &chunk, &err);
    double bubble = 1 - run.busy / x->p / run.longest;
    list_run_free(&run, &l);
    pipeline_lists_free(&l);
    return ok ? bubble : NAN;
}

static bool row_of_paper(const Bench *b, const Model *x, const Published *row, Error *err) {
    static const How hows[] = {{SCHEDULE_1F1B, 1, 0},
                               {SCHEDULE_INTERLEAVED, 0, 0},
                               {SCHEDULE_ZB_H1, 1, 0},
                               {SCHEDULE_ZB_AUTO, 1, 1},
                               {SCHEDULE_ZB_AUTO, 1, 2}};
    Bubble bubble = {0}, halves = {0};
    printf("| %s | %d | %d |", x->name, x->p, row->m);
    for (int i = 0; i < 5; i++) {
        if (!run(b, x, x->p, row->m, hows[i], err) || !measure(b, x->p, &bubble, err)) return false;
        if (hows[i].schedule == SCHEDULE_ZB_H1) halves = bubble;
        printf(" %.1f, %.2f, %.2f |", 100 * bubble.one, 100 * of_list(x, row, hows[i]),
               row->rate[i]);
    }
    printf(" %.1f | %.2f : %.2f, %.2f : %.2f |\n", 100 * bubble.all,
           halves.step[1] / halves.step[0], halves.step[2] / halves.step[0],
           row->ms[1] / row->ms[0], row->ms[2] / row->ms[0]);
    return true;
}

static bool print_paper(const Bench *b, Error *err) {
    printf(
        "| model | p | m | 1f1b | interleaved | zb-h1 | zb-auto, p | zb-auto, 2p | until all end "
        "| B : W |\n"
        "|---|---|---|---|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof paper / sizeof *paper; i++)
        for (int k = 0; k < 3 && wanted(b, paper[i].model.name); k++)
            if (!row_of_paper(b, &paper[i].model, &paper[i].row[k], err)) return false;
    return true;
}

// ---- chunks in a V ---------------------------------------------------------------------

// Prints the idle share of all stages until the last one ends, and the most micro-batches that a
// stage holds, on the paper's times. A chunk has half of a stage's.
static bool v_cell(const Model *x, const Published *row, Schedule schedule, Error *err) {
    bool folded = schedule >= SCHEDULE_ZB_V;
    int v = folded ? 2 : 1;
    PipelineTimes times = {{row->ms[0] / v, row->ms[1] / v, row->ms[2] / v}, row->ms[3], NULL};
    PipelineLists l = folded ? v_make(schedule, x->p, row->m, &times)
                             : zero_bubble_make(schedule, x->p, row->m, v, &times,
                                                2 * (size_t)x->p);
    PipelineRun run;
    bool ok = list_run(&run, &l, PIPELINE_BUFFERS, &times, err);
    size_t most = 0;
    for (int s = 0; ok && s < x->p; s++) {
        size_t held = pipeline_slots(&l, s, NULL);
        if (held > most) most = held;
    }
    if (ok)
        printf(" %.1f (%g) |", share(list_run_bubble(&run, x->p)), (double)most / v);
    list_run_free(&run, &l);
    pipeline_lists_free(&l);
    return ok;
}

static bool print_v(Error *err) {
    static const Schedule schedules[] = {SCHEDULE_1F1B, SCHEDULE_ZB_H1,  SCHEDULE_ZB_AUTO,
                                         SCHEDULE_ZB_V, SCHEDULE_V_HALF, SCHEDULE_DUALPIPE_V};
    enum { COUNT = sizeof schedules / sizeof *schedules };
    printf("| model | p | m | F : B : W |");
    for (int i = 0; i < COUNT; i++) printf(" %s |", pipeline_schedule_name(schedules[i]));
    printf("\n|---|---|---|---|");
    for (int i = 0; i < COUNT; i++) printf("---|");
    putchar('\n');
    for (size_t i = 0; i < sizeof paper / sizeof *paper; i++)
        for (int k = 0; k < 3; k++) {
            const Published *row = &paper[i].row[k];
            printf("| %s | %d | %d | 1 : %.2f : %.2f |", paper[i].model.name, paper[i].model.p,
                   row->m, row->ms[1] / row->ms[0], row->ms[2] / row->ms[0]);
            for (int j = 0; j < COUNT; j++)
                if (!v_cell(&paper[i].model, row, schedules[j], err)) return false;
            putchar('\n');
        }
    return true;
}

int main(int argc, char **argv) {
    static const char usage[] =
        "usage: bubbles formulas|paper BUILD CLUSTER.json [ROWS]\n"
        "       bubbles v\n";
    tool_begin(argc, argv, usage);
    if (argc == 2 && strcmp(argv[1], "v") == 0) {
        Error err;
        if (print_v(&err)) return 0;
        return fprintf(stderr, "bubbles: %s\n", err.text), 1;
    }
    bool formulas = argc > 1 && strcmp(argv[1], "formulas") == 0,
         published = argc > 1 && strcmp(argv[1], "paper") == 0;
    if ((!formulas && !published) || argc < 4 || argc > 5)
        return fputs(usage, stderr), 2;
    Bench b = {argv[2], argv[3], argc > 4 ? argv[4] : NULL, ""};
    Error err;
    int file = temporary_file(b.trace, "bubbles", &err);
    bool ok = file >= 0 && (formulas ? print_formulas(&b, &err) : print_paper(&b, &err));
    if (file >= 0) close(file), remove(b.trace);
    if (!ok) fprintf(stderr, "bubbles: %s\n", err.text);
    return ok ? 0 : 1;
}
