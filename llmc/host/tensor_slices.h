// tensor_slices.h: moves slices of a rank's tensors to and from the unsharded tensors of a
// safetensors file. Also computes the checksums of a checkpoint's tensors; trainer.json
// holds them, and --resume compares them with the files.
//
// defines: Checksums, checksums_make, StateKind, state_name, state_file, state_open,
//          slices_find, slices_check_rest, ST_START, GRADIENTS_START, GRADIENTS_UNFINISHED,
//          slices_create, slices_read, slices_write
#ifndef LLMC_TENSOR_SLICES_H
#define LLMC_TENSOR_SLICES_H

#include "llmc/host/safetensors.h"
#include "llmc/model.h"

typedef struct {
    GPTConfig config;
    size_t tensors;  // of the unsharded model
    size_t count;    // 1 + tensors of all kinds of state
    uint64_t *sums;  // [count] what is no tensor, then kind after kind: to be added over
                     // all ranks
} Checksums;

// Makes the sums of a model's tensors, all 0. The caller frees them.
static inline Checksums checksums_make(const GPTConfig *config, bool bf16) {
    Checksums c = {*config, count_tensors(config), 0, NULL};
    c.count = 1 + (bf16 ? 4 : 3) * c.tensors;
    c.sums = (uint64_t *)host_alloc(c.count, sizeof(uint64_t));
    return c;
}

// STATE_MASTER exists in a bf16 run.
typedef enum { STATE_WEIGHTS, STATE_M, STATE_V, STATE_MASTER } StateKind;

enum { STATE_NAME_SIZE = sizeof((Tensor *)0)->name + 16 };

#define SLICES_HEAD "lm_head.weight"  // in files of all models that we read

// Returns true if a tensor has this kind of state.
static inline bool state_has(const Tensor *x, StateKind kind) {
    return kind != STATE_V || !(x->spec->flags & TENSOR_MUON);
}

// Writes the name of a tensor in the file.
static inline const char *state_name(char name[STATE_NAME_SIZE], const Tensor *x,
                                     StateKind kind) {
    static const char *const suffixes[] = {"", ".m", ".v", ".master"};
    bool momentum = kind == STATE_M && (x->spec->flags & TENSOR_MUON);
    snprintf(name, STATE_NAME_SIZE, "%s%s", x->name, momentum ? ".momentum" : suffixes[kind]);
    return name;
}

static inline const char *state_file(StateKind kind) {
    return kind == STATE_WEIGHTS ? "model.safetensors" : "optimizer.safetensors";
}

// Opens the file of a checkpoint that has this kind of state.
static inline bool state_open(SafeTensors *st, const char *dir, StateKind kind, int flags,
                              Error *err) {
    char path[PATH_MAX];
    return path_print(path, err, "%s/%s", dir, state_file(kind)) &&
           st_open(st, path, flags, err);
}

// Writes the shape of a tensor in the file, as JSON.
static inline const char *state_shape(char shape[48], const Tensor *x) {
    if (x->spec->rows == '1')
        snprintf(shape, 48, "[%zu]", x->cols);
    else
        snprintf(shape, 48, "[%zu,%zu]", x->rows, x->cols);
    return shape;
}

// Finds a weight by the name that it may have in files of others: GPT-2's with
// "transformer." in front, Llama's without "model.". The head alone may represent a tied
// embedding.
static inline const STEntry *slices_find_foreign(const SafeTensors *st, const Tensor *x) {
    const unsigned tied = TENSOR_FIRST | TENSOR_LAST;
    char prefixed[STATE_NAME_SIZE + 12];
    snprintf(prefixed, sizeof prefixed, "transformer.%s", x->name);
    const STEntry *entry = st_find(st, prefixed);
    if (!entry && strncmp(x->name, "model.", 6) == 0) entry = st_find(st, x->name + 6);
    if (!entry && (x->spec->flags & tied) == tied) entry = st_find(st, SLICES_HEAD);
    return entry;
}

// Refuses a file of another optimizer, which has a moment for a tensor that has a momentum
// here, or the reverse.
static inline bool slices_check_optimizer(const SafeTensors *st, const Tensor *x,
                                          Error *err) {
    char name[STATE_NAME_SIZE];
    bool muon = x->spec->flags & TENSOR_MUON;
    snprintf(name, sizeof name, "%s%s", x->name, muon ? ".m" : ".momentum");
    return !st_find(st, name) ||
           error_set(err,
                     "%s is of a run with %s, and this trainer updates %s with %s: start "
                     "from the checkpoint's weights alone with --init",
                     st->path, muon ? "AdamW" : "Muon", x->name, muon ? "Muon" : "AdamW");
}

// Finds the tensor of the table in the file, with the kind's suffix, and compares their
// shapes.
static inline const STEntry *slices_find(const SafeTensors *st, const Tensor *x,
                                         StateKind kind, Error *err) {
    char name[STATE_NAME_SIZE], shape[48];
    const STEntry *entry = st_find(st, state_name(name, x, kind));
    if (!entry && kind == STATE_WEIGHTS) entry = slices_find_foreign(st, x);
    if (!entry && kind == STATE_M && !slices_check_optimizer(st, x, err)) return NULL;
    bool ok = entry || error_set(err, "%s has no tensor %s", st->path, name);
    if (ok && strcmp(entry->shape, state_shape(shape, x)) != 0)
        ok = error_set(err, "%s: tensor %s has shape %s instead of %s", st->path,
                       entry->name, entry->shape, shape);
    // Optimizer state is exact or useless; weights may come in any floating-point type.
    if (ok &&
        (entry->dtype >= ST_OTHER || (kind != STATE_WEIGHTS && entry->dtype != ST_F32)))
        ok = error_set(err, "%s: tensor %s is %s instead of %s", st->path, entry->name,
                       ST_TYPES[entry->dtype].name,
                       kind == STATE_WEIGHTS ? "F32, BF16 or F16" : "F32");
    return ok ? entry : NULL;
}

