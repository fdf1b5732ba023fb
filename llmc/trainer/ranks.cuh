// ranks.cuh: the part of the library for trainers of several ranks. Checks that all started
// alike, makes the communicators of groups and links and uses them once before training.
// Compares replicas, and sums over ranks.
//
// On GPUs some work happens at first use, on the host, and may wait for all work in flight.
// NCCL connects two ranks at their first message, and a communicator at its first
// collective of each kind and size. CUDA loads a kernel at its first launch. If a receive
// is in flight and its sender waits for us, that is a deadlock. So these come before any
// training traffic:
//   1. job_warm_up: every kind of collective on every communicator, small and large. The host
//      waits for each.
//   2. trainer_warm_up: a micro-batch forward and backward without messages, then two with
//      dropout.
//   3. trainer_link (stages.cuh): a first message on each link, in ascending order. The host
//      waits for each.
// The stand-ins refuse a program that breaks these rules (llmc/mpi/communicator.h), so they
// are tested without a GPU.
//
// defines: job_first_difference, job_split, job_split_grid, job_warm_up, trainer_warm_up,
//          wait_for, sample_append, replicas_check, trainer_check_replicas, trainer_open,
//          event_create, bucket_count, zero_gradient, sum_gradient, trainer_copy
#ifndef LLMC_RANKS_CUH
#define LLMC_RANKS_CUH

#include "llmc/grid.h"
#include "llmc/trainer.cuh"

static constexpr size_t WARM_UP_BYTES = 64 << 20;  // of the largest message in job_warm_up

// Returns the first of count numbers that differs between ranks, or count. A rank without a
// number gives UINT64_MAX for it. All ranks call it.
static inline size_t job_first_difference(const uint64_t *numbers, size_t count) {
    // The least of the values, and of their complements.
    uint64_t *least = (uint64_t *)host_alloc(2 * count, sizeof(uint64_t));
    size_t i = 0;
    for (size_t k = 0; k < count; k++) {
        bool none = numbers[k] == UINT64_MAX;
        least[k] = numbers[k];
        least[count + k] = none ? UINT64_MAX : ~numbers[k];
    }
    MPI_Allreduce(MPI_IN_PLACE, least, (int)(2 * count), MPI_UINT64_T, MPI_MIN,
                  MPI_COMM_WORLD);
    while (i < count && (least[i] == ~least[count + i] || least[i] == UINT64_MAX)) i++;
    free(least);
    return i;
}

// Splits the world into groups and returns the communicator of this rank's group: these ranks
// in this order. count is 0 for a rank in no group, and the result NULL. All ranks call it.
//   purpose  The name in reports.
//   blocks   The most multiprocessors for its kernels, 0 for NCCL's choice.
//   groups   For the virtual clock: the number of groups (0: unknown).
//   waited   For the virtual clock: compute waits for each of its collectives.
static inline ncclComm_t job_split(Job *job, const int *ranks, size_t count,
                                   const char *purpose, int blocks, size_t groups,
                                   bool waited) {
    ncclComm_t comm = NULL;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    int key = 0, color = count ? ranks[0] : NCCL_SPLIT_NOCOLOR;
    while (count && ranks[key] != job->rank) key++;
    if (blocks > 0) {
        config.minCTAs = 1;
        config.maxCTAs = blocks;
    }
#if !defined(NCCL_VERSION_CODE) || NCCL_VERSION_CODE >= 22700
    config.commName = purpose;
#endif
#ifdef NCCL_OVER_MPI
    config.ranks = ranks;
    config.count = count;
    config.groups = groups;
    config.waited = waited;
#endif
    (void)purpose, (void)groups, (void)waited;
    NCCL_CHECK(ncclCommSplit(job->world, color, key, &comm, &config));
    if (!comm) return NULL;
    return job->groups[job->group_count++] = comm;
}

// Splits the world into groups of the grid, see grid_group.
static inline ncclComm_t job_split_grid(Job *job, const Grid *grid, char group,
                                        const char *purpose, bool waited = false) {
    int *ranks = (int *)host_alloc(grid->world, sizeof(int));
    size_t count = grid_group(grid, group, ranks);
    size_t length = grid_size(grid, group == 'e' ? 'p' : group);
    ncclComm_t comm =
        job_split(job, ranks, count, purpose, 0, grid->world / length, waited);
    free(ranks);
    return comm;
}

