// reference.h: GPT-2 in plain C loops and fp64: forward, backward and AdamW. Every test compares with it.
//
// Read it top to bottom: a pair of functions for each kind of layer, then the model that calls them in order. Nothing
// here is fast, and nothing knows about devices, ranks or padding. Matrices are row-major; weights are stored [in,
// out]. N = B * T counts the tokens of the batch. Every backward function ADDS to its gradients, so that a value used
// twice (a residual, the tied embedding, a second micro-batch) needs no care.
#ifndef LLMC_REFERENCE_H
#define LLMC_REFERENCE_H

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/model.h"

static const double REFERENCE_LAYERNORM_EPS = 1e-5;

// ---- the layers -----------------------------------------------------------------------------------------

// out [B,T,C] = wte[token] + wpe[position]; wte [V,C], wpe [maxT,C].
static inline void reference_encoder_forward(double *out, const int *tokens, const double *wte,
                                             const double *wpe, size_t B, size_t T, size_t C) {
    for (size_t n = 0; n < B * T; n++) {
        const double *token = wte + (size_t)tokens[n] * C, *position = wpe + (n % T) * C;
        for (size_t c = 0; c < C; c++) out[n * C + c] = token[c] + position[c];
    }
}

static inline void reference_encoder_backward(double *dwte, double *dwpe, const double *dout,
                                              const int *tokens, size_t B, size_t T, size_t C) {
    for (size_t n = 0; n < B * T; n++) {
        double *dtoken = dwte + (size_t)tokens[n] * C, *dposition = dwpe + (n % T) * C;
        for (size_t c = 0; c < C; c++) {
            dtoken[c] += dout[n * C + c];
            dposition[c] += dout[n * C + c];
        }
    }
}

// Each row of inp [N,C] is brought to mean 0 and variance 1, then scaled and shifted: out [N,C].
static inline void reference_layernorm_forward(double *out, double *mean /*[N]*/, double *rstd /*[N]*/,
                                               const double *inp, const double *weight, const double *bias,
                                               size_t N, size_t C) {
    for (size_t n = 0; n < N; n++) {
        const double *x = inp + n * C;
        double sum = 0, squares = 0;
        for (size_t c = 0; c < C; c++) sum += x[c];
        mean[n] = sum / (double)C;
        for (size_t c = 0; c < C; c++) squares += (x[c] - mean[n]) * (x[c] - mean[n]);
        rstd[n] = 1.0 / sqrt(squares / (double)C + REFERENCE_LAYERNORM_EPS);
        for (size_t c = 0; c < C; c++) out[n * C + c] = (x[c] - mean[n]) * rstd[n] * weight[c] + bias[c];
    }
}

static inline void reference_layernorm_backward(double *dinp, double *dweight, double *dbias,
                                                const double *dout, const double *inp, const double *weight,
                                                const double *mean, const double *rstd, size_t N, size_t C) {
    for (size_t n = 0; n < N; n++) {
        const double *x = inp + n * C, *dy = dout + n * C;
        double dnorm_mean = 0, dnorm_norm_mean = 0;  // means over c of dnorm and of dnorm * norm
        for (size_t c = 0; c < C; c++) {
            double norm = (x[c] - mean[n]) * rstd[n], dnorm = dy[c] * weight[c];
            dnorm_mean += dnorm / (double)C;
            dnorm_norm_mean += dnorm * norm / (double)C;
        }
        for (size_t c = 0; c < C; c++) {
            double norm = (x[c] - mean[n]) * rstd[n], dnorm = dy[c] * weight[c];
            dweight[c] += dy[c] * norm;
            dbias[c] += dy[c];
            // The last two terms: moving x[c] also moves the row's mean and its variance.
            dinp[n * C + c] += rstd[n] * (dnorm - dnorm_mean - norm * dnorm_norm_mean);
        }
    }
}

// out [N,OC] = inp [N,IC] weight [IC,OC] + bias [OC].
static inline void reference_matmul_forward(double *out, const double *inp, const double *weight,
                                            const double *bias, size_t N, size_t IC, size_t OC) {
    for (size_t n = 0; n < N; n++) {
        double *y = out + n * OC;
        for (size_t o = 0; o < OC; o++) y[o] = bias[o];
        for (size_t i = 0; i < IC; i++) {
            double x = inp[n * IC + i];
            for (size_t o = 0; o < OC; o++) y[o] += x * weight[i * OC + o];
        }
    }
}

