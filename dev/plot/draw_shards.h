// draw_shards.h: the communication of the data ranks of train_data and train_fsdp. It draws two
// steps of the first, and one step of the second with the windows in which weights and gradients
// of a layer stay. Then the end of a step of replicas. The drawing follows the rules of these
// lessons: the stream of an operation, and the operations that it waits for. Durations are round;
// no run is behind them.
#ifndef LLMC_DRAW_SHARDS_H
#define LLMC_DRAW_SHARDS_H

#include "dev/plot/figure.h"

enum { SHARDS_LAYERS = 6, SHARDS_LEFT = 100, SHARDS_ROW = 34 };

static const char *const SHARDS_COLORS[SHARDS_LAYERS] = {"#bcd8f5", "#bfe8d6", "#e2d5f3",
                                                         "#f9d5c3", "#f3e3a1", "#d5dbe2"};

typedef struct {
    FILE *out;
    double top, unit;      // of the first row; pixels of a unit of time
    double compute, data;  // when the two streams are free
} ShardsDrawing;

// Draws a box of a row from one time to another. format: its text, one or two characters in a
// short box.
__attribute__((format(printf, 6, 7))) static inline void shards_box(const ShardsDrawing *d,
                                                                    int row, double from,
                                                                    double to, const char *fill,
                                                                    const char *format, ...) {
    char text[32];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    double x = SHARDS_LEFT + d->unit * from, w = d->unit * (to - from);
    svg_rect(d->out, x, d->top + row * SHARDS_ROW, w, 24, fill, SVG_MUTED);
    svg_text(d->out, x + w / 2, d->top + row * SHARDS_ROW + 17, 12, 400, "middle", SVG_INK, "%s",
             text);
}

// Runs an operation of `length` in a row when its stream is free and not before `ready`. Returns
// when it ends.
static inline double shards_run(ShardsDrawing *d, int row, double *stream, double ready,
                                double length, const char *fill, char name, int layer) {
    double from = fmax(*stream, ready);
    *stream = from + length;
    if (layer >= 0) shards_box(d, row, from, *stream, fill, "%c%d", name, layer);
    else shards_box(d, row, from, *stream, fill, "%c", name);
    return *stream;
}

static inline void shards_rows(const ShardsDrawing *d, int count, const char *const *names) {
    for (int row = 0; row < count; row++)
        FIGURE_LABEL(d->out, 12, d->top + row * SHARDS_ROW + 17, "start", SVG_INK, "%s",
                     names[row]);
}

// Draws two steps of 4 layers. Leaves out the buckets of embeddings and ln_f.
static inline void draw_lesson_data(FILE *out) {
    enum { L = 4 };
    static const char *const names[] = {"compute", "data stream"};
    ShardsDrawing d = {out, 52, 13.8, 0, 0};
    double gathered[L] = {0}, reduced[L];
    figure_begin(out, 620, 214, "Two steps of train_data, 4 layers");
    shards_rows(&d, 2, names);
    for (int step = 0; step < 2; step++) {
        for (int l = 0; l < L; l++)
            shards_run(&d, 0, &d.compute, gathered[l], 1.6, SHARDS_COLORS[l], 'F', l);
        for (int l = L; l-- > 0;) {
            double end = shards_run(&d, 0, &d.compute, 0, 2, SHARDS_COLORS[l], 'B', l);
            reduced[l] = shards_run(&d, 1, &d.data, end, 1.7, SHARDS_COLORS[l], 'R', l);
        }
        double updated = shards_run(&d, 0, &d.compute, reduced[0], 1.2, FIGURE_WHOLE, 'U', -1);
        if (step == 1) break;
        for (int l = 0; l < L; l++)
            gathered[l] = shards_run(&d, 1, &d.data, updated, 1.4, SHARDS_COLORS[l], 'G', l);
    }
    FIGURE_NOTE(out, 12, 146,
                "F, B: forward and backward of a layer.  U: the optimizer's update of 1/d.");
    FIGURE_NOTE(out, 12, 166,
                "R: reduce-scatter of a layer's gradients, beside the backward below it.");
    FIGURE_NOTE(out, 12, 186, "G: all-gather of a layer's weights, beside the next forward.");
    svg_end(out);
}

// The time at which a layer moves into a window, and the window's row.
typedef struct {
    double since;
    int layer, row;
} ShardsWindow;

static inline void shards_leave(const ShardsDrawing *d, const ShardsWindow *w, double until,
                                char name) {
    if (w->layer >= 0)
        shards_box(d, w->row, w->since, until, SHARDS_COLORS[w->layer], "%c%d", name, w->layer);
}

