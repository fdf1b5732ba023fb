// step.cuh: a training step without its forwards and backwards: the data before them, and
// loss, gradient norm and AdamW after them.
//
// defines: trainer_synchronize, trainer_load, trainer_begin_step, trainer_loss_share,
//          trainer_sum, trainer_bad_weight, trainer_norm_failed, trainer_norm,
//          trainer_adamw, trainer_end_step
#ifndef LLMC_STEP_CUH
#define LLMC_STEP_CUH

#include "llmc/trainer.cuh"

// Waits for a stream, or for all, like cudaStreamSynchronize. But it fails when NCCL finds
// that another rank has ended.
static inline void trainer_synchronize([[maybe_unused]] Trainer *m,
                                       cudaStream_t stream = NULL) {
#ifndef NCCL_OVER_MPI  // there mpirun ends the others
    double asked = seconds_now();
    for (size_t i = 0; i < m->stream_count; i++) {
        if (stream && m->streams[i] != stream) continue;
        for (; cudaStreamQuery(m->streams[i]) == cudaErrorNotReady; sched_yield()) {
            if (seconds_now() - asked < 0.05) continue;
            asked = seconds_now();
            job_check_ranks(&m->job);
        }
    }
#endif
    // A virtual clock sees either call.
    CUDA_CHECK(stream ? cudaStreamSynchronize(stream) : cudaDeviceSynchronize());
}

// Reads a batch of `sequences` sequences. inputs and targets get this data rank's share. If
// a read fails, they are 0, and the next sum over all ranks tells them. data: NULL for the
// rows of --eval.
static inline void trainer_load(Trainer *m, DataLoader *data, uint64_t first,
                                size_t sequences, bool shuffle) {
    trainer_set_batch(m, sequences);
    size_t count = sequences / m->readers, T = m->T, bytes = count * T * sizeof(int);
    // The targets are those behind the inputs.
    int *tokens = (int *)host_alloc(m->opt.seq + 1, sizeof(int));
    for (size_t i = 0; i < count && !m->data_failed && !m->opt.simulate;
         i++) {  // a simulation moves no data
        size_t sample = first + m->reader * count + i;
        if (!data)
            eval_sample(&m->eval, sample, m->opt.seq, tokens);
        else
            m->data_failed = !dataloader_read(data, sample, shuffle, m->opt.seed,
                                              m->config.V, tokens, &m->data_error);
        if (m->see_sequence) m->see_sequence(m, i, tokens);
        for (size_t t = 0; t < T; t++) {
            size_t position = tokens_position(m->tokens, t);
            m->host_inputs[i * T + t] = tokens[position];
            m->host_targets[i * T + t] = tokens[position + 1];
        }
    }
    free(tokens);
    if (m->data_failed) {
        memset(m->host_inputs, 0, bytes);
        memset(m->host_targets, 0, bytes);
    }
    CUDA_CHECK(cudaMemcpyAsync(m->inputs, m->host_inputs, bytes, cudaMemcpyHostToDevice,
                               m->stream));
    CUDA_CHECK(cudaMemcpyAsync(m->targets, m->host_targets, bytes, cudaMemcpyHostToDevice,
                               m->stream));
}

static inline StepReport trainer_begin_step(Trainer *m) {
    StepReport report = {};
    report.step = m->progress.step + 1;
    timeline_collect(&m->timeline, 0);  // of what ran between the steps
    m->timeline.on = m->opt.trace &&
                     m->progress.step < m->progress.first_step + m->opt.trace_steps;
    m->step_began = seconds_now();
    trainer_clock_begin_step();
    size_t sequences = ramp_batch(&m->opt.ramp, m->opt.global_batch, m->progress.sample);
    trainer_load(m, &m->train_data, m->progress.sample, sequences, m->opt.shuffle);
    trainer_set_dropout(m, true);
    return report;
}

// Returns this rank's part of the loss, from the sums of its micro-batches. The last
// stages' first tensor ranks have it, all others add 0. Synchronises.
static inline double trainer_loss_share(Trainer *m) {
    bool ours = m->table.shard.head && m->grid.t_rank == 0;
    size_t bytes = m->micros * sizeof(double);
    if (ours)
        CUDA_CHECK(cudaMemcpyAsync(m->host_sums, m->loss_sums, bytes,
                                   cudaMemcpyDeviceToHost, m->stream));
    trainer_synchronize(m);
    double sum = 0.0;
    for (size_t i = 0; i < m->micros && ours; i++) sum += m->host_sums[i];
    return sum;
}