static inline void reference_matmul_backward(double *dinp, double *dweight, double *dbias,
                                             const double *dout, const double *inp, const double *weight,
                                             size_t N, size_t IC, size_t OC) {
    for (size_t n = 0; n < N; n++) {
        const double *dy = dout + n * OC;
        for (size_t o = 0; o < OC; o++) dbias[o] += dy[o];
        for (size_t i = 0; i < IC; i++) {
            double x = inp[n * IC + i], sum = 0;
            for (size_t o = 0; o < OC; o++) {
                sum += dy[o] * weight[i * OC + o];
                dweight[i * OC + o] += x * dy[o];
            }
            dinp[n * IC + i] += sum;
        }
    }
}

// Causal self-attention. qkv [B,T,3,NH,HS] -> out [B,T,NH,HS]; att [B,NH,T,T] keeps the softmax for backward.
static inline void reference_attention_forward(double *out, double *att, const double *qkv,
                                               size_t B, size_t T, size_t C, size_t NH) {
    size_t HS = C / NH;
    double scale = 1.0 / sqrt((double)HS);
    for (size_t b = 0; b < B; b++) {
        for (size_t h = 0; h < NH; h++) {
            for (size_t t = 0; t < T; t++) {
                const double *query = qkv + (b * T + t) * 3 * C + h * HS;
                double *row = att + ((b * NH + h) * T + t) * T, *y = out + (b * T + t) * C + h * HS;
                double max = -INFINITY, sum = 0;
                for (size_t s = 0; s <= t; s++) {  // a token sees itself and what came before it
                    const double *key = qkv + (b * T + s) * 3 * C + C + h * HS;
                    double dot = 0;
                    for (size_t i = 0; i < HS; i++) dot += query[i] * key[i];
                    row[s] = dot * scale;
                    if (row[s] > max) max = row[s];
                }
                for (size_t s = 0; s <= t; s++) sum += row[s] = exp(row[s] - max);
                for (size_t i = 0; i < HS; i++) y[i] = 0;
                for (size_t s = 0; s <= t; s++) {
                    const double *value = qkv + (b * T + s) * 3 * C + 2 * C + h * HS;
                    row[s] /= sum;
                    for (size_t i = 0; i < HS; i++) y[i] += row[s] * value[i];
                }
            }
        }
    }
}

static inline void reference_attention_backward(double *dqkv, const double *dout, const double *qkv,
                                                const double *att, size_t B, size_t T, size_t C, size_t NH) {
    size_t HS = C / NH;
    double scale = 1.0 / sqrt((double)HS);
    for (size_t b = 0; b < B; b++) {
        for (size_t h = 0; h < NH; h++) {
            for (size_t t = 0; t < T; t++) {
                size_t at_query = (b * T + t) * 3 * C + h * HS;
                const double *row = att + ((b * NH + h) * T + t) * T, *dy = dout + (b * T + t) * C + h * HS;
                double mean = 0;  // sum over s of p[s] * dp[s], which the softmax's gradient subtracts
                for (size_t pass = 0; pass < 2; pass++) {
                    for (size_t s = 0; s <= t; s++) {
                        size_t at_key = (b * T + s) * 3 * C + C + h * HS, at_value = at_key + C;
                        double dp = 0;
                        for (size_t i = 0; i < HS; i++) dp += dy[i] * qkv[at_value + i];
                        if (pass == 0) {
                            mean += row[s] * dp;
                            continue;
                        }
                        double dscore = row[s] * (dp - mean) * scale;
                        for (size_t i = 0; i < HS; i++) {
                            dqkv[at_query + i] += dscore * qkv[at_key + i];
                            dqkv[at_key + i] += dscore * qkv[at_query + i];
                            dqkv[at_value + i] += row[s] * dy[i];
                        }
                    }
                }
            }
        }
    }
}

// GELU in its tanh form: x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))).
static inline void reference_gelu_forward(double *out, const double *inp, size_t n) {
    const double k = sqrt(2.0 / 3.14159265358979323846);
    for (size_t i = 0; i < n; i++) {
        double x = inp[i];
        out[i] = 0.5 * x * (1.0 + tanh(k * (x + 0.044715 * x * x * x)));
    }
}

