// eval_file.h: the file of --eval, which has rows of tokens. Some tokens of a row count.
//
// Little-endian: 256 int32 of header, then uint16 in version 1 and uint32 in version 2.
//   header  20261122, version, rows, kind (1 text, 2 cloze, 3 choices), vocabulary V (the
//           model's, or a larger one), words of the original text (0: not known).
//   a row   A number n, first, count, then n tokens. The model predicts each of the tokens
//           first .. first+count-1 from all tokens before it.
// A row of choices is a context and an ending. It has one more word behind `count`: 1 if
// its ending is the right one, else 0. The row with the right ending comes first in its
// example.
//
// defines: EvalKind, EvalRow, EvalFile, eval_sample, eval_open, eval_close
#ifndef LLMC_EVAL_FILE_H
#define LLMC_EVAL_FILE_H

#include "llmc/host/file.h"
#include "llmc/host/memory.h"

enum { EVAL_MAGIC = 20261122, EVAL_HEADER_BYTES = 1024, EVAL_MAX_FILE = 256 << 20 };

// Text: perplexity. Cloze: a row is right if every counted token is the model's first
// guess. Choices: an example is right if its right row has less loss per counted token than
// each of the others.
typedef enum { EVAL_TEXT = 1, EVAL_CLOZE, EVAL_CHOICES } EvalKind;

typedef struct {
    size_t tokens;        // n
    size_t first, count;  // those that count; first >= 1, first + count <= n
    size_t at;            // place of token 0 in the file
    bool right;           // of choices: the right ending, which begins an example
} EvalRow;

typedef struct {
    EvalKind kind;
    size_t rows, words;
    EvalRow *row;  // [rows]
    char *data;    // the whole file: a header, then words
    size_t count, word_bytes;
} EvalFile;

static inline void eval_close(EvalFile *e) {
    free(e->row);
    free(e->data);
    memset(e, 0, sizeof *e);
}

static inline size_t eval_word_at(const EvalFile *e, size_t i) {
    const void *words = e->data + EVAL_HEADER_BYTES;
    return e->word_bytes == 2 ? ((const uint16_t *)words)[i] : ((const uint32_t *)words)[i];
}

// Fills tokens [T + 1] with row i. Zeros pad its end, and fill a row behind the last one.
static inline void eval_sample(const EvalFile *e, size_t i, size_t T, int *tokens) {
    size_t count = i < e->rows ? e->row[i].tokens : 0;
    for (size_t t = 0; t <= T; t++)
        tokens[t] = t < count ? (int)eval_word_at(e, e->row[i].at + t) : 0;
}

// Reads the row at word *at, for a model with vocabulary V and sequences of T tokens, and
// moves *at behind it.
static inline bool eval_read_row(EvalFile *e, const char *path, size_t *at, size_t V,
                                 size_t T, Error *err) {
    size_t head = e->kind == EVAL_CHOICES ? 4 : 3, left = e->count - *at, word[4] = {0};
    for (size_t i = 0; i < head && i < left; i++) word[i] = eval_word_at(e, *at + i);
    EvalRow row = {word[0], word[1], word[2], *at + head, word[3] == 1};
    if (left < head || row.tokens > left - head)
        return error_set(err, "%s is truncated in row %zu", path, e->rows);
    for (size_t i = 0; i < row.tokens; i++) {
        size_t token = eval_word_at(e, row.at + i);
        if (token >= V)
            return error_set(
                err,
                "%s has token %zu in row %zu, but the model's vocabulary is %zu: "
                "prepare it with that tokenizer",
                path, token, e->rows, V);
    }
    if (word[3] > 1 || (e->kind == EVAL_CHOICES && e->rows == 0 && !row.right))
        return error_set(err,
                         "%s: row %zu has the mark %zu: 1 is the right ending, which comes "
                         "first, and 0 another",
                         path, e->rows, word[3]);
    if (row.first == 0 || row.count == 0 || row.first > row.tokens ||
        row.count > row.tokens - row.first)
        return error_set(err,
                         "%s counts %zu tokens from %zu on of row %zu, which has %zu: one "
                         "at least must count, "
                         "and not token 0",
                         path, row.count, row.first, e->rows, row.tokens);
    if (row.tokens > T + 1)
        return error_set(
            err,
            "%s has %zu tokens in row %zu, and --seq %zu takes %zu: make the rows shorter",
            path, row.tokens, e->rows, T, T + 1);
    e->row[e->rows++] = row;
    *at = row.at + row.tokens;
    return true;
}

// Checks the header and reads the rows behind it.
static inline bool eval_read(EvalFile *e, const char *path, size_t bytes, size_t V,
                             size_t T, Error *err) {
    static const int32_t none[6] = {0};
    const int32_t *header =
        bytes < EVAL_HEADER_BYTES ? none : (const int32_t *)(const void *)e->data;
    size_t at = 0;
    if (header[0] != EVAL_MAGIC || header[1] < 1 || header[1] > 2)
        return error_set(err,
                         "%s is no evaluation file: it begins with %d and version %d, not "
                         "with %d and version 1 "
                         "or 2",
                         path, (int)header[0], (int)header[1], EVAL_MAGIC);
    e->word_bytes = header[1] == 2 ? 4 : 2;
    e->count = (bytes - EVAL_HEADER_BYTES) / e->word_bytes;
    if (header[2] < 1 || (size_t)header[2] > e->count / 4 || header[3] < EVAL_TEXT ||
        header[3] > EVAL_CHOICES || header[5] < 0)
        return error_set(err,
                         "%s says that it has %d rows of kind %d in %zu words: kinds are 1 "
                         "(text), 2 (cloze) and "
                         "3 (choices)",
                         path, (int)header[2], (int)header[3], e->count);
    // A tokenizer may have tokens that the model lacks, such as a [PAD] that no row has:
    // each row is checked.
    if (header[4] < 0 || (size_t)header[4] < V)
        return error_set(
            err,
            "%s is in tokens of a vocabulary of %d, and the model's is %zu: prepare "
            "it with that tokenizer",
            path, (int)header[4], V);
    e->kind = (EvalKind)header[3];
    e->words = (size_t)header[5];
    e->row = (EvalRow *)host_alloc((size_t)header[2], sizeof(EvalRow));
    for (int i = 0; i < header[2]; i++) {
        if (!eval_read_row(e, path, &at, V, T, err)) return false;
    }
    size_t end = EVAL_HEADER_BYTES + e->word_bytes * at;
    return end == bytes ||
           error_set(err, "%s has %zu bytes behind its last row", path, bytes - end);
}

// Reads a file for a model with vocabulary V and sequences of T tokens. eval_close frees
// it; after an error nothing is left to free.
static inline bool eval_open(EvalFile *e, const char *path, size_t V, size_t T,
                             Error *err) {
    size_t bytes;
    memset(e, 0, sizeof *e);
    e->data = file_read(path, EVAL_MAX_FILE, &bytes, err);
    bool ok = e->data && eval_read(e, path, bytes, V, T, err);
    if (!ok) eval_close(e);
    return ok;
}

#endif
