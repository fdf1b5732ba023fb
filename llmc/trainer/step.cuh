// step.cuh: what surrounds the forwards and backwards of a training step: its data before, loss, gradient norm and
// AdamW after them.
//
// defines: trainer_upload, trainer_load, trainer_copy, trainer_mean_loss, trainer_begin_step, trainer_norm,
//          trainer_adamw, trainer_end_step, zero_gradient, sum_gradient
#ifndef LLMC_STEP_CUH
#define LLMC_STEP_CUH

#include "llmc/trainer.cuh"

// Queues the copy of host_inputs and host_targets to inputs and targets.
static inline void trainer_upload(Trainer *m) {
    size_t bytes = m->micros * m->B * m->T * sizeof(int);
    CUDA_CHECK(cudaMemcpyAsync(m->inputs, m->host_inputs, bytes, cudaMemcpyHostToDevice, m->stream));
    CUDA_CHECK(cudaMemcpyAsync(m->targets, m->host_targets, bytes, cudaMemcpyHostToDevice, m->stream));
}

// Reads a batch of so many sequences, of which inputs and targets get this data rank's share. What cannot be read is 0,
// and the next sum over all ranks tells them.
static inline void trainer_load(Trainer *m, DataLoader *data, uint64_t first, size_t sequences, bool shuffle) {
    trainer_set_batch(m, sequences);
    size_t count = sequences / m->readers, T = m->T, bytes = count * T * sizeof(int);
    int *whole = (int *)host_alloc(2 * m->opt.seq, sizeof(int)), *next = whole + m->opt.seq;
    for (size_t i = 0; i < count && !m->data_failed && !m->opt.simulate; i++) {  // a simulation moves no data
        m->data_failed = !dataloader_read(data, first + m->reader * count + i, shuffle, m->opt.seed, m->config.V, whole,
                                          next, &m->data_error);
        for (size_t t = 0; t < T; t++) {
            size_t position = tokens_position(m->tokens, t);
            m->host_inputs[i * T + t] = whole[position], m->host_targets[i * T + t] = next[position];
        }
    }
    free(whole);
    if (m->data_failed) memset(m->host_inputs, 0, bytes), memset(m->host_targets, 0, bytes);
    trainer_upload(m);
}

static inline StepReport trainer_begin_step(Trainer *m) {
    StepReport report;
    stop_settle(m);
    memset(&report, 0, sizeof report);
    report.step = m->progress.step + 1;
    timeline_collect(&m->timeline, 0);  // of what ran between the steps
    m->timeline.paused = m->progress.step >= m->progress.first_step + m->opt.trace_steps;
    m->step_began = seconds_now();
    trainer_clock_begin_step();
    size_t sequences = ramp_batch(&m->opt.ramp, m->opt.global_batch, m->progress.sample);
    trainer_load(m, &m->train_data, m->progress.sample, sequences, m->opt.shuffle);
    trainer_set_dropout(m, true);
    return report;
}

// Returns how many buckets the flat buffer has: 0 the embeddings, 1 + l layer l, the last ln_f.
static inline size_t bucket_count(const Trainer *m) { return m->table.bucket_count; }

// Sets the gradient of a tensor outside the layers to zero.
static inline void zero_gradient(Trainer *m, int kind) {
    const Tensor *x = table_find(&m->table, kind, 0);
    CUDA_CHECK(cudaMemsetAsync(m->state.grads + x->offset, 0, x->size * sizeof(float), m->stream));
}

// Sums the gradient of a tensor outside the layers over the ranks of a communicator; NULL: nothing to do.
static inline void sum_gradient(Trainer *m, int kind, ncclComm_t comm) {
    if (!comm) return;
    float *dx = m->dw[0][kind];
    size_t count = table_find(&m->table, kind, 0)->size;
    NCCL_CHECK(ncclAllReduce(dx, dx, count, ncclFloat, ncclSum, comm, m->stream));
}

// Copies floatX within the device, on the compute stream.
static inline void trainer_copy(Trainer *m, floatX *to, const floatX *from, size_t count) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, count * sizeof(floatX), cudaMemcpyDeviceToDevice, m->stream));
}

// Sums host doubles over all ranks, through the device. Synchronises.
static inline void trainer_sum(Trainer *m, double *x, size_t count) {
    CUDA_CHECK(cudaMemcpyAsync(m->totals, x, count * sizeof(double), cudaMemcpyHostToDevice, m->stream));
    NCCL_CHECK(ncclAllReduce(m->totals, m->totals, count, ncclDouble, ncclSum, m->job.world, m->stream));
    CUDA_CHECK(cudaMemcpyAsync(x, m->totals, count * sizeof(double), cudaMemcpyDeviceToHost, m->stream));
    trainer_synchronize(m, m->stream);
}

// This rank's part of the loss, from the sums of its micro-batches: the last stages' first tensor ranks have it, all
// others add 0. Synchronises.
static inline double trainer_loss_share(Trainer *m) {
    bool ours = m->table.shard.head && m->grid.t_rank == 0;
    size_t bytes = m->micros * sizeof(double);
    if (ours) CUDA_CHECK(cudaMemcpyAsync(m->host_sums, m->loss_sums, bytes, cudaMemcpyDeviceToHost, m->stream));
    trainer_synchronize(m);
    double sum = 0.0;
    for (size_t i = 0; i < m->micros && ours; i++) sum += m->host_sums[i];
    return sum;
}

