// eval_file.h: what --eval measures a model on: rows of tokens, and which of them count.
//
// Two layouts, both little-endian: 256 int32 of header, then uint16.
//   ours   header: 20261122, version 1, rows, kind (1 text, 2 cloze), vocabulary V, words of the original text (0: not
//          known). A row: tokens n, first, count, then n tokens; the model is asked for tokens first .. first+count-1,
//          each from those before it.
//   llm.c  header: 20240522, version 1, examples. An example: 65535, its bytes, its number, the label, how many
//          endings; tokens of the context and these; then for each ending its tokens and these. An ending becomes a row
//          behind the context, of which the ending counts.
//
// defines: EvalKind, EvalRow, EvalFile, eval_open, eval_close
#ifndef LLMC_EVAL_FILE_H
#define LLMC_EVAL_FILE_H

#include "llmc/host/file.h"
#include "llmc/host/memory.h"

enum { EVAL_MAGIC = 20261122, EVAL_CHOICES_MAGIC = 20240522, EVAL_VERSION = 1, EVAL_HEADER_BYTES = 1024 };
enum { EVAL_EXAMPLE = 65535 };
enum { EVAL_REPEATED = 10, EVAL_FREE = 1 << 20 };  // how often the file, and how many tokens more, may be kept

// Text: perplexity. Cloze: a row is right if every counted token is the model's first guess. Choices: an example is
// right if the labelled of its rows has the least loss per counted token.
typedef enum { EVAL_TEXT = 1, EVAL_CLOZE, EVAL_CHOICES } EvalKind;

typedef struct {
    size_t tokens;        // n
    size_t first, count;  // those that count; first >= 1, first + count <= n
    size_t at;            // its first token in EvalFile.tokens
    size_t example;       // of choices
} EvalRow;

typedef struct {
    EvalKind kind;
    size_t rows, examples, words, token_count, room;
    EvalRow *row;         // [rows]
    size_t *label;        // [examples] which of an example's rows is the right one
    uint16_t *tokens;     // [token_count] of room for more
} EvalFile;

static inline void eval_close(EvalFile *e) {
    free(e->row);
    free(e->label);
    free(e->tokens);
    memset(e, 0, sizeof *e);
}

// The words of the file behind the header, and how far they have been read.
typedef struct {
    const char *path;
    const unsigned char *bytes;
    size_t at, count;     // of uint16
    size_t V, T;
} EvalReader;

// The next `n` words are there.
static inline bool eval_has(const EvalReader *r, size_t n) { return n <= r->count - r->at; }

static inline size_t eval_word(EvalReader *r) {
    const unsigned char *at = r->bytes + 2 * r->at++;
    return (size_t)at[0] | (size_t)at[1] << 8;
}

// Appends n tokens, which may be some that are there already.
static inline void eval_append(EvalFile *e, size_t from, const uint16_t *tokens, size_t n) {
    if (e->token_count + n > e->room) {
        e->room = 2 * (e->token_count + n);
        e->tokens = (uint16_t *)host_resize(e->tokens, e->room, sizeof(uint16_t));
    }
    memcpy(e->tokens + e->token_count, tokens ? tokens : e->tokens + from, n * sizeof(uint16_t));
    e->token_count += n;
}

// Appends n tokens of the file.
static inline bool eval_tokens(EvalFile *e, EvalReader *r, size_t n, Error *err) {
    if (!eval_has(r, n)) return error_set(err, "%s is truncated: row %zu ends behind its end", r->path, e->rows);
    for (size_t i = 0; i < n; i++) {
        uint16_t token = (uint16_t)eval_word(r);
        if (token >= r->V) {
            return error_set(err, "%s has token %d in row %zu, but the model's vocabulary is %zu", r->path, (int)token,
                             e->rows, r->V);
        }
        eval_append(e, 0, &token, 1);
    }
    return true;
}

// Appends the row that begins at token `at` and ends with the last one so far.
static inline bool eval_row(EvalFile *e, const EvalReader *r, size_t at, size_t first, size_t count, Error *err) {
    EvalRow row = {e->token_count - at, first, count, at, e->examples};
    if (first > row.tokens || count > row.tokens - first) {
        return error_set(err, "%s counts tokens %zu to %zu of row %zu, which has %zu: the mask is longer than the row",
                         r->path, first, first + count, e->rows, row.tokens);
    }
    if (first == 0 || count == 0) {
        return error_set(err, "%s counts %s of row %zu", r->path,
                         count == 0 ? "no token" : "the first token, which nothing comes before,", e->rows);
    }
    if (row.tokens > r->T + 1) {
        return error_set(err, "%s has %zu tokens in row %zu, and --seq %zu takes %zu: make the rows shorter", r->path,
                         row.tokens, e->rows, r->T, r->T + 1);
    }
    e->row[e->rows++] = row;
    return true;
}

