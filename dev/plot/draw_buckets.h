// draw_buckets.h: the buckets of the embeddings on the first and on the last stage, cut over the
// data ranks. The sizes come from the parameter table (llmc/model.h) of the model of `make
// train`.
#ifndef LLMC_DRAW_BUCKETS_H
#define LLMC_DRAW_BUCKETS_H

#include "dev/plot/figure.h"
#include "llmc/model.h"

// Sets the elements of buckets 0 and 1, wte and wpe, on the first or on the last of two stages.
static inline void bucket_sizes(bool first, size_t d, size_t *wte, size_t *wpe) {
    size_t layers[2] = {first ? 0 : 2, first ? 1 : 3};
    GPTConfig config = {4, 128, 4, 257, padded_vocabulary(257), 64, NULL};
    Shard shard = {1, 0, first, !first, 2, layers, (size_t)TENSOR_ALIGN * d, 1, 0};
    ParamTable table = table_make(&config, shard);
    *wte = table.buckets[1] - table.buckets[0];
    *wpe = table.buckets[2] - table.buckets[1];
    table_free(&table);
}

static inline void draw_bucket0(FILE *out) {
    enum { D = 2 };
    double x = 150, scale = 690, y[2] = {70, 210};
    size_t wte[2], wpe[2];
    bucket_sizes(true, D, &wte[0], &wpe[0]);
    bucket_sizes(false, D, &wte[1], &wpe[1]);
    double unit = (scale - 20) / (double)(wte[0] + wpe[0]);
    figure_begin(
        out, 870, 364,
        "The tied embedding on the first and on the last stage, cut over d = 2 data ranks");

    for (int s = 0; s < 2; s++) {
        double w = unit * (double)wte[s], part = w / D;
        svg_text(out, 20, y[s] + 16, FIGURE_TEXT, 700, "start", SVG_INK,
                 s ? "last stage" : "first stage");
        FIGURE_NOTE(out, 20, y[s] + 34, "bucket 0: %zu", wte[s]);
        figure_box(out, x, y[s], w, 30, FIGURE_WHOLE, "wte: %zu", wte[s]);
        if (wpe[s]) {
            figure_box(out, x + w + 20, y[s], unit * (double)wpe[s], 30, "#ffffff", "wpe: %zu",
                       wpe[s]);
            FIGURE_NOTE(out, x + w + 20, y[s] + 52, "bucket 1");
        }
        for (int r = 0; r < D; r++) {
            figure_box(out, x + r * part, y[s] + 38, part, 30, r ? FIGURE_TOKENS : FIGURE_SHARE,
                       "data rank %d: [%zu, %zu)", r, wte[s] / D * (size_t)r,
                       wte[s] / D * (size_t)(r + 1));
        }
    }

    // Each part is summed with its twin on the other stage.
    for (int r = 0; r < D; r++) {
        double middle = x + (r + 0.5) * unit * (double)wte[0] / D;
        svg_line(out, middle, y[0] + 70, middle, y[1] - 2, FIGURE_ORANGE, 1.6);
        FIGURE_LABEL(out, middle + 8, (y[0] + y[1]) / 2 + 40, "start", FIGURE_ORANGE,
                     "2: sum over the two stages");
    }
    FIGURE_NOTE(out, 20, y[1] + 98,
                "1: On each stage a reduce-scatter over the data ranks leaves the sum of each "
                "part on its owner.");
    FIGURE_NOTE(out, 20, y[1] + 116,
                "2: The owners of a part on the two stages add their sums: a + b has the same "
                "bits on both, in whatever");
    FIGURE_NOTE(out, 20, y[1] + 134,
                "order each of a and b was added. wpe stands apart, or it would move the cut on "
                "the first stage.");
    svg_end(out);
}

#endif
