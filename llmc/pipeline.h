// pipeline.h: pipeline schedules as lists of steps, and the rules by which a trainer
// executes any such list.
//
// defines: PIPELINE_BUFFERS, PipelineStep, pipeline_schedule_name, pipeline_steps,
//          pipeline_warmup, pipeline_bubble, PipelineLists, pipeline_make,
//          pipeline_link_count, pipeline_link_ends, pipeline_neighbours, PipelinePlan,
//          stage_layer_count, chunk_layers, pipeline_slots, pipeline_plan
//
// There are p stages in a row, m micro-batches a training step, and v model chunks a stage.
// The model is cut into p * v chunks; chunk c of stage s is global chunk c * p + s. With v
// > 1 the model goes round the stages v times, so stage 0 follows the last stage. A
// schedule gives the order in which ONE stage runs its forwards and backwards. Messages
// follow from it.
//
// Papers: GPipe (Huang et al. 2019); PipeDream-Flush's 1F1B and interleaved 1F1B as in
// PTD-P (Narayanan et al. 2021), section 2.2, figures 3 and 4.
//
// HOW A LIST IS EXECUTED, AND WHY IT CANNOT HANG
//
// A send completes only when its receive is posted, and the operations of one communicator
// pair up in order. With send, receive and compute on one stream, 1F1B hangs at once. Stage
// 0 sends the activations of micro-batch 1 while stage 1 sends the gradients of micro-batch
// 0, and neither comes to its receive. So:
//
// 1. A link carries one kind of message in one direction between two neighbours:
//    activations s -> s+1 or gradients s -> s-1. With v > 1 the last stage and the first
//    are neighbours, too: s counts modulo p. Each link has its own two-rank communicator
//    and, at each end, its own stream. A stage has at most four link ends. At p = 2
//    previous and next are one rank, but still four links.
// 2. A link end has PIPELINE_BUFFERS buffers; message k of a link uses buffer k %
//    PIPELINE_BUFFERS. Send k meets receive k, so both ends must use messages in one order
//    (pipeline_prove checks it).
// 3. The host walks the list and only enqueues. For a step that reads message k of one link
//    and makes message j of another it enqueues three things.
//      Receiving stream:  wait until the reader of message k - PIPELINE_BUFFERS has copied
//                         it; ncclRecv.
//      Compute stream:    wait until message k has arrived, and message j -
//                         PIPELINE_BUFFERS is sent; compute.
//      Sending stream:    wait until computed; ncclSend.
//    The host runs ahead of the GPU, so a receive is posted as soon as its buffer is free:
//    transfers overlap compute.
//
// No stream ever chooses: each operation waits for a fixed set of others. Such a system (a
// marked graph) reaches the same end in any order and at any speed. Hence, if ONE order
// comes to the end, EVERY order does. The function pipeline_walk in pipeline_lists.h finds
// that order; dev/test/test_pipeline.c proves it for p <= 16, m <= 64, v <= 8. The walk
// frees a buffer at the end of its step; to free it earlier only removes waiting. Tensor
// ranks of a stage run one list, so step i of all of them is one operation. With one buffer
// at each end the schedules here cannot hang; two lose no time against unlimited ones. A
// list of your own runs with m * v buffers, if it can run at all.
//
// The rules for links on real GPUs are in llmc/trainer/ranks.cuh.
#ifndef LLMC_PIPELINE_H
#define LLMC_PIPELINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/grid.h"
#include "llmc/host/choices.h"
#include "llmc/host/memory.h"

#define PIPELINE_BUFFERS 2  // at each end of a link
#define PIPELINE_NONE \
    (-1)  // no neighbour: the input is tokens, or the output is the loss or nothing

// Also the index of a stage's link ends: a forward receives and sends activations, a
// backward gradients. With a split backward (zero_bubble.h) a backward makes only the
// gradient of its input, and a weight step the weights' gradients.
typedef enum { STEP_FORWARD, STEP_BACKWARD, STEP_WEIGHT } StepKind;

typedef struct {
    StepKind kind;
    int micro, chunk;  // micro-batch in [0, m), local chunk in [0, v)
} PipelineStep;

enum { SCHEDULE_COUNT = SCHEDULE_DUALPIPE_V + 1 };

