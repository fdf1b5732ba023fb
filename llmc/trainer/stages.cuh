// stages.cuh: the part of the library for trainers of several pipeline stages. It has a
// stage's plan, by the command line, and the communicators of its links.
//
// defines: LINK_BLOCKS, trainer_plan, plan_step, trainer_link
#ifndef LLMC_STAGES_CUH
#define LLMC_STAGES_CUH

#include "llmc/pipeline_lists.h"
#include "llmc/trainer/ranks.cuh"

// Multiprocessors of a link's kernels: each fills one, and a receive waits long.
enum { LINK_BLOCKS = 4 };

// Returns this stage's plan for the layers and the schedule of the command line. Ends the
// run if there is none.
static inline PipelinePlan trainer_plan(Trainer *m) {
    Error err;
    PipelineLists lists;
    const Options *o = &m->opt;
    bool ok = pipeline_lists(&lists, (Schedule)o->schedule, o->schedule_file, m->grid.p,
                             m->micros, o->chunks, &err);
    job_agree(&m->job, ok, &err);
    return pipeline_plan(&lists, m->config.L, o->layers_per_stage, m->grid.p_rank);
}

// Sets *step to number *i of a plan's list, or to the next one behind it whose
// micro-batch is among the first `micros`. The list is made for a full batch, and --ramp
// begins with less. Returns false if there is none.
static inline bool plan_step(const PipelinePlan *plan, size_t micros, size_t *i,
                             PipelineStep *step) {
    while (*i < plan->step_count && (size_t)plan->steps[*i].micro >= micros) ++*i;
    if (*i == plan->step_count) return false;
    *step = plan->steps[*i];
    return true;
}

// Returns the communicator of a link if this rank is at one of its ends; else NULL. It
// has two ranks, and 0 sends to 1. NCCL connects two ranks at their first message, so it
// has carried one element, and the host has waited for it. All ranks call it, for all
// links in the same order. from, to: stages. Ranks of the same tensor and data
// coordinates are linked.
static inline ncclComm_t trainer_link(Trainer *m, int from, int to) {
    const Grid *grid = &m->grid;
    bool sends = (int)grid->p_rank == from, mine = sends || (int)grid->p_rank == to;
    int ends[2] = {grid_rank_at(grid, grid->t_rank, grid->d_rank, (size_t)from),
                   grid_rank_at(grid, grid->t_rank, grid->d_rank, (size_t)to)};
    ncclComm_t comm =
        job_split(&m->job, ends, mine ? 2 : 0, "pipeline", LINK_BLOCKS, 0, false);
    if (!comm) return NULL;

    if (sends)
        NCCL_CHECK(ncclSend(m->totals, 1, ncclDouble, 1, comm, m->stream));
    else
        NCCL_CHECK(ncclRecv(m->totals, 1, ncclDouble, 0, comm, m->stream));
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    return comm;
}

#endif