// Draws one step of one micro-batch and 6 layers with --shard 3.
static inline void draw_lesson_fsdp(FILE *out) {
    enum { L = SHARDS_LAYERS };
    static const char *const names[] = {"compute",   "data stream", "weights 0",
                                        "weights 1", "gradients 0", "gradients 1"};
    ShardsDrawing d = {out, 52, 23, 0, 0};
    ShardsWindow weights[2] = {{0, -1, 2}, {0, -1, 3}}, grads[2] = {{0, -1, 4}, {0, -1, 5}};
    double gathered[L], empty[2] = {0, 0};  // when a window of gradients is free
    figure_begin(out, 660, 370, "One step of train_fsdp --shard 3, 6 layers");
    shards_rows(&d, 6, names);
    for (int l = 0; l < 2; l++) {
        weights[l].since = d.data;
        weights[l].layer = l;
        gathered[l] = shards_run(&d, 1, &d.data, 0, 0.9, SHARDS_COLORS[l], 'G', l);
    }
    for (int l = 0; l < L; l++) {
        double end = shards_run(&d, 0, &d.compute, gathered[l], 1.2, SHARDS_COLORS[l], 'F', l);
        if (l + 2 >= L) continue;
        double begin = fmax(d.data, end);
        shards_leave(&d, &weights[l % 2], begin, 'W');
        weights[l % 2].since = begin;
        weights[l % 2].layer = l + 2;
        gathered[l + 2] = shards_run(&d, 1, &d.data, end, 0.9, SHARDS_COLORS[l + 2], 'G', l + 2);
    }
    for (int l = L; l-- > 0;) {
        double begin = fmax(d.compute, fmax(gathered[l], empty[l % 2]));
        double end = shards_run(&d, 0, &d.compute, begin, 2, SHARDS_COLORS[l], 'B', l);
        grads[l % 2].since = begin;
        grads[l % 2].layer = l;
        empty[l % 2] = shards_run(&d, 1, &d.data, end, 1, SHARDS_COLORS[l], 'R', l);
        shards_leave(&d, &weights[l % 2], l >= 2 ? empty[l % 2] : end, 'W');
        if (l >= 2) {
            weights[l % 2].since = empty[l % 2];
            weights[l % 2].layer = l - 2;
            gathered[l - 2] =
                shards_run(&d, 1, &d.data, end, 0.9, SHARDS_COLORS[l - 2], 'G', l - 2);
        }
        shards_leave(&d, &grads[l % 2], empty[l % 2], 'D');
    }
    FIGURE_NOTE(out, 12, 284,
                "F, B: forward and backward of a layer.  G: all-gather of a layer's weights.");
    FIGURE_NOTE(out, 12, 304, "W: a layer's weights are in this window.  D: its gradients are.");
    FIGURE_NOTE(
        out, 12, 324,
        "R: reduce-scatter, which adds the sum to this rank's shard and empties the window.");
    FIGURE_NOTE(out, 12, 344, "Layers 4 and 5 are still in their windows when backward begins.");
    svg_end(out);
}

// Draws the backward of the last of several micro-batches and the update, with --replicas. The
// shards' sums across nodes begin as soon as a shard is complete.
static inline void draw_lesson_hsdp(FILE *out) {
    enum { L = SHARDS_LAYERS, CELL = 30 };
    static const char *const names[] = {"compute", "within a node", "across nodes"};
    ShardsDrawing d = {out, 188, 33, 0, 0};
    double gathered[L], empty[2] = {0, 0}, across = 0;
    figure_begin(out, 660, 392, "train_fsdp --replicas 2: 2 nodes of 4 ranks");

    // The shards: a rank's cell is its quarter of the model.
    for (int node = 0; node < 2; node++)
        for (int i = 0; i < 4; i++) {
            double x = SHARDS_LEFT + i * (CELL + 100), y = 62 + 62 * node;
            svg_rect(out, x, y, 4 * CELL, 26, "#ffffff", SVG_MUTED);
            figure_box(out, x + i * CELL, y, CELL, 26, FIGURE_SHARE, "%d", i);
            if (i == 0)
                FIGURE_LABEL(out, 12, y + 18, "start", SVG_INK, "replica %d", node);
            FIGURE_LABEL(out, x + 2 * CELL, y - 6, "middle", SVG_MUTED, "rank %d", 4 * node + i);
        }

    // The last micro-batch: the weights of the last two layers are still in their windows.
    shards_rows(&d, 3, names);
    for (int l = 0; l < L; l++) gathered[l] = 0;
    for (int l = L; l-- > 0;) {
        double begin = fmax(gathered[l], empty[l % 2]);
        double end = shards_run(&d, 0, &d.compute, begin, 2, SHARDS_COLORS[l], 'B', l);
        empty[l % 2] = shards_run(&d, 1, &d.data, end, 1, SHARDS_COLORS[l], 'R', l);
        shards_run(&d, 2, &across, empty[l % 2], 1.8, SHARDS_COLORS[l], 'A', l);
        if (l >= 2)
            gathered[l - 2] =
                shards_run(&d, 1, &d.data, end, 0.9, SHARDS_COLORS[l - 2], 'G', l - 2);
    }
    shards_run(&d, 0, &d.compute, across, 1.2, FIGURE_WHOLE, 'U', -1);
    FIGURE_NOTE(out, 12, 310,
                "Top: a replica's 4 ranks keep a quarter each; equal numbers are the same one.");
    FIGURE_NOTE(out, 12, 330,
                "Below: a rank's streams in the backward (B) of the last micro-batch, 6 layers.");
    FIGURE_NOTE(out, 12, 350,
                "G, R: all-gather of weights, reduce-scatter of gradients, over 4 neighbours.");
    FIGURE_NOTE(out, 12, 370,
                "A: all-reduce of a layer's quarter over the 2 replicas.  U: AdamW's update.");
    svg_end(out);
}

#endif
