// safetensors.h: .safetensors files: 8 bytes header length, a JSON header that gives each tensor's type, shape and
// place, then the data. Readers and writers touch slices, never the whole file; several processes can write disjoint
// slices of one file. Hugging Face splits large models: model.safetensors.index.json says which file has which tensor.
//
// A checksum adds up, modulo 2^64, a mix of place and bits of every element. So every rank adds what it writes, in any
// order, and the ranks' sums added together are those of the whole tensors, whatever the layout is. They find what
// disks, copies and people damage; they are no protection against somebody who means it.
//
// defines: SafeTensors, STEntry, st_open, st_open_index, st_find, st_read, st_read_floats, st_close, st_entry,
//          checksum_element, st_sum, st_create, st_write_floats, st_finish
#ifndef LLMC_SAFETENSORS_H
#define LLMC_SAFETENSORS_H

#include "llmc/host/bf16.h"
#include "llmc/host/json.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "safetensors files are little-endian, and so must the machine be"
#endif

enum { ST_NAME_SIZE = 128, ST_MAX_DIMS = 8, ST_MAX_HEADER = 100000000, ST_STAGE = 16384, ST_MAX_FILES = 1000 };

typedef enum { ST_F32, ST_BF16, ST_F16, ST_F64, ST_OTHER } STType;  // other: integers; they can be skipped

typedef struct {
    char name[ST_NAME_SIZE];
    STType dtype;
    int dims;
    size_t shape[ST_MAX_DIMS];
    size_t count;         // elements: the product of the shape
    size_t width;         // bytes of one element
    uint64_t begin, end;  // bytes of the file
    size_t file;          // which of the files
    bool listed;          // in the index
} STEntry;

typedef struct {
    char *path;        // the file, or the index
    size_t count;
    STEntry *entries;  // [count] sorted by name
    size_t file_count;
    int *files;        // [file_count] open
} SafeTensors;

// The types that the format knows and how wide they are.
static const struct {
    const char *name;
    STType type;
    size_t width;
} ST_TYPES[] = {
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
    for (size_t i = 0; i < st->file_count; i++) close(st->files[i]);
    free(st->files);
    free(st->path);
    free(st->entries);
    memset(st, 0, sizeof *st);
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
    size_t bytes, product = 1;  // of the sizes that are not 0
    x->count = 1;
    cJSON_ArrayForEach(number, shape) {
        uint64_t n;
        if (x->dims == ST_MAX_DIMS || !json_whole(number, &n))
            return error_set(err, "%s: tensor %s has a shape that is no list of at most %d sizes", path, x->name,
                             ST_MAX_DIMS);
        x->shape[x->dims++] = (size_t)n;
        if (n && __builtin_mul_overflow(product, (size_t)n, &product))
            return error_set(err, "%s: tensor %s has an absurd shape", path, x->name);
        x->count = n && x->count ? product : 0;
    }
    if (!json_whole(offsets->child, &x->begin) || !json_whole(offsets->child->next, &x->end) || x->begin > x->end) {
        return error_set(err, "%s: tensor %s has absurd data_offsets", path, x->name);
    }
    if (__builtin_mul_overflow(x->count, x->width, &bytes) || bytes != x->end - x->begin) {
        return error_set(err, "%s: tensor %s has data_offsets that contradict its shape", path, x->name);
    }
    return true;
}

// The tensors of one file must tile its data exactly: no overlap, no hole, nothing behind the last one.
static inline bool st_check_places(STEntry *x, size_t count, uint64_t data, uint64_t file_size, const char *path,
                                   Error *err) {
    qsort(x, count, sizeof *x, st_compare_places);
    uint64_t at = 0;
    for (size_t i = 0; i < count; i++, x++) {
        if (x->begin < at) return error_set(err, "%s: tensor %s overlaps another one", path, x->name);
        if (x->begin > at) return error_set(err, "%s: there is a hole before tensor %s", path, x->name);
        if (x->end > file_size - data)
            return error_set(err, "%s is truncated: tensor %s ends %llu bytes behind its end", path, x->name,
                             (unsigned long long)(x->end - (file_size - data)));
        at = x->end;
        x->begin += data;
        x->end += data;
    }
    return data + at == file_size || error_set(err, "%s has %llu bytes that belong to no tensor", path,
                                               (unsigned long long)(file_size - data - at));
}

