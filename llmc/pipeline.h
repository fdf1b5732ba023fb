// pipeline.h: pipeline schedules as lists of steps, and the rules by which a trainer executes any such list.
//
// defines: PipelineStep, Schedule, pipeline_gpipe, pipeline_1f1b, pipeline_interleaved, pipeline_zb_h1,
//          pipeline_schedule, pipeline_check, pipeline_bubble, pipeline_max_in_flight, PipelineRoute,
//          pipeline_routes, pipeline_link_ends
//
// p stages in a row, m micro-batches a training step, v model chunks a stage. The model is cut into p * v
// chunks; chunk c of stage s is global chunk c * p + s, so with v > 1 the model goes round the stages v
// times, and what follows the last stage is stage 0 again. A schedule says in which order ONE stage runs its
// forwards and backwards. It says nothing about messages: they follow from the list (pipeline_routes).
//
// Papers: GPipe (Huang et al. 2019), PipeDream-Flush's 1F1B and interleaved 1F1B as in PTD-P (Narayanan et
// al. 2021), section 2.2, figures 3 and 4; Zero Bubble Pipeline Parallelism (Qi et al. 2024).
//
// HOW A LIST IS EXECUTED, AND WHY IT CANNOT HANG
//
// A send completes only when its receive is posted, and the operations of one communicator pair up in order.
// Done naively (send, receive and compute on one stream), 1F1B hangs at once: stage 0 is in "send activations
// of micro-batch 1" while stage 1 is in "send gradients of micro-batch 0", and neither comes to its receive.
// So:
//
// 1. A link is one direction between two neighbours for one kind of message: activations s -> s+1 or
//    gradients s -> s-1 (modulo p; the wrap-around links exist only with v > 1). Each link has a two-rank
//    communicator of its own, and at each end a stream of its own. A stage has at most four link ends: it
//    receives and sends, activations and gradients. At p = 2 previous and next are one rank, but still four
//    different links.
// 2. A link end has PIPELINE_BUFFERS buffers; message number k of a link uses buffer k % PIPELINE_BUFFERS.
//    The k-th send meets the k-th receive, so the order in which one end computes them must be the order in
//    which the other end consumes them (pipeline_prove checks it; the schedules here have it).
// 3. The host walks the list and only enqueues; it waits for nothing. For a step that reads message k of one
//    link and makes message j of another:
//      receiving stream:  wait until the step that read message k - PIPELINE_BUFFERS is computed; ncclRecv
//      compute stream:    wait until message k has arrived, and message j - PIPELINE_BUFFERS is sent; compute
//      sending stream:    wait until computed; ncclSend
//    Nothing else is waited for. As the host is ahead, a receive is posted as soon as its buffer is free,
//    long before the step that needs it: transfers overlap compute without a line of code about prefetching.
//
// No stream ever chooses: each operation waits for a fixed set of others. Such a system (a marked graph) ends
// in the same state in whatever order and at whatever speed its operations run. Hence, if ONE order of
// running it comes to the end, EVERY order does; pipeline_prove looks for that one order, and
// dev/test/test_pipeline.c does so for p <= 16, m <= 64, v <= 8. Freeing a buffer earlier than at the end
// of its step only removes waiting. Tensor ranks change nothing: the t ranks of a stage run the same list, so
// step i of all of them counts as one operation. How many buffers? For the schedules here one at each end
// already cannot hang; two also lose no time against unlimited ones (tested with forward 1, backward 2 and a
// transfer of 0.25 or 1; zb-h1 and zb-auto with free transfers). For a list of your own, pipeline_prove says
// whether a number suffices; m * v does whenever the list can be run at all.
//
// Two rules for real GPUs, which llmc/trainer/connect.cuh keeps. NCCL connects a pair at its first message and keeps
// the host waiting meanwhile: each link carries one small message at start-up, in ascending link number on all ranks,
// so that no two hosts wait for each other. And a posted receive occupies some of the GPU until its message comes:
// links get few blocks (ncclConfig_t.maxCTAs). CUDA_DEVICE_MAX_CONNECTIONS stays above the number of streams, for
// where a waiting receive shares a hardware queue with compute it stops compute.
#ifndef LLMC_PIPELINE_H
#define LLMC_PIPELINE_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/host/error.h"
#include "llmc/host/memory.h"

