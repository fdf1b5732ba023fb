// draw_buckets.h: bucket 0, the embeddings, on the first and on the last stage, cut over the data ranks. The offsets
// come from the parameter table (llmc/model.h) of the model of `make train`.
#ifndef LLMC_DRAW_BUCKETS_H
#define LLMC_DRAW_BUCKETS_H

#include "dev/plot/figure.h"
#include "llmc/model.h"

// Elements of bucket 0 and of wte in it, on one of two stages.
static inline void bucket_sizes(bool first, size_t d, size_t *bucket, size_t *wte) {
    size_t layers[2] = {first ? 0 : 2, first ? 1 : 3};
    GPTConfig config = {4, 128, 4, 257, padded_vocabulary(257), 64, NULL};
    Shard shard = {1, 0, first, !first, 2, layers, (size_t)TENSOR_ALIGN * d, 1, 0};
    ParamTable table = table_make(&config, shard);
    *bucket = table.buckets[1] - table.buckets[0];
    *wte = table_find(&table, WTE, 0)->size;
    table_free(&table);
}

static inline void draw_bucket0(FILE *out) {
    enum { D = 2 };
    double x = 150, scale = 690, y[2] = {70, 190};
    size_t bucket[2], wte[2];
    bucket_sizes(true, D, &bucket[0], &wte[0]);
    bucket_sizes(false, D, &bucket[1], &wte[1]);
    double unit = scale / (double)bucket[0];
    figure_begin(out, 870, 356, "Bucket 0 of the first and of the last stage, cut over d = 2 data ranks");
    for (int s = 0; s < 2; s++) {
        svg_text(out, 20, y[s] + 16, FIGURE_TEXT, 700, "start", SVG_INK, s ? "last stage" : "first stage");
        FIGURE_NOTE(out, 20, y[s] + 34, "%zu elements", bucket[s]);
        double w = unit * (double)wte[s], part = unit * (double)bucket[s] / D;
        figure_box(out, x, y[s], w, 30, FIGURE_WHOLE, "%s", "");
        svg_text(out, x + 60, y[s] + 20, FIGURE_TEXT, 400, "start", SVG_INK, "wte: %zu", wte[s]);
        if (bucket[s] > wte[s])
            figure_box(out, x + w, y[s], unit * (double)(bucket[s] - wte[s]), 30, "#ffffff", "wpe: %zu",
                       bucket[s] - wte[s]);
        for (int r = 0; r < D; r++) {
            figure_box(out, x + r * part, y[s] + 38, part, 30, r ? FIGURE_TOKENS : FIGURE_SHARE,
                       "data rank %d: [%zu, %zu)", r, bucket[s] / D * (size_t)r, bucket[s] / D * (size_t)(r + 1));
        }
    }
    double a = x + unit * (double)bucket[1] / D, b = x + unit * (double)bucket[0] / D;
    fprintf(
        out,
        "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"none\" stroke=\"%s\" stroke-width=\"2\" "
        "stroke-dasharray=\"5 3\"/>\n",
        a, y[0] - 8, b - a, y[1] - y[0] + 84, FIGURE_ORANGE);
    svg_line(out, (a + b) / 2, y[1] + 76, (a + b) / 2, y[1] + 90, FIGURE_ORANGE, 1.6);
    FIGURE_LABEL(out, (a + b) / 2, y[1] + 106, "middle", FIGURE_ORANGE,
                 "wte's elements %zu .. %zu: reduced on data rank 0 above, on data rank 1 below", bucket[1] / D,
                 bucket[0] / D - 1);
    FIGURE_NOTE(out, 20, y[1] + 132,
                "A reduce-scatter leaves the sum in a rank's own slice and not in the rest. Of the marked elements");
    FIGURE_NOTE(out, 20, y[1] + 150,
                "no data rank has the sum on both stages. So the two stages add theirs first, and the data ranks "
                "after them.");
    svg_end(out);
}

#endif
