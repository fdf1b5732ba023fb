// files.h: helpers of tests that read and write files. Define _XOPEN_SOURCE 700 before the first
// include.
#ifndef LLMC_TEST_FILES_H
#define LLMC_TEST_FILES_H

#include <errno.h>
#include <ftw.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "llmc/host/file.h"

static inline void die(const char *what, const char *name) {
    fprintf(stderr, "%s %s: %s\n", what, name, strerror(errno));
    exit(1);
}

static inline void *allocate(size_t bytes) {
    void *p = calloc(bytes + 1, 1);
    if (!p) die("cannot allocate", "memory");
    return p;
}

// Returns the whole file with a 0 behind it, or NULL.
static inline char *read_file(const char *path, size_t *bytes) {
    size_t ignored;
    Error err;
    return file_read(path, SIZE_MAX, bytes ? bytes : &ignored, &err);
}

static inline void write_file(const char *path, const void *data, size_t bytes) {
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(data, 1, bytes, file) != bytes || fclose(file)) die("cannot write", path);
}

static inline void write_text(const char *path, const char *text) {
    write_file(path, text, strlen(text));
}

// Returns a path in a folder. The text is valid until 256 more calls.
static inline const char *in(const char *folder, const char *name) {
    static char *paths[256];
    static int next;
    char **path = &paths[next++ % 256];
    free(*path);
    *path = (char *)allocate(strlen(folder) + strlen(name) + 1);
    sprintf(*path, "%s/%s", folder, name);
    return *path;
}

// Returns true if the error is one sentence: some text, on one line, with this part.
static inline bool says(const Error *err, const char *part) {
    bool ok = err->text[0] && !strchr(err->text, '\n') && strstr(err->text, part);
    if (!ok) printf("     got: %s\n", err->text);
    return ok;
}

// Returns a copy of the text with the first `from` replaced by `to`.
static inline char *replaced(const char *text, const char *from, const char *to) {
    const char *at = strstr(text, from);
    char *out = (char *)allocate(strlen(text) + strlen(to));
    if (!at) die("nothing to replace:", from);
    sprintf(out, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    return out;
}

static inline bool file_exists(const char *path) {
    struct stat info;
    return stat(path, &info) == 0;
}

static inline bool same_file(const char *a, const char *b) {
    size_t bytes_a = 0, bytes_b = 0;
    char *text_a = read_file(a, &bytes_a), *text_b = read_file(b, &bytes_b);
    bool same = text_a && text_b && bytes_a == bytes_b && memcmp(text_a, text_b, bytes_a) == 0;
    free(text_a);
    free(text_b);
    return same;
}

static inline int remove_entry(const char *path, const struct stat *info, int type,
                               struct FTW *level) {
    (void)info, (void)type, (void)level;
    return remove(path);
}

static inline void remove_tree(const char *path) {
    nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

#endif
