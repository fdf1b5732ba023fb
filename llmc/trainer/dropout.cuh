// dropout.cuh: the masks of --dropout. It is on between trainer_begin_step and trainer_end_step, and in half of the
// warm-up; validation, --eval and samples run without.
//
// defines: trainer_set_dropout, dropout_at, drop
#ifndef LLMC_TRAINER_DROPOUT_CUH
#define LLMC_TRAINER_DROPOUT_CUH

#include "llmc/trainer.cuh"

// Sets dropout as the next step has it, or none. Under sequence parallelism a rank's rows start at its part.
static inline void trainer_set_dropout(Trainer *m, bool on) {
    m->dropout = dropout_make(on ? m->opt.dropout : 0.0, m->opt.seed, m->progress.step, 0);
    m->dropout.head = m->grid.t_rank * (m->config.NH / m->opt.tensor);
    m->dropout.T = m->T;
    m->dropout.row = m->opt.sequence_parallel ? m->grid.t_rank * (m->B * m->T / m->grid.t) : 0;
}

// Takes the masks of this micro-batch from here on, forward and backward.
static inline void dropout_at(Trainer *m, size_t micro) {
    m->dropout.sample = (m->grid.d_rank * m->micros + micro) * m->B;
}

// Returns the masks of one place in the l-th layer that this rank holds.
static inline Dropout drop(const Trainer *m, RandomPurpose place, size_t l) {
    return dropout_for(m->dropout, place, m->table.layers[l]);
}

#endif
