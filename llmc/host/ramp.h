// ramp.h: how many sequences each step has: the global batch, or at first fewer (--ramp), as MT-NLG and GPT-3 began.
//
// The batch starts at `start` and grows by `increment`, evenly over the first `samples` training samples. It follows
// from the number of samples seen alone, so a resume needs nothing else.
//
// defines: Ramp, ramp_parse, ramp_batch, ramp_samples
#ifndef LLMC_RAMP_H
#define LLMC_RAMP_H

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/host/error.h"

enum { RAMP_MOST_INCREMENTS = 100000 };  // ramp_samples may look at each of them

typedef struct {
    size_t start, increment, samples;  // start 0: no ramp
} Ramp;

// Reads "START,INCREMENT,SAMPLES" for a global batch of G, of which each size must be a multiple of `unit` sequences
// (a micro-batch on each data rank). Refuses a ramp that does not end at G.
static inline bool ramp_parse(Ramp *ramp, const char *text, size_t G, size_t unit, Error *err) {
    unsigned long long numbers[3];
    const char *at = text;
    for (int i = 0; i < 3; i++) {
        size_t digits = strspn(at, "0123456789");
        if (digits == 0 || digits > 15 || at[digits] != (i < 2 ? ',' : '\0')) {
            return error_set(err, "--ramp needs START,INCREMENT,SAMPLES, three whole numbers, not '%s'", text);
        }
        numbers[i] = strtoull(at, NULL, 10);
        at += digits + 1;
    }
    ramp->start = (size_t)numbers[0], ramp->increment = (size_t)numbers[1], ramp->samples = (size_t)numbers[2];
    if (ramp->start == 0 || ramp->start > G) {
        return error_set(err, "--ramp starts at %zu sequences: it must lie between 1 and --global-batch %zu",
                         ramp->start, G);
    }
    if (ramp->start < G && (ramp->increment == 0 || (G - ramp->start) % ramp->increment)) {
        return error_set(err, "--ramp never ends: from %zu by %zu it does not come to --global-batch %zu", ramp->start,
                         ramp->increment, G);
    }
    if (ramp->start < G && (G - ramp->start) / ramp->increment > RAMP_MOST_INCREMENTS) {
        return error_set(err, "--ramp %s grows the batch %zu times, %d are the most: raise INCREMENT", text,
                         (G - ramp->start) / ramp->increment, (int)RAMP_MOST_INCREMENTS);
    }
    if (ramp->start % unit || ramp->increment % unit) {
        return error_set(err, "--ramp %s: START and INCREMENT must be multiples of %zu, a --micro-batch on each data "
                         "rank", text, unit);
    }
    return true;
}

// Sample number from which on the batch has grown `times` times.
static inline size_t ramp_threshold(const Ramp *ramp, size_t G, size_t times) {
    size_t increments = (G - ramp->start) / ramp->increment;
    unsigned __int128 product = (unsigned __int128)times * ramp->samples;
    return (size_t)((product + increments - 1) / increments);
}

// Sequences of the step that begins at a sample number, for a global batch of G.
static inline size_t ramp_batch(const Ramp *ramp, size_t G, size_t sample) {
    if (ramp->start == 0 || ramp->start == G || sample >= ramp->samples) return G;
    size_t increments = (G - ramp->start) / ramp->increment;
    return ramp->start + ramp->increment * (size_t)((unsigned __int128)sample * increments / ramp->samples);
}

// Samples that the first `steps` steps of a run see.
static inline size_t ramp_samples(const Ramp *ramp, size_t G, size_t steps) {
    size_t sample = 0;
    while (steps > 0) {
        size_t batch = ramp_batch(ramp, G, sample);
        if (batch == G) return sample + steps * G;
        size_t next = ramp_threshold(ramp, G, (batch - ramp->start) / ramp->increment + 1);
        size_t count = (next - sample + batch - 1) / batch;
        if (count > steps) count = steps;
        sample += count * batch;
        steps -= count;
    }
    return sample;
}

#endif
