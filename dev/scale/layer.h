// layer.h: the operations of one transformer layer, of the embedding and of the head, each with
// its cost. They are in the order in which a trainer enqueues them, so that its clock can be
// compared with them.
//
// defines: LayerOp, OpList, ops_seconds, op_is_of_weights, LayerShape, LayerRecompute,
//          layer_operations, layer_recomputes, layer_weight_gathers, embedding_operations,
//          head_operations
//
// Letters as in the trainers: B, T, N = B*T tokens, Nl of a rank under sequence parallelism, C
// channels. A = C/t are the channels of this rank's heads, and F its hidden units. "bytes" must
// move once: an activation has 2, a dropout mask 1.
#ifndef DEV_SCALE_LAYER_H
#define DEV_SCALE_LAYER_H

#include "llmc/sim/cost.h"

typedef struct {
    const char *name;
    TimePart part;
    // What the compute stream spends on it, without what other operations hide.
    double seconds;
} LayerOp;

enum { OPS_MAX = 96, LAYER_WIDTH = 2 };  // bytes of an activation, and of a GEMM's factors: bf16
typedef struct {
    LayerOp op[OPS_MAX];
    size_t count;
} OpList;

static inline void ops_add(OpList *list, const char *name, TimePart part, double seconds) {
    if (seconds <= 0) return;
    if (list->count == OPS_MAX) abort();  // no layer has as many
    LayerOp op = {name, part, seconds};
    list->op[list->count++] = op;
}

// Returns the sum of all, and stores each group's in by_part[TIME_PARTS] (or NULL).
static inline double ops_seconds(const OpList *list, double *by_part) {
    double sum = 0;
    for (size_t i = 0; i < list->count; i++) {
        sum += list->op[i].seconds;
        if (by_part) by_part[list->op[i].part] += list->op[i].seconds;
    }
    return sum;
}

// Belongs to the half of a backward that makes the gradients of weights.
static inline bool op_is_of_weights(const LayerOp *op) {
    return strcmp(op->name, "weight gradient") == 0 || strcmp(op->name, "add gradient") == 0 ||
           strcmp(op->name, "bias gradient") == 0;
}

// Recomputation in backward: nothing, GELU, attention between its GEMMs, or the whole layer.
typedef enum { LAYER_KEEPS, LAYER_GELU, LAYER_ATTENTION, LAYER_WHOLE } LayerRecompute;

typedef struct {
    size_t B, T, C, NH, t;      // NH heads of all tensor ranks together
    size_t vocabulary;          // rows of wte of all tensor ranks together
    bool sequence_parallel;
    bool add;                   // weight gradients are added to those of earlier micro-batches
    LayerRecompute recompute;
    Placement tensor;           // of the tensor group
    size_t KV;  // key heads of all tensor ranks together, in a model without biases; 0: NH, and
                // biases
    size_t F;                   // hidden units of the MLP of all tensor ranks together; 0: 4 C
    bool gate;                  // the MLP has a gate beside them
    size_t HS;                  // channels of a head; 0: C / NH
    size_t window;              // keys that a query sees; 0: all
    bool head_norms;            // RMSNorm of each head of q and k
    bool split;                 // its backward is in two halves
    size_t E, k, El, places;    // experts of a layer (0: an MLP) and of a token; those of a rank,
                                // and the rows that all of them have for its tokens
    size_t c;                   // ranks of which each has T of a sequence's tokens; 0 or 1: alone
    double exchange, count;     // s: of an all-to-all of experts' rows, of counting their tokens
    double gather;              // s: of gathering, or summing, these rows over the tensor ranks, of
                                // which each exchanges a part; 0: each exchanges all
    double ring[3];             // s of a step of the ring: with keys, and gradients, and both
} LayerShape;

// The message of a step of the ring.
enum { RING_KEYS, RING_GRADIENTS, RING_BOTH };

// True if the layer has experts; if several ranks share its sequences. With PLAN_WITHOUT_EXPERTS
// there are no such layers, and no code for them.
static inline bool layer_mixes(const LayerShape *s) {
#ifdef PLAN_WITHOUT_EXPERTS
    return (void)s, false;
#else
    return s->E > 0;
#endif
}

static inline bool layer_is_cut(const LayerShape *s) { return layer_mixes(s) && s->c > 1; }