// Opens a file and adds its tensors to those of *st.
static inline bool st_add(SafeTensors *st, const char *path, int flags, Error *err) {
    uint64_t length = 0, size;
    size_t got = 0, before = st->count;
    int fd = file_open(path, flags, &size, err);
    if (fd < 0) return false;
    st->files = (int *)host_resize(st->files, st->file_count + 1, sizeof(int));
    st->files[st->file_count++] = fd;  // closed by st_close
    if (!file_read_at(fd, &length, 8, 0, &got)) return error_set(err, "cannot read %s: %s", path, strerror(errno));
    if (got < 8) return error_set(err, "%s is truncated: it has no safetensors header", path);
    if (length > ST_MAX_HEADER)
        return error_set(err, "%s is no safetensors file: its header claims %llu bytes", path,
                         (unsigned long long)length);
    if (length > size - 8) return error_set(err, "%s is truncated inside its header", path);
    char *text = (char *)host_alloc((size_t)length + 1, 1);
    errno = 0;
    bool whole = file_read_at(fd, text, (size_t)length, 8, &got) && got == length, metadata = false;
    cJSON *root = whole ? json_parse(text, got, path, err) : NULL;
    free(text);
    if (!whole)
        return error_set(err, "cannot read the header of %s: %s", path, errno ? strerror(errno) : "it ends early");
    const cJSON *item;
    bool ok = root != NULL;
    st->entries = (STEntry *)host_resize(st->entries, before + (size_t)cJSON_GetArraySize(root), sizeof(STEntry));
    cJSON_ArrayForEach(item, root) {
        STEntry *x = &st->entries[st->count];
        bool is_metadata = strcmp(item->string, "__metadata__") == 0;
        if (is_metadata && metadata) ok = error_set(err, "%s has \"__metadata__\" twice", path);
        metadata |= is_metadata;
        if (!ok || is_metadata) continue;
        memset(x, 0, sizeof *x);
        x->file = st->file_count - 1;
        ok = st_parse_entry(x, item, path, err);
        st->count++;
    }
    cJSON_Delete(root);
    return ok && st_check_places(st->entries + before, st->count - before, 8 + length, size, path, err);
}

// The tensor of that very name, or NULL.
static inline STEntry *st_find_exactly(const SafeTensors *st, const char *name) {
    STEntry key;
    int n = snprintf(key.name, sizeof key.name, "%s", name);
    if (n < 0 || (size_t)n >= sizeof key.name) return NULL;
    return (STEntry *)bsearch(&key, st->entries, st->count, sizeof key, st_compare_names);
}

// Sorts by name, for st_find. False if two tensors have one name.
static inline bool st_sort(SafeTensors *st, Error *err) {
    if (st->count) qsort(st->entries, st->count, sizeof(STEntry), st_compare_names);
    for (size_t i = 1; i < st->count; i++) {
        if (strcmp(st->entries[i - 1].name, st->entries[i].name) == 0)
            return error_set(err, "%s has tensor %s twice", st->path, st->entries[i].name);
    }
    return true;
}

// Reads and checks the header. flags: O_RDONLY, or O_RDWR for a rank that fills in its slices of a file that st_create
// has made. False with a sentence, and nothing to close, for whatever is not a sound file.
static inline bool st_open(SafeTensors *st, const char *path, int flags, Error *err) {
    memset(st, 0, sizeof *st);
    st->path = host_string(path);
    bool ok = st_add(st, path, flags, err) && st_sort(st, err);
    if (!ok) st_close(st);
    return ok;
}

