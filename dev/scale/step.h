// step.h: the time of one training step of a layout on a described cluster: a light simulation. Each stage walks the
// list that llmc/pipeline.h gives it, with costs from dev/scale/layer.h. Messages take their time. At the end gradients
// are summed and weights updated. All tensor and data ranks of a stage do the same at one time.
//
// defines: StepLayout, StepTime, step_check, step_bound, step_simulate
#ifndef DEV_SCALE_STEP_H
#define DEV_SCALE_STEP_H

#include "llmc/grid.h"
#include "dev/scale/layer.h"
#include "llmc/zero_bubble.h"

typedef struct {
    size_t ranks, layers, C, NH, T, vocabulary;  // vocabulary is padded
    size_t global_batch, micro_batch, t, p, d, v;
    LayerRecompute recompute;
    bool sequence_parallel, scatter_gather;
    bool short_ends;  // the embedding and the head each count as a layer when layers are dealt to stages
    Schedule schedule;
    size_t max_in_flight;  // of zb-auto
    bool zero;        // the optimizer's state is sharded over the data ranks
    char order[4];    // of the axes in the rank's number, fastest first; "" is "tdp"
} StepLayout;

typedef struct {
    double seconds;
    size_t slowest;             // stage that computes most
    double parts[TIME_PARTS];   // of that stage; they sum to seconds
} StepTime;

// Costs of a chunk's steps: [kind of step][first micro-batch or later].
typedef struct {
    double seconds[3][2], groups[3][2][TIME_PARTS];
} ChunkCost;

static inline bool step_split(const StepLayout *r) {
    return r->schedule == SCHEDULE_ZB_H1 || r->schedule == SCHEDULE_ZB_AUTO;
}

// How far apart two ranks are that differ by one in an axis: 't', 'd' or 'p'.
static inline size_t step_stride(const StepLayout *r, char axis) {
    size_t stride = 1;
    for (const char *at = r->order[0] ? r->order : "tdp"; *at != axis; at++)
        stride *= *at == 't' ? r->t : *at == 'd' ? r->d : r->p;
    return stride;
}

// Returns the placement of the group of `count` ranks first, first + stride, ...: a group of a grid.
static inline Placement placement_stride(const Cluster *c, size_t first, size_t stride, size_t count, size_t world) {
    size_t *ranks = (size_t *)host_alloc(count, sizeof *ranks);
    for (size_t i = 0; i < count; i++) ranks[i] = first + i * stride;
    Placement place = placement_ranks(c, ranks, count, world);
    free(ranks);
    return place;
}

static inline Placement step_tensor_group(const Cluster *c, const StepLayout *r) {
    Placement group = placement_stride(c, 0, step_stride(r, 't'), r->t, r->ranks);
    group.alone = true;
    return group;
}

static inline bool step_check(const StepLayout *r, Error *err) {
    size_t units = r->layers + (r->short_ends ? 2 : 0);
    if (r->t * r->p * r->d != r->ranks) return error_set(err, "t * p * d is not the number of ranks");
    if (r->NH % r->t || r->C % r->NH || r->vocabulary % r->t) return error_set(err, "t does not divide the model");
    if (r->global_batch % (r->micro_batch * r->d)) return error_set(err, "the batch does not divide");
    if (r->short_ends && units % (r->p * r->v))
        return error_set(err, "the layers do not divide into %zu chunks", r->p * r->v);
    if (units < r->p * r->v) return error_set(err, "there are fewer layers than chunks");
    size_t m = r->global_batch / (r->micro_batch * r->d);
    return pipeline_check(r->schedule, (int)r->p, (int)m, (int)r->v, err);
}

static inline size_t step_chunk_layers(const StepLayout *r, size_t chunk) {
    size_t chunks = r->p * r->v;
    if (!r->short_ends) return stage_layer_count(r->layers, chunks, chunk);
    return (r->layers + 2) / chunks - (chunk == 0) - (chunk == chunks - 1);
}

// Adds what a list of operations takes to a step of the chunk.
static inline void step_add(ChunkCost *cost, int kind, int later, const OpList *o, double times) {
    double groups[TIME_PARTS] = {0};
    cost->seconds[kind][later] += times * ops_seconds(o, groups);
    for (int g = 0; g < TIME_PARTS; g++) cost->groups[kind][later][g] += times * groups[g];
}

