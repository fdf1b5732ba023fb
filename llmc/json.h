// json.h: reading JSON files that may be foreign, damaged or hostile (the parser is cJSON).
//
// defines: json_read, json_parse, json_get, json_whole, file_read
#ifndef LLMC_JSON_H
#define LLMC_JSON_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/error.h"

// Reads up to `bytes` bytes at `offset`; *got is less only at the end of the file. False: errno says why.
static inline bool file_read_at(int fd, void *out, size_t bytes, uint64_t offset, size_t *got) {
    *got = 0;
    while (*got < bytes) {
        size_t ask = bytes - *got < ((size_t)1 << 30) ? bytes - *got : (size_t)1 << 30;  // Linux's limit is 2 GiB
        ssize_t n = pread(fd, (char *)out + *got, ask, (off_t)(offset + *got));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return false;
        if (n == 0) break;
        *got += (size_t)n;
    }
    return true;
}

// Opens a regular file and gives its size; -1 with a sentence for anything else, pipes and folders included.
static inline int file_open(const char *path, int flags, uint64_t *size, Error *err) {
    int fd = open(path, flags | O_CLOEXEC | O_NONBLOCK);  // O_NONBLOCK: a pipe must not block us here
    struct stat info;
    if (fd < 0 || fstat(fd, &info) != 0) {
        error_set(err, "cannot open %s: %s", path, strerror(errno));
        if (fd >= 0) close(fd);
        return -1;
    }
    if (!S_ISREG(info.st_mode)) {
        error_set(err, "cannot open %s: not a regular file", path);
        close(fd);
        return -1;
    }
    *size = (uint64_t)info.st_size;
    return fd;
}

// A whole small file, followed by a NUL that *bytes does not count; free() it. NULL: see err.
static inline char *file_read(const char *path, size_t max_bytes, size_t *bytes, Error *err) {
    uint64_t size;
    int fd = file_open(path, O_RDONLY, &size, err);
    if (fd < 0) return NULL;
    char *text = NULL;
    if (size > max_bytes) {
        error_set(err, "%s is too large: %llu bytes where at most %zu are expected", path,
                  (unsigned long long)size, max_bytes);
    } else if (!(text = (char *)malloc((size_t)size + 1))) {
        error_set(err, "cannot read %s: out of host memory", path);
    } else if (!file_read_at(fd, text, (size_t)size, 0, bytes)) {
        error_set(err, "cannot read %s: %s", path, strerror(errno));
        free(text);
        text = NULL;
    } else {
        text[*bytes] = '\0';
    }
    close(fd);
    return text;
}

// Parses text[bytes] (with a NUL behind it), all of which must be one JSON object. cJSON bounds the nesting.
static inline cJSON *json_parse(const char *text, size_t bytes, const char *file, Error *err) {
    const char *end = NULL;
    cJSON *root = cJSON_ParseWithOpts(text, &end, 0);
    while (root && end < text + bytes && (*end == ' ' || *end == '\n' || *end == '\r' || *end == '\t')) end++;
    if (root && end == text + bytes && cJSON_IsObject(root)) return root;
    if (root && end == text + bytes) error_set(err, "%s is not a JSON object", file);
    else error_set(err, "%s is not valid JSON (byte %zu)", file, end ? (size_t)(end - text) : 0);
    cJSON_Delete(root);
    return NULL;
}

static inline cJSON *json_read(const char *path, size_t max_bytes, Error *err) {
    size_t bytes;
    char *text = file_read(path, max_bytes, &bytes, err);
    cJSON *root = text ? json_parse(text, bytes, path, err) : NULL;
    free(text);
    return root;
}

// *item is the member of that name, or NULL where there is none. Fails if the name stands there twice.
static inline bool json_get(const cJSON *object, const char *key, const cJSON **item, const char *file,
                            Error *err) {
    *item = NULL;
    const cJSON *child;
    cJSON_ArrayForEach(child, object) {
        if (!child->string || strcmp(child->string, key) != 0) continue;
        if (*item) return error_set(err, "%s has \"%s\" twice", file, key);
        *item = child;
    }
    return true;
}

// A whole number from 0 to 2^53 - 1: beyond that cJSON's doubles are not exact.
static inline bool json_whole(const cJSON *item, uint64_t *out) {
    if (!cJSON_IsNumber(item)) return false;
    double x = item->valuedouble;
    if (!(x >= 0.0 && x < 9007199254740992.0) || x != floor(x)) return false;
    *out = (uint64_t)x;
    return true;
}

#endif
