// schedule.c: a playground for pipeline schedules. Proves a list of steps or refuses it with the
// reason. Prints its time and memory in virtual time.
//
//   schedule [flags] 'F0 F1 B0 B1; F0 B0 F1 B1'     a list, one line (or ;) for each stage
//   schedule [flags] doc/schedules/zb-h1.txt        the same from a file
//   schedule --stages 4 --micros 8 zb-h1            a schedule by its name
//   schedule --table                                every schedule for p of 4, 8, 16 and m of p,
//                                                   2p, 4p, in Markdown
//
// pipeline_parse (llmc/pipeline.h) reads lists.
#include <limits.h>

#include "dev/plot/pipeline_run.h"
#include "dev/plot/svg.h"
#include "dev/plot/tool.h"

static const char usage[] =
    "usage: schedule [--stages P] [--micros M] [--virtual V] [--forward X] [--backward X] "
    "[--weight X]\n"
    "                [--transfer X] [--limit N] [--trace FILE.json] [--list] LIST|FILE|NAME, or "
    "schedule --table\n"
    "  LIST             'F0 F1 B0 B1; F0 B0 F1 B1': a line (or ;) for each stage; F, B or W with "
    "a micro-batch\n"
    "  FILE             the same in a file\n"
    "  NAME             gpipe, 1f1b, interleaved, zb-h1, zb-auto, and in a V zb-v, v-half or\n"
    "                   dualpipe-v; needs --stages and --micros\n"
    "  --forward X      what a chunk's forward costs (default 1), the input half of its backward "
    "(--backward), the\n"
    "                   weight half (--weight), and a message (--transfer, default 0)\n"
    "  --limit N        micro-batches that a stage may hold under zb-auto (default 2 P)\n"
    "  --trace FILE     what ran, for the timeline tool\n"
    "  --list           print the list, as a FILE holds it\n";

// The command line.
typedef struct {
    long p, m, v, limit;
    PipelineTimes times;
    const char *trace, *what;
    bool list, table;
} Request;

static int refuse(const char *text) {
    fprintf(stderr, "refused: %s\n", text);
    return 1;
}

static bool parse_request(int argc, char **argv, Request *r) {
    const PlotFlag flags[] = {{"stages", PLOT_INTEGER, &r->p, 1, 1024},
                              {"micros", PLOT_INTEGER, &r->m, 1, 65536},
                              {"virtual", PLOT_INTEGER, &r->v, 1, 1024},
                              {"limit", PLOT_INTEGER, &r->limit, 1, 65536},
                              {"forward", PLOT_NUMBERS, &r->times.step[STEP_FORWARD], 1, 0},
                              {"backward", PLOT_NUMBERS, &r->times.step[STEP_BACKWARD], 1, 0},
                              {"weight", PLOT_NUMBERS, &r->times.step[STEP_WEIGHT], 1, 0},
                              {"transfer", PLOT_NUMBERS, &r->times.transfer, 1, 0},
                              {"trace", PLOT_TEXT, &r->trace, 0, 0},
                              {"list", PLOT_SWITCH, &r->list, 0, 0},
                              {"table", PLOT_SWITCH, &r->table, 0, 0}};
    bool good = plot_flags("schedule", argc, argv, flags, 11);
    r->what = optind < argc ? argv[optind] : NULL;
    good = good && r->times.step[0] + r->times.step[1] + r->times.step[2] > 0;
    return good && (r->table ? optind == argc : optind + 1 == argc);
}

