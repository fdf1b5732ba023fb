// reference.h: GPT-2 in plain C loops and fp64: model, loss, gradients and AdamW. All tests
// compare with it.
//
// Read reference_layers.h first, which has the functions of a layer, each forward beside
// its backward. Here they are put together: a layer, all layers and the loss, then AdamW.
#ifndef LLMC_REFERENCE_H
#define LLMC_REFERENCE_H

#include <stdlib.h>
#include <string.h>

#include "llmc/host/memory.h"
#include "llmc/model.h"
#include "llmc/reference_layers.h"

// ---- the model -------------------------------------------------------------------------

typedef struct {
    GPTConfig config;
    ParamTable table;  // of the whole model: lays out params and the other three
    double *params, *grads, *m,
        *v;           // [table.total] each; the padding of the vocabulary stays 0
    Dropout dropout;  // of these samples; off (threshold 0) unless set
    const int *first;  // (B, T) the first token that each one sees, or NULL: the first of all
} Reference;

static inline double *reference_allocate(size_t count) {
    return (double *)host_alloc(count, sizeof(double));
}

static inline Reference reference_create(const GPTConfig *config) {
    Reference ref;
    ref.config = *config;
    ref.table = table_make(config, shard_whole(config));
    ref.params = reference_allocate(ref.table.total);
    ref.grads = reference_allocate(ref.table.total);
    ref.m = reference_allocate(ref.table.total);
    ref.v = reference_allocate(ref.table.total);
    ref.dropout = dropout_make(0, 0, 0, 0);
    ref.first = NULL;
    return ref;
}

static inline void reference_free(Reference *ref) {
    free(ref->params);
    free(ref->grads);
    free(ref->m);
    free(ref->v);
    table_free(&ref->table);
}

// The activations of one layer, or their gradients, in the order of the computation.
typedef struct {
    double *residual1;                  // [N,C] output of the layer before it
    double *ln1, *ln1_mean, *ln1_rstd;  // [N,C], [N], [N]
    double *qkv, *att, *atty, *proj;    // [N,3C], [B,NH,T,T], [N,C], [N,C]
    double *residual2;                  // [N,C] after attention
    double *ln2, *ln2_mean, *ln2_rstd;  // [N,C], [N], [N]
    double *fc, *gelu, *fcproj;         // [N,4C], [N,4C], [N,C]
    double *residual3;                  // [N,C] after the MLP: residual1 of the next layer
} ReferenceLayer;

// The same of the whole model; layers[L].residual1 is the input of the last layernorm.
typedef struct {
    double *memory;                     // all of it, zeros at first
    ReferenceLayer *layers;             // [L + 1]
    double *lnf, *lnf_mean, *lnf_rstd;  // [N,C], [N], [N]
    double *probs, *losses;             // [N,V], [N]
} ReferencePass;

static inline double *reference_take(double **free_memory, size_t count) {
    return (*free_memory += count) - count;
}

static inline ReferencePass reference_pass_create(const GPTConfig *g, size_t B, size_t T) {
    size_t N = B * T, C = g->C, layer = N * (18 * C + 4 + g->NH * T);
    size_t rest = N * (2 * C + 3 + g->V);
    ReferencePass a;
    double *p = a.memory = reference_allocate(g->L * layer + rest);
    a.layers = (ReferenceLayer *)host_alloc(g->L + 1, sizeof(ReferenceLayer));
    a.layers[0].residual1 = reference_take(&p, N * C);
    for (size_t l = 0; l < g->L; l++) {
        ReferenceLayer *x = &a.layers[l];
        x->ln1 = reference_take(&p, N * C);
        x->ln1_mean = reference_take(&p, N);
        x->ln1_rstd = reference_take(&p, N);
        x->qkv = reference_take(&p, 3 * N * C);
        x->att = reference_take(&p, N * g->NH * T);
        x->atty = reference_take(&p, N * C);
        x->proj = reference_take(&p, N * C);
        x->residual2 = reference_take(&p, N * C);
        x->ln2 = reference_take(&p, N * C);
        x->ln2_mean = reference_take(&p, N);
        x->ln2_rstd = reference_take(&p, N);
        x->fc = reference_take(&p, 4 * N * C);
        x->gelu = reference_take(&p, 4 * N * C);
        x->fcproj = reference_take(&p, N * C);
        x[1].residual1 = x->residual3 = reference_take(&p, N * C);
    }
    a.lnf = reference_take(&p, N * C);
    a.lnf_mean = reference_take(&p, N);
    a.lnf_rstd = reference_take(&p, N);
    a.probs = reference_take(&p, N * g->V);
    a.losses = reference_take(&p, N);
    return a;
}

static inline void reference_pass_free(ReferencePass *a) {
    free(a->memory);
    free(a->layers);
}

