// step.h: the time of one training step of a layout on a described cluster: a light simulation. Each stage walks the
// list that llmc/pipeline.h gives it, each step of it lasts what llmc/sim/layer.h says, messages take their time, and
// at the end gradients are summed and weights updated. All tensor and data ranks of a stage do the same at one time.
//
// defines: Run, StepParts, StepTime, step_check, step_simulate
#ifndef DEV_SCALE_STEP_H
#define DEV_SCALE_STEP_H

#include "llmc/grid.h"
#include "llmc/pipeline.h"
#include "llmc/sim/layer.h"

typedef struct {
    size_t ranks, layers, C, NH, T, vocabulary;  // vocabulary is padded
    size_t global_batch, micro_batch, t, p, d, v;
    Recompute recompute;
    bool sequence_parallel, scatter_gather;
    bool short_ends;  // the embedding and the head each count as a layer when layers are dealt to stages
} Run;

typedef enum { PART_GEMM, PART_ATTENTION, PART_MEMORY, PART_TENSOR, PART_PIPELINE, PART_DATA, PART_OPTIMIZER, PART_HOST,
               PART_IDLE, PART_COUNT } StepPart;

static inline const char *step_part_name(StepPart part) {
    static const char *const names[] = {"GEMM", "attention", "memory", "tensor", "pipeline",
                                        "data", "optimizer", "host",   "idle"};
    return names[part];
}

typedef struct {
    double seconds;
    size_t slowest;             // stage that computes most
    double parts[PART_COUNT];   // of that stage; they sum to seconds
} StepTime;

// What a stage's step of a chunk costs: [forward or backward][first micro-batch or later].
typedef struct {
    double seconds[2][2], groups[2][2][GROUP_COUNT];
} ChunkCost;

static inline bool step_check(const Run *r, Error *err) {
    size_t units = r->layers + (r->short_ends ? 2 : 0);
    if (r->t * r->p * r->d != r->ranks) return error_set(err, "t * p * d is not the number of ranks");
    if (r->NH % r->t || r->C % r->NH || r->vocabulary % r->t) return error_set(err, "t does not divide the model");
    if (r->global_batch % (r->micro_batch * r->d)) return error_set(err, "the batch does not divide");
    if (units % (r->p * r->v)) return error_set(err, "the layers do not divide into %zu chunks", r->p * r->v);
    size_t m = r->global_batch / (r->micro_batch * r->d);
    return pipeline_check(r->v > 1 ? SCHEDULE_INTERLEAVED : SCHEDULE_1F1B, (int)r->p, (int)m, (int)r->v, err);
}

static inline size_t step_chunk_layers(const Run *r, size_t chunk) {
    size_t chunks = r->p * r->v, units = r->layers + (r->short_ends ? 2 : 0);
    size_t ends = r->short_ends ? (chunk == 0) + (chunk == chunks - 1) : 0;
    return units / chunks - ends;
}

static inline ChunkCost step_chunk_cost(const Cluster *c, const Run *r, size_t chunk) {
    ChunkCost cost;
    memset(&cost, 0, sizeof cost);
    LayerShape s = {r->micro_batch, r->T, r->C, r->NH, r->t, r->vocabulary, r->sequence_parallel, false, r->recompute,
                    COST_BF16, placement_stride(c, 0, 1, r->t, r->ranks)};
    double layers = (double)step_chunk_layers(r, chunk);
    for (int backward = 0; backward < 2; backward++)
        for (int later = 0; later < 2; later++) {
            OpList o;
            double *groups = cost.groups[backward][later], layer[GROUP_COUNT] = {0};
            s.add = later;
            layer_operations(&o, c, &s, backward);
            double sum = layers * ops_seconds(&o, layer);
            for (int g = 0; g < GROUP_COUNT; g++) groups[g] = layers * layer[g];
            if (chunk == 0) {
                embedding_operations(&o, c, &s, backward);
                sum += ops_seconds(&o, groups);
            }
            if (chunk == r->p * r->v - 1) {
                head_operations(&o, c, &s, backward);
                sum += ops_seconds(&o, groups);
            }
            cost.seconds[backward][later] = sum;
        }
    return cost;
}

