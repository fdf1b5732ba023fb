// verify.h: compares a checkpoint with its checksums, all of it in one process, and finds the
// newest sound one.
//
// defines: trainer_state_write, checkpoint_is_sound, checkpoint_verify, checkpoint_is_complete,
//          latest_sound
#ifndef DEV_TEST_VERIFY_H
#define DEV_TEST_VERIFY_H

#include "llmc/host/checkpoint_list.h"

// Writes a trainer.json. checksums: a JSON object, or NULL.
static inline bool trainer_state_write(const char *path, const TrainerState *state,
                                       const char *checksums, Error *err) {
    FILE *out = file_open_output(path, O_WRONLY | O_TRUNC, err);
    if (!out) return false;
    trainer_state_print(out, state);
    fprintf(out, "%s%s\n}\n", checksums ? ",\n  \"checksums\": " : "", checksums ? checksums : "");
    return fclose(out) == 0;
}

// Returns true if a checkpoint is sound. verify: compares its checksums, too.
static inline bool checkpoint_is_sound(const char *dir, bool verify, Error *err) {
    Checksums sums;
    bool ok = checkpoint_sum(dir, NULL, 0, 1, verify, &sums, err) &&
              (!verify || checkpoint_matches(dir, &sums, err));
    free(sums.sums);
    return ok;
}

static inline bool checkpoint_verify(const char *dir, Error *err) {
    return checkpoint_is_sound(dir, true, err);
}

// Returns true if the headers have the tensors of the first `kinds` kinds.
static inline bool checkpoint_is_complete(const char *dir, const GPTConfig *config, size_t kinds,
                                          Error *err) {
    return checkpoint_check(dir, config, kinds, 0, 1, NULL, err);
}

// Finds the newest sound checkpoint as a job does.
static inline bool latest_sound(const char *out, bool verify, char path[PATH_MAX], Error *err) {
    Error why;
    for (size_t passed = 0;; passed++) {
        bool ok = checkpoint_latest(out, passed, path, err);
        if (!path[0] || checkpoint_is_sound(path, verify, &why)) return ok;
        checkpoint_pass_over(path, passed, &why, err);
    }
}

// Sets [*first, *behind) to the elements of tensor x's part in [lo, hi) of a rank's flat
// buffer. There are none if *first is not below *behind.
static inline void slice_of(const Tensor *x, size_t lo, size_t hi, size_t *first, size_t *behind) {
    *first = lo > x->offset ? lo - x->offset : 0;
    *behind = hi < x->offset ? 0 : hi - x->offset < x->size ? hi - x->offset : x->size;
}

// Reads elements [lo, hi) of a rank's flat buffer `values` from a checkpoint; gaps become 0.
static inline bool read_range(const char *dir, StateKind kind, const ParamTable *table,
                              float *values, size_t lo, size_t hi, Error *err) {
    SafeTensors st;
    bool ok = true;
    if (!state_open(&st, dir, kind, O_RDONLY, err)) return false;
    memset(values + lo, 0, (hi - lo) * sizeof(float));
    for (size_t i = 0, first, behind; i < table->count && ok; i++) {
        const Tensor *x = &table->tensors[i];
        slice_of(x, lo, hi, &first, &behind);
        ok = first >= behind ||
             slices_read(&st, x, kind, values + x->offset + first, first, behind, err);
    }
    st_close(&st);
    return ok;
}

// Writes them to a checkpoint, or without sums to a file.
static inline bool write_range(const char *path, StateKind kind, const ParamTable *table,
                               const float *values, size_t lo, size_t hi, Checksums *sums,
                               Error *err) {
    SafeTensors st;
    bool ok = sums ? state_open(&st, path, kind, O_RDWR, err) : st_open(&st, path, O_RDWR, err);
    if (!ok) return false;
    for (size_t i = 0, first, behind; i < table->count && ok; i++) {
        const Tensor *x = &table->tensors[i];
        slice_of(x, lo, hi, &first, &behind);
        ok = first >= behind ||
             slices_write(&st, x, kind, values + x->offset + first, first, behind, sums, err);
    }
    st_close(&st);
    return ok;
}

#endif