// Sets at[LN1W] and so on: pointers into a buffer (params, grads, m or v) to the tensors of
// a layer and to the tensors outside the layers.
static inline void reference_find(const Reference *ref, double *buffer, size_t l,
                                  double *at[NUM_KINDS]) {
    for (int k = 0; k < NUM_KINDS; k++)
        at[k] = buffer + table_find(&ref->table, k, l)->offset;
}

// Runs the half of a layer before its MLP: residual1 -> residual2 and ln2.
static inline void reference_half_forward(const Reference *ref, size_t l, ReferenceLayer *x,
                                          size_t B, size_t T) {
    size_t N = B * T, C = ref->config.C, NH = ref->config.NH;
    double *w[NUM_KINDS];
    reference_find(ref, ref->params, l, w);
    reference_layernorm_forward(x->ln1, x->ln1_mean, x->ln1_rstd, x->residual1, w[LN1W],
                                w[LN1B], N, C);
    reference_matmul_forward(x->qkv, x->ln1, w[QKVW], w[QKVB], N, C, 3 * C);
    reference_attention_forward(x->atty, x->att, x->qkv, B, T, C, NH,
                                dropout_for(ref->dropout, DROPOUT_SCORES, l), ref->first);
    reference_matmul_forward(x->proj, x->atty, w[PROJW], w[PROJB], N, C, C);
    reference_dropout(x->proj, dropout_for(ref->dropout, DROPOUT_PROJ, l), B, T, C);
    reference_residual_forward(x->residual2, x->residual1, x->proj, N * C);
    reference_layernorm_forward(x->ln2, x->ln2_mean, x->ln2_rstd, x->residual2, w[LN2W],
                                w[LN2B], N, C);
}

static inline void reference_layer_forward(const Reference *ref, size_t l,
                                           ReferenceLayer *x, size_t B, size_t T) {
    size_t N = B * T, C = ref->config.C;
    double *w[NUM_KINDS];
    reference_find(ref, ref->params, l, w);
    reference_half_forward(ref, l, x, B, T);
    reference_matmul_forward(x->fc, x->ln2, w[FCW], w[FCB], N, C, 4 * C);
    reference_gelu_forward(x->gelu, x->fc, N * 4 * C);
    reference_matmul_forward(x->fcproj, x->gelu, w[FCPROJW], w[FCPROJB], N, 4 * C, C);
    reference_dropout(x->fcproj, dropout_for(ref->dropout, DROPOUT_FCPROJ, l), B, T, C);
    reference_residual_forward(x->residual3, x->residual2, x->fcproj, N * C);
}

// Runs that half backward. d->residual2 and d->ln2 hold the incoming gradients. Adds the
// result to d->residual1.
static inline void reference_half_backward(Reference *ref, size_t l,
                                           const ReferenceLayer *x, ReferenceLayer *d,
                                           size_t B, size_t T) {
    size_t N = B * T, C = ref->config.C, NH = ref->config.NH;
    double *w[NUM_KINDS], *g[NUM_KINDS];
    reference_find(ref, ref->params, l, w);
    reference_find(ref, ref->grads, l, g);
    reference_layernorm_backward(d->residual2, g[LN2W], g[LN2B], d->ln2, x->residual2,
                                 w[LN2W], x->ln2_mean, x->ln2_rstd, N, C);
    reference_residual_backward(d->residual1, d->proj, d->residual2, N * C);
    reference_dropout(d->proj, dropout_for(ref->dropout, DROPOUT_PROJ, l), B, T, C);
    reference_matmul_backward(d->atty, g[PROJW], g[PROJB], d->proj, x->atty, w[PROJW], N, C,
                              C);
    reference_attention_backward(d->qkv, d->atty, x->qkv, x->att, B, T, C, NH,
                                 dropout_for(ref->dropout, DROPOUT_SCORES, l), ref->first);
    reference_matmul_backward(d->ln1, g[QKVW], g[QKVB], d->qkv, x->ln1, w[QKVW], N, C,
                              3 * C);
    reference_layernorm_backward(d->residual1, g[LN1W], g[LN1B], d->ln1, x->residual1,
                                 w[LN1W], x->ln1_mean, x->ln1_rstd, N, C);
}