static inline void reference_gelu_backward(double *dinp, const double *dout, const double *inp, size_t n) {
    const double k = sqrt(2.0 / 3.14159265358979323846);
    for (size_t i = 0; i < n; i++) {
        double x = inp[i], tanh_x = tanh(k * (x + 0.044715 * x * x * x));
        double slope = k * (1.0 + 3.0 * 0.044715 * x * x);  // of what stands inside the tanh
        dinp[i] += dout[i] * (0.5 * (1.0 + tanh_x) + 0.5 * x * (1.0 - tanh_x * tanh_x) * slope);
    }
}

// out [N,C] = a + b.
static inline void reference_residual_forward(double *out, const double *a, const double *b, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = a[i] + b[i];
}

static inline void reference_residual_backward(double *da, double *db, const double *dout, size_t n) {
    for (size_t i = 0; i < n; i++) da[i] += dout[i], db[i] += dout[i];
}

// The head (logits = inp wte^T, the embedding tied), softmax and cross-entropy: losses [N], probs [N,V].
static inline void reference_classifier_forward(double *losses, double *probs, const double *inp, const double *wte,
                                                const int *targets, size_t N, size_t C, size_t V) {
    for (size_t n = 0; n < N; n++) {
        double *row = probs + n * V, max = -INFINITY, sum = 0;
        for (size_t v = 0; v < V; v++) {
            row[v] = 0;
            for (size_t c = 0; c < C; c++) row[v] += inp[n * C + c] * wte[v * C + c];
            if (row[v] > max) max = row[v];
        }
        double target_logit = row[targets[n]];
        for (size_t v = 0; v < V; v++) sum += row[v] = exp(row[v] - max);
        for (size_t v = 0; v < V; v++) row[v] /= sum;
        losses[n] = log(sum) + max - target_logit;
    }
}

// The gradient of scale * sum(losses).
static inline void reference_classifier_backward(double *dinp, double *dwte, const double *probs,
                                                 const double *inp, const double *wte, const int *targets,
                                                 double scale, size_t N, size_t C, size_t V) {
    for (size_t n = 0; n < N; n++) {
        for (size_t v = 0; v < V; v++) {
            double dlogit = scale * (probs[n * V + v] - ((size_t)targets[n] == v ? 1.0 : 0.0));
            for (size_t c = 0; c < C; c++) {
                dinp[n * C + c] += dlogit * wte[v * C + c];
                dwte[v * C + c] += dlogit * inp[n * C + c];
            }
        }
    }
}

// ---- the model ------------------------------------------------------------------------------------------

typedef struct {
    GPTConfig config;
    ParamTable table;                // of the whole model: lays out params and the other three
    double *params, *grads, *m, *v;  // [table.total] each; the padding of the vocabulary stays 0
} Reference;

// What one layer computes, or the gradients of it, in the order of the computation.
typedef struct {
    double *ln1, *ln1_mean, *ln1_rstd;  // [N,C], [N], [N]
    double *qkv, *att, *atty, *proj;    // [N,3C], [B,NH,T,T], [N,C], [N,C]
    double *residual2;                  // [N,C] after attention
    double *ln2, *ln2_mean, *ln2_rstd;  // [N,C], [N], [N]
    double *fc, *gelu, *fcproj;         // [N,4C], [N,4C], [N,C]
    double *residual3;                  // [N,C] after the MLP: what the next layer reads
} ReferenceLayer;

static inline double *reference_allocate(size_t count) { return (double *)host_alloc(count, sizeof(double)); }

static inline Reference reference_create(const GPTConfig *config) {
    Reference ref;
    ref.config = *config;
    ref.table = table_make_whole(config);
    ref.params = reference_allocate(ref.table.total);
    ref.grads = reference_allocate(ref.table.total);
    ref.m = reference_allocate(ref.table.total);
    ref.v = reference_allocate(ref.table.total);
    return ref;
}

static inline void reference_free(Reference *ref) {
    free(ref->params), free(ref->grads), free(ref->m), free(ref->v);
    table_free(&ref->table);
}