// Opens each file that the index names, and compares what the index says of each tensor with where it is.
static inline bool st_read_index(SafeTensors *st, const char *dir, const cJSON *map, Error *err) {
    const cJSON *item;
    const char *names[ST_MAX_FILES];
    size_t k, number = 0;
    cJSON_ArrayForEach(item, map) {
        char path[PATH_MAX];
        const char *name = cJSON_IsString(item) ? item->valuestring : "";
        if (!st_name_is_plain(name) || strchr(name, '/') || name[0] == '.' || !st_name_is_plain(item->string))
            return error_set(err, "%s: entry %zu of its \"weight_map\" is no tensor with a file of this folder",
                             st->path, number);
        number++;
        for (k = 0; k < st->file_count && strcmp(names[k], name) != 0;) k++;
        if (k < st->file_count) continue;
        if (k == ST_MAX_FILES) return error_set(err, "%s names more than %d files", st->path, (int)ST_MAX_FILES);
        names[k] = name;
        if (!path_print(path, sizeof path, err, "%s/%s", dir, name)) return false;
        if (access(path, F_OK) != 0)
            return error_set(err, "%s lies: it puts tensor %s into %s, which is not there", st->path, item->string,
                             path);
        if (!st_add(st, path, O_RDONLY, err)) return false;
    }
    if (!st_sort(st, err)) return false;
    cJSON_ArrayForEach(item, map) {
        STEntry *x = st_find_exactly(st, item->string);
        if (!x || strcmp(names[x->file], item->valuestring) != 0)
            return error_set(err, "%s lies: it puts tensor %s into %s, but %s has it", st->path, item->string,
                             item->valuestring, x ? names[x->file] : "no file");
        if (x->listed) return error_set(err, "%s lies: it lists tensor %s twice", st->path, x->name);
        x->listed = true;
    }
    for (size_t i = 0; i < st->count; i++) {
        const STEntry *x = &st->entries[i];
        if (!x->listed) return error_set(err, "%s lies: %s has tensor %s, which it does not list", st->path,
                                         names[x->file], x->name);
    }
    return true;
}

// Opens all files of an index to read from, as if they were one. False with a sentence, and nothing to close, if the
// index and the files do not agree on every tensor.
static inline bool st_open_index(SafeTensors *st, const char *dir, const char *index, Error *err) {
    const cJSON *map;
    memset(st, 0, sizeof *st);
    cJSON *root = json_read(index, ST_MAX_HEADER, err);
    if (!root) return false;
    st->path = host_string(index);
    bool ok = json_get(root, "weight_map", &map, index, err);
    if (ok && !(cJSON_IsObject(map) && map->child)) ok = error_set(err, "%s has no \"weight_map\"", index);
    ok = ok && st_read_index(st, dir, map, err);
    cJSON_Delete(root);
    if (!ok) st_close(st);
    return ok;
}

// The tensor of that name, with or without the prefix "transformer." on either side; NULL if there is none.
static inline const STEntry *st_find(const SafeTensors *st, const char *name) {
    static const char prefix[] = "transformer.";
    char other[ST_NAME_SIZE + sizeof prefix];
    const STEntry *found = st_find_exactly(st, name);
    if (found) return found;
    if (strncmp(name, prefix, sizeof prefix - 1) == 0) return st_find_exactly(st, name + sizeof prefix - 1);
    snprintf(other, sizeof other, "%s%s", prefix, name);
    return st_find_exactly(st, other);
}

static inline bool st_in_range(const SafeTensors *st, const STEntry *x, size_t first, size_t count, Error *err) {
    if (first <= x->count && count <= x->count - first) return true;
    return error_set(err, "%s: elements %zu to %zu of tensor %s do not exist", st->path, first, first + count, x->name);
}

