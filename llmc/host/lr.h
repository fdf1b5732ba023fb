// lr.h: the learning rate of each step.
//
// defines: LRSchedule, learning_rate
#ifndef LLMC_LR_H
#define LLMC_LR_H

#include <math.h>
#include <stddef.h>

typedef enum { LR_COSINE, LR_LINEAR } LRSchedule;

// Learning rate of update number `step`, counted from 0. Warm-up: lr * (step + 1) / warmup for the first
// `warmup` steps. Then, with x = (step - warmup) / (steps - warmup) and final = lr * final_fraction, cosine:
// final + (lr - final) * (1 + cos(pi x)) / 2; linear: final + (lr - final) * (1 - x).
static inline double learning_rate(LRSchedule schedule, size_t step, size_t warmup, size_t steps, double lr,
                                   double final_fraction) {
    if (step < warmup) return lr * (double)(step + 1) / (double)warmup;
    double final = lr * final_fraction;
    if (step >= steps) return final;
    double x = (double)(step - warmup) / (double)(steps - warmup);
    double share = schedule == LR_COSINE ? 0.5 * (1.0 + cos(3.14159265358979323846 * x)) : 1.0 - x;
    return final + (lr - final) * share;
}

#endif