// All of a layer's buffers in one allocation, which starts at ln1.
static inline ReferenceLayer reference_layer_allocate(size_t B, size_t T, size_t C, size_t NH) {
    ReferenceLayer x;
    size_t N = B * T;
    double **fields[] = {&x.ln1, &x.ln1_mean, &x.ln1_rstd, &x.qkv, &x.att, &x.atty, &x.proj, &x.residual2,
                         &x.ln2, &x.ln2_mean, &x.ln2_rstd, &x.fc, &x.gelu, &x.fcproj, &x.residual3};
    size_t sizes[] = {N * C, N, N, N * 3 * C, B * NH * T * T, N * C, N * C, N * C,
                      N * C, N, N, N * 4 * C, N * 4 * C, N * C, N * C};
    size_t total = 0, count = sizeof sizes / sizeof *sizes;
    for (size_t i = 0; i < count; i++) total += sizes[i];
    double *p = reference_allocate(total);
    for (size_t i = 0; i < count; p += sizes[i++]) *fields[i] = p;
    return x;
}

static inline void reference_layer_forward(const Reference *ref, size_t l, ReferenceLayer *x,
                                           const double *residual, size_t B, size_t T) {
    const double *w[NUM_KINDS];  // this layer's parameters
    size_t N = B * T, C = ref->config.C, NH = ref->config.NH;
    for (int k = LN1W; k < LNFW; k++) w[k] = ref->params + table_offset(&ref->table, (TensorKind)k, l);
    reference_layernorm_forward(x->ln1, x->ln1_mean, x->ln1_rstd, residual, w[LN1W], w[LN1B], N, C);
    reference_matmul_forward(x->qkv, x->ln1, w[QKVW], w[QKVB], N, C, 3 * C);
    reference_attention_forward(x->atty, x->att, x->qkv, B, T, C, NH);
    reference_matmul_forward(x->proj, x->atty, w[PROJW], w[PROJB], N, C, C);
    reference_residual_forward(x->residual2, residual, x->proj, N * C);
    reference_layernorm_forward(x->ln2, x->ln2_mean, x->ln2_rstd, x->residual2, w[LN2W], w[LN2B], N, C);
    reference_matmul_forward(x->fc, x->ln2, w[FCW], w[FCB], N, C, 4 * C);
    reference_gelu_forward(x->gelu, x->fc, N * 4 * C);
    reference_matmul_forward(x->fcproj, x->gelu, w[FCPROJW], w[FCPROJB], N, 4 * C, C);
    reference_residual_forward(x->residual3, x->residual2, x->fcproj, N * C);
}

// d->residual3 holds the gradient that arrives; what leaves is added to dresidual. d is zero elsewhere.
static inline void reference_layer_backward(Reference *ref, size_t l, const ReferenceLayer *x, ReferenceLayer *d,
                                            const double *residual, double *dresidual, size_t B, size_t T) {
    const double *w[NUM_KINDS];
    double *g[NUM_KINDS];  // gradients of this layer's parameters
    size_t N = B * T, C = ref->config.C, NH = ref->config.NH;
    for (int k = LN1W; k < LNFW; k++) {
        size_t offset = table_offset(&ref->table, (TensorKind)k, l);
        w[k] = ref->params + offset;
        g[k] = ref->grads + offset;
    }
    reference_residual_backward(d->residual2, d->fcproj, d->residual3, N * C);
    reference_matmul_backward(d->gelu, g[FCPROJW], g[FCPROJB], d->fcproj, x->gelu, w[FCPROJW], N, 4 * C, C);
    reference_gelu_backward(d->fc, d->gelu, x->fc, N * 4 * C);
    reference_matmul_backward(d->ln2, g[FCW], g[FCB], d->fc, x->ln2, w[FCW], N, C, 4 * C);
    reference_layernorm_backward(d->residual2, g[LN2W], g[LN2B], d->ln2, x->residual2, w[LN2W],
                                 x->ln2_mean, x->ln2_rstd, N, C);
    reference_residual_backward(dresidual, d->proj, d->residual2, N * C);
    reference_matmul_backward(d->atty, g[PROJW], g[PROJB], d->proj, x->atty, w[PROJW], N, C, C);
    reference_attention_backward(d->qkv, d->atty, x->qkv, x->att, B, T, C, NH);
    reference_matmul_backward(d->ln1, g[QKVW], g[QKVB], d->qkv, x->ln1, w[QKVW], N, C, 3 * C);
    reference_layernorm_backward(dresidual, g[LN1W], g[LN1B], d->ln1, residual, w[LN1W],
                                 x->ln1_mean, x->ln1_rstd, N, C);
}

