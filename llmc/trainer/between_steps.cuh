// between_steps.cuh: validation, --eval, checkpoints and samples between training steps;
// and the end of the run. trainer.cuh includes it.
//
// defines: is_last_step, validation_due, sample_due, validation_goes_on, save_due,
//          trainer_save, sample_goes_on, sample_append, trainer_close, trainer_leave
#ifndef LLMC_BETWEEN_STEPS_CUH
#define LLMC_BETWEEN_STEPS_CUH

static inline bool is_last_step(const Trainer *m) {
    return m->progress.step >= m->opt.steps;
}

// True after the last step, and after each step whose number `every` divides (0: never).
// True before this run's first step only if `unmoved`.
static inline bool is_due(const Trainer *m, size_t every, bool unmoved) {
    return (is_last_step(m) || (every && m->progress.step % every == 0)) &&
           (has_moved(m) || unmoved);
}

// A signal may have kept an earlier run from a validation or a sample. The resumed run then
// begins with them. trainer.json has the steps of the last ones.
static inline bool validation_due(const Trainer *m) {
    bool missed = m->progress.validated != m->progress.step;
    return m->opt.val_every && is_due(m, m->opt.val_every, !m->opt.resume || missed);
}

static inline bool sample_due(const Trainer *m) {
    bool missed = m->opt.resume && m->progress.sampled != m->progress.step;
    return m->opt.sample_every && is_due(m, m->opt.sample_every, is_last_step(m) || missed);
}

static inline bool save_due(const Trainer *m) {
    return m->opt.out && is_due(m, m->opt.save_every, is_last_step(m) && !m->opt.resume);
}

// --eval measures a model on the rows of a file, at any layout. Nothing is trained. The
// rows are dealt to data ranks and micro-batches as training samples are, and padded to T
// tokens at their ends, which changes no earlier token. Losses are summed in double, within
// a row and then over the rows in their order, so every layout adds in the same order.

