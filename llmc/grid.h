// grid.h: the (tensor, data, pipeline) grid of ranks: the coordinates of a rank and its
// groups, and the grid that the flags ask for.
//
// A rank number is a mixed-radix number whose digits are the three coordinates. By default
// tensor is the fastest digit. Tensor ranks communicate most, so they should be neighbours
// (one node, NVLink); pipeline ranks communicate least.
//
// defines: grid_size, grid_make, grid_rank_at, grid_place, grid_group, grid_print,
//          stage_listed, stage_list_is, rank_options_resolve, rank_options
#ifndef LLMC_GRID_H
#define LLMC_GRID_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/host/options_ranks.h"

static inline size_t grid_size(const Grid *g, char axis) {
    return axis == 't' ? g->t : axis == 'd' ? g->d : g->p;
}

// Returns the world rank of the coordinates (t, d, p), each below its size.
static inline int grid_rank_at(const Grid *g, size_t t, size_t d, size_t p) {
    size_t rank = 0;
    for (int i = 2; i >= 0; i--) {
        char axis = g->order[i];
        rank = rank * grid_size(g, axis) + (axis == 't' ? t : axis == 'd' ? d : p);
    }
    return (int)rank;  // NCCL and MPI count ranks in int
}

// Sets g's coordinates to those of rank `rank`.
static inline void grid_place(Grid *g, size_t rank) {
    g->rank = rank;
    for (int i = 0; i < 3; i++) {
        char axis = g->order[i];
        size_t coordinate = rank % grid_size(g, axis);
        rank /= grid_size(g, axis);
        if (axis == 't')
            g->t_rank = coordinate;
        else if (axis == 'd')
            g->d_rank = coordinate;
        else
            g->p_rank = coordinate;
    }
}

// Places `rank` of `world` ranks in a grid that has its sizes t, d and p. `order` names the
// digits from fastest to slowest. Returns false, with an error that says what to change, if
// the sizes do not fit.
static inline bool grid_make(Grid *g, size_t world, size_t rank, const char *order,
                             Error *err) {
    if (strlen(order) != 3 || !strchr(order, 't') || !strchr(order, 'd') ||
        !strchr(order, 'p')) {
        return error_set(
            err, "--order must be an order of the letters t, d and p, not '%s'", order);
    }
    if (g->t * g->d * g->p != world) {
        char data[40] = "", pipeline[40] = "";
        if (g->p > 1) snprintf(pipeline, sizeof pipeline, " * --pipeline %zu", g->p);
        if (g->d > 1) snprintf(data, sizeof data, " * --data %zu", g->d);
        return error_set(err,
                         "--tensor %zu%s%s makes %zu, but the job has %zu rank%s: change "
                         "that or the ranks",
                         g->t, pipeline, data, g->t * g->d * g->p, world,
                         world == 1 ? "" : "s");
    }
    g->world = world;
    memcpy(g->order, order, sizeof g->order);
    grid_place(g, rank);
    return true;
}

// Fills ranks[] with the world ranks of one of this rank's groups, in their order there.
// Returns their number.
//   't' tensor, 'd' data, 'p' pipeline: the ranks that differ in that coordinate only;
//   'e' embedding: first and last stage, which both hold the tied embedding. Other stages
//       are in none: returns 0.
static inline size_t grid_group(const Grid *g, char group, int *ranks) {
    bool ends = group == 'e';
    size_t count = ends ? 1 + (g->p > 1) : grid_size(g, group);
    if (ends && g->p_rank != 0 && g->p_rank != g->p - 1) return 0;
    for (size_t i = 0; i < count; i++)
        ranks[i] = grid_rank_at(g, group == 't' ? i : g->t_rank,
                                group == 'd' ? i : g->d_rank,
                                ends           ? i * (g->p - 1)
                                : group == 'p' ? i
                                               : g->p_rank);
    return count;
}

enum { GRID_ROWS = 64 };  // most rows of grid_print

