// draw_vocabulary.h: the loss of one token on two tensor ranks: each rank's results from
// its logits, and the three numbers that travel. Computes them as
// llmc/kernels/classifier.cuh does.
#ifndef LLMC_DRAW_VOCABULARY_H
#define LLMC_DRAW_VOCABULARY_H

#include "dev/plot/figure.h"

enum { VOCABULARY_RANKS = 2, VOCABULARY_COLUMNS = 4, VOCABULARY_TARGET = 5 };

static const double VOCABULARY_LOGITS[VOCABULARY_RANKS][VOCABULARY_COLUMNS] = {{1, 3, 0, 2},
                                                                               {2, 4, 1, 0}};

static inline void draw_vocabulary_loss(FILE *out) {
    enum { LEFT = 20, WIDE = 250, STEP = 280, CELL = 56 };
    double max[VOCABULARY_RANKS], sum[VOCABULARY_RANKS], global = -INFINITY, total = 0, target = 0;
    for (int r = 0; r < VOCABULARY_RANKS; r++) {
        max[r] = -INFINITY;
        for (int i = 0; i < VOCABULARY_COLUMNS; i++) max[r] = fmax(max[r], VOCABULARY_LOGITS[r][i]);
        sum[r] = 0;
        for (int i = 0; i < VOCABULARY_COLUMNS; i++)
            sum[r] += exp(VOCABULARY_LOGITS[r][i] - max[r]);
        global = fmax(global, max[r]);
    }

    figure_begin(out, 570, 440, "The loss of one token, 8 logits on 2 ranks");
    for (int r = 0; r < VOCABULARY_RANKS; r++) {
        double x = LEFT + r * STEP, scaled = sum[r] * exp(max[r] - global);
        const char *fill = r ? FIGURE_TOKENS : FIGURE_SHARE;
        svg_text(out, x, 60, FIGURE_TEXT, 700, "start", SVG_INK, "rank %d", r);
        for (int i = 0; i < VOCABULARY_COLUMNS; i++) {
            bool is_target = r * VOCABULARY_COLUMNS + i == VOCABULARY_TARGET;
            figure_box(out, x + i * CELL, 72, CELL, 30, fill, "%g", VOCABULARY_LOGITS[r][i]);
            if (is_target) {
                FIGURE_LABEL(out, x + (i + 0.5) * CELL, 120, "middle", FIGURE_ORANGE, "target");
                target = VOCABULARY_LOGITS[r][i];
            }
        }
        bool mine = VOCABULARY_TARGET / VOCABULARY_COLUMNS == r;
        FIGURE_LABEL(out, x, 146, "start", SVG_INK, "maximum of these: %g", max[r]);
        FIGURE_LABEL(out, x, 166, "start", SVG_INK, "sum of exp(x - %g): %.3f", max[r], sum[r]);
        FIGURE_LABEL(out, x, 186, "start", SVG_INK, "target logit: %g%s", mine ? target : 0.0,
                     mine ? "" : " (not here)");
        FIGURE_LABEL(out, x, 268, "start", SVG_INK, "sum, rescaled: %.3f", scaled);
        total += scaled;
    }
    figure_box(out, LEFT, 204, STEP + WIDE, 32, FIGURE_COLLECTIVE,
               "all-reduce, the operation max: maximum = %g", global);
    figure_box(out, LEFT, 286, STEP + WIDE, 32, FIGURE_COLLECTIVE,
               "all-reduce, the operation sum: sum = %.3f, target = %g", total, target);
    double loss = log(total) + global - target;
    svg_text(out, LEFT, 350, FIGURE_TEXT, 700, "start", SVG_INK,
             "loss = log %.3f + %g - %g = %.3f on both ranks", total, global, target, loss);
    FIGURE_NOTE(out, LEFT, 378, "Each rank then turns its own logits into their gradient:");
    FIGURE_NOTE(out, LEFT, 396, "exp(x - %g) / %.3f, less 1 at the target. Three numbers", global,
                total);
    FIGURE_NOTE(out, LEFT, 414, "travel for a token, whatever the vocabulary is.");
    svg_end(out);
}

#endif