// Adds up the losses of the batch that has run, on one rank of the last stage for each data
// rank.
static inline void evaluation_take(Trainer *m) {
    size_t N = m->B * m->T, count = m->micros * m->B;
    // The first row of this data rank.
    size_t mine = (m->validation.batch - 1) * m->batch + m->reader * count;
    trainer_synchronize(m);
    if (!m->table.shard.head || m->grid.t_rank != 0) return;
    // (micros, 2, N)
    float *losses = (float *)host_alloc(m->micros * 2 * N, sizeof(float));
    CUDA_CHECK(cudaMemcpy(losses, m->losses, m->micros * 2 * N * sizeof(float),
                          cudaMemcpyDeviceToHost));
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

// Sums over the ranks; rank 0 prints and logs. Perplexities are exp(loss sum / tokens) and
// exp(loss sum / words), as in Megatron-LM's section 5.
static inline void evaluation_report(Trainer *m) {
    const EvalFile *file = &m->eval;
    size_t tokens = 0,
           words =
               file->words;    // tokens with a loss; words of the original text, 0: unknown
    size_t right = 0, of = 0;  // rows guessed whole (cloze), or examples with the right
                               // choice; of 0: neither
    double *rows = m->validation.rows, sum = 0.0;
    // Of choices: loss per counted token of the example's right row.
    double right_mean = 0.0;
    MPI_Allreduce(MPI_IN_PLACE, rows, (int)(2 * file->rows), MPI_DOUBLE, MPI_SUM,
                  MPI_COMM_WORLD);
    bool best = false;
    for (size_t i = 0; i < file->rows; i++) {
        const EvalRow *row = &file->row[i];
        double loss = rows[2 * i], mean = loss / (double)row->count;
        sum += loss;
        tokens += row->count;
        if (file->kind == EVAL_CLOZE) {
            of++;
            right += rows[2 * i + 1] == 0.0;
        }
        if (row->right) {
            of++;
            right += best = true;
            right_mean = mean;
        } else if (best && mean <= right_mean) {
            right--;
            best = false;
        }
    }
    free(rows);
    Error err;
    bool finite = isfinite(sum);
    size_t bad = finite ? 0 : trainer_bad_weight(m);
    if (!finite && bad < count_tensors(&m->config))
        error_set(&err, "the weights of %s are not finite: %s", m->opt.init,
                  tensor_describe(&m->config, bad, 1, 0).name);
    else if (!finite)
        error_set(&err, "--eval %s: the sum of the losses is %g", m->opt.eval, sum);
    job_agree(&m->job, finite, &err, 1);
    double mean = sum / (double)tokens, of_words = words ? sum / (double)words : 0.0;
    printf("eval %s: %zu rows, %zu tokens, loss sum %.10g\n", m->opt.eval, file->rows,
           tokens, sum);
    printf("eval loss per token %.6f, perplexity %.6g\n", mean, exp(mean));
    if (words)
        printf("eval %zu original words, perplexity per word %.6g\n", words, exp(of_words));
    if (of)
        printf("eval right %zu of %zu, accuracy %.4f\n", right, of,
               (double)right / (double)of);
    fflush(stdout);
    FILE *json = m->log.json;
    if (!json) return;
    // A folder without a readable trainer.json has done no step of ours.
    TrainerState state;
    size_t step = trainer_state_read(m->opt.init, &state, &err) ? state.step : 0;
    fprintf(json, LOG_START "%zu", step);
    log_text(json, "model", m->opt.init);
    log_text(json, "eval", m->opt.eval);
    fprintf(json, "," LOG_EVAL "%zu,\"eval_tokens\":%zu", file->rows, tokens);
    log_number(json, "eval_loss_sum", sum);
    log_number(json, "eval_perplexity", exp(mean));
    if (words) fprintf(json, ",\"eval_words\":%zu", words);
    if (words) log_number(json, "eval_word_perplexity", exp(of_words));
    if (of) fprintf(json, ",\"eval_right\":%zu,\"eval_of\":%zu", right, of);
    log_end_line(&m->log);
}

// Loads the next batch of a validation that is due, or of --eval, for the trainer to run
// forward. A validation has the first global batches of the validation data, always in
// order. Returns false after the last batch and reports the mean loss. Leaves if a signal
// has come: all ranks know it since the last sum, of a step or of validation.
static inline bool validation_goes_on(Trainer *m) {
    Validation *v = &m->validation;
    size_t sequences = m->opt.global_batch;
    bool eval = m->opt.eval != NULL;
    if (v->batch > 0 && eval)
        evaluation_take(m);
    else if (v->batch > 0)
        v->sum += trainer_sum(m, 0, trainer_loss_share(m));
    if (m->stopped) trainer_leave(m);
    if (v->batch == 0) {
        if (!eval && !validation_due(m)) return false;
        size_t batches = m->val_data.samples / sequences, most = m->opt.val_batches;
        *v = {0, batches < most ? batches : most, 0.0, NULL};
        if (eval) {
            v->batches = CEIL_DIV(m->eval.rows, sequences);
            host_array(v->rows, 2 * m->eval.rows);
        }
    }
    if (v->batch < v->batches) {
        trainer_load(m, eval ? NULL : &m->val_data, v->batch++ * sequences, sequences,
                     false);
        return true;
    }
    v->batch = 0;
    m->progress.validated = m->progress.step;
    if (eval)
        evaluation_report(m);
    else
        log_validation(&m->log, m->progress.step, v->sum / (double)v->batches);
    return false;
}

// Saves a checkpoint: rank 0 makes the files, every rank writes its slices, rank 0 gives
// the folder its name. A failure of any rank leaves no folder and ends the run, with one
// error message.
static inline void trainer_save(Trainer *m) {
    Error err;
    char tmp[PATH_MAX] = "", path[PATH_MAX];
    bool bf16 = sizeof(floatX) != sizeof(float), first = m->job.rank == 0;
    CUDA_CHECK(cudaDeviceSynchronize());  // ZeRO's weights may still be on their way
    if (!m->stopped && sample_due(m))
        m->progress.sampled = m->progress.step;  // it comes next
    if (first) m->progress.save = checkpoint_next_save(m->opt.out, m->progress.save);
    bool ok = !first || checkpoint_create(m->opt.out, &m->out_lock, m->progress.step,
                                          &m->config, bf16, &m->kept, tmp, &err);
    job_agree(&m->job, ok, &err, 1);
    MPI_Bcast(tmp, sizeof tmp, MPI_CHAR, 0, MPI_COMM_WORLD);
    Checksums sums = checksums_make(&m->config, bf16);
    // Without ZeRO all data ranks hold the same.
    bool others = !m->opt.zero && m->grid.d_rank != 0;
    ok = others || state_save(&m->state, tmp, &sums, &err);
    bool written = job_first_failure(&m->job, ok) == m->job.size;
    MPI_Reduce(first ? MPI_IN_PLACE : sums.sums, sums.sums, (int)sums.count, MPI_UINT64_T,
               MPI_SUM, 0, MPI_COMM_WORLD);
    if (first && written)
        ok = checkpoint_commit(m->opt.out, tmp, &m->progress, &sums, path, &err);
    if (first && !written) checkpoint_remove(tmp);
    job_agree(&m->job, ok, &err, 1);
    free(sums.sums);
    m->saved_step = m->progress.step;
    if (!first) return;
    checkpoint_prune(m->opt.out, m->opt.keep, m->progress.step);
    printf("saved %s\n", path);
    fflush(stdout);
}

// Sends the last tokens of a sample that is due to the device, for the trainer to run
// forward. The pass is rounded up, so that samples of all lengths need few algorithms of
// matrix products. Returns false at the end of the sample, and has then printed it.
static inline bool sample_goes_on(Trainer *m) {
    Sample *s = &m->sample;
    size_t most = s->prompt + m->opt.sample_tokens;
    if (!s->running) {
        if (!sample_due(m)) return false;
        s->tokens = (int *)host_resize(s->tokens, most, sizeof(int));
        s->running = true;
        s->count = s->prompt;
    }
    if (s->count == most) {
        printf("sample: ");
        tokenizer_print(&m->tokenizer, s->tokens, s->count);
        printf("\n");
        return s->running = false;
    }
    size_t multiple = 64 * m->grid.t, padded;
    s->T = s->count < m->T ? s->count : m->T;
    padded = CEIL_DIV(s->T, multiple) * multiple;
    s->padded = padded < m->T ? padded : m->T;
    memset(m->host_inputs, 0, s->padded * sizeof(int));
    memcpy(m->host_inputs, s->tokens + s->count - s->T, s->T * sizeof(int));
    CUDA_CHECK(cudaMemcpyAsync(m->inputs, m->host_inputs, s->padded * sizeof(int),
                               cudaMemcpyHostToDevice, m->stream));
    return true;
}

// Draws the next token from logits (Vp) on the device. ranks.cuh has the function for ranks
// that share the logits.
static inline void sample_append(Trainer *m, const floatX *logits) {
    Sample *s = &m->sample;
    trainer_synchronize(m);
    float *host = (float *)host_alloc(m->config.Vp, sizeof(float));
    state_download(host, logits, m->config.Vp);
    double coin = random_uniform(m->opt.seed, RANDOM_SAMPLE, m->progress.step, 0,
                                 s->count - s->prompt);
    s->tokens[s->count++] = sample_token(host, m->config.V, coin);
    free(host);
}

// Gathers the spans of all ranks on rank 0, which writes the Chrome trace.
static inline bool trainer_report_timeline(Trainer *m, Error *err) {
    const size_t unit = sizeof(double);  // MPI counts in int: bytes would be too many
    const TraceList *mine = &m->timeline.trace;
    int size = m->job.size, count = (int)(mine->count * sizeof(TraceEvent) / unit);
    int *counts = (int *)host_alloc(2 * (size_t)size, sizeof(int)), *at = counts + size;
    TraceList all = {NULL, 0};
    MPI_Gather(&count, 1, MPI_INT, counts, 1, MPI_INT, 0, MPI_COMM_WORLD);
    for (int rank = 1; rank < size; rank++) at[rank] = at[rank - 1] + counts[rank - 1];
    all.count = (size_t)(at[size - 1] + counts[size - 1]) * unit / sizeof(TraceEvent);
    if (m->job.rank == 0)
        all.events = (TraceEvent *)host_alloc(all.count, sizeof(TraceEvent));
    MPI_Gatherv(mine->events, count, MPI_DOUBLE, all.events, counts, at, MPI_DOUBLE, 0,
                MPI_COMM_WORLD);
    free(counts);
    if (m->job.rank != 0) return true;
    qsort(all.events, all.count, sizeof *all.events, trace_order);
    bool ok =
        trace_write(m->opt.trace, all.events, all.count, m->tracks, m->stream_count, err);
    free(all.events);
    return ok;
}

// True if all output was written. A pipe without a reader is no failure.
static inline bool stdout_is_whole(Error *err) {
    struct stat info;
    bool ok = fflush(stdout) == 0 && !ferror(stdout);
    if (ok || (fstat(STDOUT_FILENO, &info) == 0 && S_ISFIFO(info.st_mode))) return true;
    return error_set(
        err, "what was printed is incomplete: is the disk of the standard output full?");
}

// Writes the reports and ends the run, on all ranks. Returns the exit code.
static inline int trainer_close(Trainer *m) {
    Error err;
    const Options *o = &m->opt;
    CUDA_CHECK(cudaDeviceSynchronize());
    // Collects validation and samples. Spans of a step know its number.
    timeline_collect(&m->timeline, 0);
    if (o->trace) CUDA_CHECK(cudaProfilerStop());
    trainer_report_clock(m);
    bool ok = (!o->trace || trainer_report_timeline(m, &err)) && log_close(&m->log, &err) &&
              stdout_is_whole(&err);
    job_agree(&m->job, ok, &err, 1);
    job_finish(&m->job);
    return 0;
}

// Ends the run on all ranks, when all know that one of them could not read its data or,
// between two steps, that a signal came. Saves the weights, which are sound, if no
// checkpoint of this run has them.
static inline void trainer_leave(Trainer *m) {
    m->stopped = true;
    if (m->opt.out && has_moved(m) && m->saved_step != m->progress.step) trainer_save(m);
    job_agree(&m->job, !m->data_failed, &m->data_error, 1);
    printf("stopped by a signal after step %zu: %s\n", m->progress.step,
           m->opt.out ? "the same command with --resume auto goes on"
                      : "without --out nothing was saved");
    exit(trainer_close(m));
}

#endif
