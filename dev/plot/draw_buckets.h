// draw_buckets.h: the bucket of wte on the first and on the last stage, cut over the data ranks, and its two sums in
// their order. The offsets come from the parameter table (llmc/model.h) of the model of `make train`.
#ifndef LLMC_DRAW_BUCKETS_H
#define LLMC_DRAW_BUCKETS_H

#include "dev/plot/figure.h"
#include "llmc/model.h"

// Elements of wte's bucket and of wpe's, on one of two stages.
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
    double unit = scale / (double)(wte[0] + wpe[0]), part = unit * (double)wte[0] / D;
    figure_begin(out, 870, 370, "Bucket 0 of the first and of the last stage, cut over d = 2 data ranks");
    for (int s = 0; s < 2; s++) {
        double w = unit * (double)wte[s];
        svg_text(out, 20, y[s] + 20, FIGURE_TEXT, 700, "start", SVG_INK, s ? "last stage" : "first stage");
        figure_box(out, x, y[s], w, 30, FIGURE_WHOLE, "bucket 0: wte, %zu elements", wte[s]);
        if (wpe[s]) figure_box(out, x + w, y[s], unit * (double)wpe[s], 30, "#ffffff", "1: wpe");
        for (int r = 0; r < D; r++)
            figure_box(out, x + r * part, y[s] + 38, part, 30, r ? FIGURE_TOKENS : FIGURE_SHARE,
                       "data rank %d: [%zu, %zu)", r, wte[s] / D * (size_t)r, wte[s] / D * (size_t)(r + 1));
        FIGURE_LABEL(out, 20, y[s] + 58, "start", FIGURE_VIOLET, "1. over the data");
    }
    for (int r = 0; r < D; r++) {
        double middle = x + (r + 0.5) * part;
        figure_arrow(out, middle - 6, y[0] + 70, middle - 6, y[1] - 4, FIGURE_VIOLET, false);
        figure_arrow(out, middle + 6, y[1] - 4, middle + 6, y[0] + 70, FIGURE_VIOLET, false);
        FIGURE_LABEL(out, middle + 18, (y[0] + 68 + y[1]) / 2 + 5, "start", FIGURE_VIOLET, "2. a + b = b + a");
    }
    FIGURE_NOTE(out, 20, y[1] + 98,
                "A reduce-scatter leaves each data rank the sum of its own slice. Alone in its bucket, wte is cut");
    FIGURE_NOTE(out, 20, y[1] + 116,
                "alike on both stages, so the owners of a slice are partners: they exchange 1/d of wte and add two");
    FIGURE_NOTE(out, 20, y[1] + 134,
                "numbers. Whatever order each of the two reduce-scatters added in, both get the same bits.");
    svg_end(out);
}

#endif
