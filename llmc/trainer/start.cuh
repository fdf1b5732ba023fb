// start.cuh: a trainer's way to its first step: command line, checkpoint, data, grid,
// memory, weights.
//
// defines: GPU_RESERVE, DEVICE_RESERVE, trainer_sizes, trainer_set_batch, trainer_open,
//          trainer_shard, trainer_layout, trainer_allocate, trainer_start
#ifndef LLMC_START_CUH
#define LLMC_START_CUH

#include "llmc/trainer.cuh"
#include "llmc/trainer/tuned.cuh"

// Bytes of a GPU that the plan of memory leaves to the driver and to libraries. They hold
// CUDA's context, kernels, cuBLASLt's workspace, and the buffers of up to 8 communicators.
// An estimate, and the "reserve" of every GPU in dev/clusters.
static constexpr size_t GPU_RESERVE = 3000000000;

#ifdef __CUDACC__
static constexpr size_t DEVICE_RESERVE = GPU_RESERVE;
#else
static constexpr size_t DEVICE_RESERVE = 0;  // a CPU needs none
#endif

// Checks that a checkpoint is complete. With --verify its checksums must be the saved ones.
// All ranks call it; each reads a share, and all get the result.
static inline bool trainer_verify(const Trainer *m, const char *dir, Error *err) {
    const Job *job = &m->job;
    Checksums sums;
    size_t rank = (size_t)job->rank, ranks = (size_t)job->size;
    bool ok =
        checkpoint_sum(dir, m->opt.config.spec, rank, ranks, m->opt.verify, &sums, err);
    int first = job_first_failure(job, ok);
    if (first < job->size) {
        MPI_Bcast(err->text, sizeof err->text, MPI_CHAR, first, MPI_COMM_WORLD);
        ok = false;
    } else if (m->opt.verify) {
        MPI_Allreduce(MPI_IN_PLACE, sums.sums, (int)sums.count, MPI_UINT64_T, MPI_SUM,
                      MPI_COMM_WORLD);
        ok = checkpoint_matches(dir, &sums, err);
    }
    free(sums.sums);
    return ok;
}

// Finds the newest sound checkpoint under --out, or "". Rank 0 looks for one, and all ranks
// read it.
static inline bool trainer_latest(const Trainer *m, char latest[PATH_MAX], Error *err) {
    bool ok = true;
    Error why;
    for (size_t passed = 0;; passed++) {
        if (m->job.rank == 0) ok = checkpoint_latest(m->opt.out, passed, latest, err);
        MPI_Bcast(latest, PATH_MAX, MPI_CHAR, 0, MPI_COMM_WORLD);
        if (!latest[0] || trainer_verify(m, latest, &why)) return ok;
        checkpoint_pass_over(latest, passed, &why, err);
    }
}

// Claims --out for this run, once.
static inline bool trainer_claim(Trainer *m, Error *err) {
    const Options *o = &m->opt;
    return m->out_lock != 0 || !o->out || o->dry_run || o->eval ||
           checkpoint_claim(o->out, m->job.rank == 0, &m->out_lock, err);
}

// Finds the source of the weights: --resume (auto: the newest checkpoint under --out, if
// there is one), else --init, else random numbers. For --resume it claims an existing
// --out. This gives the name to a checkpoint that an interrupted save left without it.
static inline bool trainer_source(Trainer *m, Error *err) {
    static char latest[PATH_MAX];
    Options *o = &m->opt;
    bool newest = o->resume && strcmp(o->resume, "auto") == 0;
    if (newest && !o->out)
        return error_set(err, "--resume auto needs --out, where it looks");
    bool claims = newest || (o->resume && o->out && access(o->out, F_OK) == 0);
    job_agree(&m->job, !claims || trainer_claim(m, err), err);
    if (newest) {
        if (!trainer_latest(m, latest, err)) return false;
        o->resume = latest[0] ? latest : NULL;  // none yet: a fresh start
        if (o->resume) o->init = NULL;  // a requeued job goes on from where it stands
    } else if (o->resume && !trainer_verify(m, o->resume, err))
        return false;
    if (o->eval && o->resume) {
        o->init = o->resume;
        o->resume = NULL;
    }  // its weights, and nothing of its training
    return true;
}

