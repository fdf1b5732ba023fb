// timeline.c: draws one training step of a --trace file as an SVG like the figures of the
// pipeline papers. It has a row per rank, and a box per forward, backward and weight step with
// its micro-batch. The measured bubble stands beside the formula of 1F1B, which has no weight
// steps.
//
//   timeline [--step N] [--pipeline P] [--title TEXT] [--width PIXELS] [--retime]
//            [--costs F,B,W] [--out FILE.svg] TRACE.json
//
// --retime keeps the place and the order of all steps and replaces their times. Every step takes
// the mean of its kind. With --costs it takes the given time of a forward, an input half and a
// weight half. Messages take nothing. Use this picture when ranks shared cores.
#include <cjson/cJSON.h>
#include <limits.h>

#include "dev/plot/pipeline_run.h"
#include "dev/plot/svg.h"
#include "dev/plot/tool.h"
#include "dev/plot/trace_read.h"
#include "llmc/pipeline_lists.h"
#include "llmc/host/trace.h"

// The lane of a kind: the row's boxes, or one of the thin lanes below them.
typedef enum { LANE_BOX, LANE_SEND, LANE_RECEIVE, LANE_COLLECTIVE, LANE_HIDDEN, LANE_COUNT } Lane;

typedef struct {
    const char *kind;
    Lane lane;
    unsigned dark, light;  // from the first chunk to the last
} KindStyle;

static const KindStyle styles[] = {
    {"forward", LANE_BOX, 0x2c5f9e, 0xa9cdf2},
    {"backward", LANE_BOX, 0x1f7a5c, 0x9fe0c4},
    {"weight", LANE_BOX, 0x7d9a2e, 0xd3e3a0},
    {"loss", LANE_BOX, 0x5b7089, 0x9fb0c4},
    {"optimizer", LANE_BOX, 0xe3a33b, 0xe3a33b},
    {"wait", LANE_HIDDEN, 0, 0},
    {"send", LANE_SEND, 0xd9632f, 0xd9632f},
    {"recv", LANE_RECEIVE, 0xf0bd9f, 0xf0bd9f},
    {"all-reduce", LANE_COLLECTIVE, 0x8a5ac2, 0x8a5ac2},
    {"reduce-scatter", LANE_COLLECTIVE, 0xa27bd3, 0xa27bd3},
    {"all-gather", LANE_COLLECTIVE, 0xc3a8e6, 0xc3a8e6},
    {"reduce", LANE_COLLECTIVE, 0xa27bd3, 0xa27bd3},
    {"broadcast", LANE_COLLECTIVE, 0xc3a8e6, 0xc3a8e6},
};
static const KindStyle other_style = {"other", LANE_BOX, 0xc2c9d1, 0xc2c9d1};

// A kind may say more after a space: "send activations" is drawn as send.
static const KindStyle *style_of(const char *kind) {
    size_t length = strcspn(kind, " ");
    for (size_t i = 0; i < sizeof styles / sizeof styles[0]; i++)
        if (strlen(styles[i].kind) == length && strncmp(kind, styles[i].kind, length) == 0)
            return &styles[i];
    return &other_style;
}

static bool is_forward(const TraceEvent *e) { return strcmp(e->kind, "forward") == 0; }
static bool is_backward(const TraceEvent *e) { return strcmp(e->kind, "backward") == 0; }
static bool is_weight(const TraceEvent *e) { return strcmp(e->kind, "weight") == 0; }
static bool is_step(const TraceEvent *e) { return is_forward(e) || is_backward(e) || is_weight(e); }
static bool is_loss(const TraceEvent *e) { return strcmp(e->kind, "loss") == 0; }
static StepKind step_kind(const TraceEvent *e) {
    return is_forward(e) ? STEP_FORWARD : is_backward(e) ? STEP_BACKWARD : STEP_WEIGHT;
}

typedef struct {
    TraceList trace;
    long step;
    int ranks, p, m, v;
    double start, end;   // of all events of the step, microseconds
    double first, last;  // of its forwards, losses, backwards and weight steps
    double bubble;       // idle over busy, between first and last
    double busiest;      // the same of the rank that has the most to do
    double mean[3];      // of a step, by StepKind
    bool split;          // it has weight steps
    double *busy;        // [ranks], between first and last
    bool lanes[LANE_COUNT];
} Timeline;

// Orders by rank, then start, the longer first, so that inner spans are drawn over outer ones.
static int compare_events(const void *a, const void *b) {
    const TraceEvent *x = a, *y = b;
    if (x->rank != y->rank) return x->rank < y->rank ? -1 : 1;
    if (x->start_us != y->start_us) return x->start_us < y->start_us ? -1 : 1;
    return x->duration_us > y->duration_us ? -1 : x->duration_us < y->duration_us;
}