// Parameters that a rank of the stage holds: matrices and vectors of its layers, the embeddings at both ends.
static inline double step_parameters(const Run *r, size_t stage) {
    double C = (double)r->C, t = (double)r->t, sum = 0;
    for (size_t chunk = 0; chunk < r->v; chunk++)
        sum += (double)step_chunk_layers(r, chunk * r->p + stage) * (12 * C * C / t + 7 * C / t + 6 * C);
    if (stage == 0) sum += (double)r->T * C;
    if (stage == 0 || stage == r->p - 1) sum += (double)r->vocabulary * C / t;
    return sum;
}

typedef struct {
    const Cluster *c;
    const Run *r;
    size_t m;
    PipelineStep *lists;       // [p][2 m v]
    double *arrival;           // [2][p v][m] when the input of a chunk is at its stage; < 0: not yet
    double *free_at;           // [p] when the stage's compute stream is free
    double (*parts)[PART_COUNT];  // [p]
    ChunkCost *costs;          // [p v]
    double *send;              // [p] s of a message between stage s and s + 1, modulo p
    double gather;             // s of the all-gather that ends scatter/gather
} StepMachine;

static inline double *step_arrival(StepMachine *x, StepKind kind, size_t chunk, size_t micro) {
    return &x->arrival[((size_t)kind * x->r->p * x->r->v + chunk) * x->m + micro];
}

// Runs the next step of a stage if its input has arrived.
static inline bool step_run(StepMachine *x, size_t stage, PipelineStep step) {
    const Run *r = x->r;
    size_t chunks = r->p * r->v, chunk = (size_t)step.chunk * r->p + stage, micro = (size_t)step.micro;
    bool forward = step.kind == STEP_FORWARD, first = forward ? chunk == 0 : chunk == chunks - 1;
    bool last = forward ? chunk == chunks - 1 : chunk == 0, overlap = x->c->pipeline_overlap;
    double arrived = *step_arrival(x, step.kind, chunk, micro), now = x->free_at[stage], *parts = x->parts[stage];
    if (!first && arrived < 0) return false;
    if (!first && arrived > now) now = arrived;
    double receive = first ? 0 : x->gather, host = first ? 0 : x->c->host_transfer;
    const ChunkCost *cost = &x->costs[chunk];
    now += receive + host + cost->seconds[step.kind][micro > 0];
    parts[PART_PIPELINE] += receive;
    parts[PART_HOST] += host;
    for (int g = 0; g < GROUP_COUNT; g++) parts[g] += cost->groups[step.kind][micro > 0][g];
    x->free_at[stage] = now;
    if (last) return true;
    double send = x->send[forward ? stage : (stage + r->p - 1) % r->p];
    if (!overlap) {
        x->free_at[stage] += send;
        parts[PART_PIPELINE] += send;
    }
    *step_arrival(x, step.kind, forward ? chunk + 1 : chunk - 1, micro) = now + send;
    return true;
}

static inline void step_walk(StepMachine *x) {
    size_t p = x->r->p, length = 2 * x->m * x->r->v;
    size_t *next = (size_t *)host_alloc(p, sizeof *next);
    for (bool moved = true; moved;) {
        moved = false;
        for (size_t s = 0; s < p; s++)
            while (next[s] < length && step_run(x, s, x->lists[s * length + next[s]])) {
                next[s]++;
                moved = true;
            }
    }
    free(next);
}

