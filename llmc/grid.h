// grid.h: where a rank stands in the (tensor, data, pipeline) grid, and which ranks form its groups.
//
// A rank number is a mixed-radix number whose digits are the three coordinates. By default tensor is the
// fastest digit: tensor ranks talk most, so they should be neighbours (one node, NVLink), and pipeline ranks
// talk least.
//
// defines: Grid, grid_make, grid_rank_at, grid_color, grid_key, grid_group_size, grid_print,
//          stage_first_layer, stage_layer_count
#ifndef LLMC_GRID_H
#define LLMC_GRID_H

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "llmc/host/error.h"

typedef struct {
    int world, rank;             // all ranks, and this one
    int t, d, p;                 // sizes of the tensor, data and pipeline groups: t * d * p = world
    int t_rank, d_rank, p_rank;  // this rank's coordinates
    char order[4];               // the digits from fastest to slowest, as "tdp"
} Grid;

static inline int grid_size(const Grid *g, char axis) {
    return axis == 't' ? g->t : axis == 'd' ? g->d : g->p;
}

// World rank of the coordinates (t, d, p), each below its size.
static inline int grid_rank_at(const Grid *g, int t, int d, int p) {
    int rank = 0;
    for (int i = 2; i >= 0; i--) {
        char axis = g->order[i];
        rank = rank * grid_size(g, axis) + (axis == 't' ? t : axis == 'd' ? d : p);
    }
    return rank;
}

static inline void grid_place(Grid *g, int rank) {
    g->rank = rank;
    for (int i = 0; i < 3; i++) {
        char axis = g->order[i];
        int coordinate = rank % grid_size(g, axis);
        rank /= grid_size(g, axis);
        if (axis == 't') g->t_rank = coordinate;
        else if (axis == 'd') g->d_rank = coordinate;
        else g->p_rank = coordinate;
    }
}

// Places `rank` of `world` ranks in a grid of t x d x p; d = 0 takes what t and p leave. `order` names the
// digits from fastest to slowest. On sizes that do not fit returns false with a sentence that says what to
// change.
static inline bool grid_make(Grid *g, int world, int rank, int t, int d, int p, const char *order,
                             Error *err) {
    memset(g, 0, sizeof *g);
    if (world < 1 || rank < 0 || rank >= world)
        return error_set(err, "rank %d of %d ranks does not exist", rank, world);
    if (t < 1) return error_set(err, "--tensor %d is not a number of ranks: use 1 or more", t);
    if (d < 0)
        return error_set(err, "--data %d is not a number of ranks: use 1 or more, or 0 to derive it", d);
    if (p < 1) return error_set(err, "--pipeline %d is not a number of ranks: use 1 or more", p);
    if (!order || strlen(order) != 3 || !strchr(order, 't') || !strchr(order, 'd') || !strchr(order, 'p')) {
        return error_set(err, "--order %s is not a permutation of the letters t, d and p",
                         order ? order : "(none)");
    }
    long long model = (long long)t * p;
    if (d == 0) {
        if (world % model != 0) {
            return error_set(
                err,
                "--tensor %d x --pipeline %d = %lld does not divide the %d ranks that were started: "
                "change one of them, or start a multiple of %lld ranks with mpirun -n",
                t, p, model, world, model);
        }
        d = (int)(world / model);
    } else if (model > INT_MAX || model * d != world) {
        return error_set(err,
                         "--tensor %d x --data %d x --pipeline %d need %lld ranks, but %d were started: "
                         "change one of them, or start that many with mpirun -n",
                         t, d, p, model > INT_MAX ? model : model * d, world);
    }
    g->world = world;
    g->t = t;
    g->d = d;
    g->p = p;
    memcpy(g->order, order, 3);
    grid_place(g, rank);
    return true;
}

// The groups that communicate, for ncclCommSplit(world, grid_color(g, group), grid_key(g, group), ...):
//   't' tensor, 'd' data, 'p' pipeline: the ranks that differ in that coordinate only;
//   'e' embedding: first and last stage, which both hold the tied embedding; -1, no group, between them;
//   'm' model: all tensor and pipeline ranks of one replica, over which norms and losses are summed.
// Two ranks are in the same group exactly if they have the same colour.
static inline int grid_color(const Grid *g, char group) {
    switch (group) {
        case 't': return g->d_rank + g->d * g->p_rank;
        case 'd': return g->t_rank + g->t * g->p_rank;
        case 'p': return g->t_rank + g->t * g->d_rank;
        case 'e': return g->p_rank == 0 || g->p_rank == g->p - 1 ? g->t_rank + g->t * g->d_rank : -1;
        case 'm': return g->d_rank;
        default: return -1;
    }
}

// This rank's number within its group.
static inline int grid_key(const Grid *g, char group) {
    switch (group) {
        case 't': return g->t_rank;
        case 'd': return g->d_rank;
        case 'p': return g->p_rank;
        case 'e': return g->p_rank == 0 ? 0 : 1;
        case 'm': return g->t_rank + g->t * g->p_rank;
        default: return -1;
    }
}

static inline int grid_group_size(const Grid *g, char group) {
    switch (group) {
        case 't': return g->t;
        case 'd': return g->d;
        case 'p': return g->p;
        case 'e': return g->p > 1 ? 2 : 1;
        case 'm': return g->t * g->p;
        default: return 0;
    }
}

// A row per pipeline stage and data rank, with the world ranks of its tensor group. One rank prints.
static inline void grid_print(FILE *file, const Grid *g) {
    fprintf(file, "%d rank%s = %d tensor x %d data x %d pipeline, fastest to slowest %s\n", g->world,
            g->world == 1 ? "" : "s", g->t, g->d, g->p, g->order);
    fprintf(file, "stage  data  tensor ranks\n");
    for (int p = 0; p < g->p; p++) {
        for (int d = 0; d < g->d; d++) {
            fprintf(file, "%5d %5d ", p, d);
            for (int t = 0; t < g->t; t++) fprintf(file, " %4d", grid_rank_at(g, t, d, p));
            fprintf(file, "\n");
        }
    }
}

// Layers are dealt to the chunks (stages, or virtual stages) in runs; the first L % chunks chunks get one
// more, so that every layer is in exactly one chunk whatever divides what.
static inline size_t stage_layer_count(size_t L, size_t chunks, size_t chunk) {
    return L / chunks + (chunk < L % chunks ? 1 : 0);
}

static inline size_t stage_first_layer(size_t L, size_t chunks, size_t chunk) {
    size_t longer = chunk < L % chunks ? chunk : L % chunks;
    return chunk * (L / chunks) + longer;
}

#endif