static inline size_t layer_head(const LayerShape *s) { return s->HS ? s->HS : s->C / s->NH; }

// Channels of a rank's heads.
static inline size_t layer_heads(const LayerShape *s) { return layer_head(s) * s->NH / s->t; }

// Channels of q, k and v of a rank, side by side.
static inline size_t layer_qkv(const LayerShape *s) {
    return layer_heads(s) + 2 * layer_head(s) * (s->KV ? s->KV : s->NH) / s->t;
}

// Returns the hidden units of a rank, or with experts of each of its experts.
static inline size_t layer_hidden(const LayerShape *s) { return (s->F ? s->F : 4 * s->C) / s->t; }

// Returns the bytes of q and k of a rank, which RoPE reads and writes in a model without biases.
static inline double layer_rope_bytes(const LayerShape *s) {
    double heads = (double)(s->KV ? s->NH + s->KV : 0) * (double)layer_head(s) / (double)s->t;
    return 2 * LAYER_WIDTH * (double)(s->B * s->T) * heads;
}

// Add GEMMs, memory-bound kernels and a shape's collectives.
static inline void ops_gemm(OpList *o, const Cluster *c, const char *name, size_t M, size_t N,
                            size_t K) {
    ops_add(o, name, TIME_GEMM, cost_gemm(c, M, N, K, LAYER_WIDTH));
}

static inline void ops_memory(OpList *o, const Cluster *c, const char *name, double share,
                              double bytes) {
    ops_add(o, name, TIME_MEMORY, cost_memory(c, share, bytes));
}

static inline double layer_collective(const Cluster *c, const LayerShape *s, CollectiveKind kind) {
    double bytes = LAYER_WIDTH * (double)s->B * (double)s->T * (double)s->C;
    return cost_collective(c, kind, bytes, s->tensor);
}

// Adds operator f in forward: nothing, or the all-gather of sequence parallelism. Operator g:
// all-reduce or reduce-scatter.
static inline void ops_f_forward(OpList *o, const Cluster *c, const LayerShape *s) {
    if (s->sequence_parallel)
        ops_add(o, "all-gather", TIME_TENSOR, layer_collective(c, s, COLLECTIVE_ALL_GATHER));
}

static inline void ops_g_forward(OpList *o, const Cluster *c, const LayerShape *s) {
    CollectiveKind kind = s->sequence_parallel ? COLLECTIVE_REDUCE_SCATTER : COLLECTIVE_ALL_REDUCE;
    ops_add(o, s->sequence_parallel ? "reduce-scatter" : "all-reduce", TIME_TENSOR,
            layer_collective(c, s, kind));
}

static inline void ops_g_backward(OpList *o, const Cluster *c, const LayerShape *s) {
    if (s->sequence_parallel)
        ops_add(o, "all-gather", TIME_TENSOR, layer_collective(c, s, COLLECTIVE_ALL_GATHER));
}

// Adds a GEMM beside a collective, which began `before` seconds earlier: both are slower, and the
// rest of the collective is exposed.
static inline void ops_beside(OpList *o, const Cluster *c, const LayerShape *s,
                              const char *gemm_name, double gemm, double before, const char *name,
                              CollectiveKind kind) {
    double seconds = s->t > 1 ? layer_collective(c, s, kind) : 0;
    double slow = fmin(seconds, before + gemm) * (c->overlap_slowdown - 1);
    ops_add(o, gemm_name, TIME_GEMM, gemm + slow);
    ops_add(o, name, TIME_TENSOR, seconds - before - gemm - slow);
}

// Adds both gradients of Y(N, n) = X(N, k) W and their accumulation. wide: W is column-parallel,
// so f stands before it. Then dX is summed over the tensor group, and sequence parallelism
// gathers X again, which began `before` seconds ago. In halves the weights' one gathers X.
static inline void ops_linear_backward(OpList *o, const Cluster *c, const LayerShape *s, size_t N,
                                       size_t n, size_t k, bool wide, double before) {
    double input = cost_gemm(c, N, k, n, LAYER_WIDTH), weight = cost_gemm(c, k, n, N, LAYER_WIDTH);
    CollectiveKind sum = s->sequence_parallel ? COLLECTIVE_REDUCE_SCATTER : COLLECTIVE_ALL_REDUCE;
    const char *name = s->sequence_parallel ? "reduce-scatter" : "all-reduce";
    if (wide && s->sequence_parallel && !s->split)
        ops_beside(o, c, s, "input gradient", input, before, "all-gather", COLLECTIVE_ALL_GATHER);
    else ops_add(o, "input gradient", TIME_GEMM, input);
    if (wide && c->tensor_overlap) ops_beside(o, c, s, "weight gradient", weight, 0, name, sum);
    else {
        ops_add(o, "weight gradient", TIME_GEMM, weight);
        if (wide && s->t > 1) ops_add(o, name, TIME_TENSOR, layer_collective(c, s, sum));
    }
    double added = c->accumulate_bytes * (double)n * (double)k;
    if (s->add) ops_memory(o, c, "add gradient", c->elementwise_efficiency, added);
}

