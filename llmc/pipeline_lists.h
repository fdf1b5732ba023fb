// pipeline_lists.h: the lists of all stages of a pipeline together, of any schedule, as the proof, the tools and a
// trainer's plan want them.
//
// defines: PipelineLists, pipeline_lists_make, pipeline_lists_prove, pipeline_lists_free
#ifndef LLMC_PIPELINE_LISTS_H
#define LLMC_PIPELINE_LISTS_H

#include "llmc/pipeline_auto.h"
#include "llmc/pipeline_proof.h"

typedef struct {
    int p, m, v;           // stages, micro-batches of a training step, chunks of a stage
    PipelineStep **steps;  // [p] lists
    size_t *counts;        // [p] their lengths
} PipelineLists;

// A schedule for sizes that pipeline_check accepts. costs: what zb-auto searches with; the others do not look at them.
// Release with pipeline_lists_free.
static inline PipelineLists pipeline_lists_make(Schedule schedule, int p, int m, int v, const PipelineCosts *costs) {
    PipelineLists l = {p, m, v, NULL, NULL};
    l.steps = (PipelineStep **)host_alloc(p, sizeof *l.steps);
    l.counts = (size_t *)host_alloc(p, sizeof *l.counts);
    for (int s = 0; s < p; s++) {
        l.steps[s] = (PipelineStep *)host_alloc(3 * (size_t)m * v, sizeof **l.steps);
        if (schedule != SCHEDULE_ZB_AUTO) l.counts[s] = pipeline_schedule(schedule, p, s, m, v, l.steps[s]);
    }
    if (schedule == SCHEDULE_ZB_AUTO) pipeline_zb_auto(p, m, costs, l.steps, l.counts);
    return l;
}

static inline bool pipeline_lists_prove(const PipelineLists *l, size_t buffers, Error *err) {
    return pipeline_prove(l->p, l->m, l->v, (const PipelineStep *const *)l->steps, l->counts, buffers, err);
}

static inline void pipeline_lists_free(PipelineLists *l) {
    for (int s = 0; s < l->p; s++) free(l->steps[s]);
    free(l->steps);
    free(l->counts);
    memset(l, 0, sizeof *l);
}

#endif
