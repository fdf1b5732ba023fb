// study.c: simulates the trade-offs of PTD-P (Narayanan et al. 2021), section 5. Draws figures 11
// to 18, with lines for the model of step.h and dots for published runs. Also shows the limit of
// growing the number of GPUs at a constant batch.
//
//   study ROWS.csv FOLDER          draws FOLDER/study-*.svg
//   study --table ROWS.csv         prints dev/scale/README.md's table of figures and of growth
#include "dev/plot/svg.h"
#include "dev/plot/tool.h"
#include "dev/scale/rows.h"
#include "llmc/host/file.h"

enum { POINTS_MAX = 24, SERIES_MAX = 4 };

typedef struct {
    double x, ours, published;  // published: 0 if it is not known
} StudyPoint;

typedef struct {
    char name[64];
    StudyPoint points[POINTS_MAX];
    size_t count;
} Series;

typedef struct {
    const char *file, *title, *x_label, *y_label;
    bool logarithmic;  // the x axis
    Series series[SERIES_MAX];
    size_t count;
} Chart;

// ---- values ----------------------------------------------------------------------------

// Returns the TFLOP/s of a GPU, by the formula of PTD-P's section 3.5, which counts a full
// recomputation.
static double teraflops(const StepLayout *r, double seconds) {
    double B = (double)r->global_batch, s = (double)r->T, l = (double)r->layers, h = (double)r->C;
    double V = (double)r->vocabulary;
    double flops = 96 * B * s * l * h * h * (1 + s / (6 * h) + V / (16 * l * h));
    return flops / seconds / (double)r->ranks / 1e12;
}

static double sequences(const StepLayout *r, double seconds) {
    return (double)r->global_batch / seconds;
}

typedef double (*Value)(const StepLayout *r, double seconds);

static double simulate(const Cluster *c, const StepLayout *r, Value value) {
    StepTime time;
    Error err;
    if (step_simulate(c, r, &time, &err)) return value(r, time.seconds);
    fprintf(stderr, "study: %s\n", err.text);
    exit(1);
}

static void add_point(Series *s, double x, double ours, double published) {
    if (s->count == POINTS_MAX) return;
    StudyPoint point = {x, ours, published};
    s->points[s->count++] = point;
}

__attribute__((format(printf, 2, 3))) static Series *add_series(Chart *chart, const char *format,
                                                                ...) {
    Series *s = &chart->series[chart->count++];
    va_list args;
    va_start(args, format);
    vsnprintf(s->name, sizeof s->name, format, args);
    va_end(args);
    return s;
}

// ---- drawing ---------------------------------------------------------------------------

static double chart_x(const Chart *chart, double x) { return chart->logarithmic ? log2(x) : x; }