#define PIPELINE_BUFFERS 2  // at each end of a link
#define PIPELINE_NONE (-1)  // no neighbour: the input is tokens, or the output is the loss or nothing

// Also the index of a stage's link ends: a forward receives and sends activations, a backward gradients. In a list
// that has weight steps a backward makes the gradient of its input only (B), for which the stage before waits; the
// weight step makes the gradients of the weights (W), for which nobody does (Qi et al. 2024). In other lists a
// backward does both.
typedef enum { STEP_FORWARD, STEP_BACKWARD, STEP_WEIGHT } StepKind;

typedef struct {
    StepKind kind;
    int micro, chunk;  // micro-batch in [0, m), local chunk in [0, v)
} PipelineStep;

typedef enum { SCHEDULE_GPIPE, SCHEDULE_1F1B, SCHEDULE_INTERLEAVED, SCHEDULE_ZB_H1, SCHEDULE_ZB_AUTO } Schedule;

enum { SCHEDULE_COUNT = SCHEDULE_ZB_AUTO + 1 };

static inline const char *pipeline_schedule_name(Schedule schedule) {
    static const char *const names[SCHEDULE_COUNT] = {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-auto"};
    return names[schedule];
}

// Appends a step; out may be NULL to count only.
static inline void pipeline_add(PipelineStep *out, size_t *n, StepKind kind, int micro, int chunk) {
    if (out) {
        out[*n].kind = kind;
        out[*n].micro = micro;
        out[*n].chunk = chunk;
    }
    (*n)++;
}

// GPipe (PTD-P figure 3): all forwards, then all backwards. Every stage keeps m micro-batches of activations.
// Backwards go 0, 1, 2, ... as in 1F1B, so that gradients are summed in one order and have the same bits.
static inline size_t pipeline_gpipe(int m, PipelineStep *out) {
    size_t n = 0;
    for (int i = 0; i < m; i++) pipeline_add(out, &n, STEP_FORWARD, i, 0);
    for (int i = 0; i < m; i++) pipeline_add(out, &n, STEP_BACKWARD, i, 0);
    return n;
}

// 1F1B (PTD-P figure 4, top): the same bubble, but stage s keeps at most p - s micro-batches. Just enough
// forwards to reach the last stage and come back, then forward and backward in turn, then what is left.
static inline size_t pipeline_1f1b(int p, int stage, int m, PipelineStep *out) {
    int warmup = p - stage - 1 < m ? p - stage - 1 : m;
    size_t n = 0;
    for (int i = 0; i < warmup; i++) pipeline_add(out, &n, STEP_FORWARD, i, 0);
    for (int i = 0; i < m - warmup; i++) {
        pipeline_add(out, &n, STEP_FORWARD, warmup + i, 0);
        pipeline_add(out, &n, STEP_BACKWARD, i, 0);
    }
    for (int i = m - warmup; i < m; i++) pipeline_add(out, &n, STEP_BACKWARD, i, 0);
    return n;
}

// Interleaved 1F1B (PTD-P figure 4, bottom): a bubble v times smaller for v times as many messages.
// Micro-batches go in groups of p: a group runs through chunk 0, then chunk 1, ..., because p steps later
// stage 0 has back what it sent round the ring; so p must divide m. Backwards go from the last chunk down.
static inline size_t pipeline_interleaved(int p, int stage, int m, int v, PipelineStep *out) {
    int total = m * v, group = p * v;
    int warmup = (p - stage - 1) * 2 + (v - 1) * p;
    if (warmup > total) warmup = total;
    size_t n = 0;
    for (int i = 0; i < total + warmup; i++) {
        int f = i, b = i - warmup;  // the f-th forward and the b-th backward, where they exist
        if (f < total) pipeline_add(out, &n, STEP_FORWARD, f / group * p + f % p, f % group / p);
        if (b >= 0) pipeline_add(out, &n, STEP_BACKWARD, b / group * p + b % p, v - 1 - b % group / p);
    }
    return n;
}

// ZB-H1 (Qi et al. 2024, section 2): 1F1B whose backwards are halved. A stage puts off its weight steps until `stage`
// of them wait, so that it is never idle for lack of gradients as long as there are some; those left over fill the
// end, where 1F1B idles. Every stage then holds at most p micro-batches, as stage 0 of 1F1B does, and the bubble
// shrinks from (p - 1)(F + B + W) to (p - 1)(F + B - W).
static inline size_t pipeline_zb_h1(int p, int stage, int m, PipelineStep *out) {
    int warmup = p - stage - 1 < m ? p - stage - 1 : m, weights = 0;
    size_t n = 0;
    for (int i = 0; i < warmup; i++) pipeline_add(out, &n, STEP_FORWARD, i, 0);
    for (int i = 0; i < m; i++) {
        if (warmup + i < m) pipeline_add(out, &n, STEP_FORWARD, warmup + i, 0);
        pipeline_add(out, &n, STEP_BACKWARD, i, 0);
        if (i + 1 - weights > stage) pipeline_add(out, &n, STEP_WEIGHT, weights++, 0);
    }
    while (weights < m) pipeline_add(out, &n, STEP_WEIGHT, weights++, 0);
    return n;
}

// True if the list has weight steps.
static inline bool pipeline_is_split(const PipelineStep *steps, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (steps[i].kind == STEP_WEIGHT) return true;
    }
    return false;
}

