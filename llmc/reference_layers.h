// reference_layers.h: each kind of layer in plain C loops and fp64, forward and backward;
// reference.h calls them.
//
// Nothing here is fast, and nothing knows about devices, ranks or padding. Matrices are
// row-major; weights are stored [in, out]. N = B * T counts the tokens of the batch. Every
// backward function ADDS to its gradients, so that a value used twice (a residual, the tied
// embedding, a second micro-batch) needs no care.
#ifndef LLMC_REFERENCE_LAYERS_H
#define LLMC_REFERENCE_LAYERS_H

#include <math.h>
#include <stddef.h>

#include "llmc/masks.h"

static const double REFERENCE_LAYERNORM_EPS = 1e-5;

// Returns the first position that the token of row n of [B,T] sees: 0 without `first`.
static inline size_t reference_first(const int *first, size_t n) {
    return first ? (size_t)first[n] : 0;
}

// out [B,T,C] = wte[token] + wpe[position]; wte [V,C], wpe [maxT,C]. With first[B,T]
// positions count from there: from the beginning of the token's document.
static inline void reference_encoder_forward(double *out, const int *tokens,
                                             const double *wte, const double *wpe, size_t B,
                                             size_t T, size_t C, const int *first) {
    for (size_t n = 0; n < B * T; n++) {
        const double *token = wte + (size_t)tokens[n] * C;
        const double *position = wpe + (n % T - reference_first(first, n)) * C;
        for (size_t c = 0; c < C; c++) out[n * C + c] = token[c] + position[c];
    }
}

static inline void reference_encoder_backward(double *dwte, double *dwpe,
                                              const double *dout, const int *tokens,
                                              size_t B, size_t T, size_t C,
                                              const int *first) {
    for (size_t n = 0; n < B * T; n++) {
        double *dtoken = dwte + (size_t)tokens[n] * C;
        double *dposition = dwpe + (n % T - reference_first(first, n)) * C;
        for (size_t c = 0; c < C; c++) {
            dtoken[c] += dout[n * C + c];
            dposition[c] += dout[n * C + c];
        }
    }
}

// Brings each row of inp [N,C] to mean 0 and variance 1, then scales and shifts it: out
// [N,C].
static inline void reference_layernorm_forward(double *out, double *mean /*[N]*/,
                                               double *rstd /*[N]*/, const double *inp,
                                               const double *weight, const double *bias,
                                               size_t N, size_t C) {
    for (size_t n = 0; n < N; n++) {
        const double *x = inp + n * C;
        double sum = 0, squares = 0;
        for (size_t c = 0; c < C; c++) sum += x[c];
        mean[n] = sum / (double)C;
        for (size_t c = 0; c < C; c++) squares += (x[c] - mean[n]) * (x[c] - mean[n]);
        rstd[n] = 1.0 / sqrt(squares / (double)C + REFERENCE_LAYERNORM_EPS);
        for (size_t c = 0; c < C; c++)
            out[n * C + c] = (x[c] - mean[n]) * rstd[n] * weight[c] + bias[c];
    }
}

