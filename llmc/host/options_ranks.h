// options_ranks.h: the flags of trainers of several ranks.
//
// defines: OPTIONS_TENSOR, OPTIONS_PIPELINE, OPTIONS_DATA, RANK_OPTIONS, one_rank_options
#ifndef LLMC_OPTIONS_RANKS_H
#define LLMC_OPTIONS_RANKS_H

#include "llmc/host/options_table.h"

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

// Returns the names of the trainers that have a row with these tags.
static inline const char *rank_option_trainers(unsigned tags) {
    return tags & OPTIONS_TENSOR     ? "train_gpt_tp and the trainers after it"
           : tags & OPTIONS_PIPELINE ? "train_gpt_pp and train_gpt_3d"
                                     : "train_gpt_3d and train_data";
}

// Returns the rank options of a trainer of one rank, for options_parse: it has none of
// these flags. It refuses each and names the trainers that have it. grid.h has the
// function of several ranks.
static inline RankOptions one_rank_options(void) {
    const RankOptions x = {RANK_OPTIONS, sizeof RANK_OPTIONS / sizeof *RANK_OPTIONS, 0,
                           rank_option_trainers, NULL};
    return x;
}

#endif
