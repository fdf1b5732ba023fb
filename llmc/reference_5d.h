// reference_5d.h: loss and gradients of llmc/model_5d.h's models, in plain C loops and
// fp64.
// lesson: 5d
//
// The first half of a layer is in reference_llama.h, the router in reference_moe.h.
// Experts compute for one token at a time.
#ifndef LLMC_REFERENCE_5D_H
#define LLMC_REFERENCE_5D_H

#include "llmc/model_5d.h"
#include "llmc/reference_llama.h"
#include "llmc/reference_moe.h"

// Returns gate, up or down (part 0, 1 or 2) of expert e of layer l in params or grads.
static inline double *reference_expert(const Reference *ref, double *buffer, size_t l,
                                       size_t e, size_t part) {
    return buffer + (table_find(&ref->table, FCW, l) + 3 * e + part)->offset;
}

// out [N,C] = inp + the experts of ln2 [N,C]. Returns the sum of the two losses.
static inline double reference_experts_forward(const Reference *ref,
                                               const ReferenceMoe *moe, ReferenceRouting *r,
                                               size_t l, double *out, const double *inp,
                                               const double *ln2, size_t B, size_t T) {
    const Llama *m = llama_of(&ref->config);
    size_t C = ref->config.C, F = m->F, k = moe->k;
    const double *router = ref->params + table_find(&ref->table, ROUTER, l)->offset;
    reference_route(moe, r, ln2, router, B, T, C);
    for (size_t i = 0; i < B * T * C; i++) out[i] = inp[i];
    for (size_t x = 0; x < B * T * k; x++) {
        const double *token = ln2 + x / k * C;
        double *w[3], *y = r->out + x * C;
        for (size_t i = 0; i < 3; i++)
            w[i] = reference_expert(ref, ref->params, l, r->choice[x], i);
        if (!r->kept[x]) continue;
        double *fc = r->fc + x * 2 * F, *act = r->gelu + x * F;
        reference_linear_forward(fc, 2 * F, token, w[0], NULL, 1, C, F);
        reference_linear_forward(fc + F, 2 * F, token, w[1], NULL, 1, C, F);
        reference_activation(m, act, fc, NULL, NULL, 1);
        reference_linear_forward(y, C, act, w[2], NULL, 1, F, C);
        for (size_t c = 0; c < C; c++) out[x / k * C + c] += r->weight[x] * y[c];
    }
    return reference_route_losses(moe, r, B * T, T);
}

// Adds to dln2 [N,C] and to the gradients of the experts and their router, from dout [N,C].
static inline void reference_experts_backward(Reference *ref, const ReferenceMoe *moe,
                                              const ReferenceRouting *r, size_t l,
                                              double *dln2, const double *dout,
                                              const double *ln2, double scale, size_t B,
                                              size_t T) {
    const Llama *m = llama_of(&ref->config);
    size_t C = ref->config.C, F = m->F, k = moe->k;
    size_t router = table_find(&ref->table, ROUTER, l)->offset;
    double *dweight = reference_allocate(k), *dy = reference_allocate(C);
    double *row = reference_allocate(3 * F);
    for (size_t n = 0; n < B * T; n++) {
        const double *token = ln2 + n * C;
        for (size_t x = n * k; x < (n + 1) * k; x++) {
            double *w[3], *g[3], *dact = row, *dfc = row + F;
            for (size_t i = 0; i < 3; i++) {
                w[i] = reference_expert(ref, ref->params, l, r->choice[x], i);
                g[i] = reference_expert(ref, ref->grads, l, r->choice[x], i);
            }
            dweight[x % k] = 0;
            if (!r->kept[x]) continue;
            for (size_t c = 0; c < C; c++) {
                dweight[x % k] += dout[n * C + c] * r->out[x * C + c];
                dy[c] = r->weight[x] * dout[n * C + c];
            }
            memset(row, 0, 3 * F * sizeof(double));
            reference_linear_backward(dact, g[2], NULL, dy, C, r->gelu + x * F, w[2], 1, F,
                                      C);
            reference_activation(m, NULL, r->fc + x * 2 * F, dfc, dact, 1);
            for (size_t i = 0; i < 2; i++)
                reference_linear_backward(dln2 + n * C, g[i], NULL, dfc + i * F, 2 * F, token,
                                          w[i], 1, C, F);
        }
        reference_route_backward(moe, dln2 + n * C, ref->grads + router, dweight, r, token,
                                 ref->params + router, scale, n, T, C);
    }
    free(dweight);
    free(dy);
    free(row);
}