static inline void reference_layernorm_backward(double *dinp, double *dweight,
                                                double *dbias, const double *dout,
                                                const double *inp, const double *weight,
                                                const double *mean, const double *rstd,
                                                size_t N, size_t C) {
    for (size_t n = 0; n < N; n++) {
        const double *x = inp + n * C, *dy = dout + n * C;
        // Means over c of dnorm and of dnorm * norm.
        double dnorm_mean = 0, dnorm_norm_mean = 0;
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
static inline void reference_matmul_forward(double *out, const double *inp,
                                            const double *weight, const double *bias,
                                            size_t N, size_t IC, size_t OC) {
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
                                             const double *dout, const double *inp,
                                             const double *weight, size_t N, size_t IC,
                                             size_t OC) {
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

// Returns dropout's factor of a probability or of an element of the residual stream: 0 or 1
// / (1 - p). Elements are numbered as in llmc/masks.h. With threshold 0 every factor is 1.
static inline double reference_factor(const Dropout *d, const Philox *block, size_t i) {
    double scale = 65536.0 / (65536.0 - d->threshold);
    return !d->threshold                                   ? 1.0
           : dropout_factor(d, block, (unsigned)i) == 0.0f ? 0.0
                                                           : scale;
}

// x [B,T,C] *= mask; backward is the same function.
static inline void reference_dropout(double *x, Dropout d, size_t B, size_t T, size_t C) {
    for (size_t i = 0; i < B * T * C && d.threshold; i++) {
        size_t element = i % (T * C);
        Philox block = dropout_block(&d, i / (T * C), element / DROPOUT_BLOCK);
        x[i] *= reference_factor(&d, &block, element % DROPOUT_BLOCK);
    }
}

// Returns the factor of the probability with which query t of head h of sample b looks at
// key s.
static inline double reference_attention_factor(const Dropout *d, size_t b, size_t h,
                                                size_t t, size_t s, size_t T) {
    Philox block = dropout_probability_block(d, b, h, t, s, T);
    return reference_factor(d, &block, s % DROPOUT_BLOCK);
}

// Causal self-attention, qkv [B,T,3,NH,HS] -> out [B,T,NH,HS]. Keeps the softmax before
// dropout for backward, in att [B,NH,T,T]. first[B,T], unless it is NULL, has the first key
// that each query sees.
static inline void reference_attention_forward(double *out, double *att, const double *qkv,
                                               size_t B, size_t T, size_t C, size_t NH,
                                               Dropout d, const int *first) {
    size_t HS = C / NH;
    double scale = 1.0 / sqrt((double)HS);
    for (size_t i = 0; i < B * NH * T; i++) {
        size_t b = i / T / NH, h = i / T % NH, t = i % T;
        const double *query = qkv + (b * T + t) * 3 * C + h * HS;
        double *row = att + i * T, *y = out + (b * T + t) * C + h * HS;
        double max = -INFINITY, sum = 0;
        size_t begin = reference_first(first, b * T + t);
        for (size_t s = begin; s <= t; s++) {  // a token sees itself and earlier ones
            const double *key = qkv + (b * T + s) * 3 * C + C + h * HS;
            double dot = 0;
            for (size_t j = 0; j < HS; j++) dot += query[j] * key[j];
            row[s] = dot * scale;
            if (row[s] > max) max = row[s];
        }
        for (size_t s = begin; s <= t; s++) sum += row[s] = exp(row[s] - max);
        for (size_t j = 0; j < HS; j++) y[j] = 0;
        for (size_t s = begin; s <= t; s++) {
            const double *value = qkv + (b * T + s) * 3 * C + 2 * C + h * HS;
            row[s] /= sum;
            double used = row[s] * reference_attention_factor(&d, b, h, t, s, T);
            for (size_t j = 0; j < HS; j++) y[j] += used * value[j];
        }
    }
}

static inline void reference_attention_backward(double *dqkv, const double *dout,
                                                const double *qkv, const double *att,
                                                size_t B, size_t T, size_t C, size_t NH,
                                                Dropout d, const int *first) {
    size_t HS = C / NH;
    double scale = 1.0 / sqrt((double)HS);
    for (size_t i = 0; i < B * NH * T; i++) {
        size_t b = i / T / NH, h = i / T % NH, t = i % T;
        size_t query = (b * T + t) * 3 * C + h * HS;
        const double *row = att + i * T, *dy = dout + (b * T + t) * C + h * HS;
        // The sum over s of row[s] * drow[s], which the softmax's gradient subtracts.
        double mean = 0;
        for (size_t pass = 0; pass < 2; pass++) {
            for (size_t s = reference_first(first, b * T + t); s <= t; s++) {
                size_t key = (b * T + s) * 3 * C + C + h * HS, value = key + C;
                double drow = 0, factor = reference_attention_factor(&d, b, h, t, s, T);
                for (size_t j = 0; j < HS; j++) drow += factor * dy[j] * qkv[value + j];
                if (pass == 0) mean += row[s] * drow;
                double dscore = row[s] * (drow - mean) * scale;
                for (size_t j = 0; j < HS && pass == 1; j++) {
                    dqkv[query + j] += dscore * qkv[key + j];
                    dqkv[key + j] += dscore * qkv[query + j];
                    dqkv[value + j] += factor * row[s] * dy[j];
                }
            }
        }
    }
}

// GELU in its tanh form: x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))).
static const double REFERENCE_GELU_SCALE = 0.79788456080286535588;  // sqrt(2/pi)

static inline void reference_gelu_forward(double *out, const double *inp, size_t n) {
    for (size_t i = 0; i < n; i++) {
        double x = inp[i];
        out[i] = 0.5 * x * (1.0 + tanh(REFERENCE_GELU_SCALE * (x + 0.044715 * x * x * x)));
    }
}

static inline void reference_gelu_backward(double *dinp, const double *dout,
                                           const double *inp, size_t n) {
    for (size_t i = 0; i < n; i++) {
        double x = inp[i], tanh_x = tanh(REFERENCE_GELU_SCALE * (x + 0.044715 * x * x * x));
        // The slope of the tanh's argument.
        double slope = REFERENCE_GELU_SCALE * (1.0 + 3.0 * 0.044715 * x * x);
        dinp[i] += dout[i] *
                   (0.5 * (1.0 + tanh_x) + 0.5 * x * (1.0 - tanh_x * tanh_x) * slope);
    }
}

// out [N,C] = a + b.
static inline void reference_residual_forward(double *out, const double *a, const double *b,
                                              size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = a[i] + b[i];
}

static inline void reference_residual_backward(double *da, double *db, const double *dout,
                                               size_t n) {
    for (size_t i = 0; i < n; i++) {
        da[i] += dout[i];
        db[i] += dout[i];
    }
}

// The head (logits = inp wte^T, the embedding tied), softmax and cross-entropy: losses [N],
// probs [N,V].
static inline void reference_classifier_forward(double *losses, double *probs,
                                                const double *inp, const double *wte,
                                                const int *targets, size_t N, size_t C,
                                                size_t V) {
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

// Adds the gradient of scale * sum(losses).
static inline void reference_classifier_backward(double *dinp, double *dwte,
                                                 const double *probs, const double *inp,
                                                 const double *wte, const int *targets,
                                                 double scale, size_t N, size_t C,
                                                 size_t V) {
    for (size_t i = 0; i < N * V; i++) {
        size_t n = i / V, v = i % V;
        double dlogit = scale * (probs[i] - ((size_t)targets[n] == v ? 1.0 : 0.0));
        for (size_t c = 0; c < C; c++) {
            dinp[n * C + c] += dlogit * wte[v * C + c];
            dwte[v * C + c] += dlogit * inp[n * C + c];
        }
    }
}

#endif
