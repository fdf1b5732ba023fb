// evaluate.cuh: --eval measures a model on the rows of a file, at any layout. Nothing is trained.
//
// The rows are dealt to the data ranks and micro-batches as training samples are, and padded to T tokens at their ends,
// which changes no earlier token. Losses are summed in double, within a row and then over the rows in their order, so
// every layout adds in the same order.
//
// defines: evaluation_take, evaluation_report
#ifndef LLMC_EVALUATE_CUH
#define LLMC_EVALUATE_CUH

#include "llmc/trainer.cuh"

// Adds up the losses of the batch that has run, on one rank of the last stage for each data rank.
static inline void evaluation_take(Trainer *m) {
    size_t N = m->B * m->T, count = m->micros * m->B;
    size_t mine = (m->validation.batch - 1) * m->batch + m->reader * count;  // this data rank's first row
    trainer_synchronize(m);
    if (!m->table.shard.head || m->grid.t_rank != 0) return;
    float *losses = (float *)host_alloc(m->micros * 2 * N, sizeof(float));  // (micros, 2, N)
    CUDA_CHECK(cudaMemcpy(losses, m->losses, m->micros * 2 * N * sizeof(float), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < count && mine + i < m->eval.rows; i++) {
        const EvalRow *row = &m->eval.row[mine + i];
        const float *loss = losses + i / m->B * 2 * N + i % m->B * m->T, *behind = loss + N;
        double *out = m->validation.rows + 2 * (mine + i);
        for (size_t t = 0; t < m->T; t++) {
            size_t j = tokens_position(m->tokens, t);
            if (j + 1 < row->first || j + 1 >= row->first + row->count) continue;
            out[0] += (double)loss[t];
            if (!(behind[t] <= 0.0f)) out[1] = 1.0;
        }
    }
    free(losses);
}

// Sums over the ranks; rank 0 prints and logs.
static inline void evaluation_report(Trainer *m) {
    const EvalFile *file = &m->eval;
    double *rows = m->validation.rows;
    EvalReport r = {file->rows, 0, 0.0, file->words, 0, 0};
    double right_mean = 0.0;  // of choices: loss per counted token of the example's right row
    MPI_Allreduce(MPI_IN_PLACE, rows, (int)(2 * file->rows), MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    bool best = false;
    for (size_t i = 0; i < file->rows; i++) {
        const EvalRow *row = &file->row[i];
        double loss = rows[2 * i], mean = loss / (double)row->count;
        r.loss_sum += loss, r.tokens += row->count;
        if (file->kind == EVAL_CLOZE) r.of++, r.right += rows[2 * i + 1] == 0.0;
        if (row->right) r.of++, r.right += best = true, right_mean = mean;
        else if (best && mean <= right_mean) r.right--, best = false;
    }
    free(rows);
    Error err;
    if (!isfinite(r.loss_sum)) {
        error_set(&err, "--eval %s: the sum of the losses is %g", m->opt.eval, r.loss_sum);
        job_stop(&m->job, 0, &err, 1);
    }
    log_eval(&m->log, m->opt.eval, &r);
}

#endif