// Returns the seconds of a residual and the layernorm behind it over `values` bytes. If they are
// fused, one kernel reads the two summands and writes their sum and its layernorm. Otherwise a
// second one reads the sum again.
static inline double cost_residual_layernorm(const Cluster *c, double values, double elements) {
    double mask = c->dropout * elements;
    if (c->fused_forward) return cost_memory(c, c->layernorm_forward_efficiency, 4 * values + mask);
    return cost_memory(c, c->elementwise_efficiency, 3 * values + mask) +
           cost_memory(c, c->layernorm_forward_efficiency, 2 * values);
}

// Returns the seconds of a layernorm's backward over `values` bytes. If it is fused, one kernel
// reads gradient and input and writes a gradient. Otherwise a second one reads the first two
// again, for the gradients of the weights.
static inline double cost_layernorm_backward(const Cluster *c, double values) {
    return cost_memory(c, c->layernorm_backward_efficiency, (c->fused_backward ? 3 : 5) * values);
}

// Returns the same with the residual's gradient added, the sum that is a bias's gradient, and the
// mask of dropout. Fused it is one kernel that reads one more.
static inline double cost_residual_backward(const Cluster *c, double values, double elements) {
    if (c->fused_backward) return cost_memory(c, c->layernorm_backward_efficiency, 4 * values);
    return cost_layernorm_backward(c, values) +
           cost_memory(c, c->elementwise_efficiency, 3 * values) +
           cost_memory(c, c->elementwise_efficiency, values) +
           cost_memory(c, c->elementwise_efficiency, c->dropout ? 2 * values + elements : 0);
}

// Adds attention among c ranks. Each step of the ring has as many scores as the causal half of a
// rank's own. It takes as long as its message if that is longer. Forward merges its results in
// fp32. Backward adds up gradients of keys, which follow their keys one step behind. They come
// home in a step of their own.
static inline void ops_ring(OpList *o, const Cluster *c, const LayerShape *s, bool backward) {
    double e = LAYER_WIDTH, N = (double)(s->B * s->T), A = (double)layer_heads(s);
    double K2 = (double)layer_qkv(s) - A, share = c->elementwise_efficiency;
    double pair = cost_attention(c, backward, s->B, s->T, s->NH / s->t, layer_head(s));
    double exposed = 0, merged = 0;
    for (size_t step = 0; step < s->c; step++) {
        // Half of the rows meet all keys, or all rows half of them.
        double rows = step == 0 ? 0 : N * 0.75;
        double merge = cost_memory(c, share, 12 * A * rows);
        if (backward) merge += cost_memory(c, share, 12 * K2 * rows);
        bool more = step + 1 < s->c;
        double message = more ? s->ring[RING_KEYS] : 0;
        if (backward && step > 0) message = s->ring[more ? RING_BOTH : RING_GRADIENTS];
        exposed += fmax(0, message - pair - (backward ? 0 : merge));
        merged += merge;
    }
    if (backward) exposed += s->ring[RING_GRADIENTS];
    ops_memory(o, c, "ring copy", share, 2 * e * N * K2);
    ops_add(o, "attention", TIME_ATTENTION, (double)s->c * pair);
    ops_add(o, "ring sum", TIME_MEMORY, merged);
    ops_add(o, "ring", TIME_PIPELINE, exposed);
    ops_memory(o, c, "ring copy", share, (4 + e) * N * A);
    if (backward) ops_memory(o, c, "ring copy", share, (4 + e) * N * K2);
}

