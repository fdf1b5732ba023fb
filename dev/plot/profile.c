// profile.c: prints the parts of the training steps of a --trace file and their time, a row per
// rank. With --out draws them as an SVG, a stacked bar per rank.
//
//   profile [--skip N] [--title TEXT] [--width PIXELS] [--out FILE.svg] TRACE.json
//
// dev/plot/step_profile.h has the formulas.
#include <limits.h>

#include "dev/plot/step_profile.h"
#include "dev/plot/tool.h"
#include "dev/plot/trace_read.h"

enum { LEFT = 82, RIGHT = 84, TOP = 106, MAX_RANKS = 4096 };

// The colours of timeline.c: work is blue, sends are orange, collectives purple, idle is grey.
static const struct {
    const char *label, *fill, *ink;
} looks[PROFILE_PARTS] = {
    {"compute", "#2c5f9e", "#ffffff"},
    {"optimizer", "#e3a33b", "#3a2a08"},
    {"tensor communication", "#8a5ac2", "#ffffff"},
    {"pipeline wait", "#d9632f", "#ffffff"},
    {"data communication", "#2a9d8f", "#ffffff"},
    {"other idle", "#d5dce4", "#43505c"},
};

// Draws one bar with the percentages of its parts inside, with as many digits as there is room
// for.
static void draw_bar(FILE *out, const StepProfile *p, double y, double height, double scale,
                     double right) {
    double x = LEFT, end = LEFT;
    for (int part = 0; part < PROFILE_PARTS; part++, x = end) {
        double w = p->part[part] * scale, percent = p->wall > 0 ? 100 * p->part[part] / p->wall : 0;
        end = x + w;
        if (w < 0.1) continue;
        svg_rect(out, x, y, w, height, looks[part].fill, w > 3 ? "#ffffff" : NULL);
        double size = fmin(12.5, 0.62 * height);
        for (int digits = 1; digits >= 0; digits--) {
            char text[32];
            snprintf(text, sizeof text, "%.*f%%", digits, percent);
            if (1.1 * svg_text_width(text, size) + 6 > w) continue;
            svg_text(out, x + w / 2, y + height / 2 + 0.36 * size, size, 400, "middle",
                     looks[part].ink, "%s", text);
            break;
        }
    }
    svg_text(out, right + 74, y + height / 2 + 4.5, 12, 400, "end", SVG_INK, "%.1f%%",
             100 * profile_bubble(p));
}

static void draw_legend(FILE *out, const StepProfile *mean, double y, double right) {
    double x = LEFT;
    for (int part = 0; part < PROFILE_PARTS; part++) {
        if (mean->part[part] <= 0) continue;
        double width = 22 + 1.1 * svg_text_width(looks[part].label, 12) + 18;
        if (x > LEFT && x + width > right + RIGHT) x = LEFT, y += 20;
        svg_rect(out, x, y - 10, 16, 12, looks[part].fill, NULL);
        svg_text(out, x + 22, y, 12, 400, "start", SVG_INK, "%s", looks[part].label);
        x += width;
    }
    svg_text(out, LEFT, y + 24, SVG_SMALL, 400, "start", SVG_MUTED,
             "Communication is what the compute stream waited for; what overlaps with compute is "
             "not in the "
             "bars.");
    svg_text(
        out, LEFT, y + 41, SVG_SMALL, 400, "start", SVG_MUTED,
        "The bubble is the pipeline's idle time over its working time, in theory (p-1)/(v m).");
}