static inline const char *pipeline_schedule_name(Schedule schedule) {
    static const char *const names[SCHEDULE_COUNT] = {"gpipe",   "1f1b",   "interleaved",
                                                      "zb-h1",   "zb-auto", "zb-v",
                                                      "v-half", "dualpipe-v"};
    return names[schedule];
}

// ---- schedules -------------------------------------------------------------------------

static inline void pipeline_add(PipelineStep *out, size_t *n, StepKind kind, int micro,
                                int chunk) {
    out[*n].kind = kind;
    out[*n].micro = micro;
    out[(*n)++].chunk = chunk;
}

// Writes a stage's list and returns its length, 2 m v: `warmup` forwards, then forward and
// backward in turn, then the remaining backwards. The schedules here differ in nothing
// else. With v chunks, micro-batches go in groups of p. A group runs through chunk 0, then
// chunk 1, and so on. p steps later stage 0 gets its own output back, from the last stage.
// So p must divide m. Backwards go from the last chunk down. The backwards of a chunk go
// 0, 1, 2, ... in all schedules, so that gradients are summed in one order and have the
// same bits.
//
// An example: stage 0 with p = 2, v = 2, m = 4. A group is 4 steps long and the warm-up 4
// forwards. F3.1 is the forward of micro-batch 3 in chunk 1.
//
//     i            0     1     2     3     4     5     6     7     8     9     10    11
//     f            0     1     2     3     4     5     6     7
//     forward      F0.0  F1.0  F0.1  F1.1  F2.0  F3.0  F2.1  F3.1
//     b                                    0     1     2     3     4     5     6     7
//     backward                             B0.1  B1.1  B0.0  B1.0  B2.1  B3.1  B2.0  B3.0
//
//     f = 6: its group is 6 / 4 = 1, which begins with micro-batch 2. Its place there is
//     6 % 2 = 0, so it is micro-batch 2. It is 6 % 4 = 2 steps into the group, and
//     2 / 2 = 1: chunk 1.
static inline size_t pipeline_steps(int p, int m, int v, int warmup, PipelineStep *out) {
    int total = m * v, group = p * v;
    if (warmup > total) warmup = total;
    size_t n = 0;
    for (int i = 0; i < total + warmup; i++) {
        int f = i, b = i - warmup;  // the f-th forward and the b-th backward, if they exist
        if (f < total)
            pipeline_add(out, &n, STEP_FORWARD, f / group * p + f % p, f % group / p);
        if (b >= 0)
            pipeline_add(out, &n, STEP_BACKWARD, b / group * p + b % p,
                         v - 1 - b % group / p);
    }
    return n;
}

// Returns how many forwards a stage runs ahead.
//   GPipe (PTD-P figure 3): all. Every stage keeps m micro-batches of activations.
//   1F1B (figure 4, top): just enough for the first gradient to come back. The same bubble,
//   but stage s keeps at most p - s micro-batches.
//   Interleaved 1F1B (figure 4, bottom): through all chunks. A bubble v times smaller for
//   (p v - 1) / (p - 1) times as many messages.
static inline int pipeline_warmup(Schedule schedule, int p, int stage, int m, int v) {
    if (schedule == SCHEDULE_GPIPE) return m;
    if (schedule == SCHEDULE_1F1B) return p - stage - 1;
    return (p - stage - 1) * 2 + (v - 1) * p;
}

// Returns the bubble, idle time over work of a stage, if all chunks cost the same and
// messages nothing: (p-1)/m, interleaved (p-1)/(v m).
static inline double pipeline_bubble(int p, int m, int v) {
    return (double)(p - 1) / ((double)v * m);
}

// Returns the kind of step after which the activations of a micro-batch and chunk are no
// longer needed.
static inline StepKind pipeline_last_use(const PipelineStep *steps, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (steps[i].kind == STEP_WEIGHT) return STEP_WEIGHT;
    }
    return STEP_BACKWARD;
}

// ---- the lists of all stages -----------------------------------------------------------

typedef struct {
    int p, m, v;           // stages, micro-batches of a training step, chunks of a stage
    PipelineStep **steps;  // [p] lists
    size_t *counts;        // [p] their lengths
    bool folded;           // a V: the second half of the chunks comes down again (v == 2)
} PipelineLists;

