// step.h: the time of one training step of a layout on a described cluster: a light simulation.
// Each stage walks the list that llmc/pipeline.h gives it, with costs from dev/scale/layer.h.
// Messages take their time. At the end gradients are summed and weights updated. All tensor and
// data ranks of a stage do the same at one time.
//
// defines: StepLayout, StepTime, step_check, step_bound, step_simulate
#ifndef DEV_SCALE_STEP_H
#define DEV_SCALE_STEP_H

#include "dev/scale/layer.h"
#include "llmc/model_muon.h"
#include "llmc/v_schedules.h"

typedef struct {
    size_t ranks, layers, C, NH, T, vocabulary;  // vocabulary is padded
    size_t global_batch, micro_batch, t, p, d, v;
    LayerRecompute recompute;
    bool sequence_parallel, scatter_gather;
    bool short_ends;  // the embedding and the head each count as a layer when layers are dealt to
                      // stages
    Schedule schedule;
    size_t max_in_flight;  // of zb-auto
    bool zero;        // the optimizer's state is sharded over the data ranks
    char order[4];    // of the axes in the rank's number, fastest first; "" is "tdp"
    size_t KV;  // key heads of a model like Llama, without biases and positions; 0: GPT-2's block
    size_t F;         // hidden units of its MLP; 0: 4 C
    bool gate, tied;  // its MLP has a gate; its head is the embedding, as GPT-2's is
    size_t HS, window;  // channels of a head, 0: C / NH; keys that a query sees, 0: all
    bool head_norms;  // RMSNorm of each head of q and k
    size_t shard;     // FSDP: 2 shards gradients and optimizer, 3 the weights as well; 0: no FSDP
    size_t replicas;  // copies of the model under FSDP, each sharded among d/replicas neighbours
    char stages[128]; // layers of each stage, as "10,12"; "": equal
    size_t c;         // context ranks of a mixture: the data ranks that share a sequence
    size_t E, k, e;   // experts of a layer, 0: an MLP; of a token; data ranks that share them out
    double capacity;  // an expert has capacity * k / E places for each token of a rank; 0: one
    bool muon;        // Muon updates the matrices of layers, each of them whole on one data rank
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

// True if the model is a mixture of experts. With PLAN_WITHOUT_EXPERTS there is none.
static inline bool step_mixes(const StepLayout *r) {
#ifdef PLAN_WITHOUT_EXPERTS
    return (void)r, false;
#else
    return r->E > 0;
#endif
}

// Returns how many ranks share each sequence: of a mixture, as only train_5d cuts sequences here.
static inline size_t step_context(const StepLayout *r) { return step_mixes(r) ? r->c : 1; }

// Returns a rank's tokens of a sequence.
static inline size_t step_tokens(const StepLayout *r) { return r->T / step_context(r); }

// Returns the sequences of a step that a data rank computes, alone or with others.
static inline size_t step_share(const StepLayout *r) {
    return r->global_batch / (r->d / step_context(r));
}

static inline size_t step_micros(const StepLayout *r) { return step_share(r) / r->micro_batch; }

// Returns an expert's places for a rank's tokens of a sequence, as train_5d has them.
static inline size_t step_places(const StepLayout *r) {
    size_t T = step_tokens(r);
    double wanted = ceil(r->capacity * (double)T * (double)r->k / (double)r->E);
    return r->capacity > 0 && wanted < (double)T ? (size_t)wanted : T;
}

// Returns how many data ranks share a copy of the model under FSDP.
static inline size_t step_shards(const StepLayout *r) {
    return r->d / (r->replicas ? r->replicas : 1);
}

// True if a backward is in two halves.
static inline bool step_split(const StepLayout *r) {
    return r->schedule >= SCHEDULE_ZB_H1;
}

// True if a stage's two chunks lie in a V. With PLAN_WITHOUT_V there are no such layouts, and no
// code for them.
static inline bool step_folded(const StepLayout *r) {
#ifdef PLAN_WITHOUT_V
    return (void)r, false;
#else
    return r->schedule >= SCHEDULE_ZB_V;
#endif
}

// Returns the global chunk that is chunk `chunk` of a stage.
static inline size_t step_chunk(const StepLayout *r, size_t stage, size_t chunk) {
    return step_folded(r) && chunk == 1 ? 2 * r->p - 1 - stage : chunk * r->p + stage;
}

// Returns the placement of the group of `count` ranks first, first + stride, ...: a group of a
// grid.
static inline Placement placement_stride(const Cluster *c, size_t first, size_t stride,
                                         size_t count, size_t world) {
    size_t *ranks = (size_t *)host_alloc(count, sizeof *ranks);
    for (size_t i = 0; i < count; i++) ranks[i] = first + i * stride;
    Placement place = placement_ranks(c, ranks, count, world);
    free(ranks);
    return place;
}

// Returns the layout's grid, at the first stage of the data rank for which the job waits, as in the
// trainer's simulation.
static inline Grid step_grid(const Cluster *c, const StepLayout *r) {
    Grid g = {0, 0, r->t, r->d, r->p, 0, 0, 0, ""};
    Error err;
    if (!grid_make(&g, r->ranks, 0, r->order[0] ? r->order : "tdp", &err))
        abort();  // checked before
    grid_place(&g, (size_t)grid_rank_at(&g, 0, grid_worst_data_rank(&g, c), 0));
    return g;
}

// Returns the placement of one group of that rank at a stage: 't' tensor, 'd' data, 'e' the two
// ends.
static inline Placement step_group(const Cluster *c, const Grid *g, size_t stage, char group) {
    size_t d = group == 'd' ? 0 : g->d_rank,
           first = (size_t)grid_rank_at(g, 0, d, group == 'e' ? 0 : stage);
    size_t next = (size_t)(group == 't'   ? grid_rank_at(g, g->t > 1, d, stage)
                           : group == 'd' ? grid_rank_at(g, 0, g->d > 1, stage)
                                          : grid_rank_at(g, 0, d, g->p - 1));
    Placement place = placement_stride(c, first, next - first,
                                       group == 't'   ? g->t
                                       : group == 'd' ? g->d
                                                      : 2,
                                       g->world);
    if (group == 'e') place = placement_among(place, g->t * g->d);
    place.alone = group == 't';
    return place;
}

static inline bool step_schedule_check(const StepLayout *r, Schedule schedule, size_t m,
                                       Error *err) {
    return step_folded(r) ? v_check(schedule, (int)r->p, (int)m, (int)r->v, err)
                          : pipeline_check(schedule, (int)r->p, (int)m, (int)r->v, err);
}

static inline bool step_check(const StepLayout *r, Error *err) {
    size_t units = r->layers + (r->short_ends ? 2 : 0);
    if (r->t * r->p * r->d != r->ranks)
        return error_set(err, "t * p * d is not the number of ranks");
    bool uneven = r->HS == 0 && r->C % r->NH;
    if (r->NH % r->t || uneven || r->vocabulary % r->t || r->KV % r->t)
        return error_set(err, "t does not divide the model");
    if (r->d % step_context(r) || r->T % (2 * step_context(r)))
        return error_set(err, "c does not divide the data ranks or the sequence");
    if (step_mixes(r) && (r->E % r->e || r->d % r->e))
        return error_set(err, "e does not divide the experts or the data ranks");
    if (r->global_batch % (r->micro_batch * (r->d / step_context(r))))
        return error_set(err, "the batch does not divide");
    if (r->short_ends && units % (r->p * r->v))
        return error_set(err, "the layers do not divide into %zu chunks", r->p * r->v);
    if (r->stages[0] && (r->short_ends || !stage_list_is(r->stages, r->layers, r->p, r->v)))
        return error_set(err,
                         "the stages' layers '%s' are not those of %zu stages and %zu layers",
                         r->stages, r->p, r->layers);
    if (units < r->p * r->v) return error_set(err, "there are fewer layers than chunks");
    size_t m = step_micros(r);
    if (r->shard && r->t * r->p > 1) return error_set(err, "FSDP has data ranks only");
    if (r->replicas && r->d % r->replicas)
        return error_set(err, "the replicas do not divide the data ranks");
    if (r->muon && r->t * r->p > 1) return error_set(err, "Muon has data ranks only");
    return step_schedule_check(r, r->schedule, m, err);
}

// Returns the layers of a global chunk, as pipeline_plan_layers deals them.
static inline size_t step_chunk_layers(const StepLayout *r, size_t chunk) {
    size_t chunks = r->p * r->v;
    size_t place = chunk / r->p * r->p + chunk_stage(r->p, step_folded(r), chunk);
    if (!r->short_ends)
        return chunk_layers(r->layers, r->stages[0] ? r->stages : NULL, r->p, r->v, place);
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

// The parts of chunks: a layer, the embedding and the head.
enum { STEP_KEY = 32 };
typedef struct {
    size_t key[STEP_KEY];  // what they depend on but for the cluster; all 0: not there yet
    ChunkCost layer, embedding, head;
} StepPieces;

// Pieces that were asked for before, by a hash of their keys. A search asks for the same ones
// again and again.
typedef struct {
    StepPieces *piece;  // [size]
    size_t size;
} StepMemo;

// Returns the seconds of the messages of one group, in the order of the peers. Messages that leave
// the node share one way, all others another.
static inline double step_messages(const Cluster *c, const Grid *g, size_t from, const size_t *to,
                                   size_t count, double bytes) {
    double ways[2] = {0}, latency = 0, seconds = 0;
    size_t node = (size_t)c->gpus_per_node;
    for (size_t i = 0; i < count; i++) {
        size_t between = from < to[i] ? to[i] - from : from - to[i];
        if (between > g->world - between) between = g->world - between;
        double empty = cost_send(c, 0, from, to[i], between);
        double *way = &ways[from / node != to[i] / node];
        *way += cost_send(c, bytes, from, to[i], between) - empty;
        latency = fmax(latency, empty);
        seconds = fmax(seconds, latency + *way);
    }
    return seconds;
}

// Sets the traffic of a layer's experts and of its ring, at a stage. The grid's rank has e and c
// neighbours among the data ranks.
static inline void step_neighbours(const Cluster *c, const StepLayout *r, const Grid *g,
                                   size_t stage, LayerShape *s) {
    size_t here = (size_t)grid_rank_at(g, 0, g->d_rank, stage), cut = step_context(r), count = 0;
    if (step_mixes(r)) {
        size_t places = r->micro_batch * step_places(r), to[128];
        s->E = r->E;
        s->k = r->k;
        s->El = r->E / r->e;
        s->places = r->E * places;
        for (size_t i = 0; i < r->e; i++) {
            size_t rank = g->d_rank - g->d_rank % r->e + i;
            if (rank != g->d_rank) to[count++] = (size_t)grid_rank_at(g, 0, rank, stage);
        }
        // Of t tensor ranks each exchanges a part of the rows, if t divides them.
        size_t parts = r->e > 1 && places % r->t == 0 ? r->t : 1;
        double row = (double)LAYER_WIDTH * (double)r->C;
        double bytes = row * (double)(s->El * places / parts);
        s->exchange = step_messages(c, g, here, to, count, bytes);
        if (parts > 1)
            s->gather = cost_collective(c, COLLECTIVE_ALL_GATHER, row * (double)s->places,
                                        s->tensor);
    }
    s->c = cut;
    if (cut == 1) return;

    size_t first = g->d_rank - g->d_rank % cut, mine = g->d_rank % cut;
    size_t next = (size_t)grid_rank_at(g, 0, first + (mine + 1) % cut, stage);
    size_t before = (size_t)grid_rank_at(g, 0, first + (mine + cut - 1) % cut, stage);
    double keys = 2 * (double)(r->micro_batch * step_tokens(r)) *
                  (double)(layer_head(s) * (r->KV ? r->KV : r->NH) / r->t);
    const double width[] = {LAYER_WIDTH, 4, LAYER_WIDTH + 4};
    for (int kind = RING_KEYS; kind <= RING_BOTH; kind++)
        s->ring[kind] = fmax(step_messages(c, g, here, &next, 1, width[kind] * keys),
                             step_messages(c, g, here, &before, 1, width[kind] * keys));
    size_t start = (size_t)grid_rank_at(g, 0, first, stage);
    size_t stride = (size_t)grid_rank_at(g, 0, first + 1, stage) - start;
    Placement group = placement_stride(c, start, stride, cut, g->world);
    group.alone = true;
    double tokens = 4.0 * (double)(r->micro_batch * r->E);
    s->count = cost_collective(c, COLLECTIVE_ALL_REDUCE, tokens, group);
}

// Under FSDP a shard adds up the gradients of micro-batches, not the layer. In halves, the sum of
// an input's gradient has no weight gradient beside it, and both recompute and gather. Gradients
// of the embedding and the head belong to the input's.
static inline void step_make_pieces(const Cluster *c, const StepLayout *r, LayerShape s,
                                    StepPieces *x) {
    Cluster alone = *c;
    OpList o, more, weights;
    bool split = step_split(r);
    if (split) alone.tensor_overlap = false;
    for (int kind = STEP_FORWARD; kind <= STEP_BACKWARD; kind++)
        for (int later = 0; later < 2; later++) {
            s.add = later && !r->shard;
            layer_operations(&o, &alone, &s, kind == STEP_BACKWARD);
            if (kind == STEP_BACKWARD && split) {
                step_take_weights(&o, &weights);
                step_add(&x->layer, STEP_WEIGHT, later, &weights, 1);
                layer_recomputes(&more, &alone, &s);
                step_add(&x->layer, STEP_WEIGHT, later, &more, 1);
                layer_weight_gathers(&more, &alone, &s);
                step_add(&x->layer, STEP_WEIGHT, later, &more, 1);
            }
            step_add(&x->layer, kind, later, &o, 1);
            double again = kind == STEP_BACKWARD && r->recompute >= LAYER_WHOLE;
            double host = c->host_layer * (kind == STEP_FORWARD ? 1 : 2 + again) / 3 -
                          x->layer.seconds[kind][later];
            if (host > 0)
                x->layer.seconds[kind][later] += host,
                    x->layer.groups[kind][later][TIME_HOST] += host;
            s.add = later;
            embedding_operations(&o, c, &s, kind == STEP_BACKWARD);
            step_add(&x->embedding, kind, later, &o, 1);
            head_operations(&o, c, &s, kind == STEP_BACKWARD);
            step_add(&x->head, kind, later, &o, 1);
        }
}

// Returns the shape of a layout's layers at a stage.
static inline LayerShape step_shape(const Cluster *c, const StepLayout *r, const Grid *g,
                                    size_t stage) {
    LayerShape s;
    memset(&s, 0, sizeof s);
    s.B = r->micro_batch, s.T = step_tokens(r), s.C = r->C, s.NH = r->NH, s.t = r->t;
    s.vocabulary = r->vocabulary, s.sequence_parallel = r->sequence_parallel;
    s.recompute = r->recompute;
    s.tensor = step_group(c, g, stage, 't');
    s.KV = r->KV, s.F = r->F, s.gate = r->gate, s.HS = r->HS, s.window = r->window;
    s.head_norms = r->head_norms, s.split = step_split(r);
    step_neighbours(c, r, g, stage, &s);
    return s;
}

// Returns a number for the seconds of a key.
static inline size_t step_number(double seconds) { return (size_t)(seconds * 1e13); }

// Returns the pieces of a layout at a stage.
static inline const StepPieces *step_pieces(const Cluster *c, const StepLayout *r, const Grid *g,
                                            size_t stage, StepMemo *memo) {
    LayerShape s = step_shape(c, r, g, stage);
    Placement q = s.tensor;
    const size_t key[STEP_KEY] = {r->micro_batch,
                                  r->T,
                                  r->C,
                                  r->NH,
                                  r->t,
                                  r->vocabulary,
                                  r->sequence_parallel,
                                  r->recompute,
                                  step_split(r),
                                  q.nodes,
                                  q.per_node,
                                  q.sharing,
                                  q.islands,
                                  q.crossing,
                                  r->shard,
                                  r->KV,
                                  r->F,
                                  r->gate,
                                  r->HS,
                                  r->window,
                                  r->head_norms,
                                  q.network,
                                  s.E,
                                  s.k,
                                  s.El,
                                  s.places,
                                  s.c,
                                  step_number(s.exchange),
                                  step_number(s.count),
                                  step_number(s.ring[RING_KEYS]),
                                  step_number(s.ring[RING_GRADIENTS])};
    size_t hash = 0;
    for (int i = 0; i < STEP_KEY; i++) hash = (hash ^ key[i]) * 0x9e3779b97f4a7c15u;
    StepPieces *x = &memo->piece[(hash >> 32) % memo->size];
    if (memcmp(x->key, key, sizeof key) != 0) {
        memset(x, 0, sizeof *x);
        memcpy(x->key, key, sizeof key);
        step_make_pieces(c, r, s, x);
    }
    return x;
}

// Adds all times of a piece.
static inline void step_add_cost(ChunkCost *sum, const ChunkCost *x, double times) {
    for (int kind = 0; kind < 3; kind++)
        for (int later = 0; later < 2; later++) {
            sum->seconds[kind][later] += times * x->seconds[kind][later];
            for (int g = 0; g < TIME_PARTS; g++)
                sum->groups[kind][later][g] += times * x->groups[kind][later][g];
        }
}

static inline ChunkCost step_chunk_cost(const Cluster *c, const StepLayout *r, const Grid *g,
                                        size_t chunk, StepMemo *memo) {
    ChunkCost cost;
    memset(&cost, 0, sizeof cost);
    size_t stage = chunk_stage(r->p, step_folded(r), chunk);
    const StepPieces *x = step_pieces(c, r, g, stage, memo);
    step_add_cost(&cost, &x->layer, (double)step_chunk_layers(r, chunk));
    if (chunk == 0) step_add_cost(&cost, &x->embedding, 1);
    if (chunk == r->p * r->v - 1) step_add_cost(&cost, &x->head, 1);
    return cost;
}

// Returns the parameters of a layer's matrices, in units of C^2: 12 in GPT-2. Experts have none
// here.
static inline double step_matrices(const StepLayout *r) {
    double heads = r->KV ? (double)r->KV / (double)r->NH : 1,
           wide = r->HS ? (double)(r->HS * r->NH) / (double)r->C : 1,
           hidden = r->F ? (double)r->F / (double)r->C : 4;
    if (step_mixes(r)) hidden = 0;
    return (2 + 2 * heads) * wide + (2 + r->gate) * hidden;
}

// Returns the parameters of an expert.
static inline double step_expert(const StepLayout *r) {
    return 3 * (double)r->C * (double)r->F;
}

// Returns the layers of a stage.
static inline double step_layers(const StepLayout *r, size_t stage) {
    double sum = 0;
    for (size_t chunk = 0; chunk < r->v; chunk++)
        sum += (double)step_chunk_layers(r, step_chunk(r, stage, chunk));
    return sum;
}

// Returns the parameters of experts that a rank of the stage holds.
static inline double step_experts(const StepLayout *r, size_t stage) {
    if (!step_mixes(r)) return 0;
    double held = (double)(r->E / r->e) / (double)r->t;
    return step_layers(r, stage) * held * step_expert(r);
}

// Returns the parameters that a rank of the stage holds, without experts. These are matrices and
// vectors of its layers, and the embeddings at both ends, which are one in a V.
static inline double step_parameters(const StepLayout *r, size_t stage) {
    double C = (double)r->C, t = (double)r->t, matrices = step_matrices(r);
    double layer = matrices * C * C / t + 7 * C / t + 6 * C + (double)r->E * C;
    double sum = step_layers(r, stage) * layer;
    if (stage == 0 && !r->KV) sum += (double)r->T * C;
    if (stage == 0 || (stage == r->p - 1 && !step_folded(r)))
        sum += (double)r->vocabulary * C / t;
    return sum;
}

typedef struct {
    const Cluster *c;
    const StepLayout *r;
    Grid grid;
    size_t m;
    PipelineLists lists;
    double *arrival;  // [2][p v][m] when the input of a chunk is at its stage; < 0: not yet
    double *free_at;           // [p] when the stage's compute stream is free
    double (*parts)[TIME_PARTS];  // [p]
    ChunkCost *costs;          // [p v]
    double *send;              // [p] s of a message between stage s and s + 1, modulo p
    double *sent;  // [2][2][p] when the last message between them has arrived: of a chunk in a V
                   // (else all are in 0), forward and backward
    double gather;             // s of the all-gather that ends scatter/gather
} StepMachine;

static inline double *step_arrival(StepMachine *x, StepKind kind, size_t chunk, size_t micro) {
    return &x->arrival[((size_t)kind * x->r->p * x->r->v + chunk) * x->m + micro];
}

// Runs the next step of a stage if its input has arrived.
static inline bool step_run(StepMachine *x, size_t stage, PipelineStep step) {
    const StepLayout *r = x->r;
    size_t chunks = r->p * r->v, chunk = step_chunk(r, stage, (size_t)step.chunk),
           micro = (size_t)step.micro;
    bool forward = step.kind == STEP_FORWARD, alone = step.kind == STEP_WEIGHT,
         overlap = x->c->pipeline_overlap;
    bool first = alone || chunk == (forward ? 0 : chunks - 1),
         last = alone || chunk == (forward ? chunks - 1 : 0);
    int from, to;  // PIPELINE_NONE at the model's ends, and where a V turns
    pipeline_neighbours(&x->lists, (int)stage, step, &from, &to);
    double arrived = first ? 0 : *step_arrival(x, step.kind, chunk, micro);
    double now = x->free_at[stage], *parts = x->parts[stage];
    if (arrived < 0) return false;
    if (arrived > now) now = arrived;
    bool receives = from != PIPELINE_NONE;
    double receive = receives ? x->gather : 0, host = receives ? x->c->host_transfer : 0;
    const ChunkCost *cost = &x->costs[chunk];
    now += receive + host + cost->seconds[step.kind][micro > 0];
    parts[TIME_PIPELINE] += receive;
    parts[TIME_HOST] += host;
    for (int g = 0; g < TIME_PARTS; g++) parts[g] += cost->groups[step.kind][micro > 0][g];
    x->free_at[stage] = now;
    if (last) return true;
    double *arrival = step_arrival(x, step.kind, forward ? chunk + 1 : chunk - 1, micro);
    if (to == PIPELINE_NONE) {
        *arrival = now;
        return true;
    }

    // The link lies between stage `link` and the next one. Each chunk of a V has its own.
    size_t in_v = step_folded(r) ? (size_t)step.chunk : 0;
    bool up = forward == (in_v == 0);
    size_t link = up ? stage : (size_t)to;
    double send = x->send[link], *sent = &x->sent[(2 * in_v + !forward) * r->p + link];
    if (!overlap) {
        x->free_at[stage] += send;
        parts[TIME_PIPELINE] += send;
    }
    *sent = fmax(now, *sent) + send;
    *arrival = *sent;
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

// Returns the seconds of Muon on a matrix of m x n, m <= n. It has five steps of Newton-Schulz.
// Around them are the momentum, the norm in two kernels, the division by it, and the update.
static inline double step_orthogonal(const Cluster *c, size_t m, size_t n) {
    double e = LAYER_WIDTH, share = c->elementwise_efficiency;
    double square = (double)(m * m), all = (double)(m * n);
    double newton_schulz = cost_gemm(c, m, m, n, e) + cost_gemm(c, m, m, m, e) +
                           cost_gemm(c, m, n, m, e) + cost_memory(c, share, 3 * e * square) +
                           cost_memory(c, share, 3 * e * all);
    return 5 * newton_schulz + cost_memory(c, share, 4 * 4 * all) +
           cost_memory(c, share, 4 * all) + c->launch_device +
           cost_memory(c, share, (4 + e) * all) + cost_memory(c, share, (2 * e + 2 * 4) * all);
}

// Returns the seconds of Muon on the matrices of the first data rank. No rank has more FLOPs of
// Newton-Schulz: each block is dealt to it before others of as much work.
static inline double step_owned(const Cluster *c, const StepLayout *r) {
    size_t C = r->C, count = LAYER_MATRICES * r->layers;
    struct { size_t parts, n; } kinds[LAYER_MATRICES] = {{3, C}, {1, C}, {1, 4 * C}, {1, 4 * C}};
    MuonBlock *blocks = (MuonBlock *)host_alloc(count, sizeof *blocks);
    double seconds = 0;
    for (size_t i = 0; i < count; i++) {
        MuonMatrix matrix = {C, kinds[i % LAYER_MATRICES].n, 0, 0};
        blocks[i].owner = -1;
        blocks[i].cost = (double)kinds[i % LAYER_MATRICES].parts * muon_flops(matrix);
    }
    muon_deal(blocks, count, r->d);
    for (size_t i = 0; i < count; i++) {
        if (blocks[i].owner != 0) continue;
        seconds += (double)kinds[i % LAYER_MATRICES].parts *
                   step_orthogonal(c, C, kinds[i % LAYER_MATRICES].n);
    }
    free(blocks);
    return seconds;
}

// Stores the seconds of a layer's sums to the owners of its matrices, of their broadcasts, and of
// the update, all layers together. Embeddings and the last layernorm are AdamW's, with ZeRO.
static inline void step_muon(const Cluster *c, const StepLayout *r, Placement data, double *sum,
                             double *gather, double *update) {
    double all = step_parameters(r, 0), ends = (double)((r->T + r->vocabulary) * r->C);
    double layers = (double)r->layers, layer = (all - ends) / layers;
    *sum = layers * cost_collective(c, COLLECTIVE_REDUCE, c->gradient_bytes * layer, data) +
           cost_collective(c, COLLECTIVE_REDUCE_SCATTER, c->gradient_bytes * ends, data);
    *gather = layers * cost_collective(c, COLLECTIVE_BROADCAST, 2 * layer, data) +
              cost_collective(c, COLLECTIVE_ALL_GATHER, 2 * ends, data);
    double adamw = c->optimizer_bytes * ends / (double)r->d;
    *update = step_owned(c, r) + cost_memory(c, c->optimizer_efficiency, adamw);
}

// Stores the seconds of a stage's sums over data ranks, of gathering its weights with zero, and
// of its update.
static inline void step_data(const Cluster *c, const StepLayout *r, const Grid *g, size_t stage,
                             double *sum, double *gather, double *update) {
    if (r->muon) {
        step_muon(c, r, step_group(c, g, stage, 'd'), sum, gather, update);
        return;
    }
    double parameters = step_parameters(r, stage), bytes = c->gradient_bytes * parameters;
    Placement data = step_group(c, g, stage, 'd');
    *sum = cost_collective(c, r->zero ? COLLECTIVE_REDUCE_SCATTER : COLLECTIVE_ALL_REDUCE, bytes,
                           data);
    *gather = r->zero ? cost_collective(c, COLLECTIVE_ALL_GATHER, 2 * parameters, data) : 0;
    double owned = parameters / (double)(r->shard ? step_shards(r) : r->zero ? r->d : 1);
    if (step_mixes(r)) {
        double experts = step_experts(r, stage);
        size_t d = g->d / r->e, first = (size_t)grid_rank_at(g, 0, g->d_rank % r->e, stage);
        size_t next = (size_t)grid_rank_at(g, 0, g->d_rank % r->e + (d > 1) * r->e, stage);
        Placement alike = placement_stride(c, first, next - first, d, g->world);
        CollectiveKind kind = r->zero ? COLLECTIVE_REDUCE_SCATTER : COLLECTIVE_ALL_REDUCE;
        *sum += cost_collective(c, kind, c->gradient_bytes * experts, alike);
        if (r->zero) *gather += cost_collective(c, COLLECTIVE_ALL_GATHER, 2 * experts, alike);
        owned += experts / (double)(r->zero ? d : 1);
    }
    *update = cost_memory(c, c->optimizer_efficiency, c->optimizer_bytes * owned);
}

// Returns how many of the `all` seconds hide behind a chunk's step. A mixture has many weights for
// its compute. There all chunks but one have p such steps to hide behind.
static inline double step_hides(const StepLayout *r, double all, double step) {
    double others = step_mixes(r) ? (double)(r->v - 1) : 0, part = all / (others + 1);
    return fmin(part, step) + others * fmin(part, (double)r->p * step);
}

// Sums over data ranks, over the two uses of the embedding, and the update. All stages wait for the
// gradient norm. With overlap the sums hide behind a chunk's last backward, and the gathering of
// weights behind its next first forward. Muon's also hides behind the update of later layers.
static inline double step_end(StepMachine *x) {
    const Cluster *c = x->c;
    const StepLayout *r = x->r;
    double end = 0, update = 0, tied = 0;
    for (size_t s = 0; s < r->p; s++) {
        double sum, gather, mine;
        step_data(c, r, &x->grid, s, &sum, &gather, &mine);
        const ChunkCost *cost = &x->costs[s];
        double hidden = 0;
        if (c->data_overlap) {
            double beside = cost->seconds[STEP_FORWARD][0] + (r->muon ? mine : 0);
            hidden = step_hides(r, sum, cost->seconds[STEP_BACKWARD][x->m > 1]);
            hidden += step_hides(r, gather, beside);
        }
        double exposed = sum + gather - hidden + hidden * (1 - 1 / c->overlap_slowdown);
        x->parts[s][TIME_DATA] += exposed;
        x->free_at[s] += exposed;
        end = fmax(end, x->free_at[s]);
        update = fmax(update, mine);
    }
    if (r->p > 1 && !step_folded(r) && (!r->KV || r->tied)) {
        Placement ends = step_group(c, &x->grid, 0, 'e');
        // With ZeRO a rank sums the part that it owns.
        double wte = (double)(r->vocabulary * r->C) / (double)(r->t * (r->zero ? r->d : 1));
        tied = cost_collective(c, COLLECTIVE_ALL_REDUCE, c->gradient_bytes * wte, ends);
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

static inline ChunkCost *step_chunk_costs(const Cluster *c, const StepLayout *r, const Grid *g,
                                          StepMemo *memo) {
    ChunkCost *costs = (ChunkCost *)host_alloc(r->p * r->v, sizeof *costs);
    for (size_t i = 0; i < r->p * r->v; i++) costs[i] = step_chunk_cost(c, r, g, i, memo);
    return costs;
}

// Returns a lower bound of the step: the work of the busiest stage, after one forward of each
// stage in front of it. Far cheaper than simulating.
static inline double step_bound(const Cluster *c, const StepLayout *r, StepMemo *memo) {
    double m = (double)step_micros(r), most = 0, before = 0;
    Grid g = step_grid(c, r);
    for (size_t s = 0; s < r->p; s++) {
        double busy = before, sum, gather, update;
        const StepPieces *x = step_pieces(c, r, &g, s, memo);
        for (size_t n = 0; n < r->v; n++) {
            size_t i = step_chunk(r, s, n);
            double layers = (double)step_chunk_layers(r, i), first = i == 0,
                   last = i == r->p * r->v - 1;
            for (int kind = 0; kind < 3; kind++)
                for (int later = 0; later < 2; later++)
                    busy += (later ? m - 1 : 1) * (layers * x->layer.seconds[kind][later] +
                                                   first * x->embedding.seconds[kind][later] +
                                                   last * x->head.seconds[kind][later]);
        }
        step_data(c, r, &g, s, &sum, &gather, &update);
        most = fmax(most, busy + update);
        before += (double)step_chunk_layers(r, s) * x->layer.seconds[STEP_FORWARD][0] +
                  (s == 0 ? x->embedding.seconds[STEP_FORWARD][0] : 0);
    }
    return most + c->host_step;
}

// Returns the bytes of a message of one tensor rank to the next stage.
static inline double step_message(const StepLayout *r) {
    double whole = 2.0 * (double)(r->micro_batch * step_tokens(r)) * (double)r->C;
    return r->sequence_parallel || (r->scatter_gather && r->t > 1) ? whole / (double)r->t : whole;
}

// Returns the seconds of such a message of a stage. The ranks beside the sender send as far.
static inline double step_send(const Cluster *c, const StepLayout *r, const Grid *g, size_t stage) {
    size_t from = (size_t)grid_rank_at(g, 0, g->d_rank, stage),
           to = (size_t)grid_rank_at(g, 0, g->d_rank, (stage + 1) % r->p),
           between = from < to ? to - from : from - to;
    if (between > r->ranks - between) between = r->ranks - between;
    return cost_send(c, step_message(r), from, to, between);
}

// FSDP: a rank keeps 1/s of each layer, and s ranks share a copy of the model. The next layer's
// weights are gathered beside a layer, in forward and, with r->shard 3, again in backward. Behind a
// layer's backward its gradients are reduced and scattered. One communicator carries these in the
// order of their calls: the scatter of a layer, then the gather of the layer two behind it.
// Embeddings and the last layernorm are gathered once a step, and reduced at its end. Behind the
// last micro-batch another communicator sums each shard over the replicas. In backward a scatter
// that a gather follows slows no compute here. This rule is fitted to the trainers' clock, not
// derived from it. It meets the clock within 0.5% on 13 published runs.
static inline void step_sharded(const Cluster *c, const StepLayout *r, size_t m, StepTime *out) {
    Grid g = step_grid(c, r);
    StepPieces pieces[1];
    StepMemo memo = {pieces, 1};
    memset(pieces, 0, sizeof pieces);
    const StepPieces *x = step_pieces(c, r, &g, 0, &memo);
    size_t shards = step_shards(r), replicas = r->d / shards;
    Placement data = placement_stride(c, 0, 1, shards, r->ranks);
    Placement copies = placement_stride(c, 0, shards, replicas, r->ranks);
    double all = step_parameters(r, 0), ends = (double)((r->T + r->vocabulary) * r->C);
    double layer = (all - ends) / (double)r->layers;
    double gather = cost_collective(c, COLLECTIVE_ALL_GATHER, 2 * layer, data);
    double scatter = cost_collective(c, COLLECTIVE_REDUCE_SCATTER, c->gradient_bytes * layer, data);
    double added =
        cost_memory(c, c->elementwise_efficiency, c->accumulate_bytes * layer / (double)shards);
    double shard = c->gradient_bytes * layer / (double)shards, across = 0;
    double alike = replicas > 1 ? cost_collective(c, COLLECTIVE_ALL_REDUCE, shard, copies) : 0;
    double now = cost_collective(c, COLLECTIVE_ALL_GATHER, 2 * ends, data), network = now + gather;
    double *part = out->parts, next;
    memset(out, 0, sizeof *out);
    part[TIME_DATA] = now;
    for (size_t i = 0; i < m; i++)
        for (int kind = STEP_FORWARD; kind <= STEP_BACKWARD; kind++) {
            int later = i > 0;
            bool forward = kind == STEP_FORWARD, gathers = forward || r->shard == 3;
            if (gathers && !(forward && i == 0))
                network = fmax(network, now) + gather;  // of this way's first layer
            double ready = network;
            for (int n = 0; n < TIME_PARTS; n++)
                part[n] += x->embedding.groups[kind][later][n] + x->head.groups[kind][later][n];
            now += x->embedding.seconds[kind][later] + x->head.seconds[kind][later];
            for (size_t l = 0; l < r->layers; l++) {
                if (gathers && ready > now) part[TIME_DATA] += ready - now, now = ready;
                // Scatters of layers before, if no gather follows them.
                bool hidden = !forward && gathers;
                double busy = hidden ? 0 : fmax(0, network - now);
                if (gathers && l + 1 < r->layers)
                    network = fmax(network, now) + gather, busy += gather;
                next = network;
                double slow = fmin(busy, x->layer.seconds[kind][later]) * (c->overlap_slowdown - 1);
                for (int n = 0; n < TIME_PARTS; n++) part[n] += x->layer.groups[kind][later][n];
                part[TIME_DATA] += slow;
                now += x->layer.seconds[kind][later] + slow;
                if (!forward) network = fmax(network, now) + scatter + later * added;
                if (!forward && i + 1 == m) across = fmax(across, network) + alike;
                ready = next;
            }
        }
    network = fmax(network, now) +
              cost_collective(c, COLLECTIVE_REDUCE_SCATTER, c->gradient_bytes * ends, data);
    if (replicas > 1)
        network = fmax(across, network) + alike / layer * ends;
    part[TIME_DATA] += network - now;
    part[TIME_OPTIMIZER] =
        cost_memory(c, c->optimizer_efficiency, c->optimizer_bytes * all / (double)shards);
    part[TIME_HOST] += c->host_step;
    for (int n = 0; n < TIME_PARTS; n++) out->seconds += part[n];
}

// Stores the step's time, or returns an error if the layout is none.
static inline bool step_simulate(const Cluster *c, const StepLayout *r, StepTime *out, Error *err) {
    if (!step_check(r, err)) return false;
    size_t chunks = r->p * r->v, m = step_micros(r);
    if (r->shard) {
        step_sharded(c, r, m, out);
        return true;
    }
    StepMachine x;
    StepPieces pieces[8];
    StepMemo memo = {pieces, sizeof pieces / sizeof *pieces};
    memset(pieces, 0, sizeof pieces);
    memset(&x, 0, sizeof x);
    x.c = c, x.r = r, x.m = m, x.grid = step_grid(c, r);
    PipelineTimes search = zero_bubble_times(r->C, r->T);
    if (step_folded(r)) x.lists = v_make(r->schedule, (int)r->p, (int)m, &search);
    else
        x.lists = zero_bubble_make(r->schedule, (int)r->p, (int)m, (int)r->v, &search,
                                   r->max_in_flight ? r->max_in_flight : 2 * r->p);
    x.arrival = (double *)host_alloc(2 * chunks * m, sizeof *x.arrival);
    x.free_at = (double *)host_alloc(r->p, sizeof *x.free_at);
    x.parts = (double(*)[TIME_PARTS])host_alloc(r->p, sizeof *x.parts);
    x.costs = step_chunk_costs(c, r, &x.grid, &memo);
    x.send = (double *)host_alloc(r->p, sizeof *x.send);
    x.sent = (double *)host_alloc(4 * r->p, sizeof *x.sent);
    for (size_t i = 0; i < 2 * chunks * m; i++) x.arrival[i] = -1;

    double message = step_message(r);
    if (r->scatter_gather && r->t > 1 && !r->sequence_parallel)
        x.gather = cost_collective(c, COLLECTIVE_ALL_GATHER, message * (double)r->t,
                                   step_group(c, &x.grid, 0, 't'));
    for (size_t s = 0; s < r->p; s++) x.send[s] = step_send(c, r, &x.grid, s);
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
