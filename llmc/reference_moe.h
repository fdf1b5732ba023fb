// reference_moe.h: the mixture of experts of llmc/kernels/moe.cuh in plain C loops and
// fp64, forward and backward.
// lesson: moe
//
// Matrices are as in reference_layers.h. The router is [E,C]. The weights of all experts
// are [E,C,F], [E,F], [E,F,C] and [E,C]. Experts compute for one token at a time, so
// there are no permutation and no places, only a count of the taken ones.
#ifndef LLMC_REFERENCE_MOE_H
#define LLMC_REFERENCE_MOE_H

#include "llmc/model_moe.h"
#include "llmc/reference.h"

typedef struct {
    size_t E, k, slots;  // experts, experts of a token, places of a sequence in an expert
    double balance, z;   // coefficients of the two losses
    double *margin;      // unless NULL, is lowered to the least gap between a token's k-th
                         // logit and its next one
    bool normalised;     // a token's k weights are divided by their sum
    size_t parts;  // of a sequence, each with places of its own; 0: one
} ReferenceMoe;

// Values that forward keeps for backward. x counts a token's choices: n k + j.
typedef struct {
    double *probs, *lse;      // [N,E], [N] of the router
    double *share;            // [B,E] of a sequence's choices, dropped ones included
    double *weight;           // [N,k] of each choice's result
    size_t *choice;           // [N,k] experts
    bool *kept;               // [N,k]
    double *fc, *gelu, *out;  // [N,k,F], [N,k,F], [N,k,C] of each kept choice
} ReferenceRouting;

// The layer's tensors, or their gradients.
typedef struct {
    double *router, *fcw, *fcb, *projw, *projb;
} ReferenceExperts;

static inline size_t reference_parts(const ReferenceMoe *moe) {
    return moe->parts ? moe->parts : 1;
}

// Returns the number of a token's sequence and part: the i-th has chunks i and 2 parts-1-i
// of 2 parts.
static inline size_t reference_part(const ReferenceMoe *moe, size_t n, size_t T) {
    size_t parts = reference_parts(moe);
    if (parts == 1) return n / T;
    size_t chunk = n % T / (T / parts / 2);
    return n / T * parts + (chunk < parts ? chunk : 2 * parts - 1 - chunk);
}

static inline ReferenceRouting reference_routing_create(const ReferenceMoe *moe, size_t B,
                                                        size_t T, size_t C, size_t F) {
    size_t N = B * T, X = N * moe->k;
    ReferenceRouting r = {
        reference_allocate(N * moe->E),         reference_allocate(N),
        reference_allocate(B * moe->E),         reference_allocate(X),
        (size_t *)host_alloc(X, sizeof(size_t)), (bool *)host_alloc(X, sizeof(bool)),
        reference_allocate(X * F),              reference_allocate(X * F),
        reference_allocate(X * C)};
    return r;
}

static inline void reference_routing_free(ReferenceRouting *r) {
    free(r->probs);
    free(r->lse);
    free(r->share);
    free(r->weight);
    free(r->choice);
    free(r->kept);
    free(r->fc);
    free(r->gelu);
    free(r->out);
}

// Computes the softmax of the router's logits, the k most probable experts of each token,
// and the tokens that find a place.
static inline void reference_route(const ReferenceMoe *moe, ReferenceRouting *r,
                                   const double *inp, const double *router, size_t B,
                                   size_t T, size_t C) {
    size_t E = moe->E, k = moe->k;
    for (size_t n = 0; n < B * T; n++) {
        double *row = r->probs + n * E, max = -INFINITY, sum = 0;
        for (size_t e = 0; e < E; e++) {
            row[e] = 0;
            for (size_t c = 0; c < C; c++) row[e] += inp[n * C + c] * router[e * C + c];
            if (row[e] > max) max = row[e];
        }
        for (size_t j = 0; j < k; j++) {
            size_t best = E;
            for (size_t e = 0; e < E; e++) {
                bool taken = false;
                for (size_t i = 0; i < j; i++) taken = taken || r->choice[n * k + i] == e;
                if (!taken && (best == E || row[e] > row[best]))
                    best = e;  // of equal ones the first
            }
            r->choice[n * k + j] = best;
        }
        for (size_t e = 0; e < E && moe->margin; e++) {
            bool taken = false;
            for (size_t i = 0; i < k; i++) taken = taken || r->choice[n * k + i] == e;
            if (!taken)
                *moe->margin = fmin(*moe->margin, row[r->choice[n * k + k - 1]] - row[e]);
        }
        for (size_t e = 0; e < E; e++) sum += row[e] = exp(row[e] - max);
        for (size_t e = 0; e < E; e++) row[e] /= sum;
        r->lse[n] = max + log(sum);
        double chosen = 0;
        for (size_t j = 0; j < k; j++) chosen += row[r->choice[n * k + j]];
        for (size_t j = 0; j < k; j++)
            r->weight[n * k + j] = row[r->choice[n * k + j]] / (moe->normalised ? chosen : 1);
    }
    size_t parts = reference_parts(moe);
    size_t *tokens = (size_t *)host_alloc(B * parts * E, sizeof(size_t));
    for (size_t x = 0; x < B * T * k; x++) {
        size_t e = r->choice[x];
        r->kept[x] = tokens[reference_part(moe, x / k, T) * E + e]++ < moe->slots;
        r->share[x / k / T * E + e] += 1 / (double)(T * k);
    }
    free(tokens);
}

