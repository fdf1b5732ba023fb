// tensor_slices.h: moving slices of a rank's flat buffer to and from the unsharded tensors of a safetensors file, and
// the checksums of a checkpoint's tensors, which trainer.json holds and --resume compares with the files.
//
// defines: Checksums, checksums_make, checksums_free, StateKind, state_file, state_name, slices_walk, slices_find,
//          slices_create, slices_write, slices_read
#ifndef LLMC_TENSOR_SLICES_H
#define LLMC_TENSOR_SLICES_H

#include "llmc/host/safetensors.h"
#include "llmc/model.h"

typedef struct {
    GPTConfig config;
    size_t kinds, tensors;  // weights, m, v and for bf16 master weights; of the unsharded model
    size_t count;           // kinds * tensors
    uint64_t *sums;         // [count] kind after kind: what is to be added over all ranks
} Checksums;

static inline Checksums checksums_make(const GPTConfig *config, bool bf16) {
    Checksums c = {*config, bf16 ? 4u : 3u, count_tensors(config), 0, NULL};
    c.count = c.kinds * c.tensors;
    c.sums = (uint64_t *)host_alloc(c.count, sizeof(uint64_t));
    return c;
}

static inline void checksums_free(Checksums *c) {
    free(c->sums);
    memset(c, 0, sizeof *c);
}

typedef enum { STATE_WEIGHTS, STATE_M, STATE_V, STATE_MASTER } StateKind;  // master: of a bf16 run

typedef bool (*RunVisit)(void *context, const Tensor *x, const Run *run, Error *err);

// Calls visit for the longest runs that make up [lo, hi) of the flat buffer, in memory order, without gaps and padding.
// Stops when visit returns false.
static inline bool slices_walk(const ParamTable *table, size_t lo, size_t hi, RunVisit visit, void *context,
                               Error *err) {
    for (size_t i = 0; i < table->count; i++) {
        const Tensor *x = &table->tensors[i];
        if (x->offset >= hi || x->offset + x->size <= lo) continue;
        Run joined = {0, 0, 0};
        for (size_t r = 0; r < tensor_run_count(x); r++) {
            Run run = tensor_run(x, r);
            size_t begin = x->offset + run.local, end = begin + run.count;
            if (begin >= hi) break;
            size_t skip = begin < lo ? lo - begin : 0;
            if (end > hi) end = hi;
            if (begin + skip >= end) continue;
            size_t local = run.local + skip, global = run.global + skip, count = end - begin - skip;
            if (joined.count && joined.local + joined.count == local && joined.global + joined.count == global) {
                joined.count += count;  // with one tensor rank the runs of a matrix join up
                continue;
            }
            if (joined.count && !visit(context, x, &joined, err)) return false;
            joined.local = local;
            joined.global = global;
            joined.count = count;
        }
        if (joined.count && !visit(context, x, &joined, err)) return false;
    }
    return true;
}

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

// Finds the tensor of the table (with the kind's suffix) in the file and compares their shapes.
static inline const STEntry *slices_find(const SafeTensors *st, const Tensor *x, StateKind kind, Error *err) {
    char name[STATE_NAME_SIZE];
    const STEntry *entry = st_find(st, state_name(name, x, kind));
    if (!entry) {
        error_set(err, "%s has no tensor %s", st->path, name);
        return NULL;
    }
    bool fits = entry->dims == x->dims && entry->shape[x->dims - 1] == x->cols;
    if (!fits || (x->dims == 2 && entry->shape[0] != x->rows)) {
        char found[ST_MAX_DIMS * 21 + 1] = "";
        for (int d = 0, n = 0; d < entry->dims; d++) {
            n += snprintf(found + n, sizeof found - (size_t)n, "%s%zu", d ? ", " : "", entry->shape[d]);
        }
        char wanted[48] = "";
        if (x->dims == 2) snprintf(wanted, sizeof wanted, "%zu, ", x->rows);
        error_set(err, "%s: tensor %s has shape [%s] instead of [%s%zu]", st->path, name, found, wanted,
                  x->cols);
        return NULL;
    }
    // Optimizer state is exact or useless; weights may come in any floating-point type.
    if (entry->dtype == ST_OTHER || (kind != STATE_WEIGHTS && entry->dtype != ST_F32)) {
        error_set(err, "%s: tensor %s is %s instead of %s", st->path, name, st_type_name(entry->dtype),
                  kind == STATE_WEIGHTS ? "F32, BF16 or F16" : "F32");
        return NULL;
    }
    return entry;
}

enum { SLICE_WINDOW = 1 << 18 };  // elements read at once where a rank's columns are scattered over the rows

