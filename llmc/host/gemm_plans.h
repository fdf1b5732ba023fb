// gemm_plans.h: which algorithm of cuBLASLt a kind of matrix product takes, kept in a file, so that what one run has
// found by timing is what the next one takes: other algorithms add in other orders, and give other bits.
//
// The file begins with a line that says for what it holds (device, precision and version of cuBLASLt); then comes a
// line for each kind of product: its key and the algorithm, as hexadecimal words. Ranks share it: one at a time, under
// a lock, reads what the others have found, times what nobody has, and appends it.
//
// defines: GEMM_KEY, GEMM_ALGORITHM, GemmChoice, GemmChoices, gemm_choices_open, gemm_choices_update,
//          gemm_choices_close, gemm_choices_find, gemm_choices_begin, gemm_choices_end, gemm_choices_fail
#ifndef LLMC_GEMM_PLANS_H
#define LLMC_GEMM_PLANS_H

#include <sys/file.h>

#include "llmc/host/file.h"

// Words that tell kinds of product apart, those of an algorithm, and both.
enum { GEMM_KEY = 8, GEMM_ALGORITHM = 8, GEMM_WORDS = GEMM_KEY + GEMM_ALGORITHM };

typedef struct {
    uint64_t words[GEMM_WORDS];
} GemmChoice;

typedef struct {
    const char *path;     // NULL: no file, and the heuristic's first algorithm for every product
    int fd;
    uint64_t read;        // bytes of the file that have become choices
    GemmChoice *choices;  // [count], with room for the next power of two
    size_t count;
    bool timing;          // whether products that are not in the file are timed
} GemmChoices;

// Takes in what was appended since the last call. False, with a sentence, if a line is no choice.
static inline bool gemm_choices_update(GemmChoices *c, Error *err) {
    struct stat info;
    if (fstat(c->fd, &info) != 0) return error_set(err, "cannot read %s: %s", c->path, strerror(errno));
    if ((uint64_t)info.st_size < c->read) return error_set(err, "%s has become shorter", c->path);
    size_t bytes = (size_t)((uint64_t)info.st_size - c->read), got = 0;
    char *text = (char *)host_alloc(bytes + 1, 1);
    bool ok = file_read_at(c->fd, text, bytes, c->read, &got) && got == bytes && strlen(text) == bytes;
    for (char *at = text; ok && *at;) {
        GemmChoice choice;
        for (size_t i = 0; i < GEMM_WORDS && ok; i++) {  // one blank behind each, and a line's end behind the last
            size_t digits = strspn(at, "0123456789abcdef");
            ok = digits > 0 && digits <= 16 && at[digits] == (i + 1 < GEMM_WORDS ? ' ' : '\n');
            choice.words[i] = strtoull(at, NULL, 16);
            at += digits + ok;
        }
        if (!ok) break;
        if ((c->count & (c->count - 1)) == 0) {
            c->choices = (GemmChoice *)host_resize(c->choices, c->count ? 2 * c->count : 1, sizeof choice);
        }
        c->choices[c->count++] = choice;
    }
    free(text);
    c->read += bytes;
    return ok || error_set(err, "%s is damaged; remove it, and the products are timed anew", c->path);
}

static inline bool gemm_choices_write(const GemmChoices *c, const char *text, Error *err) {
    size_t bytes = strlen(text);
    errno = 0;
    if (write(c->fd, text, bytes) == (ssize_t)bytes) return true;
    return error_set(err, "cannot write %s: %s", c->path, errno ? strerror(errno) : "the disk is full");
}

// Takes the lock of the file for the first time; says so if that has to wait. Ranks of one run hold it but for a moment
// while they open it, another run for as long as it times a product.
static inline bool gemm_choices_lock(const GemmChoices *c) {
    for (int ms = 0; ms < 1000; ms++) {
        if (flock(c->fd, LOCK_EX | LOCK_NB) == 0) return true;
        if (errno != EWOULDBLOCK) return false;
        usleep(1000);
    }
    fflush(stdout);
    fprintf(stderr, "note: waiting for %s (--gemm-plans), which another run has locked\n", c->path);
    return flock(c->fd, LOCK_EX) == 0;
}