// Returns the sum of the losses of tokens -> targets (each [B,T], below V), and adds the gradient of
// scale * that sum to ref->grads. scale 0: forward only, the gradients stay as they are.
static inline double reference_loss_and_gradients(Reference *ref, const int *tokens, const int *targets,
                                                  size_t B, size_t T, double scale) {
    size_t N = B * T, L = ref->config.L, C = ref->config.C, NH = ref->config.NH, V = ref->config.V;
    size_t at_wte = table_offset(&ref->table, WTE, 0), at_wpe = table_offset(&ref->table, WPE, 0);
    size_t at_lnfw = table_offset(&ref->table, LNFW, 0), at_lnfb = table_offset(&ref->table, LNFB, 0);
    const double *wte = ref->params + at_wte, *wpe = ref->params + at_wpe, *lnfw = ref->params + at_lnfw;
    double *embedded = reference_allocate(4 * N * C + 3 * N + N * V);  // all that stands outside the layers
    double *lnf = embedded + N * C, *dembedded = lnf + N * C, *dlnf = dembedded + N * C;
    double *lnf_mean = dlnf + N * C, *lnf_rstd = lnf_mean + N, *losses = lnf_rstd + N, *probs = losses + N;
    ReferenceLayer *layers = (ReferenceLayer *)host_alloc(L, sizeof(ReferenceLayer));
    for (size_t l = 0; l < L; l++) layers[l] = reference_layer_allocate(B, T, C, NH);

    reference_encoder_forward(embedded, tokens, wte, wpe, B, T, C);
    const double *residual = embedded;
    for (size_t l = 0; l < L; l++) {
        reference_layer_forward(ref, l, &layers[l], residual, B, T);
        residual = layers[l].residual3;
    }
    reference_layernorm_forward(lnf, lnf_mean, lnf_rstd, residual, lnfw, ref->params + at_lnfb, N, C);
    reference_classifier_forward(losses, probs, lnf, wte, targets, N, C, V);
    double loss = 0;
    for (size_t n = 0; n < N; n++) loss += losses[n];

    if (scale != 0) {
        ReferenceLayer *dlayers = (ReferenceLayer *)host_alloc(L, sizeof(ReferenceLayer));
        for (size_t l = 0; l < L; l++) dlayers[l] = reference_layer_allocate(B, T, C, NH);
        reference_classifier_backward(dlnf, ref->grads + at_wte, probs, lnf, wte, targets, scale, N, C, V);
        reference_layernorm_backward(L ? dlayers[L - 1].residual3 : dembedded, ref->grads + at_lnfw,
                                     ref->grads + at_lnfb, dlnf, residual, lnfw, lnf_mean, lnf_rstd, N, C);
        for (size_t l = L; l-- > 0;) {
            reference_layer_backward(ref, l, &layers[l], &dlayers[l], l ? layers[l - 1].residual3 : embedded,
                                     l ? dlayers[l - 1].residual3 : dembedded, B, T);
        }
        reference_encoder_backward(ref->grads + at_wte, ref->grads + at_wpe, dembedded, tokens, B, T, C);
        for (size_t l = 0; l < L; l++) free(dlayers[l].ln1);
        free(dlayers);
    }

    for (size_t l = 0; l < L; l++) free(layers[l].ln1);
    free(layers);
    free(embedded);
    return loss;
}

// ---- the update -----------------------------------------------------------------------------------------

static inline void reference_zero_gradients(Reference *ref) {
    memset(ref->grads, 0, ref->table.total * sizeof(double));
}

// The L2 norm of all gradients together.
static inline double reference_gradient_norm(const Reference *ref) {
    double sum = 0;
    for (size_t i = 0; i < ref->table.total; i++) sum += ref->grads[i] * ref->grads[i];
    return sqrt(sum);
}

// One AdamW update; step counts from 1. Gradients are multiplied by grad_scale first (clipping: clip / norm
// where the norm exceeds clip, else 1); only the tensors that the table marks are decayed.
static inline void reference_adamw(Reference *ref, size_t step, double lr, double beta1, double beta2,
                                   double eps, double weight_decay, double grad_scale) {
    double correction1 = 1.0 - pow(beta1, (double)step), correction2 = 1.0 - pow(beta2, (double)step);
    for (size_t k = 0; k < ref->table.count; k++) {
        const Tensor *x = &ref->table.tensors[k];
        double decay = x->decay ? weight_decay : 0.0;
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
