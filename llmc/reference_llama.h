// reference_llama.h: loss and gradients of llmc/llama.h's models, in plain C loops and
// fp64.
// lesson: llama
//
// It shares reference.h's Reference, whose table comes from the Llama in config.spec.
// Weights are [out, in], and every backward function adds to its gradients.
#ifndef LLMC_REFERENCE_LLAMA_H
#define LLMC_REFERENCE_LLAMA_H

#include "llmc/host/first_keys.h"
#include "llmc/llama.h"
#include "llmc/reference.h"

// RMSNorm: out [N,C] = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + epsilon). LayerNorm1P
// (Nemotron): of the centred row, times weight + 1, plus bias.
static inline void reference_norm_forward(const Llama *m, double *out, const double *inp,
                                          const double *weight, const double *bias,
                                          size_t N, size_t C) {
    for (size_t n = 0; n < N; n++) {
        const double *x = inp + n * C;
        double mean = 0, squares = 0;
        for (size_t c = 0; c < C && m->type == NEMOTRON; c++) mean += x[c] / (double)C;
        for (size_t c = 0; c < C; c++) squares += (x[c] - mean) * (x[c] - mean);
        double rstd = 1 / sqrt(squares / (double)C + m->epsilon);
        for (size_t c = 0; c < C; c++) {
            double norm = (x[c] - mean) * rstd;
            out[n * C + c] = m->type == NEMOTRON ? norm * (weight[c] + 1) + bias[c]
                                                 : norm * weight[c];
        }
    }
}

static inline void reference_norm_backward(const Llama *m, double *dinp, double *dweight,
                                           double *dbias, const double *dout,
                                           const double *inp, const double *weight,
                                           size_t N, size_t C) {
    bool centred = m->type == NEMOTRON;
    for (size_t n = 0; n < N; n++) {
        const double *x = inp + n * C, *dy = dout + n * C;
        double mean = 0, squares = 0, dnorm_mean = 0, dnorm_norm_mean = 0;
        for (size_t c = 0; c < C && centred; c++) mean += x[c] / (double)C;
        for (size_t c = 0; c < C; c++) squares += (x[c] - mean) * (x[c] - mean);
        double rstd = 1 / sqrt(squares / (double)C + m->epsilon);
        for (size_t c = 0; c < C; c++) {
            double norm = (x[c] - mean) * rstd;
            double dnorm = dy[c] * (centred ? weight[c] + 1 : weight[c]);
            if (centred) dnorm_mean += dnorm / (double)C;
            dnorm_norm_mean += dnorm * norm / (double)C;
            dweight[c] += dy[c] * norm;
            if (centred) dbias[c] += dy[c];
        }
        for (size_t c = 0; c < C; c++) {
            double norm = (x[c] - mean) * rstd;
            double dnorm = dy[c] * (centred ? weight[c] + 1 : weight[c]);
            dinp[n * C + c] += rstd * (dnorm - dnorm_mean - norm * dnorm_norm_mean);
        }
    }
}

// RMSNorm of each head of rows `stride` apart: x [N, heads, HS] -> out, weight [HS].
static inline void reference_head_norm_forward(const Llama *m, double *out, const double *x,
                                               const double *weight, size_t N, size_t heads,
                                               size_t stride) {
    for (size_t n = 0; n < N; n++)
        reference_norm_forward(m, out + n * stride, x + n * stride, weight, NULL, heads,
                               m->HS);
}

static inline void reference_head_norm_backward(const Llama *m, double *dx, double *dweight,
                                                const double *dout, const double *x,
                                                const double *weight, size_t N,
                                                size_t heads, size_t stride) {
    for (size_t n = 0; n < N; n++)
        reference_norm_backward(m, dx + n * stride, dweight, NULL, dout + n * stride,
                                x + n * stride, weight, heads, m->HS);
}

// out [N,OC], of rows `stride` apart, = inp [N,IC] weight [OC,IC]^T + bias [OC], which may
// be NULL.
static inline void reference_linear_forward(double *out, size_t stride, const double *inp,
                                            const double *weight, const double *bias,
                                            size_t N, size_t IC, size_t OC) {
    for (size_t n = 0; n < N; n++) {
        for (size_t o = 0; o < OC; o++) {
            double sum = bias ? bias[o] : 0;
            for (size_t i = 0; i < IC; i++) sum += inp[n * IC + i] * weight[o * IC + i];
            out[n * stride + o] = sum;
        }
    }
}