// Sums the first `count` of host_totals over all ranks, through the device. The same
// message sums the loss, and flags: a rank could not read its data, which ends the run, or
// got a signal. Returns the batch's mean loss per token. Synchronises.
static inline double trainer_sum(Trainer *m, size_t count, double loss) {
    double *x = m->host_totals;
    size_t bytes = (count + TOTALS_EXTRA) * sizeof(double);
    x[count] = loss;
    x[count + 1] = m->data_failed;
    x[count + 2] = job_signalled();
    CUDA_CHECK(cudaMemcpyAsync(m->totals, x, bytes, cudaMemcpyHostToDevice, m->stream));
    NCCL_CHECK(ncclAllReduce(m->totals, m->totals, count + TOTALS_EXTRA, ncclDouble,
                             ncclSum, m->job.world, m->stream));
    CUDA_CHECK(cudaMemcpyAsync(x, m->totals, bytes, cudaMemcpyDeviceToHost, m->stream));
    trainer_synchronize(m, m->stream);
    if (x[count + 1] > 0.0) trainer_leave(m);
    m->stopped = x[count + 2] > 0.0;
    return x[count] / ((double)m->batch * (double)m->opt.seq);
}

// Writes this step's gradients, before clipping, as one unsharded F32 file with the names
// of the model. A failure of any rank ends the run.
static inline void trainer_dump_gradients(Trainer *m) {
    Error err;
    const char *path = m->opt.dump_gradients;
    char tmp[PATH_MAX];
    bool first = m->job.rank == 0, ok = path_print(tmp, &err, GRADIENTS_UNFINISHED, path);
    ok = ok && (!first || slices_create(tmp, GRADIENTS_START, &m->config, STATE_WEIGHTS,
                                        STATE_WEIGHTS, ST_F32, &err));
    job_agree(&m->job, ok, &err, 1);
    job_agree(&m->job, state_save(&m->share, tmp, NULL, &err), &err, 1);
    ok = !first || rename(tmp, path) == 0 ||
         error_set(&err, "cannot write %s: %s", path, strerror(errno));
    job_agree(&m->job, ok, &err, 1);
}

// Returns the first tensor of the whole model with a weight that is not finite, or the
// count of tensors. Collective.
static inline size_t trainer_bad_weight(Trainer *m) {
    const State *state = &m->state;
    uint64_t bad = count_tensors(&m->config);
    float *host = (float *)host_alloc(m->table.largest, sizeof(float));
    for (size_t i = 0; i < (state->sharded ? state->piece_count : m->table.count); i++) {
        const Tensor *x =
            &m->table.tensors[state->sharded ? state->host_pieces[i].tensor : i];
        size_t lo = state->sharded ? state->host_pieces[i].lo : x->offset;
        size_t count = state->sharded ? state->host_pieces[i].hi - lo : x->size;
        state_download(host, state->params + lo, count);
        for (size_t j = 0; j < count; j++)
            if (!isfinite(host[j]) && x->id < bad) bad = x->id;
    }
    free(host);
    MPI_Allreduce(MPI_IN_PLACE, &bad, 1, MPI_UINT64_T, MPI_MIN, MPI_COMM_WORLD);
    return bad;
}

