// draw_streams.h: which stream waits for which: backward's two streams, and the deadlock that one
// stream would make of a pipeline.
#ifndef LLMC_DRAW_STREAMS_H
#define LLMC_DRAW_STREAMS_H

#include "dev/plot/figure.h"

typedef struct {
    const char *name;
    double width;
    const char *fill;
} Work;

// Draws one row of work on a stream. Returns its end.
static inline double draw_work(FILE *out, double x, double y, const Work *work, size_t count,
                               double *ends) {
    for (size_t i = 0; i < count; i++) {
        figure_box(out, x, y, work[i].width, 36, work[i].fill, "%s", work[i].name);
        x += work[i].width;
        if (ends) ends[i] = x;
    }
    return x;
}

static inline void draw_lane_names(FILE *out, double y, double width) {
    FIGURE_LABEL(out, 20, y + 23, "start", SVG_INK, "compute");
    FIGURE_LABEL(out, 20, y + 113, "start", SVG_INK, "comm");
    svg_line(out, 90, y + 18, width - 12, y + 18, SVG_GRID, 2);
    svg_line(out, 90, y + 108, width - 12, y + 108, SVG_GRID, 2);
}

// Draws an event, which one stream records and the other waits for, with its name.
static inline void draw_event(FILE *out, double x1, double y1, double x2, double y2,
                              const char *name) {
    figure_arrow(out, x1, y1, x2, y2, FIGURE_ORANGE, true);
    FIGURE_LABEL(out, (x1 + x2) / 2 + 7, (y1 + y2) / 2 + 5, "start", FIGURE_ORANGE, "%s", name);
}

// Draws the MLP's half of layer_backward. Widths follow the FLOPs of the GEMMs; the others are as
// wide as their names.
static inline void draw_backward_streams(FILE *out) {
    enum { GATHER, FCPROJ_X, FCPROJ_W, FCPROJ_B, GELU, FC_X, FC_W, WAIT, NORM, COUNT };
    static const Work compute[COUNT] = {
        {"g: all-gather", 108, FIGURE_COLLECTIVE},
        {"FCPROJW dX", 106, FIGURE_SHARE},
        {"FCPROJW dW", 106, FIGURE_SHARE},
        {"db", 30, FIGURE_SHARE},
        {"GELU, db", 74, FIGURE_SHARE},
        {"FCW dX", 106, FIGURE_SHARE},
        {"FCW dW", 106, FIGURE_SHARE},
        {"wait", 46, FIGURE_WAIT},
        {"layernorm 2", 90, FIGURE_WHOLE},
    };
    double width = 900, ends[COUNT], x = 96;
    figure_begin(out, width, 436, "Backward of the MLP on one tensor rank: two streams");
    for (int sp = 0; sp < 2; sp++) {
        double y = 76 + sp * 176, below = y + 90;
        svg_text(out, 20, y - 14, FIGURE_TEXT, 700, "start", SVG_INK, "--sequence-parallel %d", sp);
        draw_lane_names(out, y, width);
        ends[GATHER] = x + compute[GATHER].width;
        if (sp) draw_work(out, x, y, compute, 1, NULL);
        draw_work(out, ends[GATHER], y, compute + 1, COUNT - 1, ends + 1);
        if (sp) {
            double begin = ends[GATHER] + 8, end = begin + 150;
            figure_box(out, begin, below, end - begin, 36, FIGURE_COLLECTIVE,
                       "f again: all-gather");
            draw_event(out, ends[GATHER], y + 36, begin, below, "computed");
            figure_arrow(out, end, below, ends[FC_X], y + 36, FIGURE_ORANGE, true);
            FIGURE_LABEL(out, end + 56, below + 12, "start", FIGURE_ORANGE, "gathered_ready");
        }
        double begin = ends[FC_X] + 8, end = ends[FC_W] + 38;
        figure_box(out, begin, below, end - begin, 36, FIGURE_COLLECTIVE, "%s",
                   sp ? "f: reduce-scatter" : "f: all-reduce");
        draw_event(out, ends[FC_X], y + 36, begin, below, "computed");
        draw_event(out, end, below, ends[WAIT], y + 36, "reduced_ready");
    }
    FIGURE_NOTE(out, 20, 404,
                "A dashed arrow is an event: recorded where it begins, waited for where it ends. "
                "dX, dW, db: gradients of");
    FIGURE_NOTE(out, 20, 422,
                "a matmul's input, weight and bias. f overlaps dW; the rest of it is exposed, "
                "and so is all of g.");
    svg_end(out);
}