enum { MAX_RANKS = 4096 };

// Keeps one step (LONG_MIN: the last that has a backward) and learns the sizes from it. stages 0:
// all ranks.
static bool choose_step(Timeline *t, long step, int stages, Error *err) {
    bool any = step != LONG_MIN;
    t->step = step;
    for (size_t i = 0; i < t->trace.count; i++) {
        const TraceEvent *e = &t->trace.events[i];
        if (e->rank + 1 > t->ranks) t->ranks = e->rank + 1;
        if (step == LONG_MIN && is_backward(e) && (!any || e->step > t->step))
            t->step = e->step, any = true;
    }
    if (!any) return error_set(err, "no step in this trace has a backward");
    size_t kept = 0;
    t->v = 1;
    for (size_t i = 0; i < t->trace.count; i++) {
        TraceEvent e = t->trace.events[i];
        if (e.step != t->step) continue;
        if (is_step(&e) && e.micro + 1 > t->m) t->m = e.micro + 1;
        if (is_step(&e) && e.chunk + 1 > t->v) t->v = e.chunk + 1;
        t->trace.events[kept++] = e;
    }
    t->trace.count = kept;
    if (t->m == 0)
        return error_set(
            err, "step %ld of this trace has no forward or backward of a micro-batch", t->step);
    if (t->ranks > MAX_RANKS || t->m > 65536 || t->v > 1024)
        return error_set(
            err, "step %ld has %d ranks, %d micro-batches and %d chunks: too many to draw",
            t->step, t->ranks, t->m, t->v);
    t->p = stages ? stages : t->ranks;
    if (t->ranks % t->p != 0)
        return error_set(err, "%d ranks are not a multiple of --pipeline %d stages", t->ranks,
                         t->p);
    qsort(t->trace.events, kept, sizeof(TraceEvent), compare_events);
    return true;
}

// Measures idle times. A rank is busy while any of its steps or losses runs. All ranks start
// together and end together, as a training step does. With unequal stages (the last one has the
// head and the loss) the others wait for the busiest. So only the busiest rank's idle time
// follows the formulas for equal stages.
static void measure(Timeline *t) {
    t->start = t->first = INFINITY;
    t->end = t->last = -INFINITY;
    memset(t->lanes, 0, sizeof t->lanes);
    memset(t->busy, 0, (size_t)t->ranks * sizeof *t->busy);
    size_t counts[3] = {0, 0, 0};
    // covered: up to where it is counted.
    double covered = 0, total = 0, losses = 0, most = 0, sums[3] = {0, 0, 0};
    for (size_t i = 0; i < t->trace.count; i++) {
        const TraceEvent *e = &t->trace.events[i];
        double from = e->start_us, to = from + e->duration_us;
        Lane lane = style_of(e->kind)->lane;
        t->lanes[lane] = true;
        if (lane != LANE_HIDDEN) {
            t->start = fmin(t->start, from);
            t->end = fmax(t->end, to);
        }
        if (!is_step(e) && !is_loss(e)) continue;
        t->first = fmin(t->first, from);
        t->last = fmax(t->last, to);
        if (t->busy[e->rank] == 0) covered = from;
        double added = fmax(0, to - fmax(from, covered));
        t->busy[e->rank] += added;
        covered = fmax(covered, to);
        total += added;
        if (is_loss(e)) losses += added;
        if (!is_step(e)) continue;
        sums[step_kind(e)] += e->duration_us;
        counts[step_kind(e)]++;
    }
    t->split = counts[STEP_WEIGHT] > 0;
    sums[STEP_BACKWARD] = total - losses - sums[STEP_FORWARD] - sums[STEP_WEIGHT];
    for (int kind = 0; kind < 3; kind++)
        t->mean[kind] = counts[kind] ? sums[kind] / counts[kind] : 0;
    t->bubble = total > 0 ? fmax(0, (t->ranks * (t->last - t->first) - total) / total) : 0;
    for (int r = 0; r < t->ranks; r++) most = fmax(most, t->busy[r]);
    t->busiest = most > 0 ? (t->last - t->first - most) / most : 0;
}

// Returns the events of a rank, which are sorted, and their number.
static TraceEvent *rank_events(const Timeline *t, int rank, size_t *count) {
    TraceEvent *first = t->trace.events, *end = first + t->trace.count;
    while (first < end && first->rank < rank) first++;
    for (*count = 0; first + *count < end && first[*count].rank == rank;) ++*count;
    return first;
}