// Returns the sum of the two losses over all tokens, with their coefficients. The balance
// loss of a token is E times the sum over experts of share (of its sequence) times
// probability. The z loss is lse squared.
static inline double reference_route_losses(const ReferenceMoe *moe,
                                            const ReferenceRouting *r, size_t N, size_t T) {
    size_t E = moe->E;
    double losses = 0;
    for (size_t n = 0; n < N; n++) {
        for (size_t e = 0; e < E; e++)
            losses += moe->balance * (double)E *
                      r->share[n / T * E + e] * r->probs[n * E + e];
        losses += moe->z * r->lse[n] * r->lse[n];
    }
    return losses;
}

// Adds token n's gradients of the router and of its input [C]. They come from dweight
// [k], the gradients of its weights, and from the two losses, whose gradient is scale.
static inline void reference_route_backward(const ReferenceMoe *moe, double *dinp,
                                            double *drouter, const double *dweight,
                                            const ReferenceRouting *r, const double *inp,
                                            const double *router, double scale, size_t n,
                                            size_t T, size_t C) {
    size_t E = moe->E, k = moe->k;
    const double *probs = r->probs + n * E;
    double *dprobs = reference_allocate(E), mean = 0, along = 0, chosen = 0;
    for (size_t e = 0; e < E; e++)
        dprobs[e] = scale * moe->balance * (double)E * r->share[n / T * E + e];
    for (size_t j = 0; j < k; j++) {
        along += dweight[j] * r->weight[n * k + j];
        chosen += probs[r->choice[n * k + j]];
    }
    for (size_t j = 0; j < k; j++)
        dprobs[r->choice[n * k + j]] +=
            moe->normalised ? (dweight[j] - along) / chosen : dweight[j];
    for (size_t e = 0; e < E; e++) mean += probs[e] * dprobs[e];
    for (size_t e = 0; e < E; e++) {
        double dlogit = probs[e] * (dprobs[e] - mean + scale * moe->z * 2 * r->lse[n]);
        for (size_t c = 0; c < C; c++) {
            drouter[e * C + c] += dlogit * inp[c];
            dinp[c] += dlogit * router[e * C + c];
        }
    }
    free(dprobs);
}

// out [N,C] = for each token the sum of its experts, times their weights. Returns the sum of
// the two losses.
static inline double reference_moe_forward(const ReferenceMoe *moe, double *out,
                                           ReferenceRouting *r, const double *inp,
                                           ReferenceExperts w, size_t B, size_t T, size_t C,
                                           size_t F) {
    size_t k = moe->k;
    reference_route(moe, r, inp, w.router, B, T, C);
    for (size_t x = 0; x < B * T * k; x++) {
        size_t n = x / k, e = r->choice[x];
        double *y = r->out + x * C, p = r->weight[x];
        for (size_t c = 0; c < C && x % k == 0; c++) out[n * C + c] = 0;
        if (!r->kept[x]) continue;
        reference_matmul_forward(r->fc + x * F, inp + n * C, w.fcw + e * C * F,
                                 w.fcb + e * F, 1, C, F);
        reference_gelu_forward(r->gelu + x * F, r->fc + x * F, F);
        reference_matmul_forward(y, r->gelu + x * F, w.projw + e * F * C, w.projb + e * C,
                                 1, F, C);
        for (size_t c = 0; c < C; c++) out[n * C + c] += p * y[c];
    }
    return reference_route_losses(moe, r, B * T, T);
}

// dout [N,C] is the gradient of out. scale is the gradient of the losses that
// reference_moe_forward returns.
static inline void reference_moe_backward(const ReferenceMoe *moe, double *dinp,
                                          ReferenceExperts dw, const double *dout,
                                          const ReferenceRouting *r, const double *inp,
                                          ReferenceExperts w, double scale, size_t B,
                                          size_t T, size_t C, size_t F) {
    size_t k = moe->k;
    double *dweight = reference_allocate(k), *dy = reference_allocate(C);
    double *row = reference_allocate(2 * F);
    for (size_t n = 0; n < B * T; n++) {
        for (size_t x = n * k; x < (n + 1) * k; x++) {
            size_t e = r->choice[x];
            dweight[x % k] = 0;
            if (!r->kept[x]) continue;
            for (size_t c = 0; c < C; c++) {
                dweight[x % k] += dout[n * C + c] * r->out[x * C + c];
                dy[c] = r->weight[x] * dout[n * C + c];
            }
            memset(row, 0, 2 * F * sizeof(double));
            double *dgelu = row, *dfc = row + F;
            reference_matmul_backward(dgelu, dw.projw + e * F * C, dw.projb + e * C, dy,
                                      r->gelu + x * F, w.projw + e * F * C, 1, F, C);
            reference_gelu_backward(dfc, dgelu, r->fc + x * F, F);
            reference_matmul_backward(dinp + n * C, dw.fcw + e * C * F, dw.fcb + e * F, dfc,
                                      inp + n * C, w.fcw + e * C * F, 1, C, F);
        }
        reference_route_backward(moe, dinp + n * C, dw.router, dweight, r, inp + n * C,
                                 w.router, scale, n, T, C);
    }
    free(dweight);
    free(dy);
    free(row);
}

