// json.h: reading JSON files that may be foreign, damaged or hostile (the parser is cJSON).
//
// defines: json_read, json_parse, json_get, json_whole
#ifndef LLMC_JSON_H
#define LLMC_JSON_H

#include "llmc/host/file.h"

#include <cjson/cJSON.h>
#include <math.h>

// Would parsing take more than 10 times the file and 64 MiB? Counts, a little high, what cJSON allocates: 80 bytes a
// value, and each string with 24 bytes of overhead. Hostile files make tens of bytes of each of theirs.
static inline bool json_is_bloated(const char *text, size_t bytes) {
    size_t values = 1, strings = 0;
    bool inside = false;
    for (size_t i = 0; i < bytes; i++) {
        if (inside && text[i] == '\\') i++;
        else if (text[i] == '"') strings += inside = !inside;
        else if (!inside) values += text[i] == ',' || text[i] == '[' || text[i] == '{';
    }
    return values * 80 + strings * 24 > 9 * bytes + ((size_t)64 << 20);
}

// Parses text[bytes] (with a NUL behind it), all of which must be one JSON object. cJSON bounds the nesting.
static inline cJSON *json_parse(const char *text, size_t bytes, const char *file, Error *err) {
    const char *end = NULL;
    if (json_is_bloated(text, bytes)) {
        error_set(err, "%s has more values than a file of its size should", file);
        return NULL;
    }
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