// Adds attention. A window costs as much as shorter sequences with the same number of scores.
static inline void ops_attention(OpList *o, const Cluster *c, const LayerShape *s, bool backward) {
    double W = (double)s->window;
    size_t T = s->T;
    if (layer_is_cut(s)) {
        ops_ring(o, c, s, backward);
        return;
    }
    if (s->window && s->window < T) T = (size_t)(sqrt(W * (2 * (double)T - W + 1)) + 0.5);
    ops_add(o, "attention", TIME_ATTENTION,
            cost_attention(c, backward, s->B, T, s->NH / s->t, layer_head(s)));
}

// Adds the norms of q's and k's heads: three values for two that RoPE moves.
static inline void ops_head_norms(OpList *o, const Cluster *c, const LayerShape *s, double share) {
    if (s->head_norms) ops_memory(o, c, "head norms", share, 1.5 * layer_rope_bytes(s));
}

// Adds a product of each of a rank's experts.
static inline void ops_experts_gemm(OpList *o, const Cluster *c, const LayerShape *s,
                                    const char *name, size_t M, size_t N, size_t K) {
    ops_add(o, name, TIME_GEMM, (double)s->El * cost_gemm(c, M, N, K, LAYER_WIDTH));
}

// Adds the way of rows to their experts, and the way back, which begins with zeros.
static inline void ops_dispatch(OpList *o, const Cluster *c, const LayerShape *s) {
    double bytes = LAYER_WIDTH * (double)s->places * (double)s->C;
    ops_memory(o, c, "to places", c->elementwise_efficiency, 2 * bytes);
    ops_add(o, "dispatch", TIME_PIPELINE, s->exchange);
    ops_add(o, "all-gather", TIME_TENSOR, s->gather);
}

static inline void ops_combine(OpList *o, const Cluster *c, const LayerShape *s) {
    double bytes = LAYER_WIDTH * (double)s->places * (double)s->C;
    ops_add(o, "reduce-scatter", TIME_TENSOR, s->gather);
    if (s->gather > 0) ops_memory(o, c, "to places", c->elementwise_efficiency, bytes);
    ops_add(o, "combine", TIME_PIPELINE, s->exchange);
}

// Adds experts' forward, whose results come back before a recomputation may end.
static inline void ops_experts_forward(OpList *o, const Cluster *c, const LayerShape *s) {
    size_t C = s->C, F = layer_hidden(s), rows = s->places / s->El;
    double e = LAYER_WIDTH, N = (double)(s->B * s->T), R = (double)s->places;
    double share = c->elementwise_efficiency;
    ops_memory(o, c, "router", share, e * N * (double)C);
    ops_memory(o, c, "router", share, (8 * (double)s->k + 4) * N * (double)s->E);
    ops_add(o, "all-reduce", TIME_TENSOR, s->count);
    ops_dispatch(o, c, s);
    ops_experts_gemm(o, c, s, "fc", rows, 2 * F, C);
    ops_memory(o, c, "gelu", c->softmax_efficiency, 3 * e * R * (double)F);
    ops_experts_gemm(o, c, s, "fcproj", rows, C, F);
    ops_combine(o, c, s);
}

// Adds experts' backward, up to the gradient of their input. The sum over tensor ranks has only
// the router's own gradient beside it.
static inline void ops_experts_backward(OpList *o, const Cluster *c, const LayerShape *s) {
    size_t C = s->C, F = layer_hidden(s), rows = s->places / s->El;
    double e = LAYER_WIDTH, N = (double)(s->B * s->T), R = (double)s->places;
    double share = c->elementwise_efficiency, k = (double)s->k;
    double added = c->accumulate_bytes * (double)(C * F) * (double)s->El;
    ops_memory(o, c, "router", share, (1 + k) * e * N * (double)C);
    ops_dispatch(o, c, s);
    ops_experts_gemm(o, c, s, "input gradient", rows, F, C);
    ops_experts_gemm(o, c, s, "weight gradient", F, C, rows);
    ops_memory(o, c, "gelu", c->softmax_efficiency, 5 * e * R * (double)F);
    ops_experts_gemm(o, c, s, "input gradient", rows, C, 2 * F);
    ops_experts_gemm(o, c, s, "weight gradient", C, 2 * F, rows);
    if (s->add) ops_memory(o, c, "add gradient", share, 3 * added);
    ops_combine(o, c, s);
    ops_memory(o, c, "router", share, (1 + k) * e * N * (double)C);
    CollectiveKind sum = s->sequence_parallel ? COLLECTIVE_REDUCE_SCATTER : COLLECTIVE_ALL_REDUCE;
    ops_beside(o, c, s, "weight gradient", cost_memory(c, share, e * N * (double)C), 0,
               s->sequence_parallel ? "reduce-scatter" : "all-reduce", sum);
}

