// eval_file.h: the file of --eval: rows of tokens, some of which count.
//
// Two layouts, both little-endian: 256 int32 of header, then uint16 in version 1 and uint32 in version 2.
//   ours   header: 20261122, version, rows, kind (1 text, 2 cloze), vocabulary V, words of the original text (0: not
//          known). A row: tokens n, first, count, then n tokens. The model predicts each of the tokens
//          first .. first+count-1 from all tokens before it.
//   llm.c  header: 20240522, version, examples. An example: 65535, its bytes, its number, the label, the number of
//          endings; the length of the context and its tokens; then the same of each ending. Context and ending make a
//          row whose ending counts.
//
// defines: EvalKind, EvalRow, EvalFile, eval_token, eval_open, eval_close
#ifndef LLMC_EVAL_FILE_H
#define LLMC_EVAL_FILE_H

#include "llmc/host/file.h"
#include "llmc/host/memory.h"

enum { EVAL_MAGIC = 20261122, EVAL_CHOICES_MAGIC = 20240522, EVAL_HEADER_BYTES = 1024 };
enum { EVAL_MAX_FILE = 256 << 20, EVAL_EXAMPLE = 65535 };

// Text: perplexity. Cloze: a row is right if every counted token is the model's first guess. Choices: an example is
// right if the labelled of its rows has the least loss per counted token.
typedef enum { EVAL_TEXT = 1, EVAL_CLOZE, EVAL_CHOICES } EvalKind;

typedef struct {
    size_t tokens;        // n
    size_t first, count;  // those that count; first >= 1, first + count <= n
    size_t at, first_at;  // places in the file of token 0 and of token `first`: the rows of an example share a context
    size_t example;       // of choices
} EvalRow;

typedef struct {
    EvalKind kind;
    size_t rows, examples, words, room;
    EvalRow *row;    // [rows]
    size_t *label;   // [examples] which of an example's rows is the right one
    char *data;      // the whole file: a header, then words
    size_t count, word_bytes;
} EvalFile;

static inline void eval_close(EvalFile *e) {
    free(e->row);
    free(e->label);
    free(e->data);
    memset(e, 0, sizeof *e);
}

static inline size_t eval_word_at(const EvalFile *e, size_t i) {
    const void *words = e->data + EVAL_HEADER_BYTES;
    return e->word_bytes == 2 ? ((const uint16_t *)words)[i] : ((const uint32_t *)words)[i];
}

static inline int eval_token(const EvalFile *e, const EvalRow *row, size_t i) {
    return (int)eval_word_at(e, i < row->first ? row->at + i : row->first_at + i - row->first);
}

// A file while it is read, for a model with vocabulary V and sequences of T tokens.
typedef struct {
    EvalFile *e;
    const char *path;
    size_t at, V, T;  // words [0, at) of the file have been read
    bool ok;          // false: err says why
    Error *err;
} EvalReader;

// Returns the next word, or 0 behind the end, which is an error.
static inline size_t eval_word(EvalReader *r) {
    if (r->at < r->e->count) return eval_word_at(r->e, r->at++);
    if (r->ok) r->ok = error_set(r->err, "%s is truncated in row %zu", r->path, r->e->rows);
    return 0;
}

// Reads n tokens and returns the place of the first.
static inline size_t eval_tokens(EvalReader *r, size_t n) {
    size_t at = r->at;
    for (size_t i = 0; i < n && r->ok; i++) {
        size_t token = eval_word(r);
        if (token < r->V) continue;
        r->ok = error_set(r->err, "%s has token %zu in row %zu, but the model's vocabulary is %zu", r->path, token,
                          r->e->rows, r->V);
    }
    return at;
}

// Appends a row after its words have been read.
static inline bool eval_add(EvalReader *r, EvalRow row) {
    EvalFile *e = r->e;
    if (!r->ok) return false;
    if (row.first == 0 || row.count == 0 || row.first > row.tokens || row.count > row.tokens - row.first) {
        return error_set(r->err, "%s counts %zu tokens from %zu on of row %zu, which has %zu: one at least must count, "
                         "and not token 0", r->path, row.count, row.first, e->rows, row.tokens);
    }
    if (row.tokens > r->T + 1) {
        return error_set(r->err, "%s has %zu tokens in row %zu, and --seq %zu takes %zu: make the rows shorter",
                         r->path, row.tokens, e->rows, r->T, r->T + 1);
    }
    if (e->rows == e->room) {
        e->room = e->room ? 2 * e->room : 1024;
        e->row = (EvalRow *)host_resize(e->row, e->room, sizeof(EvalRow));
    }
    e->row[e->rows++] = row;
    return true;
}

