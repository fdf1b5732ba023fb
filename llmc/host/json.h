// json.h: reads JSON files that may be damaged or hostile. The parser is cJSON.
//
// defines: json_read, json_parse, json_get, json_whole, json_set_field, json_print_field
#ifndef LLMC_JSON_H
#define LLMC_JSON_H

#include "llmc/host/field.h"
#include "llmc/host/file.h"

#include <cjson/cJSON.h>
#include <inttypes.h>

#define JSON_MAX_WHOLE 9007199254740991.0  // 2^53 - 1: larger whole numbers are not exact in cJSON's doubles

// True if parsing would take more than 10 times the file and 64 MiB. Estimates the memory of cJSON, a little high: 80
// bytes for a value and 24 for a string. Hostile files need many more bytes than they have.
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

// Parses text[bytes], which a NUL follows. Returns NULL with a sentence unless it is one JSON object. The caller frees
// it with cJSON_Delete. cJSON limits the nesting.
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

// Sets *item to the member of that name, or NULL if there is none. Returns false with a sentence if it is there twice.
static inline bool json_get(const cJSON *object, const char *key, const cJSON **item, const char *file, Error *err) {
    *item = NULL;
    const cJSON *child;
    cJSON_ArrayForEach(child, object) {
        if (!child->string || strcmp(child->string, key) != 0) continue;
        if (*item) return error_set(err, "%s has \"%s\" twice", file, key);
        *item = child;
    }
    return true;
}

// Reads a whole number from 0 to JSON_MAX_WHOLE. Returns false for anything else.
static inline bool json_whole(const cJSON *item, uint64_t *out) {
    if (!cJSON_IsNumber(item)) return false;
    double x = item->valuedouble;
    if (!(x >= 0.0 && x <= JSON_MAX_WHOLE) || x != floor(x)) return false;
    *out = (uint64_t)x;
    return true;
}

// Sets a field of the struct. Returns false if the item has another type or a value that field_wanted does not name. A
// choice is its name or its position.
static inline bool json_set_field(void *object, const Field *f, const cJSON *item) {
    if (f->type == FIELD_SWITCH) return cJSON_IsBool(item) && field_set(object, f, cJSON_IsTrue(item) ? "1" : "0");
    if (f->type == FIELD_CHOICE && cJSON_IsNumber(item)) {
        uint64_t position, count = 1;
        for (const char *c = f->value; *c; c++) count += *c == '|';
        if (!json_whole(item, &position) || position >= count) return false;
        *(int *)(void *)((char *)object + f->offset) = (int)position;
        return true;
    }
    if (f->type == FIELD_SEED || f->type == FIELD_CHOICE || f->type == FIELD_CHARS)
        return cJSON_IsString(item) && field_set(object, f, item->valuestring);
    char number[32];
    uint64_t whole;
    if (!cJSON_IsNumber(item) || (f->type == FIELD_SIZE && !json_whole(item, &whole))) return false;
    snprintf(number, sizeof number, "%.17g", item->valuedouble);
    return field_set(object, f, number);
}

// Prints a field as JSON, a choice as its position. 17 digits give back the same double.
static inline void json_print_field(const void *object, const Field *f, char *text, size_t size) {
    const void *at = (const char *)object + f->offset;
    switch (f->type) {
        case FIELD_SIZE: snprintf(text, size, "%zu", *(const size_t *)at); break;
        case FIELD_SEED: snprintf(text, size, "\"%" PRIu64 "\"", *(const uint64_t *)at); break;
        case FIELD_SWITCH: snprintf(text, size, "%s", *(const bool *)at ? "true" : "false"); break;
        case FIELD_CHOICE: snprintf(text, size, "%d", *(const int *)at); break;
        case FIELD_CHARS: snprintf(text, size, "\"%s\"", (const char *)at); break;
        default: snprintf(text, size, "%.17g", *(const double *)at);
    }
}

#endif