// Adds the forward of one layer. Recomputation may end before the last GEMM and its sum.
static inline void ops_layer_forward(OpList *o, const Cluster *c, const LayerShape *s, bool ends) {
    size_t N = s->B * s->T, A = layer_heads(s), F = layer_hidden(s);
    double e = LAYER_WIDTH, mask = c->dropout;
    double rows = (double)(N / (s->sequence_parallel ? s->t : 1)) * (double)s->C,
           inner = (double)N * (double)A;
    ops_memory(o, c, "layernorm", c->layernorm_forward_efficiency, 2 * e * rows);
    ops_f_forward(o, c, s);
    ops_gemm(o, c, "qkv", N, layer_qkv(s), s->C);
    ops_head_norms(o, c, s, c->layernorm_forward_efficiency);
    ops_memory(o, c, "rope", c->elementwise_efficiency, layer_rope_bytes(s));
    ops_attention(o, c, s, false);
    // The unfused law's result is (B, NH, T, HS) and is copied to (B, T, NH, HS).
    if (c->attention == ATTENTION_UNFUSED)
        ops_memory(o, c, "transpose", c->elementwise_efficiency, 2 * e * inner);
    ops_gemm(o, c, "proj", N, s->C, A);
    ops_g_forward(o, c, s);
    ops_add(o, "bias, dropout, residual, layernorm", TIME_MEMORY,
            cost_residual_layernorm(c, e * rows, rows));
    ops_f_forward(o, c, s);
    if (layer_mixes(s)) ops_experts_forward(o, c, s);
    else {
        ops_gemm(o, c, "fc", N, (1 + s->gate) * F, s->C);
        ops_memory(o, c, "gelu", c->softmax_efficiency, (2 + s->gate) * e * (double)N * (double)F);
    }
    if (!ends) return;
    if (layer_mixes(s))
        ops_memory(o, c, "weighted sum", c->elementwise_efficiency,
                   ((2 + (double)s->k) * e + mask) * (double)N * (double)s->C);
    else ops_gemm(o, c, "fcproj", N, s->C, F);
    ops_g_forward(o, c, s);
    ops_memory(o, c, "bias, dropout, residual", c->elementwise_efficiency, (3 * e + mask) * rows);
}

// Adds the backward of one layer, without recomputation.
static inline void ops_layer_backward(OpList *o, const Cluster *c, const LayerShape *s) {
    size_t N = s->B * s->T, A = layer_heads(s), F = layer_hidden(s);
    double e = LAYER_WIDTH;
    double rows = (double)(N / (s->sequence_parallel ? s->t : 1)) * (double)s->C,
           inner = (double)N * (double)A;
    for (int half = 0; half < 2; half++) {  // the MLP, then attention
        ops_g_backward(o, c, s);
        double began = ops_seconds(o, NULL);
        if (half == 0 && layer_mixes(s)) {
            ops_experts_backward(o, c, s);
            ops_add(o, "layernorm, residual", TIME_MEMORY,
                    cost_residual_backward(c, e * rows, rows));
            continue;
        }
        ops_linear_backward(o, c, s, N, s->C, half == 0 ? F : A, false, 0);
        if (half == 0)
            ops_memory(o, c, "gelu", c->softmax_efficiency,
                       (3 + 2 * s->gate) * e * (double)N * (double)F);
        else
            ops_attention(o, c, s, true),
                ops_memory(o, c, "rope", c->elementwise_efficiency, layer_rope_bytes(s)),
                ops_head_norms(o, c, s, c->layernorm_backward_efficiency);
        // three matrices of (N, A) gathered into dqkv, and datty transposed
        if (half == 1 && c->attention == ATTENTION_UNFUSED)
            ops_memory(o, c, "transpose", c->elementwise_efficiency, (2 + 6) * e * inner);
        double biases = s->KV ? 0 : e * (double)N * (double)(half == 0 ? F : layer_qkv(s));
        ops_memory(o, c, "bias gradient", c->elementwise_efficiency, biases);
        bool early = c->gather_early && c->tensor_overlap;
        ops_linear_backward(o, c, s, N, half == 0 ? (1 + s->gate) * F : layer_qkv(s), s->C, true,
                            early ? ops_seconds(o, NULL) - began : 0);
        ops_add(o, "layernorm, residual", TIME_MEMORY, cost_residual_backward(c, e * rows, rows));
    }
}