// Moves what makes the gradients of weights from the backward `from` to `to`.
static inline void step_take_weights(OpList *from, OpList *to) {
    size_t kept = to->count = 0;
    for (size_t i = 0; i < from->count; i++) {
        if (op_is_of_weights(&from->op[i])) to->op[to->count++] = from->op[i];
        else from->op[kept++] = from->op[i];
    }
    from->count = kept;
}

// In halves, the sum of an input's gradient has no weight gradient beside it, and both recompute. Gradients of the
// embedding and the head belong to the input half.
static inline ChunkCost step_chunk_cost(const Cluster *c, const StepLayout *r, size_t chunk) {
    ChunkCost cost;
    Cluster alone = *c;
    OpList o, again, weights;
    memset(&cost, 0, sizeof cost);
    if (step_split(r)) alone.tensor_overlap = false;
    LayerShape s = {r->micro_batch, r->T, r->C, r->NH, r->t, r->vocabulary, r->sequence_parallel, false, r->recompute,
                    COST_BF16, step_tensor_group(c, r)};
    double layers = (double)step_chunk_layers(r, chunk);
    for (int kind = STEP_FORWARD; kind <= STEP_BACKWARD; kind++)
        for (int later = 0; later < 2; later++) {
            s.add = later;
            layer_operations(&o, step_split(r) ? &alone : c, &s, kind == STEP_BACKWARD);
            if (kind == STEP_BACKWARD && step_split(r)) {
                step_take_weights(&o, &weights);
                step_add(&cost, STEP_WEIGHT, later, &weights, layers);
                layer_recomputes(&again, &alone, &s);
                step_add(&cost, STEP_WEIGHT, later, &again, layers);
            }
            step_add(&cost, kind, later, &o, layers);
            if (chunk == 0) {
                embedding_operations(&o, c, &s, kind == STEP_BACKWARD);
                step_add(&cost, kind, later, &o, 1);
            }
            if (chunk == r->p * r->v - 1) {
                head_operations(&o, c, &s, kind == STEP_BACKWARD);
                step_add(&cost, kind, later, &o, 1);
            }
        }
    return cost;
}

// Parameters that a rank of the stage holds: matrices and vectors of its layers, the embeddings at both ends.
static inline double step_parameters(const StepLayout *r, size_t stage) {
    double C = (double)r->C, t = (double)r->t, sum = 0;
    for (size_t chunk = 0; chunk < r->v; chunk++)
        sum += (double)step_chunk_layers(r, chunk * r->p + stage) * (12 * C * C / t + 7 * C / t + 6 * C);
    if (stage == 0) sum += (double)r->T * C;
    if (stage == 0 || stage == r->p - 1) sum += (double)r->vocabulary * C / t;
    return sum;
}

typedef struct {
    const Cluster *c;
    const StepLayout *r;
    size_t m;
    PipelineLists lists;
    double *arrival;           // [2][p v][m] when the input of a chunk is at its stage; < 0: not yet
    double *free_at;           // [p] when the stage's compute stream is free
    double (*parts)[TIME_PARTS];  // [p]
    ChunkCost *costs;          // [p v]
    double *send;              // [p] s of a message between stage s and s + 1, modulo p
    double *sent;              // [2][p] when the last message forward and backward between them has arrived
    double gather;             // s of the all-gather that ends scatter/gather
} StepMachine;

static inline double *step_arrival(StepMachine *x, StepKind kind, size_t chunk, size_t micro) {
    return &x->arrival[((size_t)kind * x->r->p * x->r->v + chunk) * x->m + micro];
}

