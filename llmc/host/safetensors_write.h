// safetensors_write.h: writing .safetensors files (safetensors.h says what they are), slice by slice: several processes
// can write disjoint slices of one file.
//
// defines: st_entry, st_create, st_open_for_writing, st_write_floats, st_write_raw, st_finish
#ifndef LLMC_SAFETENSORS_WRITE_H
#define LLMC_SAFETENSORS_WRITE_H

#include "llmc/host/safetensors.h"

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
static inline char *st_make_header(const char *start, const STEntry *specs, size_t count, size_t *length, uint64_t *bytes) {
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

// For a rank that fills in its slices of a file that st_create has made.
static inline bool st_open_for_writing(SafeTensors *st, const char *path, Error *err) {
    return st_open_flags(st, path, O_RDWR, err);
}

// Creates (or empties) the file, writes the header of the specs (name, dtype, dims and shape are read; see
// st_entry) and reserves the space of the data. Then *st is open for writing. A file that fails is removed.
static inline bool st_create(SafeTensors *st, const char *path, const char *start, const STEntry *specs, size_t count,
                             Error *err) {
    uint64_t length = 0, bytes = 0;
    size_t n = 0;
    char *text = st_make_header(start, specs, count, &n, &bytes);
    length = n;
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool ok = fd >= 0 && file_reserve(fd, 8 + length + bytes) && file_write_at(fd, &length, 8, 0) &&
              file_write_at(fd, text, n, 8);
    if (!ok) {
        error_set(err, "cannot write %s (%.1f MiB): %s", path, (double)(8 + length + bytes) / 1048576.0,
                  strerror(errno));
    }
    if (fd >= 0) close(fd);
    free(text);
    if (ok) ok = st_open_for_writing(st, path, err);
    if (!ok && fd >= 0) unlink(path);
    return ok;
}

// Writes `bytes` bytes at byte `offset` of a tensor, as they are.
static inline bool st_write_raw(const SafeTensors *st, const STEntry *x, size_t offset, const void *data,
                                size_t bytes, Error *err) {
    if (offset > x->end - x->begin || bytes > x->end - x->begin - offset) {
        return error_set(err, "%s: tensor %s has no bytes %zu to %zu", st->path, x->name, offset,
                         offset + bytes);
    }
    if (file_write_at(st->fd, data, bytes, x->begin + offset)) return true;
    return error_set(err, "cannot write %s: %s", st->path, strerror(errno));
}

// Writes elements [first, first + count) of an F32 tensor, or of a BF16 one, rounded to nearest even.
static inline bool st_write_floats(const SafeTensors *st, const STEntry *x, size_t first, size_t count,
                                   const float *in, Error *err) {
    if (!st_in_range(st, x, first, count, err)) return false;
    if (x->dtype == ST_F32) return st_write_raw(st, x, first * 4, in, count * 4, err);
    if (x->dtype != ST_BF16) {
        return error_set(err, "%s: tensor %s is neither F32 nor BF16", st->path, x->name);
    }
    uint16_t stage[ST_STAGE];
    for (size_t i = 0; i < count; i += ST_STAGE) {
        size_t n = count - i < ST_STAGE ? count - i : (size_t)ST_STAGE;
        for (size_t j = 0; j < n; j++) stage[j] = bf16_from_float(in[i + j]);
        if (!st_write_raw(st, x, (first + i) * 2, stage, n * 2, err)) return false;
    }
    return true;
}

// Waits until what was written is on the disk, and closes.
static inline bool st_finish(SafeTensors *st, Error *err) {
    bool ok = fsync(st->fd) == 0 || error_set(err, "cannot write %s: %s", st->path, strerror(errno));
    st_close(st);
    return ok;
}

#endif