// Runs the steps of one rank of each stage again in virtual time: the order of each rank stays.
static bool retime_ranks(Timeline *t, int place, Error *err) {
    int across = t->ranks / t->p;  // ranks a stage; the stage is the slowest index
    size_t pairs = (size_t)t->m * t->v;
    const PipelineTimes times = {{t->mean[0], t->mean[1], t->mean[2]}, 0, NULL};
    PipelineLists l = pipeline_empty(t->p, t->m, t->v);
    PipelineRun run = {NULL, 0, 0, 0};
    bool ok = true;
    for (int s = 0; s < t->p && ok; s++) {
        const TraceEvent *e = rank_events(t, s * across + place, &l.counts[s]);
        ok = l.counts[s] <= 3 * pairs ||
             error_set(err, "rank %d has too many steps", s * across + place);
        for (size_t i = 0; i < l.counts[s] && ok; i++)
            l.steps[s][i] =
                (PipelineStep){step_kind(&e[i]), e[i].micro, e[i].chunk < 0 ? 0 : e[i].chunk};
        ok = ok && pipeline_prove_list(&l, s, err);
    }
    if (ok) {
        ok = list_run(&run, &l, pairs, &times, err);
        if (!ok && l.v == 2) {  // two chunks that are no ring are a V
            list_run_free(&run, &l);
            l.folded = true;
            ok = list_run(&run, &l, pairs, &times, err);
        }
        for (int s = 0; s < t->p; s++) {
            TraceEvent *e = rank_events(t, s * across + place, &l.counts[s]);
            for (size_t i = 0; i < l.counts[s]; i++) {
                e[i].start_us = run.steps[s][i].start;
                e[i].duration_us = run.steps[s][i].end - run.steps[s][i].start;
            }
        }
        list_run_free(&run, &l);
    }
    pipeline_lists_free(&l);
    return ok;
}

static bool retime(Timeline *t, Error *err) {
    size_t kept = 0;
    Error why = {"steps are missing"};
    for (size_t i = 0; i < t->trace.count; i++) {
        TraceEvent e = t->trace.events[i];
        if (is_step(&e) && e.micro >= 0) t->trace.events[kept++] = e;
    }
    t->trace.count = kept;
    bool ok = (size_t)t->ranks * 3 * t->m * t->v <= 64 * kept + 1000;
    for (int place = 0; place < t->ranks / t->p && ok; place++) ok = retime_ranks(t, place, &why);
    return ok || error_set(err, "this trace cannot be retimed, or --pipeline is wrong: %.900s",
                           why.text);
}

// Drawing

enum { LEFT = 82, RIGHT = 68, TOP = 64, BOX = 34, LANE_HEIGHT = 6, ROW_GAP = 10 };

static void draw_box(FILE *out, const Timeline *t, const TraceEvent *e, double x, double y,
                     double w, double h) {
    const KindStyle *style = style_of(e->kind);
    char fill[8];
    double shade = t->v > 1 && e->chunk > 0 ? (double)e->chunk / (t->v - 1) : 0;
    svg_mix(style->dark, style->light, shade, fill);
    svg_rect(out, x, y, fmax(w, 0.5), h, fill, style->lane == LANE_BOX && w > 3 ? "#ffffff" : NULL);
    if (style->lane != LANE_BOX || e->micro < 0) return;
    int digits = e->micro < 10 ? 1 : e->micro < 100 ? 2 : 3;
    double size = fmin(14, (w - 2) / (0.6 * digits));
    if (size >= 5.5)
        svg_text(out, x + w / 2, y + h / 2 + 0.36 * size, size, 400, "middle",
                 shade > 0.45 ? "#12303f" : "#ffffff", "%d", e->micro);
}

// Legend entries go from left to right and wrap.
typedef struct {
    double x, y, width;
} Legend;

static void legend_entry(FILE *out, Legend *l, const char *fill, const char *text) {
    double width = 22 + svg_text_width(text, 12) + 18;
    if (l->x + width > l->width) l->x = LEFT, l->y += 20;
    svg_rect(out, l->x, l->y - 10, 16, 12, fill, NULL);
    svg_text(out, l->x + 22, l->y, 12, 400, "start", SVG_INK, "%s", text);
    l->x += width;
}

