// options_ranks.h: the flags of trainers of several ranks, and the grid that they ask for.
//
// defines: OPTIONS_TENSOR, OPTIONS_PIPELINE, OPTIONS_DATA, RANK_OPTIONS, rank_options,
//          one_rank_options
#ifndef LLMC_OPTIONS_RANKS_H
#define LLMC_OPTIONS_RANKS_H

#include "llmc/grid.h"
#include "llmc/host/options.h"

// Sections of the rows below, as tags beside OPTION_BASIC and OPTION_TRAINS: a trainer has
// some of them.
enum { OPTIONS_TENSOR = 4, OPTIONS_PIPELINE = 8, OPTIONS_DATA = 16 };

#define ROW(name, type, field, initial, tags, value, help) \
    { name, type, offsetof(Options, field), initial, 1, 1e6, tags, value, help }
static const Field RANK_OPTIONS[] = {
    {"Tensor parallelism", FIELD_TITLE, 0, NULL, 0, 0, OPTIONS_TENSOR | OPTION_BASIC, NULL,
     NULL},
    ROW("tensor", FIELD_SIZE, grid.t, NULL, OPTIONS_TENSOR | OPTION_BASIC, "N",
        "ranks that share each layer (default: all in _tp, else 1)"),
    ROW("sequence-parallel", FIELD_SWITCH, sequence_parallel, "0",
        OPTIONS_TENSOR | OPTION_BASIC, "0|1",
        "cut layernorms and residuals along the sequence"),

    {"Pipeline parallelism", FIELD_TITLE, 0, NULL, 0, 0, OPTIONS_PIPELINE | OPTION_BASIC,
     NULL, NULL},
    ROW("pipeline", FIELD_SIZE, grid.p, NULL, OPTIONS_PIPELINE | OPTION_BASIC, "N",
        "stages (default: the ranks left over in _pp, else 1)"),
    ROW("virtual", FIELD_SIZE, chunks, "1", OPTIONS_PIPELINE | OPTION_BASIC, "N",
        "chunks of layers per stage; above 1 --schedule is interleaved"),
    ROW("layers-per-stage", FIELD_TEXT, layers_per_stage, NULL, OPTIONS_PIPELINE, "N,N,...",
        "layers of each stage, for unlike stages (default: equal)"),
    ROW("schedule", FIELD_CHOICE, schedule, NULL, OPTIONS_PIPELINE | OPTION_BASIC,
        "gpipe|1f1b|interleaved|zb-h1|zb-auto|zb-v|v-half|dualpipe-v",
        "order of steps (default: 1f1b)"),
    ROW("schedule-file", FIELD_TEXT, schedule_file, NULL, OPTIONS_PIPELINE, "FILE",
        "a schedule of your own, a line for each stage: F0 F1 B0 W0 B1 W1"),
    ROW("max-in-flight", FIELD_SIZE, max_in_flight, NULL, OPTIONS_PIPELINE, "N",
        "most micro-batches in flight under zb-auto (default: twice the stages)"),

    {"Data parallelism", FIELD_TITLE, 0, NULL, 0, 0, OPTIONS_DATA | OPTION_BASIC, NULL,
     NULL},
    ROW("data", FIELD_SIZE, grid.d, NULL, OPTIONS_DATA | OPTION_BASIC, "N",
        "replicas (default: ranks / (tensor * pipeline))"),
    ROW("zero", FIELD_SWITCH, zero, "1", OPTIONS_DATA | OPTION_BASIC, "0|1",
        "each data rank owns a slice of the optimizer's state (ZeRO-1)"),
    ROW("overlap", FIELD_SWITCH, overlap, "1", OPTIONS_DATA, "0|1",
        "communicate while backward and the next forward compute"),
    ROW("order", FIELD_TEXT, order, "tdp", OPTIONS_DATA, "ORDER",
        "rank order, fastest first: t tensor, d data, p pipeline"),
    ROW("debug-replicas", FIELD_SWITCH, debug_replicas, "0",
        OPTIONS_TENSOR | OPTIONS_DATA | OPTION_TRAINS, "0|1",
        "compare replicas bit by bit, at first and after every step"),
};
#undef ROW

// Fills in the sizes of the grid that were left out, for a run of `ranks` ranks, checks
// that the model divides, and places this rank.
static inline bool rank_options_resolve(Options *o, size_t ranks, Error *err) {
    const GPTConfig *c = &o->config;
    Grid *g = &o->grid;
    size_t *last = o->groups.sections & OPTIONS_DATA       ? &g->d
                   : o->groups.sections & OPTIONS_PIPELINE ? &g->p
                                                           : &g->t;
    bool takes_rest =
        *last == 0;  // the last size that this trainer has: all ranks that are left over
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

// The trainers that have a row with these tags.
static inline const char *rank_option_trainers(unsigned tags) {
    return tags & OPTIONS_TENSOR     ? "train_gpt_tp and the trainers after it"
           : tags & OPTIONS_PIPELINE ? "train_gpt_pp and train_gpt_3d"
                                     : "train_gpt_3d and train_data";
}

// The rows that a trainer with these sections of RANK_OPTIONS adds to the
// command line.
static inline RankOptions rank_options(unsigned sections) {
    const RankOptions x = {RANK_OPTIONS, sizeof RANK_OPTIONS / sizeof *RANK_OPTIONS,
                           sections, rank_option_trainers, rank_options_resolve};
    return x;
}

// The same for a trainer of one rank: none of these flags, but each is refused with the
// trainers that have it.
static inline RankOptions one_rank_options(void) {
    RankOptions x = rank_options(0);
    x.resolve = NULL;
    return x;
}

#endif