// Returns empty lists with room for 3 steps of every micro-batch and chunk. Release with
// pipeline_lists_free.
static inline PipelineLists pipeline_empty(int p, int m, int v) {
    PipelineLists l = {p, m, v, NULL, NULL, false};
    l.steps = (PipelineStep **)host_alloc(p, sizeof *l.steps);
    l.counts = (size_t *)host_alloc(p, sizeof *l.counts);
    for (int s = 0; s < p; s++)
        l.steps[s] = (PipelineStep *)host_alloc(3 * (size_t)m * v, sizeof **l.steps);
    return l;
}

static inline void pipeline_lists_free(PipelineLists *l) {
    for (int s = 0; s < l->p; s++) free(l->steps[s]);
    free(l->steps);
    free(l->counts);
    memset(l, 0, sizeof *l);
}

// Makes the lists of gpipe, 1f1b or interleaved for sizes that pipeline_check accepts.
static inline PipelineLists pipeline_make(Schedule schedule, int p, int m, int v) {
    PipelineLists l = pipeline_empty(p, m, v);
    for (int s = 0; s < p; s++)
        l.counts[s] =
            pipeline_steps(p, m, v, pipeline_warmup(schedule, p, s, m, v), l.steps[s]);
    return l;
}

// ---- links -----------------------------------------------------------------------------

// Links are numbered 0 .. 2p-1: link s carries stage s's activations to s + 1, link p + s
// its gradients to s - 1 (modulo p). The wrap-around links (p - 1 to 0, and back) are used
// when v > 1.
static inline int pipeline_link_count(int p) {
    return 2 * p;
}

static inline bool pipeline_link_ends(int p, int v, int link, int *from, int *to) {
    *from = link % p;
    *to = link < p ? (*from + 1) % p : (*from + p - 1) % p;
    bool wraps = link < p ? *from == p - 1 : *from == 0;
    return p > 1 && (v > 1 || !wraps);
}

// Returns the global chunk that is chunk `chunk` of a stage.
static inline int pipeline_chunk(const PipelineLists *l, int stage, int chunk) {
    return l->folded && chunk == 1 ? 2 * l->p - 1 - stage : chunk * l->p + stage;
}

// Returns the stage of a global chunk.
static inline size_t chunk_stage(size_t p, bool folded, size_t chunk) {
    return folded && chunk >= p ? 2 * p - 1 - chunk : chunk % p;
}

// Returns the stage with which a step exchanges the message to or from a global chunk.
// Beyond the model's ends it is PIPELINE_NONE, and at a V's turn: both chunks are on one
// stage.
static inline int pipeline_peer(const PipelineLists *l, int stage, int chunk) {
    if (chunk < 0 || chunk == l->p * l->v) return PIPELINE_NONE;
    int peer = l->folded && chunk >= l->p ? 2 * l->p - 1 - chunk : chunk % l->p;
    return l->folded && peer == stage ? PIPELINE_NONE : peer;
}

// Sets the stages that send a step's input and get its output, or PIPELINE_NONE. Forwards
// go up the global chunks, backwards down; a weight step has no message.
static inline void pipeline_neighbours(const PipelineLists *l, int stage, PipelineStep step,
                                       int *from, int *to) {
    int chunk = pipeline_chunk(l, stage, step.chunk);
    int up = step.kind == STEP_FORWARD ? 1 : -1;
    *from = *to = PIPELINE_NONE;
    if (step.kind == STEP_WEIGHT) return;
    *from = pipeline_peer(l, stage, chunk - up);
    *to = pipeline_peer(l, stage, chunk + up);
}

// ---- a stage's plan --------------------------------------------------------------------

// The plan of one stage: its layers, dealt to chunks, and its list of steps with their
// activation slots.
typedef struct {
    size_t chunks;          // v
    size_t *first, *count;  // [chunks] the layers of a chunk, in the numbering of this
                            // stage's parameter table
    // [step_count] slot of the activations of the step's micro-batch and chunk.
    size_t most_layers;     // the largest count
    size_t layer_count;     // of all chunks together
    size_t *layers;         // [layer_count] their numbers in the whole model
    PipelineStep *steps;    // [step_count] this stage's part of a training step
    size_t *slot;
    size_t step_count, slots;
} PipelinePlan;

