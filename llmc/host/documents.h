// documents.h: the flags of a trainer that keeps documents apart, and the token that a
// document begins with.
// lesson: documents
//
// defines: DocumentFlags, document_options, document_check, document_token
#ifndef LLMC_HOST_DOCUMENTS_H
#define LLMC_HOST_DOCUMENTS_H

#include <string.h>

#include "llmc/host/context.h"
#include "llmc/host/tokenizer.h"

typedef struct {
    Context context;  // the flags of train_context, and this rank's part of a sequence
    size_t eot;       // the token that a document begins with
    bool given;       // it is the command line's
} DocumentFlags;

// The rows of context.h, and one more. --eot is OPTION_LEFT_OUT at first.
static inline FieldTable document_options(DocumentFlags *flags) {
    static Field rows[CONTEXT_OPTION_ROWS + 1];
    memcpy(rows, CONTEXT_OPTIONS, sizeof CONTEXT_OPTIONS);
    rows[CONTEXT_OPTION_ROWS] = {
        "eot", FIELD_SIZE, offsetof(DocumentFlags, eot), NULL, 0, 1e9,
        OPTION_BASIC | OPTION_COMPUTES, "N",
        "token that a document begins with (default: the tokenizer's, else the last)"};
    flags->eot = OPTION_LEFT_OUT;
    return {rows, CONTEXT_OPTION_ROWS + 1, flags};
}

// Takes the vocabulary's last token if --eot is left out, and refuses one outside of it.
static inline bool document_check(DocumentFlags *flags, size_t V, Error *err) {
    flags->given = flags->eot != OPTION_LEFT_OUT;
    if (!flags->given) flags->eot = V - 1;
    return flags->eot < V ||
           error_set(err, "--eot %zu is not below the %zu tokens of the model", flags->eot,
                     V);
}

// Returns the token that a document begins with: --eot, else the one that the tokenizer
// puts before a text, else (no tokenizer has been opened) the last of V.
static inline int document_token(const DocumentFlags *flags, const Tokenizer *tokenizer,
                                 size_t V) {
    Error err;
    int *prompt = NULL, token = (int)flags->eot;
    size_t count;
    if (!flags->given && tokenizer->tokens &&
        tokenizer_prompt(tokenizer, "", V, &prompt, &count, &err))
        token = prompt[0];
    free(prompt);
    return token;
}

#endif
