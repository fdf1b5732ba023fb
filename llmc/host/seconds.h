// seconds.h: the host's clock.
//
// defines: seconds_wall
#ifndef LLMC_SECONDS_H
#define LLMC_SECONDS_H

#include <time.h>

// Returns seconds of the host's clock that never jumps.
static inline double seconds_wall(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#endif
