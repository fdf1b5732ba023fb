// lr.h: the learning rate of each step. It is counted in steps, or in samples where a step's batch grows (--ramp).
//
// defines: LRSchedule, learning_rate
#ifndef LLMC_LR_H
#define LLMC_LR_H

#include <math.h>
#include <stddef.h>

typedef enum { LR_COSINE, LR_LINEAR } LRSchedule;

// Learning rate of the update before which `done` and after which `next` steps (or samples) are done, of `total`.
// Warm-up: lr * next / warmup while done < warmup, but never above lr. Then, with
// x = (done - warmup) / (total - warmup) and final = lr * final_fraction, cosine:
// final + (lr - final) * (1 + cos(pi x)) / 2; linear: final + (lr - final) * (1 - x).
static inline double learning_rate(LRSchedule schedule, size_t done, size_t next, size_t warmup, size_t total,
                                   double lr, double final_fraction) {
    if (done < warmup && next < warmup) return lr * (double)next / (double)warmup;
    if (done < warmup) return lr;
    double final = lr * final_fraction;
    if (done >= total) return final;
    double x = (double)(done - warmup) / (double)(total - warmup);
    double share = schedule == LR_COSINE ? 0.5 * (1.0 + cos(3.14159265358979323846 * x)) : 1.0 - x;
    return final + (lr - final) * share;
}

#endif