// Ends the run because the loss or the norm of the gradient is not finite. The message
// names weights if they are not finite. It names a gradient only if others are finite,
// because a loss that is not finite makes all of them so. totals: [tensors] squared norms.
static inline void trainer_norm_failed(Trainer *m, const StepReport *report,
                                       const double *totals) {
    Error err;
    const char *from = m->opt.resume ? m->opt.resume : m->opt.init;
    size_t tensors = count_tensors(&m->config), weight = trainer_bad_weight(m);
    size_t first = 0, finite = 0;
    for (size_t i = tensors; i-- > 0;) {
        if (isfinite(totals[i]))
            finite++;
        else
            first = i;
    }
    const Tensor named =
        tensor_describe(&m->config, weight < tensors ? weight : first, 1, 0);
    const char *name = named.name;
    if (weight < tensors && from && !has_moved(m))
        error_set(&err, "the weights of %s are not finite: %s", from, name);
    else if (weight < tensors)
        error_set(&err,
                  "step %zu: the weights are not finite any more: %s; resume from a "
                  "checkpoint before the loss "
                  "grew, or start again, with a lower --lr",
                  report->step, name);
    else if (finite)
        error_set(&err,
                  "step %zu: the loss is %g and %s is the first tensor whose gradient is "
                  "not finite; nothing was "
                  "updated; resume from a checkpoint before the loss grew, or start again, "
                  "with a lower --lr",
                  report->step, report->loss, name);
    else
        error_set(&err,
                  "step %zu: the loss is %g and no gradient is finite, though all weights "
                  "are; nothing was "
                  "updated; resume from a checkpoint before the loss grew, or start again, "
                  "with a lower --lr",
                  report->step, report->loss);
    job_agree(&m->job, false, &err, 1);
}

// Computes loss and gradient norm of the step, once the gradients of all ranks are summed.
// Squares are summed per tensor in double on the device, then over the ranks, then in the
// order of the whole model's table. Ends the run if one is not finite, or if a rank could
// not read its data.
static inline void trainer_norm(Trainer *m, StepReport *report) {
    size_t count = m->share.piece_count, tensors = count_tensors(&m->config);
    double *totals = m->host_totals, sum = 0.0;
    global_norm_squared(m->norms, m->norm_scratch, m->state.grads, m->share.pieces, count,
                        m->table.largest, m->share.owned, m->stream);
    CUDA_CHECK(cudaMemcpyAsync(m->host_norms, m->norms, count * sizeof(double),
                               cudaMemcpyDeviceToHost, m->stream));
    double loss = trainer_loss_share(m);
    memset(totals, 0, tensors * sizeof(double));
    for (size_t i = 0; i < count; i++) {
        const Tensor *x = &m->table.tensors[m->share.host_pieces[i].tensor];
        if (x->counted) totals[x->id] += m->host_norms[i];
    }
    report->loss = trainer_sum(m, tensors, loss);
    for (size_t i = 0; i < tensors; i++) sum += totals[i];
    report->grad_norm = sqrt(sum);
    if (!isfinite(report->loss) || !isfinite(sum)) trainer_norm_failed(m, report, totals);
    if (m->opt.dump_gradients && m->progress.step == m->progress.first_step)
        trainer_dump_gradients(m);
}

// Runs AdamW (Loshchilov and Hutter 2019) on this rank's own elements, with gradients
// clipped to --clip.
static inline void trainer_adamw(Trainer *m, StepReport *report) {
    const Options *o = &m->opt;
    report->lr = learning_rate((LRSchedule)o->lr_schedule, report->step, o->warmup,
                               o->steps, o->lr, o->lr_final);
    double scale =
        o->clip > 0.0 && report->grad_norm > o->clip ? o->clip / report->grad_norm : 1.0;
    AdamW h = adamw_factors(report->lr, o->beta1, o->beta2, o->eps, o->weight_decay,
                            (double)report->step, scale);
    Span span(m, m->stream, "optimizer");
    adamw_update(m->state.params, m->state.master, m->state.grads, m->state.m, m->state.v,
                 m->state.pieces, m->state.piece_count, m->adamw_blocks,
                 m->state.owned - m->state.momenta, h, m->stream);
}

// Waits for the update (ZeRO's weights may still be on their way), counts the step and logs
// it.
static inline void trainer_end_step(Trainer *m, StepReport *report) {
    trainer_synchronize(m, m->stream);
    timeline_collect(&m->timeline, report->step);
    trainer_set_dropout(m, false);
    m->progress.step++;
    m->progress.sample += m->batch;
    report->ms = 1e3 * (seconds_now() - m->step_began);
    report->tokens = (double)m->batch * (double)m->opt.seq;
    trainer_clock_end_step(m, report->ms);
    if (m->check_replicas) m->check_replicas(m);
    log_step(&m->log, report);
}

#endif
