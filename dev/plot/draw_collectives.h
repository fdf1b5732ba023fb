// draw_collectives.h: the buffers of two ranks before and after each collective, and a ring of
// three. The contents of the cells are computed, not written down: a cell holds the names of the
// parts that have been added up in it.
#ifndef LLMC_DRAW_COLLECTIVES_H
#define LLMC_DRAW_COLLECTIVES_H

#include "dev/plot/figure.h"

enum { CELL_W = 66, CELL_H = 34, MAX_PARTS = 3 };

// A rank's buffer of several parts. Bit r of sum[i]: rank r's part i has been added in. 0: not
// there.
typedef struct {
    unsigned sum[MAX_PARTS];
} Buffer;

// Writes part i of the ranks in a set, as "a0+b0".
static inline void cell_text(char text[32], unsigned set, int part) {
    size_t n = 0;
    text[0] = 0;
    for (int rank = 0; rank < MAX_PARTS; rank++) {
        if (set >> rank & 1)
            n += (size_t)snprintf(text + n, 32 - n, "%s%c%d", n ? "+" : "", 'a' + rank, part);
    }
}

// Draws a rank's buffer. whole: the set that a finished cell holds.
static inline void draw_buffer(FILE *out, double x, double y, Buffer b, int parts, unsigned whole) {
    char text[32];
    for (int i = 0; i < parts; i++) {
        cell_text(text, b.sum[i], i);
        const char *fill = b.sum[i] == 0       ? "#ffffff"
                           : b.sum[i] == whole ? FIGURE_TOKENS
                                               : FIGURE_SHARE;
        figure_box(out, x + i * CELL_W, y, CELL_W, CELL_H, fill, "%s", text);
    }
}

enum { BETWEEN = 120, TOP = 62, ROW = 76, NAMES = 90 };

static inline void draw_ranks(FILE *out, int ranks) {
    for (int r = 0; r < ranks; r++)
        svg_text(out, 20, TOP + r * ROW + 22, FIGURE_TEXT, 700, "start", SVG_INK, "rank %d", r);
}

// Draws the two messages between two ranks at column x.
static inline void draw_exchange(FILE *out, double x, const char *down, const char *up) {
    double y0 = TOP + CELL_H / 2.0, y1 = y0 + ROW;
    if (*down) {
        figure_arrow(out, x + 12, y0, x + BETWEEN - 12, y1, FIGURE_VIOLET, false);
        FIGURE_LABEL(out, x + 22, y0 - 2, "start", FIGURE_VIOLET, "%s", down);
    }
    if (*up) {
        figure_arrow(out, x + 12, y1, x + BETWEEN - 12, y0, FIGURE_VIOLET, false);
        FIGURE_LABEL(out, x + 22, y1 + 13, "start", FIGURE_VIOLET, "%s", up);
    }
}

// Columns of the same two buffers, before, (between) and after, with the messages between the
// columns.
static inline void draw_two_ranks(FILE *out, const char *title, const char *note,
                                  const Buffer (*columns)[2], int count,
                                  const char *const (*messages)[2], unsigned whole) {
    double width = NAMES + count * 2 * CELL_W + (count - 1) * BETWEEN + 24;
    figure_begin(out, width < 560 ? 560 : width, TOP + 2 * ROW + 18, title);
    draw_ranks(out, 2);
    for (int c = 0; c < count; c++) {
        double x = NAMES + c * (2 * CELL_W + BETWEEN);
        const char *when = c == 0 ? "before" : c == count - 1 ? "after" : "";
        FIGURE_LABEL(out, x + CELL_W, TOP - 12, "middle", SVG_MUTED, "%s", when);
        for (int r = 0; r < 2; r++) draw_buffer(out, x, TOP + r * ROW, columns[c][r], 2, whole);
        if (c < count - 1) draw_exchange(out, x + 2 * CELL_W, messages[c][0], messages[c][1]);
    }
    FIGURE_NOTE(out, 20, TOP + 2 * ROW + 4, "%s", note);
    svg_end(out);
}

static inline void draw_reduce_scatter(FILE *out) {
    static const Buffer columns[][2] = {{{{1, 1}}, {{2, 2}}}, {{{3, 0}}, {{0, 3}}}};
    static const char *const messages[][2] = {{"a1", "b0"}};
    draw_two_ranks(out, "reduce-scatter: everybody's sum, a part for each",
                   "Of n bytes each of k ranks sends (k-1)/k n: here one of two cells.", columns,
                   2, messages, 3);
}

static inline void draw_all_gather(FILE *out) {
    static const Buffer columns[][2] = {{{{1, 0}}, {{0, 1}}}, {{{1, 1}}, {{1, 1}}}};
    static const char *const messages[][2] = {{"a0", "a1"}};
    draw_two_ranks(out, "all-gather: everybody's part, all of them for each",
                   "Of n bytes each of k ranks sends (k-1)/k n. Nothing is added.", columns, 2,
                   messages, 1);
}

