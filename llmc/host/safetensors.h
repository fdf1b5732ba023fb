// safetensors.h: reading .safetensors files: 8 bytes header length, a JSON header that gives each tensor's type, shape
// and place, then the data. Readers touch slices, never the whole file. safetensors_write.h writes them.
//
// defines: SafeTensors, STEntry, st_open, st_find, st_read_floats, st_close
#ifndef LLMC_SAFETENSORS_H
#define LLMC_SAFETENSORS_H

#include "llmc/host/bf16.h"
#include "llmc/host/json.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "safetensors files are little-endian, and so must the machine be"
#endif

enum { ST_NAME_SIZE = 128, ST_MAX_DIMS = 8, ST_MAX_HEADER = 100000000, ST_STAGE = 16384 };

typedef enum { ST_F32, ST_BF16, ST_F16, ST_F64, ST_OTHER } STType;  // other: integers; they can be skipped

typedef struct {
    char name[ST_NAME_SIZE];
    STType dtype;
    int dims;
    size_t shape[ST_MAX_DIMS];
    size_t count;         // elements: the product of the shape
    size_t width;         // bytes of one element
    uint64_t begin, end;  // bytes of the file
    size_t part;          // 0: the file itself; k: parts[k - 1] of it (st_index.h)
} STEntry;

typedef struct {
    int fd;
    char *path;
    size_t count;
    STEntry *entries;  // [count] sorted by name
    size_t part_count;
    int *parts;        // [part_count] open files, if the tensors are split over several
} SafeTensors;

// The types that the format knows and how wide they are.
typedef struct {
    const char *name;
    STType type;
    size_t width;
} STTypeName;

static const STTypeName ST_TYPES[] = {
    {"F32", ST_F32, 4},       {"BF16", ST_BF16, 2}, {"F16", ST_F16, 2},   {"F64", ST_F64, 8},
    {"BOOL", ST_OTHER, 1},    {"U8", ST_OTHER, 1},  {"I8", ST_OTHER, 1},  {"F8_E4M3", ST_OTHER, 1},
    {"F8_E5M2", ST_OTHER, 1}, {"I16", ST_OTHER, 2}, {"U16", ST_OTHER, 2}, {"I32", ST_OTHER, 4},
    {"U32", ST_OTHER, 4},     {"I64", ST_OTHER, 8}, {"U64", ST_OTHER, 8}, {"C64", ST_OTHER, 8},
};
enum { ST_TYPE_COUNT = (int)(sizeof ST_TYPES / sizeof ST_TYPES[0]) };

static inline const char *st_type_name(STType type) {
    return type == ST_OTHER ? "integer" : ST_TYPES[type].name;
}

static inline float st_float_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float st_from_f16(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 1023;
    if (exponent == 31) return st_float_from_bits(sign | 0x7f800000 | fraction << 13);
    if (exponent) return st_float_from_bits(sign | (exponent + 112) << 23 | fraction << 13);
    float tiny = (float)fraction / 16777216.0f;  // subnormal: fraction * 2^-24, exact
    return sign ? -tiny : tiny;
}

static inline void st_close(SafeTensors *st) {
    if (st->fd >= 0) close(st->fd);
    for (size_t i = 0; i < st->part_count; i++) close(st->parts[i]);
    free(st->parts);
    free(st->path);
    free(st->entries);
    memset(st, 0, sizeof *st);
    st->fd = -1;
}

static inline int st_compare_names(const void *a, const void *b) {
    return strcmp(((const STEntry *)a)->name, ((const STEntry *)b)->name);
}