static void draw(const Chart *chart, FILE *out) {
    static const char *const colors[SERIES_MAX] = {"#1769aa", "#c2571a", "#2e7d4f", "#7b4fa0"};
    const double left = 64, top = 52, width = 440, height = 250, legend = 20;
    double low = INFINITY, high = -INFINITY, most = 0;
    for (size_t i = 0; i < chart->count; i++)
        for (size_t k = 0; k < chart->series[i].count; k++) {
            const StudyPoint *p = &chart->series[i].points[k];
            low = fmin(low, chart_x(chart, p->x)), high = fmax(high, chart_x(chart, p->x));
            most = fmax(most, fmax(p->ours, p->published));
        }
    if (high <= low) high = low + 1;
    double step = svg_axis_step(most, 5), range = step * ceil(most / step);
    svg_begin(out, left + width + 24, top + height + 54 + legend * (double)chart->count,
              chart->title);
    svg_text(out, left, 20, 14, 700, "start", SVG_INK, "%s", chart->title);
#define AT_X(x) (left + width * (chart_x(chart, x) - low) / (high - low))
#define AT_Y(y) (top + height * (1 - (y) / range))
    for (double y = 0; y <= range * 1.0001; y += step) {
        svg_line(out, left, AT_Y(y), left + width, AT_Y(y), SVG_GRID, 1);
        svg_text(out, left - 8, AT_Y(y) + 4, 11, 400, "end", SVG_MUTED, "%.*f",
                 svg_axis_digits(step), y);
    }
    double last = -1e9;
    for (size_t i = 0; i < chart->count; i++)
        for (size_t k = 0; k < chart->series[i].count; k++) {
            double x = chart->series[i].points[k].x;
            bool fresh = true;
            for (size_t j = 0; j < i; j++)
                for (size_t n = 0; n < chart->series[j].count; n++)
                    fresh = fresh && chart->series[j].points[n].x != x;
            if (!fresh || (i == 0 && AT_X(x) - last < 26)) continue;
            if (i == 0) last = AT_X(x);
            svg_text(out, AT_X(x), top + height + 16, 11, 400, "middle", SVG_MUTED, "%g", x);
        }
    svg_text(out, left + width / 2, top + height + 34, 11, 400, "middle", SVG_INK, "%s",
             chart->x_label);
    svg_text(out, left, top - 8, 11, 400, "start", SVG_INK, "%s", chart->y_label);
    for (size_t i = 0; i < chart->count; i++) {
        const Series *s = &chart->series[i];
        bool dots = false;
        for (size_t k = 0; k < s->count; k++) {
            const StudyPoint *p = &s->points[k];
            if (k)
                svg_line(out, AT_X(p[-1].x), AT_Y(p[-1].ours), AT_X(p->x), AT_Y(p->ours),
                         colors[i], 2);
            if (p->published <= 0) continue;
            dots = true;
            fprintf(out, "<circle cx=\"%.2f\" cy=\"%.2f\" r=\"4\" fill=\"%s\"/>\n", AT_X(p->x),
                    AT_Y(p->published), colors[i]);
        }
        double y = top + height + 52 + legend * (double)i;
        svg_line(out, left, y - 4, left + 24, y - 4, colors[i], 2);
        if (dots)
            fprintf(out, "<circle cx=\"%.2f\" cy=\"%.2f\" r=\"4\" fill=\"%s\"/>\n", left + 12,
                    y - 4, colors[i]);
        svg_text(out, left + 32, y, 11, 400, "start", SVG_INK, "%s%s", s->name,
                 dots ? " (dots: Narayanan et al. 2021)" : "");
    }
#undef AT_X
#undef AT_Y
    svg_end(out);
}

// ---- the figures -----------------------------------------------------------------------

typedef struct {
    const Cluster *selene, *a100, *h100;
    const Row *rows;
    size_t count;
} Study;

// Adds one line for all rows whose id is prefix, anything, suffix. x: a member of the layout.
static void from_rows(const Study *s, Series *series, const char *prefix, const char *suffix,
                      size_t member, Value value) {
    for (size_t i = 0; i < s->count; i++) {
        const Row *row = &s->rows[i];
        if (row->bad) continue;
        size_t n = strlen(row->id), tail = strlen(suffix);
        if (strncmp(row->id, prefix, strlen(prefix)) != 0 || n < tail ||
            strcmp(row->id + n - tail, suffix) != 0)
            continue;
        double x = (double)*(const size_t *)((const char *)&row->run + member);
        add_point(series, x, simulate(s->selene, &row->run, value), value(&row->run, row->seconds));
    }
}

static StepLayout layout_of(size_t layers, size_t C, size_t NH, size_t batch, size_t micro,
                            size_t t, size_t p, size_t d) {
    StepLayout r;
    memset(&r, 0, sizeof r);
    r.ranks = t * p * d, r.layers = layers, r.C = C, r.NH = NH, r.T = 2048, r.vocabulary = 51200;
    r.global_batch = batch, r.micro_batch = micro, r.t = t, r.p = p, r.d = d, r.v = 1;
    r.recompute = LAYER_WHOLE, r.scatter_gather = true, r.schedule = SCHEDULE_1F1B;
    return r;
}

#define MEMBER(name) offsetof(StepLayout, name)

