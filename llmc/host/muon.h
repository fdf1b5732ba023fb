// muon.h: the flags of Muon.
// lesson: muon
//
// defines: DISTRIBUTE_WHOLE, DISTRIBUTE_GATHERED, MuonOptions, MUON_OPTIONS,
//          MUON_OPTION_ROWS
#ifndef LLMC_MUON_H
#define LLMC_MUON_H

#include "llmc/host/field.h"
#include "llmc/host/options_table.h"

enum { DISTRIBUTE_WHOLE, DISTRIBUTE_GATHERED };  // choices of --distribute

typedef struct {
    double momentum;
    size_t steps;
    int distribute;  // DISTRIBUTE_*
} MuonOptions;

static const Field MUON_OPTIONS[] = {
    {"Muon", FIELD_TITLE, 0, NULL, 0, 0, OPTION_BASIC, NULL, NULL},
    {"muon-momentum", FIELD_REAL, offsetof(MuonOptions, momentum), "0.95", 0, 1,
     OPTION_BASIC | OPTION_COMPUTES, "X", "share of its momentum that a matrix keeps"},
    {"muon-steps", FIELD_SIZE, offsetof(MuonOptions, steps), "5", 1, 100,
     OPTION_BASIC | OPTION_COMPUTES, "N", "steps of Newton-Schulz in an update"},
    {"distribute", FIELD_CHOICE, offsetof(MuonOptions, distribute), "whole", 0, 0,
     OPTION_BASIC | OPTION_COMPUTES, "whole|gathered",
     "whole: each matrix has one owner; gathered: ZeRO-1's parts, and updates are gathered"},
};
enum { MUON_OPTION_ROWS = sizeof MUON_OPTIONS / sizeof MUON_OPTIONS[0] };

#endif
