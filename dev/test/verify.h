// verify.h: compares a checkpoint with its checksums, all of it in one process, and finds the newest sound one.
//
// defines: checkpoint_verify, latest_sound
#ifndef DEV_TEST_VERIFY_H
#define DEV_TEST_VERIFY_H

#include "llmc/host/checkpoint_list.h"

static inline bool checkpoint_verify(const char *dir, Error *err) {
    Checksums sums;
    bool ok = checkpoint_sum(dir, NULL, 0, 1, &sums, err) && checkpoint_matches(dir, &sums, err);
    free(sums.sums);
    return ok;
}

// As a job finds it. verify: its checksums too are compared.
static inline bool latest_sound(const char *out, bool verify, char *path, size_t size, Error *err) {
    size_t passed = 0;
    Error why;
    for (;;) {
        bool ok = checkpoint_latest(out, NULL, &passed, path, size, err);
        if (!path[0] || !verify || checkpoint_verify(path, &why)) return ok;
        checkpoint_pass_over(path, &passed, &why, err);
    }
}

#endif