static inline bool eval_read_row(EvalReader *r) {
    size_t n = eval_word(r), first = eval_word(r), count = eval_word(r), at = eval_tokens(r, n);
    EvalRow row = {n, first, count, at, at + first, 0};
    return eval_add(r, row);
}

static inline bool eval_read_example(EvalReader *r, size_t example) {
    size_t begin = r->at, mark = eval_word(r), bytes = eval_word(r);
    eval_word(r);  // its number
    size_t label = eval_word(r), endings = eval_word(r), n = eval_word(r);
    if (r->ok && (mark != EVAL_EXAMPLE || label >= endings)) {
        return error_set(r->err, "%s: example %zu begins with %zu instead of %d, or its label %zu is none of %zu "
                         "endings", r->path, example, mark, EVAL_EXAMPLE, label, endings);
    }
    size_t context = eval_tokens(r, n);
    for (size_t k = 0; k < endings && r->ok; k++) {
        size_t count = eval_word(r), ending = eval_tokens(r, count);
        EvalRow row = {n + count, n, count, context, ending, example};
        r->ok = eval_add(r, row);
    }
    r->e->label[r->e->examples++] = label;
    size_t has = r->e->word_bytes * (r->at - begin);
    return r->ok && (has == bytes || error_set(r->err, "%s: example %zu says that it has %zu bytes, but has %zu",
                                               r->path, example, bytes, has));
}

static inline bool eval_read(EvalReader *r, const int32_t *header, size_t bytes) {
    EvalFile *e = r->e;
    bool choices = header[0] == EVAL_CHOICES_MAGIC, ok = true;
    if ((header[0] != EVAL_MAGIC && !choices) || header[1] < 1 || header[1] > 2) {
        return error_set(r->err, "%s is no evaluation file: it begins with %d and version %d, not with %d or %d and "
                         "version 1 or 2", r->path, (int)header[0], (int)header[1], EVAL_MAGIC, EVAL_CHOICES_MAGIC);
    }
    if (header[2] < 1 || (size_t)header[2] > e->count ||
        (!choices && (header[3] < EVAL_TEXT || header[3] > EVAL_CLOZE || header[5] < 0))) {
        return error_set(r->err, "%s says that it has %d rows of kind %d in %zu words: kinds are 1 (text) and 2 "
                         "(cloze)", r->path, (int)header[2], (int)header[3], e->count);
    }
    if (!choices && header[4] != (int32_t)r->V) {
        return error_set(r->err, "%s is in tokens of a vocabulary of %d, and the model's is %zu: prepare it with that "
                         "tokenizer", r->path, (int)header[4], r->V);
    }
    size_t count = (size_t)header[2];
    e->kind = choices ? EVAL_CHOICES : (EvalKind)header[3];
    e->words = choices ? 0 : (size_t)header[5];
    e->label = (size_t *)host_alloc(choices ? count : 0, sizeof(size_t));
    for (size_t i = 0; i < count && ok; i++) ok = choices ? eval_read_example(r, i) : eval_read_row(r);
    size_t end = EVAL_HEADER_BYTES + e->word_bytes * r->at;
    if (!ok || end == bytes) return ok;
    return error_set(r->err, "%s has %zu bytes behind its last row", r->path, bytes - end);
}

// Reads a file of either layout. eval_close frees it; after an error nothing is left to free.
static inline bool eval_open(EvalFile *e, const char *path, size_t V, size_t T, Error *err) {
    size_t bytes;
    int32_t header[EVAL_HEADER_BYTES / 4] = {0};
    EvalReader r = {e, path, 0, V, T, true, err};
    memset(e, 0, sizeof *e);
    e->data = file_read(path, EVAL_MAX_FILE, &bytes, err);
    if (!e->data) return false;
    if (bytes >= EVAL_HEADER_BYTES) {
        memcpy(header, e->data, sizeof header);
        e->word_bytes = header[1] == 2 ? 4 : 2;
        e->count = (bytes - EVAL_HEADER_BYTES) / e->word_bytes;
    }
    bool ok = eval_read(&r, header, bytes);
    if (!ok) eval_close(e);
    return ok;
}

#endif
