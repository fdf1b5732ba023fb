// evaluate.cuh: --eval: the losses of a file's rows at any layout, and what they say of the model. Nothing is trained.
//
// The rows are dealt to the data ranks and micro-batches as training samples are. A row is padded to T tokens behind
// its own, which changes nothing of what comes before. Losses are summed row by row in double, then over the rows in
// their order, so that the order of a sum is the same at every layout.
//
// defines: Evaluation, evaluation_begin, evaluation_goes_on
#ifndef LLMC_EVALUATE_CUH
#define LLMC_EVALUATE_CUH

#include "llmc/trainer.cuh"

typedef struct {
    size_t first, next;  // rows of the batch under way begin at `first`, those after it at `next`
    double *rows;        // [2, rows] of each its loss, and whether it was guessed wrong; 0 where another rank has it
} Evaluation;

static inline Evaluation evaluation_begin(const Trainer *m) {
    Evaluation e = {0, 0, (double *)host_alloc(m->eval.rows, 2 * sizeof(double))};
    return e;
}

// Sends this data rank's share of the rows from e->first on to inputs and targets; a place without a row gets zeros.
static inline void evaluation_load(Trainer *m, const Evaluation *e) {
    trainer_set_batch(m, m->opt.global_batch);
    size_t count = m->micros * m->B, mine = e->first + m->grid.d_rank * count;
    memset(m->host_inputs, 0, count * m->T * sizeof(int));
    memset(m->host_targets, 0, count * m->T * sizeof(int));
    for (size_t i = 0; i < count && mine + i < m->eval.rows; i++) {
        const EvalRow *row = &m->eval.row[mine + i];
        const uint16_t *tokens = m->eval.tokens + row->at;
        for (size_t j = 0; j + 1 < row->tokens; j++) {
            m->host_inputs[i * m->T + j] = tokens[j];
            m->host_targets[i * m->T + j] = tokens[j + 1];
        }
    }
    trainer_upload(m);
}

// Takes what the last stage has computed of the batch under way.
static inline void evaluation_take(Trainer *m, Evaluation *e) {
    size_t N = m->B * m->T, count = m->micros * m->B, mine = e->first + m->grid.d_rank * count;
    trainer_synchronize(m);
    if (!m->table.shard.head || m->grid.t_rank != 0) return;
    float *losses = (float *)host_alloc(m->micros * 2 * N, sizeof(float));
    CUDA_CHECK(cudaMemcpy(losses, m->losses, m->micros * 2 * N * sizeof(float), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < count && mine + i < m->eval.rows; i++) {
        const EvalRow *row = &m->eval.row[mine + i];
        const float *of_row = losses + i / m->B * 2 * N + i % m->B * m->T, *behind = of_row + N;
        double *out = e->rows + 2 * (mine + i);
        for (size_t j = row->first - 1; j < row->first - 1 + row->count; j++) {
            out[0] += (double)of_row[j];
            if (!(behind[j] <= 0.0f)) out[1] = 1.0;
        }
    }
    free(losses);
}

// Examples of which the labelled row has the least loss per counted token; of equal ones the first counts.
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
    EvalReport r;
    memset(&r, 0, sizeof r);
    double *mine = e->rows;
    e->rows = (double *)host_alloc(file->rows, 2 * sizeof(double));
    for (size_t done = 0, n; done < 2 * file->rows; done += n) {  // MPI counts in int
        n = 2 * file->rows - done < 1000000 ? 2 * file->rows - done : 1000000;
        MPI_Allreduce(mine + done, e->rows + done, (int)n, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    }
    free(mine);
    size_t wrong = 0;
    for (size_t i = 0; i < file->rows; i++) {
        r.loss_sum += e->rows[2 * i];
        r.tokens += file->row[i].count;
        wrong += e->rows[2 * i + 1] > 0.0;
    }
    r.rows = file->rows, r.words = file->words;
    if (file->kind == EVAL_CLOZE) r.of = file->rows, r.right = file->rows - wrong;
    if (file->kind == EVAL_CHOICES) r.of = file->examples, r.right = evaluation_choices(file, e->rows);
    free(e->rows);
    Error err;
    if (!isfinite(r.loss_sum)) {
        error_set(&err, "--eval %s: the sum of the losses is %g", m->opt.eval, r.loss_sum);
        job_stop(&m->job, 0, &err, 1);
    }
    log_eval(&m->log, m->opt.eval, &r);
}

// Takes the batch that has run, and loads the next one; false, and all is reported, after the last.
static inline bool evaluation_goes_on(Trainer *m, Evaluation *e) {
    if (e->next > 0) evaluation_take(m, e);
    e->first = e->next;
    e->next += m->opt.global_batch;
    if (e->first < m->eval.rows) evaluation_load(m, e);
    else evaluation_report(m, e);
    return e->first < m->eval.rows;
}

#endif