// The list of one stage: writes out[3 * m * v] (NULL: nothing) and returns its length. Arguments as pipeline_check
// accepts; zb-auto, which makes the lists of all stages at once, is in llmc/pipeline_auto.h.
static inline size_t pipeline_schedule(Schedule schedule, int p, int stage, int m, int v, PipelineStep *out) {
    if (schedule == SCHEDULE_GPIPE) return pipeline_gpipe(m, out);
    if (schedule == SCHEDULE_1F1B) return pipeline_1f1b(p, stage, m, out);
    if (schedule == SCHEDULE_ZB_H1) return pipeline_zb_h1(p, stage, m, out);
    return pipeline_interleaved(p, stage, m, v, out);
}

// False, with a sentence that says what to change, when the schedule does not exist for these sizes.
static inline bool pipeline_check(Schedule schedule, int p, int m, int v, Error *err) {
    if (p < 1 || m < 1 || v < 1)
        return error_set(err, "a pipeline has at least 1 stage, 1 micro-batch and 1 chunk, not %d, %d, %d", p,
                         m, v);
    if ((long long)m * v > INT_MAX / 8 || (long long)m * v * p > INT_MAX / 8)
        return error_set(err, "%d stages, %d micro-batches and %d chunks are too many", p, m, v);
    if (schedule >= SCHEDULE_ZB_H1 && p == 1)
        return error_set(err, "--schedule %s needs 2 or more stages: use --pipeline 2, or --schedule 1f1b",
                         pipeline_schedule_name(schedule));
    if (schedule != SCHEDULE_INTERLEAVED && v > 1)
        return error_set(err, "%d chunks a stage need --schedule interleaved: use it, or --virtual 1", v);
    if (schedule == SCHEDULE_INTERLEAVED && v == 1)
        return error_set(
            err,
            "--schedule interleaved needs 2 or more chunks a stage: use --virtual 2, or --schedule 1f1b");
    if (schedule == SCHEDULE_INTERLEAVED && p == 1)
        return error_set(
            err, "--schedule interleaved needs 2 or more stages: use --pipeline 2, or --schedule 1f1b");
    if (schedule == SCHEDULE_INTERLEAVED && m % p != 0)
        return error_set(err,
                         "--schedule interleaved needs a multiple of %d (stages) micro-batches, not %d: "
                         "change --global-batch or --micro-batch, or use --schedule 1f1b",
                         p, m);
    return true;
}

// Idle over ideal time when all chunks cost the same and messages nothing: (p-1)/m, interleaved (p-1)/(v m).
static inline double pipeline_bubble(int p, int m, int v) { return (double)(p - 1) / ((double)v * m); }

