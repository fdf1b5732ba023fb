// stall.h: how long nothing has gone on, for those who wait for other ranks and give up in the end.
//
// defines: Stall, stall_over, stall_wait, stall_patience
#ifndef LLMC_STALL_H
#define LLMC_STALL_H

#include <stdlib.h>

typedef struct {
    double waited, seen;  // s; when it was looked at last, 0: never
} Stall;

// Something went on: waiting begins anew.
static inline void stall_over(Stall *s) { s->waited = s->seen = 0; }

// Who waits calls this again and again, with the time in s. Returns for how long nothing has gone on. At most half a
// second counts between two calls: a process that was stopped for longer (Ctrl-Z, a laptop that sleeps, a debugger)
// cannot blame its peers, which may have been stopped as well.
static inline double stall_wait(Stall *s, double now) {
    double since = s->seen > 0 ? now - s->seen : 0;
    s->waited += since < 0.5 ? since : 0.5;
    s->seen = now;
    return s->waited;
}

// After how many seconds to give up: CPU_STALL_SECONDS of the environment, or 30.
static inline double stall_patience(void) {
    const char *text = getenv("CPU_STALL_SECONDS");
    double seconds = text ? atof(text) : 0;
    return seconds > 0 ? seconds : 30;
}

#endif
