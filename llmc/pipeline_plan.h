// pipeline_plan.h: what one pipeline stage is given before training starts: its layers, dealt to chunks, and its proved
// list of steps with the activation slot of each.
//
// defines: PipelinePlan, pipeline_layer_costs, pipeline_plan
#ifndef LLMC_PIPELINE_PLAN_H
#define LLMC_PIPELINE_PLAN_H

#include "llmc/grid.h"
#include "llmc/host/memory.h"
#include "llmc/pipeline_auto.h"
#include "llmc/pipeline_proof.h"

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

// Makes the lists of all p stages, has them proved and keeps that of `stage`, with its slots.
static inline bool pipeline_plan_steps(PipelinePlan *plan, Schedule schedule, int p, int stage, int m, int v,
                                       const PipelineCosts *costs, Error *err) {
    size_t longest = 3 * (size_t)m * v;
    PipelineStep *all = (PipelineStep *)host_alloc(p * longest, sizeof *all);
    PipelineStep **lists = (PipelineStep **)host_alloc(p, sizeof *lists);
    size_t *counts = (size_t *)host_alloc(p, sizeof *counts);
    PipelineRoute *routes = (PipelineRoute *)host_alloc(longest, sizeof *routes);
    plan->steps = (PipelineStep *)host_alloc(longest, sizeof *plan->steps);
    plan->slot = (size_t *)host_alloc(longest, sizeof *plan->slot);
    for (int s = 0; s < p; s++) {
        lists[s] = all + s * longest;
        if (schedule != SCHEDULE_ZB_AUTO) counts[s] = pipeline_schedule(schedule, p, s, m, v, lists[s]);
    }
    if (schedule == SCHEDULE_ZB_AUTO) pipeline_zb_auto(p, m, costs, lists, counts);
    bool ok = pipeline_prove(p, m, v, (const PipelineStep *const *)lists, counts, PIPELINE_BUFFERS, err);
    if (ok) {
        plan->step_count = counts[stage];
        plan->split = pipeline_is_split(lists[stage], counts[stage]);
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

// The plan of `stage` of p, for L layers in v chunks a stage and m micro-batches a training step; costs: for zb-auto.
// False, with a sentence, when the schedule does not exist for these sizes or cannot be run.
static inline bool pipeline_plan(PipelinePlan *plan, Schedule schedule, size_t L, size_t p, size_t stage, size_t m,
                                 size_t v, const PipelineCosts *costs, Error *err) {
    memset(plan, 0, sizeof *plan);
    if (m > INT_MAX) return error_set(err, "%zu micro-batches are too many: raise --micro-batch", m);
    if (!pipeline_check(schedule, (int)p, (int)m, (int)v, err)) return false;
    pipeline_plan_layers(plan, L, p, stage, v);
    return pipeline_plan_steps(plan, schedule, (int)p, (int)stage, (int)m, (int)v, costs, err);
}

#endif
