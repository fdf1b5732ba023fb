// draw_context.h: the ring of context parallelism, step by step.
#ifndef LLMC_DRAW_CONTEXT_H
#define LLMC_DRAW_CONTEXT_H

#include "dev/plot/figure.h"
#include "dev/plot/ring_cells.h"

enum { CONTEXT_RANKS = 4, CONTEXT_CELL = 20 };
static const char *const CONTEXT_COLORS[CONTEXT_RANKS] = {"#7fb2e5", "#7cc7a2", "#e0a35c",
                                                          "#b08ad1"};

// Draws what every rank computes in a step, queries down and keys across, a cell for each pair of
// chunks.
static inline void draw_context_step(FILE *out, double x, double y, const RingCells *cells) {
    const double side = CONTEXT_CELL;
    for (int q = 0; q < 2 * CONTEXT_RANKS; q++)
        for (int k = 0; k <= q; k++)
            svg_rect(out, x + k * side, y + q * side, side, side, "#ffffff", SVG_GRID);
    for (int q = 0; q < 2 * CONTEXT_RANKS; q++) {
        for (int k = 0; k <= q; k++) {
            int rank = cells->rank[q][k];
            double left = x + k * side, top = y + q * side;
            if (rank == RING_NOBODY) continue;
            if (k < q) svg_rect(out, left, top, side, side, CONTEXT_COLORS[rank], SVG_MUTED);
            else
                fprintf(
                    out,
                    "<polygon points=\"%.2f,%.2f %.2f,%.2f %.2f,%.2f\" fill=\"%s\" stroke=\"%s\" "
                    "stroke-width=\"0.75\"/>\n",
                    left, top, left, top + side, left + side, top + side, CONTEXT_COLORS[rank],
                    SVG_MUTED);
        }
    }
}

static inline void draw_context(FILE *out) {
    const double width = 2 * CONTEXT_RANKS * CONTEXT_CELL, gap = 48, unit = 30;
    figure_begin(
        out, 880, 640,
        "A ring of 4 ranks: who attends to what in each step (queries down, keys across)");
    for (size_t i = 0; i < CONTEXT_RANKS; i++) {
        svg_rect(out, 20 + 80 * (double)i, 42, 14, 14, CONTEXT_COLORS[i], SVG_MUTED);
        FIGURE_NOTE(out, 40 + 80 * (double)i, 54, "rank %zu", i);
    }
    for (int contiguous = 0; contiguous < 2; contiguous++) {
        double y = 78 + 264 * contiguous, slowest = 0, all = 0;
        for (size_t step = 0; step < CONTEXT_RANKS; step++) {
            double x = 20 + (width + gap) * (double)step, most = 0;
            RingCells cells;
            ring_cells(&cells, CONTEXT_RANKS, !contiguous, step);
            svg_text(out, x, y + 8, FIGURE_TEXT, 700, "start", SVG_INK, "%s, step %zu",
                     contiguous ? "contiguous" : "zigzag", step);
            draw_context_step(out, x, y + 16, &cells);
            for (size_t i = 0; i < CONTEXT_RANKS; i++) {
                svg_rect(out, x, y + 186 + 12 * (double)i, unit * cells.work[i], 9,
                         CONTEXT_COLORS[i], NULL);
                most = fmax(most, cells.work[i]), all += cells.work[i];
            }
            slowest += most;
        }
        FIGURE_NOTE(
            out, 20, y + 250,
            "The slowest ranks of the steps have %g pairs of chunks, the mean rank has %g: "
            "%.2f times the balanced time.",
            slowest, all / CONTEXT_RANKS, slowest * CONTEXT_RANKS / all);
    }
    FIGURE_NOTE(
        out, 20, 614,
        "Bars: work; a triangle is half a pair. In step s a rank has the keys of the rank "
        "that is s before it.");
    svg_end(out);
}

#endif