// Draws the legend. note: a sentence behind the others.
static void draw_legend(FILE *out, const Timeline *t, double y, double width, const char *note) {
    Legend l = {LEFT, y, width - 10};
    for (size_t k = 0; k <= sizeof styles / sizeof styles[0]; k++) {
        const KindStyle *style = k < sizeof styles / sizeof styles[0] ? &styles[k] : &other_style;
        bool seen = false;
        for (size_t i = 0; i < t->trace.count && !seen; i++)
            seen = style_of(t->trace.events[i].kind) == style;
        if (!seen || style->lane == LANE_HIDDEN) continue;
        int shades = k < 3 ? t->v : 1;  // forward, backward and weight, by chunk
        for (int chunk = 0; chunk < shades; chunk++) {
            char fill[8], text[64];
            svg_mix(style->dark, style->light, shades > 1 ? (double)chunk / (shades - 1) : 0, fill);
            snprintf(text, sizeof text, shades > 1 ? "%s, chunk %d" : "%s", style->kind, chunk);
            legend_entry(out, &l, fill, text);
        }
    }
    legend_entry(out, &l, "#e6eaef", "idle");
    svg_text(out, LEFT, l.y + 22, SVG_SMALL, 400, "start", SVG_MUTED,
             "Numbers are micro-batches, from 0.%s%s",
             t->lanes[LANE_RECEIVE] ? " A receive is drawn from its posting to its arrival." : "",
             note);
}

// Draws the picture. how: the replaced durations, in words, or NULL if all were measured.
static void draw(FILE *out, const Timeline *t, const char *title, double width, const char *how) {
    char note[96] = "", busiest[64] = "", sizes[96];
    if (t->bubble - t->busiest >= 0.0005) {
        snprintf(busiest, sizeof busiest, ", %.1f%% on the busiest rank", 100 * t->busiest);
    }
    if (how) snprintf(note, sizeof note, " The order is that of the run: %s, free messages.", how);
    int lanes = t->lanes[LANE_SEND] + t->lanes[LANE_RECEIVE] + t->lanes[LANE_COLLECTIVE];
    double row = BOX + lanes * (LANE_HEIGHT + 1) + ROW_GAP, bottom = TOP + t->ranks * row;
    double scale = (width - LEFT - RIGHT) / fmax(t->end - t->start, 1e-9);
    snprintf(sizes, sizeof sizes, "p = %d stage%s, m = %d micro-batch%s, v = %d chunk%s a stage",
             t->p, t->p > 1 ? "s" : "", t->m, t->m > 1 ? "es" : "", t->v, t->v > 1 ? "s" : "");
    if (!title) title = sizes;
    svg_begin(out, width, bottom + 118, title);
    svg_text(out, LEFT, 28, 17, 700, "start", SVG_INK, "%s", title);
    double formula = pipeline_bubble(t->p, t->m, t->v);
    svg_text(out, LEFT, 49, 13, 400, "start", SVG_MUTED,
             "bubble: %s %.1f%% of compute time%s, %s %s = %.1f%%", how ? "retimed" : "measured",
             100 * t->bubble, busiest, t->split ? "without weight steps" : "formula",
             t->v > 1 ? "(p-1)/(v m)" : "(p-1)/m", 100 * formula);
    svg_text(out, width - RIGHT + 8, 49, SVG_SMALL, 400, "start", SVG_MUTED, "busy");

    // Axis: light lines behind the rows, labels below
    double unit = t->end - t->start < 2000 ? 1 : 1000;
    SvgAxis axis = svg_axis(0, (t->end - t->start) / unit, 10);
    for (int i = 0; i < axis.count; i++) {
        double at = i * axis.step, x = LEFT + at * unit * scale;
        svg_line(out, x, TOP - 4, x, bottom + 2, SVG_GRID, 1);
        svg_text(out, x, bottom + 18, SVG_SMALL, 400, "middle", SVG_MUTED, "%.*f",
                 svg_axis_digits(axis.step), at);
    }
    svg_text(out, width - RIGHT + 8, bottom + 18, SVG_SMALL, 400, "start", SVG_MUTED,
             unit == 1 ? "us" : "ms");

    int across = t->ranks / t->p;
    for (int r = 0; r < t->ranks; r++) {
        double y = TOP + r * row;
        svg_rect(out, LEFT + (t->first - t->start) * scale, y, (t->last - t->first) * scale, BOX,
                 "#e6eaef", NULL);
        if (across == 1) svg_text(out, LEFT - 12, y + 22, 13, 700, "end", SVG_INK, "stage %d", r);
        else {
            svg_text(out, LEFT - 12, y + 15, 13, 700, "end", SVG_INK, "rank %d", r);
            svg_text(out, LEFT - 12, y + 30, SVG_SMALL, 400, "end", SVG_MUTED, "stage %d",
                     r / across);
        }
        svg_text(out, width - RIGHT + 8, y + 22, 12, 400, "start", SVG_INK, "%.1f%%",
                 100 * t->busy[r] / (t->last - t->first));
    }
    double lane_y[LANE_COUNT] = {0}, offset = BOX + 2;
    for (int lane = LANE_SEND; lane <= LANE_COLLECTIVE; lane++)
        if (t->lanes[lane]) lane_y[lane] = offset, offset += LANE_HEIGHT + 1;
    for (size_t i = 0; i < t->trace.count; i++) {
        const TraceEvent *e = &t->trace.events[i];
        Lane lane = style_of(e->kind)->lane;
        if (lane == LANE_HIDDEN) continue;
        double x = LEFT + (e->start_us - t->start) * scale, y = TOP + e->rank * row + lane_y[lane];
        draw_box(out, t, e, x, y, e->duration_us * scale, lane == LANE_BOX ? BOX : LANE_HEIGHT);
    }
    draw_legend(out, t, bottom + 52, width, note);
    svg_end(out);
}

