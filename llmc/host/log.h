// log.h: reports of a run: a console line for each step, and the JSON Lines file of --log.
//
// defines: device_peak_flops, StepReport, Log, LOG_START, LOG_EVAL, log_open, log_number,
//          log_text, log_end_line, log_step, log_validation, log_close
//
// Steps count from 1, as checkpoints do: the number of a step is the count of updates after
// it.
#ifndef LLMC_LOG_H
#define LLMC_LOG_H

#include <ctype.h>
#include <math.h>

#include "llmc/host/file.h"

// Dense peaks of a matrix product in TFLOP/s: bf16 on tensor cores, and fp32 without them
// (0: unknown). From the vendor's data sheets. The names are beginnings of the names of
// cudaGetDeviceProperties, longer ones first.
static const struct {
    const char *name;
    double bf16, fp32;
} DEVICE_PEAKS[] = {
    {"NVIDIA A10", 125, 31.2},     {"NVIDIA A30", 165, 10.3},
    {"NVIDIA A40", 149.7, 37.4},   {"NVIDIA A100", 312, 19.5},
    {"NVIDIA L4", 121, 30.3},      {"NVIDIA L40S", 362, 91.6},
    {"NVIDIA H100 PCIe", 756, 51}, {"NVIDIA H100 NVL", 835, 60},
    {"NVIDIA H100", 989, 67},      {"NVIDIA H200 NVL", 835, 60},
    {"NVIDIA H200", 989, 67},      {"NVIDIA GH200", 989, 67},
    {"NVIDIA B200", 2250, 0},
};

// Returns the peak FLOP/s of a device, or 0 if it is not in the table. A wrong peak would
// make a wrong MFU.
static inline double device_peak_flops(const char *name, bool bf16) {
    if (strstr(name, "MIG")) return 0;  // a slice of a GPU
    for (size_t i = 0; i < sizeof DEVICE_PEAKS / sizeof DEVICE_PEAKS[0]; i++) {
        size_t length = strlen(DEVICE_PEAKS[i].name);
        if (strncmp(name, DEVICE_PEAKS[i].name, length) == 0 &&
            !isalnum((unsigned char)name[length]))
            return 1e12 * (bf16 ? DEVICE_PEAKS[i].bf16 : DEVICE_PEAKS[i].fp32);
    }
    return 0;
}

typedef struct {
    size_t step;       // updates done after it
    double loss;       // mean over all tokens of the global batch
    double grad_norm;  // before clipping
    double lr, ms;
    double tokens;  // of this step, over all ranks
} StepReport;

typedef struct {
    FILE *json;         // NULL: no --log
    size_t steps;       // of the whole run
    double flops;       // of one token
    double peak_flops;  // of all devices together; 0: unknown
    double mean_ms;     // smoothed, for the time left
    bool virtual_time;  // times are of a cluster file
    bool simulated;     // virtual time without computing: there is no loss
    size_t seen;        // steps logged by this process
    int failure;        // errno of the first line that could not be written; 0: none
} Log;

#define LOG_START "{\"step\":"
#define LOG_EVAL "\"eval_rows\":"  // in a line of --eval, which no training repeats

// Finds the end of the lines of the first `done` steps. A last line may be cut off, or a
// power loss may have filled it with zeros: it does not count. Lines of --eval count as
// done. `evals` takes the ones behind that end. False with an error message if the file is
// not a log.
static inline bool log_scan(FILE *in, const char *path, size_t done, long *end, FILE *evals,
                            Error *err) {
    char *line = NULL;
    size_t room = 0, number = 0;
    long at = 0;
    bool ok = true;
    *end = 0;
    for (ssize_t n; ok && (n = getline(&line, &room, in)) > 0; at += n, number++) {
        unsigned long long step;
        size_t length = strlen(line) < strlen(LOG_START) ? strlen(line) : strlen(LOG_START);
        bool whole = line[n - 1] == '\n';
        bool begins = at + (long)length > 0 && strncmp(line, LOG_START, length) == 0;
        ok = whole ? sscanf(line, LOG_START "%llu,", &step) == 1 : begins;
        bool eval = strstr(line, LOG_EVAL) != NULL;
        if (ok && whole && (eval || step <= done) && *end == at)
            *end = at + (long)n;
        else if (ok && whole && eval)
            fwrite(line, 1, (size_t)n, evals);
    }
    free(line);
    return ok ||
           error_set(err,
                     "line %zu of %s is no line of a training log: give --log another file",
                     number, path);
}

// Opens a log to append to it, with the lock that keeps other runs out. NULL with an error
// message.
static inline FILE *log_take(const char *path, Error *err) {
    FILE *log = file_open_output(path, O_RDWR | O_APPEND, err);
    if (!log || file_lock(fileno(log), "--log", path, err) != 0) return log;
    fclose(log);
    return NULL;
}

// Renames the log of an earlier run, or a link to it, to PATH.1. If that name is taken,
// takes the next number that is free.
static inline bool log_set_aside(const char *path, Error *err) {
    char aside[PATH_MAX];
    struct stat info;
    for (int i = 1;; i++) {
        if (!path_print(aside, err, "%s.%d", path, i)) return false;
        if (lstat(aside, &info) != 0) break;
    }
    if (rename(path, aside) != 0)
        return error_set(err, "cannot rename the log %s to %s: %s", path, aside,
                         strerror(errno));
    printf("note: the log of an earlier run is now %s\n", aside);
    return true;
}