// ---- the deadlock ----------------------------------------------------------------------

static inline void draw_deadlock(FILE *out) {
    double w = 250, h = 38, left = 30, right = 430, y = 96;
    figure_begin(out, 860, 468,
                 "1F1B with p = 2 and one stream for everything: four lines that hang");
    svg_text(out, left, y - 20, FIGURE_TEXT, 700, "start", SVG_INK, "stage 0, in this order");
    svg_text(out, right, y - 20, FIGURE_TEXT, 700, "start", SVG_INK, "stage 1, in this order");
    figure_box(out, left, y, w, h, FIGURE_WAIT, "send activations of 1");
    figure_box(out, left, y + 70, w, h, "#ffffff", "receive gradients of 0");
    figure_box(out, right, y, w, h, FIGURE_WAIT, "send gradients of 0");
    figure_box(out, right, y + 70, w, h, "#ffffff", "receive activations of 1");
    figure_arrow(out, left + w, y + h / 2, right, y + 70 + h / 2, FIGURE_ORANGE, true);
    figure_arrow(out, right, y + h / 2, left + w, y + 70 + h / 2, FIGURE_ORANGE, true);
    figure_arrow(out, left + 40, y + 70, left + 40, y + h, FIGURE_ORANGE, true);
    figure_arrow(out, right + 40, y + 70, right + 40, y + h, FIGURE_ORANGE, true);
    FIGURE_LABEL(out, left + 52, y + h + 20, "start", FIGURE_ORANGE, "comes behind");
    FIGURE_LABEL(out, right + 52, y + h + 20, "start", FIGURE_ORANGE, "comes behind");
    FIGURE_LABEL(out, left + w + 75, y + h / 2 - 16, "middle", FIGURE_ORANGE, "each waits for");
    FIGURE_LABEL(out, left + w + 75, y + h / 2, "middle", FIGURE_ORANGE, "the other's receive");
    FIGURE_NOTE(out, left, y + 136,
                "A send completes only when its receive has been posted. Follow the arrows: they "
                "go round.");
    y = 300;
    svg_text(
        out, left, y - 24, FIGURE_TEXT, 700, "start", SVG_INK,
        "A stream for each direction of each link, as the trainers have it: no ring of arrows");
    static const char *const names[2][4] = {
        {"compute", "send activations", "receive gradients", ""},
        {"compute", "send gradients", "receive activations", ""}};
    for (int s = 0; s < 2; s++) {
        double x = s ? right : left;
        for (int i = 0; i < 3; i++) {
            FIGURE_LABEL(out, x, y + i * 44 + 24, "start", SVG_MUTED, "%s", names[s][i]);
            svg_line(out, x + 125, y + i * 44 + 19, x + 360, y + i * 44 + 19, SVG_GRID, 2);
        }
        figure_box(out, x + 132, y, 46, h, FIGURE_SHARE, s ? "F0" : "F1");
        if (s) figure_box(out, x + 178, y, 46, h, FIGURE_TOKENS, "B0");
        figure_box(out, x + (s ? 232 : 186), y + 44, 70, h, FIGURE_COLLECTIVE, s ? "0" : "1");
        figure_box(out, x + (s ? 186 : 232), y + 88, 70, h, FIGURE_COLLECTIVE, s ? "1" : "0");
    }
    FIGURE_NOTE(out, left, y + 150,
                "Every receive is posted as soon as its buffer is free, whatever the stage "
                "computes or sends.");
    svg_end(out);
}

#endif