// Mean loss per token of a batch that has run forward. Synchronises.
static inline double trainer_mean_loss(Trainer *m) {
    double sums[2] = {trainer_loss_share(m), m->data_failed ? 1.0 : 0.0};
    trainer_sum(m, sums, 2);
    if (sums[1] > 0.0) trainer_give_up(m);
    return sums[0] / ((double)m->batch * (double)m->opt.seq);
}

// Sums over all ranks, in one message: the squared gradient norm of every tensor of the whole model, then the loss,
// then whether a rank could not read its data. Squares are summed per tensor in double on the device. Returns
// host_totals.
static inline const double *trainer_totals(Trainer *m) {
    size_t count = m->norm_count, tensors = count_tensors(&m->config);
    global_norm_squared(m->norms, m->norm_scratch, m->state.grads, m->norm_pieces, count, table_largest(&m->table),
                        m->part.owned, m->stream);
    CUDA_CHECK(cudaMemcpyAsync(m->host_norms, m->norms, count * sizeof(double), cudaMemcpyDeviceToHost, m->stream));
    double loss = trainer_loss_share(m);
    memset(m->host_totals, 0, tensors * sizeof(double));
    for (size_t i = 0; i < count; i++) {
        const Tensor *x = &m->table.tensors[m->host_norm_pieces[i].tensor];
        if (x->counted) m->host_totals[x->id] += m->host_norms[i];
    }
    m->host_totals[tensors] = loss;
    m->host_totals[tensors + 1] = m->data_failed;
    stop_before_sum(m);
    trainer_sum(m, m->host_totals, tensors + TOTALS_EXTRA);
    return m->host_totals;
}

// Writes this step's gradients, before clipping, as one unsharded file.
static inline bool trainer_dump_gradients(Trainer *m, Error *err) {
    const char *path = m->opt.dump_gradients;
    char tmp[PATH_MAX];
    if (!gradients_unfinished(tmp, path, err) ||
        (m->job.rank == 0 && !gradients_create(tmp, &m->config, err))) return false;
    MPI_Barrier(MPI_COMM_WORLD);
    if (!state_save(&m->part, &m->table, tmp, m->table.shard.embedding, NULL, err)) return false;
    MPI_Barrier(MPI_COMM_WORLD);
    return m->job.rank != 0 || gradients_finish(tmp, path, err);
}

// Loss and gradient norm of the step, once the gradients of all ranks are summed; the squares are added in the order
// of the whole model's table. Ends the run if one is not finite, or if a rank could not read its data.
static inline void trainer_norm(Trainer *m, StepReport *report) {
    Error err;
    char bad[sizeof(m->table.tensors->name)] = "none";
    size_t tensors = count_tensors(&m->config);
    const double *totals = trainer_totals(m);
    double sum = 0.0;
    for (size_t i = 0; i < tensors; i++) sum += totals[i];
    for (size_t i = tensors; i-- > 0;) {
        if (!isfinite(totals[i])) strcpy(bad, tensor_by_id(&m->config, i).name);
    }
    report->grad_norm = sqrt(sum);
    report->loss = totals[tensors] / ((double)m->batch * (double)m->opt.seq);
    if (totals[tensors + 1] > 0.0) trainer_give_up(m);
    if (!isfinite(report->loss) || !isfinite(sum)) {
        error_set(&err, "step %zu: the loss is %g and %s is the first tensor whose gradient is not finite; nothing was "
                  "updated; resume from a checkpoint before the loss grew, or start again, with a lower --lr",
                  report->step, report->loss, bad);
        job_stop(&m->job, 0, &err, 1);
    }
    bool first = m->progress.step == m->progress.first_step;
    if (m->opt.dump_gradients && first && !trainer_dump_gradients(m, &err)) job_fail(&m->job, &err);
}

// AdamW (Loshchilov and Hutter 2019) on what this rank owns, with gradients clipped to --clip.
static inline void trainer_adamw(Trainer *m, StepReport *report) {
    const Options *o = &m->opt;
    report->lr = learning_rate((LRSchedule)o->lr_schedule, report->step, o->warmup, o->steps, o->lr, o->lr_final);
    double scale = o->clip > 0.0 && report->grad_norm > o->clip ? o->clip / report->grad_norm : 1.0;
    AdamW h = adamw_factors(report->lr, o->beta1, o->beta2, o->eps, o->weight_decay, (double)report->step, scale);
    Span span(m, m->stream, "optimizer");
    adamw_update(m->state.params, m->state.master, m->state.grads, m->state.m, m->state.v, m->adamw_pieces,
                 m->adamw_count, m->adamw_blocks, m->state.owned, h, m->stream);
}

// Waits for the update (ZeRO's weights may still be on their way), counts the step and logs it.
static inline void trainer_end_step(Trainer *m, StepReport *report) {
    trainer_synchronize(m, m->stream);
    timeline_collect(&m->timeline, report->step);
    trainer_set_dropout(m, false);
    m->progress.step++;
    m->progress.sample += m->batch;
    report->ms = 1e3 * (seconds_now() - m->step_began);
    report->tokens = (double)m->batch * (double)m->opt.seq;
    trainer_clock_end_step(m, report->ms);
    if (m->opt.debug_replicas) trainer_check_replicas(m);
    log_step(&m->log, report);
}

#endif
