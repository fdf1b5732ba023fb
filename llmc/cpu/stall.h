// stall.h: settings of the stand-ins from the environment, and their watchdog: seconds
// without progress.
//
// defines: environment_number, Random, random_next, environment_random, seconds_wall,
//          Stall, stall_over, stall_patience, stall_wait, sched_yield
#ifndef LLMC_STALL_H
#define LLMC_STALL_H

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

// Ends the program with exit code 2. Under mpirun rank 0 speaks: it ends the job within the
// seconds that others wait.
static inline void environment_refuse(const char *name, const char *text,
                                      const char *wanted) {
    const char *rank = getenv("OMPI_COMM_WORLD_RANK") ? getenv("OMPI_COMM_WORLD_RANK")
                                                      : getenv("PMI_RANK");
    if (rank && strcmp(rank, "0") != 0) sleep(5);
    fprintf(stderr, "%s=%s is not understood: write %s\n", name, text, wanted);
    exit(2);
}

// Returns a number above 0 from the environment, or `otherwise` if the variable is unset or
// empty.
static inline double environment_number(const char *name, double otherwise) {
    const char *text = getenv(name);
    char *end;
    if (!text || !*text) return otherwise;
    double number = strtod(text, &end);
    if (*end || !(number > 0 && number < 1e9))
        environment_refuse(name, text, "a number above 0");
    return number;
}

// A random order, or delays of random lengths.
typedef struct {
    bool on;
    unsigned long long state, most;  // most: microseconds of a delay
} Random;

static inline uint64_t random_next(Random *r) {
    uint64_t z = r->state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// Reads random:SEED or, for delays, random:SEED:MICROSECONDS. Off if the variable is unset
// or empty.
static inline Random environment_random(const char *name, bool delays) {
    Random r = {false, 0, 0};
    const char *text = getenv(name);
    int end = 0;
    if (!text || !*text) return r;
    if (delays)
        sscanf(text, "random:%llu:%llu%n", &r.state, &r.most, &end);
    else
        sscanf(text, "random:%llu%n", &r.state, &end);
    if (end == 0 || text[end])
        environment_refuse(name, text, delays ? "random:SEED:MICROSECONDS" : "random:SEED");
    r.on = true;
    return r;
}

// Returns seconds of the host's clock, which never jumps.
static inline double seconds_wall() {
    return std::chrono::duration<double>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

typedef struct {
    double waited, seen;  // s without progress; time of the last look, 0: none
} Stall;

// Restarts the watchdog after progress.
static inline void stall_over(Stall *s) {
    s->waited = s->seen = 0;
}

// Returns true if another rank of this node is stopped: a process of the same name and with
// the same parent, mpirun.
static inline bool stall_is_stopped(void) {
    bool stopped = false;
    DIR *processes = opendir("/proc");
    for (struct dirent *e; !stopped && processes && (e = readdir(processes)) != NULL;) {
        char path[300], name[16], state;
        int parent;
        snprintf(path, sizeof path, "/proc/%s/stat", e->d_name);
        FILE *f = fopen(path, "re");
        stopped = f && fscanf(f, "%*d (%15[^)]) %c %d", name, &state, &parent) == 3 &&
                  parent == getppid() && strchr("Tt", state) &&
                  strncmp(name, program_invocation_short_name, 15) == 0;
        if (f) fclose(f);
    }
    if (processes) closedir(processes);
    return stopped;
}

// Returns the seconds without progress after which a rank gives up.
static inline double stall_patience(void) {
    static const double patience = environment_number("CPU_STALL_SECONDS", 30);
    return patience;
}

// Returns true after too many seconds without progress. Call it repeatedly while waiting.
// At most half a second counts between two calls. A process that was stopped for longer
// (Ctrl-Z, a laptop that sleeps, a debugger) cannot blame its peers, which may have been
// stopped as well. Nor does time count while a peer is stopped. The function looks for that
// once a second.
static inline bool stall_wait(Stall *s) {
    double now = seconds_wall();
    double since = s->seen > 0 ? now - s->seen : 0, before = s->waited;
    s->waited += since < 0.5 ? since : 0.5;
    s->seen = now;
    if (floor(s->waited) > floor(before) && stall_is_stopped()) s->waited = 0;
    return s->waited > stall_patience();
}

#ifdef __linux__
// Gives the core to other processes. Open MPI calls this instead of the C library's, too,
// whenever a rank waits. On a busy machine a yield may last a time slice of the others, some
// milliseconds, and each message costs one. After such a yield this sleeps instead for a
// while, because the kernel runs a process that wakes up at once.
extern "C" __attribute__((used)) inline int sched_yield() noexcept {
    static thread_local double sleeps_until;  // s
    double begin = seconds_wall();
    if (begin < sleeps_until) return usleep(50);
    syscall(SYS_sched_yield);
    if (seconds_wall() - begin > 1e-3) sleeps_until = begin + 0.1;
    return 0;
}
#endif

#endif