// Does as reference_llama_loss, for layers of experts. Sets *extra, unless it is NULL, to
// the sum of the router's two losses over all layers. Their gradient is part of
// ref->grads.
static inline double reference_5d_loss(Reference *ref, const ReferenceMoe *moe,
                                       const int *tokens, const int *targets, size_t B,
                                       size_t T, double scale, double *extra) {
    const Llama *m = llama_of(&ref->config);
    size_t N = B * T, L = ref->config.L, C = ref->config.C, V = ref->config.V;
    int head = m->tied ? (int)WTE : (int)HEADW;
    double *w[LLAMA_KINDS], *g[LLAMA_KINDS], loss = 0, more = 0;
    ReferenceBlock *x = (ReferenceBlock *)host_alloc(L + 1, sizeof *x);
    ReferenceBlock *d = (ReferenceBlock *)host_alloc(L + 1, sizeof *d);
    ReferenceRouting *r = (ReferenceRouting *)host_alloc(L, sizeof *r);
    double *memory = reference_blocks(x, m, &ref->config, B, T), *gradients = NULL;
    double *lnf = reference_allocate(N * C), *dlnf = reference_allocate(N * C);
    double *probs = reference_allocate(N * V), *losses = reference_allocate(N);
    reference_llama_find(ref, ref->params, 0, w);
    reference_llama_find(ref, ref->grads, 0, g);
    for (size_t i = 0; i < N * C; i++)
        x[0].x[i] = w[WTE][(size_t)tokens[i / C] * C + i % C];
    for (size_t l = 0; l < L; l++) {
        r[l] = reference_routing_create(moe, B, T, C, 2 * m->F);
        reference_first_half_forward(ref, l, &x[l], B, T);
        more += reference_experts_forward(ref, moe, &r[l], l, x[l + 1].x, x[l].mid, x[l].ln2,
                                          B, T);
    }
    reference_norm_forward(m, lnf, x[L].x, w[LNFW], w[LNFB], N, C);
    reference_classifier_forward(losses, probs, lnf, w[head], targets, N, C, V);
    for (size_t n = 0; n < N; n++) loss += losses[n];
    if (extra) *extra = more;
    if (scale != 0) {
        gradients = reference_blocks(d, m, &ref->config, B, T);
        reference_classifier_backward(dlnf, g[head], probs, lnf, w[head], targets, scale, N,
                                      C, V);
        reference_norm_backward(m, d[L].x, g[LNFW], g[LNFB], dlnf, x[L].x, w[LNFW], N, C);
        for (size_t l = L; l-- > 0;) {
            const double *dout = d[l + 1].x;
            for (size_t i = 0; i < N * C; i++) d[l].mid[i] += dout[i];
            reference_experts_backward(ref, moe, &r[l], l, d[l].ln2, dout, x[l].ln2, scale, B,
                                       T);
            reference_first_half_backward(ref, l, &x[l], &d[l], B, T);
        }
        for (size_t i = 0; i < N * C; i++)
            g[WTE][(size_t)tokens[i / C] * C + i % C] += d[0].x[i];
    }
    for (size_t l = 0; l < L; l++) reference_routing_free(&r[l]);
    free(r);
    free(memory);
    free(gradients);
    free(x);
    free(d);
    free(lnf);
    free(dlnf);
    free(probs);
    free(losses);
    return loss;
}

#endif
