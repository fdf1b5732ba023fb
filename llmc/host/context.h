// context.h: sequences cut over c ranks: the flags, and which tokens each rank has.
// lesson: context
//
// defines: Context, CONTEXT_OPTIONS, CONTEXT_OPTION_ROWS, context_sizes, context_check,
//          tokens_of, context_tokens, context_is_ulysses, context_is_ring, TokenPair,
//          token_pair, context_dropout
#ifndef LLMC_HOST_CONTEXT_H
#define LLMC_HOST_CONTEXT_H

#include "llmc/host/field.h"
#include "llmc/host/options_table.h"
#include "llmc/host/tokens.h"
#include "llmc/masks.h"

// A rank's part of a sequence of T tokens. All zeros: it has the sequence alone.
typedef struct {
    size_t T, c, rank;  // ranks that share the sequence, and this one's number among them
    int ring, zigzag;   // 0 or 1: --context-by, --context-layout
    int recompute;      // RECOMPUTE_*: --recompute, which has one choice more here
} Context;

static const Field CONTEXT_OPTIONS[] = {
    {"Context parallelism", FIELD_TITLE, 0, NULL, 0, 0, OPTION_BASIC, NULL, NULL},
    {"context", FIELD_SIZE, offsetof(Context, c), "1", 1, 1e6, OPTION_BASIC, "N",
     "neighbours of the data ranks that share each sequence"},
    {"context-by", FIELD_CHOICE, offsetof(Context, ring), "ulysses", 0, 0, OPTION_BASIC,
     "ulysses|ring", "how queries meet other ranks' keys"},
    {"context-layout", FIELD_CHOICE, offsetof(Context, zigzag), "zigzag", 0, 0,
     OPTION_BASIC, "contiguous|zigzag", "which tokens a rank has"},
    {"recompute", FIELD_CHOICE, offsetof(Context, recompute), "none", 0, 0, 0,
     "none|gelu|layer|rest", "what backward computes again (rest: not attention)"},
};
enum { CONTEXT_OPTION_ROWS = sizeof CONTEXT_OPTIONS / sizeof CONTEXT_OPTIONS[0] };

// Tells the other options how many ranks share a sequence, and which part is computed again.
static inline bool context_sizes(Options *o, const void *flags, Error *err) {
    (void)err;
    o->context = ((const Context *)flags)->c;
    o->recompute = ((const Context *)flags)->recompute;
    return true;
}

// Refuses sizes by which neither the sequence nor NH heads can be cut.
static inline bool context_check(Context part, size_t NH, bool dropout, Error *err) {
    size_t T = part.T, c = part.c, parts = part.zigzag ? 2 * c : c;
    if (c == 1) return true;
    if (T % parts)
        return error_set(err,
                         "--seq %zu is not a multiple of %zu, the parts that --context %zu "
                         "cuts it in: change one",
                         T, parts, c);
    if (!part.ring && NH % c)
        return error_set(err,
                         "--context %zu does not divide the %zu heads, which --context-by "
                         "ulysses needs: take a "
                         "size that does, or --context-by ring",
                         c, NH);
    if (part.ring && dropout && T / parts % DROPOUT_BLOCK)
        return error_set(err,
                         "--dropout and --context-by ring need parts of a multiple of %d "
                         "tokens, not %zu: change "
                         "--seq or take --context-by ulysses",
                         DROPOUT_BLOCK, T / parts);
    return true;
}

// Returns the T/c tokens of rank i of c: the i-th part. Zigzag: chunks i and 2c-1-i of 2c,
// which give all ranks equal work under a causal mask.
RANDOM_FUNCTION Tokens tokens_of(size_t T, size_t c, size_t i, bool zigzag) {
    size_t half = zigzag ? T / c / 2 : 0;
    Tokens tokens = {half, {i * half, zigzag ? (2 * c - 2 - i) * half : i * (T / c)}};
    return tokens;
}

static inline Tokens context_tokens(Context part) {
    Tokens all = {0, {0, 0}};
    return part.c > 1 ? tokens_of(part.T, part.c, part.rank, part.zigzag) : all;
}

static inline bool context_is_ulysses(Context part) {
    return part.c > 1 && !part.ring;
}
static inline bool context_is_ring(Context part) {
    return part.c > 1 && part.ring;
}

// The work of a pair of ranks, each with T rows. Tq queries of one rank, from row q on, meet
// Tk keys of the other, from row k on. full: every query sees every key; otherwise the mask
// is causal. Tq 0: no query sees a key.
typedef struct {
    size_t q, Tq, k, Tk;
    bool full;
} TokenPair;

// Returns the work of the queries of rank i of c and the keys of rank r, T rows each. Under
// zigzag every pair of two different ranks is a rectangle of T * T / 2 scores.
static inline TokenPair token_pair(size_t T, size_t i, size_t r, bool zigzag) {
    TokenPair same = {0, T, 0, T, false}, first_half = {0, T, 0, T / 2, true},
              last_half = {T / 2, T / 2, 0, T, true}, all = {0, T, 0, T, true},
              none = {0, 0, 0, 0, true};
    if (r == i) return same;
    if (zigzag) return r < i ? first_half : last_half;
    return r < i ? all : none;
}

// Returns the dropout masks of this rank's heads: under Ulysses a rank has 1/c of the NH
// heads, and dropout numbers all NH.
static inline Dropout context_dropout(Dropout d, Context part, size_t NH) {
    if (context_is_ulysses(part)) d.head += part.rank * (NH / part.c);
    return d;
}

#endif