// Makes the lists that the request names: a schedule's name, a file, or a list itself.
static bool make_lists(const Request *r, PipelineLists *l, Error *err) {
    memset(l, 0, sizeof *l);
    for (int s = 0; s < SCHEDULE_COUNT; s++) {
        if (strcmp(r->what, pipeline_schedule_name((Schedule)s)) != 0) continue;
        if (!r->p || !r->m)
            return error_set(err, "%s needs --stages and --micros (of make schedule: P=4 M=8)",
                             r->what);
        bool folded = s >= SCHEDULE_ZB_V;
        long v = r->v ? r->v : folded || s == SCHEDULE_INTERLEAVED ? 2 : 1;
        if (folded) {
            if (!v_check((Schedule)s, (int)r->p, (int)r->m, (int)v, err)) return false;
            *l = v_make((Schedule)s, (int)r->p, (int)r->m, &r->times);
            return true;
        }
        if (!pipeline_check((Schedule)s, (int)r->p, (int)r->m, (int)v, err)) return false;
        *l = zero_bubble_make((Schedule)s, (int)r->p, (int)r->m, (int)v, &r->times,
                              (size_t)(r->limit ? r->limit : 2 * r->p));
        return true;
    }
    bool is_there = access(r->what, F_OK) == 0, is_text = !is_there && strpbrk(r->what, " ;\n");
    if (!is_there && !strpbrk(r->what, " ;/.\n0123456789")) {
        const char *names[SCHEDULE_COUNT];
        for (int s = 0; s < SCHEDULE_COUNT; s++) names[s] = pipeline_schedule_name((Schedule)s);
        return error_set(err, "there is no schedule '%s': did you mean %s?", r->what,
                         tool_nearest(r->what, names, SCHEDULE_COUNT));
    }
    if (!(is_text ? pipeline_parse("the list", r->what, l, err) : pipeline_read(r->what, l, err)))
        return false;
    if (r->p && r->p != l->p)
        return error_set(err, "the list has %d stages, and --stages is %ld", l->p, r->p);
    return !r->m || r->m == l->m ||
           error_set(err, "the list has %d micro-batches, and --micros is %ld", l->m, r->m);
}

static void print_lists(const PipelineLists *l) {
    for (int s = 0; s < l->p; s++)
        for (size_t i = 0; i < l->counts[s]; i++) {
            PipelineStep step = l->steps[s][i];
            printf("%c%d", "FBW"[step.kind], step.micro);
            if (l->v > 1) printf(".%d", step.chunk);
            putchar(i + 1 < l->counts[s] ? ' ' : '\n');
        }
}

static void print_report(const PipelineLists *l, const PipelineRun *run) {
    printf("%5s %6s %10s %10s %10s\n", "stage", "steps", "in flight", "own span", "idle in it");
    double busy = run->busy / l->p;  // every stage has the same work
    for (int s = 0; s < l->p; s++) {
        double span = list_run_span(run, l, s);
        printf("%5d %6zu %10zu %10g %10g\n", s, l->counts[s], pipeline_slots(l, s, NULL), span,
               span - busy);
    }
    printf("proved: %d stages, %d micro-batches, %d chunk%s a stage\n", l->p, l->m, l->v,
           l->v > 1 ? "s" : "");
    printf("bubble: %.2f%% of compute time (%g of %g)", 100 * list_run_bubble(run, l->p),
           run->end - busy, busy);
    printf("; 1f1b has %.2f%%\n", 100 * pipeline_bubble(l->p, l->m, 1));
}

// ---- the table -------------------------------------------------------------------------

// A column of the tables. formula: the text of the formula for the bubble over the ideal time,
// or NULL if there is none. It is a multiple of (p-1)/m: 1, 1/v, or zb-h1's (F+B-W)/(F+B+W).
typedef struct {
    const char *name, *formula;
    Schedule schedule;
    int v, limit;  // chunks; zb-auto: micro-batches that a stage may hold, as multiple of p
} TableColumn;

static const TableColumn columns[] = {
    {"gpipe", NULL, SCHEDULE_GPIPE, 1, 0},
    {"1f1b", "(p-1)/m", SCHEDULE_1F1B, 1, 0},
    {"interleaved", "(p-1)/(v m)", SCHEDULE_INTERLEAVED, 2, 0},
    {"zb-h1", "(p-1)(F+B-W)/(m(F+B+W))", SCHEDULE_ZB_H1, 1, 0},
    {"zb-auto, p", NULL, SCHEDULE_ZB_AUTO, 1, 1},
    {"zb-auto, 2p", NULL, SCHEDULE_ZB_AUTO, 1, 2},
};
enum { COLUMNS = sizeof columns / sizeof *columns };