static inline void reference_linear_backward(double *dinp, double *dweight, double *dbias,
                                             const double *dout, size_t stride,
                                             const double *inp, const double *weight,
                                             size_t N, size_t IC, size_t OC) {
    for (size_t n = 0; n < N; n++) {
        for (size_t o = 0; o < OC; o++) {
            double dy = dout[n * stride + o];
            if (dbias) dbias[o] += dy;
            for (size_t i = 0; i < IC; i++) {
                dinp[n * IC + i] += dy * weight[o * IC + i];
                dweight[o * IC + i] += dy * inp[n * IC + i];
            }
        }
    }
}

// RoPE in place on `heads` heads of each row: pair (i, i + D/2) turns by its angle,
// backwards with sign -1.
static inline void reference_rope(const Llama *m, double *x, size_t N, size_t T,
                                  size_t heads, size_t HS, size_t stride, double sign) {
    size_t D = llama_rotary(m, HS);
    for (size_t n = 0; n < N; n++) {
        for (size_t h = 0; h < heads; h++) {
            for (size_t i = 0; i < D / 2; i++) {
                double angle = sign * (double)(n % T) * llama_frequency(m, i, D);
                double *a = x + n * stride + h * HS + i, *b = a + D / 2, y = *a;
                *a = y * cos(angle) - *b * sin(angle);
                *b = *b * cos(angle) + y * sin(angle);
            }
        }
    }
}

// Causal attention over qkv [N, NH + 2 KV, HS]: out [N,NH,HS], att [B,NH,T,T]. Query head h
// reads key head h / (NH/KV). With dout, adds to dqkv instead and leaves out as it is.
// first[B,T], unless it is NULL, has the first key that each query sees.
static inline void reference_groups(double *out, double *att, const double *qkv,
                                    double *dqkv, const double *dout, size_t B, size_t T,
                                    size_t NH, size_t KV, size_t HS,
                                    const int *first) {
    size_t S = (NH + 2 * KV) * HS;
    double scale = 1 / sqrt((double)HS);
    for (size_t i = 0; i < B * NH * T; i++) {
        size_t b = i / T / NH, h = i / T % NH, t = i % T, query = (b * T + t) * S + h * HS;
        size_t first_key = b * T * S + (NH + h / (NH / KV)) * HS;
        size_t at = ((b * T + t) * NH + h) * HS, begin = reference_first(first, b * T + t);
        double *row = att + i * T, max = -INFINITY, sum = 0, mean = 0;
        for (size_t s = begin; s <= t && !dout; s++) {
            row[s] = 0;
            for (size_t j = 0; j < HS; j++)
                row[s] += scale * qkv[query + j] * qkv[first_key + s * S + j];
            if (row[s] > max) max = row[s];
        }
        for (size_t s = begin; s <= t && !dout; s++) sum += row[s] = exp(row[s] - max);
        for (size_t j = 0; j < HS && !dout; j++) out[at + j] = 0;
        for (size_t pass = 0; pass < 2; pass++) {
            for (size_t s = begin; s <= t; s++) {
                size_t key = first_key + s * S, value = key + KV * HS;
                double drow = 0;
                if (!dout && pass == 0) row[s] /= sum;
                for (size_t j = 0; j < HS && !dout && pass == 1; j++)
                    out[at + j] += row[s] * qkv[value + j];
                for (size_t j = 0; j < HS && dout; j++)
                    drow += dout[at + j] * qkv[value + j];
                if (pass == 0) mean += row[s] * drow;
                double dscore = row[s] * (drow - mean) * scale;
                for (size_t j = 0; j < HS && dout && pass == 1; j++) {
                    dqkv[query + j] += dscore * qkv[key + j];
                    dqkv[key + j] += dscore * qkv[query + j];
                    dqkv[value + j] += row[s] * dout[at + j];
                }
            }
        }
    }
}