// The step after which the activations of a micro-batch and chunk are no longer needed.
static inline StepKind pipeline_last_use(const PipelineStep *steps, size_t count) {
    return pipeline_is_split(steps, count) ? STEP_WEIGHT : STEP_BACKWARD;
}

// Most (micro-batch, chunk) pairs of which a stage holds activations at one time.
static inline size_t pipeline_max_in_flight(const PipelineStep *steps, size_t count) {
    size_t now = 0, most = 0;
    StepKind last_use = pipeline_last_use(steps, count);
    for (size_t i = 0; i < count; i++) {
        now = now + (steps[i].kind == STEP_FORWARD) - (steps[i].kind == last_use);
        if (now > most) most = now;
    }
    return most;
}

// Links are numbered 0 .. 2p-1: link s carries stage s's activations to s + 1, link p + s its gradients to s
// - 1 (modulo p). Those that only a ring needs (from p - 1 to 0, and back) are used when v > 1.
static inline int pipeline_link_count(int p) { return 2 * p; }

static inline bool pipeline_link_ends(int p, int v, int link, int *from, int *to) {
    *from = link % p;
    *to = link < p ? (*from + 1) % p : (*from + p - 1) % p;
    bool wraps = link < p ? *from == p - 1 : *from == 0;
    return p > 1 && (v > 1 || !wraps);
}

// What a stage needs to know to execute a step.
typedef struct {
    int from, to;          // stages that send the input and get the output; PIPELINE_NONE at the model's ends
    size_t receive, send;  // numbers of these messages on their links; 0 where there is none
    size_t slot;           // where the activations of this micro-batch and chunk stay until their last use
} PipelineRoute;

// Fills from and to. Forwards go up the global chunks, backwards down; the loss sits at the top. Weight steps stay.
static inline void pipeline_neighbours(int p, int stage, int v, PipelineStep step, PipelineRoute *route) {
    bool first = stage == 0 && step.chunk == 0, last = stage == p - 1 && step.chunk == v - 1;
    int previous = first ? PIPELINE_NONE : stage > 0 ? stage - 1 : p - 1;
    int next = last ? PIPELINE_NONE : stage < p - 1 ? stage + 1 : 0;
    route->from = step.kind == STEP_WEIGHT ? PIPELINE_NONE : step.kind == STEP_FORWARD ? previous : next;
    route->to = step.kind == STEP_WEIGHT ? PIPELINE_NONE : step.kind == STEP_FORWARD ? next : previous;
}

// Fills routes[count] for a stage's list, which must be one that pipeline_prove accepts, and returns the
// number of activation slots in use (pipeline_max_in_flight). In 1F1B, slot = micro-batch % (p - stage).
static inline size_t pipeline_routes(int p, int stage, int m, int v, const PipelineStep *steps, size_t count,
                                     PipelineRoute *routes) {
    size_t slots = pipeline_max_in_flight(steps, count), received[2] = {0, 0}, sent[2] = {0, 0};
    size_t *slot_of = (size_t *)host_alloc((size_t)m * v, sizeof *slot_of);
    size_t *unused = (size_t *)host_alloc(slots, sizeof *unused);
    for (size_t i = 0; i < slots; i++) unused[i] = slots - 1 - i;  // a stack whose top is slot 0
    size_t top = slots;
    StepKind last_use = pipeline_last_use(steps, count);
    for (size_t i = 0; i < count; i++) {
        PipelineStep step = steps[i];
        PipelineRoute *route = &routes[i];
        size_t *slot = &slot_of[(size_t)step.micro * v + step.chunk];
        pipeline_neighbours(p, stage, v, step, route);
        route->receive = route->from == PIPELINE_NONE ? 0 : received[step.kind]++;
        route->send = route->to == PIPELINE_NONE ? 0 : sent[step.kind]++;
        if (step.kind == STEP_FORWARD) *slot = unused[--top];
        route->slot = *slot;
        if (step.kind == last_use) unused[top++] = *slot;
    }
    free(slot_of);
    free(unused);
    return slots;
}

#endif