// Deals L layers to chunks. The first L % chunks of them have one layer more.
static inline size_t stage_layer_count(size_t L, size_t chunks, size_t chunk) {
    return L / chunks + (chunk < L % chunks ? 1 : 0);
}

// Returns the layers of a chunk. Chunk c * p + s of the p * v is chunk c of stage s. Layers
// follow each other through the chunks. With a list a stage's layers are dealt to its
// chunks, without one (NULL) all layers to all chunks.
static inline size_t chunk_layers(size_t L, const char *list, size_t p, size_t v,
                                  size_t chunk) {
    return list ? stage_layer_count(stage_listed(list, chunk % p), v, chunk / p)
                : stage_layer_count(L, p * v, chunk);
}

// Deals L layers to the p * v chunks as chunk_layers does, and gives `stage` its own. In a
// V the chunks have the same lengths, but follow each other in another order.
static inline void pipeline_plan_layers(PipelinePlan *plan, size_t L, const char *list,
                                        size_t p, size_t stage, size_t v, bool folded) {
    plan->chunks = v;
    plan->first = (size_t *)host_alloc(v, sizeof(size_t));
    plan->count = (size_t *)host_alloc(v, sizeof(size_t));
    plan->layers = (size_t *)host_alloc(L, sizeof(size_t));
    for (size_t chunk = 0, first = 0, n; chunk < p * v; chunk++, first += n) {
        size_t its_stage = chunk_stage(p, folded, chunk);
        n = chunk_layers(L, list, p, v, chunk / p * p + its_stage);
        if (its_stage != stage) continue;
        plan->first[chunk / p] = plan->layer_count;
        plan->count[chunk / p] = n;
        if (n > plan->most_layers) plan->most_layers = n;
        for (size_t i = 0; i < n; i++) plan->layers[plan->layer_count++] = first + i;
    }
}

// Gives each step of a proved list its slot, into slot [counts[stage]] unless that is NULL.
// The activations of the step's micro-batch and chunk stay there until their last use. A
// forward takes the slot that was freed last. Returns the number of slots, which is the
// largest number of pairs of micro-batch and chunk in flight. In 1F1B, slot = micro-batch %
// (p - stage).
static inline size_t pipeline_slots(const PipelineLists *l, int stage, size_t *slot) {
    const PipelineStep *steps = l->steps[stage];
    size_t count = l->counts[stage], slots = 0, top = 0, pairs = (size_t)l->m * l->v;
    StepKind last_use = pipeline_last_use(steps, count);
    size_t *slot_of = (size_t *)host_alloc(2 * pairs, sizeof *slot_of);
    size_t *unused = slot_of + pairs;  // a stack
    for (size_t i = 0; i < count; i++) {
        size_t *mine = &slot_of[(size_t)steps[i].micro * l->v + steps[i].chunk];
        if (steps[i].kind == STEP_FORWARD) *mine = top > 0 ? unused[--top] : slots++;
        if (slot) slot[i] = *mine;
        if (steps[i].kind == last_use) unused[top++] = *mine;
    }
    free(slot_of);
    return slots;
}

// Returns the plan of `stage` for L layers and proved lists, which it releases. stages:
// --layers-per-stage, or NULL.
static inline PipelinePlan pipeline_plan(PipelineLists *l, size_t L, const char *stages,
                                         size_t stage) {
    PipelinePlan plan;
    memset(&plan, 0, sizeof plan);
    pipeline_plan_layers(&plan, L, stages, (size_t)l->p, stage, (size_t)l->v, l->folded);
    size_t count = plan.step_count = l->counts[stage];
    plan.steps = (PipelineStep *)host_alloc(count, sizeof *plan.steps);
    plan.slot = (size_t *)host_alloc(count, sizeof *plan.slot);
    memcpy(plan.steps, l->steps[stage], count * sizeof *plan.steps);
    plan.slots = pipeline_slots(l, (int)stage, plan.slot);
    pipeline_lists_free(l);
    return plan;
}

#endif
