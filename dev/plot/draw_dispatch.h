// draw_dispatch.h: dispatch and combine of a mixture of experts. The tokens of two ranks visit
// the experts of both. Each expert has two places for the tokens of a rank, and one token finds
// none.
#ifndef LLMC_DRAW_DISPATCH_H
#define LLMC_DRAW_DISPATCH_H

#include "dev/plot/figure.h"

enum { DISPATCH_RANKS = 2, DISPATCH_TOKENS = 4, DISPATCH_PLACES = 2, DISPATCH_CELL = 54 };

static const char *const DISPATCH_COLORS[DISPATCH_RANKS] = {FIGURE_SHARE, FIGURE_TOKENS};
static const int DISPATCH_CHOICE[DISPATCH_RANKS][DISPATCH_TOKENS] = {{0, 1, 0, 0}, {1, 0, 1, 0}};

// Draws a row of tokens of both ranks at height y, those without a place in the colour of a loss.
static inline void draw_dispatch_tokens(FILE *out, double y, const bool (*kept)[DISPATCH_TOKENS],
                                        bool results) {
    for (int r = 0; r < DISPATCH_RANKS; r++) {
        for (int i = 0; i < DISPATCH_TOKENS; i++) {
            double x = 20 + r * 258 + i * DISPATCH_CELL;
            bool lost = results && !kept[r][i];
            figure_box(out, x, y, DISPATCH_CELL, 28, lost ? FIGURE_WAIT : DISPATCH_COLORS[r],
                       "%c%d", 'a' + r, i);
        }
    }
}

static inline void draw_dispatch(FILE *out) {
    enum { TOP = 74, PLACES = 232, BOTTOM = 392, ASIDE = 524, WIDE = DISPATCH_CELL };
    bool kept[DISPATCH_RANKS][DISPATCH_TOKENS];
    figure_begin(out, 610, 508, "Dispatch and combine: 2 ranks, an expert on each, k = 1");
    for (int r = 0; r < DISPATCH_RANKS; r++)
        svg_text(out, 20 + r * 258, TOP - 12, FIGURE_TEXT, 700, "start", SVG_INK,
                 "rank %d: its tokens", r);
    draw_dispatch_tokens(out, TOP, NULL, false);
    svg_text(out, ASIDE, TOP + 80, FIGURE_TEXT, 700, "start", FIGURE_VIOLET, "dispatch");

    for (int e = 0; e < DISPATCH_RANKS; e++) {
        double left = 20 + e * 258;
        svg_text(out, left, PLACES - 12, FIGURE_TEXT, 700, "start", SVG_INK,
                 "expert %d on rank %d", e, e);
        for (int r = 0; r < DISPATCH_RANKS; r++) {
            int used = 0;
            for (int place = 0; place < DISPATCH_PLACES; place++)
                figure_box(out, left + (r * DISPATCH_PLACES + place) * WIDE, PLACES, WIDE, 28,
                           "#ffffff", "%s", "");
            for (int i = 0; i < DISPATCH_TOKENS; i++) {
                if (DISPATCH_CHOICE[r][i] != e) continue;
                kept[r][i] = used < DISPATCH_PLACES;
                if (!kept[r][i]) continue;
                double x = left + (r * DISPATCH_PLACES + used) * WIDE,
                       from = 20 + r * 258 + (i + 0.5) * WIDE;
                figure_box(out, x, PLACES, WIDE, 28, DISPATCH_COLORS[r], "%c%d", 'a' + r, i);
                figure_arrow(out, from, TOP + 30, x + WIDE / 2.0, PLACES - 28, FIGURE_VIOLET,
                             r != e);
                figure_arrow(out, x + WIDE / 2.0, PLACES + 30, from, BOTTOM - 4, FIGURE_VIOLET,
                             r != e);
                used++;
            }
        }
    }
    svg_text(out, ASIDE, PLACES + 19, FIGURE_TEXT, 700, "start", SVG_INK, "MLP");
    svg_text(out, ASIDE, PLACES + 98, FIGURE_TEXT, 700, "start", FIGURE_VIOLET, "combine");
    draw_dispatch_tokens(out, BOTTOM, kept, true);
    FIGURE_NOTE(out, 20, BOTTOM + 54,
                "An expert has 2 places for each rank, and empty ones travel too.");
    FIGURE_NOTE(out, 20, BOTTOM + 72,
                "A third token is dropped (orange): the residual stream alone carries");
    FIGURE_NOTE(out, 20, BOTTOM + 90, "it on. Dashed arrows cross ranks, the others stay at home.");
    svg_end(out);
}

#endif
