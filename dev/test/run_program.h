// run_program.h: helpers for tests of whole trainers. They handle files, run programs by
// their command line (alone or under mpirun, with a time limit), and read their JSON Lines
// logs.
#ifndef LLMC_RUN_PROGRAM_H
#define LLMC_RUN_PROGRAM_H

#ifndef _XOPEN_SOURCE
#error "define _XOPEN_SOURCE 700 before the first include: fork and setpgid need it"
#endif

#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "dev/test/files.h"

// Returns true for the lessons that have data parallelism and neither tensor nor
// pipeline.
static inline bool is_data_lesson(const char *name) {
    return strcmp(name, "data") == 0 || strcmp(name, "context") == 0 || strcmp(name, "fsdp") == 0;
}

// Writes the program of a trainer: train_gpt and its suffix, or a lesson by its name.
static inline void trainer_program(char *out, size_t size, const char *trainer) {
    snprintf(out, size, "%s%s", *trainer == '_' || !*trainer ? "train_gpt" : "train_", trainer);
}

// ---- running programs ------------------------------------------------------------------

enum { TIMED_OUT = 1000, KILLED = 1001 };  // exit codes that no program returns

#ifndef TIME_LIMIT
#define TIME_LIMIT 300  // seconds that a program may take
#endif

// How a trainer is started: more than one rank by mpirun; its flags make the layout.
typedef struct {
    const char *trainer;
    int ranks;
    const char *flags;
} Layout;

// How a run differs from a plain one.
typedef struct {
    // Bytes that no file may exceed, which is how a full disk is played; 0: none.
    const char *env;    // "NAME=VALUE NAME=VALUE"
    size_t file_limit;
} Setting;

static const Setting PLAIN = {"", 0};

typedef struct {
    int code;         // exit code, TIMED_OUT, or KILLED (ended by a signal)
    char *out, *err;  // what it printed
} Outcome;

enum { MAX_ARGS = 128, ARG_BYTES = 4096 };

// Cuts text at its spaces and appends the pieces. A '~' in a piece becomes a space.
static inline size_t add_args(char **args, size_t count, char *text) {
    for (char *piece = strtok(text, " "); piece; piece = strtok(NULL, " ")) {
        for (char *c = piece; *c; c++) {
            if (*c == '~') *c = ' ';
        }
        if (count + 1 < MAX_ARGS) args[count++] = piece;
    }
    args[count] = NULL;
    return count;
}

// The process group that is running, so that an interrupted test leaves none behind.
static volatile sig_atomic_t runner_child;

static inline void runner_interrupted(int number) {
    if (runner_child) kill(-(pid_t)runner_child, SIGTERM);
    _exit(128 + number);
}

// For many short runs: Open MPI need not look for networks, nor hwloc for devices (dev/launch.sh
// does the same).
static inline void prefer_quick_starts(void) {
    setenv("OMPI_MCA_pml", "ob1", 0);
    setenv("OMPI_MCA_btl", "self,vader", 0);
    setenv("HWLOC_COMPONENTS", "-linuxio,-pci,-gl,-opencl", 0);
    setenv("HWLOC_PLUGINS_PATH", "/none", 0);
}

// Asks for oneDNN's plainest kernels. Every process compiles its own, and these take a fraction
// of the time.
static inline void prefer_plain_kernels(void) { setenv("ONEDNN_MAX_CPU_ISA", "SSE41", 0); }

// Starts the trainer of folder `build` with `flags`, then the layout's own. Its output goes to
// stdout.txt and stderr.txt in the working directory.
static inline pid_t start(const char *build, const Layout *layout, Setting setting,
                          const char *flags) {
    // dev/test/run_tests.sh sets it to what the probe has found.
    const char *mpirun = getenv("MPIRUN");
    char program[PATH_MAX + 64], mpi[256], own[ARG_BYTES], given[ARG_BYTES], env[ARG_BYTES];
    char *args[MAX_ARGS], *names[MAX_ARGS];
    size_t count = 0;
    snprintf(program, sizeof program, "%s/%s", build, layout->trainer);
    snprintf(mpi, sizeof mpi, "%s -n %d",
             mpirun ? mpirun : "mpirun --oversubscribe --bind-to none --allow-run-as-root",
             layout->ranks);
    snprintf(own, sizeof own, "%s", layout->flags);
    snprintf(given, sizeof given, "%s", flags);
    snprintf(env, sizeof env, "%s", setting.env);
    if (layout->ranks > 1) count = add_args(args, count, mpi);
    args[count++] = program;
    count = add_args(args, count, given);
    add_args(args, count, own);
    size_t variables = add_args(names, 0, env);
    fflush(NULL);
    pid_t child = fork();
    if (child < 0) die("cannot start", program);
    if (child > 0) {
        setpgid(child, child);
        runner_child = child;
        signal(SIGINT, runner_interrupted);
        signal(SIGTERM, runner_interrupted);
        return child;
    }
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    setpgid(0, 0);  // a group of its own, so that a timeout ends mpirun and all its ranks
    if (!freopen("/dev/null", "r", stdin) || !freopen("stdout.txt", "w", stdout) ||
        !freopen("stderr.txt", "w", stderr)) _exit(126);
    // Waiting threads that spin are slow where cores are shared.
    setenv("OMP_WAIT_POLICY", "passive", 0);
    if (layout->ranks > 1) setenv("OMP_NUM_THREADS", "1", 0);
    for (size_t i = 0; i < variables; i++) putenv(names[i]);
    if (setting.file_limit) {
        struct rlimit limit = {setting.file_limit, setting.file_limit};
        signal(SIGXFSZ, SIG_IGN);  // so that write() fails instead
        setrlimit(RLIMIT_FSIZE, &limit);
    }
    execvp(args[0], args);
    fprintf(stderr, "cannot run %s: %s\n", args[0], strerror(errno));
    _exit(127);
}