// out [N,F]: silu(gate) * up of fc [N, 2F], or relu^2 of fc [N,F]. With dout, adds to dfc
// instead.
static inline void reference_activation(const Llama *m, double *out, const double *fc,
                                        double *dfc, const double *dout, size_t N) {
    size_t F = m->F;
    for (size_t i = 0; i < N * F; i++) {
        size_t gate = m->type == NEMOTRON ? i : i / F * 2 * F + i % F, up = gate + F;
        double g = fc[gate], s = 1 / (1 + exp(-g)), positive = g > 0 ? g : 0;
        if (m->type == NEMOTRON && !dout)
            out[i] = positive * positive;
        else if (m->type == NEMOTRON)
            dfc[gate] += dout[i] * 2 * positive;
        else if (!dout)
            out[i] = g * s * fc[up];
        else {
            dfc[gate] += dout[i] * fc[up] * s * (1 + g * (1 - s));
            dfc[up] += dout[i] * g * s;
        }
    }
}

// ---- the model -------------------------------------------------------------------------

// The activations of one layer, or their gradients; layers[L].x is the input of the last
// norm.
typedef struct {
    double *x;  // [N,C] input of the layer
    double *ln1, *raw, *qkv;   // [N,C], [N,S] before the norms of q and k, [N,S]
    double *att, *atty, *mid;  // [B,NH,T,T], [N,A], [N,C] the stream after attention
    double *ln2, *fc, *act;  // [N,C], [N,2F] or [N,F], [N,F]
} ReferenceBlock;

static inline double *reference_blocks(ReferenceBlock *blocks, const Llama *m,
                                       const GPTConfig *g, size_t B, size_t T) {
    size_t N = B * T, C = g->C, A = g->NH * m->HS, S = A + 2 * m->KV * m->HS;
    size_t layer = N * (4 * C + A + 2 * S + g->NH * T + 3 * m->F);
    double *memory = reference_allocate((g->L + 1) * layer), *p = memory;
    for (size_t l = 0; l <= g->L; l++) {
        ReferenceBlock *x = &blocks[l];
        x->x = reference_take(&p, N * C);
        x->ln1 = reference_take(&p, N * C);
        x->raw = reference_take(&p, N * S);
        x->qkv = reference_take(&p, N * S);
        x->att = reference_take(&p, N * g->NH * T);
        x->atty = reference_take(&p, N * A);
        x->mid = reference_take(&p, N * C);
        x->ln2 = reference_take(&p, N * C);
        x->fc = reference_take(&p, 2 * N * m->F);
        x->act = reference_take(&p, N * m->F);
    }
    return memory;
}

// Sets at[kind] to the place of the tensor in params or grads, or to NULL if the model
// has none of the kind.
static inline void reference_llama_find(const Reference *ref, double *buffer, size_t l,
                                        double *at[LLAMA_KINDS]) {
    for (int k = 0; k < LLAMA_KINDS; k++) {
        const Tensor *x = table_find(&ref->table, k, l);
        at[k] = x ? buffer + x->offset : NULL;
    }
}

// Runs the first half of a layer, up to the norm before the MLP.
static inline void reference_first_half_forward(const Reference *ref, size_t l,
                                                ReferenceBlock *x, size_t B, size_t T) {
    const Llama *m = llama_of(&ref->config);
    size_t N = B * T, C = ref->config.C, NH = ref->config.NH, HS = m->HS;
    size_t A = NH * HS, K = m->KV * HS, S = A + 2 * K;
    double *w[LLAMA_KINDS];
    reference_llama_find(ref, ref->params, l, w);
    reference_norm_forward(m, x->ln1, x->x, w[LN1W], w[LN1B], N, C);
    reference_linear_forward(x->raw, S, x->ln1, w[QKVW], w[QKVB], N, C, A);
    reference_linear_forward(x->raw + A, S, x->ln1, w[KW], w[KB], N, C, K);
    reference_linear_forward(x->raw + A + K, S, x->ln1, w[VW], w[VB], N, C, K);
    memcpy(x->qkv, x->raw, N * S * sizeof(double));
    if (w[QNORMW]) {
        reference_head_norm_forward(m, x->qkv, x->raw, w[QNORMW], N, NH, S);
        reference_head_norm_forward(m, x->qkv + A, x->raw + A, w[KNORMW], N, m->KV, S);
    }
    reference_rope(m, x->qkv, N, T, NH + m->KV, HS, S, 1);
    reference_groups(x->atty, x->att, x->qkv, NULL, NULL, B, T, NH, m->KV, HS,
                     ref->first);
    reference_linear_forward(x->mid, C, x->atty, w[PROJW], NULL, N, A, C);
    for (size_t i = 0; i < N * C; i++) x->mid[i] += x->x[i];
    reference_norm_forward(m, x->ln2, x->mid, w[LN2W], w[LN2B], N, C);
}