// Prints the bubble of all stages, which wait for each other at the end. With `alone` it takes
// only the stage with the longest time from its own first step to its own last. A chunk of v has
// 1/v of a stage's work.
static bool table_cell(const TableColumn *column, int p, int m, const double *cost, bool alone,
                       Error *err) {
    PipelineTimes stage = {{cost[0], cost[1], cost[2]}, 0, NULL}, chunk = stage;
    PipelineLists l =
        zero_bubble_make(column->schedule, p, m, column->v, &stage, (size_t)(column->limit * p));
    bool ok = pipeline_prove(&l, PIPELINE_BUFFERS, err);
    if (ok) {
        double sum = cost[0] + cost[1] + cost[2], formula = pipeline_bubble(p, m, column->v);
        for (int kind = 0; kind < 3; kind++) chunk.step[kind] /= column->v;
        PipelineRun run;
        ok = list_run(&run, &l, PIPELINE_BUFFERS, &chunk, err);
        printf(" %.2f |", 100 * (alone ? run.longest / (m * sum) - 1 : list_run_bubble(&run, p)));
        if (column->schedule == SCHEDULE_ZB_H1) formula *= (cost[0] + cost[1] - cost[2]) / sum;
        if (!alone && column->formula) printf(" %.2f |", 100 * formula);
        list_run_free(&run, &l);
    }
    pipeline_lists_free(&l);
    return ok;
}

static int print_table(const double *cost) {
    Error err;
    for (int alone = 0; alone < 2; alone++) {
        printf(
            "%s, %% of compute time; F = %g, B = %g, W = %g\n\n| p | m |",
            alone ? "The stage that takes longest, alone" : "All stages until the last one ends",
            cost[0], cost[1], cost[2]);
        int width = 2;
        for (int i = 0; i < COLUMNS; i++, width++) {
            printf(" %s |", columns[i].name);
            if (!alone && columns[i].formula) width += printf(" %s |", columns[i].formula) > 0;
        }
        putchar('\n');
        for (int i = 0; i < width; i++) printf("|---");
        puts("|");
        for (int p = 4; p <= 16; p *= 2)
            for (int m = p; m <= 4 * p; m *= 2) {
                printf("| %d | %d |", p, m);
                for (int i = 0; i < COLUMNS; i++)
                    if (!table_cell(&columns[i], p, m, cost, alone, &err)) return refuse(err.text);
                putchar('\n');
            }
        if (!alone) putchar('\n');
    }
    return 0;
}

int main(int argc, char **argv) {
    Request r = {.times = {.step = {1, 1, 1}}};
    tool_begin(argc, argv, usage);
    if (!parse_request(argc, argv, &r)) return fputs(usage, stderr), 2;
    if (r.table) return print_table(r.times.step);
    Error err;
    PipelineLists l;
    bool ok = make_lists(&r, &l, &err) && pipeline_prove(&l, PIPELINE_BUFFERS, &err);
    if (ok) {
        PipelineRun run;
        ok = list_run(&run, &l, PIPELINE_BUFFERS, &r.times, &err);
        if (r.list) print_lists(&l);
        print_report(&l, &run);
        if (r.trace && same_file_on_disk(r.trace, r.what)) {
            ok = error_set(&err, "--trace would overwrite %s, where the list is from", r.what);
        }
        ok = ok && (!r.trace || list_run_write(&run, &l, r.times.transfer, r.trace, &err));
        list_run_free(&run, &l);
    }
    pipeline_lists_free(&l);
    return ok ? 0 : refuse(err.text);
}