// True for buffers that old versions of transformers saved beside the weights. These are
// masks and RoPE's angles, which follow from config.json.
static inline bool slices_is_buffer(const char *name) {
    static const char *const BUFFERS[] = {"attn.bias", "attn.masked_bias",
                                          "rotary_emb.inv_freq", "rotary_emb.cos_cached",
                                          "rotary_emb.sin_cached"};
    for (size_t i = 0; i < sizeof BUFFERS / sizeof BUFFERS[0]; i++) {
        size_t whole = strlen(name), part = strlen(BUFFERS[i]);
        if (whole < part || strcmp(name + whole - part, BUFFERS[i]) != 0) continue;
        if (whole == part || name[whole - part - 1] == '.') return true;
    }
    return false;
}

// Refuses a file with more weights than the model has, because with them it may be another
// model. used [st->count]: the tensors that the table has found. A tied model may store its
// head as well, if the head equals the embedding.
static inline bool slices_check_rest(const SafeTensors *st, const bool *used,
                                     const GPTConfig *config, Error *err) {
    for (size_t i = 0; i < st->count; i++) {
        const STEntry *x = &st->entries[i];
        bool same = false;
        if (used[i] || slices_is_buffer(x->name)) continue;
        if (strcmp(x->name, SLICES_HEAD) != 0)
            return error_set(
                err, "%s has a tensor %s, which the model of config.json does not have",
                st->path, x->name);
        Tensor embedding = tensor_describe(config, 0, 1, 0);
        const STEntry *tied = slices_find(st, &embedding, STATE_WEIGHTS, err);
        if (!tied || !st_compare(st, x, tied, &same, err)) return false;
        if (!same)
            return error_set(
                err,
                "%s: tensor %s differs from %s, and config.json says that the two are one "
                "(\"tie_word_embeddings\")",
                st->path, x->name, tied->name);
    }
    return true;
}

// The beginnings of the headers of weights and of gradient dumps. transformers wants to see
// the format "pt".
#define ST_START "{\"__metadata__\":{\"format\":\"pt\"}"
#define GRADIENTS_START "{\"__metadata__\":{\"format\":\"pt\",\"content\":\"gradients\"}"
#define GRADIENTS_UNFINISHED "%s.unfinished"  // the name of a dump until it is whole

// Creates `path` with every tensor of the kinds from `kind` to `last`, in the order of the
// unsharded table. Replaces a file that a killed run has left. Writes the header, padded so
// that the data starts at a multiple of 8, and reserves the space of the data. Removes a
// file that fails.
static inline bool slices_create(const char *path, const char *start,
                                 const GPTConfig *config, int kind, int last, int dtype,
                                 Error *err) {
    char *text, name[STATE_NAME_SIZE], shape[48];
    size_t length;
    uint64_t bytes = 0, head;
    FILE *out = open_memstream(&text, &length);
    fputs(start, out);
    for (; kind <= last; kind++) {
        for (size_t id = 0; id < count_tensors(config); id++) {
            Tensor x = tensor_describe(config, id, 1, 0);
            if (!state_has(&x, (StateKind)kind)) continue;
            fprintf(out,
                    ",\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%" PRIu64,
                    state_name(name, &x, (StateKind)kind), ST_TYPES[dtype].name,
                    state_shape(shape, &x), bytes);
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
    bool ok = fd >= 0 && file_reserve(fd, 8 + head + bytes) &&
              file_write_at(fd, &head, 8, 0) && file_write_at(fd, text, length, 8) &&
              fsync(fd) == 0;
    if (!ok)
        error_set(err, "cannot write %s (%.1f MiB): %s", path,
                  (double)(8 + head + bytes) / 1048576.0, strerror(errno));
    if (fd >= 0) close(fd);
    free(text);
    if (!ok && fd >= 0) unlink(path);
    return ok;
}

// Fills values with elements [lo, hi) of the rank's part of a tensor; padding becomes 0.
static inline bool slices_read(const SafeTensors *st, const Tensor *x, StateKind kind,
                               float *values, size_t lo, size_t hi, Error *err) {
    const STEntry *entry = slices_find(st, x, kind, err);
    memset(values, 0, (hi - lo) * sizeof(float));
    Run run;
    for (size_t i = 0; entry && tensor_run(x, i, lo, hi, &run); i++)
        if (!st_read_floats(st, entry, run.global, run.count, values + (run.local - lo),
                            err))
            return false;
    return entry != NULL;
}

// Writes elements [lo, hi) of the rank's part of a tensor into a file of slices_create.
// values: these elements. Adds them to the sums unless these are NULL. If several ranks hold
// the same tensor, only the rank that counts it writes it.
static inline bool slices_write(const SafeTensors *st, const Tensor *x, StateKind kind,
                                const float *values, size_t lo, size_t hi, Checksums *sums,
                                Error *err) {
    if (!x->counted) return true;
    const STEntry *entry = slices_find(st, x, kind, err);
    uint64_t *sum = sums ? &sums->sums[1 + kind * sums->tensors + x->id] : NULL;
    Run run;
    for (size_t i = 0; entry && tensor_run(x, i, lo, hi, &run); i++)
        if (!st_write_floats(st, entry, run.global, run.count, values + (run.local - lo),
                             sum, err))
            return false;
    return entry != NULL;
}

#endif
