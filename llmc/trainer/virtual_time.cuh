// virtual_time.cuh: --virtual-time and --simulate: reads the cluster file and starts the clock of the stand-ins
// (llmc/cpu/clock.h), and of a simulation the processes (llmc/cpu/simulate.h). On a GPU both flags are refused.
//
// defines: VirtualStep, trainer_virtual_time, trainer_simulate, trainer_clock_zero,
//          trainer_clock_begin_step
#ifndef LLMC_VIRTUAL_TIME_CUH
#define LLMC_VIRTUAL_TIME_CUH

#include "llmc/host/options.h"
#include "llmc/trainer/job.cuh"

#ifdef CPU_CLOCK
// One rank's last step: what its compute stream did. Plain bytes, so that ranks can send it.
typedef struct {
    int rank;
    double ms, part[TIME_PARTS];  // ms; the parts sum to the step
    double bytes[4], reserve;     // weights, gradients, optimizer, activations
} VirtualStep;

// Starts the clock for a run with these options.
static inline void trainer_start_clock(const Cluster *cluster, const Options *o, bool simulates) {
    cpu_clock_start(cluster, simulates);
    cpu_clock().stage_ranks = o->tensor * o->data;
}

// Starts the clock of --virtual-time; that of a simulation runs already.
static inline bool trainer_virtual_time(const Options *o, Error *err) {
    Cluster cluster;
    if (!o->virtual_time || cpu_clock().on) return true;
    if (!cluster_read(&cluster, o->virtual_time, err)) return false;
    trainer_start_clock(&cluster, o, false);
    return true;
}

// How often a data rank's layers and messages leave a node: tensor ranks of one stage, neighbours of two.
static inline size_t trainer_crossings(const Cluster *cluster, const Grid *g, size_t d) {
    size_t count = 0, node = (size_t)cluster->gpus_per_node;
    for (size_t p = 0; p < g->p; p++) {
        size_t first = (size_t)grid_rank_at(g, 0, d, p) / node, last = (size_t)grid_rank_at(g, g->t - 1, d, p) / node;
        count += last - first + ((size_t)grid_rank_at(g, 0, d, (p + 1) % g->p) / node != first);
    }
    return count;
}

// Where nodes are no multiple of stages or tensor groups, the others wait for the data rank whose ranks sit worst: the
// simulated ones sit as those do.
static inline size_t trainer_shift(const Cluster *cluster, const Options *o) {
    Grid grid;
    Error err;
    size_t worst = 0, most = 0;
    if (!grid_make(&grid, o->ranks, 0, o->tensor, o->data, o->pipeline, o->order, &err)) return 0;
    for (size_t d = 0; d < grid.d; d++) {
        size_t count = trainer_crossings(cluster, &grid, d);
        if (count > most) most = count, worst = d;
    }
    return (size_t)grid_rank_at(&grid, 0, worst, 0);
}

// The first ranks of all stages: those that are simulated.
static inline bool trainer_simulated_ranks(Options *o, int **ranks, Error *err) {
    Grid grid;
    if (!options_resolve(o, NULL, o->ranks, err)) return false;
    if (o->tensor * o->data * o->pipeline != o->ranks)
        return error_set(err,
                         "--tensor %zu, --data %zu and --pipeline %zu make %zu ranks, and --ranks is %zu: change one",
                         o->tensor, o->data, o->pipeline, o->tensor * o->data * o->pipeline, o->ranks);
    if (!grid_make(&grid, o->ranks, 0, o->tensor, o->data, o->pipeline, o->order, err)) return false;
    if (getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMI_SIZE"))
        return error_set(err, "--simulate is one command for all ranks: start it without mpirun");
    *ranks = (int *)host_alloc(grid.p, sizeof(int));
    for (size_t stage = 0; stage < grid.p; stage++) (*ranks)[stage] = grid_rank_at(&grid, 0, 0, stage);
    return true;
}

// Under --simulate, becomes a process for each stage; what is wrong ends the program with exit code 2. Otherwise, and
// where the command line is for others to refuse, nothing.
static inline void trainer_simulate(int argc, char **argv, unsigned sections) {
    Options o;
    Error err;
    Cluster cluster;
    int *ranks = NULL;
    if (!options_parse(&o, argc, argv, sections, &err) || !o.simulate || o.help) return;
    bool ok = trainer_simulated_ranks(&o, &ranks, &err) && cluster_read(&cluster, o.simulate, &err);
    if (ok) trainer_start_clock(&cluster, &o, true);
    if (ok) cpu_clock().shift = trainer_shift(&cluster, &o);
    if (ok && !cpu_simulate_ranks(ranks, (int)o.pipeline, (int)o.ranks))
        ok = error_set(&err, "cannot make %zu processes: %s", o.pipeline, strerror(errno));
    free(ranks);
    if (ok) return;
    fprintf(stderr, "error: %s\n", err.text);
    exit(2);
}

// All ranks have come equally far: time begins here.
static inline void trainer_clock_zero(void) {
    CUDA_CHECK(cudaDeviceSynchronize());
    if (cpu_clock().on) cpu_clock_zero();
}

static inline void trainer_clock_begin_step(void) {
    if (!cpu_clock().on) return;
    for (cudaStream_t s : cpu_runtime().streams) memset(s->times.spent, 0, sizeof s->times.spent);
    cpu_clock_host_works(cpu_ns(cpu_clock().cluster.host_step));
}
#else
typedef struct {
    int none;
} VirtualStep;

static inline bool trainer_virtual_time(const Options *o, Error *err) {
    return (!o->virtual_time && !o->simulate) ||
           error_set(err, "--%s needs the trainers that need no GPU: build with make DEVICE=cpu",
                     o->simulate ? "simulate" : "virtual-time");
}
static inline void trainer_simulate(int, char **, unsigned) {}
static inline void trainer_clock_zero(void) {}
static inline void trainer_clock_begin_step(void) {}
#endif

#endif