typedef struct {
    SafeTensors st;
    StateKind kind;
    float *values;         // elements [lo, hi) of the flat buffer; const when writing
    size_t lo;
    bool write_wte;
    uint64_t *sums;
    const Tensor *tensor;  // the last one that was looked up, and its place in the file
    const STEntry *entry;
    float *window;         // [SLICE_WINDOW] elements [first, first + count) of that tensor
    size_t window_first, window_count;
} SliceFile;

static inline bool slice_file_seek(SliceFile *file, const Tensor *x, Error *err) {
    if (file->tensor == x) return true;
    file->tensor = x;
    file->window_count = 0;
    file->entry = slices_find(&file->st, x, file->kind, err);
    return file->entry != NULL;
}

static inline bool run_write(void *context, const Tensor *x, const Run *run, Error *err) {
    SliceFile *file = (SliceFile *)context;
    if ((x->split == SPLIT_NONE && x->t_rank != 0) || (tensor_is_tied(x) && !file->write_wte)) return true;
    const float *values = file->values + (x->offset + run->local - file->lo);
    if (!slice_file_seek(file, x, err)) return false;
    return st_write_floats(&file->st, file->entry, run->global, run->count, values,
                           file->sums ? &file->sums[x->id] : NULL, err);
}

static inline bool run_read(void *context, const Tensor *x, const Run *run, Error *err) {
    SliceFile *file = (SliceFile *)context;
    float *out = file->values + (x->offset + run->local - file->lo);
    if (!slice_file_seek(file, x, err)) return false;
    if ((x->split != SPLIT_COLUMNS && x->split != SPLIT_QKV) || run->count >= SLICE_WINDOW) {
        return st_read_floats(&file->st, file->entry, run->global, run->count, out, err);
    }
    size_t window_end = file->window_first + file->window_count;
    if (run->global < file->window_first || run->global + run->count > window_end) {
        size_t left = file->entry->count - run->global;
        file->window_first = run->global;
        file->window_count = left < SLICE_WINDOW ? left : (size_t)SLICE_WINDOW;
        if (!st_read_floats(&file->st, file->entry, run->global, file->window_count, file->window, err)) {
            return false;
        }
    }
    memcpy(out, file->window + (run->global - file->window_first), run->count * sizeof(float));
    return true;
}

// Creates `path` with every tensor of the kinds, in the order of the unsharded table. start: see st_create.
static inline bool slices_create(const char *path, const char *start, const GPTConfig *config, const StateKind *kinds,
                                 int kind_count, STType dtype, Error *err) {
    ParamTable whole = table_make_whole(config);
    STEntry *specs = (STEntry *)host_alloc(whole.count, (size_t)kind_count * sizeof(STEntry));
    size_t n = 0;
    for (int k = 0; k < kind_count; k++) {
        for (size_t i = 0; i < whole.count; i++) {
            const Tensor *x = &whole.tensors[i];
            char name[STATE_NAME_SIZE];
            specs[n++] = st_entry(state_name(name, x, kinds[k]), dtype, x->dims, x->rows, x->cols);
        }
    }
    SafeTensors st;
    bool ok = st_create(&st, path, start, specs, n, err) && st_finish(&st, err);
    free(specs);
    table_free(&whole);
    return ok;
}

// Writes elements [lo, hi) of the flat buffer, which `values` holds, into a file that slices_create has made. sums:
// [tensors of the model], what is written is added to them; NULL: no sums.
static inline bool slices_write(const char *path, StateKind kind, const ParamTable *table, const float *values,
                                size_t lo, size_t hi, bool write_wte, uint64_t *sums, Error *err) {
    SliceFile file = {};
    file.kind = kind, file.values = (float *)values, file.lo = lo, file.write_wte = write_wte, file.sums = sums;
    if (!st_open(&file.st, path, O_RDWR, err)) return false;
    if (slices_walk(table, lo, hi, run_write, &file, err)) return st_finish(&file.st, err);
    st_close(&file.st);
    return false;
}

// Fills values with elements [lo, hi) of the flat buffer from an open file; padding and gaps become 0. Closes
// the file.
static inline bool slices_read(SafeTensors *st, StateKind kind, const ParamTable *table, float *values,
                               size_t lo, size_t hi, Error *err) {
    SliceFile file = {};
    file.st = *st, file.kind = kind, file.values = values, file.lo = lo;
    memset(values, 0, (hi - lo) * sizeof(float));
    file.window = (float *)host_alloc(SLICE_WINDOW, sizeof(float));
    bool ok = slices_walk(table, lo, hi, run_read, &file, err);
    free(file.window);
    st_close(st);
    return ok;
}

#endif