// Elements [first, first + count) of a tensor as they stand in the file.
static inline bool st_read(const SafeTensors *st, const STEntry *x, size_t first, size_t count, void *out, Error *err) {
    size_t got, bytes = count * x->width;
    if (!st_in_range(st, x, first, count, err)) return false;
    errno = 0;
    uint64_t place = x->begin + (uint64_t)first * x->width;
    return (file_read_at(st->files[x->file], out, bytes, place, &got) && got == bytes) ||
           error_set(err, "cannot read tensor %s of %s: %s", x->name, st->path,
                     errno ? strerror(errno) : "the file has become shorter");
}

// The same as floats; F32, BF16 and F16 exactly, F64 rounded.
static inline bool st_read_floats(const SafeTensors *st, const STEntry *x, size_t first, size_t count,
                                  float *out, Error *err) {
    union { uint16_t half[ST_STAGE]; double wide[ST_STAGE / 4]; } stage;
    size_t step = x->dtype == ST_F64 ? ST_STAGE / 4 : ST_STAGE;
    if (x->dtype == ST_OTHER)
        return error_set(err, "%s: tensor %s holds no floating-point numbers", st->path, x->name);
    if (x->dtype == ST_F32 || !st_in_range(st, x, first, count, err)) return st_read(st, x, first, count, out, err);
    for (size_t i = 0; i < count; i += step) {
        size_t n = count - i < step ? count - i : step;
        if (!st_read(st, x, first + i, n, &stage, err)) return false;
        for (size_t j = 0; j < n; j++) {
            out[i + j] = x->dtype == ST_BF16 ? bf16_to_float(stage.half[j])
                       : x->dtype == ST_F16 ? st_from_f16(stage.half[j]) : (float)stage.wide[j];
        }
    }
    return true;
}

// What an element adds to its tensor's sum: the finalizer of SplitMix64 (Steele et al. 2014) on place and bits.
static inline uint64_t checksum_element(uint64_t place, uint32_t bits) {
    uint64_t x = place * 0x9e3779b97f4a7c15u + bits;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// Of elements [first, first + count) of a tensor, F32 or BF16, as they stand in the file.
static inline uint64_t checksum_values(const void *values, STType dtype, size_t first, size_t count) {
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        uint16_t half;
        if (dtype == ST_BF16) memcpy(&half, (const char *)values + 2 * i, 2), bits = half;
        else memcpy(&bits, (const char *)values + 4 * i, 4);
        sum += checksum_element(first + i, bits);
    }
    return sum;
}

// Adds one of `shares` shares of a tensor's checksum, every shares-th piece; *piece counts them over all tensors. The
// tensor must have the type that it was saved with.
static inline bool st_sum(const SafeTensors *st, const STEntry *x, size_t share, size_t shares, size_t *piece,
                          uint64_t *sum, Error *err) {
    enum { PIECE = 1 << 16 };
    bool ok = true;
    if (x->dtype != ST_F32 && x->dtype != ST_BF16)
        return error_set(err, "%s: tensor %s is neither F32 nor BF16, as it was saved", st->path, x->name);
    char *stage = (char *)host_alloc(PIECE, sizeof(float));
    for (size_t first = 0, n; first < x->count && ok; first += n) {
        n = x->count - first < PIECE ? x->count - first : (size_t)PIECE;
        if ((*piece)++ % shares != share) continue;
        ok = st_read(st, x, first, n, stage, err);
        if (ok) *sum += checksum_values(stage, x->dtype, first, n);
    }
    free(stage);
    return ok;
}

// Describes a tensor for st_create; dims 1: [cols], dims 2: [rows, cols].
static inline STEntry st_entry(const char *name, STType dtype, int dims, size_t rows, size_t cols) {
    STEntry x;
    memset(&x, 0, sizeof x);
    snprintf(x.name, sizeof x.name, "%s", name);
    x.dtype = dtype;
    x.dims = dims;
    x.shape[0] = dims == 1 ? cols : rows;
    if (dims == 2) x.shape[1] = cols;
    return x;
}

// How the header of weights begins; transformers wants to see the format "pt".
#define ST_START "{\"__metadata__\":{\"format\":\"pt\"}"

