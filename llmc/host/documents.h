// documents.h: the flags of a trainer that keeps documents apart. Also finds the token that
// begins a document, and prints a line about the documents of the next batch.
// lesson: documents
//
// defines: Documents, document_options, document_check, document_token, documents_print
#ifndef LLMC_HOST_DOCUMENTS_H
#define LLMC_HOST_DOCUMENTS_H

#include "llmc/host/dataloader.h"
#include "llmc/host/tokenizer.h"
#include "llmc/host/trainer_json.h"

// Values of the command line.
typedef struct {
    bool apart;  // a token sees its own document only
    size_t eot;  // the token that a document begins with
    bool given;  // --eot names it
} Documents;

// Returns a table with more rows: the rows of `table`, then the flags of *d, which is a
// member of the table's object. apart: the default of --documents.
static inline FieldTable document_options(FieldTable table, Documents *d,
                                          const char *apart) {
    enum { OWN = 3 };
    size_t at = (size_t)((char *)d - (char *)table.object);
    const unsigned tags = OPTION_BASIC | OPTION_COMPUTES;
    const Field own[OWN] = {
        {"Documents", FIELD_TITLE, 0, NULL, 0, 0, OPTION_BASIC, NULL, NULL},
        {"documents", FIELD_SWITCH, at + offsetof(Documents, apart), apart, 0, 0, tags,
         "0|1", "1: a token sees its own document only"},
        {"eot", FIELD_SIZE, at + offsetof(Documents, eot), NULL, 0, 1e9, tags, "N",
         "token that a document begins with (default: the tokenizer's, else the last)"}};
    Field *rows = (Field *)host_alloc(table.count + OWN, sizeof *rows);
    memcpy(rows, table.fields, table.count * sizeof *rows);
    memcpy(rows + table.count, own, sizeof own);
    d->eot = OPTION_LEFT_OUT;
    FieldTable all = {rows, table.count + OWN, table.object};
    return all;
}

// Takes the vocabulary's last token if --eot is left out, and refuses one outside of it.
static inline bool document_check(Documents *d, size_t V, Error *err) {
    d->given = d->eot != OPTION_LEFT_OUT;
    if (!d->given) d->eot = V - 1;
    if (d->given && !d->apart)
        return error_set(err, "--eot %zu needs --documents 1", d->eot);
    return d->eot < V ||
           error_set(err, "--eot %zu is not below the %zu tokens of the model", d->eot, V);
}

// Returns the token that begins a document, or -1 (no token) if documents are not kept
// apart. It is --eot, else the token that the tokenizer puts before a text. Without an open
// tokenizer it is the last of V.
static inline int document_token(const Documents *d, const Tokenizer *tokenizer, size_t V) {
    Error err;
    int *prompt = NULL, token = (int)d->eot;
    size_t count;
    if (!d->apart) return -1;
    if (!d->given && tokenizer->tokens &&
        tokenizer_prompt(tokenizer, "", V, &prompt, &count, &err))
        token = prompt[0];
    free(prompt);
    return token;
}

// Prints the token, and how many documents the next batch has: a wrong token shows there.
static inline void documents_print(DataLoader *data, const TrainerState *next, int eot) {
    const Options *o = &next->opt;
    size_t sequences = ramp_batch(&o->ramp, o->global_batch, next->sample), documents = 0;
    bool ok = o->train_data != NULL;
    Error err;
    if (eot < 0) return;
    int *tokens = (int *)host_alloc(o->seq + 1, sizeof *tokens);
    for (size_t i = 0; i < sequences && ok; i++) {
        ok = dataloader_read(data, next->sample + i, o->shuffle, o->seed, o->config.V,
                             tokens, &err);
        for (size_t t = 0; t < o->seq; t++) documents += t == 0 || tokens[t] == eot;
    }
    free(tokens);
    printf("documents    begin at token %d", eot);
    if (ok) printf(": %zu in the next batch of %zu", documents, sequences);
    printf("\n");
    if (ok && documents == sequences)
        printf("note: none of them begins inside a sequence: is --eot right?\n");
}

#endif