static void draw(FILE *out, const StepProfile *profile, int ranks, const char *title,
                 double width) {
    StepProfile mean = profile_mean(profile, ranks);
    const double *part = mean.part, box = ranks <= 16 ? 30 : 18,
                 row = box + (ranks <= 16 ? 9 : 4), gap = 12;
    double longest = mean.wall, bottom = TOP + (ranks + 1) * row + gap, right = width - RIGHT;
    for (int r = 0; r < ranks; r++) longest = fmax(longest, profile[r].wall);
    double scale = (right - LEFT) / fmax(longest, 1e-9),
           percent = mean.wall > 0 ? 100 / mean.wall : 0;
    if (!title) title = "Where a training step spends its time";
    svg_begin(out, width, bottom + 118, title);
    svg_text(out, LEFT, 28, 17, 700, "start", SVG_INK, "%s", title);
    char text[160], shares[160];
    snprintf(text, sizeof text, "mean of %zu step%s on %d rank%s: %.*f ms", mean.steps,
             mean.steps > 1 ? "s" : "", ranks, ranks > 1 ? "s" : "", mean.wall < 10 ? 3 : 1,
             mean.wall);
    snprintf(shares, sizeof shares,
             "compute %.1f%%, exposed communication %.1f%%, optimizer %.1f%%, other %.1f%%",
             percent * part[PROFILE_COMPUTE],
             percent * (part[PROFILE_TENSOR] + part[PROFILE_PIPELINE] + part[PROFILE_DATA]),
             percent * part[PROFILE_OPTIMIZER], percent * part[PROFILE_OTHER]);
    svg_text(out, LEFT, 50, 13, 400, "start", SVG_MUTED, "%s", text);
    svg_text(out, LEFT, 69, 13, 400, "start", SVG_MUTED, "%s", shares);
    svg_text(out, right + 74, TOP - 14, SVG_SMALL, 400, "end", SVG_MUTED, "bubble");

    // Axis: light lines behind the bars, labels below
    double unit = longest < 1 ? 1e-3 : 1;
    SvgAxis axis = svg_axis(0, longest / unit, 10);
    for (int i = 0; i < axis.count; i++) {
        double at = i * axis.step, x = LEFT + at * unit * scale;
        svg_line(out, x, TOP - 6, x, bottom + 2, SVG_GRID, 1);
        svg_text(out, x, bottom + 18, SVG_SMALL, 400, "middle", SVG_MUTED, "%.*f",
                 svg_axis_digits(axis.step), at);
    }
    svg_text(out, right + 14, bottom + 18, SVG_SMALL, 400, "start", SVG_MUTED,
             unit == 1 ? "ms" : "us");

    for (int r = 0; r <= ranks; r++) {
        double y = TOP + r * row + (r == ranks ? gap : 0), size = ranks <= 16 ? 13 : SVG_SMALL;
        char name[32];
        snprintf(name, sizeof name, r < ranks ? "rank %d" : "mean", r);
        svg_text(out, LEFT - 12, y + box / 2 + 0.36 * size, size, 700, "end", SVG_INK, "%s", name);
        draw_bar(out, r < ranks ? &profile[r] : &mean, y, box, scale, right);
    }
    svg_line(out, LEFT - 60, TOP + ranks * row + 1.5, right + 74, TOP + ranks * row + 1.5,
             "#aeb8c2", 1);
    draw_legend(out, &mean, bottom + 52, right);
    svg_end(out);
}

// Counts the ranks and finds the first step to look at: `skip` after the first one that has a
// backward.
static bool choose_steps(const TraceList *trace, const char *path, long skip, int *ranks,
                         long *first, Error *err) {
    *ranks = 0;
    *first = -1;
    long last = -1;
    for (size_t i = 0; i < trace->count; i++) {
        const TraceEvent *e = &trace->events[i];
        if (e->rank >= *ranks) *ranks = e->rank + 1;
        if (strcmp(e->kind, "backward") != 0 || e->stream != 0 || e->step < 0) continue;
        if (*first < 0 || e->step < *first) *first = e->step;
        if (e->step > last) last = e->step;
    }
    if (*ranks > MAX_RANKS)
        return error_set(err, "%s has %d ranks; at most %d are drawn", path, *ranks, MAX_RANKS);
    if (*first < 0) return error_set(err, "no step in %s has a backward on track 0", path);
    if (skip > last - *first)
        return error_set(err, "%s holds steps %ld to %ld: nothing is left after --skip %ld", path,
                         *first, last, skip);
    *first += skip;
    return true;
}

int main(int argc, char **argv) {
    static const char usage[] =
        "usage: profile [--skip N] [--title TEXT] [--width PIXELS] [--out FILE.svg] TRACE.json\n"
        "  --skip N    training steps at the start to leave out, as a warm-up (default 1)\n"
        "  --out FILE  where to draw; without it the table alone is printed\n";
    long skip = 1, width = SVG_WIDTH, first;
    const char *title = NULL, *path = NULL;
    const PlotFlag flags[] = {{"skip", PLOT_INTEGER, &skip, 0, LONG_MAX},
                              {"title", PLOT_TEXT, &title, 0, 0},
                              {"width", PLOT_INTEGER, &width, 300, 20000},
                              {"out", PLOT_TEXT, &path, 0, 0}};
    tool_begin(argc, argv, usage);
    if (!plot_flags("profile", argc, argv, flags, 4) || optind + 1 != argc)
        return fputs(usage, stderr), 2;
    Error err;
    TraceList trace = {0};
    int ranks;
    if (!trace_read(argv[optind], &trace, &err) ||
        !choose_steps(&trace, argv[optind], skip, &ranks, &first, &err)) {
        trace_free(&trace);
        return tool_fail("profile", err.text);
    }
    StepProfile *profile = malloc((size_t)ranks * sizeof *profile);
    bool ok = profile && profile_steps(trace.events, trace.count, ranks, (size_t)first, profile);
    if (!ok) error_set(&err, "cannot profile %s: absurd times, or no memory", argv[optind]);
    trace_free(&trace);
    FILE *out = ok && path ? svg_open(path, argv + optind, 1, &err) : NULL;
    ok = ok && (out || !path);
    if (ok) profile_print(stdout, profile, ranks);
    if (out) {
        draw(out, profile, ranks, title, (double)width);
        ok = svg_close(out, path, &err);
    }
    if (ok && fflush(stdout) != 0)
        ok = error_set(&err, "cannot print the table: %s", strerror(errno));
    free(profile);
    return ok ? 0 : tool_fail("profile", err.text);
}
