// tensor_slices.h: moving slices of a rank's tensors to and from the unsharded tensors of a safetensors file, and
// the checksums of a checkpoint's tensors, which trainer.json holds and --resume compares with the files.
//
// defines: Checksums, checksums_make, StateKind, state_name, state_file, state_open, slices_find, ST_START,
//          GRADIENTS_START, GRADIENTS_UNFINISHED, slices_create, slices_read, slices_write
#ifndef LLMC_TENSOR_SLICES_H
#define LLMC_TENSOR_SLICES_H

#include "llmc/host/safetensors.h"
#include "llmc/model.h"

typedef struct {
    GPTConfig config;
    size_t tensors;  // of the unsharded model
    size_t count;    // 1 + tensors of all kinds of state
    uint64_t *sums;  // [count] what is no tensor, then kind after kind: to be added over all ranks
} Checksums;

// The caller frees the sums.
static inline Checksums checksums_make(const GPTConfig *config, bool bf16) {
    Checksums c = {*config, count_tensors(config), 0, NULL};
    c.count = 1 + (bf16 ? 4 : 3) * c.tensors;
    c.sums = (uint64_t *)host_alloc(c.count, sizeof(uint64_t));
    return c;
}

typedef enum { STATE_WEIGHTS, STATE_M, STATE_V, STATE_MASTER } StateKind;  // master: of a bf16 run

enum { STATE_NAME_SIZE = sizeof ((Tensor *)0)->name + 16 };

// The name of a tensor in the file.
static inline const char *state_name(char name[STATE_NAME_SIZE], const Tensor *x, StateKind kind) {
    static const char *const suffixes[] = {"", ".m", ".v", ".master"};
    snprintf(name, STATE_NAME_SIZE, "%s%s", x->name, suffixes[kind]);
    return name;
}

static inline const char *state_file(StateKind kind) {
    return kind == STATE_WEIGHTS ? "model.safetensors" : "optimizer.safetensors";
}

// Opens the file of a checkpoint that has this kind of state.
static inline bool state_open(SafeTensors *st, const char *dir, StateKind kind, int flags, Error *err) {
    char path[PATH_MAX];
    return path_print(path, err, "%s/%s", dir, state_file(kind)) && st_open(st, path, flags, err);
}

// The shape of a tensor in the file, as JSON.
static inline const char *state_shape(char shape[48], const Tensor *x) {
    if (x->spec->rows == '1') snprintf(shape, 48, "[%zu]", x->cols);
    else snprintf(shape, 48, "[%zu,%zu]", x->rows, x->cols);
    return shape;
}

// Finds the tensor of the table in the file (with the kind's suffix, and in foreign files with "transformer." in front)
// and compares their shapes.
static inline const STEntry *slices_find(const SafeTensors *st, const Tensor *x, StateKind kind, Error *err) {
    char name[STATE_NAME_SIZE], prefixed[STATE_NAME_SIZE + 12], shape[48];
    const STEntry *entry = st_find(st, state_name(name, x, kind));
    snprintf(prefixed, sizeof prefixed, "transformer.%s", name);
    if (!entry) entry = st_find(st, prefixed);
    bool ok = entry || error_set(err, "%s has no tensor %s", st->path, name);
    if (ok && strcmp(entry->shape, state_shape(shape, x)) != 0)
        ok = error_set(err, "%s: tensor %s has shape %s instead of %s", st->path, name, entry->shape, shape);
    // Optimizer state is exact or useless; weights may come in any floating-point type.
    if (ok && (entry->dtype >= ST_OTHER || (kind != STATE_WEIGHTS && entry->dtype != ST_F32)))
        ok = error_set(err, "%s: tensor %s is %s instead of %s", st->path, name, ST_TYPES[entry->dtype].name,
                       kind == STATE_WEIGHTS ? "F32, BF16 or F16" : "F32");
    return ok ? entry : NULL;
}

// How the headers of weights and of gradient dumps begin; transformers wants to see the format "pt".
#define ST_START "{\"__metadata__\":{\"format\":\"pt\"}"
#define GRADIENTS_START "{\"__metadata__\":{\"format\":\"pt\",\"content\":\"gradients\"}"
#define GRADIENTS_UNFINISHED "%s.unfinished"  // the name of a dump until it is whole

// Creates `path`, in place of a file that a killed run has left, with every tensor of the kinds from `kind` to `last`
// in the order of the unsharded table: writes the header, padded so that the data starts at a multiple of 8, and
// reserves the space of the data. A file that fails is removed.
static inline bool slices_create(const char *path, const char *start, const GPTConfig *config, int kind, int last,
                                 int dtype, Error *err) {
    char *text, name[STATE_NAME_SIZE], shape[48];
    size_t length;
    uint64_t bytes = 0, head;
    FILE *out = open_memstream(&text, &length);
    fputs(start, out);
    for (; kind <= last; kind++) {
        for (size_t id = 0; id < count_tensors(config); id++) {
            Tensor x = tensor_describe(config, id, 1, 0);
            fprintf(out, ",\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%" PRIu64,
                    state_name(name, &x, (StateKind)kind), ST_TYPES[dtype].name, state_shape(shape, &x), bytes);
            bytes += x.rows * x.cols * ST_TYPES[dtype].width;
            fprintf(out, ",%" PRIu64 "]}", bytes);
        }
    }
    fputs("}", out);
    fflush(out);
    fprintf(out, "%*s", (int)(-length % 8), "");
    fclose(out);
    head = length;
    unlink(path);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool ok = fd >= 0 && file_reserve(fd, 8 + head + bytes) && file_write_at(fd, &head, 8, 0) &&
              file_write_at(fd, text, length, 8) && fsync(fd) == 0;
    if (!ok)
        error_set(err, "cannot write %s (%.1f MiB): %s", path, (double)(8 + head + bytes) / 1048576.0,
                  strerror(errno));
    if (fd >= 0) close(fd);
    free(text);
    if (!ok && fd >= 0) unlink(path);
    return ok;
}

// Fills values with elements [lo, hi) of the rank's part of a tensor; padding becomes 0.
static inline bool slices_read(const SafeTensors *st, const Tensor *x, StateKind kind, float *values, size_t lo,
                               size_t hi, Error *err) {
    const STEntry *entry = slices_find(st, x, kind, err);
    memset(values, 0, (hi - lo) * sizeof(float));
    Run run;
    for (size_t i = 0; entry && tensor_run(x, i, lo, hi, &run); i++)
        if (!st_read_floats(st, entry, run.global, run.count, values + (run.local - lo), err)) return false;
    return entry != NULL;
}

// Writes elements [lo, hi) of the rank's part of a tensor, which `values` holds, into a file of slices_create, and adds
// them to the sums unless these are NULL. Of the ranks that hold a tensor alike the one writes it that counts it.
static inline bool slices_write(const SafeTensors *st, const Tensor *x, StateKind kind, const float *values, size_t lo,
                                size_t hi, Checksums *sums, Error *err) {
    if (!x->counted) return true;
    const STEntry *entry = slices_find(st, x, kind, err);
    uint64_t *sum = sums ? &sums->sums[1 + kind * sums->tensors + x->id] : NULL;
    Run run;
    for (size_t i = 0; entry && tensor_run(x, i, lo, hi, &run); i++)
        if (!st_write_floats(st, entry, run.global, run.count, values + (run.local - lo), sum, err)) return false;
    return entry != NULL;
}

#endif