static inline void reference_block_forward(const Reference *ref, size_t l,
                                           ReferenceBlock *x, double *out, size_t B,
                                           size_t T) {
    const Llama *m = llama_of(&ref->config);
    size_t N = B * T, C = ref->config.C, F = m->F;
    size_t G = m->type == NEMOTRON ? 1 : 2;
    double *w[LLAMA_KINDS];
    reference_llama_find(ref, ref->params, l, w);
    reference_first_half_forward(ref, l, x, B, T);
    reference_linear_forward(x->fc, G * F, x->ln2, w[FCW], NULL, N, C, F);
    if (G == 2) reference_linear_forward(x->fc + F, G * F, x->ln2, w[UPW], NULL, N, C, F);
    reference_activation(m, x->act, x->fc, NULL, NULL, N);
    reference_linear_forward(out, C, x->act, w[FCPROJW], NULL, N, F, C);
    for (size_t i = 0; i < N * C; i++) out[i] += x->mid[i];
}

// Runs the first half backward, from d->ln2 and from d->mid, the gradient that goes past
// the MLP.
static inline void reference_first_half_backward(Reference *ref, size_t l,
                                                 const ReferenceBlock *x,
                                                 ReferenceBlock *d, size_t B, size_t T) {
    const Llama *m = llama_of(&ref->config);
    size_t N = B * T, C = ref->config.C, NH = ref->config.NH, HS = m->HS;
    size_t A = NH * HS, K = m->KV * HS, S = A + 2 * K;
    double *w[LLAMA_KINDS], *g[LLAMA_KINDS];
    reference_llama_find(ref, ref->params, l, w);
    reference_llama_find(ref, ref->grads, l, g);
    reference_norm_backward(m, d->mid, g[LN2W], g[LN2B], d->ln2, x->mid, w[LN2W], N, C);
    for (size_t i = 0; i < N * C; i++) d->x[i] += d->mid[i];
    reference_linear_backward(d->atty, g[PROJW], NULL, d->mid, C, x->atty, w[PROJW], N, A,
                              C);
    reference_groups(NULL, x->att, x->qkv, d->qkv, d->atty, B, T, NH, m->KV, HS,
                     ref->first);
    reference_rope(m, d->qkv, N, T, NH + m->KV, HS, S, -1);
    if (w[QNORMW]) {
        reference_head_norm_backward(m, d->raw, g[QNORMW], d->qkv, x->raw, w[QNORMW], N, NH,
                                     S);
        reference_head_norm_backward(m, d->raw + A, g[KNORMW], d->qkv + A, x->raw + A,
                                     w[KNORMW], N, m->KV, S);
    } else
        memcpy(d->raw, d->qkv, N * S * sizeof(double));
    for (size_t n = 0; n < N; n++)
        memcpy(d->raw + n * S + A + K, d->qkv + n * S + A + K, K * sizeof(double));
    reference_linear_backward(d->ln1, g[QKVW], g[QKVB], d->raw, S, x->ln1, w[QKVW], N, C,
                              A);
    reference_linear_backward(d->ln1, g[KW], g[KB], d->raw + A, S, x->ln1, w[KW], N, C, K);
    reference_linear_backward(d->ln1, g[VW], g[VB], d->raw + A + K, S, x->ln1, w[VW], N, C,
                              K);
    reference_norm_backward(m, d->x, g[LN1W], g[LN1B], d->ln1, x->x, w[LN1W], N, C);
}

