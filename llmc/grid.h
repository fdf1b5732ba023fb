// grid.h: where a rank stands in the (tensor, data, pipeline) grid, and which ranks form its groups.
//
// A rank number is a mixed-radix number whose digits are the three coordinates. By default tensor is the
// fastest digit: tensor ranks talk most, so they should be neighbours (one node, NVLink), and pipeline ranks
// talk least.
//
// defines: Grid, grid_make, grid_rank_at, grid_color, grid_key, grid_print,
//          stage_first_layer, stage_layer_count
#ifndef LLMC_GRID_H
#define LLMC_GRID_H

#include <stdio.h>
#include <string.h>

#include "llmc/host/error.h"

typedef struct {
    size_t world, rank;             // all ranks, and this one
    size_t t, d, p;                 // sizes of the tensor, data and pipeline groups: t * d * p = world
    size_t t_rank, d_rank, p_rank;  // this rank's coordinates
    char order[4];                  // the digits from fastest to slowest, as "tdp"
} Grid;

static inline size_t grid_size(const Grid *g, char axis) { return axis == 't' ? g->t : axis == 'd' ? g->d : g->p; }

// World rank of the coordinates (t, d, p), each below its size.
static inline int grid_rank_at(const Grid *g, size_t t, size_t d, size_t p) {
    size_t rank = 0;
    for (int i = 2; i >= 0; i--) {
        char axis = g->order[i];
        rank = rank * grid_size(g, axis) + (axis == 't' ? t : axis == 'd' ? d : p);
    }
    return (int)rank;  // NCCL and MPI count ranks in int
}

static inline void grid_place(Grid *g, size_t rank) {
    g->rank = rank;
    for (int i = 0; i < 3; i++) {
        char axis = g->order[i];
        size_t coordinate = rank % grid_size(g, axis);
        rank /= grid_size(g, axis);
        if (axis == 't') g->t_rank = coordinate;
        else if (axis == 'd') g->d_rank = coordinate;
        else g->p_rank = coordinate;
    }
}

// Places `rank` of `world` ranks in a grid of t x d x p. `order` names the digits from fastest to slowest. What does
// not fit is refused with a sentence that says what to change.
static inline bool grid_make(Grid *g, size_t world, size_t rank, size_t t, size_t d, size_t p, const char *order,
                             Error *err) {
    memset(g, 0, sizeof *g);
    if (rank >= world) return error_set(err, "rank %zu of %zu ranks does not exist", rank, world);
    if (strlen(order) != 3 || !strchr(order, 't') || !strchr(order, 'd') || !strchr(order, 'p')) {
        return error_set(err, "--order must be an order of the letters t, d and p, not '%s'", order);
    }
    if (t * d * p != world) {
        char data[40] = "", pipeline[40] = "";
        if (p > 1) snprintf(pipeline, sizeof pipeline, " * --pipeline %zu", p);
        if (d > 1) snprintf(data, sizeof data, " * --data %zu", d);
        return error_set(err, "--tensor %zu%s%s makes %zu, but %zu rank%s started: change that or mpirun -n", t,
                         pipeline, data, t * d * p, world, world == 1 ? " was" : "s were");
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
//   'e' embedding: first and last stage, which both hold the tied embedding; -1, no group, between them.
// Two ranks are in the same group exactly if they have the same colour.
static inline int grid_color(const Grid *g, char group) {
    size_t color = group == 't' ? g->d_rank + g->d * g->p_rank
                 : group == 'd' ? g->t_rank + g->t * g->p_rank
                                : g->t_rank + g->t * g->d_rank;
    return group == 'e' && g->p_rank != 0 && g->p_rank != g->p - 1 ? -1 : (int)color;
}

// This rank's number within its group.
static inline int grid_key(const Grid *g, char group) {
    return (int)(group == 't' ? g->t_rank : group == 'd' ? g->d_rank : group == 'p' ? g->p_rank : g->p_rank != 0);
}

static inline void grid_print_sizes(FILE *file, const Grid *g) {
    fprintf(file, "%zu rank%s = %zu tensor x %zu data x %zu pipeline, fastest to slowest %s\n", g->world,
            g->world == 1 ? "" : "s", g->t, g->d, g->p, g->order);
}

// A row per pipeline stage and data rank, with the world ranks of its tensor group. One rank prints.
static inline void grid_print(FILE *file, const Grid *g) {
    grid_print_sizes(file, g);
    fprintf(file, "stage  data  tensor ranks\n");
    for (size_t p = 0; p < g->p; p++) {
        for (size_t d = 0; d < g->d; d++) {
            fprintf(file, "%5zu %5zu ", p, d);
            for (size_t t = 0; t < g->t; t++) fprintf(file, " %4d", grid_rank_at(g, t, d, p));
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