int main(int argc, char **argv) {
    static const char usage[] =
        "usage: timeline [--step N] [--pipeline P] [--title TEXT] [--width PIXELS] [--retime]\n"
        "                [--costs F,B,W] [--out FILE.svg] TRACE.json\n"
        "  --step N      training step to draw (default: the last one)\n"
        "  --pipeline P  stages, where a stage has several ranks (default: one rank a stage)\n"
        "  --retime      keep the order that ran, but with mean durations and messages that take "
        "no time\n"
        "  --costs F,B,W --retime with these milliseconds for a forward and the halves of a "
        "backward; where the trace\n"
        "                has no weight steps a backward takes B + W\n"
        "  --out FILE    where to write (default: standard output)\n";
    Timeline t = {0};
    long step = LONG_MIN, stages = 0, width = SVG_WIDTH;
    const char *title = NULL, *path = NULL;
    double costs[3] = {-1, -1, -1};
    bool retimed = false;
    const PlotFlag flags[] = {{"step", PLOT_INTEGER, &step, 0, LONG_MAX},
                              {"pipeline", PLOT_INTEGER, &stages, 1, 1000000},
                              {"width", PLOT_INTEGER, &width, 300, 20000},
                              {"title", PLOT_TEXT, &title, 0, 0},
                              {"retime", PLOT_SWITCH, &retimed, 0, 0},
                              {"costs", PLOT_NUMBERS, costs, 3, 0},
                              {"out", PLOT_TEXT, &path, 0, 0}};
    tool_begin(argc, argv, usage);
    if (!plot_flags("timeline", argc, argv, flags, 7) || optind + 1 != argc)
        return fputs(usage, stderr), 2;
    Error err;
    bool given = costs[0] >= 0;
    if (!trace_read(argv[optind], &t.trace, &err) || !choose_step(&t, step, (int)stages, &err))
        return tool_fail("timeline", err.text);
    t.busy = malloc((size_t)t.ranks * sizeof *t.busy);
    if (!t.busy) return tool_fail("timeline", "out of memory");
    measure(&t);
    if (!(t.last > t.first)) {
        error_set(&err, "the forwards and backwards of step %ld take no time", t.step);
        return tool_fail("timeline", err.text);
    }
    if (retimed || given) {
        if (given) {
            for (int kind = 0; kind < 3; kind++) t.mean[kind] = 1e3 * costs[kind];
        }
        if (!retime(&t, &err)) return tool_fail("timeline", err.text);
        measure(&t);
        if (!(t.last > t.first)) return tool_fail("timeline", "retimed, the step takes no time");
    }
    FILE *out = svg_open(path, argv + optind, 1, &err);
    if (!out) return tool_fail("timeline", err.text);
    draw(out, &t, title, (double)width,
         given     ? "given durations"
         : retimed ? "mean durations"
                   : NULL);
    if (!svg_close(out, path, &err)) return tool_fail("timeline", err.text);
    fprintf(stderr,
            "step %ld: %d stages, %d micro-batches, %d chunks; bubble %.2f%%, formula %.2f%%, "
            "busiest rank %.2f%%",
            t.step, t.p, t.m, t.v, 100 * t.bubble, 100 * pipeline_bubble(t.p, t.m, t.v),
            100 * t.busiest);
    fprintf(stderr, "; mean forward %.4g, backward %.4g", t.mean[STEP_FORWARD],
            t.mean[STEP_BACKWARD]);
    if (t.split) fprintf(stderr, ", weight %.4g", t.mean[STEP_WEIGHT]);
    fprintf(stderr, " us\n");
    free(t.busy);
    trace_free(&t.trace);
    return 0;
}