// dout [N,C] is the gradient of the output. Leaves the gradient of the input in d->x. d
// is zero before.
static inline void reference_block_backward(Reference *ref, size_t l,
                                            const ReferenceBlock *x, ReferenceBlock *d,
                                            const double *dout, size_t B, size_t T) {
    const Llama *m = llama_of(&ref->config);
    size_t N = B * T, C = ref->config.C, F = m->F;
    size_t G = m->type == NEMOTRON ? 1 : 2;
    double *w[LLAMA_KINDS], *g[LLAMA_KINDS];
    reference_llama_find(ref, ref->params, l, w);
    reference_llama_find(ref, ref->grads, l, g);
    for (size_t i = 0; i < N * C; i++) d->mid[i] += dout[i];
    reference_linear_backward(d->act, g[FCPROJW], NULL, dout, C, x->act, w[FCPROJW], N, F,
                              C);
    reference_activation(m, NULL, x->fc, d->fc, d->act, N);
    reference_linear_backward(d->ln2, g[FCW], NULL, d->fc, G * F, x->ln2, w[FCW], N, C, F);
    if (G == 2)
        reference_linear_backward(d->ln2, g[UPW], NULL, d->fc + F, G * F, x->ln2, w[UPW], N,
                                  C, F);
    reference_first_half_backward(ref, l, x, d, B, T);
}

// Returns the sum of the losses of tokens -> targets (each [B,T]). Adds the gradient of
// scale * that sum to ref->grads. With scale 0 it runs the forward pass only. ref->first,
// unless it is NULL, has the beginning of each token's document.
static inline double reference_llama_loss(Reference *ref, const int *tokens,
                                          const int *targets, size_t B, size_t T,
                                          double scale) {
    const Llama *m = llama_of(&ref->config);
    size_t N = B * T, L = ref->config.L, C = ref->config.C, V = ref->config.V;
    int head = m->tied ? (int)WTE : (int)HEADW;
    double *w[LLAMA_KINDS], *g[LLAMA_KINDS], loss = 0;
    ReferenceBlock *x = (ReferenceBlock *)host_alloc(L + 1, sizeof *x);
    ReferenceBlock *d = (ReferenceBlock *)host_alloc(L + 1, sizeof *d);
    double *memory = reference_blocks(x, m, &ref->config, B, T), *gradients = NULL;
    double *lnf = reference_allocate(N * C), *dlnf = reference_allocate(N * C);
    double *probs = reference_allocate(N * V), *losses = reference_allocate(N);
    int *first = (int *)host_alloc(N, sizeof *first);
    const int *documents = ref->first;
    for (size_t b = 0; b < B; b++)
        window_keys(first + b * T, documents ? documents + b * T : NULL, T, m->window);
    ref->first = first;
    reference_llama_find(ref, ref->params, 0, w);
    reference_llama_find(ref, ref->grads, 0, g);
    for (size_t i = 0; i < N * C; i++)
        x[0].x[i] = w[WTE][(size_t)tokens[i / C] * C + i % C];
    for (size_t l = 0; l < L; l++) reference_block_forward(ref, l, &x[l], x[l + 1].x, B, T);
    reference_norm_forward(m, lnf, x[L].x, w[LNFW], w[LNFB], N, C);
    reference_classifier_forward(losses, probs, lnf, w[head], targets, N, C, V);
    for (size_t n = 0; n < N; n++) loss += losses[n];
    if (scale != 0) {
        gradients = reference_blocks(d, m, &ref->config, B, T);
        reference_classifier_backward(dlnf, g[head], probs, lnf, w[head], targets, scale, N,
                                      C, V);
        reference_norm_backward(m, d[L].x, g[LNFW], g[LNFB], dlnf, x[L].x, w[LNFW], N, C);
        for (size_t l = L; l-- > 0;)
            reference_block_backward(ref, l, &x[l], &d[l], d[l + 1].x, B, T);
        for (size_t i = 0; i < N * C; i++)
            g[WTE][(size_t)tokens[i / C] * C + i % C] += d[0].x[i];
    }
    ref->first = documents;
    free(first);
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