// Sums over data ranks, over the two uses of the embedding, and the update. All stages wait for the gradient norm.
static inline double step_end(StepMachine *x) {
    const Cluster *c = x->c;
    const Run *r = x->r;
    size_t shards = r->t * r->d;
    double end = 0, update = 0, tied = 0;
    Placement data = placement_stride(c, 0, r->t, r->d, r->ranks);
    for (size_t s = 0; s < r->p; s++) {
        double parameters = step_parameters(r, s);
        double sum = cost_collective(c, COLLECTIVE_ALL_REDUCE, c->gradient_bytes * parameters, data);
        double hidden = c->data_overlap ? fmin(sum, x->costs[s].seconds[1][x->m > 1]) : 0;
        double slow = hidden * (1 - 1 / c->overlap_slowdown);
        x->parts[s][PART_DATA] += sum - hidden + slow;
        x->free_at[s] += sum - hidden + slow;
        end = fmax(end, x->free_at[s]);
        update = fmax(update, cost_memory(c, MEMORY_OPTIMIZER, c->optimizer_bytes * parameters));
    }
    if (r->p > 1) {
        Placement ends = placement_stride(c, 0, shards * (r->p - 1), 2, r->ranks);
        tied = cost_collective(c, COLLECTIVE_ALL_REDUCE,
                               c->gradient_bytes * (double)(r->vocabulary * r->C) / (double)r->t, ends);
        double both = fmax(x->free_at[0], x->free_at[r->p - 1]) + tied;
        x->parts[0][PART_DATA] += tied;
        x->parts[r->p - 1][PART_DATA] += tied;
        end = fmax(end, both);
    }
    for (size_t s = 0; s < r->p; s++) {
        x->parts[s][PART_OPTIMIZER] += update;
        x->parts[s][PART_HOST] += c->host_step;
    }
    return end + update + c->host_step;
}

// The step's time, or an error where the layout is none.
static inline bool step_simulate(const Cluster *c, const Run *r, StepTime *out, Error *err) {
    if (!step_check(r, err)) return false;
    size_t chunks = r->p * r->v, m = r->global_batch / (r->micro_batch * r->d), length = 2 * m * r->v;
    StepMachine x = {c, r, m, NULL, NULL, NULL, NULL, NULL, NULL, 0};
    x.lists = (PipelineStep *)host_alloc(r->p * length, sizeof *x.lists);
    x.arrival = (double *)host_alloc(2 * chunks * m, sizeof *x.arrival);
    x.free_at = (double *)host_alloc(r->p, sizeof *x.free_at);
    x.parts = (double(*)[PART_COUNT])host_alloc(r->p, sizeof *x.parts);
    x.costs = (ChunkCost *)host_alloc(chunks, sizeof *x.costs);
    x.send = (double *)host_alloc(r->p, sizeof *x.send);
    for (size_t i = 0; i < 2 * chunks * m; i++) x.arrival[i] = -1;
    for (size_t i = 0; i < chunks; i++) x.costs[i] = step_chunk_cost(c, r, i);

    bool scatter = r->scatter_gather && r->t > 1 && !r->sequence_parallel;
    double whole = 2.0 * (double)(r->micro_batch * r->T) * (double)r->C;
    double message = scatter || r->sequence_parallel ? whole / (double)r->t : whole;
    size_t shards = r->t * r->d, node = (size_t)c->gpus_per_node;
    if (scatter)
        x.gather = cost_collective(c, COLLECTIVE_ALL_GATHER, whole, placement_stride(c, 0, 1, r->t, r->ranks));
    for (size_t s = 0; s < r->p; s++) {
        size_t from = s * shards, to = (s + 1) % r->p * shards;
        x.send[s] = cost_send(c, message, from / node == to / node, shards < node ? shards : node);
        pipeline_schedule(r->v > 1 ? SCHEDULE_INTERLEAVED : SCHEDULE_1F1B, (int)r->p, (int)s, (int)m, (int)r->v,
                          x.lists + s * length);
    }
    step_walk(&x);
    out->seconds = step_end(&x);
    double most = -1;
    for (size_t s = 0; s < r->p; s++) {
        double busy = 0;
        for (int i = 0; i < PART_IDLE; i++) busy += x.parts[s][i];
        if (busy <= most) continue;
        most = busy;
        out->slowest = s;
        memcpy(out->parts, x.parts[s], sizeof out->parts);
        out->parts[PART_IDLE] = out->seconds - busy;
    }
    free(x.lists), free(x.arrival), free(x.free_at), free(x.parts), free(x.costs), free(x.send);
    return true;
}

#endif