// Starts the log of a run of `steps` steps that resumes after `done`. Drops the lines
// behind these, which the run repeats, but keeps the lines of --eval. done 0: sets an old
// log aside. Writes through links. path: NULL without --log. flops: of one token
// (llmc/model.h). peak_flops: of all devices; 0: unknown, and MFU is not reported.
static inline bool log_open(Log *log, const char *path, size_t done, size_t steps,
                            double flops, double peak_flops, Error *err) {
    long end;
    char *evals = NULL;
    size_t bytes = 0;
    memset(log, 0, sizeof *log);
    log->steps = steps;
    log->flops = flops;
    log->peak_flops = peak_flops;
    if (!path) return true;
    if (!(log->json = log_take(path, err))) return false;
    FILE *behind = open_memstream(&evals, &bytes);
    bool ok = log_scan(log->json, path, done, &end, behind, err);
    fclose(behind);
    if (ok &&
        ((done && ftruncate(fileno(log->json), end) != 0) ||
         fseek(log->json, 0, SEEK_END) != 0 ||
         (done && (fwrite(evals, 1, bytes, log->json) != bytes || fflush(log->json) != 0))))
        ok = error_set(err, "cannot write log %s: %s", path, strerror(errno));
    free(evals);
    if (ok && done == 0 && ftell(log->json) > 0 && (ok = log_set_aside(path, err))) {
        fclose(log->json);
        log->json = log_take(path, err);
    }
    if (!ok) {
        fclose(log->json);
        log->json = NULL;
    }
    return log->json != NULL;
}

// Appends `,"name":number` with 9 significant digits. Infinities and NaN, which JSON lacks,
// become null.
static inline void log_number(FILE *json, const char *name, double number) {
    if (isfinite(number))
        fprintf(json, ",\"%s\":%.9g", name, number);
    else
        fprintf(json, ",\"%s\":null", name);
}

// Appends `,"name":"text"`.
static inline void log_text(FILE *json, const char *name, const char *text) {
    fprintf(json, ",\"%s\":\"", name);
    for (const char *c = text; *c; c++) {
        if ((unsigned char)*c < ' ')
            fprintf(json, "\\u%04x", (unsigned)*c);
        else
            fprintf(json, *c == '"' || *c == '\\' ? "\\%c" : "%c", *c);
    }
    fprintf(json, "\"");
}

static inline void log_end_line(Log *log) {
    fprintf(log->json, "}\n");
    errno = 0;
    bool written = fflush(log->json) == 0;  // a killed run keeps its last step
    if (written || log->failure) return;
    log->failure = errno;
    fprintf(stderr, "note: the log cannot be written: %s; training continues without it\n",
            strerror(errno));
}

// Prints the console line of a step, with the time left at its end, and its line of the
// log.
static inline void log_step(Log *log, const StepReport *r) {
    double tokens_per_s = r->tokens / (1e-3 * r->ms);
    double of_peak = log->peak_flops > 0 ? tokens_per_s * log->flops / log->peak_flops
                                         : 0.0;
    double to_go = log->steps > r->step ? (double)(log->steps - r->step) : 0.0;
    // The first step warms up libraries and caches. The second one replaces it in the time
    // left.
    log->mean_ms = log->seen++ < 2 ? r->ms : 0.9 * log->mean_ms + 0.1 * r->ms;
    printf("step %*zu/%zu | ", snprintf(NULL, 0, "%zu", log->steps), r->step, log->steps);
    if (!log->simulated)
        printf("loss %.6f | norm %.4f | lr %.1e | ", r->loss, r->grad_norm, r->lr);
    printf("%.1f ms, %.0f tok/s", r->ms, tokens_per_s);
    if (of_peak > 0) printf(", MFU %.1f%%", 100.0 * of_peak);
    unsigned long long left = (unsigned long long)(1e-3 * log->mean_ms * to_go + 0.5);
    if (log->virtual_time)
        printf(" | virtual time\n");
    else
        printf(", %llu:%02llu:%02llu left\n", left / 3600, left / 60 % 60, left % 60);
    fflush(stdout);
    if (!log->json) return;
    fprintf(log->json, "{\"step\":%zu", r->step);
    if (log->virtual_time) fprintf(log->json, ",\"simulated\":true");
    if (!log->simulated) {
        log_number(log->json, "loss", r->loss);
        log_number(log->json, "grad_norm", r->grad_norm);
        log_number(log->json, "lr", r->lr);
    }
    log_number(log->json, "ms", r->ms);
    log_number(log->json, "tokens_per_s", tokens_per_s);
    if (of_peak > 0) log_number(log->json, "mfu", of_peak);
    log_end_line(log);
}

// Reports the validation loss after `step` updates.
static inline void log_validation(Log *log, size_t step, double val_loss) {
    printf("step %zu/%zu | validation loss %.6f\n", step, log->steps, val_loss);
    fflush(stdout);
    if (!log->json) return;
    fprintf(log->json, "{\"step\":%zu", step);
    log_number(log->json, "val_loss", val_loss);
    log_end_line(log);
}

// Closes the log. Returns false with an error message if a line could not be written, as on
// a full disk.
static inline bool log_close(Log *log, Error *err) {
    errno = 0;
    if (log->json && fclose(log->json) != 0 && !log->failure) log->failure = errno;
    log->json = NULL;
    return log->failure
               ? error_set(err, "the log is incomplete: %s", strerror(log->failure))
               : true;
}

#endif