// Opens the tokenizer and makes the tokens of the prompt, if the run prints samples or
// names a file for that. Any other run needs none: weights beside a tokenizer that we
// cannot read are sound. began: --init as the command line has it.
static inline bool trainer_tokenizer(Trainer *m, const char *from, const char *began,
                                     const Lesson *lesson, Error *err) {
    static char beside[PATH_MAX];
    Options *o = &m->opt;
    if (!o->sample_every && !o->tokenizer) return true;
    if (!o->tokenizer) {
        if (!tokenizer_beside(beside, from, began, m->config.V, err)) return false;
        if (beside[0]) o->tokenizer = beside;
    }
    return (lesson->tokenizer ? lesson->tokenizer(&m->tokenizer, o, err)
                              : tokenizer_open(&m->tokenizer, o->tokenizer, err)) &&
           (!o->sample_every ||
            tokenizer_prompt(&m->tokenizer, o->prompt, m->config.V, &m->sample.tokens,
                             &m->sample.prompt, err));
}

// Opens the data and the tokenizer, and proves that the outputs can be written. Runs last,
// so that a run that is refused for its options or data leaves no empty --out.
static inline bool trainer_files(Trainer *m, const char *from, const char *began,
                                 const Lesson *lesson, Error *err) {
    Options *o = &m->opt;
    if (o->train_data &&
        (!dataloader_open(&m->train_data, o->train_data, o->seq, o->global_batch, err) ||
         !progress_data(&m->progress, &m->train_data, !o->verify, err)))
        return false;
    if (o->val_every &&
        !dataloader_open(&m->val_data, o->val_data, o->seq, o->global_batch, err))
        return false;
    if (o->eval && !eval_open(&m->eval, o->eval, m->config.V, o->seq, err)) return false;
    return trainer_tokenizer(m, from, began, lesson, err) && trainer_claim(m, err) &&
           (m->job.rank != 0 || !from || !o->out || o->dry_run || o->eval ||
            kept_read(&m->kept, from, err)) &&
           (m->job.rank != 0 || outputs_check(o, err));
}

// Sets the widths of a rank that has 1/t of each: channels of heads, heads, hidden units
// and rows of the vocabulary.
static inline void trainer_sizes(Trainer *m, size_t t) {
    const GPTConfig *c = &m->config;
    m->A = c->C / t;
    m->NHl = c->NH / t;
    m->F = config_dimension(c, 'F') / t;
    m->Vl = c->Vp / t;
}

// Sets the size of the next batch: `sequences` on all data ranks together.
static inline void trainer_set_batch(Trainer *m, size_t sequences) {
    m->batch = sequences;
    m->micros = sequences / (m->B * m->readers);
    m->dloss = (float)(1.0 / ((double)sequences * (double)m->opt.seq));
}

static inline bool trainer_prepare(Trainer *m, int argc, char **argv, const Lesson *lesson,
                                   Error *err) {
    Options *o = &m->opt;
    GPTConfig file;
    strcpy(m->device.name, "no GPU");
    if (!options_parse(o, &lesson->options, argc, argv, lesson->groups, err)) return false;
    if (o->help || o->version) {
        if (o->help)
            options_help(stdout, argv[0], o, o->help == 2);
        else
            printf("%s, built from commit %s\n", argv[0], VERSION);
        MPI_Finalize();
        exit(0);
    }
    // A file that grows too large is an error of the write, with a message.
    signal(SIGXFSZ, SIG_IGN);
    // Nobody reads what we print: that is no reason to lose the run.
    if (o->out || o->log)
        signal(SIGPIPE, SIG_IGN);
    o->config.spec = lesson->spec;
    if (lesson->sizes && !lesson->sizes(o, lesson->options.object, err)) return false;
    const char *began = o->init;
    if (!trainer_source(m, err)) return false;
    const char *from = o->resume ? o->resume : o->init;
    if (from && !config_read(from, lesson->spec, &file, err)) return false;
    o->grid.rank = (size_t)m->job.rank;
    if (!trainer_virtual_time(o, err) ||
        !options_resolve(o, from ? &file : NULL, m->job.size, err) ||
        ((m->job.devices || !o->dry_run) && !job_check_devices(&m->job, &m->device, err)))
        return false;
    m->config = o->config;
    m->grid = o->grid;
    if (lesson->check && !lesson->check(m, err)) return false;
    if (o->init && !checkpoint_check(o->init, &m->config, 1, 0, 1, NULL, err)) return false;
    m->progress = {};
    m->progress.opt = *o;
    m->progress.bf16 = sizeof(floatX) == 2;
    progress_lesson(&m->progress, &lesson->options);
    if (o->resume && !progress_resume(&m->progress, o->resume, err)) return false;
    m->B = o->micro_batch;
    m->T = o->seq / o->context;
    m->readers = m->grid.d / o->context;
    m->reader = m->grid.d_rank / o->context;
    trainer_set_batch(m, o->global_batch);
    trainer_sizes(m, 1);
    m->V0 = 0;
    m->sp = 1;
    return trainer_files(m, from, began, lesson, err);
}

