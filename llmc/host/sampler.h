// sampler.h: drawing the next token from the logits.
//
// defines: sample_token
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

// The bits of a float as a number that grows with it; a NaN comes below everything.
static inline uint32_t sampler_order(float x) {
    uint32_t bits;
    if (isnan(x)) return 0;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The order of the k-th largest logit, found bit by bit.
static inline uint32_t sampler_threshold(const float *logits, size_t V, size_t k) {
    uint32_t threshold = 0;
    for (int bit = 31; bit >= 0; bit--) {
        uint32_t candidate = threshold | (uint32_t)1 << bit;
        size_t count = 0;
        for (size_t i = 0; i < V; i++) count += sampler_order(logits[i]) >= candidate;
        if (count >= k) threshold = candidate;
    }
    return threshold;
}

// Draws from softmax(logits [V] / temperature) with coin in [0, 1), but never a NaN. temperature 0 takes the
// largest logit. top_k > 0 draws among the k largest only (those equal to the k-th included); 0 among all.
static inline int sample_token(const float *logits, size_t V, double temperature, size_t top_k, double coin) {
    size_t best = 0;
    for (size_t i = 1; i < V; i++) {
        if (sampler_order(logits[i]) > sampler_order(logits[best])) best = i;
    }
    if (!(temperature > 0.0) || !isfinite(logits[best])) return (int)best;
    uint32_t threshold = top_k > 0 && top_k < V ? sampler_threshold(logits, V, top_k) : 0;
    if (threshold == 0) threshold = 1;  // leaves out NaN alone
    double max = (double)logits[best], sum = 0.0;
    for (size_t i = 0; i < V; i++) {
        if (sampler_order(logits[i]) >= threshold) sum += exp(((double)logits[i] - max) / temperature);
    }
    double target = coin * sum, reached = 0.0;
    for (size_t i = 0; i < V; i++) {
        if (sampler_order(logits[i]) < threshold) continue;
        reached += exp(((double)logits[i] - max) / temperature);
        if (reached > target) return (int)i;
    }
    return (int)best;
}

#endif
