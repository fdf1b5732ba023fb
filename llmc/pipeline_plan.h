// pipeline_plan.h: what one pipeline stage is given before training starts: its layers, dealt to chunks, and its proved
// list of steps with the activation slot of each.
//
// defines: PipelinePlan, pipeline_layer_costs, pipeline_plan
#ifndef LLMC_PIPELINE_PLAN_H
#define LLMC_PIPELINE_PLAN_H

#include "llmc/grid.h"
#include "llmc/host/memory.h"
#include "llmc/pipeline_text.h"

typedef struct {
    size_t chunks;         // v
    size_t *first, *count; // [chunks] the layers of a chunk, in the numbering of this stage's parameter table
    size_t most_layers;    // the largest count
    size_t layer_count;    // of all chunks together
    size_t *layers;        // [layer_count] their numbers in the whole model
    PipelineStep *steps;   // [step_count] this stage's part of a training step
    size_t *slot;          // [step_count] where the activations of the step's micro-batch and chunk stay
    size_t step_count, slots;
    bool split;            // it has weight steps
} PipelinePlan;

// Deals L layers to the p * v chunks, and gives `stage` its own: global chunk c * p + stage is its chunk c.
static inline void pipeline_plan_layers(PipelinePlan *plan, size_t L, size_t p, size_t stage, size_t v) {
    plan->chunks = v;
    plan->first = (size_t *)host_alloc(v, sizeof(size_t));
    plan->count = (size_t *)host_alloc(v, sizeof(size_t));
    plan->layers = (size_t *)host_alloc(L, sizeof(size_t));
    for (size_t c = 0; c < v; c++) {
        size_t chunk = c * p + stage, first = stage_first_layer(L, v * p, chunk);
        plan->first[c] = plan->layer_count;
        plan->count[c] = stage_layer_count(L, v * p, chunk);
        if (plan->count[c] > plan->most_layers) plan->most_layers = plan->count[c];
        for (size_t i = 0; i < plan->count[c]; i++) plan->layers[plan->layer_count++] = first + i;
    }
}

// What the steps of a layer cost, by their FLOPs for each token: 24 C^2 for each product of the forward pass, the input
// half and the weight half; causal attention in forward, and 2.5 times that in the input half. Messages are free.
static inline PipelineCosts pipeline_layer_costs(size_t C, size_t T, size_t limit) {
    double matrices = 24.0 * (double)C, attention = 2.0 * (double)T;
    PipelineCosts costs = {{matrices + attention, matrices + 2.5 * attention, matrices}, 0.0, (int)limit};
    return costs;
}

// The lists of a text file, if they are for these sizes. Stage s is its line s + 1 that is not empty.
static inline bool pipeline_plan_read(PipelineLists *lists, const char *file, int p, int m, int v, Error *err) {
    if (!pipeline_text_read(file, lists, err)) return false;
    if (lists->p != p)
        return error_set(err, "%s has lines for %d stages, and this pipeline has %d: change it, or --pipeline", file,
                         lists->p, p);
    if (lists->m != m)
        return error_set(err,
                         "%s runs %d micro-batches, and here a step has %d: change it, or --global-batch or "
                         "--micro-batch",
                         file, lists->m, m);
    return lists->v == v ||
           error_set(err, "%s has %d chunks a stage, and --virtual is %d: change one", file, lists->v, v);
}

// Makes the lists of all p stages or reads them, has them proved and keeps that of `stage`, with its slots.
static inline bool pipeline_plan_steps(PipelinePlan *plan, Schedule schedule, const char *file, int p, int stage, int m,
                                       int v, const PipelineCosts *costs, Error *err) {
    PipelineLists lists;
    memset(&lists, 0, sizeof lists);
    Error why;
    bool ok = true;
    if (file) ok = pipeline_plan_read(&lists, file, p, m, v, err);
    else lists = pipeline_lists_make(schedule, p, m, v, costs);
    if (ok && !pipeline_lists_prove(&lists, PIPELINE_BUFFERS, &why))
        ok = error_set(err, "%s: %s", file ? file : pipeline_schedule_name(schedule), why.text);
    if (ok) {
        size_t count = plan->step_count = lists.counts[stage];
        PipelineRoute *routes = (PipelineRoute *)host_alloc(count, sizeof *routes);
        plan->steps = (PipelineStep *)host_alloc(count, sizeof *plan->steps);
        plan->slot = (size_t *)host_alloc(count, sizeof *plan->slot);
        memcpy(plan->steps, lists.steps[stage], count * sizeof *plan->steps);
        plan->split = pipeline_is_split(plan->steps, count);
        plan->slots = pipeline_routes(p, stage, m, v, plan->steps, count, routes);
        for (size_t i = 0; i < count; i++) plan->slot[i] = routes[i].slot;
        free(routes);
    }
    pipeline_lists_free(&lists);
    return ok;
}

// The plan of `stage` of p, for L layers in v chunks a stage and m micro-batches a training step. file: where the
// schedule is written down (NULL: `schedule` says which); costs: for zb-auto. False, with a sentence, when the schedule
// does not exist for these sizes or cannot be run.
static inline bool pipeline_plan(PipelinePlan *plan, Schedule schedule, const char *file, size_t L, size_t p,
                                 size_t stage, size_t m, size_t v, const PipelineCosts *costs, Error *err) {
    memset(plan, 0, sizeof *plan);
    if (m > INT_MAX) return error_set(err, "%zu micro-batches are too many: raise --micro-batch", m);
    if (!file && !pipeline_check(schedule, (int)p, (int)m, (int)v, err)) return false;
    pipeline_plan_layers(plan, L, p, stage, v);
    return pipeline_plan_steps(plan, schedule, file, (int)p, (int)stage, (int)m, (int)v, costs, err);
}

#endif