// The layer's tensors in params, or in grads.
static inline ReferenceExperts reference_experts(const Reference *ref, double *buffer,
                                                 size_t l) {
    static const int kinds[] = {ROUTERW, FCW, FCB, FCPROJW, FCPROJB};
    double *at[5];
    for (int i = 0; i < 5; i++)
        at[i] = buffer + table_find(&ref->table, kinds[i], l)->offset;
    ReferenceExperts experts = {at[0], at[1], at[2], at[3], at[4]};
    return experts;
}

// Does as reference_loss_and_gradients, for a model with experts: returns the sum of the
// tokens' losses. Sets *extra, unless it is NULL, to the sum of the router's two losses
// over all layers. Their gradient is part of ref->grads.
static inline double reference_moe_loss_and_gradients(Reference *ref,
                                                      const ReferenceMoe *moe,
                                                      const int *tokens, const int *targets,
                                                      size_t B, size_t T, double scale,
                                                      double *extra) {
    size_t N = B * T, L = ref->config.L, C = ref->config.C, V = ref->config.V, F = 4 * C;
    double *w[NUM_KINDS], *g[NUM_KINDS], loss = 0, losses = 0;
    reference_find(ref, ref->params, 0, w);
    reference_find(ref, ref->grads, 0, g);
    ReferencePass x = reference_pass_create(&ref->config, B, T),
                  d = reference_pass_create(&ref->config, B, T);
    ReferenceRouting *r = (ReferenceRouting *)host_alloc(L, sizeof(ReferenceRouting));
    double *last = x.layers[L].residual1;
    reference_encoder_forward(x.layers[0].residual1, tokens, w[WTE], w[WPE], B, T, C,
                              NULL);
    reference_dropout(x.layers[0].residual1,
                      dropout_for(ref->dropout, DROPOUT_EMBEDDING, 0), B, T, C);
    for (size_t l = 0; l < L; l++) {
        ReferenceLayer *a = &x.layers[l];
        r[l] = reference_routing_create(moe, B, T, C, F);
        reference_half_forward(ref, l, a, B, T);
        losses += reference_moe_forward(moe, a->fcproj, &r[l], a->ln2,
                                        reference_experts(ref, ref->params, l), B, T, C, F);
        reference_dropout(a->fcproj, dropout_for(ref->dropout, DROPOUT_FCPROJ, l), B, T, C);
        reference_residual_forward(a->residual3, a->residual2, a->fcproj, N * C);
    }
    reference_layernorm_forward(x.lnf, x.lnf_mean, x.lnf_rstd, last, w[LNFW], w[LNFB], N,
                                C);
    reference_classifier_forward(x.losses, x.probs, x.lnf, w[WTE], targets, N, C, V);
    for (size_t n = 0; n < N; n++) loss += x.losses[n];
    if (extra) *extra = losses;

    if (scale != 0) {
        reference_classifier_backward(d.lnf, g[WTE], x.probs, x.lnf, w[WTE], targets, scale,
                                      N, C, V);
        reference_layernorm_backward(d.layers[L].residual1, g[LNFW], g[LNFB], d.lnf, last,
                                     w[LNFW], x.lnf_mean, x.lnf_rstd, N, C);
        for (size_t l = L; l-- > 0;) {
            ReferenceLayer *a = &x.layers[l], *da = &d.layers[l];
            reference_residual_backward(da->residual2, da->fcproj, da->residual3, N * C);
            reference_dropout(da->fcproj, dropout_for(ref->dropout, DROPOUT_FCPROJ, l), B,
                              T, C);
            reference_moe_backward(
                moe, da->ln2, reference_experts(ref, ref->grads, l), da->fcproj, &r[l],
                a->ln2, reference_experts(ref, ref->params, l), scale, B, T, C, F);
            reference_half_backward(ref, l, a, da, B, T);
        }
        reference_dropout(d.layers[0].residual1,
                          dropout_for(ref->dropout, DROPOUT_EMBEDDING, 0), B, T, C);
        reference_encoder_backward(g[WTE], g[WPE], d.layers[0].residual1, tokens, B, T, C,
                                   NULL);
    }
    for (size_t l = 0; l < L; l++) reference_routing_free(&r[l]);
    free(r);
    reference_pass_free(&x);
    reference_pass_free(&d);
    return loss;
}

#endif