// Connects a communicator for collectives: a few bytes, then `bytes`, the same on all
// ranks. Overwrites `bytes` bytes of scratch, on the device.
static inline void job_warm_up(ncclComm_t comm, void *scratch, size_t bytes,
                               cudaStream_t stream) {
    int n = 1, rank = 0;
    NCCL_CHECK(ncclCommCount(comm, &n));
    NCCL_CHECK(ncclCommUserRank(comm, &rank));
    if (n == 1) return;
    for (int large = 0; large < 2; large++) {
        size_t part = large ? bytes / sizeof(floatX) / (size_t)n : 1;
        size_t count = part * (size_t)n;
        floatX *x = (floatX *)scratch, *mine = x + (size_t)rank * part;
        NCCL_CHECK(ncclAllReduce(x, x, count, NCCL_FLOATX, ncclSum, comm, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        NCCL_CHECK(ncclReduceScatter(x, mine, part, NCCL_FLOATX, ncclSum, comm, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        NCCL_CHECK(ncclAllGather(mine, x, part, NCCL_FLOATX, comm, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        NCCL_CHECK(ncclBroadcast(x, x, count, NCCL_FLOATX, 0, comm, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        NCCL_CHECK(ncclReduce(x, x, count, NCCL_FLOATX, ncclSum, 0, comm, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
    }
}

// Warms up: first collectives on all communicators, then run_batch over one micro-batch,
// then over two with dropout. The second of these adds to gradients. The trainer connects
// its messages later: until then run_batch must work without them. Overwrites buffers.
// run_batch: NULL for trainers without messages.
template <class Model>
static inline void trainer_warm_up(Model *m,
                                   void (*run_batch)(Model *m, bool training) = NULL) {
    const Arena *larger = m->gradients.used > m->activations.used ? &m->gradients
                                                                  : &m->activations;
    size_t tokens = m->micros * m->B * m->T * sizeof(int), bytes = larger->used;
    size_t micros = m->micros;
    if (bytes > WARM_UP_BYTES) bytes = WARM_UP_BYTES;
    // The rank with the least room decides.
    MPI_Allreduce(MPI_IN_PLACE, &bytes, 1, MPI_UINT64_T, MPI_MIN, MPI_COMM_WORLD);
    job_warm_up(m->job.world, larger->base, bytes, m->stream);
    for (size_t i = 0; i < m->job.group_count; i++)
        job_warm_up(m->job.groups[i], larger->base, bytes, m->stream);
    CUDA_CHECK(cudaMemset(m->inputs, 0, tokens));
    CUDA_CHECK(cudaMemset(m->targets, 0, tokens));
    CUDA_CHECK(cudaDeviceSynchronize());
    if (!run_batch) return;

    for (size_t pass = 0; pass < 2; pass++) {
        m->micros = pass < micros ? 1 + pass : micros;
        trainer_set_dropout(m, pass == 1);
        run_batch(m, true);
    }
    m->micros = micros;
    trainer_set_dropout(m, false);
    CUDA_CHECK(cudaDeviceSynchronize());
}

// Lets the compute stream wait for an event, if it was ever recorded. The span shows
// exposed communication. The host waits, too, while a sample of text runs: its products
// have new shapes, which load kernels.
static inline void wait_for(Trainer *m, cudaEvent_t event, const char *name) {
    Span span(m, m->stream, name);
    CUDA_CHECK(cudaStreamWaitEvent(m->stream, event, 0));
    if (m->sample.running) trainer_synchronize(m);
}

// Draws the next token. logits: (Vl), of the last stage's ranks; `tensor` connects them.
// Other stages have none.
static inline void sample_append(Trainer *m, const floatX *logits, ncclComm_t tensor) {
    floatX *all = m->sample_logits;
    if (m->grid.t * m->grid.p == 1) return sample_append(m, logits);
    if (m->table.shard.head)
        NCCL_CHECK(ncclAllGather(logits, all, m->Vl, NCCL_FLOATX, tensor, m->stream));
    if (m->grid.p > 1)
        NCCL_CHECK(ncclBroadcast(all, all, m->config.Vp, NCCL_FLOATX, m->last_stage,
                                 m->job.world, m->stream));
    sample_append(m, all);
}

// Compares the ranks that hold the same part of the same tensor, by a 64-bit hash (FNV-1a)
// of its weights. Collective. False names the first one that differs.
static inline bool replicas_check(const Trainer *m, Error *err) {
    size_t parts = m->table.shard.t > m->table.shard.e ? m->table.shard.t
                                                       : m->table.shard.e;
    size_t count = count_tensors(&m->config) * parts;
    uint64_t *hashes = (uint64_t *)host_alloc(count, sizeof(uint64_t));
    memset(hashes, 0xff, count * sizeof(uint64_t));  // not held
    for (size_t i = 0; i < m->table.count; i++) {
        const Tensor *x = &m->table.tensors[i];
        int kind = x->spec->kind;  // several experts may have it, and w has the first
        const floatX *weights = m->w[x->held][kind] + x->offset -
                                table_find(&m->table, kind, x->held)->offset;
        size_t bytes = x->size * sizeof(floatX);
        unsigned char *host = (unsigned char *)host_alloc(bytes, 1);
        CUDA_CHECK(cudaMemcpy(host, weights, bytes, cudaMemcpyDeviceToHost));
        uint64_t *hash =
            &hashes[x->id * parts + (x->spec->split == SPLIT_NONE ? 0 : x->t_rank)];
        *hash = 0xcbf29ce484222325u;
        for (size_t k = 0; k < bytes; k++) *hash = (*hash ^ host[k]) * 0x100000001b3u;
        free(host);
    }
    size_t i = job_first_difference(hashes, count);
    free(hashes);
    return i == count || error_set(err, "%s differs between the ranks that hold it",
                                   tensor_describe(&m->config, i / parts, 1, 0).name);
}

// Compares the replicas when nothing is queued that writes weights. A difference ends the
// job.
static inline void trainer_check_replicas(Trainer *m) {
    Error err;
    CUDA_CHECK(cudaDeviceSynchronize());
    job_agree(&m->job, replicas_check(m, &err), &err, 1);
}

// Compares the ranks' programs and command lines. Comes before everything that depends on
// them, --help included: ranks that take different ways would wait for each other without
// end.
static inline bool trainer_same_start(int argc, char **argv, unsigned sections,
                                      size_t own_rows, Error *err) {
    uint64_t line = 0;
    for (int i = 1; i < argc; i++) {
        for (const char *c = argv[i]; *c; c++) line = 31 * line + (unsigned char)*c;
        line = 31 * line + ' ';
    }
    uint64_t numbers[] = {OPTION_ROWS, sizeof(Options), sizeof(floatX),
                          sections,    own_rows,        line};
    size_t count = sizeof numbers / sizeof numbers[0];
    return job_first_difference(numbers, count) == count ||
           error_set(err,
                     "the ranks run different trainers, builds of one or command lines: "
                     "start all of them alike");
}

// Refuses to start unless all ranks, each on its node, see the same data and the same
// checkpoint.
static inline bool trainer_same_files(const Trainer *m, Error *err) {
    const GPTConfig *c = &m->config;
    static const char *const what[] = {"--train-data", "--val-data", "--eval",
                                       "--resume or --init"};
    uint64_t numbers[] = {m->train_data.samples,
                          m->val_data.samples,
                          m->eval.rows,
                          m->progress.step,
                          m->progress.sample,
                          c->L,
                          c->C,
                          c->NH,
                          c->V,
                          c->maxT};
    size_t count = sizeof numbers / sizeof numbers[0];
    size_t i = job_first_difference(numbers, count);
    return i == count || error_set(err,
                                   "the ranks see different files under the name that %s "
                                   "gives: have the same on "
                                   "every node",
                                   what[i < 3 ? i : 3]);
}

// Starts the job and reads everything that the command line names. sections: the parts of
// RANK_OPTIONS that this trainer has beside the rows of its lesson. If anything is wrong,
// one rank prints one error message, and all ranks leave with exit code 2.
static inline void trainer_open(Trainer *m, int argc, char **argv, unsigned sections,
                                Lesson lesson = {}) {
    Error err;
    lesson.groups = rank_options(sections);
    trainer_simulate(argc, argv, &lesson);
    job_start(&m->job, &argc, &argv);
    job_agree(&m->job, job_check_launcher(&m->job, &err), &err);
    job_agree(&m->job, trainer_same_start(argc, argv, sections, lesson.options.count, &err),
              &err);
    job_agree(&m->job, trainer_prepare(m, argc, argv, &lesson, &err), &err);
    job_agree(&m->job, trainer_same_files(m, &err), &err);
    if (m->opt.debug_replicas) m->check_replicas = trainer_check_replicas;
    m->last_stage = grid_rank_at(&m->grid, 0, 0, m->grid.p - 1);
    if (m->job.size > 1) grid_print(stdout, &m->grid);
    if (m->opt.layers_per_stage)
        printf("layers       %s on the stages\n", m->opt.layers_per_stage);
}

static inline void event_create(cudaEvent_t *event) {
    CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
}

// Returns the number of buckets of the flat buffer: 0 wte, 1 the other embeddings,
// BUCKET_LAYERS + l layer l, the last ln_f.
static inline size_t bucket_count(const Trainer *m) {
    return m->table.bucket_count;
}

// Sets the gradient of a tensor outside the layers to zero.
static inline void zero_gradient(Trainer *m, int kind) {
    const Tensor *x = table_find(&m->table, kind, 0);
    CUDA_CHECK(
        cudaMemsetAsync(m->state.grads + x->offset, 0, x->size * sizeof(float), m->stream));
}

// Sums the gradient of a tensor outside the layers over the ranks of a communicator. It
// takes only the elements that this rank updates: 1/d of them with ZeRO. NULL: nothing to
// do.
static inline void sum_gradient(Trainer *m, int kind, ncclComm_t comm) {
    for (size_t i = 0; comm && i < m->state.piece_count; i++) {
        const Piece *x = &m->state.host_pieces[i];
        if (m->table.tensors[x->tensor].spec->kind != kind) continue;
        float *dx = m->state.grads + x->lo;
        NCCL_CHECK(
            ncclAllReduce(dx, dx, x->hi - x->lo, ncclFloat, ncclSum, comm, m->stream));
    }
}

// Copies floatX within the device, on the compute stream.
static inline void trainer_copy(Trainer *m, floatX *to, const floatX *from, size_t count) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, count * sizeof(floatX), cudaMemcpyDeviceToDevice,
                               m->stream));
}

#endif
