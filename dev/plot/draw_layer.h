// draw_layer.h: one transformer layer on a tensor rank, without and with sequence parallelism.
// It is layer_forward of train_gpt_tp.cu, with shapes and collectives on the arrows.
#ifndef LLMC_DRAW_LAYER_H
#define LLMC_DRAW_LAYER_H

#include "dev/plot/figure.h"

typedef struct {
    const char *name;     // of the operation
    bool split;           // over heads or hidden units
    const char *shape[2]; // of its output, without and with sequence parallelism
    char op;              // 'f' or 'g' that the output passes; 0: none
} LayerStep;

static const LayerStep LAYER_STEPS[] = {
    {"layernorm 1", false, {"ln1 (N, C)", "ln1 (N/t, C)"}, 'f'},
    {"matmul QKVW, by columns", true, {"qkv (N, 3A)", "qkv (N, 3A)"}, 0},
    {"attention on NH/t heads", true, {"atty (N, A)", "atty (N, A)"}, 0},
    {"matmul PROJW, by rows",
     true,
     {"proj (N, C), a partial sum", "proj (N, C), a partial sum"},
     'g'},
    {"+ bias + x, layernorm 2", false, {"ln2 (N, C)", "ln2 (N/t, C)"}, 'f'},
    {"matmul FCW, by columns", true, {"fch (N, F)", "fch (N, F)"}, 0},
    {"GELU", true, {"fch_gelu (N, F)", "fch_gelu (N, F)"}, 0},
    {"matmul FCPROJW, by rows",
     true,
     {"proj (N, C), a partial sum", "proj (N, C), a partial sum"},
     'g'},
    {"+ bias + residual2", false, {"out (N, C)", "out (N/t, C)"}, 0},
};

// Draws f or g as a box across the arrow, with its collective forward and backward.
static inline void draw_operator(FILE *out, double x, double y, double w, char op, bool sp) {
    static const char *const calls[2][2][2] = {
        // forward, backward
        {{"nothing", "all-reduce"}, {"all-gather", "reduce-scatter"}}, // f, without and with
        {{"all-reduce", "nothing"}, {"reduce-scatter", "all-gather"}}, // g
    };
    const char *const *call = calls[op == 'g'][sp];
    svg_rect(out, x, y, w, 26, FIGURE_COLLECTIVE, FIGURE_VIOLET);
    svg_text(out, x + 16, y + 18, 15, 700, "middle", FIGURE_VIOLET, "%c", op);
    FIGURE_LABEL(out, x + 34, y + 18, "start", SVG_INK, "forward: %s", call[0]);
    FIGURE_LABEL(out, x + 196, y + 18, "start", SVG_INK, "backward: %s", call[1]);
}

static inline void draw_layer_column(FILE *out, double x, bool sp) {
    double y = 92, w = 250, middle = x + 90;
    svg_text(out, x, 62, FIGURE_TEXT, 700, "start", SVG_INK,
             sp ? "--sequence-parallel 1" : "--sequence-parallel 0");
    FIGURE_LABEL(out, middle + 12, 86, "start", SVG_MUTED, sp ? "x (N/t, C)" : "x (N, C)");
    figure_arrow(out, middle, 74, middle, y, SVG_MUTED, false);
    for (size_t i = 0; i < sizeof LAYER_STEPS / sizeof *LAYER_STEPS; i++) {
        const LayerStep *s = &LAYER_STEPS[i];
        const char *fill = s->split ? FIGURE_SHARE : sp ? FIGURE_TOKENS : FIGURE_WHOLE;
        figure_box(out, x, y, w, 32, fill, "%s", s->name);
        y += 32;
        double next = y + (s->op ? 70 : 26);
        FIGURE_LABEL(out, middle + 12, y + 17, "start", SVG_MUTED, "%s", s->shape[sp]);
        if (s->op) {
            figure_arrow(out, middle, y, middle, y + 24, SVG_MUTED, false);
            draw_operator(out, x, y + 24, 392, s->op, sp);
            y += 50;
            figure_arrow(out, middle, y, middle, next, SVG_MUTED, false);
        } else {
            figure_arrow(out, middle, y, middle, next, SVG_MUTED, false);
        }
        y = next;
    }
}

static inline void draw_layer(FILE *out) {
    figure_begin(out, 872, 888, "One layer on one of t tensor ranks");
    draw_layer_column(out, 20, false);
    draw_layer_column(out, 456, true);
    double y = 832;
    figure_box(out, 20, y - 14, 22, 18, FIGURE_SHARE, "%s", "");
    FIGURE_NOTE(out, 48, y, "this rank's heads (A = C/t) or hidden units (F = 4C/t)");
    figure_box(out, 430, y - 14, 22, 18, FIGURE_WHOLE, "%s", "");
    FIGURE_NOTE(out, 458, y, "the same on all ranks");
    figure_box(out, 624, y - 14, 22, 18, FIGURE_TOKENS, "%s", "");
    FIGURE_NOTE(out, 652, y, "this rank's N/t tokens");
    FIGURE_NOTE(out, 20, y + 24,
                "Every f and g works on a buffer of (N, C). An all-reduce is a reduce-scatter "
                "and an all-gather: "
                "the boxes");
    FIGURE_NOTE(out, 20, y + 42,
                "of f and g send the same bytes in both columns. Not drawn: at the right "
                "backward gathers ln1, ln2 "
                "again.");
    svg_end(out);
}

#endif