// Runs the next step of a stage if its input has arrived.
static inline bool step_run(StepMachine *x, size_t stage, PipelineStep step) {
    const StepLayout *r = x->r;
    size_t chunks = r->p * r->v, chunk = (size_t)step.chunk * r->p + stage, micro = (size_t)step.micro;
    bool forward = step.kind == STEP_FORWARD, alone = step.kind == STEP_WEIGHT, overlap = x->c->pipeline_overlap;
    bool first = alone || chunk == (forward ? 0 : chunks - 1), last = alone || chunk == (forward ? chunks - 1 : 0);
    double arrived = first ? 0 : *step_arrival(x, step.kind, chunk, micro);
    double now = x->free_at[stage], *parts = x->parts[stage];
    if (arrived < 0) return false;
    if (arrived > now) now = arrived;
    double receive = first ? 0 : x->gather, host = first ? 0 : x->c->host_transfer;
    const ChunkCost *cost = &x->costs[chunk];
    now += receive + host + cost->seconds[step.kind][micro > 0];
    parts[TIME_PIPELINE] += receive;
    parts[TIME_HOST] += host;
    for (int g = 0; g < TIME_PARTS; g++) parts[g] += cost->groups[step.kind][micro > 0][g];
    x->free_at[stage] = now;
    if (last) return true;
    size_t link = forward ? stage : (stage + r->p - 1) % r->p;
    double send = x->send[link], *sent = &x->sent[forward ? link : r->p + link];
    if (!overlap) {
        x->free_at[stage] += send;
        parts[TIME_PIPELINE] += send;
    }
    *sent = fmax(now, *sent) + send;
    *step_arrival(x, step.kind, forward ? chunk + 1 : chunk - 1, micro) = *sent;
    return true;
}

static inline void step_walk(StepMachine *x) {
    size_t p = x->r->p, *next = (size_t *)host_alloc(p, sizeof *next);
    for (bool moved = true; moved;) {
        moved = false;
        for (size_t s = 0; s < p; s++)
            while (next[s] < x->lists.counts[s] && step_run(x, s, x->lists.steps[s][next[s]])) {
                next[s]++;
                moved = true;
            }
    }
    free(next);
}

// Stores the seconds of a stage's sums over data ranks, of gathering its weights with zero, and of its update.
static inline void step_data(const Cluster *c, const StepLayout *r, size_t stage, double *sum, double *gather,
                             double *update) {
    double parameters = step_parameters(r, stage), bytes = c->gradient_bytes * parameters;
    Placement data = placement_stride(c, 0, step_stride(r, 'd'), r->d, r->ranks);
    *sum = cost_collective(c, r->zero ? COLLECTIVE_REDUCE_SCATTER : COLLECTIVE_ALL_REDUCE, bytes, data);
    *gather = r->zero ? cost_collective(c, COLLECTIVE_ALL_GATHER, 2 * parameters, data) : 0;
    *update = cost_memory(c, MEMORY_OPTIMIZER, c->optimizer_bytes * parameters / (double)(r->zero ? r->d : 1));
}

// Sums over data ranks, over the two uses of the embedding, and the update. All stages wait for the gradient norm. With
// overlap the sums hide behind a chunk's last backward, and the gathering of weights behind its next first forward.
static inline double step_end(StepMachine *x) {
    const Cluster *c = x->c;
    const StepLayout *r = x->r;
    double end = 0, update = 0, tied = 0;
    for (size_t s = 0; s < r->p; s++) {
        double sum, gather, mine;
        step_data(c, r, s, &sum, &gather, &mine);
        const ChunkCost *cost = &x->costs[s];
        double hidden = c->data_overlap ? fmin(sum, cost->seconds[STEP_BACKWARD][x->m > 1]) : 0;
        if (c->data_overlap) {
            double behind = fmin(gather, cost->seconds[STEP_FORWARD][0]);
            hidden += behind;
        }
        double exposed = sum + gather - hidden + hidden * (1 - 1 / c->overlap_slowdown);
        x->parts[s][TIME_DATA] += exposed;
        x->free_at[s] += exposed;
        end = fmax(end, x->free_at[s]);
        update = fmax(update, mine);
    }
    if (r->p > 1) {
        Placement ends = placement_stride(c, 0, step_stride(r, 'p') * (r->p - 1), 2, r->ranks);
        ends = placement_among(ends, r->t * r->d);
        tied = cost_collective(c, COLLECTIVE_ALL_REDUCE,
                               c->gradient_bytes * (double)(r->vocabulary * r->C) / (double)r->t, ends);
        double both = fmax(x->free_at[0], x->free_at[r->p - 1]) + tied;
        x->parts[0][TIME_DATA] += tied;
        x->parts[r->p - 1][TIME_DATA] += tied;
        end = fmax(end, both);
    }
    for (size_t s = 0; s < r->p; s++) {
        x->parts[s][TIME_OPTIMIZER] += update;
        x->parts[s][TIME_HOST] += c->host_step;
    }
    return end + update + c->host_step;
}