static Chart figure(const Study *s, int number) {
    Chart c;
    memset(&c, 0, sizeof c);
    c.y_label = "TFLOP/s of a GPU", c.logarithmic = true;
    if (number == 11) {
        c.file = "study-11", c.title = "PTD-P, figure 11: pipelines grow with the model",
        c.x_label = "stages p (8 GPUs each, 3 layers)";
        from_rows(s, add_series(&c, "batch 8"), "ptd-f11-", "-B8", MEMBER(p), teraflops);
        from_rows(s, add_series(&c, "batch 128"), "ptd-f11-", "-B128", MEMBER(p), teraflops);
    } else if (number == 12) {
        c.file = "study-12", c.title = "PTD-P, figure 12: interleaving, 175B on 96 GPUs",
        c.x_label = "batch", c.logarithmic = false;
        from_rows(s, add_series(&c, "1F1B"), "ptd-f12-v1", "", MEMBER(global_batch), teraflops);
        from_rows(s, add_series(&c, "interleaved"), "ptd-f12-v4", "", MEMBER(global_batch),
                  teraflops);
    } else if (number == 13) {
        c.file = "study-13", c.title = "PTD-P, figure 13: tensor against pipeline, 162B on 64 GPUs",
        c.x_label = "t (p = 64 / t)";
        for (size_t batch = 32; batch <= 128; batch *= 4) {
            Series *line = add_series(&c, "batch %zu", batch);
            for (size_t t = 2; t <= 32; t *= 2) {
                StepLayout r = layout_of(32, 20480, 128, batch, 1, t, 64 / t, 1);
                add_point(line, (double)t, simulate(s->selene, &r, teraflops), 0);
            }
        }
    } else if (number == 14) {
        c.file = "study-14", c.title = "PTD-P, figure 14: pipeline against data, 5.9B on 64 GPUs",
        c.x_label = "p (d = 64 / p)";
        from_rows(s, add_series(&c, "batch 32"), "ptd-f14-", "-B32", MEMBER(p), teraflops);
        from_rows(s, add_series(&c, "batch 512"), "ptd-f14-", "-B512", MEMBER(p), teraflops);
    } else if (number == 15) {
        c.file = "study-15", c.title = "PTD-P, figure 15: tensor against data, 5.9B on 64 GPUs",
        c.x_label = "t (d = 64 / t)";
        for (size_t batch = 32; batch <= 512; batch *= 4) {
            Series *line = add_series(&c, "batch %zu", batch);
            for (size_t t = 2; t <= 32; t *= 2) {
                StepLayout r = layout_of(32, 3840, 32, batch, 1, t, 1, 64 / t);
                add_point(line, (double)t, simulate(s->selene, &r, teraflops), 0);
            }
        }
    } else if (number == 16) {
        c.file = "study-16", c.title = "PTD-P, figure 16: micro-batch, 91B on 64 GPUs",
        c.x_label = "micro-batch";
        from_rows(s, add_series(&c, "batch 128"), "ptd-f16-", "-B128", MEMBER(micro_batch),
                  teraflops);
        from_rows(s, add_series(&c, "batch 512"), "ptd-f16-", "-B512", MEMBER(micro_batch),
                  teraflops);
    } else if (number == 17) {
        c.file = "study-17", c.title = "PTD-P, figure 17: recomputation, 145B on 128 GPUs",
        c.x_label = "batch";
        c.y_label = "sequences a second";
        from_rows(s, add_series(&c, "recomputed"), "ptd-f17-rec", "", MEMBER(global_batch),
                  sequences);
        from_rows(s, add_series(&c, "kept"), "ptd-f17-norec", "", MEMBER(global_batch), sequences);
    } else if (number == 18) {
        c.file = "study-18", c.title = "PTD-P, figure 18: scatter/gather, 175B on 96 GPUs",
        c.x_label = "batch", c.logarithmic = false;
        from_rows(s, add_series(&c, "a tensor rank sends all"), "ptd-f18-nosg", "",
                  MEMBER(global_batch), teraflops);
        from_rows(s, add_series(&c, "a tensor rank sends 1/t"), "ptd-f12-v4", "",
                  MEMBER(global_batch), teraflops);
    }
    return c;
}

// Returns a layout of 175B, batch 1536, t = 8 and p = 8. The figure has tokens/s of a GPU as the
// data ranks grow, on the trainers' own software.
static StepLayout grown(size_t d) {
    StepLayout r = layout_of(96, 12288, 96, 1536, 1, 8, 8, d);
    size_t m = 1536 / d;
    r.recompute = LAYER_KEEPS, r.sequence_parallel = true, r.zero = true;
    if (m % 8 == 0) r.v = 12, r.schedule = SCHEDULE_INTERLEAVED;
    return r;
}

static double tokens_each(const StepLayout *r, double seconds) {
    return (double)r->global_batch * (double)r->T / seconds / (double)r->ranks;
}

