// dropout.cuh: --dropout in a trainer: which masks belong to the micro-batch under way. It is on between
// trainer_begin_step and trainer_end_step, and in half of the warm-up; validation, --eval and samples run without.
//
// defines: dropout_at, drop, dropout_forward, dropout_backward, bias_apart, bias_with
#ifndef LLMC_TRAINER_DROPOUT_CUH
#define LLMC_TRAINER_DROPOUT_CUH

#include "llmc/trainer.cuh"

// From here on the masks are those of this micro-batch, forward and backward.
static inline void dropout_at(Trainer *m, size_t micro) {
    m->dropout.sample = (m->grid.d_rank * m->micros + micro) * m->B;
}

// Those of the attention probabilities of the l-th layer that this rank holds.
static inline Dropout drop(const Trainer *m, size_t l) {
    return dropout_for(m->dropout, RANDOM_DROPOUT_PROBABILITY, m->table.layers[l]);
}

// The rows of the residual stream that a rank holds begin here: with sequence parallelism they are its part.
static inline size_t dropout_row0(const Trainer *m, size_t rows) {
    return rows < m->B * m->T ? m->grid.t_rank * rows : 0;
}

// x [rows, C] = mask * (x + bias). Returns the bias that whoever adds x must still add: zeros, or all of it without
// dropout, which leaves x alone. bias may be NULL.
static inline const floatX *dropout_forward(Trainer *m, RandomPurpose place, size_t l, floatX *x, const floatX *bias,
                                            size_t rows) {
    if (!m->dropout.threshold) return bias;
    dropout_apply(x, x, bias, dropout_for(m->dropout, place, m->table.layers[l]), rows, dropout_row0(m, rows), m->T,
                  m->config.C, m->stream);
    return m->zeros;
}

// The gradient [rows, C] of what was dropped: out = mask * dout, or dout itself without dropout. out may be dout.
static inline const floatX *dropout_backward(Trainer *m, RandomPurpose place, size_t l, const floatX *dout, floatX *out,
                                             size_t rows) {
    if (!m->dropout.threshold) return dout;
    dropout_apply(out, dout, NULL, dropout_for(m->dropout, place, m->table.layers[l]), rows, dropout_row0(m, rows),
                  m->T, m->config.C, m->stream);
    return out;
}

// Is the gradient of a projection's bias not the sum that a layernorm takes of the residual's gradient? With dropout
// the bias sees the mask, and under sequence parallelism a layernorm sees the rows of one rank only.
static inline bool bias_apart(const Trainer *m) {
    return m->opt.dropout > 0.0 || (m->opt.sequence_parallel && m->grid.t > 1);
}

// Where a layernorm puts the sum that is the gradient of a projection's bias: nowhere if that is not the sum it takes.
static inline float *bias_with(const Trainer *m, float *dbias) { return bias_apart(m) ? NULL : dbias; }

#endif
