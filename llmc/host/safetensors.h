// safetensors.h: .safetensors files: 8 bytes header length, a JSON header that gives each
// tensor's type, shape and place, then the data. Readers and writers touch slices, never
// the whole file; several processes can write disjoint slices of one file. Hugging Face
// splits large models: model.safetensors.index.json says which file has which tensor.
//
// A checksum adds up, modulo 2^64, a mix of place and bits of every element. Every rank
// adds its own elements, in any order. The sums of all ranks add up to the sums of the
// whole tensors, in every layout. Checksums find accidental damage; they do not protect
// against a forger.
//
// defines: SafeTensors, STEntry, ST_TYPES, st_open, st_find, st_read, st_read_floats,
//          st_compare, st_close, checksum_element, st_sum, st_write_floats
#ifndef LLMC_SAFETENSORS_H
#define LLMC_SAFETENSORS_H

#include "llmc/host/bf16.h"
#include "llmc/host/json.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "safetensors files are little-endian, and so must the machine be"
#endif

enum { ST_MAX_HEADER = 100000000, ST_STAGE = 16384, ST_MAX_FILES = 1000 };

// Rows of ST_TYPES. No model has types from ST_OTHER on.
enum { ST_F32, ST_BF16, ST_F16, ST_F64, ST_OTHER };

typedef struct {
    char *name;      // comes first: compare_names sorts entries
    char *shape;     // as JSON, [2,3]
    int dtype;       // row of ST_TYPES
    size_t count;    // elements: the product of the shape
    uint64_t begin;  // byte of the file
    uint64_t bytes;  // how many it has there
    size_t file;     // which of the files
} STEntry;

typedef struct {
    char *path;  // the file, or the index
    size_t count;
    STEntry *entries;  // [count] sorted by name
    size_t file_count;
    int *files;  // [file_count] open
} SafeTensors;

// The types that the format knows, and their widths in bytes. The last row is for all other
// types, of any width, so that a file with newer types opens, too.
static const struct {
    const char *name;
    size_t width;
} ST_TYPES[] = {
    {"F32", 4},     {"BF16", 2},    {"F16", 2},
    {"F64", 8},     {"BOOL", 1},    {"U8", 1},
    {"I8", 1},      {"F8_E4M3", 1}, {"F8_E5M2", 1},
    {"F8_E8M0", 1}, {"I16", 2},     {"U16", 2},
    {"I32", 4},     {"U32", 4},     {"I64", 8},
    {"U64", 8},     {"C64", 8},     {"of an unknown dtype", 0},
};
enum { ST_TYPE_COUNT = (int)(sizeof ST_TYPES / sizeof ST_TYPES[0]) };

// Converts a half-precision number. A subnormal has no leading 1 and the exponent of the
// smallest normal.
static inline float st_from_f16(uint16_t x) {
    int exponent = x >> 10 & 31, fraction = x & 1023;
    float size = ldexpf((float)(exponent ? 1024 + fraction : fraction),
                        (exponent ? exponent : 1) - 25);
    if (exponent == 31) size = fraction ? NAN : INFINITY;
    return x & 0x8000 ? -size : size;
}

static inline void st_close(SafeTensors *st) {
    for (size_t i = 0; i < st->file_count; i++) close(st->files[i]);
    for (size_t i = 0; i < st->count; i++) {
        free(st->entries[i].name);
        free(st->entries[i].shape);
    }
    free(st->files);
    free(st->path);
    free(st->entries);
    memset(st, 0, sizeof *st);
}