static inline int st_compare_places(const void *a, const void *b) {
    const STEntry *x = (const STEntry *)a, *y = (const STEntry *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

// Names end up in sentences on a terminal, so only printable ASCII is taken.
static inline bool st_name_is_plain(const char *name) {
    size_t n = 0;
    for (; name[n]; n++) {
        if (name[n] < ' ' || name[n] > '~' || n + 1 >= ST_NAME_SIZE) return false;
    }
    return n > 0;
}

// Fills in dtype, shape, count and place (relative to the data) of one member of the header.
static inline bool st_parse_entry(STEntry *x, const cJSON *item, const char *path, Error *err) {
    if (!st_name_is_plain(item->string)) {
        return error_set(err, "%s has a tensor whose name is empty, unprintable or longer than %d", path,
                         ST_NAME_SIZE - 1);
    }
    snprintf(x->name, sizeof x->name, "%s", item->string);
    const cJSON *dtype, *shape, *offsets, *number;
    if (!json_get(item, "dtype", &dtype, path, err) || !json_get(item, "shape", &shape, path, err) ||
        !json_get(item, "data_offsets", &offsets, path, err)) return false;
    if (!cJSON_IsString(dtype) || !cJSON_IsArray(shape) || !cJSON_IsArray(offsets) ||
        cJSON_GetArraySize(offsets) != 2) {
        return error_set(err, "%s: tensor %s lacks a dtype, a shape or two data_offsets", path, x->name);
    }
    for (int i = 0; i < ST_TYPE_COUNT; i++) {
        if (strcmp(ST_TYPES[i].name, dtype->valuestring) != 0) continue;
        x->dtype = ST_TYPES[i].type;
        x->width = ST_TYPES[i].width;
    }
    if (!x->width) return error_set(err, "%s: tensor %s has an unknown dtype", path, x->name);
    x->count = 1;
    bool empty = false;
    cJSON_ArrayForEach(number, shape) {
        uint64_t n;
        if (x->dims == ST_MAX_DIMS || !json_whole(number, &n)) {
            return error_set(err, "%s: tensor %s has a shape that is no list of at most %d sizes", path,
                             x->name, ST_MAX_DIMS);
        }
        x->shape[x->dims++] = (size_t)n;
        empty |= n == 0;
        if (n && __builtin_mul_overflow(x->count, (size_t)n, &x->count)) {
            return error_set(err, "%s: tensor %s has an absurd shape", path, x->name);
        }
    }
    if (empty) x->count = 0;
    size_t bytes;
    if (!json_whole(offsets->child, &x->begin) || !json_whole(offsets->child->next, &x->end) ||
        x->begin > x->end) {
        return error_set(err, "%s: tensor %s has absurd data_offsets", path, x->name);
    }
    if (__builtin_mul_overflow(x->count, x->width, &bytes) || bytes != x->end - x->begin) {
        return error_set(err, "%s: tensor %s has data_offsets that contradict its shape", path, x->name);
    }
    return true;
}

// The tensors must tile the data exactly: no overlap, no hole, nothing behind the last one. No name twice.
static inline bool st_check_places(SafeTensors *st, uint64_t data, uint64_t file_size, Error *err) {
    qsort(st->entries, st->count, sizeof(STEntry), st_compare_places);
    uint64_t at = 0;
    for (size_t i = 0; i < st->count; i++) {
        STEntry *x = &st->entries[i];
        if (x->begin < at) return error_set(err, "%s: tensor %s overlaps another one", st->path, x->name);
        if (x->begin > at) return error_set(err, "%s: there is a hole before tensor %s", st->path, x->name);
        if (x->end > file_size - data) {
            return error_set(err, "%s is truncated: tensor %s ends %llu bytes behind its end", st->path,
                             x->name, (unsigned long long)(x->end - (file_size - data)));
        }
        at = x->end;
        x->begin += data;
        x->end += data;
    }
    if (data + at != file_size) {
        return error_set(err, "%s has %llu bytes that belong to no tensor", st->path,
                         (unsigned long long)(file_size - data - at));
    }
    qsort(st->entries, st->count, sizeof(STEntry), st_compare_names);
    for (size_t i = 1; i < st->count; i++) {
        if (strcmp(st->entries[i - 1].name, st->entries[i].name) == 0) {
            return error_set(err, "%s has tensor %s twice", st->path, st->entries[i].name);
        }
    }
    return true;
}

static inline bool st_parse(SafeTensors *st, uint64_t file_size, Error *err) {
    uint64_t length = 0;
    size_t got = 0, metadata = 0;
    if (!file_read_at(st->fd, &length, 8, 0, &got)) {
        return error_set(err, "cannot read %s: %s", st->path, strerror(errno));
    }
    if (got < 8) return error_set(err, "%s is truncated: it has no safetensors header", st->path);
    if (length > ST_MAX_HEADER) {
        return error_set(err, "%s is no safetensors file: its header claims %llu bytes", st->path,
                         (unsigned long long)length);
    }
    if (length > file_size - 8) return error_set(err, "%s is truncated inside its header", st->path);
    char *text = (char *)host_alloc((size_t)length + 1, 1);
    errno = 0;
    bool whole = file_read_at(st->fd, text, (size_t)length, 8, &got) && got == length;
    cJSON *root = whole ? json_parse(text, got, st->path, err) : NULL;
    free(text);
    if (!whole) {
        return error_set(err, "cannot read the header of %s: %s", st->path,
                         errno ? strerror(errno) : "it ends early");
    }
    if (!root) return false;
    const cJSON *item;
    bool ok = true;
    cJSON_ArrayForEach(item, root) {
        if (strcmp(item->string, "__metadata__") == 0) metadata++;
        else st->count++;
    }
    if (metadata > 1) ok = error_set(err, "%s has \"__metadata__\" twice", st->path);
    st->entries = (STEntry *)host_alloc(st->count, sizeof(STEntry));
    if (ok) {
        size_t i = 0;
        cJSON_ArrayForEach(item, root) {
            if (!ok || strcmp(item->string, "__metadata__") == 0) continue;
            ok = st_parse_entry(&st->entries[i++], item, st->path, err);
        }
    }
    cJSON_Delete(root);
    return ok && st_check_places(st, 8 + length, file_size, err);
}

static inline bool st_open_flags(SafeTensors *st, const char *path, int flags, Error *err) {
    memset(st, 0, sizeof *st);
    uint64_t size = 0;
    st->fd = file_open(path, flags, &size, err);
    if (st->fd < 0) return false;
    st->path = host_string(path);
    if (st_parse(st, size, err)) return true;
    st_close(st);
    return false;
}

// Reads and checks the header. False with a sentence, and nothing to close, for whatever is not a sound file.
static inline bool st_open(SafeTensors *st, const char *path, Error *err) {
    return st_open_flags(st, path, O_RDONLY, err);
}

// The tensor of that name, with or without the prefix "transformer." on either side; NULL if there is none.
static inline const STEntry *st_find(const SafeTensors *st, const char *name) {
    static const char prefix[] = "transformer.";
    STEntry key;
    const STEntry *found = NULL;
    for (int attempt = 0; attempt < 2 && !found; attempt++) {
        bool has_prefix = strncmp(name, prefix, sizeof prefix - 1) == 0;
        int n = attempt == 0 ? snprintf(key.name, sizeof key.name, "%s", name)
                : has_prefix ? snprintf(key.name, sizeof key.name, "%s", name + sizeof prefix - 1)
                             : snprintf(key.name, sizeof key.name, "%s%s", prefix, name);
        if (n < 0 || (size_t)n >= sizeof key.name) return NULL;
        found = (const STEntry *)bsearch(&key, st->entries, st->count, sizeof(STEntry), st_compare_names);
    }
    return found;
}

static inline bool st_in_range(const SafeTensors *st, const STEntry *x, size_t first, size_t count,
                               Error *err) {
    if (first <= x->count && count <= x->count - first) return true;
    return error_set(err, "%s: elements %zu to %zu of tensor %s do not exist", st->path, first, first + count,
                     x->name);
}

// The open file that a tensor is in.
static inline int st_file_of(const SafeTensors *st, const STEntry *x) {
    return x->part ? st->parts[x->part - 1] : st->fd;
}

// Elements [first, first + count) of a tensor as floats; F32, BF16 and F16 exactly, F64 rounded.
static inline bool st_read_floats(const SafeTensors *st, const STEntry *x, size_t first, size_t count,
                                  float *out, Error *err) {
    if (!st_in_range(st, x, first, count, err)) return false;
    if (x->dtype == ST_OTHER) {
        return error_set(err, "%s: tensor %s holds no floating-point numbers", st->path, x->name);
    }
    union { uint16_t half[ST_STAGE]; double wide[ST_STAGE / 4]; } stage;
    size_t step = x->dtype == ST_F32 ? count : x->dtype == ST_F64 ? ST_STAGE / 4 : ST_STAGE, got;
    for (size_t i = 0; i < count; i += step) {
        size_t n = count - i < step ? count - i : step;
        void *to = x->dtype == ST_F32 ? (void *)out : (void *)&stage;
        errno = 0;
        uint64_t place = x->begin + (uint64_t)(first + i) * x->width;
        if (!file_read_at(st_file_of(st, x), to, n * x->width, place, &got) || got < n * x->width) {
            return error_set(err, "cannot read tensor %s of %s: %s", x->name, st->path,
                             errno ? strerror(errno) : "the file has become shorter");
        }
        for (size_t j = 0; j < n && x->dtype != ST_F32; j++) {
            out[i + j] = x->dtype == ST_BF16 ? bf16_to_float(stage.half[j])
                       : x->dtype == ST_F16 ? st_from_f16(stage.half[j]) : (float)stage.wide[j];
        }
    }
    return true;
}

#endif
