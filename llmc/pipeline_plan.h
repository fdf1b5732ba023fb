// pipeline_plan.h: what one pipeline stage is given before training starts: its layers, dealt to chunks, and its proved
// list of steps with the activation slot of each.
//
// defines: PipelinePlan, pipeline_plan
#ifndef LLMC_PIPELINE_PLAN_H
#define LLMC_PIPELINE_PLAN_H

#include "llmc/grid.h"
#include "llmc/host/memory.h"
#include "llmc/pipeline.h"

typedef struct {
    size_t chunks;         // v
    size_t *first, *count; // [chunks] the layers of a chunk, in the numbering of this stage's parameter table
    size_t most_layers;    // the largest count
    size_t layer_count;    // of all chunks together
    size_t *layers;        // [layer_count] their numbers in the whole model
    PipelineStep *steps;   // [step_count] this stage's part of a training step
    size_t *slot;          // [step_count] where the activations of the step's micro-batch and chunk stay
    size_t step_count, slots;
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

// Makes the lists of all p stages, has them proved and keeps that of `stage`, with its slots.
static inline bool pipeline_plan_steps(PipelinePlan *plan, Schedule schedule, int p, int stage, int m, int v,
                                       Error *err) {
    size_t longest = 2 * (size_t)m * v;
    PipelineStep *all = (PipelineStep *)host_alloc(p * longest, sizeof *all);
    const PipelineStep **lists = (const PipelineStep **)host_alloc(p, sizeof *lists);
    size_t *counts = (size_t *)host_alloc(p, sizeof *counts);
    PipelineRoute *routes = (PipelineRoute *)host_alloc(longest, sizeof *routes);
    plan->steps = (PipelineStep *)host_alloc(longest, sizeof *plan->steps);
    plan->slot = (size_t *)host_alloc(longest, sizeof *plan->slot);
    for (int s = 0; s < p; s++) {
        lists[s] = all + s * longest;
        counts[s] = pipeline_schedule(schedule, p, s, m, v, all + s * longest);
    }
    bool ok = pipeline_prove(p, m, v, lists, counts, PIPELINE_BUFFERS, err);
    if (ok) {
        plan->step_count = counts[stage];
        memcpy(plan->steps, lists[stage], counts[stage] * sizeof *plan->steps);
        plan->slots = pipeline_routes(p, stage, m, v, plan->steps, plan->step_count, routes);
        for (size_t i = 0; i < plan->step_count; i++) plan->slot[i] = routes[i].slot;
    }
    free(all);
    free(lists);
    free(counts);
    free(routes);
    return ok;
}

// The plan of `stage` of p, for L layers in v chunks a stage and m micro-batches a training step. False, with a
// sentence, when the schedule does not exist for these sizes or cannot be run.
static inline bool pipeline_plan(PipelinePlan *plan, Schedule schedule, size_t L, size_t p, size_t stage, size_t m,
                                 size_t v, Error *err) {
    memset(plan, 0, sizeof *plan);
    if (m > INT_MAX) return error_set(err, "%zu micro-batches are too many: raise --micro-batch", m);
    if (!pipeline_check(schedule, (int)p, (int)m, (int)v, err)) return false;
    pipeline_plan_layers(plan, L, p, stage, v);
    return pipeline_plan_steps(plan, schedule, (int)p, (int)stage, (int)m, (int)v, err);
}

#endif
