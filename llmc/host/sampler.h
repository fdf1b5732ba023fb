// sampler.h: drawing the next token from the logits.
//
// defines: sample_token
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H

#include <math.h>
#include <stddef.h>

// Draws from softmax(logits [V] / temperature) with coin in [0, 1), but never a NaN; temperature 0 takes the largest
// logit.
static inline int sample_token(const float *logits, size_t V, double temperature, double coin) {
    size_t best = 0;
    for (size_t i = 1; i < V; i++) {
        if (logits[i] > logits[best] || isnan(logits[best])) best = i;
    }
    if (!(temperature > 0.0) || !isfinite(logits[best])) return (int)best;
    double max = (double)logits[best], sum = 0.0;
    for (size_t i = 0; i < V; i++) {
        if (!isnan(logits[i])) sum += exp(((double)logits[i] - max) / temperature);
    }
    double target = coin * sum, reached = 0.0;
    for (size_t i = 0; i < V; i++) {
        if (!isnan(logits[i])) reached += exp(((double)logits[i] - max) / temperature);
        if (reached > target) return (int)i;
    }
    return (int)best;
}

#endif
