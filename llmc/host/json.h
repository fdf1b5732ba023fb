// json.h: reads JSON files that may be damaged or hostile. The parser is cJSON.
//
// defines: JSON_MAX_WHOLE, compare_names, json_parse, json_read, json_whole,
//          json_member, json_set_member, json_set_field, json_print_field
#ifndef LLMC_JSON_H
#define LLMC_JSON_H

#include "llmc/host/field.h"
#include "llmc/host/file.h"

#include <cjson/cJSON.h>
#include <inttypes.h>

#define JSON_MAX_WHOLE \
    9007199254740991.0  // 2^53 - 1: larger whole numbers are not exact in cJSON's doubles

// True if parsing would take more than 10 times the file and 64 MiB. Estimates the memory
// of cJSON, a little high: 80 bytes for a value and 24 for a string. Hostile files make it
// allocate many times their size.
static inline bool json_is_bloated(const char *text, size_t bytes) {
    size_t values = 1, strings = 0;
    bool inside = false;
    for (size_t i = 0; i < bytes; i++) {
        if (inside && text[i] == '\\')
            i++;
        else if (text[i] == '"')
            strings += inside = !inside;
        else if (!inside)
            values += text[i] == ',' || text[i] == '[' || text[i] == '{';
    }
    return values * 80 + strings * 24 > 9 * bytes + ((size_t)64 << 20);
}

// Orders names, and structs that begin with one.
static inline int compare_names(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

// False with an error message if an object in the value has a name twice: cJSON would find
// the first, others the last.
static inline bool json_names_differ(const cJSON *value, const char *file, Error *err) {
    const cJSON *child;
    size_t count = 0;
    bool ok = true;
    if (!value->child) return true;
    const char **names =
        (const char **)host_alloc((size_t)cJSON_GetArraySize(value), sizeof *names);
    cJSON_ArrayForEach(child, value) {
        if (child->string) names[count++] = child->string;
        ok = ok && json_names_differ(child, file, err);
    }
    qsort(names, count, sizeof *names, compare_names);
    for (size_t i = 1; i < count && ok; i++) {
        if (strcmp(names[i - 1], names[i]) == 0)
            ok = error_set(err, "%s has \"%s\" twice: keep one", file, names[i]);
    }
    free(names);
    return ok;
}

// Parses text[bytes], which a NUL follows. Returns NULL with an error message unless it is
// one JSON object in which no object has a name twice. The caller frees it with
// cJSON_Delete. cJSON limits the nesting.
static inline cJSON *json_parse(const char *text, size_t bytes, const char *file,
                                Error *err) {
    const char *end = NULL;
    if (json_is_bloated(text, bytes)) {
        error_set(err, "%s has more values than a file of its size should", file);
        return NULL;
    }
    cJSON *root = cJSON_ParseWithOpts(text, &end, 0);
    while (root && end < text + bytes &&
           (*end == ' ' || *end == '\n' || *end == '\r' || *end == '\t'))
        end++;
    bool whole = root && end == text + bytes, is_object = whole && cJSON_IsObject(root);
    if (is_object && json_names_differ(root, file, err)) return root;
    if (whole && !is_object) error_set(err, "%s is not a JSON object", file);
    if (!whole)
        error_set(err, "%s is not valid JSON (byte %zu)", file,
                  end ? (size_t)(end - text) : 0);
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

// Reads a whole number from 0 to JSON_MAX_WHOLE. Returns false for anything else.
static inline bool json_whole(const cJSON *item, uint64_t *out) {
    if (!cJSON_IsNumber(item)) return false;
    double x = item->valuedouble;
    if (!(x >= 0.0 && x <= JSON_MAX_WHOLE) || x != floor(x)) return false;
    *out = (uint64_t)x;
    return true;
}

// Returns the end of the JSON value at `c`, or of the name, in valid JSON.
static inline const char *json_skip(const char *c) {
    int depth = 0;
    bool inside = false;
    for (; *c; c++) {
        if (inside && *c == '\\')
            c++;
        else if (*c == '"')
            inside = !inside;
        else if (inside)
            continue;
        else if (*c == '{' || *c == '[')
            depth++;
        else if ((*c == '}' || *c == ']') && --depth < 0)
            break;
        else if (depth == 0 && (*c == ',' || *c == ':'))
            break;
    }
    while (strchr(" \n\r\t", c[-1])) c--;
    return c;
}

// Finds a member of the object in a text of valid JSON. Returns its value and stores the
// value's end, or returns NULL.
static inline const char *json_member(const char *text, const char *key, const char **end) {
    for (const char *c = strchr(text, '{') + 1;; c++) {
        c += strspn(c, " \n\r\t");
        if (*c != '"') return NULL;  // an empty object
        cJSON *name = cJSON_ParseWithOpts(c, NULL, 0);
        bool found = name && strcmp(name->valuestring, key) == 0;
        cJSON_Delete(name);
        const char *value = strchr(json_skip(c), ':') + 1;
        value += strspn(value, " \n\r\t");
        *end = c = json_skip(value);
        if (found) return value;
        c += strspn(c, " \n\r\t");
        if (*c != ',') return NULL;
    }
}

// Sets a member of the object in a text of valid JSON to a value, which is JSON. It takes
// its old place, or comes behind the last one. All else stays byte for byte. Frees `text`
// and returns a new one, which the caller frees.
static inline char *json_set_member(char *text, const char *key, const char *value) {
    const char *end, *at = json_member(text, key, &end);
    const char *before = "", *after = at ? "" : "\n";
    char *made = (char *)host_alloc(strlen(text) + strlen(key) + strlen(value) + 16, 1);
    char name[64] = "";
    if (!at) {
        end = strrchr(text, '}');
        for (at = end; strchr(" \n\r\t", at[-1]);) at--;
        before = at[-1] == '{' ? "\n" : ",\n";
        snprintf(name, sizeof name, "  \"%s\": ", key);
    }
    sprintf(made, "%.*s%s%s%s%s%s", (int)(at - text), text, before, name, value, after,
            end);
    free(text);
    return made;
}

// Sets a field of the struct. Returns false if the item has another type or a value that
// field_wanted does not name. A choice is its name or its position.
static inline bool json_set_field(void *object, const Field *f, const cJSON *item) {
    if (f->type == FIELD_SWITCH)
        return cJSON_IsBool(item) && field_set(object, f, cJSON_IsTrue(item) ? "1" : "0");
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
    if (!cJSON_IsNumber(item)) return false;
    snprintf(number, sizeof number, "%.17g", item->valuedouble);
    return field_set(object, f, number);
}

// Prints a field as JSON, a choice as its position. 17 digits give back the same double.
static inline void json_print_field(const void *object, const Field *f, char *text,
                                    size_t size) {
    const void *at = (const char *)object + f->offset;
    switch (f->type) {
        case FIELD_SIZE: snprintf(text, size, "%zu", *(const size_t *)at); break;
        case FIELD_SEED:
            snprintf(text, size, "\"%" PRIu64 "\"", *(const uint64_t *)at);
            break;
        case FIELD_SWITCH:
            snprintf(text, size, "%s", *(const bool *)at ? "true" : "false");
            break;
        case FIELD_CHOICE: snprintf(text, size, "%d", *(const int *)at); break;
        case FIELD_CHARS: snprintf(text, size, "\"%s\"", (const char *)at); break;
        default: snprintf(text, size, "%.17g", *(const double *)at);
    }
}

#endif
