// draw_shares.h: which rows and columns of the matrices of a layer and of the vocabulary each of
// two tensor ranks holds.
#ifndef LLMC_DRAW_SHARES_H
#define LLMC_DRAW_SHARES_H

#include "dev/plot/figure.h"

enum { SHARES_C = 8, SHARES_T = 2, SHARES_NH = 4, SHARES_CELL = 8 };

static const char *const SHARES_COLORS[SHARES_T] = {FIGURE_SHARE, FIGURE_TOKENS};

// Draws a matrix of cells at (x, y). A cell's column gives its rank if the matrix is cut by
// columns, else its row. The ranks share `period` columns or rows, then the next `period` ones
// (q, k and v are three).
static inline void draw_shares_matrix(FILE *out, double x, double y, int rows, int columns,
                                      bool by_columns, int period) {
    for (int row = 0; row < rows; row++) {
        for (int column = 0; column < columns; column++) {
            int rank = (by_columns ? column : row) % period / (period / SHARES_T);
            svg_rect(out, x + column * SHARES_CELL, y + row * SHARES_CELL, SHARES_CELL,
                     SHARES_CELL, SHARES_COLORS[rank], "#ffffff");
        }
    }
    svg_line(out, x, y, x + columns * SHARES_CELL, y, SVG_MUTED, 1);
    svg_line(out, x, y + rows * SHARES_CELL, x + columns * SHARES_CELL, y + rows * SHARES_CELL,
             SVG_MUTED, 1);
    svg_line(out, x, y, x, y + rows * SHARES_CELL, SVG_MUTED, 1);
    svg_line(out, x + columns * SHARES_CELL, y, x + columns * SHARES_CELL, y + rows * SHARES_CELL,
             SVG_MUTED, 1);
}

static inline void draw_shares(FILE *out) {
    enum {
        C = SHARES_C,
        F = 4 * SHARES_C,
        CELL = SHARES_CELL,
        LEFT = 20,
        RIGHT = 320,
        TOP = 74,
        LOWER = 250
    };
    figure_begin(out, 560, 622, "What each of 2 tensor ranks holds (C = 8)");

    svg_text(out, LEFT, TOP - 12, FIGURE_TEXT, 700, "start", SVG_INK, "QKVW (C, 3C): by columns");
    draw_shares_matrix(out, LEFT, TOP, C, 3 * C, true, C);
    for (int part = 0; part < 3; part++) {
        double x = LEFT + part * C * CELL;
        FIGURE_LABEL(out, x + C * CELL / 2.0, TOP + C * CELL + 18, "middle", SVG_INK, "%c",
                     "qkv"[part]);
        if (part > 0) svg_line(out, x, TOP - 4, x, TOP + C * CELL + 4, SVG_INK, 1.6);
    }
    FIGURE_NOTE(out, LEFT, TOP + C * CELL + 40, "each part by itself: whole heads");
    FIGURE_NOTE(out, LEFT, TOP + C * CELL + 58, "(2 of %d heads, 2 columns each)", SHARES_NH);

    svg_text(out, RIGHT, TOP - 12, FIGURE_TEXT, 700, "start", SVG_INK, "PROJW (C, C): by rows");
    draw_shares_matrix(out, RIGHT, TOP, C, C, false, C);
    FIGURE_NOTE(out, RIGHT + C * CELL + 12, TOP + 22, "a rank's heads in,");
    FIGURE_NOTE(out, RIGHT + C * CELL + 12, TOP + 40, "a partial sum out");

    svg_text(out, LEFT, LOWER - 12, FIGURE_TEXT, 700, "start", SVG_INK, "FCW (C, 4C): by columns");
    draw_shares_matrix(out, LEFT, LOWER, C, F, true, F);
    FIGURE_NOTE(out, LEFT, LOWER + C * CELL + 20, "a rank's hidden units");

    svg_text(out, RIGHT, LOWER - 12, FIGURE_TEXT, 700, "start", SVG_INK,
             "FCPROJW (4C, C): by rows");
    draw_shares_matrix(out, RIGHT, LOWER, F, C, false, F);
    FIGURE_NOTE(out, RIGHT + C * CELL + 12, LOWER + 22, "a rank's units in,");
    FIGURE_NOTE(out, RIGHT + C * CELL + 12, LOWER + 40, "a partial sum out");

    double y = LOWER + C * CELL + 66;
    svg_text(out, LEFT, y - 12, FIGURE_TEXT, 700, "start", SVG_INK, "wte (Vp, C): by rows");
    draw_shares_matrix(out, LEFT, y, 16, C, false, 16);
    FIGURE_NOTE(out, LEFT + C * CELL + 12, y + 30, "tokens 0 to Vp/2 - 1");
    FIGURE_NOTE(out, LEFT + C * CELL + 12, y + 98, "tokens Vp/2 to Vp - 1");

    double key = 540;
    for (int rank = 0; rank < SHARES_T; rank++) {
        double x = LEFT + 110 * rank;
        figure_box(out, x, key, 20, 18, SHARES_COLORS[rank], "%s", "");
        FIGURE_LABEL(out, x + 28, key + 14, "start", SVG_INK, "rank %d", rank);
    }
    FIGURE_NOTE(out, LEFT, key + 44,
                "QKVB and FCB are cut like their columns. All else is whole on");
    FIGURE_NOTE(out, LEFT, key + 60, "both: layernorms, wpe, PROJB, FCPROJB.");
    svg_end(out);
}

#endif
