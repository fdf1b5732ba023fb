// draw_documents.h: a sequence of several documents on a ring of context parallelism: its mask, and
// the uneven work of the ranks.
#ifndef LLMC_DRAW_DOCUMENTS_H
#define LLMC_DRAW_DOCUMENTS_H

#include "dev/plot/draw_context.h"
#include "llmc/host/context.h"
#include "llmc/host/first_keys.h"

enum { DOCUMENTS_T = 64, DOCUMENTS_CELL = 5, DOCUMENTS_LONG = 4096, DOCUMENTS_SAMPLES = 50 };

// The pairs of a query and a key in each step on each rank, and their sums.
typedef struct {
    double work[CONTEXT_RANKS][CONTEXT_RANKS];  // [step][rank]
    double slowest;  // sum over the steps of the rank with most
    double mean;     // sum over the steps, of the mean rank
    int skipped;     // pairs of ranks without work
} DocumentWork;

static inline DocumentWork document_work(const int *first, size_t T, bool zigzag) {
    DocumentWork w = {{{0}}, 0, 0, 0};
    const size_t c = CONTEXT_RANKS;
    for (size_t step = 0; step < c; step++) {
        double most = 0;
        for (size_t rank = 0; rank < c; rank++) {
            Tokens queries = tokens_of(T, c, rank, zigzag);
            Tokens keys = tokens_of(T, c, (rank + c - step) % c, zigzag);
            double work = document_rows(NULL, first, queries, keys, T / c);
            w.work[step][rank] = work;
            w.mean += work / (double)c;
            w.skipped += work == 0;
            most = fmax(most, work);
        }
        w.slowest += most;
    }
    return w;
}

// Writes the first keys of a sequence whose documents have random lengths (exponential). mean 0:
// one document.
static inline void random_documents(int *first, size_t T, double mean, size_t sample) {
    double next = 0;
    for (size_t t = 0; t < T; t++) {
        bool begins = t == 0 || (mean > 0 && (double)t >= next);
        first[t] = begins ? (int)t : first[t - 1];
        if (!begins) continue;
        double u = random_uniform(5, RANDOM_INIT, 0, sample, t);
        next = (double)t + fmax(1, -mean * log(1 - u));
    }
}

// Returns how many times the balanced time a ring takes, over many random sequences.
static inline double document_unevenness(double mean, bool zigzag, double *skipped) {
    static int first[DOCUMENTS_LONG];
    double slowest = 0, balanced = 0, none = 0;
    for (size_t sample = 0; sample < DOCUMENTS_SAMPLES; sample++) {
        random_documents(first, DOCUMENTS_LONG, mean, sample);
        DocumentWork w = document_work(first, DOCUMENTS_LONG, zigzag);
        slowest += w.slowest;
        balanced += w.mean;
        none += w.skipped;
    }
    *skipped = none / (DOCUMENTS_SAMPLES * CONTEXT_RANKS * CONTEXT_RANKS);
    return slowest / balanced;
}

// Draws the mask of one sequence, a row for each query in the colour of its rank, and the work of
// each step below it.
static inline void draw_document_ring(FILE *out, double x, double y, const int *first,
                                      bool zigzag) {
    const size_t T = DOCUMENTS_T, held = T / CONTEXT_RANKS;
    const double cell = DOCUMENTS_CELL, side = cell * (double)T;
    DocumentWork w = document_work(first, T, zigzag);
    svg_text(out, x, y, FIGURE_TEXT, 700, "start", SVG_INK, "%s",
             zigzag ? "zigzag" : "contiguous");
    svg_rect(out, x, y + 10, side, side, "#ffffff", SVG_GRID);
    for (size_t t = 0; t < T; t++) {
        size_t rank = 0;
        while (tokens_row(tokens_of(T, CONTEXT_RANKS, rank, zigzag), t, held) == held) rank++;
        double left = x + cell * first[t], top = y + 10 + cell * (double)t;
        svg_rect(out, left, top, cell * (double)(t + 1 - (size_t)first[t]), cell,
                 CONTEXT_COLORS[rank], NULL);
    }
    for (size_t step = 0; step < CONTEXT_RANKS; step++) {
        double left = x + 82 * (double)step, top = y + side + 40;
        FIGURE_NOTE(out, left, top - 8, "step %zu", step);
        for (size_t rank = 0; rank < CONTEXT_RANKS; rank++)
            svg_rect(out, left, top + 12 * (double)rank, 0.4 * w.work[step][rank], 9,
                     CONTEXT_COLORS[rank], NULL);
    }
    FIGURE_NOTE(out, x, y + side + 110, "slowest %g, mean %g: %.2f times; %d of 16 skipped",
                w.slowest, w.mean, w.slowest / w.mean, w.skipped);
}

static inline void draw_documents(FILE *out) {
    static const int begins[] = {0, 5, 26, 42};
    static const double means[] = {0, 4096, 1024, 256, 64};
    int first[DOCUMENTS_T];
    for (int t = 0, i = 0; t < DOCUMENTS_T; t++) {
        if (i < 3 && t == begins[i + 1]) i++;
        first[t] = begins[i];
    }
    figure_begin(out, 880, 660,
                 "Four documents on a ring of 4 ranks: who attends to what (queries down, keys "
                 "across)");
    for (size_t i = 0; i < CONTEXT_RANKS; i++) {
        svg_rect(out, 20 + 80 * (double)i, 42, 14, 14, CONTEXT_COLORS[i], SVG_MUTED);
        FIGURE_NOTE(out, 40 + 80 * (double)i, 54, "rank %zu", i);
    }
    draw_document_ring(out, 20, 84, first, true);
    draw_document_ring(out, 460, 84, first, false);
    FIGURE_NOTE(out, 20, 545,
                "%d random sequences of %d tokens: how many times the balanced time the ring takes "
                "(pairs of ranks skipped)",
                DOCUMENTS_SAMPLES, DOCUMENTS_LONG);
    for (int row = 0; row < 3; row++) {
        double y = 570 + 24 * row;
        static const char *const names[] = {"mean length", "zigzag", "contiguous"};
        FIGURE_NOTE(out, 20, y, "%s", names[row]);
        for (size_t i = 0; i < sizeof means / sizeof *means; i++) {
            double x = 140 + 150 * (double)i, skipped;
            double times = row ? document_unevenness(means[i], row == 1, &skipped) : 0;
            if (row) FIGURE_NOTE(out, x, y, "%.2f (%.0f%%)", times, 100 * skipped);
            else if (means[i] > 0) FIGURE_NOTE(out, x, y, "%.0f", means[i]);
            else FIGURE_NOTE(out, x, y, "one document");
        }
    }
    svg_end(out);
}

#endif