static inline int st_compare_places(const void *a, const void *b) {
    const STEntry *x = (const STEntry *)a, *y = (const STEntry *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    // An empty tensor comes before the one behind it.
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

// Fills in an entry, without its file. begin is relative to the data.
static inline bool st_parse_entry(STEntry *x, const cJSON *item, const char *path,
                                  Error *err) {
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(item, "dtype"), *number;
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(item, "shape");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
    x->name = host_string(item->string);
    if (!cJSON_IsString(dtype) || !cJSON_IsArray(shape) || !cJSON_IsArray(offsets) ||
        cJSON_GetArraySize(offsets) != 2) {
        return error_set(err, "%s: tensor %s lacks a dtype, a shape or two data_offsets",
                         path, x->name);
    }
    while (ST_TYPES[x->dtype].width &&
           strcmp(ST_TYPES[x->dtype].name, dtype->valuestring) != 0)
        x->dtype++;
    x->shape = (char *)host_check(cJSON_PrintUnformatted(shape), 1, 1);
    x->count = 1;
    cJSON_ArrayForEach(number, shape) {
        uint64_t n;
        if (!json_whole(number, &n) ||
            __builtin_mul_overflow(x->count, (size_t)n, &x->count))
            return error_set(err, "%s: tensor %s has an absurd shape", path, x->name);
    }
    uint64_t end;
    size_t bytes, width = ST_TYPES[x->dtype].width;
    if (!json_whole(offsets->child, &x->begin) || !json_whole(offsets->child->next, &end) ||
        x->begin > end) {
        return error_set(err, "%s: tensor %s has absurd data_offsets", path, x->name);
    }
    x->bytes = end - x->begin;
    if (width && (__builtin_mul_overflow(x->count, width, &bytes) || bytes != x->bytes)) {
        return error_set(err, "%s: tensor %s has data_offsets that contradict its shape",
                         path, x->name);
    }
    return true;
}

// Refuses a file whose tensors do not tile its data exactly: no overlap, no hole, nothing
// behind the last one.
static inline bool st_check_places(STEntry *x, size_t count, uint64_t data,
                                   uint64_t file_size, const char *path, Error *err) {
    qsort(x, count, sizeof *x, st_compare_places);
    uint64_t at = 0;
    for (size_t i = 0; i < count; i++, x++) {
        if (x->begin != at)
            return error_set(err,
                             "%s: tensor %s overlaps another one or has a hole before it",
                             path, x->name);
        at += x->bytes;
        x->begin += data;
    }
    return data + at == file_size ||
           error_set(err, "%s %s: its tensors need %llu bytes, and it has %llu", path,
                     data + at > file_size ? "is truncated"
                                           : "has bytes that belong to no tensor",
                     (unsigned long long)(data + at), (unsigned long long)file_size);
}

// Opens a file, adds its tensors to *st and sorts all of them by name, for st_find.
static inline bool st_add(SafeTensors *st, const char *path, int flags, Error *err) {
    uint64_t length, size;
    size_t before = st->count;
    int fd = file_open(path, flags, &size, err);
    if (fd < 0) return false;
    st->files = (int *)host_resize(st->files, st->file_count + 1, sizeof(int));
    st->files[st->file_count++] = fd;  // closed by st_close
    if (size < 8)
        return error_set(err, "%s is truncated: it has no safetensors header", path);
    if (!file_read_at(fd, &length, 8, 0))
        return error_set(err, "cannot read %s: %s", path, file_read_failure());
    if (length > ST_MAX_HEADER)
        return error_set(err, "%s is no safetensors file: its header claims %llu bytes",
                         path, (unsigned long long)length);
    if (length > size - 8) return error_set(err, "%s is truncated inside its header", path);
    char *text = (char *)host_alloc((size_t)length + 1, 1);
    bool whole =
        file_read_at(fd, text, (size_t)length, 8) ||
        error_set(err, "cannot read the header of %s: %s", path, file_read_failure());
    cJSON *root = whole ? json_parse(text, (size_t)length, path, err) : NULL;
    free(text);
    const cJSON *item;
    bool ok = root != NULL;
    st->entries = (STEntry *)host_resize(
        st->entries, before + (size_t)cJSON_GetArraySize(root), sizeof(STEntry));
    cJSON_ArrayForEach(item, root) {
        STEntry *x = &st->entries[st->count];
        if (!ok || strcmp(item->string, "__metadata__") == 0) continue;
        memset(x, 0, sizeof *x);
        x->file = st->file_count - 1;
        ok = st_parse_entry(x, item, path, err);
        st->count++;
    }
    cJSON_Delete(root);
    ok = ok && st_check_places(st->entries + before, st->count - before, 8 + length, size,
                               path, err);
    qsort(st->entries, st->count, sizeof(STEntry), compare_names);
    return ok;
}

// Returns the tensor of that name, or NULL.
static inline STEntry *st_find(const SafeTensors *st, const char *name) {
    return (STEntry *)bsearch(&name, st->entries, st->count, sizeof(STEntry),
                              compare_names);
}

// Adds the tensors of all files that the weight_map of the index st->path names. Both must
// agree on every one of them.
static inline bool st_add_listed(SafeTensors *st, const cJSON *map, Error *err) {
    const cJSON *item;
    const char *names[ST_MAX_FILES], *slash = strrchr(st->path, '/');
    int folder = slash ? (int)(slash + 1 - st->path) : 0;
    size_t k, number = 0;
    if (!cJSON_IsObject(map) || !map->child)
        return error_set(err, "%s has no \"weight_map\"", st->path);
    cJSON_ArrayForEach(item, map) {
        char path[PATH_MAX];
        const char *name = cJSON_IsString(item) ? item->valuestring : "";
        if (!name[0] || strchr(name, '/') || name[0] == '.')
            return error_set(err,
                             "%s: entry %zu of its \"weight_map\" is no tensor with a file "
                             "of this folder",
                             st->path, number);
        number++;
        for (k = 0; k < st->file_count && strcmp(names[k], name) != 0;) k++;
        if (k == ST_MAX_FILES)
            return error_set(err, "%s names more than %d files", st->path,
                             (int)ST_MAX_FILES);
        names[k] = name;
        if (!path_print(path, err, "%.*s%s", folder, st->path, name)) return false;
        if (access(path, F_OK) != 0)
            return error_set(err, "%s lies: it puts tensor %s into %s, which is not there",
                             st->path, item->string, path);
        if (k == st->file_count && !st_add(st, path, O_RDONLY, err)) return false;
        const STEntry *x = st_find(st, item->string);
        if (!x || x->file != k)
            return error_set(err,
                             "%s lies: it puts tensor %s into %s, which does not have it",
                             st->path, item->string, path);
    }
    // JSON has no name twice, so each listed tensor is another one.
    return number == st->count ||
           error_set(err, "%s lies: it lists %zu tensors, and its files have %zu", st->path,
                     number, st->count);
}

// Opens a file. If PATH.index.json is there instead, opens all files of this index as if
// they were one. flags: O_RDONLY, or O_RDWR for a rank that fills in its slices of a file
// that slices_create has made. Returns false with an error message, and nothing to close,
// if a file is not sound.
static inline bool st_open(SafeTensors *st, const char *path, int flags, Error *err) {
    char index[PATH_MAX];
    memset(st, 0, sizeof *st);
    if (!path_print(index, err, "%s.index.json", path)) return false;
    bool split = access(path, F_OK) != 0 && access(index, F_OK) == 0;
    st->path = host_string(split ? index : path);
    cJSON *root = split ? json_read(index, ST_MAX_HEADER, err) : NULL;
    const cJSON *map = cJSON_GetObjectItemCaseSensitive(root, "weight_map");
    bool ok = split ? root && st_add_listed(st, map, err) : st_add(st, path, flags, err);
    cJSON_Delete(root);
    if (!ok) st_close(st);
    return ok;
}

// Reads elements [first, first + count) of a tensor as they stand in the file.
static inline bool st_read(const SafeTensors *st, const STEntry *x, size_t first,
                           size_t count, void *out, Error *err) {
    size_t width = ST_TYPES[x->dtype].width;
    return file_read_at(st->files[x->file], out, count * width,
                        x->begin + (uint64_t)first * width) ||
           error_set(err, "cannot read tensor %s of %s: %s", x->name, st->path,
                     file_read_failure());
}

// Reads them as floats if the type is floating-point: F32, BF16 and F16 exactly, F64
// rounded.
static inline bool st_read_floats(const SafeTensors *st, const STEntry *x, size_t first,
                                  size_t count, float *out, Error *err) {
    union {
        uint16_t half[ST_STAGE];
        double wide[ST_STAGE];
    } stage;
    if (x->dtype == ST_F32) return st_read(st, x, first, count, out, err);
    for (size_t i = 0; i < count; i += ST_STAGE) {
        size_t n = count - i < ST_STAGE ? count - i : (size_t)ST_STAGE;
        if (!st_read(st, x, first + i, n, &stage, err)) return false;
        for (size_t j = 0; j < n; j++) {
            out[i + j] = x->dtype == ST_BF16  ? bf16_to_float(stage.half[j])
                         : x->dtype == ST_F16 ? st_from_f16(stage.half[j])
                                              : (float)stage.wide[j];
        }
    }
    return true;
}

// Sets *same to true if two tensors have the same shape and, as floats, the same values.
static inline bool st_compare(const SafeTensors *st, const STEntry *x, const STEntry *y,
                              bool *same, Error *err) {
    float a[ST_STAGE], b[ST_STAGE];
    *same = strcmp(x->shape, y->shape) == 0 && x->dtype < ST_OTHER && y->dtype < ST_OTHER;
    for (size_t i = 0, n; i < x->count && *same; i += n) {
        n = x->count - i < ST_STAGE ? x->count - i : (size_t)ST_STAGE;
        if (!st_read_floats(st, x, i, n, a, err) || !st_read_floats(st, y, i, n, b, err))
            return false;
        *same = memcmp(a, b, n * sizeof(float)) == 0;
    }
    return true;
}

// Returns an element's part of its tensor's sum: the finalizer of SplitMix64 (Steele et al.
// 2014) on place and bits.
static inline uint64_t checksum_element(uint64_t place, uint32_t bits) {
    uint64_t x = place * 0x9e3779b97f4a7c15u + bits;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// Adds up elements [first, first + count) of a tensor, F32 or BF16, as they stand in the
// file.
static inline uint64_t checksum_values(const void *values, int dtype, size_t first,
                                       size_t count) {
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        uint16_t half;
        if (dtype == ST_BF16) {
            memcpy(&half, (const char *)values + 2 * i, 2);
            bits = half;
        } else
            memcpy(&bits, (const char *)values + 4 * i, 4);
        sum += checksum_element(first + i, bits);
    }
    return sum;
}

// Adds one of `shares` shares of a tensor's checksum: every shares-th piece. *piece counts
// pieces over all tensors. The tensor must have the type that it was saved with.
static inline bool st_sum(const SafeTensors *st, const STEntry *x, size_t share,
                          size_t shares, size_t *piece, uint64_t *sum, Error *err) {
    enum { PIECE = 1 << 16 };
    uint32_t stage[PIECE];
    if (x->dtype != ST_F32 && x->dtype != ST_BF16)
        return error_set(err, "%s: tensor %s is neither F32 nor BF16, as it was saved",
                         st->path, x->name);
    for (size_t first = 0, n; first < x->count; first += n) {
        n = x->count - first < PIECE ? x->count - first : (size_t)PIECE;
        if ((*piece)++ % shares != share) continue;
        if (!st_read(st, x, first, n, stage, err)) return false;
        *sum += checksum_values(stage, x->dtype, first, n);
    }
    return true;
}

// Writes elements [first, first + count) of an F32 tensor, or of a BF16 one, rounded to
// nearest even. Adds their checksum to *sum, unless it is NULL.
static inline bool st_write_floats(const SafeTensors *st, const STEntry *x, size_t first,
                                   size_t count, const float *in, uint64_t *sum,
                                   Error *err) {
    uint16_t half[ST_STAGE];
    size_t width = ST_TYPES[x->dtype].width;
    for (size_t i = 0; i < count; i += ST_STAGE) {
        size_t n = count - i < ST_STAGE ? count - i : (size_t)ST_STAGE;
        for (size_t j = 0; j < n && x->dtype == ST_BF16; j++)
            half[j] = bf16_from_float(in[i + j]);
        const void *from = x->dtype == ST_BF16 ? (const void *)half
                                               : (const void *)(in + i);
        if (sum) *sum += checksum_values(from, x->dtype, first + i, n);
        if (!file_write_at(st->files[0], from, n * width,
                           x->begin + (uint64_t)(first + i) * width))
            return error_set(err, "cannot write %s: %s", st->path, strerror(errno));
    }
    return true;
}

#endif
