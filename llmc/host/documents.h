// documents.h: documents of a sequence that is cut over ranks: the flags, and how many
// scores a pair of ranks has.
// lesson: documents
//
// defines: DocumentFlags, document_options, document_check, document_token, tokens_before,
//          document_scores
#ifndef LLMC_HOST_DOCUMENTS_H
#define LLMC_HOST_DOCUMENTS_H

#include <string.h>

#include "llmc/host/context.h"
#include "llmc/host/first_keys.h"
#include "llmc/host/tokenizer.h"

typedef struct {
    Context context;  // the flags of train_context, and this rank's part of a sequence
    size_t eot;       // the token that a document begins with
} DocumentFlags;

// The rows of context.h, and one more. --eot is OPTION_LEFT_OUT at first.
static inline FieldTable document_options(DocumentFlags *flags) {
    static Field rows[CONTEXT_OPTION_ROWS + 1];
    memcpy(rows, CONTEXT_OPTIONS, sizeof CONTEXT_OPTIONS);
    rows[CONTEXT_OPTION_ROWS] = {
        "eot", FIELD_SIZE, offsetof(DocumentFlags, eot), NULL, 0, 1e9, OPTION_BASIC, "N",
        "token that a document begins with (default: the tokenizer's, else the last)"};
    flags->eot = OPTION_LEFT_OUT;
    return {rows, CONTEXT_OPTION_ROWS + 1, flags};
}

// Refuses an --eot outside of the vocabulary.
static inline bool document_check(const DocumentFlags *flags, size_t V, Error *err) {
    return flags->eot < V || flags->eot == OPTION_LEFT_OUT ||
           error_set(err, "--eot %zu is not below the %zu tokens of the model", flags->eot,
                     V);
}

// Returns the token that a document begins with: --eot, else the one that the tokenizer
// puts before a text, else (no tokenizer has been opened) the last of V.
static inline int document_token(const DocumentFlags *flags, const Tokenizer *tokenizer,
                                 size_t V) {
    Error err;
    int *prompt = NULL, token = (int)V - 1;
    size_t count;
    if (flags->eot != OPTION_LEFT_OUT) return (int)flags->eot;
    if (tokenizer->tokens && tokenizer_prompt(tokenizer, "", V, &prompt, &count, &err))
        token = prompt[0];
    free(prompt);
    return token;
}

// Returns how many of a rank's T rows have positions before the given one.
RANDOM_FUNCTION size_t tokens_before(Tokens t, size_t position, size_t T) {
    size_t first = position > t.shift[0] ? position - t.shift[0] : 0;
    size_t second = position > t.shift[1] ? position - t.shift[1] : 0;
    if (first > t.half) first = t.half;
    if (second < t.half) second = t.half;
    if (second > T) second = T;
    return first + second - t.half;
}

// Returns the pairs of a query and a key of its document, of two ranks with T rows each of
// a sequence. first: of the whole sequence.
static inline double document_scores(const int *first, Tokens queries, Tokens keys,
                                     size_t T) {
    size_t scores = 0;
    for (size_t q = 0; q < T; q++) {
        size_t position = tokens_position(queries, q);
        size_t begin = (size_t)first[position];
        scores += tokens_before(keys, position + 1, T) - tokens_before(keys, begin, T);
    }
    return (double)scores;
}

#endif
