// virtual_run.cuh: --virtual-time and --simulate. Starts the clock of the stand-ins
// (clock.h) and the processes of a simulation (simulate.h). Reports how the last step spent
// its time. llmc/trainer.cuh includes it.
#ifndef LLMC_CPU_VIRTUAL_RUN_CUH
#define LLMC_CPU_VIRTUAL_RUN_CUH

enum { SIMULATED_STAGES = 1024 };

// Starts the clock of --virtual-time. A simulation's runs already.
static inline bool trainer_virtual_time(const Options *o, Error *err) {
    Cluster cluster;
    if (!o->simulate && o->ranks)
        return error_set(err, "--ranks %zu needs --simulate, whose ranks it counts",
                         o->ranks);
    if (!o->virtual_time || cpu_clock().on) return true;
    if (!cluster_read(&cluster, o->virtual_time, err)) return false;
    cpu_clock_start(&cluster, false);
    return true;
}

// Checks a simulation, which has no data, no weights and nothing to save.
static inline bool options_check_simulation(Options *o, Error *err) {
    if (!o->ranks) return error_set(err, "--simulate needs --ranks, the GPUs of the job");
    if (o->virtual_time)
        return error_set(err, "--simulate and --virtual-time exclude each other");
    static const char off[sizeof(size_t)] = {0};
    if (o->val_every == OPTION_LEFT_OUT) o->val_every = 0;
    for (const FieldTable *t = o->tables; t < o->tables + 3; t++) {
        for (const Field *f = t->fields; f < t->fields + t->count; f++) {
            if (!(f->tags & OPTION_TRAINS)) continue;
            bool mark = f->type == FIELD_MARK;
            bool text_or_size = !mark && f->type != FIELD_SWITCH;
            size_t bytes = text_or_size ? sizeof(size_t)
                           : mark       ? sizeof(int)
                                        : sizeof(bool);
            if (memcmp((const char *)t->object + f->offset, off, bytes) != 0)
                return error_set(err,
                                 "--%s has no meaning under --simulate, where no data "
                                 "move: leave it out",
                                 f->name);
        }
    }
    if (o->steps == 0)
        return error_set(err,
                         "--simulate needs --steps 1 or more: it has nothing but steps");
    return true;
}