// Prints the sizes, and unless there are too many a row per pipeline stage and data rank,
// with the world ranks of its tensor group. One rank calls it.
static inline void grid_print(FILE *file, const Grid *g) {
    fprintf(file,
            "%zu rank%s = %zu tensor x %zu data x %zu pipeline, fastest to slowest %s\n",
            g->world, g->world == 1 ? "" : "s", g->t, g->d, g->p, g->order);
    if (g->p * g->d > GRID_ROWS) return;
    fprintf(file, "stage  data  tensor ranks\n");
    for (size_t p = 0; p < g->p; p++) {
        for (size_t d = 0; d < g->d; d++) {
            fprintf(file, "%5zu %5zu ", p, d);
            for (size_t t = 0; t < g->t; t++)
                fprintf(file, " %4d", grid_rank_at(g, t, d, p));
            fprintf(file, "\n");
        }
    }
}

// Returns the layers of a stage by a list as of --layers-per-stage, "10,10,12,16"; 0 behind
// its end.
static inline size_t stage_listed(const char *list, size_t stage) {
    for (; list && stage > 0; stage--)
        list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL;
    return list ? (size_t)strtoull(list, NULL, 10) : 0;
}

// Returns true if the list gives each of p stages v layers or more, and L to all.
static inline bool stage_list_is(const char *list, size_t L, size_t p, size_t v) {
    size_t commas = 0, left = L;
    for (const char *at = list; *at; at++) commas += *at == ',';
    if (strspn(list, "0123456789,") < strlen(list) || commas + 1 != p) return false;
    for (size_t s = 0, n; s < p; s++, left -= n)
        if ((n = stage_listed(list, s)) < v || n > left) return false;
    return left == 0;
}

// Fills in the sizes of the grid that were left out, for a run of `ranks` ranks, checks
// that the model divides, and places this rank.
static inline bool rank_options_resolve(Options *o, size_t ranks, Error *err) {
    const GPTConfig *c = &o->config;
    Grid *g = &o->grid;
    size_t *last = o->groups.sections & OPTIONS_DATA       ? &g->d
                   : o->groups.sections & OPTIONS_PIPELINE ? &g->p
                                                           : &g->t;
    // The last size that this trainer has takes all ranks that are left over.
    bool takes_rest = *last == 0;
    if (!g->t) g->t = 1;
    if (!g->p) g->p = 1;
    if (!g->d) g->d = 1;
    if (takes_rest && ranks % (g->t * g->p * g->d) == 0)
        *last = ranks / (g->t * g->p * g->d);
    if (c->NH % g->t)
        return error_set(
            err, "--tensor %zu does not divide the %zu heads: take a size that does", g->t,
            c->NH);
    if (c->Vp % g->t)
        return error_set(
            err,
            "--tensor %zu does not divide the vocabulary padded to %zu: take a power of 2",
            g->t, c->Vp);
    if (o->sequence_parallel && o->seq % g->t)
        return error_set(
            err,
            "--tensor %zu does not divide --seq %zu, which --sequence-parallel 1 needs",
            g->t, o->seq);
    if (o->schedule_file && o->schedule >= 0)
        return error_set(
            err, "--schedule and --schedule-file exclude each other: leave one out");
    if (o->max_in_flight && o->schedule != SCHEDULE_ZB_AUTO)
        return error_set(err,
                         "--max-in-flight %zu needs --schedule zb-auto, the only schedule "
                         "with such a limit",
                         o->max_in_flight);
    if (o->schedule < 0) o->schedule = o->chunks > 1 ? SCHEDULE_INTERLEAVED : SCHEDULE_1F1B;
    if (g->p * o->chunks > c->L)
        return error_set(
            err,
            "%zu layers do not fill %zu stages * %zu chunks: lower --pipeline or --virtual",
            c->L, g->p, o->chunks);
    if (o->layers_per_stage && !stage_list_is(o->layers_per_stage, c->L, g->p, o->chunks))
        return error_set(err,
                         "--layers-per-stage %.100s must be %zu numbers, one for each "
                         "stage, that sum to the %zu "
                         "layers and are %zu or more, as in --layers-per-stage 3,2",
                         o->layers_per_stage, g->p, c->L, o->chunks);
    if (g->d % o->context)
        return error_set(
            err, "--context %zu does not divide the %zu data ranks: take a size that does",
            o->context, g->d);
    return grid_make(g, ranks, g->rank, o->order, err);
}

// The rows that a trainer with these sections of RANK_OPTIONS adds to the command line.
static inline RankOptions rank_options(unsigned sections) {
    RankOptions x = one_rank_options();
    x.sections = sections;
    x.resolve = rank_options_resolve;
    return x;
}

#endif