// Opens the file, or makes it. `head` is its first line, of at most 510 bytes: a file that begins otherwise is refused.
static inline bool gemm_choices_open(GemmChoices *c, const char *path, const char *head, Error *err) {
    char found[512] = "";
    memset(c, 0, sizeof *c);
    c->path = path;
    c->fd = open(path, O_RDWR | O_CREAT | O_APPEND, 0666);
    if (c->fd < 0 || !gemm_choices_lock(c)) return error_set(err, "cannot open %s: %s", path, strerror(errno));
    size_t got = 0;
    bool ok = file_read_at(c->fd, found, strlen(head), 0, &got);
    if (ok && got == 0) {
        ok = gemm_choices_write(c, head, err);
    } else if (!ok || strcmp(head, found) != 0) {
        found[strcspn(found, "\n")] = 0;
        ok = error_set(err, "%s does not hold the %.*s; give --gemm-plans another name", path, (int)strlen(head) - 1,
                       head);
    }
    c->read = strlen(head);
    ok = ok && gemm_choices_update(c, err);
    flock(c->fd, LOCK_UN);
    c->timing = ok;
    return ok;
}

static inline void gemm_choices_close(GemmChoices *c) {
    if (!c->path) return;
    free(c->choices);
    close(c->fd);
    memset(c, 0, sizeof *c);
}

// The algorithm that the file names for a kind of product: the first, if ranks once disagreed. False: none.
static inline bool gemm_choices_find(const GemmChoices *c, const uint64_t key[GEMM_KEY],
                                     uint64_t algorithm[GEMM_ALGORITHM]) {
    for (size_t i = 0; i < c->count; i++) {
        if (memcmp(c->choices[i].words, key, GEMM_KEY * sizeof *key) != 0) continue;
        memcpy(algorithm, c->choices[i].words + GEMM_KEY, GEMM_ALGORITHM * sizeof *algorithm);
        return true;
    }
    return false;
}

static inline void gemm_choices_fail(const Error *err) {
    fflush(stdout);
    fprintf(stderr, "error: %s\n", err->text);
    exit(1);
}

// Takes the lock, and looks again: true if another rank has found it meanwhile.
static inline bool gemm_choices_begin(GemmChoices *c, const uint64_t key[GEMM_KEY],
                                      uint64_t algorithm[GEMM_ALGORITHM]) {
    Error err;
    if (flock(c->fd, LOCK_EX) != 0) {
        error_set(&err, "cannot lock %s: %s", c->path, strerror(errno));
        gemm_choices_fail(&err);
    }
    if (!gemm_choices_update(c, &err)) gemm_choices_fail(&err);
    return gemm_choices_find(c, key, algorithm);
}

// Appends the choice, unless key is NULL, and gives the lock back.
static inline void gemm_choices_end(GemmChoices *c, const uint64_t *key, const uint64_t *algorithm) {
    Error err;
    GemmChoice choice;
    char line[GEMM_WORDS * 17 + 1];
    size_t length = 0;
    if (key) {
        memcpy(choice.words, key, GEMM_KEY * sizeof *key);
        memcpy(choice.words + GEMM_KEY, algorithm, GEMM_ALGORITHM * sizeof *algorithm);
        for (size_t i = 0; i < GEMM_WORDS; i++) {
            length += (size_t)snprintf(line + length, sizeof line - length, "%llx%c",
                                       (unsigned long long)choice.words[i], i + 1 < GEMM_WORDS ? ' ' : '\n');
        }
        if (!gemm_choices_write(c, line, &err) || !gemm_choices_update(c, &err)) gemm_choices_fail(&err);
    }
    flock(c->fd, LOCK_UN);
}

#endif
