// virtual_report.cuh: what a run on the virtual clock says at its end: the step's time, and where it goes on each rank.
//
// defines: trainer_peak_flops, trainer_clock_end_step, trainer_report_clock
#ifndef LLMC_VIRTUAL_REPORT_CUH
#define LLMC_VIRTUAL_REPORT_CUH

#include "llmc/trainer.cuh"

// Peak FLOP/s of a device of this run, 0 if unknown.
static inline double trainer_peak_flops(const Trainer *m) {
    bool bf16 = sizeof(floatX) == 2;
#ifdef CPU_CLOCK
    if (cpu_clock().on) return bf16 ? cpu_clock().cluster.peak_bf16 : cpu_clock().cluster.peak_fp32;
#endif
    return device_peak_flops(m->device.name, bf16);
}

#ifdef CPU_CLOCK
// What was not spent on anything, the stream waited for.
static inline void trainer_clock_end_step(Trainer *m, double ms) {
    if (!cpu_clock().on) return;
    VirtualStep *v = &m->virtual_step;
    const Arena *arenas[4] = {&m->weights, &m->gradients, &m->optimizer, &m->activations};
    double known = 0;
    v->rank = m->job.rank;
    v->ms = ms;
    for (int i = 0; i < TIME_PARTS; i++) {
        v->part[i] = 1e-6 * (double)m->stream->times.spent[i];
        if (i != TIME_IDLE) known += v->part[i];
    }
    v->part[TIME_IDLE] = fmax(0, ms - known);
    for (int i = 0; i < 4; i++) v->bytes[i] = (double)arenas[i]->used;
    v->reserve = (double)job_reserve(&m->job);
}

static inline void trainer_print_virtual_step(const VirtualStep *v, const char *name) {
    double bytes = v->reserve;
    for (int i = 0; i < 4; i++) bytes += v->bytes[i];
    printf("%5s %10.3f", name, v->ms);
    for (int i = 0; i < TIME_PARTS; i++) printf(" %9.1f", v->ms > 0 ? 100 * v->part[i] / v->ms : 0);
    printf(" %10.2f\n", bytes / 1073741824.0);
}

// Waiting for other stages over working time, as pipeline papers count it.
static inline double virtual_bubble(const VirtualStep *v) {
    double work = v->part[TIME_GEMM] + v->part[TIME_ATTENTION] + v->part[TIME_MEMORY] + v->part[TIME_TENSOR];
    return work > 0 ? (v->part[TIME_IDLE] + v->part[TIME_PIPELINE]) / work : 0;
}

static inline void trainer_print_clock(const Trainer *m, const VirtualStep *steps, size_t count) {
    VirtualStep mean;
    double bubble = 0, n = (double)count, tokens = (double)m->opt.global_batch * (double)m->T;
    memset(&mean, 0, sizeof mean);
    for (size_t k = 0; k < count; k++) {
        const VirtualStep *v = &steps[k];
        if (m->grid.p > 1) bubble += virtual_bubble(v) / n;
        mean.ms += v->ms / n, mean.reserve += v->reserve / n;
        for (int i = 0; i < TIME_PARTS; i++) mean.part[i] += v->part[i] / n;
        for (int i = 0; i < 4; i++) mean.bytes[i] += v->bytes[i] / n;
    }
    double seconds = 1e-3 * steps[0].ms, model = count_flops(&m->config, tokens, m->T);
    double done = model * (m->opt.recompute == RECOMPUTE_LAYER ? 96.0 / 72 : 1), gpus = (double)m->job.size;
    // The head is not computed again: of 96 B T L C^2 (1 + T/6C + V/16LC) its part is that of 72.
    double head = 6.0 * tokens * (double)m->config.V * (double)m->config.C;
    if (m->opt.recompute == RECOMPUTE_LAYER) done -= head / 3;
    printf("\nvirtual time on %s: the last step, of %zu of %d ranks%s\n", cpu_clock().cluster.name, count, m->job.size,
           count < (size_t)m->job.size ? ", each of which stands for those that do the same" : "");
    printf("step %.9f s | %.0f tokens/s | %.1f TFLOP/s a GPU, %.1f with what is recomputed | MFU %.1f%% | "
           "bubble %.1f%%\n",
           seconds, tokens / seconds, 1e-12 * model / seconds / gpus, 1e-12 * done / seconds / gpus,
           100 * model / seconds / gpus / trainer_peak_flops(m), 100 * bubble);
    printf("%5s %10s", "rank", "ms");
    for (int i = 0; i < TIME_PARTS; i++) printf(" %9s", time_part_name((TimePart)i));
    printf(" %10s   (parts in %%)\n", "GiB");
    for (size_t k = 0; k < count; k++) {
        char name[16];
        snprintf(name, sizeof name, "%d", steps[k].rank);
        trainer_print_virtual_step(&steps[k], name);
    }
    if (count > 1) trainer_print_virtual_step(&mean, "mean");
    fflush(stdout);
}

// All ranks call it; rank 0 prints a row for each.
static inline void trainer_report_clock(Trainer *m) {
    size_t count = 0;
    VirtualStep *steps = (VirtualStep *)host_alloc((size_t)m->job.size, sizeof *steps);
    for (int rank = 0; rank < m->job.size; rank++) {
        if (!job_has(rank)) continue;
        VirtualStep *v = &steps[count++];
        if (rank == m->job.rank) *v = m->virtual_step;
        if (rank == 0 || (m->job.rank != 0 && m->job.rank != rank)) continue;
        if (m->job.rank == 0) MPI_Recv(v, sizeof *v, MPI_BYTE, rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        else MPI_Send(v, sizeof *v, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
    }
    if (m->job.rank == 0 && cpu_clock().host >= CPU_END) {
        printf("\nnote: on %s the run takes more than 146 years, where virtual time ends\n", cpu_clock().cluster.name);
    } else if (m->job.rank == 0 && m->virtual_step.ms > 0) {
        trainer_print_clock(m, steps, count);
    }
    free(steps);
}
#else
static inline void trainer_clock_end_step(Trainer *, double) {}
static inline void trainer_report_clock(Trainer *) {}
#endif

#endif