static inline ChunkCost *step_chunk_costs(const Cluster *c, const StepLayout *r) {
    size_t chunks = r->p * r->v;
    ChunkCost *costs = (ChunkCost *)host_alloc(chunks, sizeof *costs);
    for (size_t i = 0; i < chunks; i++) {
        bool as_before = i > 1 && i < chunks - 1 && step_chunk_layers(r, i) == step_chunk_layers(r, i - 1);
        costs[i] = as_before ? costs[i - 1] : step_chunk_cost(c, r, i);
    }
    return costs;
}

// Returns a lower bound of the step: the work of the busiest stage, after one forward of each stage in front of it. Far
// cheaper than simulating.
static inline double step_bound(const Cluster *c, const StepLayout *r) {
    double m = (double)(r->global_batch / (r->micro_batch * r->d)), most = 0, before = 0;
    ChunkCost *costs = step_chunk_costs(c, r);
    for (size_t s = 0; s < r->p; s++) {
        double busy = before, sum, gather, update;
        for (size_t i = s; i < r->p * r->v; i += r->p)
            for (int kind = 0; kind < 3; kind++)
                busy += costs[i].seconds[kind][0] + (m - 1) * costs[i].seconds[kind][1];
        step_data(c, r, s, &sum, &gather, &update);
        most = fmax(most, busy + update);
        before += costs[s].seconds[STEP_FORWARD][0];
    }
    free(costs);
    return most + c->host_step;
}

// Bytes of a message of one tensor rank to the next stage.
static inline double step_message(const StepLayout *r) {
    double whole = 2.0 * (double)(r->micro_batch * r->T) * (double)r->C;
    return r->sequence_parallel || (r->scatter_gather && r->t > 1) ? whole / (double)r->t : whole;
}

// The step's time, or an error where the layout is none.
static inline bool step_simulate(const Cluster *c, const StepLayout *r, StepTime *out, Error *err) {
    if (!step_check(r, err)) return false;
    size_t chunks = r->p * r->v, m = r->global_batch / (r->micro_batch * r->d);
    StepMachine x;
    memset(&x, 0, sizeof x);
    x.c = c, x.r = r, x.m = m;
    PipelineTimes search = zero_bubble_times(r->C, r->T);
    x.lists = zero_bubble_make(r->schedule, (int)r->p, (int)m, (int)r->v, &search,
                               r->max_in_flight ? r->max_in_flight : 2 * r->p);
    x.arrival = (double *)host_alloc(2 * chunks * m, sizeof *x.arrival);
    x.free_at = (double *)host_alloc(r->p, sizeof *x.free_at);
    x.parts = (double(*)[TIME_PARTS])host_alloc(r->p, sizeof *x.parts);
    x.costs = step_chunk_costs(c, r);
    x.send = (double *)host_alloc(r->p, sizeof *x.send);
    x.sent = (double *)host_alloc(2 * r->p, sizeof *x.sent);
    for (size_t i = 0; i < 2 * chunks * m; i++) x.arrival[i] = -1;

    double message = step_message(r);
    if (r->scatter_gather && r->t > 1 && !r->sequence_parallel)
        x.gather = cost_collective(c, COLLECTIVE_ALL_GATHER, message * (double)r->t, step_tensor_group(c, r));
    for (size_t s = 0; s < r->p; s++) {
        size_t stride = step_stride(r, 'p');
        x.send[s] = cost_send_between(c, message, s * stride, (s + 1) % r->p * stride, stride);
    }
    step_walk(&x);
    out->seconds = step_end(&x);
    double most = -1;
    for (size_t s = 0; s < r->p; s++) {
        double busy = 0;
        for (int i = 0; i < TIME_IDLE; i++) busy += x.parts[s][i];
        if (busy <= most) continue;
        most = busy;
        out->slowest = s;
        memcpy(out->parts, x.parts[s], sizeof out->parts);
        out->parts[TIME_IDLE] = out->seconds - busy;
    }
    pipeline_lists_free(&x.lists);
    free(x.arrival), free(x.free_at), free(x.parts), free(x.costs), free(x.send), free(x.sent);
    return true;
}

#endif
