// draw_muon.h: which data rank owns which matrix under train_muon, and when the matrices of two
// layers travel. llmc/model_muon.h gives the owners; the times are round.
#ifndef LLMC_DRAW_MUON_H
#define LLMC_DRAW_MUON_H

#include "dev/plot/draw_shards.h"
#include "llmc/model_muon.h"

static inline void draw_lesson_muon(FILE *out) {
    enum { L = 4, RANKS = 4, CELL = 12, LEFT = 100, TOP = 70 };
    static const char *const names[LAYER_MATRICES] = {"q k v", "proj", "fc", "fcproj"};
    static const int widths[LAYER_MATRICES] = {9, 3, 12, 12};  // elements, in C^2 / 3
    static const char *const rows[] = {"compute", "data stream"};
    MuonSpec spec;
    muon_spec(&spec);
    GPTConfig config = {L, 64, 4, 257, 384, 64, &spec.model};
    ParamTable table = table_make(&config, shard_whole(&config));
    MuonBlock *blocks = muon_blocks(&table);
    muon_deal(blocks, L * LAYER_MATRICES, RANKS);
    figure_begin(out, 660, 410, "Matrices of 4 layers and their owners, 4 data ranks");

    // Each matrix with the vectors beside it, in the order of memory.
    for (int i = 0, x = LEFT; i < LAYER_MATRICES; x += CELL * widths[i++])
        FIGURE_LABEL(out, x + CELL * widths[i] / 2, TOP - 10, "middle", SVG_INK, "%s", names[i]);
    for (int l = 0; l < L; l++) {
        int x = LEFT, y = TOP + 32 * l;
        FIGURE_LABEL(out, 12, y + 18, "start", SVG_INK, "layer %d", l);
        for (int i = 0; i < LAYER_MATRICES; x += CELL * widths[i++]) {
            int owner = blocks[l * LAYER_MATRICES + i].owner;
            figure_box(out, x, y, CELL * widths[i], 26, SHARDS_COLORS[owner], "%d", owner);
        }
    }

    // A step of two layers: rank 0's streams.
    ShardsDrawing d = {out, TOP + 32 * L + 34, 17, 0, 0};
    double reduced[2] = {0}, written[2];
    shards_rows(&d, 2, rows);
    for (int l = 2; l-- > 0;) {
        double end = shards_run(&d, 0, &d.compute, 0, 4, FIGURE_WHOLE, 'B', l);
        reduced[l] = shards_run(&d, 1, &d.data, end, 3.4, FIGURE_COLLECTIVE, 'R', l);
    }
    shards_run(&d, 0, &d.compute, reduced[0], 1.4, FIGURE_WHOLE, 'A', -1);
    for (int l = 0; l < 2; l++) {
        double end = shards_run(&d, 0, &d.compute, 0, 2.4, FIGURE_SHARE, 'N', l);
        written[l] = shards_run(&d, 1, &d.data, end, 2.6, FIGURE_COLLECTIVE, 'W', l);
    }
    for (int l = 0; l < 2; l++)
        shards_run(&d, 0, &d.compute, written[l], 3, FIGURE_WHOLE, 'F', l);
    double y = d.top + 2 * SHARDS_ROW + 20;
    FIGURE_NOTE(out, 12, y,
                "A number is the rank that updates a matrix and the vectors beside it.");
    FIGURE_NOTE(out, 12, y + 20,
                "B, F: backward and next forward of a layer.  A: norm, AdamW and momentum.");
    FIGURE_NOTE(out, 12, y + 40,
                "R: a layer's four blocks are reduced, each to its owner.");
    FIGURE_NOTE(out, 12, y + 60, "N: Newton-Schulz on this rank's matrices of a layer.");
    FIGURE_NOTE(out, 12, y + 80, "W: each owner broadcasts its block.");
    svg_end(out);
    free(blocks);
    table_free(&table);
}

#endif