// Lists the recomputation before a layer's backward. A whole layer has its attention in it
// already.
static inline void layer_recomputes(OpList *o, const Cluster *c, const LayerShape *s) {
    double N = (double)(layer_mixes(s) ? s->places : s->B * s->T);
    double gelu = (2 + s->gate) * LAYER_WIDTH * N * (double)layer_hidden(s);
    o->count = 0;
    bool whole = s->recompute == LAYER_WHOLE;
    if (whole) ops_layer_forward(o, c, s, c->recompute_end);
    if (s->recompute == LAYER_GELU) ops_memory(o, c, "gelu", c->softmax_efficiency, gelu);
    if (s->recompute == LAYER_ATTENTION || (c->attention_recompute && !whole))
        ops_attention(o, c, s, false);
}

// Lists the gathers of the weights' half under sequence parallelism. MLP and attention each gather
// the gradient behind them, which the input's half has gathered as well, and the input X.
static inline void layer_weight_gathers(OpList *o, const Cluster *c, const LayerShape *s) {
    o->count = 0;
    for (int half = 0; half < 2; half++) {
        ops_g_backward(o, c, s);
        ops_f_forward(o, c, s);
    }
}

// Lists a layer: forward, or backward with its recomputation.
static inline void layer_operations(OpList *o, const Cluster *c, const LayerShape *s,
                                    bool backward) {
    o->count = 0;
    if (!backward) {
        ops_layer_forward(o, c, s, true);
        return;
    }
    layer_recomputes(o, c, s);
    ops_layer_backward(o, c, s);
}

// Adds the lookup of tokens and positions with dropout. backward: a scatter into the gradient of
// this rank's part of wte.
static inline void embedding_operations(OpList *o, const Cluster *c, const LayerShape *s,
                                        bool backward) {
    double e = LAYER_WIDTH, table = (double)(s->vocabulary / s->t) * (double)s->C;
    double whole = (double)(s->B * s->T) * (double)s->C;
    o->count = 0;
    if (backward) {
        ops_g_backward(o, c, s);
        ops_memory(o, c, "embedding", c->elementwise_efficiency, 3 * e * whole);
        if (s->add)
            ops_memory(o, c, "add gradient", c->elementwise_efficiency,
                       c->accumulate_bytes * table);
        return;
    }
    ops_memory(o, c, "embedding", c->elementwise_efficiency,
               (2 * e + 2 * e + e + (double)c->dropout) * whole);
    ops_g_forward(o, c, s);
}

// Adds the last layernorm, logits, loss. Backward: its two GEMMs. Megatron recomputes none of it.
static inline void head_operations(OpList *o, const Cluster *c, const LayerShape *s,
                                   bool backward) {
    size_t N = s->B * s->T, V = s->vocabulary / s->t;
    double e = LAYER_WIDTH, rows = (double)(N / (s->sequence_parallel ? s->t : 1)) * (double)s->C;
    o->count = 0;
    if (backward) {
        ops_linear_backward(o, c, s, N, V, s->C, true, 0);
        ops_add(o, "layernorm", TIME_MEMORY, cost_layernorm_backward(c, e * rows));
        return;
    }
    ops_memory(o, c, "layernorm", c->layernorm_forward_efficiency, 2 * e * rows);
    ops_f_forward(o, c, s);
    ops_gemm(o, c, "logits", N, V, s->C);
    ops_memory(o, c, "classifier", c->elementwise_efficiency,
               c->classifier_bytes * (double)N * (double)V);
    // maximum, sum and target logit of each token, fp32: two all-reduces
    ops_add(o, "all-reduce", TIME_TENSOR,
            cost_collective(c, COLLECTIVE_ALL_REDUCE, 4.0 * (double)N, s->tensor));
    ops_add(o, "all-reduce", TIME_TENSOR,
            cost_collective(c, COLLECTIVE_ALL_REDUCE, 8.0 * (double)N, s->tensor));
}

#endif
