// ramp.h: how many sequences each step has, and its learning rate.
//
// A step has the global batch. With --ramp, as MT-NLG and GPT-3 began, the batch starts at
// `start` and grows by `increment`, evenly over the first `samples` training samples. It
// follows from the samples seen alone, so a resume needs nothing else.
//
// defines: Ramp, ramp_parse, ramp_batch, LRSchedule, learning_rate
#ifndef LLMC_RAMP_H
#define LLMC_RAMP_H

#include <math.h>

#include "llmc/host/error.h"

typedef struct {
    size_t start, increment, samples;  // start 0: no ramp
} Ramp;

// Reads "START,INCREMENT,SAMPLES" for a global batch of G. Each size must be a multiple of
// `unit` sequences, a micro-batch on each data rank. Refuses a ramp that does not end at G.
static inline bool ramp_parse(Ramp *ramp, const char *text, size_t G, size_t unit,
                              Error *err) {
    size_t start = 0, increment = 0, samples = 0;
    int end = 0;
    sscanf(text, "%zu,%zu,%zu%n", &start, &increment, &samples, &end);
    ramp->start = start;
    ramp->increment = increment;
    ramp->samples = samples;
    // -1 is a large number.
    if (end == 0 || text[end] || (start | increment | samples) >> 50) {
        return error_set(
            err, "--ramp needs START,INCREMENT,SAMPLES, three whole numbers, not '%s'",
            text);
    }
    if (start == 0 || start > G ||
        (start < G && (increment == 0 || (G - start) % increment))) {
        return error_set(
            err,
            "--ramp %s: INCREMENTs must lead from START, at least 1, to --global-batch %zu",
            text, G);
    }
    if (start % unit || increment % unit) {
        return error_set(err,
                         "--ramp %s: START and INCREMENT must be multiples of %zu, a "
                         "--micro-batch on each data "
                         "rank",
                         text, unit);
    }
    return true;
}

// Returns the sequences of the step that begins at a sample number, for a global batch of
// G.
static inline size_t ramp_batch(const Ramp *ramp, size_t G, size_t sample) {
    if (ramp->start == 0 || ramp->start == G || sample >= ramp->samples) return G;
    size_t increments = (G - ramp->start) / ramp->increment;
    return ramp->start + ramp->increment * (size_t)((unsigned __int128)sample * increments /
                                                    ramp->samples);
}

typedef enum { LR_COSINE, LR_LINEAR } LRSchedule;

// Returns the learning rate of step `step`, counted from 1, of `steps`.
//   warm-up  lr * step / warmup. The peak lr is in its last step, or in step 1 without one.
//   cosine   final + (lr - final) * (1 + cos(pi x)) / 2.
//   linear   final + (lr - final) * (1 - x).
// In the decay final = lr * final_fraction, and x = (step - peak) / (steps - peak) is 1 in
// the last step.
static inline double learning_rate(LRSchedule schedule, size_t step, size_t warmup,
                                   size_t steps, double lr, double final_fraction) {
    size_t peak = warmup ? warmup : 1;
    double final = lr * final_fraction;
    if (step < peak) return lr * (double)step / (double)peak;
    if (step == peak) return lr;
    if (step >= steps) return final;
    double x = (double)(step - peak) / (double)(steps - peak);
    double share = schedule == LR_COSINE ? 0.5 * (1.0 + cos(3.14159265358979323846 * x))
                                         : 1.0 - x;
    return final + (lr - final) * share;
}

#endif
