// evaluate.cuh: --eval measures a model on the rows of a file, at any layout. Nothing is trained.
//
// The rows are dealt to the data ranks and micro-batches as training samples are, and padded to T tokens at their ends,
// which changes no earlier token. Losses are summed in double, within a row and then over the rows in their order, so
// every layout adds in the same order.
//
// defines: evaluation_begin, evaluation_goes_on
#ifndef LLMC_EVALUATE_CUH
#define LLMC_EVALUATE_CUH

#include "llmc/trainer.cuh"

static inline Evaluation evaluation_begin(const Trainer *m) {
    Evaluation e = {0, (double *)host_alloc(m->eval.rows, 2 * sizeof(double))};
    return e;
}

// Returns this data rank's first row of the batch that begins at row `first`.
static inline size_t evaluation_mine(const Trainer *m, size_t first) {
    return first + m->reader * m->micros * m->B;
}

// Sends this data rank's rows of the batch that begins at row `first` to inputs and targets. Places without a row are
// zeros.
static inline void evaluation_load(Trainer *m, size_t first) {
    trainer_set_batch(m, m->opt.global_batch);
    size_t count = m->micros * m->B, mine = evaluation_mine(m, first);
    memset(m->host_inputs, 0, count * m->T * sizeof(int));
    memset(m->host_targets, 0, count * m->T * sizeof(int));
    for (size_t i = 0; i < count && mine + i < m->eval.rows; i++) {
        const EvalRow *row = &m->eval.row[mine + i];
        for (size_t t = 0; t < m->T; t++) {
            size_t j = tokens_position(m->tokens, t);
            if (j + 1 >= row->tokens) continue;
            m->host_inputs[i * m->T + t] = eval_token(&m->eval, row, j);
            m->host_targets[i * m->T + t] = eval_token(&m->eval, row, j + 1);
        }
    }
    trainer_upload(m);
}

// Adds up the losses of the batch in flight, on one rank of the last stage for each data rank.
static inline void evaluation_take(Trainer *m, Evaluation *e) {
    size_t N = m->B * m->T, count = m->micros * m->B, mine = evaluation_mine(m, e->end - m->opt.global_batch);
    trainer_synchronize(m);
    if (!m->table.shard.head || m->grid.t_rank != 0) return;
    float *losses = (float *)host_alloc(m->micros * 2 * N, sizeof(float));  // (micros, 2, N)
    CUDA_CHECK(cudaMemcpy(losses, m->losses, m->micros * 2 * N * sizeof(float), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < count && mine + i < m->eval.rows; i++) {
        const EvalRow *row = &m->eval.row[mine + i];
        const float *loss = losses + i / m->B * 2 * N + i % m->B * m->T, *behind = loss + N;
        double *out = e->rows + 2 * (mine + i);
        for (size_t t = 0; t < m->T; t++) {
            size_t j = tokens_position(m->tokens, t);
            if (j + 1 < row->first || j + 1 >= row->first + row->count) continue;
            out[0] += (double)loss[t];
            if (!(behind[t] <= 0.0f)) out[1] = 1.0;
        }
    }
    free(losses);
}

// Counts the examples whose labelled row has the least loss per counted token. Of equal ones the first counts.
static inline size_t evaluation_choices(const EvalFile *file, const double *rows) {
    size_t right = 0;
    for (size_t i = 0, example = 0; example < file->examples; example++) {
        size_t begin = i, best = i;
        for (; i < file->rows && file->row[i].example == example; i++) {
            double least = rows[2 * best] / (double)file->row[best].count;
            if (rows[2 * i] / (double)file->row[i].count < least) best = i;
        }
        right += best - begin == file->label[example];
    }
    return right;
}

// Sums over the ranks; rank 0 prints and logs.
static inline void evaluation_report(Trainer *m, Evaluation *e) {
    const EvalFile *file = &m->eval;
    EvalReport r = {file->rows, 0, 0.0, file->words, 0, 0};
    MPI_Allreduce(MPI_IN_PLACE, e->rows, (int)(2 * file->rows), MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    size_t right = 0;
    for (size_t i = 0; i < file->rows; i++) {
        r.loss_sum += e->rows[2 * i];
        r.tokens += file->row[i].count;
        right += e->rows[2 * i + 1] == 0.0;
    }
    if (file->kind == EVAL_CLOZE) r.of = file->rows, r.right = right;
    if (file->kind == EVAL_CHOICES) r.of = file->examples, r.right = evaluation_choices(file, e->rows);
    free(e->rows);
    Error err;
    if (!isfinite(r.loss_sum)) {
        error_set(&err, "--eval %s: the sum of the losses is %g", m->opt.eval, r.loss_sum);
        job_stop(&m->job, 0, &err, 1);
    }
    log_eval(&m->log, m->opt.eval, &r);
}

// Takes the batch that has run and loads the next one. After the last it reports and returns false.
static inline bool evaluation_goes_on(Trainer *m, Evaluation *e) {
    if (e->end > 0) evaluation_take(m, e);
    if (e->end >= m->eval.rows) {
        evaluation_report(m, e);
        return false;
    }
    evaluation_load(m, e->end);
    e->end += m->opt.global_batch;
    return true;
}

#endif
