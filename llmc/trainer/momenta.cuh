// momenta.cuh: the optimizer's buffers for Muon: matrices have one momentum, all else two moments.
// lesson: muon
//
// defines: momenta_place, momenta_number
#ifndef LLMC_MOMENTA_CUH
#define LLMC_MOMENTA_CUH

#include "llmc/model_muon.h"
#include "llmc/trainer/state.cuh"

// Moves the owned pieces of matrices behind all others in the optimizer's buffers. The buffer
// of second moments ends before them. Comes after the last state_own.
static inline void momenta_place(State *state) {
    size_t at = 0;
    for (int matrices = 0; matrices < 2; matrices++) {
        for (size_t i = 0; i < state->piece_count; i++) {
            Piece *piece = &state->host_pieces[i];
            if (muon_updates(&state->table->tensors[piece->tensor]) != matrices) continue;
            piece->at = at;
            at += round_up(piece->hi - piece->lo, TENSOR_ALIGN);
        }
        if (matrices == 0) state->momenta = state->owned - at;
    }
}

// Numbers the blocks of AdamW's launch, as adamw_number does, with none for matrices.
// Returns their number.
static inline unsigned momenta_number(State *state) {
    unsigned blocks = 0;
    for (size_t i = 0; i < state->piece_count; i++) {
        Piece *piece = &state->host_pieces[i];
        piece->first_block = blocks;
        if (!muon_updates(&state->table->tensors[piece->tensor]))
            blocks += element_blocks(piece->hi - piece->lo);
    }
    return blocks;
}

#endif
