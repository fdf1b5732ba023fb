// verify.h: compares a checkpoint with its checksums, all of it in one process, and finds the newest sound one.
//
// defines: trainer_state_write, checkpoint_is_sound, checkpoint_verify, checkpoint_is_complete, latest_sound
#ifndef DEV_TEST_VERIFY_H
#define DEV_TEST_VERIFY_H

#include "llmc/host/checkpoint_list.h"

// Writes a trainer.json. checksums: a JSON object, or NULL.
static inline bool trainer_state_write(const char *path, const TrainerState *state, const char *checksums, Error *err) {
    FILE *out = file_open_output(path, O_WRONLY | O_TRUNC, err);
    if (!out) return false;
    trainer_state_print(out, state);
    fprintf(out, "%s%s\n}\n", checksums ? ",\n  \"checksums\": " : "", checksums ? checksums : "");
    return fclose(out) == 0;
}

// verify: its checksums too are compared.
static inline bool checkpoint_is_sound(const char *dir, bool verify, Error *err) {
    Checksums sums;
    bool ok = checkpoint_sum(dir, NULL, 0, 1, verify, &sums, err) && (!verify || checkpoint_matches(dir, &sums, err));
    free(sums.sums);
    return ok;
}

static inline bool checkpoint_verify(const char *dir, Error *err) { return checkpoint_is_sound(dir, true, err); }

// The headers alone: are the tensors of the first `kinds` kinds there?
static inline bool checkpoint_is_complete(const char *dir, const GPTConfig *config, size_t kinds, Error *err) {
    return checkpoint_check(dir, config, kinds, 0, 1, NULL, err);
}

// As a job finds it.
static inline bool latest_sound(const char *out, bool verify, char path[PATH_MAX], Error *err) {
    Error why;
    for (size_t passed = 0;; passed++) {
        bool ok = checkpoint_latest(out, passed, path, err);
        if (!path[0] || checkpoint_is_sound(path, verify, &why)) return ok;
        checkpoint_pass_over(path, passed, &why, err);
    }
}

#endif
