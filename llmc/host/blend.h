// blend.h: data sets blended by weight. The source of a sample follows from the sample's number alone.
//
// Weights are decimal numbers, brought to whole parts w_i of W = sum of w_i, as small as possible. Let n_i(k) count the
// samples of source i among the first k. The sequence must keep n_i(k) close to k w_i / W at every k. Tijdeman's
// algorithm for the chairman assignment problem (Discrete Mathematics 32, 1980) keeps
// |n_i(k) - k w_i / W| <= 1 - 1/(2n - 2) with n sources. At each k it looks at the sources with
// k w_i / W - n_i >= 1/(2n - 2), and takes the one whose share will first pass 1 - 1/(2n - 2). After W samples every
// n_i is w_i and the sequence repeats, so a table of W entries holds it, in whole numbers.
//
// defines: Blend, BlendPlace, blend_open, blend_at, blend_close
#ifndef LLMC_BLEND_H
#define LLMC_BLEND_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/host/error.h"
#include "llmc/host/memory.h"

enum { BLEND_MOST_SOURCES = 64, BLEND_MOST_PARTS = 1 << 20 };

typedef struct {
    size_t sources;                        // 1: nothing is blended
    uint64_t parts;                        // W, the period
    uint64_t weights[BLEND_MOST_SOURCES];  // w_i
    char *patterns[BLEND_MOST_SOURCES];    // the shards of each, within text
    char *text;
    uint8_t *source;                       // [parts] where sample k comes from, by k % parts
    uint32_t *turn;                        // [parts] samples that this source has given before in this period
} Blend;

typedef struct {
    size_t source;
    uint64_t number;  // of the sample among those of its source
} BlendPlace;

static inline void blend_close(Blend *b) {
    free(b->text);
    free(b->source);
    free(b->turn);
    memset(b, 0, sizeof *b);
}

// Returns the length of the number, without sign and exponent, that a ':' follows; else 0.
static inline size_t blend_number(const char *text) {
    size_t length = strspn(text, "0123456789.");
    return text[length] == ':' ? length : 0;
}

// Reads a number of `length` characters, up to a million and with up to 9 decimals, as a whole number of 10^-9.
static inline bool blend_weight(const char *text, size_t length, uint64_t *weight) {
    const char *point = (const char *)memchr(text, '.', length);
    char *end;
    double value = strtod(text, &end);
    if (end != text + length || value > 1e6 || (point && end - point > 10)) return false;
    *weight = (uint64_t)llround(1e9 * value);
    return true;
}

static inline uint64_t blend_divisor(uint64_t a, uint64_t b) { return b ? blend_divisor(b, a % b) : a; }

// Decides where each of the W samples of a period comes from.
static inline void blend_make(Blend *b) {
    int64_t W = (int64_t)b->parts, D = b->sources > 1 ? 2 * (int64_t)b->sources - 2 : 1;
    uint32_t given[BLEND_MOST_SOURCES] = {0};
    b->source = (uint8_t *)host_alloc(b->parts, sizeof(uint8_t));
    b->turn = (uint32_t *)host_alloc(b->parts, sizeof(uint32_t));
    for (int64_t k = 1; k <= W; k++) {
        size_t best = 0;
        int64_t best_left = 1, best_weight = 0;  // later than any
        for (size_t i = 0; i < b->sources; i++) {
            int64_t w = (int64_t)b->weights[i], owed = k * w - (int64_t)given[i] * W;  // of W
            int64_t left = (D - 1) * W - D * owed;  // divided by w: the time until its share passes the bound
            if (D * owed < W || left * best_weight >= best_left * w) continue;
            best = i, best_left = left, best_weight = w;
        }
        b->source[k - 1] = (uint8_t)best;
        b->turn[k - 1] = given[best]++;
    }
}

// Reads "WEIGHT:GLOB,WEIGHT:GLOB,..."; a text that begins with no weight is one source.
static inline bool blend_read(Blend *b, const char *text, Error *err) {
    bool blended = blend_number(text) > 0;
    uint64_t divisor = 0;
    for (char *rest = b->text = host_string(text); rest; b->sources++) {
        char *at = strsep(&rest, blended ? "," : "");
        size_t digits = blended ? blend_number(at) : 0;
        uint64_t weight = 1;
        if (b->sources == BLEND_MOST_SOURCES)
            return error_set(err, "'%s' blends more than %d data sets", text, BLEND_MOST_SOURCES);
        if (blended && (digits == 0 || !at[digits + 1]))
            return error_set(err, "'%s' blends data sets, but '%s' is no WEIGHT:GLOB", text, at);
        if (blended && !blend_weight(at, digits, &weight))
            return error_set(err, "the weight '%.*s' of a data set is no number up to a million with at most 9 "
                             "decimals", (int)digits, at);
        b->weights[b->sources] = weight;
        b->patterns[b->sources] = blended ? at + digits + 1 : at;
        divisor = blend_divisor(weight, divisor);
    }
    if (divisor == 0) return error_set(err, "the weights of '%s' add up to 0: one must be more", text);
    for (size_t i = 0; i < b->sources; i++) b->parts += b->weights[i] /= divisor;
    return b->parts <= BLEND_MOST_PARTS ||
           error_set(err, "the weights of '%s' make %llu equal parts, and %d are the most: give them fewer digits",
                     text, (unsigned long long)b->parts, (int)BLEND_MOST_PARTS);
}

// Reads a blend and decides its period. After an error nothing is left to close.
static inline bool blend_open(Blend *b, const char *text, Error *err) {
    memset(b, 0, sizeof *b);
    bool ok = blend_read(b, text, err);
    if (ok) blend_make(b);
    else blend_close(b);
    return ok;
}

// Returns where sample k comes from.
static inline BlendPlace blend_at(const Blend *b, uint64_t k) {
    uint64_t period = k / b->parts, i = k % b->parts;
    BlendPlace place = {b->source[i], period * b->weights[b->source[i]] + b->turn[i]};
    return place;
}

#endif