// The header of `specs`, padded with spaces so that the data starts at a multiple of 8. *bytes: of the data.
static inline char *st_make_header(const char *start, const STEntry *specs, size_t count, uint64_t *length,
                                   uint64_t *bytes) {
    size_t room = strlen(start) + 64 + count * (ST_NAME_SIZE + 128 + 21 * ST_MAX_DIMS), n = 0;
    char *text = (char *)host_alloc(room, 1);
    *bytes = 0;
    n += (size_t)snprintf(text, room, "%s", start);
    for (size_t i = 0; i < count; i++) {
        const STEntry *x = &specs[i];
        uint64_t begin = *bytes, size = ST_TYPES[x->dtype].width;
        n += (size_t)snprintf(text + n, room - n, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", x->name,
                              st_type_name(x->dtype));
        for (int d = 0; d < x->dims; d++) {
            size *= x->shape[d];
            n += (size_t)snprintf(text + n, room - n, "%s%zu", d ? "," : "", x->shape[d]);
        }
        *bytes += size;
        n += (size_t)snprintf(text + n, room - n, "],\"data_offsets\":[%llu,%llu]}",
                              (unsigned long long)begin, (unsigned long long)*bytes);
    }
    n += (size_t)snprintf(text + n, room - n, "}");
    while (n % 8) text[n++] = ' ';
    *length = n;
    return text;
}

// Creates (or empties) the file, writes the header of the specs (name, dtype, dims and shape are read; see
// st_entry) and reserves the space of the data. Then *st is open for writing. A file that fails is removed.
static inline bool st_create(SafeTensors *st, const char *path, const char *start, const STEntry *specs, size_t count,
                             Error *err) {
    uint64_t length, bytes;
    char *text = st_make_header(start, specs, count, &length, &bytes);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool ok = fd >= 0 && file_reserve(fd, 8 + length + bytes) && file_write_at(fd, &length, 8, 0) &&
              file_write_at(fd, text, length, 8);
    if (!ok)
        error_set(err, "cannot write %s (%.1f MiB): %s", path, (double)(8 + length + bytes) / 1048576.0,
                  strerror(errno));
    if (fd >= 0) close(fd);
    free(text);
    ok = ok && st_open(st, path, O_RDWR, err);
    if (!ok && fd >= 0) unlink(path);
    return ok;
}

// Writes elements [first, first + count) of an F32 tensor, or of a BF16 one, rounded to nearest even. Adds their
// checksum to *sum, unless it is NULL.
static inline bool st_write_floats(const SafeTensors *st, const STEntry *x, size_t first, size_t count,
                                   const float *in, uint64_t *sum, Error *err) {
    uint16_t half[ST_STAGE];
    size_t step = x->dtype == ST_BF16 ? (size_t)ST_STAGE : count;
    if (!st_in_range(st, x, first, count, err)) return false;
    if (x->dtype != ST_F32 && x->dtype != ST_BF16)
        return error_set(err, "%s: tensor %s is neither F32 nor BF16", st->path, x->name);
    for (size_t i = 0; i < count; i += step) {
        size_t n = count - i < step ? count - i : step;
        for (size_t j = 0; j < n && x->dtype == ST_BF16; j++) half[j] = bf16_from_float(in[i + j]);
        const void *from = x->dtype == ST_BF16 ? (const void *)half : (const void *)in;
        if (sum) *sum += checksum_values(from, x->dtype, first + i, n);
        if (!file_write_at(st->files[0], from, n * x->width, x->begin + (uint64_t)(first + i) * x->width))
            return error_set(err, "cannot write %s: %s", st->path, strerror(errno));
    }
    return true;
}

// Waits until what was written is on the disk, and closes.
static inline bool st_finish(SafeTensors *st, Error *err) {
    bool ok = fsync(st->files[0]) == 0 || error_set(err, "cannot write %s: %s", st->path, strerror(errno));
    st_close(st);
    return ok;
}

#endif
