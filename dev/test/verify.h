// verify.h: compares a checkpoint with its checksums, all of it in one process.
//
// defines: checkpoint_verify
#ifndef DEV_TEST_VERIFY_H
#define DEV_TEST_VERIFY_H

#include "llmc/host/checkpoint.h"

static inline bool checkpoint_verify(const char *dir, Error *err) {
    Checksums sums;
    bool ok = checkpoint_sum(dir, NULL, 0, 1, &sums, err) && checkpoint_matches(dir, &sums, err);
    free(sums.sums);
    return ok;
}

#endif