// Runs a layer backward. d->residual3 holds the incoming gradient. Adds the result to
// d->residual1. d is zero elsewhere.
static inline void reference_layer_backward(Reference *ref, size_t l,
                                            const ReferenceLayer *x, ReferenceLayer *d,
                                            size_t B, size_t T) {
    size_t N = B * T, C = ref->config.C;
    double *w[NUM_KINDS], *g[NUM_KINDS];
    reference_find(ref, ref->params, l, w);
    reference_find(ref, ref->grads, l, g);
    reference_residual_backward(d->residual2, d->fcproj, d->residual3, N * C);
    reference_dropout(d->fcproj, dropout_for(ref->dropout, DROPOUT_FCPROJ, l), B, T, C);
    reference_matmul_backward(d->gelu, g[FCPROJW], g[FCPROJB], d->fcproj, x->gelu,
                              w[FCPROJW], N, 4 * C, C);
    reference_gelu_backward(d->fc, d->gelu, x->fc, N * 4 * C);
    reference_matmul_backward(d->ln2, g[FCW], g[FCB], d->fc, x->ln2, w[FCW], N, C, 4 * C);
    reference_half_backward(ref, l, x, d, B, T);
}

// Returns the sum of the losses of tokens -> targets (each [B,T], below V). Adds the
// gradient of scale * that sum to ref->grads. With scale 0 it runs the forward pass only.
static inline double reference_loss_and_gradients(Reference *ref, const int *tokens,
                                                  const int *targets, size_t B, size_t T,
                                                  double scale) {
    size_t N = B * T, L = ref->config.L, C = ref->config.C, V = ref->config.V;
    double *w[NUM_KINDS], *g[NUM_KINDS], loss = 0;
    reference_find(ref, ref->params, 0, w);
    reference_find(ref, ref->grads, 0, g);
    ReferencePass x = reference_pass_create(&ref->config, B, T);
    double *last = x.layers[L].residual1;
    reference_encoder_forward(x.layers[0].residual1, tokens, w[WTE], w[WPE], B, T, C,
                              ref->first);
    reference_dropout(x.layers[0].residual1,
                      dropout_for(ref->dropout, DROPOUT_EMBEDDING, 0), B, T, C);
    for (size_t l = 0; l < L; l++) reference_layer_forward(ref, l, &x.layers[l], B, T);
    reference_layernorm_forward(x.lnf, x.lnf_mean, x.lnf_rstd, last, w[LNFW], w[LNFB], N,
                                C);
    reference_classifier_forward(x.losses, x.probs, x.lnf, w[WTE], targets, N, C, V);
    for (size_t n = 0; n < N; n++) loss += x.losses[n];

    if (scale != 0) {
        ReferencePass d = reference_pass_create(&ref->config, B, T);
        reference_classifier_backward(d.lnf, g[WTE], x.probs, x.lnf, w[WTE], targets, scale,
                                      N, C, V);
        reference_layernorm_backward(d.layers[L].residual1, g[LNFW], g[LNFB], d.lnf, last,
                                     w[LNFW], x.lnf_mean, x.lnf_rstd, N, C);
        for (size_t l = L; l-- > 0;)
            reference_layer_backward(ref, l, &x.layers[l], &d.layers[l], B, T);
        reference_dropout(d.layers[0].residual1,
                          dropout_for(ref->dropout, DROPOUT_EMBEDDING, 0), B, T, C);
        reference_encoder_backward(g[WTE], g[WPE], d.layers[0].residual1, tokens, B, T, C,
                                   ref->first);
        reference_pass_free(&d);
    }
    reference_pass_free(&x);
    return loss;
}

// ---- the update ------------------------------------------------------------------------

static inline void reference_zero_gradients(Reference *ref) {
    memset(ref->grads, 0, ref->table.total * sizeof(double));
}

// Returns the L2 norm of all gradients together.
static inline double reference_gradient_norm(const Reference *ref) {
    double sum = 0;
    for (size_t i = 0; i < ref->table.total; i++) sum += ref->grads[i] * ref->grads[i];
    return sqrt(sum);
}

// Makes one AdamW update; step counts from 1. Multiplies gradients by grad_scale first
// (clipping: clip / norm if the norm exceeds clip, else 1). Decays only the tensors that
// the table marks.
static inline void reference_adamw(Reference *ref, size_t step, double lr, double beta1,
                                   double beta2, double eps, double weight_decay,
                                   double grad_scale) {
    double correction1 = 1.0 - pow(beta1, (double)step);
    double correction2 = 1.0 - pow(beta2, (double)step);
    for (size_t k = 0; k < ref->table.count; k++) {
        const Tensor *x = &ref->table.tensors[k];
        double decay = x->spec->flags & TENSOR_DECAYS ? weight_decay : 0.0;
        for (size_t i = x->offset; i < x->offset + x->size; i++) {
            double g = ref->grads[i] * grad_scale;
            ref->m[i] = beta1 * ref->m[i] + (1.0 - beta1) * g;
            ref->v[i] = beta2 * ref->v[i] + (1.0 - beta2) * g * g;
            double mhat = ref->m[i] / correction1, vhat = ref->v[i] / correction2;
            ref->params[i] -= lr * (mhat / (sqrt(vhat) + eps) + decay * ref->params[i]);
        }
    }
}

#endif