static inline void draw_all_reduce(FILE *out) {
    static const Buffer columns[][2] = {
        {{{1, 1}}, {{2, 2}}}, {{{3, 0}}, {{0, 3}}}, {{{3, 3}}, {{3, 3}}}};
    static const char *const messages[][2] = {{"a1", "b0"}, {"a0+b0", "a1+b1"}};
    draw_two_ranks(out, "all-reduce: everybody's sum for each = reduce-scatter, then all-gather",
                   "Of n bytes each of k ranks sends 2 (k-1)/k n.", columns, 3, messages, 3);
}

static inline void draw_broadcast(FILE *out) {
    static const Buffer columns[][2] = {{{{1, 1}}, {{0, 0}}}, {{{1, 1}}, {{1, 1}}}};
    static const char *const messages[][2] = {{"a0 a1", ""}};
    draw_two_ranks(out, "broadcast: what the root has, for each",
                   "Every rank but the root receives n bytes.", columns, 2, messages, 1);
}

static inline void draw_send_receive(FILE *out) {
    static const Buffer columns[][2] = {{{{1, 1}}, {{0, 0}}}, {{{1, 1}}, {{1, 1}}}};
    static const char *const messages[][2] = {{"a0 a1", ""}};
    draw_two_ranks(out, "send and receive: one rank to one other",
                   "n bytes, once. The sender keeps its copy.", columns, 2, messages, 1);
}

// Draws the parts that one rank of a ring holds, without their numbers. The part that it sends
// next is outlined.
static inline void draw_ring_rank(FILE *out, double x, double y, double w, Buffer b, int k,
                                  int sent) {
    for (int i = 0; i < k; i++) {
        char text[MAX_PARTS + 1] = "";
        for (int q = 0, n = 0; q < k; q++) {
            if (b.sum[i] >> q & 1) text[n++] = (char)('a' + q), text[n] = 0;
        }
        figure_box(out, x + i * w, y, w, CELL_H,
                   b.sum[i] == (1u << k) - 1 ? FIGURE_TOKENS : FIGURE_SHARE, "%s", text);
    }
    if (sent < 0) return;
    fprintf(out,
            "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%d\" fill=\"none\" stroke=\"%s\" "
            "stroke-width=\"2.5\"/>\n",
            x + sent * w + 2, y + 2, w - 4, CELL_H - 4, FIGURE_VIOLET);
}

// Draws three ranks in a ring: in each step every rank sends one part to the next one. k - 1
// steps add up, k - 1 hand round.
static inline void draw_ring(FILE *out) {
    enum { K = 3, STEPS = 2 * (K - 1), RING_ROW = 56 };
    Buffer ranks[K], before[K];
    double gap = 36, w = 43, x = NAMES, middle = TOP + RING_ROW + CELL_H / 2.0;
    figure_begin(out, NAMES + (STEPS + 1) * (K * w + gap) - gap + 20, TOP + K * RING_ROW + 34,
                 "all-reduce on a ring of 3: rank r sends to rank r + 1, and 2 sends to 0");
    for (int r = 0; r < K; r++) {
        svg_text(out, 20, TOP + r * RING_ROW + 22, FIGURE_TEXT, 700, "start", SVG_INK, "rank %d",
                 r);
        for (int i = 0; i < K; i++) ranks[r].sum[i] = 1u << r;
    }
    for (int step = 0; step <= STEPS; step++, x += K * w + gap) {
        FIGURE_LABEL(out, x + K * w / 2, TOP - 12, "middle", SVG_MUTED, "step %d: %s", step,
                     step == 0 ? "before" : step < K ? "added" : "handed on");
        memcpy(before, ranks, sizeof ranks);
        for (int r = 0; r < K; r++) {
            int part = (r - step + 2 * K) % K, to = (r + 1) % K;  // received in the step before
            draw_ring_rank(out, x, TOP + r * RING_ROW, w, before[r], K, step < STEPS ? part : -1);
            if (step < K - 1) ranks[to].sum[part] |= before[r].sum[part];
            else if (step < STEPS) ranks[to].sum[part] = before[r].sum[part];
        }
        if (step < STEPS)
            figure_arrow(out, x + K * w + 6, middle, x + K * w + gap - 6, middle, FIGURE_VIOLET,
                         false);
    }
    FIGURE_NOTE(out, 20, TOP + K * RING_ROW + 18,
                "Outlined: the part of the buffer that a rank sends next. abc: the sum of all "
                "three. 4 sends of n/3.");
    svg_end(out);
}

#endif
