// blend.h: data sets blended by weight: which of them a sample comes from follows from the sample's number alone.
//
// Weights are decimal numbers, brought to whole parts w_i of W = sum of w_i, as small as possible. With n_i(k) samples
// of source i among the first k, the sequence must keep n_i(k) close to k w_i / W at every k. Tijdeman's algorithm for
// the chairman assignment problem (Discrete Mathematics 32, 1980) keeps |n_i(k) - k w_i / W| <= 1 - 1/(2n - 2) with n
// sources: at each k, of the sources for which k w_i / W - n_i is at least 1/(2n - 2), the one whose share will first
// pass 1 - 1/(2n - 2). After W samples every n_i is w_i and the sequence begins anew, so a table of W entries says it
// all, in whole numbers.
//
// defines: Blend, BlendPlace, blend_is, blend_open, blend_at, blend_close
#ifndef LLMC_BLEND_H
#define LLMC_BLEND_H

#include <ctype.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/host/error.h"
#include "llmc/host/memory.h"

enum { BLEND_MOST_SOURCES = 64, BLEND_MOST_PARTS = 1 << 20 };

typedef struct {
    size_t sources;     // 1: nothing is blended
    uint64_t parts;     // W, the period
    uint64_t *weights;  // [sources] w_i
    char **patterns;    // [sources] the shards of each
    uint8_t *source;    // [parts] where sample k comes from, by k % parts
    uint32_t *turn;     // [parts] how many that source has given before in this period
} Blend;

typedef struct {
    size_t source;
    uint64_t number;  // of the sample among those of its source
} BlendPlace;

static inline void blend_close(Blend *b) {
    for (size_t i = 0; i < b->sources; i++) free(b->patterns[i]);
    free(b->patterns);
    free(b->weights);
    free(b->source);
    free(b->turn);
    memset(b, 0, sizeof *b);
}

// How many characters of text are a number without sign and exponent, if ':' follows; else 0.
static inline size_t blend_number(const char *text) {
    size_t length = strspn(text, "0123456789.");
    return text[length] == ':' ? length : 0;
}

// Does the text name weights, as in "0.7:a/*.bin,0.3:b/*.bin"?
static inline bool blend_is(const char *text) { return blend_number(text) > 0; }

static inline uint64_t blend_divisor(uint64_t a, uint64_t b) { return b ? blend_divisor(b, a % b) : a; }

// A decimal number of `length` characters as a whole number of 10^-9.
static inline bool blend_weight(const char *text, size_t length, uint64_t *weight) {
    uint64_t value = 0;
    int decimals = -1;  // before the point
    for (size_t i = 0; i < length; i++) {
        if (text[i] == '.' && decimals < 0) decimals = 0;
        else if (text[i] == '.' || decimals == 9 || value > UINT64_C(100000000000000)) return false;
        else value = 10 * value + (uint64_t)(text[i] - '0'), decimals += decimals >= 0;
    }
    for (int i = decimals < 0 ? 0 : decimals; i < 9; i++) {
        if (value > UINT64_C(100000000000000)) return false;
        value *= 10;
    }
    *weight = value;
    return length > (size_t)(decimals >= 0);
}

// Which source each of the W samples of a period comes from.
static inline void blend_make(Blend *b) {
    int64_t W = (int64_t)b->parts, D = b->sources > 1 ? 2 * (int64_t)b->sources - 2 : 1;
    uint32_t *given = (uint32_t *)host_alloc(b->sources, sizeof(uint32_t));
    b->source = (uint8_t *)host_alloc(b->parts, sizeof(uint8_t));
    b->turn = (uint32_t *)host_alloc(b->parts, sizeof(uint32_t));
    for (int64_t k = 1; k <= W; k++) {
        size_t best = b->sources;
        int64_t best_left = 0, best_weight = 1;
        for (size_t i = 0; i < b->sources; i++) {
            int64_t w = (int64_t)b->weights[i], owed = k * w - (int64_t)given[i] * W;  // of W
            if (b->sources > 1 && D * owed < W) continue;
            int64_t left = (D - 1) * W - D * owed;  // divided by w: the time until its share passes the bound
            if (best < b->sources && left * best_weight >= best_left * w) continue;
            best = i, best_left = left, best_weight = w;
        }
        b->source[k - 1] = (uint8_t)best;
        b->turn[k - 1] = given[best]++;
    }
    free(given);
}

// Reads "WEIGHT:GLOB,WEIGHT:GLOB,..."; a text without weights is one source. False, with a sentence and nothing to
// close, where weights are missing or make no sense.
static inline bool blend_open(Blend *b, const char *text, Error *err) {
    memset(b, 0, sizeof *b);
    b->weights = (uint64_t *)host_alloc(BLEND_MOST_SOURCES, sizeof(uint64_t));
    b->patterns = (char **)host_alloc(BLEND_MOST_SOURCES, sizeof(char *));
    bool blended = blend_is(text), ok = true;
    uint64_t divisor = 0;
    for (const char *at = text; ok; at++) {
        size_t digits = blend_number(at), end = blended ? strcspn(at, ",") : strlen(at);
        size_t begin = blended ? digits + 1 : 0;
        if (blended && (!digits || digits > end || begin == end)) {
            ok = error_set(err, "'%s' blends data sets, but '%.*s' is no WEIGHT:GLOB", text, (int)end, at);
        } else if (b->sources == BLEND_MOST_SOURCES) {
            ok = error_set(err, "'%s' blends more than %d data sets", text, BLEND_MOST_SOURCES);
        } else if (blended && !blend_weight(at, digits, &b->weights[b->sources])) {
            ok = error_set(err, "the weight '%.*s' of a data set is no number up to a million with at most 9 decimals",
                           (int)digits, at);
        } else {
            if (!blended) b->weights[0] = 1;
            b->patterns[b->sources] = (char *)host_alloc(end - begin + 1, 1);
            memcpy(b->patterns[b->sources], at + begin, end - begin);
            divisor = blend_divisor(b->weights[b->sources++], divisor);
        }
        at += end;
        if (!*at) break;
    }
    if (ok && divisor == 0) ok = error_set(err, "the weights of '%s' add up to 0: one must be more", text);
    for (size_t i = 0; i < b->sources && ok; i++) b->parts += b->weights[i] /= divisor;
    if (ok && b->parts > BLEND_MOST_PARTS) {
        ok = error_set(err, "the weights of '%s' make %llu equal parts, and %d are the most: give them fewer digits",
                       text, (unsigned long long)b->parts, (int)BLEND_MOST_PARTS);
    }
    if (ok) blend_make(b);
    else blend_close(b);
    return ok;
}

// Where sample k comes from.
static inline BlendPlace blend_at(const Blend *b, uint64_t k) {
    uint64_t period = k / b->parts, i = k % b->parts;
    BlendPlace place = {b->source[i], period * b->weights[b->source[i]] + b->turn[i]};
    return place;
}

#endif