// Makes a process for each stage: its first rank. With context parallelism, for each of the
// ranks that share the first sequence: they may differ. If stages or tensor groups do not
// fill nodes, the job waits for the data rank with the worst placed ranks. So the clock
// places the simulated ranks like these.
static inline bool trainer_simulate_stages(Options *o, Error *err) {
    Grid *grid = &o->grid;
    Cluster cluster;
    if (!options_check_simulation(o, err) || !options_resolve(o, NULL, o->ranks, err))
        return false;
    if (grid->p > SIMULATED_STAGES)
        return error_set(err,
                         "--simulate runs a process for each stage, at most %d, not %zu: "
                         "lower --pipeline",
                         SIMULATED_STAGES, grid->p);
    if (getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMI_SIZE"))
        return error_set(
            err, "--simulate is one command for all ranks: start it without mpirun");
    if (!cluster_read(&cluster, o->simulate, err)) return false;
    cpu_clock_start(&cluster, true);
    cpu_clock().shift =
        (size_t)grid_rank_at(grid, 0, grid_worst_data_rank(grid, &cluster), 0);
    int *ranks = (int *)host_alloc(grid->world, sizeof(int));
    int count = (int)grid_group(grid, 'p', ranks);
    for (size_t i = 1; i < o->context; i++) ranks[count++] = grid_rank_at(grid, 0, i, 0);
    bool ok = cpu_simulate_ranks(ranks, count, (int)grid->world);
    free(ranks);
    return ok || error_set(err, "cannot make %d processes: %s", count, strerror(errno));
}

// Under --simulate, becomes these processes, or ends with exit code 2. Does nothing for any
// other command line, which may be wrong: trainer_open refuses it.
static inline void trainer_simulate(int argc, char **argv, const Lesson *lesson) {
    Options o;
    Error err;
    if (!options_parse(&o, &lesson->options, argc, argv, lesson->groups, &err) ||
        !o.simulate || o.help)
        return;
    if ((!lesson->sizes || lesson->sizes(&o, lesson->options.object, &err)) &&
        trainer_simulate_stages(&o, &err))
        return;
    fprintf(stderr, "error: %s\n", err.text);
    exit(2);
}

// Sets the clock to zero, and the log to its time. All ranks have come equally far.
static inline void trainer_clock_zero(Trainer *m) {
    const Cluster *c = &cpu_clock().cluster;
    CUDA_CHECK(cudaDeviceSynchronize());
    if (!cpu_clock().on) return;
    m->log.peak_flops = m->job.size * (sizeof(floatX) == 2 ? c->peak_bf16 : c->peak_fp32);
    m->log.virtual_time = true;
    m->log.simulated = cpu_simulates();
    cpu_clock_zero();
}

static inline void trainer_clock_begin_step(void) {
    if (!cpu_clock().on) return;
    for (cudaStream_t s : cpu_runtime().streams)
        memset(s->times.spent, 0, sizeof s->times.spent);
    cpu_clock_host_works(cpu_ns(cpu_clock().cluster.host_step));
}

// Keeps where the compute stream's time of a step of `ms` went. It was idle in the rest.
static inline void trainer_clock_end_step(Trainer *m, double ms) {
    double *part = cpu_clock().step.part, rest = cpu_clock().step.ms = ms;
    for (int i = 0; i < TIME_PARTS; i++) {
        part[i] = i == TIME_IDLE ? 0 : 1e-6 * m->stream->times.spent[i];
        rest -= part[i];
    }
    part[TIME_IDLE] = fmax(0, rest);
}

static inline void virtual_print_row(const CpuStep *v, const char *name) {
    printf("%5s %10.3f", name, v->ms);
    for (int i = 0; i < TIME_PARTS; i++)
        printf(" %9.1f", v->ms > 0 ? 100 * v->part[i] / v->ms : 0);
    printf(" %10.2f\n", v->bytes / 1073741824.0);
}

// Prints the step, and a row for each of steps[job.size] that was simulated or ran. Rows of
// other ranks are zero.
static inline void virtual_print(const Trainer *m, const CpuStep *steps) {
    CpuStep mean = CpuStep();
    double bubble = 0, n = 0, gpus = (double)m->job.size;
    double tokens = (double)m->opt.global_batch * (double)m->opt.seq;
    for (int rank = 0; rank < m->job.size; rank++) n += steps[rank].ms > 0;
    for (int rank = 0; rank < m->job.size; rank++) {
        const double *part = steps[rank].part;
        double work = part[TIME_GEMM] + part[TIME_ATTENTION] + part[TIME_MEMORY] +
                      part[TIME_TENSOR];
        if (m->grid.p > 1 && work > 0)
            bubble += (part[TIME_IDLE] + part[TIME_PIPELINE]) / work / n;
        mean.ms += steps[rank].ms / n;
        mean.bytes += steps[rank].bytes / n;
        for (int i = 0; i < TIME_PARTS; i++) mean.part[i] += part[i] / n;
    }
    double seconds = 1e-3 * steps[0].ms;
    double model = count_flops(&m->config, tokens, m->opt.seq), done = model;
    // Of 96 B T L C^2 (1 + T/6C + V/16LC) the head, which is not computed again, has 72
    // V/16LC.
    double head = 6.0 * tokens * (double)m->config.V * (double)m->config.C;
    bool but_attention = m->opt.recompute == RECOMPUTE_BUT_ATTENTION;
    size_t scores = but_attention ? 0 : m->opt.seq;  // of a token, that are computed again
    if (but_attention || m->opt.recompute == RECOMPUTE_LAYER)
        done += (count_flops(&m->config, tokens, scores) - head) / 3;
    printf("\nvirtual time on %s: the last step, of %.0f of %d ranks%s\n",
           cpu_clock().cluster.name, n, m->job.size,
           n < gpus ? ", each of which stands for those that do the same" : "");
    printf(
        "step %.9f s | %.0f tokens/s | %.1f TFLOP/s a GPU, %.1f with what is recomputed | "
        "MFU %.1f%% | "
        "bubble %.1f%%\n",
        seconds, tokens / seconds, 1e-12 * model / seconds / gpus,
        1e-12 * done / seconds / gpus, 100 * model / seconds / m->log.peak_flops,
        100 * bubble);
    printf("published GPU runs of this size take %+.0f to %+.0f%% longer than predicted\n",
           cost_band(gpus)[0], cost_band(gpus)[1]);
    printf("%5s %10s", "rank", "ms");
    for (int i = 0; i < TIME_PARTS; i++) printf(" %9s", time_part_name((TimePart)i));
    printf(" %10s   (parts in %%)\n", "GiB");
    for (int rank = 0; rank < m->job.size; rank++) {
        char name[16];
        snprintf(name, sizeof name, "%d", rank);
        if (steps[rank].ms > 0) virtual_print_row(&steps[rank], name);
    }
    if (n > 1) virtual_print_row(&mean, "mean");
    fflush(stdout);
}

// Prints the report on rank 0. All ranks call it.
static inline void trainer_report_clock(Trainer *m) {
    if (!cpu_clock().on) return;
    CpuStep mine = cpu_clock().step,
            *steps = (CpuStep *)host_alloc((size_t)m->job.size, sizeof *steps);
    const Arena *arenas[4] = {&m->weights, &m->gradients, &m->optimizer, &m->activations};
    for (int i = 0; i < 4; i++) mine.bytes += (double)arenas[i]->used;
    if (cpu_simulates()) mine.bytes += cpu_clock().cluster.reserve;
    MPI_Gather(&mine, sizeof mine, MPI_BYTE, steps, sizeof mine, MPI_BYTE, 0,
               MPI_COMM_WORLD);
    if (m->job.rank == 0 && mine.ms > 0) virtual_print(m, steps);
    free(steps);
}

#endif