// Starts the one rank of train_gpt.cu, or of a lesson behind it, and reads everything that
// the command line names. If anything is wrong, it prints one error message and leaves with
// exit code 2. ranks.cuh has the function for trainers of several ranks.
static inline void trainer_open(Trainer *m, int argc, char **argv, Lesson lesson = {}) {
    Error err;
    lesson.groups = one_rank_options();
    trainer_simulate(argc, argv, &lesson);
    job_start(&m->job, &argc, &argv);
    job_agree(&m->job, job_check_launcher(&m->job, &err), &err);
    bool ok = m->job.size == 1 ||
              error_set(&err,
                        "this trainer is one rank, but %d were started: use train_gpt_3d",
                        m->job.size);
    job_agree(&m->job, ok, &err);  // before a rank leaves for --help
    job_agree(&m->job, trainer_prepare(m, argc, argv, &lesson, &err), &err);
}

// Takes this rank's part of the model.
static inline void trainer_shard(Trainer *m, Shard mine) {
    m->table = table_make(&m->config, mine);
    state_create(&m->share, &m->table);
    state_create(&m->state, &m->table);
}

// Counts the buffers that every trainer has, or sets their pointers. Returns the arena for
// the trainer's own. Unless the trainer has said otherwise, this rank owns all of its part.
static inline Arena *trainer_layout(Trainer *m) {
    size_t N = m->B * m->T, layers = m->table.shard.n_layers;
    if (!m->w) {
        if (!m->share.owned) state_own(&m->share, 0, m->table.total);
        if (!m->state.owned) state_own(&m->state, 0, m->table.total);
        m->adamw_blocks = adamw_number(m->state.host_pieces, m->state.piece_count);
        host_array(m->w, layers);
        host_array(m->dw, layers);
    }
    m->weights.used = m->gradients.used = m->optimizer.used = m->activations.used = 0;
    state_layout(&m->state, &m->weights, &m->gradients, &m->optimizer);
    m->share.grads = m->state.grads;
    for (size_t i = 0; i < m->table.count; i++) {
        const Tensor *x = &m->table.tensors[i];
        m->w[x->held][x->spec->kind] = m->state.params + x->offset;
        m->dw[x->held][x->spec->kind] = m->state.grads + x->offset;
    }
    Arena *arena = &m->activations;
    take(arena, m->loss_sums, m->micros);
    take(arena, m->inputs, m->micros * N);
    take(arena, m->targets, m->micros * N);
    take(arena, m->losses, m->micros * 2 * N);
    take(arena, m->share.pieces, m->share.piece_count);
    take(arena, m->norms, m->share.piece_count);
    take(arena, m->state.pieces, m->state.piece_count);
    take(arena, m->norm_scratch,
         global_norm_scratch(m->share.piece_count, m->table.largest));
    take(arena, m->totals, count_tensors(&m->config) + TOTALS_EXTRA);
    take(arena, m->sample_logits, m->grid.t * m->grid.p > 1 ? m->config.Vp : 0);
    return arena;
}

static inline void trainer_print(const Trainer *m) {
    const GPTConfig *c = &m->config;
    printf("device       %s, %s\n", m->device.name, FLOATX_NAME);
    printf(
        "model        %zu layers, %zu heads, %zu channels, vocabulary %zu (padded to %zu), "
        "%zu positions: %zu "
        "parameters\n",
        c->L, c->NH, c->C, c->V, c->Vp, c->maxT, count_parameters(c));
    printf("batch        %zu sequences of %zu tokens a step, in %zu micro-batches of %zu",
           m->opt.global_batch, m->opt.seq, m->micros, m->B);
    if (m->job.size > 1)
        printf(" on each of %zu data ranks\n", m->readers);
    else
        printf("\n");
    const Ramp *ramp = &m->opt.ramp;
    if (ramp->start)
        printf("ramp         from %zu sequences by %zu over %zu samples\n", ramp->start,
               ramp->increment, ramp->samples);
    if (m->opt.steps && m->opt.warmup >= m->opt.steps)
        printf(
            "note: --warmup %zu leaves none of --steps %zu for the decay to --lr-final\n",
            m->opt.warmup, m->opt.steps);
}