static Chart growth(const Study *s) {
    Chart c;
    memset(&c, 0, sizeof c);
    c.file = "study-growth", c.title = "175B, batch 1536, t = p = 8: more data ranks",
    c.x_label = "GPUs";
    c.y_label = "tokens/s of a GPU", c.logarithmic = true;
    const Cluster *clusters[] = {s->a100, s->h100};
    for (int k = 0; k < 2; k++) {
        Series *line = add_series(&c, "%s", clusters[k]->name);
        for (size_t d = 1; d <= 256; d *= 2) {
            StepLayout r = grown(d);
            add_point(line, (double)r.ranks, simulate(clusters[k], &r, tokens_each), 0);
        }
    }
    return c;
}

// ---- tables ----------------------------------------------------------------------------

static void print_tables(const Study *s) {
    printf("| figure | line | x | ours | published |\n|---|---|---|---|---|\n");
    for (int number = 11; number <= 18; number++) {
        Chart c = figure(s, number);
        for (size_t i = 0; i < c.count; i++) {
            const Series *line = &c.series[i];
            // The ends of each line.
            size_t stride = line->count > 1 ? line->count - 1 : 1;
            for (size_t k = 0; k < line->count; k += stride) {
                const StudyPoint *p = &line->points[k];
                printf("| %d | %s | %g | %.*f | ", number, line->name, p->x, number == 17 ? 2 : 0,
                       p->ours);
                if (p->published > 0) printf("%.*f |\n", number == 17 ? 2 : 0, p->published);
                else printf("- |\n");
            }
        }
    }
    Chart c = growth(s);
    printf("\n| GPUs | micro-batches | v |");
    for (size_t i = 0; i < c.count; i++)
        printf(" %s: tokens/s of a GPU | of the first |", c.series[i].name);
    printf("\n|---|---|---|");
    for (size_t i = 0; i < c.count; i++) printf("---|---|");
    printf("\n");
    for (size_t k = 0; k < c.series[0].count; k++) {
        StepLayout r = grown((size_t)1 << k);
        printf("| %zu | %zu | %zu |", r.ranks, r.global_batch / r.d, r.v);
        for (size_t i = 0; i < c.count; i++) {
            const Series *line = &c.series[i];
            printf(" %.0f | %.0f%% |", line->points[k].ours,
                   100 * line->points[k].ours / line->points[0].ours);
        }
        printf("\n");
    }
}

static bool draw_file(const Chart *chart, const char *folder, Error *err) {
    char path[PATH_MAX];
    if (!path_print(path, err, "%s/%s.svg", folder, chart->file)) return false;
    FILE *out = fopen(path, "w");
    if (!out) return error_set(err, "cannot write %s: %s", path, strerror(errno));
    draw(chart, out);
    bool bad = ferror(out) != 0;
    if (fclose(out) != 0 || bad) return error_set(err, "cannot write %s", path);
    printf("%s\n", path);
    return true;
}

int main(int argc, char **argv) {
    static const char usage[] = "usage: study ROWS.csv FOLDER, or study --table ROWS.csv\n";
    tool_begin(argc, argv, usage);
    bool table = argc == 3 && strcmp(argv[1], "--table") == 0;
    if (argc != 3) return fputs(usage, stderr), 2;
    Error err;
    Cluster selene, a100, h100;
    Row *rows = NULL;
    size_t count = 0;
    bool ok = cluster_read(&selene, "dev/clusters/selene-2021.json", &err) &&
              cluster_read(&a100, "dev/clusters/dgx-a100.json", &err) &&
              cluster_read(&h100, "dev/clusters/dgx-h100.json", &err) &&
              rows_read(table ? argv[2] : argv[1], &rows, &count, &err);
    Study s = {&selene, &a100, &h100, rows, count};
    if (ok && table) print_tables(&s);
    for (int number = 11; number <= 18 && ok && !table; number++) {
        Chart c = figure(&s, number);
        ok = draw_file(&c, argv[2], &err);
    }
    if (ok && !table) {
        Chart c = growth(&s);
        ok = draw_file(&c, argv[2], &err);
    }
    free(rows);
    if (!ok) fprintf(stderr, "error: %s\n", err.text);
    return ok ? 0 : 2;
}