static inline void pause_ms(long ms) {
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

static inline Outcome finish(pid_t child) {
    Outcome o = {TIMED_OUT, NULL, NULL};
    int status = 0;
    time_t begin = time(NULL);
    while (waitpid(child, &status, WNOHANG) == 0) {
        if (difftime(time(NULL), begin) > TIME_LIMIT) {
            kill(-child, SIGTERM);  // mpirun then ends its ranks
            pause_ms(5000);
            kill(-child, SIGKILL);
            waitpid(child, &status, 0);
            status = -1;
            break;
        }
        pause_ms(2);
    }
    runner_child = 0;
    if (status != -1) o.code = WIFEXITED(status) ? WEXITSTATUS(status) : KILLED;
    o.out = read_file("stdout.txt", NULL);
    o.err = read_file("stderr.txt", NULL);
    if (!o.out || !o.err) die("cannot read", "the output of a run");
    return o;
}

static inline void outcome_free(Outcome *o) {
    free(o->out);
    free(o->err);
}

// Runs a layout to its end.
__attribute__((format(printf, 4, 5))) static inline Outcome run(const char *build,
                                                                const Layout *layout,
                                                                Setting setting,
                                                                const char *format, ...) {
    char flags[ARG_BYTES];
    va_list values;
    va_start(values, format);
    vsnprintf(flags, sizeof flags, format, values);
    va_end(values);
    return finish(start(build, layout, setting, flags));
}

// Returns true if a run succeeded, else prints the reason. Frees the outcome.
static inline bool succeeded(Outcome *o) {
    bool ok = o->code == 0;
    if (!ok) printf("     exit code %d: %.600s\n", o->code, o->err);
    outcome_free(o);
    return ok;
}

// The JSON Lines log of a run. Its lines beyond MAX_STEPS are not kept.
enum { MAX_STEPS = 1000 };

typedef struct {
    size_t steps, vals;
    double step[MAX_STEPS], loss[MAX_STEPS], norm[MAX_STEPS], lr[MAX_STEPS];
    double val_step[MAX_STEPS], val[MAX_STEPS];
} Log;

static inline double number(const cJSON *object, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

static inline Log read_log(const char *path) {
    Log log;
    memset(&log, 0, sizeof log);
    char *text = read_file(path, NULL);
    for (char *line = text ? strtok(text, "\n") : NULL; line; line = strtok(NULL, "\n")) {
        cJSON *json = cJSON_Parse(line);
        if (!json) continue;  // being written at this moment
        if (!isnan(number(json, "val_loss")) && log.vals < MAX_STEPS) {
            log.val_step[log.vals] = number(json, "step");
            log.val[log.vals++] = number(json, "val_loss");
        } else if (isnan(number(json, "layer")) && log.steps < MAX_STEPS) {
            // A step's lines of experts have a layer.
            log.step[log.steps] = number(json, "step");
            log.loss[log.steps] = number(json, "loss");
            log.norm[log.steps] = number(json, "grad_norm");
            log.lr[log.steps++] = number(json, "lr");
        }
        cJSON_Delete(json);
    }
    free(text);
    return log;
}

static inline bool same_log(const Log *a, const Log *b) {
    size_t bytes = a->steps * sizeof(double);
    return a->steps == b->steps && a->steps > 0 && memcmp(a->loss, b->loss, bytes) == 0 &&
           memcmp(a->norm, b->norm, bytes) == 0 && memcmp(a->lr, b->lr, bytes) == 0;
}

#endif