static inline bool eval_read_rows(EvalFile *e, EvalReader *r, size_t rows, Error *err) {
    for (size_t i = 0; i < rows; i++) {
        if (!eval_has(r, 3)) return error_set(err, "%s is truncated: it ends before row %zu of %zu", r->path, i, rows);
        size_t n = eval_word(r), first = eval_word(r), count = eval_word(r), at = e->token_count;
        if (!eval_tokens(e, r, n, err) || !eval_row(e, r, at, first, count, err)) return false;
    }
    return true;
}

// One example: its context stands before each of its endings.
static inline bool eval_read_example(EvalFile *e, EvalReader *r, size_t i, Error *err) {
    size_t begin = r->at;
    if (!eval_has(r, 6) || eval_word(r) != EVAL_EXAMPLE) {
        return error_set(err, "%s: example %zu is not there, or does not begin as it must", r->path, i);
    }
    size_t bytes = eval_word(r);
    r->at++;  // its number
    size_t label = e->label[i] = eval_word(r), endings = eval_word(r), n = eval_word(r), context = e->token_count;
    if (label >= endings) {
        return error_set(err, "%s: example %zu has %zu endings, and says that number %zu is right", r->path, i, endings,
                         label);
    }
    if (!eval_tokens(e, r, n, err)) return false;
    for (size_t k = 0; k < endings; k++) {
        size_t at = k == 0 ? context : e->token_count;
        if (!eval_has(r, 1)) return error_set(err, "%s is truncated in example %zu", r->path, i);
        if (e->token_count + n > EVAL_REPEATED * r->count + EVAL_FREE) {
            return error_set(err, "%s: example %zu repeats its context of %zu tokens for %zu endings, which is more "
                             "than a file of its size may become", r->path, i, n, endings);
        }
        if (k > 0) eval_append(e, context, NULL, n);
        size_t length = eval_word(r);
        if (!eval_tokens(e, r, length, err) || !eval_row(e, r, at, n, length, err)) return false;
    }
    e->examples++;
    return 2 * (r->at - begin) == bytes || error_set(err, "%s: example %zu says that it has %zu bytes, but has %zu",
                                                     r->path, i, bytes, 2 * (r->at - begin));
}

// Reads a file of either layout for a model with vocabulary V and sequences of T tokens. eval_close frees it; after an
// error that is done.
static inline bool eval_open(EvalFile *e, const char *path, size_t V, size_t T, Error *err) {
    size_t bytes;
    int32_t header[EVAL_HEADER_BYTES / 4];
    memset(e, 0, sizeof *e);
    memset(header, 0, sizeof header);
    char *data = file_read(path, (size_t)1 << 31, &bytes, err);
    if (!data) return false;
    bool ok = bytes >= EVAL_HEADER_BYTES && bytes % 2 == 0;
    if (ok) memcpy(header, data, sizeof header);
    bool choices = ok && header[0] == EVAL_CHOICES_MAGIC;
    EvalReader r = {path, (const unsigned char *)data + EVAL_HEADER_BYTES, 0, 0, V, T};
    if (ok) r.count = (bytes - EVAL_HEADER_BYTES) / 2;
    if (!ok || (header[0] != EVAL_MAGIC && !choices)) {
        ok = error_set(err, "%s is no evaluation file: it begins with neither %d nor %d", path, EVAL_MAGIC,
                       EVAL_CHOICES_MAGIC);
    } else if (header[1] != EVAL_VERSION) {
        ok = error_set(err, "evaluation file %s has version %d, only version %d is known", path, (int)header[1],
                       (int)EVAL_VERSION);
    } else if (header[2] < 1 || (size_t)header[2] > r.count) {
        ok = error_set(err, "%s says that it has %d rows, in %zu bytes", path, (int)header[2], bytes);
    } else if (!choices && (header[3] < EVAL_TEXT || header[3] > EVAL_CLOZE || header[5] < 0)) {
        ok = error_set(err, "%s is of no known kind: 1 is text and 2 is cloze, not %d", path, (int)header[3]);
    } else if (!choices && header[4] != (int32_t)V) {
        ok = error_set(err, "%s is in tokens of a vocabulary of %d, and the model's is %zu: prepare it with that "
                       "tokenizer", path, (int)header[4], V);
    }
    if (ok) {
        size_t examples = choices ? (size_t)header[2] : 0;
        e->kind = choices ? EVAL_CHOICES : (EvalKind)header[3];
        e->words = choices ? 0 : (size_t)header[5];
        e->row = (EvalRow *)host_alloc(r.count, sizeof(EvalRow));
        e->label = (size_t *)host_alloc(examples, sizeof(size_t));
        for (size_t i = 0; i < examples && ok; i++) ok = eval_read_example(e, &r, i, err);
        if (!choices) ok = eval_read_rows(e, &r, (size_t)header[2], err);
    }
    if (ok && r.at < r.count) ok = error_set(err, "%s has %zu bytes behind its last row", path, 2 * (r.count - r.at));
    free(data);
    if (!ok) eval_close(e);
    return ok;
}

#endif