// Allocates the buffers of the trainer's layout and makes the communicator of all ranks.
// The layout counts the buffers in a first call and sets pointers in a second. Refuses a
// layout that does not fit, with exit code 2. Ends a --dry-run.
template <class Model>
static inline void trainer_allocate(Model *m, void (*layout)(Model *m)) {
    struct {
        Arena *arena;
        const char *purpose;
    } plan[] = {{&m->weights, "weights"},
                {&m->gradients, "gradients"},
                {&m->optimizer, "optimizer"},
                {&m->activations, "activations"}};
    size_t needed = DEVICE_RESERVE, free_bytes = SIZE_MAX, total_bytes;
    double mib[4];
    Error err;
    layout(m);
    trainer_print(m);
    for (int i = 0; i < 4; i++) {
        mib[i] = (double)plan[i].arena->used / 1048576.0;
        printf("%-12s %12.1f MiB\n", plan[i].purpose, mib[i]);
        needed += plan[i].arena->used;
    }
    if (m->job.devices) CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    bool fits = needed <= free_bytes ||
                error_set(&err,
                          "does not fit: %.0f MiB are needed and %.0f MiB are free on the "
                          "device; lower --micro-batch "
                          "or --seq, or use --recompute layer",
                          (double)needed / 1048576.0, (double)free_bytes / 1048576.0);
    for (int i = 0; i < 4 && fits && !m->opt.dry_run; i++) {
        cudaError_t error = cudaMalloc((void **)&plan[i].arena->base, plan[i].arena->used);
        fits = error == cudaSuccess ||
               error_set(&err, "cannot allocate %.0f MiB for %s: %s", mib[i],
                         plan[i].purpose, cudaGetErrorString(error));
    }
    job_agree(&m->job, fits, &err);
    if (m->opt.dry_run) exit(job_dry_run(&m->job, mib));
    layout(m);
    m->stream = stream_create(m, "compute", false);
    matmul_create(&m->matmul, m->stream);
    job_agree(&m->job, trainer_tuned(m, &err), &err);
    // NCCL then connects all its algorithms at once. So the warm-up need not use each of
    // them before a receive is in flight.
    if (m->grid.p > 1) setenv("NCCL_RUNTIME_CONNECT", "0", 0);
    job_connect(&m->job);
}

// Allocates pinned host memory. The device copies from and to it beside its work.
template <class T>
static inline void pinned_array(T *&host, size_t count) {
    CUDA_CHECK(cudaMallocHost((void **)&host, count * sizeof(T)));
}

// Makes the host buffers, the weights and the optimizer at the beginning of a run. All
// ranks have met (job_connect), and each buffer has its place.
static inline void trainer_start(Trainer *m) {
    const Options *o = &m->opt;
    Error err;
    const char *from = o->resume ? o->resume : o->init;
    size_t tokens = m->micros * m->B * m->T;
    pinned_array(m->host_inputs, tokens);
    pinned_array(m->host_targets, tokens);
    pinned_array(m->host_sums, m->micros);
    pinned_array(m->host_norms, m->share.piece_count);
    pinned_array(m->host_totals, count_tensors(&m->config) + TOTALS_EXTRA);
    const State *states[] = {&m->share, &m->state};
    for (const State *s : states)
        CUDA_CHECK(cudaMemcpy(s->pieces, s->host_pieces, s->piece_count * sizeof(Piece),
                              cudaMemcpyHostToDevice));
    // Copies of pageable memory may still be on their way.
    CUDA_CHECK(cudaDeviceSynchronize());
    trainer_set_dropout(m, false);
    // Loads its kernels before any message.
    global_norm_squared(m->norms, m->norm_scratch, m->state.grads, m->share.pieces,
                        m->share.piece_count, m->table.largest, m->share.owned, m->stream);
    bool loaded = o->simulate ||
                  state_start(&m->state, from, o->resume != NULL, o->seed, &err);
    job_agree(&m->job, loaded, &err, 1);
    CUDA_CHECK(cudaDeviceSynchronize());  // memory is set on the default stream, which ours
                                          // do not wait for
    if (m->check_replicas)
        m->check_replicas(m);  // after a step ZeRO has gathered one copy over all others
    // No rank can refuse anything any more. So the log may now lose the lines that this run
    // repeats.
    // Lines of the steps so far stay in the log.
    size_t kept = o->eval ? SIZE_MAX : m->progress.step;
    double peak = m->job.size * device_peak_flops(m->device.name, sizeof(floatX) == 2);
    bool opened = log_open(&m->log, m->job.rank == 0 ? o->log : NULL, kept, o->steps,
                           count_flops(&m->config, 1, o->seq), peak, &err);
    job_agree(&m->job, opened, &err);
    timeline_start(&m->timeline, o->trace != NULL, m->job.rank, m->stream);
    job_reset_traffic(&m->job);
    if (!o->simulate && !o->eval)
        job_listen();  // else there is nothing to save, and signals end the run
    if (o->trace) CUDA_CHECK(cudaProfilerStart());
    trainer_clock_zero(m);
}

#endif
